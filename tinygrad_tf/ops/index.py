"""Choosing elements: indexing, where and masked_fill, gather and scatter, sort and topk.

The backward pass of a choice puts each gradient back where its element came from, and adds where one element was chosen
more than once.
"""
import numbers
import operator

import numpy as np

from ..autograd import WIDEST, Function, array_of, constant, under_autocast
from ..backend import array_module, check_one_device, device_of, first_outside, numbers_beside, scatter_add, to_device
from ..dtypes import result_type, widened
from ._ids import first_bad
from .arithmetic import as_stored, broadcast_error, converted, promote
from .reduce import normalize_dim
from .shape import Moving


def as_index(index):
    """An index of ints, slices, None, … and arrays, with PyTorch's meaning where NumPy would read it differently."""
    if isinstance(index, list) and _stands_for_a_tuple(index):
        index = tuple(index)
    return tuple(_as_part(i) for i in index) if isinstance(index, tuple) else _as_part(index)


def _stands_for_a_tuple(index):
    """PyTorch's rule: a short list that holds more than numbers is read as a tuple."""
    return len(index) < 32 and any(i is None or i is ... or isinstance(i, (list, tuple, slice)) or hasattr(i, "shape") for i in index)


def _as_part(part):
    """One part of an index: an int, a slice, None, …, or an array of integers or booleans."""
    if isinstance(part, slice):
        return _as_slice(part)
    if part is None or part is ...:
        return part
    if isinstance(part, (str, float)):
        error = IndexError if isinstance(part, float) else TypeError
        raise error(f"index: only ints, slices, None, ... and integer or bool tensors are indices, got {part!r}")
    if hasattr(part, "array"):
        part = part.array.copy()                # backward needs it as it is now
    elif not hasattr(part, "shape"):
        part = np.asarray(part) if not isinstance(part, (list, tuple)) or len(part) else np.empty(0, np.int64)
    if part.dtype == np.uint8:
        part = part.astype(bool)                # as in PyTorch: the masks of its early days
    if part.dtype.kind not in "iub":
        raise IndexError(f"index: tensors used as indices must be integers or booleans, got {part.dtype}")
    return int(part) if part.ndim == 0 and part.dtype != bool else part


def beside(x, index):
    """An index whose arrays are where the array x is: those of the CPU are uploaded, as in PyTorch. The other way round raises.

    For a GPU the ids are checked, because CuPy would wrap what is out of bounds silently, and masks become ids.
    """
    if is_basic(index):
        return index
    parts = index if isinstance(index, tuple) else (index,)
    if array_module(x) is np:
        if array_module(*parts) is not np:
            raise RuntimeError("index: the index is on a GPU and the tensor on the CPU; an index may be on the CPU or beside its tensor: "
                               "move one of them with .to(...)")
        return index
    taken = sum(_axes_of(p) for p in parts)
    placed, axis = [], 0
    for part in parts:
        placed += _placed(x, axis, part) if hasattr(part, "ndim") else [part]
        axis += x.ndim - taken if part is ... else _axes_of(part)
    return tuple(placed)


def _axes_of(part):
    """How many axes of the tensor a part of an index takes."""
    return part.ndim if hasattr(part, "ndim") and part.dtype == bool else 0 if part is None or part is ... else 1


def _placed(x, axis, part):
    """Arrays of ids on the device of x for one array of an index; IndexError as NumPy has it."""
    if part.dtype == bool:
        if part.ndim == 0:
            return [to_device(part, device_of(x))]
        if part.shape != x.shape[axis:axis + part.ndim]:
            raise IndexError(f"index: boolean index did not match indexed array: a mask of shape {part.shape} at axis {axis} (tensor of "
                             f"shape {x.shape})")
        return [to_device(i, device_of(x)) for i in part.nonzero()]
    ids = part.astype(np.int64, copy=False)
    if axis < x.ndim and (bad := first_outside(ids + x.shape[axis], 2 * x.shape[axis])) is not None:
        raise IndexError(f"index: index {bad - x.shape[axis]} is out of bounds for axis {axis} with size {x.shape[axis]} (tensor of "
                         f"shape {x.shape})")
    return [to_device(ids, device_of(x))]


def _as_slice(part):
    start, stop, step = (None if p is None else operator.index(p) for p in (part.start, part.stop, part.step))
    if step is not None and step <= 0:
        raise ValueError(f"index: a slice step must be greater than zero, got {step}; use flip to reverse")
    return slice(start, stop, step)


