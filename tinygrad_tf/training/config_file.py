"""A configuration as a TOML file: the flags of `train` by their names, without dashes in front.

    text = ["python-docs"]
    steps = 600
    batch-size = 24             # or batch_size
"""
import difflib
import json
from pathlib import Path

from ..serialization import one_line, write_atomically


class ConfigError(ValueError):
    """A file that is no configuration; its message is one sentence."""


def read_config(path, names):
    """{name: value} of a TOML file, whose keys are among `names`, - and _ being the same. Raises ConfigError."""
    try:
        values = _toml().loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {getattr(error, 'strerror', None) or one_line(error)}") from None
    found = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ConfigError(f"the configuration {path} has a key {key!r:.60} that is no flag of train{_meant(name, names)}")
        if name in found:
            raise ConfigError(f"the configuration {path} has {name} twice")
        found[name] = value
    return found


def write_config(path, values):
    """A TOML file of plain values and lists of strings, atomically."""
    write_atomically(path, "".join(f"{name} = {_written(value)}\n" for name, value in values.items()))


def _toml():
    try:
        import tomllib
    except ImportError:         # Python 3.10
        import tomli as tomllib
    return tomllib


def _meant(name, names):
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _written(value):
    """JSON's strings, numbers, booleans and lists are TOML's too, but for one character that TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
