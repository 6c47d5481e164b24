"""Making tensors: from values, filled, counted, or random with PyTorch's CPU streams; and what compares or draws from them."""
import math
from numbers import Integral

import numpy as np

from . import dtypes, random
from .autograd import array_of, constant
from .backend import CPU, array_module, get_default_device, numbers_beside, quiet, to_device
from .backend import device as make_device
from .dtypes import is_float, numpy_dtype
from .ops.arithmetic import broadcast
from .ops.index import sort_pair, topk_pair
from .ops.shape import as_shape
from .random import chosen
from .size import namedtuple_of
from .tensor import Tensor


@quiet
def as_array(data, dtype=None):
    """A NumPy (or CuPy) array from a tensor, an array, a number, or nested lists of these; floats in the default float type."""
    from_python = not isinstance(data, (Tensor, np.ndarray)) and not type(data).__module__.startswith("cupy")
    array = _from_list(data) if from_python else array_of(data)
    if not dtypes.is_known(array.dtype):
        raise TypeError(f"tensor: values of type {array.dtype} are not supported; convert them first, e.g. array.astype('int64')")
    wanted = numpy_dtype(dtype) or array.dtype
    if from_python and not is_float(wanted) and not dtypes.fits(array, wanted):
        raise RuntimeError(f"tensor: values from {array.min()} to {array.max()} cannot be converted to {dtypes.as_dtype(wanted)} "
                           f"without overflow")
    if from_python and dtype is None and array.dtype == np.float64 and np.float64 not in (v.dtype for v in _numpy_leaves(data)):
        wanted = _float()
    return array.astype(wanted, copy=False)


def _from_list(data):
    try:
        array = np.asarray(_plain(data))
    except ValueError:
        raise ValueError("tensor: nested lists must form a rectangle; some rows have another length than their neighbours") from None
    if array.dtype.kind in "uO" and all(isinstance(v, Integral) for v in array.flat) and not dtypes.fits(array, np.dtype(np.int64)):
        raise ValueError(f"tensor: whole numbers from {array.min()} to {array.max()} do not fit into int64")
    if array.dtype.kind == "O":
        raise RuntimeError(f"tensor: could not infer a dtype for a {type(data).__name__}; numbers, booleans and lists of them are "
                           f"supported")
    return array


def _plain(data):
    """Tensors inside nested lists become arrays of the host."""
    if isinstance(data, Tensor):
        return to_device(data.array, CPU)
    return [_plain(v) for v in data] if isinstance(data, (list, tuple)) else data


def _numpy_leaves(data):
    """What of nested lists brings a NumPy dtype of its own."""
    if isinstance(data, (list, tuple)):
        return (leaf for v in data for leaf in _numpy_leaves(v))
    return (array_of(data),) if isinstance(data, (np.generic, np.ndarray, Tensor)) else ()


def _finish(array, dtype=None, device=None, requires_grad=False):
    array = array if dtype is None else array.astype(numpy_dtype(dtype), copy=False)
    made = constant(to_device(array, get_default_device() if device is None else make_device(device)))
    if made.array is not array:
        made.version.note_bounds(array)
    return made.requires_grad_(requires_grad)


def tensor(data, *, dtype=None, device=None, requires_grad=False):
    """A new tensor with a copy of `data`. Python floats give float32, ints int64, bools bool; NumPy arrays keep their dtype."""
    array = as_array(data, dtype)
    if device is None and isinstance(data, Tensor):
        device = data.device
    return _finish(array.copy(), None, device, requires_grad)


def as_tensor(data, dtype=None, device=None):
    """As `tensor`, but a tensor or array that already fits is shared and not copied."""
    if isinstance(data, Tensor):
        return data.to(dtype=dtype, device=device)
    return _finish(as_array(data, dtype), None, device)


