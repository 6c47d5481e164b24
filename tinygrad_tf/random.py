"""Random numbers: the streams of PyTorch's CPU generator, reproduced in NumPy.

A `Generator` yields the words of the Mersenne Twister MT19937 (Matsumoto and Nishimura, 1998); each distribution below
is a formula on those words, so one seed gives PyTorch's numbers. Checked against PyTorch 2.13. Notation:

    w32 = one 32-bit word                      u24 = (w32 mod 2²⁴) / 2²⁴    a float32 in [0, 1)
    w64 = first word · 2³² + second word       u53 = (w64 mod 2⁵³) / 2⁵³    a float64 in [0, 1)

Which words a call takes depends on the sizes and dtypes in it, never on threads; a call of size 0 takes none.
Integers, booleans, permutations, `rand` and float32 `uniform` are equal bit for bit. Where a logarithm or a cosine
takes part, the last bits are those of the mathematics library: float32 normals agree to 5 units in the last place
(PyTorch's own are up to that far from exact), float64 results and float64 `uniform` to 4.

Everything here takes and returns NumPy arrays; the functions on tensors are built on top.
"""

import math
import operator
import os
import threading
from contextlib import contextmanager

import numpy as np

from .dtypes import is_float, limits, widened

DEFAULT_SEED = 67280421310721            # PyTorch's own, for a generator that nobody has seeded
WIDE_RANGE = 2**28                       # from here on, randint takes w64: w32 % range would be visibly skewed
LARGEST_PERMUTATION = (2**32 - 1) // 20  # from here on, PyTorch's randperm takes another algorithm

# The 5,056 bytes of torch.get_rng_state(), a C struct: the words are 32-bit numbers stored in 64 bits.
STATE = np.dtype([
    ("initial_seed", np.uint64), ("left", np.int32), ("seeded", np.int32), ("next", np.uint64),
    ("words", np.uint64, 624), ("unused_x", np.float64), ("normal", np.float64), ("unused_rho", np.float64),
    ("has_normal", np.int32), ("padding", np.int32), ("unused_normal", np.float32), ("unused_flag", np.bool_),
], align=True)


