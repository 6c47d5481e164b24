"""Attention layers against a reference in NumPy, against each other, and against values recorded from PyTorch."""
import itertools
import math

import numpy as np
import pytest
import record_nn

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.generation import KVCache
from tinygrad_tf.gradcheck import gradcheck_module
from tinygrad_tf.nn.positions import ALiBi, RotaryEmbedding, T5RelativeBias
from tinygrad_tf.ops.shape import cat

B, T, C = 2, 5, 8
LEFT_PADDED = torch.tensor([[False, False, True, True, True], [True] * 5])
RIGHT_PADDED = torch.tensor([[True, True, True, False, False], [True] * 5])
NOBODY = torch.tensor([[False] * 5, [True] * 5])


class Cache:
    """The least that a cache must do."""

    def __init__(self):
        self.k = self.v = None

    @property
    def length(self):
        return 0 if self.k is None else self.k.shape[2]

    @length.setter
    def length(self, n):
        self.k, self.v = (None, None) if n == 0 else (self.k[:, :, :n], self.v[:, :, :n])

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
        return y @ linear.weight.detach().cpu().numpy().T + (0 if linear.bias is None else linear.bias.detach().cpu().numpy())
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
        visible &= valid.cpu().numpy()[:, None, None, :]
    if extra is not None:
        visible &= extra.cpu().numpy()
    out, weights = reference(layer, x.cpu().numpy(), x.cpu().numpy(), visible)
    if valid is not None:
        out = np.where(valid.cpu().numpy()[:, :, None], out, 0.0)
    options = {"causal": causal, "valid_tokens": valid, "allowed": extra}
    ours, ours_weights = layer(x, return_weights=True, **options)
    np.testing.assert_allclose(layer(x, **options).detach().cpu().numpy(), out, atol=1e-12)
    np.testing.assert_allclose(ours.detach().cpu().numpy(), out, atol=1e-12)
    np.testing.assert_allclose(ours_weights.detach().cpu().numpy(), weights, atol=1e-12)


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
    assert all(np.isfinite(p.grad.cpu().numpy()).all() for p in layer.parameters())


def test_no_nan_comes_out_of_a_masked_key():
    layer, x = layer_and_input()
    x[0, 0] = float("nan")
    for options in ({}, {"return_weights": True}):
        out = layer(x, valid_tokens=LEFT_PADDED, **options)
        out = out[0] if options else out
        assert np.isfinite(out.detach().cpu().numpy()).all()


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
    visible = np.broadcast_to(valid.cpu().numpy()[:, None, None, :], (B, 4, T, 3))
    expected, weights = reference(layer, x.cpu().numpy(), context.cpu().numpy(), visible)
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
    kept = weights.detach().cpu().numpy() != 0
    assert kept.sum() < (whole.detach().cpu().numpy() != 0).sum()
    np.testing.assert_allclose(weights.detach().cpu().numpy()[kept], 2 * whole.detach().cpu().numpy()[kept], atol=1e-12)
    assert (layer(x) == layer(x)).all()


def test_rows_of_dropped_weights_do_not_sum_to_one():
    """Guide 9.6: 1 on average, since what is kept is divided by 1 − p; exactly 1 in evaluation."""
    layer, _ = layer_and_input(4, dropout=0.1)
    x = torch.randn(4, 64, C, dtype=torch.float64)
    sums = layer(x, return_weights=True)[1].sum(dim=-1)
    assert abs(sums.mean().item() - 1) < 0.02 and ((sums - 1).abs() > 1e-6).double().mean() > 0.95
    assert ((layer.eval()(x, return_weights=True)[1].sum(dim=-1) - 1).abs() < 1e-12).all()


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
    {"valid_tokens": true(B, T - 1)}, {"valid_tokens": true(T)},
    {"allowed": true(B, T, T)}, {"allowed": true(T, T + 1)}, {"allowed": true(3, 1, T, T)}, {"allowed": true(T)},
    {"context": context(1, 3, C)}, {"context": context(B, 3, 4)}, {"context": context(B, T, C), "causal": True},
    {"context": context(B, T, C), "cache": Cache()}])
