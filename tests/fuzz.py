"""Files with random damage: bytes flipped, cut out, doubled, put elsewhere; numbers and names of JSON or TOML replaced.

    python tests/fuzz.py 5000           that many, in equal parts of every kind of file; by tests/test_fuzz.py fifty of each
"""
import json
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import gguf_files
import numpy as np
import runs
from safetensors import safe_open
from safetensors.numpy import save_file

from tinygrad_tf.data import (
    BPETokenizer,
    CorpusError,
    TokenFile,
    TokenFileError,
    Tokenizer,
    WordPieceTokenizer,
    load_huggingface,
    load_text,
)
from tinygrad_tf.data.gguf_tokenizer import tokenizer_from_gguf
from tinygrad_tf.pretrained import WeightsError, open_weights
from tinygrad_tf.training import CheckpointError, TrainConfig, Trainer, load_checkpoint, load_model, save_checkpoint
from tinygrad_tf.training.config_file import read_config, write_config
from tinygrad_tf.training.monitor import Monitor, read_metrics
from tinygrad_tf.training.parts import read_tokenizer

SECONDS = 20                    # that reading one file may take before it counts as hanging; it takes milliseconds
ODD = [b"-1", b"0", b"1e999", b"NaN", b"null", b"true", b"9" * 40, b'""', b'"\\ud800"', b"[]", b"{}", b"[" * 3000, b"2147483648", b"1.5",
       b"18446744073709551616", b"\x00", b"\xff\xfe", b'"x"']
TOKEN = re.compile(rb'"[^"]{0,40}"|-?\d+(\.\d+)?|[\[\]{},:=]')


# --- damage -----------------------------------------------------------------------------------------------------------------

def flip(draw, data):
    for _ in range(draw.choice([1, 1, 2, 8])):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def cut(draw, data):
    del data[draw.randrange(len(data) + 1):]


def leave_out(draw, data):
    start = draw.randrange(len(data) + 1)
    del data[start:start + draw.choice([1, 3, 40, 1000])]


def put_in(draw, data):
    start = draw.randrange(len(data) + 1)
    data[start:start] = draw.choice([*ODD, draw.randbytes(draw.randrange(1, 60))])


def double(draw, data):
    start = draw.randrange(len(data) + 1)
    piece = data[start:start + draw.choice([1, 20, 500])]
    data[start:start] = piece * draw.choice([1, 2, 30])


def swap(draw, data):
    if len(data) > 100:
        a, b = draw.randrange(len(data) - 50), draw.randrange(len(data) - 50)
        data[a:a + 16], data[b:b + 16] = data[b:b + 16], data[a:a + 16]


def replace_word(draw, data):
    """A string, a number or a bracket of the first 100 kB becomes something else; a file without any stays."""
    found = list(TOKEN.finditer(bytes(data[:100_000])))
    if found:
        start, end = draw.choice(found).span()
        data[start:end] = draw.choice(ODD)


def change_letter(draw, data):
    """Of a name or a number: a text in JSON or TOML often stays one."""
    places = [i for i, byte in enumerate(data[:100_000]) if chr(byte).isalnum() and byte < 128]
    for _ in range(draw.choice([1, 1, 3])):
        if places:
            data[draw.choice(places)] = draw.choice(b"abcXYZ0123456789")


DAMAGES = [flip, cut, leave_out, put_in, double, swap, replace_word, replace_word, change_letter, change_letter]
VALUES = [None, True, -1, 0, 1, 2**31, 2**64, 10**40, 1.5, 1e308, "", "x", "\ud800", [], ["x"], {}, {"x": 1}, [[]] * 3]


def damaged(data, draw):
    """Half of what is JSON stays JSON, with one value of it replaced, left out, or exchanged with another."""
    try:
        if draw.random() < 0.5:
            return json.dumps(changed(json.loads(data), draw)).encode()
    except ValueError:
        pass
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        draw.choice(DAMAGES)(draw, data)
    return bytes(data)


