"""Where a token stands, told in five ways: attention alone does not know the order of its tokens.

added to the embedding     LearnedPositions, SinusoidalPositionEncoding           (guide 9.1, 9.5)
turning q and k            RotaryEmbedding                                        (guide 10.1)
added to the scores        ALiBi, T5RelativeBias                                  (guide 18.3)

`position_ids` are whole numbers ≥ 0, [T] or [B, T]: a row of its own for each sequence where padding stands on the left,
and the positions of the new tokens where a cache holds the older ones.
"""
import math
from numbers import Integral

import numpy as np

from .. import creation
from ..arguments import require_tensors
from ..autograd import constant
from ..backend import CPU, array_module, at_least_float32, to_device
from ..dtypes import bool_, get_default_dtype, int64
from ..ops._ids import first_bad
from ..ops.rotary import check_layout, check_rotary_dim, half_split_to_interleaved, interleaved_to_half_split, rotary  # noqa: F401
from ..tensor import Tensor
from . import functional as F
from . import init
from .layers import Embedding
from .module import Module


def count_positions(T, valid_tokens=None, device=None):
    """0 … T−1; in the rows of valid_tokens [B, T] real tokens alone are counted, from the first.    [T], or [B, T]    (guide 15.2)"""
    if valid_tokens is None:
        return creation.arange(T, device=device)
    return (valid_tokens.to(device=device, dtype=bool_).long().cumsum(dim=-1) - 1).clamp(min=0)


def count_in_segments(segment_ids, valid_tokens):
    """The same, from 0 in each run of equal segment_ids.    segment_ids, valid_tokens: [B, T] → [B, T]                  (guide 15.3)"""
    real = valid_tokens.long()
    run = F.pad((segment_ids[:, 1:] != segment_ids[:, :-1]).long(), (1, 0)).cumsum(dim=-1)          # 0, 1, … : the number of the run
    in_run = creation.zeros_like(run).scatter_add(1, run, real)
    before_run = in_run.cumsum(dim=-1) - in_run                                                     # real tokens in the runs before
    return (real.cumsum(dim=-1) - 1 - before_run.gather(1, run)).clamp(min=0)


# --- added to the embedding -------------------------------------------------------------------------------------------

class InputEmbedding(Module):
    """x = E_token[ids] + E_position[0 … T−1].    ids: [B, T]  x: [B, T, C]         (guide 9.1)

    `position_ids` [T] or [B, T] replaces 0 … T−1, for padded batches and for decoding from a cache. Positions at or beyond
    `max_seq_len` raise IndexError: a learned table has no row for them. `position` may be another module that is called
    as position(x, position_ids), or None: then x is E_token[ids], and attention has to tell positions apart by itself.
    """

    def __init__(self, vocab_size, dim, max_seq_len=None, position="learned"):
        super().__init__()
        self.token = Embedding(vocab_size, dim)
        if position == "learned":
            if max_seq_len is None:
                raise ValueError("InputEmbedding: a learned table of positions needs max_seq_len, its number of rows")
            position = LearnedPositions(max_seq_len, dim)
        elif not (position is None or isinstance(position, Module)):
            raise TypeError(f"InputEmbedding: position must be 'learned', a module or None, got {position!r}")
        self.position = position

    def forward(self, token_ids, position_ids=None):
        require_tensors("InputEmbedding", token_ids=token_ids)
        if token_ids.ndim != 2:
            raise ValueError(f"InputEmbedding: token_ids must have shape [B, T], got {tuple(token_ids.shape)}")
        x = self.token(token_ids)
        return x if self.position is None else self.position(x, position_ids)


class LearnedPositions(Embedding):
    """y = x + E[position], E learned.    x, y: [B, T, C]  E: [max_seq_len, C]    IndexError beyond the table.   (guide 9.1)"""

    def __init__(self, max_seq_len, dim):
        super().__init__(max_seq_len, dim)

    def forward(self, x, position_ids=None):
        return x + F.embedding(_positions_in_table("LearnedPositions", x, position_ids, *self.weight.shape), self.weight)


