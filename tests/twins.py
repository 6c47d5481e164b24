"""The check that a fused operation equals its composed twin, and the checks on memory that every operation passes."""
import numpy as np

from tinygrad_tf import from_numpy


def value_and_gradients(function, arrays, seed=7):
    """[y, d(Σ y · random)/d(each float array)] in NumPy."""
    tensors = [from_numpy(a.copy()).requires_grad_(a.dtype.kind == "f") for a in arrays]
    y = function(*tensors)
    y.backward(from_numpy(np.asarray(np.random.default_rng(seed).standard_normal(y.shape), dtype=y.array.dtype)))
    return [y.detach().numpy()] + [t.grad.numpy() for t in tensors if t.grad is not None]


def assert_twins(fused, composed, *arrays, tolerance=1e-12):
    """Equal values and equal gradients for a random upstream gradient, in float64."""
    found, wanted = value_and_gradients(fused, arrays), value_and_gradients(composed, arrays)
    assert len(found) == len(wanted) == 1 + sum(a.dtype.kind == "f" for a in arrays)
    for i, (a, b) in enumerate(zip(found, wanted)):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max(initial=0)), err_msg=f"result {i}")


def assert_leaves_memory_alone(function, *arrays):
    """forward leaves the inputs as they were; backward does so with its upstream gradient and runs twice with one result."""
    tensors = [from_numpy(a.copy()).requires_grad_(a.dtype.kind == "f") for a in arrays]
    y = function(*tensors)
    dy = from_numpy(np.asarray(np.random.default_rng(3).standard_normal(y.shape), dtype=y.array.dtype))
    before = dy.array.copy()
    results = []
    for _ in range(2):
        y.backward(dy, retain_graph=True)
        results.append([t.grad.numpy() for t in tensors if t.grad is not None])
        for t in tensors:
            t.grad = None
    np.testing.assert_array_equal(dy.array, before)
    for t, a in zip(tensors, arrays):
        np.testing.assert_array_equal(t.array, a)
    for first, second in zip(*results):
        np.testing.assert_array_equal(first, second)
