"""Token ids to batches of inputs [B, T] and targets [B, T]: the target of a token is the one after it (guide 13.1)."""

import operator

import numpy as np

from .corpora import require_length
from .token_file import held


class BatchSampler:
    """Endless random windows of a text, for training: each of the N - T places is equally likely, with replacement.

    ids: integers [N], or a TokenFile, of which only the windows are read;  context: T;  batch_size: B;  one seed gives
    one sequence of batches. Raises CorpusError where N < T + 1.
    """

    def __init__(self, ids, context, batch_size, seed=0):
        self.ids = held(ids)
        self.context = positive("context", context)
        self.batch_size = positive("batch_size", batch_size)
        require_length(self.ids, self.context, "training text")
        # A negative seed means the 64-bit pattern of it, as in manual_seed.
        self.rng = np.random.Generator(np.random.PCG64(operator.index(seed) % 2**64))

    def next(self):
        """-> inputs [B, T], targets [B, T], int64, neither sharing memory with the other or with ids"""
        starts = self.rng.integers(len(self.ids) - self.context, size=self.batch_size)
        return windows(self.ids, starts, self.context)

    def state_dict(self):
        """All that decides the batches to come but the ids themselves, as integers and strings that JSON can hold."""
        return {"rng": self.rng.bit_generator.state, **self.sizes()}

    def load_state_dict(self, state):
        """Continues with the batch after the one that was drawn last before `state_dict()`.

        Raises ValueError where the state belongs to another text length, context or batch size, or is damaged.
        """
        require_same_sizes("BatchSampler", self.sizes(), state)
        try:
            self.rng = np.random.Generator(restored_pcg64(state["rng"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"BatchSampler.load_state_dict: the generator's state is damaged: {error}") from error

    def sizes(self):
        return {"tokens": len(self.ids), "context": self.context, "batch_size": self.batch_size}


class EpochSampler:
    """Endless windows of a text, each of the W = (N - 1) // T that lie side by side once an epoch, in an order of its own.

    The n-th window that is drawn follows from (seed, n) alone, so that n is all there is to save: a run goes on at the exact
    window, also with another batch size. A batch may hold the last windows of one epoch and the first of the next one.
    The (N - 1) % T tokens after the last window are never read. The arguments and errors are those of BatchSampler.
    """

    def __init__(self, ids, context, batch_size, seed=0):
        self.ids = held(ids)
        self.context = positive("context", context)
        self.batch_size = positive("batch_size", batch_size)
        require_length(self.ids, self.context, "training text")
        self.order = EpochOrder((len(self.ids) - 1) // self.context, seed)
        self.drawn = 0

    @property
    def epoch(self):
        """How many times all windows have been drawn."""
        return self.drawn // self.order.count

    def next(self):
        """-> inputs [B, T], targets [B, T], int64"""
        chosen = self.order(self.drawn + np.arange(self.batch_size))
        self.drawn += self.batch_size
        return windows(self.ids, chosen * self.context, self.context)

    def state_dict(self):
        """All that decides the batches to come but the ids themselves: four whole numbers."""
        return {"drawn": self.drawn, **self.sizes()}

    def load_state_dict(self, state):
        """Continues with the window after the one that was drawn last. Raises ValueError as BatchSampler does."""
        require_same_sizes("EpochSampler", self.sizes(), state)
        if type(state.get("drawn")) is not int or not 0 <= state["drawn"] < 2**62:
            raise ValueError(f"EpochSampler.load_state_dict: the state is damaged: {state.get('drawn')!r:.40} windows were drawn")
        self.drawn = state["drawn"]

    def sizes(self):
        return {"tokens": len(self.ids), "context": self.context, "seed": self.order.seed}


class EpochOrder:
    """n -> the item, 0 to count - 1, that is visited n-th: all of them once an epoch, then all of them in another order.

    The order of an epoch sorts raw words of PCG64, seeded by both: NumPy promises that these are the same in all its versions.
    """

    def __init__(self, count, seed=0):
        self.count, self.seed = positive("count", count), operator.index(seed) % 2**64
        self.epoch = self.items = None              # the order that was asked for last: it follows from seed and epoch

    def __call__(self, n):
        """n: integers [k] -> items [k]"""
        epochs, places = np.divmod(n, self.count)
        items = np.empty_like(places)
        for epoch in np.unique(epochs):
            items[epochs == epoch] = self.of_epoch(int(epoch))[places[epochs == epoch]]
        return items

    def of_epoch(self, epoch):
        if epoch != self.epoch:
            words = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(epoch,))).random_raw(self.count)
            self.epoch, self.items = epoch, np.argsort(words, kind="stable")
        return self.items


def windows(ids, starts, T):
    """ids [N], starts [B] -> ids[start … start + T - 1] and the same one place further, int64 [B, T] each"""
    places = starts[:, None] + np.arange(T)
    return ids[places].astype(np.int64, copy=False), ids[places + 1].astype(np.int64, copy=False)


def require_same_sizes(name, sizes, state):
    """Raises ValueError where a sampler's saved state was made for another text, or with other settings."""
    for key, size in sizes.items():
        if state.get(key) != size:
            raise ValueError(
                f"{name}.load_state_dict: {key} is {size} here, but {state.get(key)} in the saved state; "
                f"resume with the text and the sizes that the run began with"
            )


def evaluation_batches(ids, context, batch_size):
    """ids: integers [N], or a TokenFile -> iterator over inputs [B, T], targets [B, T]: each token but the first is a target once.

    Windows side by side, in order; the last batch may have fewer rows, and a last, shorter window comes by itself.
    Weight each batch's mean loss by its number of targets. Raises CorpusError where N < 2.
    """
    ids = held(ids)
    require_length(ids, 1, "held-out text")
    return side_by_side(ids[:-1], ids[1:], positive("context", context), positive("batch_size", batch_size))


def side_by_side(inputs, targets, T, B):
    whole = len(inputs) // T * T
    for start in range(0, whole, B * T):
        window = slice(start, min(start + B * T, whole))
        yield copied(inputs[window].reshape(-1, T)), copied(targets[window].reshape(-1, T))
    if whole < len(inputs):
        yield copied(inputs[None, whole:]), copied(targets[None, whole:])


def copied(ids):
    return np.array(ids, dtype=np.int64)


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
