"""Attention in tiles: a piece of the scores is computed, used and forgotten. The same function as `Attention`, in memory O(T).

Softmax needs the maximum and the sum of a whole row, and the row is never there as a whole. The way out is the *online* softmax:
keep the maximum so far, the sum so far and the weighted values so far; where a tile brings a higher maximum, shrink the two
sums to it, then add. Forward keeps one number a row for backward, lse = ln Σ e^z: p = e^(z − lse) comes back tile by tile.
The arithmetic is the same (backward even computes z once more); what is saved is memory, and the way to it. Work is
saved only where a tile is not visited: beyond the band of a causal mask or a window, or where a mask leaves nothing.
"""
import math
import zlib
from functools import reduce
from operator import and_
from typing import NamedTuple

import numpy as np

from ..arguments import require_tensors
from ..autograd import Function, constant, no_grad, observing
from ..backend import CPU, array_module, at_least_float32, sum_to, to_device
from ..philox import keep_tile
from ._rows import MODERATE, dot_along
from .attention import _finite, _is_finite, _product, _swap


class Band(NamedTuple):
    """Who sees whom by position alone: query i stands at p = i + query_offset and sees the keys p − left ≤ j ≤ p + right.

    None is no limit. Causal: right = 0. The last W keys: left = W − 1, right = 0. A radius r: left = right = r.
    """
    query_offset: int = 0
    left: int | None = None
    right: int | None = None

    def keys(self, rows, Tk):
        """The range of keys that some of the rows see."""
        first = 0 if self.left is None else rows.start + self.query_offset - self.left
        end = Tk if self.right is None else rows.stop + self.query_offset + self.right
        return range(max(0, first), min(Tk, end))

    def allowed(self, rows, keys, xp):
        """bool [rows, keys]; None where each of the rows sees all of the keys."""
        if self.left is self.right is None:
            return None
        p, j = xp.arange(rows.start, rows.stop)[:, None] + self.query_offset, xp.arange(keys.start, keys.stop)
        parts = []
        if self.left is not None and keys.start < rows.stop - 1 + self.query_offset - self.left:
            parts.append(j >= p - self.left)
        if self.right is not None and keys.stop - 1 > rows.start + self.query_offset + self.right:
            parts.append(j <= p + self.right)
        return reduce(and_, parts) if parts else None


AT_ONCE = 1 << 17                       # scores that a CPU computes together, a tile of some heads: 512 KiB of float32, and there are two
HEADROOM = 8                            # e⁸: what a weight may be before m has to rise


class Plan(NamedTuple):
    """What is told to TiledAttention in plain values, and what backward does again instead of keeping it."""
    band: Band = Band()
    tile: tuple = (64, 64)              # rows and keys of a tile
    scale: float = 1.0
    dropout: tuple | None = None        # (key of philox.py, p): every tile of the keep-mask can be drawn again
    mod: object = None                  # mod(rows, keys) → bool array that broadcasts to [..., rows, keys]


