"""Training in half precision: what is float32 all the same, the step that is left out, and the scale that a run goes on with."""
import math
import os

import numpy as np
import pytest
import runs
from device import host

import tinygrad_tf as torch
from tinygrad_tf import cli
from tinygrad_tf.autograd import observing
from tinygrad_tf.training import CheckpointError, TrainConfig, Trainer, evaluate
from tinygrad_tf.training.checkpoint import load_checkpoint, save_checkpoint

LOWS = ["float16", *(["bfloat16"] if hasattr(torch, "bfloat16") else [])]
pytestmark = pytest.mark.filterwarnings("error")


def weights(trainer):
    return np.concatenate([host(t).reshape(-1) for t in trainer.model.state_dict().values()]).copy()


def moved(trainer):
    """All that a step changes, apart from the batch, the random numbers and the scale."""
    return trainer.step, weights(trainer).tobytes(), str(host(trainer.optimizer.state_dict())), trainer.scheduler.get_last_lr()


def overflow(trainer, times=1):
    """From now on the gradients of so many batches are infinite in one place."""
    left, (*_, p) = [times], trainer.model.parameters()

    def hook(g):
        left[0] -= 1
        return g * math.inf if left[0] >= 0 else None
    p.register_hook(hook)


def assert_same_run(one, other):
    (tensors, state), (tensors2, state2) = (load_checkpoint(t.folder / "checkpoint.safetensors") for t in (one, other))
    assert tensors.keys() == tensors2.keys() and state == state2
    assert all(a.dtype == tensors2[name].dtype and a.tobytes() == tensors2[name].tobytes() for name, a in tensors.items())
    assert (one.folder / "metrics.csv").read_bytes() == (other.folder / "metrics.csv").read_bytes()


@pytest.mark.parametrize("precision", LOWS)
def test_a_run_follows_that_of_float32(tmp_path, precision):
    low, full = (runs.trainer(tmp_path, out=p, precision=p, steps=40, lr=0.02, eval_every=40) for p in (precision, "float32"))
    assert low.run() and full.run()
    losses = [np.array(t.metrics.column("train_loss")[1]) for t in (low, full)]
    assert losses[1][-10:].mean() < 0.8 * losses[1][:3].mean()
    assert 0 < abs(losses[0] - losses[1])[-10:].mean() < 0.03 * losses[1][-10:].mean()
    assert all(p.dtype is torch.float32 for p in low.model.parameters())
    assert low.scaler.is_enabled() == (precision == "float16")
    tensors, state = load_checkpoint(low.folder / "checkpoint.safetensors")
    assert all(a.dtype == np.float32 for name, a in tensors.items() if name.startswith(("model.", "optimizer.")))
    assert state["config"]["precision"] == precision and state["scaler"] == low.scaler.state_dict()


def test_products_are_of_float16_and_the_loss_is_float32(tmp_path):
    trainer, seen = runs.trainer(tmp_path, precision="float16"), {}
    with observing(lambda node, args, out: seen.setdefault(node.name, set()).add(out.dtype)):
        trainer.train_step()
    assert seen["Linear"] == {torch.float16} and seen["CrossEntropy"] == seen["LayerNorm"] == {torch.float32}


@pytest.mark.parametrize("settings", [{}, {"experts": 3, "experts_per_token": 1, "balance": "bias"}], ids=str)
def test_an_overflow_leaves_out_that_batch_and_changes_nothing_else(tmp_path, settings):
    trainer = runs.trainer(tmp_path, precision="float16", dropout=0.2, **settings)
    for _ in range(3):
        trainer.train_step()
    before, place = moved(trainer), trainer.sampler.state_dict()
    overflow(trainer)
    seen, update = [], trainer._update

    def watched(loss, norm):
        made = update(loss, norm)
        seen.append((made, moved(trainer) == before, trainer.scaler.get_scale()))
        return made
    trainer._update = watched
    loss, norm = trainer.train_step()
    assert seen == [(False, True, 2.0 ** 15), (True, False, 2.0 ** 15)]
    assert math.isfinite(loss) and math.isfinite(norm)
    assert trainer.step == 4 and trainer.sampler.state_dict() != place
    assert trainer.scheduler.last_epoch == 4 and all(s["step"].item() == 4 for s in trainer.optimizer.state.values())


def test_a_scale_that_is_too_large_goes_down_by_itself(tmp_path):
    trainer = runs.trainer(tmp_path, precision="float16")
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0 ** 40})
    trainer.run()
    scale = trainer.scaler.get_scale()
    assert 2.0 ** 10 < scale < 2.0 ** 30 and trainer.step == 12
    assert trainer.metrics.column("train_loss")[0].tolist() == list(range(1, 13))       # a batch that is left out is no step


def test_what_is_left_out_without_end_is_an_error(tmp_path):
    trainer = runs.trainer(tmp_path, precision="float16")
    trainer.folder.mkdir()
    trainer.train_step(), trainer.save()
    before = moved(trainer)
    overflow(trainer, times=1000)
    with pytest.raises(FloatingPointError, match="32 batches in a row left the range of float16 after 1 steps.*3.05176e-05.*bfloat16"):
        trainer.run()
    assert moved(trainer) == before
    assert Trainer.resume(trainer.folder).step == 1


