"""Helpers on gradients and parameters: clipping, the norm that it needs, and parameters as one vector."""
import math

import numpy as np

from ..autograd import no_grad
from ..backend import array_module, at_least_float32, check_one_device
from ..creation import tensor
from ..dtypes import widened
from ..ops.shape import cat
from ..tensor import Tensor


def _tensors(parameters):
    """A list from one tensor or an iterable of them, without repetitions: nothing is counted or scaled twice."""
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    return list({id(p): p for p in parameters}.values())


@no_grad
def get_total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """‖(x₁, x₂, …)‖_p over all elements of all tensors, p = norm_type: a 0-d tensor; 0 where there is none.

    RuntimeError for an infinite or NaN norm if error_if_nonfinite. `foreach` has no meaning here.
    """
    tensors = _tensors(tensors)
    return tensor(_total_norm(tensors, norm_type, error_if_nonfinite), device=tensors[0].device if tensors else None)


def _total_norm(tensors, norm_type, error_if_nonfinite):
    """The same as a NumPy number: here, and nowhere else in clipping, the host waits for a GPU."""
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"get_total_norm: norm_type must be positive or inf, got {norm_type}")
    check_one_device("get_total_norm", [t.array for t in tensors])
    arrays = [t.array.reshape(-1) for t in tensors if t.array.size]
    total = _norm(arrays, p) if arrays else 0.0
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite ({total}), so it "
                           f"cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
                           f"set `error_if_nonfinite=False`")
    return np.result_type(np.float32, *(widened(t.array.dtype) for t in tensors)).type(total)        # float16 ends at 65504


def _norm(arrays, p):
    """The p-norm over 1-d arrays. Where powers might leave the range of the dtype, the largest element is divided out first."""
    arrays = [at_least_float32(a) for a in arrays]
    xp = array_module(*arrays)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if p == 2 and 1e-12 < (total := _root_of_sum(xp, arrays, p)) < 1e18:
            return total
        largest = float(xp.stack([xp.abs(a).max() for a in arrays]).max())
        if p == math.inf or largest == 0 or not math.isfinite(largest):
            return largest
        return largest * _root_of_sum(xp, [a / largest for a in arrays], p)


def _root_of_sum(xp, arrays, p):
    """(Σ |x|^p)^(1/p); the sums of the arrays are added up in float64."""
    sums = [xp.vdot(x, x) if p == 2 else (xp.abs(x) ** p).sum() for x in arrays]
    return float(sum(s.astype(xp.float64) for s in sums)) ** (1 / p)


@no_grad
@np.errstate(invalid="ignore")                  # an infinite norm makes 0 · inf of an infinite gradient
def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """g ← g · min(1, max_norm / (‖all g‖ + 1e-6)) on every gradient g, in place: one norm over all of them.

    Returns the norm before clipping, a 0-d tensor. ValueError if max_norm is negative or NaN: the direction of every
    gradient would turn round. RuntimeError, and nothing changed, for a non-finite norm if error_if_nonfinite.
    """
    if not float(max_norm) >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be non-negative, got {float(max_norm)}")
    grads = [p.grad for p in _tensors(parameters) if p.grad is not None]
    total = _total_norm(grads, norm_type, error_if_nonfinite)
    scale = float(max_norm) / (float(total) + 1e-6)
    if not scale >= 1:                          # also where it is NaN: as in PyTorch, all gradients show it
        for g in grads:
            g.array *= scale
            g.version.wrote(g.array)
    return tensor(total, device=grads[0].device if grads else None)


@no_grad
def clip_grad_value_(parameters, clip_value, foreach=None):
    """g ← min(max(g, −clip_value), clip_value) on every element, in place. ValueError if clip_value is negative or NaN."""
    limit = float(clip_value)
    if not limit >= 0:
        raise ValueError(f"clip_grad_value_: clip_value must be non-negative, got {limit}")
    for p in _tensors(parameters):
        if p.grad is not None:
            p.grad.clamp_(-limit, limit)


def parameters_to_vector(parameters):
    """All parameters, flattened and joined: [N]."""
    return cat([p.reshape(-1) for p in parameters])


@no_grad
def vector_to_parameters(vec, parameters):
    """Copies a vector [N] back into parameters, the reverse of `parameters_to_vector`. ValueError if N does not fit."""
    if not isinstance(vec, Tensor):
        raise TypeError(f"expected a Tensor, got {type(vec).__name__}")
    parameters = list(parameters)
    count = sum(p.numel() for p in parameters)
    if tuple(vec.shape) != (count,):
        raise ValueError(f"vector_to_parameters: the parameters have {count} elements, the vector has shape {tuple(vec.shape)}")
    start = 0
    for p in parameters:
        p.copy_(vec[start:start + p.numel()].reshape(p.shape))
        start += p.numel()
