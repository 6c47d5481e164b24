"""The short path for one token: where it serves it is the forward pass, and where anything differs from what it knows it does not serve."""
import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.autograd import observing
from tinygrad_tf.generation import KVCache, PagedKVCache, RollingKVCache, complete, token_path
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.nn.positions import InputEmbedding

V, T, C, H, CFF, L = 11, 16, 8, 2, 16, 2
pytestmark = pytest.mark.host("the path is for NumPy arrays alone; on a device test_one_text.py compares texts")


def large(model, dtype=torch.float64):
    """Weights that make logits differ."""
    rng = np.random.default_rng(0)
    for p in model.parameters():
        p.detach().copy_(torch.tensor(rng.normal(size=p.shape) * 0.5))
    return model.to(dtype).eval()


def gpt(**options):
    return MiniGPT(V, T, C, H, CFF, L, dropout=0.5, **options)


def edited(edit, make=gpt):
    """A builder of a model with one part changed."""
    def build():
        model = make()
        edit(model, model.blocks[0])
        return model
    return build


def decoder(**options):
    return Decoder(V, T, C, H, CFF, L, **options)


def without_affine(model, block):
    block.norm1, model.final_norm = nn.LayerNorm(C, elementwise_affine=False), nn.RMSNorm(C)


def windowed(model, block):
    block.attention.window = 3


def untied(model, block):
    model.lm_head = nn.Linear(C, V)


def rotated(model, block):
    for b in model.blocks:
        b.attention.rope = nn.RotaryEmbedding(C // H, layout="half_split", rotary_dim=2)


def bare_norm(features):
    return nn.RMSNorm(features, elementwise_affine=False)


SERVED = {
    "post-norm": gpt, "pre-norm": lambda: gpt(norm_first=True), "Decoder": decoder, "GQA": lambda: decoder(num_kv_heads=1),
    "norms without affine": edited(without_affine), "a window": edited(windowed), "an untied head with a bias": edited(untied),
    "another rotation": edited(rotated, decoder),
    "tanh GELU": edited(lambda model, block: setattr(block.ffn, "net", nn.Sequential(nn.Linear(C, CFF), nn.GELU("tanh"), nn.Dropout(),
                                                                                     nn.Linear(CFF, C)))),
    "wide heads": lambda: decoder(head_dim=6), "biases of q, k, v": lambda: decoder(qkv_bias=True),
    "a Decoder's window": lambda: decoder(window=3), "norms of heads without a weight": lambda: decoder(qk_norm=bare_norm),
    "normalised q and k": lambda: decoder(num_kv_heads=1, head_dim=6, qk_norm=lambda n: nn.RMSNorm(n, eps=1e-5)),
    "another eps, a head of its own": lambda: decoder(norm_eps=0.1, tie_weights=False),
    "GPT-2": lambda: gpt(norm_first=True, activation="gelu_tanh"),
    "gated in MiniGPT": edited(lambda model, block: setattr(block, "ffn", nn.feedforward.GatedFeedForward(C, CFF, "gelu"))),
    "one block twice": edited(lambda model, block: model.blocks.__setitem__(1, block)),
}


class Own(nn.Linear):
    """A subclass, which may do anything."""

    def forward(self, x):
        return super().forward(x) + 1


def net(*parts):
    return edited(lambda model, block: setattr(block.ffn, "net", nn.Sequential(*parts)))


def patched(model, block):
    block.norm1.forward = lambda x: x * 2


def buffer(model, block):
    weight = block.ffn.net[0].weight.detach()
    del block.ffn.net[0].weight
    block.ffn.net[0].register_buffer("weight", weight)


UNKNOWN = {
    "a head of two layers": edited(lambda model, block: setattr(model, "lm_head", nn.Sequential(nn.Linear(C, C), nn.Linear(C, V)))),
    "no head": edited(lambda model, block: setattr(model, "lm_head", nn.Identity())),
    "a layer for dropout": edited(lambda model, block: setattr(block, "dropout", nn.Linear(C, C))),
    "a norm for dropout": edited(lambda model, block: setattr(block, "dropout", nn.LayerNorm(C))),
    "a norm in the net": net(nn.Linear(C, CFF), nn.GELU(), nn.LayerNorm(CFF), nn.Linear(CFF, C)),
    "a net of three": net(nn.Linear(C, CFF), nn.GELU(), nn.Linear(CFF, C)),
    "a net of five": net(nn.Linear(C, CFF), nn.GELU(), nn.Dropout(), nn.Linear(CFF, C), nn.Linear(C, C)),
    "dropout before GELU": net(nn.Linear(C, CFF), nn.Dropout(), nn.GELU(), nn.Linear(CFF, C)),
    "a plain ffn": edited(lambda model, block: setattr(block, "ffn", nn.Linear(C, C))),
    "a sequence for ffn": edited(lambda model, block: setattr(block, "ffn", nn.Sequential(nn.Linear(C, CFF), nn.GELU(), nn.Dropout(),
                                                                                         nn.Linear(CFF, C)))),
    "a gate of another kind": edited(lambda model, block: setattr(block.ffn, "activation", nn.LayerNorm(CFF)), decoder),
    "dropout for a norm": edited(lambda model, block: setattr(block, "norm1", nn.Dropout())),
    "a layer for the last norm": edited(lambda model, block: setattr(model, "final_norm", nn.Linear(C, C))),
    "no positions": edited(lambda model, block: setattr(model, "embedding", InputEmbedding(V, C, position=None))),
    "sinusoidal positions": edited(lambda model, block: setattr(model.embedding, "position", nn.SinusoidalPositionEncoding(C, T))),
    "ALiBi": edited(lambda model, block: setattr(block.attention, "relative_bias", nn.ALiBi(H))),
    "another norm of q": lambda: decoder(qk_norm=nn.LayerNorm),
    "a function for a norm of k": edited(lambda model, block: setattr(block.attention, "k_norm", lambda x: 2 * x), decoder),
    "a hook on a norm of q": edited(lambda model, block: block.attention.q_norm.register_forward_hook(lambda module, args, out: out * 2),
                                    lambda: decoder(qk_norm=bare_norm)),
    "a hook on the rotation": edited(lambda model, block: block.attention.rope.register_forward_hook(lambda module, args, out: out * 2),
                                     decoder),
    "a function for a bias": edited(lambda model, block: setattr(block.attention, "relative_bias",
                                                                 lambda q, k: torch.ones(H, q.shape[-1], k.shape[-1]))),
    "a subclass": edited(lambda model, block: setattr(block.attention, "q_proj", Own(C, C))),
    "a patched forward": edited(patched),
    "a weight as a buffer": edited(buffer),
    "a hook": edited(lambda model, block: block.norm2.register_forward_hook(lambda module, args, out: out * 2)),
    "a hook before": edited(lambda model, block: block.ffn.net[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))),
    "a hook on the whole": edited(lambda model, block: model.register_forward_hook(lambda module, args, out: (out[0] * 2, out[1]))),
}