def from_numpy(array):
    """A tensor that shares the memory of a NumPy array."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"from_numpy: expected an np.ndarray, got {type(array).__name__}")
    return constant(as_array(array))


def _sizes(op, sizes, size=None):
    """The shape given as ints, as one tuple, or as the keyword `size`."""
    shape = as_shape(op, sizes if size is None else (size,))
    if any(n < 0 for n in shape):
        raise RuntimeError(f"{op}: sizes must be ≥ 0, got {shape}")
    return shape


def zeros(*sizes, size=None, dtype=None, device=None, requires_grad=False):
    """A tensor of zeros: zeros(2, 3) or zeros((2, 3))."""
    return _finish(np.zeros(_sizes("zeros", sizes, size), numpy_dtype(dtype) or _float()), None, device, requires_grad)


def ones(*sizes, size=None, dtype=None, device=None, requires_grad=False):
    """A tensor of ones: ones(2, 3) or ones((2, 3))."""
    return _finish(np.ones(_sizes("ones", sizes, size), numpy_dtype(dtype) or _float()), None, device, requires_grad)


def empty(*sizes, size=None, dtype=None, device=None, requires_grad=False):
    """Zeros: memory with whatever it held is nothing a reader wants to meet."""
    return zeros(*sizes, size=size, dtype=dtype, device=device, requires_grad=requires_grad)


def full(size, fill_value, *, dtype=None, device=None, requires_grad=False):
    """A tensor of one number, whose dtype is that of the number unless dtype says otherwise."""
    if isinstance(size, int):
        raise TypeError(f"full: size must be a tuple of ints, got the int {size}; write ({size},)")
    value = array_of(fill_value)
    value = value.item() if hasattr(value, "item") else value
    wanted = numpy_dtype(dtype) or dtypes.scalar_dtype(value)
    if not dtypes.fits(value, wanted):
        raise RuntimeError(f"full: {value} cannot be converted to {dtypes.as_dtype(wanted)} without overflow")
    return _finish(np.full(_sizes("full", (size,)), value).astype(wanted), None, device, requires_grad)


def _float():
    return dtypes.get_default_dtype().numpy


def full_like(input, fill_value, *, dtype=None, device=None, requires_grad=False):
    """A tensor of one number with the shape, dtype and device of another."""
    if not isinstance(input, Tensor):
        raise TypeError(f"full_like, zeros_like, …: expected a Tensor whose shape to take, got {type(input).__name__}")
    return full(input.array.shape, fill_value, dtype=dtype or input.dtype, device=device or input.device, requires_grad=requires_grad)


def zeros_like(input, **options):
    """Zeros with the shape, dtype and device of another tensor."""
    return full_like(input, 0, **options)


def ones_like(input, **options):
    """Ones with the shape, dtype and device of another tensor."""
    return full_like(input, 1, **options)


def empty_like(input, **options):
    """As zeros_like: memory with whatever it held is nothing a reader wants to meet."""
    return full_like(input, 0, **options)


def arange(start=0, end=None, step=1, *, dtype=None, device=None, requires_grad=False):
    """start, start + step, … below end; int64 when all three are ints, else the default float."""
    start, end = (0, start) if end is None else (start, end)
    start, end, step = (v.item() if hasattr(v, "item") else v for v in (start, end, step))
    if dtype is not None and not dtypes.as_dtype(dtype).is_floating_point:
        start, end, step = int(start), int(end), int(step)
    if step == 0 or not (end - start) * step >= 0 or not math.isfinite(end - start):
        raise RuntimeError(f"arange: the step must lead from start to end, got arange({start}, {end}, {step})")
    kind = np.int64 if all(isinstance(v, int) for v in (start, end, step)) else np.float64
    numbers = start + step * np.arange(math.ceil((end - start) / step), dtype=kind)
    return _finish(numbers.astype(numpy_dtype(dtype) or (kind if kind is np.int64 else _float())), None, device, requires_grad)


def linspace(start, end, steps, *, dtype=None, device=None, requires_grad=False):
    """`steps` numbers from start to end, both included."""
    steps, = _sizes("linspace", (steps,))
    start, end = (v.item() if hasattr(v, "item") else v for v in (start, end))
    return _finish(np.linspace(start, end, steps, dtype=np.float64).astype(numpy_dtype(dtype) or _float()), None, device, requires_grad)


def eye(n, m=None, *, dtype=None, device=None, requires_grad=False):
    """Ones on the diagonal, [n, n] or [n, m]."""
    rows, columns = _sizes("eye", (n, n if m is None else m))
    return _finish(np.eye(rows, columns, dtype=numpy_dtype(dtype) or _float()), None, device, requires_grad)


# --- random: drawn on the host from PyTorch's streams -----------------------------------------------------------------

def rand(*sizes, size=None, generator=None, dtype=None, device=None, requires_grad=False):
    """Uniform on [0, 1)."""
    return _finish(chosen(generator).rand(_sizes("rand", sizes, size), numpy_dtype(dtype) or _float()), None, device, requires_grad)


def randn(*sizes, size=None, generator=None, dtype=None, device=None, requires_grad=False):
    """Normal with mean 0 and variance 1."""
    return _finish(chosen(generator).randn(_sizes("randn", sizes, size), numpy_dtype(dtype) or _float()), None, device, requires_grad)


def randint(low, high=None, size=None, *, generator=None, dtype=None, device=None):
    """Whole numbers in [low, high)."""
    if size is None:
        low, high, size = 0, low, high
    if high <= low:
        raise RuntimeError(f"randint: expects low < high, got {low} and {high}")
    return _finish(chosen(generator).randint(low, high, _sizes("randint", (size,))), dtype, device)


def get_rng_state():
    """The default generator's state: uint8 [5056], which PyTorch takes too."""
    return constant(random.get_rng_state())


def set_rng_state(new_state):
    """Puts the default generator into a state that `get_rng_state` returned, here or in PyTorch."""
    random.set_rng_state(to_device(new_state.array, CPU) if isinstance(new_state, Tensor) else new_state)


def randperm(n, *, generator=None, dtype=None, device=None):
    """0 … n−1 in random order."""
    return _finish(chosen(generator).randperm(n), dtype, device)


def normal(mean, std, size=None, *, generator=None):
    """Normal numbers of the given mean and standard deviation: numbers with a size, or tensors."""
    if size is None:
        shape = np.broadcast_shapes(*(x.array.shape for x in (mean, std) if isinstance(x, Tensor)))
        return randn(shape, generator=generator) * std + mean
    return constant(chosen(generator).normal(_sizes("normal", (size,)), mean, std, _float()))


