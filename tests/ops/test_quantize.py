"""Low-bit numbers on bare arrays, and the rounding that gradients pass: the bound on its error, what is special, PyTorch's functions."""
import numpy as np
import pytest
from device import host, placed
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from twins import assert_leaves_memory_alone, assert_twins

import tinygrad_tf as torch
from tinygrad_tf.ops.quantize import FakeQuantize, Scheme, dequantized, fake_quantize, limits, parts, quantized, scale_and_zero

random = np.random.default_rng(0)
SCHEMES = [Scheme(bits, symmetric, granularity, 4 if granularity == "group" else None)
           for bits in (2, 3, 4, 8) for symmetric in (True, False) for granularity in ("tensor", "channel", "group")]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
scale_types = pytest.mark.parametrize("scale_dtype", ["float16", "float32", "float64"])


def rounded(x, scheme, scale_dtype=None):
    """(q, scale, zero, y) of an array, as NumPy arrays."""
    x = placed(np.asarray(x))
    scale, zero = scale_and_zero(*limits(x, scheme), scheme, scale_dtype)
    q = quantized(x, scale, zero, scheme)
    return tuple(map(host, (q, scale, zero, dequantized(q, scale, zero, scheme))))


def assert_within_half_a_step(x, scheme, scale_dtype=None):
    q, scale, zero, y = rounded(x, scheme, scale_dtype)
    assert q.dtype == scheme.dtype and q.shape == y.shape == x.shape and zero.dtype == np.int32
    assert scheme.qmin <= q.min(initial=0) and q.max(initial=0) <= scheme.qmax and (scale > 0).all()
    wide, exact = np.asarray(x, np.float64), np.asarray(scale, np.float64)[..., None]
    error, size = abs(parts(wide - y, scheme)), abs(parts(wide, scheme))
    rounding = 4 * np.finfo(y.dtype).eps * (size + exact)
    assert (error <= exact / 2 + rounding).all(), (error - exact / 2).max()


# --- the scheme -----------------------------------------------------------------------------------------------------

def test_the_levels_of_a_scheme():
    assert [Scheme(b).qmax for b in (2, 3, 4, 8)] == [1, 3, 7, 127] and all(Scheme(b).qmin == -Scheme(b).qmax for b in range(2, 9))
    assert [(Scheme(b, False).qmin, Scheme(b, False).qmax) for b in (2, 3, 4, 8)] == [(0, 3), (0, 7), (0, 15), (0, 255)]
    assert Scheme() == Scheme(8, True, "tensor", None) and hash(Scheme(4)) == hash(Scheme(4)) and Scheme(4) != Scheme(5)
    assert Scheme(np.int8(8)).qmax == 127 and Scheme(np.int8(8), False).qmax == 255
    with pytest.raises(AttributeError):
        Scheme().bits = 4


@pytest.mark.parametrize("arguments, kind, words", [
    ({"bits": 1}, ValueError, "2 to 8, got 1"), ({"bits": 9}, ValueError, "got 9"), ({"bits": 4.0}, TypeError, "whole number"),
    ({"bits": True}, TypeError, "whole number"), ({"symmetric": "no"}, TypeError, "symmetric"),
    ({"granularity": "row"}, ValueError, "'tensor', 'channel' or 'group', got 'row'"),
    ({"granularity": "group"}, ValueError, "group_size"), ({"group_size": 32}, ValueError, "belongs to granularity 'group'"),
    ({"granularity": "group", "group_size": 0}, ValueError, "at least 1"),
    ({"granularity": "group", "group_size": 2.5}, TypeError, "whole number")])
def test_a_scheme_checks_its_fields(arguments, kind, words):
    with pytest.raises(kind, match=words):
        Scheme(**arguments)


def test_parts_say_what_does_not_divide():
    x = random.standard_normal((2, 3, 8))
    assert parts(x, Scheme()).shape == (48,) and parts(x, Scheme(granularity="channel")).shape == (2, 24)
    assert parts(x, Scheme(granularity="group", group_size=4)).shape == (2, 3, 2, 4)
    with pytest.raises(ValueError, match=r"\(2, 3, 8\) does not divide into groups of 5"):
        parts(x, Scheme(granularity="group", group_size=5))
    with pytest.raises(ValueError, match="no axis"):
        parts(np.float32(1.0), Scheme(granularity="channel"))