class SinusoidalPositionEncoding(Module):
    """y = x + PE,  PE[pos, 2i] = sin(pos / 10000^(2i/C)),  PE[pos, 2i+1] = cos(the same).    x, y: [B, T, C]      (guide 9.5)

    A buffer, `pe` [1, max_seq_len, C]: it moves with the model, is not trained, and is not saved. ValueError for an odd dim,
    IndexError for positions at or beyond max_seq_len.
    """

    def __init__(self, dim, max_seq_len=2048):
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ValueError(f"SinusoidalPositionEncoding: sinusoidal encoding requires an even dim, got {dim}: each frequency takes "
                             f"two features, a sine and a cosine")
        _check_rows("SinusoidalPositionEncoding", max_seq_len)
        angles = np.outer(np.arange(max_seq_len), _frequencies(dim, 10000.0))
        pe = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(1, max_seq_len, dim)
        self.register_buffer("pe", creation.tensor(pe, dtype=get_default_dtype()), persistent=False)

    def forward(self, x, position_ids=None):
        positions = _positions_in_table("SinusoidalPositionEncoding", x, position_ids, *self.pe.shape[1:])
        return x + self.pe[0][positions]


def _frequencies(R, base):
    """base^(−2i/R) for i = 0 … R/2 − 1, the angle by which pair i turns from one position to the next.    float64 [R/2]"""
    return base ** (-np.arange(0, R, 2) / R)


def _check_rows(op, max_seq_len):
    if not isinstance(max_seq_len, Integral):
        raise TypeError(f"{op}: max_seq_len must be a whole number, got {max_seq_len!r}")
    if max_seq_len < 0:
        raise ValueError(f"{op}: max_seq_len must be ≥ 0, got {max_seq_len}")


def _positions_in_table(op, x, position_ids, rows, dim):
    """The positions of x as ids into a table [rows, dim]; 0 … T−1 where none are given."""
    require_tensors(op, x=x)
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"{op}: x must be [B, T, C] with C={dim}, got {tuple(x.shape)}")
    positions = checked_positions(op, x, position_ids)
    _check_range(op, positions, rows)
    return positions


def checked_positions(op, x, position_ids):
    """position_ids of x [B, …, T, ·] as int64 on its device; 0 … T−1 for None."""
    B, T = x.shape[0], x.shape[-2]
    if position_ids is None:
        return creation.arange(T, device=x.device)
    _check_ids(f"{op}: position_ids", position_ids)
    if tuple(position_ids.shape) not in ((T,), (1, T), (B, T)):
        raise ValueError(f"{op}: position_ids must have shape [B, T] = ({B}, {T}), or [T] for all rows, got {tuple(position_ids.shape)}")
    return position_ids.to(device=x.device, dtype=int64)


def _check_ids(name, ids):
    if not isinstance(ids, Tensor) or ids.array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be a tensor of whole numbers, got {getattr(ids, 'dtype', type(ids).__name__)}")


def _check_range(op, positions, rows):
    if (bad := first_bad(positions, rows)) is not None:
        raise IndexError(f"{op}: position {bad} is out of range for max_seq_len {rows}: the table has rows 0 to {rows - 1}; make "
                         f"max_seq_len larger, or pass fewer tokens")


# --- turning q and k --------------------------------------------------------------------------------------------------

