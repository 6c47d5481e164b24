"""Packed rows: what stands where, one table in which packed = separate, and what goes wrong without each part of it."""
import itertools

import numpy as np
import pytest
from device import host
from hypothesis import given
from hypothesis import strategies as st
from test_data_collate import MODELS, T_MAX, V, assert_same, model_of, run

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.data import LMBatch, pack_sequences
from tinygrad_tf.data.packing import Piece, first_fit
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn import masks
from tinygrad_tf.nn.positions import count_in_segments

TEXTS = [[3, 7, 1, 9, 4, 2], [5, 0, 2], [8, 8, 8, 8, 2], [6, 2], [11, 12, 13, 14, 15, 16, 17, 2]]
T = 9                                                       # of a row: three rows of 24 tokens, with padding at the end of one

texts = st.lists(st.lists(st.integers(0, V - 1), max_size=12), max_size=8).filter(lambda found: any(len(ids) > 1 for ids in found))


def tokens_of(packed, sequences):
    """{(text, place): where it stands} of every token that is read."""
    return {(p.text, p.first + i): (p.row, p.column + i) for p in packed.pieces for i in range(p.length)}


# --- what stands where ----------------------------------------------------------------------------------------------------

def test_three_texts_in_a_row_by_hand():
    packed = pack_sequences([[5, 6, 7], [8, 9, 10, 11], [12, 13]], context=10, pad_id=1)
    assert {name: host(packed[name]).tolist()[0] for name in packed.keys()} == {
        "token_ids":    [8, 9, 10, 11, 5, 6, 7, 12, 13, 1],
        "targets":      [9, 10, 11, -100, 6, 7, -100, 13, -100, -100],
        "valid_tokens": [True] * 9 + [False],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 0, 1, 0],
        "segment_ids":  [0, 0, 0, 0, 1, 1, 1, 2, 2, -1]}
    assert packed.pieces == [Piece(1, 0, 4, 0, 0), Piece(0, 0, 3, 0, 4), Piece(2, 0, 2, 0, 7)]
    assert packed.real_share == 9 / 10 == LMBatch(packed.token_ids, packed.targets, segment_ids=packed.segment_ids).real_share
    assert packed.num_targets == 6


def test_the_longest_come_first_unless_the_order_is_given():
    lengths = [3, 5, 2, 7, 4]
    rows = {order: [(p.text, p.row) for p in pack_sequences([[1] * n for n in lengths], 8, order=order).pieces]
            for order in ("decreasing", "given")}
    assert rows["decreasing"] == [(3, 0), (1, 1), (4, 2), (0, 1), (2, 2)]
    assert rows["given"] == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 1)]


@given(st.lists(st.integers(1, 10), max_size=40))
def test_each_goes_to_the_first_row_with_room(lengths):
    room = []
    for length, row in zip(lengths, first_fit(lengths, 10), strict=True):
        expected = next((i for i, left in enumerate(room) if left >= length), len(room))
        room += [10] * (expected == len(room))
        room[row] -= length
        assert row == expected


@given(texts, st.integers(1, 9), st.sampled_from(["decreasing", "given"]))
def test_every_token_but_the_first_is_a_target_once_and_predicted_by_the_one_before_it(sequences, context, order):
    packed = pack_sequences(sequences, context, order=order, device="cpu")
    ids, targets, positions, segments = (packed[name].array for name in ("token_ids", "targets", "position_ids", "segment_ids"))
    places, read = tokens_of(packed, sequences), set()
    for (text, i), place in places.items():
        assert ids[place] == sequences[text][i] and positions[place] == i % context
        following = targets[place] != -100
        assert following == (i + 1 < len(sequences[text]))
        if following:
            assert targets[place] == sequences[text][i + 1]
            read.add((text, i + 1))
    assert read == {(text, i) for text, found in enumerate(sequences) for i in range(1, len(found))}
    assert len(set(places.values())) == len(places) == int((segments >= 0).sum())       # no place is taken twice
    empty = segments < 0
    assert (targets[empty] == -100).all() and (packed.valid_tokens.array == ~empty).all()
    assert packed.real_share == len(places) / ids.size and ids.shape[1] == context


@given(texts, st.integers(1, 9))
def test_segments_are_the_pieces(sequences, context):
    packed = pack_sequences(sequences, context, device="cpu")
    for row, segments in enumerate(packed.segment_ids.array):
        expected = [i for i, piece in enumerate([p for p in packed.pieces if p.row == row]) for _ in range(piece.length)]
        assert segments.tolist() == expected + [-1] * (context - len(expected))


