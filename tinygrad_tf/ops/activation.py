"""Activations: what stands between the two linear layers of a feed-forward network. Each acts on one element."""
import math
from functools import partial

from ..autograd import FLOAT32, Function
from ..backend import array_module, at_least_float32
from ..kernels import fused
from ..special import erf as erf_of
from ..special import polynomial
from ._rows import in_pieces, require_float
from .arithmetic import as_float, sigmoid
from .shape import chunk


class Relu(Function):
    """y = max(x, 0).    dx = dy where x > 0, else 0"""

    def forward(self, x):
        if x.dtype == bool:
            raise RuntimeError("relu: boolean inputs are not supported; call .float() first")
        self.saved = y = array_module(x).maximum(x, 0)
        return y

    def backward(self, dy):
        return dy * ~(self.saved <= 0)          # not y > 0: a NaN keeps its gradient, as in PyTorch


class ReluSquared(Function):
    """y = max(x, 0)².    dx = dy · 2 max(x, 0)       (So et al. 2021, "Primer")"""

    def forward(self, x):
        self.saved = positive = array_module(x).maximum(require_float("relu_squared", x), 0)
        return positive * positive

    def backward(self, dy):
        positive = self.saved
        return dy * (2 * positive)


class LeakyRelu(Function):
    """y = x where x > 0, else slope · x.    dx = dy or slope · dy"""

    def forward(self, x, slope):
        xp = array_module(x)
        self.saved, self.slope = require_float("leaky_relu", x), slope
        return xp.where(x > 0, x, x * slope)

    def backward(self, dy):
        xp = array_module(dy)
        return xp.where(self.saved > 0, dy, dy * self.slope)


class Erf(Function):
    """y = erf x.    dx = dy · 2/√π · e^(−x²)"""

    def forward(self, x):
        self.saved = x = as_float(x)
        return erf_of(x)

    def backward(self, dy):
        x = self.saved
        return dy * (2 / math.sqrt(math.pi) * array_module(x).exp(-x * x))


class Smooth(Function):
    """y = f(x),  dx = dy · f′(x). The slope f′ is computed while f is at hand: cheaper than keeping x and starting again.

    Subclasses define curve(xp, x, y, slope=None), which writes f(x) into y and f′(x) into slope; and the name of their kernel.
    """

    def forward(self, x):
        x32, wanted = at_least_float32(require_float(self.kernel, x)), self.needs[0]
        if fused.serves(x32):
            y, self.saved = fused.activation(x32, self.kernel, wanted)
        else:
            y, self.saved = in_pieces(partial(self.curve, array_module(x)), x32, 1 + wanted)
        return y.astype(x.dtype, copy=False)


class Gelu(Smooth):
    """y = x · Φ(x),  Φ(x) = (1 + erf(x/√2)) / 2.    dx = dy · (Φ(x) + x · φ(x)),  φ(x) = e^(−x²/2) / √(2π)       (guide 9.2)"""
    kernel = "gelu"

    def curve(self, xp, x, y, slope=None):
        cdf = erf_of(x * math.sqrt(0.5))
        cdf += 1
        cdf *= 0.5
        xp.multiply(x, cdf, out=y)
        if slope is not None:
            pdf = xp.multiply(x, x, out=slope)
            pdf *= -0.5
            xp.exp(pdf, out=pdf)
            pdf *= 1 / math.sqrt(2 * math.pi)
            pdf *= x
            pdf += cdf

    def backward(self, dy):
        slope = self.saved
        return dy * slope


class GeluTanh(Smooth):
    """y = x · σ(2u),  u = √(2/π) · (x + 0.044715 x³),  σ(2u) = (1 + tanh u) / 2.       (guide 9.2)

    dx = dy · (σ + 2 u′ · y · (1 − σ)),  u′ = √(2/π) · (1 + 3 · 0.044715 x²)
    """
    kernel = "gelu_tanh"

    def curve(self, xp, x, y, slope=None):
        c = math.sqrt(2 / math.pi)
        square = x * x                          # x³ as a product: float32 x**3 calls pow, 200 times slower
        u = polynomial(square, (0.044715 * c, c))
        u *= x
        gate = xp.tanh(u, out=u)
        gate += 1
        gate *= 0.5
        xp.multiply(x, gate, out=y)
        if slope is not None:
            polynomial(square, (6 * 0.044715 * c, 2 * c), out=slope)
            slope *= 1 - gate                   # 0 far out: before y, so that no product overflows up to |x| = 10¹⁹
            slope *= y
            slope += gate

    def backward(self, dy):
        slope = self.saved
        return dy * slope


class Silu(Smooth):
    """y = x · σ(x),  σ(x) = 1 / (1 + e⁻ˣ).    dx = dy · (σ + y · (1 − σ))       (guide 10.3)"""
    kernel = "silu"

    def curve(self, xp, x, y, slope=None):
        gate = xp.exp(-x)                       # e^large is inf and 1/inf the right 0; tanh would round small σ away
        gate += 1
        gate = 1 / gate
        xp.multiply(x, gate, out=y)
        if slope is not None:
            xp.subtract(1, gate, out=slope)
            slope *= y
            slope += gate

    def backward(self, dy):
        slope = self.saved
        return dy * slope


class Softplus(Function):
    """y = ln(1 + eˣ) = max(x, 0) + ln(1 + e^(−|x|)), which cannot overflow.    dx = dy · σ(x)"""
    autocast = FLOAT32

    def forward(self, x):
        xp = array_module(x)
        self.saved = x = require_float("softplus", x)
        return xp.maximum(x, 0) + xp.log1p(xp.exp(-abs(x)))

    def backward(self, dy):
        x = self.saved
        return dy / (1 + array_module(x).exp(-x))


def relu(input, inplace=False): return input._write(Relu.apply) if inplace else Relu.apply(input)
def erf(input): return Erf.apply(input)
def silu(input, inplace=False): return input._write(Silu.apply) if inplace else Silu.apply(input)
def softplus(input): return Softplus.apply(input)
def relu_squared(input): return ReluSquared.apply(input)


def leaky_relu(input, negative_slope=0.01, inplace=False):
    return input._write(LeakyRelu.apply, negative_slope) if inplace else LeakyRelu.apply(input, negative_slope)


def gelu(input, approximate="none"):
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"gelu: approximate must be 'none' (exact, by erf) or 'tanh', got {approximate!r}")
    return (Gelu if approximate == "none" else GeluTanh).apply(input)


def glu(input, dim=-1):
    """y = a · σ(b), where a and b are the halves of `input` along `dim`. RuntimeError where there are no two halves."""
    if input.ndim == 0:
        raise RuntimeError("glu does not support 0-dimensional tensors: there is no axis to halve")
    if input.size(dim) % 2:
        raise RuntimeError(f"glu: Halving dimension must be even, but dimension {dim % input.ndim} is size {input.size(dim)}: the "
                           f"first half is the value, the second its gate")
    value, gate = chunk(input, 2, dim)
    return value * sigmoid(gate)
