"""Dropout: random zeros while training, the rest scaled up so that the mean stays."""
import numpy as np

from .. import philox, random
from ..arguments import checked_probability
from ..autograd import Function
from ..backend import array_module
from ._rows import require_float


class Dropout(Function):
    """y = x · keep.    dx = dy · keep.       keep: 0 with probability p, else 1/(1 − p)"""

    def forward(self, x, keep):
        self.saved = keep
        return x * keep

    def backward(self, dy):
        return dy * self.saved


def draw_keep(x, p, shape=None):
    """What dropout multiplies x (or an array of this shape beside x) by.

    On the CPU it is the stream of PyTorch's CPU dropout; on a GPU Philox, with a key from that stream.
    """
    shape = x.shape if shape is None else shape
    if array_module(x) is not np:
        return philox.keep(x, p, shape)
    return random.chosen().dropout_keep(shape, p) * x.dtype.type(1 / (1 - p) if p < 1 else 0)


def dropout(input, p=0.5, training=True, inplace=False):
    """ValueError for p outside [0, 1]; p = 1 gives zeros; outside training, and with p = 0, the input itself."""
    p = checked_probability("dropout", "p", p)
    x = require_float("dropout", input.array)
    if not training or p == 0:
        return input
    keep = draw_keep(x, p)
    return input._write(Dropout.apply, keep) if inplace else Dropout.apply(input, keep)
