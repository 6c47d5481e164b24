"""Activation-aware weights: channels that see large inputs are rounded more finely (Lin et al. 2023, arXiv 2306.00978)."""
import numpy as np

from ..backend import array_module
from .linear import restored, round_to_nearest

POINTS = 20                     # of the search for α, besides 0
FLOOR = 1e-4                    # of the largest mean: an input that is always 0 has a logarithm, too


def awq(weight, scheme, statistics, name="weight"):
    """The Codes of W · t, rounded to nearest, with t [in] such that the outputs change least:  x Wᵀ = (x / t) (W · t)ᵀ

    t = mean|x|^α, scaled so that its smallest and largest are 1 / r and r; α is the best of 21 from 0 to 1 for the inputs of
    `statistics`. α = 0 is rounding to nearest: on these inputs the result is never worse. Scaling W up where inputs are large makes its
    errors there smaller: a weight's error is s / 2 at most, and divided by t afterwards. x / t is left to the layer.
    """
    tries = [_at(alpha, weight, scheme, statistics, name) for alpha in np.linspace(0, 1, POINTS + 1).tolist()]
    errors = [statistics.error(restored(codes, scheme, np.float64) - weight) for codes in tries]
    return tries[errors.index(min(errors))]


def _at(alpha, weight, scheme, statistics, name):
    t = input_scale(statistics, alpha)
    return round_to_nearest(weight * t.astype(weight.dtype), scheme, name)._replace(input_scale=t)


def input_scale(statistics, alpha):
    """t for one α, float16 as it is stored."""
    xp, size = array_module(statistics.absolute), statistics.absolute
    size = xp.maximum(size, FLOOR * size.max())
    t = xp.where(size > 0, size, 1) ** alpha
    return (t / xp.sqrt(t.min() * t.max())).astype(np.float16)
