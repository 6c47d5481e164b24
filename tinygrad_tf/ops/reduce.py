"""Reductions over one axis, several, or all: sum, mean, prod, extrema, variance, norms, cumulative sums."""
import math
import operator

import numpy as np

from ..autograd import FLOAT32, Function, constant, under_autocast
from ..backend import array_module
from ..dtypes import is_float, numpy_dtype, widened
from .arithmetic import cast


def normalize_dims(op, dim, ndim):
    """Axes as a tuple of non-negative ints; None or () is every axis. Raises IndexError out of range, RuntimeError for repeats."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    dims = tuple(normalize_dim(op, d, ndim) for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))
    if len(set(dims)) < len(dims):
        raise RuntimeError(f"{op}: dim {dim} names an axis more than once")
    return dims if ndim else ()                 # a 0-d tensor accepts dim 0 and −1 and has no axis


def normalize_dim(op, dim, ndim):
    """One axis as a non-negative int."""
    if type(dim) is int and -ndim <= dim < ndim:
        return dim % ndim
    try:
        d = operator.index(None if isinstance(dim, bool) else dim)
    except TypeError:
        raise TypeError(f"{op}: dim must be an int, got {type(dim).__name__}") from None
    low, high = -max(ndim, 1), max(ndim, 1) - 1
    if not low <= d <= high:
        raise IndexError(f"{op}: Dimension out of range (expected to be in range of [{low}, {high}], but got {d}) "
                         f"for a tensor with {ndim} dimensions")
    return d % max(ndim, 1)


def keep(y, shape, dims):
    """A reduced array with its axes put back as size 1, so that it broadcasts against what was reduced."""
    return y.reshape(tuple(1 if i in dims else n for i, n in enumerate(shape)))


def count(shape, dims):
    """How many elements go into one result."""
    return math.prod(shape[i] for i in dims)


def in_float32(x):
    """float16 in float32, in which it is added up: float16 itself counts ones no further than to 2048. All else as it is."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def _total(x, how, dtype, **axes):
    """x.sum, x.prod or x.cumsum in a dtype, by default that of x; for float16 by way of float32."""
    dtype = x.dtype if dtype is None else dtype
    return _rounded(getattr(x, how)(dtype=np.float32 if dtype == np.float16 else dtype, **axes), dtype)


def _rounded(y, dtype):
    """A result that was computed in float32 in its own dtype."""
    return y if y.dtype == dtype else y.astype(dtype)


class Sum(Function):
    """y = Σ x    dx = dy for every element"""
    autocast = FLOAT32

    def forward(self, x, dims, keepdim, dtype):
        self.x_shape, self.dims = x.shape, dims
        return _total(x, "sum", dtype, axis=dims, keepdims=keepdim)

    def backward(self, dy):
        return array_module(dy).broadcast_to(keep(dy, self.x_shape, self.dims), self.x_shape)


class Mean(Function):
    """y = Σ x / n.    dx = dy / n for every element"""

    def forward(self, x, dims, keepdim):
        if not is_float(x.dtype):
            raise RuntimeError(f"mean: the mean of {x.dtype} has no float result type; call .float() first or pass dtype=")
        self.x_shape, self.dims = x.shape, dims
        total = in_float32(x).sum(axis=dims, keepdims=keepdim)
        return _rounded(total / total.dtype.type(count(x.shape, dims)), x.dtype)

    def backward(self, dy):
        xp, dy = array_module(dy), in_float32(dy)
        dy = keep(dy, self.x_shape, self.dims) / dy.dtype.type(count(self.x_shape, self.dims) or 1)
        return xp.broadcast_to(dy, self.x_shape)


class Prod(Function):
    """y = Π x.    dx_i = dy · Π_{j≠i} x_j, as products from the left and from the right: y / x would be 0/0 at a zero"""
    autocast = FLOAT32

    def forward(self, x, dim, keepdim, dtype):
        self.saved, self.dim = x, dim
        return _total(x, "prod", dtype, axis=dim, keepdims=keepdim)

    def backward(self, dy):
        x, dim = in_float32(self.saved), self.dim
        xp = array_module(x)
        last = xp.moveaxis(x, dim, -1)
        ones = xp.ones_like(last[..., :1])
        left = xp.cumprod(xp.concatenate([ones, last[..., :-1]], axis=-1), axis=-1)
        right = xp.cumprod(xp.concatenate([ones, last[..., :0:-1]], axis=-1), axis=-1)[..., ::-1]
        return keep(dy, x.shape, (dim,)) * xp.moveaxis(left * right, -1, dim)


class Amax(Function):
    """y = max x.    dx = dy, shared equally among the elements that equal the maximum"""

    def forward(self, x, dims, keepdim):
        y = x.max(axis=dims, keepdims=keepdim)
        self.saved, self.dims = (x, y), dims
        return y

    def backward(self, dy):
        x, y = self.saved
        return _share_among_equals(x, y, dy, self.dims)


