"""Embedding: a row of a table for each id; its gradient goes back to that row, and adds up where an id repeats."""
import numpy as np

from ..autograd import constant, no_grad
from ..backend import array_module, at_least_float32
from ._ids import first_bad
from ._rows import scatter_rows
from .shape import Moving


class Embedding(Moving):
    """y = w[ids].    ids: integers of any shape   w: [V_vocab, C]   y: [..., C]

    dw = zeros, then dw[id] += dy for each id; the row of `padding_idx` gets nothing.       (guide 9.1)
    """
    def forward(self, ids, w, padding_idx):
        self.saved, self.rows, self.padding_idx = ids, w.shape[0], padding_idx
        return w.take(ids, axis=0)

    def backward(self, dy):
        ids = self.saved
        dw = scatter_rows(self.rows, ids, at_least_float32(dy))
        if self.padding_idx is not None:
            dw[self.padding_idx] = 0
        return None, dw


def embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0):
    """Rows of `weight` [V_vocab, C] for the ids in `input`. IndexError for an id outside [0, V_vocab): ids never wrap.

    Ids are integers of any width (PyTorch takes int32 and int64). The row of `padding_idx` is returned as it is and gets no
    gradient. With `max_norm`, rows that are looked up and longer than that are first scaled down to it, in place.
    """
    ids, w = input.array, weight.array
    if w.ndim != 2:
        raise RuntimeError(f"embedding: weight must be 2-D, [V_vocab, C], got shape {w.shape}")
    _check_ids("embedding", input, w.shape[0])
    if padding_idx is not None:
        if not -w.shape[0] <= padding_idx < w.shape[0]:
            raise ValueError(f"embedding: padding_idx {padding_idx} must be within the {w.shape[0]} rows of weight")
        padding_idx %= w.shape[0]
    if max_norm is not None:
        _limit_norms(ids, weight, max_norm, norm_type)
    return Embedding.apply(input, weight, padding_idx)


def _check_ids(op, ids, rows):
    if ids.array.dtype.kind not in "iu":
        raise RuntimeError(f"{op}: ids must be integers, got {ids.array.dtype} of shape {ids.array.shape}; convert with .long()")
    if (bad := first_bad(ids, rows)) is not None:
        raise IndexError(f"{op}: id {bad} is out of range for a table of {rows} rows: ids are 0 to {rows - 1}; "
                         f"check that the tokenizer and the table have one vocabulary size")


def _limit_norms(ids, weight, max_norm, norm_type):
    xp = array_module(ids)
    rows = constant(xp.unique(ids))
    with no_grad():
        found = weight[rows]
        norms = found.norm(norm_type, dim=1, keepdim=True)
        weight[rows] = found * (max_norm / (norms + 1e-7)).clamp(max=1.0)


def one_hot(input, num_classes=-1):
    """1 at the place of each id and 0 elsewhere, int64.    ids: [...]   result: [..., num_classes], by default max + 1"""
    ids = input.array
    xp = array_module(ids)
    if ids.dtype.kind not in "iu":
        raise RuntimeError(f"one_hot: ids must be integers, got {ids.dtype}; convert with .long()")
    if num_classes == -1 and not ids.size:
        raise RuntimeError(f"one_hot: cannot infer the number of classes from no ids (shape {ids.shape}); pass num_classes")
    if ids.size and ids.min() < 0:
        raise RuntimeError(f"one_hot: class values must be non-negative, got {int(ids.min())}")
    if num_classes == -1:
        num_classes = int(ids.max()) + 1
    elif ids.size and ids.max() >= num_classes:
        raise RuntimeError(f"one_hot: class values must be smaller than num_classes {num_classes}, got {int(ids.max())}")
    return constant((ids[..., None] == xp.arange(num_classes)).astype(np.int64))
