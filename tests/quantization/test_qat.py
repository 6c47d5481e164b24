"""Quantisation-aware training: what is replaced and what stays, rounding and converting, and that it wins back what rounding costs."""
import copy
import functools

import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.generation import complete, inference
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.ops.quantize import dequantized, fake_quantize, limits, quantized, scale_and_zero
from tinygrad_tf.quantization import (
    MSEObserver,
    QATEmbedding,
    QATLinear,
    QuantizedLinear,
    Scheme,
    convert,
    mse_limits,
    prepare_qat,
    quantize_model,
)

SCHEMES = [Scheme(bits, symmetric, granularity, 8 if granularity == "group" else None)
           for bits in (2, 4) for symmetric in (True, False) for granularity in ("tensor", "channel", "group")]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
CHANNEL = Scheme(3, granularity="channel")
IDS = [[1, 5, 2, 9, 4], [3, 3, 7, 0, 8]]


def gpt(seed=0, **options):
    torch.manual_seed(seed)
    return MiniGPT(11, 8, 16, 2, 32, 2, dropout=0.0, **options)


def ids():
    return torch.tensor(IDS)


# --- layers -----------------------------------------------------------------------------------------------------------

@every_scheme
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_multiplies_by_its_rounded_weight(scheme, bias):
    layer, x = nn.Linear(16, 5, bias), torch.randn(2, 3, 16)
    rounded = prepare_qat(layer, scheme)
    assert type(rounded) is QATLinear and type(layer) is nn.Linear and rounded.weight is not layer.weight
    assert torch.equal(rounded(x), F.linear(x, fake_quantize(layer.weight, scheme), layer.bias))
    y = rounded(x)
    y.backward(upstream := torch.randn_like(y))
    assert torch.allclose(rounded.weight.grad, upstream.reshape(-1, 5).T @ x.reshape(-1, 16), atol=1e-5)


@every_scheme
def test_an_embedding_looks_up_rounded_rows(scheme):
    layer = nn.Embedding(11, 16, padding_idx=3)
    rounded = prepare_qat(layer, scheme)
    assert type(rounded) is QATEmbedding and torch.equal(rounded(ids()), fake_quantize(layer.weight, scheme)[ids()])
    rounded(ids()).sum().backward()
    assert rounded.weight.grad[3].abs().max() == 0 and rounded.weight.grad[1].tolist() == [1] * 16


def test_activations_are_rounded_too():
    layer = prepare_qat(nn.Linear(8, 4), CHANNEL, activations=Scheme(8, False))
    x = torch.randn(5, 8)
    layer(x)
    layer.eval()
    x_hat = layer.input_quantizer(x)
    assert 0 < (x_hat - x).abs().max() <= layer.input_quantizer.observer.calculate_qparams()[0] * 0.51
    assert torch.equal(layer(x), F.linear(x_hat, layer.rounded_weight(), layer.bias))
    observer = MSEObserver(Scheme(4))
    model = prepare_qat(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), CHANNEL, activations=observer)
    model(x)
    first, second = (model[i].input_quantizer.observer for i in (0, 1))
    assert first is not second is not observer and first.max_val != second.max_val and not observer.batches


# --- what is replaced -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [gpt, lambda: Decoder(11, 8, 16, 2, 32, 1)], ids=["MiniGPT", "Decoder"])
def test_a_model_keeps_its_names_parameters_and_ties(make):
    model = make()
    before = copy.deepcopy(model.state_dict())
    rounded = prepare_qat(model, CHANNEL)
    assert not any(isinstance(m, (QATLinear, QATEmbedding)) for m in model.modules())
    assert not any(type(m) in (nn.Linear, nn.Embedding) for m in rounded.modules())
    assert list(rounded.state_dict()) == list(before) and all(torch.equal(v, before[k]) for k, v in rounded.state_dict().items())
    assert rounded.lm_head.weight is getattr(rounded.embedding, "token", rounded.embedding).weight
    plain = convert(rounded)
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()] and list(plain.state_dict()) == list(before)
    assert plain.lm_head.weight is getattr(plain.embedding, "token", plain.embedding).weight
    assert [k for m in plain.modules() for k in vars(m)] == [k for m in model.modules() for k in vars(m)]


@every_scheme
@pytest.mark.parametrize("limits_of", [limits, functools.partial(mse_limits, steps=10)], ids=["min and max", "mse"])
def test_converting_changes_no_logit(scheme, limits_of):
    model = prepare_qat(gpt(), scheme, limits_of=limits_of)
    assert torch.equal(convert(model)(ids())[0], model(ids())[0])
    assert not torch.equal(gpt()(ids())[0], model(ids())[0])


