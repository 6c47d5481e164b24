"""Arithmetic with broadcasting: PyTorch's values, dtypes, gradients and errors; laws that hold for all shapes."""
import numpy as np
import pytest
import tensorcases
from device import host
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tinygrad_tf as torch
from tinygrad_tf.gradcheck import gradcheck

pairs_of_shapes = hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3, min_side=0)


@pytest.mark.torch
@pytest.mark.parametrize("a", tensorcases.DTYPES)
@pytest.mark.parametrize("op", ["x + y", "x - y", "x * y", "x / y", "x % y", "x ** y", "x == y", "x <= y", "torch.maximum(x, y)"])
def test_every_pair_of_dtypes_as_pytorch(op, a):
    pytorch = pytest.importorskip("torch")
    skip = {("x ** y", "b")}                    # PyTorch's own backward of a float to a bool power fails
    for b in tensorcases.DTYPES:
        for shapes in (("2,3", "2,3"), ("2,3", ""), ("", "2,1"), ("3,1", "1,2")):
            if (op, b) not in skip:
                case = op, f"{a}:{shapes[0]}", f"{b}:{shapes[1]}"
                tensorcases.assert_same(tensorcases.outcome(torch, case), tensorcases.outcome(pytorch, case), case)


@given(pairs_of_shapes, st.sampled_from(["add", "sub", "mul", "maximum", "minimum"]))
def test_broadcasting_is_numpys_and_gradients_have_the_shapes_of_their_operands(shapes, op):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s) for s in shapes.input_shapes)
    x, y = (torch.tensor(v, requires_grad=True) for v in (a, b))
    z = getattr(torch, op)(x, y)
    assert z.shape == shapes.result_shape
    np.testing.assert_array_equal(host(z), getattr(np, {"sub": "subtract", "mul": "multiply"}.get(op, op))(a, b))
    z.sum().backward()
    assert x.grad.shape == x.shape and y.grad.shape == y.shape


