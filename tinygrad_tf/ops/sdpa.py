"""One function, four ways to compute it: which of them runs, and PyTorch's `scaled_dot_product_attention` on top.

dense       ops/attention.py         the weights as one array [..., Tq, Tk], kept for backward
tiled       ops/flash_attention.py   a tile of scores at a time, in NumPy or CuPy; memory O(T)
cuda        ops/kernel_attention.py  the same in one CUDA kernel, for CuPy arrays
emulator    ops/kernel_attention.py  that very kernel, run on the CPU: slow, for a look at it

They differ by rounding, and in what they draw for dropout. By default the size of the scores decides.
"""
import math
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, reduce
from operator import and_
from typing import NamedTuple

import numpy as np

from ..arguments import checked_probability, described, require_bools, warn_caller, whole_number
from ..autograd import LOW, autocasted, constant
from ..backend import array_module, at_least_float32, check_one_device
from ..kernels.flash import LONGEST
from ..philox import draw_key
from .attention import (
    Attention,
    _bias,
    _check,
    _check_alone,
    _check_value,
    _score_shape,
    bias_of,
    checked_scale,
    group,
    group_mask,
    shared_heads,
)
from .dropout import draw_keep
from .flash_attention import AT_ONCE, Band, Plan, TiledAttention
from .index import where
from .kernel_attention import KernelAttention, refusal, widest_head

BACKENDS = ("dense", "tiled", "cuda", "emulator")
# Up to so many scores, [..., Tq, Tk], dense is chosen: where measured (docs/flash_attention.md) it is as fast as tiles, or faster.
DENSE_SCORES = 1 << 24                          # 64 MiB of float32
DENSE_SCORES_OF_A_BAND = 1 << 20                # causal or a window: tiles save work
DENSE_SCORES_ON_GPU = 1 << 18                   # an estimate
KEPT = 1 << 16                                  # scores up to which the bias of a band is kept
SMALL_PRODUCT = 10**6                           # multiplications up to which OpenBLAS packs nothing, with AVX-512: a third faster

_forced = ContextVar("sdpa_backend", default=())        # the _Forced around this place, the innermost last


class _Forced:
    """What one sdpa_backend asks for."""

    def __init__(self, name, tile):
        self.name, self.tile, self.ended = name, tile, False


@contextmanager
def sdpa_backend(name, tile=None):
    """Inside, scaled_dot_product_attention and all that is made of it run on one backend; None: the choice by size, as outside.

    name: "dense", "tiled", "cuda" (tensors on a GPU) or "emulator" (the same kernels on the CPU). RuntimeError at the call where it
    cannot serve what is asked. tile: (rows, keys) of a tile, for "tiled". It holds for this thread, and this task of asyncio.
    Weights that are returned and a score_mod need the whole table of scores, and are dense anywhere. Two that overlap without one
    being inside the other (in generators): the later one that still runs is obeyed, and each may end anywhere, in another thread too.
    """
    mine = _Forced(*_checked_backend(name, tile))
    _forced.set((*(f for f in _forced.get() if not f.ended), mine))
    try:
        yield
    finally:
        here = _forced.get()
        mine.ended = mine not in here           # closed by another thread or task: the list where it began cannot be reached
        _forced.set(tuple(f for f in here if f is not mine))


def _obeyed():
    """(name, tile) of the innermost sdpa_backend that has not ended; (None, None) where there is none."""
    for forced in reversed(_forced.get()):
        if not forced.ended:
            return forced.name, forced.tile
    return None, None


def forced_backend():
    """The name of the backend that is forced here; None where size decides."""
    return _obeyed()[0]


def _checked_backend(name, tile):
    if name is not None and name not in BACKENDS:
        raise ValueError(f"sdpa_backend: expected one of {', '.join(map(repr, BACKENDS))} or None, got {name!r}")
    if tile is None:
        return name, None
    if name != "tiled":
        raise ValueError(f"sdpa_backend: tile is for 'tiled', got tile={tile!r} with {name!r}")
    if not isinstance(tile, (tuple, list)) or len(tile) != 2 or not all(type(n) is int and n > 0 for n in tile):
        raise ValueError(f"sdpa_backend: tile must be two positive whole numbers, (rows, keys), got {tile!r}")
    return name, tuple(tile)


