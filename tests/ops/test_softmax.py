import math

import numpy as np
import pytest
from device import host
from record_ops_fused import assert_close, names, ours, recorded, replay
from twins import assert_leaves_memory_alone, assert_twins

import tinygrad_tf
from tinygrad_tf import randn, tensor
from tinygrad_tf.ops.softmax import log_softmax, logsumexp, softmax

pytestmark = pytest.mark.filterwarnings("error")
X = np.random.default_rng(0).normal(0, 2, (3, 4, 5))


@pytest.mark.parametrize("name", names("softmax"))
def test_pytorchs_numbers(name):
    assert_close(ours(name), recorded(name), name)


@pytest.mark.torch
@pytest.mark.parametrize("name", names("softmax"))
def test_live(name):
    torch = pytest.importorskip("torch")
    assert_close(ours(name), replay(name, torch, torch.nn.functional), name)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_fused_equals_composed(dim):
    assert_twins(lambda x: softmax(x, dim), lambda x: x.exp() / x.exp().sum(dim, keepdim=True), X)
    assert_twins(lambda x: log_softmax(x, dim), lambda x: x - x.exp().sum(dim, keepdim=True).log(), X)


@pytest.mark.parametrize("dim", [0, -1, (0, 1), (2, 0), (0, 1, 2), ()])
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_equals_composed(dim, keepdim):
    assert_twins(lambda x: logsumexp(x, dim, keepdim), lambda x: x.exp().sum(dim, keepdim).log(), X)


@pytest.mark.parametrize("function", [lambda x: softmax(x, 1), lambda x: log_softmax(x, -1), lambda x: logsumexp(x, (0, 2))])
def test_memory(function):
    assert_leaves_memory_alone(function, X)
    assert_leaves_memory_alone(function, X.astype(np.float32).transpose(2, 0, 1))


def test_the_jacobian_of_the_guide():
    """∂p_i/∂z_j = p_i (δ_ij − p_j) at [2, 1, 0]"""
    z = tensor([2.0, 1.0, 0.0], requires_grad=True)
    rows = []
    for i in range(3):
        z.grad = None
        softmax(z, -1)[i].backward()
        rows.append(z.grad.tolist())
    np.testing.assert_allclose(rows, [[.2227, -.1628, -.0599], [-.1628, .1848, -.0220], [-.0599, -.0220, .0819]], atol=5e-5)


def test_large_scores_do_not_overflow():
    np.testing.assert_array_equal(host(softmax(tensor([1000.0, 0.0, -math.inf]), -1)), [1, 0, 0])
    np.testing.assert_array_equal(host(log_softmax(tensor([1000.0, 0.0]), -1)), [0, -1000])
    assert logsumexp(tensor([1000.0, 1000.0]), 0).item() == pytest.approx(1000 + math.log(2))


def test_rows_of_minus_infinity():
    """softmax is 0/0 there, as in PyTorch; the rows beside it are untouched."""
    x = tensor([[-math.inf, -math.inf], [0.0, 0.0]], requires_grad=True)
    y = softmax(x, -1)
    y.backward(randn(2, 2))
    assert np.isnan(host(y)[0]).all() and y[1].tolist() == [0.5, 0.5]
    assert np.isfinite(host(x.grad)[1]).all()
    assert logsumexp(x, 1)[0].item() == -math.inf


def test_a_long_row_sums_to_one():
    p = softmax(randn(4, 50_257) * 3, -1)
    np.testing.assert_allclose(host(p).astype(np.float64).sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_wrong_calls(function):
    with pytest.raises(IndexError, match=r"\[-2, 1\], but got 2"):
        function(randn(2, 3), 2)
    with pytest.raises(RuntimeError, match="int64"):
        function(tensor([1, 2]), 0)
    with pytest.raises(TypeError, match="dim"):
        function(randn(2), None)
    assert function(tensor([1, 2]), 0, dtype=tinygrad_tf.float64).dtype == tinygrad_tf.float64
