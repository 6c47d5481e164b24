"""What the fused operations share: sums and maxima along one axis in the forms that NumPy does fast, and a dtype check.

Measured on float32 rows of 64: the maximum by argmax is 4 times faster than `max`, a sum as a product with ones 7 times
faster than `sum`. Small arrays (a call costs more than its work), CuPy and half precision take the plain form.
"""
import numpy as np

from ..backend import array_module, scatter_add
from ..dtypes import is_float


def require_float(op, x):
    """x, or an error for integers and booleans."""
    if not is_float(x.dtype):
        raise RuntimeError(f"{op}: not implemented for {x.dtype}: a floating-point tensor is needed; call .float() first")
    return x


def _has_fast_rows(x, axis):
    return x.size >= 1024 and axis in (-1, x.ndim - 1) and x.dtype.char in "fd" and array_module(x) is np


def max_along(x, axis):
    """max over one axis or several, which stay with size 1; −inf over no elements. NaN wins."""
    if not x.size:
        return x.sum(axis=axis, keepdims=True) - np.inf
    if not _has_fast_rows(x, axis):
        return x.max(axis=axis, keepdims=True)
    rows = x.reshape(-1, x.shape[-1])
    return rows[np.arange(len(rows)), rows.argmax(axis=1)].reshape(*x.shape[:-1], 1)


def sum_along(x, axis):
    """Σ over one axis or several, which stay with size 1."""
    if not _has_fast_rows(x, axis):
        return x.sum(axis=axis, keepdims=True)
    rows = x.reshape(-1, x.shape[-1])
    return (rows @ np.ones(rows.shape[1], x.dtype)).reshape(*x.shape[:-1], 1)


def dot_along(a, b, axis):
    """Σ a · b over one axis, which stays with size 1."""
    if not _has_fast_rows(a, axis):
        return (a * b).sum(axis=axis, keepdims=True)
    return np.vecdot(a, b)[..., None]


def scatter_rows(n, ids, rows):
    """[n, C]: row i is the sum of those `rows` [..., C] whose id is i.

    As one flat array: NumPy's `add.at` is 6 times faster on one axis than on rows, and as fast as a sort or a one-hot GEMM.
    """
    xp, size = array_module(rows), rows.shape[-1]
    total = xp.zeros(n * size, dtype=rows.dtype)
    place = ids.reshape(-1, 1).astype(np.int64) * size + xp.arange(size)
    scatter_add(total, place.reshape(-1), rows.reshape(-1))
    return total.reshape(n, size)
