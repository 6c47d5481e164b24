"""How the tensors of a published file become the library's, and back: one `Rule` for those that belong together."""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..autograd import constant
from ..ops.rotary import half_split_to_interleaved, interleaved_to_half_split


class Rule(NamedTuple):
    """load(*arrays of `theirs`) gives the arrays of `ours`, in their order, and save the reverse."""
    theirs: tuple
    ours: tuple
    load: Callable
    save: Callable


def same(theirs, ours):
    """One name for another."""
    return Rule((theirs,), (ours,), lambda x: (x,), lambda x: (x,))


def transposed(theirs, ours):
    """GPT-2's Conv1D holds [in, out], a Linear [out, in]."""
    return Rule((theirs,), (ours,), lambda x: (x.T,), lambda x: (x.T,))


def thirds(theirs, ours, conv1d):
    """q, k and v side by side in one matrix, as GPT-2 has them."""
    def load(x):
        return np.split(x.T if conv1d else x, 3)

    def save(*parts):
        joined = np.concatenate(parts)
        return (joined.T if conv1d else joined,)
    return Rule((theirs,), ours, load, save)


def stacked(theirs, ours):
    """One matrix of each expert, where ours holds all of them, [E, out, in]."""
    return Rule(theirs, (ours,), lambda *xs: (np.stack(xs),), lambda x: tuple(x))


def turned(theirs, ours, head_dim, layout):
    """Rows of q or k. Files have the two features that RoPE turns together half a head apart, a model of layout "interleaved" side by side.

    A GGUF of Llama has them side by side already: `gguf_names.py`.
    """
    if layout == "half_split":
        return same(theirs, ours)
    return Rule((theirs,), (ours,), lambda x: (half_split_to_interleaved(constant(x), head_dim).array,),
                lambda x: (interleaved_to_half_split(constant(x), head_dim).array,))
