"""Text to token ids and back."""

import hashlib
import json
import re
import reprlib
from pathlib import Path

import numpy as np

from ..backend import first_outside
from ..serialization import write_atomically

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
# What others call the four. A name further left is preferred; a tokenizer that has none of them has None in this place.
ROLES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "bos": ("<bos>", "<s>", "[CLS]", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
}


class Tokenizer:
    """What every tokenizer shares.    ids 0 to 3: <pad> <bos> <eos> <unk>;  then its own tokens

    Special tokens are ids, never text: the five letters "<pad>" in a text are five characters. (guide 15.1)
    A subclass says `kind`, its name in files; `fields`, the strings that make it; `tokens`, the piece of each id; and
    `text_ids(text, strict, start)`, the ids of a text, or of a part of one, in which no special token is looked for.
    """

    pad_id, bos_id, eos_id, unk_id = range(len(SPECIAL_TOKENS))
    special_tokens = {name: i for i, name in enumerate(SPECIAL_TOKENS)}         # name → id
    special_ids = frozenset(special_tokens.values())
    added_tokens = {}                           # name → id of what is no special token, and matched in every text
    add_bos = False                             # whether its model wants bos_id before a text; `encode` leaves that to the caller
    kind, fields = None, ()
    kinds = {}                                  # kind → class

    def __init_subclass__(cls):
        if "kind" in vars(cls):
            Tokenizer.kinds[cls.kind] = cls

    @property
    def vocab_size(self):
        return len(self.tokens)

    def encode(self, text, errors="unk", allowed_special=()):
        """text: str -> int64 ids [N]; no special token is added.

        errors: what has no token becomes `unk_id`, or raises ValueError with "strict". allowed_special: "all", or those names
        of special tokens that become their id where they stand in the text; any other is text like the rest. Raises TypeError,
        and ValueError for lone surrogates, and for an allowed name that is none.
        """
        if errors not in ("unk", "strict"):
            raise ValueError(f'{type(self).__name__}.encode: errors must be "unk" or "strict", got {errors!r}')
        encoded(text, "utf-8")
        names = {**self.added_tokens, **self.allowed(allowed_special)}
        rows, start = [], 0
        for i, part in enumerate(split_at(names, text)):
            rows.append([names[part]] if i % 2 else self.text_ids(part, errors == "strict", start))
            start += len(part)
        return np.concatenate(rows).astype(np.int64, copy=False)

    def allowed(self, names):
        """names: "all", or some names of special tokens -> {name: id}. Raises TypeError, ValueError."""
        if names == "all":
            return self.special_tokens
        if isinstance(names, (str, bytes)) or not hasattr(names, "__iter__"):
            raise TypeError(f'{type(self).__name__}.encode: allowed_special must be "all" or a set of names, got {names!r}')
        names = list(names)
        for name in names:
            if name not in list(self.special_tokens):
                raise ValueError(f"{type(self).__name__}.encode: {name!r} is no special token here; there are: "
                                 f"{', '.join(self.special_tokens) or 'none'}")
        return {name: self.special_tokens[name] for name in names}

    def pieces(self, ids, skip_special):
        """ids: integers [N] -> the list of their tokens, with or without the special ones.

        Raises TypeError for ids that are no integers, IndexError for ids outside 0 to vocab_size - 1.
        """
        left_out = self.special_ids if skip_special else ()
        return [self.tokens[i] for i in as_ids(ids, self.vocab_size).tolist() if i not in left_out]

    def to_dict(self):
        own = {name: getattr(self, name) for name in self.fields}
        return {"type": self.kind, "special_tokens": list(SPECIAL_TOKENS), **own}

    @classmethod
    def from_dict(cls, content):
        """The inverse of `to_dict`; `Tokenizer.from_dict` reads any kind.

        Raises ValueError for anything else, so that ids never change their meaning.
        """
        if cls is Tokenizer:
            return class_of(content).from_dict(content)
        known = isinstance(content, dict) and content.get("type") == cls.kind
        if not known or not all(isinstance(content.get(name), str) for name in cls.fields):
            own = "".join(f', "{name}": "..."' for name in cls.fields)
            raise ValueError(
                f'{cls.__name__}.from_dict: expected {{"type": "{cls.kind}", "special_tokens": [...]{own}}}'
            )
        if content.get("special_tokens") != list(SPECIAL_TOKENS):
            raise ValueError(
                f"{cls.__name__}.from_dict: special_tokens must be {list(SPECIAL_TOKENS)} in this order, "
                f"got {content.get('special_tokens')!r}"
            )
        return cls(*(content[name] for name in cls.fields))

    @property
    def fingerprint(self):
        """SHA-256 of the whole vocabulary, in hex: models and texts belong together if and only if theirs agree."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode("ascii")).hexdigest()

    def save(self, path):
        """Writes JSON; a file of that name is replaced in one step, so that no reader meets half a tokenizer."""
        write_atomically(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path):
        """The tokenizer that `save` wrote; `Tokenizer.load` reads any kind. Raises FileNotFoundError, or ValueError naming the file."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no tokenizer file: {error}") from error

    def __eq__(self, other):
        return self.fingerprint == other.fingerprint if isinstance(other, Tokenizer) else NotImplemented

    def __hash__(self):
        return hash(self.fingerprint)

    def __repr__(self):
        own = "".join(f", {name}={getattr(self, name)!r}" for name in self.fields)
        return f"{type(self).__name__}(vocab_size={self.vocab_size}{own})"