def next_by_both(model, cache, prompt=(1, 2, 3), token=7):
    with torch.no_grad():
        model(torch.tensor([list(prompt)]), cache=cache)
        return token_path.next_logits(model, np.array([token]), cache)[0], host(model(torch.tensor([[*prompt, token]]))[0][0, -1])


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_the_forward_pass(kind, dtype):
    model, cache = large(SERVED[kind](), dtype), KVCache(L, T)
    short, whole = next_by_both(model, cache)
    assert token_path.serves(model, cache) and cache.lengths.tolist() == [4]
    np.testing.assert_allclose(short, whole, rtol=0, atol=1e-11 if dtype is torch.float64 else 2e-5)


@pytest.mark.parametrize("make_cache", [lambda: PagedKVCache(L, 20, block_size=2), lambda: RollingKVCache(L, 3, sinks=1, slack=1)],
                         ids=["paged", "rolling"])
@pytest.mark.parametrize("kind", ["post-norm", "Decoder", "GQA", "a window"])
def test_rows_of_different_lengths(kind, make_cache):
    """Beside the forward pass with the same cache, row by row of a ragged batch."""
    model, caches = large(SERVED[kind]()), [make_cache() for _ in range(2)]
    ids, valid = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]]).bool()
    with torch.no_grad():
        for cache in caches:
            model(ids, valid_tokens=valid, cache=cache)
        for token in 8, 9, 1:
            short = token_path.next_logits(model, np.array([token, token + 1]), caches[0])
            whole = model(torch.tensor([[token], [token + 1]]), cache=caches[1])[0][:, 0]
            np.testing.assert_allclose(short, host(whole), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_it_does_not_know_it_leaves_to_the_forward_pass(kind):
    """With a cache the text is the one without."""
    model = large(UNKNOWN[kind]())
    cache = KVCache(L, T)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), cache=cache)
    assert not token_path.serves(model, cache)
    if kind != "no head":                                       # its logits are of C ids, and those of its text beyond
        (cached,), (alone,) = (complete(model, [[1, 2]], 5, use_cache=use_cache) for use_cache in (True, False))
        assert cached.ids == alone.ids


