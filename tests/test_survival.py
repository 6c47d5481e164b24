"""A run that is killed, a file that is torn, a disk that is full: nothing is lost but the steps since the last save."""
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import runs

from tinygrad_tf import serialization
from tinygrad_tf.training import CheckpointError, CheckpointWarning, Trainer, load_checkpoint, load_model
from tinygrad_tf.training.checkpoint import BEST, CHECKPOINT, checkpoints_in, load_newest

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
FORMAT_1 = Path(__file__).parent / "data" / "format_1" / CHECKPOINT
SETTINGS = {"steps": 12, "eval_every": 2, "dropout": 0.2}
KILLED_AT_RANDOM = 30


def contents(folder):
    """All that a finished run has computed, as bytes."""
    return {name: (folder / name).read_bytes() for name in (CHECKPOINT, BEST, "metrics.csv")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a stop: (seconds, what it wrote)."""
    trainer = runs.trainer(tmp_path_factory.mktemp("whole"), **SETTINGS)
    started = time.perf_counter()
    trainer.run()
    return time.perf_counter() - started, contents(trainer.folder)


def finished(folder):
    """What the run in a folder has written when it was resumed until it is complete; no run is there: None."""
    try:
        trainer = Trainer.resume(folder / "run", [str(folder / "text.txt")])
    except CheckpointError as error:
        assert "there is no checkpoint" in str(error)
        return None
    assert trainer.run() is True
    return contents(folder / "run")


# --- killed -----------------------------------------------------------------------------------------------------------------

def in_a_child(work):
    """Runs work() in a process of its own, which ends without a trace of pytest. Returns its id."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)                                # whatever a fork beside other threads may come to, it ends
        try:
            work()
        finally:
            os._exit(0)
    return pid


def same_run(one, other, tmp_path):
    """But for the path of the text, which is another one in each test."""
    def known(content, name):
        path = tmp_path / f"compared-{name}"
        path.write_bytes(content)
        tensors, state = load_checkpoint(path)
        return {k: (a.dtype, a.tobytes()) for k, a in tensors.items()}, {k: v for k, v in state.items() if k != "sources"}
    return one["metrics.csv"] == other["metrics.csv"] and all(known(one[n], "a") == known(other[n], "b") for n in (CHECKPOINT, BEST))


@forks
@pytest.mark.host("a fork of a process that uses a GPU cannot use it")
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(tmp_path, whole):
    """The moments lie anywhere from before the first save to after the last one; twice in a row where the first came early."""
    seconds, expected = whole
    draw, began_anew = random.Random(0), 0
    for number in range(KILLED_AT_RANDOM):
        folder = tmp_path / str(number)
        folder.mkdir()
        trainer = runs.trainer(folder, **SETTINGS)
        for _ in range(1 + number % 2):
            pid = in_a_child(trainer.run)
            time.sleep(draw.uniform(0, 1.2 * seconds))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            try:
                trainer = Trainer.resume(folder / "run")
            except CheckpointError:
                break                                   # before the first save: nothing was made that could be lost
        result = finished(folder)
        began_anew += result is None
        if result is not None:
            assert same_run(result, expected, tmp_path), number
            assert not [name for name in os.listdir(folder / "run") if name.startswith(".")]
    assert began_anew < KILLED_AT_RANDOM / 2


CALLS = {"open": (serialization, "open"), "fsync": (os, "fsync"), "replace": (os, "replace"), "link": (os, "link"),
         "unlink": (os, "unlink")}


@forks
@pytest.mark.host("a fork of a process that uses a GPU cannot use it")
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_any_call_to_the_disk_it_ends_as_if_it_had_not_been(tmp_path, whole, when):
    """Right before and right after the n-th opening, flushing, renaming, linking and deleting of a run, for every third n."""
    def killing(n):
        left = [n]
        for owner, name in CALLS.values():
            original = getattr(owner, name, open)

            def call(*args, original=original, **kwargs):
                left[0] -= 1
                if left[0] == 0 and when == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    return original(*args, **kwargs)
                finally:
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            setattr(owner, name, call)
        trainer.run()

    for n in range(1, 200, 3):
        folder = tmp_path / str(n)
        folder.mkdir()
        trainer = runs.trainer(folder, **{**SETTINGS, "steps": 6})
        status = os.waitpid(in_a_child(lambda n=n: killing(n)), 0)[1]
        result = finished(folder)
        if n == 1:
            assert result is None
            continue
        if not os.WIFSIGNALED(status):
            break                                       # n is beyond the last call
        reference = results_of_six(tmp_path)
        assert result is None and n < 8 or same_run(result, reference, tmp_path), n
    assert 20 < n < 199


def results_of_six(tmp_path):
    folder = tmp_path / "reference"
    if not folder.exists():
        folder.mkdir()
        runs.trainer(folder, **{**SETTINGS, "steps": 6}).run()
    return contents(folder / "run")


# --- torn, changed ------------------------------------------------------------------------------------------------------------

@pytest.fixture
def half(tmp_path):
    """The folder of a run that has made 7 of 12 steps, with checkpoints of steps 7 and 6."""
    trainer = runs.trainer(tmp_path, **SETTINGS)
    assert trainer.run(should_stop=runs.stop_at(7, trainer)) is False
    assert [path.name for path in checkpoints_in(trainer.folder)] == [CHECKPOINT, "checkpoint-000006.safetensors"]
    return trainer.folder


def torn(path, share):
    data = path.read_bytes()
    path.write_bytes(data[:int(share * len(data))])


def flipped(path, share):
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("damage", [torn, flipped])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(half, whole, tmp_path, damage, share):
    damage(half / CHECKPOINT, share)
    with pytest.warns(CheckpointWarning, match="damaged.*the one before it is used instead: checkpoint-000006.safetensors, of step 6"):
        trainer = Trainer.resume(half)
    assert trainer.step == 6
    assert trainer.run() is True
    assert same_run(contents(half), whole[1], tmp_path)
    assert [path.name for path in checkpoints_in(half)] == [CHECKPOINT, "checkpoint-000010.safetensors"]


def test_a_model_is_loaded_from_the_one_before_too(half):
    torn(half / CHECKPOINT, 0.5)
    with pytest.warns(CheckpointWarning, match="of step 6"):
        assert load_model(half)[2]["step"] == 6
    (half / CHECKPOINT).unlink()                        # killed between two renames, on a disk without links
    assert load_model(half)[2]["step"] == 6


def test_where_all_are_damaged_the_newest_is_named(half):
    for path in checkpoints_in(half):
        torn(path, 0.5)
    with pytest.raises(CheckpointError, match=rf"{CHECKPOINT} is damaged"):
        load_newest(half)


def test_a_checkpoint_that_is_whole_and_does_not_fit_gives_way_to_nothing(half):
    """It is somebody's, and the one before it another run's: to go on with that would lose one of them."""
    from tinygrad_tf.training import save_checkpoint
    tensors, state = load_checkpoint(half / CHECKPOINT)
    save_checkpoint(half / CHECKPOINT, tensors, {**state, "sources": []})
    with pytest.raises(CheckpointError, match="does not fit"):
        Trainer.resume(half)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read_gives_way_to_nothing(half):
    """It may be whole: a run that goes on from an older one would write over it."""
    (half / CHECKPOINT).chmod(0)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        load_newest(half)


def test_a_file_that_cannot_be_opened_is_not_called_damaged(half, monkeypatch):
    opened = Path.open

    def refused(path, *args, **kwargs):
        if path.name == CHECKPOINT:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        Trainer.resume(half)


# --- somebody else's --------------------------------------------------------------------------------------------------------------

def test_a_run_that_has_gone_on_elsewhere_is_not_written_over(half):
    first, second = Trainer.resume(half), Trainer.resume(half)
    assert first.run() is True
    for use in second.save, second.run:
        with pytest.raises(CheckpointError, match="has gone on since it was resumed here"):
            use()
    assert Trainer.resume(half).step == 12
    assert first.run() is True                          # who wrote it may go on


def test_a_new_run_takes_no_folder_of_another(half, tmp_path):
    before = sorted(os.listdir(half)), (half / CHECKPOINT).read_bytes()
    other = runs.trainer(tmp_path, **SETTINGS)
    for use in other.save, other.run:
        with pytest.raises(CheckpointError, match="already holds a run"):
            use()
    (half / CHECKPOINT).rename(half / "aside")          # those before it are a run too
    with pytest.raises(CheckpointError, match="already holds a run"):
        other.run()
    (half / "aside").rename(half / CHECKPOINT)
    assert (sorted(os.listdir(half)), (half / CHECKPOINT).read_bytes()) == before


# --- interrupted, and run again in the same process -----------------------------------------------------------------------------------

@pytest.mark.parametrize("where", ["_backward_of", "_update", "evaluate"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_trainer_that_was_interrupted_can_be_run_again(tmp_path, whole, monkeypatch, where, error):
    """It makes the step again with the same batch, and no row is lost."""
    trainer = runs.trainer(tmp_path, **SETTINGS)
    original = getattr(trainer, where)

    def interrupted(*args):
        if trainer.step == 5 or where == "evaluate":
            monkeypatch.setattr(trainer, where, original)
            raise error
        return original(*args)
    monkeypatch.setattr(trainer, where, interrupted)
    with pytest.raises(error):
        trainer.run()
    assert trainer.run() is True
    assert trainer.metrics.column("train_loss")[0].tolist() == list(range(1, 13))
    ours = load_checkpoint(trainer.folder / CHECKPOINT)[0]
    (tmp_path / "other").write_bytes(whole[1][CHECKPOINT])
    theirs = load_checkpoint(tmp_path / "other")[0]
    assert all(ours[name].tobytes() == a.tobytes() for name, a in theirs.items() if name != "metrics")


# --- which are kept -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_last_ones_are_kept_and_the_best(tmp_path, keep):
    trainer = runs.trainer(tmp_path, **SETTINGS, keep=keep)
    trainer.run()
    steps = [load_checkpoint(path)[1]["step"] for path in checkpoints_in(trainer.folder)]
    assert steps == [12, 10, 8, 6, 4, 2, 0][:keep]
    at, losses = trainer.metrics.column("validation_loss")
    assert load_checkpoint(trainer.folder / BEST)[1]["step"] == at[np.argmin(losses)]


def test_the_best_is_not_the_newest(tmp_path):
    """A learning rate that ruins what was learned: best.safetensors is from before."""
    trainer = runs.trainer(tmp_path, steps=24, eval_every=4, lr=0.02, warmup=0, keep=1)
    trainer.run(should_stop=runs.stop_at(12, trainer))
    for group in trainer.optimizer.param_groups:
        group["initial_lr"] = group["lr"] = 0.0
    trainer.scheduler.base_lrs = [3.0] * len(trainer.optimizer.param_groups)
    trainer.run()
    best = load_checkpoint(trainer.folder / BEST)[1]["step"]
    assert best < 24 and trainer.evaluations_since_best() == (24 - best) // 4
    assert load_model(trainer.folder / BEST)[2]["step"] == best


def test_where_a_disk_knows_no_links_files_are_copied(tmp_path, whole, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "link", refuse)
    trainer = runs.trainer(tmp_path, **SETTINGS)
    trainer.run()
    assert same_run(contents(trainer.folder), whole[1], tmp_path)
    assert len(checkpoints_in(trainer.folder)) == 2


# --- a full disk ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("where", ["open", "fsync", "replace"])
@pytest.mark.parametrize("links", [True, False])
def test_a_full_disk_leaves_the_last_checkpoint(half, whole, tmp_path, monkeypatch, where, links):
    trainer, before = Trainer.resume(half), (half / CHECKPOINT).read_bytes()
    with monkeypatch.context() as patch:
        if not links:
            patch.delattr(os, "link")
            patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "")), raising=False)
        runs.fill_disk(patch, where)
        with pytest.raises(OSError, match="No space left"):
            trainer.run()
    assert (half / CHECKPOINT).read_bytes() == before
    assert not [name for name in os.listdir(half) if name.startswith(".")]
    assert Trainer.resume(half).run() is True
    assert same_run(contents(half), whole[1], tmp_path)