class RotaryEmbedding(Module):
    """y_pair(i) = x_pair(i) turned by position · θ_i,  θ_i = base^(−2i/R).    x, y: [B, H, T, Dh]           (guide 10.1)

    Applied to q and k, never to v: (turned q_m) · (turned k_n) depends on m − n alone. `layout` says which features are a
    pair: "interleaved" (the guide) or "half_split" (published Llama weights). Only the first `rotary_dim` = R features are
    turned where it is given. The tables of cos and sin, made in float64, grow as needed; ValueError for positions from 2⁵³ on.

    `scaling` stretches the context by s = factor:  {"type": "linear" | "ntk" | "yarn", "factor": s, …}
        linear    θ / s                                                   (position interpolation, arXiv 2306.15595)
        ntk       base · s^(R / (R − 2)): the slowest pair is stretched by s, the fastest not     (arXiv 2309.00071, 3.1)
        yarn      θ γ + (θ / s)(1 − γ), cos and sin times 0.1 ln s + 1    (arXiv 2309.00071, 3.2 to 3.4); see `_yarn`
    """

    def __init__(self, head_dim, base=10000.0, layout="interleaved", max_seq_len=2048, scaling=None, rotary_dim=None):
        super().__init__()
        check_layout("RotaryEmbedding", layout)
        _check_rows("RotaryEmbedding", max_seq_len)
        if not 1 < base < math.inf:
            raise ValueError(f"RotaryEmbedding: base must be a number above 1: pair i turns by base^(−2i/R) per position; got {base}")
        self.head_dim, self.rotary_dim = head_dim, check_rotary_dim("RotaryEmbedding", head_dim, rotary_dim)
        self.base, self.layout, self.max_seq_len, self.scaling = base, layout, max_seq_len, scaling
        self._frequencies, self._amplitude = scaled_frequencies(self.rotary_dim, base, scaling)
        self._tables = {}                       # (dtype, device) → cos, sin; no buffers: they are not saved, and not rounded by .half()
        self._last_checked = None, 0, 0         # positions, their writes, their end: all layers share them, and a GPU is asked once

    def forward(self, x, position_ids=None, offset=0):
        """x turned. The first token stands at `offset` (the length of the cache), or each where position_ids says."""
        return rotary(x, *self.turns(x, position_ids, offset), self.layout)

    def turns(self, x, position_ids=None, offset=0):
        """(cos, sin) of the angles by which the pairs of each token are turned.    [T, R/2], or [B, 1, T, R/2] for ids [B, T]"""
        require_tensors("RotaryEmbedding", x=x)
        if x.ndim < 2 or x.shape[-1] != self.head_dim:
            raise ValueError(f"RotaryEmbedding: x must be [B, H, T, Dh] with Dh={self.head_dim}, got {tuple(x.shape)}; split the heads "
                             f"first")
        if position_ids is None:
            return self._rows_from(x, offset)
        if offset:
            raise ValueError(f"RotaryEmbedding: position_ids are absolute positions; pass them or offset={offset}, not both")
        positions = checked_positions("RotaryEmbedding", x, position_ids)
        return self._rows_at(x, positions.array, self._end_of(positions))

    def _rows_from(self, x, offset):
        """cos and sin of T positions in a row, as views of the tables.    [T, R/2]"""
        if not isinstance(offset, (int, np.integer)) or offset < 0:
            raise ValueError(f"RotaryEmbedding: offset must be a whole number ≥ 0, the position of the first token, got {offset!r}")
        end = _checked_end(int(offset) + x.shape[-2])
        if end > LONGEST_TABLE:
            return self._turns(x, array_module(x.array).arange(offset, end))
        return tuple(constant(table[offset:end]) for table in self._table(x, end))

    def _end_of(self, positions):
        """The largest position + 1; ValueError for negative ones."""
        array, writes, end = self._last_checked
        if array is not positions.array or writes != positions.version.written:
            end = _checked_end(_end_of_positions(positions.array))
            self._last_checked = positions.array, positions.version.written, end
        return end

    def _rows_at(self, x, positions, end):
        """cos and sin of the given positions, with an axis for the heads where every row has its own.    [T, R/2], [B, 1, T, R/2]"""
        if positions.ndim == 2:
            positions = positions.reshape(positions.shape[0], *(1,) * (x.ndim - 3), positions.shape[1])
        if end > LONGEST_TABLE:
            return self._turns(x, positions)
        return tuple(constant(table[positions]) for table in self._table(x, end))

    def _table(self, x, length):
        """(cos, sin) of positions 0 … at least length − 1, for the dtype and device of x."""
        key = str(at_least_float32(x.array[:0]).dtype), str(x.device)
        known = self._tables.get(key)
        if known is None or len(known[0]) < length:
            rows = max(min(self.max_seq_len, LONGEST_TABLE), 1 << max(length - 1, 0).bit_length())    # doubled: decoding adds one at a time
            known = self._tables[key] = tuple(t.array for t in self._turns(x, array_module(x.array).arange(rows)))
        return known

    def _turns(self, x, positions):
        """cos and sin of positions [...] times the frequencies, times the amplitude.    [..., R/2]"""
        xp, dtype = array_module(x.array), at_least_float32(x.array[:0]).dtype
        angles = positions[..., None] * to_device(self._frequencies, x.device)
        return tuple(constant((f(angles) * self._amplitude).astype(dtype)) for f in (xp.cos, xp.sin))

    def extra_repr(self):
        shown = f"{self.head_dim}, base={self.base}, layout={self.layout!r}"
        shown += f", rotary_dim={self.rotary_dim}" if self.rotary_dim != self.head_dim else ""
        return shown + (f", scaling={self.scaling}" if self.scaling else "")


