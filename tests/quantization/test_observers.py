"""Observers: what they remember over batches and granularities, against NumPy, PyTorch and each other."""
import copy

import numpy as np
import pytest
from device import host, placed

import tinygrad_tf as torch
from tinygrad_tf.ops.quantize import dequantized, parts, quantized, scale_and_zero
from tinygrad_tf.quantization import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MSEObserver,
    PercentileObserver,
    Scheme,
    limits,
    mse_limits,
    percentile_limits,
)

random = np.random.default_rng(0)
SCHEMES = [Scheme(bits, symmetric, granularity, 8 if granularity == "group" else None)
           for bits in (2, 8) for symmetric in (True, False) for granularity in ("tensor", "channel", "group")]
OBSERVERS = [MinMaxObserver, MovingAverageMinMaxObserver, PercentileObserver, MSEObserver]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
every_observer = pytest.mark.parametrize("observer", OBSERVERS)


def batches(n=3, shape=(4, 16)):
    return [(random.standard_normal(shape) * (i + 1)).astype(np.float32) for i in range(n)]


def shown(observer, xs):
    for x in xs:
        observer(torch.tensor(x))
    return observer


def squared_error(x, low, high, scheme):
    """Σ (x − y)² of each part, through whole numbers."""
    scale, zero = scale_and_zero(low, high, scheme)
    y = dequantized(quantized(x, scale, zero, scheme), scale, zero, scheme)
    return host(parts((x - y) ** 2, scheme).sum(axis=-1))


# --- what they remember ---------------------------------------------------------------------------------------------

@every_scheme
def test_the_four_rules_over_three_batches(scheme):
    xs = batches()
    low, high = zip(*[map(host, limits(placed(x), scheme)) for x in xs])
    np.testing.assert_array_equal(host(shown(MinMaxObserver(scheme), xs).min_val), np.min(low, axis=0))
    average = high[0] + 0.25 * (high[1] - high[0])
    average = average + 0.25 * (high[2] - average)
    np.testing.assert_allclose(host(shown(MovingAverageMinMaxObserver(scheme, averaging_constant=0.25), xs).max_val), average, rtol=1e-6)
    for observer, limits_of in (PercentileObserver(scheme, percentile=90), lambda x: percentile_limits(x, scheme, 90)), \
            (MSEObserver(scheme, steps=20), lambda x: mse_limits(x, scheme, 20)):
        wanted = np.mean([host(limits_of(placed(x))[1]) for x in xs], axis=0)
        np.testing.assert_allclose(host(shown(observer, xs).max_val), wanted, rtol=1e-6)


