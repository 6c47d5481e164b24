"""`Optimizer`: parameter groups, state by parameter, and the loop that all update rules share."""
import math
import sys
from collections import defaultdict

import numpy as np

from ..autograd import constant, enable_grad, no_grad
from ..backend import check_one_device, is_writable, owner
from ..creation import tensor
from ..dtypes import is_bfloat16, widened
from ..tensor import Tensor
from . import pieces


class Optimizer:
    """Subclasses pass their options to `__init__` and define

        update(self, p, g, state, group)    changes the array p in place, given the array g of its gradient

    or, where each element of p goes its own way,

        rule(self, p, state, group)         (step, arrays, numbers): step(p, g, *arrays, *numbers) writes into p and the arrays of its state

    `update` is called for each parameter. With a `rule` alone, those that have the same numbers are joined or cut: see pieces.py.
    `param_groups` is a list of dictionaries {"params": [...], "lr": …, …}; `state` holds a dictionary for each parameter
    that was ever updated. A parameter whose `.grad` is None is left out entirely: no decay, no momentum, no step count.
    From (name, tensor) pairs, as of `model.named_parameters()`, a group also keeps its "param_names". `foreach` and `fused`,
    which choose among PyTorch's implementations, are accepted by every subclass and change nothing.
    """

    def __init__(self, params, defaults):
        if isinstance(params, (Tensor, str, bytes)) or not hasattr(params, "__iter__"):
            raise TypeError(f"{self._name()}: params argument given to the optimizer should be an iterable of Tensors or dicts, "
                            f"got {type(params).__name__}; pass model.parameters() or [tensor]")
        groups = list(params)
        if not groups:
            raise ValueError(f"{self._name()}: optimizer got an empty parameter list; a generator such as model.parameters() "
                             f"is empty after it was used once")
        self.defaults, self.state, self.param_groups = defaults, defaultdict(dict), []
        for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
            self.add_param_group(group)

    def _name(self):
        return type(self).__name__

    def add_param_group(self, param_group):
        """Adds {"params": tensors, option: value, …}; what it does not say comes from the defaults.

        TypeError for things that are no tensors; ValueError for one that is listed twice, is no leaf, or is no float, and where
        some have names and others not.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"{self._name()}: param_group must be a dict, got {type(param_group).__name__}")
        if "params" not in param_group:
            raise ValueError(f"{self._name()}: a parameter group needs the key 'params', got {sorted(param_group)}")
        group = {**self.defaults, **param_group, **self._named(self._as_list(param_group["params"]))}
        self._check_params(group["params"])
        self._check_names(group)
        self.check_options(group)
        self.param_groups.append(group)

    def _as_list(self, params):
        if isinstance(params, (set, frozenset)):
            raise TypeError(f"{self._name()}: optimizer parameters need to be organized in ordered collections, a set has no "
                            f"order; use a list")
        return [params] if isinstance(params, Tensor) else list(params)

    def _named(self, params):
        """{"params": tensors}, and where they came as (name, tensor) pairs also {"param_names": names}."""
        pairs = [p for p in params if isinstance(p, tuple) and len(p) == 2]
        if not pairs:
            return {"params": params}
        if len(pairs) < len(params):
            raise ValueError(f"{self._name()}: all optimizer params should be with or without names, got {len(pairs)} of {len(params)} "
                             f"as (name, tensor)")
        return {"params": [p for _, p in pairs], "param_names": [name for name, _ in pairs]}

    def _check_names(self, group):
        if any(("param_names" in group) != ("param_names" in other) for other in self.param_groups):
            raise ValueError(f"{self._name()}: all optimizer param groups should be with or without names; give named_parameters() to "
                             f"all, or to none")

    def _check_params(self, params):
        seen = {id(p) for group in self.param_groups for p in group["params"]}
        for p in params:
            if not isinstance(p, Tensor):
                raise TypeError(f"{self._name()}: optimizer can only optimize Tensors, but one of the params is "
                                f"{type(p).__name__}")
            if not p.is_leaf:
                raise ValueError(f"{self._name()}: can't optimize a non-leaf Tensor, shape {tuple(p.shape)}; pass the tensor "
                                 f"that it was computed from")
            if not p.is_floating_point():
                raise ValueError(f"{self._name()}: can't optimize a tensor of dtype {p.dtype}, only floating-point ones")
            if id(p) in seen:
                raise ValueError(f"{self._name()}: some parameters appear more than once, or in more than one parameter group "
                                 f"(shape {tuple(p.shape)}); a tied parameter is one parameter: list it once")
            seen.add(id(p))

    def check_options(self, group):
        """Raises ValueError for an option out of its range."""
        self.check_range(group, "lr", "weight_decay")

    def check_range(self, group, *names):
        for name in names:
            if name in group and not 0.0 <= float(group[name]) < math.inf:
                raise ValueError(f"{self._name()}: Invalid {_SPOKEN.get(name, name)}: {name}={group[name]}, expected a number >= 0")

    def zero_grad(self, set_to_none=True):
        """Forgets the gradients; `set_to_none=False` fills them with zeros, and then decay and momentum go on acting."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if set_to_none:
                p.grad = None
            else:
                p.grad.zero_()

    def step(self, closure=None):
        """One update of every parameter that has a gradient. `closure` computes the loss anew; its result is returned.

        RuntimeError, and nothing changed, where one of them lies in memory that cannot be written.
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        with no_grad():
            waiting = self._waiting()
            update = self._update_together if type(self).update is Optimizer.update and self._are_apart(waiting) else self._update_each
            for params, options in waiting:
                for p in params:
                    p.version.wrote(p.array)    # before: also where an update fails half-way
                update(params, options)
        return loss

    def _waiting(self):
        """(parameters with a gradient, options) of each group: checked together, before the first of them moves."""
        waiting = [([p for p in group["params"] if p.grad is not None], _as_numbers(group)) for group in self.param_groups]
        for p in (p for params, _ in waiting for p in params):
            self._check_devices(p)
            if not is_writable(p.array):
                raise RuntimeError(f"{self._name()}: a parameter of shape {tuple(p.shape)} cannot be updated in place: it is expanded, "
                                   f"so that one number stands for several elements, or its memory is read-only; make it from "
                                   f"tensor.clone()")
        return waiting

    def _check_devices(self, p):
        """RuntimeError where a parameter has moved and what belongs to it has not. The step count is a number on the CPU."""
        if "cupy" not in sys.modules:           # there is one device only
            return
        state = [value.array for name, value in self.state.get(p, {}).items() if isinstance(value, Tensor) and name != "step"]
        check_one_device(f"{self._name()} (a parameter, its gradient and its state; call model.to(device) before the first step, or "
                         f"load the optimizer's state_dict() anew after it)", [p.array, p.grad.array, *state])

    def _are_apart(self, waiting):
        """True where no parameter, and no part of the state, lies in memory of another or of a gradient: then no order matters."""
        params = [p for params, _ in waiting for p in params]
        written = [p.array for p in params] + [value.array for p in params for value in self.state[p].values() if isinstance(value, Tensor)]
        owners = {id(owner(array)) for array in written}
        return len(owners) == len(written) and owners.isdisjoint([id(owner(p.grad.array)) for p in params])

    def _update_each(self, params, options):
        for p in params:
            self._update(p, options)

    def _update_together(self, params, options):
        """One run of the rule for all that it treats alike. A GPU would only have more to launch, and bfloat16 is widened first."""
        alike = defaultdict(list)
        for p in params:
            if not isinstance(p.array, np.ndarray) or is_bfloat16(p.array):
                self._update(p, options)
            else:
                step, arrays, numbers = self.rule(p.array, self.state[p], options)
                alike[p.array.dtype, step, numbers].append((p.array, p.grad.array, *arrays))
        for (_, step, numbers), parameters in alike.items():
            pieces.run(step, parameters, numbers)

    def _update(self, p, options):
        """`update` of one parameter. For bfloat16 it gets float32, and what it has written is rounded."""
        if not is_bfloat16(p.array):
            return self.update(p.array, p.grad.array, self.state[p], options)
        array, state = widened(p.array), {name: _with_array(widened, value) for name, value in self.state[p].items()}
        self.update(array, widened(p.grad.array), state, options)
        p.array[...] = array
        self.state[p] = {name: value if name == "step" else _with_array(lambda a: a.astype(p.array.dtype), value)
                         for name, value in state.items()}

    def update(self, p, g, state, group):
        step, arrays, numbers = self.rule(p, state, group)
        step(p, g, *arrays, *numbers)

    def rule(self, p, state, group):
        raise NotImplementedError(f"{self._name()} defines no update(p, g, state, group)")

    # --- saving and loading ---------------------------------------------------------------------------------------------

    def state_dict(self):
        """{"state": {index: {name: value}}, "param_groups": [...]}: parameters by their index, tensors copied."""
        index = {id(p): i for i, p in enumerate(self._params())}
        state = {index[id(p)]: {name: _copy(value) for name, value in entry.items()} for p, entry in self.state.items() if entry}
        groups = [{**_options(group), "params": [index[id(p)] for p in group["params"]]} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict):
        """Takes over a copy of a state dict; state tensors get their parameter's dtype and device.

        ValueError, and nothing changed, if the groups or the shapes are not those of this optimizer.
        """
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(f"{self._name()}: loaded state dict has parameter groups of "
                             f"{[len(g['params']) for g in groups]} parameters, this optimizer has "
                             f"{[len(g['params']) for g in self.param_groups]}")
        own = dict(zip((i for g in groups for i in g["params"]), self._params()))
        groups = [{**self.defaults, **_names(mine), **_options(theirs), "params": mine["params"]}
                  for theirs, mine in zip(groups, self.param_groups)]
        for group in groups:
            self.check_options(group)
        state = defaultdict(dict)
        for index, entry in state_dict["state"].items():
            if index not in own:
                raise ValueError(f"{self._name()}: loaded state is for parameter {index}, but the groups hold {list(own)}")
            state[own[index]] = {name: self._adopt(name, value, own[index]) for name, value in entry.items()}
        self.state, self.param_groups = state, groups

    def _params(self):
        return [p for group in self.param_groups for p in group["params"]]

    def _adopt(self, name, value, p):
        """A copy of a loaded state value that fits its parameter; the step count is a number on the CPU."""
        if name == "step":
            return tensor(float(value), device="cpu")
        if not isinstance(value, Tensor):
            return value
        if tuple(value.shape) != tuple(p.shape):
            raise ValueError(f"{self._name()}: loaded {name} has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}; "
                             f"is the order of the parameters the same?")
        return value.detach().clone().to(device=p.device, dtype=p.dtype)

    def __repr__(self):
        lines = []
        for i, group in enumerate(self.param_groups):
            lines += [f"Parameter Group {i}"] + [f"    {name}: {group[name]}" for name in sorted(_options(group))]
        return f"{self._name()} (\n" + "\n".join(lines) + "\n)"


_SPOKEN = {"lr": "learning rate", "weight_decay": "weight_decay value", "eps": "epsilon value", "momentum": "momentum value"}


def _with_array(function, value):
    return constant(function(value.array)) if isinstance(value, Tensor) else value


def _as_numbers(group):
    """The group with numbers in place of 0-d tensors: a learning rate that is one is read once a step, not for each parameter."""
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}


def _options(group):
    """All but the parameters, copied."""
    return {name: _copy(value) for name, value in group.items() if name != "params"}


def _names(group):
    return {"param_names": group["param_names"]} if "param_names" in group else {}


def _copy(value):
    return value.detach().clone() if isinstance(value, Tensor) else value
