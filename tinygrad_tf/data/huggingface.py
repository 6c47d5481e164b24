"""Tokenizers from the files that published models come with: tokenizer.json, and GPT-2's vocab.json with merges.txt.

What decides about ids is read, and a feature of those files that is not here raises, named in one sentence. What does not decide
about the ids of a text is left out: post-processing (`encode` adds no special tokens), truncation and padding.
"""
import json
import reprlib
from pathlib import Path

from .bpe import BPETokenizer, pair_from, tokens_from
from .pretokenizers import PATTERNS
from .tokenizers import ROLES, require_entries
from .wordpiece import WordPieceTokenizer, require_texts


def load_huggingface(path):
    """path: a tokenizer.json, or a folder with one, or with vocab.json and merges.txt -> BPETokenizer, WordPieceTokenizer

    Raises FileNotFoundError, or ValueError naming the file: what it says, or what it takes, is not supported.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.exists():
            return load_gpt2(path.with_name("vocab.json"), path.with_name("merges.txt"))
    return read(path, lambda text: from_tokenizer_json(json.loads(text)))


def load_gpt2(vocab_path, merges_path, special_tokens=("<|endoftext|>",)):
    """GPT-2's two files: {token: id} as JSON, and a merge a line -> BPETokenizer; special_tokens: names of the vocabulary."""
    merges = read(merges_path, merges_from)
    return read(vocab_path, lambda text: from_gpt2(json.loads(text), merges, special_tokens), f"{vocab_path} with {merges_path}")


def read(path, parse, name=None):
    """What `parse` makes of a file's text; `name` for errors, the path where there is none."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name or path} is no tokenizer that is supported here: {error}") from error


def merges_from(text):
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return [pair_from(line) for line in lines if line and not line.startswith("#version")]


def from_gpt2(vocab, merges, special_tokens):
    require_entries("vocab.json", {"vocab": vocab}, {"vocab": dict})
    special_tokens = [special_tokens] if isinstance(special_tokens, str) else special_tokens
    names = {name: vocab[name] for name in special_tokens if name in vocab}
    return BPETokenizer(tokens_from(by_id(vocab), names), merges, names)


# --- tokenizer.json ---------------------------------------------------------------------------------------------------------

def from_tokenizer_json(content):
    """content: what json.loads gives"""
    require_entries("tokenizer.json", content, {"model": dict, "added_tokens": list})
    named = {True: {}, False: {}}
    for token in content["added_tokens"]:
        require_entries("an added token", token, {"id": int, "content": str, "special": bool})
        require_options("an added token", token, single_word=(False,), lstrip=(False,), rstrip=(False,))
        named[token["special"]][token["content"]] = token["id"]
    kind = one_of("model", content["model"], "BPE", "WordPiece")
    return (bpe if kind == "BPE" else word_piece)(content, content["model"], named[True], named[False])


def bpe(content, model, special, added):
    require_entries("the model BPE", model, {"vocab": dict, "merges": list})
    require_options("the model BPE", model, dropout=(None, 0), continuing_subword_prefix=(None, ""), end_of_word_suffix=(None, ""),
                    fuse_unk=(None, False), byte_fallback=(None, False), ignore_merges=(None, False, True))
    one_of("normalizer", content.get("normalizer"), None)
    one_of("decoder", content.get("decoder"), "ByteLevel", None)
    names = {**special, **added}
    tokenizer = BPETokenizer(tokens_from(by_id({**model["vocab"], **names}), names), list(map(pair_from, model["merges"])), special, added,
                             pattern_of(content.get("pre_tokenizer")), bool(model.get("ignore_merges")),
                             skip_unknown=model.get("unk_token") is None)
    if tokenizer.unknown_bytes and not tokenizer.skip_unknown:
        require_unknown(tokenizer, model)
    return tokenizer


def pattern_of(section):
    """The name of the pattern by which words are found."""
    kind, parts = one_of("pre_tokenizer", section, "ByteLevel", "Sequence"), [section]
    if kind == "Sequence":
        require_entries("the pre_tokenizer Sequence", section, {"pretokenizers": list})
        parts = section["pretokenizers"]
    *before, byte_level = parts or [None]
    one_of("pre_tokenizer", byte_level, "ByteLevel")
    name = name_of_pattern(before) if before else "gpt2"
    split = before and before[0]["type"] == "Split"             # and nothing is left to be found by GPT-2's pattern
    require_options("the pre_tokenizer ByteLevel", byte_level, add_prefix_space=(False,), use_regex=(False,) if split else (None, True))
    return name


def name_of_pattern(before):
    """before: what stands before ByteLevel, which must be one Split by a pattern that is known here, or SmolLM's Digits"""
    if len(before) > 1:
        raise ValueError(f"the pre_tokenizer Sequence of {len(before) + 1} parts is not supported: there is one Split or Digits, and "
                         f"ByteLevel")
    if one_of("pre_tokenizer", before[0], "Split", "Digits") == "Digits":
        require_options("the pre_tokenizer Digits", before[0], individual_digits=(True,))
        return "smollm"
    require_options("the pre_tokenizer Split", before[0], behavior=("Isolated",), invert=(None, False))
    for name, pattern in PATTERNS.items():
        if before[0].get("pattern") == {"Regex": pattern}:
            return name
    raise ValueError(f"the pre_tokenizer Split with pattern = {reprlib.repr(before[0].get('pattern'))} is not supported: it must be that "
                     f"of {', '.join(PATTERNS)}")


