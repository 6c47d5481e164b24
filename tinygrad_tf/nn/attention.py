"""Attention layers: `MultiHeadAttention`, ours, and `MultiheadAttention`, PyTorch's, which differ in how a mask is meant.

A boolean mask of ours says what is there: `valid_tokens` (True = a real token), `allowed` (True = may attend).
"""
import math
from contextlib import contextmanager
from numbers import Integral

from ..arguments import checked_probability, described, optional_functions, optional_tensors, require_bools, require_tensors
from ..creation import empty, zeros
from ..dtypes import bool_
from ..ops.shape import cat
from ..tensor import Tensor
from . import functional as F
from . import init
from .layers import Linear
from .masked_attention import check_added, checked_allowed, weigh
from .masks import and_masks, sliding_window_mod
from .module import Module, Parameter
from .positions import checked_positions, count_positions


def split_heads(x, num_heads):
    """[B, T, H · Dh] → [B, H, T, Dh]"""
    B, T, C = x.shape
    return x.reshape(B, T, num_heads, C // num_heads).transpose(1, 2)


def join_heads(x):
    """[B, H, T, Dh] → [B, T, H · Dh]"""
    B, H, T, Dh = x.shape
    return x.transpose(1, 2).reshape(B, T, H * Dh)


def _check_heads(dim, num_heads, num_kv_heads, head_dim=None):
    sizes = dim, num_heads, num_kv_heads, *([] if head_dim is None else [head_dim])
    if not all(isinstance(n, Integral) for n in sizes):
        raise TypeError(f"the numbers of features, heads and key heads must be whole numbers, got {', '.join(map(repr, sizes))}")
    if head_dim is not None and min(dim, num_heads, head_dim) <= 0:
        raise ValueError(f"dim, num_heads and head_dim must be positive, got {dim}, {num_heads} and {head_dim}")
    if dim <= 0 or num_heads <= 0 or (head_dim is None and dim % num_heads):
        raise ValueError(f"positive dim must be divisible by positive num_heads, got dim={dim} and num_heads={num_heads}: every "
                         f"head takes dim / num_heads features")
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be divisible by positive num_kv_heads, got num_heads={num_heads} and "
                         f"num_kv_heads={num_kv_heads}: every key head serves num_heads / num_kv_heads query heads")


