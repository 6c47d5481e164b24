"""Byte-level BPE against a slow one that says the rule, against the package `tokenizers`, and every text there and back."""
import copy
import json
import os
import pickle
import random
import sys
from collections import Counter
from functools import cache

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from tinygrad_tf.data import SPECIAL_TOKENS, BPETokenizer, CharTokenizer, Tokenizer, load_text
from tinygrad_tf.data.bpe import ALPHABET, BYTES, Neighbours, Word, shown
from tinygrad_tf.data.pretokenizers import PATTERNS, pattern, words
from tinygrad_tf.generation import TextStream

GPT2 = regex.compile(r"'(?:[smtd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")      # the same, in other words
ODD = ["", " ", "\0", "a\0b", "🙂", "👩‍👩‍👧", "e\u0301\u0323", "\u200d\ufeff", "日本語 テキスト", "क्षि",
       "\r\n\t \u2028\u00a0x", "<pad><bos>", "a" * 300, "\U0010ffff", "  two  blanks  ", "it's I'LL they'd 's",
       "x²³½ ٣४ 12345", "naïve café—“quoted”"]
any_text = st.one_of(st.text(), st.text("ab é🙂\n'1"), st.sampled_from(ODD))


@cache
def corpus():
    return load_text()[:60_000] + "\n".join(ODD)


@cache
def trained(vocab_size=600):
    return BPETokenizer.train(corpus(), vocab_size)


def pieces(tokenizer, text):
    return [tokenizer.tokens[i] for i in tokenizer.encode(text)]


# --- the rule, slowly -----------------------------------------------------------------------------------------------------

def slow_merges(text, vocab_size, min_frequency):
    """All pairs are counted anew before each merge; bytes are compared by their place in GPT-2's order, tokens by when they came."""
    counted = Counter(tuple(bytes([b]) for b in word.encode()) for word in GPT2.findall(text))
    born = {bytes([b]): i for i, b in enumerate(BYTES)}
    merges = []
    while len(born) < vocab_size - 4:
        pairs = Counter()
        for word, n in counted.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        if not pairs or max(pairs.values()) < min_frequency:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], born[pair[0]], born[pair[1]]))
        merges.append(best)
        born.setdefault(best[0] + best[1], len(born))
        counted = Counter({joined(word, best): n for word, n in counted.items()})
    return merges


def joined(word, pair):
    """Every place where the pair stands, from the left, becomes one token."""
    out, i = [], 0
    while i < len(word):
        width = 2 if word[i:i + 2] == pair else 1
        out.append(b"".join(word[i:i + width]))
        i += width
    return tuple(out)