@every_scheme
def test_the_weights_are_those_that_stored_whole_numbers_give(scheme):
    """With the scale of float16 that storing uses: what was trained is what is stored."""
    model = prepare_qat(gpt(), scheme, scale_dtype="float16")
    plain = convert(model)
    for name in "blocks.0.attention.q_proj", "blocks.1.ffn.net.3", "lm_head":
        layer, w = model.get_submodule(name), model.get_submodule(name).weight.array
        scale, zero = scale_and_zero(*limits(w, scheme), scheme, np.float16)
        wanted = host(dequantized(quantized(w, scale, zero, scheme), scale, zero, scheme))
        np.testing.assert_array_equal(host(plain.get_submodule(name).weight), wanted)
        assert layer.weight_qparams()[0].dtype == np.float16
        if scheme.symmetric:                    # and storing finds the same numbers again
            w = plain.get_submodule(name).weight.array
            scale, zero = scale_and_zero(*limits(w, scheme), scheme, np.float16)
            np.testing.assert_array_equal(host(dequantized(quantized(w, scale, zero, scheme), scale, zero, scheme)), wanted)


def test_what_was_trained_is_what_low_bit_weights_store():
    """Bit for bit, with the float16 scales that they have."""
    plain = convert(prepare_qat(gpt(), scheme := Scheme(4, granularity="group", group_size=8), scale_dtype="float16"))
    stored = quantize_model(plain, scheme)
    assert type(stored.blocks[0].attention.q_proj) is QuantizedLinear and torch.equal(stored(ids())[0], plain(ids())[0])


