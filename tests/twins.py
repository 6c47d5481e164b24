"""The check that a fused operation equals its composed twin, and the checks on memory that every operation passes."""
import numpy as np
from device import host

from tinygrad_tf import tensor


def value_and_gradients(function, arrays, seed=7):
    """[y, d(Σ y · random)/d(each float array)] in NumPy."""
    tensors = [tensor(a).requires_grad_(a.dtype.kind == "f") for a in arrays]
    y = function(*tensors)
    y.backward(tensor(np.asarray(np.random.default_rng(seed).standard_normal(y.shape), dtype=y.array.dtype)))
    return [host(y)] + [host(t.grad) for t in tensors if t.grad is not None]


def assert_twins(fused, composed, *arrays, tolerance=1e-12):
    """Equal values and equal gradients for a random upstream gradient, in float64."""
    found, wanted = value_and_gradients(fused, arrays), value_and_gradients(composed, arrays)
    assert len(found) == len(wanted) == 1 + sum(a.dtype.kind == "f" for a in arrays)
    for i, (a, b) in enumerate(zip(found, wanted)):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max(initial=0)), err_msg=f"result {i}")


def assert_leaves_memory_alone(function, *arrays):
    """forward leaves the inputs as they were; backward does so with its upstream gradient and runs twice with one result."""
    tensors = [tensor(a).requires_grad_(a.dtype.kind == "f") for a in arrays]
    y = function(*tensors)
    dy = tensor(np.asarray(np.random.default_rng(3).standard_normal(y.shape), dtype=y.array.dtype))
    before = host(dy).copy()
    results = []
    for _ in range(2):
        y.backward(dy, retain_graph=True)
        results.append([host(t.grad) for t in tensors if t.grad is not None])
        for t in tensors:
            t.grad = None
    np.testing.assert_array_equal(host(dy), before)
    for t, a in zip(tensors, arrays):
        np.testing.assert_array_equal(host(t), a)
    for first, second in zip(*results):
        np.testing.assert_array_equal(first, second)
