"""Mixture of experts: each token is computed by k of E networks, and by no other.       (guide 11.1)

    x [n, C] ─ dispatch ─→ rows [N, C], those of one expert together ─ the experts ─→ [N, C] ─ combine ─→ y [n, C]

Three steps, so that the experts may live elsewhere than the tokens. `plan_dispatch` says who stands where: a *pair* is one
token at one of its k ranks, a *row* a pair that an expert computes.
"""
from typing import NamedTuple

import numpy as np

from ..autograd import LOW, Function
from ..backend import CPU, array_module, at_least_float32, sum_rows, to_device
from ._rows import dot_along
from .linear import product


class Plan(NamedTuple):
    """Rows in the order of their experts; within one, those of rank 0 first, then rank 1, …, and each rank by token.

    pairs   [N]     of each row its pair: rank · n + token
    places  [n, k]  of each pair its row; N where it has none
    counts          E ints: rows of each expert
    wanted          E ints: pairs that chose it, of which those beyond its capacity have no row
    """
    pairs: object
    places: object
    counts: tuple
    wanted: tuple

    @property
    def tokens(self):
        """The token of each row."""
        return self.pairs % max(len(self.places), 1)


def plan_dispatch(experts, num_experts, capacity=None, valid_tokens=None):
    """The `Plan` for experts [n, k], arrays of ids. capacity: rows that one takes at most; valid_tokens [n]: the others have no row.

    A full expert drops what comes last in its order: higher ranks before lower ones, later tokens before earlier ones. On a
    GPU the host waits once, for `wanted`: the sizes of the products depend on it.
    """
    xp, (n, k) = array_module(experts), experts.shape
    chosen = experts.T.reshape(-1)                                      # [k n]
    if valid_tokens is not None:
        chosen = xp.where(xp.concatenate([valid_tokens] * k), chosen, num_experts)      # behind all experts
    order = chosen.argsort(kind="stable")
    wanted = to_device((chosen == xp.arange(num_experts)[:, None]).sum(axis=1), CPU).tolist()
    counts = wanted if capacity is None else [min(w, capacity) for w in wanted]
    starts = np.cumsum([0, *wanted]).tolist()
    pairs = xp.concatenate([order[:0], *(order[start:start + count] for start, count in zip(starts, counts))])
    places = xp.full(n * k, len(pairs), dtype=np.int64)
    places[pairs] = xp.arange(len(pairs))
    return Plan(pairs, places.reshape(k, n).T, tuple(counts), tuple(wanted))


def _reachable(rows, places):
    """The rows, and behind the last one the zeros that a pair without a row finds there."""
    if len(rows) == places.size:
        return rows
    xp = array_module(rows)
    return xp.concatenate([rows, xp.zeros((1, rows.shape[1]), dtype=rows.dtype)])


class Dispatch(Function):
    """rows_i = x_t,  t the token of row i.    x: [n, C]  rows: [N, C]

    dx_t = Σ_r drows[places[t, r]]: each token fetches from its k rows, which is faster than adding each row to its token.
    """

    def forward(self, x, plan):
        self.saved = plan.places
        return x.take(plan.tokens, axis=0)

    def backward(self, drows):
        places = self.saved
        rows = _reachable(at_least_float32(drows), places)
        dx = rows.take(places[:, 0], axis=0)
        for rank in range(1, places.shape[1]):
            dx += rows.take(places[:, rank], axis=0)
        return dx


class Combine(Function):
    """y_t = Σ_r g[t, r] · rows[places[t, r]].    rows: [N, C]  g: [n, k]  y: [n, C]; a pair without a row adds nothing

    drows_i = g_i · dy_t,  dg[t, r] = dy_t · rows[places[t, r]].        Sums of half precision in float32.
    """

    def forward(self, rows, g, plan):
        self.saved, self.plan = (rows if self.needs[1] else None, g), plan
        rows32 = _reachable(at_least_float32(rows), plan.places)
        g = g.astype(rows32.dtype, copy=False)
        y = array_module(rows).zeros((len(g), rows.shape[1]), dtype=rows32.dtype)
        for rank in range(g.shape[1]):
            part = rows32.take(plan.places[:, rank], axis=0)
            part *= g[:, rank, None]
            y += part
        return y.astype(rows.dtype, copy=False)

    def backward(self, dy):
        rows, g = self.saved
        dy, pairs, places = at_least_float32(dy), self.plan.pairs, self.plan.places
        drows = dg = None
        if self.needs[0]:
            drows = dy.take(self.plan.tokens, axis=0)
            drows *= g.T.reshape(-1)[pairs].astype(dy.dtype, copy=False)[:, None]
        if self.needs[1]:
            rows32 = _reachable(at_least_float32(rows), places)
            dg = [dot_along(dy, rows32.take(places[:, rank], axis=0), -1) for rank in range(places.shape[1])]
            dg = array_module(dy).concatenate(dg, axis=1)
        return drows, dg