@every_scheme
def test_percentiles_are_numpys(scheme):
    x = batches(1)[0]
    for percentile in (75, 99, 99.9, 100):
        wanted = np.percentile(parts(x, scheme), [100 - percentile, percentile], axis=-1)
        np.testing.assert_allclose([host(v) for v in percentile_limits(placed(x), scheme, percentile)], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(host(percentile_limits(placed(x), scheme, 100)), host(list(limits(placed(x), scheme))))


@every_scheme
def test_the_searched_limits_are_the_best_of_those_tried_and_never_worse_than_min_and_max(scheme):
    x = placed(random.standard_t(3, (4, 64)).astype(np.float32))
    low, high = limits(x, scheme)
    found = squared_error(x, *mse_limits(x, scheme, 20), scheme)
    every = np.array([squared_error(x, low * (i / 20), high * (i / 20), scheme) for i in range(1, 21)])
    np.testing.assert_allclose(found, every.min(axis=0), rtol=1e-5)
    assert (found <= every[-1] * (1 + 1e-6)).all() and (scheme.bits == 8 or (found < every[-1]).any())


def test_clipping_an_outlier_helps_at_few_bits():
    x = random.standard_normal(4096).astype(np.float32)
    x[7] = 40
    x = placed(x)
    for scheme in (Scheme(3), Scheme(3, False)):
        plain, clipped, searched = (squared_error(x, *pair, scheme) for pair in (
            limits(x, scheme), percentile_limits(x, scheme, 99.9), mse_limits(x, scheme)))
        assert searched < clipped < plain / 2 or searched < plain / 2


# --- as modules -----------------------------------------------------------------------------------------------------

@every_scheme
@every_observer
def test_gives_x_back_and_a_scale_for_each_part(observer, scheme):
    o, x = observer(scheme), torch.randn(4, 16, requires_grad=True)
    assert o(x) is x
    scale, zero = o.calculate_qparams()
    shape = {"tensor": (), "channel": (4,), "group": (4, 2)}[scheme.granularity]
    assert scale.shape == zero.shape == shape and scale.dtype == torch.float32 and zero.dtype == torch.int32
    assert not scale.requires_grad and (scale > 0).all() and ((zero >= scheme.qmin) & (zero <= scheme.qmax)).all()
    np.testing.assert_array_equal(host(scale), host(scale_and_zero(o.min_val.array, o.max_val.array, scheme)[0]))


@every_observer
def test_state_dict_deepcopy_and_to(observer):
    scheme = Scheme(4, granularity="channel")
    one = shown(observer(scheme, (4, 16)), batches())
    other = observer(scheme, (4, 16))
    other.load_state_dict(one.state_dict())
    copied = copy.deepcopy(one)
    for o in (other, copied, one.double()):
        assert torch.allclose(o.calculate_qparams()[0].float(), one.calculate_qparams()[0].float()) and int(o.batches) == 3
    more = [9 * x for x in batches(1)]
    assert torch.allclose(shown(other, more).max_val, shown(copied, more).max_val)
    assert not torch.equal(other.max_val, one.max_val.float())
    with pytest.raises(RuntimeError, match="min_val"):
        observer(scheme).load_state_dict(one.state_dict())


@every_observer
def test_nothing_seen_empty_and_reset(observer):
    for scheme in (Scheme(4), Scheme(4, granularity="channel")):
        o = observer(scheme)
        o(torch.zeros(0, 16))
        with pytest.raises(RuntimeError, match="before it has seen"):
            o.calculate_qparams()
        first = shown(o, [np.full((4, 16), 8, np.float32)]).calculate_qparams()[0]
        o.reset_min_max_vals()
        with pytest.raises(RuntimeError, match="before it has seen"):
            o.calculate_qparams()
        assert (shown(o, [np.full((4, 16), 2, np.float32)]).calculate_qparams()[0] < first / 3).all()


@every_observer
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_not_hidden(observer, bad):
    """A NaN stays until it is forgotten. Infinity may be clipped, as any outlier, but nothing finite becomes of NaN."""
    x = batches(1)[0]
    x[1, 3] = bad
    o = shown(observer(Scheme(4, granularity="channel")), [x, batches(1)[0]])
    scale = host(o.calculate_qparams()[0])
    assert np.isfinite(scale[[0, 2, 3]]).all() and (np.isnan(scale[1]) if np.isnan(bad) else True)


def test_half_precision_is_observed_in_float32_and_gradients_pass():
    o, x = MinMaxObserver(), torch.randn(3, 5, dtype=torch.float16, requires_grad=True)
    o(x).sum().backward()
    assert o.min_val.dtype == torch.float32 and x.grad.tolist() == np.ones((3, 5)).tolist()


def test_errors_teach():
    with pytest.raises(TypeError, match="expected a Scheme"):
        MinMaxObserver(8)
    with pytest.raises(TypeError, match="x must be a Tensor"):
        MinMaxObserver()(np.ones(3))
    with pytest.raises(RuntimeError, match="float"):
        MinMaxObserver()(torch.arange(3))
    o = shown(MinMaxObserver(Scheme(4, granularity="channel")), batches(1))
    with pytest.raises(ValueError, match=r"\(4,\) parts, and this x has \(5,\)"):
        o(torch.randn(5, 16))
    for wrong, kind in ((50, ValueError), (101, ValueError), (float("nan"), ValueError), ("99", TypeError), (True, TypeError)):
        with pytest.raises(kind, match="percentile"):
            PercentileObserver(percentile=wrong)
    for wrong, kind in ((0, ValueError), (2.5, TypeError)):
        with pytest.raises(kind, match="steps"):
            MSEObserver(steps=wrong)


@pytest.mark.torch
@pytest.mark.parametrize("symmetric", [True, False])
def test_as_pytorch_here(symmetric):
    """The same limits. PyTorch's symmetric scale has one level more below 0: it divides by (q_max − q_min) / 2 = 127.5 and not by 127."""
    pytest.importorskip("torch")
    import torch as pytorch
    from torch.ao.quantization import observer as theirs
    schemes = {"tensor": pytorch.per_tensor_symmetric if symmetric else pytorch.per_tensor_affine,
               "channel": pytorch.per_channel_symmetric if symmetric else pytorch.per_channel_affine}
    pairs = [("tensor", MinMaxObserver, theirs.MinMaxObserver), ("channel", MinMaxObserver, theirs.PerChannelMinMaxObserver),
             ("tensor", MovingAverageMinMaxObserver, theirs.MovingAverageMinMaxObserver),
             ("channel", MovingAverageMinMaxObserver, theirs.MovingAveragePerChannelMinMaxObserver)]
    for granularity, ours, other in pairs:
        a = ours(Scheme(8, symmetric, granularity))
        b = other(dtype=pytorch.qint8 if symmetric else pytorch.quint8, qscheme=schemes[granularity])
        for x in batches():
            a(torch.tensor(x))
            b(pytorch.tensor(x))
        (scale, zero), (their_scale, their_zero) = a.calculate_qparams(), b.calculate_qparams()
        np.testing.assert_allclose(host(a.min_val), b.min_val.numpy(), rtol=1e-6)
        np.testing.assert_allclose(host(scale).reshape(-1) * (127 / 127.5 if symmetric else 1), their_scale.numpy(), rtol=1e-6)
        np.testing.assert_array_equal(host(zero).reshape(-1), their_zero.numpy())