def test_inputs_that_do_not_fit_are_refused(options):
    layer, x = layer_and_input()
    with pytest.raises(ValueError, match="must|self-attention"):
        layer(x, **options)


@pytest.mark.parametrize("call, words", [
    (lambda layer, x: layer(x, x, x), r"causal must be a bool.* got a tensor \(2, 5, 8\).*nn\.MultiheadAttention.*\(query, key, value\)"),
    (lambda layer, x: layer(x, x, 1), r"causal must be a bool.* got 1 \(int\)"),
    (lambda layer, x: layer(x, causal=None), "causal must be a bool"),
    (lambda layer, x: layer(x, causal=nn.masks.causal_mask(T)), "causal must be a bool"),
    (lambda layer, x: layer(x.cpu().numpy()), "x must be a float tensor"),
    (lambda layer, x: layer(x, x.cpu().numpy()), "context must be a tensor"),
    (lambda layer, x: layer(x, True), "context must be a tensor"),
    (lambda layer, x: layer(x, list(layer.keys_and_values(x))), "context must be a tensor .* keys_and_values"),
    (lambda layer, x: layer(x, (x.cpu().numpy(), x.cpu().numpy())), "context must be a tensor .* keys_and_values"),
    (lambda layer, x: layer(x, valid_tokens=[[True] * T] * B), r"valid_tokens must be a boolean tensor \[B, Tk\]"),
    (lambda layer, x: layer(x, valid_tokens=np.ones((B, T), bool)), "valid_tokens must be a boolean tensor"),
    (lambda layer, x: layer(x, allowed=[[True] * T] * T), "allowed must be a boolean tensor"),
    (lambda layer, x: layer(x, allowed=True), "allowed must be a boolean tensor"),
    (lambda layer, x: layer(x, position_ids=list(range(T))), "position_ids must be a tensor of whole numbers")])
def test_arguments_of_another_kind_are_refused(call, words):
    with pytest.raises(TypeError, match=words):
        call(*layer_and_input())


def test_valid_tokens_may_be_zeros_and_ones():
    layer, x = layer_and_input()
    for dtype in torch.int64, torch.float32:
        close(layer(x, valid_tokens=LEFT_PADDED.to(dtype)), layer(x, valid_tokens=LEFT_PADDED))
    to_add = torch.zeros(B, T).masked_fill(~LEFT_PADDED, -torch.inf)
    for wrong in to_add, LEFT_PADDED.long() + 1:
        with pytest.raises(ValueError, match="valid_tokens must be boolean.*0 and 1, got other numbers"):
            layer(x, valid_tokens=wrong)


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
    assert np.isfinite(x.grad.cpu().numpy()).all() and (x.grad[0] == 0).all()


def test_dropout_of_both_paths_is_one_stream():
    layer = nn.MultiheadAttention(C, 2, dropout=0.5, batch_first=True)
    x = torch.randn(B, T, C)
    results = []
    for need_weights in (True, False):
        torch.manual_seed(2)
        results.append(layer(x, x, x, need_weights=need_weights)[0].tolist())
    np.testing.assert_allclose(*results, atol=1e-6)


@pytest.mark.torch
@pytest.mark.host("dropout on a GPU has a stream of its own")
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


@pytest.mark.parametrize("no_tensor", [None, [[1.0]], np.ones((2, 3, 4), np.float32), 1], ids=lambda x: type(x).__name__)
def test_what_is_no_tensor_is_refused_by_name(no_tensor):
    layer, x = nn.MultiheadAttention(4, 2), torch.ones(3, 2, 4)
    for name in "query", "key", "value", "key_padding_mask", "attn_mask":
        if no_tensor is not None or name in ("query", "key", "value"):
            with pytest.raises(TypeError, match=f"MultiheadAttention: {name} must be a Tensor"):
                layer(**{"query": x, "key": x, "value": x, name: no_tensor})


