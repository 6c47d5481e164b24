"""Scaled dot-product attention: every query takes a weighted mean of the values, weighted by how well their keys match it.

The boolean triangle of `is_causal` and boolean masks become one bias, 0 where a query may look and −inf where not.
`blocked` is None in what follows, unless NaN or inf stands in a blocked place: that case has a section of its own, below.
"""
import math
from numbers import Real

import numpy as np

from ..arguments import described, require_bools
from ..autograd import LOW, Function, autocasted, constant
from ..backend import array_module, at_least_float32
from ..dtypes import is_float
from ._rows import dot_along, exp_of_moderate, max_along, sum_along


class Attention(Function):
    """out = (p · keep) v,  p = softmax(s · q kᵀ + bias).       (guide 4.1; dense: p is kept whole)

    q: [..., Tq, Dh]   k: [..., Tk, Dh]   v: [..., Tk, Dv]   out: [..., Tq, Dv]   bias, keep: None or [..., Tq, Tk]

    dp = keep · (dout vᵀ),  dz = p · (dp − Σ_k dp · p),   dq = s · dz k,  dk = s · dzᵀ q,  dv = (p · keep)ᵀ dout,  dbias = dz
    """

    def forward(self, q, k, v, bias, keep, scale):
        dtype, (q, k, v) = q.dtype, map(at_least_float32, (q, k, v))
        bias = None if bias is None else at_least_float32(bias)
        p = weights(q, k, bias, scale)
        self.saved, self.scale = (q, k, v, p, bias, keep), scale
        kept = p if keep is None else p * keep
        out = kept @ v
        if bias is not None and not _is_finite(out):        # NaN in a value that is blocked?
            out = _product(kept, v, _blocked(bias, p))
        return out.astype(dtype, copy=False)

    def backward(self, dout):
        _, _, _, p, bias, _ = self.saved
        return _without_leaks(self._gradients, at_least_float32(dout), p, bias)

    def _gradients(self, dout, blocked):
        q, k, v, p, _, keep = self.saved
        dv = None
        if self.needs[2]:
            dv = _product(_swap(p if keep is None else p * keep), dout, _swap(blocked), v)
        dp = dout @ _swap(v)
        if keep is not None:
            dp *= keep
        dq, dk, dbias = score_gradients(dp, q, k, p, blocked, self.scale, (self.needs[0], self.needs[1], self.needs[3]))
        return dq, dk, dv, dbias


class AttentionWeights(Function):
    """p = softmax(s · q kᵀ + bias), zeros in a row that sees nothing.    q: [..., Tq, Dh]   k: [..., Tk, Dh]   p: [..., Tq, Tk]

    dz = p · (dp − Σ_k dp · p),   dq = s · dz k,  dk = s · dzᵀ q,  dbias = dz
    """

    def forward(self, q, k, bias, scale):
        dtype, (q, k) = q.dtype, map(at_least_float32, (q, k))
        bias = None if bias is None else at_least_float32(bias)
        p = weights(q, k, bias, scale)
        self.saved, self.scale = (q, k, p, bias), scale
        return p.astype(dtype, copy=False)

    def backward(self, dp):
        q, k, p, bias = self.saved

        def gradients(dp, blocked):
            return score_gradients(dp.copy(), q, k, p, blocked, self.scale, self.needs)
        return _without_leaks(gradients, at_least_float32(dp), p, bias)


def weights(q, k, bias, scale):
    """softmax(scale · q kᵀ + bias). A row that sees nothing is zeros, not the NaN of 0/0."""
    z = (q * scale) @ _swap(k)                  # scaling q costs Tq · Dh products, scaling z Tq · Tk
    if bias is not None:
        z += bias
    p, total = exp_of_moderate(z)
    if p is not None:
        p /= total
        return p
    top = max_along(z, -1)
    if bias is not None and not (top < np.inf).all():       # NaN or inf: the whole row becomes NaN, also where it is blocked
        return _weights_of_visible(z, _blocked(bias, z))
    return _softmax(z, top if bias is None else _finite(top))


def _softmax(z, top):
    """e^(z − top) / Σ e^(z − top) over the last axis, written over z; 0 where the sum is 0."""
    xp = array_module(z)
    z -= top
    p = xp.exp(z, out=z)
    total = sum_along(p, -1)
    p /= xp.where(total == 0, 1, total)
    return p


def score_gradients(dp, q, k, p, blocked, scale, needs):
    """(dq, dk, dbias) from dp, which is written over. `blocked` is None, or says which places of dp do not count, NaN or not."""
    if not any(needs):
        return None, None, None
    dz = _cleared(dp, blocked)
    dz -= dot_along(dz, p, -1)
    dz *= p
    dz = _cleared(dz, blocked)                  # again: the sum may be NaN, and 0 · NaN with it
    dq = _product(dz, k, blocked, q) * scale if needs[0] else None
    dk = _product(_swap(dz), q, _swap(blocked), k) * scale if needs[1] else None
    return dq, dk, dz if needs[2] else None


