"""Making tensors: from values, filled, counted, or random with PyTorch's CPU streams; and what compares or draws from them."""
import math

import numpy as np

from . import dtypes, random
from .autograd import array_of, constant
from .backend import array_module, device as make_device, get_default_device, to_device
from .dtypes import numpy_dtype
from .ops.index import sort_pair, topk_pair
from .ops.shape import as_shape
from .size import namedtuple_of
from .tensor import Tensor


def as_array(data, dtype=None):
    """A NumPy (or CuPy) array from a tensor, an array, a number, or nested lists of these; floats in the default float type."""
    if isinstance(data, Tensor):
        array = data.array
    elif isinstance(data, np.ndarray) or type(data).__module__.startswith("cupy"):
        array = data
    else:
        array = _from_list(data, dtype)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"tensor: can't convert values of type {array.dtype} to a tensor; numbers and booleans are supported")
    wanted = numpy_dtype(dtype) or (array.dtype if array.dtype.newbyteorder("=") in dtypes._OURS else None)
    if wanted is None:
        raise TypeError(f"tensor: dtype {array.dtype} is not supported; convert it first, e.g. array.astype('int64')")
    if wanted.kind in "iu" and array.dtype.kind == "f" and not isinstance(data, (Tensor, np.ndarray)) and not np.isfinite(array).all():
        raise RuntimeError(f"tensor: NaN or infinity cannot be converted to {dtypes.as_dtype(wanted)}")
    return array.astype(wanted, copy=False)


def _from_list(data, dtype):
    try:
        array = np.asarray(_plain(data))
    except ValueError:
        raise ValueError("tensor: nested lists must form a rectangle; some rows have another length than their neighbours") from None
    except OverflowError:
        raise RuntimeError("tensor: an integer is too large for int64") from None
    if array.dtype.kind == "O":
        raise TypeError(f"tensor: could not read {type(data).__name__} as numbers")
    from_python_floats = array.dtype == np.float64 and not _holds_float64(data)
    return array.astype(dtypes.get_default_dtype().numpy) if from_python_floats and dtype is None else array


def _plain(data):
    """Tensors inside nested lists become arrays."""
    if isinstance(data, Tensor):
        return data.array
    return [_plain(v) for v in data] if isinstance(data, (list, tuple)) else data


def _holds_float64(data):
    """True where the float64 comes from NumPy or a tensor and not from a Python float."""
    while isinstance(data, (list, tuple)) and data:
        data = data[0]
    return isinstance(data, (np.ndarray, np.generic, Tensor))


def _finish(array, dtype=None, device=None, requires_grad=False):
    array = array if dtype is None else array.astype(numpy_dtype(dtype), copy=False)
    array = to_device(array, get_default_device() if device is None else make_device(device))
    return constant(array).requires_grad_(requires_grad)


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


def _sizes(op, size):
    shape = as_shape(op, size)
    if any(n < 0 for n in shape):
        raise RuntimeError(f"{op}: sizes must be ≥ 0, got {shape}")
    return shape


def zeros(*size, dtype=None, device=None, requires_grad=False):
    return _finish(np.zeros(_sizes("zeros", size), numpy_dtype(dtype) or _float()), None, device, requires_grad)


def ones(*size, dtype=None, device=None, requires_grad=False):
    return _finish(np.ones(_sizes("ones", size), numpy_dtype(dtype) or _float()), None, device, requires_grad)


def empty(*size, dtype=None, device=None, requires_grad=False):
    """Zeros: memory with whatever it held is nothing a reader wants to meet."""
    return zeros(*size, dtype=dtype, device=device, requires_grad=requires_grad)


def full(size, fill_value, *, dtype=None, device=None, requires_grad=False):
    value = array_of(fill_value)
    value = value.item() if hasattr(value, "item") else value
    shape = _sizes("full", (size,) if not isinstance(size, int) else ((size,),))
    return _finish(np.full(shape, value, numpy_dtype(dtype) or dtypes.scalar_dtype(value)), None, device, requires_grad)


def _float():
    return dtypes.get_default_dtype().numpy


def zeros_like(input, *, dtype=None, device=None, requires_grad=False): return full_like(input, 0, dtype=dtype, device=device, requires_grad=requires_grad)
def ones_like(input, *, dtype=None, device=None, requires_grad=False): return full_like(input, 1, dtype=dtype, device=device, requires_grad=requires_grad)
def empty_like(input, *, dtype=None, device=None, requires_grad=False): return full_like(input, 0, dtype=dtype, device=device, requires_grad=requires_grad)


def full_like(input, fill_value, *, dtype=None, device=None, requires_grad=False):
    return full(tuple(input.array.shape), fill_value, dtype=dtype or input.dtype, device=device or input.device, requires_grad=requires_grad)


def arange(start, end=None, step=1, *, dtype=None, device=None, requires_grad=False):
    """start, start + step, … below end; int64 when all three are ints, else the default float."""
    start, end = (0, start) if end is None else (start, end)
    start, end, step = (array_of(v).item() if isinstance(v, (Tensor, np.generic)) else v for v in (start, end, step))
    if step == 0 or (end - start) * step < 0:
        raise RuntimeError(f"arange: the step must lead from start to end, got arange({start}, {end}, {step})")
    kind = np.int64 if all(isinstance(v, int) for v in (start, end, step)) else _float()
    count = math.ceil((end - start) / step)
    numbers = start + step * np.arange(count) if kind is np.int64 else start + step * np.arange(count, dtype=np.float64)
    return _finish(numbers.astype(numpy_dtype(dtype) or kind), None, device, requires_grad)


