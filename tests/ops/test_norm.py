import math

import numpy as np
import pytest
from device import host
from record_ops_fused import assert_close, names, ours, recorded, replay
from twins import assert_leaves_memory_alone, assert_twins

from tinygrad_tf import float16, ones, randn, tensor, zeros
from tinygrad_tf.ops.norm import layer_norm, normalize, rms_norm

pytestmark = pytest.mark.filterwarnings("error")
RANDOM = np.random.default_rng(0)
SHAPES = [((5,), (4,)), ((2, 3), (4,)), ((2,), (3, 4)), ((), (4,)), ((2, 2), (2, 3, 1))]


def arrays(lead, shape, parameters):
    return [RANDOM.normal(size=lead + shape)] + [RANDOM.normal(size=shape) for _ in range(parameters)]


@pytest.mark.parametrize("name", names("norm"))
def test_pytorchs_numbers(name):
    assert_close(ours(name), recorded(name), name)


@pytest.mark.torch
@pytest.mark.parametrize("name", names("norm"))
def test_live(name):
    torch = pytest.importorskip("torch")
    assert_close(ours(name), replay(name, torch, torch.nn.functional), name)


def composed_layer_norm(shape, eps=1e-5):
    axes = tuple(range(-len(shape), 0))

    def y(x, w=1.0, b=0.0):
        centred = x - x.mean(axes, keepdim=True)
        return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt() * w + b
    return y


@pytest.mark.parametrize("lead, shape", SHAPES)
def test_layer_norm_equals_composed(lead, shape):
    for count in (0, 1, 2):
        assert_twins(lambda x, *wb: layer_norm(x, shape, *wb), composed_layer_norm(shape), *arrays(lead, shape, count))
    x, b = arrays(lead, shape, 1)
    assert_twins(lambda x, b: layer_norm(x, shape, bias=b), lambda x, b: composed_layer_norm(shape)(x) + b, x, b)


@pytest.mark.parametrize("lead, shape", SHAPES)
def test_rms_norm_equals_composed(lead, shape):
    axes = tuple(range(-len(shape), 0))
    for count in (0, 1):
        assert_twins(lambda x, *w: rms_norm(x, shape, *w, eps=1e-3) if w else rms_norm(x, shape, eps=1e-3),
                     lambda x, w=1.0: x * (x.square().mean(axes, keepdim=True) + 1e-3).rsqrt() * w, *arrays(lead, shape, count))


@pytest.mark.parametrize("function, parameters", [(lambda x, w, b: layer_norm(x, (4,), w, b), 2), (lambda x, w: rms_norm(x, (4,), w), 1),
                                                  (lambda x: layer_norm(x, (4,)), 0)])
def test_memory(function, parameters):
    assert_leaves_memory_alone(function, *arrays((3, 2), (4,), parameters))
    x, *rest = arrays((3, 2), (4,), parameters)
    assert_leaves_memory_alone(function, x.transpose(1, 0, 2), *rest)


@pytest.mark.parametrize("size", [3, 128, 384])
@pytest.mark.parametrize("offset", [0.0, 100.0, -3e4])
def test_layer_norm_beside_a_large_mean(size, offset):
    """float32 stays near float64 computed from the same inputs: mean(x²) − μ² would lose every digit here."""
    x = (RANDOM.normal(size=(16, size)) + offset).astype(np.float32)
    dy = RANDOM.normal(size=x.shape)
    results = []
    for dtype in (np.float32, np.float64):
        t = tensor(x.astype(dtype), requires_grad=True)
        y = layer_norm(t, (size,))
        y.backward(tensor(dy.astype(dtype)))
        results.append((host(y), host(t.grad)))
    for found, wanted in zip(*results):
        assert np.abs(found - wanted).max() <= (2e-6 + 4e-7 * abs(offset)) * np.abs(wanted).max()


def test_gradient_is_zero_along_what_the_norm_removes():
    """A constant added to x, or a factor on it, changes nothing, so dx has no part along 1 and along x."""
    x = randn(6, 32, requires_grad=True)
    layer_norm(x, (32,), eps=0.0).backward(randn(6, 32))
    assert np.abs(host(x.grad.sum(-1))).max() < 1e-4 and np.abs(host((x.grad * x.detach()).sum(-1))).max() < 1e-4


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows(shape):
    x, w, b = zeros(*shape).requires_grad_(), ones(4).requires_grad_(), zeros(4).requires_grad_()
    for y in (layer_norm(x, (4,), w, b), rms_norm(x, (4,), w)):
        y.sum().backward()
        assert y.shape == x.grad.shape == shape and w.grad.tolist() == [0, 0, 0, 0]
    assert layer_norm(zeros(3, 0), (0,)).shape == (3, 0)


def test_half_precision_has_float32_statistics():
    x = tensor([[300.0, 301.0, 299.0, 300.0]]).to(float16)        # 300² is beyond float16
    assert np.isfinite(host(layer_norm(x, (4,)))).all() and layer_norm(x, (4,)).dtype == float16
    np.testing.assert_allclose(host(rms_norm(x, (4,))), 1, atol=1e-2)


def test_the_shape_may_be_an_int():
    x = randn(2, 4)
    np.testing.assert_array_equal(host(layer_norm(x, 4)), host(layer_norm(x, (4,))))


@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_wrong_calls(function):
    with pytest.raises(RuntimeError, match=r"normalized_shape=\[5\].*\[\*, 5\].*\[2, 4\]"):
        function(randn(2, 4), (5,))
    with pytest.raises(RuntimeError, match=r"\[\*, 1, 2, 4\]"):
        function(randn(2, 4), (1, 2, 4))
    with pytest.raises(RuntimeError, match=r"at least one axis.*\[4\]"):
        function(randn(2, 4), ())
    with pytest.raises(RuntimeError, match=r"weight.*\[4\].*\[3\]"):
        function(randn(2, 4), (4,), ones(3))
    with pytest.raises(RuntimeError, match="int64"):
        function(tensor([[1, 2]]), (2,))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_normalize_gives_unit_length(p, dim):
    x = normalize(randn(3, 4, 5), p=p, dim=dim)
    np.testing.assert_allclose(np.linalg.norm(host(x), ord=p, axis=dim), 1, rtol=1e-5)


@pytest.mark.parametrize("dtype, large", [("float32", 1e25), ("float32", 1e30), ("float64", 1e200)])
@pytest.mark.parametrize("size", [3, 64, 2000])
def test_a_row_whose_variance_overflows_is_nan_and_not_zeros(dtype, large, size):
    x = np.concatenate([RANDOM.normal(size=(1, size)) * large, RANDOM.normal(size=(1, size))]).astype(dtype)
    for parameters in ((), (ones(size).to(tensor(x).dtype),) * 2):
        t = tensor(x, requires_grad=True)
        y = layer_norm(t, (size,), *parameters)
        y.sum().backward()
        assert y[0].isnan().all() and t.grad[0].isnan().all() and not y[1].isnan().any() and not t.grad[1].isnan().any()


@pytest.mark.torch
@pytest.mark.parametrize("large", [1e15, 1e18, 1e25])
def test_large_rows_live(large):
    """Where PyTorch's answer does not depend on the size of the row: layer norm of 3, RMS norm of any."""
    torch, x = pytest.importorskip("torch"), (np.array([[1, -1, 3]]) * large).astype(np.float32)
    for function in (layer_norm, rms_norm):
        wanted = getattr(torch.nn.functional, function.__name__)(torch.tensor(x), (3,))
        np.testing.assert_allclose(host(function(tensor(x), (3,))), host(wanted), rtol=1e-6, atol=0)
