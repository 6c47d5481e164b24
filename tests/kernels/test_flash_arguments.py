"""What kernels.flash says of arguments that its kernels cannot take: they trust shapes and types, so nothing wrong may be launched."""
import inspect
import math
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from tinygrad_tf import tensor
from tinygrad_tf.arguments import type_name
from tinygrad_tf.kernels import flash
from tinygrad_tf.ops.flash_attention import Band
from tinygrad_tf.ops.kernel_attention import KernelAttention

pytestmark = pytest.mark.host("is about arguments in NumPy, and launches nothing")

TIERS = {flash.Float32: np.float32, flash.Float16: np.float16, flash.BFloat16: np.uint16}       # uint16: the bits of bfloat16
SHAPES = {"q": (2, 2, 5, 16), "k": (2, 1, 7, 16), "v": (2, 1, 7, 8), "o": (2, 2, 5, 8), "lse": (2, 2, 5), "d_o": (2, 2, 5, 8),
          "valid_tokens": (2, 7)}
every_tier = pytest.mark.parametrize("tier", TIERS, ids=lambda t: t.__name__)
every_array = pytest.mark.parametrize("name", SHAPES)
FUNCTIONS = {f.__name__: f for f in (flash.forward, flash.backward)}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The names of what would be launched."""
    names = []
    monkeypatch.setattr(flash, "function", lambda file, options, name, xp: name)
    monkeypatch.setattr(flash, "launch", lambda kernel, *args: names.append(kernel))
    return names


def right(tier):
    """Arguments as they should be, by name, for forward and backward."""
    arrays = {name: np.zeros(shape, {"lse": np.float32, "valid_tokens": bool}.get(name, TIERS[tier])) for name, shape in SHAPES.items()}
    return dict(**arrays, band=Band(0, None, 0), scale=0.25, tier=tier, needs=(True, True, True))


def call(function, own, **changed):
    """The function with the arguments of a tier, its own, but for those that are changed."""
    arguments = {**right(own), **changed}
    return function(**{name: arguments[name] for name in inspect.signature(function).parameters})


def takers(name):
    """The functions that have an argument of this name."""
    return [f for f in FUNCTIONS.values() if name in inspect.signature(f).parameters]


def refused(error, words, own, launched, **changed):
    """Every function that takes what was changed refuses it and launches nothing. → what they say"""
    said = []
    for function in takers(next(iter(changed))):
        with pytest.raises(error, match=words) as caught:
            call(function, own, **changed)
        assert str(caught.value).startswith("flash attention: ") and type(caught.value) is error
        said.append(str(caught.value))
    assert said and not launched
    return said


def test_every_argument_is_tried():
    arguments = {name for f in FUNCTIONS.values() for name in inspect.signature(f).parameters}
    assert arguments == {*SHAPES, "band", "scale", "tier", "needs"}


@every_tier
@pytest.mark.parametrize("changed", [dict(), dict(valid_tokens=None), dict(valid_tokens=np.ones((2, 7), np.uint8)), dict(band=Band()),
                                     dict(band=Band(np.int64(3), np.int32(2), np.uint8(1))), dict(scale=0), dict(scale=np.float16(0.25)),
                                     dict(scale=Fraction(1, 4)), dict(scale=-1e30), dict(needs=[True, False, True])], ids=str)
def test_right_ones_are_launched(tier, changed, launched):
    for function in FUNCTIONS.values():
        call(function, tier, **changed)
    assert launched == ["flash_forward", "flash_delta", "flash_dkdv", "flash_dq"]


# --- arrays -----------------------------------------------------------------------------------------------------------

STRANGERS = {"list": [[1.0]], "tinygrad_tf.tensor.Tensor": tensor(np.zeros((2, 2, 5, 16), np.float32)), "str": "x", "float": 1.5,
             "numpy.float32": np.float32(1), "NoneType": None}


@every_tier
@every_array
@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_no_array(name, kind, tier, launched):
    if (name, kind) == ("valid_tokens", "NoneType"):
        return
    words = rf"{name} must be an array of NumPy or CuPy, got {re.escape(kind)}; .*\.array"
    refused(TypeError, words, tier, launched, **{name: STRANGERS[kind]})


def other_shapes(shape):
    """One axis longer or shorter, one axis less or more, two axes exchanged."""
    for axis in range(len(shape)):
        for step in (1, -1):
            yield (*shape[:axis], shape[axis] + step, *shape[axis + 1:])
    yield from (shape[1:], (1, *shape), (*shape, 1), (*shape[:-2], shape[-1], shape[-2]))


@every_tier
@every_array
def test_shapes_that_do_not_fit(name, tier, launched):
    for shape in other_shapes(SHAPES[name]):
        with pytest.raises(ValueError, match="flash attention: ") as caught:
            call(flash.backward, tier, **{name: np.zeros(shape, right(tier)[name].dtype)})
        assert len(set(re.findall(r"\([\d, ]+\)", str(caught.value)))) >= 2, (shape, str(caught.value))       # received and expected
        if name not in "qkv":
            assert str(caught.value).startswith(f"flash attention: {name} must be") and str(SHAPES[name]) in str(caught.value)
            assert str(caught.value).endswith(f" {shape}")
    assert not launched


@every_tier
@every_array
def test_other_dtypes(name, tier, launched):
    own = right(tier)[name].dtype
    for dtype in map(np.dtype, (np.float16, np.float32, np.float64, np.uint16, np.int32, np.complex64, bool, own.newbyteorder())):
        if dtype != own and (name, dtype) != ("valid_tokens", np.uint8):
            error = TypeError if name in "qkv" else ValueError
            refused(error, re.escape(str(dtype)), tier, launched, **{name: np.zeros(SHAPES[name], dtype)})


@pytest.mark.parametrize("name", ["k", "v", "valid_tokens", "o", "lse", "d_o"])
def test_arrays_of_two_devices(name, gpu, launched):
    import cupy
    for function in takers(name):
        with pytest.raises(RuntimeError, match="flash attention: all tensors must be on one device"):
            call(function, flash.Float32, **{name: cupy.asarray(right(flash.Float32)[name])})
    assert not launched


# --- the tier ---------------------------------------------------------------------------------------------------------

@every_tier
@pytest.mark.parametrize("given", ["float16", 16, np.float16, np.dtype(np.float32), flash.Float16(), flash.Tile,
                                   SimpleNamespace(tiles={})], ids=type_name)
def test_what_is_no_tier(given, tier, launched):
    refused(TypeError, "tier must be one of Float32, Float16, BFloat16 of kernels.flash, or None, got ", tier, launched, tier=given)
    q = right(tier)["q"]
    assert flash.refusal(q, q, q, given)[0] is TypeError


@every_tier
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint16, np.float64])
def test_a_tier_takes_its_own_dtype_alone(dtype, tier, launched):
    """The bits of a float16 read as a bfloat16 would be another number, silently."""
    arrays = {name: np.zeros(SHAPES[name], dtype) for name in ("q", "k", "v", "o", "d_o")}
    if dtype is TIERS[tier]:
        assert flash.refusal(arrays["q"], arrays["k"], arrays["v"], tier) is None
        return
    for said in refused(TypeError, f"tier {tier.__name__} take {', '.join(tier.dtypes())}", tier, launched, **arrays):
        assert said.endswith(", ".join([np.dtype(dtype).name] * 2) + f" and {np.dtype(dtype).name}")


def test_the_table_of_tiers_agrees_with_what_they_take():
    assert all(name in tier.dtypes() and tier in TIERS for name, tier in flash.TIERS.items()) and len(flash.TIERS) == len(TIERS)
    assert all(np.dtype(dtype).name in tier.dtypes() for tier, dtype in TIERS.items())


def test_bits_of_bfloat16_without_a_tier_say_what_is_missing():
    raw = np.zeros((1, 1, 2, 16), np.uint16)
    with pytest.raises(TypeError, match="uint16.*tier=BFloat16"):
        flash.forward(raw, raw, raw, None, Band(), 1.0)


# --- numbers ----------------------------------------------------------------------------------------------------------

@every_tier
@pytest.mark.parametrize("band", [None, (0, None, 0), "causal", 0, {"right": 0}, np.zeros((5, 7), bool)], ids=str)
def test_what_is_no_band(band, tier, launched):
    refused(TypeError, r"band must be a Band .*, got .*; Band\(\) hides nothing", tier, launched, band=band)


@every_tier
@pytest.mark.parametrize("side", Band._fields)
@pytest.mark.parametrize("value", [0.5, 2.0, "1", True, np.float32(1), [1], math.nan, math.inf], ids=repr)
def test_a_side_of_a_band_is_a_whole_number(side, value, tier, launched):
    refused(TypeError, f"{side} of the band.* must be a whole number, got ", tier, launched, band=Band(**{side: value}))


@every_tier
def test_where_query_0_may_stand(tier, launched):
    refused(TypeError, "query_offset of the band must be a whole number, got None", tier, launched, band=Band(None, 1, 1))
    for offset in (flash.LONGEST + 1, -flash.LONGEST - 1, 1 << 80):
        refused(ValueError, f"query_offset must lie within ±{flash.LONGEST}", tier, launched, band=Band(offset))


@pytest.mark.parametrize("far", [1 << 31, 1 << 80, -(1 << 80), np.int64(2**63 - 1)])
def test_sides_as_far_as_one_likes(far):
    assert flash._limits(Band(0, far, far)) == (0, *[int(np.sign(float(far))) * flash.UNLIMITED] * 2)


@every_tier
@pytest.mark.parametrize("error, scale", [
    *((TypeError, x) for x in (None, "0.5", [0.5], 1j, np.array(0.5), tensor(0.5))),
    *((ValueError, x) for x in (math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400, np.float16("inf"), np.float32("nan")))],
    ids=lambda x: f"{x!r:.20}")
def test_the_scale_is_a_finite_number(error, scale, tier, launched):
    refused(error, "scale must be (a number|finite in float32).*, got ", tier, launched, scale=scale)


@every_tier
@pytest.mark.parametrize("error, needs", [
    *((TypeError, x) for x in (None, True, "yes")), *((ValueError, [True] * n) for n in (0, 1, 2, 4)), (ValueError, (True, False)),
    *((TypeError, tuple(x if i == j else True for j in range(3))) for i in range(3) for x in ("no", None, 1))], ids=repr)
def test_needs_are_three_flags(error, needs, tier, launched):
    refused(error, "needs", tier, launched, needs=needs)


# --- the operation ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("error, words, changed", [
    (TypeError, "q must be an array", dict(q=[1.0])), (TypeError, "k must be an array", dict(k=None)),
    (ValueError, "valid_tokens must be", dict(valid_tokens=tensor(np.ones((2, 6), bool)))), (TypeError, "band must be", dict(band=None)),
    (TypeError, "scale must be", dict(scale=None)), (ValueError, "scale must be", dict(scale=math.nan))], ids=str)
def test_the_operation_says_the_same(error, words, changed, launched):
    given = right(flash.Float32)
    arguments = {name: tensor(given[name]) for name in ("q", "k", "v", "valid_tokens")} | {name: given[name] for name in ("band", "scale")}
    with pytest.raises(error, match=f"flash attention: {words}"):
        KernelAttention.apply(*(arguments | changed).values())
    assert not launched
