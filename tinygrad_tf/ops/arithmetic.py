"""Element-wise arithmetic with broadcasting: + − × ÷ ^, extrema, and the elementary functions.

Operands are tensors or numbers. The engine sums each gradient over the axes along which its operand was broadcast, so
that every formula here is the formula for one element.
"""
import numpy as np

from ..autograd import Function, array_of, constant
from ..backend import array_module
from ..dtypes import get_default_dtype, result_type


def promote(a, b):
    """Both operands in the dtype that PyTorch gives their result; numbers become plain Python numbers of that kind."""
    a_dtype, b_dtype = getattr(a, "dtype", None), getattr(b, "dtype", None)
    if a_dtype is b_dtype and a.ndim and b.ndim:       # `is`: NumPy holds that float64 == None
        return a, b
    if type(b) is float and a_dtype.kind == "f" or type(a) is float and b_dtype.kind == "f":
        return a, b                             # NumPy keeps the array's dtype too
    wanted = result_type(a, b)
    return _cast(a, wanted), _cast(b, wanted)


def _cast(x, dtype):
    if isinstance(x, np.generic) or not hasattr(x, "dtype"):
        return dtype.type(x)
    return x.astype(dtype, copy=False)


def promote_to_float(a, b):
    """As `promote`; where both are integers, in the default float type."""
    a, b = promote(a, b)
    if result_type(a, b).kind == "f":
        return a, b
    return _cast(a, get_default_dtype().numpy), _cast(b, get_default_dtype().numpy)


def as_float(x):
    """Integers and booleans in the default float type; floats as they are."""
    return x if x.dtype.kind == "f" else x.astype(get_default_dtype().numpy)


def _broadcast_error(op, a, b):
    shapes = " and ".join(str(tuple(getattr(x, "shape", ()))) for x in (a, b))
    return RuntimeError(f"{op}: shapes {shapes} do not broadcast; aligned at the right, two sizes must be equal or one of them 1 "
                        f"(insert an axis with unsqueeze or [:, None], or transpose one operand)")


class Binary(Function):
    """What two-operand element-wise operations share: promotion, and the error for shapes that do not fit."""

    promote = staticmethod(promote)

    def forward(self, a, b):
        a, b = self.promote(a, b)
        try:
            return self.compute(array_module(a, b), a, b)
        except ValueError:
            raise _broadcast_error(type(self).__name__.lower(), a, b) from None


class Add(Binary):
    """y = a + b.    da = dy,  db = dy"""

    def compute(self, xp, a, b):
        if getattr(a, "dtype", None) == bool and getattr(b, "dtype", None) == bool:
            return xp.logical_or(a, b)
        return xp.add(a, b)

    def backward(self, dy):
        return dy, dy


class Sub(Binary):
    """y = a − b.    da = dy,  db = −dy"""

    def compute(self, xp, a, b):
        if getattr(a, "dtype", None) == bool and getattr(b, "dtype", None) == bool:
            raise RuntimeError("sub: subtraction of two bool tensors is not supported; use ^ or logical_xor, or ~ to negate")
        return xp.subtract(a, b)

    def backward(self, dy):
        return dy, -dy if self.needs[1] else None


class Mul(Binary):
    """y = a · b.    da = dy · b,  db = dy · a"""

    def compute(self, xp, a, b):
        self.saved = (a if self.needs[1] else None), (b if self.needs[0] else None)
        return xp.multiply(a, b)

    def backward(self, dy):
        a, b = self.saved
        return (dy * b if self.needs[0] else None,
                dy * a if self.needs[1] else None)


class Div(Binary):
    """y = a / b, integers in the default float type.    da = dy / b,  db = −dy · y / b"""

    promote = staticmethod(promote_to_float)

    def compute(self, xp, a, b):
        with np.errstate(divide="ignore", invalid="ignore"):
            y = xp.true_divide(a, b)
        self.saved = b, (y if self.needs[1] else None)
        return y

    def backward(self, dy):
        b, y = self.saved
        with np.errstate(divide="ignore", invalid="ignore"):
            da = dy / b
            return da, (-da * y if self.needs[1] else None)


class Pow(Binary):
    """y = a ^ b.    da = dy · b · a^(b−1), 0 where b = 0;    db = dy · y · log a, 0 where a = 0 and b ≥ 0"""

    def compute(self, xp, a, b):
        integers = result_type(a, b).kind in "iu"
        if integers and np.any(np.asarray(array_of(b)) < 0):
            raise RuntimeError("pow: integers to negative integer powers are not allowed; make the base a float tensor first")
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            y = _square_or_power(xp, a, b)
        self.saved = a, b, (y if self.needs[1] else None)
        return y

    def backward(self, dy):
        a, b, y = self.saved
        xp = array_module(dy)
        da = db = None
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if self.needs[0]:
                slope = b * _square_or_power(xp, a, b - 1)
                da = dy * (slope if np.ndim(b) == 0 and b != 0 else xp.where(b == 0, 0, slope).astype(dy.dtype))
            if self.needs[1]:
                db = dy * xp.where((a == 0) & (b >= 0), 0, y * xp.log(a)).astype(dy.dtype)
        return da, db