def _finite(top):
    """The maximum that is subtracted: 0 for a row that sees nothing, since −inf − (−inf) is NaN."""
    return array_module(top).where(top == -np.inf, 0, top)


def _swap(x):
    """The last two axes exchanged, as a view."""
    return None if x is None else x.swapaxes(-1, -2)


# --- NaN and inf in blocked places ------------------------------------------------------------------------------------
#
# Padding may hold anything. Its weight is 0, but 0 · NaN is NaN: the formulas above would let a blocked key or value
# spoil every query. So their results are looked at, and only if one is not finite they are computed again, with `blocked`.

def _without_leaks(gradients, dy, p, bias):
    """gradients(dy, blocked=None); where something was blocked and a gradient is not finite, again with the blocked places told."""
    found = gradients(dy, None)
    if bias is not None and not _is_finite(*found):
        found = gradients(dy, _blocked(bias, p))
    return found


def _weights_of_visible(z, blocked):
    """The weights where a score is NaN: a blocked one counts no more than any other blocked score."""
    z[blocked] = -np.inf
    p = _softmax(z, _finite(max_along(z, -1)))
    p[blocked] = 0                              # also in a row that sees a NaN
    return p


def _product(a, b, blocked, like=None):
    """a @ b. With `blocked`, where a is 0: an element is what its row may see, whatever stands in the rest of b."""
    if blocked is None:                         # as `like` lies in memory, if BLAS can: heads cut from rows become rows without a copy
        can = isinstance(like, np.ndarray) and like.strides[-1] == like.itemsize and a.shape[:-2] == b.shape[:-2] == like.shape[:-2]
        can = can and 0 not in like.strides     # where it is expanded, `empty_like` would lay it out in another order
        return np.matmul(a, b, out=np.empty_like(like, a.dtype)) if can else a @ b
    xp = array_module(a)
    finite = xp.isfinite(b)
    seen = (~blocked).astype(a.dtype) @ (~finite).astype(a.dtype) > 0
    return xp.where(seen, a @ b, a @ xp.where(finite, b, 0))


def _cleared(x, blocked):
    """x with 0 where blocked, whatever stood there."""
    return x if blocked is None else array_module(x).where(blocked, x.dtype.type(0), x)


def _blocked(bias, z):
    return array_module(z).broadcast_to(bias == -np.inf, z.shape)


def _is_finite(*arrays):
    """Whether all elements are; None counts as finite. One answer for all of them: on a GPU the host waits for it."""
    flat = [x.ravel("K") if isinstance(x, np.ndarray) else x for x in arrays if x is not None]
    total = sum(array_module(x).vdot(x, x) for x in flat)       # 3 times faster than x.sum()
    return bool(array_module(*arrays).isfinite(total))


# --- public -----------------------------------------------------------------------------------------------------------

