"""GPTQ: what rounding one column of a weight breaks, the columns after it repair (Frantar et al. 2022, arXiv 2210.17323)."""
from dataclasses import replace

import numpy as np

from ..backend import array_module
from ..ops.quantize import dequantized, quantized
from .linear import Codes, fitted, restored, round_to_nearest

DAMPING = 0.01                  # of the mean of the diagonal of H


def gptq(weight, scheme, statistics, name="weight"):
    """The Codes of W: [out, in] that change the outputs of the layer little, or those of rounding to nearest where they change them less.

    Wanted: the smallest Σ |x (W − Ŵ)ᵀ|² over the inputs x, whose Hessian is H = 2 Σ xᵀx for every row of W. Column after column
    is rounded, and the error e that this makes is fed into the columns behind it, in the direction that repairs most:

        U = the upper Cholesky factor of H⁻¹,    e = (w_i − ŵ_i) / U_ii,    W[:, i+1:] −= e ⊗ U[i, i+1:]

    A group gets its scale when its first column is due. Fewer inputs than columns: H is damped. An input that was always 0 tells nothing,
    and its column is rounded to nearest.
    """
    nearest, better = round_to_nearest(weight, scheme, name), _column_by_column(weight, scheme, inverse_factor(statistics.gram), name)
    return min(nearest, better, key=lambda codes: statistics.error(restored(codes, scheme, np.float64) - weight))


def inverse_factor(gram, damping=DAMPING):
    """U with (G + λ I)⁻¹ = Uᵀ U,  λ = damping · mean G_ii.    A factor 2 of G changes nothing that U is used for."""
    xp, diagonal = array_module(gram), gram.diagonal()
    added = xp.where(diagonal == 0, 1, damping * diagonal.mean())           # a row of zeros has no inverse
    return xp.linalg.cholesky(xp.linalg.inv(gram + xp.diag(added))).T


def _column_by_column(weight, scheme, U, name):
    xp, left = array_module(weight), weight.astype(np.float64)              # what is left to be rounded, repairs and all
    column, of_part = replace(scheme, granularity="channel", group_size=None), replace(
        scheme, granularity="tensor" if scheme.granularity == "tensor" else "channel", group_size=None)
    size, q, fits = scheme.group_size or left.shape[1], [], []
    for i in range(left.shape[1]):
        if i % size == 0:
            fits.append(fitted(left[:, i:i + size], of_part, name))
            scale, zero_point = (xp.broadcast_to(a, left.shape[:1]) for a in fits[-1])
        q.append(quantized(left[:, i:i + 1], scale, zero_point, column))
        error = (left[:, i] - dequantized(q[-1], scale, zero_point, column, np.float64)[:, 0]) / U[i, i]
        left[:, i + 1:] -= error[:, None] * U[i, i + 1:]
    scale, zero_point = (xp.stack(a, axis=1) if scheme.group_size else a[0] for a in zip(*fits))
    return Codes(xp.concatenate(q, axis=1), scale, zero_point)
