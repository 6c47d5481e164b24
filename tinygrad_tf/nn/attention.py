"""Attention layers: `MultiHeadAttention`, ours, and `MultiheadAttention`, PyTorch's, which differ in how a mask is meant.

A boolean mask of ours says what is there: `valid_tokens` (True = a real token), `allowed` (True = may attend).
"""
import math

from ..creation import empty, ones, zeros
from ..dtypes import bool_
from ..ops.attention import attention_weights
from ..ops.shape import cat
from ..tensor import Tensor
from . import functional as F
from . import init
from .layers import Linear
from .module import Module, Parameter


def split_heads(x, num_heads):
    """[B, T, H · Dh] → [B, H, T, Dh]"""
    B, T, C = x.shape
    return x.reshape(B, T, num_heads, C // num_heads).transpose(1, 2)


def join_heads(x):
    """[B, H, T, Dh] → [B, T, H · Dh]"""
    B, H, T, Dh = x.shape
    return x.transpose(1, 2).reshape(B, T, H * Dh)


def causal_allowed(Tq, Tk, device=None):
    """[Tq, Tk], True where key j is not later than query i; the queries are the last Tq of the Tk positions."""
    return ones(Tq, Tk, dtype=bool_, device=device).tril(Tk - Tq)


def weigh(q, k, v, attn_mask, dropout):
    """(A v, A) with A = dropout(softmax(q kᵀ / √Dh + mask)), the weights kept in the graph between the two.    A: [B, H, Tq, Tk]

    attn_mask is boolean (True = may attend) or added to the scores. Values that no query may see count as zeros: even
    NaN in them goes nowhere.
    """
    if k.shape[1] != q.shape[1]:                # query head h reads key head h // (H / Hkv)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is not None:
        allowed = attn_mask > -math.inf if attn_mask.is_floating_point() else attn_mask
        v = v.masked_fill(~allowed.any(dim=-2).unsqueeze(-1), 0.0)
    weights = F.dropout(attention_weights(q, k, attn_mask), dropout)
    return weights @ v, weights


def _check_heads(dim, num_heads, num_kv_heads):
    if dim <= 0 or num_heads <= 0 or dim % num_heads:
        raise ValueError(f"positive dim must be divisible by positive num_heads, got dim={dim} and num_heads={num_heads}: every "
                         f"head takes dim / num_heads features")
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be divisible by positive num_kv_heads, got num_heads={num_heads} and "
                         f"num_kv_heads={num_kv_heads}: every key head serves num_heads / num_kv_heads query heads")


class MultiHeadAttention(Module):
    """O = concat_h(softmax(Q_h K_hᵀ / √Dh + M) V_h) W_Oᵀ + b_O,   Q, K, V = projections of x      (guide 8)

    x, O: [B, T, C]; each of the H heads has Dh = C / H features. With num_kv_heads < num_heads, groups of query heads
    share a key and value head (guide 10.4). `dropout` acts on the softmax weights, in training.
    """

    def __init__(self, dim, num_heads, num_kv_heads=None, bias=True, dropout=0.0):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(dim, num_heads, num_kv_heads)
        if not 0 <= dropout <= 1:
            raise ValueError(f"MultiHeadAttention: dropout probability has to be between 0 and 1, but got {dropout}")
        self.dim, self.num_heads, self.num_kv_heads, self.head_dim = dim, num_heads, num_kv_heads, dim // num_heads
        self.dropout = dropout
        self.q_proj = Linear(dim, dim, bias)
        self.k_proj = Linear(dim, num_kv_heads * self.head_dim, bias)
        self.v_proj = Linear(dim, num_kv_heads * self.head_dim, bias)
        self.out_proj = Linear(dim, dim, bias)

    def forward(self, x, context=None, causal=False, valid_tokens=None, allowed=None, return_weights=False, cache=None):
        """O: [B, T, C], or (O, weights [B, H, T, Tk]) if return_weights. Tk: all keys, those of the cache included.

        context [B, Tk, C]      where keys and values come from, instead of x: cross-attention (guide 9.7)
        causal                  no query sees a later key; after a cache, the queries are the last T of the Tk positions
        valid_tokens [B, Tk]    False keys are not seen; False queries (without context) give zeros, after out_proj
        allowed                 True = may attend: [T, Tk], [B, 1, T, Tk] or [B, H, T, Tk]
        cache                   an object whose update(k, v) appends [B, Hkv, T, Dh] and returns all keys and values

        A query without any key gives b_O, and passes no gradient to the scores.
        """
        self._check_inputs(x, context, causal, cache)
        source = x if context is None else context
        q = split_heads(self.q_proj(x), self.num_heads)
        k = split_heads(self.k_proj(source), self.num_kv_heads)
        v = split_heads(self.v_proj(source), self.num_kv_heads)
        if cache is not None:
            k, v = cache.update(k, v)
        valid_tokens = _checked_tokens(valid_tokens, k)
        out, weights = self._attend(q, k, v, causal, _restrict(allowed, valid_tokens, q, k), return_weights)
        out = self.out_proj(join_heads(out))
        if valid_tokens is not None and context is None:        # after the projection, whose bias would fill them again
            out = out.masked_fill(~valid_tokens[:, -x.shape[1]:, None], 0.0)
        return (out, weights) if return_weights else out

    def _attend(self, q, k, v, causal, allowed, return_weights):
        """The heads' outputs [B, H, T, Dh], and the weights where they were asked for."""
        Tq, Tk = q.shape[-2], k.shape[-2]
        causal = causal and Tq > 1              # a single query is the last position, and sees every key
        if causal and (allowed is not None or Tq != Tk or return_weights):
            causal, past = False, causal_allowed(Tq, Tk, q.device)
            allowed = past if allowed is None else allowed & past
        dropout = self.dropout if self.training else 0.0
        if not return_weights:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=causal,
                                                  enable_gqa=self.num_kv_heads != self.num_heads), None
        return weigh(q, k, v, allowed, dropout)

    def _check_inputs(self, x, context, causal, cache):
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"MultiHeadAttention: x must be [B, T, C] with C={self.dim}, got {tuple(x.shape)}")
        if context is None:
            return
        if context.ndim != 3 or context.shape[0] != x.shape[0] or context.shape[-1] != self.dim:
            raise ValueError(f"MultiHeadAttention: context must be [B, Tk, C] with B={x.shape[0]} and C={self.dim}, got "
                             f"{tuple(context.shape)}")
        if causal or cache is not None:
            raise ValueError("MultiHeadAttention: `causal` and `cache` are for self-attention, but `context` was given: its positions "
                             "are those of another sequence; pass `allowed` to restrict what is seen")

    def extra_repr(self):
        return f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, dropout={self.dropout}"


