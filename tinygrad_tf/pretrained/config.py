"""The configuration of a published model: a config.json, or what a GGUF says, under the names of a config.json."""
import json
from pathlib import Path

from ..nn import GELU, ReLU, SiLU
from ..serialization import one_line

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


class PretrainedError(ValueError):
    """Published weights that are missing, damaged, of a kind that is not known, or do not fit; the message is one sentence."""


def read_config(path):
    """The dict in a config.json. Raises PretrainedError."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PretrainedError(f"there is no {path}: a published model is a folder with a config.json and its weights, or a GGUF") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PretrainedError(f"{path} cannot be read: {getattr(error, 'strerror', None) or one_line(error)}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise PretrainedError(f"{path} is no configuration of a model: it does not say its model_type")
    return config


def require(config, name, kind):
    """A size that a configuration must have: positive, and of that type."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind) or not 0 < value < 2**31:
        raise PretrainedError(f"the configuration's {name} must be a positive {kind.__name__}, got {value!r:.60}")
    return value


def sizes(config, *names):
    return [require(config, name, int) for name in names]


def require_equal(config, owner, **expected):
    """What the library has no other kind of. What a configuration does not say is as expected."""
    for name, value in expected.items():
        found = config.get(name, value)
        if found != value and not (value is False and found is None):
            raise PretrainedError(f"{owner} with {name} = {found!r:.60} is not supported, only {value!r}")


def activation_of(config, name, default):
    """The library's name of an activation."""
    found = config.get(name, default)
    if found not in list(ACTIVATIONS):
        raise PretrainedError(f"the configuration's {name} must be one of {', '.join(ACTIVATIONS)}, got {found!r:.60}")
    return ACTIVATIONS[found]


def name_of_activation(module):
    """The published name of one of the library's."""
    if type(module) is GELU:
        return "gelu_new" if module.approximate == "tanh" else "gelu"
    return {ReLU: "relu", SiLU: "silu"}[type(module)]
