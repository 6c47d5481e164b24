"""Files of others: as the package `tokenizers` and GPT-2 write them, from a writer of the test's own, and from that package live."""
import copy
import json
import random

import pytest

from tinygrad_tf.data import (
    SPECIAL_TOKENS,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    WordPieceTokenizer,
    load_gpt2,
    load_huggingface,
    load_text,
)
from tinygrad_tf.data.pretokenizers import PATTERNS

TEXT = load_text()[:20_000] + " naïve café — 東京 🙂"
ODD = ["", " ", "\0", "🙂👩‍👧", "e\u0301", "日本語", "\r\n\t x", "<|endoftext|>", "it's 12345 I'LL", "a" * 300]
TRAINED = BPETokenizer.train(TEXT, 500)


# --- a writer of its own --------------------------------------------------------------------------------------------------------

def characters():
    """The character that stands for each byte: its own where Latin-1 prints it, else the next from 256 on."""
    table, following = {}, 256
    for b in range(256):
        prints = "!" <= chr(b) <= "~" or "¡" <= chr(b) <= "¬" or "®" <= chr(b) <= "ÿ"
        table[b], following = (chr(b), following) if prints else (chr(following), following + 1)
    return table


CHARACTERS = characters()


def written(token):
    return "".join(CHARACTERS[b] for b in token)


def vocabulary(tokenizer):
    return {written(token): i for i, token in enumerate(tokenizer.tokens) if i not in tokenizer.special_ids}


def added_token(i, content, **options):
    switches = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": i, "content": content, **switches, "special": True, **options}


def bpe_file(tokenizer, pairs_as_text=False, **model):
    """The content of a tokenizer.json"""
    pairs = [[written(left), written(right)] for left, right in tokenizer.merged_pairs()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level, "post_processor": level,
            "decoder": level, "added_tokens": [added_token(i, name) for name, i in tokenizer.special_tokens.items()],
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {**tokenizer.special_tokens, **vocabulary(tokenizer)},
                      "merges": [" ".join(pair) for pair in pairs] if pairs_as_text else pairs, **model}}


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "un", "##able", "!", "a", "##b", "café"]


def word_piece_file(**options):
    content = {
        "version": "1.0", "added_tokens": [added_token(i, name) for i, name in enumerate(WORDS[:5])],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True,
                       "strip_accents": None},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": {"type": "TemplateProcessing"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                  "vocab": {word: i for i, word in enumerate(WORDS)}}}
    return {**content, **options}


def saved(folder, content, name="tokenizer.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


# --- what is read -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pairs_as_text", [True, False])
def test_tokenizer_json_of_bpe(tmp_path, pairs_as_text):
    path = saved(tmp_path, bpe_file(TRAINED, pairs_as_text))
    for tokenizer in load_huggingface(path), load_huggingface(tmp_path), load_huggingface(str(tmp_path)):
        assert type(tokenizer) is BPETokenizer and tokenizer == TRAINED and tokenizer.eos_id == 2
        for text in (TEXT, *ODD):
            assert tokenizer.encode(text).tolist() == TRAINED.encode(text).tolist() and tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_are_those_of_the_file_and_special_tokens_are_where_it_has_them(tmp_path):
    tokens = [token for i, token in enumerate(TRAINED.tokens) if i > 3][::-1]
    other = BPETokenizer([*tokens, b"<|endoftext|>", b"<tool>"], TRAINED.merged_pairs(), {"<|endoftext|>": 496}, {"<tool>": 497})
    content = bpe_file(other)
    content["added_tokens"].append(added_token(497, "<tool>", special=False))
    del content["model"]["vocab"]["<|endoftext|>"]                              # what is added need not stand in the vocabulary
    del content["model"]["vocab"]["<tool>"]
    tokenizer = load_huggingface(saved(tmp_path, content))
    assert tokenizer == other and (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id) == (496, 496, None, None)
    assert tokenizer.encode("<tool><|endoftext|>").tolist()[0] == 497 and 496 not in tokenizer.encode("<tool><|endoftext|>")
    assert tokenizer.encode("<|endoftext|>", allowed_special="all").tolist() == [496]
    assert Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict()))) == tokenizer


def test_llama3s_words(tmp_path):
    content = bpe_file(BPETokenizer.train(TEXT, 400, pattern="llama3"), ignore_merges=True)
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": PATTERNS["llama3"]}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
    tokenizer = load_huggingface(saved(tmp_path, content))
    assert tokenizer.pattern == "llama3" and tokenizer.ignore_merges
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12345")][0] in ("1", "12", "123")


