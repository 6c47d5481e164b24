"""What the flash attention kernels are tested on, and the definition that they are compared with, in float64."""
from typing import NamedTuple

import numpy as np

from tinygrad_tf.ops.flash_attention import Band

FULL, CAUSAL = Band(), Band(right=0)
OUTPUTS = ("o", "lse", "dq", "dk", "dv")


class Case(NamedTuple):
    Tq: int
    Tk: int
    Dh: int = 32
    band: Band = FULL
    padding: bool = False                       # the last third of the keys of batch 0 is padding, and in batch 1 all are
    heads: tuple = (2, 1)                       # H, Hkv
    B: int = 2
    Dv: int | None = None

    @property
    def name(self):
        sizes = f"Tq {self.Tq}, Tk {self.Tk}, Dh {self.Dh}" + (f", Dv {self.Dv}" if self.Dv else "")
        band = ", ".join(f"{n} {x}" for n, x in self.band._asdict().items() if x not in (None, 0) or (n == "right" and x == 0))
        return ", ".join([sizes, f"heads {self.heads}", band or "no band"] + ["padding"] * self.padding)

    @property
    def scale(self):
        return 1 / np.sqrt(self.Dh)


class Inputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_o: np.ndarray
    valid_tokens: np.ndarray | None


def inputs(case, dtype=np.float32):
    """The same ones every time."""
    random, (H, Hkv), Dv = np.random.default_rng(case.Tq * 1000 + case.Tk), case.heads, case.Dv or case.Dh

    def normal(heads, rows, columns):
        return random.standard_normal((case.B, heads, rows, columns), dtype=np.float32).astype(dtype)
    arrays = normal(H, case.Tq, case.Dh), normal(Hkv, case.Tk, case.Dh), normal(Hkv, case.Tk, Dv), normal(H, case.Tq, Dv)
    real = np.array([2 * case.Tk // 3, 0])[:case.B]
    return Inputs(*arrays, np.arange(case.Tk) < real[:, None] if case.padding else None)


def allowed(case, valid_tokens):
    """bool [B, 1, Tq, Tk]"""
    p, j = np.arange(case.Tq)[:, None] + case.band.query_offset, np.arange(case.Tk)
    left, right = (np.inf if n is None else n for n in (case.band.left, case.band.right))
    seen = np.broadcast_to((p - left <= j) & (j <= p + right), (case.B, 1, case.Tq, case.Tk))
    return seen if valid_tokens is None else seen & valid_tokens[:, None, None]


def reference(case, given):
    """(o, lse, dq, dk, dv) by the definition, with the whole matrix of scores."""
    q, k, v, d_o = (x.astype(np.float64) for x in given[:4])
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    z = np.where(allowed(case, given.valid_tokens), case.scale * q @ k.swapaxes(-1, -2), -np.inf)
    top = z.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isinf(top), 0, top)
    total = np.exp(z - top).sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p = np.exp(z - top) / np.where(total == 0, 1, total)
    o = p @ v
    ds = case.scale * p * (d_o @ v.swapaxes(-1, -2) - (d_o * o).sum(-1, keepdims=True))
    dk, dv = ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d_o

    def summed(x):
        return x.reshape(case.B, -1, group, case.Tk, x.shape[-1]).sum(2)
    return o, lse, ds @ k, summed(dk), summed(dv)


def errors(got, want):
    """max|Δ| / max|reference| of each output, max|Δ| where the reference is 0; infinite where NaN or another infinity stands in got."""
    found = []
    for a, b in zip(got, want):
        if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)) or not (a[~np.isfinite(b)] == b[~np.isfinite(b)]).all():
            found.append(np.inf)
            continue
        a, b = np.where(np.isfinite(b), a, 0), np.where(np.isfinite(b), b, 0)
        size = np.abs(b).max(initial=0)
        found.append(np.abs(a - b).max(initial=0) / (size if size > 1e-6 else 1))
    return found
