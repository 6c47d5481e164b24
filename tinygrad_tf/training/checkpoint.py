"""A run in one file: weights, optimizer, random states, metrics, configuration, tokenizer; and the files before it.

Tensors are stored as safetensors and everything else as JSON in the same file's header, so that one rename replaces the
old checkpoint by the new one: a crash or a full disk at any moment leaves one of the two whole. Nothing is pickled.

    checkpoint.safetensors           the newest        checkpoint-000400.safetensors    those before it, by their steps
    best.safetensors                 the one with the lowest validation loss
"""
import json
import os
import re
import warnings
from pathlib import Path

import numpy as np

from ..serialization import alias, content_digest, one_line, write_atomically

CHECKPOINT, BEST = "checkpoint.safetensors", "best.safetensors"
FORMAT = 2                      # 1 had no versions and no names of the columns of its metrics: state.py reads both
READABLE = 1, FORMAT
_STATE = "tinygrad_tf"          # the one entry of the file's metadata
_DIGEST = "sha256"              # a tensor of 32 bytes; as metadata it would come in random order, and equal runs in unequal files
_BEFORE = re.compile(r"checkpoint-(\d{6,})\.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or does not belong to what it is loaded into; the message is one sentence."""


class DamagedCheckpoint(CheckpointError):
    """A file that is not as it was written: torn, or changed since."""


class CheckpointWarning(UserWarning):
    """A run goes on otherwise than it would have: from an older checkpoint, or with other versions of what computes it."""


# --- one file ---------------------------------------------------------------------------------------------------------------

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
    try:
        Path(path).open("rb").close()
    except OSError as error:                            # may be whole: nothing takes its place
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error.strerror}") from None
    tensors, metadata = _read(path)
    state = _parse(metadata.get(_STATE, ""), path)
    digest = tensors.pop(_DIGEST, None)
    if state["format"] not in READABLE:
        raise CheckpointError(f"the checkpoint {path} has format {state['format']!r}, this version reads formats {READABLE[0]} to {FORMAT}")
    if not np.array_equal(digest, content_digest(tensors, metadata[_STATE])):
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged: its content does not have the SHA-256 that was stored with it")
    return tensors, state


def _read(path):
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:     # also odd dtypes
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged or is no safetensors file ({one_line(error)})") from None


def _parse(text, path):
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or "format" not in state:
        raise DamagedCheckpoint(f"{path} is a safetensors file but no checkpoint of tinygrad_tf, or a damaged one")
    return state


# --- several of them ----------------------------------------------------------------------------------------------------------

def checkpoints_in(folder):
    """The paths of a run's checkpoints, the newest first; without the best, which is one of them or was."""
    folder = Path(folder)
    newest = [folder / CHECKPOINT] if (folder / CHECKPOINT).is_file() else []
    return [*newest, *(path for _, path in sorted(before(folder), reverse=True))]


def before(folder):
    """[(step, path)] of the checkpoints that were the newest once."""
    found = [(_BEFORE.fullmatch(path.name), path) for path in Path(folder).glob("checkpoint-*.safetensors")]
    return [(int(name[1]), path) for name, path in found if name]


def load_newest(folder):
    """({name: array}, state, path) of the newest checkpoint in the folder that is whole. Raises CheckpointError.

    A torn one, or one that was changed, is passed over for the one before it, with a CheckpointWarning.
    """
    damaged = []
    for path in checkpoints_in(folder) or [Path(folder) / CHECKPOINT]:
        try:
            tensors, state = load_checkpoint(path)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        if damaged:
            warnings.warn(f"{damaged[0]}; the one before it is used instead: {path.name}, of step {state.get('step')}", CheckpointWarning,
                          stacklevel=2)
        return tensors, state, path
    raise damaged[0]


def keep_as_before(folder, step):
    """The newest checkpoint, of that step, gets its second name, under which it stays when the next one takes its place."""
    path = Path(folder) / CHECKPOINT
    if path.is_file():
        alias(path, path.with_name(f"checkpoint-{step:06d}.safetensors"))


def keep_as_best(folder):
    alias(Path(folder) / CHECKPOINT, Path(folder) / BEST)


def remove_old(folder, step, keep):
    """Of those before the newest, which has that step, the last keep − 1 stay."""
    older = sorted((number for number, _ in before(folder) if number < step), reverse=True)
    for number, path in before(folder):
        if number not in older[:keep - 1]:
            os.unlink(path)
