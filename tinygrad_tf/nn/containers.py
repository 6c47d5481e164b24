"""Modules that hold other modules (or parameters) under numbers or names."""
from collections import OrderedDict
from itertools import groupby

from ..tensor import Tensor
from .module import Module, Parameter, indent


class _Numbered(Module):
    """What Sequential and ModuleList share: children in order, under the names "0", "1", …"""

    def __len__(self):
        return len(self._modules)

    def __iter__(self):
        return iter(self._modules.values())

    def _name(self, index):
        """The name of the child at an index, which may be negative."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {self._get_name()} of length {len(self)}")
        return list(self._modules)[index]

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self._of(list(self._modules.items())[index])
        return self._modules[self._name(index)]

    def __setitem__(self, index, module):
        self.add_module(self._name(index), module)

    def __delitem__(self, index):
        gone = list(self._modules)[index] if isinstance(index, slice) else [self._name(index)]
        self._renumber([m for name, m in self._modules.items() if name not in gone])

    def _renumber(self, modules):
        self._modules = {str(i): module for i, module in enumerate(modules)}

    def append(self, module):
        self.add_module(str(len(self)), module)
        return self

    def extend(self, modules):
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index, module):
        """As of a list, but IndexError for a place outside [−length, length]."""
        modules = list(self)
        if not -len(self) <= index <= len(self):
            raise IndexError(f"index {index} is out of range for an insertion into {self._get_name()} of length {len(self)}")
        self.append(module)                     # checks that it is one
        modules.insert(index, module)
        self._renumber(modules)
        return self

    def pop(self, index=-1):
        module = self[index]
        del self[index]
        return module

    def __add__(self, other):
        return type(self)._of(enumerate([*self, *other]))

    def __iadd__(self, other):
        return self.extend(other)


class Sequential(_Numbered):
    """y = f_n(… f_2(f_1(x))).  `Sequential(f1, f2, …)`, or `Sequential(OrderedDict(name=f1, …))`."""

    def __init__(self, *modules):
        super().__init__()
        named = modules[0] if len(modules) == 1 and isinstance(modules[0], dict) else dict(enumerate(modules))
        for name, module in named.items():
            self.add_module(str(name), module)

    @classmethod
    def _of(cls, items):
        return cls(OrderedDict((str(name), module) for name, module in items))

    def forward(self, x):
        for module in self:
            x = module(x)
        return x


class ModuleList(_Numbered):
    """A list whose modules are children, so that their parameters are found. It has no forward: loop over it."""

    def __init__(self, modules=()):
        super().__init__()
        self.extend(modules)

    @classmethod
    def _of(cls, items):
        return cls([module for _, module in items])

    def _child_lines(self):
        """Neighbours that print the same become one line, "(0-3): 4 x Linear(…)"."""
        lines = []
        for text, run in groupby(enumerate(self), lambda item: repr(item[1])):
            numbers = [i for i, _ in run]
            name, count = str(numbers[0]), ""
            if len(numbers) > 1:
                name, count = f"{numbers[0]}-{numbers[-1]}", f"{len(numbers)} x "
            lines.append(f"({name}): {count}{indent(text)}")
        return lines


class ModuleDict(Module):
    """A dictionary whose modules are children. It has no forward: look them up."""

    def __init__(self, modules=()):
        super().__init__()
        self.update(modules)

    def __getitem__(self, key):
        return self._modules[key]

    def __setitem__(self, key, module):
        self.add_module(key, module)

    def __delitem__(self, key):
        del self._modules[key]

    def __len__(self):
        return len(self._modules)

    def __iter__(self):
        return iter(self._modules)

    def __contains__(self, key):
        return key in self._modules

    def keys(self):
        return self._modules.keys()

    def values(self):
        return self._modules.values()

    def items(self):
        return self._modules.items()

    def update(self, modules):
        for key, module in dict(modules).items():
            self[key] = module

    def pop(self, key):
        return self._modules.pop(key)

    def clear(self):
        self._modules.clear()


class ParameterList(Module):
    """A list of parameters that the module above it finds; plain tensors become parameters."""

    def __init__(self, values=()):
        super().__init__()
        self.extend(values)

    def __len__(self):
        return len(self._parameters)

    def __iter__(self):
        return iter(self._parameters.values())

    def __getitem__(self, index):
        values = list(self)[index]
        return ParameterList(values) if isinstance(index, slice) else values

    def __setitem__(self, index, value):
        self.register_parameter(list(self._parameters)[index], _parameter(value))

    def append(self, value):
        self.register_parameter(str(len(self)), _parameter(value))
        return self

    def extend(self, values):
        for value in list(values):
            self.append(value)
        return self

    def extra_repr(self):
        return "\n".join(f"({i}): Parameter of shape {tuple(p.shape)}, {p.dtype}" for i, p in enumerate(self))


def _parameter(value):
    return Parameter(value) if isinstance(value, Tensor) and not isinstance(value, Parameter) else value
