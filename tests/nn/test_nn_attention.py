"""Attention layers against a reference in NumPy, against each other, and against values recorded from PyTorch."""
import itertools
import math

import numpy as np
import pytest
import record_nn

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.gradcheck import gradcheck_module
from tinygrad_tf.ops.shape import cat

B, T, C = 2, 5, 8
LEFT_PADDED = torch.tensor([[False, False, True, True, True], [True] * 5])
RIGHT_PADDED = torch.tensor([[True, True, True, False, False], [True] * 5])
NOBODY = torch.tensor([[False] * 5, [True] * 5])


class Cache:
    """The least that a cache must do."""

    def __init__(self):
        self.k = self.v = None

    def update(self, k, v):
        self.k, self.v = (k, v) if self.k is None else (cat([self.k, k], dim=2), cat([self.v, v], dim=2))
        return self.k, self.v


def layer_and_input(num_heads=4, num_kv_heads=None, seed=0, **options):
    torch.manual_seed(seed)
    layer = nn.MultiHeadAttention(C, num_heads, num_kv_heads, **options).double()
    return layer, torch.randn(B, T, C, dtype=torch.float64)


def reference(layer, x, context, visible):
    """Attention with loops over samples, heads and queries; `visible` [B, H, Tq, Tk]."""
    def project(linear, y):
        return y @ linear.weight.detach().numpy().T + (0 if linear.bias is None else linear.bias.detach().numpy())
    Dh, group = layer.head_dim, layer.num_heads // layer.num_kv_heads
    q, k, v = project(layer.q_proj, x), project(layer.k_proj, context), project(layer.v_proj, context)
    out, weights = np.zeros(q.shape), np.zeros((len(x), layer.num_heads, x.shape[1], context.shape[1]))
    for b, h, i in np.ndindex(weights.shape[:3]):
        keys = np.flatnonzero(visible[b, h, i])
        mine, theirs = slice(h * Dh, (h + 1) * Dh), slice(h // group * Dh, (h // group + 1) * Dh)
        if len(keys):
            e = np.exp(k[b, keys, theirs] @ q[b, i, mine] / math.sqrt(Dh))
            weights[b, h, i, keys] = e / e.sum()
            out[b, i, mine] = weights[b, h, i, keys] @ v[b, keys, theirs]
    return project(layer.out_proj, out), weights


HEADS = [(1, 1), (2, 2), (4, 4), (4, 2), (4, 1)]
TOKENS = {"all": None, "left": LEFT_PADDED, "right": RIGHT_PADDED, "none": NOBODY}
ALLOWED = {"any": None, "plane": torch.ones(T, T, dtype=bool).triu(-1), "samples": torch.ones(B, 1, T, T, dtype=bool).tril(2),
           "keys": torch.tensor([[True, False, True, True, True]])}


MIXES = list(itertools.product(HEADS, (False, True), TOKENS, ALLOWED, (True, False)))


@pytest.mark.parametrize("heads, causal, tokens, allowed, bias", MIXES)
def test_every_mix_of_masks_is_what_it_says(heads, causal, tokens, allowed, bias):
    layer, x = layer_and_input(*heads, bias=bias)
    valid, extra = TOKENS[tokens], ALLOWED[allowed]
    visible = np.ones((B, heads[0], T, T), bool)
    if causal:
        visible &= np.tri(T, dtype=bool)
    if valid is not None:
        visible &= valid.numpy()[:, None, None, :]
    if extra is not None:
        visible &= extra.numpy()
    out, weights = reference(layer, x.numpy(), x.numpy(), visible)
    if valid is not None:
        out = np.where(valid.numpy()[:, :, None], out, 0.0)
    options = {"causal": causal, "valid_tokens": valid, "allowed": extra}
    ours, ours_weights = layer(x, return_weights=True, **options)
    np.testing.assert_allclose(layer(x, **options).detach().numpy(), out, atol=1e-12)
    np.testing.assert_allclose(ours.detach().numpy(), out, atol=1e-12)
    np.testing.assert_allclose(ours_weights.detach().numpy(), weights, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"valid_tokens": LEFT_PADDED, "causal": True}, {"allowed": ALLOWED["plane"]},
                                     {"return_weights": True}, {"return_weights": True, "causal": True, "valid_tokens": NOBODY}])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_gradients(options, num_kv_heads):
    layer, x = layer_and_input(4, num_kv_heads)
    assert gradcheck_module(lambda_module(layer, options), x[:, :5].requires_grad_(), fast_mode=True)


def lambda_module(layer, options):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, **options)
    return Fixed()


