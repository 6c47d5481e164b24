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
from ._rows import dot_along, max_along, sum_along
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
        self.plan, self.mod_codes, self.visited, self.pairs = plan, {}, 0, 0
        tiles = _Tiles(q, k, v, bias, (allowed, valid), plan, self.mod_codes)
        self.scores_shape = tiles.lead, tiles.Tq, tiles.Tk
        out, lse = tiles.empty_results()
        for rows in tiles.rows():
            out[..., rows.start:rows.stop, :], lse[..., rows.start:rows.stop, :] = self._online_softmax(tiles, rows)
        self.saved = q, k, v, bias, allowed, valid, out, lse
        return out.astype(q.dtype, copy=False)

    def _online_softmax(self, tiles, rows):
        """(out, lse) of some rows: what they see of each tile of keys, one after the other."""
        xp = tiles.xp
        out, top = tiles.empty_results(len(rows))
        total = xp.zeros_like(top)
        for keys, blocked in tiles.visits(rows):
            z = tiles.scores(rows, keys)
            _fill(z, blocked, -np.inf)
            higher = xp.maximum(top, max_along(z, -1))
            shift = _finite(higher)
            shrink = xp.exp(top - shift)
            z -= shift
            p = xp.exp(z, out=z)
            total = total * shrink + sum_along(p, -1)
            keep = tiles.keep(rows, keys)
            if keep is not None:
                p *= keep
            out = out * shrink + tiles.product(p, _rows(tiles.v, keys), blocked)
            top = higher
            self.visited, self.pairs = self.visited + 1, self.pairs + len(rows) * len(keys)
        return out / xp.where(total == 0, 1, total), top + xp.log(total)

    def backward(self, dout):
        q, k, v, bias, allowed, valid, out, lse = self.saved
        dout = at_least_float32(dout)
        tiles = _Tiles(q, k, v, bias, (allowed, valid), self.plan, self.mod_codes, dout)
        lse, D = _finite(lse), dot_along(dout, out, -1)
        gradients = [tiles.xp.zeros(x.shape, tiles.dtype) if need else None for x, need in zip((q, k, v, bias), self.needs)]
        for rows in tiles.rows():
            parts = [_rows(x, rows) for x in (tiles.q, dout, lse, D)]
            for keys, blocked in tiles.visits(rows):
                self._add_gradients(gradients, tiles, rows, keys, blocked, *parts)
        if gradients[0] is not None:
            gradients[0] *= self.plan.scale
        return tuple(gradients)

    def _add_gradients(self, gradients, tiles, rows, keys, blocked, q, dout, lse, D):
        """What one tile adds to (dq / scale, dk, dv, dbias). q is scaled."""
        dq, dk, dv, dbias = gradients
        p = tiles.scores(rows, keys)
        p -= lse
        tiles.xp.exp(p, out=p)
        _fill(p, blocked, 0)
        keep = tiles.keep(rows, keys)
        if dv is not None:
            kept = p if keep is None else p * keep
            _add(_rows(dv, keys), tiles.product(_swap(kept), dout, _swap(blocked)))
        if dq is dk is dbias is None:
            return
        dz = dout @ _swap(_rows(tiles.v, keys))
        if keep is not None:
            dz *= keep
        dz -= D
        dz *= p
        _fill(dz, blocked, 0)
        if dq is not None:
            _add(_rows(dq, rows), tiles.product(dz, _rows(tiles.k, keys), blocked))
        if dk is not None:
            _add(_rows(dk, keys), tiles.product(_swap(dz), q, _swap(blocked)))
        if dbias is not None:
            _add(_tile(dbias, rows, keys), dz)


class _Tiles:
    """The scores of one call a tile at a time: which there are, what is in them, and what is blocked.

    `careful`: NaN or inf stands somewhere, and 0 · NaN must not carry it out of a blocked place.
    """

    def __init__(self, q, k, v, bias, masks, plan, mod_codes, dout=None):
        self.xp, self.dtype = array_module(q), at_least_float32(q[..., :0, :]).dtype
        self.q, self.k, self.v = at_least_float32(q) * self.dtype.type(plan.scale), at_least_float32(k), at_least_float32(v)
        self.bias, self.masks = bias, [m for m in masks if m is not None]
        self.plan, self.mod_codes = plan, mod_codes
        self.lead, self.Tq, self.Tk = np.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2]
        self.careful = not all(_is_finite(x) for x in (self.q, self.k, self.v, dout) if x is not None)

    def empty_results(self, Tq=None):
        """out of zeros and lse of −inf: what rows have before they have seen anything."""
        Tq = self.Tq if Tq is None else Tq
        out = self.xp.zeros((*np.broadcast_shapes(self.lead, self.v.shape[:-2]), Tq, self.v.shape[-1]), self.dtype)
        return out, self.xp.full((*self.lead, Tq, 1), -np.inf, self.dtype)

    def rows(self):
        return _steps(range(self.Tq), self.plan.tile[0])

    def visits(self, rows):
        """(keys, blocked) of each tile in which one of the rows sees something; blocked is None where each sees everything."""
        for keys in _steps(self.plan.band.keys(rows, self.Tk), self.plan.tile[1]):
            blocked = self._blocked(rows, keys)
            if blocked is None or not blocked.all():
                yield keys, blocked

    def _blocked(self, rows, keys):
        allowed = [self.plan.band.allowed(rows, keys, self.xp), *(_tile(m, rows, keys) for m in self.masks)]
        if self.plan.mod is not None:
            allowed.append(self._asked(rows, keys))
        if self.bias is not None:
            allowed.append(_tile(self.bias, rows, keys) != -np.inf)
        allowed = [a for a in allowed if a is not None]
        blocked = ~reduce(and_, allowed) if allowed else None
        return blocked if blocked is not None and blocked.any() else None

    def _asked(self, rows, keys):
        """What the mod says of a tile; RuntimeError where backward is told another thing than forward was."""
        with no_grad(), observing(_ignore, alone=True):     # no step of the model: neither in its graph nor in its trace
            found = self.plan.mod(rows, keys)
        code = zlib.crc32(np.packbits(to_device(found, CPU)).tobytes())
        if self.mod_codes.setdefault((rows.start, keys.start), code) != code:
            raise RuntimeError(f"TiledAttention: in backward, mask_mod allows other keys of queries {rows.start} to {rows.stop - 1} than "
                               f"in forward; it is asked again, so what it reads must not be written to in between")
        return found

    def scores(self, rows, keys):
        z = _rows(self.q, rows) @ _swap(_rows(self.k, keys))
        if self.bias is not None:
            z += _tile(self.bias, rows, keys)
        return z

    def keep(self, rows, keys):
        """What dropout multiplies the weights of a tile by, or None."""
        if self.plan.dropout is None:
            return None
        return draw_keep_tile(self.plan.dropout, self.lead, rows, keys, self.dtype, self.xp)

    def product(self, a, b, blocked):
        """a @ b, where a is 0 in blocked places."""
        if blocked is None or not self.careful:
            return a @ b
        return _product(a, b, self.xp.broadcast_to(blocked, a.shape))


def _ignore(*seen):
    """An observer that looks away."""


def draw_keep_tile(dropout, lead, rows, keys, dtype, xp=np):
    """[*lead, rows, keys] of the keep-mask: 0 with probability p, else 1/(1 − p). Head h is the h-th of all leading axes."""
    key, p = dropout
    heads = range(math.prod(lead))
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
