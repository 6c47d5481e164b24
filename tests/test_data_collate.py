"""Padded batches: the guide's numbers, and one table in which left = right = unpadded, in logits, loss and gradients."""
import itertools

import numpy as np
import pytest
from device import host
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.data import LMBatch, make_lm_batch, pad_sequences
from tinygrad_tf.data.collate import padded
from tinygrad_tf.models import Decoder, MiniGPT

V, T_MAX, C, H, CFF, L = 23, 12, 16, 4, 24, 2
HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}                      # the number of key and value heads
POSITIONS = ("learned", "rope", "alibi")
WINDOWS = (None, 3)
MODELS = list(itertools.product(HEADS, POSITIONS, WINDOWS))
TEXTS = [[3, 7, 1, 9, 4, 2], [5, 0, 2], [8, 8, 8, 8, 2], [6, 2]]     # id 0, which fills up, is also a token


def model_of(heads, position, window=None):
    """A language model in float64, its weights so large that every token matters."""
    rope = nn.RotaryEmbedding(C // H, max_seq_len=T_MAX) if position == "rope" else None
    model = (Decoder if rope else MiniGPT)(V, T_MAX, C, H, CFF, L, dropout=0.0)
    model.blocks = nn.ModuleList([nn.TransformerBlock(C, H, CFF, 0.0, norm_first=True, num_kv_heads=HEADS[heads], rope=rope, window=window,
                                                      relative_bias=nn.ALiBi(H) if position == "alibi" else None) for _ in range(L)])
    if position == "alibi":
        model.embedding.position = None
    model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64) * (0.3 if p.ndim > 1 else 0.1) + (p if p.ndim == 1 else 0))
    return model


def run(model, batch):
    """(logits, loss, gradients of all parameters), as arrays."""
    model.zero_grad(set_to_none=True)
    logits, loss = model(**batch)
    loss.backward()
    return host(logits), loss.item(), [host(p.grad) for p in model.parameters()]


def run_apart(model, texts):
    """The same of each text alone, without any padding: the logits of each, the mean loss over all targets, its gradients."""
    model.zero_grad(set_to_none=True)
    logits, total, count = [], 0.0, sum(len(text) - 1 for text in texts)
    for text in texts:
        found, loss = model(torch.tensor([text[:-1]]), torch.tensor([text[1:]]))
        logits.append(host(found)[0])
        (loss * ((len(text) - 1) / count)).backward()
        total += loss.item() * (len(text) - 1) / count
    return logits, total, [host(p.grad) for p in model.parameters()]


def assert_same(found, expected, tolerance=1e-10):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def arguments(*sequences, side="right", **options):
    batch = pad_sequences(sequences, 0, side, **options)
    return {name: batch[name].tolist() for name in batch.keys()}


# --- what stands where ----------------------------------------------------------------------------------------------------

def test_the_batch_that_the_guide_makes():
    inputs, targets, valid_tokens = make_lm_batch([[1, 20, 21, 2], [1, 30, 2]], pad_id=0)
    assert inputs.shape == targets.shape == valid_tokens.shape == (2, 3)
    assert inputs.tolist() == [[1, 20, 21], [1, 30, 2]] and inputs.dtype is targets.dtype is torch.int64
    assert targets.tolist() == [[20, 21, 2], [30, 2, -100]]
    assert valid_tokens.tolist() == [[True] * 3, [True] * 3] and valid_tokens.dtype is torch.bool


def test_on_the_right():
    assert arguments([5, 6, 7, 8], [9, 4]) == {
        "token_ids": [[5, 6, 7], [9, 4, 0]], "targets": [[6, 7, 8], [4, -100, -100]],
        "valid_tokens": [[True] * 3, [True, True, False]], "position_ids": [[0, 1, 2], [0, 1, 0]]}


def test_on_the_left_padding_does_not_predict_the_first_token():
    assert arguments([5, 6, 7, 8], [9, 4], side="left") == {
        "token_ids": [[5, 6, 7], [0, 0, 9]], "targets": [[6, 7, 8], [-100, -100, 4]],
        "valid_tokens": [[True] * 3, [False, False, True]], "position_ids": [[0, 1, 2], [0, 0, 0]]}


def test_positions_are_those_that_the_guide_prints():
    assert arguments([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], side="left")["position_ids"] == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5), st.sampled_from(["left", "right"]))
