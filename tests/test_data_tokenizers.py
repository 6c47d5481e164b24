"""Characters to ids and back: nothing is lost, nothing changes its meaning between two runs."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygrad_tf.data import SPECIAL_TOKENS, ByteTokenizer, CharTokenizer, Tokenizer

any_text = st.text(min_size=1)
TEXT = "hello, wörld 🙂\n<pad>"
both = pytest.mark.parametrize("tokenizer", [CharTokenizer.from_text("abc"), ByteTokenizer()], ids=["char", "byte"])


def test_ids_are_special_tokens_then_sorted_characters():
    tokenizer = CharTokenizer.from_text("cab")
    assert SPECIAL_TOKENS == ("<pad>", "<bos>", "<eos>", "<unk>")
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert tokenizer.characters == "abc" and tokenizer.vocab_size == 7
    ids = tokenizer.encode("abcz")
    assert ids.dtype == np.int64 and ids.tolist() == [4, 5, 6, 3]


@given(any_text, st.data())
def test_round_trip_of_any_text_made_of_known_characters(corpus, data):
    tokenizer = CharTokenizer.from_text(corpus)
    text = data.draw(st.text(st.sampled_from(tokenizer.characters)))
    ids = tokenizer.encode(text, errors="strict")
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


@given(any_text, any_text)
def test_encode_agrees_with_a_dictionary(corpus, text):
    tokenizer = CharTokenizer.from_text(corpus)
    table = {character: i for i, character in enumerate(tokenizer.tokens)}
    assert tokenizer.encode(text).tolist() == [table.get(character, tokenizer.unk_id) for character in text]


@pytest.mark.parametrize("make", [CharTokenizer.from_text, lambda _: ByteTokenizer()], ids=["char", "byte"])
def test_special_tokens_in_a_text_are_never_matched(make):
    text = "<pad><bos><eos><unk>"
    ids = make(text).encode(text)
    assert len(ids) == len(text) and ids.min() >= len(SPECIAL_TOKENS)


@both
def test_decode_leaves_special_tokens_out_or_writes_their_names(tokenizer):
    a, b = tokenizer.encode("ab")
    assert tokenizer.decode([1, a, 3, b, 2, 0]) == "ab"
    assert tokenizer.decode([1, a, 3, b, 2, 0], skip_special=False) == "<bos>a<unk>b<eos><pad>"
    assert tokenizer.decode([]) == "" and tokenizer.decode(np.array([a], dtype=np.uint8)) == "a"


@both
@pytest.mark.parametrize("ids", [[4, -1], [260], [2**40], np.array([2**63], dtype=np.uint64)])
def test_decode_refuses_ids_outside_the_vocabulary(tokenizer, ids):
    with pytest.raises(IndexError, match=f"outside the vocabulary, whose ids are 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.decode(ids)


def test_the_first_id_outside_is_refused_and_the_last_inside_is_not():
    assert CharTokenizer.from_text("abc").decode([6]) == "c" and ByteTokenizer().decode_bytes([259]) == b"\xff"
    with pytest.raises(IndexError, match="0 to 6"):
        CharTokenizer.from_text("abc").decode([7])


@both
@pytest.mark.parametrize("ids, error", [([4.0], TypeError), ([True], TypeError), ([[4]], ValueError), (4, ValueError)])
def test_decode_refuses_what_is_no_row_of_integers(tokenizer, ids, error):
    with pytest.raises(error, match="token ids must"):
        tokenizer.decode(ids)


def test_strict_names_the_character_and_its_position():
    with pytest.raises(ValueError, match="'é' at position 3"):
        CharTokenizer.from_text("abc").encode("abcé!", errors="strict")
    with pytest.raises(ValueError, match="errors must be"):
        CharTokenizer.from_text("abc").encode("abc", errors="ignore")


@pytest.mark.parametrize("use", [CharTokenizer.from_text, CharTokenizer, CharTokenizer.from_text("ab").encode,
                                 ByteTokenizer().encode])
def test_lone_surrogates_and_other_types_are_refused(use):
    with pytest.raises(ValueError, match=r"lone surrogate '\\udc80', at position 1"):
        use("a\udc80")
    with pytest.raises(TypeError, match="must be a str, got bytes"):
        use(b"ab")


@pytest.mark.parametrize("characters", ["", "ba", "aa"])
def test_the_characters_must_be_sorted_and_each_stand_once(characters):
    with pytest.raises(ValueError, match="CharTokenizer: "):
        CharTokenizer(characters)


@given(st.text())
def test_bytes_hold_every_text(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.tolist() == [4 + b for b in text.encode("utf-8")]
    assert tokenizer.decode(ids) == text and tokenizer.decode_bytes(ids.tolist()) == text.encode("utf-8")


@given(st.binary())
def test_any_bytes_are_decoded_and_those_that_are_no_text_are_replaced(content):
    tokenizer = ByteTokenizer()
    ids = np.frombuffer(content, dtype=np.uint8) + np.uint16(4)
    assert tokenizer.decode_bytes(ids) == content and tokenizer.decode(ids) == content.decode("utf-8", errors="replace")


def test_bytes_their_ids_half_a_character_and_special_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 260 and tokenizer.encode("é").tolist() == [4 + 0xC3, 4 + 0xA9]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    emoji = tokenizer.encode("a🙂").tolist()
    assert tokenizer.decode(emoji[:-1]) == "a\ufffd" and tokenizer.decode_bytes(emoji[:2]) == b"a\xf0"
    assert tokenizer.decode([*emoji[:3], tokenizer.eos_id, *emoji[3:]]) == "a🙂"
    assert tokenizer.decode_bytes([1, 4 + 0xFF], skip_special=False) == b"<bos>\xff"


@given(any_text)
def test_json_and_back(corpus):
    for tokenizer in CharTokenizer.from_text(corpus), ByteTokenizer():
        again = type(tokenizer).from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert again == tokenizer and hash(again) == hash(tokenizer) and again.fingerprint == tokenizer.fingerprint


def test_bytes_equality_fingerprint_and_repr():
    one, other = ByteTokenizer(), CharTokenizer("".join(map(chr, range(256))))
    assert one == ByteTokenizer() and one != other and other != one and one != "byte" and len({one, ByteTokenizer(), other}) == 2
    # As below, of {"special_tokens": ["<pad>", "<bos>", "<eos>", "<unk>"], "type": "byte"}
    assert one.fingerprint == "4d37e0eceeb9fcfbdb7199a7b1dd9269e74407b241606ed0ab8ad44f9ac090cb"
    assert repr(one) == "ByteTokenizer(vocab_size=260)"


def test_equality_fingerprint_and_repr():
    one, same, other = (CharTokenizer.from_text(text) for text in ("ab", "bab", "abc"))
    assert one == same and one != other and one != "ab"
    assert one.fingerprint == same.fingerprint != other.fingerprint
    # Checkpoints hold it, so it must never change: the SHA-256 of
    # {"characters": "ab", "special_tokens": ["<pad>", "<bos>", "<eos>", "<unk>"], "type": "char"}
    assert one.fingerprint == "f480fc7fae831df4cad89f557de74a785951553fde316d04a909d9a7888d3517"
    assert repr(one) == "CharTokenizer(vocab_size=6, characters='ab')"


GOOD = CharTokenizer.from_text("ab").to_dict()


@both
def test_files_of_another_kind_are_refused(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    assert type(tokenizer).load(path) == tokenizer
    other = CharTokenizer if type(tokenizer) is ByteTokenizer else ByteTokenizer
    expected = rf'is no tokenizer file: {other.__name__}.from_dict: expected {{"type": "{other.kind}"'
    with pytest.raises(ValueError, match=expected):
        other.load(path)
    swapped = tokenizer.to_dict() | {"special_tokens": ["<bos>", "<pad>", "<eos>", "<unk>"]}
    with pytest.raises(ValueError, match="in this order"):
        type(tokenizer).from_dict(swapped)


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        GOOD | {"type": "bpe"},
        GOOD | {"characters": ["a", "b"]},
        GOOD | {"characters": "ba"},
        GOOD | {"characters": "a\ud800"},
        GOOD | {"special_tokens": ["<bos>", "<pad>", "<eos>", "<unk>"]},
        {"type": "char", "characters": "ab"},
    ],
)
def test_from_dict_and_load_refuse_anything_else(tmp_path, content):
    with pytest.raises(ValueError):
        CharTokenizer.from_dict(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer file"):
        CharTokenizer.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000], ids=["empty", "{", "bytes", "[…", "{…"])
def test_load_refuses_what_is_no_json(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer file"):
        CharTokenizer.load(path)
    with pytest.raises(FileNotFoundError):
        CharTokenizer.load(tmp_path / "none.json")


def test_save_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "tokenizer.json"
    for text in (TEXT, TEXT + "é"):
        CharTokenizer.from_text(text).save(path)
        assert CharTokenizer.load(path) == CharTokenizer.from_text(text)
    assert os.listdir(tmp_path) == ["tokenizer.json"]


def test_a_save_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    CharTokenizer.from_text("ab").save(path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        CharTokenizer.from_text("xyz").save(path)
    assert CharTokenizer.load(path) == CharTokenizer.from_text("ab") and os.listdir(tmp_path) == ["tokenizer.json"]


# --- what all kinds share -----------------------------------------------------------------------------------------------------

def test_any_kind_is_read_by_the_class_above_them(tmp_path):
    for tokenizer in CharTokenizer.from_text(TEXT), ByteTokenizer():
        tokenizer.save(tmp_path / "tokenizer.json")
        again = Tokenizer.load(tmp_path / "tokenizer.json")
        assert type(again) is type(tokenizer) and again == tokenizer
    assert set(Tokenizer.kinds) >= {"char", "byte", "bpe", "wordpiece"} and None not in Tokenizer.kinds


def test_a_subclass_without_a_kind_of_its_own_takes_no_place():
    class Louder(CharTokenizer):
        pass
    assert Tokenizer.kinds["char"] is CharTokenizer and type(Louder("ab")).kind == "char"


@pytest.mark.parametrize("content", [None, [], {}, {"type": "other"}, {"type": ["char"]}, {"type": None}, {"model": {"type": "BPE"}}])
def test_what_is_of_no_kind_is_refused(content):
    with pytest.raises(ValueError, match="Tokenizer.from_dict: the type must be one of char, byte, .*load_huggingface"):
        Tokenizer.from_dict(content)


@pytest.mark.parametrize("make", [lambda: CharTokenizer.from_text("ab<>pdeos"), ByteTokenizer], ids=["char", "byte"])
def test_special_tokens_that_are_allowed_become_their_ids(make):
    tokenizer = make()
    text = "<pad>a<eos><bos>b"
    a, b = tokenizer.encode("ab")
    assert tokenizer.encode(text, allowed_special="all").tolist() == [0, a, 2, 1, b]
    some = tokenizer.encode(text, allowed_special={"<eos>"})
    assert some.dtype == np.int64 and some.tolist().count(2) == 1 and tokenizer.decode(some, skip_special=False) == text
    assert tokenizer.encode(text, allowed_special=[]).tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.encode("<eos>", allowed_special=("<eos>",)).tolist() == [2] and tokenizer.encode("", allowed_special="all").size == 0


@both
@pytest.mark.parametrize("names, error, message", [
    ("<eos>", TypeError, 'must be "all" or a set of names'), (None, TypeError, "all"), (7, TypeError, "all"),
    (["<end>"], ValueError, "'<end>' is no special token here; .*<pad>"), ([["<eos>"]], ValueError, "no special token"),
    ({""}, ValueError, "no special token")])
def test_allowed_special_says_what_it_takes(tokenizer, names, error, message):
    with pytest.raises(error, match=f"{type(tokenizer).__name__}.encode: .*{message}"):
        tokenizer.encode("a", allowed_special=names)


def test_a_position_in_an_error_counts_from_the_beginning_of_the_text():
    with pytest.raises(ValueError, match="'é' at position 7"):
        CharTokenizer.from_text("abc").encode("a<eos>bé", errors="strict", allowed_special="all")
    with pytest.raises(ValueError, match="ByteTokenizer.encode: errors must be"):
        ByteTokenizer().encode("a", errors="ignore")