def attention_weights(query, key, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The weights alone, [..., Tq, Tk], for those who show them: what scaled_dot_product_attention multiplies `value` by."""
    require_bools("attention_weights", is_causal=is_causal, enable_gqa=enable_gqa)
    query, key = autocasted(LOW, query, key)
    _check("attention_weights", query, key, attn_mask)
    _check_alone("attention_weights", attn_mask, is_causal)
    grouped = enable_gqa and _heads(query) != _heads(key)
    if grouped:
        attn_mask = group_mask("attention_weights", query, shared_heads("attention_weights", query, key, key), attn_mask)
        query, key, _ = group("attention_weights", query, key, key)
    _score_shape("attention_weights", query, key, key, attn_mask)
    p = AttentionWeights.apply(query, key, _bias(query, key, attn_mask, is_causal),
                               checked_scale("attention_weights", query, scale))
    return p.flatten(-4, -3) if grouped else p


def checked_scale(op, query, scale):
    """The number that scores are multiplied by, 1/√Dh for None; TypeError for a tensor, which would get no gradient."""
    if scale is None:
        return 1 / math.sqrt(max(query.array.shape[-1], 1))
    if not isinstance(scale, Real):
        raise TypeError(f"{op}: scale must be a number, got {described(scale)}; one that is learned multiplies the query: "
                        f"query * scale, with scale=1.0 here")
    try:
        return float(scale)
    except OverflowError:
        raise ValueError(f"{op}: scale must lie within the range of a float, got {described(scale)}") from None


def _bias(query, key, attn_mask, is_causal):
    """What is added to the scores: None, the float mask itself, or 0 where a query may attend and −inf where not."""
    if is_causal:
        allowed = array_module(query.array).tri(query.array.shape[-2], key.array.shape[-2], dtype=bool)
    elif attn_mask is None or attn_mask.array.dtype != bool:
        return attn_mask
    else:
        allowed = attn_mask.array
    return constant(bias_of(allowed, query.array))


def bias_of(allowed, q):
    """0 where a query may attend and −inf where not, in the dtype in which the scores of q are computed."""
    dtype = at_least_float32(q[..., :0]).dtype
    return array_module(allowed).where(allowed, dtype.type(0), dtype.type(-np.inf))


def _heads(x):
    return x.array.shape[-3] if x.ndim > 2 else None


def group(op, query, key, value):
    """query as [..., Hkv, G, Tq, Dh], key and value as [..., Hkv, 1, Tk, D]: G query heads share a key head by broadcasting.

    Where key and value differ in heads, Hkv is their least common multiple, and their heads are repeated up to it.
    """
    heads, shared = _heads(query), shared_heads(op, query, key, value)
    query = query.unflatten(-3, (shared, heads // shared))
    key, value = (x if _heads(x) == shared else x.repeat_interleave(shared // _heads(x), -3) for x in (key, value))
    return query, key.unsqueeze(-3), value.unsqueeze(-3)


def group_mask(op, query, shared, mask):
    """A mask or bias for the heads of query, [..., H, Tq, Tk], as [..., Hkv, G, Tq, Tk]; None stays."""
    if mask is None or mask.ndim < 3:
        return mask
    heads = _heads(query)
    if _heads(mask) not in (1, heads):
        raise RuntimeError(f"{op}: attn_mask {_shape(mask)} must have 1 or {heads} heads (axis −3), as query {_shape(query)} has")
    return mask.unsqueeze(-3) if _heads(mask) == 1 else mask.unflatten(-3, (shared, heads // shared))


def shared_heads(op, query, key, value):
    heads, found = _heads(query), (_heads(key), _heads(value))
    if heads is None or not all(found) or any(heads % n for n in found):
        raise RuntimeError(f"{op}: with enable_gqa, the number of heads (axis −3) of key and of value must divide "
                           f"that of query, got query {_shape(query)}, key {_shape(key)}, value {_shape(value)}")
    return math.lcm(*found)


# --- checks -----------------------------------------------------------------------------------------------------------

def _shape(x):
    return x.array.shape


def _check(op, query, key, attn_mask):
    if query.ndim < 2 or key.ndim < 2:
        raise RuntimeError(f"{op}: query, key and value need at least 2 axes, [..., T, Dh], got query {_shape(query)}, key {_shape(key)}")
    if not is_float(query.array.dtype) or query.array.dtype != key.array.dtype:
        raise RuntimeError(f"{op}: expected query, key and value to have the same float dtype, got {query.dtype} and {key.dtype}; "
                           f"convert with .to(dtype)")
    if query.array.shape[-1] != key.array.shape[-1]:
        raise RuntimeError(f"{op}: query {_shape(query)} and key {_shape(key)} must agree in their last axis, Dh: each score is their "
                           f"dot product")
    if attn_mask is not None and attn_mask.array.dtype not in (bool, np.float32, query.array.dtype):
        raise RuntimeError(f"{op}: attn_mask must be bool (True attends), or added to the scores as float32 or as query's dtype "
                           f"{query.dtype}, got {attn_mask.dtype}; convert with .bool() or .to(query.dtype)")


def _check_alone(op, attn_mask, is_causal):
    if is_causal and attn_mask is not None:
        raise RuntimeError(f"{op}: an explicit attn_mask should not be set when is_causal=True; drop is_causal and combine the two: "
                           f"attn_mask & torch.ones(Tq, Tk, dtype=torch.bool).tril()")


def _check_value(op, query, key, value):
    if value.ndim < 2 or value.array.shape[-2] != key.array.shape[-2]:
        raise RuntimeError(f"{op}: key {_shape(key)} and value {_shape(value)} must agree in axis −2, Tk: each key "
                           f"has one value")
    if value.array.dtype != query.array.dtype:
        raise RuntimeError(f"{op}: expected query, key and value to have the same float dtype, got {query.dtype} "
                           f"and {value.dtype}; convert with .to(dtype)")


def _score_shape(op, query, key, value, attn_mask):
    """[..., Tq, Tk] of the scores; RuntimeError where the leading axes do not broadcast, or the mask not to the scores."""
    q, k, v = _shape(query), _shape(key), _shape(value)
    shape = (*q[:-1], k[-2])
    if not q[:-2] == k[:-2] == v[:-2]:
        try:
            shape = np.broadcast_shapes(q[:-2], k[:-2]) + shape[-2:]
            np.broadcast_shapes(shape[:-2], v[:-2])
        except ValueError:
            raise RuntimeError(f"{op}: the leading axes of query {q}, key {k} and value {v} do not broadcast; for fewer key and value "
                               f"heads than query heads pass enable_gqa=True") from None
    if attn_mask is None:
        return shape
    try:
        full = np.broadcast_shapes(shape, _shape(attn_mask))
    except ValueError:
        full = ()
    if full != shape:
        raise RuntimeError(f"{op}: attn_mask {_shape(attn_mask)} does not broadcast to the scores {shape} = [..., Tq, Tk]; a mask of valid "
                           f"keys [B, Tk] becomes valid_tokens[:, None, None, :]")
    return shape
