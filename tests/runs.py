"""What the tests of training and of the command line share: a small text, a tiny model, and the program in a process."""
import errno
import os
import random
import subprocess
import sys
from pathlib import Path

from tinygrad_tf import serialization
from tinygrad_tf.training import TrainConfig, Trainer

PACKAGE = Path(__file__).resolve().parents[1]
TINY = {"context": 8, "dim": 16, "layers": 1, "heads": 2, "batch_size": 4, "warmup": 3}
TINY_FLAGS = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def write_text(folder, words=600):
    """A file of words in random order; the same every time."""
    draw = random.Random(1)
    path = Path(folder) / "text.txt"
    path.write_text(" ".join(draw.choice("the cat sat on a mat and saw it go by".split()) for _ in range(words)), encoding="utf-8")
    return path


def trainer(folder, **settings):
    """A trainer of a tiny model on the text of `folder`, whose run lies in folder/run unless `out` says otherwise, on `device`."""
    out, device = settings.pop("out", "run"), settings.pop("device", None)
    return Trainer(TrainConfig(**{**TINY, "steps": 12, "eval_every": 4, **settings}), [str(write_text(folder))], Path(folder) / out, device)


def stop_at(step, trainer):
    """For Trainer.run: True once that step was made."""
    return lambda: trainer.step >= step


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(PACKAGE), **variables}


def command(*arguments, cwd, timeout=60, **options):
    """`python -m tinygrad_tf …` in a process of its own; the result has returncode, stdout, stderr."""
    options.setdefault("env", environment())
    options.setdefault("stdin", subprocess.DEVNULL)
    if "stdout" not in options and "stderr" not in options:
        options["capture_output"] = True
    return subprocess.run([sys.executable, "-m", "tinygrad_tf", *map(str, arguments)], cwd=cwd, timeout=timeout, **options)


def fill_disk(monkeypatch, where):
    """From now on the step "open", "fsync" or "replace" of an atomic write meets a full disk."""
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")
    if where == "open":
        monkeypatch.setattr(serialization, "open", full, raising=False)
    else:
        monkeypatch.setattr(os, where, full)


def assert_one_sentence(result, *parts):
    """Exit status 2, and one line on standard error that says these things."""
    error = result.stderr.decode()
    assert result.returncode == 2, (result.returncode, error)
    assert error.startswith("tinygrad-tf: ") and error.count("\n") == 1, error
    for part in parts:
        assert part in error, (part, error)
