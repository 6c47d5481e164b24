"""Element-wise arithmetic with broadcasting: + − × ÷ ^, extrema, and the elementary functions.

Operands are tensors or numbers, also where PyTorch insists on two tensors (`maximum(x, 0)`); a NumPy bool counts as a bool
(PyTorch takes it for a float). The engine sums each gradient over the axes along which its operand was broadcast, so
that every formula here is the formula for one element.
"""
import numbers

import numpy as np

from ..autograd import FLOAT32, WIDEST, Function, array_of, constant, under_autocast
from ..backend import array_module, numbers_beside, quiet, require_bfloat16
from ..dtypes import fits, get_default_dtype, is_bfloat16, is_float, result_type


def promote(a, b):
    """Both operands in the dtype that PyTorch gives their result; numbers become plain Python numbers of that kind."""
    a_dtype, b_dtype = getattr(a, "dtype", None), getattr(b, "dtype", None)
    if a_dtype is b_dtype and a.ndim and b.ndim:       # `is`: NumPy holds that float64 == None
        return a, b
    if type(b) is float and a_dtype.kind == "f" or type(a) is float and b_dtype.kind == "f":
        return a, b                             # NumPy keeps the array's dtype too
    wanted = result_type(a, b)
    return converted(a, wanted), converted(b, wanted)


def _is_number(x):
    return isinstance(x, np.generic) or not hasattr(x, "dtype")


def converted(x, dtype):
    """An array or a number in a NumPy dtype; whole numbers beyond its range wrap, as in PyTorch."""
    if not _is_number(x):
        return x.astype(dtype, copy=False)
    try:
        return np.asarray(x).astype(dtype)[()]
    except OverflowError:
        raise RuntimeError(f"the number {x} cannot be converted to {dtype} without overflow") from None


def as_stored(op, value, dtype):
    """A number, or an array as it is, to be written into memory of a NumPy dtype."""
    if hasattr(value, "shape"):
        return value
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: expected a Tensor or a number, got {type(value).__name__}; make a tensor with tinygrad_tf.tensor(...)")
    if not fits(value, dtype):
        raise RuntimeError(f"{op}: value {value} cannot be converted to {dtype} without overflow")
    return converted(value, dtype)


def promote_to_float(a, b):
    """As `promote`; where neither is a float, in the default float type."""
    if is_float(result_type(a, b)):
        return promote(a, b)
    wanted = get_default_dtype().numpy
    return converted(a, wanted), converted(b, wanted)


def as_float(x):
    """Integers and booleans in the default float type; floats as they are."""
    return x if is_float(x.dtype) else x.astype(get_default_dtype().numpy)


def broadcast_error(op, *operands):
    shapes = " and ".join(str(tuple(getattr(x, "shape", ()))) for x in operands)
    return RuntimeError(f"{op}: shapes {shapes} do not broadcast; aligned at the right, two sizes must be equal or one of them 1 "
                        f"(insert an axis with unsqueeze or [:, None], or transpose one operand)")


def _is_bool(x):
    return isinstance(x, (bool, np.bool_)) or np.dtype(bool) == getattr(x, "dtype", None)


def _refuse_bool(op, *operands, hint="convert it first, e.g. with .int()"):
    if all(_is_bool(x) for x in operands):
        raise RuntimeError(f"{op}: not defined for bool tensors; {hint}")


def _refuse_zero_divisor(op, b):
    if getattr(b, "dtype", None) is not None and b.dtype.kind in "iu" and (b == 0).any():
        raise RuntimeError(f"{op}: ZeroDivisionError: an integer was divided by zero; floats would give inf or nan")


def broadcast(op, *arrays):
    """Arrays stretched to one shape, or the error that names their shapes."""
    try:
        return array_module(*arrays).broadcast_arrays(*arrays)
    except ValueError:
        raise broadcast_error(op, *arrays) from None


class Binary(Function):
    """What two-operand element-wise operations share: promotion, and the error for shapes that do not fit."""

    promote, mixes = staticmethod(promote), True

    def forward(self, a, b):
        a, b = self.promote(a, b)
        try:
            return self.compute(a, b)
        except ValueError:
            raise broadcast_error(type(self).__name__.lower(), a, b) from None


