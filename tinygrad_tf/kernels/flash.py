"""Host code of the flash attention kernels: which file, which tiles, which grid, and arrays in the form that kernels read.

    o = softmax(scale · q kᵀ, over the keys that a query may see) v,   lse = log Σ exp(scale · q kᵀ)
    q: [B, H, Tq, Dh]   k: [B, Hkv, Tk, Dh]   v: [B, Hkv, Tk, Dv]   o: [B, H, Tq, Dv]   lse: float32 [B, H, Tq]
    valid_tokens: None, or [B, Tk], bool or uint8

`band` says what query i sees, which stands at p = i + band.query_offset among the keys: p − band.left ≤ j ≤ p + band.right
(None: no limit). Arrays of NumPy run on the emulator, arrays of CuPy on their GPU. (docs/kernels.md; guide 10.5)
"""
import contextlib
from numbers import Real
from typing import NamedTuple

import numpy as np

from ..arguments import described, require_bools, whole_number
from ..backend import array_module, check_one_device
from .compile import function, launch, no_array, require_arrays, rows_aligned, shared_limit, strides

UNLIMITED = 1 << 30                             # in a kernel's int: farther than any key, and i ± UNLIMITED does not overflow
LONGEST = (1 << 29) - 1024                      # of a sequence, and the largest offset: a tile may reach past the end
MAX_GRID = 65535                                # blocks along y and z, where heads and batches are
LARGEST_SCALE = float(np.finfo(np.float32).max)


class Tile(NamedTuple):
    """A block owns `rows` rows of one operand, and streams the other one `columns` rows at a time."""
    rows: int
    columns: int


class Float32:
    """Tier one: flash_attention.cu, on any GPU since sm_70."""
    file = "flash_attention.cu"
    threads = 128
    capability = 70
    tiles = {16: (Tile(64, 64), Tile(32, 32)),              # head dim → tiles, the fastest first: the first that fits is taken
             32: (Tile(64, 64), Tile(32, 32)),
             64: (Tile(64, 64), Tile(32, 32)),
             128: (Tile(64, 32), Tile(32, 32), Tile(32, 16))}

    @staticmethod
    def dtypes():
        """The names of what a kernel of this tier reads."""
        return ("float32",)

    @staticmethod
    def options(head_dim, tile):
        return (f"-DHEAD_DIM={head_dim}", f"-DBLOCK_M={tile.rows}", f"-DBLOCK_N={tile.columns}")

    @staticmethod
    def tile(kernel, tile):
        """The tile of one kernel of a table's entry."""
        return tile

    @staticmethod
    def shared_bytes(kernel, head_dim, tile):
        """The pitches are those of the .cu file: LD = Dh + 4, LDP = columns + lanes of a row."""
        tiles, lanes = (1, 2) if kernel == "flash_forward" else (2, 2), 4 if head_dim == 16 else 8
        floats = (tiles[0] * tile.rows + tiles[1] * tile.columns) * (head_dim + 4) + tile.rows * (tile.columns + lanes)
        return 4 * (floats + (2 * tile.columns if kernel == "flash_dkdv" else 0))


class TilePair(NamedTuple):
    """Two tiles: the forward pass may own more rows a block than the backward pass, which keeps more in registers."""
    forward: Tile
    backward: Tile


class Float16:
    """Tier two: flash_attention_mma.cu, tensor cores, on GPUs since sm_80. Each of them has 99 KB of shared memory or more a block."""
    file = "flash_attention_mma.cu"
    threads = 128                                           # four warps; a warp owns strips of 16 rows
    capability = 80
    bf16 = 0
    tiles = {16: (TilePair(Tile(128, 64), Tile(64, 64)),),
             32: (TilePair(Tile(128, 64), Tile(64, 64)),),
             64: (TilePair(Tile(128, 64), Tile(64, 64)),),
             128: (TilePair(Tile(128, 32), Tile(64, 32)),)}

    @classmethod
    def dtypes(cls):
        return ("bfloat16", "uint16") if cls.bf16 else ("float16",)

    @classmethod
    def options(cls, head_dim, pair):
        strips = 16 * cls.threads // 32
        return (f"-DHEAD_DIM={head_dim}", f"-DBF16={cls.bf16}", f"-DWARPS={cls.threads // 32}",
                f"-DFORWARD_STRIPS={pair.forward.rows // strips}", f"-DFORWARD_TILE={pair.forward.columns}",
                f"-DBACKWARD_STRIPS={pair.backward.rows // strips}", f"-DBACKWARD_TILE={pair.backward.columns}")

    @staticmethod
    def tile(kernel, pair):
        return pair.forward if kernel == "flash_forward" else pair.backward

    @classmethod
    def shared_bytes(cls, kernel, head_dim, pair):
        """The pitch is that of the .cu file; one or two operands owned, two streamed through two stages each, lse and delta of both."""
        tile, owned = cls.tile(kernel, pair), 1 if kernel == "flash_forward" else 2
        statistics = 2 * 2 * tile.columns if kernel == "flash_dkdv" else 0
        return 2 * (head_dim + 8) * (owned * tile.rows + 4 * tile.columns) + 4 * statistics


