"""Caches of all kinds beside a reference that keeps lists: what was written is read back, whatever happened between, and what is
refused or breaks off has changed nothing."""

import gc
import weakref

import numpy as np
import pytest
from device import host as on_host

import tinygrad_tf as torch
from tinygrad_tf.autograd import no_grad
from tinygrad_tf.generation import ConcatKVCache, KVCache, PagedKVCache, QuantizedKVCache, RollingKVCache
from tinygrad_tf.models import Decoder
from tinygrad_tf.nn import MultiHeadAttention
from tinygrad_tf.trace import kv_cache_bytes

LAYERS, HKV, DH, CAPACITY = 2, 2, 4, 24
KINDS = {
    "preallocated": lambda: KVCache(LAYERS, CAPACITY),
    "preallocated, rows": lambda: KVCache(LAYERS, CAPACITY, rows=3),
    "concatenating": lambda: ConcatKVCache(LAYERS),
    "paged": lambda: PagedKVCache(LAYERS, 60, block_size=3),
    "paged, 1": lambda: PagedKVCache(LAYERS, 120, block_size=1),
    "paged, 16": lambda: PagedKVCache(LAYERS, 20, block_size=16),
    "rolling": lambda: RollingKVCache(LAYERS, 6, slack=3),
    "rolling, no slack": lambda: RollingKVCache(LAYERS, 4, slack=0),
    "rolling, sinks": lambda: RollingKVCache(LAYERS, 5, sinks=2, slack=4),
    "rolling, long": lambda: RollingKVCache(LAYERS, 64, sinks=1, slack=2),
    "8 bits": lambda: QuantizedKVCache(LAYERS, CAPACITY),
    "8 bits, grouped": lambda: QuantizedKVCache(LAYERS, CAPACITY, bits=8, group=2),
    "4 bits": lambda: QuantizedKVCache(LAYERS, CAPACITY, bits=4),
    "4 bits, grouped": lambda: QuantizedKVCache(LAYERS, CAPACITY, bits=4, group=2, rows=2),
}
all_kinds = pytest.mark.parametrize("kind", KINDS)
rolling_kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("rolling")])
paged_kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("paged")])
PADDINGS = ("none", "right", "left", "middle", "anywhere", "a row of padding")


class Broken(Exception):
    """What a test breaks a pass off with."""