def linspace(start, end, steps, *, dtype=None, device=None, requires_grad=False):
    return _finish(np.linspace(start, end, steps, dtype=np.float64).astype(numpy_dtype(dtype) or _float()), None, device, requires_grad)


def eye(n, m=None, *, dtype=None, device=None, requires_grad=False):
    return _finish(np.eye(n, m, dtype=numpy_dtype(dtype) or _float()), None, device, requires_grad)


# --- random: drawn on the host from PyTorch's streams -----------------------------------------------------------------

def _generator(generator):
    return random.default_generator if generator is None else generator


def rand(*size, generator=None, dtype=None, device=None, requires_grad=False):
    """Uniform on [0, 1)."""
    return _finish(_generator(generator).rand(_sizes("rand", size), numpy_dtype(dtype) or _float()), None, device, requires_grad)


def randn(*size, generator=None, dtype=None, device=None, requires_grad=False):
    """Normal with mean 0 and variance 1."""
    return _finish(_generator(generator).randn(_sizes("randn", size), numpy_dtype(dtype) or _float()), None, device, requires_grad)


def randint(low, high=None, size=None, *, generator=None, dtype=None, device=None):
    """Whole numbers in [low, high)."""
    if size is None:
        low, high, size = 0, low, high
    if high <= low:
        raise RuntimeError(f"randint: expects low < high, got {low} and {high}")
    return _finish(_generator(generator).randint(low, high, _sizes("randint", (size,))), dtype, device)


def randperm(n, *, generator=None, dtype=None, device=None):
    return _finish(_generator(generator).randperm(n), dtype, device)


def normal(mean, std, size=None, *, generator=None):
    if size is None:
        mean, std = as_tensor(mean, dtype=None), as_tensor(std, dtype=None)
        return randn(np.broadcast_shapes(mean.array.shape, std.array.shape), generator=generator) * std + mean
    return constant(_generator(generator).normal(_sizes("normal", (size,)), mean, std, _float()))


def rand_like(input, **options): return rand(input.array.shape, **{"dtype": input.dtype, "device": input.device, **options})
def randn_like(input, **options): return randn(input.array.shape, **{"dtype": input.dtype, "device": input.device, **options})


def randint_like(input, low, high=None, **options):
    low, high = (0, low) if high is None else (low, high)
    return randint(low, high, input.array.shape, **{"dtype": input.dtype, "device": input.device, **options})


def bernoulli(input, *, generator=None):
    """1 with probability input, else 0, element by element."""
    p = to_device(input.array, make_device("cpu"))
    return _finish(np.asarray(_generator(generator).bernoulli(p)).astype(input.array.dtype), None, input.device)


def multinomial(input, num_samples, replacement=False, *, generator=None):
    """Indices drawn with the given weights, [n] or [rows, n]. An index of weight 0 is never drawn."""
    weights = to_device(input.array, make_device("cpu"))
    return _finish(_generator(generator).multinomial(weights, num_samples, replacement), None, input.device)


# --- comparing, and the functional forms of methods that return pairs -------------------------------------------------

def allclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    """True when |input − other| ≤ atol + rtol · |other| everywhere."""
    return bool(isclose(input, other, rtol, atol, equal_nan).array.all())


def isclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    a, b = array_of(input), array_of(other)
    if a.dtype != b.dtype:
        raise RuntimeError(f"isclose: both tensors must have one dtype, got {a.dtype} and {b.dtype}")
    return constant(array_module(a, b).asarray(array_module(a, b).isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)))


def equal(input, other): return input.equal(other)
def max(input, dim=None, keepdim=False): return input.max(dim, keepdim)
def min(input, dim=None, keepdim=False): return input.min(dim, keepdim)
def sort(input, dim=-1, descending=False, stable=False): return namedtuple_of("sort", *sort_pair(input, dim, descending))
def topk(input, k, dim=-1, largest=True, sorted=True): return namedtuple_of("topk", *topk_pair(input, k, dim, largest))
def numel(input): return input.numel()
def is_tensor(obj): return isinstance(obj, Tensor)
def is_floating_point(input): return input.is_floating_point()


def can_cast(from_, to):
    """False only where PyTorch would drop a category: float → integer or bool, integer → bool."""
    a, b = dtypes.as_dtype(from_).numpy.kind, dtypes.as_dtype(to).numpy.kind
    return "biuf".index(a) <= "biuf".index(b) or a in "iu" and b in "iu"


def result_type(tensor1, tensor2): return dtypes.as_dtype(dtypes.result_type(array_of(tensor1), array_of(tensor2)))
def promote_types(a, b): return dtypes.as_dtype(dtypes.result_type(*(np.empty(1, numpy_dtype(d)) for d in (a, b))))


class finfo:
    """Limits of a floating-point dtype: min, max, eps, tiny, bits."""

    def __init__(self, dtype=None):
        limits = np.finfo(numpy_dtype(dtype or dtypes.get_default_dtype()))
        self.min, self.max, self.eps, self.tiny = (float(v) for v in (limits.min, limits.max, limits.eps, limits.tiny))
        self.smallest_normal, self.bits = self.tiny, limits.bits


class iinfo:
    """Limits of an integer dtype: min, max, bits."""

    def __init__(self, dtype):
        limits = np.iinfo(numpy_dtype(dtype))
        self.min, self.max, self.bits = limits.min, limits.max, limits.bits

