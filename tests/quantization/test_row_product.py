"""A row times a matrix in whole numbers, beside the layer that makes the weights first."""
import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.quantization import QuantizedLinear, Scheme, row_product
from tinygrad_tf.quantization.linear import round_to_nearest

pytestmark = pytest.mark.host("it is for NumPy arrays alone")
SHARING = [("tensor", None), ("channel", None), ("group", 8), ("group", 3)]


def layer(scheme, C=24, out=10, bias=True, seed=0):
    torch.manual_seed(seed)
    return QuantizedLinear.from_linear(nn.Linear(C, out, bias=bias), scheme)


def compare(quantized, product, shape, dtype=torch.float32, atol=1e-5):
    x = torch.randn(*shape, quantized.in_features).to(dtype)
    y = product(host(x))
    assert y.dtype == host(x).dtype
    np.testing.assert_allclose(y, host(quantized.to(dtype)(x).detach()), rtol=0, atol=atol)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,)], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity, group_size", SHARING)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_it_is_the_layer(bits, granularity, group_size, symmetric, shape, monkeypatch):
    """In several blocks, the last one shorter; groups of 3 share bytes of 4 and 2 bits."""
    monkeypatch.setattr(row_product, "BLOCK", 24 * 4)
    quantized = layer(Scheme(bits, symmetric, granularity, group_size))
    compare(quantized, row_product.RowProduct(quantized), shape)


def test_in_float64_and_without_a_bias():
    quantized = layer(Scheme(4, granularity="group", group_size=8), bias=False)
    compare(quantized, row_product.RowProduct(quantized), (2,), torch.float64, atol=1e-12)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_odd_number_of_codes_and_none(bits):
    for C, out in (7, 5), (0, 5), (4, 0):
        quantized = layer(Scheme(bits, granularity="channel"), C, out)
        compare(quantized, row_product.RowProduct(quantized), (2,))


def test_inputs_that_were_scaled():
    linear, t = nn.Linear(24, 10), np.linspace(0.5, 2, 24).astype(np.float16)
    scheme = Scheme(4, granularity="group", group_size=8)
    codes = round_to_nearest(host(linear.weight.detach()) * t, scheme)._replace(input_scale=t)
    quantized = QuantizedLinear.from_linear(linear, scheme, codes)
    compare(quantized, row_product.RowProduct(quantized), (2,))


def test_what_is_loaded_into_the_layer_counts():
    scheme = Scheme(4, False, "group", 8)
    quantized, other = layer(scheme), layer(scheme, seed=1)
    product = row_product.RowProduct(quantized)
    compare(quantized, product, (2,))
    quantized.load_state_dict(other.state_dict())
    compare(other, product, (2,))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [2e37, -2e38, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_huge_numbers_are_those_of_the_layer(bits, value):
    quantized = layer(Scheme(bits, granularity="group", group_size=8))
    x = torch.randn(2, 24)
    x[0, 3] = x[0, 4] = value
    x[1] = 1e30
    wanted = host(quantized(x).detach())
    largest = max(abs(wanted[np.isfinite(wanted)]), default=0.0)
    np.testing.assert_allclose(row_product.RowProduct(quantized)(host(x)), wanted, rtol=0, atol=1e-5 * largest)
