"""Sequences of unequal length in one batch: filled up on either side, so that the padding has no effect.        (guide 15.2)

valid_tokens    who is seen: a real token never reads padding
−100            who counts: no loss where there is nothing to predict, or nothing that predicts
position_ids    real tokens are counted: 0 stands at the first of a row, wherever that is

None of them replaces another.
"""
from dataclasses import dataclass, field, fields, replace

import numpy as np

from ..arguments import whole_number
from ..autograd import IGNORED  # the target that takes no part in the loss: `F.cross_entropy` leaves it out
from ..creation import as_tensor
from ..nn.positions import count_positions
from ..tensor import Tensor
from .tokenizers import as_ids

SIDES = ("left", "right")


@dataclass(eq=False)
class LMBatch:
    """What a language model is called with: model(**batch). All tensors are [B, T], on one device.

    targets[b, t] is the token after token_ids[b, t], or −100. segment_ids tell the texts of a packed row apart (data/packing.py).
    """
    token_ids: Tensor
    targets: Tensor
    valid_tokens: Tensor = None
    position_ids: Tensor = None
    segment_ids: Tensor = None
    pieces: list = field(default_factory=list, repr=False)      # of a packed batch: where each piece of a text stands

    def keys(self):
        return [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]

    def __getitem__(self, name):
        return getattr(self, name)

    def to(self, device):
        return replace(self, **{name: self[name].to(device) for name in self.keys()})

    def rows(self, index):
        """The batch of some of its rows, in that order.    index: whole numbers, or a slice"""
        return replace(self, **{name: self[name][index] for name in self.keys()}, pieces=[])

    @property
    def num_targets(self):
        """How many tokens are predicted: what a mean over this batch is divided by."""
        return int((self.targets != IGNORED).sum())

    def parts(self, n):
        """(batch, share) of n parts, rows side by side, of a share of the targets each: Σ share · loss is the loss of the whole.

        So it is with the gradients (guide 16.2). A part in which nothing counts has no loss, and is left out.
        """
        return self._parts(whole_number("LMBatch.parts", "n", n, least=1))

    def _parts(self, n):
        whole = self.num_targets
        for some in row_slices(len(self.token_ids), n):
            part = self.rows(some)
            if part.num_targets:
                yield part, part.num_targets / whole

    @property
    def real_share(self):
        """The share of its places in which a real token stands; the rest is computed, and thrown away. Of no places it is 1."""
        real = self.segment_ids >= 0 if self.valid_tokens is None and self.segment_ids is not None else self.valid_tokens
        return int(real.sum()) / real.numel() if real is not None and real.numel() else 1.0


def row_slices(B, n):
    """B rows as n slices side by side, or as B where there are fewer rows; their lengths differ by one at most."""
    return [slice(some[0], some[-1] + 1) for some in np.array_split(np.arange(B), min(n, B))] if B else []


def make_lm_batch(sequences, pad_id, padding_side="right", device=None):
    """(inputs, targets, valid_tokens), each [B, T], of lists of ids with at least two each; T is the longest less one.   (guide 15.2)

    targets are −100 where the input or the target is padding. ValueError for no sequence, or one too short.
    """
    sequences = checked_sequences("make_lm_batch", sequences)
    if short := [row for row, ids in enumerate(sequences) if len(ids) < 2]:
        raise ValueError(f"make_lm_batch: a sequence needs two tokens, one to read and one to predict, but sequence {short[0]} has "
                         f"{len(sequences[short[0]])}; leave it out, or use pad_sequences, where such a row counts nothing")
    batch = pad_sequences(sequences, pad_id, padding_side, device)
    return batch.token_ids, batch.targets, batch.valid_tokens


def pad_sequences(sequences, pad_id, padding_side="right", device=None):
    """The `LMBatch` of sequences of ids: as `make_lm_batch`, with position_ids, cumsum(valid_tokens) − 1 and 0 at padding.

    A sequence of one token or none is a row that counts nothing: all its targets are −100. ValueError where no row counts.
    """
    sequences, pad_id = checked_sequences("pad_sequences", sequences), whole_number("pad_sequences", "pad_id", pad_id, least=0)
    if max(map(len, sequences)) < 2:
        raise ValueError("pad_sequences: no sequence has two tokens, one to read and one to predict: the batch would count nothing")
    full, valid = padded(sequences, padding_side, pad_id)
    targets = np.where(valid[:, :-1] & valid[:, 1:], full[:, 1:], IGNORED)      # on the left, the first real target follows padding
    token_ids, targets, valid = (as_tensor(x, device=device) for x in (full[:, :-1].copy(), targets, valid[:, :-1].copy()))
    position_ids = count_positions(token_ids.shape[1], valid, token_ids.device).masked_fill(~valid, 0)
    return LMBatch(token_ids, targets, valid, position_ids)


def padded(sequences, side="right", pad_id=0):
    """(ids int64 [B, T], valid_tokens bool [B, T]) as arrays, T the longest; filled up with pad_id on that side."""
    if side not in SIDES:
        raise ValueError(f"padding_side must be 'left' or 'right', got {side!r}")
    T = max(map(len, sequences))
    ids, valid = np.full((len(sequences), T), pad_id, np.int64), np.zeros((len(sequences), T), bool)
    for row, sequence in enumerate(sequences):
        where = slice(T - len(sequence), T) if side == "left" else slice(len(sequence))
        ids[row, where], valid[row, where] = sequence, True
    return ids, valid


def checked_sequences(op, sequences):
    """A list of int64 arrays [N]. ValueError or TypeError, with the number of the sequence, for what is none."""
    arrays = [_checked_ids(op, number, ids) for number, ids in enumerate(sequences)]
    if not arrays:
        raise ValueError(f"{op}: there are no sequences; a batch needs at least one")
    return arrays


def _checked_ids(op, number, ids):
    try:
        ids = as_ids(ids)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{op}: sequence {number}: {error}") from None
    if ids.size and ids.min() < 0:          # −100 would be a target that silently does not count
        raise ValueError(f"{op}: sequence {number} has the id {ids.min()}; ids are at least 0")
    return ids
