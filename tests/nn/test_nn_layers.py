"""Every layer: its function, its gradient, its checks."""
import copy

import numpy as np
import pytest

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf import nn
from tinygrad_tf.gradcheck import gradcheck_module


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def ids():
    return torch.tensor([[1, 0, 3], [3, 3, 2]])


def labels():
    return torch.tensor([1, -100, 0])


LAYERS = {                                      # layer, its inputs
    "Identity": lambda: (nn.Identity(3, ignored=True), double(2, 3)),
    "Linear": lambda: (nn.Linear(3, 4), double(2, 5, 3)),
    "Linear without bias": lambda: (nn.Linear(3, 4, bias=False), double(3)),
    "Embedding": lambda: (nn.Embedding(4, 3), ids()),
    "LayerNorm": lambda: (nn.LayerNorm(4), double(2, 3, 4)),
    "LayerNorm over two axes": lambda: (nn.LayerNorm((3, 4), bias=False), double(2, 3, 4)),
    "LayerNorm without parameters": lambda: (nn.LayerNorm(4, elementwise_affine=False), double(3, 4)),
    "RMSNorm": lambda: (nn.RMSNorm(4), double(3, 4)),
    "RMSNorm without parameters": lambda: (nn.RMSNorm(4, eps=1e-6, elementwise_affine=False), double(3, 4)),
    "Dropout": lambda: (nn.Dropout(0.5).eval(), double(3, 4)),
    "Flatten": lambda: (nn.Flatten(), double(2, 3, 2)),
    "ReLU": lambda: (nn.ReLU(), double(3, 4)),
    "LeakyReLU": lambda: (nn.LeakyReLU(0.1), double(3, 4)),
    "GELU": lambda: (nn.GELU(), double(3, 4)),
    "GELU by tanh": lambda: (nn.GELU("tanh"), double(3, 4)),
    "SiLU": lambda: (nn.SiLU(), double(3, 4)),
    "Tanh": lambda: (nn.Tanh(), double(3, 4)),
    "Sigmoid": lambda: (nn.Sigmoid(), double(3, 4)),
    "Softmax": lambda: (nn.Softmax(dim=-1), double(3, 4)),
    "LogSoftmax": lambda: (nn.LogSoftmax(dim=0), double(3, 4)),
    "GLU": lambda: (nn.GLU(), double(3, 4)),
    "ReLUSquared": lambda: (nn.ReLUSquared(), double(3, 4)),
    "BCEWithLogitsLoss": lambda: (nn.BCEWithLogitsLoss(), double(3, 4), torch.tensor([[0.0, 1.0, 0.5, 1.0]] * 3).double()),
    "CrossEntropyLoss": lambda: (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0, 4.0]), label_smoothing=0.1), double(3, 4), labels()),
    "NLLLoss": lambda: (nn.NLLLoss(reduction="sum"), double(3, 4), labels()),
    "MSELoss": lambda: (nn.MSELoss(), double(3, 4), double(3, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name):
    layer, *inputs = LAYERS[name]()
    with torch.no_grad():
        for p in layer.parameters():            # ones and zeros would hide a forgotten factor
            p.add_(torch.randn(*p.shape) * 0.1)
    assert gradcheck_module(layer.double(), *inputs)


@pytest.mark.torch
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_are_those_of_pytorch(name):
    theirs = pytest.importorskip("torch")
    if not hasattr(theirs.nn, name.split()[0]):
        pytest.skip(f"PyTorch has no nn.{name}")
    layer, *inputs = LAYERS[name]()
    source = {"Linear": "Linear(3, 4)", "Linear without bias": "Linear(3, 4, bias=False)", "Embedding": "Embedding(4, 3)",
              "LayerNorm": "LayerNorm(4)", "LayerNorm over two axes": "LayerNorm((3, 4), bias=False)",
              "LayerNorm without parameters": "LayerNorm(4, elementwise_affine=False)", "RMSNorm": "RMSNorm(4)",
              "RMSNorm without parameters": "RMSNorm(4, eps=1e-6, elementwise_affine=False)", "Dropout": "Dropout(0.5).eval()",
              "Flatten": "Flatten()", "LeakyReLU": "LeakyReLU(0.1)", "GELU by tanh": "GELU('tanh')", "Softmax": "Softmax(dim=-1)",
              "LogSoftmax": "LogSoftmax(dim=0)", "NLLLoss": "NLLLoss(reduction='sum')",
              "CrossEntropyLoss": "CrossEntropyLoss(T([1.0, 2.0, 3.0, 4.0]), label_smoothing=0.1)"}.get(name, f"{name}()")
    twin = eval("nn." + source, {"nn": theirs.nn, "T": theirs.tensor}).double()
    layer.double()
    twin.load_state_dict({k: theirs.tensor(v.cpu().numpy()) for k, v in layer.state_dict().items()})
    expected = twin(*(theirs.tensor(x.detach().cpu().numpy()) for x in inputs))
    np.testing.assert_allclose(layer(*inputs).detach().cpu().numpy(), expected.detach().cpu().numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LAYERS)
def test_float32_stays_float32(name):
    layer, *inputs = LAYERS[name]()
    inputs = [x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    out = layer(*inputs)
    out.sum().backward()
    assert out.dtype == torch.float32
    assert all(t.grad.dtype == torch.float32 for t in [*layer.parameters(), *inputs] if t.requires_grad)


def test_every_layer_of_the_room_is_in_the_table():
    from tinygrad_tf.nn import activations, layers, losses
    found = {c for room in (activations, layers, losses) for c in vars(room).values()
             if isinstance(c, type) and issubclass(c, nn.Module) and c.__module__ == room.__name__ and not c.__name__.startswith("_")}
    assert found == {type(make()[0]) for make in LAYERS.values()}


def test_linear_is_x_times_the_transpose():
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    np.testing.assert_allclose(layer(x).tolist(), (x @ layer.weight.T + layer.bias).tolist(), rtol=1e-6)
    assert layer.weight.shape == (2, 3) and layer(torch.randn(3)).shape == (2,)
    assert nn.Linear(2, 2, dtype=torch.float64).weight.dtype == torch.float64 and nn.Linear(0, 2).bias.tolist() == [0.0, 0.0]


def test_embedding_padding_row():
    layer = nn.Embedding(4, 2, padding_idx=-2)
    assert layer.padding_idx == 2 and layer.weight[2].tolist() == [0.0, 0.0] and layer.weight[1].tolist() != [0.0, 0.0]
    layer(torch.tensor([2, 1, 1])).sum().backward()
    assert layer.weight.grad.tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    table = torch.randn(3, 2)
    frozen = nn.Embedding.from_pretrained(table, padding_idx=0)
    assert not frozen.weight.requires_grad and repr(frozen) == "Embedding(3, 2, padding_idx=0)"
    assert (frozen(torch.tensor([0, 2])) == table[[0, 2]]).all()
    assert nn.Embedding.from_pretrained(table, freeze=False).weight.requires_grad


def test_dropout_acts_in_training_alone():
    layer, x = nn.Dropout(0.25), torch.ones(1000)
    y = layer(x)
    assert set(np.unique(y.cpu().numpy())) == {np.float32(0), np.float32(1 / 0.75)} and 200 < int((y == 0).sum()) < 300
    assert (layer.eval()(x) == x).all() and (nn.Dropout(1.0)(x) == 0).all() and (nn.Dropout(0.0)(x) == x).all()


def test_loss_weights_are_buffers_that_follow_the_dtype():
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]))
    assert list(loss.state_dict()) == ["weight"] and loss.double().weight.dtype == torch.float64
    assert list(nn.CrossEntropyLoss().state_dict()) == []
    x, t = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    assert float(nn.CrossEntropyLoss()(x, t)) == pytest.approx(float(F.cross_entropy(x, t)))


