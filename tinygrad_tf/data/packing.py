"""Several texts in one row, so that hardly a place is padding: each is computed as if it stood alone.        (guide 15.3)

segment_ids     0, 1, … for the texts of a row, −1 at padding: i may attend j if both are of one segment, and j ≤ i
position_ids    start anew at 0 in each segment
targets         −100 at the last token of a text: it does not predict how the next one begins
"""
from typing import NamedTuple

import numpy as np

from ..arguments import whole_number
from ..autograd import IGNORED
from ..creation import as_tensor
from .collate import LMBatch, checked_sequences

ORDERS = ("decreasing", "given")
TOO_LONG = ("split", "raise")


class Piece(NamedTuple):
    """Tokens first … first + length − 1 of sequence `text` stand in `row` from `column` on."""
    text: int
    first: int
    length: int
    row: int
    column: int


def pack_sequences(sequences, context, pad_id=0, *, order="decreasing", too_long="split", device=None):
    """The `LMBatch` of sequences of ids, several to a row of T = context tokens; `batch.real_share` says how full the rows are.

    First fit: each sequence goes to the first row with room for it, the longest first (order="given": as they come).
    A sequence of more than context + 1 ids is split: its pieces do not see each other, and no target is lost; or raises ValueError
    (too_long="raise"). One of fewer than two ids predicts nothing, and takes no place. batch.pieces: what stands where.
    """
    sequences = checked_sequences("pack_sequences", sequences)
    context, pad_id = (whole_number("pack_sequences", name, value, least) for name, value, least in
                       (("context", context, 1), ("pad_id", pad_id, 0)))
    for name, value, known in ("order", order, ORDERS), ("too_long", too_long, TOO_LONG):
        if value not in known:
            raise ValueError(f"pack_sequences: {name} must be {' or '.join(map(repr, known))}, got {value!r}")
    if too_long == "raise":
        _require_fit(sequences, context)
    parts = [part for text, ids in enumerate(sequences) for part in _parts(text, len(ids), context)]
    if not parts:
        raise ValueError("pack_sequences: no sequence has two tokens, one to read and one to predict: nothing would be packed")
    if order == "decreasing":
        parts.sort(key=lambda part: -part[2])           # stable: equal lengths keep their order
    pieces = _placed(parts, context)
    arrays = _filled(sequences, pieces, context, pad_id)
    return LMBatch(*(as_tensor(x, device=device) for x in arrays), pieces=pieces)


def first_fit(lengths, context):
    """The row of each length, where it goes to the first row with so much room left.    lengths: [N], at most context; → [N]

    A tree over the rows holds in each node the largest room below it: the way down to the first fit is log₂ N steps.
    """
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room, rows = [context] * (2 * leaves), []
    for length in lengths:
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)         # to the right where nothing on the left has room
        room[node] -= length
        rows.append(node - leaves)
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def _parts(text, n, context):
    """(text, first, length) of the pieces of n ids. The last target of a piece is the next piece's first token: none is lost."""
    return [(text, first, min(context, n - first)) for first in range(0, n - 1, context)]


def _placed(parts, context):
    taken, pieces = {}, []
    for part, row in zip(parts, first_fit([length for *_, length in parts], context)):
        column = taken.get(row, 0)
        pieces.append(Piece(*part, row, column))
        taken[row] = column + part[2]
    return pieces


def _filled(sequences, pieces, context, pad_id):
    """token_ids, targets, valid_tokens, position_ids, segment_ids as arrays [B, T]."""
    shape = 1 + max(piece.row for piece in pieces), context
    token_ids, targets = np.full(shape, pad_id, np.int64), np.full(shape, IGNORED, np.int64)
    positions, segments, texts = np.zeros(shape, np.int64), np.full(shape, -1, np.int64), [0] * shape[0]
    for text, first, length, row, column in pieces:
        here, following = slice(column, column + length), sequences[text][first + 1:first + 1 + length]
        token_ids[row, here], positions[row, here] = sequences[text][first:first + length], np.arange(length)
        targets[row, column:column + len(following)] = following
        segments[row, here] = texts[row]
        texts[row] += 1
    return token_ids, targets, segments >= 0, positions, segments


def _require_fit(sequences, context):
    longest = max(range(len(sequences)), key=lambda text: len(sequences[text]))
    if len(sequences[longest]) > context + 1:
        raise ValueError(f"pack_sequences: sequence {longest} has {len(sequences[longest])} ids, and a row of context = {context} reads "
                         f"{context} and predicts the one after them; use a longer context, or too_long='split'")