def test_the_real_places_hold_the_sequences_and_the_others_the_padding(sequences, side):
    ids, valid = padded(sequences, side, pad_id=7)
    assert [row[real].tolist() for row, real in zip(ids, valid)] == sequences and (ids[~valid] == 7).all()
    edges = valid if side == "right" else valid[:, ::-1]
    assert (edges[:, 1:] <= edges[:, :-1]).all()                        # real tokens first, seen from that side


def test_arrays_and_tensors_of_ids_are_sequences_too():
    expected = make_lm_batch([[1, 2, 3], [4, 5]], 0)
    for make in (np.array, np.uint8, lambda ids: tuple(np.array(ids, np.int32))):
        for a, b in zip(make_lm_batch([make([1, 2, 3]), make([4, 5])], 0), expected):
            assert torch.equal(a, b)


def test_a_batch_is_what_a_model_is_called_with():
    batch, model = pad_sequences(TEXTS, 0), model_of("MHA", "learned")
    named = model(token_ids=batch.token_ids, targets=batch.targets, valid_tokens=batch.valid_tokens, position_ids=batch.position_ids)
    for a, b in zip(model(**batch), named):
        assert torch.equal(a, b)
    assert "segment_ids" not in batch.keys() and batch["targets"] is batch.targets


def test_what_counts_and_what_is_real():
    batch = pad_sequences([[1] * 5, [1] * 3], 0, "left")
    assert batch.num_targets == 6 and batch.real_share == 6 / 8
    assert LMBatch(batch.token_ids, batch.targets).real_share == 1.0
    row = batch.rows([1])
    assert row.token_ids.tolist() == [[0, 0, 1, 1]] and row.num_targets == 2 and row.real_share == 2 / 4
    assert batch.rows(slice(1, 2)).position_ids.tolist() == [[0, 0, 0, 1]]


def test_of_no_places_none_is_thrown_away():
    assert pad_sequences(TEXTS, 0).rows(slice(0)).real_share == 1.0


@pytest.mark.parametrize("n, error, words", [
    (0, ValueError, "LMBatch.parts: n must be at least 1, got 0"), (-2, ValueError, "LMBatch.parts: n must be at least 1, got -2"),
    (2.5, TypeError, "LMBatch.parts: n must be a whole number, got 2.5"), (True, TypeError, "n must be a whole number, got True"),
    ("2", TypeError, "LMBatch.parts: n must be a whole number, got '2'")])
def test_a_number_of_parts_is_one_or_more_and_refused_at_once(n, error, words):
    with pytest.raises(error, match=words):
        pad_sequences(TEXTS, 0).parts(n)


def test_parts_are_the_rows_in_their_order():
    batch = pad_sequences(TEXTS, 0)
    for n in 1, 2, 3, np.int64(4), 9:
        rows = [row for part, _ in batch.parts(n) for row in part.token_ids.tolist()]
        assert rows == batch.token_ids.tolist() and abs(sum(share for _, share in batch.parts(n)) - 1) < 1e-12


def test_where_the_tensors_are():
    for batch in pad_sequences(TEXTS, 0, device="cpu"), pad_sequences(TEXTS, 0).to("cpu"):
        assert {batch[name].device.type for name in batch.keys()} == {"cpu"}
    for x in pad_sequences(TEXTS, 0).position_ids, make_lm_batch(TEXTS, 0)[2]:
        assert x.device.type == torch.get_default_device().type


# --- left = right = unpadded ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("heads, position, window", MODELS)
def test_left_right_and_no_padding_are_one(heads, position, window, side):
    """Logits of real tokens, loss and gradients, the positions given or left to the model."""
    model, batch = model_of(heads, position, window), pad_sequences(TEXTS, 0, side)
    alone, loss, gradients = run_apart(model, TEXTS)
    for given_positions in True, False:
        arguments = {name: batch[name] for name in batch.keys() if given_positions or name != "position_ids"}
        found, found_loss, found_gradients = run(model, arguments)
        counted = host(batch.targets) != -100
        for row, expected in enumerate(alone):
            assert_same(found[row][counted[row]], expected)
        assert_same(found_loss, loss)
        for a, b in zip(found_gradients, gradients):
            assert_same(a, b)


def test_an_empty_row_counts_nothing_and_changes_nothing():
    model = model_of("MHA", "learned")
    for side, texts in itertools.product(("left", "right"), ([*TEXTS, []], [[], *TEXTS], [*TEXTS, [5]])):
        batch = pad_sequences(texts, 0, side)
        assert batch.num_targets == sum(len(text) - 1 for text in TEXTS)
        logits, loss, gradients = run(model, batch)
        _, expected, expected_gradients = run_apart(model, TEXTS)
        assert_same(loss, expected)
        assert np.isfinite(logits).all()
        for a, b in zip(gradients, expected_gradients):
            assert_same(a, b)


