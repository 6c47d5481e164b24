"""QuantizedLinear: what it stores, what it computes, what becomes of odd weights, and how it lives among modules."""
import copy
import io

import numpy as np
import pytest
from device import host, placed

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.amp import autocast
from tinygrad_tf.quantization import INT4, QuantizedLinear, Scheme, fake_quantize, round_to_nearest
from tinygrad_tf.quantization import linear as source
from tinygrad_tf.quantization.linear import restored
from tinygrad_tf.trace import count_flops

SCHEMES = [Scheme(bits, symmetric, granularity, 4 if granularity == "group" else None)
           for bits in (2, 3, 4, 8) for symmetric in (True, False) for granularity in ("tensor", "channel", "group")]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def layers(scheme, in_features=12, out_features=6, bias=True):
    plain = nn.Linear(in_features, out_features, bias)
    return plain, QuantizedLinear.from_linear(plain, scheme)


# --- what it computes ---------------------------------------------------------------------------------------------------

@every_scheme
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 3, 12), (0, 12)])
def test_equals_a_float_layer_with_the_rounded_weights(scheme, bias, shape):
    plain, layer = layers(scheme, bias=bias)
    x = torch.randn(*shape, requires_grad=True)
    rounded = fake_quantize(plain.weight, scheme, scale_dtype=np.float16)
    assert torch.equal(layer.weight, rounded)
    assert torch.allclose(layer(x), nn.functional.linear(x, rounded, plain.bias), atol=1e-6)


@every_scheme
def test_gradients_reach_x_and_the_bias_and_stop_at_the_weights(scheme):
    _, layer = layers(scheme)
    x = torch.randn(2, 3, 12, requires_grad=True)
    y = layer(x)
    upstream = torch.randn(*y.shape)
    y.backward(upstream)
    assert torch.allclose(x.grad, upstream @ layer.weight, atol=1e-6)
    assert torch.allclose(layer.bias.grad, upstream.sum(dim=(0, 1)), atol=1e-6)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    layer.bias.requires_grad_(False)
    assert not layer(x.detach()).requires_grad


@pytest.mark.parametrize("block", [1, 12, 30, 2 ** 18])
def test_blocks_of_rows_change_nothing(block, monkeypatch):
    """All at once, a few rows at a time, each by itself; of per-tensor scales, which have no rows, too."""
    for scheme in (Scheme(3, False, "group", 6), Scheme(4), Scheme(8, False, "channel")):
        _, layer = layers(scheme)
        x = torch.randn(5, 12)
        expected = results(layer, x)
        monkeypatch.setattr(source, "BLOCK", block)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(results(layer, x), expected))
        monkeypatch.undo()


def results(layer, x):
    """(y, dx, Ŵ)"""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y, x.grad, layer.weight


def test_a_block_is_all_that_is_unpacked_at_a_time(monkeypatch):
    sizes = []

    def watched(q, *args):
        sizes.append(q.size)
        return original(q, *args)
    original = source.dequantized
    monkeypatch.setattr(source, "dequantized", watched)
    monkeypatch.setattr(source, "BLOCK", 64)
    _, layer = layers(INT4, 32, 100)
    sizes.clear()
    layer(torch.randn(3, 32))
    assert max(sizes) == 64 and sum(sizes) == 3200


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-2), (torch.float32, 1e-6), (torch.float64, 1e-6)])
def test_types(dtype, tolerance):
    plain, layer = layers(INT4, 32)
    x = torch.randn(5, 32)
    y = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype and layer.bias.dtype == dtype
    assert torch.allclose(y.float(), x @ layer.weight.t() + plain.bias, atol=tolerance)
    assert layer.packed.dtype == torch.uint8


def test_inside_autocast_the_result_is_float32():
    _, layer = layers(INT4, 32)
    x = torch.randn(4, 32)
    with autocast(x.device.type, dtype=torch.float16):
        assert layer(x).dtype == torch.float32 and layer(x.half()).dtype == torch.float32
        assert torch.allclose(layer(x), layer(x.half()), atol=1e-2)