def rand_like(input, **options):
    """Uniform on [0, 1), with the shape, dtype and device of another tensor."""
    return rand(input.array.shape, **{"dtype": input.dtype, "device": input.device, **options})


def randn_like(input, **options):
    """Normal numbers with the shape, dtype and device of another tensor."""
    return randn(input.array.shape, **{"dtype": input.dtype, "device": input.device, **options})


def randint_like(input, low, high=None, **options):
    """Whole numbers in [low, high), or [0, low), with the shape, dtype and device of another tensor."""
    low, high = (0, low) if high is None else (low, high)
    return randint(low, high, input.array.shape, **{"dtype": input.dtype, "device": input.device, **options})


def bernoulli(input, *, generator=None):
    """1 with probability input, else 0, element by element."""
    p = to_device(input.array, CPU)
    return _finish(np.asarray(chosen(generator).bernoulli(p)).astype(input.array.dtype), None, input.device)


def multinomial(input, num_samples, replacement=False, *, generator=None):
    """Indices drawn with the given weights, [n] or [rows, n]. An index of weight 0 is never drawn."""
    weights = to_device(input.array, CPU)
    return _finish(chosen(generator).multinomial(weights, num_samples, replacement), None, input.device)


# --- comparing, and the functional forms of methods that return pairs -------------------------------------------------

def allclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    """True when |input − other| ≤ atol + rtol · |other| everywhere."""
    return bool(isclose(input, other, rtol, atol, equal_nan).array.all())


@quiet
def isclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    """Where |input − other| ≤ atol + rtol · |other|; infinities of one sign are close."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        raise TypeError(f"isclose: expected two tensors, got {type(input).__name__} and {type(other).__name__}")
    if input.dtype != other.dtype or rtol < 0 or atol < 0:
        raise RuntimeError(f"isclose: needs two tensors of one dtype and tolerances ≥ 0, got {input.dtype} and {other.dtype}, "
                           f"rtol {rtol}, atol {atol}")
    a, b = broadcast("isclose", *numbers_beside("isclose", [input.array, other.array]))
    xp = array_module(a)
    return constant(xp.asarray(xp.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)))


def equal(input, other):
    """True when the shapes and all elements are equal."""
    return input.equal(other)


def max(input, dim=None, keepdim=False):
    """The largest of all; along an axis (values, indices); with a second tensor, the larger of each pair."""
    return input.max(dim, keepdim)


def min(input, dim=None, keepdim=False):
    """The smallest of all; along an axis (values, indices); with a second tensor, the smaller of each pair."""
    return input.min(dim, keepdim)


def sort(input, dim=-1, descending=False, stable=False):
    """(values, indices) in order along an axis, stable."""
    return namedtuple_of("sort", *sort_pair(input, dim, descending))


def topk(input, k, dim=-1, largest=True, sorted=True):
    """(values, indices) of the k largest along an axis, largest first."""
    return namedtuple_of("topk", *topk_pair(input, k, dim, largest))


def numel(input):
    """How many elements there are."""
    return input.numel()


def is_tensor(obj):
    """True for tensors."""
    return isinstance(obj, Tensor)


def is_floating_point(input):
    """True for tensors of float16, bfloat16, float32 and float64."""
    return input.is_floating_point()


def can_cast(from_, to):
    """False only where PyTorch would drop a category: float → integer or bool, integer → bool."""
    a, b = dtypes.numpy_dtype(from_), dtypes.numpy_dtype(to)
    return dtypes.category(a) <= dtypes.category(b)


def result_type(tensor1, tensor2):
    """The dtype of an arithmetic result of both; numbers do not widen tensors."""
    return dtypes.as_dtype(dtypes.result_type(array_of(tensor1), array_of(tensor2)))


def promote_types(a, b):
    """The dtype of an arithmetic result of tensors of both dtypes."""
    return dtypes.as_dtype(dtypes.result_type(*(np.empty(1, numpy_dtype(d)) for d in (a, b))))


class finfo:
    """Limits of a floating-point dtype: min, max, eps, tiny, bits."""

    def __init__(self, dtype=None):
        dtype = dtypes.as_dtype(dtype or dtypes.get_default_dtype())
        if not dtype.is_floating_point:
            raise TypeError(f"finfo: needs a floating-point dtype, got {dtype}; iinfo is for integers")
        limits = dtypes.limits(dtype.numpy)
        self.min, self.max, self.eps, self.tiny = (float(v) for v in (limits.min, limits.max, limits.eps, limits.tiny))
        self.smallest_normal, self.bits = self.tiny, limits.bits


class iinfo:
    """Limits of an integer dtype: min, max, bits."""

    def __init__(self, dtype):
        if dtypes.as_dtype(dtype).numpy.kind not in "iu":
            raise TypeError(f"iinfo: needs an integer dtype, got {dtype}; finfo is for floats")
        limits = np.iinfo(numpy_dtype(dtype))
        self.min, self.max, self.bits = limits.min, limits.max, limits.bits