class BFloat16(Float16):
    """The same for bfloat16: arrays of ml_dtypes.bfloat16, or of uint16 that hold its bits (then `tier=BFloat16` must say so)."""
    bf16 = 1


TIERS = {"float32": Float32, "float16": Float16, "bfloat16": BFloat16}      # by the name of the dtype


# --- public -----------------------------------------------------------------------------------------------------------

def forward(q, k, v, valid_tokens, band, scale, tier=None):
    """(o, lse). A query that sees no key has o = 0 and lse = −∞.

    TypeError, ValueError, RuntimeError for what the kernels cannot compute: of q, k, v, `refusal` says so in words beforehand.
    """
    run = _Run(q, k, v, valid_tokens, band, scale, tier)
    with run.device:
        return run.forward(q, k, v)


def backward(q, k, v, o, lse, d_o, valid_tokens, band, scale, tier=None, needs=(True, True, True)):
    """(dq, dk, dv) from what forward got and returned, and d_o, the gradient of o. None where a whole kernel's are not needed.

    ValueError where o, lse or d_o has another shape or dtype than that: a kernel would read past its end.
    """
    run = _Run(q, k, v, valid_tokens, band, scale, tier)
    run.require_results(q, o, lse, d_o)
    need_q, need_k, need_v = _three_flags(needs)
    with run.device:
        return run.backward(q, k, v, o, lse, d_o, need_q, need_k or need_v)


def refusal(q, k, v, tier=None):
    """None, or why the kernels cannot take these arrays: (type of the error, sentence)."""
    return _unknown_type(q, k, v, tier) or _misfit(q, k, v, tier or TIERS[q.dtype.name])


def _unknown_type(q, k, v, tier):
    """The part of `refusal` that is about types."""
    stranger = no_array(q=q, k=k, v=v)
    if stranger:
        return TypeError, stranger
    if tier is not None and not (isinstance(tier, type) and issubclass(tier, (Float32, Float16))):
        known = ", ".join(each.__name__ for each in TIERS.values())
        return TypeError, f"tier must be one of {known} of kernels.flash, or None, got {described(tier)}"
    dtypes = TIERS if tier is None else tier.dtypes()
    if q.dtype.name not in dtypes or not q.dtype == k.dtype == v.dtype or not q.dtype.isnative:
        whose = "the kernels" if tier is None else f"the kernels of tier {tier.__name__}"
        bits = "; for the bits of bfloat16 give tier=BFloat16" if tier is None and q.dtype == np.uint16 else ""
        return TypeError, f"{whose} take {', '.join(dtypes)}, one for all, got {q.dtype}, {k.dtype} and {v.dtype}{bits}"
    return None


def _misfit(q, k, v, tier):
    """The part that is about sizes, and the GPU."""
    if not q.ndim == k.ndim == v.ndim == 4:
        return ValueError, f"the kernels take 4 axes, [B, H, T, Dh], got query {q.shape}, key {k.shape} and value {v.shape}"
    (B, H, Tq, Dh), (Bk, Hkv, Tk, Dk) = q.shape, k.shape
    if Bk != B or Dk != Dh or v.shape[:3] != k.shape[:3] or (Hkv == 0 < H) or (Hkv and H % Hkv):
        return ValueError, (f"query {q.shape} = [B, H, Tq, Dh], key {k.shape} = [B, Hkv, Tk, Dh] and value {v.shape} = [B, Hkv, Tk, Dv] "
                            f"do not fit; H must be a multiple of Hkv")
    if max(Dh, v.shape[-1]) > max(tier.tiles):
        return ValueError, f"the kernels take Dh up to {max(tier.tiles)}, got query {q.shape} and value {v.shape}"
    if array_module(q) is not np and int(q.device.compute_capability) < tier.capability:
        return RuntimeError, (f"the kernels for {q.dtype} need a GPU of sm_{tier.capability} or later, "
                              f"this one is sm_{q.device.compute_capability}")
    if max(B, H) > MAX_GRID or max(Tq, Tk) > LONGEST:
        return ValueError, (f"a launch takes B and H up to {MAX_GRID} and T up to {LONGEST}, got query {q.shape} and key {k.shape}; "
                            f"split the batch")
    return None