class TiledAttention(Function):
    """out = (p · keep) v,  p = softmax(z) over what is visible,  z = scale · q kᵀ + bias      (guide 10.5; Dao et al. 2022, 2023)

    q: [..., Tq, Dh]   k: [..., Tk, Dh]   v: [..., Tk, Dv]   bias, allowed, valid: None or broadcast to [..., Tq, Tk]; the last two bool
    tile after tile    m' = max(m, max z),   l = e^(m − m') l + Σ e^(z − m'),   acc = e^(m − m') acc + (e^(z − m') · keep) v
    at the end         out = acc / l,   lse = m + ln l;   a row that sees nothing: 0 and −∞
    backward           p = e^(z − lse),   D = Σ dout · out,   dz = p · (keep · (dout vᵀ) − D);   dq, dk, dv, dbias as in `Attention`

    Kept: the inputs, out [..., Tq, Dv] and lse [..., Tq]. dbias is of bias's size, [..., Tq, Tk] where that is.
    """

    def forward(self, q, k, v, bias, allowed, valid, plan):
        self.plan, self.mod_codes = plan, {}
        inputs = q, k, v, bias, allowed, valid
        out, lse = self._forward(_Tiles(*inputs, plan, self.mod_codes))
        if not _is_finite(out):
            out, lse = self._forward(_Tiles(*inputs, plan, self.mod_codes, careful=True))
        self.saved = *inputs, out, lse
        return out.astype(q.dtype, copy=False)

    def _forward(self, tiles):
        self.scores_shape, self.visited, self.pairs = (tiles.lead, tiles.Tq, tiles.Tk), 0, 0
        (out, lse), k_1 = tiles.empty_results(), _beside(tiles.k, 1)
        for rows in tiles.rows():
            out[..., rows.start:rows.stop, :], lse[..., rows.start:rows.stop, :] = self._online_softmax(tiles, rows, k_1)
        return out, lse

    def _online_softmax(self, tiles, rows, k_1):
        """(out, lse) of some rows: what they see of each tile of keys, one after the other. A product subtracts: [q, −m] [k, 1]ᵀ."""
        xp, q = tiles.xp, _rows(tiles.q, rows) * tiles.scale
        acc, m = tiles.empty_results(len(rows))
        l, q_t = xp.zeros_like(m), _transposed(_beside(q, xp.zeros_like(m)))
        for tile in tiles.visits(rows):
            for heads in tiles.heads:
                self._add_keys(tiles, tile.of(heads), *(_heads(x, heads) for x in (q_t, k_1, tiles.v, m, l, acc)))
            self.visited, self.pairs = self.visited + 1, self.pairs + len(rows) * len(tile.keys)
        acc /= xp.where(l == 0, 1, l)
        return acc, m + xp.log(l)

    def _add_keys(self, tiles, tile, q_t, k_1, v, m, l, acc):
        """What the keys of one tile do to m, l and acc. m waits until some z is far above: near the maximum, any m gives the same out."""
        xp, k_1 = tiles.xp, _rows(k_1, tile.keys)
        z = tiles.scores(tile, k_1, q_t) if tiles.takes_off(q_t, m) else None         # less m
        if z is None or z.max() > tiles.headroom:
            z = tiles.scores(tile, k_1[..., :-1], q_t[..., :-1, :])
            higher = xp.maximum(m, z.max(axis=-1, keepdims=True))
            shift = _finite(higher)
            shrink = xp.exp(m - shift)
            l *= shrink
            acc *= shrink
            z -= shift
            m[...] = higher
            tiles.take_off(q_t, shift)
        p = xp.exp(z, out=z)
        l += (p @ xp.ones(len(tile.keys), tiles.dtype))[..., None]
        keep = tiles.keep(tile)
        if keep is not None:
            p *= keep
        acc += _product(p, _rows(v, tile.keys), tile.blocked)

    def backward(self, dout):
        *inputs, out, lse = self.saved
        dout = at_least_float32(dout)
        given = dout, _finite(lse), dot_along(dout, out, -1)
        gradients = self._gradients(_Tiles(*inputs, self.plan, self.mod_codes), *given)
        if not _is_finite(*gradients):
            gradients = self._gradients(_Tiles(*inputs, self.plan, self.mod_codes, careful=True), *given)
        return tuple(gradients)

    def _gradients(self, tiles, dout, lse, D):
        """[dq, dk, dv, dbias]."""
        gradients = [tiles.xp.zeros(x.shape, tiles.dtype) if need else None for x, need in zip(self.saved[:4], self.needs)]
        for rows in tiles.rows():
            q, d = _rows(tiles.q, rows) * tiles.scale, _rows(dout, rows)
            parts = q, d, _transposed(q), _transposed(d), _rows(lse, rows), _rows(D, rows), tiles.k, tiles.v, *gradients
            for tile in tiles.visits(rows):
                for heads in tiles.heads:
                    self._add_gradients(tiles, tile.of(heads), *(_heads(x, heads) for x in parts))
        if gradients[0] is not None:
            gradients[0] *= tiles.scale
        return gradients

    def _add_gradients(self, tiles, tile, q, dout, q_t, dout_t, lse, D, k, v, dq, dk, dv, dbias):
        """What one tile adds to (dq / scale, dk, dv, dbias)."""
        (rows, keys, _, blocked, _), k = tile, _rows(k, tile.keys)
        p = tiles.scores(tile, k, q_t)
        p -= lse
        tiles.xp.exp(p, out=p)
        _fill(p, blocked, 0)
        keep = tiles.keep(tile)
        if dv is not None:
            kept = p if keep is None else p * keep
            _add(_rows(dv, keys), _product(_swap(kept), dout, _swap(blocked)))
        if dq is dk is dbias is None:
            return
        dz = tiles.product(1, _rows(v, keys), dout_t)
        if keep is not None:
            dz *= keep
        dz -= D
        dz *= p
        _fill(dz, blocked, 0)
        if dq is not None:
            _add(_rows(dq, rows), _product(dz, k, blocked))
        if dk is not None:
            _add(_rows(dk, keys), _product(_swap(dz), q, _swap(blocked)))
        if dbias is not None:
            _add(_tile(dbias, rows, keys), dz)


