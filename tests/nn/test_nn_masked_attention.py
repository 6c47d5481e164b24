"""`F.attention`: the one call on which everything composes, against plain NumPy with copied key heads."""
import itertools
import math
import tracemalloc

import numpy as np
import pytest

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf.gradcheck import gradcheck
from tinygrad_tf.nn import masks

B, H, T, DH = 2, 4, 6, 4
VALID = torch.tensor([[False, False, True, True, True, True], [True, True, True, True, True, False]])
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 4, 4]])
BIAS = torch.randn(1, H, T, T, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def heads(Hkv=H, Tq=T, Tk=T, seed=0, requires_grad=False, Dv=DH):
    random = np.random.default_rng(seed)
    shapes = (B, H, Tq, DH), (B, Hkv, Tk, DH), (B, Hkv, Tk, Dv)
    return [torch.tensor(random.normal(size=s), requires_grad=requires_grad) for s in shapes]


def softcap(score, b, h, q_idx, kv_idx):
    return 2 * (score / 2).tanh()


def alibi_like(score, b, h, q_idx, kv_idx):
    return score - (q_idx - kv_idx).abs() * 0.5 ** (h + 1)


def plain(q, k, v, visible, bias=None, score_mod=None, scale=None):
    """(A V, A), with a copy of its key head for every query head."""
    q, k, v = (x.detach().cpu().numpy() for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if score_mod is not None:
        b, h, i, j = np.ogrid[:B, :H, :q.shape[2], :k.shape[2]]
        scores = score_mod(torch.tensor(scores), *map(torch.tensor, (b, h, i + k.shape[2] - q.shape[2], j))).cpu().numpy()
    scores = np.where(visible, scores + (0 if bias is None else bias.cpu().numpy()), -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-1e9)
    e = np.exp(scores - top)
    weights = e / np.maximum(e.sum(axis=-1, keepdims=True), 1e-300)
    return weights @ v, weights


HEADS = (H, 2, 1)
COMBINATIONS = list(itertools.product(HEADS, (False, True), (None, 2), (False, True), (None, "packing"), (None, softcap, alibi_like)))


@pytest.mark.parametrize("Hkv, causal, window, padded, mod, score_mod", COMBINATIONS)
def test_everything_composes(Hkv, causal, window, padded, mod, score_mod):
    q, k, v = heads(Hkv)
    visible, i = np.ones((B, 1, T, T), bool), np.arange(T)
    if causal or window:
        visible = visible & (i <= i[:, None])
    if window:
        visible = visible & (i > i[:, None] - window)
    if padded:
        visible = visible & VALID.cpu().numpy()[:, None, None, :]
    if mod:
        visible = visible & (SEGMENTS.cpu().numpy()[:, None, None, :] == SEGMENTS.cpu().numpy()[:, None, :, None])
    options = {"causal": causal, "window": window, "allowed": masks.padding_mask(VALID) if padded else None,
               "mask_mod": masks.packing_mod(SEGMENTS, causal=False) if mod else None, "score_mod": score_mod}
    for bias in (None, BIAS):
        expected, weights = plain(q, k, v, visible, bias, score_mod)
        out, ours = F.attention(q, k, v, bias=bias, return_weights=True, **options)
        np.testing.assert_allclose(F.attention(q, k, v, bias=bias, **options).cpu().numpy(), expected, atol=1e-12)
        np.testing.assert_allclose(out.cpu().numpy(), expected, atol=1e-12)
        np.testing.assert_allclose(ours.cpu().numpy(), weights, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 3}, {"score_mod": softcap, "causal": True},
                                     {"allowed": masks.packing_mask(SEGMENTS), "bias": BIAS}, {"score_mod": alibi_like, "bias": BIAS}])
@pytest.mark.parametrize("Hkv", [2, 1])
@pytest.mark.parametrize("return_weights", [False, True])
def test_grouped_heads_equal_copied_ones(options, Hkv, return_weights):
    results = []
    for copied in (False, True):
        q, k, v = heads(Hkv, requires_grad=True)
        used = [x.repeat_interleave(H // Hkv, dim=1) if copied else x for x in (k, v)]
        out = F.attention(q, *used, return_weights=return_weights, **options)
        loss = (out[0] ** 2).sum() + (out[1] ** 3).sum() if return_weights else (out ** 2).sum()
        loss.backward()
        results.append([loss.item(), *(x.grad.cpu().numpy() for x in (q, k, v))])
    for grouped, copied in zip(*results):
        np.testing.assert_allclose(grouped, copied, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"return_weights": True}, {"score_mod": softcap}, {"window": 64}])
