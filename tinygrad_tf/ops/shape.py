"""Moving elements without changing them: reshape, transpose, expand, cat, triangles. Backward moves the gradient back."""
import math
import operator

import numpy as np

from ..autograd import Function, array_of
from ..backend import CPU, array_module, owner, to_device
from ..dtypes import result_type
from .arithmetic import as_stored
from .reduce import normalize_dim, normalize_dims


def as_shape(op, sizes):
    """The sizes given as separate ints, one tuple, list or Size, as a tuple of ints."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    try:
        return tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(f"{op}: sizes must be ints, got {sizes}") from None


class Moving(Function):
    """Elements change their place and nothing else: bfloat16 goes through as it is."""
    in_float32 = False


class Reshape(Moving):
    """The same elements in row-major order under another shape; a view where the memory allows it."""

    def forward(self, x, shape):
        self.x_shape = x.shape
        return x.reshape(shape)

    def backward(self, dy):
        return dy.reshape(self.x_shape)


class Permute(Moving):
    """Axis i of y is axis dims[i] of x."""

    def forward(self, x, dims):
        self.dims = dims
        return x.transpose(dims)

    def backward(self, dy):
        return dy.transpose(tuple(map(self.dims.index, range(dy.ndim))))


class Expand(Moving):
    """Axes of size 1, and new ones in front, repeated without a copy. The engine sums the gradient back."""

    def forward(self, x, shape):
        return x if x.shape == shape else array_module(x).broadcast_to(x, shape)

    def backward(self, dy):
        return dy


class Contiguous(Moving):
    """A copy in row-major order."""

    def forward(self, x):
        return x.copy("C")

    def backward(self, dy):
        return dy


class Cat(Moving):
    """Tensors joined along an existing axis.    dx_i = its own stretch of dy"""

    def forward(self, dim, *xs):
        self.dim, self.sizes = dim, [x.shape[dim] for x in xs]
        dtype = result_type(*xs)
        return array_module(*xs).concatenate([x.astype(dtype, copy=False) for x in xs], axis=dim)

    def backward(self, dy):
        ends = np.cumsum(self.sizes).tolist()
        before = (slice(None),) * self.dim
        return None, *(dy[(*before, slice(end - n, end))] for n, end in zip(self.sizes, ends))


class Triangle(Moving):
    """x with zeros above (`tril`) or below (`triu`) a diagonal of the last two axes."""

    def forward(self, x, which, diagonal):
        self.which, self.diagonal = which, diagonal
        return getattr(array_module(x), which)(x, diagonal)

    def backward(self, dy):
        return getattr(array_module(dy), self.which)(dy, self.diagonal)


class Diagonal(Moving):
    """y[…, i] = x[…, i, i], a view.    x: [..., n, n]  y: [..., n];    dx = zeros, then dx[…, i, i] = dy[…, i]"""

    def forward(self, x):
        return array_module(x).einsum("...ii->...i", x)

    def backward(self, dy):
        xp = array_module(dy)
        dx = xp.zeros((*dy.shape, dy.shape[-1]), dtype=dy.dtype)
        xp.einsum("...ii->...i", dx)[...] = dy
        return dx


class Flip(Moving):
    """The order along some axes reversed."""

    def forward(self, x, dims):
        self.dims = dims
        return array_module(x).flip(x, dims).copy()

    def backward(self, dy):
        return array_module(dy).flip(dy, self.dims)


class Roll(Moving):
    """Elements shifted along axes; what leaves at one end comes in at the other."""

    def forward(self, x, shifts, dims):
        self.shifts, self.dims = shifts, dims
        return array_module(x).roll(x, shifts, dims)

    def backward(self, dy):
        return array_module(dy).roll(dy, tuple(-s for s in self.shifts), self.dims)


class Repeat(Moving):
    """The whole tensor tiled `times[i]` times along axis i.    dx = Σ dy over the copies"""

    def forward(self, x, times):
        self.x_shape = (1,) * (len(times) - x.ndim) + x.shape
        self.times = times
        return array_module(x).tile(x, times)

    def backward(self, dy):
        pairs = [n for t, size in zip(self.times, self.x_shape) for n in (t, size)]
        return dy.reshape(pairs).sum(axis=tuple(range(0, len(pairs), 2)))


class RepeatInterleave(Moving):
    """Each element repeated n times in place, k0 k0 k1 k1, along one axis.    dx = Σ dy over the copies"""

    def forward(self, x, repeats, dim):
        self.x_shape, self.repeats, self.dim = x.shape, repeats, dim
        return array_module(x).repeat(x, repeats, axis=dim)

    def backward(self, dy):
        before, after = self.x_shape[:self.dim + 1], self.x_shape[self.dim + 1:]
        return dy.reshape(*before, self.repeats, *after).sum(axis=self.dim + 1)


class Pad(Moving):
    """A constant border; `widths` holds (before, after) for each axis, negative ones crop.    dx = the inside of dy"""

    def forward(self, x, widths, value):
        crop = tuple(slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(x.shape, widths))
        grow = [(max(a, 0), max(b, 0)) for a, b in widths]
        self.x_shape, self.crop = x.shape, crop
        self.inside = tuple(slice(a, a + s.stop - s.start) for s, (a, b) in zip(crop, grow))
        return array_module(x).pad(x[crop], grow, constant_values=value)

    def backward(self, dy):
        dx = array_module(dy).zeros(self.x_shape, dtype=dy.dtype)
        dx[self.crop] = dy[self.inside]
        return dx


def reshape(input, *shape):
    shape = as_shape("reshape", shape)
    _check_reshape("reshape", input.array, shape)
    y = Reshape.apply(input, shape)
    y.version.inherit_bounds(input.version)
    return y


def _check_reshape(op, x, shape):
    known, free = abs(math.prod(shape)), shape.count(-1)
    if free > 1:
        raise RuntimeError(f"{op}: only one dimension can be inferred (-1), got {shape}")
    if min(shape, default=0) < -1:
        raise RuntimeError(f"{op}: invalid shape dimension in {shape}; sizes are ≥ 0, or one −1")
    if free and known == 0:
        raise RuntimeError(f"{op}: cannot infer the −1 in {shape} because the other sizes multiply to 0")
    if (x.size % known != 0) if free else (x.size != known):
        raise RuntimeError(f"{op}: shape {shape} is invalid for input of size {x.size} (shape {x.shape})")


def view(input, *size):
    if len(size) == 1 and not isinstance(size[0], (int, tuple, list)):
        raise TypeError("view: to read a tensor's memory as another dtype is not supported; use .to(dtype) to convert values")
    shape = as_shape("view", size)
    _check_reshape("view", input.array, shape)
    y = Reshape.apply(input, shape)
    if input.array.size and owner(y.array) is not owner(input.array):
        raise RuntimeError(f"view: shape {tuple(input.shape)} with these strides cannot be viewed as {tuple(y.shape)} without a "
                           f"copy; use .reshape(...) or .contiguous().view(...)")
    return y


def flatten(input, start_dim=0, end_dim=-1):
    """The axes from start_dim to end_dim become one."""
    start, end = (normalize_dim("flatten", d, input.ndim) for d in (start_dim, end_dim))
    if start > end:
        raise RuntimeError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    shape = input.array.shape
    return reshape(input, shape[:start] + (math.prod(shape[start:end + 1]),) + shape[end + 1:])


def unflatten(input, dim, sizes):
    """One axis becomes several, of the given sizes; one of them may be −1."""
    d, shape = _real_dim("unflatten", dim, input), input.array.shape
    sizes = as_shape("unflatten", (sizes,))
    if sizes.count(-1) == 1:
        known = -math.prod(sizes)
        sizes = tuple(shape[d] // max(known, 1) if n == -1 else n for n in sizes)
    if math.prod(sizes) != shape[d] or any(n < 0 for n in sizes):
        raise RuntimeError(f"unflatten: sizes {sizes} do not multiply to {shape[d]}, the size of dim {dim} of shape {shape}")
    return reshape(input, (*shape[:d], *sizes, *shape[d + 1:]))


def squeeze(input, dim=None):
    shape = input.array.shape
    dims = normalize_dims("squeeze", dim, input.ndim)
    return Reshape.apply(input, tuple(n for i, n in enumerate(shape) if not (i in dims and n == 1)))


def unsqueeze(input, dim):
    d = normalize_dim("unsqueeze", dim, input.ndim + 1)
    return Reshape.apply(input, input.array.shape[:d] + (1,) + input.array.shape[d:])


def transpose(input, dim0, dim1):
    a, b = normalize_dim("transpose", dim0, input.ndim), normalize_dim("transpose", dim1, input.ndim)
    dims = list(range(input.ndim))
    if dims:
        dims[a], dims[b] = b, a
    return Permute.apply(input, tuple(dims))


def t(input):
    if input.ndim > 2:
        raise RuntimeError(f"t: expected a tensor with at most 2 dimensions, got shape {tuple(input.shape)}; use .transpose(-2, -1) or .mT")
    return transpose(input, 0, 1) if input.ndim == 2 else Permute.apply(input, tuple(range(input.ndim)))


def transpose_matrices(input):
    """x.mT: the last two axes exchanged."""
    if input.ndim < 2:
        raise RuntimeError(f"mT: expects a matrix or a stack of matrices, got shape {tuple(input.shape)}")
    return transpose(input, -2, -1)


def permute(input, *dims):
    dims = as_shape("permute", dims)
    if len(dims) != input.ndim:
        raise RuntimeError(f"permute: {len(dims)} axes given for a tensor with {input.ndim} dimensions; name each axis once")
    return Permute.apply(input, normalize_dims("permute", dims, input.ndim))


def movedim(input, source, destination):
    sources = normalize_dims("movedim", source, input.ndim)
    places = normalize_dims("movedim", destination, input.ndim)
    order = [d for d in range(input.ndim) if d not in sources]
    for place, source in sorted(zip(places, sources)):
        order.insert(place, source)
    return Permute.apply(input, tuple(order))


def expand(input, *size):
    sizes, shape = as_shape("expand", size), input.array.shape
    extra = len(sizes) - len(shape)
    fits = extra >= 0 and all(n in (-1, s) or s == 1 for n, s in zip(sizes[extra:], shape)) and all(n >= 0 for n in sizes[:extra])
    if not fits:
        raise RuntimeError(f"expand: shape {shape} cannot be expanded to {sizes}; only axes of size 1 grow, new ones come first, "
                           f"and −1 keeps a size")
    return Expand.apply(input, sizes[:extra] + tuple(s if n == -1 else n for n, s in zip(sizes[extra:], shape)))


def broadcast_to(input, size):
    """The tensor expanded to a shape, without a copy."""
    return expand(input, size)


def expand_as(input, other): return expand(input, other.array.shape)


def contiguous(input):
    return input if input.array.flags.c_contiguous else Contiguous.apply(input)


def clone(input):
    return Contiguous.apply(input)


def cat(tensors, dim=0):
    """Joins tensors along `dim`; all other sizes must agree. 1-D tensors without elements are skipped, as in PyTorch."""
    tensors = _tensor_list("cat", tensors)
    if any(x.ndim == 0 for x in tensors):
        raise RuntimeError("cat: zero-dimensional tensors cannot be concatenated; use stack")
    kept = [x for x in tensors if x.array.shape != (0,)] or tensors[:1]
    d = normalize_dim("cat", dim, kept[0].ndim)
    rest = [x.array.shape[:d] + x.array.shape[d + 1:] for x in kept]
    if any(x.ndim != kept[0].ndim for x in kept) or any(r != rest[0] for r in rest):
        raise RuntimeError(f"cat: sizes of tensors must match except in dimension {d}, got {[tuple(x.shape) for x in kept]}")
    return Cat.apply(d, *kept)


def stack(tensors, dim=0):
    """Joins tensors of one shape along a new axis."""
    tensors = _tensor_list("stack", tensors)
    if any(x.array.shape != tensors[0].array.shape for x in tensors):
        raise RuntimeError(f"stack: expects each tensor to be equal size, got {[tuple(x.shape) for x in tensors]}")
    return cat([unsqueeze(x, dim) for x in tensors], normalize_dim("stack", dim, tensors[0].ndim + 1))


def _tensor_list(op, tensors):
    if hasattr(tensors, "array") or not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{op}: expected a list or tuple of tensors, got {type(tensors).__name__}")
    if not tensors:
        raise (ValueError if op == "cat" else RuntimeError)(f"{op}: expected a non-empty list of tensors")
    for x in tensors:
        if not hasattr(x, "array"):
            raise TypeError(f"{op}: expected tensors, got {type(x).__name__}")
    return list(tensors)


def _real_dim(op, dim, x, error=RuntimeError):
    """One axis as a non-negative int, of a tensor that has one."""
    if x.ndim == 0:
        raise error(f"{op}: expects at least a 1-dimensional tensor, this one has no dimensions; give it one with .reshape(1)")
    return normalize_dim(op, dim, x.ndim)


def split(tensor, split_size_or_sections, dim=0):
    """Views of stretches of `size` (the last may be shorter), or of the given sizes, along `dim`."""
    d = _real_dim("split", dim, tensor)
    n, sizes = tensor.array.shape[d], split_size_or_sections
    if isinstance(sizes, (list, tuple)):
        if builtin_sum(sizes) != n or any(s < 0 for s in sizes):
            raise RuntimeError(f"split: sizes {list(sizes)} must be ≥ 0 and add up to {n}, the size of dim {dim} of shape "
                               f"{tuple(tensor.shape)}")
    elif sizes <= 0 and not (sizes == 0 == n):
        raise RuntimeError(f"split: split_size must be positive, got {sizes}")
    else:
        sizes = [min(sizes, n - i) for i in range(0, n, sizes)] if n else [0]
    ends = np.cumsum(sizes).tolist()
    return tuple(tensor[(slice(None),) * d + (slice(e - s, e),)] for s, e in zip(sizes, ends))


builtin_sum = sum


def chunk(input, chunks, dim=0):
    """`chunks` stretches of equal size; the last may be shorter, and there may be fewer."""
    if chunks <= 0:
        raise RuntimeError(f"chunk: chunks must be at least 1, got {chunks}")
    n = input.array.shape[_real_dim("chunk", dim, input)]
    return split(input, -(-n // chunks) if n else [0] * chunks, dim)


def unbind(input, dim=0):
    """The slices along `dim` as a tuple of views, without that axis."""
    d = _real_dim("unbind", dim, input, IndexError)
    return tuple(input[(slice(None),) * d + (i,)] for i in range(input.array.shape[d]))


def tril(input, diagonal=0):
    """The lower triangle of the last two axes, zeros above the diagonal that lies `diagonal` above the main one."""
    return _triangle("tril", input, diagonal)


def triu(input, diagonal=0):
    """The upper triangle of the last two axes, zeros below the diagonal that lies `diagonal` above the main one."""
    return _triangle("triu", input, diagonal)


def _triangle(which, input, diagonal):
    if input.ndim < 2:
        raise RuntimeError(f"{which}: input tensor must have at least 2 dimensions, got shape {tuple(input.shape)}")
    return Triangle.apply(input, which, diagonal)


def flip(input, *dims):
    dims = as_shape("flip", dims)
    return Flip.apply(input, normalize_dims("flip", dims, input.ndim) if dims else ())


def roll(input, shifts, dims=None):
    if dims is None:
        return reshape(roll(reshape(input, -1), shifts, 0), input.array.shape)
    shifts, dims = (tuple(v) if isinstance(v, (tuple, list)) else (v,) for v in (shifts, dims))
    if len(shifts) != len(dims):
        raise RuntimeError(f"roll: one shift for each dim is needed, got shifts {shifts} and dims {dims}")
    return Roll.apply(input, shifts, tuple(_real_dim("roll", d, input, IndexError) for d in dims))


def repeat(input, *repeats):
    times = as_shape("repeat", repeats)
    if len(times) < input.ndim or any(n < 0 for n in times):
        raise RuntimeError(f"repeat: one count ≥ 0 for each of the {input.ndim} dimensions is needed, got {times}")
    return Repeat.apply(input, times)


def tile(input, *dims):
    """As `repeat`, with ones put before too few counts."""
    times = as_shape("tile", dims)
    return repeat(input, (1,) * (input.ndim - len(times)) + times)


def repeat_interleave(input, repeats, dim=None):
    if dim is None:
        return repeat_interleave(reshape(input, -1), repeats, 0)
    d = _real_dim("repeat_interleave", dim, input, IndexError)
    counts = array_of(repeats)
    if getattr(counts, "ndim", 0) and counts.size > 1:      # a count for each element: gather them
        if counts.shape != (input.array.shape[d],):
            raise RuntimeError(f"repeat_interleave: {counts.shape} counts for {input.array.shape[d]} elements of dim {dim}")
        index = np.repeat(np.arange(counts.shape[0]), to_device(counts, CPU))
        return input[(slice(None),) * d + (index,)]
    count = int(counts.reshape(()) if hasattr(counts, "ndim") else counts)
    if count < 0:
        raise RuntimeError(f"repeat_interleave: repeats must be ≥ 0, got {count}")
    return RepeatInterleave.apply(input, count, d)


def pad(input, pad, mode="constant", value=None):
    """`pad` = (before, after) of the last axis, then of the one before it, …; negative widths crop."""
    if mode != "constant":
        raise RuntimeError(f"pad: mode {mode!r} is not supported, only 'constant'")
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        raise RuntimeError(f"pad: widths come in pairs, at most one pair for each of the {input.ndim} dimensions, got {tuple(pad)}")
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    widths = [(0, 0)] * (input.ndim - len(pairs)) + pairs
    if any(n + min(a, 0) + min(b, 0) < 0 for n, (a, b) in zip(input.array.shape, widths)):
        raise RuntimeError(f"pad: widths {tuple(pad)} crop more than shape {tuple(input.shape)} has")
    return Pad.apply(input, widths, as_stored("pad", 0 if value is None else value, input.array.dtype))


def diagonal(input, offset=0, dim1=0, dim2=1):
    """The diagonal of two axes as the last axis, as a view."""
    a, b = (normalize_dim("diagonal", d, input.ndim) for d in (dim1, dim2))
    if a == b:
        raise RuntimeError(f"diagonal: dim1 and dim2 must be two axes, got {dim1} and {dim2} for shape {tuple(input.shape)}")
    row, column = max(-offset, 0), max(offset, 0)
    n = max(min(input.array.shape[a] - row, input.array.shape[b] - column), 0)
    return Diagonal.apply(movedim(input, (a, b), (-2, -1))[..., row:row + n, column:column + n])


def meshgrid(*tensors, indexing="ij"):
    """Coordinates of a grid: result i holds tensors[i] along axis i, [n0, n1, …]; "xy" exchanges the first two axes."""
    tensors = _tensor_list("meshgrid", tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors)
    if indexing not in ("ij", "xy"):
        raise RuntimeError(f"meshgrid: indexing must be 'ij' or 'xy', got {indexing!r}")
    if any(x.ndim > 1 or x.dtype != tensors[0].dtype for x in tensors):
        raise RuntimeError(f"meshgrid: expects 0-D or 1-D tensors of one dtype, got {[(tuple(x.shape), x.dtype) for x in tensors]}")
    shape = [x.array.size for x in tensors]
    grids = [expand(reshape(x, [n if i == j else 1 for j, n in enumerate(shape)]), shape) for i, x in enumerate(tensors)]
    return tuple(transpose(g, 0, 1) for g in grids) if indexing == "xy" and len(grids) > 1 else tuple(grids)
