"""`Module`: a tree of layers that knows its parameters, its buffers and its children by name. `Parameter`: a trained tensor.

A module keeps three tables, each from a name to an object: `_parameters`, `_buffers`, `_modules`. Assigning an attribute
(`self.weight = Parameter(...)`) files it into the right one, and everything else here walks these tables.
"""
import itertools
from collections import OrderedDict, namedtuple

from ..autograd import is_gathering, no_grad
from ..backend import is_writable
from ..dtypes import as_dtype
from ..tensor import Tensor, device_and_dtype

_TABLES = ("_parameters", "_buffers", "_modules")
_changes = itertools.count()
_now = [next(_changes)]


def changes():
    """A number that is another one whenever something was assigned to any module, or a hook came or went: for who keeps what they hold."""
    return _now[0]


def _changed():
    _now[0] = next(_changes)


# --- hooks --------------------------------------------------------------------------------------------------------

class RemovableHandle:
    """What registering a hook returns: `handle.remove()` takes the hook out again; so does leaving a `with handle:`."""

    _next_id = itertools.count().__next__

    def __init__(self, hooks):
        self.hooks, self.id = hooks, RemovableHandle._next_id()

    def remove(self):
        self.hooks.pop(self.id, None)
        _changed()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.remove()


def _register(hooks, entry, first):
    handle = RemovableHandle(hooks)
    hooks[handle.id] = entry
    _changed()
    if first:
        hooks.move_to_end(handle.id, last=False)
    return handle


# --- names --------------------------------------------------------------------------------------------------------

def _join(prefix, name):
    return f"{prefix}.{name}" if prefix else name


def indent(text):
    """Every line but the first two spaces further to the right."""
    return text.replace("\n", "\n  ")


class _LoadResult(namedtuple("_LoadResult", ["missing_keys", "unexpected_keys"])):
    """What `load_state_dict` returns: the names that were missing, and those that the model does not have."""

    def __repr__(self):
        return "<All keys matched successfully>" if not any(self) else super().__repr__()


class Parameter(Tensor):
    """A tensor that a module trains: it shares the memory of `data`, has no history, and requires a gradient."""
    __slots__ = ()

    def __init__(self, data=None, requires_grad=True):
        data = Tensor() if data is None else data
        if not isinstance(data, Tensor):
            raise TypeError(f"Parameter: expected a Tensor, got {type(data).__name__}; make one with tinygrad_tf.tensor(...)")
        self._set(data.array, None, data.version)
        self.requires_grad_(requires_grad)

    def __repr__(self):
        return "Parameter containing:\n" + super().__repr__()

    def __copy__(self):
        return Parameter(self.detach(), self.requires_grad)

    def __deepcopy__(self, memo):
        """A parameter with its own memory and without gradient; what was tied to this one is tied to the copy."""
        memo[id(self)] = copied = Parameter(self.detach().clone(), self.requires_grad)
        return copied


