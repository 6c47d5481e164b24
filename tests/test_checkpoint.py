"""Checkpoints: nothing is lost when writing fails, nothing damaged is ever loaded, and one sentence says why."""
import errno
import json
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import runs
from safetensors.numpy import save_file

from tinygrad_tf.data import CorpusError
from tinygrad_tf.training import CheckpointError, Trainer, load_checkpoint, save_checkpoint
from tinygrad_tf.training import trainer as training
from tinygrad_tf.training.state import load_model

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX processes")
ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "step": np.array(3.0, np.float32), "state": np.arange(9, dtype=np.uint8),
          "table": np.array([[1.0, np.nan]]), "empty": np.zeros((0, 5), np.float64), "turned": np.arange(6).reshape(2, 3).T}
STATE = {"step": 7, "text": "é\n\ud800", "big": 2**127, "third": 1 / 3, "nothing": None}


def refused(path, *parts):
    """Loading raises CheckpointError with one line that says these things."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.fixture
def path(tmp_path):
    save_checkpoint(tmp_path / "c.safetensors", ARRAYS, STATE)
    return tmp_path / "c.safetensors"


def test_what_is_saved_is_loaded_to_the_last_bit(path):
    tensors, state = load_checkpoint(path)
    assert {name: state[name] for name in STATE} == STATE
    assert tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (tensors[name].dtype, tensors[name].shape) == (array.dtype, array.shape)
        assert tensors[name].tobytes() == array.tobytes(), name


def test_one_content_is_one_file(path, tmp_path):
    save_checkpoint(tmp_path / "again", ARRAYS, STATE)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


# --- writing ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("where", ["replace", "fsync", "open"])
def test_a_failure_while_writing_leaves_the_old_file(path, monkeypatch, where):
    old = path.read_bytes()
    runs.fill_disk(monkeypatch, where)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        save_checkpoint(path, {"w": np.zeros(5)}, {})
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_an_interruption_while_writing_leaves_the_old_file(path, monkeypatch):
    old = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, {"w": np.zeros(5)}, {})
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits on the size of files")
def test_a_file_size_limit_leaves_the_old_file(path):
    """As a full disk does: the write itself fails half way."""
    old = path.read_bytes()
    script = ("import resource, sys, numpy as np; from tinygrad_tf.training import save_checkpoint\n"
              "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
              "try: save_checkpoint(sys.argv[1], {'w': np.zeros(10_000)}, {})\n"
              "except OSError as error: sys.exit(error.strerror)")
    result = subprocess.run([sys.executable, "-c", script, str(path)], env=runs.environment(), capture_output=True, timeout=60)
    assert (result.returncode, result.stderr.decode().strip()) == (1, os.strerror(errno.EFBIG))
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def pid_of_a_dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@posix
def test_only_half_a_file_of_a_killed_process_is_cleared_away(tmp_path):
    """Our own names with the id of a process that is no more; every other file, folder and link is somebody's."""
    trainer, dead, folder, tag = runs.trainer(tmp_path, steps=2), pid_of_a_dead_process(), tmp_path / "run", "0123abcd"
    kept = [".notes.tmp", "notes.tmp", ".checkpoint.safetensors.tmp", f".other.txt.{dead}.{tag}.tmp",
            f"checkpoint.safetensors.{dead}.{tag}.tmp",
            f".checkpoint.safetensors.{dead}.{tag}.tmp.txt", f".checkpointXsafetensors.{dead}.{tag}.tmp", f".metrics.csv.{dead}.tmp",
            f".sample.txt.{os.getppid()}.{tag}.tmp", f".metrics.csv.{dead}.{tag}.unfinished", f".loss.png.x.{tag}.tmp",
            f".loss.png.-{dead}.{tag}.tmp", f".loss.png.{dead}.{tag[1:]}.tmp"]
    cleared = [f".{name}.{dead}.{tag}.tmp" for name in (
        "checkpoint.safetensors", "checkpoint-000200.safetensors", "best.safetensors", "metrics.csv", "metrics.jsonl", "speed.csv",
        "loss.png", "monitor.png", "config.toml")]
    cleared += [f".sample.txt.{2**70}.{tag}.tmp"]
    folder.mkdir()
    for name in kept + cleared:
        (folder / name).write_text("precious")
    for name in ".x.tmp", f".sample.txt.{dead}.{tag}.tmp":
        (folder / name).mkdir()
    trainer.run()
    assert sorted(os.listdir(folder)) == sorted([*kept, ".x.tmp", f".sample.txt.{dead}.{tag}.tmp", "checkpoint.safetensors",
                                                  "checkpoint-000000.safetensors", "best.safetensors", "config.toml", "metrics.csv"])
    assert all((folder / name).read_text() == "precious" for name in kept)