def _checked_tokens(valid_tokens, k):
    """valid_tokens as booleans on the device of the keys; ValueError unless it has one entry for each key."""
    B, Tk = k.shape[0], k.shape[-2]
    if valid_tokens is None:
        return None
    if not isinstance(valid_tokens, Tensor) or tuple(valid_tokens.shape) != (B, Tk):
        raise ValueError(f"valid_tokens must have shape [B,T] = [{B}, {Tk}], one entry for each key (cached ones included), got "
                         f"{tuple(getattr(valid_tokens, 'shape', [type(valid_tokens).__name__]))}")
    return valid_tokens.to(device=k.device, dtype=bool_)


def _restrict(allowed, valid_tokens, q, k):
    """What both masks leave, to broadcast over [B, H, Tq, Tk]; None where there is neither."""
    if allowed is not None:
        _check_allowed(allowed, (*q.shape[:3], k.shape[-2]))
    if valid_tokens is None:
        return allowed
    keys = valid_tokens[:, None, None, :]
    return keys if allowed is None else keys & allowed


def _check_allowed(allowed, full):
    if not isinstance(allowed, Tensor) or allowed.dtype is not bool_:
        raise TypeError(f"MultiHeadAttention: allowed must be a boolean tensor (True = may attend), got "
                        f"{getattr(allowed, 'dtype', type(allowed).__name__)}")
    if allowed.ndim not in (2, 4) or any(n not in (1, m) for n, m in zip(allowed.shape[::-1], full[::-1])):
        raise ValueError(f"MultiHeadAttention: allowed must broadcast to [B, H, Tq, Tk] = {list(full)} with 2 or 4 axes, got "
                         f"{tuple(allowed.shape)}; for [B, Tq, Tk] insert the heads' axis: allowed[:, None]")


