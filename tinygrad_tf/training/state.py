"""From a run to what its checkpoint holds, and back."""
import platform
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .._version import __version__
from ..autograd import constant
from ..backend import CPU, get_default_device, module_of, to_device
from ..backend import device as make_device
from ..data import CorpusError, Tokenizer
from ..serialization import one_line
from .checkpoint import CheckpointError, load_checkpoint, load_newest
from .config import TrainConfig
from .metrics import FIELDS, WITH_EXPERTS
from .parts import build_model
from .validation import check_sizes, check_state, check_weights

TIED = "lm_head.weight"         # the embedding's, under whose name it is stored


def versions():
    """Of what the numbers of a run come from, beside its configuration."""
    return {"tinygrad_tf": __version__, "numpy": np.__version__, "python": platform.python_version()}


@contextmanager
def fitting(folder):
    """Turns whatever a checkpoint lacks, or has too much of, into one CheckpointError."""
    try:
        yield
    except (CheckpointError, CorpusError):
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"the checkpoint in {folder} does not fit this version of tinygrad_tf "
                              f"({type(error).__name__}: {one_line(error)})") from None


def upgraded(state):
    """The record of an older format as this one has it."""
    if state["format"] != 1:
        return state
    columns = WITH_EXPERTS if state["config"].get("experts") else FIELDS
    return {**state, "fields": list(columns), "versions": {}, "tokenizer_sha256": Tokenizer.from_dict(state["tokenizer"]).fingerprint}


def check_record(tensors, state):
    """(configuration, tokenizer) of a checkpoint, when it holds what it must and its sizes are those of its weights."""
    check_state(state)
    config, tokenizer = TrainConfig.from_dict(state["config"]), Tokenizer.from_dict(state["tokenizer"])
    if state["tokenizer_sha256"] != tokenizer.fingerprint:
        raise ValueError("tokenizer_sha256 is that of another tokenizer")
    check_sizes(config, tokenizer.vocab_size, tensors)
    return config, tokenizer


def stored_weights(model):
    """{"model.…": NumPy array} of all parameters and buffers; the tied head is left out."""
    return {f"model.{k}": to_device(v.array, CPU) for k, v in model.state_dict().items() if k != TIED}


def load_weights(model, tensors):
    """Copies the arrays "model.…" of a checkpoint into a model; the tied head is stored once, under the embedding's name."""
    check_weights(tensors)
    weights = {k.removeprefix("model."): constant(a) for k, a in tensors.items() if k.startswith("model.")}
    weights[TIED] = weights["embedding.token.weight"]
    model.load_state_dict(weights)


def read_run(run):
    """({name: array}, state) of a run's newest checkpoint, or of the file that is named."""
    return load_checkpoint(run) if Path(run).is_file() else load_newest(run)[:2]


def load_model(run, device=None):
    """(model in eval mode, tokenizer, state) of a run's newest checkpoint, or of the file that is named; CheckpointError.

    state holds "config", "sources", "step". The checkpoint may have been written on any device; the model comes to `device`, by default
    the default one.
    """
    device = checked_device(device)
    return model_of(run, *read_run(run), device)


def checked_device(device):
    """The device of that name, or the default one. RuntimeError, before anything is read, where it is not there."""
    device = make_device(get_default_device() if device is None else device)
    module_of(device)
    return device


def model_of(run, tensors, state, device):
    """What `load_model` returns, of the content of a checkpoint."""
    with fitting(run):
        state = upgraded(state)
        config, tokenizer = check_record(tensors, state)
        model = build_model(config, tokenizer.vocab_size)
        load_weights(model, tensors)
    return model.to(device).eval(), tokenizer, state


def split_tensors(state):
    """An optimizer's state dict as ({"0.exp_avg": NumPy array, …}, the rest with plain numbers), so that JSON can hold the rest."""
    arrays, rest = {}, {"param_groups": state["param_groups"], "state": {}}
    for index, entries in state["state"].items():
        arrays.update({f"{index}.{k}": to_device(v.array, CPU) for k, v in entries.items() if hasattr(v, "array")})
        rest["state"][str(index)] = {k: v for k, v in entries.items() if not hasattr(v, "array")}
    return arrays, rest


def join_tensors(rest, tensors, prefix):
    """The reverse of `split_tensors`."""
    state = {int(i): dict(entries) for i, entries in rest["state"].items()}
    for name, array in tensors.items():
        if name.startswith(prefix):
            index, key = name.removeprefix(prefix).split(".", 1)
            state[int(index)][key] = constant(array)
    return {"param_groups": rest["param_groups"], "state": state}