def padded(rng, padding, B, T):
    """valid_tokens, bool [B, T]."""
    real, valid = rng.integers(0, T + 1, B), np.zeros((B, T), bool)
    for row, n in zip(valid, real):
        if padding in ("right", "left"):
            row[slice(n) if padding == "right" else slice(T - n, T)] = True
        elif padding == "middle":
            row[:n // 2], row[T - (n - n // 2):] = True, True
        else:
            row[:] = rng.random(T) < 0.6
    if padding == "none":
        valid[:] = True
    elif padding == "a row of padding" and B:
        valid[rng.integers(B)] = False
    return valid


def host(x):
    """A copy, on the host: a cache gives out its own memory, and writes to it again."""
    return on_host(x).copy()


def as_tensors(new):
    """new [B, T, LAYERS, 2, Hkv, Dh] → for each layer (k, v), each [B, Hkv, T, Dh]."""
    return [tuple(torch.tensor(np.ascontiguousarray(new[:, :, layer, part].transpose(0, 2, 1, 3))) for part in range(2))
            for layer in range(LAYERS)]


def allowed_error(cache, token):
    """How far a number may be from what was written: half a scale, and the rounding of float32."""
    if cache.codec is None:
        return 0
    group = cache.codec.group or DH
    largest = np.abs(token).reshape(*token.shape[:-1], DH // group, group).max(axis=-1, keepdims=True)
    scale = np.repeat(largest / {8: 127, 4: 7}[cache.codec.bits], group, axis=-1).reshape(token.shape)
    return scale / 2 * (1 + 1e-4)


class Twin:
    """A cache, and beside it the rows that it should hold: of each row a list of tokens, each [LAYERS, 2, Hkv, Dh]."""

    def __init__(self, cache, rng, rows=(), highest=(), columns=None):
        self.cache, self.rng, self.columns = cache, rng, columns
        self.rows, self.highest = [list(row) for row in rows], list(highest)        # highest: tokens ever written, also those of no effect

    @property
    def lengths(self):
        return np.array([len(row) for row in self.rows], np.int64)

    @property
    def B(self):
        return len(self.rows)

    def new(self, B, T):
        return self.rng.standard_normal((B, T, LAYERS, 2, HKV, DH)) * 10 ** self.rng.uniform(-3, 3, (B, T, 1, 1, 1, 1))

    # --- what a cache can do ----------------------------------------------------------------------------------------------

    def read(self, T, valid=None, break_off=None, B=None, whole=False):
        """A pass over T columns; break_off: the number of layers after which it ends in an error."""
        B = self.B if B is None else B
        rows = self.rows if self.rows or not B else [[] for _ in range(B)]
        valid = np.ones((B, T), bool) if valid is None else valid
        new, before = self.new(B, T), self.filled(B)
        columns = np.concatenate([before, valid], axis=1)
        given = columns if whole else None if valid.all() and self.rng.random() < 0.5 else valid
        after = [row + [new[b, t] for t in range(T) if valid[b, t]] for b, row in enumerate(rows)]
        highest = [max(high, len(row)) if held else len(row) for high, held, row in zip(self.highest or [0] * B, rows, after)]
        try:
            with self.cache.reading(B, T, None if given is None else torch.tensor(given)) as places:
                found = []
                for layer, (k, v) in enumerate(as_tensors(new)):
                    if layer == break_off:
                        raise Broken
                    found.append([host(part) for part in self.cache.layer(layer).update(k, v)])
                if break_off is not None:
                    raise Broken
        except Broken:
            self.highest = highest if self.rows else []
            return
        self.highest = highest if B else []
        self.rows, self.columns = after, columns
        self.compare(places, found, valid)

    def trim(self, lengths):
        self.cache.trim(lengths)
        self.rows = [row[:n] for row, n in zip(self.rows, np.broadcast_to(lengths, self.B))]
        self.columns = None

    def reorder(self, rows):
        self.cache.reorder(rows)
        self.rows, self.highest = [list(self.rows[i]) for i in rows], [self.highest[i] for i in rows]
        self.columns = None

    def fork(self, rows=None):
        taken = range(self.B) if rows is None else rows
        return Twin(self.cache.fork(rows), self.rng, [self.rows[i] for i in taken], [self.highest[i] for i in taken])

    def join(self, other):
        self.cache.join(other.cache)
        self.rows, self.highest, self.columns = self.rows + other.rows, self.highest + other.highest, None
        other.forget()

    def reset(self):
        self.cache.reset()
        self.forget()

    def forget(self):
        self.rows, self.highest, self.columns = [], [], None

    # --- what must be true --------------------------------------------------------------------------------------------------

    def filled(self, B):
        """The columns that were read, bool [B, length]."""
        if self.columns is not None and self.B:
            return self.columns
        return np.arange(max([*self.lengths, 0])) < (self.lengths[:, None] if self.B else np.zeros((B, 1)))

    def check(self):
        """All that the next tokens would see, read in a pass over none."""
        cache = self.cache
        assert cache.places is None
        assert ([] if cache.lengths is None else cache.lengths.tolist()) == self.lengths.tolist()
        if not self.B:
            return
        assert cache.length == self.filled(self.B).shape[1]
        assert isinstance(cache.lengths, np.ndarray) and cache.lengths.dtype == np.int64
        with cache.reading(self.B, 0) as places:
            found = [[host(part) for part in layer.update(*(torch.zeros(self.B, HKV, 0, DH).double() for _ in range(2)))]
                     for layer in cache.layers]
        self.compare(places, found, np.zeros((self.B, 0), bool))
        assert cache.length == self.filled(self.B).shape[1]

    def compare(self, places, found, valid):
        """The keys and values of a pass, and where they stand, with the rows as they are now."""
        cache, keys, T, found = self.cache, places.keys, valid.shape[1], np.array(found)
        assert keys.shape == (self.B, places.num_keys) and (places.ends == self.lengths).all()
        assert found.shape == (LAYERS, 2, self.B, HKV, places.num_keys, DH)
        queries = np.where(valid, self.lengths[:, None] - valid[:, ::-1].cumsum(axis=1)[:, ::-1], -1)
        assert (places.queries == queries).all()
        if places.aligned and not places.fresh:
            assert (keys == np.arange(places.num_keys)).all()
        seen = (0 <= keys[:, None]) & (keys[:, None] <= queries[:, :, None])
        if cache.window is not None:
            seen &= (queries[:, :, None] - keys[:, None] < cache.window) | (keys[:, None] < cache.sinks)
        assert (host(places.allowed(torch.zeros(1).device))[:, 0] == seen).all()
        for b, row in enumerate(self.rows):
            where = {int(p): s for s, p in enumerate(keys[b]) if p >= 0}
            assert len(where) == (keys[b] >= 0).sum() and all(p < len(row) for p in where)
            seen_by = [int(q) for q in queries[b] if q >= 0] if T else [len(row)]
            needed = sorted({p for q in seen_by for p in range(min(q + 1, len(row)))
                             if cache.window is None or q - p < cache.window or p < cache.sinks})
            assert set(needed) <= set(where) and (cache.window is not None or set(where) == set(range(len(row))))
            if needed:
                tokens, got = np.stack([row[p] for p in needed]), found[:, :, b][:, :, :, [where[p] for p in needed]]
                assert (np.abs(got.transpose(3, 0, 1, 2, 4) - tokens) <= allowed_error(cache, tokens)).all()


def twin(kind, seed=0):
    return Twin(KINDS[kind](), np.random.default_rng(seed))


def filled(kind, seed=0, lengths=(3, 5, 1)):
    """A twin with rows of these lengths."""
    it = twin(kind, seed)
    it.read(max(lengths), np.arange(max(lengths)) < np.array(lengths)[:, None], B=len(lengths))
    return it


def state(cache):
    """Of what a cache is made, beyond the tokens that it can give back: whatever is refused leaves it all as it is."""
    arrays = [[host(field) for field in layer.fields or ()] for layer in cache.layers]
    pool = getattr(cache, "pool", None)
    blocks = None if pool is None else (sorted(pool.free), pool.holders.tolist(), [list(table) for table in cache.tables])
    return arrays, cache.nbytes, cache.length, None if cache.lengths is None else cache.lengths.tolist(), blocks


def same(one, other):
    return all(np.array_equal(a, b) for layers in zip(one[0], other[0]) for a, b in zip(*layers)) and one[1:] == other[1:]


# --- what was written is read back --------------------------------------------------------------------------------------------

@all_kinds
@pytest.mark.parametrize("B", [0, 1, 3])
@pytest.mark.parametrize("padding", PADDINGS)
def test_what_is_written_is_read_back(kind, B, padding):
    """Passes of all lengths one after the other; rows differ as soon as there is padding."""
    it = twin(kind)
    for T in 3, 0, 1, 2, 7, 1, 1, 0, 4:
        it.read(T, padded(it.rng, padding, B, T), B=B)
        it.check()


@all_kinds
def test_the_valid_tokens_of_all_columns(kind):
    """[B, length + T] says the same as [B, T]."""
    it = twin(kind)
    for T in 4, 1, 0, 2, 6, 1:
        it.read(T, padded(it.rng, "anywhere", 3, T), B=3, whole=True)
        it.check()
    if it.lengths.min() < it.lengths.max():
        it.reorder([2, 0, 1])                       # from here on the columns count as filled from the left
        it.read(2, padded(it.rng, "left", 3, 2), whole=True)
        it.check()


@all_kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_numbers_come_back_in_their_dtype(kind, dtype):
    cache = KINDS[kind]()
    k, v = (torch.randn(2, HKV, 3, DH).to(dtype) for _ in range(2))
    for _ in range(2):
        with cache.reading(2, 3):
            for layer in cache.layers:
                assert all(part.dtype == dtype and not part.requires_grad for part in layer.update(k, v))
    assert cache.lengths.tolist() == [6, 6]


@pytest.mark.parametrize("bits, largest", [(8, 127), (4, 7)])
@pytest.mark.parametrize("group", [None, 1, 2, 4, 8])
def test_each_group_has_its_own_scale(bits, largest, group):
    """Within half a scale of what was written, whatever the size of other groups; zeros stay zeros, and NaN stays in its group."""
    cache, rng, width = QuantizedKVCache(1, 8, bits, group), np.random.default_rng(1), group or 8
    x = rng.standard_normal((2, HKV, 5, 8 // width, width)) * 10.0 ** rng.integers(-6, 7, (2, HKV, 5, 8 // width, 1))
    x[0, 0, 0, 0], x[0, 1, 0, 0, 0], x[0, 1, 1, 0, 0] = 0, np.nan, -np.inf
    scale = np.abs(x).max(axis=-1, keepdims=True) / largest
    lost = ~np.isfinite(scale) & np.ones_like(x, bool)
    x = x.reshape(2, HKV, 5, 8)
    for found in cache.layer(0).update(torch.tensor(x), torch.tensor(x)):
        found = host(found).reshape(scale.shape[:-1] + (width,))
        error = np.abs(found - x.reshape(found.shape))
        assert (error[~lost] <= (scale / 2 * (1 + 1e-4) + 0 * found)[~lost]).all() and np.isnan(found[lost]).all()
        assert (found[0, 0, 0, 0] == 0).all()
        levels = np.rint(found / np.where(scale == 0, 1, scale))[~lost]
        assert np.abs(levels).max() == largest and len(np.unique(levels)) > min(largest, 12) / (1 if width > 1 else 12)


# --- everything in any order --------------------------------------------------------------------------------------------------

def in_pool(twins):
    """No block is lost, lent twice, or counted wrongly."""
    for pool in {id(it.cache.pool): it.cache.pool for it in twins if hasattr(it.cache, "pool")}.values():
        used = [block for it in twins for table in it.cache.tables for block in table]
        assert pool.holders.tolist() == np.bincount(used, minlength=pool.num_blocks).tolist()
        assert sorted(pool.free) == sorted(set(range(pool.num_blocks)) - set(used))
        for it in twins:
            assert [len(table) for table in it.cache.tables] == [-(-len(row) // pool.block_size) for row in it.rows]


OPERATIONS = ["read"] * 5 + ["decode"] * 4 + ["break off"] * 2 + ["trim"] * 2 + ["reorder", "fork", "join", "reset", "drop"]


def one_operation(twins, it, rng):
    """One operation on one of the twins, drawn by chance; what it refuses has changed nothing."""
    B, name = it.B, rng.choice(OPERATIONS)
    if name in ("read", "break off", "decode"):
        B, T = B or int(rng.integers(0, 4)), 1 if name == "decode" else int(rng.choice([0, 1, 2, 3, 5, 9]))
        valid = padded(rng, rng.choice(PADDINGS), B, T) if rng.random() < 0.5 else np.ones((B, T), bool)
        broken = int(rng.integers(0, LAYERS + 1)) if name == "break off" else None
        longest = max([*(it.lengths if it.B else np.zeros(B, int)) + valid.sum(axis=1), 0])
        before = state(it.cache)
        try:
            it.read(T, valid, broken, B)
        except ValueError as error:
            pool = getattr(it.cache, "pool", None)
            assert "exceed the capacity" in str(error) and longest > CAPACITY or pool and "blocks" in str(error) and \
                len(pool.free) < B * (2 + T // pool.block_size)
            assert same(before, state(it.cache))
    elif name == "trim":
        back = rng.integers(0, rng.choice([2, 4, 30]), max(B, 1))[:B] if rng.random() < 0.6 else rng.integers(0, 4)
        lengths = np.maximum(it.lengths - back, 0)
        before = state(it.cache)
        try:
            it.trim(int(lengths[0]) if B and (lengths == lengths[0]).all() else lengths if rng.random() < 0.5 else lengths.tolist())
        except ValueError as error:
            slack, ring = it.cache.slack, it.cache.ring
            assert "slack" in str(error) and any(high > ring and high - n > slack for high, n in zip(it.highest, lengths))
            assert same(before, state(it.cache))
    elif name in ("reorder", "fork"):
        rows = rng.integers(0, B, rng.integers(0, 5)).tolist() if B else []
        if name == "reorder":
            it.reorder(rows)
        elif len(twins) < 4:
            twins.append(it.fork(None if rng.random() < 0.3 else rows))
    elif name == "join":
        others = [other for other in twins if other is not it and it.B + other.B <= 5]
        if others:
            it.join(others[rng.integers(len(others))])
    elif name == "reset":
        it.reset()
    elif len(twins) > 1:
        twins.remove(it)


@all_kinds
def test_two_hundred_operations(kind):
    """Up to four caches, forks of each other, that read, break off, trim, reorder, fork, join, are reset and dropped."""
    rng = np.random.default_rng([1, *kind.encode()])
    twins = [Twin(KINDS[kind](), rng)]
    for _ in range(200):
        it = twins[rng.integers(len(twins))]
        one_operation(twins, it, rng)
        del it                                      # a twin that was dropped must not live on
        for other in twins:
            other.check()
        in_pool(twins)


@paged_kinds
def test_five_hundred_operations_on_a_small_pool(kind):
    """Where blocks are scarce: none is lost, given back twice or shared unawares, and at the end all are free."""
    rng = np.random.default_rng(5)
    twins, scarce = [Twin(PagedKVCache(LAYERS, 9, KINDS[kind]().pool.block_size), rng)], 0
    pool = twins[0].cache.pool
    for step in range(500):
        it = twins[rng.integers(len(twins))]
        one_operation(twins, it, rng)
        scarce += not pool.free
        del it
        in_pool(twins)
        if step % 5 == 0:
            twins[rng.integers(len(twins))].check()
    while twins:
        in_pool(twins)
        twins.pop()
    assert sorted(pool.free) == list(range(9)) and not pool.holders.any() and scarce > 20


# --- what is refused, and what breaks off -----------------------------------------------------------------------------------

def keys(B=3, Hkv=HKV, T=2, Dh=DH, dtype=torch.float64):
    return torch.randn(B, Hkv, T, Dh).to(dtype)


OTHERS = {
    "rows": (lambda: keys(B=2), ValueError, r"this pass is over \[B, T\] = \[3, 2\]"),
    "one row": (lambda: keys(B=1), ValueError, "this pass is over"),
    "columns": (lambda: keys(T=3), ValueError, "this pass is over"),
    "Hkv": (lambda: keys(Hkv=4), ValueError, r"holds \[Hkv, Dh\]"),
    "one head": (lambda: keys(Hkv=1), ValueError, r"holds \[Hkv, Dh\]"),
    "Dh": (lambda: keys(Dh=2), ValueError, r"holds \[Hkv, Dh\]"),
    "float32": (lambda: keys(dtype=torch.float32), ValueError, "numbers of"),
    "float16": (lambda: keys(dtype=torch.float16), ValueError, "numbers of"),
    "three axes": (lambda: keys()[0], ValueError, r"must be \[B, Hkv, T, Dh\], got"),
    "no axes": (lambda: torch.tensor(1.0), ValueError, r"must be \[B, Hkv, T, Dh\], got"),
    "an array": (lambda: np.zeros((3, HKV, 2, DH)), TypeError, "must be a Tensor, got numpy.ndarray"),
    "nothing": (lambda: None, TypeError, "must be a Tensor"),
    "a gradient": (lambda: keys().requires_grad_(), RuntimeError, "no_grad"),
}


@all_kinds
@pytest.mark.parametrize("name", OTHERS)
def test_other_keys_or_values_are_refused_and_change_nothing(kind, name):
    """Also where the layers before have taken theirs: then the pass is as if it had not been."""
    make, error, message = OTHERS[name]
    it = filled(kind)
    before = state(it.cache)
    with pytest.raises(error, match=f"{type(it.cache).__name__}: .*{message}"), it.cache.reading(3, 2):
        it.cache.layer(0).update(make(), make())
    assert same(before, state(it.cache))
    for given in (make(), keys()), (keys(), make()):            # one of them alone
        with pytest.raises(error, match=type(it.cache).__name__), it.cache.reading(3, 2):
            it.cache.layer(0).update(*given)
        assert same(before, state(it.cache))
    fork, before = it.fork(), state(it.cache)
    with pytest.raises(error), it.cache.reading(3, 2):
        it.cache.layer(0).update(keys(), keys())
        it.cache.layer(1).update(make(), make())
    assert state(it.cache)[2:] == before[2:]
    it.highest = [n + 2 for n in it.lengths]
    for one in it, fork:
        one.check()
        one.read(2)
        one.check()


@all_kinds
def test_another_device_is_refused(kind, gpu):
    it = filled(kind)
    before = state(it.cache)
    for k, v in (keys().to("cuda"), keys().to("cuda")), (keys().to("cuda"), keys()), (keys(), keys().to("cuda")):
        with pytest.raises(RuntimeError, match="all tensors must be on one device"), it.cache.reading(3, 2):
            it.cache.layer(0).update(k, v)
        assert same(before, state(it.cache))


def other_kind(cache):
    return ConcatKVCache(LAYERS) if type(cache) is KVCache else KVCache(LAYERS, CAPACITY)


METHODS = {
    "trim: more than there is": (lambda c: c.trim(6), ValueError, r"rows hold \[3, 5, 1\] tokens"),
    "trim: more than one row has": (lambda c: c.trim([3, 5, 2]), ValueError, "rows hold"),
    "trim: below 0": (lambda c: c.trim(-1), ValueError, "rows hold"),
    "trim: two rows": (lambda c: c.trim([1, 1]), ValueError, "one for each row"),
    "trim: a column": (lambda c: c.trim(np.ones((3, 1), int)), ValueError, "one for each row"),
    "trim: half a token": (lambda c: c.trim(0.5), TypeError, "whole numbers"),
    "trim: half tokens": (lambda c: c.trim([1.0, 0.5, 1.0]), TypeError, "whole numbers"),
    "trim: a str": (lambda c: c.trim("1"), TypeError, "whole numbers"),
    "trim: None": (lambda c: c.trim(None), TypeError, "whole numbers"),
    "trim: bools": (lambda c: c.trim(np.array([True, False, True])), TypeError, "whole numbers"),
    "reorder: beyond": (lambda c: c.reorder([0, 3]), IndexError, "there are 3 rows"),
    "reorder: below 0": (lambda c: c.reorder([-1]), IndexError, "there are 3 rows"),
    "reorder: half a row": (lambda c: c.reorder([0.5]), TypeError, "whole numbers"),
    "reorder: bools": (lambda c: c.reorder([True, False, True]), TypeError, "whole numbers"),
    "reorder: a row": (lambda c: c.reorder(1), TypeError, "whole numbers"),
    "reorder: two axes": (lambda c: c.reorder([[0, 1]]), TypeError, "whole numbers"),
    "reorder: uneven": (lambda c: c.reorder([[0], [1, 2]]), TypeError, "whole numbers"),
    "fork: beyond": (lambda c: c.fork([3]), IndexError, "there are 3 rows"),
    "fork: a str": (lambda c: c.fork("01"), TypeError, "whole numbers"),
    "join: another kind": (lambda c: c.join(other_kind(c)), TypeError, "join: needs"),
    "join: itself": (lambda c: c.join(c), TypeError, "join: needs"),
    "join: nothing": (lambda c: c.join(None), TypeError, "join: needs"),
    "reading: fewer rows": (lambda c: c.reading(2, 1).__enter__(), ValueError, "holds B=3 rows, got B=2"),
    "reading: no rows": (lambda c: c.reading(0, 1).__enter__(), ValueError, "holds B=3 rows, got B=0"),
    "reading: valid_tokens of another length": (lambda c: c.reading(3, 2, torch.ones(3, 3).bool()).__enter__(), ValueError,
                                                r"\[3, 2\], or for each token, cached ones included, \[3, 7\]; got \(3, 3\)"),
    "reading: valid_tokens of other rows": (lambda c: c.reading(3, 2, torch.ones(2, 2).bool()).__enter__(), ValueError, r"got \(2, 2\)"),
    "reading: valid_tokens that are numbers": (lambda c: c.reading(3, 1, torch.full((3, 1), 2)).__enter__(), ValueError, "0 and 1"),
    "reading: an array": (lambda c: c.reading(3, 1, np.ones((3, 1), bool)).__enter__(), TypeError, "valid_tokens must be a Tensor"),
    "reading: another past": (lambda c: c.reading(3, 1, torch.ones(3, 6).bool()).__enter__(), ValueError, "something else than when they"),
}


@all_kinds
@pytest.mark.parametrize("name", METHODS)
def test_what_cannot_be_done_is_refused_and_changes_nothing(kind, name):
    call, error, message = METHODS[name]
    it = filled(kind)
    before = state(it.cache)
    with pytest.raises(error, match=message) as caught:
        call(it.cache)
    assert type(it.cache).__name__ in str(caught.value)
    assert same(before, state(it.cache))
    it.check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("preallocated", "8 bits", "4 bits"))])
def test_past_the_end(kind):
    """The row that is too long decides; up to the last place all goes."""
    it = filled(kind, lengths=(3, CAPACITY - 2, 1))
    before = state(it.cache)
    for T, valid in (3, None), (1000, None), (9, np.arange(9) < [[0], [3], [0]]):
        with pytest.raises(ValueError, match=f"exceed the capacity of {CAPACITY}"):
            it.read(T, valid)
        assert same(before, state(it.cache))
    it.read(9, np.arange(9) < [[9], [2], [0]])
    it.check()
    assert it.lengths.tolist() == [12, CAPACITY, 1]


@paged_kinds
def test_out_of_blocks(kind):
    """The error says how many; what was free stays free, also in forks, and a pass that fits goes on."""
    it = filled(kind)
    pool, most = it.cache.pool, it.cache.pool.num_blocks * it.cache.pool.block_size
    fork, before = it.fork(), state(it.cache)
    for T in most, most + 1, 10 * most:
        for one in it, fork:
            with pytest.raises(ValueError, match=rf"need \d+ blocks, and of {pool.num_blocks} {len(pool.free)} are free"):
                one.read(T, np.arange(T) < [[0], [T], [0]])
        assert same(before, state(it.cache))
    in_pool([it, fork])
    for one in it, fork:
        one.read(2)
        one.check()
    in_pool([it, fork])


@pytest.mark.parametrize("method", [
    lambda c: c.reset(), lambda c: c.trim(1), lambda c: c.reorder([0]), lambda c: c.fork(), lambda c: c.join(c.empty()),
    lambda c: c.reading(3, 1).__enter__(),
], ids=["reset", "trim", "reorder", "fork", "join", "reading"])
@all_kinds
def test_nothing_else_happens_during_a_pass(kind, method):
    it = filled(kind)
    new = keys()
    with it.cache.reading(3, 2):
        for layer in range(LAYERS):
            before = state(it.cache)
            with pytest.raises(RuntimeError, match="a pass is going on"):
                method(it.cache)
            assert same(before, state(it.cache))
            it.cache.layer(layer).update(new, new)
    other = it.cache.empty()
    token = np.broadcast_to(host(new)[:, None].transpose(0, 3, 1, 2, 4)[:, :, None], (3, 2, LAYERS, 2, HKV, DH))
    it.rows, it.columns = [row + list(more) for row, more in zip(it.rows, token)], None
    it.cache.trim(it.lengths)
    it.check()
    with other.reading(3, 2), pytest.raises(RuntimeError, match="a pass is going on"):
        it.cache.join(other)


@all_kinds
@pytest.mark.parametrize("after", range(LAYERS + 1))
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("T", [1, 4, 14])
def test_a_pass_that_breaks_off_is_forgotten(kind, after, first, T):
    """Wherever it breaks off: lengths, blocks, and all that the rows and their forks will see. Then passes short and long go on."""
    it = twin(kind) if first else filled(kind)
    forks = [] if first else [it.fork(), it.fork([1, 1])]
    before, bytes_in_use = state(it.cache)[1:], getattr(it.cache, "nbytes_in_use", 0)
    it.read(T, padded(it.rng, "right", 3, T), break_off=after, B=3)
    it.read(T, break_off=after, B=3)
    assert getattr(it.cache, "nbytes_in_use", 0) == bytes_in_use
    if not (first or kind == "concatenating"):
        assert state(it.cache)[1:] == before
    for one in (it, *forks):
        one.check()
    B = 2 if first else 3                                       # nothing holds it to the B of a pass that did not happen
    for T in 1, 7, 2:
        it.read(T, padded(it.rng, "left", B, T), B=B)
        for one in (it, *forks):
            one.check()


@all_kinds
@pytest.mark.parametrize("T", [2, 9])
@pytest.mark.parametrize("where", ["attention", "ffn"])
def test_an_interrupted_model_leaves_the_cache_as_it_was(kind, T, where):
    """Ctrl-C in the last layer; a shorter pass, and what follows, give the logits of a run without it."""
    torch.manual_seed(1)
    model = Decoder(11, 64, HKV * DH, HKV, 16, LAYERS).double().eval()
    caches, ids = [KINDS[kind](), KINDS[kind]()], torch.randint(0, 11, (3, 20))
    valid = torch.tensor(np.arange(5) < [[3], [5], [1]])
    part = getattr(model.blocks[-1], where)

    def interrupted(*args, **options):
        raise KeyboardInterrupt
    with no_grad():
        for cache in caches:
            model(ids[:, :5], valid_tokens=valid, cache=cache)
        part.forward, forward = interrupted, part.forward
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :T], cache=caches[0])
        part.forward = forward
        for start, end in (5, 6), (6, 6 + T), (6 + T, 8 + T):
            one, other = (model(ids[:, start:end], cache=cache)[0] for cache in caches)
            assert torch.equal(one, other)


# --- a rolling cache -----------------------------------------------------------------------------------------------------------

@rolling_kinds
def test_no_more_is_trimmed_than_is_kept(kind):
    """slack tokens after any pass, however they are taken back; what was overwritten, also by a pass that broke off, is not given out."""
    slack, ring = KINDS[kind]().slack, KINDS[kind]().ring
    it = twin(kind)
    it.read(ring + 20, B=2)
    for back in [1] * slack:
        it.trim(it.lengths - back)
        it.check()
    fork, joined = it.fork([1, 0]), it.fork([])
    joined.read(1, B=1)
    joined.join(it.fork())
    joined.reorder([2, 1])
    for one in it, fork, joined:                                # whatever became of the rows
        for lengths in it.lengths - 1, [it.lengths[0] - 1, it.lengths[1]]:
            before = state(one.cache)
            with pytest.raises(ValueError, match=f"more than slack={slack} tokens ago is overwritten"):
                one.trim(lengths)
            assert same(before, state(one.cache))
        one.check()
    it.read(slack + 1)
    it.read(1)
    it.check()
    it.trim(it.lengths - slack)
    it.check()
    if slack:
        it.read(slack)
        it.read(1, break_off=1)
        with pytest.raises(ValueError, match="overwritten"):
            it.trim(it.lengths - slack)
        it.trim(it.lengths - slack + 1)
        it.check()
    for lengths in [0, it.lengths[1]], 0:                       # all of it, at any time
        it.trim(lengths)
        it.check()
    it.read(3)
    it.trim(it.lengths - 3)
    it.check()


@rolling_kinds
def test_rings_of_other_sizes_do_not_join(kind):
    cache = filled(kind).cache
    for sizes in (cache.window + 1, cache.sinks, cache.slack), (cache.window, cache.sinks + 1, cache.slack), \
            (cache.window + 1, cache.sinks, max(cache.slack - 1, 0)):
        other = Twin(RollingKVCache(LAYERS, *sizes), np.random.default_rng(1))
        other.read(3, B=1)
        before = state(cache), state(other.cache)
        with pytest.raises(ValueError, match="RollingKVCache.join: window, sinks and slack must be the same"):
            cache.join(other.cache)
        assert same(before[0], state(cache)) and same(before[1], state(other.cache))


# --- rows that come and go -------------------------------------------------------------------------------------------------------

@all_kinds
def test_a_cache_without_rows_is_as_new(kind):
    """Never used, all rows gone, a fork of nothing, joined with nothing: it takes any B, and another model."""
    def emptied(c, B=2):
        with c.reading(B, 3):
            for layer in c.layers:
                layer.update(keys(B, T=3), keys(B, T=3))
        return c

    def no_rows(c):
        return emptied(c, B=0)
    ways = [lambda c: c, lambda c: emptied(c).reset(), lambda c: emptied(c).reorder([]), lambda c: emptied(c).fork([]), lambda c: c.fork(),
            lambda c: c.join(c.empty()), lambda c: c.trim(0), lambda c: c.reorder([]), lambda c: emptied(c).empty(),
            no_rows]
    for way in ways:
        it = twin(kind)
        it.cache = way(it.cache) or it.cache
        assert it.cache.lengths is None and it.cache.length == 0
        it.check()
        it.read(2, B=3)
        it.check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("paged")])