def test_an_adapter_trains_through_it():
    """LoRA: W stays, Δ = B A learns what rounding took."""
    torch.manual_seed(1)
    plain, layer = layers(Scheme(2, granularity="channel"), 8, 8, bias=False)
    A, B = nn.Parameter(torch.randn(8, 8) * 0.3), nn.Parameter(torch.zeros(8, 8))
    x = torch.randn(64, 8)
    optimizer, losses = torch.optim.Adam([A, B], lr=0.02), []
    for _ in range(120):
        loss = (layer(x) + x @ A @ B - plain(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_products_are_counted():
    _, layer = layers(INT4, 32, 6)
    assert count_flops(layer, torch.randn(2, 5, 32))[""] == 2 * 10 * 32 * 6


# --- what it stores -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scheme, bits", [
    (INT4, 4.5), (Scheme(4, False, "group", 32), 4.75), (Scheme(3, granularity="group", group_size=32), 3.5),
    (Scheme(2, granularity="group", group_size=64), 2.25), (Scheme(8, granularity="channel"), 8 + 16 / 64), (Scheme(8), 8 + 16 / 64 / 48),
    (Scheme(4), 4 + 16 / 64 / 48)], ids=str)
def test_stored_bytes_are_what_they_claim(scheme, bits):
    """W [48, 64]. Bits a weight: its own, of a scale 16, of a zero point 8. In a file a header comes to it."""
    _, layer = layers(scheme, 64, 48)
    assert layer.weight_nbytes == sum(host(b).nbytes for b in layer.buffers()) == 64 * 48 * bits / 8
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    assert 0 <= file.tell() - layer.weight_nbytes - 4 * 48 < 1500


def test_odd_rows_end_within_a_byte():
    _, layer = layers(Scheme(4, granularity="channel"), 7, 3)
    assert layer.packed.shape == (3, 4) and layer.packed.dtype == torch.uint8
    assert layers(Scheme(3), 7, 3)[1].packed.shape == (3, 3)
    assert layers(Scheme(8), 7, 3)[1].packed.dtype == torch.int8 and layers(Scheme(8, False), 7, 3)[1].packed.dtype == torch.uint8


@every_scheme
def test_a_file_a_copy_and_a_device_keep_all_of_it(scheme, tmp_path):
    _, layer = layers(scheme)
    torch.save(layer.state_dict(), tmp_path / "layer.safetensors")
    read = QuantizedLinear(12, 6, scheme=scheme)
    read.load_state_dict(torch.load(tmp_path / "layer.safetensors"))
    x, y = torch.randn(3, 12), layer(torch.zeros(1, 12))
    for other in (read, copy.deepcopy(layer), copy.deepcopy(layer).to("cpu").to(y.device)):
        assert torch.equal(other(x), layer(x)) and other.scheme == scheme
        assert [b.dtype for b in other.buffers()] == [b.dtype for b in layer.buffers()]
    clone = copy.deepcopy(layer)
    clone.bias.data.zero_(), clone.packed.zero_()
    assert not torch.equal(clone(x), layer(x)), "a copy has bytes of its own"


def test_another_program_reads_the_file(tmp_path):
    from safetensors.numpy import load_file
    _, layer = layers(INT4, 32)
    torch.save(layer.state_dict(), tmp_path / "layer.safetensors")
    arrays = load_file(tmp_path / "layer.safetensors")
    q = np.stack([arrays["packed"] & 15, arrays["packed"] >> 4], axis=-1).reshape(6, 1, 32) - 8.0
    assert np.array_equal((q * arrays["scale"][..., None].astype(np.float32)).reshape(6, 32), host(layer.weight))


def test_input_scale_is_part_of_it():
    plain, layer = nn.Linear(8, 4), QuantizedLinear(8, 4, scheme=Scheme(8, granularity="channel"), input_scale=True)
    t = placed(np.linspace(0.5, 4, 8).astype(np.float16))
    codes = round_to_nearest(plain.weight.array * t.astype(np.float32), layer.scheme)._replace(input_scale=t)
    made = QuantizedLinear.from_linear(plain, layer.scheme, codes)
    layer.load_state_dict(made.state_dict())
    x = torch.randn(5, 8)
    assert torch.allclose(layer(x), x @ layer.weight.t() + plain.bias, atol=1e-5) and torch.allclose(layer(x), plain(x), atol=0.05)
    assert np.allclose(host(layer.weight), host(restored(codes, layer.scheme)), atol=1e-7)
    with pytest.raises(RuntimeError, match="input_scale"):
        QuantizedLinear(8, 4, scheme=layer.scheme).load_state_dict(made.state_dict())


@every_scheme
def test_dequantize_is_a_plain_layer_again(scheme):
    _, layer = layers(scheme)
    plain, x = layer.eval().dequantize(), torch.randn(5, 12)
    assert type(plain) is nn.Linear and not plain.training and repr(plain) == repr(nn.Linear(12, 6))
    assert torch.allclose(plain(x), layer(x), atol=1e-6)
    assert plain.weight.requires_grad and plain.bias is not layer.bias
    if scheme.symmetric:
        assert torch.equal(QuantizedLinear.from_linear(plain, scheme).weight, layer.weight), "rounding twice is rounding once"