def test_a_long_sequence_is_split_and_loses_no_target():
    packed = pack_sequences([list(range(1, 12))], context=4, order="given")
    assert packed.token_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0]]
    assert packed.targets.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, -100, -100]]
    assert pack_sequences([list(range(1, 6))], 4, too_long="raise").targets.tolist() == [[2, 3, 4, 5]]         # T + 1 ids are not too long
    with pytest.raises(ValueError, match="sequence 1 has 6 ids, and a row of context = 4 reads 4 and predicts the one after"):
        pack_sequences([[1, 2], [1] * 6, [1] * 5], 4, too_long="raise")


def test_texts_that_predict_nothing_take_no_place():
    packed = pack_sequences([[4], [], [1, 2], [7]], 3)
    assert packed.token_ids.tolist() == [[1, 2, 0]] and [p.text for p in packed.pieces] == [2]


def test_rows_of_a_packed_batch():
    packed = pack_sequences(TEXTS, T)
    chosen = packed.rows([2, 0])
    assert torch.equal(chosen.segment_ids, packed.segment_ids[[2, 0]]) and chosen.pieces == []
    assert sum(packed.rows([i]).num_targets for i in range(3)) == packed.num_targets


@pytest.mark.parametrize("options, error, words", [
    ({"context": 0}, ValueError, "context must be at least 1"),
    ({"context": 2.5}, TypeError, "context must be a whole number"),
    ({"context": 4, "pad_id": -1}, ValueError, "pad_id must be at least 0"),
    ({"context": 4, "order": "random"}, ValueError, "order must be 'decreasing' or 'given', got 'random'"),
    ({"context": 4, "too_long": "cut"}, ValueError, "too_long must be 'split' or 'raise', got 'cut'"),
])
def test_options_that_are_none_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        pack_sequences(TEXTS, **options)


@pytest.mark.parametrize("sequences, error, words", [
    ([], ValueError, "pack_sequences: there are no sequences"),
    ([[3], []], ValueError, "no sequence has two tokens"),
    ([[1, 2], [1, -1]], ValueError, "sequence 1 has the id -1"),
    ([[1, 2], [1.5, 2]], TypeError, "sequence 1: token ids must be integers"),
])
def test_sequences_that_cannot_be_packed_are_refused(sequences, error, words):
    with pytest.raises(error, match=words):
        pack_sequences(sequences, 4)


# --- packed = separate ----------------------------------------------------------------------------------------------------

def run_pieces(model, packed):
    """Of each piece read alone: {place: its logits}, the mean loss over all targets, its gradients."""
    model.zero_grad(set_to_none=True)
    logits, total = {}, 0.0
    for piece in packed.pieces:
        here = slice(piece.column, piece.column + piece.length)
        targets = packed.targets[piece.row:piece.row + 1, here]
        count = int((targets != -100).sum())
        found, loss = model(packed.token_ids[piece.row:piece.row + 1, here], targets)
        logits[piece] = host(found)[0]
        (loss * (count / packed.num_targets)).backward()
        total += loss.item() * count / packed.num_targets
    return logits, total, [host(p.grad) for p in model.parameters()]


def assert_packed_is_separate(model, packed, leave_out=()):
    logits, loss, gradients = run(model, {name: packed[name] for name in packed.keys() if name not in leave_out})
    alone, expected, expected_gradients = run_pieces(model, packed)
    for piece, found in alone.items():
        assert_same(logits[piece.row, piece.column:piece.column + piece.length], found)
    assert_same(loss, expected)
    for a, b in zip(gradients, expected_gradients):
        assert_same(a, b)


@pytest.mark.parametrize("leave_out", [(), ("valid_tokens",), ("position_ids",), ("valid_tokens", "position_ids")],
                         ids=["all given", "no valid_tokens", "no position_ids", "neither"])
@pytest.mark.parametrize("heads, position, window", MODELS)
def test_packed_texts_are_separate_texts(heads, position, window, leave_out):
    """Logits, loss and gradients; what is not given, the model finds in segment_ids."""
    assert_packed_is_separate(model_of(heads, position, window), pack_sequences(TEXTS, T), leave_out)


@pytest.mark.parametrize("order, context", list(itertools.product(("decreasing", "given"), (4, T_MAX))))
def test_in_any_order_and_split_too(order, context):
    for position in "learned", "rope":
        assert_packed_is_separate(model_of("GQA", position), pack_sequences(TEXTS, context, order=order))


def test_in_tiles_and_with_blocks_that_are_run_twice():
    model, packed = model_of("GQA", "learned"), pack_sequences(TEXTS, T)
    with nn.functional.sdpa_backend("tiled", tile=(4, 4)):
        assert_packed_is_separate(model, packed)
    model.checkpoint_blocks = True
    assert_packed_is_separate(model, packed)


