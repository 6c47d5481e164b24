"""Every position scheme against a plain reference, and what each promises: RoPE's dot products know distances alone."""
import copy
import math

import numpy as np
import pytest

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf import nn
from tinygrad_tf.gradcheck import gradcheck_module
from tinygrad_tf.nn import positions
from tinygrad_tf.nn.positions import scaled_frequencies, t5_bucket
from tinygrad_tf.ops.rotary import LAYOUTS

layouts = pytest.mark.parametrize("layout", LAYOUTS)
random = np.random.default_rng(0)


def double(*shape):
    return torch.tensor(random.normal(size=shape))


# --- added to the embedding -------------------------------------------------------------------------------------------

def test_sinusoidal_has_the_known_numbers():
    pe = nn.SinusoidalPositionEncoding(4).pe
    assert tuple(pe.shape) == (1, 2048, 4) and pe.dtype is torch.float32
    assert pe[0, 0].tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(pe[0, 1].cpu().numpy(), [0.8415, 0.5403, 0.0100, 0.9999], atol=5e-5)      # as PyTorch prints it


def test_sinusoidal_is_its_formula():
    C, T = 6, 300
    expected = [[(math.cos if c % 2 else math.sin)(t / 10000 ** ((c - c % 2) / C)) for c in range(C)] for t in range(T)]
    np.testing.assert_allclose(nn.SinusoidalPositionEncoding(C, T).pe[0].cpu().numpy(), expected, atol=6e-8)


def test_sinusoidal_is_added_moves_and_is_not_saved():
    encoding, x = nn.SinusoidalPositionEncoding(6, 10), torch.randn(2, 3, 6)
    assert torch.equal(encoding(x), x + encoding.pe[:, :3])
    assert dict(encoding.state_dict()) == {} and list(encoding.parameters()) == [] and [n for n, _ in encoding.named_buffers()] == ["pe"]
    assert encoding.double().pe.dtype is torch.float64
    for dim in (5, 0, -2):
        with pytest.raises(ValueError, match="even dim"):
            nn.SinusoidalPositionEncoding(dim)


TABLES = {"sinusoidal": lambda: nn.SinusoidalPositionEncoding(6, 10), "learned": lambda: nn.LearnedPositions(10, 6)}
tables = pytest.mark.parametrize("name", TABLES)


@tables
def test_position_ids_choose_rows(name):
    module, x = TABLES[name](), torch.randn(2, 3, 6)
    rows = module.pe[0] if name == "sinusoidal" else module.weight
    assert torch.equal(module(x), x + rows[:3])
    ids = torch.tensor([[0, 0, 1], [7, 8, 9]])
    assert torch.equal(module(x, ids), x + rows[ids])
    for shared in (ids[1], ids[1:], ids[1].int()):
        assert torch.equal(module(x, shared), x + rows[7:])
    assert tuple(module(torch.randn(0, 3, 6)).shape) == (0, 3, 6) and tuple(module(torch.randn(2, 0, 6)).shape) == (2, 0, 6)


@tables
def test_tables_refuse_what_they_have_no_row_for(name):
    module = TABLES[name]()
    for position in (10, -1):
        with pytest.raises(IndexError, match=f"position {position} is out of range for max_seq_len 10"):
            module(torch.randn(1, 1, 6), torch.tensor([[position]]))
    with pytest.raises(IndexError, match="position 10 is out of range"):
        module(torch.randn(1, 11, 6))
    for x, ids, error, message in [(torch.randn(2, 3, 5), None, ValueError, r"\[B, T, C\] with C=6"),
                                   (torch.randn(3, 6), None, ValueError, r"\[B, T, C\] with C=6"),
                                   (torch.randn(2, 3, 6), torch.zeros(2, 4).long(), ValueError, "position_ids"),
                                   (torch.randn(2, 3, 6), torch.zeros(2, 3), TypeError, "whole numbers, got torch.float32"),
                                   (torch.randn(2, 3, 6), [0, 1, 2], TypeError, "whole numbers, got list")]:
        with pytest.raises(error, match=message):
            module(x, ids)


