"""philox.py: Random123's known answers, tiles that fit together, and numbers that look random."""
import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf import philox
from tinygrad_tf.random import Generator

ONES = 2**32 - 1
KEY = (0x12345678, 0x9ABCDEF0)
KNOWN = [                                       # key, counters → words: kat_vectors of Random123, philox4x32 with 10 rounds
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def scalar_words(key, counters):
    """The same rounds on Python's ints, which cannot overflow."""
    (k0, k1), (c0, c1, c2, c3) = key, counters
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & ONES, (a >> 32) ^ c3 ^ k1, a & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return c0, c1, c2, c3


def counters(*values):
    return [np.asarray(v, np.uint32) for v in values]


@pytest.mark.parametrize("key, c, answer", KNOWN)
def test_known_answers(key, c, answer):
    assert scalar_words(key, c) == answer
    assert tuple(int(w[0]) for w in philox.words(key, *counters(*([v] for v in c)))) == answer
    assert tuple(int(w) for w in philox.words(key, *counters(*c))) == answer


def test_counters_broadcast_and_are_not_written_to():
    args = counters(np.arange(5), np.arange(7)[:, None], np.array([3, ONES])[:, None, None], [9])
    before = [a.copy() for a in args]
    block = np.stack([np.broadcast_to(w, (2, 7, 5)) for w in philox.words(KEY, *args)], axis=-1)
    assert all(np.array_equal(a, b) for a, b in zip(args, before))
    assert block.dtype == np.uint32
    for h, c2 in enumerate((3, ONES)):
        for i, j in np.ndindex(7, 5):
            assert tuple(block[h, i, j].tolist()) == scalar_words(KEY, (j, i, c2, 9))


def whole(p=0.3, dtype=np.float32):
    return philox.keep_tile(KEY, range(3), range(9), range(41), p, dtype)


def test_keep_tile_is_what_it_says():
    keep = whole()
    for h, i, j in np.ndindex(keep.shape):
        word = scalar_words(KEY, (j // 4, i, h, 0))[j % 4]
        assert keep[h, i, j] == (np.float32(1 / 0.7) if word >= 0.3 * 2**32 else 0)


@pytest.mark.parametrize("heads, rows, keys", [(1, 1, 1), (2, 4, 3), (3, 2, 4), (1, 9, 16), (3, 5, 7), (2, 9, 41)])
def test_any_tiling_draws_the_same_mask(heads, rows, keys):
    expected, drawn = whole(), np.full((3, 9, 41), np.nan, np.float32)
    for h, i, j in np.ndindex(-(-3 // heads), -(-9 // rows), -(-41 // keys)):
        tile = [range(n * size, min((n + 1) * size, end)) for n, size, end in ((h, heads, 3), (i, rows, 9), (j, keys, 41))]
        place = tuple(slice(r.start, r.stop) for r in tile)
        drawn[place] = philox.keep_tile(KEY, *tile, 0.3, np.float32)
    assert np.array_equal(drawn, expected)


@pytest.mark.parametrize("p, value", [(0, 1), (0.0, 1), (1, 0), (1.0, 0)])
def test_certain_outcomes(p, value):
    assert (whole(p) == value).all() and whole(p).shape == (3, 9, 41)


def test_p_just_inside_the_ends():
    assert (whole(1e-30) == 1).all()
    assert (whole(np.nextafter(1.0, 0)) == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtype_and_values(dtype):
    keep = whole(0.25, dtype)
    assert keep.dtype == dtype and set(np.unique(keep)) == {dtype(0), dtype(1 / 0.75)}


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_empty_tiles(empty):
    tile = [range(2, 4), range(3, 8), range(5, 11)]
    tile[empty] = range(6, 6)
    assert philox.keep_tile(KEY, *tile, 0.5, np.float32).shape == tuple(map(len, tile))


def test_huge_indices_are_numbers_of_their_own_and_too_huge_ones_raise():
    last = range(2**32 - 2, 2**32)
    keep = philox.keep_tile(KEY, last, last, range(2**34 - 5, 2**34), 0.5, np.float32)
    for h, i, j in np.ndindex(2, 2, 5):
        column = 2**34 - 5 + j
        assert keep[h, i, j] == 2 * (scalar_words(KEY, (column // 4, last[i], last[h], 0))[column % 4] >= 2**31)
    for tile in ([range(2**32, 2**32 + 1), range(1), range(1)], [range(1), range(2**32 + 1), range(1)],
                 [range(1), range(1), range(2**34, 2**34 + 1)], [range(-1, 1), range(1), range(4)]):
        with pytest.raises(ValueError, match="counters are 32-bit"):
            philox.keep_tile(KEY, *tile, 0.5, np.float32)


# --- do they look random? All of it is deterministic: bounds of 5 standard deviations hold once and for all --------------------

def sample(n=2**16):
    return np.stack(philox.words(KEY, *counters(np.arange(n), [0], [0], [0])), axis=-1).reshape(-1)


def test_every_bit_is_fair_and_uniforms_fill_the_interval():
    w = sample()
    ones = np.array([((w >> np.uint32(b)) & 1).mean() for b in range(32)])
    assert abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(w.size)
    u = philox.uniform(w)
    assert u.dtype == np.float32 and 0 <= u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1
    cells = np.bincount((u * 256).astype(int), minlength=256)
    chi2 = ((cells - w.size / 256) ** 2).sum() / (w.size / 256)
    assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)
    assert philox.uniform(np.array([ONES, 0, 255, 256], np.uint32)).tolist() == [1 - 2.0**-24, 0, 0, 2.0**-24]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 64])
def test_neighbours_are_uncorrelated(step):
    u = philox.uniform(sample()).astype(np.float64) - 0.5
    assert abs((u[step:] * u[:-step]).mean() * 12) < 5 / np.sqrt(u.size - step)


def test_masks_of_neighbouring_rows_heads_and_keys_are_independent():
    a = philox.keep_tile(KEY, range(4), range(64), range(256), 0.5, np.float32) - 1
    b = philox.keep_tile((KEY[0] + 1, KEY[1]), range(4), range(64), range(256), 0.5, np.float32) - 1
    for x, y in [(a[1:], a[:-1]), (a[:, 1:], a[:, :-1]), (a[:, :, 1:], a[:, :, :-1]), (a, b)]:
        assert abs((x * y).mean()) < 5 / np.sqrt(x.size)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    dropped = (philox.keep_tile(KEY, range(4), range(128), range(256), p, np.float32) == 0).mean()
    assert abs(dropped - p) < 5 * np.sqrt(p * (1 - p) / (4 * 128 * 256))


# --- keys and whole masks ----------------------------------------------------------------------------------------------

def test_keys_come_from_the_seed_and_the_state():
    torch.manual_seed(5)
    first, state = philox.draw_key(), torch.get_rng_state()
    second = philox.draw_key()
    torch.manual_seed(5)
    assert philox.draw_key() == first == philox.draw_key(Generator().manual_seed(5)) != second
    torch.set_rng_state(state)
    assert philox.draw_key() == second
    assert all(isinstance(k, int) and 0 <= k < 2**32 for k in first)


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 5), (2, 2, 3, 5), (0, 4), (2, 0, 3)])
def test_a_mask_for_an_array_is_the_tile_of_its_leading_axes(shape):
    x = np.zeros(shape, np.float32)
    keep = philox.keep(x, 0.5, generator=Generator().manual_seed(1))
    rows, keys = (1, 1, *shape)[-2:]
    heads = int(np.prod(shape[:-2]))
    assert keep.shape == shape and keep.dtype == np.float32
    key = philox.draw_key(Generator().manual_seed(1))
    assert np.array_equal(keep.reshape(heads, rows, keys), philox.keep_tile(key, range(heads), range(rows), range(keys), 0.5, np.float32))
    assert np.array_equal(keep, philox.keep(np.zeros(2, np.float32), 0.5, shape, Generator().manual_seed(1)))
