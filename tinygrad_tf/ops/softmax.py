"""softmax, log_softmax and logsumexp: the largest score is subtracted first, so that no exponential overflows."""

from ..autograd import FLOAT32, Function, without_autocast
from ..backend import array_module, at_least_float32
from ..dtypes import numpy_dtype
from ..kernels import fused
from ._rows import dot_along, max_along, require_float, sum_along
from .arithmetic import as_float, cast
from .reduce import keep, normalize_dim, normalize_dims


class Softmax(Function):
    """y_i = e^(x_i − m) / Σ_j e^(x_j − m),  m = max x, along one axis.    dx = y · (dy − Σ_j dy_j · y_j)

    A row of −inf alone is NaN, as in PyTorch. float16 is computed in float32.       (guide 4.2)
    """
    autocast = FLOAT32

    def forward(self, x, dim):
        xp, x32 = array_module(x), at_least_float32(require_float("softmax", x))
        if fused.serves(x32, dim):
            y = fused.softmax(x32)
        else:
            y = x32 - max_along(x32, dim)
            xp.exp(y, out=y)
            y /= sum_along(y, dim)
        self.saved, self.dim = y, dim
        return y.astype(x.dtype, copy=False)

    def backward(self, dy):
        y = self.saved
        dy = at_least_float32(dy)
        if fused.serves(dy, self.dim):
            return fused.softmax_backward(dy, y)
        dx = dy - dot_along(dy, y, self.dim)
        dx *= y
        return dx


class LogSoftmax(Function):
    """y_i = x_i − m − ln Σ_j e^(x_j − m),  m = max x, along one axis.    dx = dy − e^y · Σ_j dy_j"""
    autocast = FLOAT32

    def forward(self, x, dim):
        xp, x32 = array_module(x), at_least_float32(require_float("log_softmax", x))
        if fused.serves(x32, dim):
            y = fused.log_softmax(x32)
        else:
            y = x32 - max_along(x32, dim)
            y -= xp.log(sum_along(xp.exp(y), dim))
        self.saved, self.dim = y, dim
        return y.astype(x.dtype, copy=False)

    def backward(self, dy):
        y = self.saved
        dy = at_least_float32(dy)
        if fused.serves(dy, self.dim):
            return fused.log_softmax_backward(dy, y)
        p = array_module(dy).exp(y)
        p *= sum_along(dy, self.dim)
        return dy - p


class LogSumExp(Function):
    """y = m + ln Σ e^(x − m),  m = max x.    dx = dy · e^(x − y), which is the softmax of x

    −inf where all are −inf; integers are computed in the default float type.
    """
    autocast = FLOAT32

    def forward(self, x, dims, keepdim):
        xp = array_module(x)
        x = as_float(x)
        x32 = at_least_float32(x)
        axis = dims[0] if len(dims) == 1 else dims
        top = max_along(x32, axis)
        top = xp.where(xp.isfinite(top), top, x32.dtype.type(0))
        y = top + xp.log(sum_along(xp.exp(x32 - top), axis))
        self.saved, self.dims = (x32, y), dims
        shape = y.shape if keepdim else tuple(n for i, n in enumerate(y.shape) if i not in dims)
        return y.astype(x.dtype, copy=False).reshape(shape)

    def backward(self, dy):
        x, y = self.saved
        dx = array_module(x).exp(x - y)
        dx *= keep(at_least_float32(dy), x.shape, self.dims)
        return dx


def softmax(input, dim, dtype=None):
    return _along("softmax", Softmax, input, dim, dtype)


def log_softmax(input, dim, dtype=None):
    return _along("log_softmax", LogSoftmax, input, dim, dtype)


def _along(op, function, input, dim, dtype):
    if dim is None:
        raise TypeError(f"{op}: dim is missing; name the axis whose values compete, usually dim=-1")
    if dtype is not None:                       # what is asked for, autocast or not
        return without_autocast(_along, op, function, cast(input, numpy_dtype(dtype)), dim, None)
    dim = normalize_dim(op, dim, input.ndim)
    if input.ndim == 0:                         # one number competes with nobody
        return function.apply(input.unsqueeze(0), 0).squeeze(0)
    return function.apply(input, dim)


def logsumexp(input, dim, keepdim=False):
    return LogSumExp.apply(input, normalize_dims("logsumexp", dim, input.ndim), keepdim)
