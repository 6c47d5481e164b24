"""Sampling: each step against its definition written out for one row of Python numbers, the order of the steps, and what is drawn."""
import copy
import itertools
import math
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
from device import host
from hypothesis import example, given
from hypothesis import strategies as st

import tinygrad_tf as torch
from tinygrad_tf.generation import sampling
from tinygrad_tf.generation.sampling import Sampler, add_bias, keep_min_p, keep_top_k, keep_top_p, penalize, sample, temper
from tinygrad_tf.nn import functional as F

INF, NAN = math.inf, math.nan


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def unchanged_logits(logits, *options):
    """What every step would be if it did nothing: the fault that each check below must notice."""
    return logits


# --- definitions, for one row of Python numbers -----------------------------------------------------------------------------

def shares(z):
    """softmax(z), by Python's exact sum."""
    weights = [math.exp(x - max(z)) for x in z]
    return [w / math.fsum(weights) for w in weights]


def most_probable_first(z):
    return sorted(range(len(z)), key=lambda i: (-z[i], i))


def biased(z, bias):
    return [x + bias.get(i, 0.0) for i, x in enumerate(z)]


def penalized(z, ids, repetition=1.0, presence=0.0, frequency=0.0):
    z = list(z)
    for i in set(ids):
        z[i] = (z[i] / repetition if z[i] > 0 else z[i] * repetition) - presence - ids.count(i) * frequency
    return z


def tempered(z, temperature):
    if temperature == 0:
        return [0.0 if i == z.index(max(z)) else -INF for i in range(len(z))]
    return [(x - max(z)) / temperature for x in z]


def only(z, kept):
    return [x if i in kept else -INF for i, x in enumerate(z)]


def top_k(z, k):
    return only(z, most_probable_first(z)[:k])


def top_p(z, p):
    p_of, order = shares(z), most_probable_first(z)
    return only(z, next((order[:n] for n in range(1, len(z)) if math.fsum(p_of[i] for i in order[:n]) >= p), order))


def min_p(z, share):
    p_of = shares(z)
    return only(z, [i for i, p in enumerate(p_of) if p >= share * max(p_of)])


# --- each step is its definition --------------------------------------------------------------------------------------------
# A check takes the step as an argument, so that it can be given a wrong one. It looks at every row of a batch.

def rows_of(step, logits, *options, dtype=torch.float32):
    """The rows before, as the step reads them, and after."""
    logits = torch.tensor(logits, dtype=dtype)
    before = logits.tolist()
    after = step(logits, *options)
    assert logits.tolist() == before and after.shape == logits.shape and after.device == logits.device
    return list(zip(before, after.tolist()))


def check_top_k(step, logits, k):
    for z, kept in rows_of(step, logits, k):
        assert kept == top_k(z, k)


def check_top_p(step, logits, p):
    """By its properties, for a sum may be p up to rounding: the first of the order; they reach p; without the last they do not."""
    for z, kept in rows_of(step, logits, p):
        n = sum(x > -INF for x in kept)
        order, p_of = most_probable_first(z)[:n], shares(z)
        assert kept == only(z, order) and n >= 1
        assert n == sum(x > -INF for x in z) or math.fsum(p_of[i] for i in order) >= p - 1e-11
        assert kept == z if p == 1 else n == 1 or math.fsum(p_of[i] for i in order[:-1]) < p


def check_min_p(step, logits, share):
    for z, kept in rows_of(step, logits, share):
        p_of = shares(z)
        for x, y, p in zip(z, kept, p_of):
            assert y in (x, -INF)
            if not math.isclose(p, share * max(p_of), rel_tol=1e-12, abs_tol=0) or p == max(p_of):
                assert y == (x if p >= share * max(p_of) else -INF)


def check_temper(step, logits, temperature):
    for z, found in rows_of(step, logits, temperature):
        wanted = np.array(tempered(z, max(temperature, 2.0 ** -126) if temperature else 0))
        wanted[(wanted < -3.4e38) | (np.array(z) - max(z) < -3.4e38)] = -INF        # beyond float32
        np.testing.assert_allclose(np.maximum(found, -3.5e38), np.maximum(wanted, -3.5e38), rtol=1e-6, atol=1e-37)


def check_bias(step, logits, bias):
    V = len(logits[0])
    bias = {i % V: x for i, x in bias.items()}
    for form in bias, torch.tensor([bias.get(i, 0.0) for i in range(V)]):
        for z, found in rows_of(step, logits, form):
            np.testing.assert_allclose(found, biased(z, bias), rtol=1e-6, atol=1e-6)