def is_basic(index):
    """True for ints, slices, None and …: those give views, each element at most once."""
    return not any(hasattr(p, "ndim") for p in (index if isinstance(index, tuple) else (index,)))


def in_two_steps(index):
    """(ints, slices, None; then arrays), or (index, None) where one step does. PyTorch takes the ints of an index first; NumPy
    counts them among its arrays, so that x[0, :, ids] has its axes in another order there."""
    if is_basic(index) or not any(type(p) is int for p in (index if isinstance(index, tuple) else (index,))):
        return index, None
    basic, arrays = [], []
    for part in index:
        if hasattr(part, "ndim"):
            basic += [slice(None)] * (part.ndim if part.dtype == bool else 1)
            arrays.append(part)
        else:
            basic.append(part)
            if type(part) is not int:
                arrays.append(part if part is ... else slice(None))
    return tuple(basic), tuple(arrays)


def _read(x, index):
    """x[index]; a view for a basic index, also where a single element is left, which NumPy would return as a number."""
    parts = index if isinstance(index, tuple) else (index,)
    if is_basic(index) and not any(p is ... for p in parts):
        index = (*parts, ...)
    try:
        return x[index]
    except IndexError as error:
        raise IndexError(f"index: {error} (tensor of shape {x.shape})") from None


class GetItem(Moving):
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


class SetItem(Moving):
    """y = x, but y[index] = value.    dx = dy with zeros there,  dvalue = dy[index]"""

    def forward(self, x, value, index):
        self.index, self.value_ndim = index, getattr(value, "ndim", 0)
        y = x.copy()
        _assign(y, index, value)
        return y

    def backward(self, dy):
        dx = dvalue = None
        if self.needs[0]:
            dx = dy.copy()
            dx[self.index] = 0
        if self.needs[1]:
            dvalue = dy[self.index]
            dvalue = dvalue[(None,) * (self.value_ndim - dvalue.ndim)]
        return dx, dvalue


def _assign(x, index, value):
    """x[index] = value on arrays, with an error that shows both shapes. Leading axes of size 1 in value do not count.
    The value is cast to x's dtype, also for an index of arrays, where PyTorch refuses another dtype.
    """
    value = as_stored("setitem", value, x.dtype)
    if value.ndim:
        value = value.reshape(value.shape[next((i for i, n in enumerate(value.shape) if n != 1), value.ndim):])
    try:
        x[index] = value
    except ValueError:
        shape = getattr(value, "shape", ())
        raise RuntimeError(f"setitem: a value of shape {shape} does not broadcast to x[index] of shape "
                           f"{x[index].shape} (x: {x.shape})") from None
    except IndexError as error:
        raise IndexError(f"setitem: {error} (tensor of shape {x.shape})") from None


def set_item(x, value, index):
    """x with x[index] = value, in the graph."""
    first, then = in_two_steps(index)
    if then is not None:
        value = SetItem.apply(GetItem.apply(x, first), value, then)
    return SetItem.apply(x, value, first)


def write(x, value, index):
    """x[index] = value, on arrays and in place."""
    first, then = in_two_steps(index)
    _assign(*((x, first) if then is None else (_read(x, first), then)), value)


class Where(Function):
    """y = a where condition, else b: a selection, so that an unselected inf or NaN never gets through.

    da = dy where condition, else 0;  db the other way round
    """
    mixes = True

    def forward(self, condition, a, b):
        xp = array_module(condition, a, b)
        self.saved = condition
        wanted = result_type(a, b)
        try:
            return xp.where(condition, converted(a, wanted), converted(b, wanted))
        except ValueError:
            raise broadcast_error("where", condition, a, b) from None

    def backward(self, dy):
        xp, condition, zero = array_module(dy), self.saved, dy.dtype.type(0)
        return (None, xp.where(condition, dy, zero) if self.needs[1] else None,
                xp.where(condition, zero, dy) if self.needs[2] else None)


class MaskedFill(Function):
    """y = value where blocked, else x.    dx = 0 where blocked, else dy;  dvalue = Σ dy over the blocked"""
    mixes = True

    def forward(self, x, blocked, value):
        self.saved = blocked
        value = as_stored("masked_fill", getattr(value, "item", lambda: value)(), x.dtype)
        try:
            return array_module(x).where(blocked, value, x)
        except ValueError:
            raise broadcast_error("masked_fill", x, blocked) from None

    def backward(self, dy):
        xp, blocked, zero = array_module(dy), self.saved, dy.dtype.type(0)
        return xp.where(blocked, zero, dy), None, xp.where(blocked, dy, zero) if self.needs[2] else None


