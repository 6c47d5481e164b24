"""The streams of random.py against PyTorch's: recorded values (record_random.py), live where PyTorch is installed."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from record_random import DATA, PROGRAMS, SEEDS, brief, call, torch_draw, weights

import tinygrad_tf as torch
from tinygrad_tf import random
from tinygrad_tf.random import Generator

EXACT = {"rand", "randint", "randperm", "bernoulli", "dropout_keep", "multinomial"}
SIZES = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 1000, 40000)


def assert_same(name, ours, theirs):
    """Equal bits where only integers take part; else 5 units in the last place, plus what cancels in mean + std · z."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (name, ours.dtype, ours.shape)
    if name in EXACT or (name == "uniform" and ours.dtype == np.float32):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    else:
        eps = np.finfo(ours.dtype).eps
        atol = 2 * eps if name == "normal" else eps / 2
        np.testing.assert_allclose(ours, theirs, rtol=5 * eps, atol=atol, err_msg=name)


def draw(generator, name, arguments):
    return getattr(generator, name)(**arguments)


@pytest.fixture(scope="module")
def recorded():
    with np.load(DATA) as data:
        return dict(data)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_draws_what_pytorch_drew(recorded, program, seed):
    generator, theirs = Generator().manual_seed(seed), recorded[f"{program}/{seed}"]
    for name, arguments in PROGRAMS[program]:
        ours = brief(draw(generator, name, arguments))
        assert_same(name, ours, theirs[:ours.nbytes].view(ours.dtype).reshape(ours.shape))
        theirs = theirs[ours.nbytes:]
    assert theirs.size == 0


# ---- live -----------------------------------------------------------------------------------------------------------


def assert_same_live(torch, seed, calls):
    torch.manual_seed(seed)
    generator = Generator().manual_seed(seed)
    for name, arguments in calls:
        assert_same(name, draw(generator, name, arguments), torch_draw(name, **arguments))
    next_word = call("randint", low=0, high=2**27, shape=1)
    np.testing.assert_array_equal(draw(generator, *next_word), torch_draw(next_word[0], **next_word[1]))


def calls_of_size(n):
    for dtype in (np.float16, np.float32, np.float64):
        yield call("rand", shape=n, dtype=dtype)
        yield call("uniform", shape=n, low=-0.3, high=0.2, dtype=dtype)
        yield call("randn", shape=n, dtype=dtype)
        yield call("normal", shape=n, mean=0.5, std=2, dtype=dtype)
        yield call("exponential", shape=n, rate=1.5, dtype=dtype)
        yield call("bernoulli", p=np.linspace(0, 1, n, dtype=dtype))
    yield call("bernoulli", p=0.3, shape=n)
    yield call("dropout_keep", shape=n, p=0.1)
    yield call("randperm", n=n)
    for high in (100, 2**28 - 1, 2**28, 2**40):
        yield call("randint", low=-7, high=high, shape=n)


@pytest.mark.torch
@pytest.mark.parametrize("n", SIZES)
def test_every_distribution_live(n):
    torch = pytest.importorskip("torch")
    for seed in range(21) if n < 1000 else range(2):
        assert_same_live(torch, seed, calls_of_size(n))


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(21))
def test_shuffled_calls_live(seed):
    torch = pytest.importorskip("torch")
    pool = [c for n in SIZES[:-1] for c in calls_of_size(n)] + PROGRAMS["multinomial"] + 20 * [call("randn", shape=1)]
    order = np.random.default_rng(seed).permutation(len(pool))[:80]
    assert_same_live(torch, seed, [pool[i] for i in order])