class Sight(NamedTuple):
    """Who sees whom: what all of these allow; and `bias`, which is added to the scores, and blocks where it is −inf."""
    band: Band = Band()
    allowed: object = None                      # bool tensor that broadcasts to [..., Tq, Tk]
    valid_tokens: object = None                 # bool tensor [B, Tk], B the first axis of query
    bias: object = None                         # float tensor that broadcasts to [..., Tq, Tk]
    mod: object = None                          # mod(rows, keys), of two ranges → bool tensor that broadcasts to [..., rows, keys]


# --- public -----------------------------------------------------------------------------------------------------------

def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
                                 query_offset=0, window=None):
    """softmax(scale · query keyᵀ + mask) value.    query: [..., Tq, Dh]   key: [..., Tk, Dh]   value: [..., Tk, Dv] → [..., Tq, Dv]

    attn_mask: bool, True attends, or float (float32 or query's dtype), added to the scores; broadcast to [..., Tq, Tk].
    is_causal: query i sees keys 0 to i (aligned top-left). scale: 1/√Dh by default. A query that sees nothing gets zeros.
    dropout_p applies whenever it is not 0.
    enable_gqa: query head h reads key head h // (Hq / Hk) and value head h // (Hq / Hv); heads are axis −3. Nothing is copied
    where Hk = Hv.
    query_offset: where query 0 stands among the keys, for is_causal and window; Tk − Tq aligns the ends.
    window: W, causal, the last W keys; or (left, right), so many keys to each side, None for all.   Neither is PyTorch's.
    """
    return _attention("scaled_dot_product_attention", query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, query_offset,
                      window)


def flash_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
                    query_offset=0, window=None, tile=None):
    """scaled_dot_product_attention in tiles, whatever its size: exact, in memory O(T).    tile: (rows, keys); None: what fits a cache

    Dropout is a stream of its own: see docs/flash_attention.md.                    (guide 10.5)
    """
    with sdpa_backend("tiled", tile):
        return _attention("flash_attention", query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, query_offset, window)


def _attention(op, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, query_offset, window):
    require_bools(op, is_causal=is_causal, enable_gqa=enable_gqa)
    dropout_p = checked_probability(op, "dropout_p", dropout_p)
    _check_alone(op, attn_mask, is_causal)
    is_float = attn_mask is not None and attn_mask.array.dtype != bool
    sight = Sight(band(op, is_causal, window, query_offset), None if is_float else attn_mask, bias=attn_mask if is_float else None)
    return attend(op, query, key, value, sight, dropout_p, scale, enable_gqa)


def band(op, causal=False, window=None, query_offset=0):
    """The `Band` of these arguments. ValueError or TypeError for a window or an offset that is none."""
    left, right = _sides(op, window)
    return Band(checked_offset(op, query_offset), left, 0 if causal else right)


def checked_offset(op, query_offset):
    """The position of query 0 as an int; ValueError for one that no backend counts to."""
    first = whole_number(op, "query_offset", query_offset)
    if not -LONGEST <= first <= LONGEST:
        raise ValueError(f"{op}: query_offset must lie within ±{LONGEST}, got {described(first)}")
    return first


def _sides(op, window):
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)):
        return whole_number(op, "window: the width", window, least=1) - 1, 0
    if len(window) != 2:
        raise ValueError(f"{op}: window must be a number of keys, or (left, right), got {window!r}")
    return tuple(None if n is None else whole_number(op, "each side of window", n, least=0) for n in window)


# --- the choice -------------------------------------------------------------------------------------------------------

def attend(op, query, key, value, sight, dropout_p=0.0, scale=None, enable_gqa=False, backend=None):
    """Attention of query, key and value under a `Sight`, on the backend that is given, or forced, or chosen."""
    query, key, value = autocasted(LOW, query, key, value)
    check_inputs(op, query, key, value, sight)
    scale = checked_scale(op, query, scale)
    if enable_gqa:
        shared_heads(op, query, key, value)
    else:
        _score_shape(op, query, key, value, None)
    if backend is None:
        backend, sight = choose(query, key, value, sight, dropout_p)
    if backend in ("cuda", "emulator"):
        return KernelAttention.apply(query, key, value, sight.valid_tokens, sight.band, scale)
    grouped = _grouped(op, query, key, value, sight) if enable_gqa else (query, key, value, with_axes(query, sight))
    shape = _checked_shape(op, *grouped)
    out = (_dense if backend == "dense" else _tiled)(*grouped, dropout_p, scale, shape)
    return out.flatten(-4, -3) if enable_gqa else out


