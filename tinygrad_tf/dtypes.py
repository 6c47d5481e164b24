"""Data types under PyTorch's names, and PyTorch's promotion rules.

NumPy's rules differ where it hurts: there int64 * 0.5 is float64, and a float64 scalar widens a float32 array.
Here a result takes the highest *category* among the operands (bool < integer < float), and within that category
the widest dtype among the operands of the highest *priority*: tensors with dimensions, then 0-d tensors, then
Python or NumPy scalars. A scalar that raises the category brings the default dtype with it (float32, int64).
"""
import numbers

import numpy as np

# NumPy counts bfloat16, which ml_dtypes adds to it, among its raw memory ("V"), promotes it by rules of its own, and sums in it. So
# operations are computed in float32, which holds every bfloat16, and what comes out is rounded: see `Function.in_float32`.
FLOAT_KINDS = "fV"
BFLOAT16 = []                                   # its NumPy dtype, once somebody has asked for it


def is_float(dtype):
    """Whether a NumPy dtype is float16, bfloat16, float32 or float64."""
    return dtype.kind in FLOAT_KINDS


def is_bfloat16(x):
    """Whether an array, or a dtype, is bfloat16."""
    return bool(BFLOAT16) and getattr(x, "dtype", x) == BFLOAT16[0]


def widened(x):
    """A bfloat16 array in float32, and for its dtype float32; all else as it is."""
    if not BFLOAT16 or (x if isinstance(x, np.dtype) else getattr(x, "dtype", None)) != BFLOAT16[0]:
        return x
    return x.astype(np.float32) if hasattr(x, "astype") else np.dtype(np.float32)


class dtype:
    """One element type; prints as PyTorch's does. `numpy` is the NumPy dtype behind it."""

    __slots__ = ("name", "numpy")

    def __init__(self, name, numpy_dtype):
        self.name, self.numpy = name, np.dtype(numpy_dtype)

    is_floating_point = property(lambda self: is_float(self.numpy))
    is_complex = property(lambda self: self.numpy.kind == "c")
    itemsize = property(lambda self: self.numpy.itemsize)

    def __repr__(self):
        return f"torch.{self.name}"

    def __reduce__(self):                       # one object per type, also after pickling or deepcopy
        return as_dtype, (self.numpy,)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self


class _BFloat16(dtype):
    """The upper half of a float32: its range, 8 bits of precision. `numpy` imports the package ml_dtypes when it is first read."""

    __slots__ = ()
    is_floating_point, is_complex, itemsize = True, False, 2

    def __init__(self):
        self.name = "bfloat16"

    def __getattr__(self, name):                # only for what is not there, as `numpy` at first
        if name != "numpy":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.numpy = _from_ml_dtypes()
        _OURS[self.numpy] = self
        BFLOAT16[:] = [self.numpy]
        return self.numpy

    def __reduce__(self):
        return as_dtype, (self.name,)


def _from_ml_dtypes():
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise RuntimeError("torch.bfloat16 needs the package ml_dtypes, which is not installed: "
                           "pip install 'tinygrad_tf[lowbit]'") from None
    return np.dtype(bfloat16)


bool_ = dtype("bool", np.bool_)
uint8 = dtype("uint8", np.uint8)
int8 = dtype("int8", np.int8)
int16 = short = dtype("int16", np.int16)
int32 = int_ = dtype("int32", np.int32)
int64 = long = dtype("int64", np.int64)
float16 = half = dtype("float16", np.float16)
float32 = float_ = dtype("float32", np.float32)
float64 = double = dtype("float64", np.float64)
bfloat16 = _BFloat16()

DTYPES = (bool_, uint8, int8, int16, int32, int64, float16, float32, float64)                # bfloat16 comes besides
TENSOR_NAMES = {"bool": "Bool", "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "float16": "Half",
                "float32": "Float", "float64": "Double", "bfloat16": "BFloat16"}
_OURS = {d.numpy: d for d in DTYPES}
_CATEGORY = {"b": 0, "i": 1, "u": 1, **dict.fromkeys(FLOAT_KINDS, 2)}