def test_a_word_that_is_a_token_is_not_merged_where_the_file_says_so(tmp_path):
    base = BPETokenizer.train("ab", 260)
    whole = BPETokenizer([*base.tokens, b"abc", b"bc"], [(b"b", b"c")], base.special_tokens)
    path = saved(tmp_path, bpe_file(whole, ignore_merges=True))
    tokenizer = load_huggingface(path)
    assert tokenizer.encode("abc").tolist() == [260] and len(whole.encode("abc")) == 2 and len(tokenizer.encode("xabc")) == 3
    assert "3 in bytes, 1 in tokens" in tokenizer.trace("abc") and "+" not in tokenizer.trace("abc")


@pytest.mark.parametrize("first_line", ["#version: 0.2\n", ""])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_gpt2s_two_files(tmp_path, first_line, line_end):
    tokens = [*(token for i, token in enumerate(TRAINED.tokens) if i > 3), b"<|endoftext|>"]
    expected = BPETokenizer(tokens, TRAINED.merged_pairs(), {"<|endoftext|>": 496})
    vocab = saved(tmp_path, {**vocabulary(expected), "<|endoftext|>": 496}, "vocab.json")
    lines = "\n".join(f"{written(left)} {written(right)}" for left, right in expected.merged_pairs())
    (tmp_path / "merges.txt").write_bytes((first_line + lines + "\n").replace("\n", line_end).encode())
    for tokenizer in load_gpt2(vocab, tmp_path / "merges.txt"), load_huggingface(tmp_path):
        assert tokenizer == expected and tokenizer.eos_id == 496
        assert tokenizer.encode(TEXT).tolist() == (TRAINED.encode(TEXT) - 4).tolist()
        assert tokenizer.decode(tokenizer.encode("<|endoftext|>")) == "<|endoftext|>"
    assert load_gpt2(vocab, tmp_path / "merges.txt", special_tokens="<|endoftext|>") == expected, "one name alone"


def test_tokenizer_json_of_word_piece(tmp_path):
    tokenizer = load_huggingface(saved(tmp_path, word_piece_file()))
    assert tokenizer == WordPieceTokenizer(WORDS, {name: i for i, name in enumerate(WORDS[:5])})
    assert [WORDS[i] for i in tokenizer.encode("The unable CATS! [CLS]")][:6] == ["the", "un", "##able", "cat", "##s", "!"]
    plain = load_huggingface(saved(tmp_path, word_piece_file(normalizer=None)))
    assert [WORDS[i] for i in plain.encode("The cats café")] == ["[UNK]", "cat", "##s", "café"]


# --- what is not ------------------------------------------------------------------------------------------------------------

def changed(content, path, value):
    """A copy, with one entry of it another."""
    content = copy.deepcopy(content)
    *way, last = path.split(".")
    inner = content
    for key in way:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[int(last) if isinstance(inner, list) else last] = value
    return content


