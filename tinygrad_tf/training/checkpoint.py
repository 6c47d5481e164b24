"""One file that holds a whole run: weights, optimizer, random states, metrics, configuration, tokenizer.

Tensors are stored as safetensors and everything else as JSON in the same file's header, so that one rename replaces the
old checkpoint by the new one: a crash or a full disk at any moment leaves one of the two whole. Nothing is pickled.
"""
import json
from pathlib import Path

import numpy as np

from ..serialization import content_digest, one_line, write_atomically

FORMAT = 1
_STATE = "tinygrad_tf"          # the one entry of the file's metadata
_DIGEST = "sha256"              # a tensor of 32 bytes; as metadata it would come in random order, and equal runs in unequal files


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or does not belong to what it is loaded into; the message is one sentence."""


def save_checkpoint(path, tensors, state):
    """Writes {name: array} and a JSON-able dict to one file, atomically."""
    from safetensors.numpy import save
    arrays = {name: np.asarray(a, order="C") for name, a in tensors.items()}
    text = json.dumps({"format": FORMAT, **state})
    write_atomically(path, save({**arrays, _DIGEST: content_digest(arrays, text)}, metadata={_STATE: text}))


def load_checkpoint(path):
    """({name: array}, state). Raises CheckpointError with one sentence when the file is missing or damaged."""
    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    tensors, metadata = _read(path)
    state = _parse(metadata.get(_STATE, ""), path)
    if state["format"] != FORMAT:
        raise CheckpointError(f"the checkpoint {path} has format {state['format']!r}, this version reads format {FORMAT}")
    digest = tensors.pop(_DIGEST, None)
    if not np.array_equal(digest, content_digest(tensors, metadata[_STATE])):
        raise CheckpointError(f"the checkpoint {path} is damaged: its content does not have the SHA-256 that was stored with it")
    return tensors, state


def _read(path):
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:     # also odd dtypes
        raise CheckpointError(f"the checkpoint {path} is damaged or is no safetensors file ({one_line(error)})") from None


def _parse(text, path):
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(f"{path} is a safetensors file but no checkpoint of tinygrad_tf, or a damaged one")
    return state
