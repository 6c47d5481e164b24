"""Sums, means, extrema, norms: PyTorch's values, dtypes, gradients and errors; laws over axes."""
import math

import numpy as np
import pytest
import tensorcases
from device import host
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tinygrad_tf as torch

shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)


def numbers(shape):
    return np.random.default_rng(len(shape)).standard_normal(shape)


@pytest.mark.torch
@pytest.mark.parametrize("op", ["sum", "prod", "amax", "amin", "any", "all", "count_nonzero", "argmax", "argmin"])
def test_every_dtype_and_axis_as_pytorch(op):
    """PyTorch refuses argmax of bool and gives uint8 for any and all of uint8: the two where this package goes its own way."""
    pytorch = pytest.importorskip("torch")
    for kind in tensorcases.DTYPES:
        if kind == "b" and "arg" in op or kind == "u1" and op in ("any", "all"):
            continue
        for shape in ("", "3", "2,3", "2,0,3"):
            for dim in ("", "0", "-1", "1", "-3", "7"):
                case = f"torch.{op}(x{dim and f', dim={dim}'})", f"{kind}:{shape}"
                tensorcases.assert_same(tensorcases.outcome(torch, case), tensorcases.outcome(pytorch, case), case)


@given(shapes, st.data())
def test_any_choice_of_axes_is_numpys(shape, data):
    dims = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True, min_size=1).map(tuple))
    signs = data.draw(st.lists(st.sampled_from([0, len(shape)]), min_size=len(dims), max_size=len(dims)))
    named = tuple(d - s for d, s in zip(dims, signs))
    keep, x = data.draw(st.booleans()), numbers(shape)
    for ours, theirs in [("sum", np.sum), ("mean", np.mean), ("amax", np.max), ("amin", np.min)]:
        np.testing.assert_allclose(host(getattr(torch.tensor(x), ours)(named, keep)), theirs(x, axis=dims, keepdims=keep), atol=1e-14)
    np.testing.assert_allclose(host(torch.tensor(x).var(named, correction=0, keepdim=keep)), np.var(x, axis=dims, keepdims=keep),
                               atol=1e-14)


@given(shapes)
def test_gradients_of_sum_mean_and_amax_add_up_to_what_came(shape):
    for op in ("sum", "mean", "amax"):
        x = torch.tensor(numbers(shape), requires_grad=True)
        y = getattr(x, op)(0)
        y.backward(torch.full(y.shape, 3.0, dtype=torch.float64))
        total = 3 * y.numel() * (shape[0] if op == "sum" else 1)
        assert math.isclose(x.grad.sum().item(), total, rel_tol=1e-12)


@given(shapes)
def test_variance_knows_no_shift_and_the_last_cumulative_sum_is_the_sum(shape):
    x = torch.tensor(numbers(shape))
    assert torch.allclose(x.var(correction=0), (x + 100).var(correction=0), atol=1e-10)
    assert torch.allclose(x.cumsum(0)[-1], x.sum(0)) and torch.allclose(x.std(0, correction=0) ** 2, x.var(0, correction=0))


@given(hnp.arrays(np.int8, hnp.array_shapes(min_dims=1, max_dims=2, max_side=5)))
def test_integers_are_summed_in_int64(x):
    assert torch.tensor(x).sum().item() == int(x.sum(dtype=np.int64)) and torch.tensor(x).prod(0).dtype == torch.int64
    assert torch.tensor(x).cumsum(0).tolist() == x.cumsum(0, dtype=np.int64).tolist()


def test_equal_extremes_share_the_gradient_but_max_along_an_axis_takes_the_first():
    x = torch.tensor([[2.0, 2, 1], [0, 5, 5]], requires_grad=True)
    x.amax(1).sum().backward()
    assert x.grad.tolist() == [[0.5, 0.5, 0], [0, 0.5, 0.5]]
    x.grad = None
    values, indices = x.max(1)
    values.sum().backward()
    assert indices.tolist() == [0, 1] and x.grad.tolist() == [[1, 0, 0], [0, 1, 0]]


def test_the_spread_of_equal_numbers_is_0_with_gradient_0():
    x = torch.full((3,), 2.5, requires_grad=True)
    x.std().backward()
    assert x.std().item() == 0 and x.grad.tolist() == [0, 0, 0]


def test_nan_is_the_extreme():
    x = torch.tensor([[1, math.nan, 3], [4, 5, 6]])
    assert math.isnan(x.max().item()) and x.argmax(1).tolist() == [1, 2] and x.argmin(1).tolist() == [1, 0]
    assert np.isnan(host(x.amax(1))).tolist() == [True, False]


@pytest.mark.parametrize("expression", ["x.sum()", "x.mean(0)", "x.prod(1)", "x.var()", "x.std(0)", "x.norm()", "x.norm(3)",
                                        "x.cumsum(1)", "x.amax()",
                                        "(x * 1e38).norm()", "x.half().sum()", "x[:0].mean()", "x[:0].var()", "x[0, :1].std()",
                                        "x.norm(-1)"])
def test_no_numpy_warning_escapes_from_inf_nan_and_zero(expression):
    assert "error" not in tensorcases.outcome(torch, (expression, "f4!s:4,5"))


@pytest.mark.parametrize("expression, error, words", [
    ("x.sum(2)", IndexError, ["sum", "[-2, 1]", "2 dimensions"]),
    ("x.sum((0, 0))", RuntimeError, ["sum", "more than once"]),
    ("x.sum('a')", TypeError, ["sum", "int", "str"]),
    ("x.long().mean()", RuntimeError, ["mean", "int64", "float()"]),
    ("x.long().std()", RuntimeError, ["std", "int64", "float()"]),
    ("x.long().norm()", RuntimeError, ["norm", "int64"]),
    ("x[:0].amax()", RuntimeError, ["amax", "(0, 3)", "dim"]),
    ("x[:0].amax(0)", IndexError, ["amax", "(0, 3)"]),
    ("x[:0].argmax()", IndexError, ["argmax", "(0, 3)"]),
    ("x[:0].norm(inf)", RuntimeError, ["norm", "inf", "(0, 3)"]),
    ("x.norm('nuc')", TypeError, ["norm", "'nuc'", "number"]),
    ("x.max(keepdim=True)", TypeError, ["max", "dim", "amax"]),
])
def test_errors_say_what_came_and_what_would_do(expression, error, words):
    with pytest.raises(error) as caught:
        tensorcases.evaluate(torch, expression, {"x": torch.ones(2, 3)})
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)
