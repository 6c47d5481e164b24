"""`FakeQuantize` as a module: who looks at x and when, gradients, state, devices."""
import copy

import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
from tinygrad_tf.ops.quantize import fake_quantize
from tinygrad_tf.quantization import FakeQuantize, MinMaxObserver, MovingAverageMinMaxObserver, MSEObserver, PercentileObserver, Scheme

SCHEMES = [Scheme(bits, symmetric, granularity, 8 if granularity == "group" else None)
           for bits in (3, 8) for symmetric in (True, False) for granularity in ("tensor", "channel", "group")]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


@every_scheme
@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageMinMaxObserver, PercentileObserver, MSEObserver])
def test_is_the_function_under_the_observers_scale(observer, scheme):
    module, x = FakeQuantize(observer(scheme)), torch.randn(4, 16)
    y = module(x)
    assert torch.equal(y, fake_quantize(x, scheme, *module.observer.calculate_qparams()))
    assert len(np.unique(host(y[0, :8]))) <= 2 ** scheme.bits


@every_scheme
def test_learns_its_scale_in_training_and_keeps_it_in_evaluation(scheme):
    module, x = FakeQuantize(MinMaxObserver(scheme)), torch.randn(4, 16)
    y = module(x)
    before = copy.deepcopy(module.state_dict())
    module.eval()
    assert torch.equal(module(x), y)
    clipped = module(100 * x)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert clipped.abs().max() <= y.abs().max() * 2
    module.train()
    assert module(100 * x).abs().max() > 50 * y.abs().max()


def test_what_is_clipped_gets_no_gradient():
    module = FakeQuantize(MinMaxObserver(Scheme(4)))
    module(torch.tensor([-1.0, 1.0]))
    x = torch.tensor([-3.0, -1.0, 0.2, 1.0, 3.0], requires_grad=True)
    module.eval()(x).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


@every_scheme
def test_state_dict_deepcopy_and_dtype(scheme):
    module, x = FakeQuantize(MinMaxObserver(scheme, (4, 16))), torch.randn(4, 16)
    module(x)
    module.eval()
    other = FakeQuantize(MinMaxObserver(scheme, (4, 16))).eval()
    other.load_state_dict(module.state_dict())
    for m in (other, copy.deepcopy(module)):
        assert torch.equal(m(x), module(x)) and not m.training
    y = module(x)
    assert torch.allclose(module.double()(x.double()).float(), y, atol=1e-5) and module(x.double()).dtype == torch.float64


def test_moves_to_a_device(gpu):
    module, x = FakeQuantize(MinMaxObserver()), torch.randn(3, 8)
    y = module(x)
    there = copy.deepcopy(module).to("cuda").eval()
    assert there(x.to("cuda")).device.type == "cuda" and torch.allclose(there(x.to("cuda")).cpu(), y)
    with pytest.raises(RuntimeError, match="one device"):
        there(x)


def test_without_data_there_is_no_scale_and_without_elements_nothing_to_round():
    module = FakeQuantize(MinMaxObserver())
    empty = torch.zeros(0, 8)
    assert module(empty) is empty
    with pytest.raises(RuntimeError, match="before it has seen"):
        module.eval()(torch.randn(2, 8))
    with pytest.raises(TypeError, match="expected an Observer"):
        FakeQuantize(Scheme())
