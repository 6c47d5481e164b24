"""`Tensor`: its attributes, conversions and in-place methods as PyTorch's."""
import copy
import operator
import pickle

import numpy as np
import pytest
from device import host
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tinygrad_tf as torch

IN_PLACE = sorted(n for n in dir(torch.Tensor)
                  if n.endswith("_") and not n.startswith("_") and n != "requires_grad_" and hasattr(torch.Tensor, n[:-1]))
ARGUMENTS = {"clamp": (-0.5, 0.5), "clamp_max": (0.5,), "clamp_min": (0.5,), "lerp": ("y", 0.5), "addcmul": ("y", "y"),
             "addcdiv": ("y", "y"),
             "masked_fill": ("x > 0", 2.0), "scatter": (0, "i", "y"), "scatter_add": (0, "i", "y"), "index_add": (0, "j", "y"), "pow": (3,)}
TWO_OPERANDS = {"add", "sub", "mul", "div", "remainder", "floor_divide", "bitwise_and", "bitwise_or", "bitwise_xor"}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_in_place_method_is_its_operation_written_back(name):
    """Same numbers, same gradients, same memory, for every method that has both forms."""
    op = name[:-1]
    x = torch.tensor([[0.5, 1.5, -2.0], [3.0, -0.25, 1.0]], requires_grad=not op.startswith(("bitwise", "floor_div")))
    x = x if x.requires_grad else x.detach().long()
    y = (x.detach() if x.requires_grad else x) * 2 + 1
    scope = {"x": x, "y": y, "x > 0": x > 0, "i": torch.tensor([[0, 1, 0]]), "j": torch.tensor([1, 0])}
    arguments = [scope.get(a, a) if isinstance(a, str) else a for a in ARGUMENTS.get(op, ("y",) if op in TWO_OPERANDS else ())]
    target = x * 1
    alias = target
    want, got = getattr(x * 1, op)(*arguments), getattr(target, name)(*arguments)
    assert got is target is alias
    np.testing.assert_array_equal(host(got), host(want))
    if want.requires_grad:
        gradients = []
        for result in (want, got):
            x.grad = None
            result.sum().backward()
            gradients.append(host(x.grad))
        np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize("op", ["+=", "-=", "*=", "/=", "//=", "%=", "**=", "&=", "|=", "^="])
def test_augmented_assignment_writes_into_the_same_memory(op):
    x = torch.tensor([7, 5, 3]) if op in ("&=", "|=", "^=") else torch.tensor([7.0, 5.0, 3.0])
    view, scope = x[1:], {"x": x}
    exec(f"x {op} 2", scope)
    assert scope["x"] is x and view.tolist() == x[1:].tolist() != [5, 3]


def test_an_in_place_result_keeps_its_dtype_or_raises():
    x = torch.ones(2)
    x += torch.ones(2, dtype=torch.float64)
    assert x.dtype == torch.float32
    for bad in (lambda: torch.ones(2, dtype=torch.int64).add_(0.5), lambda: torch.ones(2, dtype=torch.int64).div_(2),
                lambda: torch.tensor([True]).add_(1)):
        with pytest.raises(RuntimeError, match="result type"):
            bad()


def test_an_in_place_operation_without_gradient_cuts_the_history():
    x = torch.tensor([1.5, 2.5], requires_grad=True)
    y = x * 2
    y.floor_divide_(2)
    assert not y.requires_grad and y.tolist() == [1, 2]
    (y * x).sum().backward()
    assert x.grad.tolist() == [1, 2]


@given(hnp.arrays(st.sampled_from([np.float32, np.int64, np.bool_]), hnp.array_shapes(min_dims=0, max_side=3),
                  elements=st.sampled_from([0, 1])))
