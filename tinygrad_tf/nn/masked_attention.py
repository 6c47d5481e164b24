"""`attention`: the one call in which heads, masks, biases and score functions compose. `MultiHeadAttention` is made of it."""
import math

from ..arguments import checked_probability, described, optional_functions, require_bools
from ..autograd import LOW, autocasted, without_autocast
from ..creation import promote_types
from ..dtypes import bool_, float32
from ..ops.attention import attention_weights, checked_scale
from ..ops.dropout import dropout
from ..ops.index import where
from ..ops.linear import matmul
from ..ops.sdpa import Sight, attend, band, check_inputs, one_mask, with_axes
from ..tensor import Tensor
from .masks import broadcasts_to, evaluate, first_query, indices


def attention(query, key, value, allowed=None, bias=None, mask_mod=None, score_mod=None, causal=False, window=None, dropout_p=0.0,
              scale=None, query_offset=None, return_weights=False, valid_tokens=None):
    """A V,  A = softmax over visible keys of score_mod(scale · Q Kᵀ) + bias.    query: [B, H, Tq, Dh] → [B, H, Tq, Dv]

    key [B, Hkv, Tk, Dh], value [B, Hkv, Tk, Dv]: query head h reads head h // (H / Hkv), without copies (GQA; Hkv = 1: MQA)
    visible         what all of these allow:  allowed  bool, [Tq, Tk] or broadcast to [B, H, Tq, Tk], True = may attend
                    valid_tokens  bool [B, Tk], True = a real key;  mask_mod(b, h, q_idx, kv_idx) → bool;  causal  j ≤ i
                    window  W: causal, the last W keys; or (left, right): so many keys to each side, None for all
    score_mod       score_mod(score [B, H, Tq, Tk], b, h, q_idx, kv_idx) → score; differentiable, also in what it closes over
    bias            float, added after score_mod: [Tq, Tk] or broadcast to [B, H, Tq, Tk]; −inf blocks
    query_offset    position of query 0 among the keys. None: the queries are the last of them; 0: top-left, as in PyTorch
    dropout_p       acts whenever it is not 0.    scale: 1/√Dh by default
    return_weights  (A V, A) instead of A V, A [B, H, Tq, Tk] as it was after dropout, in the graph

    Large scores are computed in tiles, and [Tq, Tk] is never there as a whole (ops/sdpa.py): neither the scores nor a mask, but with
    score_mod and return_weights. A query that sees no key gets zeros, and sends no gradient. ValueError or TypeError for what does
    not fit.
    """
    optional_functions("attention", mask_mod=mask_mod, score_mod=score_mod)
    require_bools("attention", return_weights=return_weights)
    dropout_p = checked_probability("attention", "dropout_p", dropout_p)
    _check_heads(query, key, value)
    query, key, value = autocasted(LOW, query, key, value)
    shape = (*query.shape[:3], key.shape[2])
    sight = _sight(shape, allowed, bias, valid_tokens, mask_mod, causal, window, query_offset, query)
    if return_weights or score_mod is not None:
        check_inputs("attention", query, key, value, sight)
    if score_mod is not None:
        restriction = one_mask(query, key, with_axes(query, sight._replace(bias=None)))
        scores = _scores(query, key, scale, score_mod, shape, query_offset, restriction)
        sight = sight._replace(bias=scores if sight.bias is None else scores + sight.bias)
        # What follows computes softmax(Q Kᵀ + bias) V. Here all scores are in `bias`: Q and K go on without features, so Q Kᵀ = 0.
        query, key, scale = query.detach()[..., :0], key.detach()[..., :0], 1.0
    if return_weights:
        return weigh(query, key, value, one_mask(query, key, with_axes(query, sight)), dropout_p, scale)
    backend = None if score_mod is None else "dense"
    return attend("attention", query, key, value, sight, dropout_p, scale, key.shape[1] != query.shape[1], backend)


def _sight(shape, allowed, bias, valid_tokens, mask_mod, causal, window, query_offset, query):
    """The restrictions of a call, checked; none of them is made [Tq, Tk] here."""
    if not isinstance(causal, bool):
        raise TypeError(f"attention: causal must be a bool, True or False, got {described(causal)}; a mask goes to `allowed`")
    check_added("bias", bias, shape)
    first = first_query(*shape[2:], query_offset, "attention")

    def mod(rows, keys):
        return evaluate(mask_mod, shape, first, query.device, rows, keys)
    return Sight(band("attention", causal, window, first), checked_allowed(allowed, shape),
                 None if valid_tokens is None else _checked_valid(valid_tokens, shape),
                 None if bias is None else bias.to(promote_types(query.dtype, float32)), None if mask_mod is None else mod)


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


def _scores(query, key, scale, score_mod, shape, query_offset, restriction):
    """score_mod(scale · Q Kᵀ, …), at least in float32.    [B, H, Tq, Tk]"""
    scale, dtypes = checked_scale("attention", query, scale), [query.dtype, float32]
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
    if scores.dtype not in dtypes:
        raise RuntimeError(f"attention: score_mod must return scores of the dtype that it gets, {query.dtype}, got {scores.dtype}; convert "
                           f"with .to(score.dtype)")
    return scores


def _products(query, key):
    """Q Kᵀ, with key head h // (H / Hkv) for query head h.    [B, H, Tq, Tk]"""
    H, Hkv = query.shape[1], key.shape[1]
    return without_autocast(matmul, query.unflatten(1, (Hkv, H // Hkv)), key.unsqueeze(2).transpose(-2, -1)).flatten(1, 2)


# --- checks -----------------------------------------------------------------------------------------------------------

def _check_heads(query, key, value):
    q, k, v = (tuple(x.shape) for x in (query, key, value))
    if not (len(q) == len(k) == len(v) == 4 and q[0] == k[0] and k[:3] == v[:3] and q[3] == k[3] and k[1] and q[1] % k[1] == 0):
        raise ValueError(f"attention: query [B, H, Tq, Dh], key [B, Hkv, Tk, Dh] and value [B, Hkv, Tk, Dv] must have 4 axes and agree, "
                         f"with Hkv a divisor of H; got query {q}, key {k}, value {v}. A single head is H = 1: x.unsqueeze(1)")


def checked_allowed(allowed, shape):
    """`allowed`, which is None or a boolean tensor that broadcasts to shape = [B, H, Tq, Tk]; TypeError or ValueError else."""
    if allowed is None:
        return None
    if not isinstance(allowed, Tensor) or allowed.dtype is not bool_:
        raise TypeError(f"attention: allowed must be a boolean tensor (True = may attend), got {described(allowed)}; numbers that are "
                        f"added to the scores are `bias`")
    _check_broadcast("allowed", allowed, shape)
    return allowed


def _checked_valid(valid_tokens, shape):
    if not isinstance(valid_tokens, Tensor) or valid_tokens.dtype is not bool_ or tuple(valid_tokens.shape) != (shape[0], shape[3]):
        raise ValueError(f"attention: valid_tokens must be a boolean tensor [B, Tk] = [{shape[0]}, {shape[3]}], True = a real key, got "
                         f"{described(valid_tokens)}")
    return valid_tokens


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