class CharTokenizer(Tokenizer):
    """One token per character.    ids 0 to 3: <pad> <bos> <eos> <unk>;  then the characters in order of code point

    What its characters do not hold is <unk>; ByteTokenizer knows every text. (guide 15.1)
    """

    kind, fields = "char", ("characters",)

    def __init__(self, characters):
        """characters: str, each once, in ascending order (`from_text` sorts). Raises TypeError, ValueError."""
        self.code_points = code_points(characters)
        if len(characters) == 0:
            raise ValueError("CharTokenizer: there are no characters; build it from a text that is not empty")
        if not (self.code_points[:-1] < self.code_points[1:]).all():
            raise ValueError("CharTokenizer: characters must be sorted, each once; use CharTokenizer.from_text")
        self.characters = characters
        self.tokens = (*SPECIAL_TOKENS, *characters)

    @classmethod
    def from_text(cls, text):
        """The tokenizer of every character that occurs in `text`."""
        code_points(text)
        return cls("".join(sorted(set(text))))

    def text_ids(self, text, strict=False, start=0):
        """text: str of N characters -> int64 ids [N]; start: where it begins in the text that an error speaks of."""
        codes = code_points(text)
        rank = np.searchsorted(self.code_points, codes).clip(max=len(self.code_points) - 1)
        known = self.code_points[rank] == codes
        if strict and not known.all():
            position = int(np.argmin(known))
            raise ValueError(
                f"CharTokenizer.encode: the character {text[position]!r} at position {start + position} is not among the "
                f'{len(self.characters)} that this tokenizer knows; pass errors="unk" to encode it as <unk>'
            )
        return np.where(known, rank + len(SPECIAL_TOKENS), self.unk_id)

    def decode(self, ids, skip_special=True):
        """ids: integers [N] -> str; special tokens are left out, or written by name with skip_special=False.

        Raises TypeError for ids that are no integers, IndexError for ids outside 0 to vocab_size - 1.
        """
        return "".join(self.pieces(ids, skip_special))


class OfBytes(Tokenizer):
    """Tokenizers whose tokens are bytes: a character may lie across two of them."""

    def decode_bytes(self, ids, skip_special=True):
        """ids: integers [N] -> bytes, which need not end with a whole character; special tokens as in `decode`."""
        return b"".join(self.pieces(ids, skip_special))

    def decode(self, ids, skip_special=True):
        """ids: integers [N] -> str; bytes that are no UTF-8, as those of half a character, become U+FFFD.

        Special tokens are left out, or written by name with skip_special=False. Raises TypeError for ids that are no
        integers, IndexError for ids outside 0 to vocab_size - 1.
        """
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")


