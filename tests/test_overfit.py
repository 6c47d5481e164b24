"""One batch learnt by heart: PyTorch's losses, a verdict that knows a sound model from a broken one, and a model left as it was."""
import math

import pytest

import tinygrad_tf as torch
from tinygrad_tf.data import make_lm_batch, pad_sequences
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.training import Overfit, overfit_one_batch

PYTORCH = {0: 4.617, 10: 3.7330, 50: 1.1172, 100: 0.1074, 199: 0.0200}        # the guide's model, lr 3e-3, seed 0


def guide():
    torch.manual_seed(0)
    model = MiniGPT(vocab_size=100, max_seq_len=32, dim=24, num_heads=4, hidden_dim=96, num_layers=2, dropout=0.0)
    tokens = torch.randint(0, 100, (4, 9))
    return model, (tokens[:, :-1], tokens[:, 1:])


def small(make=MiniGPT, dropout=0.1):
    torch.manual_seed(0)
    return make(11, 8, 16, 2, 32, 1, **({"dropout": dropout} if make is MiniGPT else {}))


def batch():
    return pad_sequences([[1, 2, 3, 4, 5, 6], [7, 8, 9], [4, 3, 2, 1]], 0)


def test_the_losses_are_pytorchs():
    result = overfit_one_batch(*guide())
    assert len(result.losses) == 200 and result.learnt and result.verdict.startswith("learnt")
    for step, loss in PYTORCH.items():
        assert math.isclose(result.losses[step], loss, rel_tol=5e-3)
    assert str(result).startswith("loss 4.617 at step 0, 3.733 at step 10, 1.117 at step 50, 0.107 at step 100, 0.020 at step 199: learnt")


def test_the_loop_is_the_plain_one():
    model, (inputs, targets) = guide()
    losses = overfit_one_batch(model, (inputs, targets), steps=5).losses
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for expected in losses:
        optimizer.zero_grad()
        _, loss = model(inputs, targets)
        assert loss.item() == expected
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("make", [MiniGPT, Decoder])
@pytest.mark.parametrize("kind", ["LMBatch", "dict", "tuple"])
def test_models_and_kinds_of_batches(make, kind):
    whole = batch()
    given = {"LMBatch": whole, "dict": {name: whole[name] for name in whole.keys()}, "tuple": make_lm_batch([[1, 2, 3], [4, 5]], 0)}[kind]
    assert overfit_one_batch(small(make), given, steps=40, lr=3e-2).learnt


def test_the_model_stays_as_it_was_and_nothing_is_drawn():
    model = small().train()
    model.blocks[0].eval()
    before = [p.tolist() for p in model.parameters()], [m.training for m in model.modules()], torch.get_rng_state().tolist()
    with torch.no_grad():
        result = overfit_one_batch(model, batch(), steps=3)
    assert ([p.tolist() for p in model.parameters()], [m.training for m in model.modules()], torch.get_rng_state().tolist()) == before
    assert all(p.grad is None for p in [*model.parameters(), *result.model.parameters()])
    assert [m.training for m in result.model.modules()] == before[1]


def test_in_place_it_is_the_model_that_learns():
    model = small()
    result = overfit_one_batch(model, batch(), steps=3, inplace=True)
    assert result.model is model and model(**batch())[1].item() != result.losses[0]


def no_graph(model, batch):
    return model(**batch)[1].detach()


def raises(model, batch):
    model(**batch)[1].backward()
    raise RuntimeError("after backward")


@pytest.mark.parametrize("loss", [no_graph, raises])
def test_modes_are_as_before_after_an_error_too(loss):
    model = small().train()
    model.blocks[0].eval()
    before = [m.training for m in model.modules()]
    with pytest.raises((ValueError, RuntimeError), match="does not depend on any parameter|after backward"):
        overfit_one_batch(model, batch(), loss=loss, inplace=True)
    assert [m.training for m in model.modules()] == before and all(p.grad is None for p in model.parameters())


# --- verdicts -----------------------------------------------------------------------------------------------------------------

def run(model=None, steps=60, lr=1e-2, given=None, **options):
    return overfit_one_batch(model or small(), given or batch(), steps, lr, **options)


def frozen_blocks(model, batch):
    return model(**{**batch, "targets": None})[0].detach().mean() + model.lm_head.weight.sum() * 0


@pytest.mark.host("hundreds of steps, of which the stand-in for a device needs minutes")
@pytest.mark.parametrize("verdict, options", [
    ("learnt", {}),
    ("stuck", {"lr": 0.0}),
    ("stuck", {"lr": 1e-7}),
    ("stuck", {"loss": frozen_blocks}),
    ("diverged", {"lr": 30.0, "make_optimizer": torch.optim.SGD}),
    ("falling", {"steps": 25}),
    ("learnt", {"make_optimizer": lambda params, lr: torch.optim.Adam(params, lr=lr)}),
    ("learnt", {"training": True, "steps": 100}),
])
def test_verdicts(verdict, options):
    assert run(**options).verdict.partition(":")[0] == verdict


def test_a_constant_loss_below_0_is_stuck():
    result = run(steps=3, loss=lambda model, batch: model.lm_head.weight.sum() * 0 - 1)
    assert result.losses == [-1.0] * 3 and not result.learnt and result.verdict.startswith("stuck")


def test_two_answers_to_one_question_are_not_learnt():
    rows = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[3, 4], [5, 6]])
    result = run(given=rows, steps=100)
    assert not result.learnt and abs(result.losses[-1] - math.log(2)) < 0.01
    assert result.verdict.startswith("falling") and "different answers" in result.verdict


def test_it_ends_at_nan():
    result = run(lr=1e38, make_optimizer=torch.optim.SGD)
    assert len(result.losses) < 60 and not math.isfinite(result.losses[-1]) and result.verdict.startswith("diverged")


@pytest.mark.parametrize("losses, verdict", [
    ([4.0, 0.4], "learnt"), ([4.0, 2.0], "falling"), ([4.0, 2.1], "stuck"), ([4.0, 5.0], "diverged"), ([4.0, math.nan], "diverged"),
    ([4.0], "stuck"), ([math.inf], "diverged"), ([4.0, 4.4], "stuck"), ([0.0, 0.0], "stuck"), ([-1.0, -1.0], "stuck"),
    ([-1.0, -1.4], "stuck"), ([-1.0, -100.0], "falling"), ([-1.0, -0.8], "diverged")])
def test_limits_of_the_verdicts(losses, verdict):
    assert Overfit(losses, None).verdict.partition(":")[0] == verdict and f"at step {len(losses) - 1}" in str(Overfit(losses, None))


# --- errors -------------------------------------------------------------------------------------------------------------------

def test_errors_say_what_is_missing():
    model = small()
    with pytest.raises(ValueError, match="returns no loss.*loss=…"):
        overfit_one_batch(model, (batch().token_ids,))
    with pytest.raises(ValueError, match="does not depend on any parameter"):
        overfit_one_batch(model.requires_grad_(False), batch())
    with pytest.raises(TypeError, match="steps must be a whole number"):
        overfit_one_batch(small(), batch(), steps=2.5)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        overfit_one_batch(small(), batch(), steps=0)