BPE, PIECES = bpe_file(BPETokenizer.train("ab ab", 261)), word_piece_file()
SPLIT = {"type": "Split", "pattern": {"Regex": PATTERNS["gpt2"]}, "behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


@pytest.mark.parametrize("content, path, value, message", [
    (BPE, "model.type", "Unigram", "the model 'Unigram' is not supported: it must be BPE or WordPiece"),
    (BPE, "model.type", None, "the model that is missing"), (BPE, "model", [], "model"), (BPE, "added_tokens", None, "added_tokens"),
    (BPE, "normalizer", {"type": "NFKC"}, "the normalizer 'NFKC' is not supported: it must be none"),
    (BPE, "decoder", {"type": "ByteFallback"}, "the decoder 'ByteFallback'"),
    (BPE, "pre_tokenizer", {"type": "Metaspace"}, "the pre_tokenizer 'Metaspace' is not supported"),
    (BPE, "pre_tokenizer", None, "the pre_tokenizer that is missing"), (BPE, "pre_tokenizer", [1], "the pre_tokenizer"),
    (BPE, "pre_tokenizer.add_prefix_space", True, "add_prefix_space = True is not supported"),
    (BPE, "pre_tokenizer.use_regex", False, "use_regex = False is not supported"),
    (BPE, "pre_tokenizer", {"type": "Sequence", "pretokenizers": []}, "pre_tokenizer"),
    (BPE, "pre_tokenizer", {"type": "Sequence", "pretokenizers": [SPLIT, SPLIT, LEVEL]}, "Sequence of 3 parts"),
    (BPE, "pre_tokenizer", {"type": "Sequence", "pretokenizers": [{**SPLIT, "pattern": {"Regex": "(a+)+b"}}, LEVEL]}, "Split with pattern"),
    (BPE, "pre_tokenizer", {"type": "Sequence", "pretokenizers": [{**SPLIT, "behavior": "Removed"}, LEVEL]}, "behavior = 'Removed'"),
    (BPE, "pre_tokenizer", {"type": "Sequence", "pretokenizers": [SPLIT, {**LEVEL, "use_regex": True}]}, "use_regex = True"),
    (BPE, "pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, LEVEL]}, "individual_digits = None"),
    (BPE, "pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, LEVEL]}, "use_regex = F"),
    (BPE, "model.dropout", 0.1, "dropout = 0.1 is not supported"), (BPE, "model.byte_fallback", True, "byte_fallback"),
    (BPE, "model.end_of_word_suffix", "</w>", "end_of_word_suffix = '</w>'"), (BPE, "model.continuing_subword_prefix", "##", "prefix"),
    (BPE, "model.merges", [["a"]], "two tokens"), (BPE, "model.merges", ["a é"], "none"), (BPE, "model.merges", {}, "merges"),
    (BPE, "model.vocab", {"a": 0}, "each id"), (BPE, "model.vocab", [], "vocab"), (BPE, "model.vocab.a", 10**12, "'a' has the id"),
    (BPE, "model.vocab.a", 5, "each id from 0 to 260 must stand once"), (BPE, "model.vocab.▁a", 261, "'▁a' is not written in the 256"),
    (BPE, "added_tokens.0.lstrip", True, "lstrip = True is not supported"), (BPE, "added_tokens.0.id", "0", "id"),
    (BPE, "added_tokens.0.content", "<x>", "each id"), (BPE, "added_tokens.0", 7, "added token"),
    (BPE, "added_tokens.0.content", "", "each id"),
    (PIECES, "model.unk_token", "[WHAT]", r"unknown token '\[WHAT\]' is not supported"), (PIECES, "model.unk_token", None, "unk_token"),
    (PIECES, "pre_tokenizer", {"type": "Whitespace"}, "the pre_tokenizer 'Whitespace' is not supported: it must be BertPreTokenizer"),
    (PIECES, "normalizer", {"type": "Lowercase"}, "the normalizer 'Lowercase'"), (PIECES, "normalizer.lowercase", None, "lowercase"),
    (PIECES, "normalizer.strip_accents", "yes", "strip_accents = 'yes'"), (PIECES, "decoder", {"type": "ByteLevel"}, "decoder"),
    (PIECES, "added_tokens.4.special", False, r"the added token '\[MASK\]' is not supported"),
    (PIECES, "model.max_input_chars_per_word", -1, "max_chars"), (PIECES, "model.vocab.\ud800", 14, "surrogate"),
])
def test_what_is_not_supported_is_named_in_a_sentence(tmp_path, content, path, value, message):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(changed(content, path, value)))
    with pytest.raises(ValueError, match=message) as caught:
        load_huggingface(file)
    assert "tokenizer.json is no tokenizer that is supported here: " in str(caught.value) and len(str(caught.value)) < 600


def test_bytes_that_are_missing_are_the_unknown_token_of_the_file_or_left_out(tmp_path):
    small = BPETokenizer([b"<unk>", *(bytes([b]) for b in range(97, 123))], [], {"<unk>": 0})
    tokenizer = load_huggingface(saved(tmp_path, bpe_file(small, unk_token="<unk>")))
    assert tokenizer.encode("aéb").tolist() == [1, 0, 0, 2]
    without = load_huggingface(saved(tmp_path, bpe_file(small)))                        # without one, they get no id
    assert without.encode("aéb").tolist() == [1, 2]
    with pytest.raises(ValueError, match="pass errors=\"unk\" to leave them out"):
        without.encode("aéb", errors="strict")


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "null", "[]", "7", '"BPE"', "{}"])
def test_what_is_no_such_file_is_refused(tmp_path, content):
    path = saved(tmp_path, content)
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer that is supported here"):
        load_huggingface(path)
    vocab, merges = saved(tmp_path, content, "vocab.json"), saved(tmp_path, "a b\n", "merges.txt")
    with pytest.raises(ValueError, match="vocab.json with .*merges.txt is no tokenizer that is supported here"):
        load_gpt2(vocab, merges)


