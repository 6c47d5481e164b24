"""The tokenizer in a GGUF file: the entries tokenizer.ggml.* of its metadata.

    model                                  "gpt2": byte-level BPE, the one that is read here
    pre                                    how words are found, by the name of a model that does it so
    tokens, merges                         in GPT-2's alphabet, as in vocab.json and merges.txt
    token_type                             of each token: 1 normal, 2 unknown, 3 control, 4 added by users, 5 unused, 6 byte
    bos_token_id, …, add_bos_token         who is who; whether the model wants its first token before a text
"""
from .bpe import BPETokenizer, pair_from, tokens_from
from .tokenizers import require_entries

# pre → (the pattern of pretokenizers.py, whether a word that is a token stays whole)
WORDS = {"gpt-2": ("gpt2", False), "llama-bpe": ("llama3", True), "qwen2": ("qwen2", False), "smollm": ("smollm", False)}
UNKNOWN, CONTROL, ADDED, UNUSED = 2, 3, 4, 5
ROLES = {"pad": "padding_token_id", "bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id"}


def tokenizer_from_gguf(metadata):
    """metadata: of open_weights(path).metadata -> BPETokenizer, with the ids of the file.

    Raises ValueError, one sentence, for a tokenizer that is not supported here and for one that is none.
    """
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    words, ignore_merges = how_words_are_found(said)
    require_entries("the tokenizer of a GGUF file", said, {"tokens": list, "merges": list})
    special, added, unused = by_type(said["tokens"], said.get("token_type", [1] * len(said["tokens"])))
    roles = {role: said[key] for role, key in ROLES.items() if key in said}
    tokens, merges = tokens_from(said["tokens"], {**special, **added, **unused}), list(map(pair_from, said["merges"]))
    return BPETokenizer(tokens, merges, special, added, words, ignore_merges, roles=roles, add_bos=said.get("add_bos_token") is True,
                        skip_unknown=True)


def how_words_are_found(said):
    model, pre = said.get("model"), said.get("pre")
    if model != "gpt2":
        raise ValueError(f"the tokenizer {model!a:.80} of a GGUF file is not supported: there is gpt2, which is byte-level BPE")
    if not isinstance(pre, str) or pre not in WORDS:
        raise ValueError(f"the pre-tokenizer {pre!a:.80} of a GGUF file is not supported: there are {', '.join(WORDS)}")
    return WORDS[pre]


def by_type(tokens, types):
    """{token: id} of the special ones, of those that are matched in every text, and of those that stand for nothing."""
    if not isinstance(types, list) or len(types) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise ValueError("the tokenizer of a GGUF file needs as many types as it has tokens, and its tokens must be texts")
    return tuple({token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind in kinds}
                 for kinds in ((UNKNOWN, CONTROL), (ADDED,), (UNUSED,)))
