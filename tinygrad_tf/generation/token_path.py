"""One more token of each row through a model, on bare arrays: the formulas of nn/ without the engine around them.

A decode step is a few dozen small products. Around each of them the engine would make a Tensor, look for its history, and
check shapes that were right a token ago: together several times the work itself. So where all parts of a model are the
library's own, as it made them, `next_logits` says the same in NumPy; anything else takes the model's forward pass.
"""
import functools
import math

import numpy as np

from .. import nn
from ..autograd import constant, is_observed
from ..models import Decoder, MiniGPT
from ..models.common import check_end
from ..nn.feedforward import GatedFeedForward
from ..nn.positions import InputEmbedding, LearnedPositions
from ..ops.activation import Gelu, GeluTanh, Relu, Silu
from ..ops.rotary import turn
from ..ops.sdpa import forced_backend

NORMS = {nn.LayerNorm, nn.RMSNorm}
ACTIVATIONS = {nn.GELU, nn.SiLU, nn.ReLU}
# What may stand where, by the names of the parts. Subclasses may do anything, and are not known.
PARTS = {
    MiniGPT: {"embedding": {InputEmbedding}, "blocks": {nn.ModuleList}, "final_norm": NORMS, "lm_head": {nn.Linear}},
    Decoder: {"embedding": {nn.Embedding}, "blocks": {nn.ModuleList}, "final_norm": NORMS, "lm_head": {nn.Linear}},
    InputEmbedding: {"token": {nn.Embedding}, "position": {LearnedPositions}},
    nn.TransformerBlock: {"attention": {nn.MultiHeadAttention}, "ffn": {nn.FeedForward, GatedFeedForward}, "norm1": NORMS, "norm2": NORMS,
                          "dropout": {nn.Dropout}},
    nn.MultiHeadAttention: {"q_proj": {nn.Linear}, "k_proj": {nn.Linear}, "v_proj": {nn.Linear}, "out_proj": {nn.Linear}},
    nn.FeedForward: {"net": {nn.Sequential}},
    nn.Sequential: {"0": {nn.Linear}, "1": ACTIVATIONS, "2": {nn.Dropout}, "3": {nn.Linear}},           # the net of FeedForward
    GatedFeedForward: {"gate_proj": {nn.Linear}, "up_proj": {nn.Linear}, "down_proj": {nn.Linear}, "activation": ACTIVATIONS,
                       "dropout": {nn.Dropout}},
}
LEAVES = {nn.Linear, nn.Dropout, nn.Embedding, LearnedPositions, nn.RotaryEmbedding, *NORMS, *ACTIVATIONS}
FORWARD = {kind: kind.forward for kind in {*PARTS, *LEAVES} if kind is not nn.ModuleList}       # as the library wrote them


def serves(model, cache):
    """Whether all parts are known, without hooks, in float32 or float64 on the CPU; and nobody watches, or forces attention's backend.

    Where the cache is of another depth or dtype than the model, the forward pass has the words for it.
    """
    if type(model) not in (MiniGPT, Decoder) or is_observed() or forced_backend() is not None or not _are_known([model]):
        return False
    weight, layers = model.lm_head.weight.array, cache.layers
    return (isinstance(weight, np.ndarray) and weight.dtype.char in "fd" and len(layers) == len(model.blocks)
            and layers[0].like is not None and layers[0].like[0][1] == weight.dtype)


def _are_known(modules):
    """Of these, and all below them. This is asked at every token, and so without a call for each."""
    while modules:
        module = modules.pop()
        state, kind = module.__dict__, type(module)
        if kind.forward is not FORWARD.get(kind) or state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state:
            return False
        children = state["_modules"]
        if kind in LEAVES:
            if children or (kind not in WITHOUT_WEIGHT and "weight" not in state["_parameters"]):
                return False
            continue
        if kind is nn.MultiHeadAttention and not _is_plain_attention(state):
            return False
        for name, kinds in PARTS[kind].items():
            child = children.get(name)
            if type(child) not in kinds:
                return False
            if type(child) is nn.ModuleList:
                blocks = child.__dict__["_modules"].values()
                if not all(type(block) is nn.TransformerBlock for block in blocks):
                    return False
                modules += blocks
            else:
                modules.append(child)
        if kind is nn.Sequential and len(children) != len(PARTS[kind]):
            return False
    return True


WITHOUT_WEIGHT = {nn.Dropout, nn.RotaryEmbedding, *ACTIVATIONS}


def _is_plain_attention(state):
    """Neither a bias nor a rotation of another kind; either may be a function, which is no module."""
    return (state.get("rope") is None and state.get("relative_bias") is None and state["_modules"].get("relative_bias") is None
            and type(state["_modules"].get("rope")) in (nn.RotaryEmbedding, type(None)) and "keys_and_values" not in state)


def next_logits(model, ids, cache):
    """Logits [B, V] after one more token of each row, which the cache then holds.    ids: int64 array [B]"""
    with cache.reading(len(ids), 1) as places, np.errstate(all="ignore"):
        check_end(model, places)
        x, turns = embed(model, ids, places), {}
        for block, layer in zip(model.blocks, cache.layers):
            x = through(block, x, layer, places, turns)
        return linear(model.lm_head, normed(model.final_norm, x))