def test_a_learned_table_gets_the_sum_of_the_gradients():
    module, x = nn.LearnedPositions(4, 2), torch.zeros(3, 2, 2)
    module(x, torch.tensor([[0, 1], [1, 1], [3, 0]])).sum().backward()
    assert module.weight.grad.tolist() == [[2, 2], [3, 3], [0, 0], [1, 1]]


def test_input_embedding_takes_any_positions_or_none():
    ids = torch.tensor([[1, 2, 0], [3, 3, 3]])
    learned = nn.InputEmbedding(5, 6, 10)
    assert sorted(learned.state_dict()) == ["position.weight", "token.weight"]
    assert torch.equal(learned(ids), learned.token(ids) + learned.position.weight[:3])
    alone = nn.InputEmbedding(5, 6, position=None)
    assert torch.equal(alone(ids), alone.token(ids)) and list(alone.state_dict()) == ["token.weight"]
    waves = nn.InputEmbedding(5, 6, position=nn.SinusoidalPositionEncoding(6, 10))
    shifted = torch.tensor([[0, 0, 1], [4, 5, 6]])
    assert torch.equal(waves(ids, shifted), waves.token(ids) + waves.position.pe[0][shifted])
    with pytest.raises(ValueError, match="max_seq_len"):
        nn.InputEmbedding(5, 6)
    with pytest.raises(TypeError, match="got 'rope'"):
        nn.InputEmbedding(5, 6, 10, position="rope")


# --- RoPE -------------------------------------------------------------------------------------------------------------

def plain_rope(x, positions, layout, theta, amplitude=1.0):
    """One pair at a time, each multiplied as a complex number.    x: [B, H, T, Dh]   positions: [B, T]"""
    y = x.copy()
    R = 2 * len(theta)
    for i, speed in enumerate(theta):
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + R // 2)
        z = (x[..., a] + 1j * x[..., b]) * amplitude * np.exp(1j * positions[:, None] * speed)
        y[..., a], y[..., b] = z.real, z.imag
    return y


