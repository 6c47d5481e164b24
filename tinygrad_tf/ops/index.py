"""Choosing elements: indexing, where and masked_fill, gather and scatter, sort and topk.

The backward pass of a choice puts each gradient back where its element came from, and adds where one element was chosen
more than once.
"""
import numpy as np

from ..autograd import Function, array_of, constant
from ..backend import array_module, scatter_add
from ..dtypes import result_type
from .arithmetic import _broadcast_error, _cast
from .reduce import normalize_dim


def as_index(index):
    """An index with arrays where it had tensors or lists, checked for what NumPy would read differently from PyTorch."""
    if isinstance(index, tuple):
        return tuple(as_index(i) for i in index)
    if isinstance(index, list):
        index = np.asarray(index) if index else np.empty(0, np.int64)
    if isinstance(index, slice):
        parts = [None if p is None else int(p) for p in (index.start, index.stop, index.step)]
        if parts[2] is not None and parts[2] <= 0:
            raise ValueError(f"index: a slice step must be greater than zero, got {parts[2]}; use flip to reverse")
        return slice(*parts)
    if hasattr(index, "array"):
        index = index.array.copy()              # backward needs it as it is now
    if getattr(index, "dtype", None) is not None and index.dtype.kind not in "iub":
        raise IndexError(f"index: tensors used as indices must be integers or booleans, got {index.dtype}")
    if getattr(index, "dtype", None) == np.uint8:
        index = index.astype(bool)              # as in PyTorch: the masks of its early days
    if isinstance(index, float):
        raise IndexError(f"index: a float is no index, got {index}; use an int")
    return index


def is_basic(index):
    """True for ints, slices, None and …: those give views, each element at most once."""
    parts = index if isinstance(index, tuple) else (index,)
    return not any(hasattr(p, "ndim") or isinstance(p, (bool, np.bool_)) for p in parts)


def _read(x, index):
    """x[index]; a view for a basic index, also where a single element is left, which NumPy would return as a number."""
    parts = index if isinstance(index, tuple) else (index,)
    if is_basic(index) and not any(p is Ellipsis for p in parts):
        index = (*parts, ...)
    try:
        return x[index]
    except IndexError as error:
        raise IndexError(f"index: {error} (tensor of shape {x.shape})") from None


class GetItem(Function):
    """y = x[index].    dx = zeros, then dx[index] += dy"""

    def forward(self, x, index):
        self.x_shape, self.index = x.shape, index
        return _read(x, index)

    def backward(self, dy):
        dx = array_module(dy).zeros(self.x_shape, dtype=dy.dtype)
        if is_basic(self.index):
            dx[self.index] = dy
        else:
            scatter_add(dx, self.index, dy)
        return dx


class SetItem(Function):
    """y = x, but y[index] = value.    dx = dy with zeros there,  dvalue = dy[index]"""

    def forward(self, x, value, index):
        self.index = index
        y = x.copy()
        write(y, index, value)
        return y

    def backward(self, dy):
        dx = dvalue = None
        if self.needs[0]:
            dx = dy.copy()
            dx[self.index] = 0
        if self.needs[1]:
            dvalue = dy[self.index]
        return dx, dvalue


def write(x, index, value):
    """x[index] = value on arrays, with an error that shows both shapes."""
    try:
        x[index] = value
    except ValueError:
        raise RuntimeError(f"setitem: a value of shape {np.shape(value)} does not broadcast to x[index] of shape {x[index].shape} "
                           f"(x: {x.shape})") from None
    except IndexError as error:
        raise IndexError(f"setitem: {error} (tensor of shape {x.shape})") from None


class Where(Function):
    """y = a where condition, else b: a selection, so that an unselected inf or NaN never gets through.

    da = dy where condition, else 0;  db the other way round
    """

    def forward(self, condition, a, b):
        xp = array_module(condition, a, b)
        self.saved = condition
        wanted = result_type(a, b)
        try:
            return xp.where(condition, _cast(a, wanted), _cast(b, wanted))
        except ValueError:
            raise _broadcast_error("where", condition, xp.empty(np.broadcast_shapes(np.shape(a), np.shape(b)))) from None

    def backward(self, dy):
        xp, condition, zero = array_module(dy), self.saved, dy.dtype.type(0)
        return (None, xp.where(condition, dy, zero) if self.needs[1] else None,
                xp.where(condition, zero, dy) if self.needs[2] else None)


class MaskedFill(Function):
    """y = value where blocked, else x.    dx = 0 where blocked, else dy;  dvalue = Σ dy over the blocked"""

    def forward(self, x, blocked, value):
        self.saved = blocked
        try:
            return array_module(x).where(blocked, _cast(value, x.dtype), x)
        except ValueError:
            raise _broadcast_error("masked_fill", x, blocked) from None

    def backward(self, dy):
        xp, blocked, zero = array_module(dy), self.saved, dy.dtype.type(0)
        return xp.where(blocked, zero, dy), None, xp.where(blocked, dy, zero) if self.needs[2] else None