def check_inputs(op, query, key, value, sight):
    """RuntimeError unless all are on one device, and query, key and value of one float dtype, and of sizes that agree."""
    masks = (sight.allowed, sight.valid_tokens, sight.bias)
    check_one_device(op, [x.array for x in (query, key, value, *masks) if x is not None])
    _check(op, query, key, sight.bias)
    _check_value(op, query, key, value)


def choose(query, key, value, sight, dropout_p=0.0):
    """(one of BACKENDS, the sight in the form that it takes). RuntimeError where one was forced that cannot."""
    forced, _ = _obeyed()
    on_gpu = array_module(query.array) is not np
    if forced in ("cuda", "emulator"):
        return forced, _for_kernel(forced, on_gpu, query, key, value, sight, dropout_p)
    if forced is not None:
        return forced, sight
    if math.prod(query.array.shape[:-1]) * key.array.shape[-2] <= _dense_scores(sight.band, dropout_p, on_gpu):
        return "dense", sight
    if on_gpu:
        as_keys = _keys_alone(query, key, sight)
        if _refusal(query, key, value, as_keys, dropout_p) is None:
            return "cuda", as_keys
        _warn_of_wide_heads(query, value)
    return "tiled", sight


def _dense_scores(who, dropout_p, on_gpu):
    """Up to how many scores dense is chosen. With dropout it is the longer, for dense draws what PyTorch draws."""
    if on_gpu:
        return DENSE_SCORES_ON_GPU
    return DENSE_SCORES if dropout_p or who.left is who.right is None else DENSE_SCORES_OF_A_BAND


def _for_kernel(forced, on_gpu, query, key, value, sight, dropout_p):
    if on_gpu != (forced == "cuda"):
        raise RuntimeError("sdpa_backend('cuda') is for tensors on a GPU, and query is on the CPU: move it with .to('cuda'), or run the "
                           "same kernels here with sdpa_backend('emulator')" if forced == "cuda" else
                           "sdpa_backend('emulator') runs the kernels on the CPU, and query is on a GPU: use sdpa_backend('cuda'), or move "
                           "it with .cpu()")
    sight = _keys_alone(query, key, sight)
    reason = _refusal(query, key, value, sight, dropout_p)
    if reason is not None:
        raise RuntimeError(f"sdpa_backend({forced!r}) cannot serve this call, because {reason}; sdpa_backend('tiled') can")
    return sight


def _refusal(query, key, value, sight, dropout_p):
    if sight.mod is not None:
        return "the kernels know no mask_mod"
    return refusal(query.array, key.array, value.array, sight.bias, sight.allowed, dropout_p)


def _keys_alone(query, key, sight):
    """A mask [B, 1, 1, Tk] says which keys are real: the kernels take it as valid_tokens [B, Tk]."""
    mask = sight.allowed
    if mask is None or sight.valid_tokens is not None or query.ndim != 4 or mask.array.shape[1:] != (1, 1, key.array.shape[-2]):
        return sight
    return sight._replace(allowed=None, valid_tokens=mask[:, 0, 0, :].expand(query.array.shape[0], -1))


_warned = set()                                 # the widths of heads that were told of


def _warn_of_wide_heads(query, value):
    """Says once in a process that heads are too wide for the kernels."""
    widest = max(query.array.shape[-1], value.array.shape[-1])
    if widest > widest_head() and not _warned:
        _warned.add(widest)
        warn_caller(f"scaled_dot_product_attention: heads of {widest} features are too wide for the CUDA kernels, which take "
                    f"{widest_head()}; tiles of ordinary operations are used")


# --- the backends -----------------------------------------------------------------------------------------------------

def with_axes(query, sight):
    """The sight with valid_tokens as a mask that has the axes of the scores, [B, 1, …, 1, Tk]."""
    valid = sight.valid_tokens
    return sight if valid is None else sight._replace(valid_tokens=valid[(slice(None), *[None] * (query.ndim - 2))])


