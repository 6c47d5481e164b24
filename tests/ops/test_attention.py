import itertools
import math

import numpy as np
import pytest
from device import host, share_memory
from record_ops_fused import assert_close, names, ours, recorded, replay
from twins import assert_leaves_memory_alone, assert_twins

import tinygrad_tf
from tinygrad_tf import bool as bool_
from tinygrad_tf import float16, manual_seed, ones, randn, tensor, where, zeros
from tinygrad_tf.autograd import observing
from tinygrad_tf.ops import sdpa
from tinygrad_tf.ops._rows import MODERATE
from tinygrad_tf.ops.attention import _product, attention_weights
from tinygrad_tf.ops.dropout import dropout
from tinygrad_tf.ops.sdpa import scaled_dot_product_attention
from tinygrad_tf.ops.softmax import softmax

pytestmark = pytest.mark.filterwarnings("error")
RANDOM = np.random.default_rng(0)
ALLOWED = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], bool)
B, H, TQ, TK, DH = 2, 4, 3, 4, 2


DROPOUT = pytest.mark.host("dropout on another device has a counter-based stream of its own")
NAMES = [pytest.param(name, marks=DROPOUT) if "dropout" in name else name for name in names("attention")]


@pytest.mark.parametrize("name", NAMES)
def test_pytorchs_numbers(name):
    assert_close(ours(name), recorded(name), name)


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
def test_live(name):
    torch = pytest.importorskip("torch")
    assert_close(ours(name), replay(name, torch, torch.nn.functional), name)


# --- fused = composed, over the product of the options ----------------------------------------------------------------

def composed_weights(q, k, mask=None, is_causal=False, scale=None):
    """From small operations: every key head is copied for its group, and every blocked score is filled."""
    if min(q.ndim, k.ndim) > 2 and k.shape[-3] not in (1, q.shape[-3]):
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = ones(*scores.shape[-2:], dtype=bool_).tril()
    if mask is None:
        return softmax(scores, -1)
    allowed = mask
    if mask.is_floating_point():
        scores, allowed = scores + mask, mask.detach() > -math.inf
    allowed = allowed & ones(*scores.shape, dtype=bool_)
    dead = ~allowed.any(-1, keepdim=True)
    return softmax(scores.masked_fill(~allowed, -math.inf).masked_fill(dead, 0.0), -1).masked_fill(~allowed, 0.0)