def theta(R, base=10000.0):
    return [base ** (-2 * i / R) for i in range(R // 2)]


@layouts
@pytest.mark.parametrize("rotary_dim", [None, 6])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_rope_is_plain_rope(layout, rotary_dim, base):
    rope, x = nn.RotaryEmbedding(8, base, layout, max_seq_len=4, rotary_dim=rotary_dim), double(2, 3, 5, 8)
    for offset in (0, 3, 1000, 123456):
        expected = plain_rope(x.cpu().numpy(), np.tile(offset + np.arange(5), (2, 1)), layout, theta(rotary_dim or 8, base))
        np.testing.assert_allclose(rope(x, offset=offset).cpu().numpy(), expected, rtol=1e-9, atol=1e-10)
    ids = torch.tensor([[0, 0, 0, 1, 2], [7, 3, 90, 2, 2]])
    expected = plain_rope(x.cpu().numpy(), ids.cpu().numpy(), layout, theta(rotary_dim or 8, base))
    np.testing.assert_allclose(rope(x, ids).cpu().numpy(), expected, atol=1e-12)


def test_interleaved_rope_is_the_guides_function():
    """In float32, its angles too: the guide's function rounds them, ours are exact."""
    x, Dh = torch.randn(2, 3, 4, 8), 8
    for offset in (0, 5, 50):
        inv_freq = 1.0 / (10000 ** (torch.arange(0, Dh, 2) / Dh))
        angles = torch.outer(torch.arange(offset, offset + 4), inv_freq).repeat_interleave(2, dim=-1)
        rotated = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        assert torch.allclose(nn.RotaryEmbedding(8)(x, offset=offset), x * angles.cos() + rotated * angles.sin(), atol=2e-5)


@layouts
@pytest.mark.parametrize("scaling", [None, {"type": "yarn", "factor": 4, "original_max_seq_len": 16}], ids=["plain", "yarn"])
def test_a_dot_product_depends_on_the_distance_alone(layout, scaling):
    rope, q, k = nn.RotaryEmbedding(64, layout=layout, scaling=scaling), torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)

    def score(m, n):
        return (rope(q, offset=m) * rope(k, offset=n)).sum().item() / 64
    for distance in (0, 1, 7):
        shifted = [score(shift + distance, shift) for shift in (0, 5, 50)]
        assert max(shifted) - min(shifted) < 3e-7
    assert abs(score(1, 0) - score(7, 0)) > 1e-3


@layouts
def test_decoding_one_token_at_a_time_needs_the_length_of_the_cache(layout):
    rope, x = nn.RotaryEmbedding(8, layout=layout), double(2, 3, 6, 8)
    whole = rope(x)
    each = [rope(x[:, :, t:t + 1], offset=t) for t in range(6)]
    assert torch.equal(torch.cat(each, dim=2), whole)
    forgetful = torch.cat([rope(x[:, :, t:t + 1]) for t in range(6)], dim=2)
    assert torch.equal(forgetful[:, :, 0], whole[:, :, 0]) and (forgetful - whole)[:, :, 1:].abs().max().item() > 0.1


@layouts
def test_forms_of_position_ids(layout):
    rope, x = nn.RotaryEmbedding(8, layout=layout), double(2, 3, 5, 8)
    for ids in (torch.arange(2, 7), torch.arange(2, 7).unsqueeze(0), torch.arange(2, 7).expand(2, 5), torch.arange(2, 7).int()):
        assert torch.equal(rope(x, ids), rope(x, offset=2))
    for part in (x[:, 0], x[0, 0]):                                         # [B, T, Dh] and [T, Dh]
        assert torch.equal(rope(part, torch.arange(2, 7)), rope(part, offset=2))
    assert torch.equal(rope(x[:, 0], torch.arange(2, 7).expand(2, 5)), rope(x[:, 0], offset=2))
    assert tuple(rope(x[:0], torch.zeros(0, 5).long()).shape) == (0, 3, 5, 8)
    assert torch.equal(rope(x, offset=np.int64(2)), rope(x, offset=2))
    assert tuple(rope(x[:, :, :0], offset=4).shape) == (2, 3, 0, 8) == tuple(rope(x[:, :, :0], torch.zeros(2, 0).long()).shape)


def test_tables_grow_are_not_saved_and_leave_old_results_alone():
    rope, x = nn.RotaryEmbedding(8, max_seq_len=4), torch.randn(1, 1, 3, 8, requires_grad=True)
    y = rope(x)
    before = y.detach().clone()
    far = rope(x, offset=100)
    assert [len(cos) for cos, _ in rope._tables.values()] == [128]
    assert torch.equal(rope(x), before) and torch.equal(far, nn.RotaryEmbedding(8)(x, offset=100))
    y.sum().backward()
    assert dict(rope.state_dict()) == {} and list(rope.parameters()) == [] and list(rope.buffers()) == []
    assert torch.equal(copy.deepcopy(rope)(x), before)


def test_positions_beyond_the_longest_table_are_computed_alone(monkeypatch):
    x, ids = double(2, 1, 3, 8), torch.tensor([[3, 39, 40], [0, 1, 2]])
    rope = nn.RotaryEmbedding(8, max_seq_len=4)
    expected = [rope(x, offset=37), rope(x, offset=38), rope(x, ids)]
    monkeypatch.setattr(positions, "LONGEST_TABLE", 40)
    rope = nn.RotaryEmbedding(8, max_seq_len=4)
    found = [rope(x, offset=37), rope(x, offset=38), rope(x, ids)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected)) and len(next(iter(rope._tables.values()))[0]) == 64
    monkeypatch.undo()
    assert nn.RotaryEmbedding(8)(x, torch.tensor([0, 1, 10 ** 12])).isfinite().all()