@pytest.mark.torch
@pytest.mark.parametrize("threads", (1, 2))
def test_threads_and_dtypes_do_not_change_dropout_live(threads):
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for shape in ((100003,), (4, 128, 300)):
                torch.manual_seed(3)
                x = torch.ones(shape, dtype=dtype, requires_grad=True)
                kept = torch.nn.functional.dropout(x, 0.1).detach() != 0
                np.testing.assert_array_equal(Generator().manual_seed(3).dropout_keep(shape, 0.1), kept.numpy())
    finally:
        torch.set_num_threads(before)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("shape", ((2,), (65,), (1000,), (50257,), (4, 65), (300, 3)))
def test_multinomial_live(shape, dtype):
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(0).standard_normal(shape)
    p = np.exp(3 * logits).astype(dtype)
    for seed in range(5):
        assert_same_live(torch, seed, [call("multinomial", p=p, num_samples=n, replacement=r)
                                       for n, r in ((1, False), (2, False), (1, True), (50, True), (1, False))])


@pytest.mark.torch
def test_states_travel_both_ways_live():
    torch = pytest.importorskip("torch")
    for seed in range(5):
        for warmup in (0, 1, 3, 623, 624, 625):
            ours, theirs = Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
            ours.randn(3), torch.randn(3, generator=theirs)                    # leaves a normal kept
            ours.rand(warmup), torch.rand(warmup, generator=theirs)
            from_theirs, from_ours = Generator(), torch.Generator()
            from_theirs.set_state(theirs.get_state().numpy())
            from_ours.set_state(torch.from_numpy(ours.get_state()))
            expected = torch.randn(3, generator=theirs).numpy(), torch.rand(700, generator=theirs).numpy()
            for got in ((ours.randn(3), ours.rand(700)), (from_theirs.randn(3), from_theirs.rand(700)),
                        (torch.randn(3, generator=from_ours).numpy(), torch.rand(700, generator=from_ours).numpy())):
                assert_same("randn", got[0], expected[0])
                assert_same("rand", got[1], expected[1])
            assert from_ours.initial_seed() == ours.initial_seed()
    np.testing.assert_array_equal(Generator().get_state(), torch.Generator().get_state().numpy())


# ---- seeds and states -----------------------------------------------------------------------------------------------


def test_state_is_pytorchs_state(recorded):
    generator = Generator().manual_seed(0)
    for name, arguments in PROGRAMS["mixed"]:
        draw(generator, name, arguments)
    state, theirs = generator.get_state(), recorded["state after mixed/0"]
    ours = state.view(random.STATE)[0]
    assert ours["has_normal"] == 1
    np.testing.assert_allclose(ours["normal"], theirs.view(random.STATE)[0]["normal"], rtol=1e-14)
    state.view(random.STATE)["normal"] = theirs.view(random.STATE)["normal"]
    np.testing.assert_array_equal(state, theirs)


@pytest.mark.parametrize("words", (0, 1, 5, 623, 624, 625, 1248))
@pytest.mark.parametrize("normals", (0, 1, 2))
def test_state_round_trip(words, normals):
    a = Generator().manual_seed(7)
    a.rand(words), a.randn(normals)
    state = a.get_state()
    b = Generator()
    b.set_state(state)
    np.testing.assert_array_equal(b.get_state(), state)
    assert b.initial_seed() == 7
    first = [a.randn(1), a.rand(1300), a.randn(40), a.multinomial(weights((30,)), 1), a.randn(1)]
    for again in (b, a):
        if again is a:
            a.set_state(state)
        for x, y in zip(first, [again.randn(1), again.rand(1300), again.randn(40),
                                again.multinomial(weights((30,)), 1), again.randn(1)]):
            np.testing.assert_array_equal(x, y)


def test_state_right_after_seeding():
    state = Generator().manual_seed(5).get_state().view(random.STATE)[0]
    assert [int(state[field]) for field in ("initial_seed", "left", "seeded", "next", "has_normal")] == [5, 1, 1, 0, 0]


def test_copies_go_their_own_way():
    a = Generator().manual_seed(7)
    a.randn(1)
    b = copy.deepcopy(a)
    expected = b.randn(1), b.rand(9)
    np.testing.assert_array_equal(a.randn(1), expected[0])
    np.testing.assert_array_equal(a.rand(9), expected[1])