class MultiheadAttention(Module):
    """PyTorch's layer: its arguments, its parameter names, its conventions. The formula is that of `MultiHeadAttention`.

    Here True in a boolean mask *blocks*, a float mask is added to the scores, and sequences come first ([T, B, C]) unless
    batch_first. One matrix holds the three projections. A query without any key gives zeros where PyTorch may give NaN.
    """

    def __init__(self, embed_dim, num_heads, dropout=0.0, bias=True, add_bias_kv=False, add_zero_attn=False, kdim=None, vdim=None,
                 batch_first=False, device=None, dtype=None):
        super().__init__()
        _check_heads(embed_dim, num_heads, num_heads)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.add_zero_attn, self.batch_first = dropout, add_zero_attn, batch_first
        self.kdim, self.vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim

        def parameter(*shape):
            return Parameter(empty(*shape, device=device, dtype=dtype))

        together = self.kdim == self.vdim == embed_dim
        self.register_parameter("in_proj_weight", parameter(3 * embed_dim, embed_dim) if together else None)
        for name, width in ("q", embed_dim), ("k", self.kdim), ("v", self.vdim):
            self.register_parameter(f"{name}_proj_weight", None if together else parameter(embed_dim, width))
        self.register_parameter("in_proj_bias", parameter(3 * embed_dim) if bias else None)
        self.out_proj = Linear(embed_dim, embed_dim, bias, device, dtype)
        self.register_parameter("bias_k", parameter(1, 1, embed_dim) if add_bias_kv else None)
        self.register_parameter("bias_v", parameter(1, 1, embed_dim) if add_bias_kv else None)
        self._reset_parameters()

    def _reset_parameters(self):
        for weight in self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight:
            if weight is not None:
                init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            init.zeros_(self.in_proj_bias)
            init.zeros_(self.out_proj.bias)
        if self.bias_k is not None:
            init.xavier_normal_(self.bias_k)
            init.xavier_normal_(self.bias_v)

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True,
                is_causal=False):
        """(output, weights): [T, B, C] like query, and [B, Tq, Tk] or [B, H, Tq, Tk], or None unless need_weights.

        key_padding_mask [B, Tk] and attn_mask ([Tq, Tk] or [B · H, Tq, Tk]): boolean, True = blocked, or float, added.
        Without a batch, query is [Tq, C] and every B above is left out. `is_causal` is a hint, and needs attn_mask.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: is_causal=True needs attn_mask: it only says that the mask is causal; pass "
                               "attn_mask=ones(Tq, Tk, dtype=bool).triu(1)")
        batched = query.ndim == 3
        query, key, value = (self._batch_first(x, batched) for x in (query, key, value))
        self._check_inputs(query, key, value)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._project(query, key, value)
        mask = self._merge_masks(attn_mask, key_padding_mask, q, key.shape[1], k.shape[2])
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            out, weights = weigh(q, k, v, mask, dropout)
        else:
            weights, out = None, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        out = self.out_proj(join_heads(out))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _batch_first(self, x, batched):
        """[B, T, C], from any of the layouts that the layer takes."""
        if x.ndim != (3 if batched else 2):
            raise RuntimeError(f"MultiheadAttention: query, key and value must all be batched (3 axes) or all unbatched (2 axes), got "
                               f"shape {tuple(x.shape)}")
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _check_inputs(self, query, key, value):
        widths = tuple(x.shape[-1] for x in (query, key, value))
        if widths != (self.embed_dim, self.kdim, self.vdim):
            raise RuntimeError(f"MultiheadAttention: query, key and value must have {self.embed_dim}, {self.kdim} and {self.vdim} "
                               f"features, got {widths}")
        if key.shape[:2] != value.shape[:2] or key.shape[0] != query.shape[0]:
            raise RuntimeError(f"MultiheadAttention: key and value must have one length and the batch size of query; as [B, T] they "
                               f"are query {tuple(query.shape[:2])}, key {tuple(key.shape[:2])}, value {tuple(value.shape[:2])} "
                               f"(batch_first={self.batch_first})")

    def _project(self, query, key, value):
        """q, k, v: [B, H, T, Dh]; bias_k, bias_v and a row of zeros are further keys at the end."""
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
        B, C = q.shape[0], self.embed_dim
        if self.bias_k is not None:
            k, v = cat([k, self.bias_k.expand(B, 1, C)], dim=1), cat([v, self.bias_v.expand(B, 1, C)], dim=1)
        if self.add_zero_attn:
            row = zeros(B, 1, C, dtype=k.dtype, device=k.device)
            k, v = cat([k, row], dim=1), cat([v, row], dim=1)
        return tuple(split_heads(x, self.num_heads) for x in (q, k, v))

    def _merge_masks(self, attn_mask, key_padding_mask, q, Tk, all_keys):
        """One mask in the sense of scaled_dot_product_attention, from PyTorch's two; added keys are seen by all."""
        B, H, Tq, _ = q.shape
        masks = []
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, (Tq, Tk) if attn_mask.ndim == 2 else (B * H, Tq, Tk))
            masks.append(attn_mask if attn_mask.ndim == 2 else attn_mask.reshape(B, H, Tq, Tk))
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (B, Tk))
            masks.append(key_padding_mask[:, None, None, :])
        if not masks:
            return None
        if any(m.is_floating_point() for m in masks):
            added = sum(_as_added(m, q.dtype) for m in masks)
            return F.pad(added, (0, all_keys - Tk))
        blocked = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return ~F.pad(blocked, (0, all_keys - Tk))


def _check_mask(name, mask, shape):
    if mask.dtype is not bool_ and not mask.is_floating_point():
        raise RuntimeError(f"MultiheadAttention: {name} must be boolean (True = blocked) or floating point (added), got {mask.dtype}")
    if tuple(mask.shape) != shape:
        raise RuntimeError(f"MultiheadAttention: {name} must have shape {shape}, got {tuple(mask.shape)}")


def _as_added(mask, dtype):
    """A boolean mask as numbers to add: −inf where blocked."""
    if mask.is_floating_point():
        return mask.to(dtype)
    return zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
