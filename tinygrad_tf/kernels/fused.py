"""Host code of fused.cu: one launch where a chain of array operations would be many. float32.

An operation asks `if fused.serves(x):` and calls its kernel, beside the array form that stays its reference and serves all else.
Every function here takes arrays of CuPy, or of NumPy, for which it runs on the emulator, and allocates its results. A kernel trusts
its arguments: TypeError for what is no array, ValueError for operands whose shapes do not fit. Targets are the caller's to check.
"""
import contextlib
import functools
import math

import numpy as np

from ..arguments import described
from ..backend import array_module, check_one_device, is_writable
from .compile import function, launch, require_arrays

LANES, MAX_THREADS = 32, 256                    # as in fused.cu
MAX_BLOCKS = 1 << 16                            # more rows than this: a block takes several
CHUNK = 64                                      # rows that one block of norm_columns adds up, at least
MAX_CHUNKS = 256
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
OPTIONAL = ("w", "b", "largest")                # operands that may be None: null for a kernel


def serves(x, axis=-1):
    """True where a kernel takes over: float32 on a GPU, and for operations on rows the last axis."""
    return not isinstance(x, (np.ndarray, np.generic)) and x.dtype == np.float32 and axis in (-1, x.ndim - 1) and x.size > 0


def _on_its_device(host):
    """CuPy allocates and launches on the current device, which need not be the one of the first argument."""
    first = host.__code__.co_varnames[0]

    @functools.wraps(host)
    def inner(x, *args, **kwargs):
        require_arrays(f"fused.{host.__name__}", **{first: x})
        with contextlib.nullcontext() if isinstance(x, np.ndarray) else x.device:
            return host(x, *args, **kwargs)
    return inner


def _require(op, x, **operands):
    """operands: name = (array, its shape or number of elements). ValueError for others, RuntimeError for one on another device."""
    for name, (a, wanted) in operands.items():
        if a is None and name in OPTIONAL:
            continue
        if type(a) is not type(x) or not isinstance(a, np.ndarray) and a.device != x.device:
            require_arrays(f"fused.{op}", **{name: a})
            check_one_device(f"fused.{op}", [x, a])
        if wanted != (a.shape if isinstance(wanted, tuple) else a.size):
            expected = f"the shape {wanted}" if isinstance(wanted, tuple) else f"{wanted} elements"
            raise ValueError(f"fused.{op}: {name} must have {expected}, as the first argument has the shape {x.shape}, got {a.shape}")


def _require_rows(op, x):
    """ValueError where x is not [rows, n]."""
    if x.ndim != 2:
        raise ValueError(f"fused.{op}: the first argument must be [rows, n], got the shape {x.shape}")


def _require_integers(op, target):
    if target.dtype.kind not in "iu":
        raise TypeError(f"fused.{op}: target must be integers, got {target.dtype}")


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
    _require("softmax_backward", dy, y=(y, dy.shape))
    return _map_rows("softmax_backward", dy, y)


@_on_its_device
def log_softmax(x):
    return _map_rows("log_softmax_forward", x)


@_on_its_device
def log_softmax_backward(dy, y):
    _require("log_softmax_backward", dy, y=(y, dy.shape))
    return _map_rows("log_softmax_backward", dy, y)


def _map_rows(name, *inputs):
    """The output of a kernel (inputs, output, rows, n), which has the shape of the inputs."""
    if not inputs[0].ndim:
        raise ValueError(f"fused.{name.removesuffix('_forward')}: the first argument must have an axis, [..., n], got the shape ()")
    inputs = _floats(*inputs)
    out = _like(inputs[0])
    _by_rows(name, inputs[0], *inputs, out)
    return out


@_on_its_device
def cross_entropy(x, target):
    """(p, −ln p_t):  p = softmax(x) [rows, n], t = target, integers [rows] in [0, n)."""
    _require_rows("cross_entropy", x)
    _require("cross_entropy", x, target=(target, x.shape[:1]))
    _require_integers("cross_entropy", target)
    (x,), xp = _floats(x), array_module(x)
    p, loss = _like(x), xp.empty(len(x), dtype=np.float32)
    _by_rows("cross_entropy_forward", x, x, xp.ascontiguousarray(target, dtype=np.int64), p, loss)
    return p, loss