def test_state_is_a_snapshot():
    generator = Generator()
    state = generator.get_state()
    kept = state.copy()
    generator.set_state(state)
    generator.rand(1000)
    np.testing.assert_array_equal(state, kept)
    generator.get_state()[:] = 0
    generator.rand(3)


def damaged(field, value):
    state = Generator().get_state()
    state.view(random.STATE)[field] = value
    return state


@pytest.mark.parametrize("state, error, words", [
    (np.zeros(5056, np.float32), TypeError, "uint8"), ([1, 2], TypeError, "uint8"), (None, TypeError, "uint8"),
    (np.zeros(3, np.uint8), RuntimeError, r"\(5056,\), got \(3,\)"),
    (np.zeros((2, 2528), np.uint8), RuntimeError, "shape"),
    (np.zeros(5056, np.uint8), RuntimeError, "invalid mt19937"), (damaged("left", 0), RuntimeError, "invalid"),
    (damaged("left", 625), RuntimeError, "invalid"), (damaged("left", 100), RuntimeError, "invalid"),
    (damaged("next", 625), RuntimeError, "invalid"), (damaged("seeded", 0), RuntimeError, "invalid"),
    (damaged("words", 2**32), RuntimeError, "invalid"),
])
def test_bad_state_raises_and_changes_nothing(state, error, words):
    generator = Generator()
    before = generator.get_state()
    with pytest.raises(error, match=words):
        generator.set_state(state)
    np.testing.assert_array_equal(generator.get_state(), before)


@pytest.mark.parametrize("seed, unsigned", [(0, 0), (-1, 2**64 - 1), (-2**63, 2**63), (2**64 - 1, 2**64 - 1),
                                            (np.int64(5), 5), (np.array(6), 6), (True, 1)])
def test_seeds(seed, unsigned):
    generator = Generator()
    assert generator.manual_seed(seed) is generator
    assert generator.initial_seed() == unsigned
    np.testing.assert_array_equal(generator.rand(9), Generator().manual_seed(unsigned % 2**32).rand(9))


@pytest.mark.parametrize("seed, error", [(2**64, ValueError), (-2**63 - 1, ValueError), (1.5, TypeError),
                                         (1.0, TypeError), ("3", TypeError), (None, TypeError),
                                         (np.float32(2), TypeError), ([1], TypeError)])
def test_bad_seeds_raise_and_change_nothing(seed, error):
    generator = Generator()
    before = generator.get_state()
    with pytest.raises(error, match="manual_seed"):
        generator.manual_seed(seed)
    np.testing.assert_array_equal(generator.get_state(), before)


def test_seeding_forgets_the_kept_normal():
    generator = Generator().manual_seed(1)
    first = generator.randn(1)
    np.testing.assert_array_equal(generator.manual_seed(1).randn(1), first)


def test_fresh_seeds_differ_and_are_reported():
    a, b = Generator(), Generator()
    assert a.initial_seed() == b.initial_seed() == random.DEFAULT_SEED
    assert a.seed() != b.seed()
    np.testing.assert_array_equal(Generator().manual_seed(a.initial_seed()).rand(5), a.rand(5))


def test_default_generator():
    before = random.get_rng_state()
    try:
        assert random.manual_seed(11) is random.default_generator
        assert random.initial_seed() == 11
        np.testing.assert_array_equal(random.default_generator.rand(5), Generator().manual_seed(11).rand(5))
        state = random.get_rng_state()
        first = random.default_generator.randn(5)
        random.set_rng_state(state)
        np.testing.assert_array_equal(random.default_generator.randn(5), first)
        assert random.seed() == random.initial_seed()
    finally:
        random.set_rng_state(before)


def test_another_device_raises():
    with pytest.raises(RuntimeError, match="cuda"):
        Generator("cuda")