@layouts
def test_each_dtype_is_turned_in_its_own_precision(layout):
    rope, x = nn.RotaryEmbedding(8, layout=layout), double(2, 3, 5, 8)
    exact = rope(x, offset=1000)
    for dtype, tolerance in (torch.float32, 1e-6), (torch.float16, 4e-3):
        y = rope.to(dtype)(x.to(dtype), offset=1000)
        assert y.dtype is dtype and (y.double() - exact).abs().max().item() < tolerance
    assert torch.equal(rope.half()(x.half()), rope(x.half().float()).half())


@layouts
def test_rope_has_the_right_gradient(layout):
    rope = nn.RotaryEmbedding(6, layout=layout, rotary_dim=4, scaling={"type": "yarn", "factor": 8, "original_max_seq_len": 4})
    assert torch.gradcheck(rope, [double(2, 2, 3, 6).requires_grad_()])
    assert torch.gradcheck(lambda x: rope(x, torch.tensor([[0, 0, 1], [5, 6, 7]])), [double(2, 2, 3, 6).requires_grad_()])


def test_rope_refuses():
    rope, x = nn.RotaryEmbedding(8), torch.randn(2, 3, 5, 8)
    for call, message in [(lambda: rope(torch.randn(2, 3, 5, 6)), "Dh=8"), (lambda: rope(torch.randn(8)), "Dh=8"),
                          (lambda: rope(x, offset=-1), "offset must be"), (lambda: rope(x, offset=1.0), "offset must be"),
                          (lambda: rope(x, torch.arange(5), 3), "not both"), (lambda: rope(x, torch.arange(4)), r"\[B, T\] = \(2, 5\)"),
                          (lambda: rope(x, torch.arange(5) - 1), "positions must be ≥ 0, got -1"),
                          (lambda: rope(x, torch.zeros(3, 5).long()), r"got \(3, 5\)"),
                          (lambda: rope(x[0, 0], torch.zeros(5, 5).long()), "broadcasts"),
                          (lambda: nn.RotaryEmbedding(7), "must be even"), (lambda: nn.RotaryEmbedding(8, rotary_dim=10), "must be even"),
                          (lambda: nn.RotaryEmbedding(8, layout="neox"), "got 'neox'"),
                          (lambda: nn.RotaryEmbedding(8, 1.0), "base must be"), (lambda: nn.RotaryEmbedding(8, -5), "got -5")]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="whole numbers"):
        rope(x, torch.zeros(2, 5))


def test_positions_of_rope_end_where_float64_does():
    rope, x = nn.RotaryEmbedding(8), torch.ones(1, 2, 3, 8).double()
    last = 2 ** 53 - 3
    for found in rope(x, offset=last), rope(x, torch.arange(3) + last):
        assert (found[:, :, 0] != found[:, :, 1]).any() and (found[:, :, 1] != found[:, :, 2]).any()
    for call in (lambda: rope(x, offset=last + 1), lambda: rope(x, offset=10 ** 30), lambda: rope(x, offset=np.int64(2 ** 63 - 1)),
                 lambda: rope(x, torch.arange(3) + last + 1), lambda: rope(x, torch.tensor([0, 1, 2 ** 63 - 1]))):
        with pytest.raises(ValueError, match=r"is not below 2\*\*53"):
            call()


@pytest.mark.parametrize("make", [lambda n: nn.RotaryEmbedding(8, max_seq_len=n), lambda n: nn.SinusoidalPositionEncoding(8, n)])
def test_sizes_of_tables_are_whole_numbers(make):
    for wrong in "a", 2.5, None:
        with pytest.raises(TypeError, match="max_seq_len must be a whole number"):
            make(wrong)
    with pytest.raises(ValueError, match="max_seq_len must be ≥ 0, got -5"):
        make(-5)


def test_a_promised_length_costs_no_memory_before_it_is_there():
    x = double(1, 2, 3, 8)
    assert torch.equal(nn.RotaryEmbedding(8, max_seq_len=10 ** 12)(x), nn.RotaryEmbedding(8)(x))