# --- reading what is damaged or foreign -----------------------------------------------------------------------------------

def test_missing(tmp_path):
    refused(tmp_path / "none", "no checkpoint at")
    refused(tmp_path, "no checkpoint at")


def test_every_truncation_is_refused(path):
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path)
    path.write_bytes(whole + b"\0")
    refused(path)


def test_every_flipped_bit_is_refused(path):
    """In the header and in the payload: the format, a name, a shape, a number of the state, one bit of one weight."""
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            tensors, state = load_checkpoint(path)
        except CheckpointError:
            continue
        assert whole[position:position + 1].isspace() or bytes(damaged[position:position + 1]).isspace()     # JSON between tokens
        assert {name: state[name] for name in STATE} == STATE
        assert all(tensors[name].tobytes() == array.tobytes() for name, array in ARRAYS.items())


def test_garbage_is_refused(path):
    for content in b"", b"\0" * 8, b"\0" * 200, b"\xff" * 200, b"hello " * 50, (2**40).to_bytes(8, "little") + b"{}":
        path.write_bytes(content)
        refused(path, "damaged")


def test_a_foreign_file_is_refused(path):
    for text in "null", "[1]", "{", "{}", "[" * 100_000, '{"format":' * 100_000, "1" * 5000:
        save_file({"w": np.zeros(3)}, path, metadata={"tinygrad_tf": text})
        refused(path, "no checkpoint of tinygrad_tf")
    for metadata in None, {"format": "pt"}:
        save_file({"w": np.zeros(3)}, path, metadata=metadata)
        refused(path, "no checkpoint of tinygrad_tf")


def test_another_format_is_refused(path):
    save_file({"w": np.zeros(3)}, path, metadata={"tinygrad_tf": json.dumps({"format": 3})})
    refused(path, "format 3", "reads formats 1 to 2")


def test_a_checkpoint_without_its_digest_is_refused(path):
    save_file({"w": np.zeros(3)}, path, metadata={"tinygrad_tf": json.dumps({"format": 1})})
    refused(path, "SHA-256")


# --- checkpoints that are whole, but not what a run needs -------------------------------------------------------------------

@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """(tensors, state) of a run that has made 1 of 2 steps; read only."""
    trainer = runs.trainer(tmp_path_factory.mktemp("half"), steps=2)
    trainer.run(should_stop=lambda: True)
    return load_checkpoint(trainer.folder / "checkpoint.safetensors")


@pytest.fixture
def resumed(contents, tmp_path, monkeypatch):
    """resumed(tensors=…, state=…): Trainer.resume of a checkpoint that holds these, or None where it is refused with one sentence."""
    def resume(tensors=contents[0], state=contents[1]):
        path = tmp_path / "checkpoint.safetensors"
        monkeypatch.setattr(training, "load_newest", lambda _: (dict(tensors), json.loads(json.dumps(state)), path))
        try:
            return Trainer.resume(tmp_path)
        except (CheckpointError, CorpusError) as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            return None
    assert resume().step == 1
    return resume


def leaves(tree, path=()):
    """(path, value) of every value of nested dicts and lists, they themselves included."""
    yield path, tree
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*path, key))


def replaced(tree, path, value):
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