class Gather(Moving):
    """y[…, i, …] = x[…, index[…, i, …], …] along one axis.    dx = zeros, then dx[index] += dy"""

    def forward(self, x, index, dim):
        self.x_shape, self.dim, self.saved = x.shape, dim, index
        return x[along(index, dim)]

    def backward(self, dy):
        dx = array_module(dy).zeros(self.x_shape, dtype=dy.dtype)
        scatter_add(dx, along(self.saved, self.dim), dy)
        return dx


class Scatter(Moving):
    """y = x, but y[…, index[…, i, …], …] = source[…, i, …].    dx = dy with zeros there,  dsource = dy[index]"""

    def forward(self, x, index, source, dim):
        self.dim, self.saved = dim, index
        y = x.copy()
        y[along(index, dim)] = source if getattr(source, "ndim", 0) == 0 else source[tuple(slice(n) for n in index.shape)]
        self.source_shape = getattr(source, "shape", ())
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
    first, then = in_two_steps(beside(input.array, as_index(index)))
    y = GetItem.apply(input, first)
    return y if then is None else GetItem.apply(y, then)


def where(condition, input=None, other=None):
    if input is None and other is None:
        return nonzero(condition, as_tuple=True)
    if array_of(condition).dtype != bool:
        raise TypeError(f"where: condition must be a bool tensor, got {condition.dtype}; write it as a comparison, e.g. x > 0")
    return Where.apply(condition, input, other)


def masked_fill(input, mask, value):
    """PyTorch's name and convention: `value` is written where `mask` is True."""
    if mask.array.dtype != bool:
        raise RuntimeError(f"masked_fill: mask must be a bool tensor, got {mask.dtype}; compare it, e.g. mask == 0")
    if getattr(value, "ndim", 0):
        raise RuntimeError(f"masked_fill: value must be a number or a 0-d tensor, got shape {tuple(value.shape)}")
    return MaskedFill.apply(input, mask, value)


def masked_select(input, mask):
    """The elements where `mask` is True, as one axis; both are broadcast against each other."""
    if mask.array.dtype != bool:
        raise RuntimeError(f"masked_select: mask must be a bool tensor, got {mask.dtype}; compare it, e.g. mask != 0")
    try:
        shape = np.broadcast_shapes(input.array.shape, mask.array.shape)
    except ValueError:
        raise broadcast_error("masked_select", input, mask) from None
    return getitem(input.expand(shape), mask.expand(shape))


def _check_index(op, index, size, dim, error=IndexError):
    """int64 or int32 in [0, size): ids never wrap."""
    if index.array.dtype not in (np.int64, np.int32):
        raise RuntimeError(f"{op}: index must be an int64 or int32 tensor, got {index.array.dtype}; convert it with .long()")
    if (bad := first_bad(index, size)) is not None:
        raise error(f"{op}: index {bad} is out of bounds for dimension {dim} with size {size}; valid are 0 to {size - 1}")


def _check_gather(op, input, index, dim):
    x, ids = input.array, index
    index = ids.array
    check_one_device(op, [x, index])
    if x.ndim != index.ndim:
        raise RuntimeError(f"{op}: index must have the same number of dimensions as input, got {index.shape} and {x.shape}")
    if any(n > m for d, (n, m) in enumerate(zip(index.shape, x.shape)) if d != dim):
        raise RuntimeError(f"{op}: index {index.shape} must not be larger than {x.shape} apart from dimension {dim}")
    _check_index(op, ids, x.shape[dim] if x.ndim else 1, dim, RuntimeError)


def gather(input, dim, index):
    """y[…, i, …] = input[…, index[…, i, …], …] along `dim`. Other than in PyTorch, index has as many dimensions as input also
    where one of them is a single number, and fits into input apart from `dim` also where it is empty.
    """
    d = normalize_dim("gather", dim, input.ndim)
    _check_gather("gather", input, index, d)
    return Gather.apply(input, index, d)


def take_along_dim(input, indices, dim):
    """As `gather`, after broadcasting both apart from `dim`."""
    d = normalize_dim("take_along_dim", dim, input.ndim)
    if input.ndim != indices.ndim:
        raise RuntimeError(f"take_along_dim: input and indices need one number of dimensions, got {tuple(input.shape)} and "
                           f"{tuple(indices.shape)}")
    rest = [max(n, m) if i != d else -1 for i, (n, m) in enumerate(zip(input.array.shape, indices.array.shape))]
    return gather(input.expand(rest), d, indices.expand(rest))