def embed(model, ids, places):
    """E_token[ids] + E_position[position].    [B] → [B, C]"""
    if type(model) is Decoder:
        return model.embedding.weight.array[ids]
    table = model.embedding.position.weight.array
    return model.embedding.token.weight.array[ids] + table[places.start if places.aligned else places.queries[:, 0]]


def through(block, x, layer, places, turns):
    """x: [B, C]. Pre-norm or post-norm, as in `TransformerBlock`; dropout does nothing here."""
    parts = block._modules                          # as block.norm1, and five times as fast
    attend, norm1, norm2, ffn = parts["attention"], parts["norm1"], parts["norm2"], parts["ffn"]
    if block.norm_first:
        x = x + attention(attend, normed(norm1, x), layer, places, turns)
        return x + feed_forward(ffn, normed(norm2, x))
    x = normed(norm1, x + attention(attend, x, layer, places, turns))
    return normed(norm2, x + feed_forward(ffn, x))


def linear(layer, x):
    """y = x Wᵀ + b"""
    parameters = layer._parameters
    y = x @ parameters["weight"].array.T
    bias = parameters["bias"]
    if bias is not None:
        y += bias.array
    return y


def normed(norm, x):
    """LayerNorm or RMSNorm over C. A product with a vector of 1 / C is a mean, and the fastest there is."""
    share, parameters, centred = _share(x.shape[1], x.dtype.char), norm._parameters, type(norm) is nn.LayerNorm
    eps = np.finfo(x.dtype).eps if norm.eps is None else norm.eps
    if len(x) == 1:                                 # numbers in place of arrays [1, 1]: half of the time
        x = x - x[0] @ share if centred else x
        r = 1 / np.sqrt(x[0] @ x[0] / x.shape[1] + x.dtype.type(eps))
        y = x * (np.nan if centred and r == 0 else r)           # σ² = ∞: zeros would pass for a result
    else:
        x = x - (x @ share)[:, None] if centred else x
        r = 1 / np.sqrt((x * x) @ share + x.dtype.type(eps))
        y = x * (np.where(r == 0, np.nan, r).astype(r.dtype) if centred else r)[:, None]
    if parameters["weight"] is not None:
        y *= parameters["weight"].array
    if parameters.get("bias") is not None:
        y += parameters["bias"].array
    return y


@functools.lru_cache(maxsize=8)
def _share(C, dtype):
    return np.full(C, 1 / C, dtype)


def feed_forward(ffn, x):
    parts = ffn._modules
    if type(ffn) is GatedFeedForward:
        return linear(parts["down_proj"], activated(parts["activation"], linear(parts["gate_proj"], x)) * linear(parts["up_proj"], x))
    first, activation, _, second = parts["net"]
    return linear(second, activated(activation, linear(first, x)))


def activated(activation, x):
    """The operation itself, without a node around it."""
    op = {nn.GELU: Gelu, nn.SiLU: Silu, nn.ReLU: Relu}[type(activation)]()
    if getattr(activation, "approximate", "none") == "tanh":
        op = GeluTanh()
    op.needs = (False,)
    return op.forward(x)


def attention(layer, x, cached, places, turns):
    """softmax(q Kᵀ / √Dh + bias) V with a single query a row.    x: [B, C]

    The G = H / Hkv query heads that share a key head are the rows of one product: q [B, Hkv, G, Dh] · Kᵀ [B, Hkv, Dh, S].
    """
    B, Hkv, Dh, parts = len(x), layer.num_kv_heads, layer.head_dim, layer._modules
    q = linear(parts["q_proj"], x).reshape(B, -1, 1, Dh)
    k = linear(parts["k_proj"], x).reshape(B, Hkv, 1, Dh)
    v = linear(parts["v_proj"], x).reshape(B, Hkv, 1, Dh)
    rope = parts.get("rope")
    if rope is not None:
        angles = turns.get(rope) or turns.setdefault(rope, _angles(rope, q, places))
        q, k = (turn(a, *angles, rope.layout) for a in (q, k))
    K, V = cached.extend(k, v, places)
    q *= 1 / math.sqrt(Dh)
    scores = q.reshape(B, Hkv, -1, Dh) @ K.swapaxes(2, 3)                           # [B, Hkv, G, S]
    allowed = _allowed(layer.window, places)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    out = weights @ V
    if allowed is not None and not np.isfinite(out).all():          # NaN in a slot that nobody sees: 0 · NaN
        out = weights @ np.where(allowed.swapaxes(2, 3), V, 0)
    return linear(parts["out_proj"], out.reshape(B, -1))


def _angles(rope, q, places):
    at = {"offset": places.start} if places.aligned else {"position_ids": constant(places.queries)}
    return tuple(t.array for t in rope.turns(constant(q), **at))


def _allowed(window, places):
    """bool [B or 1, 1, 1, S], or None where the query sees all keys."""
    if not places.aligned:
        return places.mask(window)
    if window is None or window >= places.num_keys:
        return None
    return (np.arange(places.num_keys) >= places.num_keys - window)[None, None, None]
