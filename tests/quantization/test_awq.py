"""Activation-aware scaling: nothing changes but the rounding, which is never worse, and finer where inputs are large."""
import sys

import numpy as np
import pytest
from device import host, placed
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization.calibrated import SCHEMES, case, every_scheme, statistics_of, true_error

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.quantization import INT4, QuantizedLinear, Scheme, awq, round_to_nearest
from tinygrad_tf.quantization.awq import POINTS, input_scale
from tinygrad_tf.quantization.linear import Codes, restored


def test_without_rounding_it_changes_nothing(monkeypatch):
    """x Wᵀ = (x / t) (W t)ᵀ, also with the t that float16 holds."""
    monkeypatch.setattr(sys.modules[awq.__module__], "round_to_nearest", unrounded)
    W, X = case()
    codes = awq(placed(W), Scheme(8), statistics_of(X))
    assert np.allclose(host(restored(codes, Scheme(8), np.float64)), W, rtol=1e-6)
    x, t = X.astype(np.float64), host(codes.input_scale).astype(np.float64)
    assert np.allclose(x / t @ (W * t).T, x @ W.T, rtol=1e-12, atol=1e-12)


def unrounded(weight, scheme, name):
    return Codes(weight.astype(np.float64), placed(np.float64(1)), placed(np.int32(0)))


@settings(max_examples=20)
@given(st.sampled_from(SCHEMES), st.integers(1, 40), st.integers(0, 999), st.floats(0, 2))
def test_is_never_worse_than_rounding_to_nearest(scheme, rows, seed, spread):
    W, X = case(rows, seed=seed, spread=spread)
    codes, nearest = awq(placed(W), scheme, statistics_of(X)), round_to_nearest(placed(W), scheme)
    assert true_error(codes, scheme, W, X) <= true_error(nearest, scheme, W, X) * (1 + 1e-9)


@every_scheme
def test_alpha_is_the_best_of_the_grid(scheme):
    W, X = case()
    statistics = statistics_of(X)
    errors = []
    for alpha in np.linspace(0, 1, POINTS + 1):
        t = input_scale(statistics, float(alpha))
        codes = round_to_nearest(placed(W) * t.astype(np.float32), scheme)._replace(input_scale=t)
        errors.append(true_error(codes, scheme, W, X))
    assert np.isclose(true_error(awq(placed(W), scheme, statistics), scheme, W, X), min(errors), rtol=1e-9)


def test_one_large_input_gets_finer_weights():
    W, X = case(500, 64, 32, spread=0.0)
    X[:, 7] *= 50
    codes, nearest = awq(placed(W), INT4, statistics_of(X)), round_to_nearest(placed(W), INT4)
    assert true_error(codes, INT4, W, X) < 0.5 * true_error(nearest, INT4, W, X)
    errors = [np.abs(host(restored(c, INT4)) - W).mean(axis=0) for c in (codes, nearest)]
    assert errors[0][7] < 0.5 * errors[1][7] and host(codes.input_scale).argmax() == 7


def test_the_scale_is_a_power_of_the_mean_size_balanced_around_one():
    _, X = case()
    statistics, mean = statistics_of(X[:100], X[100:]), np.abs(X.astype(np.float64)).mean(axis=0)
    for alpha in (0.0, 0.5, 1.0):
        t = host(input_scale(statistics, alpha)).astype(np.float64)
        ratio = t / mean ** alpha
        assert np.allclose(ratio, ratio[0], rtol=2e-3) and np.isclose(t.min() * t.max(), 1, rtol=2e-3)
    assert (host(input_scale(statistics, 0.0)) == 1).all()


def test_inputs_that_are_always_zero_and_no_others():
    W, X = case()
    X[:, 3] = 0
    for x in (X, 0 * X):
        codes = awq(placed(W), Scheme(3), statistics_of(x))
        assert np.isfinite(host(restored(codes, Scheme(3)))).all() and (host(codes.input_scale) > 0).all()


def test_the_layer_divides_its_input():
    torch.manual_seed(0)
    plain, x = nn.Linear(32, 8), torch.randn(100, 32)
    statistics = statistics_of(host(x))
    layer = QuantizedLinear.from_linear(plain, INT4, awq(plain.weight.array, INT4, statistics))
    assert torch.allclose(layer(x), x @ layer.weight.t() + plain.bias, atol=1e-5)
    y = x.clone().requires_grad_()
    layer(y).sum().backward()
    assert torch.allclose(y.grad, layer.weight.sum(dim=0).expand(100, 32), atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_with_nan_or_infinity_are_named(bad):
    W, X = case()
    W[1, 1] = bad
    with pytest.raises(ValueError, match="lm.weight.*holds NaN or infinity"):
        awq(placed(W), Scheme(4), statistics_of(X), "lm.weight")
