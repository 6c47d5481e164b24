"""Reductions over one axis, several, or all: sum, mean, prod, extrema, variance, norms, cumulative sums."""
import math
import operator

import numpy as np

from ..autograd import Function, array_of, constant
from ..backend import array_module
from ..dtypes import numpy_dtype
from .arithmetic import cast, sqrt


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
    try:
        d = operator.index(dim)
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


class Sum(Function):
    """y = Σ x, integers and booleans in int64.    dx = dy for every element"""

    def forward(self, x, dims, keepdim):
        self.x_shape, self.dims = x.shape, dims
        return x.sum(axis=dims, keepdims=keepdim, dtype=x.dtype if x.dtype.kind == "f" else np.int64)

    def backward(self, dy):
        return array_module(dy).broadcast_to(keep(dy, self.x_shape, self.dims), self.x_shape)


class Mean(Function):
    """y = Σ x / n.    dx = dy / n for every element"""

    def forward(self, x, dims, keepdim):
        if x.dtype.kind != "f":
            raise RuntimeError(f"mean: the mean of {x.dtype} has no float result type; call .float() first or pass dtype=")
        self.x_shape, self.dims = x.shape, dims
        with np.errstate(invalid="ignore", divide="ignore"):
            return x.sum(axis=dims, keepdims=keepdim) / x.dtype.type(count(x.shape, dims))

    def backward(self, dy):
        xp = array_module(dy)
        dy = keep(dy, self.x_shape, self.dims) / dy.dtype.type(count(self.x_shape, self.dims) or 1)
        return xp.broadcast_to(dy, self.x_shape)


class Prod(Function):
    """y = Π x.    dx_i = dy · Π_{j≠i} x_j, as products from the left and from the right: y / x would be 0/0 at a zero"""

    def forward(self, x, dim, keepdim):
        self.saved, self.dim = x, dim
        return x.prod(axis=dim, keepdims=keepdim, dtype=x.dtype if x.dtype.kind == "f" else np.int64)

    def backward(self, dy):
        x, dim = self.saved, self.dim
        xp = array_module(x)
        last = xp.moveaxis(x, dim, -1)
        ones = xp.ones_like(last[..., :1])
        left = xp.cumprod(xp.concatenate([ones, last[..., :-1]], axis=-1), axis=-1)
        right = xp.cumprod(xp.concatenate([ones, last[..., :0:-1]], axis=-1), axis=-1)[..., ::-1]
        return keep(dy, x.shape, (dim,)) * xp.moveaxis(left * right, -1, dim)


class Amax(Function):
    """y = max x.    dx = dy, shared equally among the elements that equal the maximum"""

    def forward(self, x, dims, keepdim):
        _require_elements("amax", x, dims)
        y = x.max(axis=dims, keepdims=keepdim)
        self.saved, self.dims = (x, y), dims
        return y

    def backward(self, dy):
        x, y = self.saved
        return _share_among_equals(x, y, dy, self.dims)


class Amin(Function):
    """y = min x.    dx = dy, shared equally among the elements that equal the minimum"""

    def forward(self, x, dims, keepdim):
        _require_elements("amin", x, dims)
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


def _require_elements(op, x, dims):
    if any(x.shape[d] == 0 for d in dims):
        raise IndexError(f"{op}: expected every reduced dim to have a non-zero size, got shape {x.shape} reduced over {dims}")


