"""A whole model with low-bit weights: which layers, how each is rounded, and what that does to their outputs."""
import copy
import math
from collections import Counter

from ..arguments import described
from ..nn.layers import Linear
from ..nn.module import Module
from ..ops.quantize import Scheme
from .awq import awq
from .calibration import collect
from .gptq import gptq
from .linear import INT4, QuantizedLinear, round_to_nearest
from .modules import is_kept, kept_names, replaced

METHODS = {"rtn": lambda weight, scheme, statistics, name: round_to_nearest(weight, scheme, name), "awq": awq, "gptq": gptq}
CALIBRATED = ("awq", "gptq")


def quantize_model(model, scheme=INT4, method="rtn", calibration=None, keep=(), inplace=False):
    """A copy of the model, or with inplace=True itself, in which each `nn.Linear` is a `QuantizedLinear`; all else stays floats.

    method: "rtn" rounds to nearest; "awq" and "gptq" look at what the layers get as input when the model reads `calibration`, a
    batch of ids [B, T] or a list of such batches. All statistics are those of the float model, in one pass. A Linear whose weight
    is tied to another module, as a head's is to its embedding, stays as it is; so do subclasses of Linear, weights outside of Linears,
    and the modules that `keep` names, with all below them. ValueError names the parameter that holds NaN or infinity, or does not
    divide into groups.
    """
    _check(model, scheme, method, calibration)
    result = model if inplace else copy.deepcopy(model)
    layers = linears(result, keep)
    if not layers:
        raise ValueError(f"quantize_model: {type(model).__name__} has no nn.Linear to quantise, apart from tied ones and those in keep")
    statistics = collect(result, layers, calibration) if method in CALIBRATED else {}
    made = {name: _converted(name, layer, scheme, method, statistics.get(name)) for name, layer in layers.items()}
    return replaced(result, {id(layers[name]): layer for name, layer in made.items()})


def _converted(name, layer, scheme, method, statistics):
    name = f"{name}.weight".lstrip(".")
    if statistics is not None and not statistics.count:
        raise ValueError(f"quantize_model: no input reached {name} when the model read the calibration batch; keep it, or use method 'rtn'")
    try:
        codes = METHODS[method](layer.weight.array, scheme, statistics, name)
    except ValueError as error:
        raise ValueError(f"quantize_model: {'' if name in str(error) else f'{name}: '}{error}") from None
    return QuantizedLinear.from_linear(layer, scheme, codes)


def _check(model, scheme, method, calibration):
    if not isinstance(model, Module):
        raise TypeError(f"quantize_model: model must be a Module, got {described(model)}")
    if not isinstance(scheme, Scheme):
        raise TypeError(f"quantize_model: scheme must be a Scheme, such as Scheme(bits=4), got {described(scheme)}")
    if method not in METHODS:
        raise ValueError(f"quantize_model: method must be one of {', '.join(map(repr, METHODS))}, got {described(method)}")
    if method in CALIBRATED and calibration is None:
        raise ValueError(f"quantize_model: method {method!r} needs calibration: a batch of ids [B, T] of the text that the model is for")


def linears(model, keep=()):
    """{name: layer} of the Linears that can be quantised."""
    kept, shared = kept_names("quantize_model", model, keep), _tied(model)
    return {name: module for name, module in model.named_modules() if type(module) is Linear and id(module.weight) not in shared
            and not is_kept(name, kept)}


def _tied(model):
    """The ids of the parameters that several modules hold."""
    held = Counter(id(p) for module in model.modules() for p in module.__dict__["_parameters"].values())
    return {key for key, times in held.items() if times > 1}


def quantized_linears(model):
    """{name: QuantizedLinear} of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def bits_per_weight(model):
    """Bits that are stored for each weight of the quantised matrices, their scales among them."""
    layers = list(quantized_linears(model).values())
    return 8 * sum(layer.weight_nbytes for layer in layers) / sum(layer.in_features * layer.out_features for layer in layers)


def output_errors(model, quantized, calibration):
    """{name: Σ |x (W − Ŵ)ᵀ|² / Σ |x Wᵀ|²} for each quantised layer, over the inputs x that it gets in the float model."""
    layers = {name: model.get_submodule(name) for name in quantized_linears(quantized)}
    found = {}
    for name, statistics in collect(model, layers, calibration).items():
        weight = layers[name].weight.array
        error, size = statistics.error(quantized.get_submodule(name).weight.array - weight), statistics.error(weight)
        found[name] = error / size if size else math.inf if error else 0.0
    return found