# ---- what every call promises ---------------------------------------------------------------------------------------

ALL_CALLS = [call for calls in PROGRAMS.values() for call in calls]


@pytest.mark.parametrize("name, arguments", [
    ("rand", dict(shape=0)), ("rand", dict(shape=(3, 0), dtype=np.float64)), ("uniform", dict(shape=0)),
    ("randn", dict(shape=0)), ("normal", dict(shape=(0, 20))), ("exponential", dict(shape=0)),
    ("randint", dict(low=0, high=5, shape=0)), ("randint", dict(low=0, high=2**40, shape=0)), ("randperm", dict(n=0)),
    ("randperm", dict(n=1)), ("bernoulli", dict(p=0.5, shape=0)), ("bernoulli", dict(p=np.zeros(0, np.float32))),
    ("dropout_keep", dict(shape=0, p=0.5)), ("dropout_keep", dict(shape=9, p=0)), ("dropout_keep", dict(shape=9, p=1)),
    ("multinomial", dict(p=np.ones((0, 4), np.float32), num_samples=2)),
    ("multinomial", dict(p=np.ones((0, 4), np.float32), num_samples=9, replacement=True)),
])
def test_calls_that_take_no_words(name, arguments):
    generator = Generator()
    generator.randn(1)
    before = generator.get_state()
    draw(generator, name, arguments)
    np.testing.assert_array_equal(generator.get_state(), before)


@pytest.mark.parametrize("name, arguments", ALL_CALLS)
def test_calls_leave_their_arguments_alone_and_return_writable_arrays(name, arguments):
    p = arguments.get("p")
    before = p.copy() if isinstance(p, np.ndarray) else p
    assert draw(Generator(), name, arguments).flags.writeable
    np.testing.assert_array_equal(p, before)


def test_shape_is_an_int_or_ints():
    flat = Generator().rand(6)
    for shape in ((6,), [6], (2, 3), np.int64(6), np.array([3, 2])):
        np.testing.assert_array_equal(Generator().rand(shape).ravel(), flat)
    assert Generator().rand(()).shape == Generator().randn(()).shape == Generator().dropout_keep((), 0.5).shape == ()


def test_ranges():
    generator = Generator().manual_seed(0)
    for dtype in (np.float32, np.float64):
        u = generator.rand(100_000, dtype)
        assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01
        u = generator.uniform(100_000, 1, 1 + 1e-6, dtype)                   # float32 has 8 numbers in there
        assert u.min() >= 1 and u.max() < dtype(1 + 1e-6)
        z = generator.randn(100_000, dtype)
        assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.02
    assert sorted(generator.randperm(1000)) == list(range(1000))
    assert set(generator.randint(-2, 3, 1000)) == {-2, -1, 0, 1, 2}
    assert abs(generator.dropout_keep(100_000, 0.1).mean() - 0.9) < 0.01
    assert abs(generator.exponential(100_000, 4).mean() - 0.25) < 0.01


# ---- multinomial ----------------------------------------------------------------------------------------------------


def all_zero_words():
    """A generator whose every word is 0: each uniform is the rarest one, exactly 0."""
    generator = Generator()
    generator.set_state(damaged("words", 0))
    assert not generator.rand(3).any()
    return generator


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("make", (Generator, all_zero_words))
@pytest.mark.parametrize("p", ([0, 3, 0, 1, 0], [0, 0, 0, 0, 2], [[0, 1, 1], [2, 0, 1], [3, 1, 0]],
                               [0, 1e-45, 1e-45, 0], [0, 1e-45, 3e38], [0, 1e-30, 0, 1e30, 0]))
@pytest.mark.parametrize("n, replacement", ((1, False), (1, True), (300, True)))
def test_weight_zero_is_never_drawn(p, n, replacement, make, dtype):
    p, generator = np.array(p, dtype), make()
    for _ in range(200 if n == 1 else 1):
        drawn = generator.multinomial(p, n, replacement)
        assert drawn.dtype == np.int64 and drawn.shape == p.shape[:-1] + (n,)
        assert (np.take_along_axis(p, drawn, axis=-1) > 0).all()


