"""One file that holds a whole run: weights, optimizer, random states, data position, configuration, tokenizer.

Tensors are stored as safetensors and everything else as JSON in the same file's header, so that one rename replaces the
old checkpoint by the new one: a crash or a full disk at any moment leaves one of the two whole. Nothing is pickled.
"""
import json
import os
from pathlib import Path

import numpy as np

FORMAT = 1
_HEADER = "tinygrad_tf"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or does not belong to what it is loaded into; the message is one sentence."""


def save_checkpoint(path, tensors, state):
    """Writes {name: array} and a JSON-able dict to one file, atomically: a temporary file, flushed to disk, then renamed."""
    from safetensors.numpy import save
    arrays = {name: np.ascontiguousarray(a) for name, a in tensors.items()}
    data = save(arrays, metadata={_HEADER: json.dumps({"format": FORMAT, **state})})
    write_atomically(path, data)


def write_atomically(path, data):
    """Bytes or text to a file that is, at every moment, the old one or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = data.encode("utf-8") if isinstance(data, str) else data
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path):
    """({name: array}, state). Raises CheckpointError with one sentence when the file is missing or damaged."""
    from safetensors import SafetensorError, safe_open
    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            state = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged or is no safetensors file ({error})") from None
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(f"{path} is a safetensors file but no checkpoint of tinygrad_tf")
    if state["format"] != FORMAT:
        raise CheckpointError(f"the checkpoint {path} has format {state['format']!r}, this version reads format {FORMAT}")
    return tensors, state
