"""`explain`: capturing changes nothing, names mean what they say, and what is switched off is off."""
import sys

import numpy as np
import pytest

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf import random
from tinygrad_tf.explain import (
    ablate_heads,
    attention_gradient,
    capture,
    draw_patterns,
    head_importance,
    intervene,
    log_probability,
    logit_lens,
    occlusion,
    run_with,
    to_html,
)
from tinygrad_tf.explain.points import points
from tinygrad_tf.generation import KVCache
from tinygrad_tf.models import Decoder, Encoder, EncoderClassifier, EncoderDecoder, MiniGPT
from tinygrad_tf.ops.sdpa import sdpa_backend
from tinygrad_tf.training.doctor import host

B, T, C, H, Dh, V, L = 2, 5, 12, 6, 2, 11, 2


def decoder(**options):
    return Decoder(V, 16, C, H, 20, L, num_kv_heads=3, **options)


MODELS = {
    "post-norm": lambda **o: MiniGPT(V, 16, C, H, 20, L, **o),
    "pre-norm": lambda **o: MiniGPT(V, 16, C, H, 20, L, norm_first=True, **o),
    "decoder": decoder,
    "window, qk_norm": lambda **o: decoder(window=2, qk_norm=nn.RMSNorm, qkv_bias=True, **o),
    "head_dim": lambda **o: Decoder(V, 16, C, H, 20, L, head_dim=4, **o),
    "experts": lambda **o: decoder(ffn=lambda: nn.MoE(C, 16, 4), **o),
    "dense experts": lambda **o: decoder(ffn=lambda: nn.DenseMoE(C, 16, 4, ffn="gelu"), **o),
    "encoder": lambda **o: EncoderClassifier(Encoder(V, 16, C, H, 20, L, norm_first=False, **o), V),
    "encoder-decoder": lambda **o: EncoderDecoder(V, V, 16, 16, C, H, 20, L, **o),
}
LANGUAGE = [name for name in MODELS if name not in ("encoder", "encoder-decoder")]
models = pytest.mark.parametrize("kind", MODELS)
language = pytest.mark.parametrize("kind", LANGUAGE)


def ids(rows=B):
    return torch.randint(0, V, (rows, T))


def call(kind, padded):
    """(inputs, kwargs) of a call that has a loss."""
    x, valid = ids(), torch.tensor([[1] * T, [0, 0] + [1] * (T - 2)]).bool() if padded else None
    if kind == "encoder":
        return (x, x[:, 0]), {"valid_tokens": valid}
    if kind == "encoder-decoder":
        return (x, ids(), ids()), {"source_valid": valid}
    return (x, ids()), {"valid_tokens": valid}


def same(a, b):
    return np.array_equal(host(a), host(b))


def near(a, b, tolerance=1e-5):
    return np.abs(host(a) - host(b)).max() <= tolerance


# --- capturing changes nothing ----------------------------------------------------------------------------------------------

@models
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_results_gradients_and_random_streams_are_those_without_it(kind, padded, training):
    model = MODELS[kind](dropout=0.25).train(training)
    inputs, kwargs = call(kind, padded)
    found = []
    for run in (model, lambda *a, **k: capture(model, *a, **k).output):
        model.zero_grad()
        torch.manual_seed(1)
        logits, loss = run(*inputs, **kwargs)
        loss.backward()
        found.append([host(x).copy() for x in (logits, loss, *(p.grad for p in model.parameters() if p.grad is not None), torch.rand(3))])
    assert all(map(np.array_equal, *found))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_packed_rows_caches_and_checkpointed_blocks():
    model = MODELS["decoder"]().eval()
    x, segments = ids(), torch.tensor([[0, 0, 1, 1, -1], [0, 1, 1, 1, 1]])
    seen = capture(model, x, segment_ids=segments)
    assert same(seen.output[0], model(x, segment_ids=segments)[0])
    A = seen.array("blocks.1.attn.hook_pattern")
    assert not A[0, :, 2:4, :2].any() and not A[1, :, 1:, 0].any() and np.allclose(A[1].sum(-1), 1)
    with torch.no_grad():
        caches = [KVCache(L, 16) for _ in range(2)]
        for cache in caches:
            model(x[:, :3], cache=cache)
        seen = capture(model, x[:, 3:], cache=caches[0])
        assert same(seen.output[0], model(x[:, 3:], cache=caches[1])[0])
    assert seen["blocks.0.attn.hook_pattern"].shape == (B, H, 2, 5) and seen["blocks.0.attn.hook_k"].shape == (B, 2, 3, Dh)
    gradients = []
    model.checkpoint_blocks = True
    for run in (model, lambda *a: capture(model, *a).output):
        model.zero_grad()
        run(x, x)[1].backward()
        gradients.append([host(p.grad).copy() for p in model.parameters()])
    assert all(map(np.array_equal, *gradients))