# --- each of the conditions is needed, and none replaces another ------------------------------------------------------------

def differs(model, batch, **changed):
    """Whether (a predicted logit, the loss) is another one than that of the texts alone."""
    alone, expected, _ = run_apart(model, TEXTS)
    counted = host(batch.targets) != -100
    logits, loss, _ = run(model, {name: batch[name] for name in batch.keys()} | changed)
    moved = max(np.abs(logits[row][counted[row]] - alone[row]).max() for row in range(len(TEXTS)))
    return bool(moved > 1e-3), bool(abs(loss - expected) > 1e-3)


def targets_of_padding(batch, side):
    """The targets as they are without −100: padding predicts, and is predicted."""
    full, _ = padded(TEXTS, side, 0)
    return torch.tensor(full[:, 1:], device=batch.targets.device)


def test_on_the_left_each_of_four_conditions_is_needed():
    model, batch = model_of("MHA", "learned"), pad_sequences(TEXTS, 0, "left")
    columns = torch.arange(batch.token_ids.shape[1]).expand(*batch.token_ids.shape)
    assert differs(model, batch) == (False, False)
    assert differs(model, batch, valid_tokens=None) == (True, True)                     # −100 alone: real tokens read padding
    assert differs(model, batch, targets=targets_of_padding(batch, "left")) == (False, True)    # valid_tokens alone: padding counts
    assert differs(model, batch, position_ids=columns) == (True, True)
    logits, _, gradients = run(model, batch)
    assert np.isfinite(logits).all() and all(np.isfinite(g).all() for g in gradients)   # of queries that see no key


def test_on_the_right_a_causal_model_needs_the_loss_mask_alone():
    model, batch = model_of("GQA", "rope"), pad_sequences(TEXTS, 0)
    assert differs(model, batch) == differs(model, batch, valid_tokens=None) == (False, False)
    assert differs(model, batch, targets=targets_of_padding(batch, "right")) == (False, True)


def test_on_the_left_with_target_valid_alone_one_target_too_many_counts():
    """The guide masks what is no target; on the left, the first real token is one, and padding predicts it."""
    batch = pad_sequences(TEXTS, 0, "left")
    full, valid = padded(TEXTS, "left", 0)
    careless = torch.tensor(np.where(valid[:, 1:], full[:, 1:], -100))
    assert int((careless != -100).sum()) == batch.num_targets + 3                       # the three rows that are padded
    assert differs(model_of("MHA", "learned"), batch, targets=careless) == (False, True)


# --- what is refused ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sequences, error, words", [
    ([], ValueError, "there are no sequences"),
    ([[1, 2], [1]], ValueError, "needs two tokens.*sequence 1 has 1.*pad_sequences"),
    ([[1, 2], []], ValueError, "sequence 1 has 0"),
    ([[1, 2], [3, -100]], ValueError, "sequence 1 has the id -100; ids are at least 0"),
    ([[1, 2], [3.0, 4.0]], TypeError, "sequence 1: token ids must be integers, got float64"),
    ([[1, 2], [True, False]], TypeError, "sequence 1: token ids must be integers, got bool"),
    ([[[1, 2]], [[3, 4]]], ValueError, r"sequence 0: token ids must have one axis \[N\], got the shape \(1, 2\)"),
    (["ab"], ValueError, "sequence 0: token ids must have one axis"),
    ([1, 2, 3], ValueError, "sequence 0: token ids must have one axis"),
])
def test_sequences_that_make_no_batch_are_refused(sequences, error, words):
    with pytest.raises(error, match=words):
        make_lm_batch(sequences, 0)


def test_rows_that_all_count_nothing_are_refused():
    for sequences in ([[]], [[4], []]):
        with pytest.raises(ValueError, match="pad_sequences: no sequence has two tokens.*count nothing"):
            pad_sequences(sequences, 0)


@pytest.mark.parametrize("options, error, words", [
    ({"pad_id": -1}, ValueError, "pad_id must be at least 0, got -1"),
    ({"pad_id": 0.5}, TypeError, "pad_id must be a whole number"),
    ({"pad_id": None}, TypeError, "pad_id must be a whole number"),
    ({"pad_id": 0, "padding_side": "top"}, ValueError, "padding_side must be 'left' or 'right', got 'top'"),
])
def test_options_that_are_none_are_refused(options, error, words):
    for make in make_lm_batch, pad_sequences:
        with pytest.raises(error, match=words):
            make(TEXTS, **options)
