"""Host code of fused.cu: one launch where a chain of array operations would be many. float32.

An operation asks `if fused.serves(x):` and calls its kernel, beside the array form that stays its reference and serves all else.
Every function here takes arrays of CuPy, or of NumPy, for which it runs on the emulator, and allocates its results.
"""
import contextlib
import functools
import math

import numpy as np

from ..backend import array_module
from .compile import function, launch

LANES, MAX_THREADS = 32, 256                    # as in fused.cu
MAX_BLOCKS = 1 << 16                            # more rows than this: a block takes several
CHUNK = 64                                      # rows that one block of norm_columns adds up, at least
MAX_CHUNKS = 256


def serves(x, axis=-1):
    """True where a kernel takes over: float32 on a GPU, and for operations on rows the last axis."""
    return not isinstance(x, (np.ndarray, np.generic)) and x.dtype == np.float32 and axis in (-1, x.ndim - 1) and x.size > 0


def _on_its_device(host):
    """CuPy allocates and launches on the current device, which need not be the one of the first argument."""
    @functools.wraps(host)
    def inner(x, *args, **kwargs):
        with contextlib.nullcontext() if isinstance(x, np.ndarray) else x.device:
            return host(x, *args, **kwargs)
    return inner


def _floats(*arrays):
    """The arrays as kernels read them: float32 without gaps; None stays."""
    return tuple(a if a is None else array_module(a).ascontiguousarray(a, dtype=np.float32) for a in arrays)


def _like(x):
    return array_module(x).empty(x.shape, dtype=np.float32)


def _launch(name, x, blocks, threads, args):
    if blocks:                                  # a grid of no blocks cannot be launched
        launch(function("fused.cu", (), name, array_module(x)), (min(blocks, MAX_BLOCKS),), threads, args)


def _by_rows(name, x, *args):
    """Launches (arrays of args, rows, n, numbers of args) over the rows of x [..., n]: a block each, of as many threads as have work."""
    n = x.shape[-1]
    sizes = np.int64(x.size // max(n, 1)), np.int64(n)
    arrays = [a for a in args if not isinstance(a, (int, float))]
    _launch(name, x, int(sizes[0]), min(MAX_THREADS, LANES * -(-n // LANES)), (*arrays, *sizes, *args[len(arrays):]))


def _by_elements(name, x, *args):
    _launch(name, x, -(-x.size // MAX_THREADS), MAX_THREADS, args)


# --- softmax ------------------------------------------------------------------------------------------------------------

@_on_its_device
def softmax(x):
    """e^(x − max) / Σ e^(x − max) along the last axis."""
    return _map_rows("softmax_forward", x)


@_on_its_device
def softmax_backward(dy, y):
    return _map_rows("softmax_backward", dy, y)


@_on_its_device
def log_softmax(x):
    return _map_rows("log_softmax_forward", x)


@_on_its_device
def log_softmax_backward(dy, y):
    return _map_rows("log_softmax_backward", dy, y)


def _map_rows(name, *inputs):
    """The output of a kernel (inputs, output, rows, n), which has the shape of the inputs."""
    inputs = _floats(*inputs)
    out = _like(inputs[0])
    _by_rows(name, inputs[0], *inputs, out)
    return out


@_on_its_device
def cross_entropy(x, target):
    """(p, −ln p_t):  p = softmax(x) [rows, n], t = target, integers [rows] in [0, n)."""
    (x,), xp = _floats(x), array_module(x)
    p, loss = _like(x), xp.empty(len(x), dtype=np.float32)
    _by_rows("cross_entropy_forward", x, x, xp.ascontiguousarray(target, dtype=np.int64), p, loss)
    return p, loss


@_on_its_device
def cross_entropy_backward(p, target, counted, a):
    """a · (p − [column = target]), 0 where not `counted`.    p: [rows, n]   target, counted, a: [rows]"""
    (p, a), xp = _floats(p, a), array_module(p)
    dx = _like(p)
    target, counted = xp.ascontiguousarray(target, dtype=np.int64), xp.ascontiguousarray(counted, dtype=np.uint8)
    _by_rows("cross_entropy_backward", p, p, target, counted, a, dx)
    return dx


# --- norms --------------------------------------------------------------------------------------------------------------

@_on_its_device
def norm(x, w, b, eps, centred):
    """(y, x̂, r) of LayerNorm (centred) or RMSNorm.    x, y, x̂: [rows, n]   w, b: None or n numbers   r: [rows, 1]"""
    x, w, b = _floats(x, w, b)
    y, x_hat, r = _like(x), _like(x), _like(x[:, :1])
    _by_rows("norm_forward", x, x, w, b, y, x_hat, r, float(eps), int(centred))
    return y, x_hat, r


@_on_its_device
def norm_backward(dy, x_hat, r, w, centred):
    """dx."""
    dy, x_hat, r, w = _floats(dy, x_hat, r, w)
    dx = _like(dy)
    _by_rows("norm_backward", dy, dy, x_hat, r, w, dx, int(centred))
    return dx


@_on_its_device
def norm_columns(dy, x_hat, shape):
    """(dw, db) = (Σ dy · x̂, Σ dy) over the rows, each of `shape`. Within chunks of rows, then over the chunks: always in the same order."""
    (dy, x_hat), xp, (rows, n) = _floats(dy, x_hat), array_module(dy), dy.shape
    chunk = max(CHUNK, -(-rows // MAX_CHUNKS))
    chunks = -(-rows // chunk)
    parts = xp.empty((2, chunks, *shape), dtype=np.float32)
    if parts.size:
        launch(function("fused.cu", (), "norm_columns", xp), (-(-n // LANES), chunks), MAX_THREADS,
               (dy, x_hat, parts[0], parts[1], np.int64(rows), np.int64(n), np.int64(chunk)))
    return parts[0].sum(axis=0), parts[1].sum(axis=0)


# --- elements -----------------------------------------------------------------------------------------------------------

@_on_its_device
def activation(x, name, slope):
    """(y, dy/dx) of "gelu", "gelu_tanh" or "silu"; dy/dx is None unless `slope`."""
    x, = _floats(x)
    y, slope = _like(x), _like(x) if slope else None
    _by_elements(name, x, x, y, slope, np.int64(x.size))
    return y, slope


def can_step(p, *state):
    """True where `adam` can write into p and its state: float32 on a GPU, without gaps."""
    return serves(p) and all(a.flags.c_contiguous and a.dtype == np.float32 for a in (p, *state) if a is not None)


@_on_its_device
def adam(p, g, m, v, largest, t, lr, betas, eps, maximize=False, penalty=0.0, shrink=1.0):
    """The step number t of Adam, written into p, m, v and `largest`: `adam_step` of optim/adam.py."""
    (beta1, beta2), (g,) = betas, _floats(g)
    sign, rate, root = -1 if maximize else 1, lr / (1 - beta1 ** t), math.sqrt(1 - beta2 ** t)
    numbers = sign, penalty, shrink, beta1, 1 - beta1, beta2, 1 - beta2, rate, root, eps
    _by_elements("adam", p, p, g, m, v, largest, np.int64(p.size), *map(float, numbers))


def philox_keep(key, heads, rows, keys, below, xp):
    """Which elements of the tile are kept, bool [len(heads), len(rows), len(keys)], as in `philox.keep_tile`."""
    kept = xp.empty((len(heads), len(rows), len(keys)), dtype=bool)
    tile = [*map(np.int64, (*kept.shape, heads.start, rows.start, keys.start))]
    _by_elements("philox_keep", kept, kept.view(np.uint8), *tile, *map(np.uint32, key), np.uint32(below))
    return kept
