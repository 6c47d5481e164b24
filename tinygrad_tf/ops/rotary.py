"""Rotary position embedding: pairs of features are turned by an angle that grows with the position (guide 10.1).

Which two features are a pair is the layout: `interleaved` takes (0, 1), (2, 3), …; `half_split` takes (0, R/2), (1, R/2 + 1), …
"""
import numpy as np

from ..arguments import require_tensors
from ..autograd import Function, constant
from ..backend import array_module, at_least_float32
from ._rows import require_float
from .index import index_select

LAYOUTS = ("interleaved", "half_split")


class Rotary(Function):
    """a' = a cos − b sin,  b' = a sin + b cos  for each pair (a, b).    x, y: [..., T, Dh]   cos, sin: [..., T, R/2]

    da = da' cos + db' sin,  db = db' cos − da' sin: the gradient is turned back. The features from R on pass through.
    (RoFormer, arXiv 2104.09864; guide 10.1. Half precision is turned in float32.)
    """

    def forward(self, x, cos, sin, layout):
        self.saved, self.layout = (cos, sin), layout
        return turn(at_least_float32(x), cos, sin, layout).astype(x.dtype, copy=False)

    def backward(self, dy):
        cos, sin = self.saved
        return turn(at_least_float32(dy), cos, -sin, self.layout)


def turn(x, cos, sin, layout):
    """A copy of x, each pair of its first R features turned by its angle."""
    first, second = pairs(2 * cos.shape[-1], layout)
    a, b = x[..., first], x[..., second]
    y = x.copy()
    y[..., first] = a * cos - b * sin
    y[..., second] = a * sin + b * cos
    return y


def pairs(R, layout):
    """The places of all first and of all second members of the pairs among R features, as two slices."""
    return (slice(0, R, 2), slice(1, R, 2)) if layout == "interleaved" else (slice(0, R // 2), slice(R // 2, R))


def rotary(x, cos, sin, layout="interleaved"):
    """x with its pairs of features turned.    x: [..., T, Dh]   cos, sin: broadcast to [..., T, R/2], R ≤ Dh; constants

    ValueError for an unknown layout, shapes that do not fit, and cos or sin that want a gradient (they get none).
    """
    check_layout("rotary", layout)
    require_tensors("rotary", x=x, cos=cos, sin=sin)
    require_float("rotary", x.array)
    _check_turns(x.array.shape, cos.array.shape, sin.array.shape)
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rotary: cos and sin are constants of the position and get no gradient; pass cos.detach(), sin.detach()")
    return Rotary.apply(x, cos, sin, layout)


def check_layout(op, layout):
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: layout must be 'interleaved' (pairs of neighbours: the guide) or 'half_split' (one half with the "
                         f"other: published Llama weights), got {layout!r}")


def _check_turns(x, cos, sin):
    """ValueError unless cos and sin give each pair of each token one angle, without making x larger."""
    if cos == sin and cos and x and 2 * cos[-1] <= x[-1]:
        wanted = (*x[:-1], cos[-1])
        if len(cos) <= len(x) and all(n in (1, m) for n, m in zip(cos[-2::-1], wanted[-2::-1])):
            return
    raise ValueError(f"rotary: cos and sin must have one shape that broadcasts to [..., T, R/2] with R ≤ Dh, for x {tuple(x)} "
                     f"[..., T, Dh]; got cos {tuple(cos)} and sin {tuple(sin)}")


# --- from one layout to the other -------------------------------------------------------------------------------------

def interleaved_to_half_split(x, head_dim, rotary_dim=None, dim=None):
    """The features of every head in the order of the other layout: 0, 2, 4, …, then 1, 3, 5, …

    Of a projection's weight [H · Dh, in] or bias [H · Dh], axis 0 is reordered; of anything with 3 axes or more
    ([B, H, T, Dh], [B, T, H · Dh]) the last; `dim` says otherwise. Reorder the weights of q and of k, never those of v: then
    half_split RoPE gives the scores that interleaved RoPE gave. Only the first rotary_dim features of a head form pairs.
    """
    return _reorder("interleaved_to_half_split", x, head_dim, rotary_dim, dim, _half_split_order)


def half_split_to_interleaved(x, head_dim, rotary_dim=None, dim=None):
    """The reverse of `interleaved_to_half_split`, with the same arguments: 0, R/2, 1, R/2 + 1, …"""
    return _reorder("half_split_to_interleaved", x, head_dim, rotary_dim, dim, lambda R: np.argsort(_half_split_order(R)))


def _half_split_order(R):
    return np.concatenate([np.arange(0, R, 2), np.arange(1, R, 2)])


def _reorder(op, x, head_dim, rotary_dim, dim, order):
    require_tensors(op, x=x)
    dim = (0 if x.ndim < 3 else -1) if dim is None else dim
    features = x.shape[dim]
    R = check_rotary_dim(op, head_dim, rotary_dim)
    if features % head_dim:
        raise ValueError(f"{op}: axis {dim} of {tuple(x.shape)} must hold whole heads, a multiple of head_dim {head_dim}; is `dim` "
                         f"the axis of the heads' features?")
    one_head = np.concatenate([order(R), np.arange(R, head_dim)])
    places = (np.arange(0, features, head_dim)[:, None] + one_head).reshape(-1)
    return index_select(x, dim, constant(array_module(x.array).asarray(places)))


def check_rotary_dim(op, head_dim, rotary_dim):
    """How many features of a head are turned; ValueError unless they form pairs within the head."""
    R = head_dim if rotary_dim is None else rotary_dim
    if head_dim <= 0 or not 0 < R <= head_dim or R % 2:
        raise ValueError(f"{op}: features are turned in pairs, so their number must be even, and 2 to head_dim; got head_dim "
                         f"{head_dim}" + ("" if rotary_dim is None else f" and rotary_dim {rotary_dim}"))
    return R