def scatter(input, dim, index, src=None, *, value=None):
    """`src`, a tensor as large as index, or `value`, a number, written to the places that index names."""
    src = value if src is None else src
    d = normalize_dim("scatter", dim, input.ndim)
    _check_gather("scatter", input, index, d)
    if hasattr(src, "array"):
        _check_source("scatter", input, index.array, src)
    elif not isinstance(src, (numbers.Number, np.generic)):
        raise TypeError(f"scatter: src must be a Tensor or a number, got {type(src).__name__}")
    else:
        src = as_stored("scatter", src, input.array.dtype)
    return Scatter.apply(input, index, src, d)


@under_autocast(WIDEST)
def scatter_add_(input, dim, index, src):
    d = normalize_dim("scatter_add", dim, input.ndim)
    if not hasattr(src, "array"):
        raise TypeError(f"scatter_add: src must be a Tensor, got {type(src).__name__}")
    _check_gather("scatter_add", input, index, d)
    _check_source("scatter_add", input, index.array, src)
    return ScatterAdd.apply(input, index, src, d)


def _check_source(op, input, index, src):
    if input.dtype != src.dtype:
        raise RuntimeError(f"{op}: input and src need one dtype, got {input.dtype} and {src.dtype}; convert one with .to(dtype)")
    if src.ndim != index.ndim or any(n > m for n, m in zip(index.shape, src.array.shape)):
        raise RuntimeError(f"{op}: index {index.shape} must not be larger than src {tuple(src.shape)}")


def _check_vector(op, index, size, dim):
    if index.ndim > 1:
        raise IndexError(f"{op}: index must be one row of ids, got shape {index.array.shape}")
    _check_index(op, index, size, dim)


def index_select(input, dim, index):
    d = normalize_dim("index_select", dim, input.ndim)
    x = input if input.ndim else input.reshape(1)
    check_one_device("index_select", [input.array, index.array])
    _check_vector("index_select", index, x.array.shape[d], d)
    y = GetItem.apply(x, (slice(None),) * d + (index.array.flatten(),))
    return y if input.ndim else y.reshape(())


def index_add(input, dim, index, source, *, alpha=1):
    """input with source[i] · alpha added to its slice index[i] along `dim`."""
    d = normalize_dim("index_add", dim, input.ndim)
    if input.ndim == 0:
        return index_add(input.reshape(1), 0, index, source.reshape(1), alpha=alpha).reshape(())
    _check_vector("index_add", index, input.array.shape[d], d)
    wanted = (*input.array.shape[:d], index.array.size, *input.array.shape[d + 1:])
    if source.array.shape != wanted or source.dtype != input.dtype:
        raise RuntimeError(f"index_add: source must have shape {wanted} and {input.dtype}, one slice for each index, got "
                           f"{tuple(source.shape)} and {source.dtype}")
    return IndexAdd.apply(input, index.reshape(-1), source if alpha == 1 else source * alpha, d)


# --- order ------------------------------------------------------------------------------------------------------------

def _order(x, dim, descending):
    """Indices that sort along an axis, stable; NaN counts as the largest, as in PyTorch."""
    xp, x = array_module(x), widened(x)
    if not x.ndim:
        return xp.zeros((), dtype=np.int64)
    if not descending:
        return x.argsort(axis=dim, kind="stable")
    backwards = xp.flip(x, dim).argsort(axis=dim, kind="stable")    # reversing twice keeps equal elements in order
    return x.shape[dim] - 1 - xp.flip(backwards, dim)


def argsort(input, dim=-1, descending=False, stable=False):
    """The indices that sort along an axis, stable; NaN counts as the largest."""
    return constant(_order(input.array, normalize_dim("argsort", dim, input.ndim), descending))


def sort_pair(input, dim=-1, descending=False, stable=False):
    """(values, indices); the gradient flows through the values."""
    index = argsort(input, dim, descending)
    return gather(input, dim, index), index