def test_to_numpy_and_back(array):
    x = torch.from_numpy(array)
    assert x.device == torch.device("cpu")
    assert x.tolist() == array.tolist() and np.shares_memory(host(x), array) and np.asarray(x).dtype == array.dtype
    assert x.shape == array.shape and x.stride() == tuple(s // array.itemsize for s in array.strides) and len(x.size()) == x.dim()
    assert torch.equal(torch.tensor(x.tolist(), dtype=x.dtype, device="cpu").reshape(x.shape), x)


def test_copies_are_independent_and_keep_what_they_are():
    x = torch.ones(2, requires_grad=True)
    (x * 3).sum().backward()
    y = copy.deepcopy([x, x])
    y[0].data.fill_(5)
    assert y[0] is y[1] and y[0].requires_grad and y[0].grad.tolist() == [3, 3] and x.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="leaf"):
        copy.deepcopy(x * 2)
    with pytest.raises(TypeError, match="safetensors"):
        pickle.dumps(x)


def test_a_tensor_is_its_own_key_and_compares_by_element():
    x = torch.ones(2)
    assert {x: 1}[x] == 1 and hash(x) != hash(torch.ones(2)) and (x == torch.ones(2)).all() and x in [x]


def test_python_protocols():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert [r.tolist() for r in x] == [[1, 2], [3, 4]] and len(x) == 2 and f"{x[0, 0]:.2f}" == "1.00" and f"{x[0, 0]}" == "1.0"
    assert ["a", "b"][torch.tensor(1)] == "b" and list(range(torch.tensor(3))) == [0, 1, 2] and round(float(x[1, 1])) == 4
    assert sum(x[0]).item() == 3 and max(x[0]).item() == 2 and not torch.tensor(0) and +x is x


@pytest.mark.parametrize("expression, error, words", [
    ("x.item()", RuntimeError, ["item", "6 elements", "(2, 3)"]),
    ("float(x)", ValueError, ["float", "(2, 3)"]),
    ("bool(x)", RuntimeError, ["bool", "6", "any()", "all()"]),
    ("len(x[0, 0])", TypeError, ["0-d"]),
    ("range(x)", TypeError, ["integer", "float32", "(2, 3)"]),
    ("x.long().requires_grad_()", RuntimeError, ["floating point", "int64"]),
    ("x.requires_grad_().numpy()", RuntimeError, ["numpy", "detach()"]),
    ("x.requires_grad_().add_(1)", RuntimeError, ["leaf", "no_grad", "clone"]),
    ("x.requires_grad_()[0].add_(1)", RuntimeError, ["leaf", "no_grad", "clone"]),
    ("x.expand(2, 2, 3).add_(1)", RuntimeError, ["expanded", "clone"]),
    ("x.add_(torch.ones(2, 2, 3))", RuntimeError, ["(2, 3)", "(2, 2, 3)"]),
    ("x.fill_(torch.ones(2))", RuntimeError, ["number", "(2,)"]),
    ("x.to('gpu')", RuntimeError, ["'gpu'", "'cpu'", "'cuda'"]),
    ("x.to(dtype='float31')", TypeError, ["dtype", "float32"]),
    ("setattr(x, 'data', torch.ones(2))", RuntimeError, ["data", "(2, 3)", "(2,)"]),
    ("(x.requires_grad_() * 2).backward()", RuntimeError, ["scalar", "(2, 3)", "sum()"]),
    ("x.backward()", RuntimeError, ["does not require grad", "requires_grad=True"]),
])
def test_errors_say_what_came_and_what_would_do(expression, error, words):
    with pytest.raises(error) as caught:
        eval(expression, {"x": torch.ones(2, 3), "torch": torch})
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)


OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.matmul,
             operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_, operator.or_, operator.xor]


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_between_a_tensor_and_an_array_says_what_to_do(op):
    for a, b in [(torch.ones(2), np.ones(2)), (np.ones(2), torch.ones(2))]:
        with pytest.raises(TypeError, match="from_numpy"):
            op(a, b)


@pytest.mark.parametrize("function", [np.sum, np.mean, np.prod, np.argmax])
def test_functions_of_numpy_that_call_the_method(function):
    x = torch.arange(6.0).reshape(2, 3)
    assert function(x, axis=1).tolist() == function(host(x), axis=1).tolist()