def test_a_long_row_of_tiny_weights():
    tiny = np.full(50_000, 1e-6, np.float32)                                 # its float32 running sum misses 0.05
    tiny[-1] = tiny[0] = 0
    drawn = Generator().multinomial(tiny, 100_000, replacement=True)
    assert 0 < drawn.min() and drawn.max() < 49_999 and drawn.max() > 49_000


def test_frequencies_and_distinctness():
    generator = Generator().manual_seed(0)
    p = np.array([[0, 3, 0, 1, 0], [1, 1, 0, 0, 2]], np.float32)
    drawn = generator.multinomial(p, 4000, replacement=True)
    assert abs((drawn[0] == 1).mean() - 0.75) < 0.04 and abs((drawn[1] == 4).mean() - 0.5) < 0.04
    assert sorted(generator.multinomial(p[1], 3)) == [0, 1, 4]
    ones = np.stack([generator.multinomial(p, 1)[:, 0] for _ in range(4000)])
    assert abs((ones[:, 0] == 1).mean() - 0.75) < 0.04


@pytest.mark.parametrize("p, n, replacement, words", [
    ([0, 0], 1, False, "no weight above 0"), ([0, 0], 1, True, "no weight above 0"),
    ([[1, 1], [0, 0]], 1, False, "no weight above 0"), ([-1, 2], 1, False, "weights >= 0"),
    ([-1, 2], 1, True, "weights >= 0"),
    ([np.nan, 1], 1, False, "NaN"), ([np.nan, 1], 1, True, "NaN"), ([np.inf, 1], 1, False, "infinite"),
    ([np.inf, 1], 1, True, "infinite"), ([1, 2], 3, False, "num_samples=3"),
    ([1, 0, 0], 2, False, "fewer weights above 0"),
    ([1, 2], 0, False, "num_samples > 0"), ([1, 2], -1, True, "num_samples > 0"), (1.0, 1, False, r"shape \(\)"),
    (np.ones((2, 2, 2)), 1, False, r"\(2, 2, 2\)"),
    ([], 1, False, "no weight"), (np.ones((2, 0)), 1, True, "no weight"),
    ([3e38, 3e38, 3e38], 5, True, "overflows float32"),
])
def test_bad_weights_raise(p, n, replacement, words):
    with pytest.raises(RuntimeError, match=words):
        Generator().multinomial(np.array(p, np.float32), n, replacement)


def test_integer_weights_raise():
    with pytest.raises(RuntimeError, match="int64"):
        Generator().multinomial(np.array([1, 2]), 1)