def test_tiles_stay_tiles_unless_patterns_are_asked_for():
    model, x = MODELS["decoder"]().eval(), ids()
    with torch.no_grad(), sdpa_backend("tiled"):
        plain = model(x)[0]
        assert same(capture(model, x, names=["*resid*", "*hook_z", "*hook_q"]).output[0], plain)
        assert near(capture(model, x).output[0], plain)


# --- names --------------------------------------------------------------------------------------------------------------------

def test_the_names_of_a_pre_norm_and_of_a_post_norm_block_in_the_order_of_computing():
    attn = [f"attn.hook_{name}" for name in ("q", "k", "v", "attn_scores", "pattern", "z")] + ["hook_attn_out", "hook_resid_mid"]
    mlp = ["mlp.hook_pre", "mlp.hook_post", "hook_mlp_out", "hook_resid_post"]
    pre = ["hook_resid_pre", "ln1.hook_normalized", *attn, "ln2.hook_normalized", *mlp]
    post = ["hook_resid_pre", *attn, "ln1.hook_normalized", *mlp, "ln2.hook_normalized", "hook_normalized_resid_post"]
    for kind, block in ("pre-norm", pre), ("post-norm", post):
        expected = ["hook_embed", "hook_pos_embed", *(f"blocks.{l}.{name}" for l in range(L) for name in block), "ln_final.hook_normalized"]
        seen = capture(MODELS[kind]().eval(), ids())
        assert list(seen) == expected and len(seen) == len(expected)
    assert {"blocks.0.attn.hook_rot_q", "blocks.0.mlp.hook_pre_linear"} <= set(capture(MODELS["decoder"](), ids()))
    assert "blocks.0.mlp.hook_expert_weights" in capture(MODELS["experts"](), ids())
    assert "encoder.blocks.1.hook_resid_mid" in capture(MODELS["encoder"](), ids())
    assert {"encoder.ln_final.hook_normalized", "blocks.0.cross_attn.hook_pattern", "blocks.0.hook_resid_mid_cross",
            "hook_embed"} <= set(capture(MODELS["encoder-decoder"](), ids(), ids()))


@models
def test_every_name_is_captured_and_shapes_are_those_of_the_page(kind):
    model = MODELS[kind]().eval()
    inputs, kwargs = call(kind, False)
    seen = capture(model, *inputs, **kwargs)
    assert set(seen) == set(points(model))
    block = model.get_submodule("blocks.0" if kind != "encoder" else "encoder.blocks.0")
    Hkv, width = block.attention.num_kv_heads, 4 if kind == "head_dim" else Dh
    for name, x in seen.items():
        last = name.rpartition(".")[2]
        expected = {"hook_q": (B, T, H, width), "hook_z": (B, T, H, width), "hook_k": (B, T, Hkv, width), "hook_v": (B, T, Hkv, width),
                    "hook_pattern": (B, H, T, T), "hook_attn_scores": (B, H, T, T), "hook_resid_pre": (B, T, C),
                    "hook_mlp_out": (B, T, C), "hook_resid_post": (B, T, C), "hook_embed": (B, T, C)}.get(last)
        assert expected is None or tuple(x.shape) == expected, name