@pytest.mark.parametrize("make", [nn.MultiHeadAttention, nn.MultiheadAttention])
def test_sizes_are_whole_numbers(make):
    for sizes in (None, 2), (4, None), (4.0, 2), ("4", 2), (4, torch.tensor(2)):
        with pytest.raises(TypeError, match="whole numbers"):
            make(*sizes)


# --- positions, windows, mods ---------------------------------------------------------------------------------------

HOLES = torch.tensor([[True, False, True, True, False, False, True], [True] * 7])
LEFT = torch.tensor([[False, False, False, True, True, True, True], [True] * 7])
RIGHT = torch.tensor([[True, True, True, True, False, False, False], [True] * 7])
N = 7
POSITIONS = {
    "none": lambda: {},
    "rope": lambda: {"rope": RotaryEmbedding(2)},
    "rope, half split": lambda: {"rope": RotaryEmbedding(2, layout="half_split")},
    "alibi": lambda: {"relative_bias": ALiBi(4)},
    "t5": lambda: {"relative_bias": T5RelativeBias(4, num_buckets=8, max_distance=6, bidirectional=False)},
    "rope and alibi": lambda: {"rope": RotaryEmbedding(2), "relative_bias": ALiBi(4)},
}
CAUSAL = list(itertools.product(POSITIONS, (4, 2, 1), (None, 3)))


def positioned(position, num_kv_heads=4, window=None, n=N):
    """A layer of dim 8 with 4 heads and n tokens; the T5 table is made large, so that it matters."""
    torch.manual_seed(0)
    layer = nn.MultiHeadAttention(C, 4, num_kv_heads, window=window, **POSITIONS[position]()).double()
    if position == "t5":
        nn.init.normal_(layer.relative_bias.table.weight)
    return layer, torch.randn(B, n, C, dtype=torch.float64)


def close(a, b):
    np.testing.assert_allclose(a.tolist(), b.tolist(), atol=1e-12)


@pytest.mark.parametrize("position, num_kv_heads, window", CAUSAL)
def test_future_tokens_change_no_earlier_output(position, num_kv_heads, window):
    layer, x = positioned(position, num_kv_heads, window)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0] * 7])
    for options in ({}, {"mask_mod": nn.masks.packing_mod(segments)}, {"valid_tokens": LEFT}, {"valid_tokens": HOLES},
                    {"score_mod": lambda score, *where: score.tanh()}, {"return_weights": True}):
        def run(x, options=options):
            found = layer(x, causal=True, **options)
            return found[0] if "return_weights" in options else found
        before = run(x)
        for t in range(1, N):
            changed = x.clone()
            changed[:, t:] = 9.0
            after = run(changed)
            assert (after[:, :t] == before[:, :t]).all() and (after[1, t:] != before[1, t:]).any()


@pytest.mark.parametrize("position, num_kv_heads, window", CAUSAL)
@pytest.mark.parametrize("valid", [LEFT, RIGHT, HOLES], ids=["left", "right", "holes"])
def test_padding_changes_nothing(position, num_kv_heads, window, valid):
    """Wherever it stands: padding takes no place in positions or windows."""
    layer, x = positioned(position, num_kv_heads, window)
    real = valid[0]
    alone = layer(x[:1, real], causal=True)
    padded = layer(x, causal=True, valid_tokens=valid)
    close(padded[:1, real], alone)
    assert (padded[0, ~real] == 0).all()
    close(padded[1], layer(x[1:], causal=True)[0])
    ids = (real.long().cumsum(-1) - 1).clamp(min=0)
    close(layer(x, causal=True, valid_tokens=valid, position_ids=torch.stack([ids, torch.arange(N)])), padded)


