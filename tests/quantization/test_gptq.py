"""GPTQ: the same as least squares column by column, never worse than rounding to nearest, and at ease with poor calibration."""
import numpy as np
import pytest
from device import host, placed
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization.calibrated import SCHEMES, case, every_scheme, statistics_of, true_error

from tinygrad_tf.ops.quantize import dequantized, quantized
from tinygrad_tf.quantization import INT4, Scheme, gptq, round_to_nearest
from tinygrad_tf.quantization.gptq import DAMPING, inverse_factor
from tinygrad_tf.quantization.linear import fitted, restored


def by_least_squares(W, scheme, X):
    """What GPTQ means, slowly: after each column, the columns behind it are solved for anew, from W itself."""
    G = X.astype(np.float64).T @ X
    H = G + DAMPING * np.diag(G).mean() * np.eye(len(G))
    column = Scheme(scheme.bits, scheme.symmetric, "channel")
    left, q, size = W.astype(np.float64), [], scheme.group_size or W.shape[1]
    for i in range(W.shape[1]):
        if i % size == 0:
            scale, zero = fitted(left[:, i:i + size], column if scheme.granularity != "tensor" else Scheme(scheme.bits, scheme.symmetric))
            scale, zero = np.broadcast_to(scale, len(W)), np.broadcast_to(zero, len(W))
        q.append(quantized(left[:, i:i + 1], scale, zero, column))
        left[:, i] = dequantized(q[-1], scale, zero, column, np.float64)[:, 0]
        change = left[:, :i + 1] - W[:, :i + 1]
        if i + 1 < len(H):
            left[:, i + 1:] = W[:, i + 1:] - change @ H[:i + 1, i + 1:] @ np.linalg.inv(H[i + 1:, i + 1:])
    return np.concatenate(q, axis=1)


@every_scheme
def test_is_least_squares_column_by_column(scheme):
    W, X = case(spread=0.3)
    codes = gptq(placed(W), scheme, statistics_of(X))
    if true_error(codes, scheme, W, X) < true_error(round_to_nearest(placed(W), scheme), scheme, W, X):
        assert np.array_equal(host(codes.q), by_least_squares(W, scheme, X))
    else:
        assert scheme.bits == 2, "at 3 bits and more GPTQ wins here"


@settings(max_examples=40)
@given(st.sampled_from(SCHEMES), st.integers(1, 40), st.integers(0, 999), st.floats(0, 2))
def test_is_never_worse_than_rounding_to_nearest(scheme, rows, seed, spread):
    W, X = case(rows, seed=seed, spread=spread)
    codes, nearest = gptq(placed(W), scheme, statistics_of(X)), round_to_nearest(placed(W), scheme)
    assert true_error(codes, scheme, W, X) <= true_error(nearest, scheme, W, X) * (1 + 1e-9)


def test_where_the_repairs_make_it_worse_rounding_to_nearest_stays():
    """Two bits, few inputs of very different sizes: what is fed forward leaves the levels of its group, and is clipped."""
    scheme, found = Scheme(2, granularity="group", group_size=8), 0
    for seed in range(12):
        W, X = case(3, seed=seed, spread=2.0)
        codes, nearest = gptq(placed(W), scheme, statistics_of(X)), round_to_nearest(placed(W), scheme)
        found += all(np.array_equal(host(a), host(b)) for a, b in zip(codes[:3], nearest[:3]))
    assert found, "no such case among these"


def test_repairs_much_at_four_bits():
    W, X = case(500, 64, 32, spread=0.3)
    codes = gptq(placed(W), INT4, statistics_of(X))
    assert true_error(codes, INT4, W, X) < 0.7 * true_error(round_to_nearest(placed(W), INT4), INT4, W, X)


def test_the_error_by_the_gram_matrix_is_the_error():
    W, X = case()
    codes = round_to_nearest(placed(W), Scheme(3))
    statistics, change = statistics_of(X[:50], X[50:].reshape(3, 50, 16)), restored(codes, Scheme(3), np.float64) - placed(W)
    assert statistics.count == 200
    assert np.isclose(statistics.error(change), true_error(codes, Scheme(3), W, X), rtol=1e-10)


def test_the_factor_is_of_the_inverse():
    _, X = case()
    statistics = statistics_of(X)
    U, G = host(inverse_factor(statistics.gram)), host(statistics.gram)
    assert np.allclose(U, np.triu(U)) and (np.diag(U) > 0).all()
    assert np.allclose(U.T @ U @ (G + DAMPING * np.diag(G).mean() * np.eye(16)), np.eye(16), atol=1e-8)


# --- poor calibration -----------------------------------------------------------------------------------------------

@every_scheme
def test_inputs_that_are_always_zero(scheme):
    W, X = case()
    X[:, [0, 5, 15]] = 0
    codes, nearest = gptq(placed(W), scheme, statistics_of(X)), round_to_nearest(placed(W), scheme)
    weights = host(restored(codes, scheme))
    assert np.isfinite(weights).all() and true_error(codes, scheme, W, X) <= true_error(nearest, scheme, W, X)
    if scheme.granularity == "channel" and not np.array_equal(host(codes.q), host(nearest.q)):
        assert np.array_equal(host(codes.q)[:, [0, 5, 15]], host(nearest.q)[:, [0, 5, 15]]), "nothing repairs them, and they repair nothing"


def test_no_input_but_zero_is_rounding_to_nearest():
    W, X = case()
    codes, nearest = gptq(placed(W), Scheme(3), statistics_of(0 * X)), round_to_nearest(placed(W), Scheme(3))
    assert np.array_equal(host(codes.q), host(nearest.q))


@pytest.mark.parametrize("rows", [1, 2, 15])
def test_fewer_inputs_than_columns(rows):
    W, X = case(rows)
    codes = gptq(placed(W), Scheme(3), statistics_of(X))
    assert np.isfinite(host(restored(codes, Scheme(3)))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_calibration_with_nan_or_infinity_is_refused(bad):
    _, X = case()
    X[3, 2] = bad
    with pytest.raises(ValueError, match=r"input of layer, \(200, 16\), holds NaN or infinity"):
        statistics_of(X)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_with_nan_or_infinity_are_named(bad):
    W, X = case()
    W[1, 1] = bad
    with pytest.raises(ValueError, match="lm.weight.*holds NaN or infinity"):
        gptq(placed(W), Scheme(4), statistics_of(X), "lm.weight")


def test_huge_and_tiny_inputs():
    W, X = case()
    for size in (1e-15, 1e15):
        codes = gptq(placed(W), Scheme(3), statistics_of(X * np.float32(size)))
        assert np.array_equal(host(codes.q), host(gptq(placed(W), Scheme(3), statistics_of(X)).q))