class Add(Binary):
    """y = a + b.    da = dy,  db = dy"""

    def compute(self, a, b):
        return a + b

    def backward(self, dy):
        return dy, dy


class Sub(Binary):
    """y = a − b.    da = dy,  db = −dy"""

    def forward(self, a, b):
        for x in (a, b):
            _refuse_bool("sub", x, hint="use ^ or logical_xor for two of them, ~ to negate")
        return super().forward(a, b)

    def compute(self, a, b):
        return a - b

    def backward(self, dy):
        return dy, -dy if self.needs[1] else None


class Mul(Binary):
    """y = a · b.    da = dy · b,  db = dy · a"""

    def compute(self, a, b):
        self.saved = (a if self.needs[1] else None), (b if self.needs[0] else None)
        return a * b

    def backward(self, dy):
        a, b = self.saved
        return (dy * b if self.needs[0] else None,
                dy * a if self.needs[1] else None)


class Div(Binary):
    """y = a / b, integers in the default float type.    da = dy / b,  db = −dy · y / b"""

    promote = staticmethod(promote_to_float)

    def compute(self, a, b):
        y = a / b
        self.saved = b, (y if self.needs[1] else None)
        return y

    def backward(self, dy):
        b, y = self.saved
        da = dy / b
        return da, (-da * y if self.needs[1] else None)


def _promote_powers(a, b):
    """As `promote`; a number as the exponent of integers must be a power that integers have."""
    dtype = result_type(a, b)
    if dtype.kind in "iu" and _is_number(b) and not 0 <= b <= np.iinfo(dtype).max:
        raise RuntimeError(f"pow: integers to negative integer powers are not allowed, and {dtype} holds none above "
                           f"{np.iinfo(dtype).max}; got {b}: make the base a float tensor first")
    return promote(a, b)


class Pow(Binary):
    """y = a ^ b.    da = dy · b · a^(b−1), 0 where b = 0;    db = dy · y · log a, 0 where a = 0 and b ≥ 0"""
    autocast = FLOAT32

    promote = staticmethod(_promote_powers)

    def compute(self, a, b):
        _refuse_bool("pow", a, b)
        y = _power(array_module(a, b), a, b)
        self.saved = a, b, (y if self.needs[1] else None)
        return y

    def backward(self, dy):
        a, b, y = self.saved
        xp = array_module(dy)
        da = db = None
        if self.needs[0]:
            slope = b * _power(xp, a, b - 1)
            da = dy * (slope if getattr(b, "ndim", 0) == 0 and b != 0 else xp.where(b == 0, 0, slope).astype(dy.dtype))
        if self.needs[1]:
            db = dy * xp.where((a == 0) & (b >= 0), 0, y * xp.log(a)).astype(dy.dtype)
        return da, db


def _power(xp, a, b):
    """a ^ b. float32 `power` costs 44 ns an element; the small whole powers are products. Integers to negative powers are ±1 or 0."""
    if getattr(b, "ndim", 0) == 0 and hasattr(a, "ndim"):
        if b == 1:
            return a.copy()
        if b == 2:
            return xp.square(a)
        if b == 3:
            return a * a * a
    if getattr(b, "dtype", None) is not None and b.dtype.kind == "i":
        return xp.where((b < 0) & (abs(a) != 1), 0, xp.power(a, abs(b)))
    return xp.power(a, b)


class Maximum(Binary):
    """y = max(a, b); NaN wins.    The gradient goes to the larger operand, half to each where they are equal."""

    def compute(self, a, b):
        self.saved = a, b
        return array_module(a, b).maximum(a, b)

    def backward(self, dy):
        a, b = self.saved
        return dy * _share(a, b, dy.dtype), dy * _share(b, a, dy.dtype)


class Minimum(Binary):
    """y = min(a, b); NaN wins.    The gradient goes to the smaller operand; half to each where they are equal."""

    def compute(self, a, b):
        self.saved = a, b
        return array_module(a, b).minimum(a, b)

    def backward(self, dy):
        a, b = self.saved
        return dy * _share(b, a, dy.dtype), dy * _share(a, b, dy.dtype)


def _share(a, b, dtype):
    """1 where a > b, 0 where a < b, ½ where they are equal, and 1 where one of them is NaN, as in PyTorch."""
    return dtype.type(1) - (a < b) - (a == b) * dtype.type(0.5)