def test_padding_within_a_packed_row_is_not_counted():
    """A row that something else has packed: the second text begins with padding, and valid_tokens says so."""
    model = model_of("MHA", "learned")
    ids, segments = torch.tensor([[3, 4, 5, 0, 6, 7]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    valid = torch.tensor([[True, True, True, False, True, True]])
    logits, _ = model(ids, valid_tokens=valid, segment_ids=segments)
    assert_same(host(logits)[:, :3], host(model(ids[:, :3])[0]))
    assert_same(host(logits)[:, 4:], host(model(ids[:, 4:])[0]))


def test_experts_are_not_given_the_padding_of_packed_rows():
    """segment_ids alone say what is real, to the feed-forward network too."""
    model = MiniGPT(V, T_MAX, 16, 4, 24, 1, dropout=0.0, ffn=lambda: nn.MoE(16, 24, num_experts=4))
    packed = pack_sequences(TEXTS, T)
    with nn.moe.routings() as routed:
        model(packed.token_ids, segment_ids=packed.segment_ids)
    assert torch.equal(routed[0].valid_tokens, packed.valid_tokens)


# --- each part is needed --------------------------------------------------------------------------------------------------

def differs(packed, **changed):
    """Whether (a logit, the loss) is another one than that of the texts alone."""
    model = model_of("MHA", "learned")
    alone, expected, _ = run_pieces(model, packed)
    logits, loss, _ = run(model, {name: packed[name] for name in packed.keys()} | changed)
    moved = max(np.abs(logits[p.row, p.column:p.column + p.length] - found).max() for p, found in alone.items())
    return bool(moved > 1e-3), bool(abs(loss - expected) > 1e-3)


def test_without_the_mask_the_positions_or_the_joins_it_is_something_else():
    packed = pack_sequences(TEXTS, T)
    joined = host(packed.targets).copy()
    ids, segments = host(packed.token_ids), host(packed.segment_ids)
    at_joins = (segments[:, :-1] != segments[:, 1:]) & (segments[:, 1:] >= 0)
    joined[:, :-1][at_joins] = ids[:, 1:][at_joins]
    assert at_joins.any() and differs(packed) == (False, False)
    assert differs(packed, segment_ids=None) == (True, True)                            # texts read their neighbours
    assert differs(packed, position_ids=torch.arange(T)) == (True, True)                # they begin late
    assert differs(packed, targets=torch.tensor(joined)) == (False, True)               # the end of one predicts the next


def test_the_mask_is_block_diagonal_and_causal():
    segments = host(pack_sequences([[1] * 3, [1] * 2], 6).segment_ids)
    expected = np.zeros((6, 6), bool)
    expected[:3, :3], expected[3:5, 3:5] = np.tri(3), np.tri(2)
    assert (host(masks.packing_mask(torch.tensor(segments)))[0, 0] == expected).all()


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=4).map(lambda runs: [n for n, *_ in runs]),
       st.lists(st.booleans(), min_size=24, max_size=24))
def test_positions_count_the_real_tokens_of_each_run(lengths, real):
    """Against the definition: how many real tokens of its own run stand before it."""
    segments = np.array([[i for i, n in enumerate(lengths) for _ in range(n + 1)]])
    valid = np.array([real[:segments.shape[1]]])
    found = host(count_in_segments(torch.tensor(segments), torch.tensor(valid)))[0]
    for t in np.flatnonzero(valid[0]):
        assert found[t] == sum(valid[0, s] and segments[0, s] == segments[0, t] for s in range(t))
    assert (found >= 0).all()


# --- what a model refuses ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make, error, words", [
    (lambda: torch.zeros(1, 4, dtype=torch.int64), ValueError, r"segment_ids must have one entry for each token, \(2, 4\), got \(1, 4\)"),
    (lambda: torch.zeros(2, 5, dtype=torch.int64), ValueError, r"one entry for each token, \(2, 4\), got \(2, 5\)"),
    (lambda: torch.zeros(2, 4), ValueError, "segment_ids must be whole numbers"),
    (lambda: [[0, 0, 1, 1]] * 2, TypeError, "segment_ids must be a Tensor, got list"),
])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_segments_that_do_not_fit_are_refused(position, make, error, words):
    with pytest.raises(error, match=words):
        model_of("MHA", position)(torch.ones(2, 4, dtype=torch.int64), segment_ids=make())


def test_a_cache_holds_one_text_a_row():
    from tinygrad_tf.generation import KVCache
    ids, cache = torch.ones(1, 4, dtype=torch.int64), KVCache(2, T_MAX)
    with torch.no_grad(), pytest.raises(ValueError, match="segment_ids pack several texts into a row.*without a cache"):
        model_of("MHA", "rope")(ids, segment_ids=torch.zeros(1, 4, dtype=torch.int64), cache=cache)
    assert cache.length == 0


def test_a_batch_without_targets_or_segments_is_still_one():
    assert LMBatch(torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)).keys() == ["token_ids", "targets"]
