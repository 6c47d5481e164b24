"""Tokens to text while they come: what is given out is the text of all tokens, cut at the first stop string, and no less is given
at any time than is certain."""
import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tinygrad_tf.data import ByteTokenizer, CharTokenizer
from tinygrad_tf.generation.text import TextStream

BYTES = ByteTokenizer()
EMOJI = "👩🏽\u200d🚀"                             # four code points, fifteen bytes
ALPHABETS = {"ab": "ab", "letters and marks": "ae\u0301\u0308é", "emoji": "a🙂" + EMOJI, "replacement": "a\ufffdé"}


class Pieces:
    """A tokenizer with a token for each of some pieces, strings or bytes, like those of subwords."""

    def __init__(self, pieces):
        self.pieces, self.calls = pieces, []
        if pieces and isinstance(pieces[0], bytes):
            self.decode_bytes = self.join
        else:
            self.decode = self.join

    def join(self, ids):
        self.calls.append(list(ids))
        return (b"" if hasattr(self, "decode_bytes") else "").join(self.pieces[i] for i in ids)


def cut(text, stops):
    """By looking at every place of the whole text: (what comes before the first stop string, that string or None)."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start], text[start:end]
    return text, None


def may_begin(text, stops):
    """How much of the end of the text must be held back."""
    return max((n for n in range(len(text) + 1) for stop in stops if n < len(stop) and stop.startswith(text[len(text) - n:])), default=0)


def read(tokenizer, ids, stop=()):
    """(pieces of all pushes and of flush, the stream)."""
    stream, given_out = TextStream(tokenizer, stop), []
    for token_id in ids:
        given_out.append(stream.push(token_id))
        if stream.stopped is not None:
            break
        assert stream.text == "".join(given_out)
    given_out.append(stream.flush())
    assert stream.text == "".join(given_out)
    return given_out, stream


def split(content, places):
    """Content cut at some places; where two are equal, an empty piece."""
    places = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[one:other] for one, other in zip(places, places[1:])]


places = st.lists(st.integers(0, 100), max_size=12)


@st.composite
def texts_and_stops(draw):
    letters = draw(st.sampled_from(list(ALPHABETS.values())))
    text = draw(st.text(st.sampled_from(letters), max_size=30))
    stops = draw(st.lists(st.text(st.sampled_from(letters), min_size=1, max_size=5), max_size=4))
    if text and draw(st.booleans()):                        # one that is sure to be there
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start:start + draw(st.integers(1, 8))])
    return text, stops


# --- the whole text, cut at the first stop string -----------------------------------------------------------------------

@given(texts_and_stops(), places)
@example(("aaab", ["aab"]), [1, 2, 3])
@example(("abc", ["abc", "ab"]), [])
@example(("aabaaab", ["aaab", "baaa"]), [2, 5])
@example(("xab", ["xaby", "ab"]), [])
def test_streamed_is_decoded_and_cut(text_and_stops, cuts):
    """However the text is cut into tokens: characters, bytes in the middle of them, or one token for all."""
    text, stops = text_and_stops
    before, stopped = cut(text, stops)
    characters = CharTokenizer.from_text(text or "a")
    for tokenizer, ids in ((characters, characters.encode(text)), (BYTES, BYTES.encode(text))):
        _, stream = read(tokenizer, ids.tolist(), stops)
        assert (stream.text, stream.stopped) == (before, stopped)
    for content in text, text.encode():
        pieces = split(content, cuts)
        _, stream = read(Pieces(pieces), range(len(pieces)), stops)
        assert (stream.text, stream.stopped) == (before, stopped)


@given(st.binary(max_size=30) | st.text().map(str.encode).map(lambda content: content[:-1]), places,
       st.lists(st.text(st.sampled_from("\ufffda\x00"), min_size=1, max_size=3), max_size=2))
@example("🙂".encode()[:3], [1, 2], ["\ufffd"])
@example("aé".encode()[:2], [1], ["a\ufffd"])
def test_bytes_that_are_no_text_become_what_decoding_them_at_once_gives(content, cuts, stops):
    pieces = split(content, cuts)
    _, stream = read(Pieces(pieces), range(len(pieces)), stops)
    assert (stream.text, stream.stopped) == cut(content.decode("utf-8", errors="replace"), stops)


def test_every_short_row_of_the_bytes_that_utf_8_treats_differently():
    kinds = bytes([0x61, 0x80, 0x90, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xFF])
    for row in itertools.chain.from_iterable(itertools.product(kinds, repeat=n) for n in range(4)):
        ids = [4 + b for b in row]
        assert read(BYTES, ids)[1].text == BYTES.decode(ids)


@given(texts_and_stops(), places)
def test_no_more_is_held_back_than_must_be(text_and_stops, cuts):
    """After each token: all whole characters, but for the longest end that a stop string begins with."""
    text, stops = text_and_stops
    before, _ = cut(text, stops)
    for content in text, text.encode():
        pieces = split(content, cuts)
        stream = TextStream(Pieces(pieces), stops)
        for i in range(len(pieces)):
            stream.push(i)
            so_far = content[:0].join(pieces[:i + 1])
            so_far = so_far if isinstance(so_far, str) else so_far.decode(errors="ignore")
            if stream.stopped is not None:
                assert stream.text == before and cut(so_far, stops)[1] == stream.stopped
                break
            assert cut(so_far, stops)[1] is None
            assert stream.text == so_far[:len(so_far) - may_begin(so_far, stops)]


# --- by hand ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pieces, stop, given_out, stopped", [
    (["a", "a", "a", "b"], "aab", ["", "", "a", "", ""], "aab"),                    # "aa" is held through the third a
    (["a", "b", "c"], ["abc", "ab"], ["", "", ""], "ab"),                           # the one that ends first
    (["xa", "b", "y"], ["xab", "b"], ["", "", ""], "xab"),                          # they end together: the one that begins first
    (["xa", "b", "y"], ["b", "ab"], ["x", "", ""], "ab"),
    (["the end"], "the end", ["", ""], "the end"),                                  # all of the text
    (["1 ", "<e", "n", "d> 2"], "<end>", ["1 ", "", "", "", ""], "<end>"),          # over three tokens, ends within one
    (["one.", " two.", " three"], ". t", ["one", "", ""], ". t"),
    (["a<", "b<e", "nd"], "<end>", ["a", "<b", "", "<end"], None),                  # never whole: given out at the end
    (["a", "", "b"], "ab", ["", "", "", ""], "ab"),
    (["a\n", "\nb", "\nQ:"], "\n\nQ:", ["a", "\n\nb", "\nQ:", ""], None),
    (["ab", "ab", "ac"], "ababac", ["", "", "", ""], "ababac"),
    (["ab", "ab", "ab", "ac"], "ababac", ["", "", "ab", "", ""], "ababac"),         # falls back to "abab"
    (["ab"], (), ["ab", ""], None),
    (["ab"], {"b"}, ["a", ""], "b"),
    ([], "b", [""], None),
])
def test_what_each_token_gives(pieces, stop, given_out, stopped):
    results, stream = read(Pieces(pieces), range(len(pieces)), stop)
    assert (results, stream.stopped) == (given_out, stopped)


def test_characters_are_given_out_whole():
    ids = BYTES.encode("né" + EMOJI).tolist()
    expected = ["n", "", "é", "", "", "", "👩", "", "", "", "🏽", "", "", "\u200d", "", "", "", "🚀"]
    assert read(BYTES, ids)[0] == [*expected, ""]
    assert read(BYTES, ids[:-1])[0] == [*expected[:-1], "\ufffd"]                   # a cut emoji at the end
    assert read(BYTES, [*ids[:-1], *BYTES.encode("!")])[0] == [*expected[:-1], "\ufffd!", ""]


def test_a_cut_character_behind_what_is_held_back():
    ids = BYTES.encode("x<🙂").tolist()[:-1]
    assert read(BYTES, ids, "<end>")[0] == ["x", "", "", "", "", "<\ufffd"]
    results, stream = read(BYTES, ids, "<\ufffd")
    assert results == ["x", "", "", "", "", ""] and stream.stopped == "<\ufffd"


@pytest.mark.parametrize("tokenizer", [BYTES, CharTokenizer.from_text("abé")], ids=["byte", "char"])
def test_special_tokens_give_no_text_and_part_nothing(tokenizer):
    ids = [special for i in tokenizer.encode("abé").tolist() for special in (tokenizer.bos_id, tokenizer.pad_id, i)]
    assert "".join(read(tokenizer, [*ids, tokenizer.eos_id])[0]) == "abé"
    _, stream = read(tokenizer, ids, "bé")
    assert (stream.text, stream.stopped) == ("a", "bé")


@pytest.mark.parametrize("kind", [int, np.int64, np.uint16])
def test_ids_of_every_integer_type(kind):
    assert TextStream(BYTES).push(kind(4 + ord("a"))) == "a"


# --- the end ------------------------------------------------------------------------------------------------------------

def test_nothing_comes_after_a_stop_string():
    stream = TextStream(BYTES, "b")
    assert [stream.push(4 + b) for b in b"ab"] == ["a", ""] and stream.stopped == "b"
    with pytest.raises(RuntimeError, match="push: the text reached the stop string 'b'; a new text needs a new TextStream"):
        stream.push(4 + ord("c"))
    assert stream.flush() == "" and stream.text == "a" and stream.stopped == "b"


def test_nothing_comes_after_flush():
    stream = TextStream(BYTES, "bc")
    assert [stream.push(4 + b) for b in b"ab"] == ["a", ""] and stream.text == "a"
    assert stream.flush() == "b" and stream.flush() == "" and stream.text == "ab" and stream.stopped is None
    with pytest.raises(RuntimeError, match="push: the text was flushed"):
        stream.push(4 + ord("c"))


# --- what is refused ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stop, error, words", [
    ("", ValueError, "a stop string is empty"),
    (["a", ""], ValueError, "a stop string is empty"),
    (None, TypeError, "stop must be a str, or a list of them, got NoneType; leave it out"),
    (b"a", TypeError, "stop must be a str, or a list of them, got bytes"),
    (7, TypeError, "stop must be a str, or a list of them, got int"),
    (["a", b"b"], TypeError, "each stop string must be a str, got b'b' of type bytes"),
    ([["a"]], TypeError, "each stop string must be a str"),
    ("a\ud800", ValueError, "half a character"),
])
def test_stop_strings_are_checked(stop, error, words):
    with pytest.raises(error, match=words):
        TextStream(BYTES, stop)


def test_a_tokenizer_must_decode():
    with pytest.raises(TypeError, match=r"must have decode_bytes\(ids\) or decode\(ids\), got NoneType"):
        TextStream(None)


@pytest.mark.parametrize("token_id, error, words", [
    ("a", TypeError, "token_id must be an integer, got 'a' of type str"), (True, TypeError, "must be an integer"),
    (5.0, TypeError, "must be an integer"), ([5], TypeError, "must be an integer"), (260, IndexError, "outside the vocabulary"),
    (-1, IndexError, "outside the vocabulary"),
])
def test_a_bad_id_is_refused_and_changes_nothing(token_id, error, words):
    stream = TextStream(BYTES, "é!")
    first, second = BYTES.encode("é").tolist()
    stream.push(first)
    with pytest.raises(error, match=words):
        stream.push(token_id)
    assert stream.push(second) == "" and stream.flush() == "é"


# --- work ---------------------------------------------------------------------------------------------------------------

class Counted(str):
    """A stop string that counts how often a character of it is looked at."""
    looks = 0

    def __getitem__(self, i):
        self.looks += 1
        return super().__getitem__(i)


@pytest.mark.parametrize("text, stop", [
    ("a" * 4000, "a" * 500 + "b"),                          # held back at the most, and falls back at each character
    (("a" * 499 + "b") * 8, "a" * 500 + "b"),               # falls back all the way, again and again
    ("ab" * 2000, "ab" * 100 + "c"),
    ("x" * 4000, "y"),
])
def test_the_work_of_a_token_does_not_grow(text, stop):
    """Two or three looks a character of the text, at its end as at its start; and each token is decoded once, by itself."""
    stop, tokenizer = Counted(stop), Pieces(sorted(set(text)))
    stream = TextStream(tokenizer, [stop])
    stop.looks, done = 0, []
    for character in text:
        stream.push(tokenizer.pieces.index(character))
        done.append(stop.looks)
    assert done[-1] <= 4 * len(text)
    half = len(text) // 2
    assert done[-1] - done[half - 1] <= done[half - 1] + 2 * len(stop)
    assert all(len(ids) == 1 for ids in tokenizer.calls) and len(tokenizer.calls) == len(text)
