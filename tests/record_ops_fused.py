"""Records in tests/data/ops_fused.npz what PyTorch computes for the fused operations:  python tests/record_ops_fused.py

A case is a function of PyTorch's names, `torch` and `F`, and of some arrays; `replay` runs it with PyTorch or with ours:
the value, and the gradients of Σ value · random. The inputs come from a seed that is the case's name.
"""
import functools
import json
import math
import zlib
from pathlib import Path

import numpy as np

DATA = Path(__file__).with_name("data") / "ops_fused.npz"
INF, NAN = math.inf, math.nan
CASES = {}


def case(name, function, *inputs):
    """inputs: a tuple is the shape of normal float32 numbers, an array stands for itself; floats are differentiated."""
    if name in CASES:
        raise ValueError(f"two cases are called {name!r}")
    CASES[name] = function, inputs


def names(prefix):
    return [n for n in CASES if n.startswith(prefix)]


def inputs_of(name):
    r = np.random.RandomState(zlib.crc32(name.encode()))
    return [r.standard_normal(x).astype(np.float32) if isinstance(x, tuple) else x for x in CASES[name][1]], r


def replay(name, torch, F):
    """[value, gradient of each float input, …] as NumPy arrays."""
    arrays, r = inputs_of(name)
    tensors = [torch.tensor(a).requires_grad_(a.dtype.kind == "f") for a in arrays]
    y = CASES[name][0](torch, F, *tensors)
    if not y.requires_grad:
        return [y.cpu().numpy()]
    value = y.detach().cpu().numpy()
    y.backward(torch.tensor(np.asarray(r.standard_normal(tuple(y.shape)), dtype=value.dtype)))
    return [value] + [t.grad.cpu().numpy() for t in tensors if t.grad is not None]


def record(torch):
    """One buffer for all arrays and one table of contents: an entry in the file for each would cost more than its numbers."""
    found = {name: replay(name, torch, torch.nn.functional) for name in CASES}
    contents = {name: [(a.dtype.str, a.shape) for a in arrays] for name, arrays in found.items()}
    numbers = b"".join(a.tobytes() for arrays in found.values() for a in arrays)
    np.savez_compressed(DATA, contents=np.array(json.dumps(contents)), numbers=np.frombuffer(numbers, np.uint8))


@functools.cache
def everything_recorded():
    with np.load(DATA) as file:
        contents, numbers, place, found = json.loads(file["contents"].item()), file["numbers"], 0, {}
    for name, arrays in contents.items():
        found[name] = []
        for dtype, shape in arrays:
            end = place + math.prod(shape) * np.dtype(dtype).itemsize
            found[name].append(numbers[place:end].copy().view(dtype).reshape(shape))
            place = end
    return found


def recorded(name):
    return everything_recorded()[name]


def ours(name):
    """The case with tinygrad_tf."""
    import tinygrad_tf
    from tinygrad_tf.ops import activation, dropout, embedding, loss, norm, sdpa, softmax

    class F:                                    # PyTorch's nn.functional, as far as it is in these files
        pass
    for room in (activation, dropout, embedding, loss, norm, sdpa, softmax):
        for key, value in vars(room).items():
            if callable(value) and not key.startswith("_"):
                setattr(F, key, staticmethod(value))
    return replay(name, tinygrad_tf, F)