class GroupedLinear(Function):
    """y = x W_eᵀ + b_e for the rows of each expert e.    x: [N, in]  W: [E, out, in]  b: [E, out] or None  y: [N, out]

    dx = dy W_e,  dW_e = dyᵀ x,  db_e = Σ dy, over the rows of e. One GEMM an expert each; nothing is padded or moved.
    """
    autocast = LOW

    def forward(self, x, w, b, counts):
        if any(p is not None and p.dtype != x.dtype for p in (w, b)):
            raise RuntimeError(f"grouped_linear: input {x.dtype}, weight {w.dtype}"
                               f"{'' if b is None else f' and bias {b.dtype}'} must have one dtype; convert with .to(dtype)")
        self.saved, self.groups = (x if self.needs[1] else None, w), groups(counts)
        y = array_module(x).empty((len(x), w.shape[1]), dtype=x.dtype)
        for e, rows in enumerate(self.groups):
            _multiply(x[rows], w[e].T, y[rows])
            if b is not None:
                y[rows] += b[e]
        return y

    def backward(self, dy):
        x, w = self.saved
        xp, (E, out, _) = array_module(dy), w.shape
        dx = xp.empty((len(dy), w.shape[2]), dtype=dy.dtype) if self.needs[0] else None
        dw = xp.empty_like(w) if self.needs[1] else None
        db = xp.empty((E, out), dtype=dy.dtype) if self.needs[2] else None
        for e, rows in enumerate(self.groups):
            if dx is not None:
                _multiply(dy[rows], w[e], dx[rows])
            if dw is not None:
                _multiply(dy[rows].T, x[rows], dw[e])
            if db is not None:
                db[e] = sum_rows(dy[rows])
        return dx, dw, db


def groups(counts):
    """The slice of each expert's rows."""
    ends = np.cumsum(counts).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts)]


def _multiply(a, b, y):
    """y = a b, written to its place. Half precision by way of float32, as in `product`."""
    if y.dtype.itemsize < 4:
        y[...] = product(a, b)
    else:
        array_module(y).matmul(a, b, out=y)


# --- the functions ----------------------------------------------------------------------------------------------------

def dispatch(input, plan):
    """Rows [N, C] in the order of their experts, of tokens [n, C]."""
    if input.ndim != 2 or len(input.array) != len(plan.places):
        raise RuntimeError(f"dispatch: input must be [n, C] for the n = {len(plan.places)} tokens of the plan, got {tuple(input.shape)}; "
                           f"reshape to (-1, C) first")
    return Dispatch.apply(input, plan)


def combine(input, weight, plan):
    """[n, C]: for each token the sum of its rows of input [N, C], times its weight [n, k]."""
    if input.ndim != 2 or len(input.array) != len(plan.pairs):
        raise RuntimeError(f"combine: input must be [N, C] for the N = {len(plan.pairs)} rows of the plan, got {tuple(input.shape)}")
    if weight.array.shape != plan.places.shape:
        raise RuntimeError(f"combine: weight must have a number for each of the {plan.places.shape} pairs, got {tuple(weight.shape)}")
    return Combine.apply(input, weight, plan)


def grouped_linear(input, weight, bias, counts):
    """`linear` with matrix e for the next counts[e] rows of input.    input: [N, in]  weight: [E, out, in]  bias: [E, out] or None"""
    x, w, b = input.array, weight.array, None if bias is None else bias.array
    if w.ndim != 3 or x.ndim != 2 or x.shape[1] != w.shape[2]:
        raise RuntimeError(f"grouped_linear: input {x.shape} and weight {w.shape} do not fit: weight is [E, out, in], and input [N, in]")
    if b is not None and b.shape != w.shape[:2]:
        raise RuntimeError(f"grouped_linear: bias {b.shape} must be {w.shape[:2]}, one number for each output of weight {w.shape}")
    if len(counts) != len(w) or sum(counts) != len(x) or min(counts, default=0) < 0:
        raise RuntimeError(f"grouped_linear: counts must say how many of the {len(x)} rows each of the {len(w)} experts has, got "
                           f"{list(counts)}")
    return GroupedLinear.apply(input, weight, bias, tuple(counts))
