"""What the models share: first weights, positions in padded rows, the loss, and the checks of their inputs."""
from contextlib import contextmanager

from .. import nn
from ..arguments import optional_tensors, require_tensors
from ..nn import functional as F
from ..nn.masks import packing_mod
from ..nn.moe import GroupedLinear, Router
from ..nn.positions import count_in_segments, count_positions
from ..utils.checkpoint import checkpoint


def init_weights(module):
    """Linear and Embedding weights from N(0, 0.02²), biases 0; for `Module.apply`. Experts and routers likewise.       (guide 13.2)"""
    if isinstance(module, (nn.Linear, nn.Embedding, GroupedLinear, Router)):
        nn.init.normal_(module.weight, mean=0.0, std=0.02)
    if isinstance(module, (nn.Linear, GroupedLinear)) and module.bias is not None:
        nn.init.zeros_(module.bias)


def device_of_model(model):
    """Where its parameters are, and so its inputs have to be."""
    return next(model.parameters()).device


def positions_of(tokens, valid_tokens=None, past=0, segment_ids=None):
    """Where each of the new tokens [B, T, …] stands after `past` earlier ones, padding not counted; in a packed row, within its text."""
    B, T = tokens.shape[:2]
    if segment_ids is not None:
        return count_in_segments(segment_ids, valid_tokens)
    return count_positions(past + T, valid_tokens, tokens.device).expand(B, past + T)[:, past:]


def next_token_loss(logits, targets):
    """Mean of −ln softmax(logits)[target] over the targets that are not −100.    logits: [B, T, V_vocab]  targets: [B, T]"""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def run_block(model, block, x, **options):
    """block(x, **options); with `model.checkpoint_blocks`, backward runs it again and nothing but x is kept for it."""
    return checkpoint(block, x, **options) if model.checkpoint_blocks else block(x, **options)


@contextmanager
def reading(model, token_ids, targets=None, valid_tokens=None, position_ids=None, cache=None, segment_ids=None):
    """The pass of `model` over token_ids: yields (position_ids, valid_tokens) for its embedding and its blocks, all checked.

    With a cache, valid_tokens are then those of the new tokens; they count in the cache when the pass has come to its end.
    In packed rows a negative segment is padding. ValueError, and nothing is changed, where something does not fit.
    """
    check_inputs(model, token_ids, targets, valid_tokens, cache, position_ids)
    B, T = token_ids.shape
    if cache is None:
        check_length(model, B, T, valid_tokens)
        if segment_ids is not None:
            valid_tokens = _real_in_segments(model, token_ids, segment_ids, valid_tokens)
        yield positions_of(token_ids, valid_tokens, 0, segment_ids) if position_ids is None else position_ids, valid_tokens
        return
    if segment_ids is not None:
        raise ValueError(f"{type(model).__name__}: segment_ids pack several texts into a row, and a cache continues one text a row; read "
                         f"packed rows without a cache")
    with cache.reading(B, T, valid_tokens) as places:
        check_end(model, places)
        device = token_ids.device
        yield places.position_ids(device) if position_ids is None else position_ids, places.valid_tokens(device)


def within(segment_ids):
    """The mask_mod of packed rows, beside `causal`: a token sees its own text alone.    segment_ids: int [B, T], or None"""
    return None if segment_ids is None else packing_mod(segment_ids, causal=False)


def _real_in_segments(model, token_ids, segment_ids, valid_tokens):
    optional_tensors(type(model).__name__, segment_ids=segment_ids)
    if segment_ids.shape != token_ids.shape:
        raise ValueError(f"{type(model).__name__}: segment_ids must have one entry for each token, {tuple(token_ids.shape)}, got "
                         f"{tuple(segment_ids.shape)}")
    real = segment_ids >= 0
    return real if valid_tokens is None else real & valid_tokens


def check_inputs(model, token_ids, targets=None, valid_tokens=None, cache=None, position_ids=None):
    """TypeError or ValueError where something does not fit `model`."""
    name = type(model).__name__
    require_tensors(name, token_ids=token_ids)
    optional_tensors(name, targets=targets, valid_tokens=valid_tokens, position_ids=position_ids)
    if token_ids.ndim != 2:
        raise ValueError(f"{name}: token_ids must have shape [B, T], got {tuple(token_ids.shape)}")
    if not (cache is None or hasattr(cache, "layers")):
        raise TypeError(f"{name}: cache must be a generation.KVCache, which holds all layers, got {type(cache).__name__}")
    if cache is not None and len(cache.layers) != len(model.blocks):
        raise ValueError(f"{name}: the cache has {len(cache.layers)} layers, the model {len(model.blocks)}; build "
                         f"KVCache(num_layers={len(model.blocks)}, capacity={model.max_seq_len})")
    if targets is not None:
        _check_targets(name, token_ids, targets)


def _check_targets(name, token_ids, targets):
    if targets.shape != token_ids.shape:
        raise ValueError(f"{name}: targets must have the shape of token_ids, {tuple(token_ids.shape)}, got {tuple(targets.shape)}")
    if targets.numel() == 0:
        raise ValueError(f"{name}: a mean over targets needs at least one, got shape {tuple(targets.shape)}; leave targets out")
    some_ignored = targets.version.known_bounds()[0] <= -100       # unless it is known that none is: no need to look at them on a GPU
    if some_ignored and not (targets != -100).any():
        raise ValueError(f"{name}: targets are all -100: none counts, and their mean would be 0 / 0")


def check_length(model, B, T, valid_tokens=None):
    """ValueError where T tokens are more than the model has positions for, or valid_tokens is not [B, T]."""
    name = type(model).__name__
    if T > model.max_seq_len:
        raise ValueError(_too_long(model, T))
    if valid_tokens is not None and tuple(valid_tokens.shape) != (B, T):
        raise ValueError(f"{name}: valid_tokens must have one entry for each token, [{B}, {T}], got {tuple(valid_tokens.shape)}")


def check_end(model, places):
    """ValueError where the tokens of a pass over a cache are more than the model has positions for.

    A rolling cache lets a model without a table of positions read on: no token looks farther back than its window.
    """
    endless = places.window is not None and getattr(model, "endless_positions", False)
    if places.end > model.max_seq_len and not endless:
        raise ValueError(_too_long(model, places.end))


def _too_long(model, needed):
    return (f"{type(model).__name__}: {needed} positions are needed but max_seq_len is {model.max_seq_len}; pass a shorter sequence or "
            f"build the model with a larger max_seq_len")