def test_in_place_keeps_parameters_optimizer_hooks_and_modes():
    model, seen = gpt(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    parameters = list(model.parameters())
    handle = model.lm_head.register_forward_hook(lambda *args: seen.append(1))
    model.blocks[0].eval()
    assert prepare_qat(model, CHANNEL, activations=Scheme(), inplace=True) is model
    assert all(a is b for a, b in zip(model.parameters(), parameters)) and type(model.lm_head) is QATLinear
    assert not model.blocks[0].attention.q_proj.training and not model.blocks[0].attention.q_proj.input_quantizer.training
    assert model.blocks[1].attention.q_proj.input_quantizer.training
    model.train()
    before = copy.deepcopy(model.state_dict())
    model(ids(), ids())[1].backward()
    optimizer.step()
    moved = [k for k, v in model.named_parameters() if not torch.equal(v, before[k])]
    assert len(moved) == len(parameters) and seen == [1]
    assert convert(model, inplace=True) is model and type(model.lm_head) is nn.Linear and all(
        a is b for a, b in zip(model.parameters(), parameters))
    model(ids())
    handle.remove()
    model(ids())
    assert seen == [1, 1]


def test_one_layer_with_two_names_stays_one():
    layer = nn.Linear(4, 4)
    model = prepare_qat(nn.Sequential(layer, nn.Tanh(), layer), CHANNEL)
    assert model[0] is model[2] and type(model[0]) is QATLinear
    plain = convert(model)
    assert plain[0] is plain[2] and torch.equal(plain(x := torch.randn(3, 4)), model(x))


def test_what_is_kept():
    model = prepare_qat(gpt(), CHANNEL, keep=["lm_head", "embedding", "blocks.1"])
    kinds = {path: type(m) for path, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    assert {path for path, kind in kinds.items() if kind is QATLinear} == {p for p in kinds if p.startswith("blocks.0")}
    assert not any(kind is QATEmbedding for kind in kinds.values())
    prepare_qat(gpt(), CHANNEL, keep=["blocks.1"])      # "blocks.1" does not stand for "blocks.10"


def test_subclasses_stay():
    class Mine(nn.Linear):
        pass
    model = prepare_qat(nn.Sequential(Mine(4, 4), nn.Linear(4, 4)), CHANNEL)
    assert type(model[0]) is Mine and type(model[1]) is QATLinear


# --- living with it ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("activations", [None, Scheme(8, False)], ids=["weights", "weights and activations"])
def test_state_dict_deepcopy_modes_and_dtype(activations):
    model = prepare_qat(gpt(), CHANNEL, activations)
    model(ids())
    model.eval()
    logits = model(ids())[0]
    other = prepare_qat(gpt(seed=1), CHANNEL, activations).eval()
    other.load_state_dict(model.state_dict())
    for m in (other, copy.deepcopy(model)):
        assert torch.equal(m(ids())[0], logits)
    if activations is None:
        gpt().load_state_dict(model.state_dict())
        model.load_state_dict(gpt().state_dict())
    assert torch.allclose(model.double()(ids())[0].float(), logits, atol=0.02)
    assert model(ids())[0].dtype == torch.float64


def test_moves_to_a_device(gpu):
    model = prepare_qat(gpt(), CHANNEL, Scheme(8))
    model(ids())
    model.eval()
    logits = model(ids())[0]
    there = copy.deepcopy(model).to("cuda")
    assert torch.allclose(there(ids().to("cuda"))[0].cpu(), logits, atol=1e-5)
    prepare_qat(gpt().to("cuda"), CHANNEL, Scheme(8))(ids().to("cuda"))[0].sum().backward()


def test_writes_text_with_and_without_a_cache():
    model = prepare_qat(gpt(), CHANNEL)
    texts = [complete(m, [[1, 2, 3]], 4, use_cache=use)[0].ids for m in (model, convert(model)) for use in (True, False)]
    assert all(text == texts[0] for text in texts)


def test_zeros_and_nan_in_a_weight():
    layer = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        layer.weight[0].zero_()
        layer.weight[1, 2] = float("nan")
    w = host(convert(prepare_qat(layer, CHANNEL)).weight)
    assert not w[0].any() and np.isnan(w[1]).all() and np.isfinite(w[2]).all()


@pytest.mark.parametrize("call, kind, words", [
    (lambda: prepare_qat(gpt(), Scheme(4, granularity="group", group_size=5)), ValueError, r"embedding\.token\.weight: .*groups of 5"),
    (lambda: prepare_qat(gpt(), CHANNEL, keep=["lm_head"]), ValueError, "tied to lm_head.weight, which is not; keep both or neither"),
    (lambda: prepare_qat(gpt(), CHANNEL, keep=["head"]), ValueError, "no module of that name"),
    (lambda: prepare_qat(gpt(), CHANNEL, keep="lm_head"), TypeError, r"write \['lm_head'\]"),
    (lambda: prepare_qat(gpt(), 4), TypeError, "Scheme"), (lambda: prepare_qat([], CHANNEL), TypeError, "Module"),
    (lambda: prepare_qat(gpt(), CHANNEL, activations=8), TypeError, "activations"),
    (lambda: prepare_qat(gpt(), CHANNEL, limits_of=3), TypeError, "limits_of"),
    (lambda: prepare_qat(nn.LayerNorm(4), CHANNEL), ValueError, "no Linear and no Embedding"),
    (lambda: prepare_qat(prepare_qat(gpt(), CHANNEL), CHANNEL), ValueError, "prepared before"),
    (lambda: convert(gpt()), ValueError, "nothing to convert")])
def test_errors_teach(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_nothing_is_replaced_where_something_does_not_fit():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6, 2))
    with pytest.raises(ValueError, match="2.weight"):
        prepare_qat(model, Scheme(4, granularity="group", group_size=8), inplace=True)
    assert [type(m) for m in model] == [nn.Linear] * 3


# --- training ---------------------------------------------------------------------------------------------------------

def language(n, seed, V_vocab=24):
    """n tokens, each chosen among 4 by the two before it: a text that a small model learns in seconds, and not by heart."""
    choices = np.random.default_rng(0).integers(0, V_vocab, (V_vocab, V_vocab, 4))
    random, text = np.random.default_rng(seed), [0, 1]
    for _ in range(n):
        text.append(choices[text[-2], text[-1] % 3, min(random.geometric(0.6) - 1, 3)])
    return np.array(text[2:])


def fit(model, steps, lr, text, T=16, B=32):
    random, optimizer = np.random.default_rng(3), torch.optim.AdamW(model.train().parameters(), lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        windows = text[random.integers(len(text) - T, size=(B, 1)) + np.arange(T + 1)]
        optimizer.zero_grad()
        model(torch.tensor(windows[:, :-1]), torch.tensor(windows[:, 1:]))[1].backward()
        optimizer.step()
    return model.eval()


def losses(model, text, T=16):
    """The mean loss of each held-out window."""
    windows = torch.tensor(np.lib.stride_tricks.sliding_window_view(text, T + 1)[::T].copy())
    with inference(model):
        loss = F.cross_entropy(model(windows[:, :-1])[0].flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    return host(loss).reshape(-1, T).mean(axis=1)


@functools.cache
def trained():
    torch.manual_seed(0)
    return fit(MiniGPT(24, 16, 32, 2, 64, 1, dropout=0.0, norm_first=True), 300, 1e-2, language(20000, 1))


@pytest.mark.host("training takes minutes on the stand-in; the layers, and a backward pass through a model, are tested there above")
@pytest.mark.parametrize("scheme", [CHANNEL, Scheme(3, False)], ids=str)
def test_training_with_rounded_weights_wins_back_most_of_what_rounding_costs(scheme):
    train, held_out, model = language(20000, 1), language(4000, 2), trained()
    longer = fit(copy.deepcopy(model), 80, 3e-3, train)
    rounded, aware = (convert(m) for m in (prepare_qat(longer, scheme), fit(prepare_qat(model, scheme), 80, 3e-3, train)))
    in_float, by_rounding, by_training = (losses(m, held_out) for m in (longer, rounded, aware))
    cost, left = by_rounding - in_float, by_training - in_float
    error = (by_rounding - by_training).std() / len(cost) ** 0.5
    assert by_rounding.mean() - by_training.mean() > 3 * error and left.mean() < cost.mean() / 2
