"""quantize_model: which layers, what stays, that it writes text and trains on, and that calibration is the model's own inputs."""
import copy

import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.generation import KVCache, generate, inference
from tinygrad_tf.generation.token_path import next_logits, serves
from tinygrad_tf.models import Decoder, Encoder, EncoderDecoder, MiniGPT
from tinygrad_tf.quantization import (
    INT4,
    QuantizedLinear,
    Scheme,
    bits_per_weight,
    convert,
    output_errors,
    prepare_qat,
    quantize_model,
    quantized_linears,
)

METHODS = ("rtn", "awq", "gptq")
CHANNEL = Scheme(4, granularity="channel")
GROUP8 = Scheme(3, granularity="group", group_size=8)


def minigpt(layers=2, **options):
    torch.manual_seed(0)
    return MiniGPT(20, 16, 16, 2, 32, layers, dropout=0.0, **options).eval()


def decoder():
    torch.manual_seed(0)
    return Decoder(20, 16, 16, 4, 24, 2, num_kv_heads=2).eval()


def ids(rows=4, T=16, seed=1):
    return torch.randint(0, 20, (rows, T), generator=torch.Generator().manual_seed(seed)).to(torch.get_default_device())


# --- which layers -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [minigpt, lambda: minigpt(norm_first=True), decoder])
def test_all_linears_but_the_tied_head(build, method):
    model = build()
    before = copy.deepcopy(model.state_dict())
    quantised = quantize_model(model, GROUP8, method, ids())
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    assert list(quantized_linears(quantised)) == linears and len(linears) >= 12
    assert type(quantised.lm_head) is nn.Linear and type(quantised) is type(model) and not quantised.training
    tables = [m for m in quantised.modules() if isinstance(m, nn.Embedding)]
    assert quantised.lm_head.weight is tables[0].weight, "still one tensor"
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items()), "the model itself stays"
    assert bits_per_weight(quantised) <= 3 + 16 / 8 + 16 / 16


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_float_model_with_the_rounded_weights(method):
    model, x = minigpt(), ids()
    quantised = quantize_model(model, CHANNEL, method, x)
    for name, layer in quantized_linears(quantised).items():
        model.get_submodule(name).weight.data.copy_(layer.weight)
    assert torch.allclose(quantised(x)[0], model(x)[0], atol=1e-4)


def test_keep():
    quantised = quantize_model(minigpt(), CHANNEL, keep=["blocks.0", "blocks.1.ffn.net.3"])
    names = list(quantized_linears(quantised))
    assert names == ["blocks.1.attention.q_proj", "blocks.1.attention.k_proj", "blocks.1.attention.v_proj", "blocks.1.attention.out_proj",
                     "blocks.1.ffn.net.0"]
    with pytest.raises(ValueError, match="keep names 'blocks.7', and MiniGPT has no module of that name"):
        quantize_model(minigpt(), CHANNEL, keep=["blocks.7"])
    with pytest.raises(TypeError, match=r"keep must be a list of names.*write \['blocks'\]"):
        quantize_model(minigpt(), CHANNEL, keep="blocks")
    with pytest.raises(ValueError, match="MiniGPT has no nn.Linear to quantise"):
        quantize_model(minigpt(), CHANNEL, keep=["blocks"])


