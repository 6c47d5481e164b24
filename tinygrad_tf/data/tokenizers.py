"""Text to token ids and back."""

import hashlib
import json
from pathlib import Path

import numpy as np

from ..backend import first_outside
from ..serialization import write_atomically

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")


class Tokenizer:
    """What every tokenizer shares.    ids 0 to 3: <pad> <bos> <eos> <unk>;  then its own tokens

    Special tokens are ids, never text: the five letters "<pad>" in a text are five characters. (guide 15.1)
    A subclass says `kind`, its name in files; `fields`, the strings that make it; and `tokens`, the piece of each id.
    """

    pad_id, bos_id, eos_id, unk_id = range(len(SPECIAL_TOKENS))
    kind, fields = None, ()

    @property
    def vocab_size(self):
        return len(self.tokens)

    def pieces(self, ids, skip_special):
        """ids: integers [N] -> the list of their tokens, with or without the special ones.

        Raises TypeError for ids that are no integers, IndexError for ids outside 0 to vocab_size - 1.
        """
        ids = as_ids(ids, self.vocab_size)
        if skip_special:
            ids = ids[ids >= len(SPECIAL_TOKENS)]
        return [self.tokens[i] for i in ids.tolist()]

    def to_dict(self):
        own = {name: getattr(self, name) for name in self.fields}
        return {"type": self.kind, "special_tokens": list(SPECIAL_TOKENS), **own}

    @classmethod
    def from_dict(cls, content):
        """The inverse of `to_dict`. Raises ValueError for anything else, so that ids never change their meaning."""
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
        """The tokenizer that `save` wrote. Raises FileNotFoundError, or ValueError naming the file."""
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

    def encode(self, text, errors="unk"):
        """text: str of N characters -> int64 ids [N].

        A character outside the vocabulary becomes `unk_id`, or raises ValueError with errors="strict".
        """
        if errors not in ("unk", "strict"):
            raise ValueError(f'CharTokenizer.encode: errors must be "unk" or "strict", got {errors!r}')
        codes = code_points(text)
        rank = np.searchsorted(self.code_points, codes).clip(max=len(self.code_points) - 1)
        known = self.code_points[rank] == codes
        if errors == "strict" and not known.all():
            position = int(np.argmin(known))
            raise ValueError(
                f"CharTokenizer.encode: the character {text[position]!r} at position {position} is not among the "
                f'{len(self.characters)} that this tokenizer knows; pass errors="unk" to encode it as <unk>'
            )
        return np.where(known, rank + len(SPECIAL_TOKENS), self.unk_id)

    def decode(self, ids, skip_special=True):
        """ids: integers [N] -> str; special tokens are left out, or written by name with skip_special=False.

        Raises TypeError for ids that are no integers, IndexError for ids outside 0 to vocab_size - 1.
        """
        return "".join(self.pieces(ids, skip_special))


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8.    ids 0 to 3: <pad> <bos> <eos> <unk>;  id 4 + b: the byte b, 0 to 255

    Every text has ids and nothing is <unk>; outside ASCII a character is two to four tokens. (guide 15.1)
    """

    kind = "byte"
    tokens = (*(name.encode("ascii") for name in SPECIAL_TOKENS), *(bytes([b]) for b in range(256)))

    def encode(self, text):
        """text: str of N bytes in UTF-8 -> int64 ids [N]. Raises TypeError, and ValueError for lone surrogates."""
        return np.frombuffer(encoded(text, "utf-8"), dtype=np.uint8).astype(np.int64) + len(SPECIAL_TOKENS)

    def decode_bytes(self, ids, skip_special=True):
        """ids: integers [N] -> bytes, which need not end with a whole character; special tokens as in `decode`."""
        return b"".join(self.pieces(ids, skip_special))

    def decode(self, ids, skip_special=True):
        """ids: integers [N] -> str; bytes that are no UTF-8, as those of half a character, become U+FFFD.

        Special tokens are left out, or written by name with skip_special=False. Raises TypeError for ids that are no
        integers, IndexError for ids outside 0 to vocab_size - 1.
        """
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")


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