@pytest.mark.parametrize("no_tensor", [None, [[1]], np.ones((1, 3, 8)), 1], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("make", [lambda: nn.RotaryEmbedding(8), lambda: nn.SinusoidalPositionEncoding(8),
                                  lambda: nn.LearnedPositions(9, 8), lambda: nn.InputEmbedding(9, 8, 9)])
def test_what_is_no_tensor_is_refused_by_name(make, no_tensor):
    with pytest.raises(TypeError, match="must be a Tensor, got"):
        make()(no_tensor)


# --- stretching RoPE --------------------------------------------------------------------------------------------------

def test_linear_scaling_divides_positions():
    x = double(2, 3, 5, 8)
    stretched = nn.RotaryEmbedding(8, scaling={"type": "linear", "factor": 4})
    found, expected = stretched(x, offset=400)[:, :, 0], nn.RotaryEmbedding(8)(x, offset=100)[:, :, 0]
    np.testing.assert_allclose(found.cpu().numpy(), expected.cpu().numpy(), atol=1e-12)


@pytest.mark.parametrize("R, s", [(8, 2), (64, 4), (128, 8.0)])
def test_ntk_scaling_stretches_the_slowest_pair_by_the_factor_and_the_fastest_not(R, s):
    found, amplitude = scaled_frequencies(R, 10000.0, {"type": "ntk", "factor": s})
    plain = np.array(theta(R))
    assert found[0] == 1 and amplitude == 1 and math.isclose(found[-1], plain[-1] / s, rel_tol=1e-12)
    stretch = plain / found                                                # grows from pair to pair by one factor
    np.testing.assert_allclose(stretch, [s ** (i / (R / 2 - 1)) for i in range(R // 2)], rtol=1e-12)


def yarn_of_the_paper(R, base, s, L, alpha=1.0, beta=32.0):
    """Pair by pair from the wavelengths, as in section 3.2 of arXiv 2309.00071: h(θ) = (1 − γ) θ / s + γ θ."""
    result = []
    for i in range(R // 2):
        wavelength = 2 * math.pi * base ** (2 * i / R)
        r = L / wavelength
        gamma = 0.0 if r < alpha else 1.0 if r > beta else (r - alpha) / (beta - alpha)
        result.append((1 - gamma) * base ** (-2 * i / R) / s + gamma * base ** (-2 * i / R))
    return result


@pytest.mark.parametrize("R, base, s, L", [(64, 10000.0, 4, 2048), (128, 10000.0, 16.0, 4096), (128, 1e6, 4, 32768), (8, 100.0, 2, 64)])
def test_yarn_is_the_papers_formula(R, base, s, L):
    found, amplitude = scaled_frequencies(R, base, {"type": "yarn", "factor": s, "original_max_seq_len": L})
    np.testing.assert_allclose(found, yarn_of_the_paper(R, base, s, L), rtol=1e-12)
    assert math.isclose(amplitude, 0.1 * math.log(s) + 1)
    assert found[0] == 1.0 or L / (2 * math.pi) < 32                        # the fastest keeps its speed
    other, _ = scaled_frequencies(R, base, {"type": "yarn", "factor": s, "original_max_seq_len": L, "alpha": 2, "beta": 8.0})
    np.testing.assert_allclose(other, yarn_of_the_paper(R, base, s, L, 2, 8.0), rtol=1e-12)


def test_yarn_with_the_ramp_of_published_weights():
    """Dh = 128, base 10000, 4096 → 64 k tokens: by hand, pairs 0 to 20 keep their speed, those from 46 on are 16 times slower.

    Place of r turns: i = 64 ln(4096 / 2πr) / ln 10000.  r = 32: 20.95, rounded down 20.  r = 1: 45.03, rounded up 46.
    """
    found, _ = scaled_frequencies(128, 10000.0, {"type": "yarn", "factor": 16, "original_max_seq_len": 4096, "ramp": "index"})
    slower = np.array(theta(128)) / found
    np.testing.assert_allclose(slower[:21], 1)
    np.testing.assert_allclose(slower[46:], 16)
    middle = (33 - 20) / (46 - 20)                                          # pair 33 is half of the way: θ (½ + ½ / 16)
    assert math.isclose(1 / slower[33], (1 - middle) + middle / 16, rel_tol=1e-12)
    assert (np.diff(slower[20:47]) > 0).all()


@layouts
def test_yarn_multiplies_scores_by_the_square_of_its_factor(layout):
    s, options = 4, {"type": "yarn", "factor": 4, "original_max_seq_len": 32}
    x = double(2, 3, 5, 8)
    y = nn.RotaryEmbedding(8, layout=layout, scaling=options)(x, offset=9)
    np.testing.assert_allclose(y.cpu().numpy(), plain_rope(x.cpu().numpy(), np.tile(9 + np.arange(5), (2, 1)), layout,
                                                     yarn_of_the_paper(8, 10000.0, s, 32), 0.1 * math.log(s) + 1), atol=1e-12)
    plain = nn.RotaryEmbedding(8, layout=layout, scaling={**options, "attention_factor": 1.0})(x, offset=9)
    expected = (plain * plain).sum(-1) * (0.1 * math.log(s) + 1) ** 2
    np.testing.assert_allclose((y * y).sum(-1).cpu().numpy(), expected.cpu().numpy(), rtol=1e-12)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_a_factor_of_1_changes_nothing(kind):
    options = {"original_max_seq_len": 64} if kind == "yarn" else {}
    x = double(1, 2, 5, 8)
    np.testing.assert_allclose(nn.RotaryEmbedding(8, scaling={"type": kind, "factor": 1, **options})(x).cpu().numpy(),
                               nn.RotaryEmbedding(8)(x).cpu().numpy(), atol=1e-13)


@pytest.mark.parametrize("scaling, message", [
    ("linear", "must be a dict"), ({}, "must be a dict"), ({"type": "dynamic", "factor": 2}, "'linear', 'ntk', 'yarn'"),
    ({"type": "linear"}, "needs 'factor'"), ({"type": "linear", "factor": 0.5}, "≥ 1; got 0.5"),
    ({"type": "ntk", "factor": "2"}, "got '2'"),
    ({"type": "linear", "factor": math.inf}, "got inf"), ({"type": "linear", "factor": math.nan}, "got nan"),
    ({"type": "linear", "factor": 2, "beta": 3}, r"takes no \['beta'\]"), ({"type": "yarn", "factor": 2}, "original_max_seq_len"),
    ({"type": "yarn", "factor": 2, "original_max_seq_len": 0}, "got 0"),
    ({"type": "yarn", "factor": 2, "original_max_seq_len": 8, "alpha": 4, "beta": 2}, "alpha < beta"),
    ({"type": "yarn", "factor": 2, "original_max_seq_len": 8, "ramp": "up"}, "got 'up'")], ids=str)
def test_scalings_that_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        nn.RotaryEmbedding(8, scaling=scaling)


def test_ntk_scaling_needs_two_pairs():
    with pytest.raises(ValueError, match="single pair"):
        nn.RotaryEmbedding(2, scaling={"type": "ntk", "factor": 2})


# --- ALiBi ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, exponents", [(1, [8]), (2, [4, 8]), (4, [2, 4, 6, 8]), (8, [1, 2, 3, 4, 5, 6, 7, 8]), (3, [4, 8, 2]),
                                          (6, [2, 4, 6, 8, 1, 3]), (12, [1, 2, 3, 4, 5, 6, 7, 8, .5, 1.5, 2.5, 3.5])])
def test_slopes_for_any_number_of_heads(n, exponents):
    np.testing.assert_allclose(nn.alibi_slopes(n).cpu().numpy(), [2.0 ** -e for e in exponents], rtol=1e-7)


def test_slopes_of_16_heads_and_what_is_refused():
    np.testing.assert_allclose(nn.alibi_slopes(16).cpu().numpy(), [2.0 ** (-h / 2) for h in range(1, 17)], rtol=1e-7)
    for n in (0, -1, 2.0):
        with pytest.raises(ValueError, match="num_heads"):
            nn.alibi_slopes(n)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_alibi_is_its_formula_and_the_guides(bidirectional):
    H, T = 6, 5
    alibi = nn.ALiBi(H, bidirectional)
    m = alibi.slopes.tolist()
    expected = [[[-m[h] * (abs(i - j) if bidirectional else max(i - j, 0)) for j in range(T)] for i in range(T)] for h in range(H)]
    found = alibi(torch.arange(T), torch.arange(T))
    np.testing.assert_allclose(found.cpu().numpy(), expected)
    pos = torch.arange(T)                                                   # the guide's lines
    distance = (pos[:, None] - pos[None, :]).clamp_min(0)
    if not bidirectional:
        assert torch.equal(found, (-alibi.slopes[None, :, None, None] * distance[None, None, :, :])[0])
    assert dict(alibi.state_dict()) == {} and list(alibi.parameters()) == []


@pytest.mark.parametrize("make", [lambda: nn.ALiBi(3), lambda: nn.T5RelativeBias(3, 8, 16), lambda: nn.T5RelativeBias(3, 8, 16, False)],
                         ids=["alibi", "t5", "t5 causal"])
def test_biases_take_queries_after_a_cache_and_rows_of_their_own(make):
    bias = make()
    whole = bias(torch.arange(7), torch.arange(7))
    assert tuple(whole.shape) == (3, 7, 7)
    assert torch.equal(bias(torch.arange(5, 7), torch.arange(7)), whole[:, 5:])             # the last two queries
    rows = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])                                       # the second is padded on the left
    per_row = bias(rows, rows)
    assert tuple(per_row.shape) == (2, 3, 4, 4)
    for b in range(2):
        assert torch.equal(per_row[b], bias(rows[b], rows[b]))
        assert torch.equal(bias(rows, rows[b])[b], per_row[b]) and torch.equal(bias(rows, rows[b:b + 1])[b], per_row[b])
    assert torch.equal(bias(torch.arange(9, 12), torch.arange(9, 12)), whole[:, :3, :3])    # distances alone
    for q, k, error in [(torch.zeros(2, 3).long(), torch.zeros(4, 3).long(), ValueError), (torch.zeros(1, 1, 1).long(), rows, ValueError),
                        (torch.zeros(3), rows, TypeError), (3, rows, TypeError)]:
        with pytest.raises(error, match="positions"):
            bias(q, k)


def test_alibi_does_not_hide_the_future():
    """The guide's warning (18.3): with the bias alone a later token changes an earlier output; with the causal mask it does not."""
    T = 5
    x = torch.randn(1, 2, T, 8)
    later = x.clone()
    later[:, :, -1] += 1
    bias = nn.ALiBi(2)(torch.arange(T), torch.arange(T))
    masked = bias.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    for mask, leaks in (bias, True), (masked, False):
        a, b = (F.scaled_dot_product_attention(v, v, v, attn_mask=mask)[:, :, :-1] for v in (x, later))
        assert torch.equal(a, b) != leaks


def test_alibi_in_half_precision_counts_far():
    """4001 is no float16; 4001 / 256 is within half a step of one."""
    bias = nn.ALiBi(1).half()(torch.tensor([4001]), torch.tensor([0]))
    assert bias.dtype is torch.float16 and bias.item() == np.float16(-4001 / 256)


# --- T5 ---------------------------------------------------------------------------------------------------------------

def plain_bucket(step, num_buckets, max_distance, bidirectional):
    """One number at a time, from the paper's words. step = j − i."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if step > 0 else 0
        d = abs(step)
    else:
        d = max(-step, 0)
    exact = num_buckets // 2
    if d < exact:
        return first + d
    far = num_buckets - exact
    for b in range(1, far):                                                 # d < exact · (max_distance / exact)^(b / far)
        if d ** far * exact ** b < max_distance ** b * exact ** far:
            return first + exact + b - 1
    return first + num_buckets - 1


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 16), (16, 100), (64, 1000), (4, 5), (20, 40)])
def test_buckets_are_the_plain_reference(num_buckets, max_distance, bidirectional):
    """The reference compares powers of whole numbers: nothing is rounded."""
    steps = list(range(-300, 301))
    found = t5_bucket(torch.tensor(steps), num_buckets, max_distance, bidirectional)
    assert found.dtype is torch.int64
    assert found.tolist() == [plain_bucket(s, num_buckets, max_distance, bidirectional) for s in steps]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_buckets_of_narrow_numbers(dtype, bidirectional):
    bounds = torch.iinfo(dtype)
    steps = torch.tensor(sorted({bounds.min, bounds.min + 1, max(bounds.min, -100), 0, 1, 100, bounds.max}))
    for n, far in (32, 128), (512, 1000):
        found = t5_bucket(steps.to(dtype), n, far, bidirectional)
        assert found.dtype is torch.int64 and torch.equal(found, t5_bucket(steps, n, far, bidirectional))


def test_buckets_of_t5_itself():
    """32 buckets to distance 128, recorded from the published formula in PyTorch."""
    steps = torch.tensor([-1000, -128, -127, -91, -90, -20, -12, -11, -8, -7, -1, 0, 1, 7, 8, 16, 64, 127, 128, 1000])
    assert t5_bucket(steps).tolist() == RECORDED_BOTH
    assert t5_bucket(steps, bidirectional=False).tolist() == RECORDED_CAUSAL


RECORDED_BOTH = [15, 15, 15, 15, 14, 10, 9, 8, 8, 7, 1, 0, 17, 23, 24, 26, 30, 31, 31, 31]
RECORDED_CAUSAL = [31, 31, 31, 29, 29, 17, 12, 11, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_gradients_reach_the_table(bidirectional):
    bias = nn.T5RelativeBias(2, 8, 16, bidirectional)
    assert [n for n, _ in bias.named_parameters()] == ["table.weight"] and tuple(bias.table.weight.shape) == (8, 2)
    found = bias(torch.arange(6), torch.arange(6))
    buckets = t5_bucket(torch.arange(6)[None, :] - torch.arange(6)[:, None], 8, 16, bidirectional)
    assert torch.equal(found, bias.table.weight[buckets].permute(2, 0, 1))
    dy = torch.randn(2, 6, 6)
    found.backward(dy)
    for bucket in range(8):
        expected = (dy * (buckets == bucket)).sum(dim=(1, 2))
        np.testing.assert_allclose(bias.table.weight.grad[bucket].cpu().numpy(), expected.cpu().numpy(), atol=1e-5)
    assert gradcheck_module(bias.double(), torch.arange(3, 6), torch.arange(6))


def test_buckets_that_are_refused():
    for buckets, distance, both in (2, 128, True), (7, 128, True), (1, 128, False), (32, 8, True), (32, 16, False):
        with pytest.raises(ValueError, match="num_buckets"):
            nn.T5RelativeBias(2, buckets, distance, both)
        with pytest.raises(ValueError, match="num_buckets"):
            t5_bucket(torch.arange(3), buckets, distance, both)
    for sizes in (32.0, 128), (32, 128.0), ("32", 128), (None, 128):
        with pytest.raises(TypeError, match="whole numbers"):
            t5_bucket(torch.arange(3), *sizes)
    for steps in torch.tensor([-2.5]), torch.tensor([True]), [1, 2], np.arange(3), 1:
        with pytest.raises(TypeError, match="steps must be a tensor of whole numbers"):
            t5_bucket(steps)


# --- printed ----------------------------------------------------------------------------------------------------------

def test_how_they_print():
    assert repr(nn.RotaryEmbedding(8)) == "RotaryEmbedding(8, base=10000.0, layout='interleaved')"
    assert repr(nn.RotaryEmbedding(8, rotary_dim=4, scaling={"type": "ntk", "factor": 2})) == (
        "RotaryEmbedding(8, base=10000.0, layout='interleaved', rotary_dim=4, scaling={'type': 'ntk', 'factor': 2})")
    assert repr(nn.ALiBi(4)) == "ALiBi(4, bidirectional=False)"
