"""`attention`: the one call in which heads, masks, biases and score functions compose. `MultiHeadAttention` is made of it."""
import math
from functools import reduce
from operator import and_

from ..creation import promote_types
from ..dtypes import bool_, float32
from ..ops.attention import attention_weights, checked_scale, scaled_dot_product_attention
from ..ops.dropout import dropout
from ..ops.index import where
from ..tensor import Tensor
from .masks import broadcasts_to, causal_mod, described, evaluate, first_query, indices, sliding_window_mod


def attention(query, key, value, allowed=None, bias=None, mask_mod=None, score_mod=None, causal=False, window=None, dropout_p=0.0,
              scale=None, query_offset=None, return_weights=False):
    """A V,  A = softmax over visible keys of score_mod(scale · Q Kᵀ) + bias.    query: [B, H, Tq, Dh] → [B, H, Tq, Dv]

    key [B, Hkv, Tk, Dh], value [B, Hkv, Tk, Dv]: query head h reads head h // (H / Hkv), without copies (GQA; Hkv = 1: MQA)
    visible         what all of these allow:  allowed  bool, [Tq, Tk] or broadcast to [B, H, Tq, Tk], True = may attend
                    mask_mod(b, h, q_idx, kv_idx) → bool;  causal  j ≤ i;  window  causal, the last `window` keys (nn/masks.py)
    score_mod       score_mod(score [B, H, Tq, Tk], b, h, q_idx, kv_idx) → score; differentiable, also in what it closes over
    bias            float, added after score_mod: [Tq, Tk] or broadcast to [B, H, Tq, Tk]; −inf blocks
    query_offset    position of query 0 among the keys. None: the queries are the last of them; 0: top-left, as in PyTorch
    dropout_p       acts whenever it is not 0.    scale: 1/√Dh by default
    return_weights  (A V, A) instead of A V, A [B, H, Tq, Tk] as it was after dropout, in the graph

    A query that sees no key gets zeros, and sends no gradient. ValueError or TypeError for what does not fit.
    """
    _check_heads(query, key, value)
    if not isinstance(causal, bool):
        raise TypeError(f"attention: causal must be a bool, True or False, got {described(causal)}; a mask goes to `allowed`")
    shape = (*query.shape[:3], key.shape[2])
    restriction = visible(shape, allowed, mask_mod, causal, window, query_offset, query.device)
    check_added("bias", bias, shape)
    if score_mod is not None:
        scores = _scores(query, key, scale, score_mod, shape, query_offset, restriction)
        bias = scores if bias is None else scores + bias
        # What follows computes softmax(Q Kᵀ + bias) V. Here all scores are in `bias`: Q and K go on without features, so Q Kᵀ = 0.
        query, key, scale = query.detach()[..., :0], key.detach()[..., :0], 1.0
    to_add = restriction
    if bias is not None:
        bias = bias.to(promote_types(query.dtype, float32))
        to_add = bias if restriction is None else where(restriction, bias, -math.inf)
    if return_weights:
        return weigh(query, key, value, to_add, dropout_p, scale)
    return scaled_dot_product_attention(query, key, value, to_add, dropout_p, scale=scale, enable_gqa=key.shape[1] != query.shape[1])


