"""Parameters that are joined or cut move exactly as each would by itself."""
import copy

import numpy as np
import pytest
from device import host, placed
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.optim import SGD, Adam, AdamW, Optimizer, adam, pieces, sgd

PIECE, SMALL = 64, 8                            # in the tests, so that small arrays meet every border
SHAPES = [(), (0,), (1,), (7,), (8,), (9,), (2, 3, 1), (5, 0), (63,), (64,), (65,), (8, 8), (127,), (128,), (43, 3), (3,), (2, 200), (6,)]
CASES = [(SGD, {"lr": 0.1}), (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
         (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "maximize": True}), (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
         (Adam, {"lr": 0.1}), (Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
         (AdamW, {"lr": 0.1}), (AdamW, {"lr": 0.1, "weight_decay": 0.3, "amsgrad": True}), (AdamW, {"lr": 0.1, "weight_decay": 0.0})]
HOST = pytest.mark.host("nothing is joined or cut on a GPU, where a launch costs the same for any size")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", PIECE)
    monkeypatch.setattr(pieces, "SMALL", SMALL)


def alone(kind):
    """The same optimizer with an `update` of its own: it is called for one parameter at a time."""
    return type(kind.__name__, (kind,), {"update": lambda self, p, g, state, group: super(kind, self).update(p, g, state, group)})


def parameters(shapes, seed=0, dtypes=("float32",)):
    rng = np.random.default_rng(seed)
    return [nn.Parameter(torch.tensor(rng.normal(size=s), dtype=dtypes[i % len(dtypes)])) for i, s in enumerate(shapes)]


def give_gradients(params, rng, missing=0.0):
    for p in params:
        g = torch.tensor(rng.normal(size=tuple(p.shape)), dtype=p.dtype)
        p.grad = None if rng.random() < missing else g


def bits(values):
    """Names and exact numbers of what a state dict, a list, … holds."""
    if isinstance(values, (dict, list, tuple)):
        return [(str(name), bits(v)) for name, v in (values.items() if isinstance(values, dict) else enumerate(values))]
    return (str(host(values).dtype), host(values).tobytes()) if isinstance(values, torch.Tensor) else repr(values)


def assert_alike(together, one_by_one):
    """Two optimizers hold the same parameters and the same state, bit by bit."""
    ours, theirs = (o.state_dict() for o in (together, one_by_one))
    assert bits(ours) == bits(theirs)
    for group, other in zip(together.param_groups, one_by_one.param_groups):
        assert bits([p.detach() for p in group["params"]]) == bits([p.detach() for p in other["params"]])


def both(kind, options, make, steps=4, missing=0.0, between=lambda optimizer, step: optimizer):
    """The two optimizers after some steps on the same numbers. `between` may change or replace an optimizer after each step."""
    found = []
    for cls in (kind, alone(kind)):
        optimizer, rng = cls(make(), **copy.deepcopy(options)), np.random.default_rng(1)
        for step in range(steps):
            give_gradients([p for group in optimizer.param_groups for p in group["params"]], rng, missing)
            optimizer.step()
            optimizer = between(optimizer, step)
        found.append(optimizer)
    return found


@pytest.mark.parametrize("kind, options", CASES, ids=str)
@pytest.mark.parametrize("dtypes", [("float32",), ("float64",), ("float32", "float64", "float16", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_together_is_one_by_one(kind, options, dtypes, missing):
    """With gradients that are missing now and then, so that step counts differ."""
    if "bfloat16" in dtypes:
        pytest.importorskip("ml_dtypes")
    assert_alike(*both(kind, {"eps": 1e-3, **options} if kind is not SGD else options, lambda: parameters(SHAPES, dtypes=dtypes),
                       missing=missing))


@pytest.mark.parametrize("kind, options", CASES, ids=str)
def test_state_dict_and_copies_in_the_middle(kind, options):
    def reloaded(optimizer, step):
        fresh = type(optimizer)(copy.deepcopy(optimizer.param_groups[0]["params"]), lr=7.0)
        fresh.load_state_dict(optimizer.state_dict())
        return copy.deepcopy(fresh) if step % 2 else fresh
    assert_alike(*both(kind, options, lambda: parameters(SHAPES), between=reloaded))
    assert_alike(both(kind, options, lambda: parameters(SHAPES), between=reloaded)[0], both(kind, options, lambda: parameters(SHAPES))[1])


@pytest.mark.parametrize("kind, options", CASES, ids=str)
def test_options_of_groups_that_change_between_steps(kind, options):
    options = {**options, "lr": torch.tensor(options["lr"], dtype=torch.float64)}

    def groups():
        first, second, third = parameters(SHAPES), parameters(SHAPES, 1), parameters([(3,), (70,)], 2)
        other = {"amsgrad": not options.get("amsgrad")} if kind is not SGD else {"momentum": 0.0, "nesterov": False}
        return [{"params": first}, {"params": second, "weight_decay": 0.2, **other}, {"params": third}]

    def changed(optimizer, step):
        optimizer.param_groups[0]["lr"].fill_(0.3 / (1 + step))
        optimizer.param_groups[1]["lr"] = 0.01 * step
        return optimizer
    assert_alike(*both(kind, options, groups, between=changed))


LAYOUTS = {"as it is": lambda a: a, "transposed": lambda a: a.T.copy().T, "steps": lambda a: np.stack([a, a], -1)[..., 0],
           "reversed": lambda a: a[::-1].copy()[::-1]}


@HOST
@pytest.mark.parametrize("kind, options", CASES, ids=str)
@pytest.mark.parametrize("p_layout", LAYOUTS)
@pytest.mark.parametrize("g_layout", [*LAYOUTS, "expanded", "read-only"])
def test_any_order_in_memory(kind, options, p_layout, g_layout):
    found = []
    for cls in (kind, alone(kind)):
        rng, params = np.random.default_rng(0), parameters([(3, 2), (2, 2), (12, 11), (5, 13)])
        for p in params:
            p.array = LAYOUTS[p_layout](p.array)
        optimizer = cls(params, **options)
        for _ in range(3):
            for p in params:
                g = rng.normal(size=p.shape).astype("float32")
                g = np.broadcast_to(g[:1], g.shape) if g_layout == "expanded" else LAYOUTS.get(g_layout, np.array)(g)
                g.flags.writeable = g_layout != "read-only" and g_layout != "expanded"
                p.grad = torch.autograd.constant(g)
            before = [(p.grad.array, p.grad.array.tobytes(), p.array) for p in params]
            optimizer.step()
            assert all(p.grad.array is g and g.tobytes() == numbers and p.array is a for p, (g, numbers, a) in zip(params, before))
        found.append(optimizer)
    assert_alike(*found)


def shared(array):
    """A parameter in this memory."""
    p = nn.Parameter(torch.zeros(array.shape))
    p.array = array
    return p


OVERLAPS = {"the same": lambda a: [a, a[:]], "parts": lambda a: [a[:3], a[1:5], a], "transposed": lambda a: [a[:36].reshape(6, 6).T, a[2:]],
            "small and large": lambda a: [a[-4:], a, a[:4]]}


@HOST
@pytest.mark.parametrize("kind, options", CASES, ids=str)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_parameters_in_one_memory_move_in_turn(kind, options, overlap):
    def views():
        memory = np.random.default_rng(0).normal(size=100).astype("float32")
        return [shared(a) for a in OVERLAPS[overlap](memory)] + parameters([(3,)])
    assert_alike(*both(kind, options, views))


@HOST
@pytest.mark.parametrize("kind, options", CASES, ids=str)
def test_a_gradient_in_the_memory_of_a_parameter(kind, options):
    found = []
    for cls in (kind, alone(kind)):
        p, q, r = parameters([(5,), (5,), (200,)])
        q.grad, p.grad, r.grad = torch.autograd.constant(p.array), torch.ones(5), torch.autograd.constant(r.array[::-1])
        optimizer = cls([p, q, r], **options)
        optimizer.step()
        found.append(optimizer)
    assert_alike(*found)


@HOST
@pytest.mark.parametrize("kind, module, step", [(AdamW, adam, "adam_step"), (SGD, sgd, "sgd_step")])
def test_what_is_joined_and_cut(kind, module, step, monkeypatch):
    """40 parameters of 5 are 3 runs of 13 at most and one of what remains; one of 200 is four pieces, in place."""
    sizes, original = [], getattr(module, step)
    monkeypatch.setattr(module, step, lambda p, *args: (sizes.append(p.size), original(p, *args)))
    params = parameters([(5,)] * 40 + [(10, 20)])
    give_gradients(params, np.random.default_rng(0))
    kind(params, lr=0.1).step()
    assert sizes == [64, 64, 64, 8, 65, 65, 65, 5]


class OneNorm(Optimizer):
    """p ← p − lr · g / max |g|: every element depends on all others."""
    def update(self, p, g, state, group):
        state["seen"] = state.get("seen", 0) + 1
        p -= group["lr"] * g / abs(g).max()


class Trimmed(AdamW):
    """AdamW on a gradient without its mean."""
    def update(self, p, g, state, group):
        super().update(p, g - g.mean(), state, group)


class Signs(Optimizer):
    """p ← p − lr · sign(g), as a rule."""
    def rule(self, p, state, group):
        return (lambda p, g, lr: p.__isub__(lr * np.sign(g))), (), (group["lr"],)


def test_an_update_of_ones_own_sees_whole_parameters():
    params = [p for p in parameters(SHAPES) if p.numel()]
    before = [p.detach().clone() for p in params]
    give_gradients(params, np.random.default_rng(0))
    optimizer = OneNorm(params, {"lr": 0.5})
    optimizer.step()
    for p, start in zip(params, before):
        np.testing.assert_allclose(host(p), host(start) - 0.5 * host(p.grad) / abs(host(p.grad)).max(), rtol=1e-5, atol=1e-6)
    assert all(optimizer.state[p] == {"seen": 1} for p in params)


def test_an_update_that_extends_adamw():
    params, plain = parameters([(5,), (200,), (3, 3)]), parameters([(5,), (200,), (3, 3)])
    give_gradients(params, np.random.default_rng(0))
    for p, q in zip(params, plain):
        q.grad = p.grad - placed(np.float32(host(p.grad).mean())).item()
    Trimmed(params, lr=0.1).step(), AdamW(plain, lr=0.1).step()
    for p, q in zip(params, plain):
        np.testing.assert_allclose(host(p), host(q), rtol=1e-5, atol=1e-6)


@HOST
def test_a_rule_of_ones_own():
    params = parameters(SHAPES)
    before = [p.detach().clone() for p in params]
    give_gradients(params, np.random.default_rng(0))
    Signs(params, {"lr": 0.5}).step()
    for p, start in zip(params, before):
        np.testing.assert_array_equal(host(p), host(start) - np.float32(0.5) * np.sign(host(p.grad)))


def test_a_write_counts_also_where_the_update_fails():
    p, q = parameters([(3,), (4,)])
    y = (p * p).sum()

    class Fails(AdamW):
        def update(self, p, g, state, group):
            super().update(p, g if p.size == 3 else g[:1, None], state, group)
            if p.size == 4:
                raise ValueError("half-way")
    give_gradients([p, q], np.random.default_rng(0))
    with pytest.raises(ValueError):
        Fails([p, q]).step()
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_amsgrad_that_is_switched_on_too_late_changes_nothing(kind):
    params = parameters([(3,), (200,)])
    optimizer = kind(params, lr=0.1)
    give_gradients(params, np.random.default_rng(0))
    optimizer.step()
    before = bits(optimizer.state_dict()["state"]), bits([p.detach() for p in params])
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        optimizer.step()
    assert before == (bits(optimizer.state_dict()["state"]), bits([p.detach() for p in params]))


@given(st.lists(st.integers(0, 200), max_size=12), st.integers(1, 80), st.integers(0, 20), st.booleans())
def test_every_element_is_met_once(sizes, piece, small, with_state):
    """pieces.run on arrays of any sizes: p becomes p + g + number, the state g, and g stays."""
    pieces.PIECE, pieces.SMALL = piece, small   # the fixture sets them back
    rng = np.random.default_rng(len(sizes))
    given = [(rng.normal(size=n), rng.normal(size=n), np.zeros(n) if with_state else None) for n in sizes]
    wanted = [(p + (g + 2.0), g.copy()) for p, g, _ in given]

    def step(p, g, s, number):
        p += g + number
        if s is not None:
            s += g
    pieces.run(step, given, (2.0,))
    for (p, g, s), (moved, same) in zip(given, wanted):
        assert p.tolist() == moved.tolist() and g.tolist() == same.tolist() and (s is None or s.tolist() == same.tolist())
