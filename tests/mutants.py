"""Wrong backwards on purpose: what the gradient check must catch.

Generic mutants change what any backward returns. Hand-made ones are a second, independent formula for the gradients of an op,
from which one term can be dropped; with nothing dropped the formula must pass the same check, which proves that the
dropped term is what made it fail.
"""
import contextlib
import math
from typing import NamedTuple
from unittest import mock

import gradcases
import numpy as np
from device import host, placed

from tinygrad_tf.autograd import backward, constant
from tinygrad_tf.gradcheck import gradcheck
from tinygrad_tf.philox import keep_tile
from tinygrad_tf.tensor import Tensor


def changing(change):
    """A mutant that changes each gradient by itself."""
    return lambda node, dy, original: tuple(None if g is None else change(np.asarray(g)) for g in original(dy))


def one_slice(g, shape):
    """What `sum_to` must not do: the first element along each broadcast axis instead of their sum."""
    extra = g.ndim - len(shape)
    return g[(0,) * extra + tuple(slice(0, 1) if n == 1 else slice(None) for n in shape)].reshape(shape) if g.size else np.zeros(shape)


def without_sum(node, dy, original):
    def first(source, g):
        wanted = None if source is None or g is None else getattr(source, "shape", None)
        return g if wanted is None or g.shape == tuple(wanted) else one_slice(g, tuple(wanted))
    return tuple(first(source, g) for source, g in zip(node.inputs, original(dy)))


def rotated(node, dy, original):
    """Each gradient goes to the next argument that wants one."""
    gradients = list(original(dy))
    wanted = [i for i, (source, g) in enumerate(zip(node.inputs, gradients)) if source is not None and g is not None]
    for i, j in zip(wanted, wanted[1:] + wanted[:1]):
        gradients[j] = original(dy)[i]
    return tuple(gradients)


def forgotten(node, dy, original):
    """The last gradient is not returned."""
    gradients = list(original(dy))
    last = max((i for i, (source, g) in enumerate(zip(node.inputs, gradients)) if source is not None and g is not None), default=None)
    return tuple(None if i == last else g for i, g in enumerate(gradients))


GENERIC = {
    "zero": changing(lambda g: 0 * g),
    "× 1.01": changing(lambda g: g * 1.01),
    "sign flipped": changing(lambda g: -g),
    "reversed": changing(lambda g: g.reshape(-1)[::-1].reshape(g.shape)),
    "transposed": changing(lambda g: g.T.reshape(g.shape)),
    "another shape": changing(lambda g: g[..., None]),
    "no sum over broadcast axes": without_sum,
    "gradients exchanged": rotated,
    "a gradient forgotten": forgotten,
    "dy ignored": lambda node, dy, original: original(np.ones_like(dy)),
}


@contextlib.contextmanager
def replaced(cls, mutant):
    """Inside, the op computes its gradients by `mutant(node, dy, original)`; `node.args` and `node.y` are what forward saw and made."""
    forward, backward_ = cls.forward, cls.backward

    def remembering(self, *args):
        self.args, self.y = args, forward(self, *args)
        return self.y

    def original(self, dy):
        gradients = backward_(self, dy)
        return gradients if isinstance(gradients, tuple) else (gradients,)

    with (mock.patch.object(cls, "forward", remembering),
          mock.patch.object(cls, "backward", lambda self, dy: mutant(self, dy, lambda dy: original(self, dy)))):
        yield


# --- is a mutant caught, and does it apply? -------------------------------------------------------------------------

class Verdict(NamedTuple):
    """Of one mutant of one op: the cases in which it gives other gradients, and those in which the check fails."""
    op: str
    name: str
    applies: list
    caught: list


def refused(error):
    """True for the engine's own check of what backward returns; any other error is a mistake in a mutant."""
    if "returned a gradient of shape" not in str(error):
        raise error
    return True


def delivered(case):
    """The gradients that the engine delivers in a case, or True where it refuses them."""
    inputs = case.inputs()
    outputs = case.function(*inputs)
    random = np.random.default_rng(1)
    try:
        backward(outputs, constant(placed(random.standard_normal(outputs.array.shape), outputs)))
    except RuntimeError as error:
        return refused(error)
    return [None if x.grad is None else host(x.grad) for x in inputs if isinstance(x, Tensor) and x.requires_grad]


