"""WordPiece as BERT has it: words from a fixed vocabulary, cut into the longest pieces that there are. (Devlin et al. 2018)

    text → cleaned, lower case without accents → words and single signs → pieces: the first as it is, the others with ## before

A reader, not a trainer: vocabularies come with published models. A text does not come back as it was.
"""
import unicodedata
from itertools import chain
from pathlib import Path

import numpy as np

from .tokenizers import Tokenizer, encoded, ids_of_roles, require_entries, require_names

BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# CJK ideographs, each of which BERT takes for a word; not kana, hangul or the newer extensions
_IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF),
               (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))
_CACHED_WORDS, _CACHED_LENGTH = 1 << 16, 100                                    # no more words are kept, and no longer ones


class WordPieceTokenizer(Tokenizer):
    """Words in pieces.    a word is its longest beginning that is a token, then ## and the longest that fits, …; else [UNK]

    `bos_id` is [CLS] and `eos_id` is [SEP]; `encode` adds neither. (guide 15.1)
    """

    kind, fields = "wordpiece", ("prefix",)

    def __init__(self, tokens, special_tokens, prefix="##", max_chars=100, clean=True, split_ideographs=True, lowercase=True,
                 strip_accents=None):
        """tokens: the str of each id. special_tokens: {name: id}, with one for what is unknown. A word of more than max_chars
        characters is unknown. clean: control characters go, white space is a blank; strip_accents: as lowercase where None.

        Raises ValueError for what is no vocabulary.
        """
        self.tokens, self.special_tokens, self.prefix, self.max_chars = tuple(tokens), dict(special_tokens), prefix, max_chars
        self.clean, self.split_ideographs, self.lowercase = clean, split_ideographs, lowercase
        self.strip_accents = lowercase if strip_accents is None else strip_accents
        require_names("WordPieceTokenizer", self.tokens, self.special_tokens)
        self.special_ids = frozenset(self.special_tokens.values())
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = ids_of_roles(self.special_tokens)
        self.ids = {token: i for i, token in enumerate(self.tokens) if i not in self.special_ids}
        self.longest = max(map(len, self.ids), default=0)
        self.cache, self.table = {}, Table(clean, split_ideographs, lowercase, self.strip_accents)
        self.require_sound()

    def require_sound(self):
        if len(self.ids) + len(self.special_ids) < len(self.tokens) or "" in self.ids:
            raise ValueError("WordPieceTokenizer: each token must stand once, and none is empty")
        if self.unk_id is None:
            raise ValueError("WordPieceTokenizer: there must be a special token [UNK] or <unk>, for words that have no pieces")
        if self.max_chars < 1 or not self.prefix:
            raise ValueError(f"WordPieceTokenizer: max_chars must be at least 1, and the prefix a text, got {self.max_chars} and "
                             f"{self.prefix!r}")

    @classmethod
    def from_vocab_file(cls, path, lowercase=True, strip_accents=None):
        """path: BERT's vocab.txt, a token a line, the first has id 0; lowercase: of a model that is called "uncased".

        Raises FileNotFoundError, ValueError.
        """
        try:
            tokens = [line.rstrip("\r") for line in Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")]
            special = {name: tokens.index(name) for name in BERT_TOKENS if name in tokens}
            return cls(tokens, special, lowercase=lowercase, strip_accents=strip_accents)
        except ValueError as error:
            raise ValueError(f"{path} is no vocabulary of WordPiece: {error}") from error

    def words(self, text):
        """text: str -> its words and signs, list of str: in lower case and without accents where the vocabulary is so."""
        return list(filter(None, text.translate(self.table).split(" ")))

    def text_ids(self, text, strict=False, start=0):
        """text: str -> int64 ids [N]"""
        words = self.words(text)
        if strict and (unknown := [word for word in words if self.unk_id in self.word_ids(word)]):
            raise ValueError(f'WordPieceTokenizer.encode: {unknown[0]!r} has no pieces here; pass errors="unk" to encode it as '
                             f"{self.tokens[self.unk_id]}")
        return np.fromiter(chain.from_iterable(map(self.word_ids, words)), np.int64)

    def word_ids(self, word):
        """word: str -> its ids; those of words seen lately are looked up."""
        ids = self.cache.get(word)
        if ids is None:
            ids = self.cut(word) if len(word) <= self.max_chars else [self.unk_id]
            if len(word) <= _CACHED_LENGTH:
                if len(self.cache) >= _CACHED_WORDS:
                    self.cache.clear()
                self.cache[word] = ids
        return ids

    def cut(self, word):
        """word: str -> ids of its pieces, from the left the longest that is a token; [unk_id] where some part has none"""
        ids, start = [], 0
        while start < len(word):
            before = self.prefix if start else ""
            ends = range(min(len(word), start + self.longest - len(before)), start, -1)
            end = next((end for end in ends if before + word[start:end] in self.ids), None)
            if end is None:
                return [self.unk_id]
            ids.append(self.ids[before + word[start:end]])
            start = end
        return ids

    def decode_bytes(self, ids, skip_special=True):
        """ids: integers [N] -> bytes: as `decode`, with a blank before the first word too, so that texts can be joined."""
        pieces = self.pieces(ids, skip_special)
        return "".join(p.removeprefix(self.prefix) if p.startswith(self.prefix) else f" {p}" for p in pieces).encode()

    def decode(self, ids, skip_special=True):
        """ids: integers [N] -> str: words with a blank between, signs too; special tokens are left out, or written by name.

        Raises TypeError for ids that are no integers, IndexError for ids outside 0 to vocab_size - 1.
        """
        return self.decode_bytes(ids, skip_special).decode().removeprefix(" ")

    def to_dict(self):
        return {"type": self.kind, "special_tokens": self.special_tokens, "tokens": list(self.tokens), "prefix": self.prefix,
                "max_chars": self.max_chars, "clean": self.clean, "split_ideographs": self.split_ideographs,
                "lowercase": self.lowercase, "strip_accents": self.strip_accents}

    @classmethod
    def from_dict(cls, content):
        """The inverse of `to_dict`. Raises ValueError for anything else."""
        options = {"prefix": str, "max_chars": int, "clean": bool, "split_ideographs": bool, "lowercase": bool, "strip_accents": bool}
        require_entries("WordPieceTokenizer.from_dict", content, {"type": str, "special_tokens": dict, "tokens": list, **options})
        if content["type"] != cls.kind:
            raise ValueError(f'WordPieceTokenizer.from_dict: expected {{"type": "{cls.kind}"}}, got {content["type"]!r}')
        return cls(require_texts(content["tokens"]), content["special_tokens"], **{name: content[name] for name in options})


def require_texts(tokens):
    for token in tokens:
        if not isinstance(token, str):
            raise ValueError(f"WordPieceTokenizer: each token must be a text, got {token!r}")
        encoded(token, "utf-8")
    return tokens


# --- characters -------------------------------------------------------------------------------------------------------------

class Table(dict):
    """code point → what stands for it, with blanks where words end. `str.translate` asks for it, and it fills while it does.

    Each character is taken by itself: Σ is σ, at the end of a word too, and no text takes longer than its characters.
    """

    def __init__(self, clean, split_ideographs, lowercase, strip_accents):
        self.clean, self.split_ideographs, self.lowercase, self.strip_accents = clean, split_ideographs, lowercase, strip_accents

    def __missing__(self, code):
        text = chr(code)
        if self.clean and is_control(text):
            text = " " if text in "\t\n\r" else ""
        if self.strip_accents:
            text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
        if self.lowercase:
            text = text.lower()
        ideograph = self.split_ideographs and any(first <= code <= last for first, last in _IDEOGRAPHS)
        self[code] = f" {text} " if ideograph else "".join(map(set_apart, text))
        return self[code]


def is_control(character):
    return character == "\ufffd" or unicodedata.category(character) in ("Cc", "Cf", "Co")


def set_apart(character):
    """A blank for white space, and a sign with blanks around it: each is a word of its own."""
    if character.isspace() and character not in "\x1c\x1d\x1e\x1f":           # those four are white space to Python alone
        return " "
    return f" {character} " if is_sign(character) else character


def is_sign(character):
    """Punctuation, and what ASCII has beside letters, digits and blanks."""
    in_ascii = "!" <= character <= "~" and not character.isalnum()
    return in_ascii or unicodedata.category(character).startswith("P")