class Generator:
    """One stream of random words, and every distribution drawn from it.

    `shape` is an int or a tuple of ints; a floating `dtype` is float16 or bfloat16 (float32 draws, rounded), float32 or float64.
    """

    def __init__(self, device="cpu"):
        if str(device) != "cpu":
            raise RuntimeError(f"Generator: there is no stream on device '{device}'; draw with Generator('cpu') "
                               "and move the result.")
        self.device = "cpu"
        self._start(DEFAULT_SEED)

    # ---- seed and state ---------------------------------------------------------------------------------------------

    def manual_seed(self, seed):
        """Start the stream of `seed`, an int in [−2⁶³, 2⁶⁴); a negative one means seed + 2⁶⁴. Returns self.

        The words depend on seed mod 2³². TypeError if `seed` is not an int, ValueError if it is out of range.
        """
        self._note()
        return self._start(seed)

    def _start(self, seed):
        self._initial_seed, self._next_normal = _seed_to_uint64(seed), None
        self.__dict__.pop("stream", None)
        return self

    @property
    def _words(self):
        """The stream of words, made when the first is drawn: many a generator is made for a forward pass that draws nothing.

        NumPy promises that RandomState's stream never changes (NEP 19), and seeds MT19937 as PyTorch does.
        """
        stream = self.__dict__.get("stream")
        if stream is None:                       # setdefault: of threads that come at once, all get the same one
            stream = self.__dict__.setdefault("stream", np.random.RandomState(self._initial_seed % 2**32))
        return stream

    def initial_seed(self):
        """The seed that this stream was started with, as a non-negative int."""
        return self._initial_seed

    def seed(self):
        """Start a stream from a seed of the operating system's, and return that seed."""
        self.manual_seed(int.from_bytes(os.urandom(8), "little"))
        return self._initial_seed

    def get_state(self):
        """Everything that decides what comes next: uint8 [5056], the layout of torch.get_rng_state()."""
        _, words, position = self._words.get_state()[:3]
        state = np.zeros((), STATE)
        state["initial_seed"], state["seeded"], state["words"] = self._initial_seed, 1, words
        state["left"], state["next"] = 625 - position, position % 624
        if self._next_normal is not None:
            state["has_normal"], state["normal"] = 1, self._next_normal
        return np.frombuffer(state.tobytes(), np.uint8).copy()

    def set_state(self, state):
        """Continue where `get_state` was called. TypeError if not uint8, RuntimeError if it is not such a state."""
        state = _parse_state(state)
        self._note()
        position = 624 if state["left"] == 1 else int(state["next"])
        self._initial_seed = int(state["initial_seed"])
        self._words.set_state(("MT19937", state["words"].astype(np.uint32), position))
        self._next_normal = float(state["normal"]) if state["has_normal"] else None

    # ---- words ------------------------------------------------------------------------------------------------------

    def _note(self):
        """Tells `states_at_first_use` the state before this use."""
        if _use.states is not None and self not in _use.states:
            _use.states[self] = self.get_state()

    def _w32(self, n):
        self._note()
        return self._words.randint(0, 2**32, n, dtype=np.uint32)

    def _w64(self, n):
        self._note()
        return self._words.randint(0, 2**64, n, dtype=np.uint64)

    def _w53(self, n):
        return self._w64(n) & np.uint64(2**53 - 1)

    def _unit(self, n, dtype):
        """n uniforms in [0, 1): u24 in float32, also for 16 bits; u53 for float64."""
        if dtype != np.float64:
            return (self._w32(n) & np.uint32(2**24 - 1)).astype(np.float32) * np.float32(2.0**-24)
        return self._w53(n).astype(np.float64) * 2.0**-53

    # ---- continuous distributions -----------------------------------------------------------------------------------

    def rand(self, shape, dtype=np.float32):
        """u24 or u53, uniform in [0, 1)."""
        return self.uniform(_shape(shape, "rand"), 0.0, 1.0, _float_dtype(dtype, "rand"))

    def uniform(self, shape, low=0.0, high=1.0, dtype=np.float32):
        """u · (high − low) + low, in [low, high). RuntimeError unless low ≤ high, both finite in `dtype`."""
        shape, dtype = _shape(shape, "uniform"), _float_dtype(dtype, "uniform")
        low, high = _interval(low, high, dtype)
        x = _multiply_add(self._unit(math.prod(shape), dtype), high - low, low).astype(dtype, copy=False)
        x[x == dtype.type(high)] = low               # rounding may have reached the excluded end
        return x.reshape(shape)

    def randn(self, shape, dtype=np.float32):
        """Normal with mean 0 and standard deviation 1; see `normal`."""
        return self.normal(shape, 0.0, 1.0, dtype)

    def normal(self, shape, mean=0.0, std=1.0, dtype=np.float32):
        """mean + std · z with z from Box and Muller (1958). RuntimeError if std < 0.

        16 or more elements are made in blocks of 16, fewer in float64 pairs of which an unused second half is kept.
        """
        shape, dtype = _shape(shape, "normal"), _float_dtype(dtype, "normal")
        if not std >= 0:
            raise RuntimeError(f"normal: expected a standard deviation std >= 0, got {std}.")
        n = math.prod(shape)
        z = self._normal_blocks(n, dtype) if n >= 16 else self._normal_pairs(n)
        return _multiply_add(z, std, mean).astype(dtype, copy=False).reshape(shape)

    def _normal_blocks(self, n, dtype):
        """n ≥ 16 normals in blocks of 16; where 16 does not divide n, the last 16 are drawn again as one block.

        Before that the uniforms of the ragged end are drawn too, and not used; but not for 16 bits.
        """
        whole = n - n % 16
        u = self._unit(whole if dtype.itemsize == 2 else n, dtype)
        z = np.empty(n, u.dtype)
        z[:whole] = _box_muller_blocks(u[:whole])
        if whole < n:
            z[-16:] = _box_muller_blocks(self._unit(16, dtype))
        return z

    def _normal_pairs(self, n):
        """n < 16 normals in float64: √(−2 ln(1 − u₂)) · (cos 2πu₁, sin 2πu₁), u53; one left over is kept."""
        kept = [] if self._next_normal is None else [self._next_normal]
        pairs = (n - len(kept) + 1) // 2
        u1, u2 = self._unit(2 * pairs, np.float64).reshape(pairs, 2).T
        radius, theta = np.sqrt(-2 * np.log1p(-u2)), 2 * np.pi * u1
        z = np.concatenate([kept, np.stack([radius * np.cos(theta), radius * np.sin(theta)], axis=1).ravel()])
        self._next_normal = float(z[n]) if len(z) > n else None
        return z[:n]

    def exponential(self, shape, rate=1.0, dtype=np.float32):
        """−ln(1 − u53) / rate, rounded to `dtype`. RuntimeError unless rate > 0."""
        shape, dtype = _shape(shape, "exponential"), _float_dtype(dtype, "exponential")
        if not rate > 0:
            raise RuntimeError(f"exponential: expected a rate > 0, got {rate}.")
        return (-1.0 / rate * np.log1p(-self._unit(math.prod(shape), np.float64))).astype(dtype).reshape(shape)

    # ---- integers and permutations ----------------------------------------------------------------------------------

    def randint(self, low, high, shape, dtype=np.int64):
        """low + w mod (high − low), in [low, high): w is w32, or w64 if high − low ≥ 2²⁸.

        RuntimeError if low ≥ high, or if `dtype` cannot hold every integer of the range.
        """
        shape, dtype, low, high = _shape(shape, "randint"), np.dtype(dtype), operator.index(low), operator.index(high)
        _check_integer_range(low, high, dtype)
        n, span = math.prod(shape), high - low
        words = self._w64(n) if span >= WIDE_RANGE else self._w32(n)
        return ((words % words.dtype.type(span)).astype(np.int64) + low).astype(dtype, copy=False).reshape(shape)

    def randperm(self, n):
        """A permutation of 0 … n−1, int64 (Fisher and Yates): swap i with i + w32 mod (n − i), for i = 0 … n−2."""
        n = operator.index(n)
        if not 0 <= n < LARGEST_PERMUTATION:
            raise RuntimeError(f"randperm: expected 0 <= n < {LARGEST_PERMUTATION}, got n={n}; shuffle more in parts.")
        first = np.arange(max(n - 1, 0))
        partners = first + self._w32(len(first)) % (n - first)
        order = list(range(n))           # each swap needs the one before; lists swap faster than arrays
        for i, j in enumerate(partners.tolist()):
            order[i], order[j] = order[j], order[i]
        return np.array(order, np.int64)

    # ---- coins ------------------------------------------------------------------------------------------------------

    def bernoulli(self, p, shape=None, dtype=None):
        """1 with probability p, else 0:  u < p.   p: a float, with `shape`; or an array, drawn elementwise.

        u is u53 for a float and for float64 arrays, u24 for float32 arrays. An array is broadcast to `shape` if that
        is given. `dtype` is the array's, or float32. RuntimeError if any p is outside [0, 1].
        """
        if isinstance(p, np.ndarray):
            keep, default = self._bernoulli_array(p, shape), p.dtype
        else:
            keep, default = self._bernoulli_scalar(p, shape), np.float32
        return keep.astype(default if dtype is None else dtype, copy=False)

    def _bernoulli_scalar(self, p, shape):
        """u53 < p, in integers: w64 mod 2⁵³ < ⌈p · 2⁵³⌉."""
        if shape is None:
            raise TypeError(f"bernoulli: p={p} is one number, so `shape` must say how many to draw.")
        if not 0 <= p <= 1:
            raise RuntimeError(f"bernoulli: expected a probability p in [0, 1], got {p}.")
        shape = _shape(shape, "bernoulli")
        return (self._w53(math.prod(shape)) < np.uint64(math.ceil(p * 2.0**53))).reshape(shape)

    def _bernoulli_array(self, p, shape):
        dtype = _float_dtype(p.dtype, "bernoulli")
        if not ((p >= 0) & (p <= 1)).all():
            raise RuntimeError("bernoulli: expected every probability in [0, 1], got one outside (or NaN).")
        if shape is not None:
            p = np.broadcast_to(p, _shape(shape, "bernoulli"))
        return self._unit(p.size, dtype).reshape(p.shape) < p

    def dropout_keep(self, shape, p):
        """Which elements dropout keeps: True with probability 1 − p; bool.  F.dropout(x, p) = x · keep / (1 − p).

        One u53 per element in C order, whatever the dtype of x; p = 0 and p = 1 draw nothing. ValueError if p is
        outside [0, 1].
        """
        if not 0 <= p <= 1:
            raise ValueError(f"dropout: expected a probability p between 0 and 1, got {p}.")
        if p in (0, 1):
            return np.full(_shape(shape, "dropout"), p == 0)
        return self._bernoulli_scalar(1 - p, shape)

    # ---- categories -------------------------------------------------------------------------------------------------

    def multinomial(self, p, num_samples, replacement=False):
        """Indices drawn with the weights p: [V] or [rows, V], which need not sum to 1 → int64 [n] or [rows, n].

        Without replacement, or for one sample: the n largest of p / Exp(1), largest first. With: the first index whose
        cumulative share of the weights reaches u53. An index of weight 0 is never drawn. RuntimeError for weights that
        are negative, NaN, infinite, all zero, or (without replacement) fewer than the samples.
        """
        p, num_samples = np.asarray(p), operator.index(num_samples)
        _check_weights(p, num_samples, replacement)
        rows = p.reshape(-1, p.shape[-1])
        draw = self._with_replacement if replacement and num_samples > 1 else self._without_replacement
        return draw(rows, num_samples).astype(np.int64, copy=False).reshape(*p.shape[:-1], num_samples)

    def _without_replacement(self, p, n):
        with np.errstate(all="ignore"):
            race = np.where(p > 0, p / self.exponential(p.shape, dtype=p.dtype), -1)     # p / q may underflow to 0
        if n == 1:
            return race.argmax(axis=-1)
        return np.argsort(-race, axis=-1, kind="stable")[:, :n]

    def _with_replacement(self, p, n):
        with np.errstate(over="ignore"):
            share = np.cumsum(p, axis=-1)
        _check_sums_are_finite(share[:, -1])
        share /= share[:, -1:]
        u = self._unit(len(p) * n, np.float64).reshape(len(p), n)
        drawn = np.array([np.searchsorted(share_row, u_row) for share_row, u_row in zip(share, u)], np.int64)
        return np.maximum(drawn.reshape(u.shape), (p > 0).argmax(axis=-1)[:, None])      # u = 0 finds index 0


