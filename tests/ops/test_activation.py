import math

import numpy as np
import pytest
from device import host
from record_ops_fused import assert_close, names, ours, recorded, replay
from twins import assert_leaves_memory_alone, assert_twins

import tinygrad_tf
from tinygrad_tf import no_grad, randn, tensor
from tinygrad_tf.ops import _rows
from tinygrad_tf.ops._rows import PIECE
from tinygrad_tf.ops.activation import erf, gelu, glu, leaky_relu, relu, relu_squared, silu, softplus

pytestmark = pytest.mark.filterwarnings("error")
X = np.random.default_rng(0).normal(0, 2, (5, 7))
ALL = {"relu": relu, "leaky_relu": leaky_relu, "erf": erf, "gelu": gelu, "gelu tanh": lambda x: gelu(x, "tanh"), "silu": silu,
       "softplus": softplus}


@pytest.mark.parametrize("name", names("activation"))
def test_pytorchs_numbers(name):
    assert_close(ours(name), recorded(name), name)


@pytest.mark.torch
@pytest.mark.parametrize("name", names("activation"))
def test_live(name):
    torch = pytest.importorskip("torch")
    assert_close(ours(name), replay(name, torch, torch.nn.functional), name)


@pytest.mark.parametrize("fused, composed", [
    (relu, lambda x: x.clamp_min(0.0)),
    (leaky_relu, lambda x: x.clamp_min(0.0) + x.clamp_max(0.0) * 0.01),
    (gelu, lambda x: x * (1 + erf(x / math.sqrt(2))) / 2),
    (lambda x: gelu(x, "tanh"), lambda x: x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh()) / 2),
    (silu, lambda x: x * x.sigmoid()),
    (relu_squared, lambda x: x.clamp_min(0.0) * x.clamp_min(0.0)),
    (softplus, lambda x: (1 + x.exp()).log())],
    ids=["relu", "leaky_relu", "gelu", "gelu tanh", "silu", "relu_squared", "softplus"])
def test_fused_equals_composed(fused, composed):
    assert_twins(fused, composed, X)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (3, 1)])
def test_any_shape(name, shape):
    x = randn(*shape).requires_grad_() if shape else tensor(0.7, requires_grad=True)
    y = ALL[name](x)
    y.backward(y.detach())
    assert y.shape == x.grad.shape == shape and y.dtype == x.grad.dtype == x.dtype


@pytest.mark.parametrize("name", ALL)
def test_memory(name):
    assert_leaves_memory_alone(ALL[name], X)
    assert_leaves_memory_alone(ALL[name], X.astype(np.float32).T)


@pytest.mark.parametrize("name", ["gelu", "gelu tanh", "silu"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_far_out_an_activation_is_x_or_0(name, dtype):
    x = tensor(np.array([1e3, 1e10, -1e3, -1e10, 1e18, -1e18], dtype), requires_grad=True)
    y = ALL[name](x)
    y.sum().backward()
    np.testing.assert_array_equal(host(y), np.maximum(host(x), 0))
    np.testing.assert_array_equal(host(x.grad), host(x) > 0)


def test_gelu_facts():
    """The two forms differ by at most 4.8e-4; the smallest value is −0.16997, near −0.7518."""
    x = tinygrad_tf.linspace(-6, 6, 24001, dtype=tinygrad_tf.float64)
    exact, approximate = gelu(x), gelu(x, "tanh")
    assert 4.6e-4 < (exact - approximate).abs().max().item() < 4.8e-4
    assert abs(exact.min().item() + 0.16997) < 1e-5 and abs(x[exact.argmin()].item() + 0.7518) < 1e-3


@pytest.mark.parametrize("name", ["gelu", "gelu tanh", "silu"])
def test_the_slope_is_computed_only_where_it_is_wanted(name):
    x = randn(3, requires_grad=True)
    assert ALL[name](x).grad_fn.saved.shape == (3,)
    with no_grad():
        assert ALL[name](x).grad_fn is None


@pytest.mark.parametrize("name", ["leaky_relu", "gelu", "gelu tanh", "silu", "softplus"])
def test_integers_are_refused(name):
    with pytest.raises(RuntimeError, match=r"int64.*float\(\)"):
        ALL[name](tensor([1, 2]))


def test_integers_where_pytorch_takes_them():
    assert relu(tensor([-1, 2])).tolist() == [0, 2]
    assert erf(tensor([0])).dtype == tinygrad_tf.float32
    with pytest.raises(RuntimeError, match="boolean"):
        relu(tensor([True]))


def test_unknown_approximation():
    with pytest.raises(RuntimeError, match="'none'.*'tanh'.*'fast'"):
        gelu(randn(2), approximate="fast")


@pytest.mark.parametrize("function", [relu, silu, leaky_relu])
def test_in_place(function):
    x = randn(6, requires_grad=True)
    fresh, written = x * 1, x * 1
    y = function(fresh)
    assert function(written, inplace=True) is written
    np.testing.assert_array_equal(host(written), host(y))
    (written * written).sum().backward()
    by_place, x.grad = x.grad, None
    (y * y).sum().backward()
    np.testing.assert_array_equal(host(by_place), host(x.grad))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_glu_is_the_first_half_times_the_gate_of_the_second(dim):
    x = tensor(np.random.default_rng(0).normal(size=(4, 6)), requires_grad=True)
    (a, b), axis = np.split(host(x), 2, axis=dim), dim % 2
    gate = 1 / (1 + np.exp(-b))
    y = glu(x, dim)
    y.sum().backward()
    np.testing.assert_allclose(host(y), a * gate, rtol=1e-12)
    np.testing.assert_allclose(host(x.grad), np.concatenate([gate, a * gate * (1 - gate)], axis=axis), rtol=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("shape, dim", [((4, 6), 0), ((4, 6), -1), ((2, 3, 2), 2), ((3, 5), 1), ((), 0), ((2, 2), 2)])
def test_glu_live(shape, dim):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=shape)
    try:
        expected = host(torch.nn.functional.glu(torch.tensor(x), dim))
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            glu(tensor(x), dim)
    else:
        np.testing.assert_allclose(host(glu(tensor(x), dim)), expected, rtol=1e-12)

@pytest.mark.parametrize("size", [1, 2 * PIECE, 2 * PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("name", ["gelu", "gelu tanh", "silu"])
def test_in_pieces_as_in_one(name, size, monkeypatch):
    """Bit for bit, value and slope, for sizes on both sides of each border; the last axis is not that of the pieces."""
    x = host(randn(size).array).reshape(-1, 1 if size % 5 else 5)

    def of(x):
        leaf = tensor(x, requires_grad=True)
        y = ALL[name](leaf)
        y.sum().backward()
        with no_grad():
            assert (host(ALL[name](leaf).array) == host(y.array)).all()
        return host(y.array), host(leaf.grad.array)
    found = of(x)
    monkeypatch.setattr(_rows, "PIECE", 10**9)
    for a, b in zip(found, of(x), strict=True):
        assert a.shape == x.shape and a.tobytes() == b.tobytes()