class Shared(nn.Module):
    """One layer in two places; a subclass; a mode of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.special = type("Special", (nn.Linear,), {})(8, 8)

    def forward(self, x):
        return self.special(self.again(self.first(x)))


def test_a_layer_in_two_places_stays_one_and_subclasses_stay():
    quantised = quantize_model(Shared(), CHANNEL, "gptq", torch.randn(5, 8))
    assert type(quantised.first) is QuantizedLinear and quantised.first is quantised.again
    assert type(quantised.special).__name__ == "Special" and quantised.training and quantised.first.training


def test_a_model_that_is_one_layer():
    plain = nn.Linear(8, 4)
    layer = quantize_model(plain, CHANNEL, "gptq", torch.randn(20, 8))
    assert type(layer) is QuantizedLinear and torch.equal(layer.bias, plain.bias) and layer.bias is not plain.bias


def test_weights_that_are_tied_anywhere_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert list(quantized_linears(quantize_model(model, CHANNEL))) == ["1"]


def test_encoder_and_encoder_decoder():
    encoder = Encoder(20, 16, 16, 2, 32, 1)
    assert len(quantized_linears(quantize_model(encoder, CHANNEL, "awq", ids()))) == 6
    both = EncoderDecoder(20, 20, 16, 16, 16, 2, 32, 1)
    assert len(quantized_linears(quantize_model(both, CHANNEL))) == 6 + 10


# --- calibration --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scheme", [CHANNEL, GROUP8, Scheme(2, False, "group", 8), Scheme(4)], ids=str)
def test_each_layers_error_is_at_most_that_of_rounding_to_nearest(scheme):
    model, x = minigpt(1, norm_first=True), [ids(), ids(3, 11, seed=2)]
    errors = {method: output_errors(model, quantize_model(model, scheme, method, x), x) for method in METHODS}
    for name, nearest in errors["rtn"].items():
        assert 0 < errors["gptq"][name] <= nearest * (1 + 1e-5) and 0 < errors["awq"][name] <= nearest * (1 + 1e-5), name
    assert np.mean(list(errors["gptq"].values())) < 0.9 * np.mean(list(errors["rtn"].values()))


def test_the_errors_are_those_of_the_outputs():
    model, x = minigpt(), ids()
    quantised, seen = quantize_model(model, CHANNEL), {}
    layer = model.blocks[1].ffn.net[0]
    handle = layer.register_forward_hook(lambda module, args, out: seen.update(x=args[0]))
    model(x)
    handle.remove()
    plain = seen["x"] @ layer.weight.t()
    change = seen["x"] @ quantised.blocks[1].ffn.net[0].weight.t() - plain
    expected = (change.square().sum() / plain.square().sum()).item()
    assert np.isclose(output_errors(model, quantised, x)["blocks.1.ffn.net.0"], expected, rtol=1e-3)


def test_one_batch_and_its_halves_are_the_same_calibration():
    model, x = minigpt(), ids()
    whole, halves = (quantize_model(model, CHANNEL, "gptq", batch) for batch in (x, [x[:2], x[2:]]))
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), halves.buffers()))


def test_calibration_reads_in_eval_mode_and_leaves_no_trace():
    model = MiniGPT(20, 16, 16, 2, 32, 1, dropout=0.9)
    one, two = (quantize_model(model, CHANNEL, "gptq", ids()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), two.buffers())), "no dropout"
    assert model.training and one.training and all(m.training for m in one.modules())
    assert not any(m._forward_pre_hooks for model in (model, one) for m in model.modules())
    assert all(p.grad is None for p in one.parameters())


# --- a model like any other ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [minigpt, decoder])
def test_it_writes_the_same_with_and_without_a_cache(build, method):
    model = quantize_model(build(), CHANNEL, method, ids(2, 5))
    prompt = ids(1, 5)
    texts = [host(generate(model, prompt, 4, temperature=0, use_cache=use_cache)).tolist() for use_cache in (True, False)]
    assert texts[0] == texts[1] and len(texts[0][0]) == 9


@pytest.mark.host("the path is for NumPy arrays alone")
@pytest.mark.parametrize("method", ["rtn", "awq"])
@pytest.mark.parametrize("scheme", [CHANNEL, GROUP8], ids=["channel", "group"])
def test_the_short_path_for_a_token_is_the_forward_pass(scheme, method):
    """Also after other weights were loaded: its scales are those that the layers have now."""
    model, caches = quantize_model(minigpt(), scheme, method, ids(2, 5)), [KVCache(2, 16) for _ in range(2)]
    others = minigpt()
    for p in others.parameters():
        p.detach().mul_(1.5)
    others = quantize_model(others, scheme, method, ids(2, 5)).state_dict()
    with inference(model):
        for cache in caches:
            model(ids(1, 3), cache=cache)
        for token in 4, 5:
            assert serves(model, caches[0])
            short, whole = next_logits(model, np.array([token]), caches[0]), model(torch.tensor([[token]]), cache=caches[1])[0]
            np.testing.assert_allclose(short, host(whole)[:, 0], rtol=0, atol=1e-5)
            model.load_state_dict(others)


def test_a_state_dict_and_a_copy():
    model, x = quantize_model(minigpt(1), GROUP8, "awq", ids()), ids(seed=3)
    other = quantize_model(minigpt(1), GROUP8, "awq", ids(seed=9))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(other(x)[0], model(x)[0]) and torch.equal(copy.deepcopy(model)(x)[0], model(x)[0])


def test_what_is_left_in_float_trains_on():
    model, x = quantize_model(minigpt(1), CHANNEL), ids(2, 8)
    optimizer, losses, before = torch.optim.AdamW(model.parameters(), lr=1e-2), [], [b.clone() for b in model.buffers()]
    for _ in range(5):
        _, loss = model(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers()))


def test_after_training_for_it_nothing_is_lost():
    """The weights that quantisation-aware training leaves lie on the levels already."""
    for scheme in (Scheme(3, granularity="channel"), GROUP8):
        trained = convert(prepare_qat(minigpt(), scheme, scale_dtype=np.float16, keep=["embedding", "lm_head"]))
        stored = quantize_model(trained, scheme)
        assert torch.equal(stored.blocks[0].attention.q_proj.weight, trained.blocks[0].attention.q_proj.weight)
        assert torch.allclose(stored(ids())[0], trained(ids())[0], atol=1e-5)


# --- wrong calls ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_with_nan_or_infinity_is_named(method, bad):
    model = minigpt()
    model.blocks[1].ffn.net[3].weight.data[0, 0] = bad
    model.blocks[1].norm2.weight.data.zero_()                          # so that calibration itself stays finite behind it
    with pytest.raises(ValueError, match=r"blocks\.1\.ffn\.net\.3\.weight, \(16, 32\), .*NaN or infinity"):
        quantize_model(model, CHANNEL, method, ids())


def test_a_model_that_gives_nan_is_no_calibration():
    model = minigpt()
    model.embedding.token.weight.data[3] = np.nan
    with pytest.raises(ValueError, match=r"calibration: the input of blocks\.0\.attention\.q_proj, \(4, 16, 16\), holds NaN"):
        quantize_model(model, CHANNEL, "gptq", ids().fill_(3))


def test_wrong_calls_say_what_is_wrong():
    model = minigpt()
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.q_proj\.weight: .*choose a divisor of 16"):
        quantize_model(model, INT4)
    with pytest.raises(ValueError, match="method 'gptq' needs calibration"):
        quantize_model(model, CHANNEL, "gptq")
    with pytest.raises(ValueError, match="method must be one of 'rtn', 'awq', 'gptq', got 'exl2'"):
        quantize_model(model, CHANNEL, "exl2")
    with pytest.raises(TypeError, match="scheme must be a Scheme"):
        quantize_model(model, 4)
    with pytest.raises(TypeError, match="model must be a Module"):
        quantize_model([model], CHANNEL)
    for batch in (np.zeros((2, 3), int), [], "text"):
        with pytest.raises(TypeError, match="calibration must be a batch of ids as a Tensor"):
            quantize_model(model, CHANNEL, "awq", batch)
    with pytest.raises(TypeError, match="batch 1 must be a Tensor"):
        quantize_model(model, CHANNEL, "awq", [ids(), [1, 2]])
    with pytest.raises(ValueError, match=r"no input reached special\.weight"):
        quantize_model(Unused(), CHANNEL, "gptq", torch.randn(3, 8))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.special = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)