def test_after_reset_it_serves_another_model(kind):
    """Other heads, another dtype; also as the one that others join."""
    it = filled(kind)
    it.reset()
    k = keys(2, Hkv=1, Dh=8, dtype=torch.float32)
    other = it.cache.empty()
    for cache in it.cache, other:
        with cache.reading(2, 2):
            assert all(layer.update(k, k)[0].shape == k.shape for layer in cache.layers)
    it.cache.reset()
    it.cache.join(other)
    with it.cache.reading(2, 0):
        found = it.cache.layer(0).update(k[:, :, :0], k[:, :, :0])
    assert all(part.dtype == torch.float32 and torch.allclose(part, k, rtol=0, atol=k.abs().max().item() / 7) for part in found)


@all_kinds
def test_only_rows_of_one_model_join(kind):
    it = filled(kind)
    others = keys(2, Hkv=4), keys(2, Dh=8), keys(2, Hkv=1), keys(2, dtype=torch.float32)
    for k in others:
        other = KINDS[kind]()
        with other.reading(2, 2):
            for layer in other.layers:
                layer.update(k, k)
        before = state(it.cache), state(other)
        with pytest.raises(TypeError if kind.startswith("paged") else ValueError, match="join: .*(pool|one model)"):
            it.cache.join(other)
        assert same(before[0], state(it.cache)) and same(before[1], state(other))
    with pytest.raises(TypeError, match="join: needs "):
        it.cache.join(type(it.cache)(LAYERS + 1, *([] if kind == "concatenating" else [8])))