def composed(q, k, v, mask=None, is_causal=False, scale=None, p=0.0):
    weights = composed_weights(q, k, mask, is_causal, scale)
    if v.ndim > 2 and v.shape[-3] not in (1, weights.shape[-3]):
        v = v.repeat_interleave(weights.shape[-3] // v.shape[-3], dim=-3)
    return dropout(weights, p) @ v


MASKS = {"none": None, "causal": "causal", "bool": ALLOWED, "valid tokens": np.array([[1, 1, 0, 1], [0, 0, 0, 0]], bool)[:, None, None],
         "of heads": RANDOM.random((1, H, TQ, TK)) > 0.5, "float": RANDOM.normal(size=(TQ, TK)),
         "float of heads": RANDOM.normal(size=(B, H, TQ, TK)), "one number": np.array(0.7),
         "float with infinities": np.where(ALLOWED, 0.5, -np.inf)}


@pytest.mark.parametrize("kv_heads, mask, scale, p", list(itertools.product((4, 2, 1), MASKS, (None, 0.2), (0.0, 0.4))))
def test_fused_equals_composed(kv_heads, mask, scale, p):
    arrays = [RANDOM.normal(size=s) for s in ((B, H, TQ, DH), (B, kv_heads, TK, DH), (B, kv_heads, TK, 3))]
    options = {"scale": scale, "is_causal": mask == "causal"}
    if isinstance(MASKS[mask], np.ndarray):
        arrays.append(MASKS[mask])

    def fused(q, k, v, m=None):
        manual_seed(5)
        return scaled_dot_product_attention(q, k, v, m, p, enable_gqa=True, **options)

    def twin(q, k, v, m=None):
        manual_seed(5)
        return composed(q, k, v, m, p=p, **options)
    assert_twins(fused, twin, *arrays)
    if p == 0:
        assert_twins(lambda q, k, m=None: attention_weights(q, k, m, enable_gqa=True, **options),
                     lambda q, k, m=None: composed_weights(q, k, m, **options), *arrays[:2], *arrays[3:])


@pytest.mark.parametrize("q, k, v", [((3, 2), (4, 2), (4, 5)), ((2, 3, 2), (2, 4, 2), (2, 4, 2)),
                                     ((2, 2, 2, 3, 2), (2, 4, 2), (2, 1, 1, 4, 2)),
                                     ((1, 2), (1, 2), (1, 1)), ((3, 2), (3, 4, 2), (4, 2)), ((2, 3, 2), (4, 2), (5, 1, 4, 2))], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_leading_axes_broadcast(q, k, v, is_causal):
    assert_twins(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=is_causal),
                 lambda q, k, v: composed(q, k, v, is_causal=is_causal), *(RANDOM.normal(size=s) for s in (q, k, v)))


def test_memory():
    q, k, v = (RANDOM.normal(size=(2, 3, 4)) for _ in range(3))
    assert_leaves_memory_alone(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    assert_leaves_memory_alone(scaled_dot_product_attention, q, k, v, RANDOM.normal(size=(3, 3)))
    assert_leaves_memory_alone(attention_weights, q, k, RANDOM.normal(size=(3, 3)))


@pytest.mark.parametrize("key_heads, value_heads", [(2, 4), (4, 2), (2, 3), (1, 6), (12, 3), (4, 6)])
def test_key_and_value_may_differ_in_heads(key_heads, value_heads):
    """Query head h reads key head h // (12 / Hk) and value head h // (12 / Hv)."""
    q, k, v = (RANDOM.normal(size=(2, heads, 3, 4)) for heads in (12, key_heads, value_heads))
    assert_twins(lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
                 lambda q, k, v, m: composed(q, k.repeat_interleave(12 // key_heads, 1), v.repeat_interleave(12 // value_heads, 1), m),
                 q, k, v, RANDOM.normal(size=(2, 12, 3, 3)))


def test_grouped_heads_are_not_copied():
    q, k, v = randn(1, 6, 3, 4, requires_grad=True), randn(1, 2, 3, 4), randn(1, 2, 3, 4)
    node = scaled_dot_product_attention(q, k, v, enable_gqa=True).grad_fn
    while node.name != "Attention":
        node = node.inputs[0]
    assert share_memory(node.saved[1], k) and share_memory(node.saved[2], v)


# --- rows that see nothing, and what must not leak --------------------------------------------------------------------

@pytest.mark.parametrize("mask", [ALLOWED, np.where(ALLOWED, 0, -np.inf).astype(np.float32)], ids=["bool", "float"])
@pytest.mark.parametrize("junk", [0.0, math.nan, math.inf])
def test_a_row_that_sees_nothing_is_zero_and_sends_no_gradient(mask, junk):
    q, k, v = (randn(2, n, 5) for n in (3, 4, 4))
    q[:, 1] = junk
    for t in (q, k, v):
        t.requires_grad_()
    y = scaled_dot_product_attention(q, k, v, tensor(mask))
    assert np.isfinite(host(y)).all() and (host(y)[:, 1] == 0).all()
    assert (host(attention_weights(q, k, tensor(mask)))[:, 1] == 0).all()
    y.backward(randn(2, 3, 5))
    assert (host(q.grad)[:, 1] == 0).all()
    assert all(np.isfinite(host(t.grad)).all() for t in (q, k, v))


def two_texts(dtype):
    """Positions 0 to 2 and 3 to 5 are two packed texts that must not see each other; causal inside each."""
    text = np.arange(6) // 3
    allowed = (text[:, None] == text) & np.tri(6, dtype=bool)
    return allowed if dtype is bool else np.where(allowed, 0, -np.inf).astype(dtype)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poisoned", ["q", "k", "v", "dout", "qkv"])
@pytest.mark.parametrize("dtype", [bool, np.float32])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_nothing_leaks_through_a_mask(junk, poisoned, dtype, dropout_p):
    """What stands in the second text changes no bit of the first: value, gradients of q, k and v."""
    clean = {name: RANDOM.normal(size=(2, 6, 4)).astype(np.float32) for name in ("q", "k", "v", "dout")}
    dirty = {name: a.copy() for name, a in clean.items()}
    for name in ("q", "k", "v") if poisoned == "qkv" else (poisoned,):
        dirty[name][:, 4] = junk
    results = []
    for arrays in (clean, dirty):
        q, k, v = (tensor(arrays[n], requires_grad=True) for n in "qkv")
        manual_seed(1)
        y = scaled_dot_product_attention(q, k, v, tensor(two_texts(dtype)), dropout_p)
        y.backward(tensor(arrays["dout"]))
        p = attention_weights(q, k, tensor(two_texts(dtype)))
        dp = np.concatenate([arrays["dout"], arrays["v"]], -1)[..., :6].swapaxes(1, 2)
        q2, k2 = (tensor(arrays[n], requires_grad=True) for n in "qk")
        attention_weights(q2, k2, tensor(two_texts(dtype))).backward(tensor(dp))
        results.append([host(t)[:, :3] for t in (y, q.grad, k.grad, v.grad, p, q2.grad, k2.grad)])
    for name, wanted, found in zip(("out", "dq", "dk", "dv", "p", "dq of p", "dk of p"), *results):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_what_a_row_sees_is_not_hidden(junk):
    """NaN and inf that a query may see reach it, as without a mask."""
    q, k, v = (RANDOM.normal(size=(4, 3)).astype(np.float32) for _ in range(3))
    v[2, 1] = junk
    y = host(scaled_dot_product_attention(tensor(q), tensor(k), tensor(v), is_causal=True))
    np.testing.assert_array_equal(np.isfinite(y), np.array([[1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 0, 1]], bool))
    assert not np.isfinite(host(scaled_dot_product_attention(tensor(q), tensor(k), tensor(v)))[:, 1]).any()


# --- facts ------------------------------------------------------------------------------------------------------------

def test_causal_is_aligned_top_left():
    weights = attention_weights(zeros(2, 4), zeros(3, 4), is_causal=True)
    np.testing.assert_array_equal(host(weights), np.array([[1, 0, 0], [0.5, 0.5, 0]], np.float32))


def test_weights_times_values_is_attention():
    q, k, v = randn(2, 3, 4), randn(2, 5, 4), randn(2, 5, 4)
    p = attention_weights(q, k)
    np.testing.assert_allclose(host(p.sum(-1)), 1, rtol=1e-6)
    np.testing.assert_allclose(host(p @ v), host(scaled_dot_product_attention(q, k, v)), rtol=1e-5, atol=1e-6)


def test_query_head_h_reads_key_head_h_over_group():
    q, k, v = randn(1, 4, 1, 2), zeros(1, 2, 1, 2), tensor([[[[1.0]], [[2.0]]]])
    assert scaled_dot_product_attention(q, k, v, enable_gqa=True).reshape(-1).tolist() == [1, 1, 2, 2]


def test_gradient_goes_only_where_it_is_wanted():
    for wanted in itertools.product((False, True), repeat=3):
        q, k, v = (randn(2, 3, 4, requires_grad=w) for w in wanted)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        assert y.requires_grad == any(wanted)
        if y.requires_grad:
            y.sum().backward()
        assert [t.grad is not None for t in (q, k, v)] == list(wanted)


def test_dropout_of_everything_and_outside_of_probability():
    q = randn(2, 3, 4)
    assert scaled_dot_product_attention(q, q, q, dropout_p=1.0).abs().max().item() == 0
    for p in (-0.5, 1.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            scaled_dot_product_attention(q, q, q, dropout_p=p)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_no_elements(shape):
    q = zeros(*shape).requires_grad_()
    for options in ({}, {"is_causal": True}):
        y = scaled_dot_product_attention(q, q, q, **options)
        y.sum().backward()
        assert y.shape == q.grad.shape == shape


def test_half_precision_is_computed_in_float32():
    q, k = (randn(1, 8, 64) * 40).to(float16), (randn(1, 8, 64) * 40).to(float16)     # q · k is beyond float16
    v = randn(1, 8, 4).to(float16)
    y = scaled_dot_product_attention(q, k, v, scale=1.0)
    wanted = scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=1.0)
    assert y.dtype == float16
    np.testing.assert_allclose(host(y.float()), host(wanted), atol=2e-3)


def test_float32_stays_float32():
    q = randn(2, 3, 4, requires_grad=True)
    y = where(scaled_dot_product_attention(q, q, q, zeros(3, 3)) > 0, q, q)
    y.sum().backward()
    assert y.dtype == q.grad.dtype == q.dtype
    node = scaled_dot_product_attention(q, q, q, is_causal=True).grad_fn
    assert {a.dtype for a in node.saved if a is not None} == {np.dtype(np.float32)}


@pytest.mark.torch
@pytest.mark.parametrize("query", ["float16", "float32", "float64"])
@pytest.mark.parametrize("mask", ["bool", "uint8", "int64", "float16", "float32", "float64"])
def test_dtypes_of_a_mask_are_those_of_pytorch(query, mask):
    assert same_outcome(lambda torch, f: f(*[torch.ones(1, 2, 3, 4).to(getattr(torch, query))] * 3,
                                           torch.ones(3, 3).to(getattr(torch, mask))))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize("lead", [(), (2,), (3, 2), (1, 3, 2)])
@pytest.mark.parametrize("mask", [(5, 6), (1, 6), (5, 1), (4, 6), (2, 5, 6), (1, 5, 6), (3, 5, 6), (3, 2, 5, 6), (3, 1, 1, 6), (4, 2, 5, 6),
                                  (1, 3, 2, 5, 6), (7, 3, 2, 5, 6), (1, 1, 1, 5, 6)], ids=str)
def test_shapes_of_a_mask_are_those_of_pytorch(lead, mask, dtype):
    """It broadcasts to the scores, and never the scores to it."""
    assert same_outcome(lambda torch, f: f(torch.ones(*lead, 5, 4), *[torch.ones(*lead, 6, 4)] * 2,
                                           torch.ones(*mask).to(getattr(torch, dtype))))


def same_outcome(call):
    """Both frameworks raise RuntimeError, or return the same shape and dtype."""
    torch = pytest.importorskip("torch")
    outcomes = []
    for framework, f in ((torch, torch.nn.functional.scaled_dot_product_attention), (tinygrad_tf, scaled_dot_product_attention)):
        try:
            y = call(framework, f)
            outcomes.append((tuple(y.shape), str(y.dtype)))
        except RuntimeError:
            outcomes.append("RuntimeError")
    return outcomes[0] == outcomes[1]


@pytest.mark.parametrize("query, mask", [("float16", "float32"), ("float64", "float32"), ("float16", "float16")])
def test_the_gradient_of_a_mask_has_its_dtype(query, mask):
    q, m = (ones(2, 3, 4).to(getattr(tinygrad_tf, query)), randn(2, 3, 3).to(getattr(tinygrad_tf, mask)).requires_grad_())
    v = randn(2, 3, 4).to(q.dtype)
    scaled_dot_product_attention(q, q, v, m).sum().backward()
    assert m.grad.dtype == m.dtype and (m.grad != 0).any()


Q = (2, 4, 3, 8)


@pytest.mark.parametrize("text, call", [
    (r"drop is_causal and combine", lambda q, s: s(q, q, q, ones(3, 3, dtype=bool_), is_causal=True)),
    (r"at least 2 axes.*\(8,\)", lambda q, s: s(q[0, 0, 0], q, q)),
    (r"at least 2 axes", lambda q, s: s(q, q[0, 0, 0], q)),
    (r"axis −2, Tk", lambda q, s: s(q, q, q[0, 0, 0])),
    (r"\(2, 4, 3, 8\).*\(2, 4, 3, 5\).*Dh", lambda q, s: s(q, randn(2, 4, 3, 5), q)),
    (r"\(2, 4, 3, 8\).*\(2, 4, 5, 8\).*Tk", lambda q, s: s(q, q, randn(2, 4, 5, 8))),
    (r"float32.*float64", lambda q, s: s(q, q.double(), q)),
    (r"float32.*float64", lambda q, s: s(q, q, q.double())),
    (r"int64", lambda q, s: s(q.long(), q.long(), q.long())),
    (r"enable_gqa=True", lambda q, s: s(q, q[:, :2], q[:, :2])),
    (r"enable_gqa=True", lambda q, s: s(q, q, q[:, :2])),
    (r"divide.*\(2, 3, 3, 8\).*\(2, 2, 3, 8\)", lambda q, s: s(q[:, :3], q[:, :2], q[:, :2], enable_gqa=True)),
    (r"divide.*\(2, 2, 3, 8\).*\(2, 3, 3, 8\)", lambda q, s: s(q, q[:, :2], q[:, :3], enable_gqa=True)),
    (r"divide.*\(3, 8\)", lambda q, s: s(q[0, 0], q[0, 0], q[0, 0], enable_gqa=True)),
    (r"attn_mask \(2, 3, 3\) must have 1 or 4 heads.*\(2, 4, 3, 8\)",
     lambda q, s: s(q, q[:, :2], q[:, :2], ones(2, 3, 3, dtype=bool_), enable_gqa=True)),
    (r"attn_mask \(2, 3\).*\(2, 4, 3, 3\).*\[:, None, None, :\]", lambda q, s: s(q, q, q, ones(2, 3, dtype=bool_))),
    (r"attn_mask \(5, 3\)", lambda q, s: s(q[:, :, :1], q, q, ones(5, 3, dtype=bool_))),
    (r"attn_mask \(1, 2, 4, 3, 3\).*\(2, 4, 3, 3\)", lambda q, s: s(q, q, q, ones(1, 2, 4, 3, 3, dtype=bool_))),
    (r"attn_mask \(2, 4, 3, 3\).*\(1, 4, 3, 3\)", lambda q, s: s(q[:1], q[:1], q[:1], zeros(2, 4, 3, 3))),
    (r"float32, got torch.float64.*\.to\(query.dtype\)", lambda q, s: s(q, q, q, zeros(3, 3).double())),
    (r"float32, got torch.float16", lambda q, s: s(q, q, q, zeros(3, 3).half())),
    (r"float16, got torch.float64", lambda q, s: s(q.half(), q.half(), q.half(), zeros(3, 3).double())),
    (r"bool.*float.*int64.*bool\(\)", lambda q, s: s(q, q, q, ones(3, 3).long()))])
def test_wrong_calls(text, call):
    with pytest.raises(RuntimeError, match=f"(?s){text}"):
        call(randn(*Q), scaled_dot_product_attention)


@pytest.mark.parametrize("scale", [tensor(0.5), tensor(0.5, requires_grad=True), np.ones(1), "1"],
                         ids=["tensor", "learned", "array", "text"])
@pytest.mark.parametrize("attend", [lambda q, k, scale: scaled_dot_product_attention(q, k, k, scale=scale),
                                    lambda q, k, scale: attention_weights(q, k, scale=scale)], ids=["attention", "weights"])
def test_a_scale_is_a_number_and_a_learned_one_multiplies_the_query(attend, scale):
    q, k, learned = randn(*Q), randn(*Q), tensor(0.5, requires_grad=True)
    with pytest.raises(TypeError, match=r"scale must be a number.*query \* scale, with scale=1\.0"):
        attend(q, k, scale)
    found = attend(q * learned, k, 1.0)
    assert tinygrad_tf.allclose(found, attend(q, k, 0.5)) and tinygrad_tf.allclose(found, attend(q, k, np.float32(0.5)))
    (found * randn(*found.shape)).sum().backward()
    assert learned.grad.item() != 0


# --- softmax without its maximum, which is left out where all scores are moderate: arrays of 1,024 scores and more ---------------

def true_weights(z):
    """softmax of each row in float64, zeros where all is −inf."""
    z = z.astype(np.float64)
    top = z.max(-1, keepdims=True)
    e = np.exp(z - np.where(np.isfinite(top), top, 0))
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-300)


SHIFTS = {"moderate": 0, "at the limit": MODERATE - 4, "above the limit": MODERATE + 1, "overflowing": 3e4, "far below": -MODERATE - 30,
          "underflowing": -3e4}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sees_nothing", [[], [11]], ids=["each row sees something", "one sees nothing"])
@pytest.mark.parametrize("rows", ["every row", "one row"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_scores_of_any_size(shift, rows, sees_nothing, dtype):
    """The bias moves all scores of some rows, which changes no weight; each is right to the last digits that its scores have."""
    q, k = (RANDOM.normal(size=(2, 40, 8)).astype(dtype) for _ in range(2))
    bias = np.zeros((40, 40), dtype)
    bias[slice(None) if rows == "every row" else 7] = SHIFTS[shift]
    bias[3, 5:] = bias[sees_nothing] = -np.inf
    found = attention_weights(tensor(q), tensor(k), tensor(bias))
    scores = (q.astype(dtype) / dtype(math.sqrt(8))) @ k.swapaxes(-1, -2) + bias
    tolerance = 16 * np.finfo(dtype).eps * max(1, abs(SHIFTS[shift]))
    assert np.abs(host(found.array) - true_weights(scores)).max() <= tolerance
    assert (host(found.array)[:, sees_nothing] == 0).all() and (host(found.array)[:, 3, 5:] == 0).all()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e38])
def test_nothing_leaks_among_many_scores(junk):
    """As among few: a key and a value that nobody may look at can hold anything."""
    q, k, v = (randn(2, 48, 8).requires_grad_() for _ in range(3))
    allowed = ones(48, 48, dtype=bool_).tril()
    allowed[:, 9] = False

    def run(poison):
        keys, values = (host(x.array).copy() for x in (k, v))
        keys[:, 9] = values[:, 9] = poison
        leaves = [tensor(host(x.array).copy(), requires_grad=True) for x in (q,)] + [tensor(x, requires_grad=True) for x in (keys, values)]
        out = scaled_dot_product_attention(*leaves, attn_mask=allowed)
        out.backward(out.detach())
        return [host(out.array)] + [host(x.grad.array) for x in leaves]
    for clean, found in zip(run(0.0), run(junk), strict=True):
        assert np.allclose(clean, found, atol=2e-6)


# --- what is kept from call to call, and how gradients lie in memory -----------------------------------------------------

ORDERS = list(itertools.permutations(range(4)))         # of the axes [B, H, T, Dh] in memory


def lying(shape, order):
    """Random numbers of that shape, whose axes lie in memory in that order."""
    return RANDOM.normal(size=[shape[i] for i in order]).astype(np.float32).transpose(np.argsort(order))


@pytest.mark.host("CuPy's products are new arrays")
@pytest.mark.parametrize("T", [1, 5, 64])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_product_may_lie_in_memory_as_another_array(order, T):
    """The same bits; in that order of axes where each row stays in one piece."""
    a, b, like = lying((2, 3, T, 7), ORDERS[0]), lying((2, 3, 7, 8), order), lying((2, 3, T, 8), order)
    found, plain = _product(a, b, None, like), a @ b
    assert found.tobytes() == plain.tobytes()
    assert T == 1 or found.strides == (like if order[-1] == 3 else plain).strides       # of an axis of size 1 any stride is right
    assert _product(a[:1], b, None, like).tobytes() == (a[:1] @ b).tobytes()            # where the leading axes are broadcast
    assert _product(a, b, None, like[:1]).tobytes() == plain.tobytes()


@pytest.mark.host("CuPy's products are new arrays")
def test_gradients_of_heads_that_were_cut_from_rows_lie_in_rows():
    rows, seen = [randn(2, 6, 3, 4, requires_grad=True) for _ in range(3)], []
    heads = [x.transpose(1, 2) for x in rows]
    for x in heads:
        x.register_hook(lambda g: seen.append(g.array))
    scaled_dot_product_attention(*heads, is_causal=True).sum().backward()
    assert [g.strides for g in seen] == [x.array.strides for x in reversed(heads)]
    assert all(x.grad.array.flags.c_contiguous for x in rows)


@pytest.mark.host("on a GPU no bias is kept")
def test_a_small_bias_of_a_band_is_made_once(monkeypatch):
    """The same numbers as of one that is not kept; nobody can write into it."""
    def biases(*queries):
        seen = []
        with observing(lambda node, args, out: seen.append((args[3].array, out.array))):
            for x in queries:
                scaled_dot_product_attention(x, x, x, is_causal=True, window=2)
        return seen
    x = randn(2, 5, 4)
    half, wide = x.half(), x.double()
    (a, y), (b, z), (c, _), (d, _) = biases(x, x, half, wide)
    assert a is b and not a.flags.writeable and [n.dtype for n in (a, c, d)] == [np.float32, np.float32, np.float64]
    monkeypatch.setattr(sdpa, "KEPT", 24)
    (a2, y2), (b2, _) = biases(x, x)
    assert a2 is not b2 and a2.tobytes() == a.tobytes() and y2.tobytes() == y.tobytes() == z.tobytes()
