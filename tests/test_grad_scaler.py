"""GradScaler: the scale, the step that is left out, the order of the calls; and, beside PyTorch, the same numbers in the same order."""
import copy
import math

import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf import nn
from tinygrad_tf.amp import GradScaler

pytestmark = pytest.mark.filterwarnings("error")


def scaler(**options):
    return GradScaler(torch.get_default_device().type, **options)


def problem(optimizer=torch.optim.AdamW, **options):
    """(model, optimizer, loss function) of a small regression; the loss of infinite targets overflows."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(8, 3), torch.randn(8, 2)
    return model, optimizer(model.parameters(), lr=0.1, **options), lambda factor=1.0: F.mse_loss(model(x), y * factor)


def numbers(model):
    return np.concatenate([host(p).reshape(-1) for p in model.parameters()]).copy()


def iterate(scaler, optimizer, loss, clip=None):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)
    scaler.step(optimizer)
    scaler.update()


def state_of(optimizer):
    return host(optimizer.state_dict())


# --- what it does -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_power_of_two_changes_no_bit(clip):
    (model, optimizer, loss), (plain, plain_optimizer, plain_loss) = problem(), problem()
    found = scaler()
    for _ in range(5):
        iterate(found, optimizer, loss(), clip)
        iterate(scaler(enabled=False), plain_optimizer, plain_loss(), clip)
    np.testing.assert_array_equal(numbers(model), numbers(plain))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("explicitly", [False, True])
def test_an_overflow_leaves_out_that_step_alone_and_halves_the_scale(bad, explicitly):
    (model, optimizer, loss), (plain, plain_optimizer, plain_loss) = problem(), problem()
    found = scaler(growth_interval=100)
    for step in range(6):
        before, state = numbers(model), copy.deepcopy(state_of(optimizer))
        iterate(found, optimizer, loss(bad if step == 3 else 1.0), clip=1.0 if explicitly else None)
        if step == 3:
            np.testing.assert_array_equal(numbers(model), before)
            assert str(state_of(optimizer)) == str(state)
        else:
            iterate(scaler(enabled=False), plain_optimizer, plain_loss(), clip=1.0 if explicitly else None)
        assert found.get_scale() == (2 ** 16 if step < 3 else 2 ** 15)
    np.testing.assert_array_equal(numbers(model), numbers(plain))


def test_one_bad_number_among_many_parameters_is_enough():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(5)]
    for wrong in range(5):
        optimizer, found = torch.optim.SGD(parameters, lr=0.1), scaler(init_scale=4.0)
        found.scale(torch.ones(1))
        for i, p in enumerate(parameters):
            p.grad = torch.ones(3)
            p.grad[1] = math.inf if i == wrong else 1.0
        assert found.step(optimizer) is None
        found.update()
        assert found.get_scale() == 2.0 and all((host(p) == 1).all() for p in parameters)


def test_the_scale_grows_after_an_interval_without_overflow():
    _, optimizer, loss = problem(torch.optim.SGD)
    found, scales = scaler(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3), []
    for step in range(12):
        iterate(found, optimizer, loss(math.inf if step == 4 else 1.0))
        scales.append(found.get_scale())
    assert scales == [8, 8, 32, 32, 8, 8, 8, 32, 32, 32, 128, 128]


def test_the_scale_stays_within_float32():
    _, optimizer, loss = problem(torch.optim.SGD)
    top = scaler(init_scale=2.0 ** 127, growth_interval=1)
    top.scale(torch.ones(1))
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(2, 3)
    top.step(optimizer), top.update()
    assert top.get_scale() == 2.0 ** 127
    low = scaler(init_scale=2.0 ** -125)
    for _ in range(4):
        iterate(low, optimizer, loss(math.inf))
    assert low.get_scale() == 2.0 ** -126


def test_a_small_gradient_survives_float16_only_when_scaled():
    """2⁻²⁶ is below the smallest number of float16, 2⁻²⁴: to the weight it is 0, unless it goes back 2¹⁶ times as large."""
    gradients = []
    for found in scaler(enabled=False), scaler():
        w = nn.Parameter(torch.ones(1, 1))
        optimizer = torch.optim.SGD([w], lr=1.0)
        with torch.autocast(torch.get_default_device().type, torch.float16):
            y = F.linear(torch.ones(1, 1), w)
        found.scale((y.float() * 2.0 ** -26).sum()).backward()
        found.unscale_(optimizer)
        gradients.append(w.grad.item())
    assert gradients == [0.0, 2.0 ** -26]


def test_gradients_are_unscaled_before_they_are_clipped():
    model, optimizer, loss = problem(torch.optim.SGD)
    found = scaler()
    found.scale(loss()).backward()
    scaled = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    found.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert scaled == pytest.approx(norm * 2 ** 16) and norm < 100
    before = numbers(model)
    found.step(optimizer)                       # does not divide again
    assert np.linalg.norm(numbers(model) - before) == pytest.approx(0.1 * min(norm, 1.0), rel=1e-4)


def test_accumulated_gradients_are_unscaled_once():
    (model, optimizer, loss), (plain, plain_optimizer, plain_loss) = problem(), problem()
    found = scaler()
    for factor in 1.0, 2.0, 3.0:
        found.scale(loss(factor)).backward()
        plain_loss(factor).backward()
    found.step(optimizer), plain_optimizer.step()
    np.testing.assert_array_equal(numbers(model), numbers(plain))


def test_two_optimizers_are_told_apart():
    (one, one_optimizer, one_loss), (two, two_optimizer, two_loss) = problem(), problem()
    found, before = scaler(), numbers(one)
    found.scale(one_loss(math.nan)).backward(), found.scale(two_loss()).backward()
    found.step(one_optimizer), found.step(two_optimizer)
    found.update()
    np.testing.assert_array_equal(numbers(one), before)
    assert (numbers(two) != before).any() and found.get_scale() == 2 ** 15


@pytest.mark.parametrize("low", [torch.float16, *([torch.bfloat16] if hasattr(torch, "bfloat16") else [])], ids=str)
def test_a_low_precision_loss_becomes_float32_and_larger_outputs_stay(low):
    assert scaler().scale(torch.tensor(3.0, dtype=low)).dtype is torch.float32
    assert scaler().scale(torch.tensor(3.0, dtype=low)).item() == 3 * 2 ** 16
    assert scaler(init_scale=2.0).scale(torch.ones(2, dtype=low)).dtype is low


def test_lists_and_tuples_are_scaled_too():
    found = scaler(init_scale=2.0).scale([torch.ones(1), (torch.ones(2), torch.ones(3))])
    assert isinstance(found, list) and isinstance(found[1], tuple)
    assert [host(x).tolist() for x in (found[0], *found[1])] == [[2.0], [2.0] * 2, [2.0] * 3]


def test_parameters_without_a_gradient_are_left_alone():
    model, optimizer, loss = problem(torch.optim.SGD)
    model.bias.requires_grad_(False)
    before = host(model.bias).copy()
    iterate(scaler(), optimizer, loss())
    np.testing.assert_array_equal(host(model.bias), before)


# --- not enabled ------------------------------------------------------------------------------------------------------

def test_a_scaler_that_is_not_enabled_is_not_there():
    model, optimizer, loss = problem(torch.optim.SGD)
    found, value = scaler(enabled=False), loss()
    assert found.scale(value) is value and not found.is_enabled() and found.get_scale() == 1.0 and found.state_dict() == {}
    found.unscale_(optimizer), found.update(), found.load_state_dict({})
    assert found.step(optimizer, lambda: 5) == 5                # a closure too goes to the optimizer
    value = loss(math.inf)
    value.backward()
    found.step(optimizer)
    assert not np.isfinite(numbers(model)).all()


@pytest.mark.host("on the CPU there may be no GPU")
def test_without_a_gpu_a_scaler_for_it_is_a_warning_and_not_enabled():
    for make in GradScaler, torch.cuda.amp.GradScaler:
        with pytest.warns(UserWarning, match="no GPU; GradScaler is disabled.*GradScaler.'cpu'"):
            assert not make().is_enabled()


def test_the_older_name_takes_the_scale_first(gpu):
    assert torch.cuda.amp.GradScaler(2.0 ** 10).get_scale() == 2 ** 10


# --- the order of the calls -------------------------------------------------------------------------------------------

def test_the_wrong_order_is_an_error():
    model, optimizer, loss = problem(torch.optim.SGD)
    found = scaler()
    for name, arguments in ("unscale_", [optimizer]), ("step", [optimizer]), ("update", []):
        with pytest.raises(RuntimeError, match=rf"GradScaler.{name}: nothing was scaled yet.*scaler.scale\(loss\).backward"):
            getattr(found, name)(*arguments)
    value = found.scale(loss())
    with pytest.raises(RuntimeError, match="step: the optimizer has no gradient.*backward"):
        found.step(optimizer)
    with pytest.raises(RuntimeError, match="update: no gradients were looked at"):
        found.update()
    found.update(new_scale=2.0 ** 16)
    value.backward()
    found.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called on this optimizer since the last update"):
        found.unscale_(optimizer)
    found.step(optimizer)
    with pytest.raises(RuntimeError, match="unscale_: it is being called after step"):
        found.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="step: it has already been called"):
        found.step(optimizer)
    found.update()
    found.unscale_(optimizer)


def test_closures_half_gradients_and_other_outputs_are_refused():
    model, optimizer, loss = problem(torch.optim.SGD)
    found = scaler()
    found.scale(loss()).backward()
    for step in (lambda: found.step(optimizer, closure=loss)), (lambda: found.step(optimizer, loss)):
        with pytest.raises(RuntimeError, match="closure is not supported"):
            step()
    with pytest.raises(ValueError, match="expected a Tensor, or a list or tuple of them, got 3.0"):
        found.scale(3.0)
    half = nn.Linear(2, 2).half()
    found.scale(half(torch.ones(1, 2).half()).float().sum()).backward()
    with pytest.raises(ValueError, match="unscale float16 gradients.*keep the weights float32"):
        found.unscale_(torch.optim.SGD(half.parameters(), lr=0.1))


@pytest.mark.parametrize("options, message", [
    ({"init_scale": 0}, "the scale must be positive"), ({"init_scale": math.inf}, "the scale must be"),
    ({"init_scale": math.nan}, "the scale must be"),
    ({"growth_factor": 1.0}, "growth_factor must be above 1, got 1.0"), ({"growth_factor": math.nan}, "growth_factor"),
    ({"backoff_factor": 1.0}, "backoff_factor must be between 0 and 1"), ({"backoff_factor": -1}, "backoff_factor"),
    ({"growth_interval": 0}, "growth_interval must be at least 1")])
def test_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        scaler(**options)
    with pytest.raises(TypeError, match="whole number"):
        scaler(growth_interval=2.5)
    with pytest.raises(TypeError, match="enabled must be a bool"):
        scaler(enabled=1)


# --- its state --------------------------------------------------------------------------------------------------------

def test_the_state_goes_on_where_it_was():
    runs = []
    for resumed in False, True:
        _, optimizer, loss = problem(torch.optim.SGD)
        found, scales = scaler(init_scale=64.0, growth_interval=4), []
        for step in range(14):
            if resumed and step == 7:
                state = found.state_dict()
                found = scaler(growth_factor=3.0)
                found.load_state_dict(state)
            iterate(found, optimizer, loss(math.inf if step == 5 else 1.0))
            scales.append(found.get_scale())
        runs.append(scales)
    assert runs[0] == runs[1] and runs[0][-1] > runs[0][6]


def test_states_that_are_none_are_refused_and_change_nothing():
    found = scaler()
    state = found.state_dict()
    assert state == {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
    with pytest.raises(RuntimeError, match="the state dict is empty"):
        found.load_state_dict({})
    for wrong, message in ({"scale": 1.0}, "expected scale, growth_factor"), ({**state, "scale": -1.0}, "the scale must be positive"), (
            {**state, "_growth_tracker": -1}, "_growth_tracker must be at least 0"):
        with pytest.raises(ValueError, match=message):
            found.load_state_dict(wrong)
    assert found.state_dict() == state


def test_setting_its_numbers():
    found = scaler()
    found.set_growth_factor(3.0), found.set_backoff_factor(0.25), found.set_growth_interval(7)
    assert (found.get_growth_factor(), found.get_backoff_factor(), found.get_growth_interval()) == (3.0, 0.25, 7)
    found.scale(torch.ones(1))
    found.update(2.0 ** 10)
    assert found.get_scale() == 2 ** 10
    found.update(torch.tensor(32.0))
    assert found.get_scale() == 32


# --- beside PyTorch ---------------------------------------------------------------------------------------------------

def play(library, make, script):
    """Of each call of a script whether it raises; scale, state and weights after it."""
    w = library.nn.Parameter(library.tensor([1.0, -2.0]))
    optimizer, found = library.optim.SGD([w], lr=0.25), make(init_scale=12.0, growth_factor=3.0, backoff_factor=0.3, growth_interval=2)

    def backward(factor):
        optimizer.zero_grad()
        found.scale((w * w * factor).sum()).backward()
    calls = {"backward": lambda: backward(0.5), "overflow": lambda: backward(math.inf), "zero": optimizer.zero_grad, "update": found.update,
             "unscale_": lambda: found.unscale_(optimizer), "step": lambda: found.step(optimizer)}
    seen = []
    for name in script.split():
        raises = False
        try:
            calls[name]()
        except (RuntimeError, AssertionError):
            raises = True
        seen.append((name, raises, found.get_scale(), sorted(found.state_dict().items()), w.tolist()))
    return seen


@pytest.mark.torch
@pytest.mark.host("PyTorch's is the CPU's")
@pytest.mark.parametrize("script", [
    "backward step update " * 5, "backward step update overflow step update backward step update backward step update",
    "overflow unscale_ step update backward unscale_ step update", "overflow step update " * 4, "unscale_", "step", "update",
    "backward step step update", "backward unscale_ unscale_ step update", "backward step unscale_ update", "backward update",
    "backward step update zero step update", "backward step update update"])
def test_as_pytorch(script):
    """Scale, state and weights after every call, and which calls raise (where PyTorch asserts, here RuntimeError)."""
    pytorch = pytest.importorskip("torch")
    assert play(torch, lambda **options: GradScaler("cpu", **options), script) == play(
        pytorch, lambda **options: pytorch.amp.GradScaler("cpu", **options), script)