class Neg(Function):
    """y = −x.    dx = −dy"""

    def forward(self, x):
        _refuse_bool("neg", x, hint="use ~ or logical_not")
        return -x

    def backward(self, dy):
        return -dy


class Abs(Function):
    """y = |x|.    dx = dy · sign(x), 0 at 0"""

    def forward(self, x):
        _refuse_bool("abs", x)
        self.saved = x
        return abs(x)

    def backward(self, dy):
        return dy * array_module(dy).sign(self.saved)


class Clamp(Function):
    """y = min(max(x, low), high); low or high may be None.    dx = dy where low ≤ x ≤ high,  dlow = dy where x < low,  dhigh = dy where
    x > high, else 0; where low > high, everything is high's."""
    mixes = True

    def forward(self, x, low, high):
        xp = array_module(x)
        if low is None and high is None:
            raise RuntimeError("clamp: at least one of min and max must be given")
        wanted = result_type(x, *(b for b in (low, high) if b is not None))
        x, low, high = (b if b is None else converted(b, wanted) for b in (x, low, high))
        self.saved = x, low, high
        try:
            y = x if low is None else xp.maximum(x, low)
            return y if high is None else xp.minimum(y, high)
        except ValueError:
            raise broadcast_error("clamp", *(b for b in (x, low, high) if b is not None)) from None

    def backward(self, dy):
        x, low, high = self.saved
        xp, zero = array_module(dy), dy.dtype.type(0)
        low = -np.inf if low is None else low
        high = np.inf if high is None else high
        over = (x > high) | (low > high)
        return (xp.where((x >= low) & (x <= high), dy, zero), xp.where((x < low) & ~over, dy, zero) if self.needs[1] else None,
                xp.where(over, dy, zero) if self.needs[2] else None)


# --- elementary functions: integers are computed in the default float type ------------------------------------------

class Exp(Function):
    """y = eˣ.    dx = dy · y"""
    autocast = FLOAT32

    def forward(self, x):
        self.saved = y = array_module(x).exp(as_float(x))
        return y

    def backward(self, dy):
        return dy * self.saved


class Log(Function):
    """y = ln x.    dx = dy / x"""
    autocast = FLOAT32

    def forward(self, x):
        self.saved = x = as_float(x)
        return array_module(x).log(x)

    def backward(self, dy):
        return dy / self.saved


class Log1p(Function):
    """y = ln(1 + x), accurate near 0.    dx = dy / (1 + x)"""
    autocast = FLOAT32

    def forward(self, x):
        self.saved = x = as_float(x)
        return array_module(x).log1p(x)

    def backward(self, dy):
        return dy / (1 + self.saved)


class Sqrt(Function):
    """y = √x.    dx = dy / 2y"""

    def forward(self, x):
        self.saved = y = array_module(x).sqrt(as_float(x))
        return y

    def backward(self, dy):
        return dy / (2 * self.saved)


class Rsqrt(Function):
    """y = 1/√x.    dx = −dy · y³ / 2"""
    autocast = FLOAT32

    def forward(self, x):
        self.saved = y = 1 / array_module(x).sqrt(as_float(x))
        return y

    def backward(self, dy):
        y = self.saved
        return dy * (-0.5 * y * y * y)


class Tanh(Function):
    """y = tanh x.    dx = dy · (1 − y²)"""

    def forward(self, x):
        self.saved = y = array_module(x).tanh(as_float(x))
        return y

    def backward(self, dy):
        y = self.saved
        return dy * (1 - y * y)


class Sigmoid(Function):
    """y = 1 / (1 + e⁻ˣ) = (1 + tanh(x/2)) / 2, which cannot overflow.    dx = dy · y · (1 − y)"""

    def forward(self, x):
        xp = array_module(x)
        self.saved = y = 0.5 * xp.tanh(0.5 * as_float(x)) + 0.5
        return y

    def backward(self, dy):
        y = self.saved
        return dy * y * (1 - y)


class Sin(Function):
    """y = sin x.    dx = dy · cos x"""

    def forward(self, x):
        self.saved = x = as_float(x)
        return array_module(x).sin(x)

    def backward(self, dy):
        return dy * array_module(dy).cos(self.saved)