@given(pairs_of_shapes)
def test_the_gradient_of_a_sum_counts_how_often_an_element_was_used(shapes):
    x, y = (torch.zeros(s, dtype=torch.float64, requires_grad=True) for s in shapes.input_shapes)
    (x + y).sum().backward()
    for v in (x, y):
        times = np.prod(shapes.result_shape) / v.numel() if v.numel() else 0
        np.testing.assert_array_equal(host(v.grad), np.full(v.shape, times))


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=5), st.integers(-9, 9).filter(bool))
def test_floor_division_and_remainder_fit_together_and_are_pythons(numbers, divisor):
    x = torch.tensor(numbers)
    assert (x // divisor).tolist() == [n // divisor for n in numbers]
    assert (x % divisor).tolist() == [n % divisor for n in numbers]
    assert ((x // divisor) * divisor + x % divisor).tolist() == numbers
    assert torch.div(x, divisor, rounding_mode="trunc").tolist() == [int(n / divisor) for n in numbers]


@given(st.sampled_from(list(tensorcases.DTYPES.values())[1:6]), st.integers(-2**40, 2**40))
def test_whole_numbers_beyond_the_range_wrap_as_in_c(dtype, number):
    info = torch.iinfo(getattr(torch, dtype))
    want = (number - info.min) % (info.max - info.min + 1) + info.min
    assert (torch.zeros(1, dtype=getattr(torch, dtype)) + number).item() == want


@pytest.mark.parametrize("low, high", [(-0.5, 0.5), (0.5, -0.5)])
def test_clamp_gives_bounds_that_are_tensors_their_gradients(low, high):
    random = np.random.default_rng(3)
    x = torch.tensor(random.standard_normal((3, 4)), requires_grad=True)
    bounds = (torch.full((4,), low, dtype=torch.float64, requires_grad=True), torch.full((3, 1), high, dtype=torch.float64,
                                                                                         requires_grad=True))
    assert gradcheck(lambda x, low, high: torch.clamp(x, low, high), (x, *bounds))


SPECIAL = "f4!s:5,8"
QUIET = ["x + y", "x - y", "x * y", "x / y", "x % y", "x ** y", "1 / x", "x ** -1", "x ** 0.5", "x * inf", "x.exp()", "x.log()",
         "x.log1p()",
         "x.sqrt()", "x.rsqrt()", "x.tanh()", "x.sigmoid()", "x.sin()", "x.cos()", "x.abs()", "x.square()", "x.reciprocal()",
         "x.round()", "x.sign()",
         "x.clamp(-1, 1)", "torch.maximum(x, y)", "torch.lerp(x, y, 0.5)", "x.half()", "x.long()", "x.int()", "(x * 1e30) * 1e30", "x // 0",
         "torch.div(x, 0.0, rounding_mode='trunc')", "x.detach().double().mul(1e300).float()", "torch.addcdiv(x, y, y)", "x > y",
         "x.half() * 60000"]


@pytest.mark.parametrize("expression", QUIET)
def test_no_numpy_warning_escapes_from_inf_nan_and_zero(expression):
    """The gradients too: `outcome` turns warnings into errors. y has no gradient, so that nothing is added up."""
    assert "error" not in tensorcases.outcome(torch, (expression.replace("y", "y.detach()"), SPECIAL, SPECIAL.replace("5,8", "1,8")))


@pytest.mark.parametrize("expression, recipes, words", [
    ("x + y", ("f4:2,3", "f4:2,4"), ["add", "(2, 3) and (2, 4)", "unsqueeze"]),
    ("torch.clamp(x, y)", ("f4:3", "f4:4"), ["clamp", "(3,) and (4,)"]),
    ("x - y", ("b:2", "b:2"), ["sub", "bool", "^"]),
    ("-x", ("b:2",), ["neg", "~"]),
    ("x // 0", ("i8:2",), ["div", "zero", "inf"]),
    ("x % y", ("i8:2", "b:2"), ["remainder", "zero"]),
    ("x ** -2", ("i8:2",), ["pow", "negative", "-2", "float"]),
    ("x ** 300", ("u1:2",), ["pow", "uint8", "255", "300"]),
    ("x & y", ("f4:2", "f4:2"), ["bitwise_and", "float32", "integers"]),
    ("x.clamp()", ("f4:2",), ["clamp", "min", "max"]),
    ("torch.div(x, 2, rounding_mode='up')", ("f4:2",), ["div", "floor", "trunc", "'up'"]),
    ("torch.lerp(x, x, 0.5)", ("i8:2",), ["lerp", "int64", "float"]),
    ("torch.add(x, x, alpha=0.5)", ("i8:2",), ["alpha", "0.5"]),
    ("torch.add(1, 2)", (), ["Add", "Tensor", "int"]),
    ("torch.eq(1, 2)", (), ["eq", "Tensor", "int"]),
    ("x + 2**70", ("i8:2",), ["1180591620717411303424", "overflow"]),
])
def test_errors_say_what_came_and_what_would_do(expression, recipes, words):
    inputs = dict(zip("xyz", (tensorcases.make(torch, r) for r in recipes)))
    with pytest.raises((RuntimeError, TypeError)) as caught:
        tensorcases.evaluate(torch, expression, inputs)
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)


def test_a_number_never_widens_a_float32_tensor():
    x = torch.ones(2)
    for number in (2.5, 10**10, np.float64(2.5), np.float32(1), np.int64(3), True):
        for y in (x + number, number * x, x / number, x ** number, number / x, torch.where(x > 0, x, number)):
            assert y.dtype == torch.float32


def test_operators_leave_unknown_operands_to_the_other_side():
    class Other:
        def __rmul__(self, other): return "mine"
        def __ror__(self, other): return "mine"

    assert torch.ones(2) * Other() == "mine" and torch.tensor([True]) | Other() == "mine"
    assert (2 & torch.tensor([3, 1])).tolist() == [2, 0] and [1, 2] * torch.tensor(2) == [1, 2, 1, 2]