def slow_encode(tokenizer, text):
    """The pair that was learned first, the leftmost of its places, one at a time."""
    ranks = {pair: i for i, pair in enumerate(tokenizer.merged_pairs())}
    found = []
    for word in GPT2.findall(text):
        parts = [bytes([b]) for b in word.encode()]
        while known := [(ranks[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in ranks]:
            _, i = min(known)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        found += parts
    return found


repeats = st.lists(st.tuples(st.sampled_from("ab é-\n"), st.integers(1, 9))).map(lambda runs: "".join(c * n for c, n in runs))


@given(repeats, st.integers(260, 300), st.integers(1, 3))
def test_merges_are_those_of_counting_everything_each_time(text, vocab_size, min_frequency):
    tokenizer = BPETokenizer.train(text, vocab_size, min_frequency)
    assert tokenizer.merged_pairs() == slow_merges(text, vocab_size, min_frequency)
    assert pieces(tokenizer, text) == slow_encode(tokenizer, text)


def test_merges_of_a_real_text_are_those_of_counting_everything_each_time():
    text = load_text()[:12_000]
    tokenizer = BPETokenizer.train(text, 360)
    assert tokenizer.merged_pairs() == slow_merges(text, 360, 2)
    assert pieces(tokenizer, text[:3000]) == slow_encode(tokenizer, text[:3000])


def test_ties_go_to_the_lower_left_id_then_the_lower_right_one():
    assert BPETokenizer.train("ba ba ab ab", 261, pattern="gpt2").merged_pairs() == [(b"a", b"b")]
    assert BPETokenizer.train("ab ac", 261, 1).merged_pairs() == [(b"a", b"b")]
    assert BPETokenizer.train("!\n?\n", 261, 1).merged_pairs() == BPETokenizer.train("?\n!\n", 261, 1).merged_pairs()


def test_a_larger_vocabulary_begins_with_a_smaller_one_and_several_texts_are_one():
    small, large = trained(400), trained(600)
    assert large.tokens[:400] == small.tokens and large.merged_pairs()[:len(small.merges)] == small.merged_pairs()
    lines = corpus().splitlines(keepends=True)
    assert BPETokenizer.train(iter(lines), 300) == BPETokenizer.train(lines[::-1], 300)
    assert BPETokenizer.train("ab", 5000).vocab_size == 260 and BPETokenizer.train("", 300, 1).vocab_size == 260


def test_counts_stay_those_of_the_words_while_they_are_merged():
    counted = {"abababab": 3, "aaaaa": 2, "b": 1, "ba": 5}
    neighbours, new = Neighbours(counted, 0), 1000
    while pair := neighbours.most_frequent(1):
        neighbours.merge(pair, new)
        left = [(n, [t for t in row if t is not None]) for n, row in rows(neighbours, counted)]
        expected = Counter()
        for n, row in left:
            for neighbouring in zip(row, row[1:]):
                expected[neighbouring] += n
        assert +neighbours.count == expected
        new += 1


def rows(neighbours, counted):
    start = 1
    for word, n in counted.items():
        yield n, neighbours.token[start:start + len(word)]
        start += len(word)


# --- GPT-2's words ----------------------------------------------------------------------------------------------------------

@given(any_text)
def test_words_are_the_text_and_gpt2s(text):
    assert "".join(words("gpt2", text)) == text and words("gpt2", text) == GPT2.findall(text)
    assert "".join(words("llama3", text)) == text


def test_words_as_they_are_known():
    assert words("gpt2", "I'd say it's 25 cafés,  isn't\n\nit?!") == [
        "I", "'d", " say", " it", "'s", " 25", " cafés", ",", " ", " isn", "'t", "\n", "\n", "it", "?!"]
    assert words("llama3", "I'D 12345\n\n x") == ["I", "'D", " ", "123", "45", "\n\n", " x"]
    assert words("gpt2", "\x1c\x1c a") == ["\x1c\x1c", " a"], "a sign here, white space to Python"


def test_bytes_stand_in_gpt2s_order_and_alphabet():
    assert sorted(BYTES) == list(range(256)) and (BYTES[0], BYTES[93], BYTES[-1]) == (ord("!"), ord("~"), 0xAD)
    assert [ALPHABET[b] for b in b" \n\t\0a~"] == ["Ġ", "Ċ", "ĉ", "Ā", "a", "~"]
    assert len(set(ALPHABET.values())) == 256 and list(ALPHABET.values()) == sorted(ALPHABET.values())
    assert not any(c.isspace() or not c.isprintable() for c in ALPHABET.values())


def test_without_the_package_regex_training_says_what_to_install(monkeypatch):
    tokenizer = Tokenizer.from_dict(trained().to_dict())
    monkeypatch.setitem(sys.modules, "regex", None)
    pattern.cache_clear()
    with pytest.raises(ImportError, match="pip install regex"):
        tokenizer.encode("a")
    assert tokenizer.decode([4 + 64]) == chr(BYTES[64]), "what needs no words works"


# --- there and back -----------------------------------------------------------------------------------------------------------

@given(any_text)
def test_every_text_comes_back(text):
    for tokenizer in trained(), trained(260), BPETokenizer.train(text, 300, 1), BPETokenizer.train(text, 300, 1, pattern="llama3"):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64 and ids.ndim == 1 and tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids.tolist()) == text.encode()
        assert tokenizer.encode(text, errors="strict").tolist() == ids.tolist()


@given(st.lists(st.integers(0, 599)))
def test_any_ids_decode_and_half_characters_are_replaced(ids):
    tokenizer = trained()
    expected = b"".join(tokenizer.tokens[i] for i in ids if i > 3)
    assert tokenizer.decode_bytes(ids) == expected and tokenizer.decode(ids) == expected.decode("utf-8", errors="replace")


def test_a_character_that_is_cut():
    tokenizer = trained(260)
    ids = tokenizer.encode("a🙂").tolist()
    assert len(ids) == 5 and tokenizer.decode(ids[:-1]) == "a\ufffd" and tokenizer.decode(ids[2:]) == "\ufffd" * 3


@given(any_text)
def test_a_stream_gives_whole_characters_and_the_whole_text(text):
    tokenizer = trained(300)
    stream, given_out = TextStream(tokenizer), []
    for i in tokenizer.encode(text):
        given_out.append(stream.push(int(i)))
        assert "\ufffd" not in given_out[-1] and text.startswith("".join(given_out))
    assert "".join(given_out) + stream.flush() == text


def test_a_stream_stops_inside_a_token_and_leaves_special_tokens_out():
    tokenizer = BPETokenizer.train("abcabcabc", 262)
    assert pieces(tokenizer, "abc") == [b"abc"]
    stream = TextStream(tokenizer, stop="bcab")
    assert [stream.push(i) for i in (tokenizer.eos_id, 261, 261)] == ["", "a", ""] and stream.stopped == "bcab"


@pytest.mark.parametrize("use", [lambda text: BPETokenizer.train(text, 300), trained(300).encode, trained(300).trace,
                                 lambda text: BPETokenizer.train(["a", text], 300)])
def test_lone_surrogates_and_other_types_are_refused(use):
    with pytest.raises(ValueError, match=r"lone surrogate '\\udc80', at position 1"):
        use("a\udc80")
    with pytest.raises(TypeError, match="must be a str, got (bytes|int)"):
        use(b"ab")


@pytest.mark.parametrize("ids, error", [([600], IndexError), ([-1], IndexError), ([4.0], TypeError),
                                        ([True], TypeError), ([[4]], ValueError)])
def test_ids_that_are_none_are_refused(ids, error):
    with pytest.raises(error, match="token id"):
        trained().decode(ids)


@pytest.mark.parametrize("options, error, message", [
    (dict(vocab_size=259), ValueError, "vocab_size must be at least 260, got 259"),
    (dict(vocab_size=300.0), TypeError, "vocab_size must be a whole number"),
    (dict(vocab_size=300, min_frequency=0), ValueError, "min_frequency must be at least 1"),
    (dict(vocab_size=300, pattern="gpt3"), ValueError, "pattern must be one of gpt2, llama3, qwen2, smollm, got 'gpt3'")])
def test_training_says_what_it_takes(options, error, message):
    with pytest.raises(error, match=message):
        BPETokenizer.train("a text", **options)


# --- how much work it is ------------------------------------------------------------------------------------------------------

class Counting(Word):
    steps = 0

    def found(self, left):
        Counting.steps += 1
        return super().found(left)


@pytest.mark.parametrize("make", [lambda n: b"a" * n, lambda n: b"ab" * (n // 2), lambda n: b"e" * n, random.Random(0).randbytes])
def test_one_long_word_takes_steps_in_proportion_to_its_length(make):
    """Counted, not timed: each place is looked at a few times, whether the word has one thousand bytes or sixteen."""
    tokenizer = BPETokenizer.train("a" * 5000 + " " + "ab" * 5000 + corpus()[:20_000], 500, 1)
    counts = []
    for n in 1000, 16_000:
        Counting.steps = 0
        word = make(n)
        ids = Counting([tokenizer.byte_ids[b] for b in word], tokenizer.merges).ids()
        assert b"".join(tokenizer.tokens[i] for i in ids) == word
        counts.append(Counting.steps)
    assert counts[1] < 17 * counts[0] and counts[1] < 8 * 16_000


def test_words_seen_before_are_looked_up_and_the_store_stays_small(monkeypatch):
    tokenizer = copy.deepcopy(trained())
    tokenizer.cache.clear()
    first = tokenizer.encode("the cat the cat " + "x" * 1000).tolist()
    assert set(tokenizer.cache) == {"the", " cat", " the"} and tokenizer.encode("the cat the cat " + "x" * 1000).tolist() == first
    monkeypatch.setattr("tinygrad_tf.data.bpe._CACHED_WORDS", 3)
    tokenizer.encode(corpus())
    assert len(tokenizer.cache) <= 3 and tokenizer.encode(corpus()).tolist() == trained().encode(corpus()).tolist()


# --- special tokens -----------------------------------------------------------------------------------------------------------

def test_special_tokens_in_a_text_are_text_unless_they_are_allowed():
    tokenizer = trained(300).with_special_tokens("<|user|>", "<|user|>x")
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3) and tokenizer.vocab_size == 302
    text = "<bos>a<|user|>xb<|user|>"
    plain = tokenizer.encode(text)
    assert not set(plain) & {0, 1, 2, 3, 300, 301} and tokenizer.decode(plain) == text
    a, b, x = (tokenizer.encode(c)[0] for c in "abx")
    assert tokenizer.encode(text, allowed_special="all").tolist() == [1, a, 301, b, 300], "the longest name wins"
    assert tokenizer.encode("<bos>a", allowed_special={"<bos>"}).tolist() == [1, a]
    assert tokenizer.encode("<|user|>xb", allowed_special=["<|user|>"]).tolist() == [300, x, b]
    assert tokenizer.decode([1, a, 301]) == "a" and tokenizer.decode([1, a, 301], skip_special=False) == "<bos>a<|user|>x"


def test_new_special_tokens_move_no_id_and_are_refused_twice():
    tokenizer = trained(300)
    more = tokenizer.with_special_tokens("<x>", "é")
    assert more.tokens[:300] == tokenizer.tokens and more.special_tokens == {**tokenizer.special_tokens, "<x>": 300, "é": 301}
    assert more != tokenizer and more.encode("é", allowed_special="all").tolist() == [301] and more.encode("é").tolist() != [301]
    for names in ("<pad>",), ("<x>", "<x>"):
        with pytest.raises(ValueError, match="there is a special token .* already"):
            tokenizer.with_special_tokens(*names)
    with pytest.raises(ValueError, match="special or added token ''"):
        tokenizer.with_special_tokens("")


def test_added_tokens_are_matched_in_every_text():
    base = trained(300)
    tokenizer = BPETokenizer([*base.tokens, b"<tool>"], base.merged_pairs(), base.special_tokens, {"<tool>": 300})
    a, = tokenizer.encode("a")
    assert tokenizer.encode("a<tool>a").tolist() == [a, 300, a] and tokenizer.decode([a, 300]) == "a<tool>"
    assert Tokenizer.from_dict(tokenizer.to_dict()) == tokenizer


# --- the trace ----------------------------------------------------------------------------------------------------------------

TEXT = "un able believ believe believer unbelieving unable able unable! believable " * 3


def test_the_trace_of_unbelievable():
    tokenizer = BPETokenizer.train(TEXT, 290)
    trace = tokenizer.trace("unbelievable!")
    assert trace.splitlines()[0] == "'unbelievable': 12 in bytes, 3 in tokens"
    assert trace.splitlines()[1].split() == list("unbelievable")
    assert trace.splitlines()[-1] == f"un believ able ! → {tokenizer.encode('unbelievable!').tolist()}"
    assert "a + b" in trace and "'!': 1 in bytes, 1 in tokens" in trace
    ranks = [int(line.split(":")[0]) for line in trace.splitlines() if " + " in line]
    assert ranks == sorted(ranks) and len(ranks) == 9 and all(tokenizer.merged_pairs()[r] for r in ranks)


@given(any_text)
def test_the_last_step_of_each_word_is_what_encode_gives(text):
    tokenizer = trained()
    for word in words("gpt2", text):
        steps = list(tokenizer.steps(word.encode()))
        assert all(b"".join(left) == word.encode() for _, left in steps) and steps[0][0] is None
        assert steps[-1][1] == pieces(tokenizer, word) and len(steps) == len(word.encode()) - len(steps[-1][1]) + 1
    assert isinstance(tokenizer.trace(text), str)


def test_bytes_are_shown_so_that_one_can_read_them():
    assert [shown(token) for token in (b" the", b"\n\n", "é".encode(), b"\xc3", b"a\0")] == ["␣the", "↵↵", "é", "\\xc3", "a\\x00"]


# --- files --------------------------------------------------------------------------------------------------------------------

def test_json_and_back(tmp_path):
    tokenizer = trained().with_special_tokens("<|é|>")
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    assert os.listdir(tmp_path) == ["tokenizer.json"]
    for again in BPETokenizer.load(path), Tokenizer.load(path), copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer)):
        assert type(again) is BPETokenizer and again == tokenizer and hash(again) == hash(tokenizer)
        assert again.tokens == tokenizer.tokens and again.merges == tokenizer.merges and again.special_tokens == tokenizer.special_tokens
        assert again.encode(corpus()[:1000]).tolist() == tokenizer.encode(corpus()[:1000]).tolist()
    assert repr(tokenizer) == "BPETokenizer(vocab_size=601, pattern='gpt2')"
    with pytest.raises(ValueError, match="CharTokenizer.from_dict"):
        CharTokenizer.load(path)


def test_the_fingerprint_is_that_of_all_that_decides_about_ids():
    base = trained(300)
    others = [trained(299), base.with_special_tokens("<x>"), BPETokenizer.train(corpus(), 300, pattern="llama3"),
              BPETokenizer(base.tokens, base.merged_pairs(), base.special_tokens, ignore_merges=True),
              BPETokenizer(base.tokens, base.merged_pairs()[::-1], base.special_tokens)]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 6
    # Checkpoints hold it, so it must never change.
    assert BPETokenizer.train("abab", 261).fingerprint == "424b090ef63085a086a6be4af6c288c17999134455970e959d652eec9c372806"


GOOD = BPETokenizer.train("abab abab", 262).to_dict()


@pytest.mark.parametrize("change, message", [
    (dict(type="char"), "expected .*bpe"), (dict(pattern="gpt3"), "pattern must be one of"), (dict(pattern=None), "pattern"),
    (dict(tokens=GOOD["tokens"][:-1]), "is none"), (dict(tokens=[*GOOD["tokens"], "a"]), "stand once"), (dict(tokens={}), "tokens"),
    (dict(tokens=[*GOOD["tokens"], ""]), "none is empty"), (dict(tokens=[*GOOD["tokens"], 5]), "token 5"),
    (dict(tokens=[*GOOD["tokens"], "a b"]), "no byte-level BPE"), (dict(tokens=[*GOOD["tokens"], "日"]), "no byte-level BPE"),
    (dict(merges=["a b", "a b"]), "once"), (dict(merges=["a  b"]), "two tokens"), (dict(merges=["ab"]), "two tokens"),
    (dict(merges=["a c"]), "is none"), (dict(merges=[["a"]]), "two tokens"), (dict(merges=[["a", 5]]), "token 5"),
    (dict(merges=[None]), "two tokens"), (dict(special_tokens={"<pad>": 5}), "<pad>"), (dict(special_tokens=[]), "dict"),
    (dict(special_tokens={"<pad>": 10**30}), "<pad>"),
    (dict(special_tokens={"<pad>": True}), "<pad>"), (dict(special_tokens={"<pad>": -262}), "<pad>"),
    (dict(ignore_merges=0), "ignore_merges"), (dict(added_tokens={"\ud800": 0}), "surrogate"),
    (dict(tokens=[t for t in GOOD["tokens"] if t != "!"], special_tokens={}), "0x21"),
])
def test_files_with_something_wrong_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        BPETokenizer.from_dict(GOOD | change)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer file: "):
        Tokenizer.load(path)


def test_a_vocabulary_without_some_bytes_must_have_an_unknown_token():
    tokens, special = [b"<unk>", *(bytes([b]) for b in range(128))], {"<unk>": 0}
    tokenizer = BPETokenizer(tokens, [], special)
    assert tokenizer.encode("aé").tolist() == [98, 0, 0] and tokenizer.encode("a", errors="strict").tolist() == [98]
    with pytest.raises(ValueError, match="'é' has bytes that are no tokens"):
        tokenizer.encode("a é".replace(" ", "\n"), errors="strict")
    with pytest.raises(ValueError, match="the byte 0x80 is no token"):
        BPETokenizer(tokens[1:], [], {})


def test_a_file_may_let_two_pairs_make_one_token():
    """The lowest rank goes first wherever it comes up, as one place at a time would have it."""
    tokens = [*(bytes([b]) for b in range(256)), b"ab", b"bc", b"abc", b"abcd"]
    merges = [(b"a", b"b"), (b"abc", b"d"), (b"b", b"c"), (b"ab", b"c"), (b"a", b"bc")]
    tokenizer = BPETokenizer(tokens, merges, {})
    assert tokenizer.pad_id is tokenizer.unk_id is None
    for text in "abcdabcd", "abcabcd", "bcabcdbcd":
        assert pieces(tokenizer, text) == slow_encode(tokenizer, text)


# --- the package `tokenizers` ---------------------------------------------------------------------------------------------------

def theirs(text, vocab_size, min_frequency=2):
    hf = pytest.importorskip("tokenizers")
    level = hf.pre_tokenizers.ByteLevel
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = level(add_prefix_space=False), hf.decoders.ByteLevel()
    tokenizer.train_from_iterator([text], hf.trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=level.alphabet(),
        show_progress=False))
    return tokenizer