HOSTILE = [None, "x", -1, 0, 1.5, float("nan"), float("inf"), 10**30, 10**400, True, [], ["x"], {}, {"x": 1}]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:9])
def test_no_value_of_the_record_can_be_replaced(resumed, contents, value):
    """Each one, by each of these: refused, or a setting of the run that is as good as the other, with which it goes on."""
    # Of the configuration: nothing that is stored at step 1 follows.
    free = {"clip", "seed", "dropout", "steps", "eval_every", "vocab_size", "accumulation", "patience", "keep", "threads"}
    for path, original in leaves(contents[1]):
        if not path or path == ("format",) or value == original:
            continue
        trainer = resumed(state=replaced(contents[1], path, value))
        if trainer is not None:
            assert path[0] == "config" and path[1] in free or path[:2] == ("sampler", "rng") or path[0] == "versions", (path, value)
            assert trainer.step == 1 and np.isfinite(trainer.train_step()).all()


TWISTS = {
    "gone": lambda a: None,
    "integers": lambda a: np.nan_to_num(a).astype(np.int64),
    "booleans": lambda a: a.astype(bool),
    "no elements": lambda a: a.reshape(-1)[:0],
    "one axis more": lambda a: a[None],
    "twice": lambda a: np.concatenate([a.reshape(-1)] * 2),
    "NaN": lambda a: np.full_like(a, np.nan) if a.dtype.kind == "f" else None,
    "infinite": lambda a: np.full_like(a, np.inf) if a.dtype.kind == "f" else None,
    "negative": lambda a: -1 - np.abs(a) if a.dtype.kind == "f" else None,
}


@pytest.mark.parametrize("twist", TWISTS.values(), ids=TWISTS)
def test_no_tensor_can_be_replaced(resumed, contents, twist):
    for name, array in contents[0].items():
        twisted = twist(array)
        rest = {other: a for other, a in contents[0].items() if other != name}
        trainer = resumed(tensors=rest if twisted is None else {**rest, name: twisted})
        if trainer is not None:                         # of either sign, and squares of huge gradients do overflow
            allowed = ("exp_avg_sq",) if twist is TWISTS["infinite"] else ("exp_avg", "weight", "bias")
            assert name.endswith(allowed) and twist in (TWISTS["infinite"], TWISTS["negative"]), name
            assert np.isfinite(trainer.train_step()).all()


def test_the_step_is_the_one_of_everything_else(resumed, contents):
    for step in 0, 2, 3, 10**9:
        assert resumed(state={**contents[1], "step": step}) is None


def test_the_alphabet_is_the_one_of_the_text(resumed, contents):
    """Another of the same size would give every id another meaning."""
    tokenizer = contents[1]["tokenizer"]
    other = "".join(sorted(set(tokenizer["characters"]) - {"a"} | {"q"}))
    assert len(other) == len(tokenizer["characters"])
    assert resumed(state={**contents[1], "tokenizer": {**tokenizer, "characters": other}}) is None


@pytest.mark.parametrize("sizes", [{"dim": 2**20}, {"context": 2**40}, {"layers": 10**7}, {"heads": 16}, {"dim": 32, "heads": 2}], ids=str)
@pytest.mark.parametrize("load", [Trainer.resume, load_model], ids=["resume", "load_model"])
def test_sizes_are_compared_before_memory_is_taken(run, sizes, load):
    rewrite(run, change_config(**sizes))
    tracemalloc.start()
    try:
        if "heads" in sizes and len(sizes) == 1:        # has no size of its own: 16 heads of 1 channel have the same weights
            load(run)
        else:
            with pytest.raises(CheckpointError, match="as the configuration says|the number of blocks"):
                load(run)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


@pytest.fixture
def run(tmp_path):
    trainer = runs.trainer(tmp_path, steps=2)
    trainer.run()
    return trainer.folder


def rewrite(folder, change):
    """The checkpoint with changed content, whole in itself."""
    tensors, state = load_checkpoint(folder / "checkpoint.safetensors")
    change(tensors, state)
    save_checkpoint(folder / "checkpoint.safetensors", tensors, state)


def twisted(tensors, beginning, twist):
    return {name: twist(a) for name, a in tensors.items() if name.startswith(beginning)}


def change_config(**values):
    return lambda tensors, state: state["config"].update(values)


