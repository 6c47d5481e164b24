"""Initial values: PyTorch's numbers under a seed, and the bounds of each function."""
import math

import numpy as np
import pytest
import record_nn

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.nn import init

RECORDED = dict(np.load(record_nn.FILE))


@pytest.fixture(scope="module")
def ours():
    return record_nn.initial_values(torch)


def test_values_are_those_of_pytorch(ours):
    assert len(ours) > 25
    for name, value in ours.items():
        np.testing.assert_allclose(value, RECORDED[name], rtol=3e-6, atol=1e-9, err_msg=name)


@pytest.mark.torch
def test_values_are_those_of_pytorch_live(ours):
    for name, value in record_nn.initial_values(pytest.importorskip("torch")).items():
        np.testing.assert_allclose(ours[name], value, rtol=3e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("mean, std, a, b", [(0.0, 1.0, -2.0, 2.0), (0.0, 0.02, -2.0, 2.0), (1.0, 0.5, 0.9, 1.0), (0.0, 1.0, 1.9, 5.0),
                                             (0.0, 1.0, -1.0, -0.9)])
def test_trunc_normal_stays_inside(mean, std, a, b):
    x = init.trunc_normal_(torch.empty(2000), mean, std, a, b).cpu().numpy()
    assert x.min() >= np.float32(a) and x.max() <= np.float32(b)
    z = np.linspace(max(a, mean - 8 * std), min(b, mean + 8 * std), 20001)
    density = np.exp(-0.5 * ((z - mean) / std) ** 2)
    expected = (z * density).sum() / density.sum()
    assert abs(x.mean() - expected) < 5 * x.std() / math.sqrt(2000)


def test_trunc_normal_warns_far_outside_and_refuses_nonsense():
    with pytest.warns(UserWarning, match="more than 2 std"):
        init.trunc_normal_(torch.empty(3), 0.0, 1.0, 3.0, 4.0)
    for std, a, b in ((0.0, -1, 1), (-1.0, -1, 1), (1.0, 1, 1), (1.0, 2, -2), (float("nan"), -1, 1)):
        with pytest.raises(ValueError, match="trunc_normal_"):
            init.trunc_normal_(torch.empty(3), 0.0, std, a, b)


@pytest.mark.parametrize("fill, std", [
    (lambda t: init.xavier_normal_(t, gain=2.0), 2 * math.sqrt(2 / (40 * 6 + 50 * 6))),
    (init.xavier_uniform_, math.sqrt(2 / (40 * 6 + 50 * 6))),
    (lambda t: init.kaiming_normal_(t, nonlinearity="relu"), math.sqrt(2 / (50 * 6))), (init.kaiming_uniform_, math.sqrt(2 / (50 * 6))),
    (lambda t: init.kaiming_uniform_(t, mode="fan_out", nonlinearity="linear"), 1 / math.sqrt(40 * 6)),
    (lambda t: init.uniform_(t, -1.0, 1.0), 1 / math.sqrt(3)), (lambda t: init.normal_(t, 5.0, 0.1), 0.1)])
def test_standard_deviations(fill, std):
    weight = nn.Parameter(torch.empty(40, 50, 2, 3))
    version = weight.version.written
    assert fill(weight) is weight and weight.is_leaf and weight.requires_grad and weight.version.written > version
    assert abs(weight.detach().cpu().numpy().std() / std - 1) < 0.03


def test_constants_gains_and_generators():
    assert (init.ones_(torch.zeros(2, 2)) == 1).all() and (init.zeros_(torch.ones(2)) == 0).all()
    assert init.constant_(torch.zeros(2), 0.5).tolist() == [0.5, 0.5] and init.eye_(torch.ones(2, 3)).tolist() == [[1, 0, 0], [0, 1, 0]]
    assert init.calculate_gain("tanh") == 5 / 3 and init.calculate_gain("leaky_relu", 1) == 1 and init.calculate_gain("conv2d") == 1
    a, b = (init.normal_(torch.empty(3), generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert a.tolist() == b.tolist()


@pytest.mark.parametrize("call", [
    lambda: init.xavier_uniform_(torch.empty(3)), lambda: init.kaiming_normal_(torch.empty(())), lambda: init.eye_(torch.empty(3)),
    lambda: init.calculate_gain("softermax"), lambda: init.calculate_gain("leaky_relu", "steep"),
    lambda: init.kaiming_uniform_(torch.empty(2, 2), mode="fan")])
def test_bad_input_raises(call):
    with pytest.raises(ValueError):
        call()


INITIALIZERS = [name for name in vars(init) if name.endswith("_") and not name.startswith("_")]


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("wrong", [[1.0], np.ones((2, 2)), None, 5])
def test_what_is_no_tensor_is_refused(name, wrong):
    assert len(INITIALIZERS) >= 10
    with pytest.raises(TypeError, match="'tensor'.* must be Tensor, not "):
        getattr(init, name)(wrong, *([1.0] if name == "constant_" else []))
