"""Low-bit numbers: where their levels lie, rounding to them, and a rounding that gradients pass (guide 11.3).

    q = clip(rint(x / s) + z, q_min, q_max)        x ≈ s · (q − z)

Numbers that share a scale s and a zero point z are a part: a whole tensor, a row of it, or a run of a row. The first half
works on bare arrays, and is all that stored low-bit weights need; the second is the operation for training.
"""
import math
from dataclasses import dataclass

import numpy as np

from ..arguments import described, require_bools, whole_number
from ..autograd import Function, array_of
from ..backend import array_module, at_least_float32, check_one_device, quiet
from ._rows import max_along, require_float
from .shape import reshape

GRANULARITIES = ("tensor", "channel", "group")


@dataclass(frozen=True)
class Scheme:
    """Which whole numbers there are, and who shares a scale.

    symmetric: −(2^(bits − 1) − 1) … 2^(bits − 1) − 1 and z = 0, so that 2 bits have 3 levels. asymmetric: 0 … 2^bits − 1.
    granularity: "tensor": one scale; "channel": one for each index of the first axis, a row of W: [out, in]; "group": one for each
    run of `group_size` numbers along the last axis.
    """
    bits: int = 8
    symmetric: bool = True
    granularity: str = "tensor"
    group_size: int = None

    def __post_init__(self):
        object.__setattr__(self, "bits", whole_number("Scheme", "bits", self.bits))
        if not 2 <= self.bits <= 8:
            raise ValueError(f"Scheme: bits must be 2 to 8, got {self.bits}")
        require_bools("Scheme", symmetric=self.symmetric)
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"Scheme: granularity must be 'tensor', 'channel' or 'group', got {described(self.granularity)}")
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError(f"Scheme: group_size belongs to granularity 'group', and to no other; got granularity {self.granularity!r} "
                             f"and group_size {self.group_size!r}")
        if self.group_size is not None:
            object.__setattr__(self, "group_size", whole_number("Scheme", "group_size", self.group_size, least=1))

    @property
    def qmin(self):
        return -self.qmax if self.symmetric else 0

    @property
    def qmax(self):
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2 ** self.bits - 1

    @property
    def dtype(self):
        """The NumPy dtype that holds every q."""
        return np.dtype(np.int8 if self.symmetric else np.uint8)


# --- arrays in, arrays out ------------------------------------------------------------------------------------------

def parts_shape(shape, scheme):
    """(*shape of the scales, n): how an array of `shape` divides into parts of n numbers.    ValueError where it does not."""
    if scheme.granularity == "tensor":
        return (math.prod(shape),)
    if not shape:
        raise ValueError(f"quantisation by {scheme.granularity}: a single number has no axis; use granularity 'tensor'")
    if scheme.granularity == "channel":
        return shape[0], math.prod(shape[1:])
    if shape[-1] % scheme.group_size:
        raise ValueError(f"quantisation by group: the last axis of shape {tuple(shape)} does not divide into groups of "
                         f"{scheme.group_size}; choose a divisor of {shape[-1]}")
    return *shape[:-1], shape[-1] // scheme.group_size, scheme.group_size


def parts(x, scheme):
    """x as [*shape of the scales, n]: one row for each scale; a view where the memory allows."""
    return x.reshape(parts_shape(x.shape, scheme))


def limits(x, scheme):
    """(smallest, largest) of each part, of the shape of the scales; 0 where a part is empty. A NaN makes both NaN."""
    rows = parts(x, scheme)
    if not rows.shape[-1]:
        zeros = array_module(x).zeros(rows.shape[:-1], x.dtype)
        return zeros, zeros
    return -max_along(-rows, -1)[..., 0], max_along(rows, -1)[..., 0]