def test_what_it_prints():
    assert repr(layers(INT4, 32)[1]) == "QuantizedLinear(in_features=32, out_features=6, bias=True, bits=4, group=32)"
    assert repr(QuantizedLinear(3, 2, False, Scheme(8, False, "channel"), input_scale=True)) == \
        "QuantizedLinear(in_features=3, out_features=2, bias=False, bits=8, a scale for each channel, asymmetric, input_scale=True)"


def test_what_is_made_without_a_layer_is_zero():
    layer = QuantizedLinear(32, 4)
    assert not layer.weight.any() and not layer(torch.randn(2, 32)).any()
    assert QuantizedLinear(0, 2, scheme=Scheme(4))(torch.ones(3, 0)).shape == (3, 2)
    assert QuantizedLinear(32, 0)(torch.ones(3, 32)).shape == (3, 0)


# --- odd weights --------------------------------------------------------------------------------------------------------

def with_weights(values, scheme, name="weight"):
    plain = nn.Linear(values.shape[1], values.shape[0], bias=False)
    plain.weight.data.copy_(torch.tensor(values.astype(np.float32)))
    return QuantizedLinear.from_linear(plain, scheme, name=name)


@every_scheme
def test_a_zero_matrix_stays_exactly_zero(scheme):
    layer = with_weights(np.zeros((3, 8)), scheme)
    assert not layer.weight.any() and torch.isfinite(layer.scale).all()


@every_scheme
@pytest.mark.parametrize("value", [0.7, -0.05, 300.0])
def test_a_constant_channel_is_kept_up_to_float16(scheme, value):
    """Its value is the last level: all that is lost is the rounding of the scale."""
    layer = with_weights(np.full((2, 8), value), scheme)
    assert np.abs(host(layer.weight) / value - 1).max() <= 2 ** -10


@every_scheme
def test_every_weight_is_within_half_a_step(scheme):
    values = np.random.default_rng(0).standard_normal((4, 8)) * np.array([[1e-6], [1e-3], [1], [1e3]])
    plain = nn.Linear(8, 4)
    plain.weight.data.copy_(torch.tensor(values.astype(np.float32)))
    codes = round_to_nearest(plain.weight.array, scheme)
    steps = host(codes.scale).astype(np.float64).reshape({0: (1, 1), 1: (4, 1), 2: (4, 2)}[codes.scale.ndim])
    error = np.abs(host(restored(codes, scheme)) - host(plain.weight)).reshape(4, 2, 4)
    assert (error <= 0.5 * (1 + 1e-3) * steps[..., None]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@every_scheme
def test_nan_and_infinity_are_named(scheme, bad):
    values = np.ones((3, 8))
    values[1, 2] = bad
    with pytest.raises(ValueError, match=r"blocks\.0\.weight, \(3, 8\), .*NaN or infinity"):
        with_weights(values, scheme, name="blocks.0.weight")


def test_weights_beyond_a_scale_in_float16_are_refused():
    with pytest.raises(ValueError, match="too large for a scale in float16"):
        with_weights(np.full((2, 4), 1e6), Scheme(4))


# --- wrong calls --------------------------------------------------------------------------------------------------------

def test_errors_say_what_is_wrong():
    layer = layers(INT4, 32)[1]
    with pytest.raises(RuntimeError, match=r"in_features, 32, got \(2, 31\)"):
        layer(torch.ones(2, 31))
    with pytest.raises(RuntimeError, match="float64.*float32.*one dtype"):
        layer(torch.ones(2, 32, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="floating-point"):
        QuantizedLinear(32, 4, bias=False)(torch.ones(2, 32, dtype=torch.int64))
    with pytest.raises(TypeError, match="input must be a Tensor"):
        layer([1.0] * 32)
    with pytest.raises(TypeError, match="scheme must be a Scheme"):
        QuantizedLinear(32, 4, True, 4)
    with pytest.raises(TypeError, match="in_features must be a whole number"):
        QuantizedLinear(3.5, 4)
    with pytest.raises(ValueError, match="out_features must be at least 0"):
        QuantizedLinear(32, -1)
    with pytest.raises(ValueError, match="choose a divisor of 30"):
        QuantizedLinear.from_linear(nn.Linear(30, 4), INT4)
    with pytest.raises(TypeError, match="an nn.Linear is expected"):
        QuantizedLinear.from_linear(layer)
    with pytest.raises(RuntimeError, match="size mismatch for packed"):
        layer.load_state_dict(layers(INT4, 64)[1].state_dict())