class MultiHeadAttention(Module):
    """O = concat_h(softmax(Q_h K_hᵀ / √Dh + M) V_h) W_Oᵀ + b_O,   Q, K, V = projections of x      (guide 8)

    x, O: [B, T, C]; each of the H heads has Dh = C / H features, or head_dim. One head is the layer of guide 7. With num_kv_heads <
    num_heads, groups of query heads share a key and value head (guide 10.4). `dropout` acts on the softmax weights, in training.

    rope            a RotaryEmbedding(head_dim): turns q and k, never v, by their positions (guide 10.1)
    relative_bias   a module, relative_bias(q_positions, k_positions) → [H, Tq, Tk] or [B, H, Tq, Tk], added to the scores: ALiBi, T5
    window          causal sliding window: a token sees itself and the window − 1 before it (guide 2.2)
    qkv_bias        whether q, k and v have a bias, where that is not `bias` (Qwen2: they have one, O has none)
    qk_norm         a function that makes a norm of so many features: q and k of each head are normalised before rope (Qwen3)
    """

    def __init__(self, dim, num_heads, num_kv_heads=None, bias=True, dropout=0.0, *, rope=None, relative_bias=None, window=None,
                 head_dim=None, qkv_bias=None, qk_norm=None):
        super().__init__()
        num_kv_heads, qkv_bias = num_heads if num_kv_heads is None else num_kv_heads, bias if qkv_bias is None else qkv_bias
        _check_heads(dim, num_heads, num_kv_heads, head_dim)
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.dropout, self.window = checked_probability("MultiHeadAttention", "dropout", dropout), window
        self.q_proj = Linear(dim, num_heads * self.head_dim, qkv_bias)
        self.k_proj = Linear(dim, num_kv_heads * self.head_dim, qkv_bias)
        self.v_proj = Linear(dim, num_kv_heads * self.head_dim, qkv_bias)
        self.out_proj = Linear(num_heads * self.head_dim, dim, bias)
        self.q_norm, self.k_norm = (None, None) if qk_norm is None else (qk_norm(self.head_dim), qk_norm(self.head_dim))
        self.rope, self.relative_bias = rope, relative_bias
        self._check_parts()

    def _check_parts(self):
        if self.window is not None:
            sliding_window_mod(self.window)
        for part, name, wanted in (self.rope, "head_dim", self.head_dim), (self.relative_bias, "num_heads", self.num_heads):
            if not (part is None or callable(part)):
                raise TypeError(f"MultiHeadAttention: rope must be a module like RotaryEmbedding({self.head_dim}), and relative_bias one "
                                f"like ALiBi({self.num_heads}), got {described(part)}")
            if getattr(part, name, wanted) != wanted:
                raise ValueError(f"MultiHeadAttention: its {name} is {wanted}, but that of {part} is {getattr(part, name)}")

    def forward(self, x, context=None, causal=False, valid_tokens=None, allowed=None, return_weights=False, cache=None, *,
                position_ids=None, mask_mod=None, score_mod=None):
        """O: [B, T, C], or (O, weights [B, H, T, Tk]) if return_weights. Tk: all keys, those of the cache included.

        context [B, Tk, C]      where keys and values come from, instead of x: cross-attention (guide 9.7); or their pair (k, v)
                                from `keys_and_values(context)`, which a decoder computes once
        causal                  no query sees a later key; after a cache, the queries are the last T of the Tk positions. In a model's
                                pass over a cache whose rows differ (generation/places.py) every query is causal anyway
        valid_tokens [B, Tk]    False keys are not seen; False queries (without context) give zeros, after out_proj
        allowed                 True = may attend: [T, Tk], [B, 1, T, Tk] or [B, H, T, Tk]
        mask_mod, score_mod     functions of F.attention. A key is seen if all of these masks allow it: one twice is harmless
        cache                   an object with `length`, the number of tokens that it holds, and update(k, v), which appends
                                [B, Hkv, T, Dh] and returns all keys and values; a call that fails sets `length` back
        position_ids            of the new tokens, [T] or [B, T], for rope, and without a cache for relative_bias. By default tokens
                                are counted, where valid_tokens is given the real ones alone

        A query without any key gives b_O, and passes no gradient to the scores.
        """
        require_bools("MultiHeadAttention", return_weights=return_weights)
        optional_functions("MultiHeadAttention", mask_mod=mask_mod, score_mod=score_mod)
        self._check_inputs(x, context, causal, cache)
        shape = (x.shape[0], self.num_heads, x.shape[1], self._number_of_keys(x, context, cache))
        ragged = _ragged_places(cache, allowed, mask_mod, score_mod)
        valid_tokens = _checked_tokens(valid_tokens, shape[0], shape[2 if ragged else 3], x.device)
        _check_position_ids(position_ids, context, x)
        queries, keys = self._positions(shape, valid_tokens, ragged, x.device)
        turn = self._turn(queries, position_ids, valid_tokens, shape)
        bias = self._bias(shape, *((queries, keys) if position_ids is None or cache is not None else (position_ids, position_ids)))
        if ragged:
            seen = {"allowed": ragged.allowed(x.device, self.window)}
        else:
            mask_mod, window = self._window_as(mask_mod, keys, valid_tokens, return_weights)
            seen = {"allowed": checked_allowed(allowed, shape), "mask_mod": mask_mod, "causal": causal or self.window is not None,
                    "window": window, "valid_tokens": valid_tokens}
        q = _normed(self.q_norm, split_heads(self.q_proj(x), self.num_heads))
        k, v = context if isinstance(context, tuple) else self.keys_and_values(x if context is None else context)
        if self.rope is not None:
            q, k = self.rope(q, **turn), self.rope(k, **turn)
        with _unchanged_on_error(cache):
            k, v = (k, v) if cache is None else cache.update(k, v)
            out = F.attention(q, k, v, bias=bias, score_mod=score_mod, dropout_p=self.dropout if self.training else 0.0,
                              return_weights=return_weights, **seen)
        out, weights = out if return_weights else (out, None)
        out = self.out_proj(join_heads(out))
        if valid_tokens is not None and context is None:        # after the projection, whose bias would fill them again
            real = valid_tokens if ragged else _of_queries(valid_tokens, shape)
            out = out.masked_fill(~real[..., None], 0.0)
        return (out, weights) if return_weights else out

    def keys_and_values(self, source):
        """(k, v), each [B, Hkv, Tk, Dh], of source [B, Tk, C], not turned by rope."""
        k, v = split_heads(self.k_proj(source), self.num_kv_heads), split_heads(self.v_proj(source), self.num_kv_heads)
        return _normed(self.k_norm, k), v

    def _uses_positions(self):
        return any(part is not None for part in (self.rope, self.relative_bias, self.window))

    def _positions(self, shape, valid_tokens, ragged, device):
        """Where the new tokens and all keys stand, padding not counted; None, None where nobody asks."""
        if not self._uses_positions():
            return None, None
        if ragged:
            return ragged.position_ids(device), ragged.key_ids(device)
        keys = count_positions(shape[3], valid_tokens, device)
        return _of_queries(keys, shape), keys

    def _turn(self, queries, position_ids, valid_tokens, shape):
        """What rope is told of where the new tokens stand: from the length of the cache on, unless there is more to say."""
        if position_ids is not None:
            return {"position_ids": position_ids}
        if valid_tokens is None and (queries is None or queries.ndim == 1):
            return {"offset": shape[3] - shape[2]}
        return {"position_ids": queries}

    def _number_of_keys(self, x, context, cache):
        if context is not None:
            return context[0].shape[2] if isinstance(context, tuple) else context.shape[1]
        if cache is None:
            return x.shape[1]
        if not (hasattr(cache, "length") and hasattr(cache, "update")):
            raise TypeError(f"MultiHeadAttention: a cache must have `length`, the number of tokens that it holds, and update(k, v), "
                            f"got {type(cache).__name__}; see generation.KVCache and its layer(i)")
        places = getattr(cache, "places", None)
        return cache.length + x.shape[1] if places is None else places.num_keys

    def _window_as(self, mask_mod, positions, valid_tokens, return_weights):
        """(mask_mod, window) for F.attention. The window counts real tokens: padding between them takes no place in it.

        Where none lies between them that is the window of places, but for padded queries, whose weights alone would tell.
        """
        if self.window is None or valid_tokens is None or (_is_one_run(valid_tokens.array) and not return_weights):
            return mask_mod, self.window
        window = sliding_window_mod(self.window)

        def window_of_tokens(b, h, q_idx, kv_idx):
            return window(b, h, positions[b, q_idx], positions[b, kv_idx])
        return window_of_tokens if mask_mod is None else and_masks(mask_mod, window_of_tokens), None

    def _bias(self, shape, queries, keys):
        """What relative_bias adds to the scores, to broadcast over shape = [B, H, T, Tk]."""
        if self.relative_bias is None:
            return None
        bias = self.relative_bias(queries, keys)
        bias = bias[None] if isinstance(bias, Tensor) and bias.ndim == 3 else bias
        check_added("relative_bias", bias, shape)
        return bias

    def _check_inputs(self, x, context, causal, cache):
        _check_types(x, context, causal)
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"MultiHeadAttention: x must be [B, T, C] with C={self.dim}, got {tuple(x.shape)}")
        if context is None:
            return
        if isinstance(context, tuple):
            _check_pair(context, x.shape[0], self.num_kv_heads, self.head_dim)
        elif context.ndim != 3 or context.shape[0] != x.shape[0] or context.shape[-1] != self.dim:
            raise ValueError(f"MultiHeadAttention: context must be [B, Tk, C] with B={x.shape[0]} and C={self.dim}, got "
                             f"{tuple(context.shape)}")
        if causal or cache is not None or self._uses_positions():
            raise ValueError("MultiHeadAttention: `causal`, `cache`, `window`, `rope` and `relative_bias` are for self-attention, but "
                             "`context` was given: its positions are those of another sequence; pass `allowed` to restrict what is seen")

    def extra_repr(self):
        shown = f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, dropout={self.dropout}"
        return shown if self.window is None else f"{shown}, window={self.window}"