@quiet
def scale_and_zero(low, high, scheme, dtype=None):
    """The s and z with which q_min … q_max reach from `low` to `high`, both first widened to include 0, which so stays exact.

    symmetric: s = max(−low, high) / q_max, z = 0.    asymmetric: s = (high − low) / (2^bits − 1), z = rint(−low / s)

    s is rounded *up* to `dtype` (default: that of low, float32 at least): it is never 0, and low and high are never clipped by
    more than s / 2. So |x − s (q − z)| ≤ s / 2 for all x between them, up to float rounding. z is int32.
    low = high = 0: s = 1.    NaN or infinity in low or high, or s too large for dtype: s is NaN or infinite.
    """
    xp, dtype = array_module(low), np.dtype(dtype or at_least_float32(low).dtype)
    low, high = xp.minimum(low.astype(np.float64), 0), xp.maximum(high.astype(np.float64), 0)
    scale = xp.maximum(-low, high) / scheme.qmax if scheme.symmetric else high / scheme.qmax - low / scheme.qmax
    scale = xp.where(scale == 0, 1, _rounded_up(scale, dtype)).astype(dtype)
    zero = xp.zeros_like(low) if scheme.symmetric else xp.rint(-low / scale.astype(np.float64))
    zero = xp.clip(xp.where(xp.isfinite(zero), zero, 0), scheme.qmin, scheme.qmax)
    return xp.asarray(scale), xp.asarray(zero.astype(np.int32))


def _rounded_up(s, dtype):
    """The smallest number of `dtype` that is not below s ≥ 0. The bits of floats ≥ 0 are ordered as they are: the next is one more."""
    narrow = s.astype(dtype)
    bits = narrow.view(f"u{dtype.itemsize}")
    return (bits + (narrow < s).astype(bits.dtype)).view(dtype)


@quiet
def quantized(x, scale, zero, scheme):
    """q = clip(rint(x / s) + z, q_min, q_max), whole numbers in the shape of x; halves go to the even one.

    A part of zeros is z; infinity is clipped, as any x that is too large. Where the scale is NaN or infinite, q is z, of which
    `dequantized` makes NaN. ValueError for NaN under a finite scale: no whole number stands for it.
    """
    xp, rows = array_module(x), parts(at_least_float32(x), scheme)
    scale, zero = _columns(rows, scale, zero)
    usable = xp.isfinite(scale)
    q = xp.rint(xp.where(usable, rows, 0) / xp.where(usable, scale, 1))
    if xp.isnan(q).any():
        raise ValueError("quantized: x holds NaN under a finite scale, and no whole number stands for NaN; scales from `limits` of "
                         "the same x are NaN there")
    return xp.clip(q + zero, scheme.qmin, scheme.qmax).astype(scheme.dtype).reshape(x.shape)


@quiet
def dequantized(q, scale, zero, scheme, dtype=None):
    """x ≈ s · (q − z) in `dtype` (default: that of the scale, float32 at least); NaN where the scale is NaN or infinite."""
    rows = parts(q, scheme)
    scale, zero = _columns(rows, scale, zero)
    x = rows.astype(scale.dtype)
    if not scheme.symmetric:
        x -= zero
    x *= scale
    return x.astype(scale.dtype if dtype is None else dtype, copy=False).reshape(q.shape)


def _columns(rows, scale, zero):
    """Scale and zero point as columns beside the rows of parts; float16 is computed with in float32."""
    if scale.shape != rows.shape[:-1] or zero.shape != scale.shape:
        raise ValueError(f"quantisation: {rows.shape[:-1]} scales and zero points are needed, one for each part, got scales of shape "
                         f"{scale.shape} and zero points of shape {zero.shape}")
    scale = at_least_float32(scale)
    return scale[..., None], zero[..., None].astype(scale.dtype)


# --- rounding with a gradient ---------------------------------------------------------------------------------------

class FakeQuantize(Function):
    """y = s · (clip(q, q_min, q_max) − z),  q = rint(x / s) + z.    dx = dy where q_min ≤ q ≤ q_max, else 0

    x, y: floats [...]; s, z: numbers or arrays that broadcast to x. The true slope is 0 almost everywhere; this is the straight-through
    estimator: backward takes the rounding for y = x and the clipping for what it is (Bengio et al. 2013, arXiv 1308.3432).
    The edge: a q that *is* q_min or q_max passes, so x passes to half a step beyond the last level; a tie there rounds to the
    even q, as everywhere. s and z are constants, also where they were computed from x. NaN stays NaN, with dx = 0.
    """

    def forward(self, x, scale, zero, qmin, qmax):
        xp, x32 = array_module(x), at_least_float32(require_float("fake_quantize", x))
        scale, zero = (n.astype(x32.dtype, copy=False) if hasattr(n, "dtype") else n for n in (scale, zero))
        q = xp.rint(x32 / scale) + zero
        self.saved = (q >= qmin) & (q <= qmax)
        return ((xp.clip(q, qmin, qmax) - zero) * scale).astype(x.dtype, copy=False)

    def backward(self, dy):
        inside = self.saved
        return dy * inside