# ---- formulas -------------------------------------------------------------------------------------------------------


def _box_muller_blocks(u):
    """Uniforms [16 k] → normals [16 k]. In each block u₁ is the first 8 and u₂ the last 8, and the normals are

    √(−2 ln(1 − u₁)) · cos 2πu₂, then the same with sin 2πu₂.
    """
    u1, u2 = np.ascontiguousarray(u.reshape(-1, 2, 8).swapaxes(0, 1))
    radius, theta = np.sqrt(-2 * np.log(1 - u1)), 2 * np.pi * u2
    return np.stack([radius * np.cos(theta), radius * np.sin(theta)], axis=1).ravel()


def _multiply_add(x, scale, shift):
    """x · scale + shift; float32 is rounded once, as by the fused instruction that PyTorch's kernels use."""
    if x.dtype == np.float32 and shift != 0:
        return (x.astype(np.float64) * np.float32(scale) + np.float32(shift)).astype(np.float32)
    return x * x.dtype.type(scale) + x.dtype.type(shift)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _shape(shape, op):
    """An int or a sequence of ints, as a tuple of non-negative ints."""
    try:
        shape = tuple(operator.index(size) for size in shape) if np.iterable(shape) else (operator.index(shape),)
    except TypeError:
        raise TypeError(f"{op}: expected a shape of ints, got {shape!r}.") from None
    if min(shape, default=0) < 0:
        raise RuntimeError(f"{op}: trying to create a tensor with a negative dimension: {shape}.")
    return shape