def assert_close(found, wanted, context=""):
    """Equal shapes, dtypes, infinities and NaN, and values to a few units in the last place of the largest."""
    assert len(found) == len(wanted), f"{context}: {len(found)} arrays, {len(wanted)} recorded"
    for i, (a, b) in enumerate(zip(found, wanted)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{context}[{i}]: {a.shape} {a.dtype}, wanted {b.shape} {b.dtype}"
        finite = np.abs(b[np.isfinite(b)])
        tolerance = {2: 2e-3, 4: 2e-6, 8: 1e-13}[b.dtype.itemsize] if b.dtype.kind == "f" else 0
        np.testing.assert_allclose(a, b, rtol=4 * tolerance, atol=tolerance * max(1, finite.max() if finite.size else 1),
                                   err_msg=f"{context}[{i}]")


def wide(*shape):
    """Values over the whole range where an activation bends."""
    return np.linspace(-9, 9, math.prod(shape), dtype=np.float32).reshape(shape)


# --- activation -----------------------------------------------------------------------------------------------------

EDGES = np.array([0, -0.0, 1e-30, -1e-30, 20, -20, 5.5, -5.5, 100, -100, NAN, 1e-4, -1e-4], np.float32)
for name, function in {
        "relu": lambda t, F, x: F.relu(x), "gelu": lambda t, F, x: F.gelu(x), "gelu tanh": lambda t, F, x: F.gelu(x, approximate="tanh"),
        "silu": lambda t, F, x: F.silu(x), "leaky_relu": lambda t, F, x: F.leaky_relu(x, 0.2), "softplus": lambda t, F, x: F.softplus(x),
        "erf": lambda t, F, x: t.erf(x)}.items():
    case(f"activation {name} float32", function, wide(7, 11))
    case(f"activation {name} float64", function, np.linspace(-7, 7, 41))
    case(f"activation {name} float16", function, np.linspace(-4, 4, 17).astype(np.float16))
    case(f"activation {name} edges", function, EDGES)

# --- softmax --------------------------------------------------------------------------------------------------------

ODD_ROWS = np.array([[-INF, -INF, -INF], [INF, 0, 1], [0, -INF, 1], [1000, 999, -1000], [NAN, 0, 1], [88, 89, 90]], np.float32)
for name, function in {"softmax": lambda t, F, x, dim: F.softmax(x, dim=dim), "log_softmax": lambda t, F, x, dim: F.log_softmax(x, dim=dim),
                       "logsumexp": lambda t, F, x, dim: t.logsumexp(x, dim)}.items():
    for dim in (-1, 0, 1):
        case(f"softmax {name} dim {dim}", lambda t, F, x, f=function, d=dim: f(t, F, x, d), (3, 4, 5))
    case(f"softmax {name} float64", lambda t, F, x, f=function: f(t, F, x, -1), np.arange(-12, 12.0).reshape(4, 6) ** 2 / 9)
    case(f"softmax {name} float16", lambda t, F, x, f=function: f(t, F, x, -1), np.linspace(-9, 9, 12).reshape(3, 4).astype(np.float16))
    case(f"softmax {name} odd rows", lambda t, F, x, f=function: f(t, F, x, 1), ODD_ROWS)
    case(f"softmax {name} 0-d", lambda t, F, x, f=function: f(t, F, x, 0), np.array(3, np.float32))
    case(f"softmax {name} empty", lambda t, F, x, f=function: f(t, F, x, 1), np.zeros((3, 0), np.float32))
case("softmax logsumexp dims", lambda t, F, x: t.logsumexp(x, (0, 2)), (3, 4, 5))
case("softmax logsumexp keepdim", lambda t, F, x: t.logsumexp(x, (1, -1), keepdim=True), (3, 4, 5))
case("softmax logsumexp integers", lambda t, F, x: t.logsumexp(x, 0), np.array([1, 2, 5]))
case("softmax dtype", lambda t, F, x: F.softmax(x, dim=-1, dtype=t.float64), (2, 3))
case("softmax integers with dtype", lambda t, F, x: F.log_softmax(x, dim=-1, dtype=t.float32), np.array([1, 2, 5]))

# --- norm -----------------------------------------------------------------------------------------------------------

case("norm layer_norm", lambda t, F, x, w, b: F.layer_norm(x, (8,), w, b), (5, 8), (8,), (8,))
case("norm layer_norm 3-D", lambda t, F, x, w, b: F.layer_norm(x, (8,), w, b), (2, 3, 8), (8,), (8,))
case("norm layer_norm two axes", lambda t, F, x, w, b: F.layer_norm(x, (3, 4), w, b, 1e-3), (2, 3, 4), (3, 4), (3, 4))
case("norm layer_norm one row", lambda t, F, x, w, b: F.layer_norm(x, (6,), w, b), (6,), (6,), (6,))
case("norm layer_norm plain", lambda t, F, x: F.layer_norm(x, (5,)), (3, 5))
case("norm layer_norm weight only", lambda t, F, x, w: F.layer_norm(x, (5,), w), (3, 5), (5,))
case("norm layer_norm bias only", lambda t, F, x, b: F.layer_norm(x, (5,), None, b), (3, 5), (5,))
case("norm layer_norm float64", lambda t, F, x: F.layer_norm(x, (6,)), np.arange(24.0).reshape(4, 6) ** 1.5)
case("norm layer_norm float16", lambda t, F, x: F.layer_norm(x, (6,)), (300 * np.cos(np.arange(24)).reshape(4, 6)).astype(np.float16))
case("norm layer_norm constant rows", lambda t, F, x: F.layer_norm(x, (4,)), np.full((2, 4), 7, np.float32))
case("norm layer_norm size 1", lambda t, F, x, w, b: F.layer_norm(x, (1,), w, b), (3, 1), (1,), (1,))
case("norm layer_norm NaN row", lambda t, F, x: F.layer_norm(x, (3,)), np.array([[1, NAN, 2], [1, 2, 4]], np.float32))
case("norm rms_norm", lambda t, F, x, w: F.rms_norm(x, (8,), w, 1e-6), (5, 8), (8,))
case("norm rms_norm two axes", lambda t, F, x, w: F.rms_norm(x, (3, 4), w, 1e-5), (2, 3, 4), (3, 4))
case("norm rms_norm plain", lambda t, F, x: F.rms_norm(x, (8,)), 1e-4 * np.cos(np.arange(16, dtype=np.float32)).reshape(2, 8))
case("norm rms_norm float64", lambda t, F, x: F.rms_norm(x, (6,)), 1e-9 * np.cos(np.arange(24.0).reshape(4, 6)))
case("norm rms_norm float16", lambda t, F, x: F.rms_norm(x, (6,)), (1e-3 * np.cos(np.arange(24)).reshape(4, 6)).astype(np.float16))
case("norm normalize", lambda t, F, x: F.normalize(x, dim=-1), (3, 4))
case("norm normalize default axis", lambda t, F, x: F.normalize(x), (3, 4, 2))
case("norm normalize p 1", lambda t, F, x: F.normalize(x, p=1.0, dim=0), (3, 4))
case("norm normalize zero", lambda t, F, x: F.normalize(x), np.array([[0, 0], [3, 4]], np.float32))

# --- embedding, dropout ---------------------------------------------------------------------------------------------

IDS = np.array([[3, 0, 3], [6, 3, 1]])
case("embedding", lambda t, F, i, w: F.embedding(i, w), IDS, (7, 4))
case("embedding padding", lambda t, F, i, w: F.embedding(i, w, padding_idx=3), IDS, (7, 4))
case("embedding negative padding", lambda t, F, i, w: F.embedding(i, w, padding_idx=-1), IDS, (7, 4))
case("embedding one id", lambda t, F, i, w: F.embedding(i, w), np.array(2, np.int32), (3, 2))
case("embedding max_norm", lambda t, F, i, w: F.embedding(i, w.detach(), max_norm=1.0), IDS, (7, 4))
case("embedding max_norm 1", lambda t, F, i, w: F.embedding(i, w.detach(), max_norm=1.0, norm_type=1.0), IDS, (7, 4))
case("embedding half", lambda t, F, i, w: F.embedding(i, w), np.zeros(40, np.int64), np.full((2, 2), 0.1, np.float16))
case("embedding one_hot", lambda t, F, i: F.one_hot(i), IDS)
case("embedding one_hot classes", lambda t, F, i: F.one_hot(i, 9), IDS)


def seeded(function):
    return lambda torch, F, *tensors: (torch.manual_seed(11), function(torch, F, *tensors))[1]


case("dropout", seeded(lambda t, F, x: F.dropout(x, 0.3)), (5, 7))
case("dropout float64", seeded(lambda t, F, x: F.dropout(x, 0.5)), np.ones((3, 4)))
case("dropout all", seeded(lambda t, F, x: F.dropout(x, 1.0)), (3, 4))
case("dropout eval", seeded(lambda t, F, x: F.dropout(x, 0.3, training=False) * 1.0), (3, 4))

# --- loss -----------------------------------------------------------------------------------------------------------

TARGET = np.array([2, 0, -100, 4, 2, -100])
IMAGE = np.array([[[0, 1], [2, -100]], [[1, 1], [-100, 0]]])
PROBABILITIES = np.random.RandomState(5).dirichlet(np.ones(5), 6).astype(np.float32)
W = np.array([0.5, 2, 0, 1.5, 1], np.float32)
for reduction in ("mean", "sum", "none"):
    for smoothing in (0.0, 0.1):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        tag = f"{reduction} {smoothing}"
        case(f"loss cross_entropy {tag}", lambda t, F, x, y, o=options: F.cross_entropy(x, y, **o), (6, 5), TARGET)
        case(f"loss cross_entropy {tag} weight", lambda t, F, x, y, w, o=options: F.cross_entropy(x, y, weight=w.detach(), **o),
             (6, 5), TARGET, W)
        case(f"loss cross_entropy {tag} ignore 2", lambda t, F, x, y, o=options: F.cross_entropy(x, y, ignore_index=2, **o),
             (6, 5), np.abs(TARGET) % 5)
        case(f"loss cross_entropy {tag} image", lambda t, F, x, y, w, o=options: F.cross_entropy(x, y, weight=w.detach(), **o),
             (2, 3, 2, 2), IMAGE, W[:3])
        case(f"loss cross_entropy {tag} one row", lambda t, F, x, y, o=options: F.cross_entropy(x, y, **o), (5,), np.array(3))
        case(f"loss cross_entropy {tag} all ignored", lambda t, F, x, y, o=options: F.cross_entropy(x, y, **o), (2, 5), TARGET[[2, 5]])
        case(f"loss cross_entropy {tag} empty", lambda t, F, x, y, o=options: F.cross_entropy(x, y, **o), (0, 5), TARGET[:0])
        case(f"loss cross_entropy {tag} probabilities", lambda t, F, x, y, w, o=options: F.cross_entropy(x, y, weight=w.detach(), **o),
             (6, 5), PROBABILITIES, W)
        case(f"loss cross_entropy {tag} probabilities image", lambda t, F, x, y, o=options: F.cross_entropy(x, t.softmax(y, 1), **o),
             (2, 3, 2), (2, 3, 2))
        case(f"loss cross_entropy {tag} probabilities one row", lambda t, F, x, y, o=options: F.cross_entropy(x, y, **o),
             (5,), PROBABILITIES[0])
    case(f"loss nll_loss {reduction}", lambda t, F, x, y, r=reduction: F.nll_loss(x, y, reduction=r), (6, 5), TARGET)
    case(f"loss nll_loss {reduction} weight", lambda t, F, x, y, w, r=reduction: F.nll_loss(x, y, w.detach(), reduction=r),
         (2, 3, 2, 2), IMAGE, W[:3])
    case(f"loss mse_loss {reduction}", lambda t, F, x, y, r=reduction: F.mse_loss(x, y, reduction=r), (3, 4), (3, 4))
    case(f"loss bce {reduction}", lambda t, F, x, y, r=reduction: F.binary_cross_entropy_with_logits(x, t.sigmoid(y), reduction=r),
         (3, 4), (3, 4))
case("loss cross_entropy float64", lambda t, F, x, y: F.cross_entropy(x, y, label_smoothing=0.2), np.arange(30.0).reshape(6, 5) % 7, TARGET)
case("loss cross_entropy float16", lambda t, F, x, y: F.cross_entropy(x, y), (np.arange(30).reshape(6, 5) % 7).astype(np.float16), TARGET)
case("loss cross_entropy large", lambda t, F, x, y: F.cross_entropy(x, y), np.array([[1000, 0], [-1000, 0]], np.float32), np.array([1, 1]))
case("loss cross_entropy infinite", lambda t, F, x, y: F.cross_entropy(x, y),
     np.array([[-INF, 0, 1], [0, 1, 2]], np.float32), np.array([1, 0]))
case("loss cross_entropy zero weights", lambda t, F, x, y: F.cross_entropy(x, y, weight=t.zeros(5)), (2, 5), np.array([1, 2]))
case("loss cross_entropy old flags", lambda t, F, x, y: F.cross_entropy(x, y, None, False), (6, 5), TARGET)
case("loss bce weights", lambda t, F, x, y: F.binary_cross_entropy_with_logits(
         x, y.detach(), t.tensor([1.0, 2.0]), pos_weight=t.tensor([3.0, 0.5])),
     np.array([[0, -200], [200, 0.5], [0, 0]], np.float32), np.array([[1, 0], [0, 1], [0, 0.25]], np.float32))

# --- attention ------------------------------------------------------------------------------------------------------

ALLOWED = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], bool)
VALID = np.array([[1, 1, 0, 1], [0, 0, 0, 1]], bool)[:, None, None, :]