class Module:
    """The base of every layer and model: define `__init__` and `forward(*inputs)`, and call the object.

        class Double(Module):
            def __init__(self):
                super().__init__()                     # first, else there are no tables to assign into
                self.scale = Parameter(tinygrad_tf.tensor(2.0))

            def forward(self, x):
                return self.scale * x
    """

    def __init__(self):
        self.training = True
        self._parameters, self._buffers, self._modules = {}, {}, {}
        self._non_persistent_buffers_set = set()
        self._forward_pre_hooks, self._forward_hooks = OrderedDict(), OrderedDict()

    def forward(self, *args, **kwargs):
        raise NotImplementedError(f"Module [{self._get_name()}] is missing the required \"forward\" function; "
                                  f"define forward(self, ...) in its class")

    def __call__(self, *args, **kwargs):
        """forward, with the hooks before and after it; a hook that returns something other than None replaces the value."""
        for hook, with_kwargs in self._forward_pre_hooks and tuple(self._forward_pre_hooks.values()):
            args, kwargs = self._run_pre_hook(hook, with_kwargs, args, kwargs)
        out = self.forward(*args, **kwargs)
        for hook, with_kwargs in self._forward_hooks and tuple(self._forward_hooks.values()):
            changed = hook(self, args, kwargs, out) if with_kwargs else hook(self, args, out)
            out = out if changed is None else changed
        return out

    def _run_pre_hook(self, hook, with_kwargs, args, kwargs):
        changed = hook(self, args, kwargs) if with_kwargs else hook(self, args)
        if changed is None:
            return args, kwargs
        if not with_kwargs:
            return (changed if isinstance(changed, tuple) else (changed,)), kwargs
        if not (isinstance(changed, tuple) and len(changed) == 2):
            raise RuntimeError(f"a forward pre-hook with kwargs must return None or (args, kwargs), got {type(changed).__name__}")
        return changed

    def register_forward_pre_hook(self, hook, *, prepend=False, with_kwargs=False):
        """hook(module, args) before each forward, or hook(module, args, kwargs). Returns a handle with `.remove()`."""
        return _register(self._forward_pre_hooks, (hook, with_kwargs), prepend)

    def register_forward_hook(self, hook, *, prepend=False, with_kwargs=False):
        """hook(module, args, out) after each forward, or hook(module, args, kwargs, out). Returns a handle with `.remove()`."""
        return _register(self._forward_hooks, (hook, with_kwargs), prepend)

    # --- attributes live in three tables --------------------------------------------------------------------------

    def __setattr__(self, name, value):
        """Files Parameters and Modules into their tables; tying two layers is `a.weight = b.weight`."""
        _changed()
        if isinstance(value, Parameter):
            self._file("_parameters", name, value)
        elif isinstance(value, Module):
            self._file("_modules", name, value)
        elif not self._replace(name, value):
            object.__setattr__(self, name, value)

    def _file(self, table, name, value):
        """Puts a value under a name into one table, and takes the name out of everything else."""
        if table not in self.__dict__:
            raise AttributeError(f"{self._get_name()}: cannot assign {name!r} before Module.__init__() was called; "
                                 f"make super().__init__() the first line of {self._get_name()}.__init__")
        self.__dict__.pop(name, None)
        for other in _TABLES:
            if other != table:
                self.__dict__[other].pop(name, None)
        self._non_persistent_buffers_set.discard(name)
        self.__dict__[table][name] = value
        _changed()

    def _replace(self, name, value):
        """Assigns something that is no Parameter or Module to a registered name; False where the name is in no table."""
        for table, allowed, kind in (("_parameters", (), "Parameter"), ("_modules", (), "Module"), ("_buffers", Tensor, "Tensor")):
            if name in self.__dict__.get(table, ()):
                if value is not None and not isinstance(value, allowed):
                    raise TypeError(f"{self._get_name()}.{name} is registered as a {kind}: cannot assign a {type(value).__name__} "
                                    f"to it (a {kind} or None expected); to change its values write into it under no_grad(), "
                                    f"as with copy_()")
                if is_gathering():
                    raise RuntimeError(f"{self._get_name()}.{name} is a {kind}, and was assigned to while threads share the module: which "
                                       f"of them comes last is chance; assign outside of the shards, or use one thread")
                self.__dict__[table][name] = value
                return True
        return False

    def __getattr__(self, name):
        for table in _TABLES:
            entries = self.__dict__.get(table, {})
            if name in entries:
                return entries[name]
        hint = "" if "_modules" in self.__dict__ else "; was super().__init__() forgotten in its __init__?"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __delattr__(self, name):
        _changed()
        for table in _TABLES:
            if name in self.__dict__.get(table, ()):
                del self.__dict__[table][name]
                self._non_persistent_buffers_set.discard(name)
                return
        object.__delattr__(self, name)

    def __dir__(self):
        names = itertools.chain(super().__dir__(), *(self.__dict__.get(table, ()) for table in _TABLES))
        return sorted({name for name in names if not name[:1].isdigit()})

    def _check_new_name(self, table, name, kind):
        if not isinstance(name, str):
            raise TypeError(f"{kind} name should be a string, got {type(name).__name__}")
        if "." in name or not name:
            raise KeyError(f"{kind} name can't be empty or contain \".\", got {name!r}")
        if hasattr(self, name) and name not in self.__dict__[table]:
            raise KeyError(f"attribute {name!r} already exists in {self._get_name()}")

    def register_parameter(self, name, param):
        """The same as assigning it; `None` registers a name without a parameter, as a layer without bias does."""
        self._check_new_name("_parameters", name, "parameter")
        if param is not None and not isinstance(param, Parameter):
            raise TypeError(f"cannot assign a {type(param).__name__} as parameter {name!r}; wrap it: Parameter(tensor)")
        self._file("_parameters", name, param)

    def register_buffer(self, name, tensor, persistent=True):
        """A tensor that belongs to the module and is not trained: it moves with `.to()`, and is saved if persistent."""
        self._check_new_name("_buffers", name, "buffer")
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"cannot assign a {type(tensor).__name__} as buffer {name!r}; a Tensor or None is required")
        self._file("_buffers", name, tensor)
        if not persistent:
            self._non_persistent_buffers_set.add(name)

    def add_module(self, name, module):
        """The same as assigning it, for names that are no identifiers: Sequential's children are "0", "1", …"""
        self._check_new_name("_modules", name, "module")
        if module is not None and not isinstance(module, Module):
            raise TypeError(f"{type(module).__name__} is not a Module subclass; child {name!r} of {self._get_name()} must be one")
        self._file("_modules", name, module)

    register_module = add_module

    def get_submodule(self, target):
        """The module at a dotted path: `get_submodule("blocks.0.attention")`; "" is the module itself."""
        module = self
        for name in target.split(".") if target else ():
            module = module._modules.get(name) if isinstance(module, Module) else None
            if module is None:
                raise AttributeError(f"{self._get_name()} has no module {target!r}: there is no {name!r} on that path")
        return module

    def get_parameter(self, target):
        return self._get_member("_parameters", target, "parameter")

    def get_buffer(self, target):
        return self._get_member("_buffers", target, "buffer")

    def _get_member(self, table, target, kind):
        path, _, name = target.rpartition(".")
        entries = getattr(self.get_submodule(path), table)
        if entries.get(name) is None:
            raise AttributeError(f"{self._get_name()} has no {kind} {target!r}; there are {', '.join(entries) or 'none'}")
        return entries[name]

    # --- walking the tree -----------------------------------------------------------------------------------------

    def named_children(self):
        """(name, child) of each direct child once, also where two names share it."""
        seen = set()
        for name, child in self._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                yield name, child

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        """(dotted name, module) of the module itself and all below it, parents first."""
        memo = set() if memo is None else memo
        if remove_duplicate and id(self) in memo:
            return
        memo.add(id(self))
        yield prefix, self
        for name, child in self._modules.items():
            if child is not None:
                yield from child.named_modules(memo, _join(prefix, name), remove_duplicate)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """(dotted name, Parameter); a tied one comes once, under its first name."""
        return self._named_members("_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        return self._named_members("_buffers", prefix, recurse, remove_duplicate)

    def _named_members(self, table, prefix, recurse, remove_duplicate):
        seen = set()
        for path, module in self.named_modules(None, prefix, remove_duplicate) if recurse else [(prefix, self)]:
            for name, value in module.__dict__[table].items():
                if value is None or (remove_duplicate and id(value) in seen):
                    continue
                seen.add(id(value))
                yield _join(path, name), value

    def children(self):
        return (child for _, child in self.named_children())

    def modules(self):
        return (module for _, module in self.named_modules())

    def parameters(self, recurse=True):
        return (p for _, p in self.named_parameters(recurse=recurse))

    def buffers(self, recurse=True):
        return (b for _, b in self.named_buffers(recurse=recurse))

    def apply(self, fn):
        """fn(module) on every module below this one, then on this one. Returns self."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    # --- modes, gradients, dtype and device ----------------------------------------------------------------------------

    def train(self, mode=True):
        """Dropout and its like act in training mode and not in evaluation mode. Returns self."""
        if not isinstance(mode, bool):
            raise ValueError(f"training mode is expected to be boolean, got {type(mode).__name__}")
        for module in self.modules():
            module.training = mode
        return self

    def eval(self):
        return self.train(False)

    def requires_grad_(self, requires_grad=True):
        """Freezes (False) or unfreezes every parameter. Returns self."""
        for p in self.parameters():
            p.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none=True):
        """Forgets the gradients of all parameters, or fills them with zeros."""
        for p in (p for p in self.parameters() if p.grad is not None):
            if set_to_none:
                p.grad = None
            else:
                p.grad.zero_()

    def to(self, *args, **kwargs):
        """to(device), to(dtype), to(device, dtype): parameters and buffers move in place and keep their identity.

        A dtype changes floating-point tensors only, and must be one itself (TypeError). Returns self.
        """
        device, dtype = _checked_device_and_dtype(*args, **kwargs)
        return self._apply(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None))

    def float(self):
        return self.to(dtype="float32")

    def double(self):
        return self.to(dtype="float64")

    def half(self):
        return self.to(dtype="float16")

    def bfloat16(self):
        return self.to(dtype="bfloat16")

    def cpu(self):
        return self.to(device="cpu")

    def cuda(self, device="cuda"):
        return self.to(device=device)

    def _apply(self, change):
        """Gives every parameter, gradient and buffer the memory of change(tensor); the objects, and so the ties, stay."""
        with no_grad():
            for tensor in itertools.chain(self.parameters(), self.buffers()):
                tensor.take_memory(change(tensor.detach()))
                if tensor.grad is not None:
                    tensor.grad.take_memory(change(tensor.grad.detach()))
        return self

    # --- saving and loading --------------------------------------------------------------------------------------------

    def _saved_tensors(self):
        """(key, tensor) of all that a state dict holds; a tied parameter comes under each of its names."""
        for path, module in self.named_modules(remove_duplicate=False):
            for name, p in module._parameters.items():
                if p is not None:
                    yield _join(path, name), p
            for name, b in module._buffers.items():
                if b is not None and name not in module._non_persistent_buffers_set:
                    yield _join(path, name), b

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """{key: tensor} of parameters and persistent buffers. The tensors are the live memory: deepcopy for a snapshot."""
        state = OrderedDict() if destination is None else destination
        for key, tensor in self._saved_tensors():
            state[prefix + key] = tensor if keep_vars else tensor.detach()
        return state

    def load_state_dict(self, state_dict, strict=True):
        """Copies the values of a state dict into this module. Dtypes, devices, ties and Parameter objects stay.

        RuntimeError if a shape differs, if a tensor of this module is read-only, if tied names hold different values, or,
        when strict, if a key is missing or unexpected: it names all of them, and then nothing was loaded.
        Returns (missing_keys, unexpected_keys).
        """
        if not hasattr(state_dict, "keys"):
            raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict).__name__}")
        own = dict(self._saved_tensors())
        missing, unexpected = [k for k in own if k not in state_dict], [k for k in state_dict if k not in own]
        errors = _misfits(own, state_dict)
        if strict and unexpected:
            errors.insert(0, "Unexpected key(s) in state_dict: " + ", ".join(f'"{k}"' for k in unexpected) + ". ")
        if strict and missing:
            errors.insert(0, "Missing key(s) in state_dict: " + ", ".join(f'"{k}"' for k in missing) + ". ")
        if errors:
            raise RuntimeError(f"Error(s) in loading state_dict for {self._get_name()}:\n\t" + "\n\t".join(errors))
        with no_grad():
            for key in (key for key in own if key in state_dict):
                own[key].copy_(state_dict[key])
        return _LoadResult(missing, unexpected)

    # --- printing -------------------------------------------------------------------------------------------------------

    def _get_name(self):
        return type(self).__name__

    def extra_repr(self):
        """What stands between the parentheses of the printed line: "in_features=8, out_features=4"."""
        return ""

    def _child_lines(self):
        return [f"({name}): {indent(repr(child))}" for name, child in self._modules.items()]

    def __repr__(self):
        own, lines = self.extra_repr(), self._child_lines()
        if not lines and "\n" not in own:
            return f"{self._get_name()}({own})"
        return f"{self._get_name()}(\n  " + "\n  ".join([line for line in own.split("\n") if line] + lines) + "\n)"


def _checked_device_and_dtype(*args, device=None, dtype=None, non_blocking=False):
    """`device_and_dtype`; TypeError for a dtype that no parameter can have."""
    device, dtype = device_and_dtype(args, device, dtype)
    dtype = None if dtype is None else as_dtype(dtype)
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"Module.to only accepts floating point dtypes, got {dtype}")
    return device, dtype


def _misfits(own, state_dict):
    """One line for each entry that cannot be loaded whatever `strict` says: no tensor, another shape, no place, a broken tie."""
    errors, first_key = [], {}
    for key in (k for k in own if k in state_dict):
        value, wanted = state_dict[key], own[key]
        if not isinstance(value, Tensor):
            errors.append(f"{key}: expected a Tensor, got {type(value).__name__}. ")
        elif tuple(value.shape) != tuple(wanted.shape):
            errors.append(f"size mismatch for {key}: the state dict has shape {tuple(value.shape)}, "
                          f"the model has {tuple(wanted.shape)}. ")
        elif not is_writable(wanted.array):
            errors.append(f"{key}: the model's tensor cannot be written, it is expanded or read-only; make it from tensor.clone(). ")
        elif not _equal(state_dict[first_key.setdefault(id(wanted), key)], value):
            errors.append(f"{key} and {first_key[id(wanted)]} are one tied tensor in the model, "
                          f"but hold different values in the state dict. ")
    return errors


def _equal(a, b):
    return a is b or bool(((a == b) | ((a != a) & (b != b))).all())        # NaN counts as equal to NaN