def _float_dtype(dtype, op):
    dtype = np.dtype(dtype)
    if not is_float(dtype):
        raise TypeError(f"{op}: expected dtype float16, bfloat16, float32 or float64, got {dtype}; draw float32 and cast the result.")
    return dtype


def _seed_to_uint64(seed):
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"manual_seed: expected an int, got {type(seed).__name__} {seed!r}.") from None
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"manual_seed: expected a seed in [-2**63, 2**64), got {number}.")
    return number % 2**64


def _parse_state(state):
    """uint8 [5056] → one STATE record, with the fields that `set_state` relies on checked."""
    state = np.asarray(state)
    if state.dtype != np.uint8:
        raise TypeError(f"set_state: expected the uint8 array that get_state() returns, got dtype {state.dtype}.")
    if state.shape != (STATE.itemsize,):
        raise RuntimeError(f"set_state: expected a state of shape ({STATE.itemsize},), got {state.shape}; "
                           "was it made by get_state()?")
    state = np.frombuffer(state.tobytes(), STATE)[0]
    left, position = int(state["left"]), int(state["next"])
    ready_or_spent = left == 1 and position in (0, 624)
    if state["seeded"] != 1 or not (ready_or_spent or 0 < position == 625 - left) or state["words"].max() >= 2**32:
        raise RuntimeError("set_state: invalid mt19937 state; its bytes do not describe a generator, "
                           "so it was damaged or not made by get_state().")
    return state


def _interval(low, high, dtype):
    if not low <= high:
        raise RuntimeError(f"uniform: expected low <= high for the interval [low, high), got low={low}, high={high}.")
    limit, wide = float(limits(dtype).max), np.promote_types(widened(dtype), np.float32)
    if not (-limit <= low and high <= limit and float(high) - float(low) <= limit):
        raise RuntimeError(f"uniform: the interval [{low}, {high}) and its length must be finite in {dtype}.")
    return wide.type(low), wide.type(high)