def test_grouped_keys_and_values_are_not_copied(options):
    q, k, v = torch.ones(1, 32, 1, 64), torch.ones(1, 1, 4096, 64), torch.ones(1, 1, 4096, 64)
    F.attention(q, k[:, :, :8], v[:, :, :8], **options)
    tracemalloc.start()
    F.attention(q, k, v, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * k.array.nbytes / 4           # scores and weights; copies alone would be 2 · 32 times the keys


@pytest.mark.parametrize("score_mod", [None, softcap])
@pytest.mark.parametrize("how", [{"allowed": torch.tensor([True] * 3 + [False] + [True] * 2)[:, None].expand(T, T)},
                                 {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx != 3) & (kv_idx >= 0)},
                                 {"bias": torch.zeros(T, T, dtype=torch.float64).masked_fill(torch.arange(T)[:, None] == 3, -torch.inf)}])
@pytest.mark.parametrize("Hkv", HEADS)
def test_a_query_that_sees_nothing_gets_zeros(score_mod, how, Hkv):
    for return_weights in (False, True):
        q, k, v = heads(Hkv, requires_grad=True)
        out = F.attention(q, k, v, score_mod=score_mod, return_weights=return_weights, **how)
        if return_weights:
            assert (out[1][:, :, 3] == 0).all()
            out = out[0]
        assert (out[:, :, 3] == 0).all() and (out[:, :, 2] != 0).any()
        (out ** 2).sum().backward()
        assert (q.grad[:, :, 3] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_score_mod_may_block_with_minus_infinity():
    def causal(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx <= q_idx, score, -torch.inf)
    q, k, v = heads()
    for return_weights in (False, True):
        mine = F.attention(q, k, v, score_mod=causal, query_offset=-2, return_weights=return_weights)
        masked = F.attention(q, k, v, causal=True, query_offset=-2, return_weights=return_weights)
        for a, b in zip(mine, masked):
            np.testing.assert_allclose(a.cpu().numpy(), b.cpu().numpy(), atol=1e-12)


@pytest.mark.parametrize("Tq, Tk", [(2, 5), (5, 5), (1, 4), (4, 2)])
def test_queries_are_the_last_positions_and_pytorchs_the_first(Tq, Tk):
    q, k, v = heads(Tq=Tq, Tk=Tk)
    i, j = np.arange(Tq)[:, None], np.arange(Tk)
    for offset, first in ((None, Tk - Tq), (0, 0), (2, 2), (3, 3), (-1, -1)):
        expected, _ = plain(q, k, v, j <= i + first)
        np.testing.assert_allclose(F.attention(q, k, v, causal=True, query_offset=offset).cpu().numpy(), expected, atol=1e-12)
        expected, _ = plain(q, k, v, (j <= i + first) & (j > i + first - 2))
        np.testing.assert_allclose(F.attention(q, k, v, window=2, query_offset=offset).cpu().numpy(), expected, atol=1e-12)
    top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(F.attention(q, k, v, causal=True, query_offset=0).cpu().numpy(), top_left.cpu().numpy(), atol=1e-12)


def test_one_mask_given_twice_is_harmless_here_and_refused_by_pytorchs_call():
    q, k, v = heads()
    once = F.attention(q, k, v, causal=True)
    twice = F.attention(q, k, v, causal=True, allowed=masks.causal_mask(T), mask_mod=masks.causal_mod)
    assert (once == twice).all()
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=masks.causal_mask(T), is_causal=True)


@pytest.mark.parametrize("Hkv", HEADS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"bias": BIAS}, {"allowed": masks.packing_mask(SEGMENTS)}])
def test_score_mod_gradients(Hkv, options):
    """In q, k and v, and in a tensor that score_mod closes over."""
    q, k, v = heads(Hkv, requires_grad=True)
    slopes = torch.tensor(np.random.default_rng(1).normal(size=(1, H, 1, 1)), requires_grad=True)

    def attend(q, k, v, slopes):
        def score_mod(score, b, h, q_idx, kv_idx):
            return softcap(score, b, h, q_idx, kv_idx) + slopes[:, h.reshape(-1)] * (q_idx - kv_idx)
        return F.attention(q, k, v, score_mod=score_mod, **options)
    assert gradcheck(attend, (q, k, v, slopes), fast_mode=True)
    if Hkv == 2:
        assert gradcheck(lambda *inputs: attend(*inputs)[:, :, 2:4], (q, k, v, slopes))         # element by element


def test_bias_gets_its_gradient():
    q, k, v = heads(2, requires_grad=True)
    bias = torch.tensor(np.random.default_rng(1).normal(size=(1, H, T, T)), requires_grad=True)
    for options in ({}, {"window": 2}, {"window": 2, "return_weights": True}):
        assert gradcheck(lambda q, k, v, bias, options=options: F.attention(q, k, v, bias=bias, **options), (q, k, v, bias), fast_mode=True)