class Cos(Function):
    """y = cos x.    dx = −dy · sin x"""

    def forward(self, x):
        self.saved = x = as_float(x)
        return array_module(x).cos(x)

    def backward(self, dy):
        return dy * -array_module(dy).sin(self.saved)


class Cast(Function):
    """y = x in another dtype.    dx = dy, which the engine casts back"""
    in_float32 = False

    def forward(self, x, dtype):
        return x.astype(dtype)

    def backward(self, dy):
        return dy


def add(input, other, *, alpha=1): return Add.apply(input, other if alpha == 1 else _scaled(input, other, alpha))
def sub(input, other, *, alpha=1): return Sub.apply(input, other if alpha == 1 else _scaled(input, other, alpha))


def _scaled(input, other, alpha):
    """other · alpha; alpha takes no part in promotion."""
    if not hasattr(other, "array"):
        return other * alpha
    dtype = result_type(array_of(input), other.array)
    if isinstance(alpha, float) and not is_float(dtype):
        raise RuntimeError(f"add, sub: alpha must be a whole number for a result of {dtype}, got {alpha}")
    return cast(mul(cast(other, dtype), alpha), dtype)


def mul(input, other): return Mul.apply(input, other)
def pow(input, exponent): return Pow.apply(input, exponent)
def maximum(input, other): return Maximum.apply(input, other)
def minimum(input, other): return Minimum.apply(input, other)
def neg(input): return Neg.apply(input)
def abs_(input): return Abs.apply(input)
def exp(input): return Exp.apply(input)
def log(input): return Log.apply(input)
def log1p(input): return Log1p.apply(input)
def sqrt(input): return Sqrt.apply(input)
def rsqrt(input): return Rsqrt.apply(input)
def tanh(input): return Tanh.apply(input)
def sigmoid(input): return Sigmoid.apply(input)
def sin(input): return Sin.apply(input)
def cos(input): return Cos.apply(input)
def clamp(input, min=None, max=None): return Clamp.apply(input, min, max)
def clamp_min(input, min): return Clamp.apply(input, min, None)
def clamp_max(input, max): return Clamp.apply(input, None, max)
def square(input): return Pow.apply(input, 2)
@under_autocast(FLOAT32)
def reciprocal(input): return Div.apply(1.0, input)


def cast(input, dtype):
    """The tensor in a NumPy dtype; the same tensor when it has that dtype already."""
    if is_bfloat16(dtype):
        require_bfloat16(array_module(input.array))
    return input if input.array.dtype == dtype else Cast.apply(input, dtype)


def div(input, other, *, rounding_mode=None):
    """input / other; rounded down ("floor") or towards 0 ("trunc") it is constant between jumps and has no gradient."""
    if rounding_mode is None:
        return Div.apply(input, other)
    if rounding_mode not in ("floor", "trunc"):
        raise RuntimeError(f"div: rounding_mode must be None, 'floor' or 'trunc', got {rounding_mode!r}")
    return (floor_divide if rounding_mode == "floor" else _trunc_divide)(input, other)


# --- without gradient: comparisons, rounding, logic ------------------------------------------------------------------

def without_gradient(name, function):
    """A public element-wise operation whose result has no gradient: `function(xp, a, b)`."""
    def op(input, other):
        a, b = array_of(input), array_of(other)
        if _is_number(a) and _is_number(b):
            raise TypeError(f"{name}: expected a Tensor, got {type(input).__name__}; make one with tinygrad_tf.tensor(...)")
        return _constant(name, function, *promote(*_beside(name, a, b)))
    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"{name} of tensors, or a tensor and a number, element by element; the result has no gradient."
    return quiet(op)


def without_gradient_of_one(name, function):
    """The same with one operand: `function(xp, a)`."""
    def op(input):
        return _constant(name, function, input.array)
    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"{name} of each element; the result has no gradient."
    return quiet(op)


def _beside(name, a, b):
    return (a, b) if _is_number(a) or _is_number(b) else numbers_beside(name, [a, b])


def _constant(name, function, *arrays):
    xp = array_module(*arrays)
    try:
        return constant(xp.asarray(function(xp, *arrays)))
    except ValueError:
        raise broadcast_error(name, *arrays) from None
    except TypeError:
        kinds = " and ".join(str(getattr(x, "dtype", type(x).__name__)) for x in arrays)
        raise RuntimeError(f"{name}: not defined for {kinds}; bit operations take integers and booleans") from None