def same_as_theirs(text, vocab_size, min_frequency=2):
    ours, other = BPETokenizer.train(text, vocab_size, min_frequency), theirs(text, vocab_size, min_frequency)
    written = ours.to_dict()
    merges = json.loads(other.to_str())["model"]["merges"]
    assert written["merges"] == [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    assert {token: i for i, token in enumerate(written["tokens"])} == other.get_vocab()
    return ours, other


def test_merges_and_ids_are_those_of_the_package_tokenizers():
    ours, other = same_as_theirs(load_text(), 4096)
    assert len(ours.merges) == 3836
    for text in (load_text()[-50_000:], *(text for text in ODD if "<" not in text)):        # there, "<pad>" in a text is the special token
        assert ours.encode(text).tolist() == other.encode(text).ids and other.decode(ours.encode(text).tolist()) == text


@given(repeats, st.integers(260, 300), st.integers(1, 3))
def test_merges_of_odd_texts_are_those_of_the_package_tokenizers(text, vocab_size, min_frequency):
    ours, other = same_as_theirs(text, vocab_size, min_frequency)
    assert ours.encode(text).tolist() == other.encode(text).ids


def test_patterns_are_those_of_the_package_tokenizers():
    """On each character that this Python's Unicode knows; a newer one may be a letter to one of the packages and none to the other."""
    import unicodedata
    hf = pytest.importorskip("tokenizers")
    splits = {"gpt2": hf.pre_tokenizers.ByteLevel(add_prefix_space=False),
              "llama3": hf.pre_tokenizers.Split(hf.Regex(PATTERNS["llama3"]), "isolated")}
    large = "CJK UNIFIED", "HANGUL SYLLABLE", "TANGUT", "EGYPTIAN", "YI SYLLABLE", "CUNEIFORM", "ANATOLIAN", "BAMUM", "CJK COMP"
    codes = [c for c in range(0x30000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")
             and (c % 50 == 0 or not unicodedata.name(chr(c), "").startswith(large))]
    for block in range(0, len(codes), 64):
        text = "".join(f"a{c} {c}1{c}'s\n{c}'LL " for c in map(chr, codes[block:block + 64]))
        for name, split in splits.items():
            assert words(name, text) == [text[begin:end] for _, (begin, end) in split.pre_tokenize_str(text)]
