"""Where each named activation stands in a model: under the names of TransformerLens, `blocks.0.attn.hook_pattern` and its like.

A `Point` ties a name to the input or the result of one module, so that what is captured and what is changed is the same thing. Names begin
with the path of the module: an encoder inside of a classifier has `encoder.blocks.0.…`.
"""
import difflib
from fnmatch import fnmatchcase
from typing import NamedTuple

from .. import nn
from ..models.encoder_decoder import DecoderBlock
from ..nn.moe import Router
from ..tensor import Tensor

SHORT = {"attention": "attn", "cross_attention": "cross_attn", "ffn": "mlp"}


class Point(NamedTuple):
    """side: "input" or "output" of `module`, or "inside": of the one operation that it runs, and is seen there.

    heads: so many heads lie side by side in the last axis, and are shown apart, [B, T, H, Dh]; item: which of the outputs it is, where
    there are several; instead: None, or what to change, since this cannot be.
    """
    name: str
    module: nn.Module
    side: str
    heads: int | None = None
    item: int | None = None
    instead: str | None = None

    def shown(self, value):
        """What is captured of the input or output `value`."""
        if isinstance(value, tuple):
            value = value[self.item or 0]
        return value if self.heads is None else value.unflatten(-1, (self.heads, value.shape[-1] // self.heads))

    def changed(self, value, function):
        """`value` with function(what is shown of it) in its place."""
        new = _checked(self.name, self.shown(value), function)
        new = new if self.heads is None else new.flatten(-2)
        return (new, *value[1:]) if isinstance(value, tuple) else new


def points(model):
    """{name: Point} of all that can be captured in `model`; TypeError for what is no module, ValueError where there is nothing."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain: expected a model, an nn.Module, got {type(model).__name__}")
    found = [point for path, module in model.named_modules() for point in _points_of(path, module)]
    if not found:
        raise ValueError(f"explain: {type(model).__name__} has no TransformerBlock and no MultiHeadAttention, in which there is something "
                         f"to be named")
    return {point.name: point for point in found}


def chosen(found, names):
    """Those of the points whose names match one of `names`: a name or glob, or several of them; None: all. ValueError for others."""
    if names is None:
        return found
    patterns = [names] if isinstance(names, str) else list(names)
    matches = {pattern: [name for name in found if fnmatchcase(name, pattern)] for pattern in patterns}
    for pattern, matching in matches.items():
        if not matching:
            raise ValueError(f"explain: {unknown(pattern, found)}")
    return {name: found[name] for name in found if any(name in matching for matching in matches.values())}


def unknown(name, names):
    """The sentence about a name that is none."""
    close = difflib.get_close_matches(str(name), list(names), n=3, cutoff=0.3)
    return f"nothing is named {name!r}; names like it: {', '.join(close) or 'none'}"


def layers(model):
    """The names of the self-attentions of the stack that writes the output: ["blocks.0.attn", …]; ValueError where there is none."""
    found = [name for name in attentions(model) if name.rpartition(".")[2] == "attn"]
    found = [name for name in found if not name.startswith("encoder.")] or found
    if not found:
        raise ValueError(f"explain: {type(model).__name__} has no block with attention")
    return found


def attentions(model):
    """{name: MultiHeadAttention} of all that there are."""
    return {label(path): module for path, module in model.named_modules() if isinstance(module, nn.MultiHeadAttention)}


def label(path):
    """The path of a module as names have it: "blocks.0.attention" is "blocks.0.attn"."""
    return ".".join(SHORT.get(part, part) for part in path.split(".")) if path else ""


# --- which module has which points --------------------------------------------------------------------------------------

def _points_of(path, module):
    last, prefix = path.rpartition(".")[2], label(path)
    prefix = prefix and prefix + "."
    if isinstance(module, nn.MultiHeadAttention):
        return _of_attention(prefix, module)
    if isinstance(module, nn.TransformerBlock):
        return _of_block(prefix, module)
    if isinstance(module, DecoderBlock):
        return _of_decoder_block(prefix, module)
    if isinstance(module, nn.FeedForward):
        return _hooks(prefix, hook_pre=(module.net[0], "output"), hook_post=(module.net[3], "input"))
    if isinstance(module, nn.GatedFeedForward):
        return _hooks(prefix, hook_pre=(module.gate_proj, "output"), hook_pre_linear=(module.up_proj, "output"),
                      hook_post=(module.down_proj, "input"))
    if isinstance(module, Router):
        prefix, fixed = label(path.rpartition(".")[0]) + ".", "hook_mlp_out"
        return [Point(f"{prefix}hook_expert_indices", module, "output", item=1, instead=fixed),
                Point(f"{prefix}hook_expert_weights", module, "output", item=2, instead=fixed)]
    above = label(path.rpartition(".")[0])
    if last == "embedding":
        return _of_embedding(above and above + ".", module)
    if last == "final_norm" and not isinstance(module, nn.Identity):
        return _hooks(above and above + ".", **{"ln_final.hook_normalized": (module, "output")})
    return []


def _hooks(prefix, **places):
    return [Point(prefix + name, *place) for name, place in places.items()]


def _of_attention(prefix, attention):
    H, Hkv = attention.num_heads, attention.num_kv_heads
    turned = [f"{prefix}hook_rot_q", f"{prefix}hook_rot_k"] if attention.rope is not None else []
    return [Point(f"{prefix}hook_q", attention.q_proj, "output", H),
            Point(f"{prefix}hook_k", attention.k_proj, "output", Hkv),
            Point(f"{prefix}hook_v", attention.v_proj, "output", Hkv),
            *(Point(name, attention, "inside", instead=name.replace("rot_", "")) for name in turned),
            Point(f"{prefix}hook_attn_scores", attention, "inside"),
            Point(f"{prefix}hook_pattern", attention, "inside", instead=f"{prefix}hook_attn_scores"),
            Point(f"{prefix}hook_z", attention.out_proj, "input", H)]


def _of_block(prefix, block):
    """pre-norm: x + attn_out = resid_mid, + mlp_out = resid_post.    post-norm: the same sums, each before its norm."""
    found = _hooks(prefix, hook_resid_pre=(block, "input"), **{"ln1.hook_normalized": (block.norm1, "output")},
                   hook_attn_out=(block.attention, "output"), **{"ln2.hook_normalized": (block.norm2, "output")},
                   hook_mlp_out=(block.ffn, "output"))
    return found + _sums(prefix, block, [("hook_resid_mid", block.norm2, "hook_attn_out"), ("hook_resid_post", None, None)],
                         [block.norm1, block.norm2])


def _of_decoder_block(prefix, block):
    norms = block.norm1, block.norm2, block.norm3
    found = _hooks(prefix, hook_resid_pre=(block, "input"), hook_attn_out=(block.attention, "output"),
                   hook_cross_attn_out=(block.cross_attention, "output"), hook_mlp_out=(block.ffn, "output"),
                   **{f"ln{i + 1}.hook_normalized": (norm, "output") for i, norm in enumerate(norms)})
    return found + _sums(prefix, block, [("hook_resid_mid", block.norm2, "hook_attn_out"),
                                         ("hook_resid_mid_cross", block.norm3, "hook_cross_attn_out"), ("hook_resid_post", None, None)],
                         list(norms))


def _sums(prefix, block, sums, norms):
    """The residual stream behind each sublayer: where pre-norm reads it next, and where post-norm norms it."""
    if not block.norm_first:
        return [Point(prefix + name, norm, "input") for (name, *_), norm in zip(sums, norms)] + [
            Point(f"{prefix}hook_normalized_resid_post", block, "output")]
    return [Point(prefix + name, block, "output") if norm is None else Point(prefix + name, norm, "input", instead=prefix + added)
            for name, norm, added in sums]


def _of_embedding(prefix, module):
    if isinstance(module, nn.Embedding) or not isinstance(getattr(module, "token", None), nn.Module):
        return [Point(f"{prefix}hook_embed", module, "output")]
    found = [Point(f"{prefix}hook_embed", module.token, "output")]
    for name, part in ("hook_pos_embed", getattr(module, "position", None)), ("hook_token_type_embed", getattr(module, "type", None)):
        if isinstance(part, nn.LearnedPositions):               # it adds the rows that it looks up
            found.append(Point(prefix + name, part, "inside", instead=f"{prefix}hook_embed"))
        elif isinstance(part, nn.Embedding):
            found.append(Point(prefix + name, part, "output"))
    return found


def _checked(name, old, function):
    """function(old), which must be such a tensor as old is."""
    new = function(old)
    if not isinstance(new, Tensor) or new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
        got = f"{new.dtype} {list(new.shape)} on {new.device}" if isinstance(new, Tensor) else type(new).__name__
        raise ValueError(f"explain: what takes the place of {name} must be a tensor like it, {old.dtype} {list(old.shape)} on "
                         f"{old.device}, got {got}")
    return new