def differ(a, b):
    """True where two deliveries are not the same gradients; no gradient is the same as zeros."""
    if a is True or b is True:
        return a is not b
    zeros = [(x if x is not None else 0.0, y if y is not None else 0.0) for x, y in zip(a, b)]
    return any(not np.allclose(x, y, rtol=1e-7, atol=1e-12, equal_nan=True) for x, y in zeros)


def passes(case):
    try:
        return gradcheck(case.function, case.inputs(), raise_exception=False)
    except RuntimeError as error:
        return not refused(error)


def verdict(op, name, mutant):
    """A mutant applies to a case where it changes what the engine delivers. This is the only rule: where it changes nothing
    (a reversed single number, exchanged gradients that are equal, a sum that was not needed) there is nothing to catch."""
    cls = gradcases.differentiable_ops()[op]
    cases = gradcases.cases_of(op)
    right = [delivered(c) for c in cases]
    with replaced(cls, mutant):
        applies = [c for c, want in zip(cases, right) if differ(want, delivered(c))]
        caught = [c for c in applies if not passes(c)]
    return Verdict(op, name, applies, caught)


def generic_verdicts(op):
    return [verdict(op, name, mutant) for name, mutant in GENERIC.items()]


# --- hand-made: the formula again, with terms that can be dropped ----------------------------------------------------

HAND_MADE = {}                                  # op → (formula, the terms that can be dropped)


def formula(op, *terms):
    """Registers `function(node, dy, keeps)`; `keeps(term)` is False for the dropped one."""
    def register(function):
        HAND_MADE[op] = function, terms
        return function
    return register


def dropping(op, term):
    """The mutant of an op that drops one term of its formula; None drops nothing."""
    function = HAND_MADE[op][0]

    def mutant(node, dy, original):
        gradients = function(node, dy, lambda name: name != term)
        return gradients if isinstance(gradients, tuple) else (gradients,)
    return mutant


def hand_made_verdicts(op):
    return [verdict(op, f"without {term}", dropping(op, term)) for term in HAND_MADE[op][1]]


def along(x, dims):
    """x with reduced axes put back: dims are the axes, x.ndim + len(dims) the full rank."""
    return np.expand_dims(x, tuple(dims)) if len(dims) else x


@formula("Softmax", "the sum")
def _(node, dy, keeps):
    y, dim = node.y, node.args[1]
    return y * (dy - (dy * y).sum(dim, keepdims=True) * keeps("the sum"))


@formula("LogSoftmax", "the sum", "the probabilities")
def _(node, dy, keeps):
    p = np.exp(node.y) if keeps("the probabilities") else 1.0 / node.y.shape[node.args[1]] if node.y.size else 1.0
    return dy - p * dy.sum(node.args[1], keepdims=True) * keeps("the sum")


@formula("LogSumExp", "the probabilities")
def _(node, dy, keeps):
    x, dims, keepdim, *_ = node.args
    y, dy = (node.y, dy) if keepdim else (along(node.y, dims), along(dy, dims))
    return dy * (np.exp(x - y) if keeps("the probabilities") else np.ones_like(x))


def _rows(x, shape):
    return x.reshape(x.shape[:x.ndim - len(shape)] + (math.prod(shape),))


@formula("LayerNorm", "mean(g)", "x̂ · mean(g · x̂)", "r", "x̂ in dw", "w in g")
def _(node, dy, keeps):
    x, w, b, shape, eps, *_ = node.args
    rows, drows = _rows(x, shape), _rows(dy, shape)
    mean = rows.mean(-1, keepdims=True)
    r = 1 / np.sqrt(((rows - mean) ** 2).mean(-1, keepdims=True) + eps)
    x_hat = (rows - mean) * r
    g = drows * w.reshape(-1) if w is not None and keeps("w in g") else drows
    dx = g - g.mean(-1, keepdims=True) * keeps("mean(g)") - x_hat * (g * x_hat).mean(-1, keepdims=True) * keeps("x̂ · mean(g · x̂)")
    dx = dx * r if keeps("r") else dx
    dw = (drows * x_hat if keeps("x̂ in dw") else drows).reshape(x.shape)
    return dx.reshape(x.shape), None if w is None else dw, None if b is None else dy