@pytest.mark.parametrize("position, num_kv_heads, window", CAUSAL)
def test_packed_texts_equal_separate_ones(position, num_kv_heads, window):
    layer, x = positioned(position, num_kv_heads, window)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 0, 0]])
    packed = layer(x, mask_mod=nn.masks.packing_mod(segments), position_ids=positions)
    for b, start, end in (0, 0, 3), (0, 3, 7), (1, 0, 2), (1, 2, 5), (1, 5, 6):
        close(packed[b:b + 1, start:end], layer(x[b:b + 1, start:end], causal=True))
    close(packed, layer(x, allowed=nn.masks.packing_mask(segments), position_ids=positions))
    assert (packed[1, 6] == layer.out_proj.bias).all()


@pytest.mark.parametrize("position, num_kv_heads, window", CAUSAL)
@pytest.mark.parametrize("tokens", ["all", "left", "right"])
@pytest.mark.parametrize("chunks", [(1,) * 7, (4, 1, 2), (3, 4)])
def test_cached_equals_uncached_at_all_positions(position, num_kv_heads, window, tokens, chunks):
    layer, x = positioned(position, num_kv_heads, window)
    valid = {"all": None, "left": LEFT, "right": RIGHT}[tokens]
    whole = layer(x, causal=True, valid_tokens=valid)
    for given in (False, True):
        cache, parts, start = Cache(), [], 0
        for n in chunks:
            seen = None if valid is None else valid[:, :start + n]
            ids = torch.arange(start, start + n) if given and valid is None else None
            parts.append(layer(x[:, start:start + n], causal=True, valid_tokens=seen, cache=cache, position_ids=ids))
            start += n
        close(cat(parts, dim=1), whole)


@pytest.mark.parametrize("position", [p for p in POSITIONS if p != "none"])
def test_a_position_scheme_tells_order(position):
    """Without one, a query's output does not depend on the order of the keys; with one, it does; a common shift does nothing."""
    swapped = torch.tensor([1, 0, 2, 3, 4, 5, 6])
    for name in ("none", position):
        layer, x = positioned(name)
        same = np.allclose(layer(x)[:, -1].tolist(), layer(x[:, swapped])[:, -1].tolist(), atol=1e-9)
        assert same == (name == "none")
    close(layer(x, causal=True, position_ids=torch.arange(5, 5 + N)), layer(x, causal=True))
    assert not np.allclose(layer(x, position_ids=2 * torch.arange(N)).tolist(), layer(x).tolist())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("valid", [LEFT, RIGHT, HOLES], ids=["left", "right", "holes"])
def test_a_window_is_causal_also_in_the_weights_of_padded_queries(causal, valid):
    layer, x = positioned("rope", window=2)
    _, weights = layer(x, causal=causal, valid_tokens=valid, return_weights=True)
    later_or_padded = ~(nn.masks.causal_mask(N) & nn.masks.padding_mask(valid)).expand(B, 4, N, N)
    assert (weights[later_or_padded] == 0).all() and ((weights > 0).sum(dim=-1) <= 2).all()
    np.testing.assert_allclose(weights[0, :, valid[0]].sum(dim=-1).tolist(), 1.0, atol=1e-12)


def test_rope_turns_queries_and_keys_and_not_values():
    layer, x = positioned("rope")
    _, weights = layer(x, causal=True, return_weights=True)
    q, (k, v) = layer.q_proj(x).reshape(B, N, 4, 2).transpose(1, 2), layer.keys_and_values(x)
    scores = layer.rope(q) @ layer.rope(k).transpose(-2, -1) / math.sqrt(2)
    expected = scores.masked_fill(~nn.masks.causal_mask(N), -torch.inf).softmax(dim=-1)
    close(weights, expected)
    close(layer(x, causal=True), layer.out_proj((expected @ v).transpose(1, 2).reshape(B, N, C)))


