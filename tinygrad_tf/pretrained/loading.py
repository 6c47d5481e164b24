"""`from_pretrained` and `save_pretrained`: published weights into the library's models, and back."""
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..autograd import constant, no_grad
from ..backend import CPU, to_device
from ..dtypes import float32
from ..nn import Module, RotaryEmbedding, init
from ..quantization.model import linears, quantize_model
from ..quantization.modules import replaced
from ..serialization import one_line, write_atomically
from .config import PretrainedError, read_config
from .families import FAMILIES, family_of
from .gguf_names import config_of_gguf, is_gguf, published_name
from .packages import located
from .structure import difference
from .tokenizers import chat_template_in, longest_text_in, save_companions, tokenizer_in
from .weights import open_weights

NAMED = 10                      # tensors that an error tells; more are counted


@dataclass
class Pretrained:
    """A model in eval mode, and what came with it: its configuration; its tokenizer and template of a chat, or None.

    longest_text: the tokens that `embed` reads of a text, where the files of an encoder say it.
    """
    model: Module
    config: dict
    tokenizer: object = None
    chat_template: str = None
    path: Path = field(default=None, repr=False)
    longest_text: int = None

    @property
    def family(self):
        return self.config["model_type"]


def from_pretrained(source, *, device=None, quantize=None):
    """The `Pretrained` in a folder with config.json and safetensors, in a GGUF, or in an installed package, by its name.

    Only the weights are read, in float32; nothing of a package is imported, and no code in a file is run. quantize: a `Scheme`; then each
    linear layer is rounded to it as soon as it is read, so that they are never in memory as floats all at once. Raises PretrainedError
    with one sentence that names what is missing, unexpected, or of another shape.
    """
    path = located(source)
    with open_weights(path) as weights:
        gguf = is_gguf(weights)
        config = config_of_gguf(weights) if gguf else read_config(folder_of(path) / "config.json")
        family = known_family(config)
        require_plausible(config, weights)
        with init.skipped():
            model = built(family, config)
        model = fill(model, family, config, Renamed(weights, published_name if gguf else str, family.prefix), quantize)
        tokenizer, template = tokenizer_in(path, weights), chat_template_in(path, weights)
    model = model.to(device).eval() if device is not None else model.eval()
    return Pretrained(model, config, tokenizer, template, path, longest_text_in(path))


def save_pretrained(pretrained, folder):
    """Writes config.json and model.safetensors, as `transformers` reads them; and the tokenizer, where there is one.

    pretrained: a `Pretrained`, or a bare model of a known family: a MiniGPT as GPT-2, a Decoder as Llama or a relative of it, and BERT.
    Raises ValueError, and writes nothing, where those have no setting for something in the model, which would be another one when it is
    read. A tokenizer, a chat template and a limit of texts that an earlier model left in the folder in the library's form are removed.
    """
    from safetensors.numpy import save
    known = pretrained if isinstance(pretrained, Pretrained) else Pretrained(pretrained, {})
    model, family, folder = known.model, family_of(known.model), Path(folder)
    config = published_config(known, family)
    ours = {name: to_device(tensor.array, CPU) for name, tensor in model.state_dict().items()}
    tensors = {}
    for rule in family.rules(model, {}):
        arrays = rule.save(*(ours[name] for name in rule.ours))
        tensors.update({name: np.ascontiguousarray(array) for name, array in zip(rule.theirs, arrays)})
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", save({saved_name(family, k): v for k, v in tensors.items()}, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    save_companions(folder, known.tokenizer, known.chat_template, known.longest_text)


# --- steps of it ----------------------------------------------------------------------------------------------------------------

def published_config(known, family):
    """The configuration of a model, when the model that it describes is this one. Raises ValueError."""
    try:
        found = family.config_of(known.model)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"save_pretrained: {type(known.model).__name__} has parts that no published family has ({one_line(error)}); "
                         f"quantised layers are not saved either") from None
    config = {**{k: v for k, v in known.config.items() if k != "rope_layout"}, **found}
    with init.skipped():
        again = built(family, {**config, "rope_layout": layout_of(known.model)})
    if said := difference(known.model, again):
        raise ValueError(f"save_pretrained: {found['model_type']}'s files cannot say what this model is: {said}")
    return config


def folder_of(path):
    return path if path.is_dir() else path.parent


def known_family(config):
    if config["model_type"] not in FAMILIES:
        raise PretrainedError(f"models of the kind {config['model_type']!r:.60} are not known; there are {', '.join(FAMILIES)}")
    return FAMILIES[config["model_type"]]