def fake_quantize(input, scheme, scale=None, zero=None, scale_dtype=None):
    """`input` rounded to the levels of a scheme, with `FakeQuantize`'s gradient; what `dequantized(quantized(x))` is.

    scale and zero: tensors or arrays of one number for each part, from an observer; without them they are those of the parts' own
    limits, the scale rounded to `scale_dtype`, and no gradient goes through them. NaN or infinity makes its own part NaN.
    """
    x = require_float("fake_quantize", input.array)
    if (scale is None) != (zero is None):
        raise TypeError("fake_quantize: scale and zero are given together, or neither of them")
    scale, zero = scale_and_zero(*limits(x, scheme), scheme, scale_dtype) if scale is None else (array_of(scale), array_of(zero))
    check_one_device("fake_quantize", [x, scale, zero])
    rows = reshape(input, parts_shape(x.shape, scheme))
    return reshape(FakeQuantize.apply(rows, *_columns(rows.array, scale, zero), scheme.qmin, scheme.qmax), x.shape)


def fake_quantize_per_tensor_affine(input, scale, zero_point, quant_min, quant_max):
    """Rounds to s · (q − z), q from quant_min to quant_max, with `FakeQuantize`'s gradient; scale and zero_point: numbers, or tensors
    of one element. RuntimeError for a scale that is not above 0, and a zero point that is not from quant_min to quant_max.
    """
    op, x = "fake_quantize_per_tensor_affine", input.array
    for name, value in ("scale", scale), ("zero_point", zero_point):
        if hasattr(value, "array") and value.numel() != 1:
            raise RuntimeError(f"{op}: {name} must be one number, got shape {tuple(value.shape)}; for one a channel, there is "
                               f"fake_quantize_per_channel_affine")
    scale, zero = (v.array.reshape(()) if hasattr(v, "array") else v for v in (scale, zero_point))
    _check_levels(op, x, scale, zero, quant_min, quant_max)
    return FakeQuantize.apply(input, scale, zero, quant_min, quant_max)


def fake_quantize_per_channel_affine(input, scale, zero_point, axis, quant_min, quant_max):
    """The same with a scale and a zero point for each index of one axis: tensors of shape [input.size(axis)]."""
    op, x = "fake_quantize_per_channel_affine", input.array
    if not 0 <= whole_number(op, "axis", axis) < x.ndim:
        raise RuntimeError(f"{op}: axis must be from 0 to {x.ndim - 1}, the last of input {x.shape}, got {axis}")
    for name, value in ("scale", scale), ("zero_point", zero_point):
        if not hasattr(value, "array"):
            raise TypeError(f"{op}: {name} must be a Tensor, got {described(value)}")
        if value.array.shape != (x.shape[axis],):
            raise RuntimeError(f"{op}: {name} must have shape ({x.shape[axis]},), one number for each index of axis {axis} of input "
                               f"{x.shape}, got {tuple(value.shape)}")
    _check_levels(op, x, scale.array, zero_point.array, quant_min, quant_max)
    beside = [1] * axis + [-1] + [1] * (x.ndim - axis - 1)
    return FakeQuantize.apply(input, scale.array.reshape(beside), zero_point.array.reshape(beside), quant_min, quant_max)


def _check_levels(op, x, scale, zero, qmin, qmax):
    """RuntimeError for levels that are none."""
    if whole_number(op, "quant_min", qmin) > whole_number(op, "quant_max", qmax):
        raise RuntimeError(f"{op}: quant_min must be at most quant_max, got {qmin} and {qmax}")
    check_one_device(op, [x, *(n for n in (scale, zero) if hasattr(n, "dtype"))])
    if not _all(scale > 0):
        raise RuntimeError(f"{op}: every scale, the step between two levels, must be above 0")
    if not _all((zero >= qmin) & (zero <= qmax)):
        raise RuntimeError(f"{op}: every zero_point must be from quant_min = {qmin} to quant_max = {qmax}, so that 0 is a level")


def _all(condition):
    return bool(condition.all()) if hasattr(condition, "all") else condition
