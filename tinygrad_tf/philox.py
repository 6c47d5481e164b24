"""Random numbers without a state: Philox4x32-10 turns a counter and a key into four 32-bit words. (Salmon et al., 2011, "Parallel
random numbers: as easy as 1, 2, 3".)

A generator with a state is a queue: the millionth number comes after all that stand before it. Here the counter says *which*
number, so any of them can be had at once, in any order, twice. That is what tiles and GPU threads need: each draws its own
part of a dropout mask, and backward draws it again instead of keeping it.

One round maps (c0, c1, c2, c3) to (hi(M1·c2) ⊕ c1 ⊕ k0, lo(M1·c2), hi(M0·c0) ⊕ c3 ⊕ k1, lo(M0·c0)): hi and lo are the halves of a
64-bit product. Ten rounds, the key growing by (W0, W1) after each. Arrays are NumPy's or CuPy's.
"""
import math

import numpy as np

from . import random
from .backend import array_module
from .kernels import fused

M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85                 # the golden ratio − 1 and √3 − 1, times 2³²
ROUNDS = 10
LAST = 2**32 - 1


def words(key, c0, c1, c2, c3):
    """Four random uint32 arrays from the key (k0, k1), two ints, and four counters: uint32 arrays that broadcast.

    A counter that varies along one axis alone stays small in the first rounds, so [heads, 1, 1], [rows, 1] and [keys] cost least.
    """
    k0, k1 = key
    for i in range(ROUNDS):
        high0, low0 = _product(c0, M0)
        high1, low1 = _product(c2, M1)
        c0, c1, c2, c3 = high1 ^ c1, low1, high0 ^ c3, low0
        c0 ^= np.uint32((k0 + i * W0) & LAST)
        c2 ^= np.uint32((k1 + i * W1) & LAST)
    return c0, c1, c2, c3


def _product(c, m):
    """The high and the low 32 bits of c · m."""
    product = c.astype(np.uint64)
    product *= np.uint64(m)
    low = product.astype(np.uint32)
    product >>= np.uint64(32)
    return product.astype(np.uint32), low


def uniform(word):
    """The upper 24 bits · 2⁻²⁴: float32 in [0, 1), all of them exact."""
    return (word >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def keep_tile(key, heads, rows, keys, p, dtype, xp=np):
    """What dropout multiplies one tile by, [len(heads), len(rows), len(keys)]: 0 with probability p, else 1/(1 − p).

    heads, rows, keys: ranges. Element (h, i, j) is word j % 4 of the block with the counters (j // 4, i, h, 0), wherever the
    tile begins: tiles that are drawn apart, or again, fit together.
    """
    shape, dtype = (len(heads), len(rows), len(keys)), np.dtype(dtype)
    if p in (0, 1):
        return xp.full(shape, 1 - p, dtype=dtype)
    blocks = range(keys.start // 4, -(-keys.stop // 4))
    for counters in (heads, rows, blocks):
        _check_counters(counters)
    if xp is np:
        kept = _kept(key, heads, rows, blocks, below(p))[:, :, keys.start - 4 * blocks.start:keys.stop - 4 * blocks.start]
    else:
        kept = fused.philox_keep(key, heads, rows, keys, below(p), xp)
    return kept * dtype.type(1 / (1 - p))


def _kept(key, heads, rows, blocks, threshold):
    """Whether each word of the blocks reaches the threshold: bool [heads, rows, 4 · blocks]."""
    c2, c1, c0 = (np.arange(r.start, r.stop, dtype=np.uint32) for r in (heads, rows, blocks))
    block = words(key, c0, c1[:, None], c2[:, None, None], np.zeros(1, np.uint32))
    kept = [word >= threshold for word in np.broadcast_arrays(*block)]
    return np.stack(kept, axis=-1).reshape(len(heads), len(rows), 4 * len(blocks))


def _check_counters(indices):
    if indices.start < 0 or indices.stop > 2**32:
        raise ValueError(f"philox: counters are 32-bit, got {indices.start} to {indices.stop}; a tile has heads and rows below 2**32 "
                         f"and keys below 2**34")


def below(p):
    """The threshold below which a word means "dropped": ⌈p · 2³²⌉ of the 2³² words are, for 0 < p < 1."""
    return np.uint32(min(math.ceil(p * 2**32), LAST))


def keep(x, p, shape=None, generator=None):
    """`keep_tile` for all of x, or for a shape beside x, with a fresh key: [..., rows, keys] counts its leading axes as heads."""
    shape = x.shape if shape is None else tuple(shape)
    rows, keys = (1, 1, *shape)[-2:]
    tile = range(math.prod(shape[:-2])), range(rows), range(keys)
    return keep_tile(draw_key(generator), *tile, p, x.dtype, array_module(x)).reshape(shape)


def draw_key(generator=None):
    """A key of two 32-bit ints, drawn from the generator (the default one): its seed and its state decide all that follows."""
    return tuple(random.chosen(generator).randint(0, 2**32, 2).tolist())