@formula("RMSNorm", "x̂ · mean(g · x̂)", "r", "x̂ in dw", "w in g")
def _(node, dy, keeps):
    x, w, shape, eps, *_ = node.args
    rows, drows = _rows(x, shape), _rows(dy, shape)
    r = 1 / np.sqrt((rows ** 2).mean(-1, keepdims=True) + eps)
    g = drows * w.reshape(-1) if w is not None and keeps("w in g") else drows
    dx = g - rows * r * (g * rows * r).mean(-1, keepdims=True) * keeps("x̂ · mean(g · x̂)")
    dx = dx * r if keeps("r") else dx
    dw = (drows * rows * r if keeps("x̂ in dw") else drows).reshape(x.shape)
    return dx.reshape(x.shape), None if w is None else dw


_cdf = np.vectorize(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))), otypes=[float])


@formula("Gelu", "the density", "the distribution")
def _(node, dy, keeps):
    x, *_ = node.args
    density = x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return dy * (_cdf(x) * keeps("the distribution") + density * keeps("the density"))


@formula("GeluTanh", "the slope of the gate", "the cubic part of the slope")
def _(node, dy, keeps):
    x, *_ = node.args
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x ** 3))
    inner = c * (1 + 3 * 0.044715 * x ** 2 * keeps("the cubic part of the slope"))
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner * keeps("the slope of the gate"))


@formula("Silu", "the slope of the gate")
def _(node, dy, keeps):
    x, *_ = node.args
    gate = 1 / (1 + np.exp(-x))
    return dy * (gate + x * gate * (1 - gate) * keeps("the slope of the gate"))


@formula("ReluSquared", "the factor 2", "the limit")
def _(node, dy, keeps):
    x, *_ = node.args
    return dy * (2 if keeps("the factor 2") else 1) * (np.maximum(x, 0) if keeps("the limit") else x)


@formula("Softplus", "the gate")
def _(node, dy, keeps):
    return dy / (1 + np.exp(-node.args[0])) if keeps("the gate") else dy


@formula("Sigmoid", "1 − y")
def _(node, dy, keeps):
    return dy * node.y * (1 - node.y * keeps("1 − y"))


@formula("Tanh", "the square")
def _(node, dy, keeps):
    return dy * (1 - (node.y ** 2 if keeps("the square") else node.y))


@formula("Erf", "2/√π", "the square")
def _(node, dy, keeps):
    x, *_ = node.args
    return dy * np.exp(-x * x if keeps("the square") else -abs(x)) * (2 / math.sqrt(math.pi) if keeps("2/√π") else 1)


@formula("Relu", "the limit")
def _(node, dy, keeps):
    return dy * (node.args[0] > 0) if keeps("the limit") else dy


@formula("LeakyRelu", "the slope")
def _(node, dy, keeps):
    x, slope, *_ = node.args
    return np.where(x > 0, dy, dy * slope * keeps("the slope"))


@formula("Clamp", "the upper limit", "the lower limit", "the gradient of the limits")
def _(node, dy, keeps):
    x, low, high, *_ = node.args
    under = False if low is None else x < low
    over = False if high is None else x > high
    inside = ~(np.zeros(x.shape, bool) | (under if keeps("the lower limit") else False) | (over if keeps("the upper limit") else False))
    return dy * inside, *(dy * (side & keeps("the gradient of the limits")) for side in (under, over))


