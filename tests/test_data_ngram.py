"""The n-gram baselines against a dictionary of counters, which is slow and plain."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygrad_tf.data import WittenBell, baselines

V_vocab = 6
some_ids = st.lists(st.integers(0, V_vocab - 1), min_size=1, max_size=40)
orders = st.integers(1, 5)


def count(ids, order):
    following = defaultdict(Counter)
    for n in range(1, order + 1):
        for i in range(n - 1, len(ids)):
            following[tuple(ids[i - n + 1 : i])][ids[i]] += 1
    return following


def reference(following, history, token):
    shorter = reference(following, history[1:], token) if history else 1 / V_vocab
    counts = following.get(history)
    return (counts[token] + len(counts) * shorter) / (counts.total() + len(counts)) if counts else shorter


def reference_probabilities(train, ids, order):
    following = count(train, order)
    return [reference(following, tuple(ids[max(0, i - order + 1) : i]), ids[i]) for i in range(len(ids))]


@given(some_ids, some_ids, orders)
def test_probabilities_are_those_of_the_formula(train, ids, order):
    ours = WittenBell(order).fit(train, V_vocab).probabilities(ids)
    np.testing.assert_allclose(ours, reference_probabilities(train, ids, order), rtol=1e-12)


@given(some_ids, st.lists(st.integers(0, V_vocab - 1), max_size=6), orders)
def test_probabilities_sum_to_one_after_any_context(train, context, order):
    model = WittenBell(order).fit(train, V_vocab)
    assert math.isclose(sum(model.probabilities([*context, w])[-1] for w in range(V_vocab)), 1, rel_tol=1e-12)


def test_one_value_by_hand():
    # Training text 0 1 0 1 0. After 0: 1, twice. Unigram: (c + 2/V) / 7 with V = 4.
    model = WittenBell(2).fit([0, 1, 0, 1, 0], 4)
    p1 = (2 + 2 / 4) / 7
    assert math.isclose(model.probabilities([0, 1])[1], (2 + 1 * p1) / (2 + 1))


def test_an_unseen_context_leaves_the_shorter_one_as_it_is():
    train, ids = [0, 1, 0, 1, 2], [3, 0, 2, 1, 1]
    model = WittenBell(4).fit(train, V_vocab)
    # 3 never occurs in training, and 2 only at its end: nothing follows either of them.
    assert model.probabilities(ids)[[1, 3]].tolist() == model.probabilities(ids, order=1)[[1, 3]].tolist()
    assert model.probabilities(ids)[2] != model.probabilities(ids, order=1)[2]


@given(some_ids, some_ids)
def test_one_fit_answers_for_every_order(train, ids):
    together = baselines(train, ids, V_vocab)
    assert list(together) == [1, 2, 3, 4]
    for order, nats in together.items():
        assert nats == WittenBell(order).fit(train, V_vocab).nats_per_token(ids)
        expected = -sum(math.log(p) for p in reference_probabilities(train, ids, order)) / len(ids)
        assert math.isclose(nats, expected, rel_tol=1e-9)


def test_longer_contexts_help_on_a_text_with_structure():
    ids = np.tile([0, 1, 0, 2, 0, 0, 3], 60)
    nats = baselines(ids[:350], ids[350:], V_vocab)
    assert nats[1] > nats[2] > nats[3] > nats[4] > 0


def test_large_vocabularies_do_not_overflow():
    ids = np.array([99_999, 7, 99_999, 50_000, 99_999, 7, 99_999])
    p = WittenBell(4).fit(ids, 100_000).probabilities(ids)
    assert (p > 0).all() and (p < 1).all() and p[-1] > 0.5


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_narrow_ids_do_not_overflow(dtype):
    train, ids = np.random.default_rng(0).integers(200, size=(2, 300)).astype(dtype)
    expected = WittenBell(3).fit(train.tolist(), 200).nats_per_token(ids.tolist())
    assert WittenBell(3).fit(train, 200).nats_per_token(ids) == expected


def test_refusals():
    with pytest.raises(ValueError, match="order must be at least 1"):
        WittenBell(0)
    with pytest.raises(RuntimeError, match="call fit"):
        WittenBell(2).nats_per_token([1])
    with pytest.raises(ValueError, match="no tokens to count"):
        WittenBell(2).fit([], 3)
    with pytest.raises(IndexError, match="token id 3 is outside"):
        WittenBell(2).fit([0, 3], 3)
    model = WittenBell(2).fit([0, 1], 3)
    with pytest.raises(IndexError, match="token id -1 is outside"):
        model.nats_per_token([-1])
    with pytest.raises(ValueError, match="no tokens to predict"):
        model.nats_per_token([])
    for order in (0, 3):
        with pytest.raises(ValueError, match="fitted for the orders 1 to 2"):
            model.nats_per_token([0], order)