@pytest.mark.host("a process of its own")
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE") or sys.platform == "win32", reason="there is a limit for files on POSIX")
def test_a_file_that_may_not_grow_ends_the_run_in_one_sentence(tmp_path):
    """A limit that the first checkpoints stay below, and, with more and more rows of metrics in them, a later one does not."""
    runs.write_text(tmp_path)
    train = ["train", "--text", "text.txt", *runs.TINY_FLAGS, "--eval-every", "10", "--out", "run"]
    probe = runs.command(*train, "--steps", "10", "--out", "probe", cwd=tmp_path)
    assert probe.returncode == 0, probe.stderr
    limit = (tmp_path / "probe" / CHECKPOINT).stat().st_size + 2000
    script = (f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
              f"from tinygrad_tf.cli import main; sys.exit(main())")
    result = subprocess.run([sys.executable, "-c", script, *train, "--steps", "400"], cwd=tmp_path, env=runs.environment(), timeout=120,
                            capture_output=True)
    runs.assert_one_sentence(result, "File too large")
    resumed = Trainer.resume(tmp_path / "run")
    assert 10 <= resumed.step < 400
    assert resumed.run(should_stop=lambda: resumed.step % 10 == 5) is False         # without the limit it goes on


# --- older formats, other versions -----------------------------------------------------------------------------------------------

