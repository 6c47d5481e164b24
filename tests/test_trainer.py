"""Training runs: what they write, that one seed gives one run, and that an interruption changes nothing."""
import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import runs

import tinygrad_tf
from tinygrad_tf.data import BatchSampler, CorpusError, evaluation_batches
from tinygrad_tf.nn import functional as F
from tinygrad_tf.training import CheckpointError, TrainConfig, Trainer, evaluate, perplexity
from tinygrad_tf.training import folder as folder_module
from tinygrad_tf.training.checkpoint import load_checkpoint
from tinygrad_tf.training.folder import locked


def everything(trainer):
    """All that a run has computed: the tensors of its checkpoint, the rest of it, and metrics.csv."""
    tensors, state = load_checkpoint(trainer.folder / "checkpoint.safetensors")
    return tensors, state, (trainer.folder / "metrics.csv").read_bytes()


def assert_same_run(one, other):
    (tensors, state, csv), (tensors2, state2, csv2) = everything(one), everything(other)
    assert tensors.keys() == tensors2.keys()
    for name, array in tensors.items():
        assert array.dtype == tensors2[name].dtype and array.tobytes() == tensors2[name].tobytes(), name
    assert state == state2
    assert csv == csv2


def weights(trainer):
    return {name: p.detach().cpu().numpy().copy() for name, p in trainer.model.named_parameters()}


def test_the_loss_falls_and_the_files_are_written(tmp_path):
    trainer = runs.trainer(tmp_path, steps=60, lr=0.02, eval_every=30)
    seen = []
    assert trainer.run(report=lambda **numbers: seen.append(numbers)) is True
    assert [numbers["step"] for numbers in seen] == list(range(1, 61))
    assert [numbers["step"] for numbers in seen if numbers["validation_loss"] is not None] == [30, 60]
    assert all(numbers["tokens_per_second"] > 0 for numbers in seen)
    assert seen[-1]["validation_loss"] < trainer.baselines()[1] < seen[0]["loss"]
    assert sorted(os.listdir(trainer.folder)) == ["best.safetensors", "checkpoint-000030.safetensors", "checkpoint.safetensors",
                                                  "config.toml", "metrics.csv"]


def test_the_rate_does_not_count_evaluations(tmp_path, monkeypatch):
    from tinygrad_tf.training import trainer as module
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    trainer = runs.trainer(tmp_path, steps=4, eval_every=2)
    step, evaluation, rates = trainer.train_step, trainer.evaluate, []

    def takes(seconds, function):
        def timed():
            clock[0] += seconds
            return function()
        return timed
    trainer.train_step, trainer.evaluate = takes(0.5, step), takes(100.0, evaluation)
    trainer.run(report=lambda tokens_per_second, **_: rates.append(tokens_per_second))
    assert rates == [4 * 8 / 0.5] * 4


def test_one_seed_is_one_run(tmp_path):
    first, second, third = (runs.trainer(tmp_path, out=str(i), dropout=0.2, seed=seed) for i, seed in enumerate([7, 7, 8]))
    for trainer in first, second, third:
        trainer.run()
    assert_same_run(first, second)
    assert any((weights(first)[name] != w).any() for name, w in weights(third).items())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("stops", [[1], [3], [4], [7], [11], [2, 5], [4, 8], [1, 2, 3]], ids=str)
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, stops, norm):
    whole = runs.trainer(tmp_path, out="whole", dropout=0.3, norm=norm)
    whole.run()
    trainer = runs.trainer(tmp_path, dropout=0.3, norm=norm)
    for stop in stops:
        assert trainer.run(should_stop=runs.stop_at(stop, trainer)) is False
        assert trainer.step == stop
        tinygrad_tf.manual_seed(99)             # what happens between the two must not matter
        trainer = Trainer.resume(trainer.folder)
        assert trainer.step == stop
    assert trainer.run() is True
    assert_same_run(whole, trainer)


def test_a_stop_at_the_last_step_is_no_interruption(tmp_path):
    trainer = runs.trainer(tmp_path, steps=3)
    assert trainer.run(should_stop=runs.stop_at(3, trainer)) is True


def test_resuming_a_complete_run_changes_nothing(tmp_path):
    trainer = runs.trainer(tmp_path)
    trainer.run()
    before = everything(trainer)[2], weights(trainer)
    (trainer.folder / "metrics.csv").unlink()           # an output: the checkpoint holds the numbers
    again = Trainer.resume(trainer.folder)
    assert again.run() is True
    assert everything(again)[2] == before[0]
    assert all((before[1][name] == w).all() for name, w in weights(again).items())


def test_a_run_that_has_made_no_step_can_be_resumed(tmp_path):
    whole, trainer = runs.trainer(tmp_path, out="whole"), runs.trainer(tmp_path)
    whole.run()
    trainer.folder.mkdir()
    trainer.save()
    resumed = Trainer.resume(trainer.folder)
    resumed.run()
    assert_same_run(whole, resumed)


