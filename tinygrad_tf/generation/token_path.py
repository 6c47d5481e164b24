"""One more token of each row through a model, on bare arrays: the formulas of nn/ without the engine around them.

A decode step is a few dozen small products. Around each of them the engine would make a Tensor, look for its history, and
check shapes that were right a token ago: together several times the work itself. So where all parts of a model are the
library's own, as it made them, `next_logits` says the same in NumPy; anything else takes the model's forward pass.

Looking a weight up takes as long as adding a bias. So each part becomes a function that holds its arrays, once: `linear(layer)`
is x ↦ x Wᵀ + b. They are the model's own arrays, not copies, and are looked up anew as soon as any module was changed. Low-bit weights
stay low-bit: see `quantization/row_product.py`.
"""
import math
from operator import attrgetter, is_
from weakref import WeakKeyDictionary

import numpy as np

from .. import nn
from ..autograd import constant, is_observed
from ..backend import casting, quietly
from ..models import Decoder, MiniGPT
from ..models.common import check_end
from ..nn.feedforward import GatedFeedForward
from ..nn.module import changes
from ..nn.positions import InputEmbedding, LearnedPositions
from ..ops.activation import Gelu, Relu, Silu
from ..ops.rotary import turn
from ..ops.sdpa import forced_backend
from ..quantization.linear import QuantizedLinear
from ..quantization.row_product import RowProduct

LINEAR = {nn.Linear, QuantizedLinear}
NORMS = {nn.LayerNorm, nn.RMSNorm}
ACTIVATIONS = {nn.GELU, nn.SiLU, nn.ReLU}
# What may stand where, by the names of the parts. Subclasses may do anything, and are not known.
PARTS = {
    MiniGPT: {"embedding": {InputEmbedding}, "blocks": {nn.ModuleList}, "final_norm": NORMS, "lm_head": LINEAR},
    Decoder: {"embedding": {nn.Embedding}, "blocks": {nn.ModuleList}, "final_norm": NORMS, "lm_head": LINEAR},
    InputEmbedding: {"token": {nn.Embedding}, "position": {LearnedPositions}},
    nn.TransformerBlock: {"attention": {nn.MultiHeadAttention}, "ffn": {nn.FeedForward, GatedFeedForward}, "norm1": NORMS, "norm2": NORMS,
                          "dropout": {nn.Dropout}},
    nn.MultiHeadAttention: dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), LINEAR),
    nn.FeedForward: {"net": {nn.Sequential}},
    nn.Sequential: {"0": LINEAR, "1": ACTIVATIONS, "2": {nn.Dropout}, "3": LINEAR},                     # the net of FeedForward
    GatedFeedForward: {"gate_proj": LINEAR, "up_proj": LINEAR, "down_proj": LINEAR, "activation": ACTIVATIONS, "dropout": {nn.Dropout}},
}
LEAVES = {*LINEAR, nn.Dropout, nn.Embedding, LearnedPositions, nn.RotaryEmbedding, *NORMS, *ACTIVATIONS}
FORWARD = {kind: kind.forward for kind in {*PARTS, *LEAVES} if kind is not nn.ModuleList}       # as the library wrote them
CLASSES, FORWARDS, forward_of, array_of = tuple(FORWARD), tuple(FORWARD.values()), attrgetter("forward"), attrgetter("array")


class Path:
    """A model as functions; `logits` is None where a part is not known."""

    def __init__(self, model):
        self.changes, self.held = changes(), [*model.parameters(), *model.buffers()]
        self.arrays, self.dtype = [t.array for t in self.held], self.held[0].array.dtype
        on_host = isinstance(self.arrays[0], np.ndarray) and self.dtype.char in "fd"
        self.logits = _logits(model, self.dtype) if on_host and _are_known([model]) else None

    def holds(self):
        """Whether nothing was changed since: no module, no class, and no parameter or buffer got another array."""
        return self.changes == changes() and all(map(is_, map(array_of, self.held), self.arrays))


_paths = WeakKeyDictionary()                    # model → its Path, which does not hold the model


def path_of(model):
    path = _paths.get(model)
    if path is None or not path.holds():
        path = _paths[model] = Path(model)
    return path


def serves(model, cache):
    """Whether `next_logits` has an answer."""
    return _serving(model, cache) is not None