@pytest.mark.host("the file was written on the CPU, where dropout draws other numbers than on a device")
def test_a_run_of_format_1_goes_on(tmp_path):
    """Written by the version before; the metrics have had fewer columns. It ends with the weights of a run of today."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CHECKPOINT).write_bytes(FORMAT_1.read_bytes())
    whole = runs.trainer(tmp_path, out="whole", steps=6, dropout=0.2)
    whole.run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")                  # its versions are not known: nothing is said about them
        trainer = Trainer.resume(tmp_path / "run", str(tmp_path / "text.txt"))
    assert trainer.step == 3 and trainer.config == whole.config
    assert trainer.metrics.table()[:, 4:].tolist() == [[pytest.approx(np.nan, nan_ok=True)] * (len(trainer.fields) - 4)] * 3
    trainer.run()
    for (name, one), other in zip(whole.model.named_parameters(), trainer.model.parameters()):
        np.testing.assert_allclose(one.detach().cpu().numpy(), other.detach().cpu().numpy(), rtol=2e-4, atol=2e-5, err_msg=name)
    assert load_checkpoint(trainer.folder / CHECKPOINT)[1]["format"] == 2
    np.testing.assert_allclose(trainer.metrics.column("train_loss")[1], whole.metrics.column("train_loss")[1], rtol=1e-4)


def test_a_model_of_format_1_is_loaded():
    model, tokenizer, state = load_model(FORMAT_1)
    assert state["step"] == 3 and tokenizer.vocab_size == model.vocab_size


def test_other_versions_are_told_and_do_not_matter(half):
    from tinygrad_tf.training import save_checkpoint
    tensors, state = load_checkpoint(half / CHECKPOINT)
    save_checkpoint(half / CHECKPOINT, tensors, {**state, "versions": {**state["versions"], "numpy": "1.0", "unheard": "2"}})
    with pytest.warns(CheckpointWarning, match="saved with numpy 1.0, now"):
        assert Trainer.resume(half).step == 7