# --- the error ------------------------------------------------------------------------------------------------------

@every_scheme
@scale_types
def test_no_number_moves_by_more_than_half_a_step(scheme, scale_dtype):
    x = random.standard_normal((3, 8)).astype(np.float32)
    for size in (1, 1e-3, 1e-6, 1e-9, 1e-30, 1e-44, 3e4, 5e37) if scale_dtype != "float16" else (1, 1e-3, 1e-6, 1e-9, 1e-44, 1e4):
        for shift in (0, 3):
            assert_within_half_a_step(((x + shift) * np.float64(size)).astype(np.float32), scheme, scale_dtype)


@given(st.sampled_from(SCHEMES), hnp.arrays(np.float32, st.tuples(st.integers(0, 3), st.just(8)),
                                            elements=st.floats(-1e4, 1e4, width=32)), st.sampled_from([None, np.float16, np.float64]))
def test_no_number_of_any_array_moves_by_more_than_half_a_step(scheme, x, scale_dtype):
    assert_within_half_a_step(x, scheme, scale_dtype)


@pytest.mark.parametrize("bits", range(2, 9))
def test_is_the_guides_function(bits):
    """Guide 11.3: the largest |x| over q_max, and a clamp."""
    x = random.standard_normal((4, 8)).astype(np.float32)
    scale = np.maximum(abs(x).max(), 1e-8) / (2 ** (bits - 1) - 1)
    q, s, zero, y = rounded(x, Scheme(bits))
    np.testing.assert_array_equal(q, np.clip(np.round(x / scale), -Scheme(bits).qmax, Scheme(bits).qmax))
    np.testing.assert_allclose(s, scale, rtol=1e-6)
    np.testing.assert_allclose(y, q * scale, rtol=1e-6)
    assert zero == 0 and (len(np.unique(y)) <= 3 or bits > 2)


def test_finer_parts_are_closer():
    x = random.standard_normal((16, 64)) * np.exp(random.standard_normal((16, 1)))
    errors = [np.square(x - rounded(x, s)[3]).mean() for s in (Scheme(4), Scheme(4, granularity="channel"),
                                                               Scheme(4, granularity="group", group_size=16))]
    assert errors[0] > 2 * errors[1] > 2 * errors[2]


@every_scheme
def test_rounding_what_is_rounded_changes_nothing_when_the_levels_are_the_same(scheme):
    x = placed(random.standard_normal((3, 8)))
    scale, zero = scale_and_zero(*limits(x, scheme), scheme, np.float16)
    q = quantized(x, scale, zero, scheme)
    np.testing.assert_array_equal(host(quantized(dequantized(q, scale, zero, scheme), scale, zero, scheme)), host(q))


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.symmetric], ids=str)
@scale_types
def test_symmetric_rounding_finds_its_own_levels_again(scheme, scale_dtype):
    q, scale, zero, y = rounded(random.standard_normal((3, 8)), scheme, scale_dtype)
    np.testing.assert_array_equal(rounded(y, scheme, scale_dtype)[0], q)


def test_halves_go_to_the_even_level():
    scale, zero = placed(np.float64(0.5)), placed(np.int32(0))
    x = placed(np.array([-1.25, -0.75, -0.25, 0.25, 0.75, 1.25]))
    assert host(quantized(x, scale, zero, Scheme(4))).tolist() == [-2, -2, 0, 0, 2, 2]


# --- what is special ------------------------------------------------------------------------------------------------

@every_scheme
@scale_types
def test_zeros_stay_zeros_under_a_scale_of_one(scheme, scale_dtype):
    q, scale, zero, y = rounded(np.zeros((3, 8), np.float32), scheme, scale_dtype)
    assert not q.any() and not y.any() and (scale == 1).all() and (zero == 0).all() and scale.dtype == scale_dtype