def check_penalties(step, logits, history, repetition, presence, frequency):
    history = [[i % len(logits[0]) for i in history[row:]] for row in range(len(logits))]       # of another length in each row
    for form in history, [np.array(ids, np.int32) for ids in history], [torch.tensor(ids, dtype=torch.int64) for ids in history]:
        for ids, (z, found) in zip(history, rows_of(step, logits, form, repetition, presence, frequency)):
            wanted = np.array(penalized(z, ids, repetition, presence, frequency))
            wanted[wanted < -3.41e38] = -INF
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


usual = st.floats(-12, 12, width=32)
tied = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
extreme = st.sampled_from([1e30, -1e30, 3e38, -3e38, 0.0, 80.0, -80.0, -INF, -INF])


@st.composite
def batches(draw):
    """[B, V]: random, tied, equal, or degenerate numbers; in each row one at least is not −inf."""
    B, V, kind = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.sampled_from([usual, tied, extreme, st.just(0.25)]))
    rows = [[draw(kind) for _ in range(V)] for _ in range(B)]
    for row in rows:
        if max(row) == -INF:
            row[draw(st.integers(0, V - 1))] = draw(usual)
    return rows


ROW = [1.0, -0.5, 2.0, 0.3, -1.2, 2.0]


@given(batches(), st.one_of(st.integers(1, 12), st.just(10**30)))
@example([[2.0, 2.0, 2.0]], 2)
@example([[-INF, 1.0, -INF]], 2)
def test_top_k(logits, k):
    check_top_k(keep_top_k, logits, k)


@given(batches(), st.one_of(st.floats(0, 1, exclude_min=True), st.sampled_from([1.0, 0.5, 0.75, 1e-300, 1 - 2.0 ** -53])))
@example([[0.0, -60.0]], 1.0)
def test_top_p(logits, p):
    check_top_p(keep_top_p, logits, p)


@given(batches(), st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, 1e-300])))
def test_min_p(logits, share):
    check_min_p(keep_min_p, logits, share)


@given(batches(), st.one_of(st.floats(0.01, 100), st.sampled_from([0, 1, 1e-320, 1e-45, 1e-30, 1e30, 1e300])))
@example([[0.0, -3e38, -INF]], 1e300)
def test_temper(logits, temperature):
    if temperature < 1e38:
        check_temper(temper, logits, temperature)
    else:                                                        # hotter than float32 can say: finite, and −inf stays −inf
        for z, found in rows_of(temper, logits, temperature):
            assert all(math.isfinite(y) if x > -1e38 else not math.isnan(y) for x, y in zip(z, found))
            assert all(y == -INF for x, y in zip(z, found) if x == -INF)


numbers = st.dictionaries(st.integers(0, 8), st.one_of(usual, st.just(-INF)), max_size=5)


@given(batches(), numbers)
def test_bias(logits, bias):
    check_bias(add_bias, logits, bias)


@given(batches(), st.lists(st.integers(0, 8), max_size=7), st.sampled_from([1.0, 0.5, 1.3, 1e300]), st.sampled_from([0.0, 0.7, -0.7]),
       st.sampled_from([0.0, 0.4, -0.4]))
@example([[0.0, 1.0, -1e-30]], [0, 1, 2], 1e300, 0.0, 0.0)
def test_penalties(logits, history, repetition, presence, frequency):
    if repetition < 1 and max(map(max, logits)) > 1e38:
        repetition = 1 / repetition                              # 3e38 / 0.5 is no float32
    check_penalties(penalize, logits, history, repetition, presence, frequency)


def without_the_last(z, p):
    """A wrong top-p: the sets whose probability is still below p."""
    values, ids = z.sort(dim=-1, descending=True)
    below = F.softmax(values.double(), dim=-1).cumsum(dim=-1) < p
    return torch.full_like(z, -INF).scatter_(-1, ids, values.masked_fill(~below, -INF))


