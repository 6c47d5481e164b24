"""`Size`, the shape of a tensor: a tuple that prints as PyTorch's does; and the named pairs that max, sort and topk return."""
import collections
import functools
import math


class Size(tuple):
    __slots__ = ()

    def __repr__(self):
        return f"torch.Size([{', '.join(map(str, self))}])"

    def numel(self):
        return math.prod(self)

    def __getitem__(self, key):
        part = tuple.__getitem__(self, key)
        return Size(part) if isinstance(key, slice) else part

    def __add__(self, other): return Size(tuple.__add__(self, other))
    def __radd__(self, other): return Size(other + tuple(self))
    def __mul__(self, times): return Size(tuple.__mul__(self, times))
    __rmul__ = __mul__


@functools.cache
def _pair(name):
    return collections.namedtuple(name, ["values", "indices"])


def namedtuple_of(name, values, indices):
    """(values, indices) that also answer to these names."""
    return _pair(name)(values, indices)