def test_steps_that_were_made_by_hand_can_be_resumed(tmp_path):
    whole, trainer = runs.trainer(tmp_path, out="whole"), runs.trainer(tmp_path)
    whole.run()
    trainer.folder.mkdir()
    for save_at in 2, 5:
        while trainer.step < save_at:
            trainer.train_step()
        trainer.save()
        trainer = Trainer.resume(trainer.folder)
        assert trainer.step == save_at and trainer.metrics.rows == []
    trainer.run()
    assert all((weights(whole)[name] == w).all() for name, w in weights(trainer).items())
    assert Trainer.resume(trainer.folder).metrics.column("train_loss")[0].tolist() == list(range(6, 13))


def test_what_was_computed_after_the_checkpoint_is_computed_again(tmp_path):
    whole, trainer = runs.trainer(tmp_path, out="whole"), runs.trainer(tmp_path)
    whole.run()

    def crash(step, **_):
        if step == 7:
            raise OSError("the machine is switched off")
    with pytest.raises(OSError):
        trainer.run(report=crash)
    trainer.metrics.write()                             # rows 5 to 7 are in the file, but not in the checkpoint
    resumed = Trainer.resume(trainer.folder)
    assert resumed.step == 4
    resumed.run()
    assert_same_run(whole, resumed)


def test_evaluating_and_stopping_change_no_random_number(tmp_path):
    often, seldom = (runs.trainer(tmp_path, out=str(n), dropout=0.2, eval_every=n) for n in (1, 12))
    often.run(), seldom.run()
    for name, w in weights(often).items():
        assert (w == weights(seldom)[name]).all(), name


