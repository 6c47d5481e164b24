"""Losses. Each takes `reduction` "mean", "sum" or "none", and scores, not probabilities, where its name does not say otherwise."""
import warnings

from ..autograd import FLOAT32, Function, under_autocast
from ..backend import array_module, at_least_float32, may_hold
from ..dtypes import is_float
from ..kernels import fused
from ._ids import are_known_labels
from ._rows import max_along, require_float, sum_along
from .activation import softplus
from .arithmetic import add, mul, square, sub
from .reduce import mean
from .reduce import sum as sum_of
from .shape import reshape
from .softmax import log_softmax


class CrossEntropy(Function):
    """loss_i = −w_t · ln p_t,  p = softmax(x_i),  t = target_i;  0 where t is ignored.    x: [N, C, ...]   target: [N, ...]

    With label smoothing ε: (1 − ε) · loss_i − ε/C · Σ_c w_c · ln p_c.   mean = Σ loss_i / Σ w_t over the rows that count.

    dx_c = a · (p_c − [c = t]) + s · (p_c · Σ w − w_c),   a = (1 − ε) · w_t · dloss_i,  s = ε/C · dloss_i       (guide 9.9)
    """
    autocast = FLOAT32

    def forward(self, x, target, w, ignore_index, reduction, smoothing, checked=False):
        xp, rows = array_module(x), class_rows(at_least_float32(x))
        t, counted = check_targets("cross_entropy", target, rows.shape[1], ignore_index, checked)
        w_t = row_weights(w, t, counted, rows.dtype)
        if fused.serves(rows) and not smoothing:
            p, loss = fused.cross_entropy(rows, t)
            loss = loss * w_t
        else:
            z = rows - max_along(rows, 1)
            z_t = z[xp.arange(len(t)), t]
            z_all = _sum_over_classes(z, w) if smoothing else 0
            p = xp.exp(z, out=z)
            total = sum_along(p, 1)
            p /= total
            log_total = xp.log(total[:, 0])
            loss = (log_total - z_t) * ((1 - smoothing) * w_t)
            if smoothing:
                loss += (log_total * _sum_of_weights(w, rows) - z_all) * (smoothing / rows.shape[1])
        count = w_t.sum()
        self.saved = p, t, counted, w, w_t, count
        self.x_shape, self.reduction, self.smoothing = x.shape, reduction, smoothing
        return reduce_rows(xp.where(counted, loss, 0), target.shape, count, reduction).astype(x.dtype, copy=False)

    def backward(self, dy):
        p, t, counted, w, w_t, count = self.saved
        xp = array_module(p)
        dloss = spread(dy, count, self.reduction, len(t))
        a, s = (1 - self.smoothing) * w_t * dloss, self.smoothing / p.shape[1] * dloss
        if fused.serves(p) and not self.smoothing:
            return class_columns(fused.cross_entropy_backward(p, t, counted, a), self.x_shape)
        dx = p * (a + s * _sum_of_weights(w, p) if self.smoothing else a)[:, None]      # 0 · Σ w may be 0 · ∞
        dx[xp.arange(len(t)), t] -= a
        if self.smoothing:
            dx -= s[:, None] * (1 if w is None else w)
        if may_hold(~counted.all()):            # not 0 · p: an ignored row may hold NaN, and count may be 0
            xp.copyto(dx, 0, where=~counted[:, None])
        return class_columns(dx, self.x_shape)


class NLLLoss(Function):
    """loss_i = −w_t · x_i[t],  t = target_i;  0 where t is ignored.    x: [N, C, ...] log-probabilities   target: [N, ...]

    dx_c = −w_t · dloss_i where c = t, else 0.       mean = Σ loss_i / Σ w_t over the rows that count
    """
    autocast = FLOAT32

    def forward(self, x, target, w, ignore_index, reduction, checked=False):
        xp, rows = array_module(x), class_rows(at_least_float32(x))
        t, counted = check_targets("nll_loss", target, rows.shape[1], ignore_index, checked)
        w_t = row_weights(w, t, counted, rows.dtype)
        count = w_t.sum()
        self.saved = t, counted, w_t, count
        self.x_shape, self.rows, self.reduction = x.shape, rows.shape, reduction
        loss = xp.where(counted, -w_t * rows[xp.arange(len(t)), t], 0)
        return reduce_rows(loss, target.shape, count, reduction).astype(x.dtype, copy=False)

    def backward(self, dy):
        t, counted, w_t, count = self.saved
        xp = array_module(w_t)
        dx = xp.zeros(self.rows, dtype=w_t.dtype)
        dx[xp.arange(len(t)), t] = xp.where(counted, -w_t * spread(dy, count, self.reduction, len(t)), 0)
        return class_columns(dx, self.x_shape)