class Var(Function):
    """y = Σ (x − x̄)² / (n − correction).    dx = dy · 2 (x − x̄) / (n − correction)"""

    def forward(self, x, dims, keepdim, correction):
        self.dims, self.divisor = dims, max(count(x.shape, dims) - correction, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            centred = x - x.sum(axis=dims, keepdims=True) / x.dtype.type(count(x.shape, dims))
            self.saved = centred
            return (centred * centred).sum(axis=dims, keepdims=keepdim) / x.dtype.type(self.divisor)

    def backward(self, dy):
        centred = self.saved
        with np.errstate(invalid="ignore", divide="ignore"):
            return keep(dy, centred.shape, self.dims) * (2 / dy.dtype.type(self.divisor)) * centred


class Norm(Function):
    """y = (Σ |x|^p)^(1/p); p = inf is max |x|, p = 0 counts non-zeros.    dx = dy · sign(x) · (|x| / y)^(p−1), 0 where y = 0"""

    def forward(self, x, p, dims, keepdim):
        xp = array_module(x)
        size = abs(x)
        if p == 2:
            y = xp.sqrt((x * x).sum(axis=dims, keepdims=True))
        elif p == math.inf:
            y = size.max(axis=dims, keepdims=True, initial=0)
        elif p == -math.inf:
            y = size.min(axis=dims, keepdims=True)
        elif p == 0:
            y = (x != 0).sum(axis=dims, keepdims=True).astype(x.dtype)
        else:
            y = xp.power(xp.power(size, p).sum(axis=dims, keepdims=True), 1 / p)
        self.saved, self.p, self.dims = (x, y), p, dims
        return y if keepdim else y.reshape([n for i, n in enumerate(x.shape) if i not in dims])

    def backward(self, dy):
        x, y = self.saved
        xp, p = array_module(x), self.p
        dy = keep(dy, x.shape, self.dims)
        if p == 0:
            return xp.zeros_like(x)
        if p in (math.inf, -math.inf):
            return _share_among_equals(abs(x), y, dy, self.dims) * xp.sign(x)
        with np.errstate(invalid="ignore", divide="ignore"):
            if p == 2:
                return dy * xp.where(y == 0, 0, x / y)
            slope = xp.sign(x) * xp.power(abs(x) / y, p - 1)
            return dy * xp.where((y == 0) | (x == 0), 0, slope)


class Cumsum(Function):
    """y_i = Σ_{j≤i} x_j, integers in int64.    dx_j = Σ_{i≥j} dy_i"""

    def forward(self, x, dim):
        self.dim = dim
        if x.ndim == 0:
            return x.copy()
        return x.cumsum(axis=dim, dtype=x.dtype if x.dtype.kind == "f" else np.int64)

    def backward(self, dy):
        xp, dim = array_module(dy), self.dim
        if dy.ndim == 0:
            return dy
        return xp.flip(xp.cumsum(xp.flip(dy, dim), axis=dim), dim)


def sum(input, dim=None, keepdim=False, *, dtype=None):
    input = input if dtype is None else cast(input, numpy_dtype(dtype))
    return Sum.apply(input, normalize_dims("sum", dim, input.ndim), keepdim)


def mean(input, dim=None, keepdim=False, *, dtype=None):
    input = input if dtype is None else cast(input, numpy_dtype(dtype))
    return Mean.apply(input, normalize_dims("mean", dim, input.ndim), keepdim)


def prod(input, dim=None, keepdim=False, *, dtype=None):
    input = input if dtype is None else cast(input, numpy_dtype(dtype))
    if dim is None:
        return Prod.apply(input.reshape(-1), 0, False)
    if input.ndim == 0:
        return Prod.apply(input.reshape(1), normalize_dim("prod", dim, 0), False)
    return Prod.apply(input, normalize_dim("prod", dim, input.ndim), keepdim)


def amax(input, dim=(), keepdim=False): return Amax.apply(input, normalize_dims("amax", dim, input.ndim), keepdim)
def amin(input, dim=(), keepdim=False): return Amin.apply(input, normalize_dims("amin", dim, input.ndim), keepdim)


def var(input, dim=None, unbiased=None, keepdim=False, *, correction=None):
    if isinstance(dim, bool):                   # PyTorch's old form var(input, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if input.array.dtype.kind != "f":
        raise RuntimeError(f"var: a floating-point tensor is needed, got {input.dtype}; call .float() first")
    return Var.apply(input, normalize_dims("var", dim, input.ndim), keepdim, correction)


def std(input, dim=None, unbiased=None, keepdim=False, *, correction=None):
    return sqrt(var(input, dim, unbiased, keepdim, correction=correction))


def norm(input, p=2, dim=None, keepdim=False):
    p = {"fro": 2, None: 2}.get(p, p)
    if input.array.dtype.kind != "f":
        raise RuntimeError(f"norm: a floating-point tensor is needed, got {input.dtype}; call .float() first")
    return Norm.apply(input, p, normalize_dims("norm", dim, input.ndim), keepdim)


def cumsum(input, dim, *, dtype=None):
    input = input if dtype is None else cast(input, numpy_dtype(dtype))
    return Cumsum.apply(input, normalize_dim("cumsum", dim, input.ndim))


# --- without gradient -------------------------------------------------------------------------------------------------

def any_(input, dim=None, keepdim=False):
    x = array_of(input)
    return constant(array_module(x).asarray((x != 0).any(axis=normalize_dims("any", dim, x.ndim), keepdims=keepdim)))


def all_(input, dim=None, keepdim=False):
    x = array_of(input)
    return constant(array_module(x).asarray((x != 0).all(axis=normalize_dims("all", dim, x.ndim), keepdims=keepdim)))


def _arg(op, input, dim, keepdim):
    """argmax and argmin: the index in the flattened tensor, or along one axis."""
    x = array_of(input)
    if x.size == 0:
        raise IndexError(f"{op}: expected a tensor with elements, got shape {x.shape}")
    y = getattr(x, op)() if dim is None else getattr(x, op)(axis=normalize_dim(op, dim, x.ndim)) if x.ndim else x.astype(np.int64) * 0
    y = array_module(x).asarray(y, dtype=np.int64)
    if keepdim:
        y = keep(y, x.shape, normalize_dims(op, dim, x.ndim))
    return constant(y)


def argmax(input, dim=None, keepdim=False): return _arg("argmax", input, dim, keepdim)
def argmin(input, dim=None, keepdim=False): return _arg("argmin", input, dim, keepdim)


def count_nonzero(input, dim=None):
    x = array_of(input)
    return constant(array_module(x).asarray((x != 0).sum(axis=normalize_dims("count_nonzero", dim, x.ndim)), dtype=np.int64))