def test_filters_take_globs_and_say_what_is_like_a_name_that_is_none():
    model, x = MODELS["pre-norm"]().eval(), ids()
    assert list(capture(model, x, names="blocks.*.attn.hook_pattern")) == ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]
    assert list(capture(model, x, names=["*.hook_z", "hook_embed"])) == ["hook_embed", "blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]
    with pytest.raises(ValueError, match="nothing is named 'blocks.0.attn.hook_patern'; names like it: blocks.0.attn.hook_pattern"):
        capture(model, x, names="blocks.0.attn.hook_patern")
    seen = capture(model, x, names="*.hook_z")
    with pytest.raises(KeyError, match="names like it: blocks.0.attn.hook_z"):
        seen["blocks.0.attn.hook_zz"]
    assert list(seen.matching("*.0.*")) == ["blocks.0.attn.hook_z"]
    assert "[2, 5, 6, 2]  float32" in str(seen) and "2 activations" in repr(seen)
    with pytest.raises(TypeError, match="expected a model, an nn.Module, got int"):
        capture(3, x)
    with pytest.raises(ValueError, match="Linear has no TransformerBlock and no MultiHeadAttention"):
        capture(nn.Linear(2, 2), x)


def test_layers_and_blocks_by_themselves_and_a_module_that_runs_twice():
    x = torch.randn(B, T, C)
    layer, block = nn.MultiHeadAttention(C, H), nn.TransformerBlock(C, H, 20, 0.0)
    assert near(capture(layer, x, causal=True)["hook_pattern"], layer(x, causal=True, return_weights=True)[1], 0)
    assert same(capture(layer, x=x)["hook_z"].flatten(-2), capture(layer, x, return_weights=True)["hook_z"].flatten(-2))
    assert "attn.hook_pattern" in capture(block, x)
    twice = nn.Sequential(block, block)
    with pytest.raises(RuntimeError, match="'0.hook_resid_pre' ran twice in one call"):
        capture(twice, x)
    assert not block._forward_hooks and not block._forward_pre_hooks


# --- names mean what they say -----------------------------------------------------------------------------------------------------

@language
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_streams_add_up_and_patterns_are_what_weighs_the_values(kind, padded):
    model = MODELS[kind]().eval()
    (x, _), kwargs = call(kind, padded)
    seen = capture(model, x, **kwargs)
    valid = kwargs["valid_tokens"]
    if "hook_pos_embed" in seen:
        assert same(seen["hook_embed"] + seen["hook_pos_embed"], seen["blocks.0.hook_resid_pre"])
    for l in range(L):
        got = {name.partition(f"blocks.{l}.")[2]: value for name, value in seen.items()}
        assert same(got["hook_resid_mid"], got["hook_resid_pre"] + got["hook_attn_out"])
        post = kind == "post-norm"
        assert same(got["hook_resid_post"], got["ln1.hook_normalized" if post else "hook_resid_mid"] + got["hook_mlp_out"])
        out = got["hook_normalized_resid_post" if post else "hook_resid_post"]
        if l + 1 < L:
            assert same(out, seen[f"blocks.{l + 1}.hook_resid_pre"])
        A, z, scores = host(got["attn.hook_pattern"]), host(got["attn.hook_z"]), host(got["attn.hook_attn_scores"])
        v = np.repeat(host(got["attn.hook_v"]), H // got["attn.hook_v"].shape[2], axis=2)
        assert np.abs(np.einsum("bhqk,bkhd->bqhd", A, v) - z).max() < 1e-5
        assert not np.triu(A, 1).any() and np.array_equal(A == 0, scores == -np.inf)
        assert np.allclose(A.sum(-1)[host(valid)[:, None] & np.ones((B, H, T), bool)] if padded else A.sum(-1), 1, atol=1e-5)
        e = np.exp(scores - np.where(np.isinf(scores.max(-1, keepdims=True)), 0, scores.max(-1, keepdims=True)))
        assert np.allclose(e / np.maximum(e.sum(-1, keepdims=True), 1e-30), A, atol=1e-5)
        if "attn.hook_rot_q" in got:
            q, k = host(got["attn.hook_rot_q"]), host(got["attn.hook_rot_k"])
            dots = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, H // k.shape[2], axis=2)) / q.shape[-1] ** 0.5
            assert np.allclose(dots[A > 0], scores[A > 0], atol=1e-4)
    assert same(seen.output[0], model.lm_head(seen["ln_final.hook_normalized"]))


def test_patterns_of_cross_attention_are_those_that_decode_returns():
    model, x, y = MODELS["encoder-decoder"]().eval(), ids(), ids()
    seen = capture(model, x, y, names="*cross_attn.hook_pattern")
    _, expected = model.decode(y, model.encode(x), return_weights=True)
    assert len(seen) == L and all(same(a, b) for a, b in zip(seen.values(), expected))


# --- interventions --------------------------------------------------------------------------------------------------------------------

@models
def test_what_is_replaced_by_itself_changes_nothing_and_the_rest_says_what_to_change(kind):
    model = MODELS[kind]().eval()
    inputs, kwargs = call(kind, True)
    plain = model(*inputs, **kwargs)[0]
    for name, point in points(model).items():
        if point.instead is None:
            now = run_with(model, {name: lambda x: x}, *inputs, **kwargs)[0]
            assert near(now, plain) if name.endswith("scores") else same(now, plain), name
        else:
            with pytest.raises(ValueError, match=f"only shows what comes of other activations; change {point.instead}"), \
                    intervene(model, {name: lambda x: x}):
                pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@language
def test_a_change_is_seen_behind_it_and_not_before(kind):
    model, x = MODELS[kind]().eval(), ids()
    plain = capture(model, x)
    with intervene(model, {"blocks.1.attn.hook_z": lambda z: z * 0.0}), intervene(model, {"blocks.*.hook_attn_out": lambda x: x + 1.0}):
        seen = capture(model, x)
    assert not host(seen["blocks.1.attn.hook_z"]).any() and same(seen["blocks.0.hook_resid_pre"], plain["blocks.0.hook_resid_pre"])
    assert near(seen["blocks.0.hook_resid_mid"], plain["blocks.0.hook_resid_mid"] + 1.0)
    bias = model.blocks[1].attention.out_proj.bias
    assert near(seen["blocks.1.hook_attn_out"], (0.0 if bias is None else bias) + torch.ones(B, T, C))
    nobody = torch.arange(T) == 1
    with intervene(model, {"*.hook_attn_scores": lambda s: s.masked_fill(nobody, -torch.inf)}):
        A = capture(model, x).array("blocks.0.attn.hook_pattern")
    sums = A.sum(-1)
    assert not A[..., 1].any() and np.allclose(np.where(sums == 0, 1, sums), 1, atol=1e-5) and not np.triu(A, 1).any()


def test_what_takes_a_place_must_fit_and_nothing_is_left_behind_after_an_error():
    model, x = MODELS["pre-norm"]().eval(), ids()
    for function, message in (lambda z: z[:, :1], r"like it, .*float32 \[2, 5, 6, 2\] on .*, got .*float32 \[2, 1, 6, 2\]"), (
            lambda z: None, "got NoneType"), (lambda z: z.double(), "float64"):
        with pytest.raises(ValueError, match=message):
            run_with(model, {"blocks.0.attn.hook_z": function}, x)
    with pytest.raises(ValueError, match="names like it: blocks.0.attn.hook_z"):
        run_with(model, {"blocks.0.attn.hook_x": abs}, x)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@language
def test_a_head_that_is_off_is_one_whose_columns_of_the_projection_are_zero(kind):
    model, (x, y) = MODELS[kind]().eval(), (ids(), ids())
    with ablate_heads(model, {(0, 1), (1, 0), (1, 3)}):
        off = model(x, y)
    importance = head_importance(model, x, y)
    width = model.blocks[0].attention.head_dim
    before = model(x, y)[1].item()
    with torch.no_grad():
        for layer, head in (0, 1), (1, 0), (1, 3):
            model.blocks[layer].attention.out_proj.weight[:, head * width:(head + 1) * width] = 0.0
            if (layer, head) == (0, 1):
                assert abs(importance[0, 1] - (model(x, y)[1].item() - before)) < 1e-5
    assert near(off[0], model(x, y)[0]) and importance.shape == (L, H)


def test_the_mean_is_that_of_real_tokens_and_wrong_heads_are_named():
    model, (x, y) = MODELS["pre-norm"](dropout=0.5), (ids(), ids())
    valid = torch.tensor([[1] * T, [0, 0] + [1] * (T - 2)]).bool()
    model.eval()
    typical = capture(model, x, valid_tokens=valid)
    model.train()
    z = typical.array("blocks.1.attn.hook_z")
    expected = z[host(valid)].mean(axis=0)                                          # [H, Dh]
    with ablate_heads(model, {(1, 2)}, mean_of=typical):
        seen = capture(model, y).array("blocks.1.attn.hook_z")
    assert np.allclose(seen[:, :, 2], expected[2]) and not np.allclose(seen[:, :, 1], expected[1])
    first = head_importance(model, x, y, mean_of=typical)
    assert np.array_equal(first, head_importance(model, x, y, mean_of=typical)) and all(m.training for m in model.modules())
    assert np.allclose(head_importance(model, x, loss=lambda out: out[0].sum() * 0.0), 0)
    for heads, error, message in ({(2, 0)}, IndexError, "layers 0 to 1"), ({(0, H)}, IndexError, "blocks.0.attn has heads 0 to 5"), (
            {("blocks.0.atn", 0)}, ValueError, "names like it: blocks.0.attn"):
        with pytest.raises(error, match=message):
            ablate_heads(model, heads)
    with pytest.raises(ValueError, match="give it targets"):
        head_importance(model, x)
    both = MODELS["encoder-decoder"]().eval()
    assert head_importance(both, x, y, y).shape == (L, H) and head_importance(MODELS["encoder"](), x, x[:, 0]).shape == (L, H)
    with ablate_heads(both, {("encoder.blocks.0.attn", 1), ("blocks.1.cross_attn", 2)}):
        seen = capture(both, x, y, names="*.hook_z")
    assert not host(seen["encoder.blocks.0.attn.hook_z"])[:, :, 1].any() and not host(seen["blocks.1.cross_attn.hook_z"])[:, :, 2].any()
    assert host(seen["blocks.1.attn.hook_z"])[:, :, 2].any()


# --- the lens -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", [*LANGUAGE, "encoder-decoder"])
def test_the_last_line_of_the_lens_is_what_the_model_says(kind, tmp_path):
    model = MODELS[kind](dropout=0.5)
    inputs, kwargs = call(kind, True)
    lens = logit_lens(model, *inputs, **kwargs)
    assert model.training and len(lens) == L + 1 and not lens[0].requires_grad
    model.eval()
    assert same(lens[-1], model(*inputs, **kwargs)[0])
    stream = capture(model, *inputs, **kwargs)["blocks.1.hook_resid_pre"]
    assert same(lens[1], model.lm_head(model.final_norm(stream)))
    p = lens.probabilities(row=1, position=2)
    assert p.shape == (L + 1, V) and np.allclose(p.sum(-1), 1, atol=1e-5)
    table = lens.table(decode="abcdefghijk".__getitem__, k=2)
    assert [row[0] for row in table] == ["embedding", "layer 0", "layer 1"] and table[-1][3] == 1
    lens.draw(tmp_path / "lens.png", ["$a", "b$", "<s>", "\n", "e"], decode=lambda i: f"${i}_$")
    assert (tmp_path / "lens.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_without_a_head_has_no_lens():
    with pytest.raises(ValueError, match="EncoderClassifier has no head that reads its last layer"):
        logit_lens(MODELS["encoder"](), ids())


# --- who is to blame -------------------------------------------------------------------------------------------------------------------

@language
def test_occlusion_is_the_mean_over_what_stands_there_instead(kind):
    model, x = MODELS[kind]().eval(), ids(1)
    score = log_probability(4)
    drop = occlusion(model, x, score, [2, 7, 9], batch_size=4)

    def value(tokens):
        return host(model(torch.tensor([tokens]))[0].log_softmax(-1))[0, -1, 4]
    here = host(x)[0].tolist()
    for t in range(T):
        others = [r for r in (2, 7, 9) if r != here[t]]
        assert abs(drop[t] - np.mean([value(here) - value(here[:t] + [r] + here[t + 1:]) for r in others])) < 1e-4
    assert np.isnan(occlusion(model, torch.full((1, T), 3), score, [3])).all()
    segments = torch.zeros(1, T, dtype=torch.int64)
    assert np.allclose(occlusion(model, x, score, [2, 7, 9], segment_ids=segments), drop, atol=1e-5)


def test_what_occlusion_does_not_take():
    model = MODELS["pre-norm"]().eval()
    with pytest.raises(ValueError, match=r"must be one text, \[1, T\], got \[2, 5\]"):
        occlusion(model, ids(), log_probability(0), [1])
    with pytest.raises(ValueError, match=r"one number for each of 1 rows, got shape \[1, 5, 11\]"):
        occlusion(model, ids(1), lambda out: out[0], [1])
    with pytest.raises(TypeError, match="ids"):
        occlusion(model, [[1, 2]], log_probability(0), [1])
    assert MODELS["encoder"]().eval()(ids(1))[0].shape == (1, V)
    assert occlusion(MODELS["encoder"]().eval(), ids(1), log_probability(3), range(V)).shape == (T,)


@pytest.mark.parametrize("groups", [6, 3, 1])
def test_attention_times_gradient_is_that_of_weights_in_the_graph(groups):
    layer = nn.MultiHeadAttention(C, H, groups)
    x, up = torch.randn(B, T, C), torch.randn(B, T, C)
    found = attention_gradient(layer, x, causal=True, score=lambda out: (out * up).sum(dim=(1, 2)))[""]
    out, A = layer(x, causal=True, return_weights=True)
    A.retain_grad()
    (out * up).sum().backward()
    assert np.allclose(found, host(A) * host(A.grad), atol=1e-5) and found.shape == (B, H, T, T)


@models
def test_attention_times_gradient_leaves_the_model_as_it_was(kind):
    model = MODELS[kind](dropout=0.5)
    inputs, kwargs = call(kind, True)
    names = [name.removesuffix(".hook_pattern") for name in points(model) if name.endswith("pattern")]
    for frozen in False, True:
        model.requires_grad_(not frozen)
        state = np.asarray(random.get_rng_state()).copy()
        found = attention_gradient(model, *inputs, score=log_probability(3), **kwargs)
        assert np.array_equal(state, random.get_rng_state())
        assert sorted(found) == sorted(names) and all(A.shape == (B, H, T, T) and np.isfinite(A).all() for A in found.values())
        assert all(p.grad is None and p.requires_grad is not frozen for p in model.parameters()) and model.training
    assert any(A.any() for A in found.values())


def test_attention_times_gradient_needs_a_graph():
    model = MODELS["pre-norm"]()
    model.checkpoint_blocks = True
    with pytest.raises(ValueError, match="checkpoint_blocks"):
        attention_gradient(model, ids(), score=log_probability(0))


# --- pages and pictures -----------------------------------------------------------------------------------------------------------

TOKENS = ["<script>alert(1)</script>", "__QUERY__", '"q\\', "data.layers.forEach((layer,i)=>{const o", "$x_{"]


def test_a_page_is_one_file_in_which_a_token_is_a_text(tmp_path):
    pytest.importorskip("attnview")
    seen = capture(MODELS["decoder"]().eval(), ids())
    path = tmp_path / "page.html"
    to_html(seen, TOKENS, path, row=1)
    page = path.read_text(encoding="utf-8")
    assert page.count("<script") == 1 == page.count("</script") and "alert(1)" in page and "http" not in page and "src=" not in page
    assert "'<':'&lt;'" in page and "const esc=s=>String(s);" not in page, "attnview puts tokens between tags, and has to escape them"
    assert page.count("orderSelect.id='order'") == 1 and r"_\u2060_QUERY_\u2060_" in page
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    weight = seen.array("blocks.1.attn.hook_pattern")[1, 2, 4, 0]
    assert str(round(float(weight), 5)) in page


def test_a_page_of_cross_attention_and_what_does_not_fit(tmp_path):
    pytest.importorskip("attnview")
    seen = capture(MODELS["encoder-decoder"]().eval(), ids(), ids()[:, :3])
    path = tmp_path / "page.html"
    to_html(seen, "abc", path, key_tokens="vwxyz", names="*cross_attn.hook_pattern")
    before = path.read_bytes()
    own = "blocks.0.attn.hook_pattern"
    for tokens, names, row, error, message in ("ab", own, 0, ValueError, "3 queries and 3 keys, but there are 2"), (
            "abc", "*.hook_z", 0, ValueError, "hook_z is no pattern"), ("abc", "*hook_patern", 0, ValueError, "nothing is named"), (
            "abc", own, 2, IndexError, "there is no row 2 in a batch of 2"):
        with pytest.raises(error, match=message):
            to_html(seen, tokens, path, names=names, row=row)
    assert path.read_bytes() == before


def test_without_attnview_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "attnview", None)
    with pytest.raises(ImportError, match="pip install attnview"):
        to_html(capture(MODELS["decoder"](), ids()), "abcde", tmp_path / "page.html")


def test_a_picture(tmp_path):
    seen = capture(MODELS["decoder"]().eval(), ids())
    draw_patterns(seen, tmp_path / "a.png", TOKENS)
    draw_patterns(seen, tmp_path / "b.png", names="blocks.0.*pattern", columns=2)
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in "ab")