eq = without_gradient("eq", lambda xp, a, b: xp.equal(a, b))
ne = without_gradient("ne", lambda xp, a, b: xp.not_equal(a, b))
lt = without_gradient("lt", lambda xp, a, b: xp.less(a, b))
le = without_gradient("le", lambda xp, a, b: xp.less_equal(a, b))
gt = without_gradient("gt", lambda xp, a, b: xp.greater(a, b))
ge = without_gradient("ge", lambda xp, a, b: xp.greater_equal(a, b))
logical_not = without_gradient_of_one("logical_not", lambda xp, a: xp.logical_not(a))
logical_and = without_gradient("logical_and", lambda xp, a, b: xp.logical_and(a, b))
logical_or = without_gradient("logical_or", lambda xp, a, b: xp.logical_or(a, b))
logical_xor = without_gradient("logical_xor", lambda xp, a, b: xp.logical_xor(a, b))
bitwise_and = without_gradient("bitwise_and", lambda xp, a, b: xp.bitwise_and(a, b))
bitwise_or = without_gradient("bitwise_or", lambda xp, a, b: xp.bitwise_or(a, b))
bitwise_xor = without_gradient("bitwise_xor", lambda xp, a, b: xp.bitwise_xor(a, b))
bitwise_not = without_gradient_of_one("bitwise_not", lambda xp, a: xp.invert(a))
isnan = without_gradient_of_one("isnan", lambda xp, a: xp.isnan(a))
isinf = without_gradient_of_one("isinf", lambda xp, a: xp.isinf(a))
isfinite = without_gradient_of_one("isfinite", lambda xp, a: xp.isfinite(a))


def _floor(xp, a, b):
    _refuse_bool("div", a, b)
    _refuse_zero_divisor("div", b)
    return xp.floor_divide(a, b)


def _trunc(xp, a, b):
    if is_float(result_type(a, b)):
        return xp.trunc(xp.true_divide(a, b))
    y = _floor(xp, a, b)
    return y + ((y < 0) & (y * b != a)).astype(y.dtype)


floor_divide = without_gradient("floor_divide", _floor)
_trunc_divide = without_gradient("div", _trunc)


class Round(Function):
    """Rounding half to even, floor, ceil, trunc, sign: constant between jumps, so dx = 0."""

    def forward(self, x, how):
        if how == "sign" and x.dtype == bool:
            return x.copy()
        _refuse_bool(how, x)
        return getattr(array_module(x), how)(x) if is_float(x.dtype) or how == "sign" else x.copy()

    def backward(self, dy):
        return array_module(dy).zeros_like(dy)


class Remainder(Binary):
    """y = a − b · ⌊a / b⌋, with the sign of b.    da = dy,  db = −dy · ⌊a / b⌋. Integers by zero raise."""

    def compute(self, a, b):
        _refuse_bool("remainder", a, b)
        _refuse_zero_divisor("remainder", b)
        self.saved = a, b
        return a % b

    def backward(self, dy):
        a, b = self.saved
        return dy, -dy * array_module(dy).floor_divide(a, b) if self.needs[1] else None


def round(input, *, decimals=0):
    if decimals:
        return div(Round.apply(mul(input, 10.0 ** decimals), "rint"), 10.0 ** decimals)
    return Round.apply(input, "rint")


def floor(input): return Round.apply(input, "floor")
def ceil(input): return Round.apply(input, "ceil")
def trunc(input): return Round.apply(input, "trunc")
def sign(input): return Round.apply(input, "sign")
def remainder(input, other): return Remainder.apply(input, other)


def lerp(input, end, weight):
    """input + weight · (end − input), floats"""
    if not is_float(array_of(input).dtype):
        raise RuntimeError(f"lerp: not implemented for {input.dtype}; call .float() first")
    return add(input, mul(weight, sub(end, input)))


@under_autocast(WIDEST)
def addcmul(input, tensor1, tensor2, *, value=1):
    """input + value · tensor1 · tensor2"""
    return add(input, mul(mul(tensor1, tensor2), value))


@under_autocast(WIDEST)
def addcdiv(input, tensor1, tensor2, *, value=1):
    """input + value · tensor1 / tensor2"""
    return add(input, mul(div(tensor1, tensor2), value))