def weigh(query, key, value, attn_mask, dropout_p, scale=None):
    """(A V, A) with A = dropout(softmax(scale · Q Kᵀ + mask)), the weights kept in the graph between the two.    A: [B, H, Tq, Tk]

    attn_mask is boolean (True = may attend) or added to the scores.
    """
    H, Hkv = query.shape[1], key.shape[1]
    weights = dropout(attention_weights(query, key, attn_mask, scale=scale, enable_gqa=H != Hkv), dropout_p)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.detach() > -math.inf
    if attn_mask is not None and attn_mask.ndim > 2:
        attn_mask = attn_mask.unsqueeze(2) if attn_mask.shape[1] == 1 else attn_mask.unflatten(1, (Hkv, H // Hkv))
    return _mean(weights.unflatten(1, (Hkv, H // Hkv)), value.unsqueeze(2), attn_mask).flatten(1, 2), weights


def _mean(A, V, allowed):
    """A V, where NaN and infinity in V reach those alone who may see them: 0 · NaN would be NaN.    A: [B, Hkv, G, Tq, Tk]"""
    finite = V.isfinite()
    if allowed is None or finite.all():
        return A @ V
    seen = allowed.expand(*allowed.shape[:-1], V.shape[-2]).to(V.dtype) @ (~finite).to(V.dtype) > 0
    return where(seen, (A @ V).detach(), A @ V.masked_fill(~finite, 0.0))


def visible(shape, allowed=None, mask_mod=None, causal=False, window=None, query_offset=None, device=None):
    """What all restrictions leave, as bool that broadcasts to shape = [B, H, Tq, Tk]; None where there is no restriction."""
    Tq, Tk = shape[2:]
    mods = [mask_mod]
    if window is not None:
        mods.append(sliding_window_mod(window))
    elif causal and not (Tq == 1 and first_query(Tq, Tk, query_offset) >= Tk - 1):  # the last position sees every key
        mods.append(causal_mod)
    found = [evaluate(mod, shape, query_offset, device) for mod in mods if mod is not None]
    if allowed is not None:
        found.append(_checked_allowed(allowed, shape))
    return reduce(and_, found) if found else None


def _scores(query, key, scale, score_mod, shape, query_offset, restriction):
    """score_mod(scale · Q Kᵀ, …), at least in float32.    [B, H, Tq, Tk]"""
    scale = checked_scale(query, scale)
    if query.element_size() < 4:
        query, key = query.float(), key.float()
    scores = _products(query * scale, key)
    finite = scores.isfinite()
    if restriction is not None and not finite.all():        # in backward, 0 · NaN would bring a blocked key to the query
        clean = _products(*(where(x.isfinite(), x, 0.0) for x in (query * scale, key)))
        scores = where(finite, clean, where(restriction, scores.detach(), 0.0))
    scores = score_mod(scores, *indices(shape, query_offset, query.device))
    if not isinstance(scores, Tensor) or tuple(scores.shape) != shape:
        raise ValueError(f"attention: score_mod must return scores of the shape that it gets, [B, H, Tq, Tk] = {list(shape)}, got "
                         f"{described(scores)}")
    check_added("the result of score_mod", scores, shape)
    return scores


def _products(query, key):
    """Q Kᵀ, with key head h // (H / Hkv) for query head h.    [B, H, Tq, Tk]"""
    H, Hkv = query.shape[1], key.shape[1]
    return (query.unflatten(1, (Hkv, H // Hkv)) @ key.unsqueeze(2).transpose(-2, -1)).flatten(1, 2)


# --- checks -----------------------------------------------------------------------------------------------------------

def _check_heads(query, key, value):
    q, k, v = (tuple(x.shape) for x in (query, key, value))
    if not (len(q) == len(k) == len(v) == 4 and q[0] == k[0] and k[:3] == v[:3] and q[3] == k[3] and k[1] and q[1] % k[1] == 0):
        raise ValueError(f"attention: query [B, H, Tq, Dh], key [B, Hkv, Tk, Dh] and value [B, Hkv, Tk, Dv] must have 4 axes and agree, "
                         f"with Hkv a divisor of H; got query {q}, key {k}, value {v}. A single head is H = 1: x.unsqueeze(1)")


def _checked_allowed(allowed, shape):
    if not isinstance(allowed, Tensor) or allowed.dtype is not bool_:
        raise TypeError(f"attention: allowed must be a boolean tensor (True = may attend), got {described(allowed)}; numbers that are "
                        f"added to the scores are `bias`")
    _check_broadcast("allowed", allowed, shape)
    return allowed


def check_added(name, x, shape):
    """TypeError or ValueError unless x is None or a float tensor that can be added to scores [B, H, Tq, Tk]."""
    if x is None:
        return
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"attention: {name} must be a float tensor, which is added to the scores, got {described(x)}; a boolean mask "
                        f"(True = may attend) is `allowed`")
    _check_broadcast(name, x, shape)


def _check_broadcast(name, x, shape):
    if x.ndim not in (2, 4) or not broadcasts_to(x.shape, shape):
        raise ValueError(f"attention: {name} must broadcast to [B, H, Tq, Tk] = {list(shape)} with 2 or 4 axes, got {tuple(x.shape)}; for "
                         f"[B, Tq, Tk] insert the heads' axis: {name}[:, None]")