@formula("CrossEntropy", "the one-hot", "the mean over rows", "what is ignored", "label smoothing", "weights of the classes")
def _(node, dy, keeps):
    x, target, w, ignored, reduction, smoothing, *_ = node.args
    axis = min(1, x.ndim - 1)
    x, classes = np.moveaxis(x, axis, -1), x.shape[axis]
    smoothing = smoothing if keeps("label smoothing") else 0.0
    w = np.ones(classes) if w is None or not keeps("weights of the classes") else w
    counted = (target != ignored) if keeps("what is ignored") else np.ones(target.shape, bool)
    p = np.exp(x - x.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    one_hot = np.eye(classes)[np.where(target == ignored, 0, target)]
    w_t = (one_hot * w).sum(-1) * counted
    dloss = (dy / (w_t.sum() if reduction == "mean" and keeps("the mean over rows") else 1) * counted)[..., None]
    dx = (1 - smoothing) * w_t[..., None] * dloss * (p - one_hot * keeps("the one-hot")) + smoothing / classes * dloss * (p * w.sum() - w)
    return np.moveaxis(dx, -1, axis)


@formula("NLLLoss", "the mean over rows", "weights of the classes", "what is ignored")
def _(node, dy, keeps):
    x, target, w, ignored, reduction, *_ = node.args
    axis = min(1, x.ndim - 1)
    classes = x.shape[axis]
    counted = (target != ignored) if keeps("what is ignored") else np.ones(target.shape, bool)
    one_hot = np.eye(classes)[np.where(target == ignored, 0, target)] * (1 if w is None or not keeps("weights of the classes") else w)
    one_hot = one_hot * counted[..., None]
    dloss = dy / (one_hot.sum() if reduction == "mean" and keeps("the mean over rows") else 1)
    return np.moveaxis(-one_hot * np.asarray(dloss)[..., None], -1, axis)


def _swap(x):
    return np.swapaxes(x, -1, -2)


def _scores_gradient(node, dp, p, q, k, scale, keeps):
    dz = p * (dp - (dp * p).sum(-1, keepdims=True) * keeps("delta"))
    scale = scale if keeps("the scale") else 1.0
    return dz @ k * scale, _swap(dz) @ q * scale, dz


def _weights(q, k, bias, scale):
    with np.errstate(invalid="ignore", divide="ignore"):
        z = q @ _swap(k) * scale + (0 if bias is None else bias)
        p = np.exp(z - np.max(z, -1, keepdims=True, initial=-1e300))
        return np.nan_to_num(p / p.sum(-1, keepdims=True), nan=0.0)


@formula("Attention", "delta", "the scale", "dropout in dp", "dropout in dv")
def _(node, dy, keeps):
    q, k, v, bias, keep, scale, *_ = node.args
    p, keep = _weights(q, k, bias, scale), 1.0 if keep is None else keep
    dp = dy @ _swap(v) * (keep if keeps("dropout in dp") else 1)
    dv = _swap(p * (keep if keeps("dropout in dv") else 1)) @ dy
    dq, dk, dz = _scores_gradient(node, dp, p, q, k, scale, keeps)
    return dq, dk, dv, dz


def _hidden(q, k, bias, allowed, valid, plan):
    """0 where a query may look and −inf where not, and the bias: what `plan` says in tiles, as one table."""
    p, j = np.arange(q.shape[-2])[:, None] + plan.band.query_offset, np.arange(k.shape[-2])
    visible = np.ones((q.shape[-2], k.shape[-2]), bool)
    if plan.band.left is not None:
        visible &= j >= p - plan.band.left
    if plan.band.right is not None:
        visible &= j <= p + plan.band.right
    for more in (allowed, valid):
        visible = visible if more is None else visible & more
    return np.where(visible, 0.0 if bias is None else bias, -np.inf)


@formula("TiledAttention", "delta", "the scale", "dropout in dp", "dropout in dv", "the rest of a row")
def _(node, dy, keeps):
    q, k, v, bias, allowed, valid, plan, *_ = node.args
    p, keep = _weights(q, k, _hidden(q, k, bias, allowed, valid, plan), plan.scale), 1.0
    if not keeps("the rest of a row"):          # each tile of keys with a softmax of its own
        hidden, n = _hidden(q, k, bias, allowed, valid, plan), plan.tile[1]
        parts = [_weights(q, k[..., i:i + n, :], hidden[..., i:i + n], plan.scale) for i in range(0, k.shape[-2], n)]
        p = np.concatenate(parts, axis=-1) if parts else p
    if plan.dropout is not None:
        key, probability = plan.dropout
        heads = range(math.prod(p.shape[:-2]))
        keep = keep_tile(key, heads, range(p.shape[-2]), range(p.shape[-1]), probability, float).reshape(p.shape)
    dp = dy @ _swap(v) * (keep if keeps("dropout in dp") else 1)
    dv = _swap(p * (keep if keeps("dropout in dv") else 1)) @ dy
    dq, dk, dz = _scores_gradient(node, dp, p, q, k, plan.scale, keeps)
    return dq, dk, dv, dz


@formula("AttentionWeights", "delta", "the scale")
def _(node, dp, keeps):
    q, k, bias, scale, *_ = node.args
    return _scores_gradient(node, dp, _weights(q, k, bias, scale), q, k, scale, keeps)


def _put_back(shape, index, dy, keeps):
    dx = np.zeros(shape)
    if keeps("adding up"):
        np.add.at(dx, index, dy)
    else:
        dx[index] = dy
    return dx


@formula("Embedding", "adding up")
def _(node, dy, keeps):
    ids, w, *_ = node.args
    return None, _put_back(w.shape, ids, dy, keeps)


@formula("GetItem", "adding up")
def _(node, dy, keeps):
    return _put_back(node.args[0].shape, node.args[1], dy, keeps)


def _full_index(index, dim):
    full = list(np.indices(index.shape, sparse=True))
    full[dim] = index
    return tuple(full)


@formula("Gather", "adding up")
def _(node, dy, keeps):
    x, index, dim, *_ = node.args
    return _put_back(x.shape, _full_index(index, dim), dy, keeps)


@formula("SetItem", "the zeros where it was overwritten")
def _(node, dy, keeps):
    dx = dy.copy()
    if keeps("the zeros where it was overwritten"):
        dx[node.args[2]] = 0
    return dx, np.asarray(dy[node.args[2]])


@formula("Where", "the choice")
def _(node, dy, keeps):
    condition = node.args[0]
    return None, dy * condition if keeps("the choice") else dy, dy * ~condition if keeps("the choice") else dy


@formula("MaskedFill", "the zeros where it was filled")
def _(node, dy, keeps):
    blocked = node.args[1]
    return np.where(blocked & keeps("the zeros where it was filled"), 0.0, dy), None, np.where(blocked, dy, 0.0)


@formula("Var", "the 2", "the correction", "the mean")
def _(node, dy, keeps):
    x, dims, keepdim, correction, *_ = node.args
    n = math.prod(x.shape[d] for d in dims) - correction * keeps("the correction")
    centred = x - (x.mean(dims, keepdims=True) if x.size else 0) * keeps("the mean")
    return (dy if keepdim else along(dy, dims)) * (2 if keeps("the 2") else 1) / n * centred


@formula("Mean", "the count")
def _(node, dy, keeps):
    x, dims, keepdim, *_ = node.args
    dy = dy if keepdim else along(dy, dims)
    return np.broadcast_to(dy / (math.prod(x.shape[d] for d in dims) or 1) if keeps("the count") else dy, x.shape)


@formula("Amax", "the choice")
def _(node, dy, keeps):
    return _extremum(node, dy, keeps, np.max)


@formula("Amin", "the choice")
def _(node, dy, keeps):
    return _extremum(node, dy, keeps, np.min)


def _extremum(node, dy, keeps, extreme):
    x, dims, keepdim, *_ = node.args
    dy = dy if keepdim else along(dy, dims)
    chosen = (x == extreme(x, axis=dims, keepdims=True)) if keeps("the choice") else np.ones(x.shape)
    return dy * chosen


@formula("Cumsum", "the reversal")
def _(node, dy, keeps):
    x, dim, *_ = node.args
    if not x.ndim:
        return dy
    return np.flip(np.cumsum(np.flip(dy, dim), dim), dim) if keeps("the reversal") else np.cumsum(dy, dim)


@formula("Prod", "products that leave out a zero")
def _(node, dy, keeps):
    x, dim, keepdim, *_ = node.args
    dy = dy if keepdim else np.expand_dims(dy, dim)
    if not keeps("products that leave out a zero"):
        with np.errstate(invalid="ignore", divide="ignore"):
            return dy * x.prod(dim, keepdims=True) / x
    others = [np.delete(x, i, dim).prod(dim, keepdims=True) for i in range(x.shape[dim])]
    return dy * (np.concatenate(others, dim) if others else x)


@formula("Dropout", "the scale", "the zeros")
def _(node, dy, keeps):
    keep = node.args[1]
    return dy * (keep if keeps("the scale") else (keep > 0)) if keeps("the zeros") else dy * np.max(keep, initial=0)


@formula("Pow", "the exponent", "the logarithm", "exponent minus one")
def _(node, dy, keeps):
    a, b, *_ = node.args
    with np.errstate(invalid="ignore", divide="ignore"):
        da = dy * np.where(np.equal(b, 0), 0, (b if keeps("the exponent") else 1) * np.power(a, b - 1.0 * keeps("exponent minus one")))
        db = dy * np.where(np.equal(a, 0), 0, node.y * (np.log(a) if keeps("the logarithm") else 1))
    return da, db if isinstance(b, np.ndarray) else None


@formula("Div", "the square in db")
def _(node, dy, keeps):
    a, b, *_ = node.args
    return dy / b, -dy * a / (b * b if keeps("the square in db") else b)


@formula("Linear", "the sum over leading axes")
def _(node, dy, keeps):
    x, w, b, *_ = node.args
    rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, w.shape[0])
    if not keeps("the sum over leading axes"):
        rows, drows = rows[:1], drows[:1]
    return dy @ w, drows.T @ rows, None if b is None else drows.sum(0)


