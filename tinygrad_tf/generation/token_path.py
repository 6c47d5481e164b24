"""One more token of each row through a model, on bare arrays: the formulas of nn/ without the engine around them.

A decode step is a few dozen small products. Around each of them the engine would make a Tensor, look for its history, and
check shapes that were right a token ago: together several times the work itself. So where all parts of a model are the
library's own, as it made them, `next_logits` says the same in NumPy; anything else takes the model's forward pass.

Looking a weight up takes as long as adding a bias. So each part becomes a function that holds its arrays, once: `linear(layer)`
is x ↦ x Wᵀ + b. They are the model's own arrays, not copies, and are looked up anew as soon as any module was changed.
"""
import functools
import math
from operator import attrgetter, is_
from weakref import WeakKeyDictionary

import numpy as np

from .. import nn
from ..autograd import constant, is_observed
from ..backend import casting
from ..models import Decoder, MiniGPT
from ..models.common import check_end
from ..nn.feedforward import GatedFeedForward
from ..nn.module import changes
from ..nn.positions import InputEmbedding, LearnedPositions
from ..ops.activation import Gelu, Relu, Silu
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
CLASSES, FORWARDS, forward_of, array_of = tuple(FORWARD), tuple(FORWARD.values()), attrgetter("forward"), attrgetter("array")


class Path:
    """A model as functions; `logits` is None where a part is not known."""

    def __init__(self, model):
        self.changes, self.parameters = changes(), list(model.parameters())
        self.arrays = [p.array for p in self.parameters]
        on_host = isinstance(self.arrays[0], np.ndarray) and self.arrays[0].dtype.char in "fd"
        self.logits = _logits(model) if on_host and _are_known([model]) else None

    def holds(self):
        """Whether nothing was changed since: no module, no class, and no parameter got another array."""
        return self.changes == changes() and all(map(is_, map(array_of, self.parameters), self.arrays))


_paths = WeakKeyDictionary()                    # model → its Path, which does not hold the model


def path_of(model):
    path = _paths.get(model)
    if path is None or not path.holds():
        path = _paths[model] = Path(model)
    return path


def serves(model, cache):
    """Whether all parts are known, without hooks, in float32 or float64 on the CPU; nobody watches, casts, or forces attention's backend.

    Where the cache is of another depth or dtype than the model, the forward pass has the words for it.
    """
    if type(model) not in (MiniGPT, Decoder) or is_observed() or casting.dtypes or forced_backend() is not None:
        return False
    if not all(map(is_, map(forward_of, CLASSES), FORWARDS)) or path_of(model).logits is None:
        return False
    layers = cache.layers
    return len(layers) == len(model.blocks) and layers[0].like is not None and layers[0].like[0][1] == model.lm_head.weight.array.dtype


def _are_known(modules):
    """Whether these are, and all below them."""
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
        if kind is nn.MultiHeadAttention:
            if not _is_plain_attention(state):
                return False
            modules += [children[name] for name in ("rope", "q_norm", "k_norm") if children.get(name) is not None]
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
            and type(state["_modules"].get("rope")) in (nn.RotaryEmbedding, type(None)) and "keys_and_values" not in state
            and all(type(state["_modules"].get(name)) in (nn.RMSNorm, type(None)) and state.get(name) is None
                    for name in ("q_norm", "k_norm")))


def next_logits(model, ids, cache):
    """Logits [B, V] after one more token of each row, which the cache then holds.    ids: int64 array [B]"""
    with cache.reading(len(ids), 1) as places, np.errstate(all="ignore"):
        check_end(model, places)
        return path_of(model).logits(ids, cache.layers, places)


# --- the parts, each as a function of x: [C] for one row, [B, C] for several -----------------------------------------------------

def _logits(model):
    enter, final_norm, lm_head = embedding(model), norm(model.final_norm), linear(model.lm_head)
    blocks, V = [block_of(block) for block in model.blocks], model.lm_head.out_features

    def apply(ids, layers, places):
        x, turns = enter(ids[0] if len(ids) == 1 else ids, places), {}
        for through, layer in zip(blocks, layers):
            x = through(x, layer, places, turns)
        return lm_head(final_norm(x)).reshape(-1, V)
    return apply


def embedding(model):
    """E_token[ids] + E_position[position]"""
    if type(model) is Decoder:
        table = model.embedding.weight.array
        return lambda ids, places: table[ids]
    tokens, positions = model.embedding.token.weight.array, model.embedding.position.weight.array
    return lambda ids, places: tokens[ids] + positions[places.start if places.aligned else places.queries[:, 0]]


def block_of(block):
    """Pre-norm or post-norm, as in `TransformerBlock`; dropout does nothing here."""
    attend, norm1, norm2, ffn = attention(block.attention), norm(block.norm1), norm(block.norm2), feed_forward(block.ffn)

    def pre(x, *where):
        x = x + attend(norm1(x), *where)
        x += ffn(norm2(x))
        return x

    def post(x, *where):
        x = norm1(x + attend(x, *where))
        return norm2(x + ffn(x))
    return pre if block.norm_first else post


