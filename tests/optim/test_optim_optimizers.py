"""SGD, Adam, AdamW: the numbers, the groups, saving, and what is refused."""
import copy
import math

import numpy as np
import pytest
import record_nn
from device import host

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.optim import SGD, Adam, AdamW, Optimizer

RECORDED = dict(np.load(record_nn.FILE))
KINDS = [(SGD, {"lr": 0.1, "momentum": 0.9}), (Adam, {"lr": 0.1}), (AdamW, {"lr": 0.1, "amsgrad": True})]


def parameter(*values, grad=None, dtype=torch.float32):
    p = nn.Parameter(torch.tensor(values, dtype=dtype))
    p.grad = None if grad is None else torch.tensor(grad, dtype=dtype)
    return p


# --- numbers ------------------------------------------------------------------------------------------------------

def test_fifty_steps_are_those_of_pytorch():
    for name, value in record_nn.optimizer_values(torch).items():
        np.testing.assert_allclose(value, RECORDED[name], rtol=1e-12, atol=1e-14, err_msg=name)


def test_fifty_steps_in_float32():
    for name, value in record_nn.optimizer_values(torch, "float32").items():
        assert np.abs(value - RECORDED[name]).max() < 1e-6 * np.abs(RECORDED[name]).max(), name


@pytest.mark.torch
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 3e-7)])
def test_fifty_steps_are_those_of_pytorch_live(dtype, tolerance):
    theirs = record_nn.optimizer_values(pytest.importorskip("torch"), dtype)
    for name, value in record_nn.optimizer_values(torch, dtype).items():
        assert np.abs(value - theirs[name]).max() <= tolerance * np.abs(theirs[name]).max(), name


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_defaults_are_those_of_pytorch(kind):
    theirs = pytest.importorskip("torch")
    mine = getattr(torch.optim, kind)([parameter(1.0)]).state_dict()["param_groups"][0]
    other = getattr(theirs.optim, kind)([theirs.zeros(1)]).state_dict()["param_groups"][0]
    assert mine == {name: other[name] for name in mine}


def test_adamw_by_hand():
    p = parameter(1.0, -2.0, grad=[0.5, 4.0], dtype=torch.float64)
    AdamW([p], lr=0.1, weight_decay=0.2, eps=1e-3).step()
    g = np.array([0.5, 4.0])                    # at the first step m̂ = g and v̂ = g²
    np.testing.assert_allclose(p.tolist(), np.array([1.0, -2.0]) * (1 - 0.1 * 0.2) - 0.1 * g / (abs(g) + 1e-3), rtol=1e-12)


@pytest.mark.parametrize("kind, options", KINDS)
def test_a_parameter_without_gradient_is_left_alone(kind, options):
    p, q = parameter(1.0, grad=[1.0]), parameter(2.0)
    optimizer = kind([p, q], weight_decay=0.5, **options)
    optimizer.step()
    assert p.item() != 1.0 and q.item() == 2.0 and q not in optimizer.state
    p.grad, q.grad = None, torch.zeros(1)
    before = p.item()
    optimizer.step()
    assert p.item() == before and q.item() < 2.0         # a gradient of zero still decays