def changed(tree, draw):
    """A copy of nested dicts and lists in which one value, at any depth, is another."""
    if not isinstance(tree, (dict, list)) or not tree or draw.random() < 0.05:
        return draw.choice(VALUES)
    copy, key = tree.copy(), draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    how = draw.random()
    if how < 0.1:
        del copy[key]
    elif how < 0.2:
        copy[key] = tree[draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))]
    else:
        copy[key] = changed(tree[key], draw)
    return copy


# --- kinds of files: (how they are made, how they are read, what may be raised) ------------------------------------------------

def write_checkpoint(path):
    trainer = runs.trainer(path.parent, steps=2, out=path.parent.name + "-run")
    trainer.run(should_stop=lambda: True)
    path.write_bytes((trainer.folder / "checkpoint.safetensors").read_bytes())


def resume(path):
    """In a folder with this one file, as a run and as a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path.replace(path.with_name("checkpoint.safetensors"))
        load_model(path.parent)
        Trainer.resume(path.parent).train_step()


def read_signed(path):
    """A record that somebody wrote who knows how to sign it: only what it says is damaged."""
    folder = path.parent
    tensors, state = load_checkpoint(folder / "whole")
    try:
        state = json.loads(path.read_bytes())
        assert isinstance(state, dict)
        save_checkpoint(folder / "signed", tensors, {name: value for name, value in state.items() if name != "format"})
    except (ValueError, RecursionError, AssertionError):
        raise CheckpointError("this is no record") from None
    resume(folder / "signed")


def write_record(path):
    write_checkpoint(path.with_name("whole"))
    with safe_open(path.with_name("whole"), framework="numpy") as file:
        path.write_text(file.metadata()["tinygrad_tf"])


def use(tokenizer):
    ids = tokenizer.encode("Unbelievable, isn't it?\n\n  3.14 é 🙂")
    tokenizer.decode(ids)


def write_bpe(path):
    BPETokenizer.train(load_text()[:20_000], 400).save(path)


def write_wordpiece(path):
    special = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
    tokens = [*special, *"abcdefghij", *(f"##{c}" for c in "abcdefghij"), "un", "##able"]
    WordPieceTokenizer(tokens, {name: i for i, name in enumerate(special)}).save(path)


def write_huggingface(path):
    tokenizer = BPETokenizer.train(load_text()[:5000], 300)
    content = tokenizer.to_dict()
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [
            {"id": i, "content": name, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
            for name, i in content["special_tokens"].items()],
        "normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None, "decoder": {"type": "ByteLevel"}, "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(content["tokens"])}, "merges": content["merges"]}}))


def read_configuration(path):
    TrainConfig(**{k: v for k, v in read_config(path, ["text", *TrainConfig().to_dict()]).items() if k != "text"})


def read_text(path):
    text = load_text(path)
    for tokenizer in BPETokenizer.train(text[:2000], 270), BPETokenizer.train(text[:2000], 260, pattern="gpt2"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def write_tokens(path):
    tokenizer = BPETokenizer.train("a text that is long enough " * 20, 270)
    TokenFile.write(path, [tokenizer.encode("a text that is long enough " * 50)], tokenizer)


def write_metrics(path):
    trainer = runs.trainer(path.parent, steps=3, out=path.parent.name + "-run")
    trainer.callbacks.append(Monitor())
    trainer.run()
    path.write_bytes((trainer.folder / "metrics.jsonl").read_bytes())


def write_gguf(path):
    content = BPETokenizer.train(load_text()[:5000], 300).to_dict()
    entries = {"model": "gpt2", "pre": "smollm", "tokens": content["tokens"], "merges": content["merges"],
               "token_type": [3] * 4 + [1] * 296, "eos_token_id": 2, "add_bos_token": False}
    path.write_bytes(gguf_files.gguf({f"tokenizer.ggml.{key}": value for key, value in entries.items()}, {"x": ("F32", np.ones(4))}))


def write_gguf_of_weights(path):
    x = np.arange(-128, 128, dtype=np.float32).reshape(4, 64)
    path.write_bytes(gguf_files.gguf({"general.architecture": "llama", "general.alignment": 32, "a.list": ["x", "y"], "a.size": 3},
                                     {kind: (kind, x[:i]) for i, kind in enumerate(("F32", "Q8_0", "Q4_1", "BF16"), 1)}))


def write_safetensors(path):
    tensors = {"a.weight": np.ones((3, 4), np.float32), "a.bias": np.ones(3, np.float16), "ids": np.arange(5)}
    save_file(tensors, path, metadata={"format": "pt"})


def read_weights(path):
    with warnings.catch_warnings(), open_weights(path) as weights:
        warnings.simplefilter("ignore")                                 # of numbers that are none
        for name in weights:
            assert weights[name].shape == weights.shape(name)


def read_gguf_tokenizer(path):
    with open_weights(path) as weights:
        use(tokenizer_from_gguf(weights.metadata))


KINDS = {
    "checkpoint": (write_checkpoint, resume, (CheckpointError, CorpusError)),
    "signed checkpoint": (write_record, read_signed, (CheckpointError, CorpusError)),
    "tokenizer": (write_bpe, lambda path: use(Tokenizer.load(path)), (ValueError,)),
    "WordPiece": (write_wordpiece, lambda path: use(Tokenizer.load(path)), (ValueError,)),
    "tokenizer.json": (write_huggingface, lambda path: use(load_huggingface(path)), (ValueError,)),
    "tokenizer of a run": (write_huggingface, lambda path: use(read_tokenizer(path)), (CorpusError,)),
    "configuration": (lambda path: write_config(path, {"text": ["a"], **TrainConfig().to_dict()}), read_configuration, (ValueError,)),
    "text": (lambda path: path.write_text(load_text()[:4000]), read_text, (CorpusError,)),
    "tokens": (write_tokens, TokenFile, (TokenFileError,)),
    "GGUF": (write_gguf_of_weights, read_weights, (WeightsError,)),
    "tokenizer of a GGUF": (write_gguf, read_gguf_tokenizer, (ValueError,)),
    "safetensors weights": (write_safetensors, read_weights, (WeightsError,)),
    "metrics": (write_metrics, lambda path: read_metrics(path.replace(path.with_suffix(".jsonl"))), (ValueError,)),
}


# --- reading them -------------------------------------------------------------------------------------------------------------

@contextmanager
def in_time():
    """RuntimeError where a file takes too long; only in the main thread of a POSIX system, else there is no limit."""
    def late(*_):
        raise TimeoutError(f"reading took more than {SECONDS} s")
    try:
        before = signal.signal(signal.SIGALRM, late)
    except (ValueError, AttributeError):
        yield
        return
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def survive(kind, folder, mutations, seed=0):
    """(how many were read, how many refused). AssertionError where one of them ends otherwise, with its number."""
    write, read, documented = KINDS[kind]
    whole = folder / "file"
    write(whole)
    content, draw, refused = whole.read_bytes(), random.Random(f"{kind} {seed}"), 0
    for number in range(mutations):
        whole.write_bytes(damaged(content, draw))
        try:
            with in_time():
                read(whole)
        except documented as error:
            refused += 1
            if "\n" in str(error):
                raise AssertionError(f"{kind} {number}: more than one line: {error}") from error
        except BaseException as error:
            raise AssertionError(f"{kind} {number}: {type(error).__name__}: {error}") from error
    return mutations - refused, refused


def peak_bytes():
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(mutations):
    before, started = peak_bytes(), time.perf_counter()
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            read, refused = survive(kind, Path(folder), -(-mutations // len(KINDS)))
        print(f"{kind:20s} {read + refused:6,} files: {read:5,} were read, {refused:5,} refused", flush=True)
    print(f"{time.perf_counter() - started:.0f} s; memory grew by {(peak_bytes() - before) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