class ByteTokenizer(OfBytes):
    """One token per byte of UTF-8.    ids 0 to 3: <pad> <bos> <eos> <unk>;  id 4 + b: the byte b, 0 to 255

    Every text has ids and nothing is <unk>; outside ASCII a character is two to four tokens. (guide 15.1)
    """

    kind = "byte"
    tokens = (*(name.encode("ascii") for name in SPECIAL_TOKENS), *(bytes([b]) for b in range(256)))

    def text_ids(self, text, strict=False, start=0):
        """text: str of N bytes in UTF-8 -> int64 ids [N]; each byte has one."""
        return np.frombuffer(encoded(text, "utf-8"), dtype=np.uint8).astype(np.int64) + len(SPECIAL_TOKENS)


def ids_of_roles(special_tokens):
    """special_tokens: {name: id} -> the ids of padding, beginning, end, unknown; None for what there is not"""
    return tuple(next((special_tokens[name] for name in names if name in special_tokens), None) for names in ROLES.values())


def require_names(owner, tokens, names):
    """Raises ValueError unless names: {name: id} are what `tokens` holds at these ids, as str or as bytes."""
    for name, i in names.items():
        if not (isinstance(name, str) and name and type(i) is int and 0 <= i < len(tokens) and tokens[i] in (name, encoded(name, "utf-8"))):
            raise ValueError(f"{owner}: the special or added token {name!r} must have an id from 0 to {len(tokens) - 1} and be "
                             f"the token there, got the id {reprlib.repr(i)}")


def require_entries(owner, content, kinds):
    """Raises ValueError unless content is a dict with these entries: {name: type}."""
    wrong = [name for name, kind in kinds.items() if not isinstance(content, dict) or type(content.get(name)) is not kind]
    if wrong:
        raise ValueError(f"{owner}: expected a dict with {', '.join(f'{name} ({kinds[name].__name__})' for name in wrong)}")


def class_of(content):
    """The class of what some `to_dict` made. Raises ValueError."""
    kind = content.get("type") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in Tokenizer.kinds:
        raise ValueError(f"Tokenizer.from_dict: the type must be one of {', '.join(Tokenizer.kinds)}, got {reprlib.repr(kind)}; "
                         f"files of Hugging Face are read by data.load_huggingface")
    return Tokenizer.kinds[kind]


def split_at(names, text):
    """names: of tokens that are matched -> the text in parts; those at 1, 3, 5, … are names, the longest that fits first."""
    if not names:
        return [text]
    longest_first = sorted(names, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text)


def code_points(text):
    """text: str of N characters -> uint32 code points [N]. Raises TypeError, and ValueError for lone surrogates."""
    return np.frombuffer(encoded(text, "utf-32-le"), dtype="<u4")


def encoded(text, encoding):
    """text: str -> bytes in a Unicode encoding. Raises TypeError, and ValueError for lone surrogates."""
    if not isinstance(text, str):
        raise TypeError(f"a text must be a str, got {type(text).__name__}")
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has half a character, the lone surrogate {text[error.start]!r}, at position {error.start}: "
            f"read it as UTF-8 without errors='surrogateescape'"
        ) from None


def as_ids(ids, vocab_size=None):
    """ids: integers [N] -> int64 array [N], a copy: who changes `ids` later changes nothing here.

    Raises TypeError, ValueError; IndexError outside 0 to vocab_size - 1.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1:
        raise ValueError(f"token ids must have one axis [N], got the shape {ids.shape}; pass one row at a time")
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, got {ids.dtype}")
    if vocab_size is not None and (wrong := first_outside(ids, vocab_size)) is not None:
        raise IndexError(f"token id {wrong} is outside the vocabulary, whose ids are 0 to {vocab_size - 1}")
    if ids.size and ids.max() > np.iinfo(np.int64).max:
        raise ValueError(f"token ids must be less than 2**63, got {ids.max()}")
    return ids.astype(np.int64)