# ---- bad arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, arguments, error, words", [
    ("rand", dict(shape=-1), RuntimeError, "negative dimension"),
    ("randn", dict(shape=(2, -3)), RuntimeError, r"\(2, -3\)"), ("rand", dict(shape=1.5), TypeError, "1.5"),
    ("rand", dict(shape="ab"), TypeError, "ab"), ("rand", dict(shape=3, dtype=np.int64), TypeError, "int64"),
    ("randn", dict(shape=3, dtype=np.int32), TypeError, "int32"),
    ("uniform", dict(shape=3, low=2, high=1), RuntimeError, "low=2, high=1"),
    ("uniform", dict(shape=3, low=np.nan, high=1), RuntimeError, "nan"),
    ("uniform", dict(shape=3, low=0, high=np.inf), RuntimeError, "finite"),
    ("uniform", dict(shape=3, low=-3e38, high=3e38), RuntimeError, "finite in float32"),
    ("normal", dict(shape=3, std=-1), RuntimeError, "std"), ("normal", dict(shape=0, std=np.nan), RuntimeError, "nan"),
    ("exponential", dict(shape=3, rate=0), RuntimeError, "rate"),
    ("exponential", dict(shape=3, rate=np.nan), RuntimeError, "nan"),
    ("randint", dict(low=5, high=5, shape=2), RuntimeError, "low=5, high=5"),
    ("randint", dict(low=5, high=4, shape=0), RuntimeError, "low=5, high=4"),
    ("randint", dict(low=0, high=300, shape=2, dtype=np.uint8), RuntimeError, "uint8"),
    ("randint", dict(low=-1, high=3, shape=2, dtype=np.uint8), RuntimeError, "uint8"),
    ("randint", dict(low=0, high=3, shape=2, dtype=np.bool_), RuntimeError, "bool"),
    ("randint", dict(low=0, high=2**63, shape=2), RuntimeError, "int64"),
    ("randint", dict(low=0, high=2**30, shape=2, dtype=np.float32), RuntimeError, "float32"),
    ("randint", dict(low=0.5, high=3, shape=2), TypeError, "float"),
    ("randint", dict(low=0, high=3, shape=2, dtype="c8"), TypeError, "complex64"),
    ("randperm", dict(n=-1), RuntimeError, "n=-1"), ("randperm", dict(n=2**31), RuntimeError, "in parts"),
    ("randperm", dict(n=2.0), TypeError, "float"), ("bernoulli", dict(p=1.5, shape=2), RuntimeError, "1.5"),
    ("bernoulli", dict(p=np.nan, shape=2), RuntimeError, "nan"), ("bernoulli", dict(p=0.5), TypeError, "shape"),
    ("bernoulli", dict(p=np.array([0.5, 2])), RuntimeError, "outside"),
    ("bernoulli", dict(p=np.array([0.5, np.nan])), RuntimeError, "NaN"),
    ("bernoulli", dict(p=np.array([0, 1])), TypeError, "int64"),
    ("dropout_keep", dict(shape=2, p=1.5), ValueError, "1.5"),
    ("dropout_keep", dict(shape=2, p=-0.1), ValueError, "-0.1"),
    ("dropout_keep", dict(shape=2, p=np.nan), ValueError, "nan"),
])
def test_bad_arguments_raise_and_take_no_words(name, arguments, error, words):
    generator = Generator()
    before = generator.get_state()
    with pytest.raises(error, match=words):
        draw(generator, name, arguments)
    np.testing.assert_array_equal(generator.get_state(), before)


@pytest.mark.parametrize("draw", [lambda g: torch.rand(2, generator=g), lambda g: torch.randn(2, generator=g),
                                  lambda g: torch.randint(5, (2,), generator=g), lambda g: torch.randperm(3, generator=g),
                                  lambda g: torch.ones(2).uniform_(generator=g), lambda g: torch.ones(2).multinomial(1, generator=g),
                                  lambda g: torch.bernoulli(torch.ones(2), generator=g),
                                  lambda g: torch.normal(0.0, 1.0, (2,), generator=g)])
def test_a_generator_is_a_generator(draw):
    draw(None), draw(torch.Generator())
    for wrong in (5, "cpu", np.random.default_rng(0), torch.Generator):
        with pytest.raises(TypeError, match="expected a Generator or None"):
            draw(wrong)


def test_threads_that_draw_first_at_once_draw_from_one_stream(monkeypatch):
    made, both = np.random.RandomState, threading.Barrier(2)

    def slow(seed):
        both.wait(10)
        return made(seed)
    monkeypatch.setattr(random.np.random, "RandomState", slow)
    generator = Generator().manual_seed(3)
    with ThreadPoolExecutor(2) as pool:
        drawn = [task.result() for task in [pool.submit(generator.rand, (2,)) for _ in range(2)]]
    monkeypatch.undo()
    want = Generator().manual_seed(3).rand((4,)).tolist()
    assert sorted(np.concatenate(drawn).tolist()) == sorted(want)