def test_files_that_are_not_there(tmp_path):
    for use in (lambda: load_huggingface(tmp_path), lambda: load_huggingface(tmp_path / "none.json"),
                lambda: load_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt"), lambda: Tokenizer.load(tmp_path / "none.json")):
        with pytest.raises(FileNotFoundError):
            use()


# --- 500 files with something wrong in them -------------------------------------------------------------------------------------

STRANGE = [None, True, -1, 0, 2**63, 10**30, 1e308, "", " ", "a", "\ud800", "<pad>", [], {}, [[]], {"type": "BPE"}, "é" * 50, float("nan")]


def places(value, way=()):
    """Every way from the root of a JSON value to an entry."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield (*way, key)
        yield from places(inner, (*way, key))


def with_another_entry(text, chance):
    content = json.loads(text)
    ways = list(places(content))
    *way, last = chance.choice(ways if chance.random() < 0.5 else [way for way in ways if len(way) < 3])
    inner = content
    for key in way:
        inner = inner[key]
    if chance.random() < 0.3:
        del inner[last]
    else:
        inner[last] = copy.deepcopy(chance.choice(STRANGE))
    return json.dumps(content).encode()


def with_other_bytes(content, chance):
    begin, length = chance.randrange(len(content)), chance.choice([0, 1, 1, 3, 40])
    put = chance.choice([b"", chance.randbytes(chance.choice([1, 4])), content[begin:begin + length] * 2, b"\xff", b"[" * 5000, b'"', b" "])
    return content[:begin] + put + content[begin + length:]


def mutated(content, name, chance):
    kind = chance.randrange(4)
    if kind == 0:
        return content[:chance.randrange(len(content))]
    if kind < 3 and name.endswith("json"):
        return with_another_entry(content, chance)
    return with_other_bytes(content, chance)


def originals():
    """name → (the file's bytes, how it is read)"""
    small = BPETokenizer.train(TEXT, 290).with_special_tokens("<|x|>")
    own = {"bpe": small, "wordpiece": WordPieceTokenizer(WORDS, {name: i for i, name in enumerate(WORDS[:5])}),
           "char": CharTokenizer.from_text("abc é"), "byte": ByteTokenizer()}
    gpt2 = {written(token): i for i, token in enumerate(token for i, token in enumerate(small.tokens) if i not in small.special_ids)}
    found = {f"{kind}.json": (json.dumps(tokenizer.to_dict()).encode(), Tokenizer.load) for kind, tokenizer in own.items()}
    return {**found,
            "hf-bpe.json": (json.dumps(bpe_file(small)).encode(), load_huggingface),
            "hf-wordpiece.json": (json.dumps(word_piece_file()).encode(), load_huggingface),
            "vocab.json": (json.dumps(gpt2).encode(), lambda path: load_gpt2(path, path.with_name("good-merges.txt"))),
            "merges.txt": ("\n".join(f"{written(a)} {written(b)}" for a, b in small.merged_pairs()).encode(),
                           lambda path: load_gpt2(path.with_name("good-vocab.json"), path)),
            "vocab.txt": ("\n".join(WORDS).encode(), WordPieceTokenizer.from_vocab_file)}


def fuzz(folder, n, seed):
    """How many of n files with something wrong are read, and how many refused; anything but a documented error comes through."""
    chance, files, outcomes = random.Random(seed), originals(), {"read": 0, "refused": 0}
    for name in "vocab.json", "merges.txt":
        (folder / f"good-{name}").write_bytes(files[name][0])
    for _ in range(n):
        name = chance.choice(sorted(files))
        content, load = files[name]
        (folder / name).write_bytes(mutated(content, name, chance))
        try:
            tokenizer = load(folder / name)
        except (ValueError, FileNotFoundError) as error:
            assert name in str(error)
            outcomes["refused"] += 1
        else:
            ids = tokenizer.encode("the unable café\n" + "a" * 200)
            assert isinstance(tokenizer.decode(ids), str) and Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict()))) == tokenizer
            outcomes["read"] += 1
    return outcomes


def test_fuzzed_files_are_read_or_refused(tmp_path):
    outcomes = fuzz(tmp_path, 500, seed=0)
    assert outcomes["read"] > 30 and outcomes["refused"] > 200


# --- the package `tokenizers` ---------------------------------------------------------------------------------------------------