def _normed(norm, x):
    return x if norm is None else norm(x)


def _of_queries(positions, shape):
    """Where the queries stand: they are the last T of the Tk keys.    [..., Tk] → [..., T],  shape = [B, H, T, Tk]"""
    return positions[..., shape[3] - shape[2]:]


def _is_one_run(valid):
    """True where the real tokens of every row stand side by side.    valid: bool array [B, T]"""
    begins = valid[:, 1:] & ~valid[:, :-1]
    return bool((begins.sum(axis=1) + valid[:, :1].sum(axis=1) <= 1).all())


def _ragged_places(cache, *by_index):
    """The `Places` of a model's pass in which rows hold different numbers of tokens, so that key j is not token j; else None."""
    places = getattr(cache, "places", None)
    if places is None or places.aligned:
        return None
    if any(restriction is not None for restriction in by_index):
        raise ValueError("MultiHeadAttention: `allowed`, `mask_mod` and `score_mod` speak of columns, and the rows of this cache differ in "
                         "length, or it rolls: read them with one cache a row, or without one")
    return places


@contextmanager
def _unchanged_on_error(cache):
    """Within it, an error makes the cache forget what came meanwhile: a score_mod runs when the keys are already in."""
    past = None if cache is None else cache.length
    try:
        yield
    except BaseException:
        if cache is not None:
            cache.length = past
        raise


