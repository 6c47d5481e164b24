"""Clipping, norms, and parameters as a vector."""
import math

import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parameters_to_vector, vector_to_parameters


def with_grads(*grads, dtype=torch.float32):
    params = [nn.Parameter(torch.zeros(np.shape(g), dtype=dtype)) for g in grads]
    for p, g in zip(params, grads):
        p.grad = torch.tensor(g, dtype=dtype)
    return params


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [1, 2.0, 3, 0.5, math.inf])
def test_one_norm_over_all(dtype, norm_type):
    params = with_grads([3.0, -4.0], [[1.0], [2.0]], 2.0, dtype=dtype)
    flat = np.array([3.0, 4.0, 1.0, 2.0, 2.0])
    norm = flat.max() if norm_type == math.inf else (flat ** norm_type).sum() ** (1 / norm_type)
    total = clip_grad_norm_(params, 1.0, norm_type)
    assert total.shape == () and float(total) == pytest.approx(norm, rel=1e-6)
    clipped = np.concatenate([p.grad.cpu().numpy().reshape(-1) for p in params])
    np.testing.assert_allclose(abs(clipped), flat / (norm + 1e-6), rtol=2e-3 if dtype == torch.float16 else 1e-6)
    assert all(p.grad.dtype == dtype for p in params)


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1e25), (torch.float32, 1e-25), (torch.float64, 1e200), (torch.float64, 1e-200),
                                          (torch.float16, 2e4)])
def test_squares_that_leave_the_range(dtype, scale):
    params = with_grads([3 * scale, 0.0], [0.0, 2 * scale], [6 * scale / 2], dtype=dtype)
    expected = np.sqrt(22.0) * scale
    total = clip_grad_norm_(params, 0.5 * scale)
    assert float(total) == pytest.approx(expected, rel=1e-3, abs=0)
    if scale > 1:                               # below, the 1e-6 of the formula decides
        assert float(get_total_norm([p.grad for p in params])) == pytest.approx(0.5 * scale, rel=2e-3)


def test_never_scaled_up_and_nothing_to_clip():
    params = with_grads([0.3, 0.4])
    assert float(clip_grad_norm_(params, 10.0)) == pytest.approx(0.5) and params[0].grad.tolist() == pytest.approx([0.3, 0.4])
    none = nn.Parameter(torch.ones(2))
    for empty in ([], [none], iter([none]), [nn.Parameter(torch.ones(0))]):
        assert float(clip_grad_norm_(empty, 1.0)) == 0.0
    zero = with_grads([0.0, 0.0])
    assert float(clip_grad_norm_(zero, 0.0)) == 0.0 and zero[0].grad.tolist() == [0.0, 0.0]
    empty = nn.Parameter(torch.ones(0))
    empty.grad = torch.ones(0)
    assert float(clip_grad_norm_([empty, *with_grads([2.0])], 1.0)) == 2.0


def test_a_parameter_named_twice_is_clipped_once():
    p, = with_grads([3.0, 4.0])
    assert float(clip_grad_norm_([p, p], 1.0)) == 5.0 and p.grad.tolist() == pytest.approx([0.6, 0.8])
    assert float(clip_grad_norm_(p, 1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_norms(bad):
    params = with_grads([bad, 1.0], [2.0])
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert params[1].grad.tolist() == [2.0]
    assert not math.isfinite(float(clip_grad_norm_(params, 1.0)))
    assert params[1].grad.tolist() == [0.0] or math.isnan(params[1].grad.item())


@pytest.mark.parametrize("call", [
    lambda p: clip_grad_norm_(p, -1.0), lambda p: clip_grad_norm_(p, math.nan), lambda p: clip_grad_norm_(p, 1.0, -2),
    lambda p: clip_grad_norm_(p, 1.0, math.nan), lambda p: clip_grad_value_(p, -1.0), lambda p: clip_grad_value_(p, math.nan)])
def test_bad_limits_raise_and_change_nothing(call):
    params = with_grads([3.0, 4.0])
    with pytest.raises(ValueError):
        call(params)
    assert params[0].grad.tolist() == [3.0, 4.0]


def test_clipping_counts_as_a_write():
    p, = with_grads([3.0, 4.0])
    leaf = torch.ones(2, requires_grad=True)
    y = (p.grad * leaf).sum()                   # saves the gradient's memory
    clip_grad_norm_([p], 1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()


def test_clip_value():
    params = with_grads([3.0, -4.0, 0.5]) + [nn.Parameter(torch.ones(1))]
    clip_grad_value_(iter(params), 1)
    assert params[0].grad.tolist() == [1.0, -1.0, 0.5] and params[1].grad is None


def test_vectors():
    layer = nn.Linear(2, 3)
    vector = parameters_to_vector(layer.parameters())
    assert vector.shape == (9,) and vector.requires_grad
    vector_to_parameters(torch.arange(9).float(), layer.parameters())
    assert layer.weight.tolist() == [[0, 1], [2, 3], [4, 5]] and layer.bias.tolist() == [6, 7, 8] and layer.weight.requires_grad
    for bad in (torch.ones(8), torch.ones(10), torch.ones(9, 1)):
        with pytest.raises(ValueError, match="9 elements"):
            vector_to_parameters(bad, layer.parameters())
    with pytest.raises(TypeError):
        vector_to_parameters([1.0], layer.parameters())


@pytest.mark.torch
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_numbers_are_those_of_pytorch(norm_type):
    theirs = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=s).astype("float32") for s in ((50, 40), (7,), (3, 3, 3))]
    ours, others = with_grads(*grads), [theirs.nn.Parameter(theirs.zeros(g.shape)) for g in grads]
    for p, g in zip(others, grads):
        p.grad = theirs.tensor(g)
    for limit in (1.0, 0.3):
        a, b = clip_grad_norm_(ours, limit, norm_type), theirs.nn.utils.clip_grad_norm_(others, limit, norm_type)
        assert float(a) == pytest.approx(float(b), rel=1e-6)
    for p, q in zip(ours, others):
        np.testing.assert_allclose(p.grad.cpu().numpy(), q.grad.cpu().numpy(), rtol=1e-6)