def test_the_identity_as_score_mod_changes_nothing():
    q, k, v = heads(2)
    for options in ({"scale": 0.3}, {"causal": True}, {"allowed": masks.packing_mask(SEGMENTS), "bias": BIAS}):
        np.testing.assert_allclose(F.attention(q, k, v, score_mod=lambda score, *where: score, **options).cpu().numpy(),
                                   F.attention(q, k, v, **options).cpu().numpy(), atol=1e-12)


@pytest.mark.parametrize("score_mod", [None, softcap])
@pytest.mark.parametrize("Hkv", [H, 2])
def test_dropout_is_one_stream_with_and_without_weights(score_mod, Hkv):
    q, k, v = heads(Hkv)
    results = []
    for return_weights in (False, True):
        torch.manual_seed(3)
        results.append(F.attention(q, k, v, causal=True, score_mod=score_mod, dropout_p=0.5, return_weights=return_weights))
    out, (same, weights) = results
    np.testing.assert_allclose(out.cpu().numpy(), same.cpu().numpy(), atol=1e-12)
    _, whole = F.attention(q, k, v, causal=True, score_mod=score_mod, return_weights=True)
    kept = weights.cpu().numpy() != 0
    np.testing.assert_allclose(weights.cpu().numpy()[kept], 2 * whole.cpu().numpy()[kept], atol=1e-12)
    assert 0 < kept.sum() < (whole.cpu().numpy() != 0).sum()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 2}, {"mask_mod": masks.causal_mod}, {"causal": True, "bias": BIAS},
                                     {"causal": True, "score_mod": softcap}, {"allowed": masks.packing_mask(SEGMENTS)}])
@pytest.mark.parametrize("Hkv", [H, 1])
@pytest.mark.parametrize("return_weights", [False, True])
def test_nothing_comes_out_of_later_keys(junk, options, Hkv, return_weights):
    def run(k, v):
        found = F.attention(q, k, v, return_weights=return_weights, **options)
        return found if return_weights else (found,)
    q, k, v = heads(Hkv)
    before = run(k, v)
    for spoiled in (k, v):
        spoiled[:, :, 4:] = junk
    for a, b in zip(before, run(k, v)):
        assert (a[:, :, :4] == b[:, :, :4]).all()
    assert not v[:, :, 4:].isfinite().all() or junk == 1e300
    if junk != 1e300:
        assert not run(k, v)[0][:, :, 5].isfinite().all()           # who sees it, sees it