def test_the_run_folder_can_be_resumed_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs.write_text(tmp_path)
    trainer = Trainer(TrainConfig(**{**runs.TINY, "steps": 3}), "text.txt", tmp_path / "run")
    trainer.run(should_stop=lambda: True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Trainer.resume(tmp_path / "run").run() is True


def test_another_text_is_refused(tmp_path):
    trainer = runs.trainer(tmp_path, steps=2)
    trainer.run()
    text = tmp_path / "text.txt"
    text.write_text(text.read_text().replace("cat", "act", 1))          # same characters, same length
    with pytest.raises(CheckpointError, match="another text"):
        Trainer.resume(trainer.folder)
    text.unlink()
    with pytest.raises(CorpusError, match="does not exist"):
        Trainer.resume(trainer.folder)
    moved = tmp_path / "moved.txt"
    runs.write_text(tmp_path).rename(moved)
    assert Trainer.resume(trainer.folder, [str(moved)]).step == 2


@pytest.mark.parametrize("text, context, what", [("abcdefgh", 8, "training text"), ("abcdefghij", 3, "held-out text")])
def test_a_text_that_is_too_short_is_refused_before_training(tmp_path, text, context, what):
    (tmp_path / "short.txt").write_text(text)
    with pytest.raises(CorpusError, match=what):
        Trainer(TrainConfig(**{**runs.TINY, "context": context}), str(tmp_path / "short.txt"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("bad", ["loss", "gradient norm"])
def test_nan_stops_before_it_reaches_the_weights(tmp_path, monkeypatch, bad):
    from tinygrad_tf.training import trainer as module
    trainer = runs.trainer(tmp_path)
    trainer.run(should_stop=runs.stop_at(5, trainer))
    before = weights(trainer)
    if bad == "loss":
        trainer.model.forward = lambda **_: (None, (trainer.model.lm_head.weight * float("nan")).sum())
    else:
        monkeypatch.setattr(module, "clip_grad_norm_", lambda *_: tinygrad_tf.tensor(float("inf")))
    with pytest.raises(FloatingPointError, match=f"the {bad} became (nan|inf) after 5 steps"):
        trainer.run()
    assert all((before[name] == w).all() for name, w in weights(trainer).items())
    assert Trainer.resume(trainer.folder).step == 5


def test_a_validation_loss_that_is_not_finite_is_not_saved(tmp_path, monkeypatch):
    from tinygrad_tf.training import trainer as module
    trainer = runs.trainer(tmp_path)
    monkeypatch.setattr(module, "evaluate", lambda *_: float("nan"))
    with pytest.raises(FloatingPointError, match="validation loss became nan after 4 steps"):
        trainer.run()
    assert Trainer.resume(trainer.folder).step == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, bad):
    """A stop right after the step that broke them must not replace a checkpoint that is whole."""
    trainer = runs.trainer(tmp_path)

    def break_and_stop():
        trainer.model.final_norm.weight.detach()[3] = bad
        return trainer.step == 2
    with pytest.raises(FloatingPointError, match="the weights became (nan|inf) after 2 steps"):
        trainer.train_step(), trainer.run(should_stop=break_and_stop)
    assert Trainer.resume(trainer.folder).step == 1


def test_a_learning_rate_that_blows_up_ends_in_one_error(tmp_path, recwarn):
    with pytest.raises(FloatingPointError, match="smaller --lr"):
        runs.trainer(tmp_path, lr=1e30, clip=1e30, steps=30).run()
    assert not recwarn.list


# --- one process for one folder ---------------------------------------------------------------------------------------------

posix = pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX systems only")


@posix
def test_a_folder_in_which_somebody_trains_is_refused(tmp_path):
    """To a run and to a resumption, which change nothing; afterwards it is free, however the training ended."""
    trainer, other = runs.trainer(tmp_path), runs.trainer(tmp_path, seed=1)
    refused = []

    def report(step, **_):
        before = everything(trainer)
        for use in other.run, lambda: Trainer.resume(trainer.folder):
            with pytest.raises(BlockingIOError, match="another process trains in this folder"):
                use()
        assert str(before) == str(everything(trainer))
        refused.append(step)
        if step == 9:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.run(report=report)
    assert refused == list(range(1, 10))
    assert Trainer.resume(trainer.folder).run() is True
    assert not [name for name in os.listdir(trainer.folder) if name.startswith(".")]


@posix
def test_other_folders_are_free(tmp_path):
    one, other = runs.trainer(tmp_path, out="one", steps=2), runs.trainer(tmp_path, out="one/other", steps=2)
    assert one.run(report=lambda **_: other.run()) is True
    assert other.step == 2


@posix
def test_a_killed_process_leaves_no_lock(tmp_path):
    script = "import sys, time; from tinygrad_tf.training.folder import locked\nwith locked(sys.argv[1]): print(flush=True), time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=runs.environment(), stdout=subprocess.PIPE)
    process.stdout.readline()
    with pytest.raises(BlockingIOError), locked(tmp_path):
        pass
    process.kill()
    process.communicate()
    with locked(tmp_path):
        assert os.listdir(tmp_path) == []


@posix
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP])
def test_without_locks_training_goes_on(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(folder_module.fcntl, "flock", flock)
    assert runs.trainer(tmp_path, out="one", steps=1).run() is True
    monkeypatch.setattr(folder_module, "fcntl", None)
    assert runs.trainer(tmp_path, out="two", steps=1).run() is True


# --- evaluation ---------------------------------------------------------------------------------------------------------

def test_the_validation_loss_is_the_mean_over_all_tokens(tmp_path):
    """Against one prediction at a time: windows side by side, the last one shorter."""
    trainer = runs.trainer(tmp_path, dropout=0.5)
    ids, model = trainer.validation_ids[:53], trainer.model.eval()
    losses = []
    for inputs, targets in evaluation_batches(ids, 8, 1):
        logits, _ = model(tinygrad_tf.tensor(inputs))
        losses += F.cross_entropy(logits[0], tinygrad_tf.tensor(targets[0]), reduction="none").tolist()
    assert len(losses) == 52
    for batch_size in 1, 4, 64:
        assert evaluate(model.train(), ids, 8, batch_size) == pytest.approx(np.mean(losses), rel=1e-6)


def test_evaluation_leaves_every_mode_as_it_was(tmp_path):
    trainer = runs.trainer(tmp_path)
    trainer.model.train()
    trainer.model.blocks[0].attention.eval()
    before = [module.training for module in trainer.model.modules()]
    trainer.evaluate()
    assert [module.training for module in trainer.model.modules()] == before
    assert len(set(before)) == 2
    with pytest.raises(CorpusError):
        evaluate(trainer.model, trainer.validation_ids[:1], 8)
    assert [module.training for module in trainer.model.modules()] == before
    assert tinygrad_tf.is_grad_enabled()


def test_perplexity():
    assert perplexity(0.0) == 1.0
    assert perplexity(np.log(50)) == pytest.approx(50)
    assert perplexity(1e6) == float("inf")


# --- the configuration --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("field, value", [
    ("context", 0), ("dim", -4), ("layers", 0), ("heads", 0), ("heads", 3), ("batch_size", 0), ("steps", 0), ("steps", -1),
    ("eval_every", 0), ("lr", 0.0), ("lr", float("nan")), ("lr", float("inf")), ("lr", -1e-3), ("clip", 0.0), ("clip", float("nan")),
    ("warmup", -1), ("weight_decay", -0.1), ("weight_decay", float("nan")), ("weight_decay", float("inf")), ("dropout", 1.0),
    ("dropout", -0.1), ("dropout", float("nan")), ("norm", "middle"), ("steps", 1.5), ("steps", "9"), ("steps", True), ("lr", "1e-3"),
    ("lr", 10**400), ("clip", 10**400), ("weight_decay", 10**400),
])
def test_the_configuration_refuses(field, value):
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: value})


def test_the_configuration_survives_json():
    config = TrainConfig(lr=1 / 3, dropout=0.1)
    assert TrainConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="other fields.*'depth'"):
        TrainConfig.from_dict({**config.to_dict(), "depth": 3})


def test_the_batches_do_not_depend_on_the_model(tmp_path):
    trainer = runs.trainer(tmp_path)
    sampler = BatchSampler(trainer.train_ids, 8, 4, seed=0)
    wide = runs.trainer(tmp_path, dim=32)
    assert all((wide.sampler.next()[0] == sampler.next()[0]).all() for _ in range(3))
