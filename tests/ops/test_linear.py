"""Matrix products: every pair of ranks as PyTorch, gradients, empty ones, einsum."""
import numpy as np
import pytest
import tensorcases
from device import host
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tinygrad_tf as torch
from tinygrad_tf.gradcheck import gradcheck


@given(hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, min_side=0, max_side=3, max_dims=3))
def test_all_shapes_that_numpy_multiplies(shapes):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(s) for s in shapes.input_shapes)
    x, y = torch.tensor(a, requires_grad=True), torch.tensor(b, requires_grad=True)
    z = x @ y
    assert z.shape == shapes.result_shape
    np.testing.assert_allclose(host(z), a @ b, atol=1e-12)
    z.sum().backward()
    assert x.grad.shape == x.shape and y.grad.shape == y.shape


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_the_products_agree_with_each_other(n, k, m):
    random = np.random.default_rng(n * 9 + k * 3 + m)
    x, y, v = (torch.tensor(random.standard_normal(s)) for s in ((2, n, k), (2, k, m), (k,)))
    assert torch.allclose(torch.bmm(x, y), torch.stack([torch.mm(x[0], y[0]), torch.mm(x[1], y[1])]))
    assert torch.allclose(torch.einsum("bij,bjk->bik", x, y), x @ y)
    assert torch.allclose(torch.mv(x[0], v), torch.stack([torch.dot(row, v) for row in x[0]]))
    assert torch.allclose(torch.outer(v, v), v[:, None] @ v[None])
    assert torch.allclose(torch.nn.functional.linear(x, y[0].T, None), x @ y[0])


@pytest.mark.parametrize("equation, shapes", [("ij,jk,kl->il", [(2, 3), (3, 2), (2, 2)]), ("bhqd,bhkd->bhqk", [(1, 2, 3, 2), (1, 2, 2, 2)]),
                                              ("...ij,...j->...i", [(2, 2, 3), (2, 3)]), ("ij->", [(2, 3)]), ("ij,k->kj", [(2, 3), (2,)]),
                                              ("...ij,...jk->...ik", [(2, 1, 2, 3), (3, 3, 2)]), ("ij,ij->ij", [(2, 1), (1, 3)]),
                                              ("ij,jk", [(2, 1), (3, 2)]), ("...,...", [(1,), (2, 3)]), ("ij,j->", [(1, 0), (1,)])])
def test_einsum_has_right_gradients(equation, shapes):
    random = np.random.default_rng(0)
    operands = tuple(torch.tensor(random.standard_normal(s), requires_grad=True) for s in shapes)
    assert gradcheck(lambda *xs: torch.einsum(equation, *xs), operands)


def test_half_precision_is_multiplied_in_float32():
    x = torch.full((1, 4096), 0.1).half()
    assert abs((x @ x.T).item() - 4096 * float(x[0, 0]) ** 2) < 0.05 and (x @ x.T).dtype == torch.float16


@pytest.mark.parametrize("expression", ["x @ x.T.detach()", "torch.nn.functional.linear(x, x.detach())",
                                        "torch.einsum('ij,kj->ik', x, x.detach())", "x.half() @ y"])
def test_no_numpy_warning_escapes_from_inf_and_nan(expression):
    expression = expression.replace("y", "torch.full((5, 2), 6e4).half()")
    assert "error" not in tensorcases.outcome(torch, (expression, "f4!s:4,5"))


@pytest.mark.parametrize("expression, error, words", [
    ("x @ x", RuntimeError, ["matmul", "(2, 3)", "3", "2", "transpose"]),
    ("x @ x[0, 0]", RuntimeError, ["matmul", "(2, 3)", "()", "*"]),
    ("x.expand(2, 2, 3) @ torch.ones(3, 3, 1)", RuntimeError, ["matmul", "(2, 2, 3)", "(3, 3, 1)", "broadcast"]),
    ("x @ x.T.double()", RuntimeError, ["matmul", "float32", "float64", ".to("]),
    ("torch.matmul(x, 3)", TypeError, ["matmul", "tensors", "int"]),
    ("torch.mm(x, x[0])", RuntimeError, ["mm", "2-D", "(3,)", "matmul"]),
    ("torch.bmm(x, x)", RuntimeError, ["bmm", "3-D"]),
    ("torch.dot(x[0], x)", RuntimeError, ["dot", "1-D", "(2, 3)"]),
    ("torch.nn.functional.linear(x, x.T)", RuntimeError, ["linear", "(2, 3)", "(3, 2)", "[out, in]"]),
    ("torch.nn.functional.linear(x, x, x[0])", RuntimeError, ["linear", "bias", "(3,)", "(2,)"]),
    ("torch.einsum('ij,jk', x, x)", RuntimeError, ["einsum", "'ij,jk'", "'j'", "3 and 2"]),
    ("torch.einsum('ij', x, x)", RuntimeError, ["einsum", "1 operands", "2"]),
    ("torch.einsum('ii', x)", RuntimeError, ["einsum", "'ii'", "once"]),
    ("torch.einsum('ij->ik', x)", RuntimeError, ["einsum", "'ik'"]),
    ("torch.einsum('ij,kj', x, x.double())", RuntimeError, ["einsum", "float32", "float64"]),
    ("torch.einsum('ij,kj', x > 0, x > 0)", RuntimeError, ["einsum", "bool"]),
    ("torch.einsum('éj', x)", RuntimeError, ["einsum", "letters"]),
    ("torch.einsum([])", TypeError, ["einsum", "equation", "str", "list"]),
    ("torch.einsum(x, x)", TypeError, ["einsum", "equation", "str", "Tensor"]),
    ("torch.einsum('...i,...i', x, torch.ones(5, 3))", RuntimeError, ["einsum", "2 and 5"]),
])
def test_errors_say_what_came_and_what_would_do(expression, error, words):
    with pytest.raises(error) as caught:
        eval(expression, {"x": torch.ones(2, 3), "torch": torch})
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)
