"""Moving elements: PyTorch's results and errors, gradients that move back, and round trips."""
import numpy as np
import pytest
from device import host
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tinygrad_tf as torch

shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)
ROUND_TRIPS = {
    "reshape": lambda x: x.reshape(-1).reshape(x.shape),
    "flatten": lambda x: x.flatten().view(x.shape),
    "unflatten": lambda x: x.unflatten(0, (1, -1)).squeeze(0),
    "transpose": lambda x: x.transpose(0, -1).transpose(-1, 0),
    "permute": lambda x: x.permute(*range(x.ndim)[::-1]).T,
    "movedim": lambda x: x.movedim(0, -1).movedim(-1, 0),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "flip": lambda x: x.flip(0).flip(0),
    "roll": lambda x: x.roll(2, 0).roll(-2, 0),
    "split": lambda x: torch.cat(x.split(2)),
    "chunk": lambda x: torch.cat(x.chunk(3, -1), -1),
    "unbind": lambda x: torch.stack(x.unbind(0)) if len(x) else x.clone(),
    "expand": lambda x: x.expand(3, *x.shape)[1],
    "repeat": lambda x: x.repeat(2, *[1] * (x.ndim - 1))[:len(x)],
    "interleave": lambda x: x.repeat_interleave(3, 0)[::3],
    "pad": lambda x: torch.nn.functional.pad(torch.nn.functional.pad(x, (2, 1)), (-2, -1)),
    "contiguous": lambda x: x.T.contiguous().T,
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
@given(shape=shapes)
def test_there_and_back_is_the_same_forward_and_backward(name, shape):
    x = torch.tensor(np.random.default_rng(0).standard_normal(shape), requires_grad=True)
    y = ROUND_TRIPS[name](x)
    assert y.shape == x.shape and torch.equal(y, x)
    upstream = torch.tensor(np.random.default_rng(1).standard_normal(shape))
    (y * upstream).sum().backward()
    assert torch.equal(x.grad, upstream)


@given(shapes.filter(lambda s: len(s) >= 2), st.integers(-3, 3))
def test_two_triangles_make_the_whole(shape, diagonal):
    x = torch.tensor(np.random.default_rng(0).standard_normal(shape))
    assert torch.equal(torch.tril(x, diagonal) + torch.triu(x, diagonal + 1), x)
    np.testing.assert_array_equal(host(x.diagonal(diagonal)), np.diagonal(host(x), diagonal))


@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3))
def test_expand_is_broadcasting_without_a_copy(shapes):
    source, result = shapes.input_shapes[0], shapes.result_shape
    x = torch.zeros(source)
    assert x.expand(result).shape == result and x.expand(result).data_ptr() == x.data_ptr()


@given(st.lists(hnp.array_shapes(min_dims=2, max_dims=2, max_side=4), min_size=1, max_size=4))
def test_cat_takes_what_agrees_beside_its_axis_and_splits_again(sizes):
    tensors = [torch.tensor(np.random.default_rng(i).standard_normal((n, 3)), requires_grad=True) for i, (n, _) in enumerate(sizes)]
    joined = torch.cat(tensors)
    parts = joined.split([len(t) for t in tensors])
    assert all(torch.equal(p, t) for p, t in zip(parts, tensors))
    (joined ** 2).sum().backward()
    assert all(torch.allclose(t.grad, 2 * t) for t in tensors)


@pytest.mark.parametrize("view", ["x.view(3, 2)", "x[0]", "x[:, 1:]", "x.T", "x.unsqueeze(0)", "x.expand(4, 2, 3)", "x.reshape(6)",
                                  "x.detach()", "x.data",
                                  "x.split(1)[0]", "x.chunk(2)[0]", "x.unbind()[0]", "x.permute(1, 0)", "x.squeeze()",
                                  "x.flatten()", "x.mT"])
def test_views_share_memory_and_copies_do_not(view):
    x = torch.zeros(2, 3)
    y = eval(view, {"x": x})
    x.fill_(7)
    assert y.reshape(-1)[0].item() == 7 and x.clone().data_ptr() != x.data_ptr()


def test_meshgrid_passes_gradients_on():
    x, y = torch.arange(3.0).requires_grad_(), torch.arange(2.0).requires_grad_()
    a, b = torch.meshgrid(x, y, indexing="xy")
    (a * 2 + b * 3).sum().backward()
    assert a.shape == (2, 3) and x.grad.tolist() == [4, 4, 4] and y.grad.tolist() == [9, 9]


@pytest.mark.parametrize("expression, error, words", [
    ("x.reshape(4, 2)", RuntimeError, ["reshape", "(4, 2)", "(2, 3)", "6"]),
    ("x.reshape(-1, -1)", RuntimeError, ["reshape", "one", "-1"]),
    ("x.T.view(6)", RuntimeError, ["view", "(3, 2)", "(6,)", "reshape", "contiguous"]),
    ("x.expand(3, 3)", RuntimeError, ["expand", "(2, 3)", "(3, 3)", "size 1"]),
    ("x.permute(0)", RuntimeError, ["permute", "1 axes", "2 dimensions"]),
    ("x.transpose(0, 2)", IndexError, ["transpose", "[-2, 1]"]),
    ("torch.cat([x, x[0]])", RuntimeError, ["cat", "(2, 3)", "(3,)"]),
    ("torch.cat([x, x.T])", RuntimeError, ["cat", "(2, 3)", "(3, 2)"]),
    ("torch.cat(x)", TypeError, ["cat", "list", "Tensor"]),
    ("torch.cat([x[0, 0]])", RuntimeError, ["cat", "stack"]),
    ("torch.stack([x, x.T])", RuntimeError, ["stack", "(2, 3)", "(3, 2)"]),
    ("x.split([1, 5], 1)", RuntimeError, ["split", "[1, 5]", "3", "(2, 3)"]),
    ("x[0, 0].split(1)", RuntimeError, ["split", "1-dimensional", "reshape"]),
    ("x.chunk(0)", RuntimeError, ["chunk", "0"]),
    ("x.unflatten(1, (2, 2))", RuntimeError, ["unflatten", "(2, 2)", "3"]),
    ("x.repeat(2)", RuntimeError, ["repeat", "2 dimensions", "(2,)"]),
    ("x.roll((1, 2), 0)", RuntimeError, ["roll", "(1, 2)"]),
    ("x.t().unsqueeze(0).t()", RuntimeError, ["t:", "(1, 3, 2)", "mT"]),
    ("x[0].mT", RuntimeError, ["mT", "(3,)"]),
    ("x.diagonal(0, 1, 1)", RuntimeError, ["diagonal", "two axes"]),
    ("torch.nn.functional.pad(x, (1, ))", RuntimeError, ["pad", "pairs", "(1,)"]),
    ("torch.nn.functional.pad(x, (-2, -2))", RuntimeError, ["pad", "crop", "(2, 3)"]),
    ("torch.meshgrid(x, x)", RuntimeError, ["meshgrid", "1-D", "(2, 3)"]),
    ("x.reshape(2.0, 3)", TypeError, ["reshape", "ints"]),
])
def test_errors_say_what_came_and_what_would_do(expression, error, words):
    with pytest.raises(error) as caught:
        eval(expression, {"x": torch.ones(2, 3), "torch": torch})
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("op", ["view", "reshape"])
@pytest.mark.parametrize("size", [(4, 2), (-1, -1), (-2, 3), (4, -1)])
def test_the_error_names_the_call(op, size):
    with pytest.raises(RuntimeError, match=f"^{op}: "):
        getattr(torch.ones(3, 2), op)(*size)
