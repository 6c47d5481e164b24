"""FeedForward and TransformerBlock: both orders of the norm, against PyTorch's encoder layer, cached and padded."""
import numpy as np
import pytest
import record_nn

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf import nn
from tinygrad_tf.gradcheck import gradcheck_module
from tinygrad_tf.nn.positions import ALiBi, RotaryEmbedding
from tinygrad_tf.ops.shape import cat
from tinygrad_tf.optim import SGD

RECORDED = dict(np.load(record_nn.FILE))


class Cache:
    def __init__(self):
        self.kv = None

    @property
    def length(self):
        return 0 if self.kv is None else self.kv[0].shape[2]

    def update(self, k, v):
        self.kv = (k, v) if self.kv is None else tuple(cat([old, new], dim=2) for old, new in zip(self.kv, (k, v)))
        return self.kv


def from_encoder_layer(prefix, get):
    """Parameters of torch.nn.TransformerEncoderLayer under the names of TransformerBlock."""
    weight, bias = get(f"{prefix}self_attn.in_proj_weight"), get(f"{prefix}self_attn.in_proj_bias")
    state = {}
    for name, w, b in zip("qkv", np.split(weight, 3), np.split(bias, 3)):
        state[f"attention.{name}_proj.weight"], state[f"attention.{name}_proj.bias"] = w, b
    names = {"self_attn.out_proj": "attention.out_proj", "linear1": "ffn.net.0", "linear2": "ffn.net.3", "norm1": "norm1", "norm2": "norm2"}
    for theirs, ours in names.items():
        for kind in ("weight", "bias"):
            state[f"{ours}.{kind}"] = get(f"{prefix}{theirs}.{kind}")
    return {k: torch.tensor(v) for k, v in state.items()}


@pytest.mark.parametrize("name, norm_first", [("post_norm", False), ("pre_norm", True)])
def test_block_is_pytorchs_encoder_layer(name, norm_first):
    block = nn.TransformerBlock(8, 2, 16, norm_first=norm_first).double().eval()
    block.load_state_dict(from_encoder_layer(f"block.{name}.", RECORDED.__getitem__))
    x = torch.tensor(np.random.default_rng(0).normal(size=(2, 5, 8)), requires_grad=True)
    out = block(x, causal=True)
    (out ** 2).sum().backward()
    np.testing.assert_allclose(out.detach().cpu().numpy(), RECORDED[f"block.{name}.out"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(x.grad.cpu().numpy(), RECORDED[f"block.{name}.dx"], rtol=1e-9, atol=1e-11)


@pytest.mark.torch
@pytest.mark.parametrize("norm_first", [False, True])
def test_block_is_pytorchs_encoder_layer_live(norm_first):
    theirs = pytest.importorskip("torch")
    layer = theirs.nn.TransformerEncoderLayer(8, 2, 16, activation="relu", batch_first=True, norm_first=norm_first,
                                              dtype=theirs.float64).eval()
    block = nn.TransformerBlock(8, 2, 16, norm_first=norm_first, activation="relu").double().eval()
    block.load_state_dict(from_encoder_layer("", lambda k: layer.state_dict()[k].cpu().numpy()))
    x, valid = np.random.default_rng(1).normal(size=(2, 5, 8)), np.array([[True] * 5, [True] * 3 + [False] * 2])
    ours = block(torch.tensor(x), valid_tokens=torch.tensor(valid)).detach().cpu().numpy()
    out = layer(theirs.tensor(x), src_key_padding_mask=theirs.tensor(~valid)).detach().cpu().numpy()
    np.testing.assert_allclose(ours[valid], out[valid], rtol=1e-10, atol=1e-12)


def block_and_input(**options):
    torch.manual_seed(0)
    return nn.TransformerBlock(8, 4, 16, **options).double().eval(), torch.randn(2, 5, 8, dtype=torch.float64)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_formula(norm_first):
    block, x = block_and_input(norm_first=norm_first)
    if norm_first:
        y = x + block.attention(block.norm1(x), causal=True)
        expected = y + block.ffn(block.norm2(y))
    else:
        y = block.norm1(x + block.attention(x, causal=True))
        expected = block.norm2(y + block.ffn(y))
    np.testing.assert_allclose(block(x, causal=True).tolist(), expected.tolist(), atol=1e-12)
    last = {p for p in block.ffn.net[3].parameters()} | {p for p in block.attention.out_proj.parameters()}
    with torch.no_grad():
        for p in last:
            p.zero_()
    assert (block(x) == x).all() == norm_first           # pre-norm: the residual path is the identity


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu_tanh", "num_kv_heads": 2, "norm_first": True},
                                     {"activation": "silu", "bias": False}])