@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("spoiled", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("Hkv", [H, 2])
@pytest.mark.parametrize("score_mod", [None, softcap, alibi_like])
@pytest.mark.parametrize("return_weights", [False, True])
def test_nothing_comes_back_from_blocked_places(junk, spoiled, Hkv, score_mod, return_weights):
    """The gradients of one text do not change, whatever stands in another text of the same row."""
    gradients = []
    for value in (0.0, junk):
        inputs = heads(Hkv)
        inputs[spoiled][:, :, :3] = value
        for x in inputs:
            x.requires_grad_()
        segments = torch.tensor([[0, 0, 0, 1, 1, 1]] * B)
        out = F.attention(*inputs, mask_mod=masks.packing_mod(segments), score_mod=score_mod, return_weights=return_weights)
        ((out[0] if return_weights else out)[:, :, 3:] ** 2).sum().backward()
        gradients.append([x.grad.cpu().numpy()[:, :, 3:] for x in inputs])
    for before, after in zip(*gradients):
        assert np.isfinite(after).all() and np.abs(after).max() > 0
        np.testing.assert_allclose(after, before, atol=1e-12)


@pytest.mark.parametrize("return_weights", [False, True])
def test_scores_of_half_precision_are_float32(return_weights):
    """q · k = 2 · 300² is beyond the largest float16 number, 65504; a score_mod gets it whole."""
    q, k, v = torch.full((1, 1, 2, 2), 300.0), torch.full((1, 1, 2, 2), 300.0), torch.randn(1, 1, 2, 2)
    seen = []

    def halved(score, *where):
        seen.append(score)
        return score / 2
    options = {"scale": 1.0, "causal": True, "return_weights": return_weights}
    half, full = (F.attention(*(x.to(dtype) for x in (q, k, v)), score_mod=halved, **options) for dtype in (torch.float16, torch.float32))
    half, full = (half[0], full[0]) if return_weights else (half, full)
    assert [s.dtype for s in seen] == [torch.float32] * 2 and (seen[0] == 180000).all() and half.dtype is torch.float16
    np.testing.assert_allclose(half.tolist(), full.tolist(), atol=1e-3)


def test_values_may_be_wider_than_keys():
    q, k, v = heads(2, Dv=7)
    expected, _ = plain(q, k, v, True)
    assert tuple(expected.shape) == (B, H, T, 7)
    for options in ({}, {"score_mod": lambda score, *where: score}):
        np.testing.assert_allclose(F.attention(q, k, v, **options).cpu().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(F.attention(q, k, v, return_weights=True)[0].cpu().numpy(), expected, atol=1e-12)


def test_float32_stays_float32():
    q, k, v = (x.float() for x in heads(2))
    for options in ({}, {"score_mod": alibi_like}, {"bias": BIAS}, {"window": 2}):
        out, weights = F.attention(q, k, v, return_weights=True, **options)
        assert F.attention(q, k, v, **options).dtype is out.dtype is weights.dtype is torch.float32


@pytest.mark.torch
@pytest.mark.parametrize("Hkv", HEADS)
def test_it_is_flex_attention(Hkv, monkeypatch):
    theirs = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)      # plain PyTorch: no compiler is loaded
    q, k, v = heads(Hkv)
    mod = masks.and_masks(masks.causal_mod, masks.sliding_window_mod(3))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * 0.5 + (q_idx - kv_idx) * h
    block_mask = flex.create_block_mask(mod, B, H, T, T, device="cpu")
    expected = flex.flex_attention(*(theirs.tensor(x.cpu().numpy()) for x in (q, k, v)), score_mod=score_mod, block_mask=block_mask,
                                   enable_gqa=Hkv != H)
    np.testing.assert_allclose(F.attention(q, k, v, mask_mod=mod, score_mod=score_mod).cpu().numpy(), expected.cpu().numpy(), atol=1e-10)


Q, K, V = heads(2)


@pytest.mark.parametrize("call, error, words", [
    (lambda: F.attention(Q[0], K[0], V[0]), ValueError, r"x\.unsqueeze\(1\)"),
    (lambda: F.attention(Q, K[:, :, :3], V), ValueError, "must have 4 axes and agree"),
    (lambda: F.attention(Q, K[:1], V[:1]), ValueError, "must have 4 axes and agree"),
    (lambda: F.attention(Q[:, :3], K, V), ValueError, "divisor of H"),
    (lambda: F.attention(Q, K[..., :3], V), ValueError, "agree"),
    (lambda: F.attention(Q, K.float(), V), RuntimeError, "same float dtype"),
    (lambda: F.attention(Q.tolist(), K, V), TypeError, "must be Tensor"),
    (lambda: F.attention(Q, K, V, allowed=BIAS), TypeError, "numbers that are added to the scores are `bias`"),
    (lambda: F.attention(Q, K, V, allowed=masks.causal_mask(T)[None].expand(B, T, T)), ValueError, r"allowed\[:, None\]"),
    (lambda: F.attention(Q, K, V, allowed=masks.causal_mask(T + 1)), ValueError, "broadcast"),
    (lambda: F.attention(Q, K, V, bias=masks.causal_mask(T)), TypeError, "is `allowed`"),
    (lambda: F.attention(Q, K, V, bias=BIAS[..., :3]), ValueError, "bias must broadcast"),
    *[(lambda causal=causal: F.attention(Q, K, V, causal=causal), TypeError, "causal must be a bool")
      for causal in ("no", 0, 1, None, np.True_, masks.causal_mask(T))],
    *[(lambda scale=scale, options=options: F.attention(Q, K, V, scale=scale, **options), TypeError,
       r"scale must be a number.*query \* scale")
      for scale in (torch.tensor(0.5), torch.tensor(0.5, requires_grad=True), torch.ones(H, 1, 1), "1")
      for options in ({}, {"return_weights": True}, {"score_mod": softcap})],
    (lambda: F.attention(Q, K, V, window=0), ValueError, "width must be at least 1"),
    (lambda: F.attention(Q, K, V, window=True), TypeError, "whole number"),
    (lambda: F.attention(Q, K, V, causal=True, query_offset="end"), TypeError, "query_offset"),
    (lambda: F.attention(Q, K, V, mask_mod=lambda b, h, q, k: q - k), TypeError, "mask_mod: what it returns must be a bool tensor"),
    (lambda: F.attention(Q, K, V, score_mod=lambda score, *where: score[0]), ValueError, "score_mod must return"),
    (lambda: F.attention(Q, K, V, score_mod=lambda score, *where: score > 0), TypeError, "float tensor"),
    (lambda: F.attention(Q, K, V, score_mod=lambda score, *where: None), ValueError, "score_mod must return"),
    (lambda: F.attention(Q, K, V, dropout_p=1.5), ValueError, "between 0 and 1")])
def test_wrong_calls(call, error, words):
    with pytest.raises(error, match=words):
        call()
