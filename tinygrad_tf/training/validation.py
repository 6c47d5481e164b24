"""What a checkpoint must hold: everything is checked here, before a size is believed or a number is used.

A SHA-256 says that a file is what somebody wrote, not that it was `Trainer.save`. Most of it follows from the
configuration and the step alone, and what follows is compared, not believed. Each check raises ValueError.
"""
import json
import math
import reprlib

import numpy as np

MOMENTS = ("step", "exp_avg", "exp_avg_sq")     # what AdamW keeps for each parameter
_EMBEDDING = "model.embedding.token.weight", "model.embedding.position.weight"


def check_state(state):
    """The parts of the JSON whose types decide what happens next."""
    kinds = {"step": int, "config": dict, "tokenizer": dict, "tokenizer_sha256": str, "optimizer": dict, "scheduler": dict, "sampler": dict,
             "sources": list, "text": str, "fields": list, "versions": dict}
    for name, kind in kinds.items():
        _require(name, state[name], type(state[name]) is kind, f"of type {kind.__name__}")
    step, sources = state["step"], state["sources"]
    _require("step", step, 0 <= step <= state["config"]["steps"], "from 0 to the configuration's steps")
    _require("sources", sources, sources and all(type(source) is str for source in sources), "names and paths")
    _require("versions", state["versions"], all(type(version) is str for version in state["versions"].values()), "names and versions")


def check_sizes(config, vocab_size, tensors):
    """The configuration's sizes against the shapes in the file: no model is built that the weights could not fill."""
    expected = {_EMBEDDING[0]: (vocab_size, config.dim), _EMBEDDING[1]: (config.context, config.dim)}
    for name, shape in expected.items():
        _require(f"the shape of {name}", tensors[name].shape, tensors[name].shape == shape, f"{shape}, as the configuration says")
    blocks = {name.split(".")[2] for name in tensors if name.startswith("model.blocks.")}
    _require("layers", config.layers, config.layers == len(blocks), f"the number of blocks in the file, {len(blocks)}")
    routed = {len(a) for name, a in tensors.items() if name.endswith(".router.weight") and a.ndim}
    _require("experts", config.experts, routed == {config.experts} - {0}, f"those that the routers in the file know, {sorted(routed)}")


def check_weights(tensors):
    for name in (name for name in tensors if name.startswith("model.")):
        _require_floats(name, tensors[name], np.isfinite)


def check_moments(tensors, step, params):
    """optimizer.<i>.<moment> of each parameter: none before the first step, then all of them, each as old as the run."""
    expected = {f"optimizer.{i}.{key}": () if key == "step" else tuple(p.shape) for i, p in enumerate(params) for key in MOMENTS if step}
    odd = expected.keys() ^ {name for name in tensors if name.startswith("optimizer.")}
    _require("the optimizer's tensors", sorted(odd), not odd, f"{', '.join(MOMENTS)} of each parameter")
    valid = {"step": lambda a: a == step, "exp_avg": np.isfinite, "exp_avg_sq": lambda a: a >= 0}
    for name, shape in expected.items():
        _require(f"the shape of {name}", tensors[name].shape, tensors[name].shape == shape, shape)
        _require_floats(name, tensors[name], valid[name.rpartition(".")[2]])


def check_metrics(table, step, fields, known):
    """Rows of steps that were made, in their order; a number that was not measured is NaN. fields: its columns, of those that are known."""
    _require("fields", fields, fields[:1] == ["step"] and fields == [name for name in known if name in fields], f"some of {known}")
    _require("the shape of metrics", table.shape, table.ndim == 2 and table.shape[1] == len(fields), f"[N, {len(fields)}]")
    _require_floats("metrics", table, lambda a: ~np.isinf(a))
    steps = table[:, 0]
    _require("the steps in metrics", steps, (np.diff(steps, prepend=0) > 0).all() and (steps <= step).all(), f"rising to at most {step}")


def check_scaler(found, new):
    """{} without a GradScaler, also in files of versions that had none; else as a new one's, but for what moves: it checks that itself."""
    moving = "scale", "_growth_tracker"
    _require("scaler", found, type(found) is dict and found.keys() == new.keys(), f"a record of {sorted(new)}")
    check_equal({k: v for k, v in found.items() if k not in moving}, {k: v for k, v in new.items() if k not in moving}, "scaler")


def check_equal(found, expected, name):
    """The JSON of a checkpoint against what a run is known to have at that step; floats to nine digits: machines differ in cos."""
    if type(expected) is dict:
        _require(name, found, type(found) is dict and found.keys() == expected.keys(), f"a record of {sorted(expected)}")
        for key in expected:
            check_equal(found[key], expected[key], f"{name}.{key}")
    elif type(expected) is list:
        _require(name, found, type(found) is list and len(found) == len(expected), f"a list of {len(expected)}")
        for i, value in enumerate(expected):
            check_equal(found[i], value, f"{name}.{i}")
    else:
        same = math.isclose(found, expected, rel_tol=1e-9) if type(found) is type(expected) is float else found == expected
        _require(name, found, type(found) is type(expected) and same, repr(expected))


def as_json(state):
    """As it comes back from a file: tuples are lists."""
    return json.loads(json.dumps(state))


def _require_floats(name, array, valid):
    _require(f"the type of {name}", array.dtype, array.dtype.kind == "f", "a floating-point type")
    wrong = array[~valid(array)]
    _require(name, wrong[:1], wrong.size == 0, "numbers that training can reach")


def _require(name, found, holds, expected):
    if not holds:
        raise ValueError(f"{name} must be {expected}, not {reprlib.repr(found)}")
