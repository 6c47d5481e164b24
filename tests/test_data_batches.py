"""Batches: random ones that a resumed run sees again, and ordered ones that cover a text exactly once."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygrad_tf.data import BatchSampler, CorpusError, EpochOrder, EpochSampler, evaluation_batches

IDS = np.arange(1000, 1100)


def draw(sampler, steps):
    return [sampler.next() for _ in range(steps)]


def assert_same(batches, others):
    np.testing.assert_array_equal(np.array(batches), np.array(others))


def test_a_batch_is_windows_of_the_text_and_targets_are_one_further():
    inputs, targets = BatchSampler(IDS.astype(np.int32), context=8, batch_size=5, seed=1).next()
    assert inputs.shape == targets.shape == (5, 8) and inputs.dtype == targets.dtype == np.int64
    assert (np.diff(inputs) == 1).all() and (targets == inputs + 1).all()


def test_every_place_is_drawn_even_the_first_and_the_last():
    sampler = BatchSampler(IDS[:5], context=2, batch_size=50, seed=0)
    assert set(sampler.next()[0][:, 0].tolist()) == {1000, 1001, 1002}


def test_the_shortest_text_has_one_window():
    inputs, targets = BatchSampler(IDS[:9], context=8, batch_size=3).next()
    assert inputs.tolist() == [IDS[:8].tolist()] * 3 and targets.tolist() == [IDS[1:9].tolist()] * 3


def test_batches_are_copies():
    ids = IDS.copy()
    inputs, targets = BatchSampler(ids, context=8, batch_size=5).next()
    for other in (ids, targets):
        assert not np.shares_memory(inputs, other)
    for inputs, targets in evaluation_batches(ids, 8, 5):
        assert not np.shares_memory(inputs, targets) and not np.shares_memory(inputs, ids)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_a_caller_who_changes_the_ids_later_changes_no_batch(dtype):
    ids = np.arange(100).astype(dtype)
    sampler, ordered = BatchSampler(ids, 8, 5, seed=1), evaluation_batches(ids, 8, 5)
    expected = draw(BatchSampler(ids.copy(), 8, 5, seed=1), 2), list(evaluation_batches(ids.copy(), 8, 5))
    ids[:] = 0
    assert_same(draw(sampler, 2), expected[0])
    for (inputs, targets), (others, other_targets) in zip(ordered, expected[1], strict=True):
        assert (inputs == others).all() and (targets == other_targets).all()


@pytest.mark.parametrize("make", [BatchSampler, evaluation_batches])
def test_ids_that_int64_cannot_hold_are_refused(make):
    with pytest.raises(ValueError, match=r"less than 2\*\*63, got 9223372036854775808"):
        make(np.array([1, 2, 2**63], np.uint64), 1, 1)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_integers(integer):
    sampler = BatchSampler(IDS, integer(8), integer(5), seed=integer(3))
    assert json.loads(json.dumps(sampler.state_dict())) == BatchSampler(IDS, 8, 5, seed=3).state_dict()
    assert_same(draw(sampler, 2), draw(BatchSampler(IDS, 8, 5, seed=3), 2))
    for batch, other in zip(evaluation_batches(IDS, integer(8), integer(5)), evaluation_batches(IDS, 8, 5)):
        assert_same(batch, other)


@pytest.mark.parametrize("seed", [0, 3, -1, 2**63])
def test_one_seed_gives_one_sequence(seed):
    one, same, other = (draw(BatchSampler(IDS, 8, 5, s), 4) for s in (seed, seed, seed + 1))
    assert_same(one, same)
    assert not np.array_equal(one, other)


def test_the_sequences_of_seeds_that_runs_were_recorded_with():
    assert [[int(i) - 1000 for i in BatchSampler(IDS, 8, 5, seed).next()[0][:, 0]] for seed in (0, 1, 42)] == [
        [78, 58, 47, 24, 28], [43, 47, 69, 87, 3], [8, 71, 60, 40, 39]]


@given(st.integers(0, 6), st.integers(1, 7))
def test_a_resumed_run_sees_exactly_the_same_batches(before, batch_size):
    sampler = BatchSampler(IDS, 8, batch_size, seed=4)
    draw(sampler, before)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = draw(sampler, 5)
    resumed = BatchSampler(IDS, 8, batch_size, seed=99)
    resumed.load_state_dict(state)
    assert_same(draw(resumed, 5), expected)


def test_a_state_is_a_copy():
    sampler = BatchSampler(IDS, 8, 5)
    state = sampler.state_dict()
    kept = json.dumps(state)
    draw(sampler, 3)
    assert json.dumps(state) == kept


@pytest.mark.parametrize(
    "name, sampler",
    [
        ("tokens", BatchSampler(IDS[:50], 8, 5)),
        ("context", BatchSampler(IDS, 9, 5)),
        ("batch_size", BatchSampler(IDS, 8, 6)),
    ],
)
def test_a_state_of_another_run_is_refused(name, sampler):
    with pytest.raises(ValueError, match=f"{name} is .* here, but .* in the saved state"):
        sampler.load_state_dict(BatchSampler(IDS, 8, 5).state_dict())


def pcg64(**numbers):
    """A state that is whole but for these numbers."""
    state = np.random.PCG64(1).state
    inner = {name: numbers.pop(name) for name in ("state", "inc") if name in numbers}
    return {**state, **numbers, "state": {**state["state"], **inner}}


@pytest.mark.parametrize(
    "rng",
    [
        None, 5, [], {}, {"bit_generator": "MT19937"}, {"bit_generator": "PCG64", "state": {"state": -1}},
        pcg64(state=0, inc=0), pcg64(inc=0), pcg64(inc=2), pcg64(inc=-1), pcg64(inc=2**128 + 1), pcg64(inc=3.5), pcg64(inc="1"),
        pcg64(inc=None), pcg64(state=-1), pcg64(state=2**128), pcg64(state=0.5), pcg64(uinteger=-1), pcg64(uinteger=2**32),
        pcg64(uinteger=0.5), pcg64(has_uint32="x"), pcg64(has_uint32=None),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(rng):
    sampler, twin = BatchSampler(IDS, 8, 5), BatchSampler(IDS, 8, 5)
    with pytest.raises(ValueError, match="damaged"):
        sampler.load_state_dict(sampler.state_dict() | {"rng": rng})
    assert_same(draw(sampler, 2), draw(twin, 2))


@given(st.integers(2, 60), st.integers(1, 70), st.integers(1, 5))
def test_evaluation_covers_every_token_exactly_once(length, context, batch_size):
    ids = IDS[:length]
    batches = list(evaluation_batches(ids, context, batch_size))
    np.testing.assert_array_equal(np.concatenate([targets.ravel() for _, targets in batches]), ids[1:])
    for inputs, targets in batches:
        assert inputs.shape == targets.shape and inputs.dtype == targets.dtype == np.int64
        assert (targets == inputs + 1).all()
    for inputs, _ in batches[:-1]:
        assert inputs.shape[1] == context and inputs.shape[0] <= batch_size
    assert batches[-1][0].shape[0] == 1 or batches[-1][0].shape[1] == context


def test_evaluation_shapes():
    shapes = [inputs.shape for inputs, _ in evaluation_batches(IDS[:24], context=4, batch_size=2)]
    assert shapes == [(2, 4), (2, 4), (1, 4), (1, 3)]


def test_texts_that_are_too_short_name_the_lengths_and_the_fix():
    with pytest.raises(CorpusError, match="training text has 8 tokens.*context of 8 needs at least 9.*at most 7"):
        BatchSampler(IDS[:8], 8, 5)
    with pytest.raises(CorpusError, match="held-out text has 1 tokens.*at least 2"):
        evaluation_batches(IDS[:1], 8, 5)


@pytest.mark.parametrize("make", [BatchSampler, evaluation_batches])
def test_sizes_that_make_no_batch_are_refused_at_once(make):
    for context, batch_size, name in ((0, 5, "context"), (-1, 5, "context"), (8, 0, "batch_size")):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            make(IDS, context, batch_size)
    for context, batch_size in ((8.0, 5), (8, 5.0)):
        with pytest.raises(TypeError):
            make(IDS, context, batch_size)
    with pytest.raises(TypeError, match="token ids must be integers"):
        make(IDS.astype(np.float32), 8, 5)


# --- every window once an epoch --------------------------------------------------------------------------------------------

def starts(sampler, steps):
    return np.concatenate([sampler.next()[0][:, 0] - 1000 for _ in range(steps)]).tolist()


def test_an_epoch_has_the_windows_of_batch_sampler_side_by_side():
    inputs, targets = EpochSampler(IDS.astype(np.int32), context=8, batch_size=5, seed=1).next()
    assert inputs.shape == targets.shape == (5, 8) and inputs.dtype == targets.dtype == np.int64
    assert (np.diff(inputs) == 1).all() and (targets == inputs + 1).all() and ((inputs[:, 0] - 1000) % 8 == 0).all()


@given(st.integers(2, 60), st.integers(1, 59), st.integers(1, 9), st.integers(-3, 2**64))
def test_every_window_is_drawn_once_an_epoch(length, context, batch_size, seed):
    context = min(context, length - 1)
    windows = (length - 1) // context
    drawn = starts(EpochSampler(IDS[:length], context, batch_size, seed), -(-3 * windows // batch_size))
    for epoch in range(3):
        assert sorted(drawn[epoch * windows:(epoch + 1) * windows]) == [i * context for i in range(windows)]


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    orders = [tuple(starts(sampler, 12)) for seed in (0, 1, 2) for sampler in [EpochSampler(IDS, 1, 33, seed)]]
    epochs = [order[i:i + 99] for order in orders for i in range(0, 396, 99)]
    assert len(set(epochs)) == len(epochs) == 12
    assert orders[0] == tuple(starts(EpochSampler(IDS, 1, 33, 0), 12))


def test_the_order_is_the_one_that_runs_were_recorded_with():
    assert EpochOrder(10, seed=0)(np.arange(30)).reshape(3, 10).tolist() == [
        [6, 3, 8, 1, 4, 5, 9, 2, 7, 0], [1, 3, 8, 6, 2, 0, 7, 5, 4, 9], [1, 4, 9, 8, 5, 2, 6, 3, 0, 7]]
    for seed in -1, 2**64 - 1:
        assert EpochOrder(10, seed)(np.arange(10)).tolist() == [5, 1, 4, 0, 7, 9, 2, 6, 8, 3]


def test_an_order_may_be_asked_in_any_order():
    order = EpochOrder(7, seed=5)
    forward = order(np.arange(21)).tolist()
    assert order(np.arange(21)[::-1]).tolist() == forward[::-1] and [int(order(np.array([n]))[0]) for n in (20, 0, 13)] == [
        forward[20], forward[0], forward[13]]


@pytest.mark.parametrize("make", [EpochSampler, BatchSampler])
def test_resumed_anywhere_is_uninterrupted(make):
    """Cut after each of 40 batches, several epochs long: what follows is what would have followed, to the last window."""
    whole = draw(make(IDS, 8, 5, seed=4), 40)
    sampler = make(IDS, 8, 5, seed=4)
    for cut in range(40):
        resumed = make(IDS, 8, 5, seed=4)
        resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        assert_same(draw(resumed, 40 - cut), whole[cut:])
        sampler.next()


def test_an_epoch_goes_on_with_another_batch_size():
    sampler, resumed = EpochSampler(IDS, 8, 5, seed=4), EpochSampler(IDS, 8, 3, seed=4)
    expected = starts(EpochSampler(IDS, 8, 1, seed=4), 40)
    assert starts(sampler, 3) == expected[:15]
    resumed.load_state_dict(sampler.state_dict())
    assert starts(resumed, 5) == expected[15:30] and resumed.epoch == 30 // 12


@pytest.mark.parametrize("name, sampler", [("tokens", EpochSampler(IDS[:50], 8, 5, 1)), ("context", EpochSampler(IDS, 9, 5, 1)),
                                           ("seed", EpochSampler(IDS, 8, 5, 2))])
def test_a_state_of_another_epoch_sampler_is_refused(name, sampler):
    with pytest.raises(ValueError, match=f"EpochSampler.load_state_dict: {name} is .* here, but .* in the saved state"):
        sampler.load_state_dict(EpochSampler(IDS, 8, 5, 1).state_dict())


@pytest.mark.parametrize("drawn", [None, -1, 2**62, 1.0, "3", [], True])
def test_a_damaged_number_of_windows_is_refused_and_changes_nothing(drawn):
    sampler = EpochSampler(IDS, 8, 5)
    sampler.next()
    with pytest.raises(ValueError, match="damaged"):
        sampler.load_state_dict(sampler.state_dict() | {"drawn": drawn})
    assert sampler.drawn == 5


def test_sizes_that_make_no_epoch_are_refused():
    with pytest.raises(CorpusError, match="training text has 8 tokens"):
        EpochSampler(IDS[:8], 8, 5)
    for context, batch_size, name in ((0, 5, "context"), (8, 0, "batch_size")):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            EpochSampler(IDS, context, batch_size)
    with pytest.raises(ValueError, match="count must be at least 1"):
        EpochOrder(0)