@every_scheme
@pytest.mark.parametrize("sign", [1, -1])
def test_a_constant_is_exact_where_its_scale_is_representable(scheme, sign):
    x = np.full((3, 8), sign * scheme.qmax * 0.125, np.float32)
    for dtype in (np.float16, np.float32):
        np.testing.assert_array_equal(rounded(x, scheme, dtype)[3], x)
    np.testing.assert_allclose(rounded(np.full((3, 8), sign * 0.7), scheme)[3], sign * 0.7, rtol=1e-6)


@every_scheme
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_make_their_own_part_nan_and_no_other(scheme, bad):
    x = random.standard_normal((3, 8)).astype(np.float32)
    x[1, 2] = bad
    q, scale, zero, y = rounded(x, scheme)
    hit = ~np.isfinite(scale)
    assert hit.sum() == 1 and (parts(q, scheme)[hit] == zero[hit][:, None]).all()
    np.testing.assert_array_equal(np.isnan(parts(y, scheme)), np.broadcast_to(hit[..., None], parts(y, scheme).shape))
    fake = host(fake_quantize(torch.tensor(x), scheme))
    np.testing.assert_array_equal(fake, y)


def test_under_a_given_scale_infinity_is_clipped_and_nan_is_refused():
    scale, zero, scheme = placed(np.float32(0.5)), placed(np.int32(0)), Scheme(4)
    assert host(quantized(placed(np.array([np.inf, -np.inf, 9.0])), scale, zero, scheme)).tolist() == [7, -7, 7]
    with pytest.raises(ValueError, match="NaN under a finite scale"):
        quantized(placed(np.array([1.0, np.nan])), scale, zero, scheme)


def test_a_scale_is_rounded_up_never_to_zero_and_too_large_a_one_is_infinite():
    scheme = Scheme(4)
    for high in np.float64([1e-12, 1e-7, 0.7, 3.0, 1e5]):
        scale, _ = scale_and_zero(placed(-high), placed(high), scheme, np.float16)
        exact, found = high / 7, host(scale)
        assert found >= exact and (np.nextafter(found, np.float16(0)) < exact)
    assert np.isinf(host(scale_and_zero(placed(np.float64(-1e6)), placed(np.float64(1e6)), scheme, np.float16)[0]))
    assert np.isfinite(host(scale_and_zero(placed(np.float32(-3e38)), placed(np.float32(3e38)), Scheme(8, False))[0]))


def test_scales_of_another_shape_are_refused():
    x, scheme = placed(np.ones((3, 8))), Scheme(4, granularity="channel")
    with pytest.raises(ValueError, match=r"\(3,\) scales .* got scales of shape \(2,\)"):
        quantized(x, placed(np.ones(2)), placed(np.zeros(2)), scheme)


# --- rounding with a gradient -----------------------------------------------------------------------------------------

@every_scheme
def test_fake_is_what_storing_and_reading_back_gives(scheme):
    x = random.standard_normal((3, 8)).astype(np.float32)
    for dtype in (None, np.float16):
        np.testing.assert_array_equal(host(fake_quantize(torch.tensor(x), scheme, scale_dtype=dtype)), rounded(x, scheme, dtype)[3])


def test_where_the_gradient_ends():
    """Levels −3 … 3 of step 1: x passes up to 3.5, which rounds to the even 4, that is outside; −2.5 of −2 … 2 rounds to −2, inside."""
    for (low, high), x, passes in [((-3, 3), [-3.5, -3.49, -3, 0, 3, 3.49, 3.5, 9], [0, 1, 1, 1, 1, 1, 0, 0]),
                                   ((-2, 2), [-2.6, -2.5, -2, 2, 2.5, 2.6], [0, 1, 1, 1, 1, 0])]:
        x = torch.tensor(x, requires_grad=True)
        y = FakeQuantize.apply(x, 1.0, 0, low, high)
        y.backward(torch.full_like(y, 7))
        assert x.grad.tolist() == [7 * p for p in passes] and y.tolist() == np.clip(np.round(host(x)), low, high).tolist()