def test_padding_changes_nothing_for_real_tokens():
    layer, x = layer_and_input()
    alone = layer(x[:1, 2:], causal=True)
    padded = layer(x, causal=True, valid_tokens=LEFT_PADDED)
    np.testing.assert_allclose(padded[:1, 2:].tolist(), alone.tolist(), atol=1e-12)
    assert (padded[0, :2] == 0).all()
    padded.sum().backward()
    assert all(np.isfinite(p.grad.numpy()).all() for p in layer.parameters())


def test_no_nan_comes_out_of_a_masked_key():
    layer, x = layer_and_input()
    x[0, 0] = float("nan")
    for options in ({}, {"return_weights": True}):
        out = layer(x, valid_tokens=LEFT_PADDED, **options)
        out = out[0] if options else out
        assert np.isfinite(out.detach().numpy()).all()


def test_causal_outputs_do_not_depend_on_later_tokens():
    layer, x = layer_and_input()
    before = layer(x, causal=True)
    x[:, 3:] = 9.0
    assert (layer(x, causal=True)[:, :3] == before[:, :3]).all() and (layer(x)[:, :3] != before[:, :3]).all()


@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1), (3, 1, 1), (2, 3), (1, 4), (5,)])
@pytest.mark.parametrize("tokens", ["all", "left"])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("return_weights", [False, True])
def test_cached_equals_uncached(chunks, tokens, num_kv_heads, return_weights):
    layer, x = layer_and_input(4, num_kv_heads)
    valid = TOKENS[tokens]
    whole = layer(x, causal=True, valid_tokens=valid)
    cache, parts, start = Cache(), [], 0
    for n in chunks:
        seen = None if valid is None else valid[:, :start + n]
        part = layer(x[:, start:start + n], causal=True, valid_tokens=seen, cache=cache, return_weights=return_weights)
        parts.append(part[0] if return_weights else part)
        start += n
    np.testing.assert_allclose(cat(parts, dim=1).tolist(), whole.tolist(), atol=1e-12)
    assert cache.k.shape == (B, num_kv_heads, T, C // 4)


def test_cross_attention():
    layer, x = layer_and_input()
    context, valid = torch.randn(B, 3, C, dtype=torch.float64), torch.tensor([[True, True, False], [True, True, True]])
    visible = np.broadcast_to(valid.numpy()[:, None, None, :], (B, 4, T, 3))
    expected, weights = reference(layer, x.numpy(), context.numpy(), visible)
    out, ours = layer(x, context, valid_tokens=valid, return_weights=True)
    np.testing.assert_allclose(out.tolist(), expected, atol=1e-12)
    np.testing.assert_allclose(ours.tolist(), weights, atol=1e-12)
    np.testing.assert_allclose(layer(x, context=context, valid_tokens=valid).tolist(), expected, atol=1e-12)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_dropout_acts_on_the_weights_in_training(num_kv_heads):
    layer, x = layer_and_input(4, num_kv_heads, dropout=0.5)
    torch.manual_seed(1)
    out, weights = layer(x, causal=True, return_weights=True)
    torch.manual_seed(1)
    np.testing.assert_allclose(layer(x, causal=True).tolist(), out.tolist(), atol=1e-12)
    _, whole = layer.eval()(x, causal=True, return_weights=True)
    kept = weights.detach().numpy() != 0
    assert kept.sum() < (whole.detach().numpy() != 0).sum()
    np.testing.assert_allclose(weights.detach().numpy()[kept], 2 * whole.detach().numpy()[kept], atol=1e-12)
    assert (layer(x) == layer(x)).all()


@pytest.mark.parametrize("options, error", [
    ({"dim": 7}, ValueError), ({"num_heads": 3}, ValueError), ({"num_heads": 0}, ValueError), ({"dim": 0}, ValueError),
    ({"num_kv_heads": 3}, ValueError), ({"num_kv_heads": 0}, ValueError), ({"dropout": 1.5}, ValueError)])
def test_impossible_layers_are_refused(options, error):
    with pytest.raises(error, match="must be divisible|dropout"):
        nn.MultiHeadAttention(**{"dim": 8, "num_heads": 4, **options})


def true(*shape):
    return torch.ones(*shape, dtype=bool)


def context(*shape):
    return torch.ones(*shape, dtype=torch.float64)


@pytest.mark.parametrize("options", [
    {"valid_tokens": true(B, T - 1)}, {"valid_tokens": true(T)}, {"valid_tokens": [[True] * T] * B},
    {"allowed": true(B, T, T)}, {"allowed": true(T, T + 1)}, {"allowed": true(3, 1, T, T)}, {"allowed": true(T)},
    {"context": context(1, 3, C)}, {"context": context(B, 3, 4)}, {"context": context(B, T, C), "causal": True},
    {"context": context(B, T, C), "cache": Cache()}])
def test_inputs_that_do_not_fit_are_refused(options):
    layer, x = layer_and_input()
    with pytest.raises(ValueError, match="must|self-attention"):
        layer(x, **options)


def test_masks_must_be_boolean_and_x_three_axes():
    layer, x = layer_and_input()
    for wrong in (torch.ones(T, T), torch.ones(T, T, dtype=torch.int64), np.ones((T, T), bool)):
        with pytest.raises(TypeError, match="boolean"):
            layer(x, allowed=wrong)
    for wrong in (x[0], x[..., :4]):
        with pytest.raises(ValueError, match="B, T, C"):
            layer(wrong)


# --- PyTorch's layer ----------------------------------------------------------------------------------------------

RECORDED = dict(np.load(record_nn.FILE))


@pytest.fixture(scope="module")
def ours():
    return record_nn.attention_values(torch)


def test_multihead_attention_is_that_of_pytorch(ours):
    assert sorted(ours) == sorted(name for name in RECORDED if name.startswith("attention."))
    for name, value in ours.items():
        np.testing.assert_allclose(value, RECORDED[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.torch
def test_multihead_attention_is_that_of_pytorch_live(ours):
    for name, value in record_nn.attention_values(pytest.importorskip("torch")).items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_both_layers_agree():
    mine, x = layer_and_input()
    theirs = nn.MultiheadAttention(C, 4, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict({"in_proj_weight": cat([mine.q_proj.weight, mine.k_proj.weight, mine.v_proj.weight]),
                            "in_proj_bias": cat([mine.q_proj.bias, mine.k_proj.bias, mine.v_proj.bias]),
                            "out_proj.weight": mine.out_proj.weight, "out_proj.bias": mine.out_proj.bias})
    out, weights = mine(x, causal=True, return_weights=True)
    blocked = ~torch.ones(T, T, dtype=bool).tril()
    other, other_weights = theirs(x, x, x, attn_mask=blocked, average_attn_weights=False)
    np.testing.assert_allclose(out.tolist(), other.tolist(), atol=1e-12)
    np.testing.assert_allclose(weights.tolist(), other_weights.tolist(), atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_sample_of_padding_alone_gives_zeros(need_weights):
    layer = nn.MultiheadAttention(C, 2, batch_first=True)
    x = torch.randn(B, T, C, requires_grad=True)
    out, _ = layer(x, x, x, key_padding_mask=~NOBODY, need_weights=need_weights)
    assert (out[0] == layer.out_proj.bias).all()
    out.sum().backward()
    assert np.isfinite(x.grad.numpy()).all() and (x.grad[0] == 0).all()


def test_dropout_of_both_paths_is_one_stream():
    layer = nn.MultiheadAttention(C, 2, dropout=0.5, batch_first=True)
    x = torch.randn(B, T, C)
    results = []
    for need_weights in (True, False):
        torch.manual_seed(2)
        results.append(layer(x, x, x, need_weights=need_weights)[0].tolist())
    np.testing.assert_allclose(*results, atol=1e-6)


@pytest.mark.torch
def test_dropout_is_that_of_pytorch():
    theirs = pytest.importorskip("torch")
    outs = []
    for framework in (theirs, torch):
        framework.manual_seed(5)
        layer = framework.nn.MultiheadAttention(C, 2, dropout=0.4, batch_first=True)
        x = framework.randn(B, T, C)
        outs.append([layer(x, x, x, need_weights=w)[0].tolist() for w in (True, False)])
    np.testing.assert_allclose(*outs, atol=1e-5)


def test_wrong_calls_of_pytorchs_layer():
    layer, x = nn.MultiheadAttention(4, 2), torch.ones(3, 2, 4)
    for call in (lambda: layer(x, x, x, is_causal=True), lambda: layer(x, x[:2], x), lambda: layer(x, x[:, :1], x[:, :1]),
                 lambda: layer(x[0], x, x), lambda: layer(x[..., :3], x, x), lambda: layer(x, x, x, attn_mask=torch.ones(3, 4)),
                 lambda: layer(x, x, x, attn_mask=torch.ones(2, 3, 3)), lambda: layer(x, x, x, key_padding_mask=torch.ones(3, 2)),
                 lambda: layer(x, x, x, key_padding_mask=torch.ones(2, 3, dtype=torch.int64))):
        with pytest.raises(RuntimeError, match="MultiheadAttention"):
            call()
    with pytest.raises(ValueError, match="divisible"):
        nn.MultiheadAttention(5, 2)