def test_files_of_the_package_tokenizers_bpe(tmp_path):
    hf = pytest.importorskip("tokenizers")
    level = hf.pre_tokenizers.ByteLevel
    theirs = hf.Tokenizer(hf.models.BPE())
    theirs.pre_tokenizer, theirs.decoder = level(add_prefix_space=False), hf.decoders.ByteLevel()
    theirs.post_processor = hf.processors.ByteLevel(trim_offsets=False)
    theirs.train_from_iterator([TEXT], hf.trainers.BpeTrainer(vocab_size=700, special_tokens=["<|endoftext|>", *SPECIAL_TOKENS],
                                                              initial_alphabet=level.alphabet(), show_progress=False))
    theirs.add_special_tokens(["<|user|>"])
    theirs.add_tokens(["<tool>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_huggingface(tmp_path)
    assert ours.vocab_size == theirs.get_vocab_size() and ours.special_tokens["<|user|>"] == 700 and ours.added_tokens == {"<tool>": 701}
    for text in (TEXT, *ODD, "a<tool>b <tool>", "x<|user|><tool>"):
        ids = theirs.encode(text).ids
        assert ours.encode(text, allowed_special="all").tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)
    theirs.model.save(str(tmp_path), "gpt2")
    again = load_gpt2(tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt", special_tokens=["<|endoftext|>", *SPECIAL_TOKENS])
    assert again.encode(TEXT).tolist() == theirs.encode(TEXT).ids


def test_files_of_the_package_tokenizers_without_some_bytes(tmp_path):
    hf = pytest.importorskip("tokenizers")
    theirs = hf.Tokenizer(hf.models.BPE(unk_token="<unk>"))
    theirs.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.train_from_iterator(["the cat sat"], hf.trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"], show_progress=False))
    theirs.save(str(tmp_path / "tokenizer.json"))
    assert load_huggingface(tmp_path).encode("the caté 🙂").tolist() == theirs.encode("the caté 🙂").ids
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["unk_token"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    without = hf.Tokenizer.from_str(json.dumps(content))
    assert load_huggingface(tmp_path).encode("tzhe cazt 🙂").tolist() == without.encode("tzhe cazt 🙂").ids


def test_files_of_the_package_tokenizers_smollm(tmp_path):
    hf = pytest.importorskip("tokenizers")
    level = hf.pre_tokenizers.ByteLevel
    theirs = hf.Tokenizer(hf.models.BPE())
    theirs.pre_tokenizer = hf.pre_tokenizers.Sequence([hf.pre_tokenizers.Digits(individual_digits=True), level(add_prefix_space=False)])
    theirs.decoder = hf.decoders.ByteLevel()
    theirs.train_from_iterator([TEXT], hf.trainers.BpeTrainer(vocab_size=600, initial_alphabet=level.alphabet(), show_progress=False))
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_huggingface(tmp_path)
    assert ours.pattern == "smollm"
    for text in (TEXT, *ODD, "in  2024\n\n 12½ x²"):
        assert ours.encode(text).tolist() == theirs.encode(text).ids


def test_files_of_the_package_tokenizers_llama3(tmp_path):
    hf = pytest.importorskip("tokenizers")
    level = hf.pre_tokenizers.ByteLevel
    theirs = hf.Tokenizer(hf.models.BPE(ignore_merges=True))
    theirs.pre_tokenizer = hf.pre_tokenizers.Sequence([hf.pre_tokenizers.Split(hf.Regex(PATTERNS["llama3"]), "isolated"),
                                                       level(add_prefix_space=False, use_regex=False)])
    theirs.decoder = hf.decoders.ByteLevel()
    theirs.train_from_iterator([TEXT], hf.trainers.BpeTrainer(vocab_size=600, initial_alphabet=level.alphabet(), show_progress=False))
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_huggingface(tmp_path)
    assert ours.pattern == "llama3"
    for text in (TEXT, *ODD):
        assert ours.encode(text).tolist() == theirs.encode(text).ids


def test_files_of_the_package_tokenizers_word_piece(tmp_path):
    hf = pytest.importorskip("tokenizers")
    theirs = hf.BertWordPieceTokenizer()
    theirs.train_from_iterator([TEXT], vocab_size=500, show_progress=False)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_huggingface(tmp_path)
    assert type(ours) is WordPieceTokenizer and ours.encode(TEXT).tolist() == theirs.encode(TEXT, add_special_tokens=False).ids
