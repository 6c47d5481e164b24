"""What the tests of GPTQ and of activation-aware scaling share: a weight, inputs that depend on each other, the error multiplied out."""
import numpy as np
import pytest
from device import host, placed

from tinygrad_tf.quantization import InputStatistics, Scheme
from tinygrad_tf.quantization.linear import restored

SCHEMES = [Scheme(bits, symmetric, granularity, 8 if granularity == "group" else None)
           for bits in (2, 3, 4) for symmetric in (True, False) for granularity in ("tensor", "channel", "group")]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def case(rows=200, width=16, out=6, seed=0, spread=1.0):
    """(W [out, in] float32, X [rows, in]) with inputs that depend on each other, of very different sizes."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((width, width)) / np.sqrt(width) * np.exp(spread * random.standard_normal(width))
    X = random.standard_normal((rows, width)) @ mixed
    return (random.standard_normal((out, width)) * 0.1).astype(np.float32), X.astype(np.float32)


def statistics_of(*inputs):
    found = InputStatistics()
    for x in inputs:
        found.add(placed(x))
    return found


def true_error(codes, scheme, W, X):
    """Mean over the inputs of |x (W − Ŵ)ᵀ|², multiplied out."""
    return np.square(X.astype(np.float64) @ (host(restored(codes, scheme, np.float64)) - W).T).sum(axis=1).mean()