def topk_pair(input, k, dim=-1, largest=True, sorted=True):
    """(values, indices) of the k largest along an axis, largest first."""
    d = normalize_dim("topk", dim, input.ndim)
    if isinstance(k, bool) or not isinstance(k, numbers.Integral):
        raise TypeError(f"topk: k must be an int, got {type(k).__name__}")
    if input.array.dtype == bool:
        raise RuntimeError("topk: not implemented for bool; convert with .to(dtype)")
    n = input.array.shape[d] if input.ndim else 1
    if not 0 <= k <= n:
        raise RuntimeError(f"topk: k must be between 0 and {n}, the size of dim {dim} of shape {tuple(input.shape)}, got {k}")
    index = constant(_first(input.array, d, k, largest) if input.ndim else _order(input.array, d, largest))
    return gather(input, d, index), index


LONG = 2048                                     # from so many elements on, finding the few largest is cheaper than sorting all


def _first(x, d, k, largest):
    """The first k of `_order` along axis d."""
    xp, x, n = array_module(x), widened(x), x.shape[d]
    if xp is not np or n < LONG or not 0 < 4 * k < n:
        return _order(x, d, largest)[(slice(None),) * d + (slice(k),)].copy()
    rows = np.moveaxis(x, d, -1)
    found = np.empty((*rows.shape[:-1], k), np.int64)
    for where in np.ndindex(rows.shape[:-1]):
        row = rows[where]
        last = np.partition(row, n - k)[n - k] if largest else np.partition(row, k - 1)[k - 1]
        kept = np.flatnonzero(~(row < last) if largest else ~(row > last))          # and NaN, which is no less: the largest of all
        found[where] = kept[_order(row[kept], 0, largest)[:k]]
    return np.moveaxis(found, -1, d)


def extreme_pair(input, dim, keepdim, which):
    """(values, indices) of the largest ("argmax") or smallest ("argmin") along an axis; the first of equals."""
    d = normalize_dim(which[3:], dim, input.ndim)
    if input.ndim == 0:
        return input.clone(), constant(array_module(input.array).zeros((), dtype=np.int64))
    if input.array.shape[d] == 0:
        raise IndexError(f"{which[3:]}: expected dim {dim} to have a non-zero size, got shape {tuple(input.shape)}")
    index = constant(array_module(input.array).expand_dims(getattr(widened(input.array), which)(axis=d), d))
    values = gather(input, d, index)
    return (values, index) if keepdim else (values.squeeze(d), index.squeeze(d))


def nonzero(input, as_tuple=False):
    """[n, ndim]: the indices of the n elements that are not 0, row-major; as_tuple=True gives one tensor an axis."""
    xp, x = array_module(input.array), widened(input.array)
    if as_tuple:
        return tuple(constant(i) for i in xp.atleast_1d(x).nonzero())
    return constant(xp.argwhere(x))


def isin(elements, test_elements):
    """Which elements occur in test_elements."""
    a, b = map(widened, promote(array_of(elements), array_of(test_elements)))
    xp = array_module(a, b)
    return constant(xp.isin(*numbers_beside("isin", [xp.asarray(x) if np.isscalar(x) else x for x in (a, b)])))


def unique(input, sorted=True, return_inverse=False, return_counts=False):
    """The different values, sorted; on request also where each element went, and how often each occurs. No NaN equals another."""
    x = widened(input.array)
    found = array_module(x).unique(x, return_inverse=return_inverse, return_counts=return_counts, equal_nan=False)
    values, *places = found if isinstance(found, tuple) else (found,)
    found = (constant(values.astype(input.array.dtype, copy=False)), *map(constant, places))
    return found if places else found[0]


def bincount(input, minlength=0):
    """How often each of 0, 1, 2, … occurs."""
    x = input.array
    if x.ndim != 1 or x.dtype.kind not in "biu" or x.size and x.min() < 0:
        raise RuntimeError(f"bincount: one row of integers ≥ 0 is needed, got {input.dtype} of shape {tuple(input.shape)}"
                           f"{f' with the value {x.min()}' if x.size and x.ndim == 1 else ''}")
    return constant(array_module(input.array).bincount(input.array, minlength=minlength))


def searchsorted(sorted_sequence, values, *, right=False):
    """Where each value would have to be inserted into a sorted row to keep it sorted, [shape of values]. One row only: PyTorch
    also takes a row for each row of values.
    """
    x, v = map(widened, promote(sorted_sequence.array, array_of(values)))
    if hasattr(v, "ndim"):
        x, v = numbers_beside("searchsorted", [x, v])
    if x.ndim != 1:
        raise RuntimeError(f"searchsorted: sorted_sequence must be one row, got shape {x.shape}; go through the rows one by one")
    return constant(array_module(x).asarray(array_module(x).searchsorted(x, v, side="right" if right else "left"), dtype=np.int64))

