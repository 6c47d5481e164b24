"""WordPiece: BERT's words, the longest pieces first, and the same ids as the package `tokenizers`."""
import copy
import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygrad_tf.data import Tokenizer, WordPieceTokenizer, load_text
from tinygrad_tf.generation import TextStream

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = [*SPECIAL, "un", "##aff", "##able", "##a", "##ble", "the", "cat", "##s", "!", "[", "]", "cl", "i", "東", "σ", "##σ", "a", "##b"]


def make(tokens=VOCAB, **options):
    return WordPieceTokenizer(tokens, {name: tokens.index(name) for name in SPECIAL if name in tokens}, **options)


def pieces(tokenizer, text, **options):
    return [tokenizer.tokens[i] for i in tokenizer.encode(text, **options)]


def test_the_longest_piece_comes_first():
    tokenizer = make()
    assert pieces(tokenizer, "unaffable") == ["un", "##aff", "##able"]
    assert pieces(tokenizer, "The CATS!") == ["the", "cat", "##s", "!"]
    assert pieces(tokenizer, "una ble unx") == ["un", "##a", "[UNK]", "[UNK]"], "one part without a piece, and the word is unknown"
    ids = tokenizer.encode("the cat")
    assert ids.dtype == np.int64 and ids.tolist() == [VOCAB.index("the"), VOCAB.index("cat")] and tokenizer.encode(" \n").tolist() == []
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 2, 3, 1)


def slow_cut(tokenizer, word):
    """As one would say it: try every end from the last."""
    out, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in tokenizer.tokens and piece not in SPECIAL:
                break
        else:
            return ["[UNK]"]
        out.append(piece)
        start = end
    return out


@given(st.text("abcens", min_size=1, max_size=12), st.sets(st.text("abcens", min_size=1, max_size=5)),
       st.sets(st.text("abcens", max_size=5)))
def test_pieces_are_those_of_trying_every_end(word, beginnings, others):
    tokenizer = make([*SPECIAL, *sorted(beginnings), *(f"##{piece}" for piece in sorted(others))])
    assert pieces(tokenizer, word) == slow_cut(tokenizer, word)


@pytest.mark.parametrize("text, options, words", [
    ("Hello,World! it's", {}, ["hello", ",", "world", "!", "it", "'", "s"]),
    ("Crème BRÛLÉE Ünïcøde", {}, ["creme", "brulee", "unicøde"]),
    ("Crème BRÛLÉE", {"strip_accents": False}, ["crème", "brûlée"]),
    ("Crème BRÛLÉE", {"lowercase": False}, ["Crème", "BRÛLÉE"]),
    ("Crème BRÛLÉE", {"lowercase": False, "strip_accents": True}, ["Creme", "BRULEE"]),
    ("ab\0c\u200dd\ufffd\te\u00a0f\x1cg", {}, ["abcd", "e", "fg"]),
    ("東京 is カナ", {}, ["東", "京", "is", "カナ"]),
    ("東京", {"split_ideographs": False}, ["東京"]),
    ("ΟΔΟΣ İ", {}, ["οδοσ", "i"]),
    ("a$b€c—d「e」", {}, ["a", "$", "b€c", "—", "d", "「", "e", "」"]),
    ("한국", {}, [unicodedata.normalize("NFD", "한국")]),
    ("a\0b", {"clean": False}, ["a\0b"]),
])
def test_words(text, options, words):
    assert make(**options).words(text) == words


def test_special_tokens_in_a_text_are_text_unless_they_are_allowed():
    tokenizer = make()
    assert pieces(tokenizer, "[CLS]the") == ["[", "cl", "##s", "]", "the"] and pieces(tokenizer, "[PAD]") == ["[", "[UNK]", "]"]
    assert pieces(tokenizer, "[CLS] the [SEP]", allowed_special="all") == ["[CLS]", "the", "[SEP]"]
    assert pieces(tokenizer, "[MASK]s", allowed_special={"[MASK]"}) == ["[MASK]", "[UNK]"]


def test_a_word_that_is_too_long_is_unknown():
    assert pieces(make(), "a" + "b" * 99) == ["a", *["##b"] * 99] and pieces(make(), "a" + "b" * 100) == ["[UNK]"]
    assert pieces(make(max_chars=3), "cats cat") == ["[UNK]", "cat"]


def test_strict_names_the_word():
    assert make().encode("the cats", errors="strict").tolist() == make().encode("the cats").tolist()
    with pytest.raises(ValueError, match="'dog' has no pieces here; .* as .UNK."):
        make().encode("the dog", errors="strict")


def test_decoding_joins_pieces_and_a_stream_gives_the_same():
    tokenizer = make()
    ids = tokenizer.encode("The unaffable cats!").tolist()
    assert tokenizer.decode(ids) == "the unaffable cats !" and tokenizer.decode([2, *ids, 3]) == tokenizer.decode(ids)
    assert tokenizer.decode([2, *ids, 3], skip_special=False) == "[CLS] the unaffable cats ! [SEP]" and tokenizer.decode([]) == ""
    stream = TextStream(tokenizer)
    assert "".join(stream.push(i) for i in [2, *ids]) + stream.flush() == " the unaffable cats !"
    with pytest.raises(IndexError, match="outside the vocabulary"):
        tokenizer.decode([len(VOCAB)])


@given(st.text())
def test_any_text_is_encoded(text):
    tokenizer = make()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and isinstance(tokenizer.decode(ids), str)


@pytest.mark.parametrize("text, error", [("a\ud800", ValueError), (b"a", TypeError), (None, TypeError)])
def test_what_is_no_text_is_refused(text, error):
    with pytest.raises(error):
        make().encode(text)