def word_piece(content, model, special, added):
    require_entries("the model WordPiece", model, {"vocab": dict, "unk_token": str, "continuing_subword_prefix": str,
                                                   "max_input_chars_per_word": int})
    if added:
        raise ValueError(f"the added token {next(iter(added))!r} is not supported: beside WordPiece only special tokens are")
    one_of("pre_tokenizer", content.get("pre_tokenizer"), "BertPreTokenizer")
    one_of("decoder", content.get("decoder"), "WordPiece", None)
    unknown = {name: i for name, i in model["vocab"].items() if name == model["unk_token"]}
    tokens = by_id({**model["vocab"], **special})
    tokenizer = WordPieceTokenizer(require_texts(tokens), {**special, **unknown}, model["continuing_subword_prefix"],
                                   model["max_input_chars_per_word"], **options_of(content.get("normalizer")))
    require_unknown(tokenizer, model)
    return tokenizer


def options_of(section):
    """What is done to a text before words are found."""
    if one_of("normalizer", section, "BertNormalizer", None) is None:
        return {"clean": False, "split_ideographs": False, "lowercase": False}
    require_entries("the normalizer BertNormalizer", section, {"clean_text": bool, "handle_chinese_chars": bool, "lowercase": bool})
    require_options("the normalizer BertNormalizer", section, strip_accents=(None, False, True))
    return {"clean": section["clean_text"], "split_ideographs": section["handle_chinese_chars"], "lowercase": section["lowercase"],
            "strip_accents": section.get("strip_accents")}


def require_unknown(tokenizer, model):
    if tokenizer.unk_id != tokenizer.special_tokens.get(model.get("unk_token"), -1):
        raise ValueError(f"the unknown token {reprlib.repr(model.get('unk_token'))} is not supported: it must be a special token, one of "
                         f"{', '.join(ROLES['unk'])}")


def by_id(vocab):
    """{token: id} -> the tokens in the order of their ids, which must be 0, 1, 2, …"""
    tokens = [None] * len(vocab)
    for token, i in vocab.items():
        if type(i) is not int or not 0 <= i < len(tokens) or tokens[i] is not None:
            raise ValueError(f"each id from 0 to {len(tokens) - 1} must stand once, but the token {token!r} has the id {reprlib.repr(i)}")
        tokens[i] = token
    return tokens


def one_of(name, section, *kinds):
    """The "type" of a section, None for one that is absent. Raises ValueError unless it is one of those that there are here."""
    kind = section.get("type") if isinstance(section, dict) else section
    if kind not in kinds:
        there = " or ".join("none" if known is None else known for known in kinds)
        raise ValueError(f"the {name} {'that is missing' if kind is None else reprlib.repr(kind)} is not supported: it must be {there}")
    return kind


def require_options(name, section, **options):
    """Raises ValueError for an option with another value than those that there are here."""
    for option, values in options.items():
        if section.get(option) not in values:
            raise ValueError(f"{name} with {option} = {reprlib.repr(section.get(option))} is not supported: it must be "
                             f"{' or '.join(map(repr, values))}")
