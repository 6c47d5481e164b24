"""Rotary: pairs of features turned by their position, in both layouts, and the way from one layout to the other."""
import numpy as np
import pytest
from device import host
from twins import assert_leaves_memory_alone, assert_twins

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf.ops.rotary import LAYOUTS, half_split_to_interleaved, interleaved_to_half_split
from tinygrad_tf.ops.shape import cat

layouts = pytest.mark.parametrize("layout", LAYOUTS)
random = np.random.default_rng(0)


def turns(*shape, start=0):
    """cos and sin of some angles."""
    angles = torch.tensor(0.3 * (start + np.arange(np.prod(shape, dtype=int))).reshape(shape))
    return angles.cos(), angles.sin()


def guides_form(x, cos, sin):
    """x cos + rotate(x) sin, rotate(x) = (−x₁, x₀, −x₃, x₂, …), angles repeated in pairs: the guide's function."""
    rotated = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * cos.repeat_interleave(2, dim=-1) + rotated * sin.repeat_interleave(2, dim=-1)


def published_form(x, cos, sin):
    """x cos + rotate(x) sin, rotate(x) = (−second half, first half), angles twice in a row: GPT-NeoX and Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cat([cos, cos], -1) + cat([-second, first], -1) * cat([sin, sin], -1)


@pytest.mark.parametrize("layout, composed", [("interleaved", guides_form), ("half_split", published_form)])
@pytest.mark.parametrize("shape, angles", [((3, 4), (3, 2)), ((2, 3, 5, 8), (5, 4)), ((2, 3, 5, 8), (2, 1, 5, 4)), ((2, 1, 2), (1, 1))])
def test_is_the_composed_form(layout, composed, shape, angles):
    cos, sin = turns(*angles)
    assert_twins(lambda x: F.rotary(x, cos, sin, layout), lambda x: composed(x, cos, sin), random.normal(size=shape))


@layouts
def test_leaves_memory_alone(layout):
    assert_leaves_memory_alone(lambda x: F.rotary(x, *turns(5, 4), layout), random.normal(size=(2, 3, 5, 8)))


@layouts
def test_turning_back_gives_x_again_and_lengths_stay(layout):
    x, (cos, sin) = torch.tensor(random.normal(size=(2, 5, 8))), turns(5, 4)
    y = F.rotary(x, cos, sin, layout)
    np.testing.assert_allclose(host(F.rotary(y, cos, -sin, layout)), host(x), atol=1e-14)
    np.testing.assert_allclose(host(y.norm(dim=-1)), host(x.norm(dim=-1)), rtol=1e-14)
    assert not np.allclose(host(x), host(y))


@layouts
def test_features_beyond_the_pairs_pass_through(layout):
    x, (cos, sin) = torch.tensor(random.normal(size=(2, 5, 7))), turns(5, 2)
    y = F.rotary(x, cos, sin, layout)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert torch.equal(y[..., :4], F.rotary(x[..., :4], cos, sin, layout))


@layouts
def test_half_precision_is_turned_in_float32(layout):
    x = torch.tensor(random.normal(size=(4, 5, 8)).astype(np.float16), requires_grad=True)
    cos, sin = (t.float() for t in turns(5, 4))
    y = F.rotary(x, cos, sin, layout)
    assert y.dtype is torch.float16
    assert torch.equal(y, F.rotary(x.float(), cos, sin, layout).half())
    y.sum().backward()
    assert x.grad.dtype is torch.float16


# --- from one layout to the other -------------------------------------------------------------------------------------

def test_the_order_of_both_layouts():
    x = torch.arange(6)
    assert interleaved_to_half_split(x, 6).tolist() == [0, 2, 4, 1, 3, 5]
    assert half_split_to_interleaved(x, 6).tolist() == [0, 3, 1, 4, 2, 5]
    assert interleaved_to_half_split(torch.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]            # head by head
    assert interleaved_to_half_split(torch.arange(12), 6, rotary_dim=4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@pytest.mark.parametrize("shape, dim", [((24,), None), ((24, 5), None), ((5, 24), -1), ((2, 3, 5, 8), None), ((2, 5, 24), None),
                                        ((2, 24, 5), 1)])
@pytest.mark.parametrize("R", [None, 2, 4, 6, 8])
def test_there_and_back_changes_nothing(shape, dim, R):
    x = torch.tensor(random.normal(size=shape))
    there = interleaved_to_half_split(x, 8, R, dim)
    assert torch.equal(half_split_to_interleaved(there, 8, R, dim), x)
    assert torch.equal(interleaved_to_half_split(half_split_to_interleaved(x, 8, R, dim), 8, R, dim), x)
    assert torch.equal(there, x) == (R == 2)


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_converted_activations_give_the_converted_result(rotary_dim):
    x, (cos, sin) = torch.tensor(random.normal(size=(2, 3, 5, 8))), turns(5, (rotary_dim or 8) // 2)
    expected = interleaved_to_half_split(F.rotary(x, cos, sin, "interleaved"), 8, rotary_dim)
    assert torch.equal(F.rotary(interleaved_to_half_split(x, 8, rotary_dim), cos, sin, "half_split"), expected)


def test_converted_weights_give_the_same_scores():
    """q and k through converted projections, turned in the other layout: the same dot products."""
    B, T, C, H, Dh = 2, 5, 12, 3, 4
    x, (cos, sin) = torch.tensor(random.normal(size=(B, T, C))), turns(T, Dh // 2)
    W = [torch.tensor(random.normal(size=(H * Dh, C))) for _ in range(2)]
    b = [torch.tensor(random.normal(size=(H * Dh,))) for _ in range(2)]

    def scores(W, b, layout):
        q, k = (F.rotary(F.linear(x, w, c).reshape(B, T, H, Dh).transpose(1, 2), cos, sin, layout) for w, c in zip(W, b))
        return host(q @ k.transpose(-1, -2))
    expected = scores(W, b, "interleaved")
    converted = [[interleaved_to_half_split(p, Dh) for p in ps] for ps in (W, b)]
    np.testing.assert_allclose(scores(*converted, "half_split"), expected, rtol=1e-12, atol=1e-12)
    assert not np.allclose(scores(W, b, "half_split"), expected)


def test_conversion_passes_gradients():
    x = torch.tensor(random.normal(size=(8, 3)), requires_grad=True)
    dy = torch.tensor(random.normal(size=(8, 3)))
    interleaved_to_half_split(x, 4).backward(dy)
    assert torch.equal(x.grad, half_split_to_interleaved(dy, 4))


# --- what is refused --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cos, sin", [((4, 2), (4, 2)), ((3, 3), (3, 3)), ((3, 2), (1, 2)), ((2, 3, 2), (2, 3, 2)), ((2, 1, 1, 3, 2),) * 2,
                                      ((), ())])
def test_angles_that_do_not_fit_are_refused(cos, sin):
    with pytest.raises(ValueError, match=r"cos and sin must have one shape that broadcasts to \[\.\.\., T, R/2\]"):
        F.rotary(torch.randn(1, 3, 4), torch.ones(cos), torch.ones(sin))


def test_other_arguments_that_are_refused():
    x, cos = torch.randn(3, 4), torch.ones(3, 2)
    with pytest.raises(ValueError, match="'half_split'.*got 'neox'"):
        F.rotary(x, cos, cos, "neox")
    with pytest.raises(RuntimeError, match="rotary: not implemented for int64"):
        F.rotary(torch.ones(3, 4).long(), cos, cos)
    with pytest.raises(ValueError, match="get no gradient"):
        F.rotary(x, cos, torch.ones(3, 2, requires_grad=True))
    with pytest.raises(ValueError, match="whole heads"):
        interleaved_to_half_split(torch.randn(10, 4), 4)
    for head_dim, rotary_dim in (5, None), (4, 3), (4, 6), (0, None), (4, 0):
        with pytest.raises(ValueError, match="must be even"):
            interleaved_to_half_split(torch.randn(20, 4), head_dim, rotary_dim)


@pytest.mark.parametrize("no_tensor", [None, [[1.0, 1.0]] * 3, np.ones((3, 2), np.float32), 1.0], ids=lambda x: type(x).__name__)
def test_what_is_no_tensor_is_refused_by_name(no_tensor):
    for name in "x", "cos", "sin":
        with pytest.raises(TypeError, match=f"rotary: {name} must be a Tensor, got"):
            F.rotary(**{"x": torch.randn(3, 4), "cos": torch.ones(3, 2), "sin": torch.ones(3, 2), name: no_tensor})
    for convert in interleaved_to_half_split, half_split_to_interleaved:
        with pytest.raises(TypeError, match=f"{convert.__name__}: x must be a Tensor, got"):
            convert(no_tensor, 2)