def _grouped(op, query, key, value, sight):
    """All four with an axis for the groups of query heads."""
    shared, mod, sight = shared_heads(op, query, key, value), sight.mod, with_axes(query, sight)

    def grouped_mod(rows, keys):
        return group_mask(op, query, shared, mod(rows, keys))
    allowed, valid, bias = (group_mask(op, query, shared, m) for m in (sight.allowed, sight.valid_tokens, sight.bias))
    return *group(op, query, key, value), Sight(sight.band, allowed, valid, bias, mod and grouped_mod)


def _checked_shape(op, query, key, value, sight):
    """[..., Tq, Tk] of the scores, to which every mask broadcasts."""
    shape = _score_shape(op, query, key, value, None)
    for mask in (sight.allowed, sight.valid_tokens, sight.bias):
        if mask is not None:
            _score_shape(op, query, key, value, mask)
    return shape


def one_mask(query, key, sight):
    """All of a sight as one mask [..., Tq, Tk]: boolean, or added to the scores where there is a bias; None where nothing is hidden."""
    rows, keys = range(query.array.shape[-2]), range(key.array.shape[-2])
    masks = [sight.allowed, sight.valid_tokens, None if sight.mod is None else sight.mod(rows, keys)]
    arrays = [sight.band.allowed(rows, keys, array_module(query.array)), *(m.array for m in masks if m is not None)]
    arrays = [a for a in arrays if a is not None]
    if not arrays:
        return sight.bias
    allowed = constant(reduce(and_, arrays))
    return allowed if sight.bias is None else where(allowed, sight.bias, -math.inf)


def _dense(query, key, value, sight, dropout_p, scale, shape):
    keep = draw_keep(at_least_float32(query.array), dropout_p, shape) if dropout_p else None
    return Attention.apply(query, key, value, _one_bias(query, key, sight), keep, scale)


def _one_bias(query, key, sight):
    """What is added to the scores. That of a band alone is the same in all layers, and a small one is kept."""
    (band, *masks), size = sight, (query.array.shape[-2], key.array.shape[-2])
    if any(m is not None for m in masks) or not isinstance(query.array, np.ndarray) or math.prod(size) > KEPT:
        return _bias(query, key, one_mask(query, key, sight), False)
    bias = _bias_of_band(band, *size, query.array.dtype)
    return None if bias is None else constant(bias)


@lru_cache(maxsize=16)
def _bias_of_band(band, Tq, Tk, dtype):
    """0 where a query sees a key and −inf where not, read-only; None where each sees all."""
    allowed = band.allowed(range(Tq), range(Tk), np)
    return None if allowed is None else np.broadcast_to(bias_of(allowed, np.empty(0, dtype)), (Tq, Tk))


def _tiled(query, key, value, sight, dropout_p, scale, shape):
    def mod(rows, keys):
        return sight.mod(rows, keys).array
    plan = Plan(sight.band, _tile(query, value, shape), scale, (draw_key(), dropout_p) if dropout_p else None,
                sight.mod and mod)
    return TiledAttention.apply(query, key, value, sight.bias, sight.allowed, sight.valid_tokens, plan)


def _tile(query, value, shape):
    """The tile that is forced, or one whose products are fast.    shape: [..., Tq, Tk] of the scores

    CPU: products of a tile are small ones, for three heads or more; for fewer, what a call costs counts for more.
    """
    _, forced = _obeyed()
    if forced is not None:
        return forced
    heads, width = max(1, math.prod(shape[:-2])), 1 + max(query.array.shape[-1], value.array.shape[-1])
    if array_module(query.array) is not np:                 # a GPU wants few launches, not small tiles
        side = max(64, min(2048, 1 << max(1, math.isqrt((1 << 24) // heads)).bit_length() - 1))
        return side, side
    scores = SMALL_PRODUCT // width if heads > 2 else AT_ONCE // heads
    rows = _sixteens(min(math.isqrt(scores), 256, max(64, shape[-2] // 4)))
    return rows, _sixteens(min(scores // rows, 512))


def _sixteens(n):
    """n rounded down to a multiple of 16, the floats of a vector register; 16 at least."""
    return max(16, n // 16 * 16)
