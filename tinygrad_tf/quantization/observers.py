"""How far should the levels reach? A wider range clips less and rounds more coarsely.

`limits`, `percentile_limits` and `mse_limits` answer for the numbers of one array. An `Observer` is a module that remembers
the answers over all batches it was shown: of activations no batch shows the whole range.
"""
import numbers

import numpy as np

from .. import nn
from ..arguments import described, require_tensors, whole_number
from ..autograd import constant
from ..backend import array_module, at_least_float32, quiet
from ..creation import zeros
from ..ops._rows import require_float
from ..ops.quantize import Scheme, limits, parts, parts_shape, scale_and_zero


def percentile_limits(x, scheme, percentile=99.9):
    """(low, high) of each part: what 100 − `percentile` and `percentile` % of its numbers lie below, between neighbours linearly.

    x: an array [...]; low, high: arrays of the shape of the scales. 100 is min and max. A NaN makes both NaN.
    """
    xp, n = array_module(x), parts_shape(x.shape, scheme)[-1]
    if not n:
        return limits(x, scheme)
    ordered = xp.sort(parts(x, scheme), axis=-1)                # NaN comes last
    place = (n - 1) * _checked_share(percentile) / 100
    unknown = xp.isnan(ordered[..., -1])
    return tuple(xp.where(unknown, np.nan, _between(ordered, p)).astype(x.dtype) for p in (n - 1 - place, place))


def _between(ordered, place):
    """The number at a place that may lie between two."""
    below = int(place)
    low, share = ordered[..., below], place - below
    return low + share * (ordered[..., below + 1] - low) if share else low      # without share: ∞ − ∞ is none


def _checked_share(percentile):
    if isinstance(percentile, bool) or not isinstance(percentile, numbers.Real):
        raise TypeError(f"percentile must be a number, got {described(percentile)}")
    if not 50 < percentile <= 100:
        raise ValueError(f"percentile must be above 50, the median, and at most 100, got {described(percentile)}")
    return percentile


@quiet
def mse_limits(x, scheme, steps=100):
    """(low, high) of each part: of (r · min, r · max), r = 1, 1 − 1/steps, …, 1/steps, the pair of the smallest Σ (x − y)², y being x
    rounded within it. Never worse than min and max, which are r = 1. A NaN makes both NaN.
    """
    whole_number("mse_limits", "steps", steps, least=1)
    xp, rows = array_module(x), parts(x, scheme)
    low, high = best = limits(x, scheme)
    least = _squared_error(rows, *best, scheme)
    for step in range(steps - 1, 0, -1):
        tried = low * (step / steps), high * (step / steps)
        error = _squared_error(rows, *tried, scheme)
        best = tuple(xp.where(error < least, new, old) for new, old in zip(tried, best))
        least = xp.minimum(error, least)
    return best


def _squared_error(rows, low, high, scheme):
    """Σ (x − y)² of each part, where the levels reach from low to high."""
    xp = array_module(rows)
    scale, zero = (n[..., None].astype(rows.dtype) for n in scale_and_zero(low, high, scheme, rows.dtype))
    y = xp.clip(xp.rint(rows / scale), scheme.qmin - zero, scheme.qmax - zero) * scale
    return xp.square(rows - y).sum(axis=-1)


# --- modules that remember ------------------------------------------------------------------------------------------

class Observer(nn.Module):
    """x → x. Looks at each x, and remembers in `min_val` and `max_val`, one number for each part, how far its levels should reach.

    Subclasses say what to make of one array, `limits_of(x)`, and of one more, `merged(old, new, pick)`. `batches` counts what was
    looked at. A NaN stays until `reset_min_max_vals()`. Where each channel or group has a scale, `shape` is that of x; it may be
    left out until the first x, but a state dict can be loaded only into an observer that knows it.
    """

    def __init__(self, scheme=None, shape=None):
        super().__init__()
        self.scheme = Scheme() if scheme is None else scheme
        if not isinstance(self.scheme, Scheme):
            raise TypeError(f"{type(self).__name__}: expected a Scheme, got {described(scheme)}")
        known = () if self.scheme.granularity == "tensor" else None if shape is None else parts_shape(tuple(shape), self.scheme)[:-1]
        for name in "min_val", "max_val":
            self.register_buffer(name, None if known is None else zeros(known))
        self.register_buffer("batches", zeros((), dtype="int64"))

    def forward(self, x):
        require_tensors(type(self).__name__, x=x)
        array = at_least_float32(require_float(type(self).__name__, x.array))
        if array.size:
            low, high = self.limits_of(array)
            self.min_val, self.max_val = self._remembered(self.min_val, low, "minimum"), self._remembered(self.max_val, high, "maximum")
            self.batches = self.batches + 1
        return x

    @quiet
    def _remembered(self, old, new, pick):
        xp = array_module(new)
        if old is None:
            return constant(new)
        if old.array.shape != new.shape:
            raise ValueError(f"{type(self).__name__}: looks at {old.array.shape} parts, and this x has {new.shape}; another shape needs "
                             f"an observer of its own, or reset_min_max_vals()")
        merged = self.merged(old.array, new, getattr(xp, pick))
        return constant(xp.where(self.batches.array == 0, new, merged).astype(new.dtype))

    def reset_min_max_vals(self):
        """Forgets all that it has seen."""
        if self.scheme.granularity != "tensor":
            self.min_val = self.max_val = None
        self.batches = self.batches * 0

    def calculate_qparams(self):
        """(scale, zero point), tensors of one number for each part. RuntimeError before anything was seen."""
        if not self.batches.item():
            raise RuntimeError(f"{type(self).__name__}: no scale is known before it has seen a tensor; call it on data, or its model in "
                               f"training mode")
        return tuple(map(constant, scale_and_zero(self.min_val.array, self.max_val.array, self.scheme)))

    def extra_repr(self):
        return str(self.scheme)


class MinMaxObserver(Observer):
    """The smallest and the largest number so far. Clips nothing; one outlier makes all steps coarse."""

    def limits_of(self, x):
        return limits(x, self.scheme)

    def merged(self, old, new, pick):
        return pick(old, new)


class MovingAverageMinMaxObserver(MinMaxObserver):
    """min ← min + c · (min of x − min), max likewise, c = `averaging_constant`; the first x sets them."""

    def __init__(self, scheme=None, shape=None, averaging_constant=0.01):
        super().__init__(scheme, shape)
        self.averaging_constant = averaging_constant

    def merged(self, old, new, pick):
        return old + self.averaging_constant * (new - old)


class _MeanObserver(Observer):
    """The mean of the limits over all batches."""

    def merged(self, old, new, pick):
        return old + (new - old) / (self.batches.array + 1).astype(old.dtype)


class PercentileObserver(_MeanObserver):
    """`percentile_limits`, their mean over all batches: the rarest numbers are clipped, whatever their size."""

    def __init__(self, scheme=None, shape=None, percentile=99.9):
        super().__init__(scheme, shape)
        self.percentile = _checked_share(percentile)

    def limits_of(self, x):
        return percentile_limits(x, self.scheme, self.percentile)


class MSEObserver(_MeanObserver):
    """`mse_limits`, their mean over all batches: the clipping of the smallest squared error, found by trying `steps` of them."""

    def __init__(self, scheme=None, shape=None, steps=100):
        super().__init__(scheme, shape)
        self.steps = whole_number("MSEObserver", "steps", steps, least=1)

    def limits_of(self, x):
        return mse_limits(x, self.scheme, self.steps)