class Amin(Function):
    """y = min x.    dx = dy, shared equally among the elements that equal the minimum"""

    def forward(self, x, dims, keepdim):
        y = x.min(axis=dims, keepdims=keepdim)
        self.saved, self.dims = (x, y), dims
        return y

    def backward(self, dy):
        x, y = self.saved
        return _share_among_equals(x, y, dy, self.dims)


def _share_among_equals(x, y, dy, dims):
    chosen = x == keep(y, x.shape, dims)
    shares = chosen / chosen.sum(axis=dims, keepdims=True)
    return shares.astype(dy.dtype) * keep(dy, x.shape, dims)


class Var(Function):
    """y = Σ (x − x̄)² / (n − correction).    dx = dy · 2 (x − x̄) / (n − correction)"""

    def forward(self, x, dims, keepdim, correction):
        self.dims, self.divisor = dims, max(count(x.shape, dims) - correction, 0)
        x32 = in_float32(x)
        self.saved = centred = x32 - x32.sum(axis=dims, keepdims=True) / x32.dtype.type(count(x.shape, dims))
        return _rounded((centred * centred).sum(axis=dims, keepdims=keepdim) / x32.dtype.type(self.divisor), x.dtype)

    def backward(self, dy):
        centred, dy = self.saved, in_float32(dy)
        return keep(dy, centred.shape, self.dims) * (2 / dy.dtype.type(self.divisor)) * centred


class Norm(Function):
    """y = (Σ |x|^p)^(1/p); p = inf is max |x|, p = 0 counts non-zeros.    dx = dy · sign(x) · (|x| / y)^(p−1), 0 where y = 0"""
    autocast = FLOAT32

    def forward(self, x, p, dims, keepdim):
        xp, dtype, x = array_module(x), x.dtype, in_float32(x)
        size = abs(x)
        if p == 2:
            y = xp.sqrt((x * x).sum(axis=dims, keepdims=True))
        elif p == math.inf:
            y = size.max(axis=dims, keepdims=True)
        elif p == -math.inf:
            y = size.min(axis=dims, keepdims=True)
        elif p == 0:
            y = (x != 0).sum(axis=dims, keepdims=True).astype(x.dtype)
        else:
            y = xp.power(xp.power(size, p).sum(axis=dims, keepdims=True), 1 / p)
        self.saved, self.p, self.dims = (x, y), p, dims
        return _rounded(y if keepdim else y.reshape([n for i, n in enumerate(x.shape) if i not in dims]), dtype)

    def backward(self, dy):
        x, y = self.saved
        xp, p = array_module(x), self.p
        dy = keep(dy, x.shape, self.dims)
        if p == 0:
            return xp.zeros_like(x)
        if p in (math.inf, -math.inf):
            return _share_among_equals(abs(x), y, dy, self.dims) * xp.sign(x)
        if p == 2:
            return dy * xp.where(y == 0, 0, x / y)
        slope = xp.sign(x) * xp.power(abs(x) / y, p - 1)
        return dy * xp.where((y == 0) | (x == 0), 0, slope)


class Cumsum(Function):
    """y_i = Σ_{j≤i} x_j    dx_j = Σ_{i≥j} dy_i"""
    autocast = FLOAT32

    def forward(self, x, dim, dtype):
        self.dim = dim
        return _total(x, "cumsum", dtype, axis=dim) if x.ndim else x.astype(dtype or x.dtype)

    def backward(self, dy):
        xp, dim, dy = array_module(dy), self.dim, in_float32(dy)
        if dy.ndim == 0:
            return dy
        return xp.flip(xp.cumsum(xp.flip(dy, dim), axis=dim), dim)


def _accumulate_in(input, dtype):
    """(input, result dtype) of sum, prod and cumsum: what the caller asked for, else floats as they are (None), all else in int64."""
    if dtype is None:
        return input, None if input.is_floating_point() else np.dtype(np.int64)
    return cast(input, numpy_dtype(dtype)), numpy_dtype(dtype)


def sum(input, dim=None, keepdim=False, *, dtype=None):
    input, dtype = _accumulate_in(input, dtype)
    return Sum.apply(input, normalize_dims("sum", dim, input.ndim), keepdim, dtype)


def mean(input, dim=None, keepdim=False, *, dtype=None):
    input = input if dtype is None else cast(input, numpy_dtype(dtype))
    return Mean.apply(input, normalize_dims("mean", dim, input.ndim), keepdim)


def prod(input, dim=None, keepdim=False, *, dtype=None):
    input, dtype = _accumulate_in(input, dtype)
    if dim is None and keepdim:
        raise TypeError("prod: keepdim=True needs a dim")
    d = 0 if dim is None else normalize_dim("prod", dim, input.ndim)
    flat = dim is None or input.ndim == 0
    return Prod.apply(input.reshape(-1) if flat else input, d, keepdim and not flat, dtype)