def test_rows_that_are_too_long_do_not_join():
    for make in KVCache, QuantizedKVCache:
        one, other = (Twin(make(LAYERS, capacity), np.random.default_rng(1)) for capacity in (4, 9))
        one.read(3, B=2)
        other.read(5, B=1)
        before = state(one.cache), state(other.cache)
        with pytest.raises(ValueError, match=r"join: rows of \[5\] tokens exceed the capacity of 4"):
            one.join(other)
        assert same(before[0], state(one.cache)) and same(before[1], state(other.cache))
        other.join(one)                                         # the other way round there is room
        other.check()
        assert one.cache.lengths is None


@pytest.mark.parametrize("bits, group", [(8, 2), (4, None)])
def test_rows_of_another_code_do_not_join(bits, group):
    with pytest.raises(TypeError, match="join: needs"):
        QuantizedKVCache(LAYERS, 4).join(QuantizedKVCache(LAYERS, 4, bits, group))


@all_kinds
def test_a_cache_that_is_dropped_is_freed_at_once(kind):
    """By reference counting alone, while a layer that was handed out keeps its cache."""
    it = filled(kind)
    cache, fork, layer = it.cache, it.cache.fork(), it.cache.fork([1]).layer(0)
    pool, alive = getattr(cache, "pool", None), [weakref.ref(c) for c in (cache, fork, layer.cache)]
    gc.disable()
    try:
        assert layer.length == 5 and layer.nbytes > 0
        del it, cache, fork
        assert [c() is None for c in alive] == [True, True, False] and layer.lengths.tolist() == [5]
        del layer
        assert alive[2]() is None and (pool is None or len(pool.free) == pool.num_blocks)
    finally:
        gc.enable()