def test_gradients(options):
    block, x = block_and_input(**options)
    assert gradcheck_module(block, x.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_cached_and_padded_equal_whole(norm_first, num_kv_heads):
    block, x = block_and_input(norm_first=norm_first, num_kv_heads=num_kv_heads)
    whole, cache = block(x, causal=True), Cache()
    parts = [block(x[:, a:b], causal=True, cache=cache) for a, b in ((0, 2), (2, 3), (3, 5))]
    np.testing.assert_allclose(cat(parts, dim=1).tolist(), whole.tolist(), atol=1e-12)
    padded = cat([torch.zeros(2, 2, 8, dtype=torch.float64), x], dim=1)
    valid = torch.tensor([[False, False] + [True] * 5] * 2)
    np.testing.assert_allclose(block(padded, causal=True, valid_tokens=valid)[:, 2:].tolist(), whole.tolist(), atol=1e-12)
    window = torch.ones(5, 5, dtype=bool).tril().triu(-1)
    assert not np.allclose(block(x, allowed=window).tolist(), whole.tolist())


def test_dropout_is_off_in_evaluation_and_scales_what_a_sublayer_adds():
    block, x = block_and_input(dropout=1.0, norm_first=True)
    assert (block(x) == block(x)).all() and not (block(x) == x).all()
    assert (block.train()(x) == x).all()        # all that the sublayers add is dropped


def test_feed_forward_acts_on_each_token():
    f = nn.FeedForward(4, 6, dropout=0.0).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    order = torch.tensor([2, 0, 1])
    np.testing.assert_allclose(f(x[:, order]).tolist(), f(x)[:, order].tolist(), atol=1e-14)
    first, last = f.net[0], f.net[3]
    np.testing.assert_allclose(f(x).tolist(), last(F.gelu(first(x))).tolist(), atol=1e-14)
    assert [n for n, _ in f.named_parameters()] == ["net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"]
    with pytest.raises(ValueError, match="gelu_tanh"):
        nn.FeedForward(4, 6, activation="swish2")


def test_a_block_without_bias_has_none():
    block, _ = block_and_input(bias=False)
    assert not any("bias" in name for name, _ in block.named_parameters())


def test_a_block_learns():
    torch.manual_seed(0)
    block = nn.TransformerBlock(8, 2, 16, dropout=0.0, norm_first=True)
    x, target = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    optimizer, losses = SGD(block.parameters(), lr=0.1), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.mse_loss(block(x, causal=True), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


# --- the modern block ---------------------------------------------------------------------------------------------------

MODERN = {"norm_first": True, "norm": "rms", "ffn": "swiglu", "bias": False, "num_kv_heads": 2}


def modern(**options):
    return block_and_input(**{**MODERN, "rope": RotaryEmbedding(2), "window": 3, **options})


def test_the_modern_block_is_its_parts():
    """Guide 10.5: x + attention(norm(x)), + SwiGLU(norm(x)), RMSNorm, RoPE, grouped heads, a window; no bias anywhere."""
    block, x = modern()
    assert isinstance(block.norm1, nn.RMSNorm) and isinstance(block.norm2, nn.RMSNorm)
    assert sorted(name for name, _ in block.named_parameters()) == sorted(
        [f"attention.{p}_proj.weight" for p in ("q", "k", "v", "out")] + [f"ffn.{p}_proj.weight" for p in ("gate", "up", "down")]
        + ["norm1.weight", "norm2.weight"])
    y = x + block.attention(F.rms_norm(x, (8,), block.norm1.weight, 1e-6), causal=True)
    z, ffn = F.rms_norm(y, (8,), block.norm2.weight, 1e-6), block.ffn
    gated = F.silu(F.linear(z, ffn.gate_proj.weight)) * F.linear(z, ffn.up_proj.weight)
    expected = y + F.linear(gated, ffn.down_proj.weight)
    np.testing.assert_allclose(block(x, causal=True).tolist(), expected.tolist(), atol=1e-12)
    assert gradcheck_module(block, x.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("ffn, activation", [("glu", "sigmoid"), ("reglu", "relu"), ("geglu", "gelu"), ("swiglu", "silu")])
@pytest.mark.parametrize("bias", [True, False])
def test_gated_networks_by_name(ffn, activation, bias):
    block, x = block_and_input(ffn=ffn, bias=bias)
    gated = nn.GatedFeedForward(8, 16, activation, bias, dropout=0.1).double().eval()
    assert not gated.load_state_dict(block.ffn.state_dict()).missing_keys
    assert (gated(x) == block.ffn(x)).all() and block.ffn.dropout.p == 0.1


def test_plain_networks_by_name():
    for ffn in ("relu", "gelu_tanh", "silu"):
        block, x = block_and_input(ffn=ffn)
        other, _ = block_and_input(activation=ffn)
        assert (block(x) == other(x)).all()
    both = [nn.TransformerBlock(8, 4, 16, norm=norm) for norm in ("layer", "rms")]
    assert [len(list(b.norm1.parameters())) for b in both] == [2, 1]


def test_new_options_leave_the_first_values_alone():
    """One seed gives one block: what is off by default draws nothing."""
    torch.manual_seed(0)
    before = nn.TransformerBlock(8, 4, 16).state_dict()
    torch.manual_seed(0)
    after = nn.TransformerBlock(8, 4, 16, window=2, rope=RotaryEmbedding(2), relative_bias=ALiBi(4)).state_dict()
    assert list(before) == list(after) and all((before[k] == after[k]).all() for k in before)


@pytest.mark.parametrize("options", [{}, {"norm_first": False}, {"ffn": "geglu", "norm": "layer", "bias": True},
                                     {"rope": None, "relative_bias": ALiBi(4)}])
def test_the_modern_block_cached_padded_and_packed(options):
    block, x = modern(**options)
    whole, cache = block(x, causal=True), Cache()
    parts = [block(x[:, a:b], causal=True, cache=cache, position_ids=torch.arange(a, b)) for a, b in ((0, 3), (3, 4), (4, 5))]
    np.testing.assert_allclose(cat(parts, dim=1).tolist(), whole.tolist(), atol=1e-12)
    padded = cat([x[:, :2] * 0 + 5, x], dim=1)
    valid = torch.tensor([[False, False] + [True] * 5] * 2)
    np.testing.assert_allclose(block(padded, causal=True, valid_tokens=valid)[:, 2:].tolist(), whole.tolist(), atol=1e-12)
    packed = block(x, mask_mod=nn.masks.packing_mod(torch.tensor([[0, 0, 1, 1, 1]] * 2)), position_ids=torch.tensor([0, 1, 0, 1, 2]))
    np.testing.assert_allclose(packed[:, :2].tolist(), whole[:, :2].tolist(), atol=1e-12)
    np.testing.assert_allclose(packed[:, 2:].tolist(), block(x[:, 2:], causal=True).tolist(), atol=1e-12)


def test_a_score_function_reaches_the_scores():
    block, x = modern()
    assert (block(x, score_mod=lambda score, *where: score) - block(x)).abs().max() < 1e-12
    assert (block(x, score_mod=lambda score, *where: 5 * score) != block(x)).any()
    for name in "colour", "return_weights", "context":      # a block returns x alone, and attends to itself alone
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            block(x, **{name: True})


@pytest.mark.parametrize("options, words", [({"norm": "batch"}, "'rms'"), ({"ffn": "moe"}, "swiglu"), ({"activation": "moe"}, "swiglu"),
                                            ({"window": 0}, "width"), ({"rope": RotaryEmbedding(4)}, "head_dim")])
def test_impossible_blocks_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        nn.TransformerBlock(8, 4, 16, **options)