def amax(input, dim=(), keepdim=False): return _extreme(Amax, "amax", input, dim, keepdim)
def amin(input, dim=(), keepdim=False): return _extreme(Amin, "amin", input, dim, keepdim)


def _extreme(op, name, input, dim, keepdim):
    if dim in (None, ()) and not input.array.size:
        raise RuntimeError(f"{name}: no elements, no extreme: got shape {tuple(input.shape)}; name a dim that has elements")
    dims = normalize_dims(name, dim, input.ndim)
    if any(input.array.shape[d] == 0 for d in dims):
        raise IndexError(f"{name}: every reduced dim must have elements, got shape {tuple(input.shape)} reduced over {dims}")
    return op.apply(input, dims, keepdim)


def var(input, dim=None, unbiased=None, keepdim=False, *, correction=None):
    dims, correction = _spread("var", input, dim, unbiased, correction)
    return Var.apply(input, dims, keepdim, correction)


@under_autocast(None)
def std(input, dim=None, unbiased=None, keepdim=False, *, correction=None):
    """√var, as ‖x − x̄‖ / √(n − correction): the norm's gradient is 0 at 0, where that of √ is infinite."""
    dims, correction = _spread("std", input, dim, unbiased, correction)
    divisor = max(count(input.array.shape, dims) - correction, 0)
    return Norm.apply(input - Mean.apply(input, dims, True), 2, dims, keepdim) / math.sqrt(divisor)


def _spread(op, input, dim, unbiased, correction):
    """(axes, correction) of var and std, also in PyTorch's old forms var(input, unbiased) and var(input, dim, unbiased, keepdim)."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if not is_float(input.array.dtype):
        raise RuntimeError(f"{op}: a floating-point tensor is needed, got {input.dtype}; call .float() first")
    return normalize_dims(op, dim, input.ndim), correction


def norm(input, p=2, dim=None, keepdim=False):
    p = {"fro": 2, None: 2}.get(p, p)
    if not is_float(input.array.dtype):
        raise RuntimeError(f"norm: a floating-point tensor is needed, got {input.dtype}; call .float() first")
    if not isinstance(p, (int, float)):
        raise TypeError(f"norm: p must be a number or 'fro', got {p!r}")
    dims = normalize_dims("norm", dim, input.ndim)
    if (p < 0 or p == math.inf) and count(input.array.shape, dims) == 0:
        raise RuntimeError(f"norm: the {p} norm of no elements does not exist, got shape {tuple(input.shape)}")
    return Norm.apply(input, p, dims, keepdim)


def cumsum(input, dim, *, dtype=None):
    input, dtype = _accumulate_in(input, dtype)
    return Cumsum.apply(input, normalize_dim("cumsum", dim, input.ndim), dtype)


# --- without gradient -------------------------------------------------------------------------------------------------


def any_(input, dim=None, keepdim=False):
    """Is an element not 0? Of all, or along axes."""
    return _truth("any", input, dim, keepdim)


def all_(input, dim=None, keepdim=False):
    """Is no element 0? Of all, or along axes."""
    return _truth("all", input, dim, keepdim)


def _truth(op, input, dim, keepdim):
    """bool, also for uint8 (where PyTorch gives uint8). dim=() reduces nothing, as in PyTorch."""
    x = input.array != 0
    dims = () if dim == () else normalize_dims(op, dim, x.ndim)
    return constant(array_module(x).asarray(getattr(x, op)(axis=dims, keepdims=keepdim)))


def argmax(input, dim=None, keepdim=False):
    """Where the largest element is, the first of equals: in the flattened tensor, or along one axis."""
    return _arg("argmax", input, dim, keepdim)


def argmin(input, dim=None, keepdim=False):
    """Where the smallest element is, the first of equals: in the flattened tensor, or along one axis."""
    return _arg("argmin", input, dim, keepdim)


def _arg(op, input, dim, keepdim):
    """The index of the first extreme in the flattened tensor, or along one axis."""
    x = widened(input.array)
    d = None if dim is None else normalize_dim(op, dim, x.ndim)
    if (x.size if d is None or not x.ndim else x.shape[d]) == 0:
        raise IndexError(f"{op}: expected {'a tensor' if dim is None else f'dim {dim}'} with elements, got shape {x.shape}")
    y = getattr(x, op)(axis=d if x.ndim else None)
    return constant(array_module(x).asarray(keep(y, x.shape, range(x.ndim) if d is None else (d,)) if keepdim else y, dtype=np.int64))


def count_nonzero(input, dim=None):
    """How many elements are not 0."""
    x = input.array
    return constant(array_module(x).asarray((x != 0).sum(axis=normalize_dims("count_nonzero", dim, x.ndim)), dtype=np.int64))