def _serving(model, cache):
    """The model's path, or None: all parts must be known, without hooks, in float32 or float64 on the CPU, and nobody may watch, cast, or
    force attention's backend.

    Where the cache is of another depth or dtype than the model, the forward pass has the words for it.
    """
    if type(model) not in (MiniGPT, Decoder) or is_observed() or casting.dtypes or forced_backend() is not None:
        return None
    if not all(map(is_, map(forward_of, CLASSES), FORWARDS)):
        return None
    path, like = path_of(model), cache.layers[0].like
    return path if path.logits and len(cache.layers) == len(model.blocks) and like is not None and like[0][1] == path.dtype else None


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


WITHOUT_WEIGHT = {QuantizedLinear, nn.Dropout, nn.RotaryEmbedding, *ACTIVATIONS}


def _is_plain_attention(state):
    """Neither a bias nor a rotation of another kind; either may be a function, which is no module."""
    return (state.get("rope") is None and state.get("relative_bias") is None and state["_modules"].get("relative_bias") is None
            and type(state["_modules"].get("rope")) in (nn.RotaryEmbedding, type(None)) and "keys_and_values" not in state
            and all(type(state["_modules"].get(name)) in (nn.RMSNorm, type(None)) and state.get(name) is None
                    for name in ("q_norm", "k_norm")))


def next_logits(model, ids, cache):
    """Logits [B, V] after one more token of each row, which the cache then holds; None where the path does not serve.    ids: int64 [B]"""
    path = _serving(model, cache)
    if path is None:
        return None
    with cache.reading(len(ids), 1) as places:
        check_end(model, places)
        return quietly(path.logits, ids, cache.layers, places)


# --- the parts, each as a function of x: [C] for one row, [B, C] for several -----------------------------------------------------

def _logits(model, dtype):
    enter, final_norm, lm_head = embedding(model), norm(model.final_norm, dtype), linear(model.lm_head)
    blocks, V = [block_of(block, dtype) for block in model.blocks], model.lm_head.out_features

    def apply(ids, layers, places):
        x, shared = enter(ids[0] if len(ids) == 1 else ids, places), {"ones": np.ones(places.num_keys, dtype)}
        for through, layer in zip(blocks, layers):
            x = through(x, layer, places, shared)
        return lm_head(final_norm(x)).reshape(-1, V)
    return apply


def embedding(model):
    """E_token[ids] + E_position[position]"""
    if type(model) is Decoder:
        table = model.embedding.weight.array
        return lambda ids, places: table[ids]
    tokens, positions = model.embedding.token.weight.array, model.embedding.position.weight.array
    return lambda ids, places: tokens[ids] + positions[places.start if places.aligned else places.queries[:, 0]]


def block_of(block, dtype):
    """Pre-norm or post-norm, as in `TransformerBlock`; dropout does nothing here."""
    attend, ffn = attention(block.attention, dtype), feed_forward(block.ffn, dtype)
    norm1, norm2 = norm(block.norm1, dtype), norm(block.norm2, dtype)

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
    if type(layer) is QuantizedLinear:
        return RowProduct(layer)
    weight = layer.weight.array.T
    if layer.bias is None:
        return lambda x: x.dot(weight)
    bias = layer.bias.array

    def apply(x):
        y = x.dot(weight)
        y += bias
        return y
    return apply


def norm(layer, dtype):
    """LayerNorm or RMSNorm over C. A product with a vector of 1 / C is a mean, and the fastest there is."""
    weight, bias = (None if p is None else p.array for p in (layer._parameters["weight"], layer._parameters.get("bias")))
    centred, C, number = type(layer) is nn.LayerNorm, layer.normalized_shape[-1], dtype.type
    eps, share = float(np.finfo(dtype).eps) if layer.eps is None else layer.eps, np.full(C, 1 / C, dtype)

    def apply(x):
        if x.ndim == 1:                         # numbers in place of arrays [1, 1]: half of the time
            x = x - x.dot(share) if centred else x
            y = x * number(_scale_of(float(x.dot(x)) / C + eps, centred))
        else:
            x = x - (x @ share)[:, None] if centred else x
            r = 1 / np.sqrt((x * x) @ share + number(eps))
            y = x * (np.where(r == 0, np.nan, r).astype(r.dtype) if centred else r)[:, None]        # σ² = ∞: zeros would pass for a result
        if weight is not None:
            y *= weight
        if bias is not None:
            y += bias
        return y
    return apply