@pytest.mark.parametrize("make, error", [
    (lambda: nn.Linear(2.0, 3), TypeError), (lambda: nn.Linear(-1, 3), RuntimeError), (lambda: nn.Linear(2, True), TypeError),
    (lambda: nn.Embedding(3, -1), RuntimeError), (lambda: nn.Embedding("3", 1), TypeError),
    (lambda: nn.Embedding(3, 2, padding_idx=3), ValueError), (lambda: nn.Embedding(3, 2, padding_idx=-4), ValueError),
    (lambda: nn.Embedding.from_pretrained(torch.ones(3)), ValueError),
    (lambda: nn.Dropout(1.1), ValueError), (lambda: nn.Dropout(-0.1), ValueError), (lambda: nn.Dropout(float("nan")), ValueError),
    (lambda: nn.LayerNorm(-3), RuntimeError), (lambda: nn.LayerNorm(3.5), TypeError),
    (lambda: nn.GELU("fast")(torch.ones(1)), RuntimeError),
    (lambda: nn.Linear(2, 3)(torch.ones(3)), RuntimeError), (lambda: nn.LayerNorm(3)(torch.ones(2)), RuntimeError),
    (lambda: nn.Embedding(3, 2)(torch.tensor([3])), IndexError), (lambda: nn.Embedding(3, 2)(torch.tensor([-1])), IndexError),
    (lambda: nn.Embedding(3, 2)(torch.tensor([1.0])), RuntimeError),
])
def test_bad_input_raises(make, error):
    with pytest.raises(error):
        make()


def test_layers_can_be_copied_and_run_alike():
    for name in LAYERS:
        layer, *inputs = LAYERS[name]()
        layer.double()
        assert (copy.deepcopy(layer)(*inputs) == layer(*inputs)).all(), name