def _check_integer_range(low, high, dtype):
    if low >= high:
        raise RuntimeError(f"randint: expected low < high for the interval [low, high), got low={low}, high={high}.")
    smallest, largest = _integers_of(dtype)
    if low < smallest or high - 1 > largest:
        raise RuntimeError(f"randint: dtype {dtype} cannot hold every integer of [{low}, {high}); choose a wider one.")


def _integers_of(dtype):
    """The smallest and the largest of the consecutive integers that randint may return in `dtype`."""
    if is_float(dtype):
        return -(2 ** (limits(dtype).nmant + 1)), 2 ** (limits(dtype).nmant + 1)
    if dtype.kind == "b":
        return 0, 1
    if dtype.kind not in "iu":
        raise TypeError(f"randint: expected an integer, boolean or floating dtype, got {dtype}.")
    return int(np.iinfo(dtype).min), min(int(np.iinfo(dtype).max), 2**63 - 2)     # the excluded end is an int64 too


def _check_weights(p, num_samples, replacement):
    if p.ndim not in (1, 2):
        raise RuntimeError(f"multinomial: expected weights [V] or [rows, V], got shape {p.shape}.")
    if p.dtype not in (np.float32, np.float64):
        raise RuntimeError(f"multinomial: expected float32 or float64 weights, got {p.dtype}; cast them.")
    if num_samples <= 0:
        raise RuntimeError(f"multinomial: expected num_samples > 0, got {num_samples}.")
    if not ((p >= 0) & (p < np.inf)).all():
        raise RuntimeError("multinomial: expected weights >= 0, got a negative, infinite or NaN weight; "
                           "are these logits? Then apply softmax first.")
    if not (p > 0).any(axis=-1).all():
        raise RuntimeError("multinomial: invalid distribution, a row has no weight above 0 (its sum is <= 0).")
    if not replacement and (np.count_nonzero(p, axis=-1) < num_samples).any():
        raise RuntimeError(f"multinomial: cannot draw num_samples={num_samples} different indices, a row has fewer "
                           "weights above 0; lower num_samples or pass replacement=True.")


def _check_sums_are_finite(sums):
    if not np.isfinite(sums).all():
        raise RuntimeError(f"multinomial: the sum of a row's weights overflows {sums.dtype}; "
                           "divide them by their maximum.")


# ---- the same numbers again -----------------------------------------------------------------------------------------

class _Use(threading.local):
    states = None
    generator = None                    # this thread's default one, where it is not that of all: see `drawing_from`


_use = _Use()


@contextmanager
def states_at_first_use():
    """Yields {generator: its state before it was first used inside} of this thread; `replayed` takes it."""
    before, _use.states = _use.states, {}
    try:
        yield _use.states
    finally:
        _use.states = before


@contextmanager
def replayed(states):
    """Inside, the generators give the numbers that they gave from those states on; afterwards they go on as if nothing had been drawn."""
    now = {generator: generator.get_state() for generator in states}
    try:
        for generator, state in states.items():
            generator.set_state(state)
        yield
    finally:
        for generator, state in now.items():
            generator.set_state(state)


# ---- the default generator ------------------------------------------------------------------------------------------

default_generator = Generator()


@contextmanager
def drawing_from(generator):
    """Inside, this thread's default generator is this one: threads that shared one would draw in an order of chance."""
    before, _use.generator = _use.generator, generator
    try:
        yield
    finally:
        _use.generator = before


def chosen(generator=None):
    """The generator, or the default one for None."""
    if generator is not None and not isinstance(generator, Generator):
        raise TypeError(f"generator: expected a Generator or None, got {type(generator).__name__}; make one with "
                        f"tinygrad_tf.Generator().manual_seed(seed)")
    return generator or _use.generator or default_generator


def manual_seed(seed):
    """Seed the default generator, and return it. An int in [−2⁶³, 2⁶⁴)."""
    return chosen().manual_seed(seed)


def initial_seed():
    """The seed that the default generator's stream was started with."""
    return chosen().initial_seed()


def seed():
    """Seed the default generator from the operating system, and return the seed."""
    return chosen().seed()


def get_rng_state():
    """The default generator's state: uint8 [5056]."""
    return chosen().get_state()


def set_rng_state(state):
    """Put the default generator into a state that `get_rng_state` returned."""
    chosen().set_state(state)