def require_plausible(config, weights):
    """Parts of which there are more than tensors in the file are not built: a number in a configuration takes no memory."""
    for name in "num_hidden_layers", "n_layer", "num_local_experts":
        if isinstance(config.get(name), int) and config[name] > len(weights):
            raise PretrainedError(f"the configuration says {name} = {config[name]}, and there are {len(weights)} tensors")


def built(family, config):
    """The model, with weights that hold anything."""
    try:
        return family.build(config)
    except PretrainedError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, MemoryError) as error:
        raise PretrainedError(f"the configuration fits no {config['model_type']}: {one_line(error)}") from None


def layout_of(model):
    """Which features RoPE turns together; of no matter for a file, whose rows are put in order, nor for a model without."""
    return next((module.layout for module in model.modules() if isinstance(module, RotaryEmbedding)), "half_split")


class Renamed(Mapping):
    """Weights under the names that the rules use: those of another format translated, without the prefix of a whole model."""

    def __init__(self, weights, translate, prefix):
        self.weights, self.names = weights, {}
        for name in weights:
            first = self.names.setdefault(translate(name).removeprefix(prefix), name)
            if first != name:
                raise PretrainedError(f"{name} and {first} are two tensors for one place")

    def __getitem__(self, name):
        array = self.weights[self.names[name]]
        if array.dtype.kind != "f":             # whole numbers that stand for fractions, by a scale that lies elsewhere
            raise PretrainedError(f"{name} holds numbers of type {array.dtype}, and weights must be floating point")
        return array

    def shape(self, name):
        return tuple(self.weights.shape(self.names[name]))

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


def fill(model, family, config, weights, quantize=None):
    """The model with every tensor in its place, when all of them are there and none is left."""
    rules = list(family.rules(model, config))
    theirs = dict.fromkeys(name for rule in rules for name in rule.theirs)
    left = [name for name in weights if name not in theirs and not name.endswith(family.ignored)]
    if tied(model) and "lm_head.weight" in left:        # a second copy of the embedding
        left.remove("lm_head.weight")
    complain(missing=[name for name in theirs if name not in weights], unexpected=left)
    places, misshapen = dict(model.state_dict(keep_vars=True)), []
    unread = {} if quantize is None else {name: set(dict(layer.named_parameters())) for name, layer in linears(model).items()}
    for rule in rules:
        for name, array in zip(rule.ours, loaded(rule, weights, misshapen)):
            place = places[name]
            if array.shape == tuple(place.shape):
                put(place, array, rule)
                layer, _, part = name.rpartition(".")
                if layer in unread:
                    unread[layer].discard(part)
                    if not unread[layer]:
                        round_layer(model, layer, places, quantize)
            else:
                misshapen.append(f"{', '.join(rule.theirs)} (becomes {list(array.shape)}, where {name} has {list(place.shape)})")
    complain(misshapen=misshapen)
    return model


def round_layer(model, name, places, scheme):
    """Puts a low-bit layer into the place of a Linear, of which nothing stays in memory."""
    layer = model.get_submodule(name)
    for part in dict(layer.named_parameters()):
        del places[f"{name}.{part}"]
    replaced(model, {id(layer): quantize_model(layer, scheme)})


def loaded(rule, weights, misshapen):
    """The arrays of a rule; none where it cannot make them of these shapes."""
    arrays = [weights[name] for name in rule.theirs]    # what cannot be read says so itself
    try:
        return rule.load(*arrays)
    except ValueError:
        misshapen.append(f"{', '.join(rule.theirs)} ({', '.join(str(list(weights.shape(name))) for name in rule.theirs)})")
        return ()


def put(place, array, rule):
    if array.dtype == np.float64 and place.dtype is float32 and (np.abs(array) > np.finfo(np.float32).max).any():
        raise PretrainedError(f"{', '.join(rule.theirs)}: numbers of float64 that are beyond float32")
    with no_grad():
        place.copy_(constant(np.ascontiguousarray(array)))


def tied(model):
    return getattr(getattr(model, "lm_head", None), "weight", None) is getattr(getattr(model, "embedding", None), "weight", 0)


def complain(**problems):
    said = [f"{kind}: {', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if len(names) > NAMED else ''}"
            for kind, names in problems.items() if names]
    if said:
        raise PretrainedError(f"the weights do not fit the model that the configuration describes; {'; '.join(said)}")


def saved_name(family, name):
    """With the prefix of a whole model, but for the heads, which stand beside it."""
    return name if name.startswith(("lm_head.", "cls.")) else family.prefix + name
