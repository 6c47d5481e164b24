"""`trace` shows what flowed and changes nothing; the counters are equal to the formulas."""
import json
import math
import threading

import numpy as np
import pytest

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
import tinygrad_tf.nn.functional as F
from tinygrad_tf import autograd, random
from tinygrad_tf.generation import KVCache
from tinygrad_tf.models import Decoder, EncoderDecoder, MiniGPT
from tinygrad_tf.nn import masks
from tinygrad_tf.nn.positions import ALiBi, RotaryEmbedding
from tinygrad_tf.trace import FLOPS, attention_flops, compare_shapes, count_flops, count_parameters, kv_cache_bytes, saved_bytes, trace

B, T, C, H = 2, 5, 12, 3                        # no two sizes are equal, so that a letter in a wrong place is seen
Dh = C // H


class SingleHead(nn.Module):
    """Attention as a student writes it: each step one operation."""

    def __init__(self, dim):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, causal=False):
        Q, K, V = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        scores = Q @ K.transpose(-2, -1)
        scores = scores / math.sqrt(x.shape[-1])
        if causal:
            blocked = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(blocked, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        return weights @ V


class ManyHeads(nn.Module):
    """The same with heads and a projection at the end."""

    def __init__(self, dim, heads, product="matmul"):
        super().__init__()
        self.heads, self.product = heads, product
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, causal=False):
        n, t, width = x.shape
        Q, K, V = (p(x).reshape(n, t, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = Q @ K.transpose(-2, -1) if self.product == "matmul" else torch.einsum("bhid,bhjd->bhij", Q, K)
        scores = scores / math.sqrt(width // self.heads)
        if causal:
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        out = weights @ V if self.product == "matmul" else torch.einsum("bhij,bhjd->bhid", weights, V)
        return self.out_proj(out.transpose(1, 2).reshape(n, t, width))


def batch_first(dim, heads):
    layer = nn.MultiheadAttention(dim, heads, batch_first=True)
    return lambda x: layer(x, x, x)


MULTI = {
    "ours": nn.MultiHeadAttention,
    "ours, weights returned": lambda dim, heads: lambda x: nn.MultiHeadAttention(dim, heads)(x, return_weights=True),
    "PyTorch's": batch_first,
    "by hand": ManyHeads,
    "by hand, einsum": lambda dim, heads: ManyHeads(dim, heads, "einsum"),
}
multi = pytest.mark.parametrize("make", MULTI.values(), ids=MULTI)


def x():
    return torch.randn(B, T, C)


# --- the two tables of the guide --------------------------------------------------------------------------------------

@multi
def test_single_and_multi_head_side_by_side(make):
    table = compare_shapes(trace(SingleHead(C), x()), trace(make(C, H), x()))
    assert list(table) == [
        ("X", "[B, T, C]", "[B, T, C]"),
        ("Q, K, V", "[B, T, C]", "[B, H, T, Dh]"),
        ("scores", "[B, T, T]", "[B, H, T, T]"),
        ("output of a head", "[B, T, C]", "[B, H, T, Dh]"),
        ("output", "[B, T, C]", "[B, T, C]"),
        ("scores divided by", "√C = √12", "√Dh = √4"),
    ]


def test_four_steps_with_their_code_and_shapes():
    assert list(trace(SingleHead(C), x()).attention_steps()) == [
        ("Q Kᵀ", "scores = Q @ K.transpose(-2, -1)", "[B, T, T]"),
        ("/ √C", "scores = scores / math.sqrt(x.shape[-1])", "[B, T, T]"),
        ("softmax over keys", "weights = torch.softmax(scores, dim=-1)", "[B, T, T]"),
        ("A V", "return weights @ V", "[B, T, C]"),
    ]


def test_the_fused_operation_shows_its_steps():
    layer = nn.MultiHeadAttention(C, H)
    assert [(step, shape) for step, _, shape in trace(layer, x()).attention_steps()] == [
        ("Q Kᵀ", "[B, H, T, T]"), ("/ √Dh", "[B, H, T, T]"), ("softmax over keys", "[B, H, T, T]"), ("A V", "[B, H, T, Dh]")]
    assert [step for step, _, _ in trace(layer, x(), causal=True).attention_steps()][2] == "+ M"


@pytest.mark.parametrize("causal", [False, True])
def test_steps_inside_have_the_numbers_of_the_steps_by_hand(causal):
    torch.manual_seed(1)
    ours = nn.MultiHeadAttention(C, H)
    by_hand = ManyHeads(C, H)
    by_hand.load_state_dict(ours.state_dict())
    data = x()
    inside, outside = trace(ours, data, causal=causal), trace(by_hand, data, causal=causal)
    for name in ("X", "Q", "K", "V", "scores", "scaled", *(["masked"] if causal else []), "A", "heads", "O"):
        a, b = inside[name], outside[name]
        assert (a.shape, a.letters, a.nan, a.inf) == (b.shape, b.letters, b.nan, b.inf), name
        assert [a.min, a.mean, a.max] == pytest.approx([b.min, b.mean, b.max], abs=1e-6), name


def test_the_numbers_are_those_of_the_tensors():
    layer, data = SingleHead(C), x()
    seen = trace(layer, data, causal=True)
    q, k = layer.q_proj(data).detach().cpu().numpy(), layer.k_proj(data).detach().cpu().numpy()
    scaled = q @ k.swapaxes(-1, -2) / math.sqrt(C)
    kept = scaled[np.broadcast_to(np.tri(T, dtype=bool), scaled.shape)]
    row = seen["masked"]
    assert (row.min, row.mean, row.max) == pytest.approx((kept.min(), kept.mean(), kept.max()), abs=1e-6)
    assert (row.nan, row.inf, row.dtype, row.shape) == (0, B * T * (T - 1) // 2, "float32", (B, T, T))
    assert seen["S"] is seen["scores"] and seen["attn"] is seen["A"] and seen["out"] is seen["O"] and seen["M"].dtype == "bool"


# --- every class of attention, every size a true one -------------------------------------------------------------------

def letters_are_true(seen):
    """Every letter of every row stands for the number in its place, as `sizes` or its own attention's Tq and Tk say."""
    for row in seen:
        letters = row.letters.strip("[]").split(", ") if row.shape else []
        assert len(letters) == len(row.shape), row
        for letter, n in zip(letters, row.shape):
            assert letter == str(n) or not letter.isdigit(), row
            if letter in seen.sizes and letter not in ("T", "Tq", "Tk"):
                assert seen.sizes[letter] == n, row


FAMILY = {
    "grouped": (lambda: nn.MultiHeadAttention(C, 6, 3), {"causal": True}, "[B, Hkv, T, Dh]"),
    "one key head": (lambda: nn.MultiHeadAttention(C, H, 1), {}, "[B, Hkv, T, Dh]"),
    "window": (lambda: nn.MultiHeadAttention(C, H, window=2), {}, "[B, H, T, Dh]"),
    "rotary": (lambda: nn.MultiHeadAttention(C, H, rope=RotaryEmbedding(Dh)), {"causal": True}, "[B, H, T, Dh]"),
    "ALiBi": (lambda: nn.MultiHeadAttention(C, H, relative_bias=ALiBi(H)), {"causal": True}, "[B, H, T, Dh]"),
    "score_mod": (lambda: nn.MultiHeadAttention(C, H), {"score_mod": lambda s, b, h, i, j: s * 0.5 + (i - j).to(s.dtype)}, "[B, H, T, Dh]"),
    "padded left": (lambda: nn.MultiHeadAttention(C, H), {"causal": True, "valid_tokens": torch.tensor([[0, 0, 1, 1, 1], [1] * 5]).bool()},
                    "[B, H, T, Dh]"),
}


@pytest.mark.parametrize("make, options, keys", FAMILY.values(), ids=FAMILY)
def test_letters_in_every_kind_of_attention(make, options, keys):
    seen = trace(make(), x(), **options)
    letters_are_true(seen)
    assert seen["X"].letters == seen["O"].letters == "[B, T, C]"
    assert seen["Q"].letters == "[B, H, T, Dh]" and seen["K"].letters == seen["V"].letters == keys
    assert seen["A"].letters.endswith("T, T]")
    assert seen["scores"].letters in (seen["A"].letters, "[B, H, 1, T, T]")     # with a score_mod: grouped, before it is called
    assert seen["A"].nan == 0 and 0 <= seen["A"].min <= seen["A"].max <= 1 + 1e-6


def test_cross_attention_has_two_lengths():
    seen = trace(nn.MultiHeadAttention(C, H), x(), context=torch.randn(B, 7, C))
    assert (seen["Q"].letters, seen["K"].letters, seen["scores"].letters) == ("[B, H, Tq, Dh]", "[B, H, Tk, Dh]", "[B, H, Tq, Tk]")
    assert seen.sizes["Tq"] == 5 and seen.sizes["Tk"] == 7 and "T" not in seen.sizes


def test_a_cached_step():
    layer, cache = nn.MultiHeadAttention(C, H).eval(), KVCache(1, 8)
    with torch.no_grad():
        layer(torch.randn(B, 4, C), causal=True, cache=cache.layer(0))
        seen = trace(layer, torch.randn(B, 1, C), causal=True, cache=cache.layer(0))
    assert seen["A"].shape == (B, H, 1, 5) and seen["A"].letters == "[B, H, Tq, Tk]"
    assert seen["K"].shape == (B, H, 5, Dh) and cache.length == 5


def test_a_block_and_a_language_model():
    block = trace(nn.TransformerBlock(C, H, 48, dropout=0.0), x(), causal=True)
    assert block["attention.A"].letters == "[B, H, T, T]" and block["ffn.net.0"].letters == "[B, T, Cff]"
    assert block["norm1"].op == "LayerNorm" and abs(block["norm1"].mean) < 1e-5 and block["attention.X"] is block["X"]
    model = MiniGPT(20, 8, C, H, 48, 2, dropout=0.0)
    ids = torch.randint(0, 20, (B, T))
    seen = trace(model, ids, targets=ids)
    letters_are_true(seen)
    assert seen.sizes == {"B": B, "T": T, "C": C, "H": H, "Dh": Dh, "Cff": 48, "V_vocab": 20}
    assert seen["lm_head"].letters == "[B, T, V_vocab]" and seen["lm_head"] is seen["out"]
    assert seen["loss"].max == seen.output[1].item()
    assert len(seen.groups) == 2 and len(seen.below("blocks.1.attention").groups) == 1
    assert seen["blocks.0.attention.scores"] is not seen["blocks.1.attention.scores"]
    assert all(row.name.startswith("blocks.1") or row.module.startswith("blocks.1") for row in seen.below("blocks.1"))


@pytest.mark.parametrize("quiet", [False, True], ids=["grad", "no_grad"])
def test_the_other_architectures(quiet):
    ids, longer = torch.randint(0, 20, (B, T)), torch.randint(0, 30, (B, 7))
    with torch.no_grad() if quiet else torch.enable_grad():
        modern = trace(Decoder(20, 8, C, H, 32, 2), ids, targets=ids)
        both = trace(EncoderDecoder(30, 20, 8, 8, C, H, 48, 1, dropout=0.0), longer, ids)
    letters_are_true(modern)
    letters_are_true(both)
    assert "Rotary" in {row.op for row in modern} and modern["blocks.1.attention.A"].letters == "[B, H, T, T]"
    shapes = [both[f"{path}blocks.0.{kind}attention.scores"].shape for path, kind in (("encoder.", ""), ("", ""), ("", "cross_"))]
    assert shapes == [(B, H, 7, 7), (B, H, T, T), (B, H, T, 7)]
    assert both["blocks.0.cross_attention.A"].letters == "[B, H, Tq, Tk]"


def test_in_place_steps_keep_their_letters():
    def attention(q, k, v):
        scores = q @ k.transpose(-2, -1)
        scores /= math.sqrt(Dh)
        scores.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return torch.softmax(scores, -1) @ v

    q, k, v = (torch.randn(B, H, T, Dh, requires_grad=True) for _ in range(3))
    seen = trace(attention, q, k, v)
    assert [step for step, _, _ in seen.attention_steps()] == ["Q Kᵀ", "/ √Dh", "+ M", "softmax over keys", "A V"]
    assert seen["scores"].max == pytest.approx(2 * max(seen["scaled"].max, 0), rel=1e-6)      # the number before it was written over


def test_a_softmax_without_two_products_is_no_attention():
    seen = trace(lambda x: torch.softmax(x @ torch.ones(C, 3), dim=-1), x())
    assert seen.groups == [] and "A" not in seen and len(seen) == 3


def test_one_query_without_an_axis_of_its_own():
    q, k = torch.randn(Dh), torch.randn(T, Dh)
    seen = trace(lambda: torch.einsum("t,td->d", torch.softmax(torch.einsum("d,td->t", q, k), -1), k))
    assert seen.groups == [] and seen.output.shape == (Dh,)


def test_nothing_finite_still_compares():
    nan = torch.full((B, T, C), math.nan)
    assert compare_shapes(trace(SingleHead(C), nan), trace(nn.MultiHeadAttention(C, H), nan))[-1] == (
        "scores divided by", "not finite", "not finite")


def test_functions_are_traced_too():
    q = torch.randn(B, H, T, Dh)
    seen = trace(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    assert seen["scores"].letters == "[B, H, T, T]" and seen["query"] is seen["key"] is seen["value"] is seen["Q"] is seen["K"]


def test_a_module_called_twice_is_numbered():
    seen = trace(nn.Sequential(*[nn.Linear(C, C)] * 2), x())
    assert [row.name for row in seen] == ["X", "0", "0#2"] and seen["out"] is seen["0#2"]


# --- tracing changes nothing ---------------------------------------------------------------------------------------------

def run_of(model, ids, traced):
    """Loss, gradients and the next random number of a training step with dropout."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = trace(model, ids, targets=ids).output[1] if traced else model(ids, targets=ids)[1]
    loss.backward()
    return [loss.item(), torch.rand(3).tolist(), *(p.grad.cpu().numpy().copy() for p in model.parameters())]


def test_results_gradients_and_random_streams_are_the_same():
    model, ids = MiniGPT(20, 8, C, H, 48, 2, dropout=0.3), torch.randint(0, 20, (B, T))
    for block in model.blocks:
        block.attention.dropout = 0.2
    plain, traced = run_of(model, ids, False), run_of(model, ids, True)
    for a, b in zip(plain, traced, strict=True):
        assert np.array_equal(a, b)


def test_it_leaves_no_hook_and_no_observer_behind():
    model = MiniGPT(20, 8, C, H, 48, 1)
    trace(model, torch.zeros(1, 3, dtype=torch.int64))
    assert autograd._mode.observers == ()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


class Failing(nn.Module):
    def __init__(self, caught):
        super().__init__()
        self.bad, self.good, self.caught = nn.Linear(3, 3), nn.Linear(C, C), caught

    def forward(self, x):
        if not self.caught:
            return self.bad(x)
        try:
            self.bad(x)
        except RuntimeError:
            return self.good(x) + 1


def test_an_exception_leaves_nothing_behind():
    model = Failing(caught=False)
    with pytest.raises(RuntimeError, match="linear"):
        trace(model, x())
    assert autograd._mode.observers == ()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    table, before = nn.Embedding(3, 4), random.get_rng_state()
    with pytest.raises(IndexError):
        trace(table, torch.tensor([7]))
    assert autograd._mode.observers == () and np.array_equal(before, random.get_rng_state())


def test_a_call_that_failed_and_was_caught_does_not_shift_the_paths():
    seen = trace(Failing(caught=True), x())
    assert [(row.name, row.module) for row in seen] == [("X", ""), ("good", "good"), ("out", "")]


class Gate(nn.Module):
    """Hands on what it gets; another thread than the one that made it waits inside until it is let go."""

    def __init__(self):
        super().__init__()
        self.entered, self.release, self.mine = threading.Event(), threading.Event(), threading.get_ident()

    def forward(self, x):
        if threading.get_ident() != self.mine:
            self.entered.set()
            assert self.release.wait(60)
        return x * 3


class Meeting(nn.Module):
    """Runs its operations while another thread is inside its child."""

    def __init__(self, work):
        super().__init__()
        self.gate, self.work = Gate(), work

    def forward(self, x):
        other = threading.Thread(target=self.work, args=(self.gate,))
        other.start()
        assert self.gate.entered.wait(60)
        y = x + 1
        self.gate.release.set()
        other.join(60)
        return self.gate(y) * 2


@pytest.mark.parametrize("traced", [False, True], ids=["the other runs", "the other traces"])
def test_threads_do_not_see_each_other(traced):
    found = []

    def work(gate):
        data = torch.ones(7)
        found.append(trace(gate, data) if traced else (gate(data), autograd._mode.observers))

    seen = trace(Meeting(work), torch.ones(3))
    assert [(row.op, row.module, row.shape) for row in seen] == [
        ("input", "", (3,)), ("Add", "", (3,)), ("Mul", "gate", (3,)), ("Mul", "", (3,))]
    if traced:
        assert [(row.op, row.module, row.shape) for row in found[0]] == [("input", "", (7,)), ("Mul", "", (7,))]
    else:
        assert found[0][1] == ()


def test_a_trace_inside_a_trace():
    inner = []
    seen = trace(lambda x: inner.append(trace(nn.MultiHeadAttention(C, H), x)) or x * 2, x())
    assert "scores" in inner[0] and [row.op for row in seen] == [*(row.op for row in inner[0]), "Mul"]


# --- what is not finite ---------------------------------------------------------------------------------------------------

def test_values_that_are_not_finite_are_counted():
    data = torch.tensor([[1.0, math.nan, math.inf, -math.inf, 3.0]])
    row = trace(nn.Identity(), data)["X"]
    assert (row.min, row.mean, row.max, row.nan, row.inf) == (1.0, 2.0, 3.0, 1, 2)
    assert "1 NaN!, 2 inf" in str(trace(nn.Identity(), data))


@pytest.mark.parametrize("data", [torch.zeros(0, 3), torch.full((2, 3), math.nan)], ids=["empty", "NaN alone"])
def test_nothing_finite_has_no_mean(data):
    seen = trace(nn.Linear(3, 2), data)
    assert seen["X"].mean is None and seen["out"].shape == (len(data), 2)
    assert json.loads(json.dumps(seen.to_dict()))["rows"][0]["mean"] is None and str(seen)


def test_half_precision():
    q = torch.randn(B, H, T, Dh).half()
    seen = trace(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    assert seen["scores"].dtype == "float32" and seen.output.dtype is torch.float16 and seen["A"].max == 1.0


def test_nan_in_a_key_that_is_blocked_stays_out():
    k = torch.randn(B, H, T, Dh)
    k[:, :, -1] = math.nan
    seen = trace(F.scaled_dot_product_attention, torch.randn(B, H, T, Dh), k, k, attn_mask=torch.tensor([True] * 4 + [False]))
    assert seen["scores"].nan == B * H * T and seen["A"].nan == seen["heads"].nan == 0
    assert not seen.output.isnan().any()


# --- finding and printing ----------------------------------------------------------------------------------------------------

def test_errors_teach():
    seen = trace(nn.MultiHeadAttention(C, H), x())
    with pytest.raises(KeyError, match="names like it: .*scores"):
        seen["score"]
    with pytest.raises(ValueError, match=r"nothing ran in 'ffn'; modules that ran: .*q_proj"):
        seen.below("ffn")
    with pytest.raises(TypeError, match="expected a module or a function, got Tensor"):
        trace(x())
    with pytest.raises(ValueError, match="one attention, got 0"):
        compare_shapes(trace(nn.Linear(C, C), x()), seen)
    with pytest.raises(TypeError, match="missing"):
        trace(nn.Linear(C, C))


def test_it_prints_a_row_for_each_intermediate_and_survives_json():
    seen = trace(nn.MultiHeadAttention(C, H), x())
    lines = str(seen).splitlines()
    assert lines[0] == "B = 2, T = 5, C = 12, H = 3, Dh = 4" and len(lines) == len(seen) + 2
    assert any(line.startswith("scores") and "[2, 3, 5, 5]" in line and "[B, H, T, T]" in line for line in lines)
    assert json.loads(json.dumps(seen.to_dict()))["sizes"]["Dh"] == Dh and repr(seen).startswith("<Trace of ")


# --- counting -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("heads", [1, 4, 8])
def test_parameters_do_not_depend_on_the_number_of_heads(heads):
    C = 48
    for attention in nn.MultiHeadAttention(C, heads), nn.MultiheadAttention(C, heads):
        assert count_parameters(attention).total == 4 * C * C + 4 * C == 9408
    block = count_parameters(nn.TransformerBlock(C, heads, 4 * C))
    assert block["attention"] == 9408 and block["ffn"] == 8 * C * C + 5 * C == 18672
    assert block.total == sum(block[name] for name in ("attention", "ffn", "norm1", "norm2"))


def test_a_tied_parameter_counts_once():
    model = MiniGPT(20, 8, C, H, 48, 2)
    counts = count_parameters(model)
    assert counts.total == sum(p.numel() for p in model.parameters()) == sum(counts[n] for n, _ in model.named_children())
    assert (counts["embedding.token"], counts["lm_head"]) == (20 * C, 0) and "total" in str(counts)
    with pytest.raises(TypeError, match="expected a Module, got Tensor"):
        count_parameters(x())


@multi
def test_flops_of_attention(make):
    """Projections 2 · 4 · B T C², scores and weighted values 2 · 2 · B T² C, whatever the class and H."""
    assert count_flops(make(C, H), x()).total == 8 * B * T * C * C + 4 * B * T * T * C


def test_flops_by_module():
    Cff = 48
    counts = count_flops(nn.TransformerBlock(C, H, Cff), x(), causal=True)
    assert counts["attention.q_proj"] == 2 * B * T * C * C and counts["ffn"] == 4 * B * T * C * Cff
    assert counts["attention"] == 8 * B * T * C * C + 4 * B * T * T * C
    assert counts.total == counts["attention"] + counts["ffn"]


def test_flops_grow_with_t_squared_in_attention_alone():
    layer = nn.MultiHeadAttention(C, H)
    whole = [count_flops(layer, torch.randn(B, n, C)) for n in (8, 16)]
    projections = [sum(counts[f"{p}_proj"] for p in ("q", "k", "v", "out")) for counts in whole]
    assert projections[1] == 2 * projections[0]
    assert whole[1].total - projections[1] == 4 * (whole[0].total - projections[0])


def test_flops_of_products():
    a, b = torch.randn(2, 3, 4), torch.randn(4, 5)
    assert count_flops(lambda: a @ b).total == 2 * 2 * 3 * 4 * 5
    assert count_flops(lambda: torch.einsum("bij,jk->bik", a, b)).total == 2 * 2 * 3 * 4 * 5
    assert count_flops(lambda: torch.einsum("bij->bji", a)).total == 0
    assert count_flops(lambda: torch.randn(1, 3, 4) @ torch.randn(6, 4, 2)).total == 2 * 6 * 3 * 4 * 2
    assert count_flops(lambda: torch.randn(4) @ torch.randn(4)).total == 2 * 4


def test_flops_of_grouped_heads_and_of_cross_attention():
    grouped = count_flops(nn.MultiHeadAttention(C, 6, 2), x())
    assert grouped.total == 2 * B * T * C * (2 * C + 2 * C // 3) + 4 * B * T * T * C
    crossed = count_flops(nn.MultiHeadAttention(C, H), x(), context=torch.randn(B, 7, C))
    assert crossed.total == 4 * B * T * C * C + 4 * B * 7 * C * C + 4 * B * T * 7 * C


@pytest.mark.torch
def test_flops_are_those_that_pytorch_counts():
    real = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    def compute(torch, linear):
        x, w, b = torch.ones(B, T, C), torch.ones(48, C), torch.ones(48)
        y = linear(x, w, b)
        heads = y.reshape(B, T, 4, C).transpose(1, 2)
        return torch.softmax(heads @ heads.transpose(-2, -1), -1) @ heads

    with FlopCounterMode(display=False) as counter:
        compute(real, real.nn.functional.linear)
    assert count_flops(lambda: compute(torch, F.linear)).total == counter.get_total_flops()


def test_every_operation_with_a_formula_exists():
    assert set(FLOPS) <= set(autograd.Function.registry)


def test_visible_pairs_and_their_cost():
    """Full and causal O(T²), window O(T W), local + global O(T W + T G), cross Tq · Tk; dense attention computes all pairs."""
    T, W, G = 16, 4, 2
    pairs = {"full": masks.full_mask(T), "causal": masks.causal_mask(T), "window": masks.sliding_window_mask(T, W),
             "blocks": masks.block_sparse_mask(T, 4, torch.eye(4, dtype=torch.bool)), "cross": masks.full_mask(T, 7),
             "global": masks.global_token_mask(T, 1, G)}
    seen = {name: masks.count_visible(mask) for name, mask in pairs.items()}
    rows = T - G                                            # the queries that are not global, each with its window and the G keys
    assert seen == {"full": T * T, "causal": T * (T + 1) // 2, "window": T * W - W * (W - 1) // 2, "blocks": T * 4, "cross": T * 7,
                    "global": G * T + rows * G + (3 * rows - 2)}
    q = torch.randn(B, H, T, Dh)
    dense = count_flops(F.scaled_dot_product_attention, q, q, q, attn_mask=pairs["causal"]).total
    assert dense == attention_flops(B * H * seen["full"], Dh) == 4 * B * H * T * T * Dh
    assert attention_flops(10, 4, value_dim=6) == 2 * 10 * (4 + 6)


# --- memory --------------------------------------------------------------------------------------------------------------------

def test_saved_bytes_of_known_graphs():
    a = torch.randn(100, requires_grad=True)
    y = a.exp()                                             # keeps its result, once, though three nodes use it
    assert saved_bytes(y) == {"": 400, "Exp": 400}
    z = (y * y).sum() + (y.reshape(10, 10) * 2.0).sum()
    assert saved_bytes(z)["Exp"] == 400 and saved_bytes(z).total < 500
    z.backward()
    assert saved_bytes(z).total == 0
    with torch.no_grad():
        assert saved_bytes(a * a).total == 0
    with pytest.raises(TypeError, match="expected a tensor"):
        saved_bytes(None)


def test_parameters_are_not_counted_as_activations():
    layer, data = nn.Linear(30, 40), torch.randn(5, 30, requires_grad=True)
    report = saved_bytes(layer(data))
    assert report.total == 0 and report.leaves == 4 * (30 * 40 + 5 * 30)       # the graph keeps the weight and the leaf x alone
    assert saved_bytes(layer(torch.randn(5, 30))).total == 4 * 5 * 30          # x without a gradient lives for this graph


def test_dense_attention_keeps_its_weights():
    """B H T² numbers of A beside the projections: the report grows with T² by just that."""
    layer = nn.MultiHeadAttention(C, H)
    kept = {n: saved_bytes(layer(torch.randn(B, n, C)))["Attention"] for n in (8, 16)}
    assert kept == {n: 4 * (3 * B * n * C + B * H * n * n) for n in (8, 16)}


def test_the_report_is_what_memory_says():
    import tracemalloc
    model, ids = MiniGPT(20, 32, 24, 3, 96, 2, dropout=0.0), torch.randint(0, 20, (4, 32))
    model(ids, targets=ids)
    tracemalloc.start()
    loss = model(ids, targets=ids)[1]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    counted = saved_bytes(loss).total
    assert 0.8 * held < counted < 1.1 * held


def test_kv_cache_bytes():
    assert kv_cache_bytes(32, 1, 4096, 8, 128, 2) == 536_870_912 == 512 * 2 ** 20
    cache, layer = KVCache(1, 8), nn.MultiHeadAttention(C, 6, 3)
    with torch.no_grad():
        layer(x(), cache=cache.layer(0))
    assert cache.nbytes == kv_cache_bytes(1, B, 8, 3, C // 6)
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match="kv_cache_bytes: T must be an integer"):
            kv_cache_bytes(1, 1, wrong, 1, 1)


def test_arguments_that_contain_themselves_are_read_once():
    x = torch.ones(2)
    around, named = [x], {"x": x}
    around.append(around)
    named["again"] = (named, x)
    for nest in (around, named):
        assert [row.shape for row in trace(lambda nest: x * 2, nest).rows][-1] == (2,)