def _square_or_power(xp, a, b):
    """a ^ b. float32 `power` costs 44 ns an element; the small whole powers are products."""
    if np.ndim(b) == 0 and hasattr(a, "ndim"):
        if b == 1:
            return a.copy()
        if b == 2:
            return xp.square(a)
        if b == 3:
            return a * a * a
    return xp.power(a, b)


class Maximum(Binary):
    """y = max(a, b); NaN wins.    The gradient goes to the larger operand; half to each where they are equal."""

    def compute(self, xp, a, b):
        self.saved = a, b
        return xp.maximum(a, b)

    def backward(self, dy):
        a, b = self.saved
        share_a, share_b = _shares(a, b, dy.dtype)
        return dy * share_a, dy * share_b


class Minimum(Binary):
    """y = min(a, b); NaN wins.    The gradient goes to the smaller operand; half to each where they are equal."""

    def compute(self, xp, a, b):
        self.saved = a, b
        return xp.minimum(a, b)

    def backward(self, dy):
        a, b = self.saved
        share_b, share_a = _shares(a, b, dy.dtype)
        return dy * share_a, dy * share_b


def _shares(a, b, dtype):
    """(1, 0) where a > b, (0, 1) where a < b, (½, ½) where they are equal."""
    tie = (a == b) * dtype.type(0.5)
    return (a > b) + tie, (a < b) + tie


class Neg(Function):
    """y = −x.    dx = −dy"""

    def forward(self, x):
        if x.dtype == bool:
            raise RuntimeError("neg: the negative of a bool tensor is not supported; use ~ or logical_not")
        return -x

    def backward(self, dy):
        return -dy


class Abs(Function):
    """y = |x|.    dx = dy · sign(x), 0 at 0"""

    def forward(self, x):
        self.saved = x
        return abs(x)

    def backward(self, dy):
        return dy * array_module(dy).sign(self.saved)


class Clamp(Function):
    """y = min(max(x, low), high); low or high may be None.    dx = dy where low ≤ x ≤ high, else 0"""

    def forward(self, x, low, high):
        xp = array_module(x)
        if low is None and high is None:
            raise RuntimeError("clamp: at least one of min and max must be given")
        wanted = result_type(x, *(b for b in (low, high) if b is not None))
        x, low, high = (b if b is None else _cast(b, wanted) for b in (x, low, high))
        self.saved = x, low, high
        y = x if low is None else xp.maximum(x, low)
        return y if high is None else xp.minimum(y, high)

    def backward(self, dy):
        x, low, high = self.saved
        inside = True
        if low is not None:
            inside = inside & (x >= low)
        if high is not None:
            inside = inside & (x <= high)
        return dy * inside


# --- elementary functions: integers are computed in the default float type ------------------------------------------

class Exp(Function):
    """y = eˣ.    dx = dy · y"""

    def forward(self, x):
        with np.errstate(over="ignore"):
            self.saved = y = array_module(x).exp(as_float(x))
        return y

    def backward(self, dy):
        return dy * self.saved


class Log(Function):
    """y = ln x.    dx = dy / x"""

    def forward(self, x):
        self.saved = x = as_float(x)
        with np.errstate(divide="ignore", invalid="ignore"):
            return array_module(x).log(x)

    def backward(self, dy):
        with np.errstate(divide="ignore", invalid="ignore"):
            return dy / self.saved


class Log1p(Function):
    """y = ln(1 + x), accurate near 0.    dx = dy / (1 + x)"""

    def forward(self, x):
        self.saved = x = as_float(x)
        with np.errstate(divide="ignore", invalid="ignore"):
            return array_module(x).log1p(x)

    def backward(self, dy):
        with np.errstate(divide="ignore", invalid="ignore"):
            return dy / (1 + self.saved)


class Sqrt(Function):
    """y = √x.    dx = dy / 2y"""

    def forward(self, x):
        with np.errstate(invalid="ignore"):
            self.saved = y = array_module(x).sqrt(as_float(x))
        return y

    def backward(self, dy):
        with np.errstate(divide="ignore", invalid="ignore"):
            return dy / (2 * self.saved)