def test_alibi_adds_its_bias():
    layer, x = positioned("alibi")
    bare, _ = positioned("none")
    bare.load_state_dict(layer.state_dict())

    def as_score_mod(score, b, h, q_idx, kv_idx):
        return score - 2.0 ** (-2 * (h + 1)) * (q_idx - kv_idx)
    close(layer(x, causal=True), bare(x, causal=True, score_mod=as_score_mod))


@pytest.mark.parametrize("position", POSITIONS)
def test_gradients_of_positions_windows_and_mods(position):
    layer, x = positioned(position, 2, 3)
    options = {"valid_tokens": LEFT, "score_mod": lambda score, *where: 2 * (score / 2).tanh()}
    assert gradcheck_module(lambda_module(layer, options), x.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("return_weights", [False, True])
def test_rope_causal_grouped_window_and_score_function_at_once(packed, return_weights):
    """Guide 18: the methods do not exclude each other. Against loops over rows, heads and queries."""
    layer, x = positioned("rope", 2, 3)
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0] * 7])
    mod = nn.masks.packing_mod(segments) if packed else None

    def score_mod(score, b, h, i, j):
        return score - 0.1 * (h * (i - j)).to(score.dtype)          # whole numbers times 0.1 alone would be float32
    out = layer(x, causal=True, valid_tokens=LEFT, mask_mod=mod, score_mod=score_mod, return_weights=return_weights)
    out = (out[0] if return_weights else out).detach().cpu().numpy()
    q = layer.rope(layer.q_proj(x).reshape(B, N, 4, 2).transpose(1, 2)).detach().cpu().numpy()
    k, v = layer.keys_and_values(x)
    k, v = layer.rope(k).detach().cpu().numpy(), v.detach().cpu().numpy()
    mixed, real, texts = np.zeros((B, N, C)), LEFT.cpu().numpy(), segments.cpu().numpy() if packed else np.zeros((B, N))
    for b, h, i in np.ndindex(B, 4, N):
        keys = [j for j in range(max(0, i - 2), i + 1) if real[b, j] and texts[b, i] == texts[b, j]]
        if keys:
            scores = k[b, h // 2, keys] @ q[b, h, i] / math.sqrt(2) - 0.1 * h * (i - np.array(keys))
            e = np.exp(scores - scores.max())
            mixed[b, i, 2 * h:2 * h + 2] = e / e.sum() @ v[b, h // 2, keys]
    expected = mixed @ layer.out_proj.weight.detach().cpu().numpy().T + layer.out_proj.bias.detach().cpu().numpy()
    np.testing.assert_allclose(out, np.where(real[:, :, None], expected, 0), atol=1e-12)


def test_names_in_the_state_dict_are_those_of_the_projections():
    bare = [f"{p}_proj.{w}" for p in ("q", "k", "v", "out") for w in ("weight", "bias")]
    for position in POSITIONS:
        layer, _ = positioned(position, window=3)
        assert list(layer.state_dict()) == bare + (["relative_bias.table.weight"] if position == "t5" else [])


@pytest.mark.parametrize("return_weights", [False, True])
def test_nan_in_a_later_token_goes_nowhere(return_weights):
    layer, x = positioned("rope", 2)
    spoiled = x.clone()
    spoiled[:, 4:] = float("nan")
    before, after = (layer(y, causal=True, return_weights=return_weights) for y in (x, spoiled))
    before, after = (before[0], after[0]) if return_weights else (before, after)
    assert (after[:, :4] == before[:, :4]).all() and after[:, 4:].isnan().all()


def test_keys_and_values_of_a_context_are_computed_once():
    layer, x = layer_and_input(4, 2)
    memory = torch.randn(B, 3, C, dtype=torch.float64)
    valid = torch.tensor([[True, True, False], [True] * 3])
    pair = layer.keys_and_values(memory)
    assert [tuple(t.shape) for t in pair] == [(B, 2, 3, 2)] * 2
    for step in range(T):
        close(layer(x[:, step:step + 1], context=pair, valid_tokens=valid), layer(x[:, step:step + 1], memory, valid_tokens=valid))


WRONG = {
    "valid_tokens, short": ({"valid_tokens": true(B, 2)}, ValueError, "valid_tokens must"),
    "valid_tokens, of the new ones": ({"valid_tokens": true(B, 3)}, ValueError, "valid_tokens must"),
    "valid_tokens, a list": ({"valid_tokens": [[True] * 5] * B}, TypeError, "valid_tokens must"),
    "allowed": ({"allowed": true(3, 3)}, ValueError, "allowed must"),
    "allowed, float": ({"allowed": torch.ones(3, 5)}, TypeError, "boolean"),
    "position_ids, of all": ({"position_ids": torch.arange(5)}, ValueError, "position_ids must"),
    "position_ids, another batch": ({"position_ids": torch.zeros(3, 3, dtype=torch.int64)}, ValueError, "position_ids must"),
    "position_ids, float": ({"position_ids": torch.zeros(3)}, TypeError, "whole numbers"),
    "position_ids, negative": ({"position_ids": torch.arange(3) - 1}, ValueError, "positions must be"),
    "mask_mod": ({"mask_mod": lambda b, h, i, j: i - j}, TypeError, "mask_mod"),
    "score_mod, failing": ({"score_mod": lambda *arguments: 1 / 0}, ZeroDivisionError, "division"),
    "score_mod, returning nothing": ({"score_mod": lambda *arguments: None}, ValueError, "score_mod must"),
    "score_mod, returning a bool": ({"score_mod": lambda score, *where: score > 0}, TypeError, "score_mod must"),
    "x": ({"x": torch.ones(B, 3, C + 1, dtype=torch.float64)}, ValueError, "x must be"),
    "context": ({"context": torch.ones(B, 3, C, dtype=torch.float64)}, ValueError, "self-attention"),
}


@pytest.mark.parametrize("make_cache", [lambda: KVCache(1, 8).layer(0), Cache], ids=["KVCache", "one of one's own"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_refused_call_leaves_the_cache_as_it_was(wrong, make_cache):
    options, error, words = WRONG[wrong]
    layer, x = positioned("rope", n=5)
    with torch.no_grad():
        whole = layer(x, causal=True)
        cache = make_cache()
        with pytest.raises(ZeroDivisionError):
            layer(x, cache=cache, score_mod=lambda *arguments: 1 / 0)
        assert cache.length == 0
        layer(x[:, :2], causal=True, cache=cache)
        with pytest.raises(error, match=words):
            layer(**{"x": x[:, 2:], "causal": True, "cache": cache, **options})
        assert cache.length == 2
        close(layer(x[:, 2:], causal=True, cache=cache), whole[:, 2:])


@pytest.mark.parametrize("cached", [0, 3])
@pytest.mark.parametrize("return_weights", [False, True])
def test_no_new_tokens_are_no_fault(cached, return_weights):
    layer, x = positioned("rope", n=5)
    cache, valid = KVCache(1, 8).layer(0), torch.ones(B, cached, dtype=bool)
    with torch.no_grad():
        layer(x[:, :cached], causal=True, valid_tokens=valid, cache=cache)
        out = layer(x[:, :0], causal=True, valid_tokens=valid, cache=cache, return_weights=return_weights)
    assert cache.length == cached
    out, weights = out if return_weights else (out, None)
    assert tuple(out.shape) == (B, 0, C) and (weights is None or tuple(weights.shape) == (B, 4, 0, cached))


@pytest.mark.parametrize("call, error, words", [
    (lambda: nn.MultiHeadAttention(8, 4, window=0), ValueError, "width"),
    (lambda: nn.MultiHeadAttention(8, 4, window=2.0), TypeError, "whole number"),
    (lambda: nn.MultiHeadAttention(8, 4, rope=RotaryEmbedding(4)), ValueError, "its head_dim is 2"),
    (lambda: nn.MultiHeadAttention(8, 4, relative_bias=ALiBi(8)), ValueError, "its num_heads is 4"),
    (lambda: layer_and_input(rope=RotaryEmbedding(2))[0](*[context(B, T, C)] * 2), ValueError, "self-attention"),
    (lambda: layer_and_input(window=2)[0](*[context(B, T, C)] * 2), ValueError, "self-attention"),
    (lambda: layer_and_input()[0](*[context(B, T, C)] * 2, position_ids=torch.arange(T)), ValueError, "self-attention"),
    (lambda: layer_and_input()[0](context(B, T, C), (context(B, 4, T, 2), context(B, 4, T, 3))), ValueError, "keys_and_values"),
    (lambda: layer_and_input()[0](context(B, T, C), (context(B, 2, T, 2),) * 2), ValueError, "keys_and_values"),
    (lambda: nn.MultiHeadAttention(8, 4, rope=True), TypeError, r"RotaryEmbedding\(2\).* got True"),
    (lambda: nn.MultiHeadAttention(8, 4, relative_bias=True), TypeError, r"ALiBi\(4\).* got True"),
    (lambda: layer_and_input(relative_bias=lambda i, j: [[0.0]])[0](context(B, T, C)), TypeError, "relative_bias must be a float tensor"),
    (lambda: layer_and_input()[0](context(B, T, C), cache=KVCache(1, 8)), TypeError, r"update\(k, v\), got KVCache.*layer\(i\)"),
    (lambda: layer_and_input()[0](context(B, T, C), cache=[]), TypeError, "`length`"),
    (lambda: layer_and_input()[0](context(B, T, C), cache=object()), TypeError, "`length`")])
def test_parts_that_do_not_fit_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


# --- what published models have besides -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{"head_dim": 6}, {"head_dim": 3, "num_kv_heads": 2}, {"qkv_bias": False},
                                     {"bias": False, "qkv_bias": True}, {"qk_norm": lambda n: nn.RMSNorm(n, eps=1e-3), "head_dim": 4},
                                     {"qk_norm": lambda n: nn.LayerNorm(n), "num_kv_heads": 1}], ids=" ".join)
def test_heads_of_any_width_biases_and_norms(options):
    """Beside the formula written out, and gradients."""
    layer, x = layer_and_input(4, **options)
    Dh, H, G = layer.head_dim, layer.num_heads, layer.num_heads // layer.num_kv_heads
    assert layer.out_proj.weight.shape == (C, H * Dh)
    assert (layer.q_proj.bias is not None) == options.get("qkv_bias", options.get("bias", True))

    def heads(y, n, norm=None):
        y = y.reshape(B, T, n, Dh).transpose(1, 2)
        return y if norm is None else norm(y)
    q = heads(layer.q_proj(x), H, layer.q_norm)
    k, v = heads(layer.k_proj(x), layer.num_kv_heads, layer.k_norm), heads(layer.v_proj(x), layer.num_kv_heads)
    k, v = (torch.stack([y[:, h // G] for h in range(H)], dim=1) for y in (k, v))
    weights = nn.functional.softmax(q @ k.transpose(2, 3) / math.sqrt(Dh), dim=-1)
    expected = layer.out_proj((weights @ v).transpose(1, 2).reshape(B, T, H * Dh))
    assert torch.allclose(layer(x), expected, rtol=1e-12, atol=1e-12)
    cache, parts = Cache(), []
    for t in range(T):
        parts.append(layer(x[:, t:t + 1], cache=cache))
    assert torch.allclose(cat(parts, dim=1), layer(x, causal=True), rtol=1e-12, atol=1e-12)
    assert gradcheck_module(layer, x)


@pytest.mark.parametrize("sizes, error", [({"head_dim": 0}, ValueError), ({"head_dim": -2}, ValueError), ({"head_dim": 2.0}, TypeError)],
                         ids=str)
def test_heads_of_no_width_are_refused(sizes, error):
    with pytest.raises(error, match="head"):
        nn.MultiHeadAttention(C, 4, **sizes)