def test_subclasses_and_models_of_ones_own_are_not_served():
    class Mine(MiniGPT):
        pass
    cache = KVCache(L, T)
    cache.layer(0).update(torch.zeros(1, H, 1, C // H), torch.zeros(1, H, 1, C // H))
    assert not token_path.serves(Mine(V, T, C, H, CFF, L), cache) and not token_path.serves(nn.Linear(2, 2), cache)
    assert token_path.serves(gpt(), cache)


def test_who_watches_sees_all_operations():
    model, cache = large(gpt()), KVCache(L, T)
    next_by_both(model, cache)
    assert token_path.serves(model, cache)
    with observing(lambda node, args, out: None):
        assert not token_path.serves(model, cache)
    with torch.sdpa_backend("tiled"):
        assert not token_path.serves(model, cache)
    model.half()
    assert not token_path.serves(model, cache)


@pytest.mark.parametrize("change, error", [
    (lambda model: model.blocks.append(nn.TransformerBlock(C, H, CFF)), ValueError), (lambda model: model.float(), ValueError),
], ids=["a block more", "another dtype"])
def test_a_model_that_changes_while_it_writes_is_refused_as_ever(change, error):
    from tinygrad_tf.generation import Batch
    model = large(gpt())
    batch = Batch(model)
    batch.add([1, 2], 5)
    batch.step()
    change(model)
    with pytest.raises(error, match="cache|KVCache"):
        batch.step()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("norm", [nn.LayerNorm(C, eps=0.0), nn.RMSNorm(C, eps=0.0), nn.LayerNorm(C), nn.RMSNorm(C)], ids=str)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e25, 1e-30])
def test_norms_of_extreme_rows(norm, rows, size):
    """Zeros, and numbers whose squares overflow or vanish: as the layer has it, NaN included."""
    x = (np.random.default_rng(0).normal(size=(rows, C)) * size).astype(np.float32)
    with torch.no_grad(), np.errstate(all="ignore"):
        short = token_path.norm(norm, x.dtype)(x[0] if rows == 1 else x).reshape(rows, C)
        np.testing.assert_allclose(short, host(norm(torch.tensor(x))), rtol=1e-5, atol=1e-6)


def assign(path, make):
    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make(model))
    return change


CHANGES = {
    "another head": assign("lm_head", lambda model: large(nn.Linear(C, V))),
    "another norm": assign("blocks.1.norm2", lambda model: nn.RMSNorm(C)),
    "a patched forward": assign("blocks.0.norm1.forward", lambda model: lambda x: x * 2),
    "another order": assign("blocks.0.norm_first", lambda model: True),
    "a window": assign("blocks.0.attention.window", lambda model: 1),
    "another eps": assign("final_norm.eps", lambda model: 1.0),
    "another weight": assign("blocks.0.ffn.net.0.weight", lambda model: nn.Parameter(torch.ones(CFF, C, dtype=torch.float64))),
    "other numbers": lambda model: model.blocks[0].attention.out_proj.weight.detach().mul_(-2),
    "another array": lambda model: setattr(model.blocks[1].ffn.net[3].weight, "data", torch.ones(C, CFF, dtype=torch.float64)),
    "a bias less": lambda model: setattr(model.blocks[0].attention.out_proj, "bias", None),
    "a layer in a list": lambda model: model.blocks.__setitem__(0, large(nn.TransformerBlock(C, H, CFF, norm_first=True))),
    "a layer in a sequence": lambda model: model.blocks[0].ffn.net.__setitem__(1, nn.ReLU()),
    "a hook": lambda model: model.blocks[0].norm2.register_forward_hook(lambda module, args, out: out * 2),
    "a hook before": lambda model: model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "loaded weights": lambda model: model.load_state_dict({name: -a for name, a in model.state_dict().items()}),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_between_two_tokens_counts_from_the_next_on(kind):
    """What the path has looked up it looks up anew: beside the forward pass with the same cache."""
    model, caches = large(gpt()), [KVCache(L, T) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(torch.tensor([[1, 2, 3]]), cache=cache)
        token_path.next_logits(model, np.array([4]), caches[0])
        before = host(model(torch.tensor([[4]]), cache=caches[1])[0][0, -1])
        CHANGES[kind](model)
        if token_path.serves(model, caches[0]):
            after = token_path.next_logits(model, np.array([4]), caches[0])[0]
        else:
            after = host(model(torch.tensor([[4]]), cache=caches[0])[0][0, -1])
        np.testing.assert_allclose(after, host(model(torch.tensor([[4]]), cache=caches[1])[0][0, -1]), rtol=0, atol=1e-11)
    assert abs(after - before).max() > 1e-4


def test_a_hook_that_is_gone_and_a_class_that_was_patched(monkeypatch):
    model, cache = large(gpt()), KVCache(L, T)
    next_by_both(model, cache)
    handle = model.final_norm.register_forward_hook(lambda module, args, out: out)
    assert not token_path.serves(model, cache)
    handle.remove()
    assert token_path.serves(model, cache)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert not token_path.serves(model, cache)


def test_a_model_that_is_dropped_is_freed():
    import gc
    import weakref
    model, cache = large(gpt()), KVCache(L, T)
    next_by_both(model, cache)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