def linear(layer):
    """y = x Wᵀ + b"""
    weight = layer.weight.array.T
    if layer.bias is None:
        return lambda x: x.dot(weight)
    bias = layer.bias.array

    def apply(x):
        y = x.dot(weight)
        y += bias
        return y
    return apply


def norm(layer):
    """LayerNorm or RMSNorm over C. A product with a vector of 1 / C is a mean, and the fastest there is."""
    weight, bias = (None if p is None else p.array for p in (layer._parameters["weight"], layer._parameters.get("bias")))
    centred, eps = type(layer) is nn.LayerNorm, layer.eps

    def apply(x):
        C, share = x.shape[-1], _share(x.shape[-1], x.dtype.char)
        if x.ndim == 1:                         # numbers in place of arrays [1, 1]: half of the time
            x = x - x.dot(share) if centred else x
            y = x * _scale_of(float(x.dot(x)) / C + _eps(eps, x), centred)
        else:
            x = x - (x @ share)[:, None] if centred else x
            r = 1 / np.sqrt((x * x) @ share + x.dtype.type(_eps(eps, x)))
            y = x * (np.where(r == 0, np.nan, r).astype(r.dtype) if centred else r)[:, None]        # σ² = ∞: zeros would pass for a result
        if weight is not None:
            y *= weight
        if bias is not None:
            y += bias
        return y
    return apply


def norm_of_heads(layer, Dh):
    """Of the Dh features of each head; nothing where there is no such norm."""
    if layer is None:
        return lambda x: x
    each = norm(layer)
    return lambda x: each(x.reshape(-1, Dh)).reshape(x.shape)


def _scale_of(variance, centred):
    """1 / σ of one row; NaN where σ² = ∞ and zeros would pass for a result."""
    r = variance ** -0.5 if variance else math.inf
    return math.nan if centred and r == 0 else r


def _eps(eps, x):
    return float(np.finfo(x.dtype).eps) if eps is None else eps


@functools.lru_cache(maxsize=8)
def _share(C, dtype):
    return np.full(C, 1 / C, dtype)


def feed_forward(ffn):
    if type(ffn) is GatedFeedForward:
        gate, up, down, activate = linear(ffn.gate_proj), linear(ffn.up_proj), linear(ffn.down_proj), activation_of(ffn.activation)
        return lambda x: down(activate(gate(x)) * up(x))
    first, activate, second = linear(ffn.net[0]), activation_of(ffn.net[1]), linear(ffn.net[3])
    return lambda x: second(activate(first(x)))


def activation_of(layer):
    """The operation's forward, without a node around it. An x that nobody else holds may be written to."""
    if getattr(layer, "approximate", "none") == "tanh":
        return _gelu_tanh
    op = {nn.GELU: Gelu, nn.SiLU: Silu, nn.ReLU: Relu}[type(layer)]()
    op.needs = (False,)
    return op.forward


def _gelu_tanh(x):
    """x · (1 + tanh u) / 2,  u = √(2/π) · x · (1 + 0.044715 x²), in one buffer"""
    u = x * x
    u *= 0.044715 * math.sqrt(2 / math.pi)
    u += math.sqrt(2 / math.pi)
    u *= x
    np.tanh(u, out=u)
    u += 1
    u *= 0.5
    u *= x
    return u


def attention(layer):
    """softmax(q Kᵀ / √Dh) V with a single query a row.

    The G = H / Hkv query heads that share a key head are the rows of one product: q [B, Hkv, G, Dh] · Kᵀ [B, Hkv, Dh, S].
    """
    q_proj, k_proj, v_proj, out_proj = (linear(part) for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj))
    H, Hkv, Dh, rope, window = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rope, layer.window
    scale, q_norm, k_norm = 1 / math.sqrt(Dh), norm_of_heads(layer.q_norm, Dh), norm_of_heads(layer.k_norm, Dh)

    def apply(x, cached, places, turns):
        q, k, v = q_norm(q_proj(x)), k_norm(k_proj(x)).reshape(-1, Hkv, 1, Dh), v_proj(x).reshape(-1, Hkv, 1, Dh)
        if rope is not None:
            q = q.reshape(-1, H, 1, Dh)
            angles = turns.get(rope) or turns.setdefault(rope, _angles(rope, q, places))
            q, k = (turn(a, *angles, rope.layout) for a in (q, k))
        K, V = cached.extend(k, v, places)
        q *= scale
        scores = q.reshape(-1, Hkv, H // Hkv, Dh) @ K.swapaxes(2, 3)                    # [B, Hkv, G, S]
        allowed = _allowed(window, places)
        if allowed is not None:
            scores = np.where(allowed, scores, -np.inf)
        scores -= np.maximum.reduce(scores, axis=3, keepdims=True)
        weights = np.exp(scores, out=scores)
        total = np.add.reduce(weights, axis=3, keepdims=True)
        out = weights @ V
        if allowed is not None and not np.isfinite(out).all():      # NaN in a slot that nobody sees: 0 · NaN
            out = weights @ np.where(allowed.swapaxes(2, 3), V, 0)
        out /= total                            # Dh numbers a head, where the weights are S
        return out_proj(out.reshape(x.shape[:-1] + (-1,)))
    return apply


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
