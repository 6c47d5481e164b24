"""Token ids to batches of inputs [B, T] and targets [B, T]: the target of a token is the one after it (guide 13.1)."""

import operator

import numpy as np

from .corpora import require_length
from .tokenizers import as_ids


class BatchSampler:
    """Endless random windows of a text, for training: each of the N - T places is equally likely, with replacement.

    ids: integers [N];  context: T;  batch_size: B;  one seed gives one sequence of batches.
    Raises CorpusError where N < T + 1.
    """

    def __init__(self, ids, context, batch_size, seed=0):
        self.ids = as_ids(ids)
        self.context = positive("context", context)
        self.batch_size = positive("batch_size", batch_size)
        require_length(self.ids, self.context, "training text")
        # A negative seed means the 64-bit pattern of it, as in manual_seed.
        self.rng = np.random.Generator(np.random.PCG64(operator.index(seed) % 2**64))

    def next(self):
        """-> inputs [B, T], targets [B, T], int64, neither sharing memory with the other or with ids"""
        starts = self.rng.integers(len(self.ids) - self.context, size=(self.batch_size, 1))
        places = starts + np.arange(self.context)
        return self.ids[places], self.ids[places + 1]

    def state_dict(self):
        """All that decides the batches to come but the ids themselves, as integers and strings that JSON can hold."""
        return {"rng": self.rng.bit_generator.state, **self.sizes()}

    def load_state_dict(self, state):
        """Continues with the batch after the one that was drawn last before `state_dict()`.

        Raises ValueError where the state belongs to another text length, context or batch size, or is damaged.
        """
        for name, size in self.sizes().items():
            if state.get(name) != size:
                raise ValueError(
                    f"BatchSampler.load_state_dict: {name} is {size} here, but {state.get(name)} in the saved state; "
                    f"resume with the text and the sizes that the run began with"
                )
        try:
            self.rng = np.random.Generator(restored_pcg64(state["rng"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"BatchSampler.load_state_dict: the generator's state is damaged: {error}") from error

    def sizes(self):
        return {"tokens": len(self.ids), "context": self.context, "batch_size": self.batch_size}


def evaluation_batches(ids, context, batch_size):
    """ids: integers [N] -> iterator over inputs [B, T], targets [B, T]: each token but the first is a target once.

    Windows side by side, in order; the last batch may have fewer rows, and a last, shorter window comes by itself.
    Weight each batch's mean loss by its number of targets. Raises CorpusError where N < 2.
    """
    ids = as_ids(ids)
    require_length(ids, 1, "held-out text")
    return side_by_side(ids[:-1], ids[1:], positive("context", context), positive("batch_size", batch_size))


def side_by_side(inputs, targets, T, B):
    whole = len(inputs) // T * T
    for start in range(0, whole, B * T):
        window = slice(start, min(start + B * T, whole))
        yield inputs[window].reshape(-1, T).copy(), targets[window].reshape(-1, T).copy()
    if whole < len(inputs):
        yield inputs[None, whole:].copy(), targets[None, whole:].copy()


def positive(name, value):
    """The size as a Python int, which JSON can hold, NumPy's integers included."""
    if operator.index(value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return operator.index(value)


def restored_pcg64(state):
    """The generator in that state. Raises for what NumPy refuses, and for what it takes but no generator ever says."""
    generator = np.random.PCG64()
    generator.state = state
    if generator.state != state or state["state"]["inc"] % 2 == 0:  # of an even increment, it would repeat itself soon
        raise ValueError("PCG64 has an odd increment and integers only")
    return generator