def test_a_text_takes_steps_in_proportion_to_its_length(monkeypatch):
    """Counted, not timed: the characters that are asked for, and the ends that are tried."""
    tried, cut = [], WordPieceTokenizer.cut
    monkeypatch.setattr(WordPieceTokenizer, "cut", lambda self, word: tried.append(len(word)) or cut(self, word))
    tokenizer = make()
    tokenizer.encode("b" * 1_000_000)
    assert tried == [], "too long, not looked at"
    tokenizer.encode("cats " * 1000)
    assert tried == [4], "seen before"
    assert tokenizer.longest == 6
    assert tokenizer.encode("\u0300\u0327" * 1000).size == 0


# --- files --------------------------------------------------------------------------------------------------------------------

def test_json_and_back(tmp_path):
    for options in {}, {"lowercase": False, "clean": False}, {"max_chars": 5, "strip_accents": False, "split_ideographs": False}:
        tokenizer = make(**options)
        tokenizer.save(tmp_path / "tokenizer.json")
        loaded = [kind.load(tmp_path / "tokenizer.json") for kind in (WordPieceTokenizer, Tokenizer)]
        for again in *loaded, copy.deepcopy(tokenizer):
            assert type(again) is WordPieceTokenizer and again == tokenizer and again.to_dict() == tokenizer.to_dict()
            assert again.encode("The Crème 東京").tolist() == tokenizer.encode("The Crème 東京").tolist()
    assert repr(make()) == f"WordPieceTokenizer(vocab_size={len(VOCAB)}, prefix='##')"
    assert len({make().fingerprint, make(lowercase=False).fingerprint, make(VOCAB[:-1]).fingerprint}) == 3


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_vocab_txt(tmp_path, end):
    path = tmp_path / "vocab.txt"
    path.write_bytes(("\r\n" if "\r" in end else "\n").join(VOCAB).encode() + end.encode())
    assert WordPieceTokenizer.from_vocab_file(path) == make()
    assert WordPieceTokenizer.from_vocab_file(path, lowercase=False) == make(lowercase=False)
    with pytest.raises(FileNotFoundError):
        WordPieceTokenizer.from_vocab_file(tmp_path / "none.txt")


@pytest.mark.parametrize("content, message", [
    (b"", "none is empty"), (b"[UNK]\na\na", "stand once"), (b"a\nb", "must be a special token .UNK."), (b"[UNK]\n\na", "none is empty"),
    (b"\xff", "utf-8")])
def test_what_is_no_vocabulary_is_refused(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"vocab.txt is no vocabulary of WordPiece: .*{message}"):
        WordPieceTokenizer.from_vocab_file(path)


@pytest.mark.parametrize("change, message", [
    ({"type": "bpe"}, "expected"), ({"tokens": [*VOCAB, 5]}, "must be a text"), ({"tokens": [*VOCAB, "\ud800"]}, "surrogate"),
    ({"special_tokens": {}}, "UNK"), ({"special_tokens": {"[UNK]": 2}}, "'.UNK.' must have an id"), ({"max_chars": 0}, "at least 1"),
    ({"max_chars": True}, "max_chars"), ({"prefix": ""}, "prefix"), ({"lowercase": 1}, "lowercase"), ({"tokens": "abc"}, "tokens")])
def test_files_with_something_wrong_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        WordPieceTokenizer.from_dict(json.loads(json.dumps(make().to_dict())) | change)


# --- the package `tokenizers` ---------------------------------------------------------------------------------------------------

OPTIONS = [{"lowercase": True}, {"lowercase": False}, {"lowercase": False, "strip_accents": True},
           {"lowercase": True, "strip_accents": False}]


@pytest.mark.parametrize("options", OPTIONS)
def test_ids_are_those_of_the_package_tokenizers(tmp_path, options):
    hf = pytest.importorskip("tokenizers")
    text = load_text()[:40_000]
    words = sorted(set(make(**options).words(text)))
    letters = sorted({letter for word in words for letter in word})
    vocab = list(dict.fromkeys([*SPECIAL, *words[::3], *letters[::2], *(f"##{w[-3:]}" for w in words[::2]), *(f"##{c}" for c in letters)]))
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(vocab) + "\n", encoding="utf-8")
    ours, theirs = WordPieceTokenizer.from_vocab_file(path, **options), hf.BertWordPieceTokenizer(str(path), **options)
    ids = ours.encode(text).tolist()
    assert ids == theirs.encode(text, add_special_tokens=False).ids and ours.unk_id in ids
    plain = hf.decoders.WordPiece(prefix="##", cleanup=False)
    assert ours.decode(ids) == plain.decode([ours.tokens[i] for i in ids if i != ours.unk_id])


@pytest.mark.parametrize("options", OPTIONS)
def test_words_are_those_of_the_package_tokenizers(options):
    """On characters of the older Unicode that its tables know, and without the ideographs that it leaves out by a slip of the pen."""
    hf = pytest.importorskip("tokenizers")
    clean = hf.normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, **{"strip_accents": None, **options})
    split, tokenizer = hf.pre_tokenizers.BertPreTokenizer(), make(**options)
    for c in [*range(0x600), *range(0x900, 0x950), *range(0x1E00, 0x2100), *range(0x2190, 0x2E00), *range(0x3000, 0x3100),
              *range(0x4E00, 0x4E50), *range(0xAC00, 0xAC20), *range(0xE000, 0xE010), *range(0xF900, 0xF910),
              *range(0xFF00, 0xFF70), 0x1F600, 0x20000, 0x2A700]:
        text = f"aB{chr(c)}Cd {chr(c)}"
        assert tokenizer.words(text) == [word for word, _ in split.pre_tokenize_str(clean.normalize_str(text))], hex(c)