LONGEST_TABLE = 1 << 20                         # beyond it cos and sin are computed for the positions at hand, and not kept

def _end_of_positions(positions):
    if not positions.size:
        return 0
    low, high = to_device(array_module(positions).stack([positions.min(), positions.max()]), CPU)
    if low < 0:
        raise ValueError(f"RotaryEmbedding: positions must be ≥ 0, got {low}; does a padded row count from below 0? clamp it: its tokens "
                         f"are not seen")
    return int(high) + 1


def _checked_end(end):
    """end, the number of positions up to the last; ValueError where float64, which angles are made in, no longer tells all apart."""
    if end > 1 << 53:
        raise ValueError(f"RotaryEmbedding: position {end - 1} is not below 2**53, from where on float64 does not tell all apart; "
                         f"only differences of positions matter: subtract the smallest")
    return end


SCALINGS = {"linear": (), "ntk": (), "yarn": ("original_max_seq_len", "alpha", "beta", "ramp", "attention_factor")}


def scaled_frequencies(R, base, scaling):
    """(θ [R/2], the factor on cos and sin) after stretching; see `RotaryEmbedding`. ValueError for a scaling that is not one."""
    if scaling is None:
        return _frequencies(R, base), 1.0
    kind, s, options = _checked_scaling(scaling)
    if kind == "linear":
        return _frequencies(R, base) / s, 1.0
    if kind == "ntk":
        if R == 2:
            raise ValueError("RotaryEmbedding: scaling 'ntk' changes the base, on which a single pair (R = 2) does not depend; use "
                             "'linear'")
        return _frequencies(R, base * s ** (R / (R - 2))), 1.0
    return _yarn(R, base, s, **options)