@pytest.mark.parametrize("precision", ["float32", *LOWS[1:]])
def test_without_a_scaler_what_is_not_finite_is_an_error_at_once(tmp_path, precision):
    trainer = runs.trainer(tmp_path, precision=precision)
    before = moved(trainer)
    overflow(trainer)
    with pytest.raises(FloatingPointError, match="the gradient norm became (nan|inf) after 0 steps"):
        trainer.train_step()
    assert moved(trainer) == before


@pytest.mark.parametrize("precision", LOWS)
@pytest.mark.parametrize("stops", [[1], [4], [5, 6], [7]], ids=str)
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, stops, precision):
    """With scales that go down at first, and up again every three steps."""
    def begun(out):
        trainer = runs.trainer(tmp_path, out=out, dropout=0.3, precision=precision)
        if trainer.scaler.is_enabled():
            trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0 ** 30})
        return trainer
    whole, trainer = begun("whole"), begun("run")
    whole.run()
    for stop in stops:
        assert trainer.run(should_stop=runs.stop_at(stop, trainer)) is False
        torch.manual_seed(99)
        scale = trainer.scaler.state_dict()
        trainer = Trainer.resume(trainer.folder)
        assert trainer.scaler.state_dict() == scale and trainer.step == stop
    assert trainer.run() is True
    assert_same_run(whole, trainer)


def test_evaluation_is_in_float32(tmp_path):
    trainer = runs.trainer(tmp_path, precision="float16", steps=4)
    trainer.run()
    assert trainer.evaluate() == evaluate(trainer.model, trainer.validation_ids, trainer.config.context)
    assert trainer.metrics.column("validation_loss")[1].tolist() == [trainer.evaluate()]


def test_float32_is_float32_also_within_autocast(tmp_path):
    one, other = runs.trainer(tmp_path, out="one", steps=3), runs.trainer(tmp_path, out="other", steps=3)
    losses = [one.train_step() for _ in range(3)]
    with torch.autocast(torch.get_default_device().type, torch.float16):
        assert [other.train_step() for _ in range(3)] == losses


# --- checkpoints of other versions, and damaged ones ------------------------------------------------------------------

def rewritten(trainer, change):
    """The checkpoint of a run after change(its state)."""
    path = trainer.folder / "checkpoint.safetensors"
    tensors, state = load_checkpoint(path)
    change(state)
    state.pop("format")
    save_checkpoint(path, tensors, state)
    return trainer.folder


def test_a_checkpoint_from_before_there_was_a_precision_is_of_float32(tmp_path):
    whole, trainer = runs.trainer(tmp_path, out="whole"), runs.trainer(tmp_path)
    whole.run(), trainer.run(should_stop=runs.stop_at(5, trainer))

    def older(state):
        del state["config"]["precision"], state["scaler"]
    resumed = Trainer.resume(rewritten(trainer, older))
    assert resumed.config.precision == "float32"
    resumed.run()
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("change", [
    {}, {"scale": 0.0}, {"scale": math.inf}, {"scale": "large"}, {"growth_interval": 5}, {"growth_factor": 4.0}, {"_growth_tracker": -1},
    {"_growth_tracker": 1.5}, {"more": 1}], ids=str)
def test_a_scaler_that_is_none_is_refused(tmp_path, change):
    trainer = runs.trainer(tmp_path, precision="float16", steps=2)
    trainer.run()
    with pytest.raises(CheckpointError, match="scale|growth"):
        Trainer.resume(rewritten(trainer, lambda state: state["scaler"].update(change) if change else state["scaler"].clear()))


def test_a_scaler_where_none_is_due_is_refused(tmp_path):
    trainer = runs.trainer(tmp_path, precision="float16", steps=2)
    trainer.run()
    with pytest.raises(CheckpointError, match="scaler"):
        Trainer.resume(rewritten(trainer, lambda state: state["config"].update(precision="float32")))


def test_fields_of_a_later_version_are_refused():
    with pytest.raises(ValueError, match="other fields.*posit"):
        TrainConfig.from_dict({**TrainConfig().to_dict(), "posit": 8})
    with pytest.raises(ValueError, match="precision must be one of 'float32', 'float16', 'bfloat16', got float8"):
        TrainConfig(precision="float8")


# --- the command line -------------------------------------------------------------------------------------------------

def arguments(folder, *more):
    return ["train", "--text", str(runs.write_text(folder)), "--out", str(folder / "run"), "--steps", "3", *runs.TINY_FLAGS, *more]


def test_the_flag(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, "--precision", "float16")) == 0
    assert "Precision: float16." in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "run" / "checkpoint.safetensors")[1]["config"]["precision"] == "float16"
    assert cli.main(["evaluate", "--run", str(tmp_path / "run")]) == 0


def test_what_is_no_precision_is_one_sentence(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, "--precision", "half")) == 2
    assert "precision must be one of" in capsys.readouterr().err


def test_bfloat16_without_its_package_is_one_sentence(tmp_path):
    (tmp_path / "ml_dtypes.py").write_text("raise ImportError")
    paths = os.pathsep.join([str(tmp_path), str(runs.PACKAGE)])
    result = runs.command(*arguments(tmp_path, "--precision", "bfloat16"), cwd=tmp_path, env=runs.environment(PYTHONPATH=paths))
    runs.assert_one_sentence(result, "bfloat16 needs the package ml_dtypes", "pip install")
    assert not (tmp_path / "run").exists()