class Rsqrt(Function):
    """y = 1/√x.    dx = −dy · y³ / 2"""

    def forward(self, x):
        with np.errstate(divide="ignore", invalid="ignore"):
            self.saved = y = 1 / array_module(x).sqrt(as_float(x))
        return y

    def backward(self, dy):
        y = self.saved
        with np.errstate(invalid="ignore", over="ignore"):
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

    def forward(self, x, dtype):
        with np.errstate(invalid="ignore", over="ignore"):
            return x.astype(dtype)

    def backward(self, dy):
        return dy


def add(input, other, *, alpha=1):
    return Add.apply(input, other if alpha == 1 else mul(other, alpha))


def sub(input, other, *, alpha=1):
    return Sub.apply(input, other if alpha == 1 else mul(other, alpha))


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
def reciprocal(input): return Div.apply(1.0, input)


def cast(input, dtype):
    """The tensor in a NumPy dtype; the same tensor when it has that dtype already."""
    return input if input.array.dtype == dtype else Cast.apply(input, dtype)


def div(input, other, *, rounding_mode=None):
    if rounding_mode is None:
        return Div.apply(input, other)
    if rounding_mode not in ("floor", "trunc"):
        raise RuntimeError(f"div: rounding_mode must be None, 'floor' or 'trunc', got {rounding_mode!r}")
    if rounding_mode == "floor":
        return floor_divide(input, other)
    a, b = promote(array_of(input), array_of(other))
    xp = array_module(a, b)
    return constant(xp.trunc(xp.true_divide(a, b)).astype(result_type(a, b)))


# --- without gradient: comparisons, rounding, logic ------------------------------------------------------------------

def without_gradient(name, function):
    """A public element-wise operation whose result has no gradient: `function(xp, a, b)` or `function(xp, a)`."""
    def op(input, *other):
        arrays = [array_of(x) for x in (input, *other)]
        if len(arrays) == 2:
            arrays = promote(*arrays)
        xp = array_module(*arrays)
        try:
            with np.errstate(divide="ignore", invalid="ignore"):
                return constant(xp.asarray(function(xp, *arrays)))
        except ValueError:
            raise _broadcast_error(name, *arrays) from None
        except ZeroDivisionError:
            raise RuntimeError("ZeroDivisionError: integer division by zero") from None
    op.__name__ = op.__qualname__ = name
    return op


eq = without_gradient("eq", lambda xp, a, b: xp.equal(a, b))
ne = without_gradient("ne", lambda xp, a, b: xp.not_equal(a, b))
lt = without_gradient("lt", lambda xp, a, b: xp.less(a, b))
le = without_gradient("le", lambda xp, a, b: xp.less_equal(a, b))
gt = without_gradient("gt", lambda xp, a, b: xp.greater(a, b))
ge = without_gradient("ge", lambda xp, a, b: xp.greater_equal(a, b))
floor_divide = without_gradient("floor_divide", lambda xp, a, b: xp.floor_divide(a, b))
logical_not = without_gradient("logical_not", lambda xp, a: xp.logical_not(a))
logical_and = without_gradient("logical_and", lambda xp, a, b: xp.logical_and(a, b))
logical_or = without_gradient("logical_or", lambda xp, a, b: xp.logical_or(a, b))
logical_xor = without_gradient("logical_xor", lambda xp, a, b: xp.logical_xor(a, b))
bitwise_and = without_gradient("bitwise_and", lambda xp, a, b: xp.bitwise_and(a, b))
bitwise_or = without_gradient("bitwise_or", lambda xp, a, b: xp.bitwise_or(a, b))
bitwise_xor = without_gradient("bitwise_xor", lambda xp, a, b: xp.bitwise_xor(a, b))
bitwise_not = without_gradient("bitwise_not", lambda xp, a: xp.invert(a))
isnan = without_gradient("isnan", lambda xp, a: xp.isnan(a))
isinf = without_gradient("isinf", lambda xp, a: xp.isinf(a))
isfinite = without_gradient("isfinite", lambda xp, a: xp.isfinite(a))


class Round(Function):
    """Rounding half to even, floor, ceil, trunc, sign: constant between jumps, so dx = 0."""

    def forward(self, x, how):
        return getattr(array_module(x), how)(x) if x.dtype.kind == "f" or how == "sign" else x.copy()

    def backward(self, dy):
        return array_module(dy).zeros_like(dy)


class Remainder(Binary):
    """y = a − b · ⌊a / b⌋, with the sign of b.    da = dy,  db = −dy · ⌊a / b⌋"""

    def compute(self, xp, a, b):
        self.saved = a, b
        with np.errstate(divide="ignore", invalid="ignore"):
            return xp.remainder(a, b)

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
    """input + weight · (end − input)"""
    return add(input, mul(weight, sub(end, input)))


def addcmul(input, tensor1, tensor2, *, value=1):
    return add(input, mul(mul(tensor1, tensor2), value))


def addcdiv(input, tensor1, tensor2, *, value=1):
    return add(input, mul(div(tensor1, tensor2), value))
