"""A trained run with weights of a few bits: the variants worth a look, and one of them as a file that is read back."""
import dataclasses
import time

import numpy as np

from ..autograd import constant
from ..creation import zeros
from ..data import BatchSampler, Tokenizer
from ..generation import stream
from ..models.common import device_of_model
from ..ops.quantize import Scheme
from ..quantization.linear import QuantizedLinear
from ..quantization.model import METHODS, quantized_linears
from ..quantization.modules import replaced
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .config import TrainConfig
from .parts import build_model
from .state import TIED, checked_device, fitting, model_of, read_run, stored_weights
from .validation import check_sizes

KIND = "quantized weights"


def variants(scheme, method="rtn"):
    """The (scheme, method) worth comparing: 8 bits in two ways, and 4, 3, 2 with parts as in `scheme` in each way; and this one itself."""
    found = [(Scheme(8), "rtn"), (Scheme(8, granularity="channel"), "rtn"),
             *((dataclasses.replace(scheme, bits=bits), method) for bits in (4, 3, 2) for method in METHODS)]
    return found if (scheme, method) in found else [*found, (scheme, method)]


def title(scheme, method):
    """What a variant is called in the table: "int4, groups of 32, gptq"."""
    sharing = f"groups of {scheme.group_size}" if scheme.granularity == "group" else f"per {scheme.granularity}"
    return f"{'int' if scheme.symmetric else 'uint'}{scheme.bits}, {sharing}, {method}"


def calibration_batch(ids, context, rows=32, seed=0):
    """Ids [rows, T] from random places of the training text, as a NumPy array: what "awq" and "gptq" look at."""
    return BatchSampler(ids, context, rows, seed).next()[0]


def write_speed(model, tokens=64):
    """Tokens a second of greedy writing with a cache, in a context that is empty at first: 1 / the median of a token's time."""
    times, begin = [], time.perf_counter()
    for _ in stream(model, zeros(1, 1, dtype="int64", device=device_of_model(model)), min(tokens, model.max_seq_len - 1), temperature=0):
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return 1 / float(np.median(times))


def save_quantized(path, model, state):
    """A quantised MiniGPT to one file, atomically; state: that of the run it came from, as `load_model` returns it."""
    layers = quantized_linears(model)
    if not layers:
        raise ValueError(f"save_quantized: {type(model).__name__} has no QuantizedLinear; make them with quantize_model")
    kinds = {name: {"scheme": dataclasses.asdict(layer.scheme), "input_scale": layer.input_scale is not None}
             for name, layer in layers.items()}
    of_run = {key: state[key] for key in ("config", "tokenizer", "sources", "step")}
    save_checkpoint(path, stored_weights(model), {"kind": KIND, "layers": kinds, **of_run})


def load_quantized(path, device=None):
    """(model in eval mode, tokenizer, state) of a file of `save_quantized`, as `load_model` returns them. CheckpointError."""
    device = checked_device(device)
    return quantized_of(path, *load_checkpoint(path), device)


def quantized_of(path, tensors, state, device):
    """What `load_quantized` returns, of the content of a file."""
    if state.get("kind") != KIND:
        raise CheckpointError(f"{path} holds no quantised weights; for a run, name its folder")
    with fitting(path):
        config, tokenizer = TrainConfig.from_dict(state["config"]), Tokenizer.from_dict(state["tokenizer"])
        check_sizes(config, tokenizer.vocab_size, tensors)
        model = with_quantized_layers(build_model(config, tokenizer.vocab_size), state["layers"])
        _load(model, {name.removeprefix("model."): array for name, array in tensors.items()})
    return model.to(device).eval(), tokenizer, state


def load_any(run, device=None):
    """(model, tokenizer, state) of a run's folder, of one of its checkpoints, or of a file of `save_quantized`."""
    device = checked_device(device)
    tensors, state = read_run(run)
    return (quantized_of if state.get("kind") == KIND else model_of)(run, tensors, state, device)


def with_quantized_layers(model, layers):
    """The model with QuantizedLinears, still to be filled, in the places that {name: {"scheme": …, "input_scale": …}} says."""
    new = {}
    for name, layer in layers.items():
        plain = model.get_submodule(name)
        new[id(plain)] = QuantizedLinear(plain.in_features, plain.out_features, plain.bias is not None, Scheme(**layer["scheme"]),
                                         layer["input_scale"])
    return replaced(model, new)


def _load(model, arrays):
    """Copies the arrays into the model, when each is of the type that belongs there, and finite."""
    arrays[TIED] = arrays["embedding.token.weight"]
    for name, tensor in model.state_dict().items():
        array = arrays[name]
        if array.dtype != tensor.dtype.numpy or not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite numbers of type {tensor.dtype.name}, not {array.dtype}")
    model.load_state_dict({name: constant(array) for name, array in arrays.items()})