CHANGES = {
    "no weight": lambda tensors, state: tensors.pop("model.blocks.0.norm1.weight"),
    "no embedding": lambda tensors, state: tensors.pop("model.embedding.token.weight"),
    "a weight too many": lambda tensors, state: tensors.update({"model.extra": np.zeros(3)}),
    "another shape": lambda tensors, state: tensors.update({"model.final_norm.weight": np.zeros(3, np.float32)}),
    "another model": change_config(layers=2),
    "a bad setting": change_config(heads=3),
    "an unknown setting": change_config(depth=3),
    "no setting": lambda tensors, state: state["config"].pop("dim"),
    "no configuration": lambda tensors, state: state.pop("config"),
    "a learning rate beyond all floats": change_config(lr=10**400),
    "weights that are integers": lambda tensors, state: tensors.update(twisted(tensors, "model.", TWISTS["integers"])),
    "weights that are NaN": lambda tensors, state: tensors.update(twisted(tensors, "model.embedding.token", TWISTS["NaN"])),
    "a weight that is infinite": lambda tensors, state: tensors["model.final_norm.bias"].__setitem__(3, np.inf),
    "sources that are a number": lambda tensors, state: state.update(sources=5),
    "sources that are numbers": lambda tensors, state: state.update(sources=[5]),
    "no sources at all": lambda tensors, state: state.update(sources=[]),
    "sources that are a text": lambda tensors, state: state.update(sources="text.txt"),
}
CHANGES_OF_THE_TOKENIZER = {
    "no tokenizer": lambda tensors, state: state.pop("tokenizer"),
    "a tokenizer of another kind": lambda tensors, state: state["tokenizer"].update(type="bpe"),
    "a tokenizer of another size": lambda tensors, state: state["tokenizer"].update(characters="abc"),
}
CHANGES_OF_THE_REST = {
    "no moment": lambda tensors, state: tensors.pop("optimizer.0.exp_avg"),
    "a moment of another shape": lambda tensors, state: tensors.update({"optimizer.0.exp_avg": np.zeros(3, np.float32)}),
    "no optimizer": lambda tensors, state: state.pop("optimizer"),
    "no groups": lambda tensors, state: state["optimizer"].pop("param_groups"),
    "no scheduler": lambda tensors, state: state.pop("scheduler"),
    "no sampler": lambda tensors, state: state.pop("sampler"),
    "a sampler of another text": lambda tensors, state: state["sampler"].update(tokens=3),
    "no random state": lambda tensors, state: tensors.pop("rng"),
    "half a random state": lambda tensors, state: tensors.update(rng=tensors["rng"][:100]),
    "no metrics": lambda tensors, state: tensors.pop("metrics"),
    "metrics of other columns": lambda tensors, state: tensors.update(metrics=np.zeros((2, 4))),
    "no step": lambda tensors, state: state.pop("step"),
    "no text": lambda tensors, state: state.pop("text"),
    "no sources": lambda tensors, state: state.pop("sources"),
}


@pytest.mark.parametrize("change", [*CHANGES.values(), *CHANGES_OF_THE_REST.values()], ids=[*CHANGES, *CHANGES_OF_THE_REST])
def test_a_run_that_lacks_something_is_not_resumed(run, change):
    rewrite(run, change)
    with pytest.raises(CheckpointError, match="does not fit this version") as caught:
        Trainer.resume(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [*CHANGES.values(), *CHANGES_OF_THE_TOKENIZER.values()], ids=[*CHANGES, *CHANGES_OF_THE_TOKENIZER])
def test_a_model_that_lacks_something_is_not_loaded(run, change):
    rewrite(run, change)
    with pytest.raises(CheckpointError, match="does not fit this version") as caught:
        load_model(run)
    assert "\n" not in str(caught.value)


def test_loading_a_model_needs_no_text(run):
    (run.parent / "text.txt").unlink()
    model, tokenizer, state = load_model(run)
    assert not model.training and model.max_seq_len == state["config"]["context"]
    assert tokenizer.vocab_size == model.vocab_size
    assert model.lm_head.weight is model.embedding.token.weight