def norm_of_heads(layer, Dh, dtype):
    """Of the Dh features of each head; nothing where there is no such norm."""
    if layer is None:
        return lambda x: x
    each = norm(layer, dtype)
    return lambda x: each(x.reshape(-1, Dh)).reshape(x.shape)


def _scale_of(variance, centred):
    """1 / σ of one row; NaN where σ² = ∞ and zeros would pass for a result."""
    r = variance ** -0.5 if variance else math.inf
    return math.nan if centred and r == 0 else r


def feed_forward(ffn, dtype):
    if type(ffn) is GatedFeedForward:
        gate, up, down, activate = linear(ffn.gate_proj), linear(ffn.up_proj), linear(ffn.down_proj), activation_of(ffn.activation, dtype)
        return lambda x: down(activate(gate(x)) * up(x))
    first, activate, second = linear(ffn.net[0]), activation_of(ffn.net[1], dtype), linear(ffn.net[3])
    return lambda x: second(activate(first(x)))


def activation_of(layer, dtype):
    """The operation's forward, without a node around it."""
    if getattr(layer, "approximate", "none") == "tanh":
        return gelu_tanh(dtype.type)
    op = {nn.GELU: Gelu, nn.SiLU: Silu, nn.ReLU: Relu}[type(layer)]()
    op.needs = (False,)
    return op.forward


def gelu_tanh(number):
    """x / (1 + e^(−2u)),  −2u = −√(8/π) · x · (1 + 0.044715 x²), in one buffer; a Python number beside an array takes longer than one
    of the array's dtype.
    """
    linear, cubic, one = map(number, (-math.sqrt(8 / math.pi), -math.sqrt(8 / math.pi) * 0.044715, 1))

    def apply(x):
        u = x * x
        u *= cubic
        u += linear
        u *= x
        np.exp(u, u)
        u += one
        return np.divide(x, u, u)
    return apply


def attention(layer, dtype):
    """softmax(q Kᵀ / √Dh) V with a single query a row.

    The G = H / Hkv query heads that share a key head are the rows of one product: q [B, Hkv, G, Dh] · Kᵀ [B, Hkv, Dh, S].
    """
    q_proj, k_proj, v_proj, out_proj = (linear(part) for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj))
    H, Hkv, Dh, rope, window = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rope, layer.window
    q_norm, k_norm = (norm_of_heads(part, Dh, dtype) for part in (layer.q_norm, layer.k_norm))
    scale, each = dtype.type(1 / math.sqrt(Dh)), (-1, Hkv, 1, Dh)

    def apply(x, cached, places, shared):
        q, k, v = q_norm(q_proj(x)), k_norm(k_proj(x)).reshape(each), v_proj(x).reshape(each)
        if rope is not None:
            q = q.reshape(-1, H, 1, Dh)
            angles = shared.get(rope) or shared.setdefault(rope, _angles(rope, q, places))
            q, k = (turn(a, *angles, rope.layout) for a in (q, k))
        K, V = cached.extend(k, v, places)
        q *= scale
        scores = q.reshape(-1, Hkv, H // Hkv, Dh) @ K.swapaxes(2, 3)                    # [B, Hkv, G, S]
        allowed = _allowed(window, places)
        if allowed is not None:
            scores = np.where(allowed, scores, -np.inf)
        weights, total = _exponentials(scores, shared["ones"])
        out = weights @ V
        if allowed is not None and not np.isfinite(out).all():      # NaN in a slot that nobody sees: 0 · NaN
            out = weights @ np.where(allowed.swapaxes(2, 3), V, 0)
        out /= total[..., None]                 # Dh numbers a head, where the weights are S
        return out_proj(out.reshape(x.shape[:-1] + (-1,)))
    return apply


def _exponentials(scores, ones):
    """(e^scores, their sums) up to a factor of each row. The largest is taken out only where a sum says that it matters: it seldom does."""
    weights = np.exp(scores)
    total = weights.dot(ones)
    sums = total.ravel().tolist()
    if 1e-15 < min(sums) and max(sums) < 1e15:
        return weights, total
    weights = np.exp(scores - np.maximum.reduce(scores, axis=3, keepdims=True))
    return weights, weights.dot(ones)


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