@formula("PackedLinear", "the scale", "the zero point", "the sum over leading axes")
def _(node, dy, keeps):
    x, packed, scale, zero_point, b, scheme = node.args
    if scheme.bits < 8:
        digits = np.unpackbits(packed, axis=1, bitorder="little")[:, :x.shape[-1] * scheme.bits].reshape(len(packed), -1, scheme.bits)
        packed = digits @ (1 << np.arange(scheme.bits)) - (2 ** (scheme.bits - 1) if scheme.symmetric else 0)
    wide = {0: (1, 1), 1: (-1, 1), 2: scale.shape}[scale.ndim]
    w, scale = packed * 1.0, scale.astype(float).reshape(wide).repeat(x.shape[-1] // wide[1], axis=1)
    if zero_point is not None and keeps("the zero point"):
        w -= zero_point.reshape(wide).repeat(x.shape[-1] // wide[1], axis=1)
    dx = dy @ (w * scale if keeps("the scale") else w)
    rows = dy.reshape(-1, dy.shape[-1])
    return dx, None, None, None, rows.sum(0) if keeps("the sum over leading axes") else rows[:1].sum(0)


@formula("Rotary", "the turn back", "the cosine", "the features that are not turned", "the layout")
def _(node, dy, keeps):
    x, cos, sin, layout, *_ = node.args
    half = cos.shape[-1]
    sin = -sin if keeps("the turn back") else sin
    pairs = [(i, i + half) if (layout == "half_split") == bool(keeps("the layout")) else (2 * i, 2 * i + 1) for i in range(half)]
    dx = dy * 1.0 if keeps("the features that are not turned") else np.zeros_like(dy)
    for i, (a, b) in enumerate(pairs):
        c, s = cos[..., i] if keeps("the cosine") else 1.0, sin[..., i]
        dx[..., a], dx[..., b] = dy[..., a] * c - dy[..., b] * s, dy[..., a] * s + dy[..., b] * c
    return dx


@formula("FakeQuantize", "the clip below", "the clip above", "the half step", "the zero point")
def _(node, dy, keeps):
    x, scale, zero, qmin, qmax = node.args
    x = x / scale + (zero if keeps("the zero point") else 0)
    half = 0.5 + 1e-9 if keeps("the half step") else 0
    below, above = x < qmin - half, x > qmax + half
    return np.where(below * keeps("the clip below") + above * keeps("the clip above"), 0, dy), None, None


@formula("Dispatch", "adding up")
def _(node, drows, keeps):
    x, plan = node.args
    return _put_back(x.shape, plan.tokens, drows, keeps)


@formula("Combine", "the weight", "the rows", "zeros for what has no row")
def _(node, dy, keeps):
    rows, g, plan = node.args
    drows, dg = np.zeros_like(rows), np.zeros_like(g)
    for t, rank in np.ndindex(*g.shape):
        place = plan.places[t, rank]
        if place < len(rows):
            drows[place] = dy[t] * (g[t, rank] if keeps("the weight") else 1)
            dg[t, rank] = (dy[t] * (rows[place] if keeps("the rows") else 1)).sum()
        elif not keeps("zeros for what has no row"):
            dg[t, rank] = (dy[t] * rows[-1]).sum() if len(rows) else 1
    return drows, dg


@formula("GroupedLinear", "a matrix of its own", "rows of its own", "the sum in db")
def _(node, dy, keeps):
    x, w, b, counts, *_ = node.args
    owner = np.repeat(np.arange(len(counts)), counts)
    dx = np.einsum("no,noi->ni", dy, w[owner] if keeps("a matrix of its own") else w[owner * 0])
    own = np.eye(len(w))[owner] if keeps("rows of its own") else np.ones((len(x), len(w)))
    db = [dy[owner == e].sum(0) if keeps("the sum in db") else dy[owner == e][:1].sum(0) for e in range(len(w))]
    return dx, np.einsum("ne,no,ni->eoi", own, dy, x), None if b is None else np.array(db)