# --- one layer alone -------------------------------------------------------------------------------------------------------------

@all_kinds
def test_a_layer_alone_appends_to_all_rows(kind):
    cache = KINDS[kind]()
    most = min(cache.window or 10, 10)
    k, v = keys(2, T=most), keys(2, T=most)
    for layer in map(cache.layer, range(LAYERS)):
        for end in range(2, most + 1, 2):
            found = layer.update(k[:, :, end - 2:end], v[:, :, end - 2:end])
            for part, whole in zip(found, (k, v)):
                error = np.array(allowed_error(cache, host(whole)[:, :, :end])) + np.zeros((2, HKV, end, DH))
                assert (np.abs(host(part) - host(whole)[:, :, :end]) <= error).all()
            assert layer.length == end
    assert cache.lengths.tolist() == [most // 2 * 2] * 2


@all_kinds
def test_a_layer_alone_refuses_what_does_not_fit(kind):
    """And changes nothing, blocks included; rows that differ need a pass."""
    cache = KINDS[kind]()
    layer = cache.layer(0)
    layer.update(keys(), keys())

    def all_of_it():
        return layer.length, cache.nbytes, getattr(cache, "blocks_in_use", 0)
    before = all_of_it()
    for wrong, error in ((keys(B=2), ValueError), (keys(Dh=8), ValueError), (keys(dtype=torch.float32), ValueError), (None, TypeError),
                         (keys()[0], ValueError), (keys().requires_grad_(), RuntimeError)):
        with pytest.raises(error):
            layer.update(wrong, wrong)
        assert all_of_it() == before
    it = filled(kind)
    before = state(it.cache)
    with pytest.raises(RuntimeError, match="its rows differ"):
        it.cache.layer(0).update(keys(), keys())
    assert same(before, state(it.cache))


@all_kinds
@pytest.mark.parametrize("held", [0, 2])
def test_an_attention_that_fails_takes_its_keys_back(kind, held):
    """A score_mod runs when the keys are in already."""
    attention, cache = MultiHeadAttention(HKV * DH, HKV).double(), KINDS[kind]()
    x, layer = torch.randn(2, 4, HKV * DH).double(), cache.layer(0)
    with no_grad():
        attention(x[:, :held], causal=True, cache=layer)
        with pytest.raises(ZeroDivisionError):
            attention(x[:, :2], causal=True, cache=layer, score_mod=lambda *args: 1 / 0)
        assert layer.length == held
        assert getattr(cache, "blocks_in_use", 0) == 2 * -(-held // cache.pool.block_size) if kind.startswith("paged") else True
        x = x if held else x[:1]
        out = [attention(x[:, i:i + 1], causal=True, cache=layer) for i in range(held, 4)]
        assert torch.allclose(torch.cat(out, dim=1), attention(x, causal=True)[:, held:], rtol=0, atol=1e-9 if cache.codec is None else 0.5)


# --- bytes ---------------------------------------------------------------------------------------------------------------------------

def read_bytes(cache, B, lengths, dtype=torch.float64, Hkv=HKV, Dh=DH):
    """(longest row, nbytes) after each of some passes."""
    found, longest = [(0, cache.nbytes)], 0
    for T in lengths:
        with cache.reading(B, T):
            for layer in cache.layers:
                layer.update(*(torch.zeros(B, Hkv, T, Dh, dtype=dtype) for _ in range(2)))
        longest += T
        found.append((longest, cache.nbytes))
    return found


@pytest.mark.parametrize("dtype, size", [(torch.float16, 2), (torch.float32, 4), (torch.float64, 8)])
def test_bytes_are_those_of_the_formula(dtype, size):
    """2 · L · B · T · Hkv · Dh · bytes of a number, T the places that there are.       (guide 9.8)"""
    def formula(B, T):
        return kv_cache_bytes(LAYERS, B, T, HKV, DH, size)
    passes = (3, 1, 1, 4, 1)
    assert all(n == formula(3, CAPACITY) for _, n in read_bytes(KVCache(LAYERS, CAPACITY), 3, passes, dtype)[1:])
    assert all(n == formula(7, CAPACITY) for _, n in read_bytes(KVCache(LAYERS, CAPACITY, rows=7), 3, passes, dtype)[1:])
    assert all(n == formula(3, T) for T, n in read_bytes(ConcatKVCache(LAYERS), 3, passes, dtype))
    rolling = RollingKVCache(LAYERS, 5, sinks=2, slack=4)
    assert all(n == formula(3, 2 + 5 + 4) for _, n in read_bytes(rolling, 3, (*passes, 30, 1), dtype)[1:])
    cache = PagedKVCache(LAYERS, 12, block_size=4)
    assert all(n == formula(1, 12 * 4) for _, n in read_bytes(cache, 3, passes, dtype)[1:])
    assert cache.blocks_in_use == 3 * 3 and cache.nbytes_in_use == formula(1, 9 * 4)


def test_the_bytes_of_the_guide():
    """32 layers, B = 1, T = 4096, Hkv = 8, Dh = 128 in 2 bytes: 512 MiB. Pages that nobody wrote to are not there yet.     (S9.8-6)"""
    assert kv_cache_bytes(32, 1, 4096, 8, 128, 2) == 512 * 2**20
    (_, before), (_, after) = read_bytes(KVCache(32, 4096), 1, (1,), torch.float16, Hkv=8, Dh=128)
    assert (before, after) == (0, 512 * 2**20)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [None, 1, 2, 4])
def test_bytes_of_numbers_and_scales(bits, group):
    """A token: Dh · bits / 8 + 4 · Dh / group, for each head, key and value."""
    found = read_bytes(QuantizedKVCache(LAYERS, CAPACITY, bits, group), 3, (3, 1, 5))[1:]
    assert all(n == 2 * LAYERS * 3 * CAPACITY * HKV * (DH * bits // 8 + 4 * DH // (group or DH)) for _, n in found)


# --- blocks ----------------------------------------------------------------------------------------------------------------------------

def blocks(lengths, size=4, num_blocks=40):
    it = Twin(PagedKVCache(LAYERS, num_blocks, block_size=size), np.random.default_rng(3))
    it.read(max(lengths), np.arange(max(lengths)) < np.array(lengths)[:, None], B=len(lengths))
    return it


def test_forks_share_until_one_writes():
    """A fork takes no block; the first to write to a block that both hold copies that one, and no other; the second copies none."""
    it = blocks([6, 9])
    assert it.cache.blocks_in_use == 2 + 3
    fork = it.fork()
    assert fork.cache.blocks_in_use == it.cache.blocks_in_use == 5 and fork.cache.nbytes == it.cache.nbytes
    fork.read(1)
    assert it.cache.blocks_in_use == 5 + 2                      # the last block of either row
    fork.read(1)
    it.read(2)
    assert it.cache.blocks_in_use == 7 and all(one.check() is None for one in (it, fork))
    shared = [set(map(tuple, [a[:-1] for a in it.cache.tables])), set(map(tuple, [b[:-1] for b in fork.cache.tables]))]
    assert shared[0] == shared[1]
    it.read(1)                                                  # 9 tokens: a block more; 12: none
    assert it.cache.blocks_in_use == 8
    in_pool([it, fork])


def test_a_full_block_is_shared_for_good():
    it = blocks([8])
    fork = it.fork()
    for one in it, fork:
        one.read(1)
    assert it.cache.blocks_in_use == 4 and it.cache.tables[0][:2] == fork.cache.tables[0][:2]
    it.check(), fork.check()


def test_rows_that_repeat_share():
    """Of three rows with one half-filled block, two copy it and the third goes on in it: as many blocks as rows, at no time more."""
    it = blocks([6, 3], num_blocks=2 + 1 + 2)
    it.reorder([0, 0, 1, 0])
    assert it.cache.blocks_in_use == 3
    assert it.cache.fits() and not it.cache.fits([1])
    it.read(1)
    assert it.cache.blocks_in_use == 5 and len({table[0] for table in it.cache.tables}) == 2
    it.check()
    it.reorder([3, 2])
    assert it.cache.blocks_in_use == 3
    it.check()
    in_pool([it])


@pytest.mark.parametrize("lengths", [(7, 5), (5, 7), (6, 6)])
@pytest.mark.parametrize("break_off", [None, 1, 2])
def test_rows_of_two_lengths_in_one_block(lengths, break_off):
    """Trimmed apart, they share a block in which the shorter writes where the longer has its tokens."""
    it = blocks([7])
    it.reorder([0, 0])
    it.trim(lengths)
    assert it.cache.blocks_in_use == 2
    it.read(1, break_off=break_off)
    assert it.cache.blocks_in_use == (2 if break_off is not None else 3)
    it.check()
    it.read(2)
    it.check()
    in_pool([it])


def test_rows_that_read_nothing_copy_nothing():
    it = blocks([6, 6])
    fork = it.fork()
    fork.read(1, np.array([[True], [False]]))
    assert it.cache.blocks_in_use == 4 + 1
    fork.read(0)
    assert it.cache.blocks_in_use == 4 + 1
    it.check(), fork.check()


def test_blocks_go_back():
    """By trim, reset, reorder, and when a fork is dropped; those that others hold stay."""
    it = blocks([9, 5])
    assert it.cache.blocks_in_use == 5
    it.trim([4, 5])
    assert it.cache.blocks_in_use == 3
    fork = it.fork([0])
    fork.read(4)
    assert it.cache.blocks_in_use == 4
    it.reset()
    assert fork.cache.blocks_in_use == 2
    fork.check()
    it.read(1, B=1)
    it.join(fork)
    assert it.cache.blocks_in_use == 3 and fork.cache.tables == []
    it.check()
    it.reorder([1])
    assert it.cache.blocks_in_use == 2
    more = it.fork([0, 0])
    more.read(1)
    assert it.cache.blocks_in_use == 4
    del more
    assert it.cache.blocks_in_use == 2
    it.trim(0)
    assert it.cache.blocks_in_use == it.cache.nbytes_in_use == 0


@pytest.mark.parametrize("seed", range(4))
def test_it_fits_where_a_pass_goes_through(seed):
    """`fits` says beforehand whether one more token of each row, and some new rows, find blocks."""
    rng, answers = np.random.default_rng(seed), set()
    for _ in range(24):
        it = blocks(rng.integers(0, 7, 3), size=int(rng.integers(1, 5)), num_blocks=30)
        it.reorder(rng.integers(0, 3, 3))
        keep = it.fork(rng.integers(0, 3, 1))
        hoard = it.fork([])
        hoard.read(it.cache.pool.block_size * int(rng.integers(0, len(it.cache.pool.free) + 1)), B=1)
        more = rng.integers(1, 6, rng.integers(0, 3)).tolist()
        fits = it.cache.fits(more)
        answers.add(fits)
        new = it.fork([])
        try:
            if more:
                new.read(max(more), np.arange(max(more)) < np.array(more)[:, None], B=len(more))
            it.read(1)
        except ValueError:
            assert not fits
        else:
            assert fits
        keep.check()
    assert answers == {True, False}


def test_a_pool_is_of_one_model():
    """Forks and empty caches of a pool write to the same arrays: what has another shape or dtype is refused, not cast."""
    it = blocks([3, 2])
    for k in keys(2, Hkv=1), keys(2, Dh=1), keys(2, dtype=torch.float32), keys(2, Hkv=4):
        for other in it.cache.empty(), it.cache.fork([]):
            with pytest.raises(ValueError, match="its pool holds keys of another shape, dtype or device"), other.reading(2, 2):
                other.layer(0).update(k, k)
            assert other.lengths is None
    it.check()
    in_pool([it])


# --- constructors -------------------------------------------------------------------------------------------------------------------

SIZES = {
    "KVCache": (KVCache, {"num_layers": 2, "capacity": 8, "rows": 1}), "ConcatKVCache": (ConcatKVCache, {"num_layers": 2}),
    "PagedKVCache": (PagedKVCache, {"num_layers": 2, "num_blocks": 8, "block_size": 4}),
    "RollingKVCache": (RollingKVCache, {"num_layers": 2, "window": 8, "sinks": 1, "slack": 3}),
    "QuantizedKVCache": (QuantizedKVCache, {"num_layers": 2, "capacity": 8, "bits": 8, "group": 2, "rows": 1}),
}
ARGUMENTS = [(name, argument) for name, (_, sizes) in SIZES.items() for argument in sizes]


@pytest.mark.parametrize("name, argument", ARGUMENTS)
def test_sizes_are_whole_numbers(name, argument):
    make, sizes = SIZES[name]
    least = 0 if argument in ("sinks", "slack") else 1
    for value in (2.0, "2", True, [2]) + (() if argument in ("rows", "group") else (None,)):
        with pytest.raises(TypeError, match=f"{name}: {argument} must be an integer, got"):
            make(**{**sizes, argument: value})
    for value in least - 1, -5:
        with pytest.raises(ValueError, match=f"{name}: {argument} must be at least {least}, got"):
            make(**{**sizes, argument: value})
    for value in {"bits": (4, 8)}.get(argument, (least, 2)):
        it = make(**{**sizes, argument: np.int64(value)})
        assert it.lengths is None and it.nbytes == 0 and it.length == 0


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 7, 16, 32])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(ValueError, match="QuantizedKVCache: bits must be 4 or 8"):
        QuantizedKVCache(1, 8, bits)


@pytest.mark.parametrize("bits, group, Dh", [(8, 3, 4), (8, 8, 4), (4, None, 3), (4, 3, 9)])
def test_heads_that_do_not_divide_into_groups(bits, group, Dh):
    """Known when the first keys come; the cache is then as new."""
    cache = QuantizedKVCache(1, 8, bits, group)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"heads of {Dh} features do not divide into groups of"), cache.reading(2, 2):
            cache.layer(0).update(keys(2, Dh=Dh), keys(2, Dh=Dh))
        assert cache.lengths is None and cache.nbytes == 0
    with cache.reading(3, 1):
        cache.layer(0).update(keys(Dh=24, T=1), keys(Dh=24, T=1))


@all_kinds
def test_what_it_says_of_itself(kind):
    it = filled(kind)
    assert repr(it.cache) == f"{type(it.cache).__name__}(layers=2, tokens in its rows=[3, 5, 1], {it.cache.nbytes:,} bytes)"
    assert "rows=None" in repr(KINDS[kind]())