@pytest.mark.parametrize("kind, options", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_steps_are_in_place_and_keep_the_dtype(kind, options, dtype):
    p = parameter(1.0, 2.0, grad=[1.0, -1.0], dtype=dtype)
    array, version, gradient = p.array, p.version.written, p.grad.tolist()
    optimizer = kind([p], **options)
    optimizer.step()
    assert p.array is array and p.dtype == dtype and p.version.written > version and p.grad.tolist() == gradient
    assert all(v.dtype == dtype for name, v in optimizer.state[p].items() if name != "step")


def test_a_step_between_forward_and_backward_is_noticed():
    p = parameter(2.0, grad=[1.0])
    y = (p * p).sum()
    SGD([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()


def test_state_never_shares_memory_with_gradients():
    p = parameter(1.0, grad=[1.0])
    optimizer = SGD([p], lr=0.1, momentum=0.9)
    optimizer.step()
    p.grad.fill_(100.0)
    assert optimizer.state[p]["momentum_buffer"].tolist() == [1.0]


def test_closure_is_run_with_gradients_and_its_loss_returned():
    p = parameter(3.0)
    optimizer = SGD([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 9.0
    assert p.item() == pytest.approx(2.4) and torch.is_grad_enabled()


@pytest.mark.parametrize("kind, options", [(SGD, {"lr": 0.1, "momentum": 0.9}),
                                           (SGD, {"lr": 0.1, "nesterov": True, "momentum": 0.5}),
                                           (Adam, {"lr": 0.3}), (AdamW, {"lr": 0.3, "weight_decay": 0.0}),
                                           (Adam, {"lr": 0.3, "amsgrad": True})])
def test_a_bowl_is_descended(kind, options):
    p = parameter(3.0, -2.0)
    optimizer = kind([p], **options)
    for _ in range(100):
        optimizer.zero_grad()
        ((p - torch.tensor([1.0, 1.0])) ** 2).sum().backward()
        optimizer.step()
    assert np.abs(np.array(p.tolist()) - 1).max() < 0.1


MANY = [("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True, "dampening": 0.2}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("Adam", {"lr": 0.1}),
        ("Adam", {"lr": 0.1, "amsgrad": True, "maximize": True, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.1}), ("AdamW", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.3})]
SHAPES = [(), (1,), (0,), (2, 1, 3)]


def trajectory(framework, kind, options, dtype, steps=10):
    """The values of parameters of all shapes after each step, and the shapes of their state."""
    rng = np.random.default_rng(3)
    params = [framework.nn.Parameter(framework.tensor(rng.normal(size=s), dtype=getattr(framework, dtype))) for s in SHAPES]
    optimizer, seen = getattr(framework.optim, kind)(params, **options), []
    for _ in range(steps):
        for p in params:
            p.grad = framework.tensor(rng.normal(size=tuple(p.shape)), dtype=p.dtype)
        optimizer.step()
        seen.append(np.concatenate([np.reshape(p.tolist(), -1) for p in params]))
    state = {i: {name: (tuple(v.shape), str(v.dtype)) for name, v in entry.items() if v is not None}
             for i, entry in optimizer.state_dict()["state"].items()}
    return np.array(seen), state


@pytest.mark.torch
@pytest.mark.parametrize("kind, options", MANY)
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-6)])
def test_every_shape_moves_as_in_pytorch(kind, options, dtype, tolerance):
    theirs, their_state = trajectory(pytest.importorskip("torch"), kind, options, dtype)
    mine, state = trajectory(torch, kind, options, dtype)
    np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)
    assert state == their_state


@pytest.mark.parametrize("kind, options", MANY)
def test_a_0d_parameter_moves_like_one_of_one_element(kind, options):
    p, q = nn.Parameter(torch.tensor(2.0)), parameter(2.0)
    optimizer = getattr(torch.optim, kind)([p, q], **options)
    for g in (1.0, -0.5, 3.0):
        p.grad, q.grad = torch.tensor(g), torch.tensor([g])
        optimizer.step()
        assert p.item() == q.item() != 2.0
    assert p.grad.item() == 3.0 and all(isinstance(host(v), np.ndarray) and v.shape == () for v in optimizer.state[p].values())


@pytest.mark.parametrize("kind, options", MANY)
def test_options_may_be_tensors(kind, options):
    options = {"weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-4, **options}
    options = {name: v for name, v in options.items() if kind != "SGD" or name not in ("betas", "eps")}

    def as_tensor(value):
        if isinstance(value, tuple):
            return tuple(map(as_tensor, value))
        return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    plain = getattr(torch.optim, kind)([p], **options)
    given = getattr(torch.optim, kind)([q], **{name: as_tensor(value) for name, value in options.items()})
    train(plain, [p], 3, 0), train(given, [q], 3, 0)
    assert p.tolist() == q.tolist() != [1.0, 2.0]
    snapshot = given.state_dict()
    given.param_groups[0]["lr"].fill_(0.0)
    train(given, [q], 1, 0)
    assert p.tolist() == q.tolist() and snapshot["param_groups"][0]["lr"].item() == options["lr"]
    given.load_state_dict(snapshot)
    given.param_groups[0]["lr"].fill_(7.0)
    assert snapshot["param_groups"][0]["lr"].item() == options["lr"]


# --- groups -------------------------------------------------------------------------------------------------------

def test_groups_have_their_own_options():
    p, q, r = (parameter(1.0, grad=[1.0]) for _ in range(3))
    optimizer = SGD([{"params": [p]}, {"params": q, "lr": 0.5}], lr=0.1)
    optimizer.add_param_group({"params": iter([r]), "weight_decay": 1.0})
    optimizer.step()
    assert [x.item() for x in (p, q, r)] == pytest.approx([0.9, 0.5, 0.8])
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert p.item() == pytest.approx(0.9) and "Parameter Group 2" in repr(optimizer) and "weight_decay: 1.0" in repr(optimizer)


def test_named_parameters_keep_their_names():
    model = nn.Linear(2, 1)
    optimizer = SGD(model.named_parameters(), lr=0.1)
    optimizer.add_param_group({"params": [("extra", parameter(1.0))], "lr": 0.5})
    assert optimizer.param_groups[0]["params"] == [model.weight, model.bias]
    state = optimizer.state_dict()
    assert [g["param_names"] for g in state["param_groups"]] == [["weight", "bias"], ["extra"]]
    assert [g["params"] for g in state["param_groups"]] == [[0, 1], [2]] and "param_names: ['extra']" in repr(optimizer)
    with pytest.raises(ValueError, match="named_parameters"):
        optimizer.add_param_group({"params": parameter(1.0)})
    assert len(optimizer.param_groups) == 2
    unnamed = SGD([{"params": model.parameters()}, {"params": parameter(1.0)}], lr=7.0)
    plain = unnamed.state_dict()
    unnamed.load_state_dict(state)              # names that are loaded stay; where none are, one's own do
    assert unnamed.state_dict() == state
    optimizer.load_state_dict(plain)
    assert optimizer.param_groups[1]["param_names"] == ["extra"] and optimizer.param_groups[1]["lr"] == 7.0


@pytest.mark.torch
def test_named_parameters_are_kept_as_in_pytorch():
    groups = []
    for framework in (pytest.importorskip("torch"), torch):
        model = framework.nn.Sequential(framework.nn.Linear(2, 3), framework.nn.Linear(3, 1))
        optimizer = framework.optim.SGD([{"params": model[0].named_parameters()}, {"params": model[1].named_parameters("last")}])
        groups.append([(g["params"], g["param_names"]) for g in optimizer.state_dict()["param_groups"]])
    assert groups[0] == groups[1] == [([0, 1], ["weight", "bias"]), ([2, 3], ["last.weight", "last.bias"])]


def test_zero_grad():
    p, q = parameter(1.0, grad=[1.0]), parameter(1.0)
    optimizer = SGD([p, q], lr=0.1)
    gradient = p.grad
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is gradient and p.grad.tolist() == [0.0] and q.grad is None
    optimizer.zero_grad()
    assert p.grad is None


LEAF = parameter(1.0)


@pytest.mark.parametrize("make, error, words", [
    (lambda: SGD([], lr=0.1), ValueError, "empty"), (lambda: SGD(iter([]), lr=0.1), ValueError, "empty"),
    (lambda: SGD(LEAF, lr=0.1), TypeError, "iterable"), (lambda: SGD(3, lr=0.1), TypeError, "iterable"),
    (lambda: SGD([1.0], lr=0.1), TypeError, "float"),
    (lambda: SGD([{"params": {LEAF}}], lr=0.1), TypeError, "set"), (lambda: SGD([{"lr": 1.0}]), ValueError, "'params'"),
    (lambda: SGD([LEAF * 2], lr=0.1), ValueError, "non-leaf"), (lambda: SGD([torch.tensor([1])], lr=0.1), ValueError, "int64"),
    (lambda: SGD([LEAF, LEAF], lr=0.1), ValueError, "more than once"),
    (lambda: SGD([{"params": LEAF}, {"params": LEAF}]), ValueError, "more than once"),
    (lambda: SGD([{"params": [LEAF]}, LEAF]), TypeError, "dict"),
    (lambda: SGD([("p", LEAF), parameter(2.0)]), ValueError, "1 of 2"), (lambda: SGD([("p", 1.0)]), TypeError, "float"),
    (lambda: SGD([("p", LEAF, 3)]), TypeError, "tuple"), (lambda: SGD([("p", LEAF), ("q", LEAF)]), ValueError, "more than once"),
    (lambda: SGD([{"params": [("p", LEAF)]}, {"params": parameter(2.0)}]), ValueError, "with or without names"),
    (lambda: SGD([LEAF], lr=torch.tensor([0.1, 0.2])), ValueError, "one element"),
    (lambda: SGD([LEAF], lr=torch.tensor(-0.1)), ValueError, "learning rate"),
    (lambda: SGD([LEAF], lr=-0.1), ValueError, "learning rate"), (lambda: SGD([LEAF], lr=math.nan), ValueError, "learning rate"),
    (lambda: SGD([LEAF], lr=math.inf), ValueError, "learning rate"),
    (lambda: SGD([{"params": LEAF, "lr": -1}]), ValueError, "learning rate"),
    (lambda: SGD([LEAF], momentum=-1), ValueError, "momentum"), (lambda: SGD([LEAF], weight_decay=-1), ValueError, "weight_decay"),
    (lambda: SGD([LEAF], nesterov=True), ValueError, "Nesterov"),
    (lambda: SGD([LEAF], nesterov=True, momentum=0.9, dampening=0.1), ValueError, "dampening"),
    (lambda: Adam([LEAF], lr=-1), ValueError, "learning rate"), (lambda: Adam([LEAF], eps=-1), ValueError, "epsilon"),
    (lambda: Adam([LEAF], betas=(1.0, 0.9)), ValueError, "index 0"), (lambda: Adam([LEAF], betas=(0.9, -0.1)), ValueError, "index 1"),
    (lambda: AdamW([LEAF], betas=(0.9, math.nan)), ValueError, "index 1"),
    (lambda: AdamW([LEAF], weight_decay=-0.1), ValueError, "weight_decay"),
    (lambda: Optimizer([parameter(1.0, grad=[1.0])], {}).step(), NotImplementedError, "update")])
def test_bad_input_raises(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("kind, options", KINDS)
@pytest.mark.parametrize("how", ["expanded", pytest.param("read-only", marks=pytest.mark.host("CuPy knows no read-only memory"))])
def test_what_cannot_be_written_is_refused_before_anything_moves(kind, options, how):
    p, q = parameter(1.0, grad=[1.0]), nn.Parameter(torch.ones(1).expand(2) if how == "expanded" else torch.ones(2))
    if how == "read-only":
        q.array.flags.writeable = False
    optimizer = kind([{"params": [p]}, {"params": [q]}], **options)
    optimizer.step()                            # q has no gradient: nothing is to be written
    before, state = p.item(), copy.deepcopy(optimizer.state_dict())
    q.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"parameter of shape \(2,\).*in place.*clone"):
        optimizer.step()
    assert p.item() == before and repr(optimizer.state_dict()) == repr(state)


@pytest.mark.parametrize("wrong", [torch.ones(2), torch.ones(3, 2).double()])
def test_a_wrong_gradient_never_reaches_the_optimizer(wrong):
    p = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="shape and dtype"):
        p.grad = wrong
    assert p.grad is None


# --- saving and loading -------------------------------------------------------------------------------------------

def train(optimizer, params, steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.tensor(rng.normal(size=tuple(p.shape)).astype("float32"))
        optimizer.step()


@pytest.mark.parametrize("kind, options", KINDS)
def test_resumed_equals_uninterrupted(kind, options):
    first = [parameter(1.0, 2.0), parameter(3.0)]
    optimizer = kind(first, weight_decay=0.1, **options)
    train(optimizer, first, 3, 0)
    second = [copy.deepcopy(p) for p in first]
    resumed = kind([{"params": second}], lr=7.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, first, 3, 1), train(resumed, second, 3, 1)
    assert [p.tolist() for p in first] == [p.tolist() for p in second] and resumed.param_groups[0]["lr"] == options["lr"]


@pytest.mark.parametrize("kind, options", KINDS)
def test_a_snapshot_is_a_copy(kind, options):
    p = parameter(1.0, 2.0)
    optimizer = kind([p], **options)
    train(optimizer, [p], 2, 0)
    snapshot = optimizer.state_dict()
    values = {k: v.tolist() for k, v in snapshot["state"][0].items()}
    other = kind([parameter(0.0, 0.0)], **options)
    other.load_state_dict(snapshot)
    train(optimizer, [p], 2, 1), train(other, other.param_groups[0]["params"], 2, 1)
    optimizer.param_groups[0]["lr"] = 9.0
    assert {k: v.tolist() for k, v in snapshot["state"][0].items()} == values
    assert snapshot["param_groups"][0]["lr"] == options["lr"] and snapshot["param_groups"][0]["params"] == [0]


@pytest.mark.torch
@pytest.mark.parametrize("kind, options", [(kind.__name__, options) for kind, options in KINDS])
def test_the_layout_is_that_of_pytorch(kind, options):
    theirs = pytest.importorskip("torch")
    states = []
    for framework in (theirs, torch):
        p, q = (framework.nn.Parameter(framework.ones(s)) for s in (2, 3))
        p.grad = framework.ones(2)
        optimizer = getattr(framework.optim, kind)([{"params": [q]}, {"params": [p], "lr": 0.5}], **options)
        optimizer.step()
        states.append(optimizer.state_dict())
    other, mine = states
    assert {i: {k: v.tolist() for k, v in s.items()} for i, s in mine["state"].items()} == \
        {i: {k: pytest.approx(v.tolist(), rel=1e-6) for k, v in s.items()} for i, s in other["state"].items()}
    assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in other["param_groups"]] == [[0], [1]]
    other["state"] = {i: {k: torch.tensor(v.tolist()) for k, v in s.items()} for i, s in other["state"].items()}
    optimizer.load_state_dict(other)            # PyTorch's further options do no harm
    optimizer.step()


def test_loading_takes_dtype_and_step_from_here():
    p = parameter(1.0, dtype=torch.float64, grad=[1.0])
    optimizer = Adam([p])
    optimizer.load_state_dict({"state": {0: {"step": 4, "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}},
                               "param_groups": [{"lr": 0.5, "params": [0]}]})
    assert optimizer.state[p]["exp_avg"].dtype == torch.float64 and optimizer.param_groups[0]["eps"] == 1e-8
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 5


def test_states_that_do_not_fit_are_refused_and_nothing_changes():
    p = parameter(1.0, 2.0)
    optimizer = Adam([p])
    train(optimizer, [p], 1, 0)
    good = optimizer.state_dict()
    group, entry = good["param_groups"][0], good["state"][0]
    for bad in ({"state": {}, "param_groups": []}, {"state": {}, "param_groups": [{**group, "params": [0, 1]}]},
                {"state": {3: entry}, "param_groups": [group]},
                {"state": {0: {**entry, "exp_avg": torch.ones(1)}}, "param_groups": [group]},
                {"state": {}, "param_groups": [{**group, "lr": -1.0}]}):
        with pytest.raises(ValueError):
            optimizer.load_state_dict(bad)
    assert optimizer.state[p]["exp_avg"].tolist() == entry["exp_avg"].tolist() and optimizer.param_groups[0]["lr"] == 1e-3