@_on_its_device
def cross_entropy_backward(p, target, counted, a):
    """a · (p − [column = target]), 0 where not `counted`.    p: [rows, n]   target, counted, a: [rows]"""
    _require_rows("cross_entropy_backward", p)
    rows = p.shape[:1]
    _require("cross_entropy_backward", p, target=(target, rows), counted=(counted, rows), a=(a, rows))
    _require_integers("cross_entropy_backward", target)
    (p, a), xp = _floats(p, a), array_module(p)
    dx = _like(p)
    target, counted = xp.ascontiguousarray(target, dtype=np.int64), xp.ascontiguousarray(counted, dtype=np.uint8)
    _by_rows("cross_entropy_backward", p, p, target, counted, a, dx)
    return dx


# --- norms --------------------------------------------------------------------------------------------------------------

@_on_its_device
def norm(x, w, b, eps, centred):
    """(y, x̂, r) of LayerNorm (centred) or RMSNorm.    x, y, x̂: [rows, n]   w, b: None or n numbers   r: [rows, 1]"""
    _require_rows("norm", x)
    _require("norm", x, w=(w, x.shape[1]), b=(b, x.shape[1]))
    x, w, b = _floats(x, w, b)
    y, x_hat, r = _like(x), _like(x), _like(x[:, :1])
    _by_rows("norm_forward", x, x, w, b, y, x_hat, r, float(eps), int(centred))
    return y, x_hat, r


@_on_its_device
def norm_backward(dy, x_hat, r, w, centred):
    """dx."""
    _require_rows("norm_backward", dy)
    _require("norm_backward", dy, x_hat=(x_hat, dy.shape), r=(r, dy.shape[0]), w=(w, dy.shape[1]))
    dy, x_hat, r, w = _floats(dy, x_hat, r, w)
    dx = _like(dy)
    _by_rows("norm_backward", dy, dy, x_hat, r, w, dx, int(centred))
    return dx


@_on_its_device
def norm_columns(dy, x_hat, shape, bias=True):
    """(dw, db) = (Σ dy · x̂, Σ dy) over the rows, each of `shape`; db is None without a `bias`, as in RMSNorm.

    Within chunks of rows, then over the chunks: always in the same order.
    """
    _require_rows("norm_columns", dy)
    _require("norm_columns", dy, x_hat=(x_hat, dy.shape))
    (dy, x_hat), xp, (rows, n) = _floats(dy, x_hat), array_module(dy), dy.shape
    if math.prod(shape) != n:
        raise ValueError(f"fused.norm_columns: `shape` must have {n} elements, one for each column of dy {dy.shape}, got {shape}")
    chunk = max(CHUNK, -(-rows // MAX_CHUNKS))
    chunks = -(-rows // chunk)
    parts = [xp.empty((chunks, *shape), dtype=np.float32) if wanted else None for wanted in (True, bias)]
    if parts[0].size:
        launch(function("fused.cu", (), "norm_columns", xp), (-(-n // LANES), chunks), MAX_THREADS,
               (dy, x_hat, *parts, np.int64(rows), np.int64(n), np.int64(chunk)))
    return tuple(part if part is None else part.sum(axis=0) for part in parts)


# --- elements -----------------------------------------------------------------------------------------------------------

@_on_its_device
def activation(x, name, slope):
    """(y, dy/dx) of "gelu", "gelu_tanh" or "silu"; dy/dx is None unless `slope`."""
    if name not in ACTIVATIONS:
        raise ValueError(f"fused.activation: name must be one of {', '.join(ACTIVATIONS)}, got {described(name)}")
    x, = _floats(x)
    y, slope = _like(x), _like(x) if slope else None
    _by_elements(name, x, x, y, slope, np.int64(x.size))
    return y, slope


def can_step(p, *state):
    """True where `adam` can write into p and its state: float32 on a GPU, without gaps."""
    return serves(p) and all(_is_whole(a) for a in (p, *state) if a is not None)


def _is_whole(a):
    """True where a kernel can take an array as it lies in memory."""
    return a.flags.c_contiguous and a.dtype == np.float32


@_on_its_device
def adam(p, g, m, v, largest, t, lr, betas, eps, maximize=False, penalty=0.0, shrink=1.0):
    """The step number t of Adam, written into p, m, v and `largest`: `adam_step` of optim/adam.py. These must be as `can_step` says."""
    _require("adam", p, g=(g, p.shape), m=(m, p.shape), v=(v, p.shape), largest=(largest, p.shape))
    if not all(_is_whole(a) and is_writable(a) for a in (p, m, v, largest) if a is not None):
        raise ValueError("fused.adam: p, m, v and largest are written into, and must be float32, writable, without gaps")
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
