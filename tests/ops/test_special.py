import math

import numpy as np
import pytest

from tinygrad_tf.special import erf

pytestmark = pytest.mark.filterwarnings("error")


def points(dtype):
    """Where erf bends, both signs, down to the smallest normal numbers and up to the largest."""
    smallest, largest = np.finfo(dtype).smallest_normal, np.finfo(dtype).max
    tiny = np.geomspace(float(smallest), 1, 4000)
    x = np.concatenate([np.linspace(0, 7, 40_001), tiny, [0.46875, 4.0, 6.0, 30.0, float(largest)]]).astype(dtype)
    return np.concatenate([x, -x])


def true_erf(x):
    return np.array([math.erf(v) for v in x.tolist()])


def test_float64_to_the_last_digits():
    x = points(np.float64)
    wanted = true_erf(x)
    assert erf(x).dtype == np.float64
    error = np.abs(erf(x) - wanted)
    assert (error <= 1e-15 * np.abs(wanted)).all(), error.max()


def test_float32_within_four_units_in_the_last_place():
    x = points(np.float32)
    y, wanted = erf(x), true_erf(x)
    assert y.dtype == np.float32
    error = np.abs(y.astype(np.float64) - wanted)
    assert (error <= 4 * np.spacing(np.abs(wanted).astype(np.float32))).all(), (error / np.spacing(np.abs(wanted).astype(np.float32))).max()
    assert error.max() <= 1.8e-7


def test_float16_is_correctly_rounded_from_float32():
    x = np.linspace(-5, 5, 2001).astype(np.float16)
    assert erf(x).dtype == np.float16
    assert np.abs(erf(x) - true_erf(x)).max() <= 2.5e-4


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_special_values(dtype):
    x = np.array([0.0, -0.0, math.inf, -math.inf, math.nan], dtype)
    before = x.copy()
    y = erf(x)
    np.testing.assert_array_equal(y, np.array([0, 0, 1, -1, math.nan], dtype))
    assert np.signbit(y[:4]).tolist() == [False, True, False, True]
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_is_odd_bounded_and_never_falls(dtype):
    x = np.linspace(-8, 8, 5001).astype(dtype)
    y = erf(x)
    np.testing.assert_array_equal(erf(-x), -y)
    assert np.abs(y).max() == 1
    assert (np.diff(y) >= -4 * np.finfo(dtype).eps).all()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (3, 4)])
def test_shapes_and_views(shape):
    for dtype in (np.float32, np.float64):
        x = np.full(shape, 0.5, dtype)
        assert np.shape(erf(x)) == shape and np.asarray(erf(x)).dtype == dtype
    x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(erf(x.T[::2]), erf(x).T[::2])
