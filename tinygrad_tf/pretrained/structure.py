"""Whether two models compute the same from the same weights: what stands in each place, and with which settings."""
from ..nn import GEGLU, GatedFeedForward, SwiGLU

# What changes nothing that a model computes in evaluation: modes, dropout, memory; lengths are in the shapes of tables, or RoPE has no end.
NO_MATTER = {"training", "checkpoint_blocks", "inplace", "dropout", "p", "max_seq_len"}
ALIKE = {SwiGLU: GatedFeedForward, GEGLU: GatedFeedForward, "softmax_topk_renormalized": "topk_softmax"}


def difference(model, other):
    """The first thing in `model` that `other` has not, or has otherwise, as a part of a sentence; None where there is none."""
    parts, settings = _settings(model), _settings(other)
    for place in {**parts, **settings}:
        if parts.get(place) != settings.get(place):
            return f"{'.'.join(filter(None, place))} is {_shown(parts.get(place))}, and would be {_shown(settings.get(place))}"
    return _of_weights(model, other)


def _settings(model):
    """{(dotted name, attribute): value} of all modules, with their classes; None is as if it were not there."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name, "class"] = ALIKE.get(type(module), type(module))
        for attribute, value in vars(module).items():
            if not attribute.startswith("_") and attribute not in NO_MATTER and value is not None:
                found[name, attribute] = ALIKE.get(value, value) if isinstance(value, str) else value
    return found


def _shown(value):
    return value.__name__ if isinstance(value, type) else f"{value!r:.60}"


def _of_weights(model, other):
    """Names, shapes, and which of them are one tensor wherever those of `other` are."""
    ours, theirs = (m.state_dict(keep_vars=True) for m in (model, other))
    shapes, wanted = ({name: tuple(x.shape) for name, x in tensors.items()} for tensors in (ours, theirs))
    for name in {**ours, **theirs}:
        if shapes.get(name) != wanted.get(name):
            return f"{name} has the shape {shapes.get(name)}, and would have {wanted.get(name)}"
    first = {}
    for name, x in theirs.items():
        tied = first.setdefault(id(x), name)
        if ours[tied] is not ours[name]:
            return f"{name} is a tensor of its own, and would be {tied}"
    return None