class Gather(Function):
    """y[…, i, …] = x[…, index[…, i, …], …] along one axis.    dx = zeros, then dx[index] += dy"""

    def forward(self, x, index, dim):
        self.x_shape, self.dim, self.saved = x.shape, dim, index
        return x[along(index, dim)]

    def backward(self, dy):
        dx = array_module(dy).zeros(self.x_shape, dtype=dy.dtype)
        scatter_add(dx, along(self.saved, self.dim), dy)
        return dx


class Scatter(Function):
    """y = x, but y[…, index[…, i, …], …] = source[…, i, …].    dx = dy with zeros there,  dsource = dy[index]"""

    def forward(self, x, index, source, dim):
        self.dim, self.saved = dim, index
        y = x.copy()
        y[along(index, dim)] = source if np.ndim(source) == 0 else source[tuple(slice(n) for n in index.shape)]
        self.source_shape = np.shape(source)
        return y

    def backward(self, dy):
        index = along(self.saved, self.dim)
        dx = dsource = None
        if self.needs[0]:
            dx = dy.copy()
            dx[index] = 0
        if self.needs[2]:
            dsource = array_module(dy).zeros(self.source_shape, dtype=dy.dtype)
            dsource[tuple(slice(n) for n in self.saved.shape)] = dy[index]
        return dx, None, dsource


class ScatterAdd(Function):
    """y = x, then y[…, index[…, i, …], …] += source[…, i, …].    dx = dy,  dsource = dy[index]"""

    def forward(self, x, index, source, dim):
        self.dim, self.saved, self.source_shape = dim, index, source.shape
        y = x.copy()
        scatter_add(y, along(index, dim), source[tuple(slice(n) for n in index.shape)])
        return y

    def backward(self, dy):
        index, dsource = self.saved, None
        if self.needs[2]:
            dsource = array_module(dy).zeros(self.source_shape, dtype=dy.dtype)
            dsource[tuple(slice(n) for n in index.shape)] = dy[along(index, self.dim)]
        return dy, None, dsource


class IndexAdd(Function):
    """y = x, then y[index[i]] += source[i] along one axis.    dx = dy,  dsource = dy[index]"""

    def forward(self, x, index, source, dim):
        self.place, self.saved = (slice(None),) * dim, index
        y = x.copy()
        scatter_add(y, (*self.place, index), source)
        return y

    def backward(self, dy):
        return dy, None, dy[(*self.place, self.saved)]


def along(index, dim):
    """The full index that picks index[…] along `dim` and keeps every other place: what gather and scatter share."""
    xp = array_module(index)
    grid = list(xp.ogrid[tuple(slice(n) for n in index.shape)]) if index.ndim else []
    if index.ndim:
        grid[dim] = index
    return tuple(grid)


def getitem(input, index):
    return GetItem.apply(input, as_index(index))


def where(condition, input=None, other=None):
    if input is None and other is None:
        return nonzero(condition, as_tuple=True)
    if array_of(condition).dtype != bool:
        raise TypeError(f"where: condition must be a bool tensor, got {condition.dtype}; write it as a comparison, e.g. x > 0")
    return Where.apply(condition, input, other)


def masked_fill(input, mask, value):
    """PyTorch's name and convention: `value` is written where `mask` is True."""
    if array_of(mask).dtype != bool:
        raise RuntimeError(f"masked_fill: mask must be a bool tensor, got {mask.dtype}; compare it, e.g. mask == 0")
    if np.ndim(array_of(value)):
        raise RuntimeError(f"masked_fill: value must be a number or a 0-d tensor, got shape {tuple(value.shape)}")
    return MaskedFill.apply(input, mask, value)


def masked_select(input, mask):
    shape = np.broadcast_shapes(input.array.shape, mask.array.shape)
    xp = array_module(input.array)
    return getitem(input.expand(shape), constant(xp.broadcast_to(mask.array, shape)))


def _check_index(op, index, size, dim):
    """Integers in [0, size): ids never wrap."""
    if index.dtype.kind not in "iu":
        raise RuntimeError(f"{op}: index must be an integer tensor (int64), got {index.dtype}")
    if index.size and (index.min() < 0 or index.max() >= size):
        bad = int(index[(index < 0) | (index >= size)].reshape(-1)[0])
        raise IndexError(f"{op}: index {bad} is out of bounds for dimension {dim} with size {size}; valid are 0 to {size - 1}")


def _check_gather(op, x, index, dim):
    if x.ndim != index.ndim:
        raise RuntimeError(f"{op}: index must have the same number of dimensions as input, got {index.shape} and {x.shape}")
    if any(n > m for d, (n, m) in enumerate(zip(index.shape, x.shape)) if d != dim):
        raise RuntimeError(f"{op}: index {index.shape} must not be larger than {x.shape} apart from dimension {dim}")
    if x.ndim:
        _check_index(op, index, x.shape[dim], dim)


