"""The configuration of a published model: a config.json, or what a GGUF says, under the names of a config.json."""
import json
from pathlib import Path

from ..nn import GELU, ReLU, SiLU
from ..serialization import one_line

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
MAX_TEXT = 1 << 24              # bytes


class PretrainedError(ValueError):
    """Published weights that are missing, damaged, of a kind that is not known, or do not fit; the message is one sentence.

    WeightsError, of a file of weights, is one too.
    """


def read_text(path):
    """The text of a small file beside weights. FileNotFoundError; PretrainedError where it is a pipe or a device, huge, or no UTF-8."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():            # a pipe would be waited for, a device might have no end
            raise PretrainedError(f"{path} is no file, but a folder, a pipe or a device")
        if path.stat().st_size > MAX_TEXT:
            raise PretrainedError(f"{path} has more than {MAX_TEXT >> 20} MiB, and is not read")
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise PretrainedError(f"{path} cannot be read: {getattr(error, 'strerror', None) or one_line(error)}") from None


def read_json(path):
    """The dict in such a file. The same errors."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise PretrainedError(f"{path} must hold a JSON object")
    return content


def read_config(path):
    """The dict in a config.json. Raises PretrainedError."""
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise PretrainedError(f"there is no {path}: a published model is a folder with a config.json and its weights, or a GGUF") from None
    if not isinstance(config.get("model_type"), str):
        raise PretrainedError(f"{path} is no configuration of a model: it does not say its model_type")
    return config


def require(config, name, kind, default=None):
    """A size that a configuration must have, unless there is a default: positive, and of that type."""
    value = default if config.get(name) is None else config[name]
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind) or not 0 < value < 2**31:
        raise PretrainedError(f"the configuration's {name} must be a positive {kind.__name__}, got {value!r:.60}")
    return value


def sizes(config, *names):
    return [require(config, name, int) for name in names]


def flag(config, name, default):
    """A setting that is true or false."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise PretrainedError(f"the configuration's {name} must be true or false, got {value!r:.60}")
    return value


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