def choose_tile(tier, name, head_dim, xp):
    """(tile, bytes of shared memory) of a kernel: the first of the table that this device can hold."""
    limit = shared_limit(xp)
    sizes = [(tile, tier.shared_bytes(name, head_dim, tile)) for tile in tier.tiles[head_dim]]
    fitting = [pair for pair in sizes if pair[1] <= limit]
    if not fitting:
        raise RuntimeError(f"flash attention: {name} with Dh = {head_dim} needs {sizes[-1][1]} bytes of shared memory, "
                           f"and a block of this device has {limit}; use sdpa_backend('tiled')")
    return fitting[0]


# --- one call ---------------------------------------------------------------------------------------------------------

class _Run:
    """What the launches of one call have in common: sizes, options, and the arguments at the end of every signature."""

    def __init__(self, q, k, v, valid_tokens, band, scale, tier):
        refused = refusal(q, k, v, tier)
        if refused:
            raise refused[0](f"flash attention: {refused[1]}")
        self.xp, self.dtype = array_module(q), q.dtype
        self.tier = tier or TIERS[q.dtype.name]
        (self.B, self.H, self.Tq, self.Dh), (_, self.Hkv, self.Tk, self.Dv) = q.shape, v.shape
        self.head_dim = min(n for n in self.tier.tiles if n >= max(self.Dh, self.Dv))
        if valid_tokens is not None:
            _require("valid_tokens", valid_tokens, "[B, Tk]", (self.B, self.Tk), np.bool_, np.uint8)
        check_one_device("flash attention", [q, k, v] + ([] if valid_tokens is None else [valid_tokens]))
        self.valid_tokens = None if valid_tokens is None else self.xp.ascontiguousarray(valid_tokens).view(np.uint8)     # one byte a key
        self.tail = (self.H, self.Hkv, self.Tq, self.Tk, *_limits(band), _finite(scale))
        self.device = contextlib.nullcontext() if self.xp is np else q.device       # CuPy launches on the current device

    def require_results(self, q, o, lse, d_o):
        """TypeError, ValueError, RuntimeError where these cannot be what forward returned, and the gradient of its o."""
        row = self.B, self.H, self.Tq
        _require("o", o, "[B, H, Tq, Dv]", (*row, self.Dv), self.dtype)
        _require("lse", lse, "[B, H, Tq]", row, np.float32)
        _require("d_o", d_o, "[B, H, Tq, Dv]", (*row, self.Dv), self.dtype)
        check_one_device("flash attention", [q, o, lse, d_o])

    def forward(self, q, k, v):
        o, lse = self._new(self.H, self.Tq), self._statistic()
        if not self._has_work():
            o[...], lse[...] = 0, -np.inf
        else:
            q, k, v = map(self._rows, (q, k, v))
            self._launch("flash_forward", self.Tq, self.H,
                         (q, k, v, self.valid_tokens, o, lse, *map(strides, (q, k, v, o))))
        return self._cut(o, self.Dv), lse

    def backward(self, q, k, v, o, lse, d_o, need_dq, need_dkdv):
        dq = self._new(self.H, self.Tq) if need_dq else None
        dk, dv = (self._new(self.Hkv, self.Tk) if need_dkdv else None for _ in "kv")
        if not self._has_work():
            for gradient in (dq, dk, dv):
                if gradient is not None:
                    gradient[...] = 0
        else:
            q, k, v, o, d_o = map(self._rows, (q, k, v, o, d_o))
            inputs = (q, k, v, d_o, self.xp.ascontiguousarray(lse), self._delta(o, d_o), self.valid_tokens)
            if need_dkdv:
                self._launch("flash_dkdv", self.Tk, self.Hkv, (*inputs, dk, dv, *map(strides, (q, k, v, d_o, dk, dv))))
            if need_dq:
                self._launch("flash_dq", self.Tq, self.H, (*inputs, dq, *map(strides, (q, k, v, d_o, dq))))
        return self._cut(dq, self.Dh), self._cut(dk, self.Dh), self._cut(dv, self.Dv)

    def _delta(self, o, d_o):
        """Δ = Σ_d o · d_o of every query, one warp a row."""
        delta, rows, threads = self._statistic(), self.B * self.H * self.Tq, 128
        tile, _ = choose_tile(self.tier, "flash_forward", self.head_dim, self.xp)
        launch(function(self.tier.file, self.tier.options(self.head_dim, tile), "flash_delta", self.xp), (_ceil(rows, threads // 32),),
               threads, (o, d_o, delta, strides(o), strides(d_o), self.H, self.Tq, np.int64(rows)))
        return delta

    def _launch(self, name, owned, heads, args):
        """A block for every tile of the `owned` rows of every head of every batch."""
        tile, shared = choose_tile(self.tier, name, self.head_dim, self.xp)
        kernel = function(self.tier.file, self.tier.options(self.head_dim, tile), name, self.xp)
        rows = self.tier.tile(name, tile).rows
        launch(kernel, (_ceil(owned, rows), heads, self.B), self.tier.threads, args + self.tail, shared)

    def _has_work(self):
        return self.B * self.H * self.Tq * self.Tk > 0

    def _new(self, heads, rows):
        return self.xp.empty((self.B, heads, rows, self.head_dim), self.dtype)

    def _statistic(self):
        return self.xp.empty((self.B, self.H, self.Tq), np.float32)

    def _rows(self, x):
        """x with head_dim columns, the new ones 0, and rows that can be read 16 bytes at a time; x itself where it is so."""
        if x.shape[-1] == self.head_dim:
            return x if rows_aligned(x) else self.xp.array(x, order="C")
        padded = self.xp.zeros((*x.shape[:-1], self.head_dim), x.dtype)
        padded[..., :x.shape[-1]] = x
        return padded

    def _cut(self, x, columns):
        """x without the columns that were added."""
        return x if x is None or x.shape[-1] == columns else self.xp.ascontiguousarray(x[..., :columns])


# --- arguments --------------------------------------------------------------------------------------------------------

def _require(name, x, axes, shape, *dtypes):
    """ValueError for an array of another shape or dtype: a kernel trusts both."""
    require_arrays("flash attention", **{name: x})
    dtypes = [np.dtype(d) for d in dtypes]
    if x.shape != shape or x.dtype not in dtypes:
        raise ValueError(f"flash attention: {name} must be {' or '.join(d.name for d in dtypes)} {axes} = {shape} for these "
                         f"q, k and v, got {x.dtype} {x.shape}")


def _limits(band):
    """(query_offset, left, right) as the kernels take them."""
    if not all(hasattr(band, name) for name in ("query_offset", "left", "right")):
        raise TypeError(f"flash attention: band must be a Band of ops.flash_attention, got {described(band)}; Band() hides nothing, "
                        f"Band(right=0) is causal")
    offset = whole_number("flash attention", "query_offset of the band", band.query_offset)
    if abs(offset) > LONGEST:
        raise ValueError(f"flash attention: query_offset must lie within ±{LONGEST}, got {described(offset)}")
    return offset, _side("left", band.left), _side("right", band.right)


def _side(name, keys):
    if keys is None:
        return UNLIMITED
    return max(-UNLIMITED, min(whole_number("flash attention", f"{name} of the band (None: no limit)", keys), UNLIMITED))


def _finite(scale):
    """The scale as a float. An infinite one, or one that float32 makes infinite, would turn scores into those of hidden keys."""
    if not isinstance(scale, Real):
        raise TypeError(f"flash attention: scale must be a number, usually 1/√Dh, got {described(scale)}")
    number = scale.item() if isinstance(scale, np.generic) else scale           # in float16 the largest one would be infinite itself
    if not -LARGEST_SCALE <= number <= LARGEST_SCALE:       # also for NaN
        raise ValueError(f"flash attention: scale must be finite in float32, got {described(scale)}")
    return float(number)


def _three_flags(needs):
    """Whether dq, dk and dv are needed."""
    if not isinstance(needs, (tuple, list)):
        raise TypeError(f"flash attention: needs must be three flags, for q, k and v, got {described(needs)}")
    if len(needs) != 3:
        raise ValueError(f"flash attention: needs must be three flags, for q, k and v, got {len(needs)}: {described(needs)}")
    require_bools("flash attention", **{f"needs[{i}]": flag for i, flag in enumerate(needs)})
    return needs


def _ceil(n, size):
    return -(-n // size)
