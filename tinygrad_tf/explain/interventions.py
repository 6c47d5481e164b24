"""Changing what flows, to see what follows: `intervene`, and heads that are switched off."""
from contextlib import ExitStack, contextmanager
from numbers import Integral

import numpy as np

from ..creation import as_tensor
from ..dtypes import bool_
from ..generation.inference import inference
from ..ops.index import where
from .points import attentions, chosen, layers, points, unknown


@contextmanager
def intervene(model, changes):
    """Within it, each activation that `changes`, {name or glob: function}, names becomes function(value): a tensor like it.

    `hook_attn_scores` are those before the masks, which hide afterwards what they hide; −inf keeps a head from looking. What only shows
    a sum or a result, as `hook_resid_mid` of pre-norm, cannot be changed: ValueError says what can. They nest; the inner one comes later.
    """
    found = points(model)
    steps = [(point, function) for name, function in changes.items() for point in chosen(found, name).values()]
    for point, _ in steps:
        if point.instead is not None:
            raise ValueError(f"intervene: {point.name} only shows what comes of other activations; change {point.instead}")
    with ExitStack() as stack:
        for point, function in steps:
            stack.enter_context(_hooked(point, function))
        yield


def run_with(model, changes, *inputs, **kwargs):
    """model(*inputs, **kwargs) within `intervene(model, changes)`."""
    with intervene(model, changes):
        return model(*inputs, **kwargs)


def _hooked(point, function):
    if point.side == "output":
        return point.module.register_forward_hook(lambda _, args, out: point.changed(out, function))

    def changed_input(_, args, kwargs):
        if point.side == "inside":
            return args, {**kwargs, "score_mod": _after(kwargs.get("score_mod"), point, function)}
        if args:
            return (point.changed(args[0], function), *args[1:]), kwargs
        return args, {**kwargs, "x": point.changed(kwargs["x"], function)}
    return point.module.register_forward_pre_hook(changed_input, with_kwargs=True)


def _after(score_mod, point, function):
    """The score_mod that there may be, and then the function."""
    def changed(scores, *places):
        return point.changed(scores if score_mod is None else score_mod(scores, *places), function)
    return changed


# --- heads ----------------------------------------------------------------------------------------------------------------

def ablate_heads(model, heads, mean_of=None):
    """A context within which these heads, {(layer, head), …}, write zeros; or, with mean_of, what they write on average.

    layer: a number, or the name of an attention, "encoder.blocks.0.attn". mean_of: a `Captured` with the `hook_z` of typical texts, whose
    real tokens count. Zeros are a value that later layers may never have met; the mean takes away what depends on the text.
    """
    by_layer = {}
    for layer, head in heads:
        by_layer.setdefault(_name_of_layer(model, layer), set()).add(head)
    return intervene(model, {f"{name}.hook_z": _without(_flags(model, name, which), _means(mean_of, name))
                             for name, which in by_layer.items()})


def _name_of_layer(model, layer):
    numbered = isinstance(layer, Integral)
    names = layers(model) if numbered else list(attentions(model))
    if numbered and not 0 <= layer < len(names):
        raise IndexError(f"ablate_heads: there is no layer {layer}; the model has layers 0 to {len(names) - 1}")
    if numbered:
        return names[layer]
    if layer not in names:
        raise ValueError(f"ablate_heads: {unknown(layer, names)}")
    return layer


def _flags(model, name, heads):
    """True for the heads that are switched off.    [H, 1]"""
    H = attentions(model)[name].num_heads
    wrong = [head for head in heads if not (isinstance(head, Integral) and 0 <= head < H)]
    if wrong:
        raise IndexError(f"ablate_heads: {name} has heads 0 to {H - 1}, got {wrong}")
    return np.isin(np.arange(H), list(heads))[:, None]


def _means(captured, name):
    """The mean of z [B, T, H, Dh] over the real tokens.    [H, Dh], or 0.0"""
    if captured is None:
        return 0.0
    z, real = captured[f"{name}.hook_z"].detach(), captured.valid_tokens.get(name)
    rows = z.flatten(0, 1) if real is None else z[real.to(dtype=bool_)]
    if not len(rows):
        raise ValueError("ablate_heads: mean_of has no real token, of which a mean could be taken")
    return rows.mean(dim=0)


def _without(off, mean):
    def changed(z):
        new = mean if isinstance(mean, float) else mean.to(device=z.device, dtype=z.dtype).expand(z.shape)
        return where(as_tensor(off, device=z.device), new, z)
    return changed


def head_importance(model, *inputs, loss=None, mean_of=None, **kwargs):
    """By how much the loss rises when one head is switched off, in evaluation mode.    float64 array [L, H]

    loss: a function of the model's output; by default the second of (logits, loss), for which the call needs targets. Below 0: without
    that head the model is better. Heads that do the same work each count for nothing: switch off pairs too before you say so.
    """
    measure = _second if loss is None else loss

    def loss_without(heads):
        with ablate_heads(model, heads, mean_of):
            return float(measure(model(*inputs, **kwargs)))
    names = layers(model)
    with inference(model):
        whole = loss_without(())
        return np.array([[loss_without([(name, h)]) - whole for h in range(attentions(model)[name].num_heads)] for name in names])


def _second(output):
    if not (isinstance(output, tuple) and len(output) > 1 and output[1] is not None):
        raise ValueError("head_importance: the model returned no loss; give it targets, or pass loss, a function of its output")
    return output[1]
