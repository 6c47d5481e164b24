"""LayerNorm and RMSNorm: each position is brought to unit size over its own features, whatever the batch around it."""
import numpy as np

from ..autograd import FLOAT32, Function
from ..backend import array_module, as_rows, at_least_float32
from ..kernels import fused
from ._rows import dot_along, require_float, sum_along
from .arithmetic import clamp_min, div
from .reduce import norm


class LayerNorm(Function):
    """y = x̂ · w + b,  x̂ = (x − μ) · r,  r = 1/√(σ² + eps);  μ, σ² over the last axes.    x, y: [..., C]   w, b: [C]

    dx = r · (g − mean(g) − x̂ · mean(g · x̂)),  g = dy · w,    dw = dy · x̂,  db = dy       (guide 9.3)

    σ² is the mean of (x − μ)²: as mean(x²) − μ² it would cancel to nothing, or less, beside a large mean. A row so large
    (above 10¹⁹ in float32) that σ² overflows becomes NaN.
    """
    autocast = FLOAT32

    def forward(self, x, w, b, shape, eps):
        xp, x32 = array_module(x), as_rows(at_least_float32(require_float("layer_norm", x)), len(shape))
        if fused.serves(x32):
            y, x_hat, r = fused.norm(x32, w, b, eps, centred=True)
        else:
            size = x32.shape[1]
            x_hat = x32 - sum_along(x32, -1) / size
            r = 1 / xp.sqrt(dot_along(x_hat, x_hat, -1) / size + eps)
            r[r == 0] = np.nan                  # σ² = ∞: zeros would pass for a result
            x_hat *= r
            y = x_hat if w is None else x_hat * w.reshape(-1)
            if b is not None:
                y = y + b.reshape(-1) if w is None else xp.add(y, b.reshape(-1), out=y)
        self.saved, self.axes = (x_hat, r, w), len(shape)
        return y.astype(x.dtype, copy=False).reshape(x.shape)

    def backward(self, dy):
        x_hat, r, w = self.saved
        rows = as_rows(at_least_float32(dy), self.axes)
        if fused.serves(rows):
            return _fused_backward(self, rows, dy.shape, centred=True)
        dx, dw, size = None, rows * x_hat, rows.shape[1]
        if self.needs[0]:
            dx = rows.copy() if w is None else rows * w.reshape(-1)
            dx -= x_hat * (_weighted_sum(dw, w) / size)
            dx -= _weighted_sum(rows, w) / size
            dx *= r
            dx = dx.reshape(dy.shape)
        return dx, dw.reshape(dy.shape) if self.needs[1] else None, dy


class RMSNorm(Function):
    """y = x̂ · w,  x̂ = x · r,  r = 1/√(mean(x²) + eps) over the last axes.    x, y: [..., C]   w: [C]

    dx = r · (g − x̂ · mean(g · x̂)),  g = dy · w,    dw = dy · x̂       (guide 10.2)
    """
    autocast = FLOAT32

    def forward(self, x, w, shape, eps):
        xp, x32 = array_module(x), as_rows(at_least_float32(require_float("rms_norm", x)), len(shape))
        if fused.serves(x32):
            y, x_hat, r = fused.norm(x32, w, None, eps, centred=False)
        else:
            r = 1 / xp.sqrt(dot_along(x32, x32, -1) / x32.shape[1] + eps)
            x_hat = x32 * r
            y = x_hat if w is None else x_hat * w.reshape(-1)
        self.saved, self.axes = (x_hat, r, w), len(shape)
        return y.astype(x.dtype, copy=False).reshape(x.shape)

    def backward(self, dy):
        x_hat, r, w = self.saved
        rows = as_rows(at_least_float32(dy), self.axes)
        if fused.serves(rows):
            return _fused_backward(self, rows, dy.shape, centred=False)[:2]
        dx, dw = None, rows * x_hat
        if self.needs[0]:
            dx = rows.copy() if w is None else rows * w.reshape(-1)
            dx -= x_hat * (_weighted_sum(dw, w) / rows.shape[1])
            dx *= r
            dx = dx.reshape(dy.shape)
        return dx, dw.reshape(dy.shape) if self.needs[1] else None


def _weighted_sum(rows, w):
    """Σ_c w_c · rows_c, as a column: the sum of g = dy · w, or of g · x̂, without an array for it."""
    return sum_along(rows, -1) if w is None else (rows @ w.reshape(-1))[:, None]


def _fused_backward(op, rows, shape, centred):
    """(dx, dw, db) by kernels, dw and db summed over the rows already.    rows: dy as [n, C]   shape: that of dy"""
    x_hat, r, w = op.saved
    dx = fused.norm_backward(rows, x_hat, r, w, centred).reshape(shape) if op.needs[0] else None
    columns = fused.norm_columns(rows, x_hat, shape[len(shape) - op.axes:], op.needs[2]) if any(op.needs[1:]) else (None, None)
    return dx, *columns


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    shape = _check_shapes("layer_norm", input, normalized_shape, weight=weight, bias=bias)
    return LayerNorm.apply(input, weight, bias, shape, eps)


def rms_norm(input, normalized_shape, weight=None, eps=None):
    """eps=None is the machine epsilon of the dtype that is computed in (float32 for float16), as in PyTorch.

    A row so large (above 10¹⁹ in float32) that its mean square overflows becomes zeros, as in PyTorch.
    """
    shape = _check_shapes("rms_norm", input, normalized_shape, weight=weight)
    if eps is None:
        eps = float(np.finfo(at_least_float32(require_float("rms_norm", input.array)[:0]).dtype).eps)
    return RMSNorm.apply(input, weight, shape, eps)


def normalize(input, p=2.0, dim=1, eps=1e-12):
    """x / max(‖x‖_p, eps) along an axis: vectors of length 1; zero stays zero."""
    return div(input, clamp_min(norm(input, p, dim, keepdim=True), eps))


def _check_shapes(op, input, normalized_shape, **parameters):
    """normalized_shape as a tuple. RuntimeError where it is not the end of the input's shape, or a parameter's shape is not it."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    x = input.array
    if not shape:
        raise RuntimeError(f"{op}: expected normalized_shape to have at least one axis, got {list(shape)}; "
                           f"for the last axis of this input it is [{x.shape[-1] if x.ndim else '?'}]")
    if x.shape[max(x.ndim - len(shape), 0):] != shape:
        raise RuntimeError(f"{op}: given normalized_shape={list(shape)}, expected input with shape [*, {str(list(shape))[1:-1]}], "
                           f"but got input of size {list(x.shape)}; the last {len(shape)} axes of the input must equal normalized_shape")
    for name, p in parameters.items():
        if p is not None and p.array.shape != shape:
            raise RuntimeError(f"{op}: expected {name} to be of the same shape as normalized_shape {list(shape)}, "
                               f"but got {list(p.array.shape)}")
    return shape