def _check_types(x, context, causal):
    if not isinstance(x, Tensor):
        raise TypeError(f"MultiHeadAttention: x must be a float tensor [B, T, C], got {type(x).__name__}")
    if not isinstance(causal, bool):
        raise TypeError(f"MultiHeadAttention: causal must be a bool, True or False, got {described(causal)}; this layer is called as "
                        f"(x, context=None, causal=False), and PyTorch's nn.MultiheadAttention, with a small h, as (query, key, value)")
    for part in context if isinstance(context, tuple) else (context,):
        if not (isinstance(part, Tensor) or context is None):
            raise TypeError(f"MultiHeadAttention: context must be a tensor [B, Tk, C], or the pair (k, v) from keys_and_values, got "
                            f"{described(context)}")


def _check_pair(pair, B, Hkv, Dh):
    shapes = [tuple(t.shape) for t in pair]
    if len(shapes) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 4 or (*shapes[0][:2], shapes[0][3]) != (B, Hkv, Dh):
        raise ValueError(f"MultiHeadAttention: context as a pair must be (k, v) from keys_and_values, each [B, Hkv, Tk, Dh] with "
                         f"B={B}, Hkv={Hkv} and Dh={Dh}, got shapes {shapes}")


def _checked_tokens(valid_tokens, B, columns, device):
    """valid_tokens as booleans on the device of x; ValueError unless it is [B, columns]."""
    if valid_tokens is None:
        return None
    if not isinstance(valid_tokens, Tensor):
        raise TypeError(f"MultiHeadAttention: valid_tokens must be a boolean tensor [B, Tk], True = real, got {described(valid_tokens)}")
    if tuple(valid_tokens.shape) != (B, columns):
        raise ValueError(f"valid_tokens must have shape [B,T] = [{B}, {columns}], one entry for each key (cached ones included), got "
                         f"{tuple(valid_tokens.shape)}")
    if valid_tokens.dtype is not bool_ and not ((valid_tokens == 0) | (valid_tokens == 1)).all():
        raise ValueError(f"MultiHeadAttention: valid_tokens must be boolean, True = a real token, or 0 and 1, got other numbers in "
                         f"{described(valid_tokens)}; a mask that is added to the scores is the `bias` of F.attention")
    return valid_tokens.to(device=device, dtype=bool_)


def _check_position_ids(position_ids, context, x):
    if position_ids is None:
        return
    if context is not None:
        raise ValueError("MultiHeadAttention: `position_ids` are for self-attention, but `context` was given")
    checked_positions("MultiHeadAttention", x, position_ids)


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
        self.dropout = checked_probability("MultiheadAttention", "dropout", dropout)
        self.add_zero_attn, self.batch_first = add_zero_attn, batch_first
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
        require_tensors("MultiheadAttention", query=query, key=key, value=value)
        optional_tensors("MultiheadAttention", key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: is_causal=True needs attn_mask: it only says that the mask is causal; pass "
                               "attn_mask=ones(Tq, Tk, dtype=bool).triu(1)")
        batched = query.ndim == 3
        query, key, value = (self._batch_first(x, batched) for x in (query, key, value))
        self._check_inputs(query, key, value)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._project(query, key, value)
        attn_mask = self._merge_masks(attn_mask, key_padding_mask, q, key.shape[1], k.shape[2])
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            out, weights = weigh(q, k, v, attn_mask, dropout)
        else:
            weights, out = None, F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout)
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


def _check_mask(name, restriction, shape):
    if restriction.dtype is not bool_ and not restriction.is_floating_point():
        raise RuntimeError(f"MultiheadAttention: {name} must be boolean (True = blocked) or floating point (added), got "
                           f"{restriction.dtype}")
    if tuple(restriction.shape) != shape:
        raise RuntimeError(f"MultiheadAttention: {name} must have shape {shape}, got {tuple(restriction.shape)}")


def _as_added(restriction, dtype):
    """True = blocked as numbers to add: −inf where blocked. What is added already stays."""
    if restriction.is_floating_point():
        return restriction.to(dtype)
    return zeros(restriction.shape, dtype=dtype, device=restriction.device).masked_fill(restriction, -math.inf)