# --- what the two class losses share: rows, targets, weights, reductions ----------------------------------------------

def class_rows(x):
    """[N, C, ...] as a matrix with the classes last; [C] is one row."""
    classes = x.shape[min(1, x.ndim - 1)]
    return array_module(x).moveaxis(x, min(1, x.ndim - 1), -1).reshape(x.size // max(classes, 1), classes)


def class_columns(rows, shape):
    """The reverse of `class_rows`."""
    if len(shape) <= 2:
        return rows.reshape(shape)
    return array_module(rows).moveaxis(rows.reshape(shape[0], *shape[2:], shape[1]), -1, 1)


def check_targets(op, target, classes, ignore_index, checked=False):
    """(class of each row, 0 where it is ignored; which rows count). IndexError for a class outside [0, C): none wraps.
    checked: it is known that there is none, and nothing has to be looked at."""
    t = target.reshape(-1)
    counted = t != ignore_index
    wrong = None if checked else counted & ((t < 0) | (t >= classes))
    if wrong is not None and wrong.any():
        row = int(wrong.argmax())
        raise IndexError(f"{op}: target {int(t[row])} of row {row} is out of bounds: classes are 0 to {classes - 1}, and rows without "
                         f"a label carry ignore_index = {ignore_index}")
    return t * counted, counted


def row_weights(w, t, counted, dtype):
    """w_t for each row: 1, or the weight of its class; 0 for an ignored row."""
    return counted.astype(dtype) if w is None else array_module(w).where(counted, w[t], w.dtype.type(0))


def _sum_over_classes(z, w):
    return sum_along(z, 1)[:, 0] if w is None else z @ w


def _sum_of_weights(w, rows):
    return rows.shape[1] if w is None else w.sum()


def reduce_rows(loss, shape, count, reduction):
    if reduction == "none":
        return loss.reshape(shape)
    return loss.sum() / count if reduction == "mean" else loss.sum()


def spread(dy, count, reduction, rows):
    """dloss for each row: the reverse of `reduce_rows`."""
    dy = at_least_float32(dy).reshape(-1)
    return array_module(dy).broadcast_to(dy / count if reduction == "mean" else dy, (rows,))


# --- public -----------------------------------------------------------------------------------------------------------

def cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0):
    """−ln of the probability that softmax(input) gives to the target.    input: [N, C], [C] or [N, C, d1, ...], scores

    target: classes, integers (of any width; PyTorch takes int64 and uint8) of input's shape without C, or probabilities,
    floats of input's shape.
    """
    reduction = _reduction("cross_entropy", reduction, size_average, reduce)
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"cross_entropy: label_smoothing must be between 0.0 and 1.0, got {label_smoothing}")
    x, t = require_float("cross_entropy", input.array), target.array
    _check_weight("cross_entropy", x, weight)
    if t.shape == x.shape and is_float(t.dtype):
        return _cross_entropy_of_probabilities(input, target, weight, ignore_index, reduction, label_smoothing)
    _check_classes("cross_entropy", x, t)
    checked = are_known_labels(target, x.shape[min(1, x.ndim - 1)], ignore_index)
    return CrossEntropy.apply(input, target, weight, ignore_index, reduction, label_smoothing, checked)


@under_autocast(FLOAT32)
def _cross_entropy_of_probabilities(input, target, weight, ignore_index, reduction, smoothing):
    """loss_i = −Σ_c w_c · q_c · ln p_c,  q = (1 − ε) · target + ε/C; the mean is over rows"""
    if ignore_index >= 0:
        raise RuntimeError(f"cross_entropy: ignore_index {ignore_index} is not supported for class probabilities (a float target); "
                           f"give the rows to be ignored a target of zeros")
    dim = min(1, input.ndim - 1)
    if smoothing:
        target = add(mul(target, 1 - smoothing), smoothing / input.array.shape[dim])
    terms = mul(log_softmax(input, dim), target)
    if weight is not None:
        terms = mul(terms, reshape(weight, (-1,) + (1,) * (input.ndim - dim - 1)))
    return _reduce(mul(sum_of(terms, dim), -1), reduction)


def nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    """−input at the target class, for log-probabilities [N, C], [C] or [N, C, d1, ...].

    target: classes, integers (of any width; PyTorch takes int64 and uint8) of input's shape without C.
    """
    reduction = _reduction("nll_loss", reduction, size_average, reduce)
    x, t = require_float("nll_loss", input.array), target.array
    _check_weight("nll_loss", x, weight)
    _check_classes("nll_loss", x, t)
    checked = are_known_labels(target, x.shape[min(1, x.ndim - 1)], ignore_index)
    return NLLLoss.apply(input, target, weight, ignore_index, reduction, checked)


@under_autocast(FLOAT32)
def mse_loss(input, target, size_average=None, reduce=None, reduction="mean"):
    """(input − target)²"""
    reduction = _reduction("mse_loss", reduction, size_average, reduce)
    if input.array.shape != target.array.shape:
        warnings.warn(f"mse_loss: input {tuple(input.shape)} and target {tuple(target.shape)} differ in shape and are broadcast, "
                      f"which is rarely meant; make them equal", stacklevel=2)
    return _reduce(square(sub(input, target)), reduction)


@under_autocast(FLOAT32)
def binary_cross_entropy_with_logits(input, target, weight=None, size_average=None, reduce=None, reduction="mean", pos_weight=None):
    """−(p · y · ln σ(x) + (1 − y) · ln(1 − σ(x))) = (1 − y) · x + (1 + (p − 1) · y) · ln(1 + e⁻ˣ),  p = pos_weight or 1"""
    reduction = _reduction("binary_cross_entropy_with_logits", reduction, size_average, reduce)
    if input.shape != target.shape:
        raise ValueError(f"binary_cross_entropy_with_logits: target {tuple(target.shape)} must have the shape of input "
                         f"{tuple(input.shape)}")
    loss = softplus(mul(input, -1))
    if pos_weight is not None:
        loss = mul(loss, add(mul(target, sub(pos_weight, 1)), 1))
    loss = add(mul(sub(1, target), input), loss)
    return _reduce(loss if weight is None else mul(loss, weight), reduction)


def _reduce(loss, reduction):
    return loss if reduction == "none" else mean(loss) if reduction == "mean" else sum_of(loss)


def _reduction(op, reduction, size_average, reduce):
    """The reduction by name; PyTorch's two old flags, where given, decide."""
    if size_average is not None or reduce is not None:
        return "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: {reduction!r} is not a valid value for reduction; it is 'mean', 'sum' or 'none'")
    return reduction


def _check_weight(op, x, weight):
    if weight is None:
        return
    if weight.requires_grad:
        raise RuntimeError(f"{op}: weight has no gradient; pass weight.detach()")
    if x.ndim == 0 or weight.array.shape != (x.shape[min(1, x.ndim - 1)],):
        raise RuntimeError(f"{op}: weight must hold one number for each class, got shape {tuple(weight.shape)} for input {x.shape}")


def _check_classes(op, x, t):
    """Raises where input and target do not fit: the class axis of input is axis 1, or axis 0 of a single row."""
    wanted = x.shape[:1] * (x.ndim > 1) + x.shape[2:]
    if x.ndim and x.ndim > 1 and t.ndim and t.shape[0] != x.shape[0]:
        raise ValueError(f"{op}: expected input batch_size ({x.shape[0]}) to match target batch_size ({t.shape[0]}); input {x.shape}, "
                         f"target {t.shape}; flatten both: logits.reshape(-1, C), targets.reshape(-1)")
    if not x.ndim or t.shape != wanted:
        raise RuntimeError(f"{op}: input {x.shape} has its classes on axis {min(1, max(x.ndim - 1, 0))}, so target must have shape "
                           f"{wanted} for class ids or {x.shape} for float probabilities, got {t.shape}; of "
                           f"[B, T, V] logits and [B, T] ids flatten both: logits.reshape(-1, V), targets.reshape(-1)")
    if t.dtype.kind not in "iu":
        raise RuntimeError(f"{op}: a target of class ids must hold integers, got {t.dtype} of shape {t.shape}; convert with .long()")