_default = float32


def get_default_dtype():
    """The dtype of float literals, of `randn`, `zeros`, …"""
    return _default


def set_default_dtype(d):
    """The dtype of float literals, of `randn`, `zeros`, … and of int / int. Float types only."""
    global _default
    d = as_dtype(d)
    if not d.is_floating_point:
        raise TypeError(f"set_default_dtype: only floating-point types are supported as the default type, got {d}")
    numpy_dtype(d)                              # where ml_dtypes is missing this is told here, and not by the next tensor
    _default = d


def as_dtype(d):
    """A `dtype` from ours, NumPy's (`np.float32`, `"float32"`), or Python's (`float` is float64, `int` int64, as in PyTorch)."""
    if isinstance(d, dtype):
        return d
    try:
        return _OURS[np.dtype(d)]
    except (TypeError, KeyError):
        if "bfloat16" in (d if isinstance(d, str) else None, getattr(d, "name", None), getattr(d, "__name__", None)):
            return _OURS[bfloat16.numpy]
        names = ", ".join(t.name for t in (*DTYPES, bfloat16))
        raise TypeError(f"dtype {d!r} is not supported; the dtypes are {names}") from None


def is_known(d):
    """Whether tensors can be of a NumPy dtype, of either byte order."""
    d = d.newbyteorder("=")
    return d in _OURS or d.name == "bfloat16" and as_dtype(d) is bfloat16


def of_array(array):
    """The `dtype` of an array's elements."""
    return _OURS[array.dtype]


def numpy_dtype(d):
    """The NumPy dtype of any name for a dtype; None stays None."""
    return None if d is None else as_dtype(d).numpy


def limits(d):
    """finfo of a NumPy dtype."""
    if not is_bfloat16(d):
        return np.finfo(d)
    from ml_dtypes import finfo
    return finfo(d)


def category(d):
    """0 for bool, 1 for integers, 2 for floats."""
    return _CATEGORY[d.kind]


def fits(values, d):
    """True where numbers can be converted to a NumPy dtype: within its range; whole negatives may wrap to unsigned integers, and
    inf and NaN are floats.
    """
    values = np.asarray(values)
    if is_float(d):
        size = np.abs(values)
        return not np.any((size > float(limits(d).max)) & (size != np.inf))
    if d.kind not in "iu" or not values.size:
        return True
    integers = np.iinfo(d)
    low = -integers.max if d.kind == "u" and values.dtype.kind == "i" else integers.min
    return bool(values.min() >= low and values.max() <= integers.max)


def scalar_dtype(value):
    """The NumPy dtype that a lone Python or NumPy scalar has as a tensor: bool, int64, or the default float."""
    if isinstance(value, (bool, np.bool_)):
        return bool_.numpy
    if isinstance(value, numbers.Integral):
        return int64.numpy
    if isinstance(value, numbers.Real):
        return _default.numpy
    raise TypeError(f"expected a tensor or a real number, got {type(value).__name__}")


def _wider(a, b):
    """Of two dtypes the one of the higher category; within a category the one that holds both."""
    if category(a) != category(b):
        return max(a, b, key=category)
    if a != b and (is_bfloat16(a) or is_bfloat16(b)):       # also beside float16, which has other numbers
        return np.promote_types(np.float32, b if is_bfloat16(a) else a)
    return np.promote_types(a, b)


def result_type(*operands):
    """The NumPy dtype of a result by PyTorch's rules. Operands: arrays, Python scalars, NumPy scalars."""
    best = [None, None, None]                   # widest dtype seen among: dimensioned arrays, 0-d arrays, scalars
    for x in operands:
        is_array = hasattr(x, "ndim") and not isinstance(x, np.generic)
        priority, d = (0 if x.ndim else 1, x.dtype) if is_array else (2, scalar_dtype(x))
        best[priority] = d if best[priority] is None else _wider(best[priority], d)
    found = [d for d in best if d is not None]
    top = max(map(category, found))
    return next(d for d in found if category(d) == top)