def sdpa(**options):
    return lambda t, F, q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def masked(**options):
    return lambda t, F, q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, **options)


QKV = (2, 2, 3, 4), (2, 2, 4, 4), (2, 2, 4, 6)
case("attention", sdpa(), *QKV)
case("attention causal", sdpa(is_causal=True), *QKV)
case("attention causal tall", sdpa(is_causal=True), (2, 5, 4), (2, 3, 4), (2, 3, 4))
case("attention scale", sdpa(scale=0.1), *QKV)
case("attention 2-D", sdpa(is_causal=True), (4, 3), (4, 3), (4, 3))
case("attention bool", masked(), *QKV, ALLOWED)
case("attention bool of heads", masked(), *QKV, np.stack([ALLOWED, ~ALLOWED])[None])
case("attention valid tokens", masked(), *QKV, VALID)
case("attention float", masked(), *QKV, (3, 4))
case("attention float of batch", masked(), *QKV, (2, 1, 3, 4))
case("attention float with infinities", masked(), *QKV, np.where(ALLOWED, np.float32(0.5), np.float32(-INF)))
case("attention shared keys", sdpa(), (2, 2, 3, 4), (2, 5, 4), (1, 2, 5, 4))
case("attention gqa", sdpa(is_causal=True, enable_gqa=True), (2, 6, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4))
case("attention mqa", sdpa(enable_gqa=True), (4, 3, 2), (1, 5, 2), (1, 5, 2))
case("attention gqa mask", masked(enable_gqa=True), (2, 4, 3, 4), (2, 2, 4, 4), (2, 2, 4, 4), VALID)
case("attention gqa mask of heads", masked(enable_gqa=True), (1, 4, 3, 4), (1, 2, 4, 4), (1, 2, 4, 4), (1, 4, 3, 4))
case("attention float64", sdpa(is_causal=True), *np.cos(np.arange(72.0)).reshape(3, 2, 3, 4))
case("attention float16", sdpa(is_causal=True), *np.cos(np.arange(72)).reshape(3, 2, 3, 4).astype(np.float16))
case("attention large scores", sdpa(), *(300 * np.cos(np.arange(72, dtype=np.float32))).reshape(3, 2, 3, 4))
case("attention no keys", sdpa(), (2, 3, 4), (2, 0, 4), (2, 0, 4))
case("attention dropout", seeded(sdpa(dropout_p=0.4, is_causal=True)), (2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))
case("attention dropout mask", seeded(masked(dropout_p=0.4)), *QKV, ALLOWED)


if __name__ == "__main__":
    import torch
    record(torch)
    print(f"{len(CASES)} cases, {DATA.stat().st_size} bytes")
