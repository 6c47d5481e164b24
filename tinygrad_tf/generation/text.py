"""Tokens to text while they come (guide 12): whole characters only, and nothing of a stop string.

    all that is given out = the text of all tokens, cut before the first stop string

A token may be part of a character (of ByteTokenizer's, "é" is two), and a stop string may begin in one token and end in
the middle of another: at each token some of the text is not certain yet. Held back are the bytes of a character that is
not whole, and the longest end of the text that a stop string begins with, and no more: with the stop string "\n\nQ:" a
"\n" waits for the next character, and "\nA" is given out at once.
"""
import codecs
from numbers import Integral

from ..arguments import type_name
from ..data.tokenizers import code_points
from .sampling import check_number


class TextStream:
    """The text of one row of tokens, piece by piece: `push` each token id, then `flush`.

    tokenizer: its `decode_bytes(ids)` where it has one, else its `decode(ids)`, which must leave special tokens out.
    stop: a str, or several. `stopped` is None, and then the first stop string in the text: the one that ends first, of
    those the one that begins first. Reading N characters takes O(N) steps a stop string, however they come.
    """

    def __init__(self, tokenizer, stop=()):
        """ValueError for an empty stop string or half a character in it; TypeError for other types."""
        in_bytes = hasattr(tokenizer, "decode_bytes")
        if not in_bytes and not hasattr(tokenizer, "decode"):
            raise TypeError(f"TextStream: the tokenizer must have decode_bytes(ids) or decode(ids), got {type_name(tokenizer)}")
        self._decode = tokenizer.decode_bytes if in_bytes else tokenizer.decode
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if in_bytes else None
        self._searches = [Search(string) for string in _stop_strings(stop)]
        self._held, self._given, self._ended = "", [], False
        self.stopped = None

    @property
    def text(self):
        """All that was given out."""
        return "".join(self._given)

    def push(self, token_id):
        """The text that this token makes certain, often "". RuntimeError after a stop string, or after `flush`.

        TypeError for what is no integer, IndexError for ids outside the vocabulary; the stream is then as before.
        """
        if self._ended:
            why = "the text was flushed" if self.stopped is None else f"the text reached the stop string {self.stopped!r}"
            raise RuntimeError(f"TextStream.push: {why}; a new text needs a new TextStream")
        check_number("TextStream.push", "token_id", token_id, Integral, "an integer")
        piece = self._decode([token_id])
        return self._read(piece if self._utf8 is None else self._utf8.decode(piece))

    def flush(self):
        """The end: what was held back, with U+FFFD for a character that is not whole. Again, or after a stop string: ""."""
        if self._ended:
            return ""
        text = self._read("" if self._utf8 is None else self._utf8.decode(b"", final=True))    # U+FFFD may end a stop string too
        return text if self._ended else text + self._give(self._held, ended=True)

    def _read(self, piece):
        """Takes the next characters; gives out all but what may begin a stop string."""
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            found = [search.stop for search in self._searches if search.read(text[end - 1])]
            if found:
                self.stopped = max(found, key=len)              # they end together: the longest begins first
                return self._give(text[:end - len(self.stopped)], ended=True)
        held = max((search.length for search in self._searches), default=0)
        self._held = text[len(text) - held:]
        return self._give(text[:len(text) - held])

    def _give(self, text, ended=False):
        self._ended = ended
        if text:
            self._given.append(text)
        return text


class Search:
    """One stop string, looked for character by character: `length` is how long a beginning of it the text now ends with.

    Where the next character does not fit, the next shorter beginning that the text ends with is tried: after "aa" of "aab",
    an "a" leaves "aa". shorter[n − 1] is that of the first n characters, so no character of the text is read twice.
    (Knuth, Morris, Pratt 1977)
    """

    def __init__(self, stop):
        self.stop, self.length, self.shorter = stop, 0, [0]
        for character in stop[1:]:                              # the stop string, read as a text from its second character on,
            self.read(character)                                # ends with the beginnings that the table is to hold
            self.shorter.append(self.length)
        self.length = 0

    def read(self, character):
        """Takes the next character of the text; whether the stop string ends with it. Not to be called after that."""
        while self.length and self.stop[self.length] != character:
            self.length = self.shorter[self.length - 1]
        self.length += self.stop[self.length] == character
        return self.length == len(self.stop)


def _stop_strings(stop):
    several = [stop] if isinstance(stop, str) else stop
    if not isinstance(several, (list, tuple, set, frozenset)):
        raise TypeError(f"TextStream: stop must be a str, or a list of them, got {type_name(stop)}; leave it out for none")
    for string in several:
        if not isinstance(string, str):
            raise TypeError(f"TextStream: each stop string must be a str, got {string!r} of type {type_name(string)}")
        if not string:
            raise ValueError("TextStream: a stop string is empty, and would stop before the first character; leave it out for none")
        code_points(string)                                     # half a character: no text holds it, so it would never stop one
    return several
