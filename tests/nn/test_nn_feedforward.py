"""The feed-forward family: each formula by hand, its gradient, its size, and that nothing passes between tokens."""
import math

import numpy as np
import pytest

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf import nn
from tinygrad_tf.gradcheck import gradcheck_module

B, T, C, CFF = 2, 3, 4, 6

SIGMA = {                                       # σ, written in NumPy
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * np.vectorize(lambda t: 0.5 * (1 + math.erf(t / math.sqrt(2))))(x),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
GATED = {
    "SwiGLU": (lambda **options: nn.SwiGLU(C, CFF, **options), "silu"),
    "GEGLU": (lambda **options: nn.GEGLU(C, CFF, **options), "gelu"),
    **{f"gated by {name}": (lambda name=name, **options: nn.GatedFeedForward(C, CFF, name, **options), name) for name in SIGMA},
}
every_network = pytest.mark.parametrize("make, name", GATED.values(), ids=GATED)
with_and_without_bias = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@with_and_without_bias
@every_network
def test_the_formula(make, name, bias):
    ffn, x = make(bias=bias).double(), tokens(B, T, C)

    def linear(layer, x):
        return x @ layer.weight.detach().cpu().numpy().T + (layer.bias.detach().cpu().numpy() if bias else 0)
    hidden = SIGMA[name](linear(ffn.gate_proj, x.cpu().numpy())) * linear(ffn.up_proj, x.cpu().numpy())
    np.testing.assert_allclose(ffn(x).tolist(), linear(ffn.down_proj, hidden), rtol=1e-10, atol=1e-12)


@with_and_without_bias
@every_network
def test_gradients_and_number_of_parameters(make, name, bias):
    ffn = make(bias=bias).double()
    assert gradcheck_module(ffn, tokens(B, T, C).requires_grad_())
    assert sum(p.numel() for p in ffn.parameters()) == 3 * C * CFF + (2 * CFF + C if bias else 0)


@every_network
def test_nothing_passes_between_tokens(make, name):
    ffn, x, order = make().double(), tokens(B, T, C), torch.tensor([2, 0, 1])
    np.testing.assert_allclose(ffn(x[:, order]).tolist(), ffn(x)[:, order].tolist(), atol=1e-14)
    assert ffn(x[0, 0]).shape == (C,)           # one token alone


@pytest.mark.torch
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "sigmoid"])
def test_against_pytorch(activation):
    theirs = pytest.importorskip("torch")
    sigma = {"silu": theirs.nn.functional.silu, "gelu": theirs.nn.functional.gelu, "relu": theirs.relu, "sigmoid": theirs.sigmoid}
    ffn, x = nn.GatedFeedForward(C, CFF, activation), torch.randn(B, T, C)
    x_, gate, up, down = (theirs.tensor(t.detach().cpu().numpy()) for t in (x, *(p for p in ffn.parameters())))
    expected = (sigma[activation](x_ @ gate.T) * (x_ @ up.T)) @ down.T
    np.testing.assert_allclose(ffn(x).detach().cpu().numpy(), expected.cpu().numpy(), rtol=1e-5, atol=1e-6)


def test_dropout_acts_between_the_two_layers_in_training_only():
    ffn, x = nn.SwiGLU(C, CFF, bias=True, dropout=1.0), torch.randn(B, T, C)
    assert torch.equal(ffn(x), ffn.down_proj.bias.expand(B, T, C))
    assert not torch.equal(ffn.eval()(x), ffn.down_proj.bias.expand(B, T, C))


def test_two_linear_layers_without_an_activation_are_one():
    first, second, x = nn.Linear(C, CFF), nn.Linear(CFF, C), torch.randn(B, T, C)
    together = F.linear(x, second.weight @ first.weight, second.weight @ first.bias + second.bias)
    assert torch.allclose(second(first(x)), together, atol=1e-6)


def test_activations_as_layers():
    x = torch.randn(3, 4)
    assert torch.equal(nn.ReLUSquared()(x), F.relu(x) * F.relu(x))
    assert torch.equal(nn.GLU()(x), x[:, :2] * x[:, 2:].sigmoid())
    with pytest.raises(RuntimeError, match="must be even, but dimension 0 is size 3"):
        nn.GLU(dim=0)(x)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'swish' is unknown; there are .*silu"):
        nn.GatedFeedForward(C, CFF, "swish")