class _Tile(NamedTuple):
    """Some rows and keys of some heads."""
    rows: range
    keys: range
    added: object = None                # to the scores: bias + ln(allowed), and ln 0 = −∞
    blocked: object = None              # where 0 · NaN must not carry it out; told to the careful alone
    heads: tuple = ()                   # a slice of each leading axis

    def of(self, heads):
        return _Tile(self.rows, self.keys, _heads(self.added, heads), _heads(self.blocked, heads), heads)


class _Tiles:
    """The scores of one call a tile at a time: which there are, what is in them, and what is blocked.

    `careful`: a result was not finite, and NaN or inf in a blocked place may be the reason.
    """

    def __init__(self, q, k, v, bias, allowed, valid, plan, mod_codes, careful=False):
        self.xp, self.dtype = array_module(q), at_least_float32(q[..., :0, :]).dtype
        q, k, self.v = map(at_least_float32, (q, k, v))
        self.q, self.k, self.scale = q, k, self.dtype.type(plan.scale)
        self.bias, self.masks = bias, [m for m in (allowed, valid) if m is not None]
        self.plan, self.mod_codes, self.careful, self.headroom = plan, mod_codes, careful, 0 if careful else HEADROOM
        self.lead, self.Tq, self.Tk = np.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2]
        self.out_lead = np.broadcast_shapes(self.lead, v.shape[:-2])
        self.heads = _groups(self.lead, AT_ONCE // math.prod(plan.tile) if self.xp is np else math.prod(self.lead))
        self.memory = [self.xp.empty(0, self.dtype)] * 2

    def empty_results(self, Tq=None):
        """out of zeros and lse of −inf: what rows have before they have seen anything."""
        Tq = self.Tq if Tq is None else Tq
        out = self.xp.zeros((*self.out_lead, Tq, self.v.shape[-1]), self.dtype)
        return out, self.xp.full((*self.lead, Tq, 1), -np.inf, self.dtype)

    def rows(self):
        return _steps(range(self.Tq), self.plan.tile[0])

    def visits(self, rows):
        """Each tile in which one of the rows sees something, for all heads."""
        for keys in _steps(self.plan.band.keys(rows, self.Tk), self.plan.tile[1]):
            bias, allowed = None if self.bias is None else _tile(self.bias, rows, keys), self._allowed(rows, keys)
            if allowed is None or allowed.all():
                yield _Tile(rows, keys, bias)
            elif allowed.any():
                added = self.xp.log(allowed.astype(self.dtype, order="F"))
                yield _Tile(rows, keys, added if bias is None else added + bias, ~allowed if self.careful else None)

    def _allowed(self, rows, keys):
        """bool [..., rows, keys]; None where nothing is blocked."""
        allowed = [self.plan.band.allowed(rows, keys, self.xp), *(_tile(m, rows, keys) for m in self.masks)]
        if self.plan.mod is not None:
            allowed.append(self._asked(rows, keys))
        if self.bias is not None:
            allowed.append(_tile(self.bias, rows, keys) != -np.inf)
        allowed = [a for a in allowed if a is not None]
        return reduce(and_, allowed, self.xp.ones((len(rows), len(keys)), bool)) if allowed else None

    def _asked(self, rows, keys):
        """What the mod says of a tile; RuntimeError where backward is told another thing than forward was."""
        with no_grad(), observing(_ignore, alone=True):     # no step of the model: neither in its graph nor in its trace
            found = self.plan.mod(rows, keys)
        code = zlib.crc32(np.packbits(to_device(found, CPU)).tobytes())
        if self.mod_codes.setdefault((rows.start, keys.start), code) != code:
            raise RuntimeError(f"TiledAttention: in backward, mask_mod allows other keys of queries {rows.start} to {rows.stop - 1} than "
                               f"in forward; it is asked again, so what it reads must not be written to in between")
        return found

    def scores(self, tile, k, q_t):
        """z, −inf where blocked."""
        z = self.product(0, k, q_t)
        if tile.added is not None:
            z += tile.added
        _fill(z, tile.blocked, -np.inf)
        return z

    def take_off(self, q_t, shift):
        """From now on the product takes m off the scores: a row of q_t. Not a large m, beside which the scores would be rounded away."""
        q_t[..., -1:, :] = -_swap(self.xp.where(abs(shift) <= MODERATE, shift, np.nan))

    def takes_off(self, q_t, m):
        """Whether it does, in all rows. On a GPU the host would wait for the answer: there it never does."""
        return self.xp is np and bool((q_t[..., -1:, :] == -_swap(m)).all())

    def product(self, place, a, b):
        """(a b)ᵀ in memory that all tiles share, keys before rows: BLAS is up to a third faster on what follows than from rows first."""
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        size = math.prod(shape)
        if self.memory[place].size < size:
            self.memory[place] = self.xp.empty(size, self.dtype)
        return _swap(self.xp.matmul(a, b, out=self.memory[place][:size].reshape(shape)))

    def keep(self, tile):
        """What dropout multiplies the weights of a tile by, or None."""
        if self.plan.dropout is None:
            return None
        heads = [range(n)[here] for n, here in zip(self.lead, tile.heads)]
        first = sum(here.start * math.prod(self.lead[i + 1:]) for i, here in enumerate(heads))
        return draw_keep_tile(self.plan.dropout, [*map(len, heads)], tile.rows, tile.keys, self.dtype, self.xp, first)


def _ignore(*seen):
    """An observer that looks away."""


def draw_keep_tile(dropout, lead, rows, keys, dtype, xp=np, first=0):
    """[*lead, rows, keys] of the keep-mask: 0 with probability p, else 1/(1 − p). Heads are counted over all leading axes, from `first`."""
    key, p = dropout
    heads = range(first, first + math.prod(lead))
    return keep_tile(key, heads, rows, keys, p, dtype, xp).reshape(*lead, len(rows), len(keys))


def keep_mask(output):
    """The whole keep-mask, a tensor [..., Tq, Tk], by which attention in tiles has made `output`, for a look: dense given it is equal.

    ValueError where no TiledAttention with dropout is the last operation, reshapes aside.
    """
    require_tensors("keep_mask", output=output)
    node = output.node
    while node is not None and node.name == "Reshape":
        node = node.inputs[0]
    if not isinstance(node, TiledAttention) or node.plan.dropout is None:
        raise ValueError("keep_mask: expected the result of attention in tiles with dropout, in a graph (requires_grad), got "
                         f"{output.node!r}")
    lead, Tq, Tk = node.scores_shape
    return constant(draw_keep_tile(node.plan.dropout, lead, range(Tq), range(Tk), at_least_float32(output.array[..., :0, :]).dtype,
                                   array_module(output.array)))


# --- tiles ------------------------------------------------------------------------------------------------------------

def band_tiles(Tq, Tk, band, tile):
    """(rows, keys), two ranges, of each tile that a band touches, in the order of the visits."""
    return [(rows, keys) for rows in _steps(range(Tq), tile[0]) for keys in _steps(band.keys(rows, Tk), tile[1])]


def _steps(numbers, step):
    """A range cut at the multiples of step."""
    start = numbers.start
    while start < numbers.stop:
        end = min(numbers.stop, start // step * step + step)
        yield range(start, end)
        start = end


def _rows(x, rows):
    return x[..., rows.start:rows.stop, :]


def _groups(lead, most):
    """All heads in groups of at most so many neighbours: tuples of a slice for each leading axis."""
    if not lead:
        return [()]
    step = max(1, min(lead[-1], most))
    last = [slice(i, i + step) for i in range(0, lead[-1], step)] if lead[-1] != 1 else [slice(None)]
    return [(*before, here) for before in _groups(lead[:-1], most // step if step == lead[-1] else 1) for here in last]


def _heads(x, heads):
    """x [..., m, n] for some heads; an axis of size 1 stands for all."""
    if x is None or x.ndim < 3:
        return x
    pairs = list(zip(reversed(x.shape[:-2]), reversed(heads)))
    return x[(..., *(slice(None) if n == 1 else here for n, here in reversed(pairs)), slice(None), slice(None))]


def _transposed(x):
    return array_module(x).ascontiguousarray(_swap(x))


def _beside(x, column):
    """[x, column]: one feature more."""
    lead = np.broadcast_shapes(x.shape[:-1], getattr(column, "shape", ())[:-1])
    both = array_module(x).empty((*lead, x.shape[-1] + 1), x.dtype)
    both[..., :-1], both[..., -1:] = x, column
    return both


def _tile(x, rows, keys):
    """The part of x for a tile; an axis of size 1 stands for all."""
    part = x if x.ndim < 2 or x.shape[-2] == 1 else _rows(x, rows)
    return part if x.ndim < 1 or x.shape[-1] == 1 else part[..., keys.start:keys.stop]


def _add(total, part):
    """total += part, summed over the axes along which `total` was broadcast: heads that share a key add up here."""
    total += sum_to(part, total.shape)


def _fill(x, blocked, value):
    if blocked is not None:
        array_module(x).copyto(x, value, where=blocked)