# step → its check, options of a case, and wrong steps
CHECKS = {
    "top_k": (check_top_k, (1,), [
        lambda z, k: keep_top_k(z, k + 1), lambda z, k: z.masked_fill(z < z.amax(dim=-1, keepdim=True), -INF),
        lambda z, k: keep_top_k(z.flip(-1), k).flip(-1), lambda z, k: keep_top_k(-z, k)]),
    "top_p": (check_top_p, (0.3,), [
        without_the_last, lambda z, p: keep_top_p(z, 2 * p), lambda z, p: keep_top_p(z.flip(-1), p).flip(-1),
        lambda z, p: keep_top_p(z * 0, p) + z]),
    "min_p": (check_min_p, (0.5,), [
        lambda z, p: z.masked_fill(F.softmax(z, dim=-1) < p, -INF), lambda z, p: keep_min_p(z, p / 4),
        lambda z, p: z.masked_fill(z < z.amax(dim=-1, keepdim=True) * p, -INF)]),
    "temper": (check_temper, (0.5,), [lambda z, t: temper(z, 1 / t), lambda z, t: temper(z, t) + 1, lambda z, t: temper(z, 0)]),
    "bias": (check_bias, ({1: 2.0, 4: -INF},), [lambda z, b: z - add_bias(z * 0, b)]),
    "penalties": (check_penalties, ([1, 2, 2, 5, 2], 1.5, 0.25, 0.125), [
        lambda z, h, r, p, f: penalize(z, h, 1 / r, p, f), lambda z, h, r, p, f: penalize(z, h, r, f, p),
        lambda z, h, r, p, f: penalize(penalize(z, h, 1, p, f), h, r), lambda z, h, r, p, f: penalize(z, [h[0]] * len(h), r, p, f),
        lambda z, h, r, p, f: penalize(z, [list(dict.fromkeys(np.array(host(ids)).tolist())) for ids in h], r, p, f)]),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_notice_wrong_steps(name):
    check, options, wrong = CHECKS[name]
    for step in [unchanged_logits, *wrong]:
        with pytest.raises(AssertionError, match="assert|Not equal"):
            check(step, [ROW, ROW[::-1]], *options)


@pytest.mark.parametrize("V", [5, 10, 48, 1000])
def test_top_p_counts_equal_tokens(V):
    """Of V equal tokens k reach k/V, exactly, though V sums of 1/V in floating point may not; and of equals the first ones."""
    for k in sorted({1, 2, 3, V // 2, V - 2, V}):
        kept = host(keep_top_p(torch.zeros(1, V), k / V))[0]
        assert (kept == np.where(np.arange(V) < k, 0, -INF)).all()


# --- the order --------------------------------------------------------------------------------------------------------------

STEPS = {
    "bias": lambda z, o, ids: biased(z, o["logit_bias"]) if "logit_bias" in o else z,
    "penalties": lambda z, o, ids: penalized(z, ids, *(o.get(f"{name}_penalty", usual) for name, usual in
                                                      (("repetition", 1), ("presence", 0), ("frequency", 0)))),
    "temperature": lambda z, o, ids: tempered(z, o.get("temperature", 1)),
    "top_k": lambda z, o, ids: top_k(z, o["top_k"]) if "top_k" in o else z,
    "top_p": lambda z, o, ids: top_p(z, o["top_p"]) if "top_p" in o else z,
    "min_p": lambda z, o, ids: min_p(z, o["min_p"]) if "min_p" in o else z,
}
DOCUMENTED = list(STEPS)


def exactly(z, ids=(), order=DOCUMENTED, **options):
    """The distribution, by the definitions above, one step after the other."""
    for name in order:
        z = STEPS[name](z, options, list(ids))
    return shares(z)


def logs(*probabilities):
    return [math.log(p) for p in probabilities]


TENTHS = logs(0.4, 0.3, 0.2, 0.1)
# two steps, and logits and options for which they must not change places
ORDERS = [
    ("bias", "penalties", [-1.0, 0.5, 0.0], {"logit_bias": {0: 2.0}, "repetition_penalty": 3.0}),
    ("bias", "temperature", [1.0, 0.5, 0.0], {"logit_bias": {0: 3.0}, "temperature": 2.0}),
    ("bias", "top_k", [1.0, 0.5, 0.0], {"logit_bias": {2: 3.0}, "top_k": 2}),
    ("penalties", "temperature", [1.0, 0.5, 0.0], {"presence_penalty": 1.0, "temperature": 2.0}),
    ("penalties", "top_k", [1.0, 0.5, 0.0], {"frequency_penalty": 3.0, "top_k": 2}),
    ("temperature", "top_p", TENTHS, {"temperature": 2.0, "top_p": 0.65}),
    ("temperature", "min_p", TENTHS, {"temperature": 2.0, "min_p": 0.4}),
    ("top_k", "top_p", TENTHS, {"top_k": 2, "top_p": 0.5}),
    ("top_p", "min_p", TENTHS, {"top_p": 0.75, "min_p": 0.45}),
]


@pytest.mark.parametrize("one, other, z, options", ORDERS, ids=lambda x: x if isinstance(x, str) else "")
def test_the_order_is_the_documented_one(one, other, z, options):
    order = [{one: other, other: one}.get(name, name) for name in DOCUMENTED]
    wanted, swapped = exactly(z, [0], **options), exactly(z, [0], order=order, **options)
    assert max(abs(a - b) for a, b in zip(wanted, swapped)) > 0.05, "the case does not tell the orders apart"
    found = Sampler(**options).probabilities(torch.tensor([z]), [[0]])
    np.testing.assert_allclose(found, [wanted], rtol=1e-5)
    places = [Sampler.__doc__.index(name) for name in ("`logit_bias`", "penalize", "temper;", "keep_top_k", "keep_top_p", "keep_min_p")]
    assert places == sorted(places)


EVERYTHING = {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.2,
              "frequency_penalty": 0.1, "logit_bias": {0: 1.5, 3: -INF}}
some = st.sets(st.sampled_from(sorted(EVERYTHING)))


@given(some, st.integers(0, 10**6))
def test_any_steps_together(names, seed):
    """Random logits: nothing there is at a boundary, so that float32 decides as exact numbers do."""
    z = np.random.default_rng(seed).standard_normal((2, 9)).astype(np.float32)
    options, history = {name: EVERYTHING[name] for name in names}, [[1, 2, 1, 8], [0]]
    found = Sampler(**options).probabilities(torch.tensor(z), history)
    assert found.dtype == np.float64 and type(found) is np.ndarray
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(found, [exactly(row, ids, **options) for row, ids in zip(z.tolist(), history)], rtol=1e-5)


@pytest.mark.parametrize("step", ["temper", "keep_top_k", "keep_top_p", "keep_min_p", "penalize", "_biased"])
def test_the_sampler_takes_every_step(step, monkeypatch):
    """Without any one of them the probabilities are others, so the tests above notice that one is left out."""
    logits, history = torch.randn(64, 9), [[1, 2, 1, 8]] * 64
    sampler = Sampler(**{**EVERYTHING, "top_k": 4, "top_p": 0.8, "min_p": 0.3})
    wanted = sampler.probabilities(logits, history)
    monkeypatch.setattr(sampling, step, unchanged_logits)
    assert np.abs(sampler.probabilities(logits, history) - wanted).max() > 1e-3


# --- what is drawn ----------------------------------------------------------------------------------------------------------

def critical(freedom, surprise=1e-5):
    """The χ² that is exceeded by chance with that probability (Wilson and Hilferty 1931), or one a few percent higher."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + NormalDist().inv_cdf(1 - surprise) * math.sqrt(spread)) ** 3


def chi_square(drawn, p):
    """Σ (count − n p)² / (n p) over the ids that can be drawn, and how many of them are free; no other may have been drawn."""
    p, counts = np.array(p), np.bincount(drawn, minlength=len(p))
    assert counts[p == 0].sum() == 0
    wanted = len(drawn) * p[p > 0]
    assert wanted.min() >= 5
    return float(((counts[p > 0] - wanted) ** 2 / wanted).sum()), int((p > 0).sum()) - 1


DRAWS = 20_000
DRAWN = [{}, {"temperature": 0.6}, {"temperature": 2.5}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"repetition_penalty": 1.8},
         {"presence_penalty": 0.9}, {"frequency_penalty": 0.6}, {"logit_bias": {1: 2.0, 2: -INF}},
         {"temperature": 1.5, "top_k": 5, "top_p": 0.95, "min_p": 0.1, "presence_penalty": 0.5, "logit_bias": {3: 0.7}}]


def draws(options, generator=None):
    history = [[0, 5, 0]] * DRAWS if Sampler(**options).uses_history else None
    drawn = Sampler(**options)(torch.tensor([ROW] * DRAWS), history, seeded() if generator is None else generator)
    assert drawn.shape == (DRAWS, 1) and drawn.dtype == torch.int64
    return host(drawn).ravel()


@pytest.mark.parametrize("options", DRAWN, ids=str)
def test_what_is_drawn_has_the_exact_distribution(options):
    exact = exactly(ROW, [0, 5, 0], **options)
    statistic, freedom = chi_square(draws(options), exact)
    assert statistic < critical(freedom)
    np.testing.assert_allclose(Sampler(**options).probabilities(torch.tensor([ROW]), [[0, 5, 0]]), [exact], rtol=1e-6)
    if options:                                                  # and so much it would be with the option left out
        exact = np.array(exactly(ROW, [0, 5, 0]))
        assert chi_square(draws(options), exact)[0] > 3 * critical(len(ROW) - 1)


def test_a_generator_for_each_row_has_the_exact_distribution():
    """One draw from each of many seeds."""
    sampler, n = Sampler(temperature=0.7, top_k=4), 2_000
    drawn = sampler(torch.tensor([ROW] * n), generator=[seeded(seed) for seed in range(n)])
    statistic, freedom = chi_square(host(drawn).ravel(), exactly(ROW, temperature=0.7, top_k=4))
    assert statistic < critical(freedom)


def test_critical_values():
    """With two degrees of freedom χ² is exceeded with probability e^(−χ²/2); for 5 and 30 a table says 20.52 and 59.70 at 0.001."""
    for freedom, surprise, wanted in (2, 1e-5, 10 * math.log(10)), (2, 0.001, 6 * math.log(10)), (5, 0.001, 20.52), (30, 0.001, 59.70):
        assert 0.999 * wanted < critical(freedom, surprise) < 1.08 * wanted


def as_before(logits, temperature, k, generator):
    """The draw that seeds are used to, written out: float32, the largest logit at 0, top-k, softmax, one multinomial for all rows."""
    logits = (logits - logits.amax(dim=-1, keepdim=True)).to(torch.float32) / max(temperature, 2.0 ** -126)
    if k is not None and k < logits.shape[-1]:
        values, ids = logits.topk(k, dim=-1)
        logits = torch.full_like(logits, -INF).scatter_(-1, ids, values)
    return torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("temperature, k", [(1.0, None), (0.7, None), (0.7, 5), (1.3, 40), (1e-30, 2), (np.float32(0.3), np.int32(7))])
def test_seeds_draw_what_they_drew(temperature, k, dtype):
    """Value for value, and the generator stands where it stood."""
    logits, one, two, three = (3 * torch.randn(50, 65)).to(dtype), seeded(), seeded(), seeded()
    for _ in range(5):
        wanted = as_before(logits, temperature, k, one)
        assert torch.equal(sample(logits, temperature, k, two), wanted)
        assert torch.equal(Sampler(temperature, k)(logits, generator=three), wanted)
    assert (host(one.get_state()) == host(two.get_state())).all()


@pytest.fixture
def weights(monkeypatch):
    """From what was drawn so far, row by row: two softmaxes that differ in the last digit would rarely draw another id."""
    seen, multinomial = [], sampling.creation.multinomial

    def recorded(p, *args, **options):
        seen.extend(host(p).tolist())
        return multinomial(p, *args, **options)
    monkeypatch.setattr(sampling.creation, "multinomial", recorded)
    return seen


@pytest.mark.parametrize("V", [1, 6, 65, 300, 1100])            # 300: a row is short, and the batch long enough for other sums
@pytest.mark.parametrize("options", [{}, EVERYTHING, {"temperature": 0}], ids=["plain", "everything", "greedy"])
def test_with_its_own_generator_a_row_is_alone(V, options, weights):
    """Alone, beside others, or in another place, its draws are the same; and they are those of one generator for a batch of it."""
    options = {**options, "logit_bias": {0: 0.3}}
    logits, history, sampler = torch.randn(4, V), [[0], [], [0] * 3, [V - 1]], Sampler(**options)
    for seeds in (1, 2, 3, 4), (4, 1, 2, 3):
        together = sampler(logits, history, [seeded(seed) for seed in seeds])
        assert together.shape == (4, 1)
        among_others = weights.copy()
        weights.clear()
        for row, seed in enumerate(seeds):
            alone = logits[row:row + 1], history[row:row + 1]
            assert torch.equal(together[row:row + 1], sampler(*alone, [seeded(seed)]))
            assert torch.equal(together[row:row + 1], sampler(*alone, seeded(seed)))
        assert weights[::2] == weights[1::2] == among_others
        weights.clear()
    changed = logits.clone()
    changed[1:] = 0
    assert torch.equal(sampler(changed, history, [seeded(seed) for seed in seeds])[0], together[0])


def test_the_default_generator_draws_where_none_is_given():
    drawn = []
    for generator in None, seeded(5), None:
        torch.manual_seed(5)
        drawn.append(Sampler()(torch.zeros(3, 1000), generator=generator).tolist())
    assert drawn[0] == drawn[1] == drawn[2]


# --- greedy -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_greedy_is_the_first_of_the_largest(options, dtype):
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-INF, -INF, -7.0], [-INF, 5.0, 5.0]], dtype=dtype)
    sampler = Sampler(temperature=0, **options)
    assert sampler(logits).tolist() == [[1], [0], [2], [1]]
    assert sampler.probabilities(logits).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_greedy_draws_nothing_and_sees_bias_and_penalties():
    generator = seeded()
    before = host(generator.get_state()).copy()
    assert Sampler(temperature=0, logit_bias={0: 9.0})(torch.tensor([ROW]), generator=generator).tolist() == [[0]]
    assert Sampler(temperature=0, presence_penalty=5)(torch.tensor([ROW]), [[2]], generator).tolist() == [[5]]
    assert (host(generator.get_state()) == before).all()


def test_large_whole_numbers_and_close_float64_are_told_apart():
    assert Sampler(temperature=0)(torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)).tolist() == [[1]]
    assert Sampler(temperature=0)(torch.tensor([[1, 3, 2]])).tolist() == [[1]]


# --- what it takes, and leaves alone ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64], ids=str)
def test_every_dtype(dtype):
    """Small numbers, exact in each of them: the same distribution."""
    z = [[2.0, -1.0, 0.0, 1.0, 3.0, -2.0]]
    logits, sampler = torch.tensor(z).to(dtype), Sampler(**{**EVERYTHING, "logit_bias": {0: 0.001}})
    wanted = exactly(z[0], [4, 4], **{**EVERYTHING, "logit_bias": {0: 0.001}})
    np.testing.assert_allclose(sampler.probabilities(logits, [[4, 4]]), [wanted], rtol=1e-6)
    assert int(sampler(logits, [[4, 4]], seeded())) in np.nonzero(wanted)[0]
    for step, options in ((keep_top_k, (2,)), (keep_top_p, (0.5,)), (keep_min_p, (0.5,))):
        kept = step(logits, *options)
        assert kept.dtype == (dtype if dtype.is_floating_point else torch.float32)
        assert set(kept.flatten().tolist()) < {*z[0], -INF}


@pytest.mark.parametrize("numbers", [Fraction, np.float64, np.float32], ids=lambda kind: kind.__name__)
def test_numbers_of_other_types_are_numbers(numbers):
    options = {name: x for name, x in EVERYTHING.items() if name not in ("top_k", "logit_bias")}
    same = Sampler(**{name: numbers(x) for name, x in options.items()}, top_k=np.int64(7), logit_bias={np.int64(0): numbers(1.5)})
    logits, history = torch.randn(3, 9), [[1], [2, 2], []]
    found = same.probabilities(logits, history)
    np.testing.assert_allclose(found, Sampler(**options, top_k=7, logit_bias={0: 1.5}).probabilities(logits, history), rtol=1e-5)


def test_nothing_given_is_changed_or_kept():
    logits, bias, history = torch.randn(2, 9, requires_grad=True), {0: 1.5, 3: -INF}, [[1, 2], [3]]
    tensor = torch.tensor([0.5] * 9)
    before = copy.deepcopy([logits.tolist(), bias, history, tensor.tolist()])
    for form in bias, tensor:
        sampler = Sampler(**{**EVERYTHING, "logit_bias": form})
        assert not sampler(logits, history, seeded()).requires_grad
        wanted = sampler.probabilities(logits, history)
        assert [logits.tolist(), bias, history, tensor.tolist()] == before
        if form is bias:
            form[5] = 99.0
        else:
            form += torch.arange(9)
        assert (sampler.probabilities(logits, history) == wanted).all()
        bias.pop(5, None)
    wanted[:] = -1                                               # what it gave out is not its own either
    assert (sampler.probabilities(logits, history) >= 0).all()
    for step, options in ((add_bias, (bias,)), (penalize, (history, 2.0)), (temper, (0.5,)), (keep_top_k, (3,)), (keep_top_k, (99,)),
                          (keep_top_p, (0.5,)), (keep_top_p, (1.0,)), (keep_min_p, (0.2,))):
        assert not step(logits, *options).requires_grad and logits.tolist() == before[0]


def test_a_sampler_is_immutable_and_copies():
    sampler = Sampler(**EVERYTHING)
    for name in EVERYTHING:
        with pytest.raises(FrozenInstanceError):
            setattr(sampler, name, None)
    logits, history = torch.randn(2, 9), [[1, 2], [3]]
    for twin in copy.deepcopy(sampler), replace(sampler), Sampler(**EVERYTHING):
        assert (twin.probabilities(logits, history) == sampler.probabilities(logits, history)).all()
    assert replace(sampler, temperature=0).is_greedy and not sampler.is_greedy


@pytest.mark.parametrize("options, uses", [
    ({}, False), ({"temperature": 0, "logit_bias": {1: 1.0}}, False), ({"repetition_penalty": 1.1}, True),
    ({"repetition_penalty": 0.9}, True), ({"presence_penalty": -1}, True),
    ({"frequency_penalty": 0.1}, True), ({"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0}, False)], ids=str)
def test_whether_history_is_used(options, uses):
    sampler = Sampler(**options)
    assert sampler.uses_history is uses
    if uses:
        for ask in sampler, sampler.probabilities:
            with pytest.raises(ValueError, match="history"):
                ask(torch.zeros(2, 5))
    else:
        assert (sampler.probabilities(torch.zeros(2, 5), "not looked at") == sampler.probabilities(torch.zeros(2, 5))).all()


def test_sample_takes_every_option():
    logits, history = torch.randn(2, 9), [[1, 2], [3]]
    wanted = Sampler(**EVERYTHING)(logits, history, seeded(8))
    assert torch.equal(sample(logits, history=history, generator=seeded(8), **EVERYTHING), wanted)


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, EVERYTHING], ids=["plain", "greedy", "everything"])
def test_no_rows(options):
    """A batch of no row draws nothing."""
    sampler = Sampler(**options)
    assert sampler.probabilities(torch.zeros(0, 9), []).shape == (0, 9)
    for generator in None, seeded(), []:
        assert sampler(torch.zeros(0, 9), [], generator).shape == (0, 1)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("bias", [{0: 1.5, 3: -INF}, [1.5, 0.0, 0.25] * 3], ids=["dict", "tensor"])
def test_on_a_device(bias):
    """The ids of the CPU, on the device of the logits; one download; and each step by itself works there."""
    logits, history = torch.randn(3, 9), [[1, 2], [3], []]
    there, counts = logits.to("cuda"), getattr(torch.backend.require_cupy(), "counts", None)
    bias = bias if isinstance(bias, dict) else torch.tensor(bias, device="cuda")
    sampler = Sampler(**{**EVERYTHING, "logit_bias": bias})
    wanted = sampler(logits, history, seeded())
    downloads = counts and counts.downloads
    found = sampler(there, history, seeded())
    assert counts is None or counts.downloads == downloads + 1
    assert found.is_cuda and found.tolist() == wanted.tolist()
    assert (sampler.probabilities(there, torch.tensor([[1, 2]] * 3, device="cuda")) == sampler.probabilities(logits, [[1, 2]] * 3)).all()
    here = bias if isinstance(bias, dict) else bias.cpu()
    for step, options, same in ((add_bias, (bias,), (here,)), (penalize, (history, 2.0, 0.5), None), (temper, (0.5,), None),
                                (temper, (0,), None), (keep_top_k, (3,), None), (keep_top_p, (0.5,), None), (keep_min_p, (0.2,), None)):
        kept = step(there, *options)
        assert kept.is_cuda
        np.testing.assert_allclose(host(kept), host(step(logits, *(same or options))), rtol=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------------

OF_THE_STEPS = {"temperature": temper, "top_k": keep_top_k, "top_p": keep_top_p, "min_p": keep_min_p, "logit_bias": add_bias}
HUGE = 10**400
OUT_OF_RANGE = [
    *itertools.product(["temperature"], [-1, -0.001, NAN, INF, -INF, HUGE]),
    *itertools.product(["top_k"], [0, -1, -HUGE]),
    *itertools.product(["top_p"], [0, 0.0, -0.1, 1.0001, 2, NAN, INF, HUGE]),
    *itertools.product(["min_p"], [-0.1, -HUGE, 1.0001, 2, NAN, INF]),
    *itertools.product(["repetition_penalty"], [0, -1.0, NAN, INF, HUGE]),
    *itertools.product(["presence_penalty", "frequency_penalty"], [NAN, INF, -INF, HUGE, -HUGE, np.float32(NAN)]),
    *itertools.product(["logit_bias"], [{1: NAN}, {0: 0.0, 1: INF}, {1: HUGE}]),
]
OTHER_TYPES = [
    *itertools.product(["temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"], ["1", None, True, 1j, [1.0]]),
    *itertools.product(["top_p", "min_p"], ["1", True, 1j, [1.0]]),
    *itertools.product(["top_k"], ["2", 2.0, True, [2]]),
    *itertools.product(["logit_bias"], [3, "ab", [0.1, 0.2], np.zeros(5), {1.0: 1.0}, {"1": 1.0}, {True: 1.0}, {1: "1"}, {1: True},
                                        {1: None}]),
]
short = {"ids": lambda x: str(x)[:20]}


def refused(error, name, value):
    """By the sampler when it is made, by `sample`, and by the step."""
    with pytest.raises(error, match=rf"sample: (an id of )?{name}\b.* must be "):
        Sampler(**{name: value})
    with pytest.raises(error, match=f"sample: .*{name}"):
        sample(torch.zeros(2, 5), **{name: value})
    if name in OF_THE_STEPS:
        step = OF_THE_STEPS[name]
        with pytest.raises(error, match=f"{step.__name__}: "):
            step(torch.zeros(2, 5), value)
    else:
        with pytest.raises(error, match=f"penalize: {name}"):
            penalize(torch.zeros(2, 5), [[], []], **{name: value})


@pytest.mark.parametrize("name, value", OUT_OF_RANGE, **short)
def test_options_out_of_range_are_refused(name, value):
    refused(ValueError, name, value)


@pytest.mark.parametrize("name, value", OTHER_TYPES, **short)
def test_options_of_another_type_are_refused(name, value):
    refused(TypeError, name, value)


@pytest.mark.parametrize("bias", [[0.0, NAN], [INF, 0.0]], ids=str)
def test_tensors_of_bad_biases_are_refused(bias):
    with pytest.raises(ValueError, match="sample: logit_bias must be finite, or -inf"):
        Sampler(logit_bias=torch.tensor(bias))
    with pytest.raises(ValueError, match="add_bias: bias must be finite, or -inf"):
        add_bias(torch.zeros(1, 2), torch.tensor(bias))


def test_unknown_options_are_refused():
    for function in Sampler, lambda **options: sample(torch.zeros(1, 2), **options):
        with pytest.raises(TypeError, match="top_q"):
            function(top_q=0.5)


@pytest.mark.parametrize("bad", [-1, 5, 10**30])
def test_ids_outside_the_vocabulary_are_refused(bad):
    """They never wrap, in a bias or in a history."""
    for ask in Sampler(logit_bias={bad: 1.0}), Sampler(logit_bias={bad: 1.0}).probabilities, lambda z: add_bias(z, {0: 0.0, bad: 1.0}):
        with pytest.raises(IndexError, match=f"add_bias: .* id {bad}, .* 0 to 4"):
            ask(torch.zeros(2, 5))
    if abs(bad) < 10**9:
        for history in [[0], [bad]], [np.array([0]), np.array([4, bad])], torch.tensor([[0], [bad]]):
            with pytest.raises(IndexError, match=f"row 1 has the id {bad}, .* 0 to 4"):
                Sampler(presence_penalty=1)(torch.zeros(2, 5), history)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (6,), (1, 5), (2, 5)], ids=str)
def test_biases_of_another_shape_are_refused(shape):
    for ask in Sampler(logit_bias=torch.zeros(shape)), lambda z: add_bias(z, torch.zeros(shape)):
        with pytest.raises(ValueError, match=r"must have shape \(5,\)"):
            ask(torch.zeros(2, 5))


@pytest.mark.parametrize("history, error", [
    ([], ValueError), ([[1]], ValueError), ([[1]] * 3, ValueError), ("ab", TypeError), (3, TypeError), ([1, 2], TypeError),
    (np.array(3), TypeError), (np.array([1, 2]), TypeError), ([[1.0], [2.0]], TypeError), ([["a"], ["b"]], TypeError),
    ([[1], None], TypeError), ([[True], [False]], TypeError), ([[1], [[2]]], TypeError), ({0: [1], 1: [2]}, TypeError),
    (np.zeros((2, 3)), TypeError), ([[1], [10**30]], TypeError)], ids=str)
def test_histories_of_another_kind_are_refused(history, error):
    for ask in lambda z: Sampler(frequency_penalty=1)(z, history), lambda z: penalize(z, history, 2.0):
        with pytest.raises(error, match="penalize: .*history"):
            ask(torch.zeros(2, 5))


NOTHING_TO_DRAW = [[NAN, 1.0], [1.0, NAN], [-INF, -INF], [INF, 1.0], [NAN, -INF], [INF, -INF]]


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0.5, "min_p": 0.5}, {"logit_bias": {0: -INF}},
                                     {"repetition_penalty": 2.0, "presence_penalty": -1}], ids=str)
@pytest.mark.parametrize("row", NOTHING_TO_DRAW, ids=str)
def test_rows_without_a_distribution_are_refused(row, options):
    sampler, logits = Sampler(**options), torch.tensor([[0.0, 1.0], row])
    for ask in sampler, sampler.probabilities:
        with pytest.raises(ValueError, match="a row of logits holds NaN or"):
            ask(logits, [[0, 1], [0, 1]])


def test_a_bias_that_forbids_every_id_is_refused():
    with pytest.raises(ValueError, match="all -inf"):
        Sampler(logit_bias={0: -INF, 1: -INF})(torch.zeros(1, 2))
    assert Sampler(logit_bias={0: -INF}).probabilities(torch.zeros(1, 2)).tolist() == [[0, 1]]


@pytest.mark.parametrize("generators, error", [
    ([], ValueError), ([None], ValueError), ([None] * 3, ValueError), ([1, 2], TypeError), (7, TypeError), ("ab", TypeError)], ids=str)
def test_generators_of_another_kind_are_refused(generators, error):
    with pytest.raises(error, match="generator"):
        Sampler()(torch.zeros(2, 5), generator=generators)


@pytest.mark.parametrize("shape", [(), (5,), (2, 0), (0, 0), (2, 3, 5)], ids=str)
def test_logits_of_another_shape_are_refused(shape):
    for name, ask in (("sample", Sampler()), ("sample", Sampler().probabilities), ("temper", lambda z: temper(z, 1)),
                      ("keep_top_k", lambda z: keep_top_k(z, 1)), ("keep_top_p", lambda z: keep_top_p(z, 1)),
                      ("keep_min_p", lambda z: keep_min_p(z, 1)), ("add_bias", lambda z: add_bias(z, {})),
                      ("penalize", lambda z: penalize(z, []))):
        with pytest.raises(ValueError, match=rf"{name}: logits must have shape \[B, V_vocab\]"):
            ask(torch.zeros(shape))
        with pytest.raises(TypeError, match=f"{name}: logits must be a Tensor, got numpy.ndarray"):
            ask(np.zeros(shape))