def _yarn(R, base, s, original_max_seq_len, alpha=1.0, beta=32.0, ramp="turns", attention_factor=None):
    """YaRN: pairs that turn often within the original context L keep their speed, those that turn less than once are stretched.

    r_i = L θ_i / 2π turns;  γ = 0 for r < α, 1 for r > β;  between them it rises evenly in r (ramp="turns", the paper), or
    evenly in i between the rounded places of β and α (ramp="index": the authors' code, and published weights).
    Cos and sin times 0.1 ln s + 1: every score is multiplied by its square, the paper's 1/t.
    """
    theta = _frequencies(R, base)
    if ramp == "turns":
        gamma = np.clip((original_max_seq_len * theta / (2 * math.pi) - alpha) / (beta - alpha), 0, 1)
    else:
        low, high = (R * math.log(original_max_seq_len / (r * 2 * math.pi)) / (2 * math.log(base)) for r in (beta, alpha))
        low, high = max(math.floor(low), 0), min(math.ceil(high), R - 1)
        gamma = 1 - np.clip((np.arange(R // 2) - low) / max(high - low, 1e-3), 0, 1)
    amplitude = 0.1 * math.log(s) + 1 if attention_factor is None else attention_factor
    return theta * gamma + theta / s * (1 - gamma), amplitude


def _checked_scaling(scaling):
    """(type, factor, the other options) of a scaling dict."""
    kind = scaling.get("type") if isinstance(scaling, dict) else None
    if kind not in SCALINGS:
        raise ValueError(f"RotaryEmbedding: scaling must be a dict with 'type' one of {', '.join(map(repr, SCALINGS))} and 'factor', got "
                         f"{scaling!r}")
    options = {name: value for name, value in scaling.items() if name not in ("type", "factor")}
    if set(options) - set(SCALINGS[kind]):
        raise ValueError(f"RotaryEmbedding: scaling {kind!r} takes no {sorted(set(options) - set(SCALINGS[kind]))}; it takes "
                         f"{['factor', *SCALINGS[kind]]}")
    factor = scaling.get("factor")
    if not isinstance(factor, (int, float)) or not 1 <= factor < math.inf:
        raise ValueError(f"RotaryEmbedding: scaling needs 'factor', how many times longer the context becomes, a number ≥ 1; got "
                         f"{factor!r}")
    if kind == "yarn":
        _check_yarn(**options)
    return kind, factor, options


def _check_yarn(original_max_seq_len=None, alpha=1.0, beta=32.0, ramp="turns", attention_factor=None):
    if not isinstance(original_max_seq_len, int) or original_max_seq_len <= 0:
        raise ValueError(f"RotaryEmbedding: scaling 'yarn' needs 'original_max_seq_len', the context that the model was trained with, "
                         f"got {original_max_seq_len!r}")
    if not 0 < alpha < beta:
        raise ValueError(f"RotaryEmbedding: scaling 'yarn' needs 0 < alpha < beta (numbers of turns), got {alpha} and {beta}")
    if ramp not in ("turns", "index"):
        raise ValueError(f"RotaryEmbedding: scaling 'yarn' has ramp 'turns' (the paper) or 'index' (published weights), got {ramp!r}")


# --- added to the scores ----------------------------------------------------------------------------------------------

class ALiBi(Module):
    """bias = −m_h · max(i − j, 0), or −m_h · |i − j| if bidirectional.    i: [Tq] or [B, Tq]  j: [Tk] or [B, Tk]    (guide 18.3)

    Returns [H, Tq, Tk], or [B, H, Tq, Tk]. Nothing is learned; `slopes` [H] is a buffer that is not saved. The bias does not
    hide the future: where j > i it is 0, the largest value that there is. The causal mask is needed as ever.
    """

    def __init__(self, num_heads, bidirectional=False):
        super().__init__()
        self.num_heads, self.bidirectional = num_heads, bidirectional
        self.register_buffer("slopes", alibi_slopes(num_heads), persistent=False)

    def forward(self, q_positions, k_positions):
        back = _steps_back("ALiBi", q_positions, k_positions)
        distance = back.abs() if self.bidirectional else back.clamp_min(0)
        dtype = self.slopes.dtype               # the product in float32: float16 has no whole numbers beyond 2048
        slopes = constant(at_least_float32(self.slopes.array))[:, None, None]
        return (slopes * -distance.unsqueeze(-3)).to(dtype)

    def extra_repr(self):
        return f"{self.num_heads}, bidirectional={self.bidirectional}"


def alibi_slopes(num_heads):
    """m_h = 2^(−8h/n), h = 1 … n, for n heads.    [n]         (arXiv 2108.12409)

    The recipe is for powers of two. For any other n: the slopes of the power of two below it, then every other one of those
    for the power above it.
    """
    if not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads must be a whole number ≥ 1, got {num_heads!r}")

    def of_power(n):
        return 2.0 ** (-8 * np.arange(1, n + 1) / n)
    power = 1 << num_heads.bit_length() - 1
    slopes = np.concatenate([of_power(power), of_power(2 * power)[0::2][:num_heads - power]])
    return creation.tensor(slopes, dtype=get_default_dtype())


class T5RelativeBias(Module):
    """bias[h, i, j] = w[bucket(j − i), h], w learned.    w: [num_buckets, H]   i, j, bias: as in ALiBi    (arXiv 1910.10683; guide 18.3)

    Near distances have a bucket each, farther ones share buckets that widen with the logarithm, and all from max_distance on
    the last. Bidirectional: half of the buckets is for keys after the query; else all of those keys share bucket 0, and the
    causal mask is needed as ever. All layers may share one module.
    """

    def __init__(self, num_heads, num_buckets=32, max_distance=128, bidirectional=True):
        super().__init__()
        _check_buckets(num_buckets, max_distance, bidirectional)
        self.num_heads, self.num_buckets, self.max_distance, self.bidirectional = num_heads, num_buckets, max_distance, bidirectional
        self.table = Embedding(num_buckets, num_heads)
        init.normal_(self.table.weight, std=0.02)

    def forward(self, q_positions, k_positions):
        steps = -_steps_back("T5RelativeBias", q_positions, k_positions)
        buckets = t5_bucket(steps, self.num_buckets, self.max_distance, self.bidirectional)
        return self.table(buckets).movedim(-1, -3)

    def extra_repr(self):
        return f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def _check_buckets(num_buckets, max_distance, bidirectional):
    if not (isinstance(num_buckets, Integral) and isinstance(max_distance, Integral)):
        raise TypeError(f"T5RelativeBias: num_buckets and max_distance must be whole numbers, got {num_buckets!r} and {max_distance!r}")
    near = num_buckets // (4 if bidirectional else 2)
    if near < 1 or num_buckets % (2 if bidirectional else 1) or max_distance <= near:
        raise ValueError(f"T5RelativeBias: num_buckets must be even and ≥ 4 if bidirectional, else ≥ 2, and max_distance beyond the "
                         f"buckets of one distance each ({near}), got num_buckets={num_buckets}, max_distance={max_distance}")


def t5_bucket(steps, num_buckets=32, max_distance=128, bidirectional=True):
    """The bucket of each j − i in `steps`, whole numbers of any shape.      (T5, arXiv 1910.10683, 2.1)

    d = i − j if that is > 0 (bidirectional: |i − j|), n buckets for a direction, e = n / 2 of them exact:
    d < e: d;    else e + ⌊ln(d / e) / ln(max_distance / e) · (n − e)⌋, at most n − 1;    j > i: + n if bidirectional
    """
    _check_buckets(num_buckets, max_distance, bidirectional)
    _check_ids("t5_bucket: steps", steps)
    steps = steps.array.astype(np.int64)        # in narrower numbers −steps and the buckets beyond them may not fit
    xp = array_module(steps)
    n = num_buckets // 2 if bidirectional else num_buckets
    d = xp.abs(steps) if bidirectional else xp.maximum(-steps, 0)
    exact = n // 2
    far = exact + (xp.log(xp.maximum(d, exact) / exact) / math.log(max_distance / exact) * (n - exact)).astype(np.int64)
    buckets = xp.where(d < exact, d, xp.minimum(far, n - 1))
    return constant(buckets + (steps > 0) * n if bidirectional else buckets)


def _steps_back(op, q_positions, k_positions):
    """i − j for each query i and key j.    [Tq, Tk], or [B, Tq, Tk]"""
    for name, positions in ("q_positions", q_positions), ("k_positions", k_positions):
        _check_ids(f"{op}: {name}", positions)
        if positions.ndim not in (1, 2):
            raise ValueError(f"{op}: {name} must be [T] or [B, T], got {tuple(positions.shape)}")
    batches = {len(positions) for positions in (q_positions, k_positions) if positions.ndim == 2} - {1}
    if len(batches) > 1:
        raise ValueError(f"{op}: q_positions {tuple(q_positions.shape)} and k_positions {tuple(k_positions.shape)} must have one batch "
                         f"size")
    return q_positions.to(int64).unsqueeze(-1) - k_positions.to(int64).unsqueeze(-2)