def gather(input, dim, index):
    d = normalize_dim("gather", dim, input.ndim)
    _check_gather("gather", input.array, index.array, d)
    return Gather.apply(input, index, d)


def take_along_dim(input, indices, dim):
    d = normalize_dim("take_along_dim", dim, input.ndim)
    shape = list(input.array.shape)
    shape[d] = indices.array.shape[d]
    return gather(input, d, indices.expand(shape))


def scatter(input, dim, index, src):
    d = normalize_dim("scatter", dim, input.ndim)
    _check_gather("scatter", input.array, index.array, d)
    _check_source("scatter", index.array, array_of(src))
    return Scatter.apply(input, index, src, d)


def scatter_add_(input, dim, index, src):
    d = normalize_dim("scatter_add", dim, input.ndim)
    _check_gather("scatter_add", input.array, index.array, d)
    _check_source("scatter_add", index.array, src.array)
    return ScatterAdd.apply(input, index, src, d)


def _check_source(op, index, source):
    if np.ndim(source) and (source.ndim != index.ndim or any(n > m for n, m in zip(index.shape, source.shape))):
        raise RuntimeError(f"{op}: index {index.shape} must not be larger than src {np.shape(source)}")


def index_select(input, dim, index):
    d = normalize_dim("index_select", dim, input.ndim)
    _check_index("index_select", index.array, input.array.shape[d], d)
    return GetItem.apply(input, (slice(None),) * d + (index.array.flatten(),))


def index_add(input, dim, index, source, *, alpha=1):
    d = normalize_dim("index_add", dim, input.ndim)
    _check_index("index_add", index.array, input.array.shape[d], d)
    return IndexAdd.apply(input, index, source if alpha == 1 else source * alpha, d)


# --- order ------------------------------------------------------------------------------------------------------------

def _order(x, dim, descending):
    """Indices that sort along an axis, stable; NaN counts as the largest, as in PyTorch."""
    xp = array_module(x)
    if not x.ndim:
        return xp.zeros((), dtype=np.int64)
    if not descending:
        return x.argsort(axis=dim, kind="stable")
    backwards = xp.flip(x, dim).argsort(axis=dim, kind="stable")    # reversing twice keeps equal elements in order
    return x.shape[dim] - 1 - xp.flip(backwards, dim)


def argsort(input, dim=-1, descending=False, stable=False):
    return constant(_order(input.array, normalize_dim("argsort", dim, input.ndim), descending))


def sort_pair(input, dim=-1, descending=False, stable=False):
    """(values, indices); the gradient flows through the values."""
    index = argsort(input, dim, descending)
    return gather(input, dim, index), index


def topk_pair(input, k, dim=-1, largest=True, sorted=True):
    """(values, indices) of the k largest along an axis, largest first."""
    d = normalize_dim("topk", dim, input.ndim)
    n = input.array.shape[d] if input.ndim else 1
    if not 0 <= k <= n:
        raise RuntimeError(f"topk: k must be between 0 and {n}, the size of dim {dim} of shape {tuple(input.shape)}, got {k}")
    order = _order(input.array, d, descending=largest)
    index = constant(order[(slice(None),) * d + (slice(k),)].copy() if input.ndim else order)
    return gather(input, d, index), index


def extreme_pair(input, dim, keepdim, which):
    """(values, indices) of the largest ("argmax") or smallest ("argmin") along an axis; the first of equals."""
    d = normalize_dim(which[3:], dim, input.ndim)
    if input.ndim == 0:
        return input.clone(), constant(array_module(input.array).zeros((), dtype=np.int64))
    if input.array.shape[d] == 0:
        raise IndexError(f"{which[3:]}: expected dim {dim} to have a non-zero size, got shape {tuple(input.shape)}")
    index = constant(np.expand_dims(getattr(input.array, which)(axis=d), d))
    values = gather(input, d, index)
    return (values, index) if keepdim else (values.squeeze(d), index.squeeze(d))


def nonzero(input, as_tuple=False):
    """[n, ndim]: the indices of the n elements that are not 0, row-major; as_tuple=True gives one tensor an axis."""
    xp = array_module(input.array)
    if as_tuple:
        return tuple(constant(i) for i in xp.atleast_1d(input.array).nonzero())
    return constant(xp.argwhere(input.array))


def isin(elements, test_elements):
    a, b = array_of(elements), array_of(test_elements)
    return constant(array_module(a).isin(a, b))


def unique(input, sorted=True, return_inverse=False, return_counts=False):
    found = array_module(input.array).unique(input.array, return_inverse=return_inverse, return_counts=return_counts)
    if not isinstance(found, tuple):
        return constant(found)
    return tuple(constant(f) for f in found)


def bincount(input, minlength=0):
    return constant(array_module(input.array).bincount(input.array, minlength=minlength))


def searchsorted(sorted_sequence, values, *, right=False):
    x, v = array_of(sorted_sequence), array_of(values)
    return constant(array_module(x).asarray(array_module(x).searchsorted(x, v, side="right" if right else "left"), dtype=np.int64))