def test_the_gradient_is_that_of_a_clip_and_none_goes_through_the_scale():
    """x → clip(x) has the gradient; x / max|x| · max|x| does not tell of the maximum."""
    x = random.standard_normal((3, 8))
    scale, zero = placed(np.float64(0.4)), placed(np.int32(0))

    def clip(x):
        return x + (fake_quantize(x, Scheme(3), scale, zero) - x).detach() + (x.clamp(-1.4, 1.4) - x) - (x.clamp(-1.4, 1.4) - x).detach()
    assert_twins(lambda x: fake_quantize(x, Scheme(3), scale, zero), clip, x)
    x = torch.tensor(x, requires_grad=True)
    fake_quantize(x, Scheme(3)).sum().backward()
    assert x.grad.tolist() == np.ones((3, 8)).tolist()


def test_a_tensor_of_scales_gets_no_gradient():
    x, scale = torch.ones(2, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    torch.fake_quantize_per_tensor_affine(x, scale, 0, -8, 7).sum().backward()
    assert scale.grad is None and x.grad.tolist() == [1, 1]


def test_leaves_memory_alone_and_keeps_dtypes():
    assert_leaves_memory_alone(lambda x: fake_quantize(x, Scheme(4, granularity="channel")), random.standard_normal((3, 8)))
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert fake_quantize(torch.randn(3, 8).to(dtype), Scheme(4)).dtype == dtype
        y = torch.fake_quantize_per_tensor_affine(torch.randn(3).to(dtype), torch.tensor(0.1, dtype=torch.float64), 0, -8, 7)
        assert y.dtype == dtype


def test_errors_teach():
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="float"):
        fake_quantize(torch.arange(3), Scheme())
    with pytest.raises(TypeError, match="together"):
        fake_quantize(x, Scheme(), scale=placed(np.float32(1)))
    for call, words in [(lambda: torch.fake_quantize_per_tensor_affine(x, 0.0, 0, -8, 7), "above 0"),
                        (lambda: torch.fake_quantize_per_tensor_affine(x, float("nan"), 0, -8, 7), "above 0"),
                        (lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 8, -8, 7), "from quant_min = -8"),
                        (lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 7, -8), "at most quant_max"),
                        (lambda: torch.fake_quantize_per_tensor_affine(x, torch.ones(2), 0, -8, 7), "per_channel"),
                        (lambda: torch.fake_quantize_per_channel_affine(x, torch.ones(2), torch.zeros(2), 1, -8, 7), r"shape \(3,\)"),
                        (lambda: torch.fake_quantize_per_channel_affine(x, torch.ones(2), torch.zeros(2), 2, -8, 7), "axis")]:
        with pytest.raises(RuntimeError, match=words):
            call()
    with pytest.raises(TypeError, match="scale must be a Tensor"):
        torch.fake_quantize_per_channel_affine(x, 0.1, torch.zeros(2), 0, -8, 7)


def test_devices_do_not_mix(gpu):
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="one device"):
        torch.fake_quantize_per_channel_affine(x, torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"), 1, -8, 7)
    with pytest.raises(RuntimeError, match="one device"):
        fake_quantize(x, Scheme(), torch.tensor(1.0, device="cuda"), torch.tensor(0, device="cuda"))


@pytest.mark.torch
@pytest.mark.parametrize("scale, zero, low, high", [(0.1, 0, -8, 7), (0.37, 3, 0, 15), (0.5, -1, -3, 3), (0.02, 100, 0, 255)])
def test_as_pytorch_here(scale, zero, low, high):
    pytorch = pytest.importorskip("torch")
    x = random.standard_normal((3, 4, 5)).astype(np.float32)
    scales, zeros = (scale * (1 + np.arange(4))).astype(np.float32), np.clip(zero + np.arange(4), low, high).astype(np.int32)
    found = []
    for library in (torch, pytorch):
        a, b = (library.tensor(x, requires_grad=True) for _ in range(2))
        y = library.fake_quantize_per_tensor_affine(a, scale, zero, low, high)
        z = library.fake_quantize_per_channel_affine(b, library.tensor(scales), library.tensor(zeros), 1, low, high)
        upstream = library.tensor(np.arange(60, dtype=np.float32).reshape(3, 4, 5))
        y.backward(upstream)
        z.backward(upstream)
        found.append([host(t) for t in (y, z, a.grad, b.grad)])
    for ours, theirs in zip(*found):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
