"""The factors of SCHEDULES: one signature, and the same rules at every edge."""
import math

import pytest

from tinygrad_tf.optim.lr_scheduler import SCHEDULES, warmup_constant, warmup_cosine, warmup_linear, warmup_stable_decay

SHAPES = {**SCHEDULES, **{f"wsd {share}": lambda *a, share=share: warmup_stable_decay(*a, decay=share) for share in (0, 0.001, 0.5, 1)}}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("warmup, total", [(0, 100), (1, 100), (20, 100), (99, 100), (100, 100), (150, 100), (0, 0), (0, 1), (5, 0)])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_up_in_a_line_then_never_up_again_and_never_below_the_floor(name, warmup, total, floor):
    factors = [SHAPES[name](step, warmup, total, floor) for step in range(201)]
    assert factors[:warmup] == [step / warmup for step in range(warmup)] and factors[warmup] == 1.0
    after = factors[warmup:]
    assert all(a >= b for a, b in zip(after, after[1:])) and min(after) >= floor
    assert len(set(factors[max(warmup, total) + 1:])) == 1              # beyond the end nothing moves


@pytest.mark.parametrize("name", SHAPES)
def test_no_jumps(name):
    """In 10,000 steps, no step changes the factor by more than the steepest of its lines does."""
    shortest = 10 if name == "wsd 0.001" else 100
    factors = [SHAPES[name](step, 100, 10_000, 0.1) for step in range(10_100)]
    assert max(abs(a - b) for a, b in zip(factors, factors[1:])) <= 1 / shortest + 1e-12


@pytest.mark.parametrize("name", SHAPES)
def test_where_the_steps_end(name):
    """At step `total` those that decline are at the floor, exactly."""
    declines = name not in ("constant", "wsd 0")
    assert SHAPES[name](10_000, 100, 10_000, 0.1) == pytest.approx(0.1 if declines else 1.0, abs=1e-15)
    assert SHAPES[name](9_989, 100, 10_000, 0.1) > 0.1


def test_values():
    assert [warmup_linear(step, 100, 1000) for step in (0, 50, 100, 550, 775, 1000, 2000)] == pytest.approx([0, 0.5, 1, 0.5, 0.25, 0, 0])
    assert warmup_linear(550, 100, 1000, 0.2) == pytest.approx(0.6)
    wsd = [warmup_stable_decay(step, 100, 1000, 0.2) for step in (0, 50, 100, 500, 800, 900, 1000, 2000)]
    assert wsd == pytest.approx([0, 0.5, 1, 1, 1, 0.6, 0.2, 0.2])
    assert [warmup_constant(step, 4, 10) for step in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert list(SCHEDULES) == ["cosine", "linear", "wsd", "constant"] and SCHEDULES["cosine"] is warmup_cosine


def test_wsd_at_its_ends_is_the_line_and_the_constant():
    for step in range(120):
        assert warmup_stable_decay(step, 10, 100, 0.1, decay=1) == pytest.approx(warmup_linear(step, 10, 100, 0.1), rel=1e-12)
        assert warmup_stable_decay(step, 10, 100, 0.1, decay=0) == warmup_constant(step, 10, 100)
    assert warmup_stable_decay(95, 90, 100, 0.0, decay=0.9) == 0.5      # the decline waits for the end of the warmup


def test_a_longer_run_begins_as_the_shorter_one_did():
    begin = [warmup_stable_decay(step, 10, 100) for step in range(81)]
    assert begin == [warmup_stable_decay(step, 10, 1000) for step in range(81)]


@pytest.mark.parametrize("decay", [-0.1, 1.1, math.nan, 20])
def test_a_share_is_a_share(decay):
    with pytest.raises(ValueError, match="decay is the share of the steps.*0 to 1, got"):
        warmup_stable_decay(0, 1, 10, decay=decay)
