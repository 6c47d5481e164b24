"""docs/cheat_sheet.md against the library: every shape in its tables is that of a real tensor, every mask call is run."""
import math
import re
from pathlib import Path

import pytest

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
import tinygrad_tf.nn.functional as F
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn import masks
from tinygrad_tf.nn.attention import join_heads, split_heads

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "cheat_sheet.md").read_text(encoding="utf-8")

# No two letters are equal, nor one the product of others but for H · Dh = C: a wrong letter is a wrong number.
LETTERS = {"B": 3, "T": 7, "Tq": 5, "Tk": 11, "C": 24, "H": 4, "Dh": 6, "Hkv": 2, "Cff": 96, "V_vocab": 50, "max_seq_len": 13, "1": 1,
           "Hkv·Dh": 12, "Dh/2": 3}


def table(first):
    """The rows of the table whose first header cell is `first`: a list of cells each."""
    rows = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[1].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def shapes(cell):
    return [tuple(LETTERS[letter.strip()] for letter in found.split(",")) for found in re.findall(r"`\[([^]]+)\]`", cell)]


def size(letters):
    return [LETTERS[letter] for letter in letters.split()]


# --- the tables of shapes ---------------------------------------------------------------------------------------------

def attention_tensors(H, Hkv, context=False):
    """X (and context), Q, K, A, heads, O as `MultiHeadAttention` makes them, one step at a time; the last is compared with its own."""
    B, T, C = size("B Tq C") if context else size("B T C")
    layer = nn.MultiHeadAttention(C, H, Hkv)
    x = torch.randn(B, T, C)
    source = torch.randn(*size("B Tk C")) if context else x
    q, k, v = split_heads(layer.q_proj(x), H), split_heads(layer.k_proj(source), Hkv), split_heads(layer.v_proj(source), Hkv)
    heads, weights = F.attention(q, k, v, return_weights=True)
    out = layer.out_proj(join_heads(heads))
    expected, expected_weights = layer(x, context=source if context else None, return_weights=True)
    assert torch.allclose(out, expected, atol=1e-6) and torch.allclose(weights, expected_weights, atol=1e-6)
    return [(x, source) if context else (x,), (q,), (k,), (weights,), (heads,), (out,)]


def single_head_tensors():
    """The same without an axis for heads: three-dimensional throughout, scaled by √C."""
    B, T, C = size("B T C")
    layer = nn.MultiHeadAttention(C, 1)
    x = torch.randn(B, T, C)
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(C), dim=-1)
    out = layer.out_proj(weights @ v)
    assert torch.allclose(out, layer(x), atol=1e-6)
    return [(x,), (q,), (k,), (weights,), (weights @ v,), (out,)]


@pytest.mark.parametrize("column, tensors", [
    (1, single_head_tensors), (2, lambda: attention_tensors(4, 4)), (3, lambda: attention_tensors(4, 2)),
    (4, lambda: attention_tensors(4, 4, context=True))], ids=["single", "multi", "grouped", "cross"])
def test_shapes_of_attention(column, tensors):
    said = [shapes(row[column]) for row in table("step")]
    assert said == [[tuple(t.shape) for t in step] for step in tensors()]


def test_shapes_around_attention():
    B, T, C, H, Cff, V, L = size("B T C H Cff V_vocab max_seq_len")
    ids, x = torch.randint(0, V, (B, T)), torch.randn(B, T, C)
    ffn = nn.FeedForward(C, Cff)
    model = MiniGPT(vocab_size=V, max_seq_len=L, dim=C, num_heads=H, hidden_dim=Cff, num_layers=1)
    embedded, embedding = model.embedding(ids), nn.InputEmbedding(V, C, L)
    found = {"InputEmbedding": (ids, embedding.token(ids), embedding(ids)),
             "FeedForward": (x, ffn.net[0](x), ffn(x)),
             "TransformerBlock": (x, nn.MultiHeadAttention(C, H)(x), nn.TransformerBlock(C, H, Cff)(x)),
             "MiniGPT": (ids, embedded, model(ids)[0])}
    assert {row[0]: [shapes(cell)[0] for cell in row[1:]] for row in table("around it")} == \
        {name: [tuple(t.shape) for t in tensors] for name, tensors in found.items()}


def test_shapes_and_numbers_of_parameters():
    C, H, Hkv, Cff, V = size("C H Hkv Cff V_vocab")
    full, grouped, ffn, norm = nn.MultiHeadAttention(C, H), nn.MultiHeadAttention(C, H, Hkv), nn.FeedForward(C, Cff), nn.LayerNorm(C)
    token = nn.Embedding(V, C)
    of = {"q_proj, out_proj": ([full.q_proj, full.out_proj], [full]),
          "k_proj, v_proj of GQA": ([grouped.k_proj, grouped.v_proj], [grouped]),
          "feed-forward 1, 2": ([ffn.net[0], ffn.net[-1]], [ffn]), "norm, token table": ([norm, token], [norm, token])}
    rows = table("parameters")
    assert [row[0] for row in rows] == list(of)
    for name, weight, bias, numbers in rows:
        layers, counted = of[name]
        assert [tuple(layer.weight.shape) for layer in layers] == spread(shapes(weight))
        assert [tuple(layer.bias.shape) for layer in layers if hasattr(layer, "bias")] == spread(shapes(bias), "none" not in bias)
        formulas = re.findall(r"`([^`]+)`", numbers)
        assert [eval(formula, {}, {k: v for k, v in LETTERS.items() if k.isidentifier()}) for formula in formulas] == \
            [sum(p.numel() for p in module.parameters()) for module in counted]


def spread(shapes, double=True):
    """One shape in a cell stands for both layers of the row."""
    return shapes * 2 if len(shapes) == 1 and double else shapes


@pytest.mark.parametrize("H", [1, 2, 3, 4, 6])
def test_the_number_of_heads_changes_no_number_of_parameters(H):
    assert sum(p.numel() for p in nn.MultiHeadAttention(24, H).parameters()) == 4 * 24 ** 2 + 4 * 24


# --- masks and positions ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("row", table("mask"), ids=lambda row: row[0])
def test_masks(row):
    _, call, shape, _, seen = row
    T = 4
    names = {**vars(masks), "T": T, "valid_tokens": torch.tensor([[True, True, True, False]] * 3),
             "segment_ids": torch.tensor([[0, 0, 1, 1]] * 3)}
    allowed = eval(call.strip("`"), names)
    assert allowed.dtype is torch.bool
    assert tuple(allowed.shape) == tuple({**LETTERS, "T": T}[letter.strip()] for letter in shape.strip("`[]").split(","))
    assert allowed.expand(3, 1, T, T)[0, 0].sum(dim=-1).tolist() == [int(n) for n in seen.split(",")]


def test_norms():
    x = torch.randn(*size("B T C"))
    norms = {"`nn.LayerNorm`": ((x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt(), nn.LayerNorm),
             "`nn.RMSNorm`": (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), nn.RMSNorm)}
    rows = table("norm")
    assert [row[0] for row in rows] == list(norms)
    for name, _, _, learned in rows:
        expected, norm = norms[name][0], norms[name][1](LETTERS["C"], eps=1e-5)
        assert torch.allclose(norm(x), expected, atol=1e-5)
        assert len(list(norm.parameters())) == len(learned.partition("`")[0].split(","))
        assert {tuple(p.shape) for p in norm.parameters()} == set(shapes(learned))


def test_positions():
    T, C, Dh, H, L = size("T C Dh H max_seq_len")
    rope = nn.RotaryEmbedding(Dh)
    queries, keys = torch.arange(LETTERS["Tq"]), torch.arange(LETTERS["Tk"])
    found = {"nn.LearnedPositions": (nn.LearnedPositions(L, C), lambda m: m.weight),
             "nn.SinusoidalPositionEncoding": (nn.SinusoidalPositionEncoding(C, L), lambda m: m.pe),
             "nn.RotaryEmbedding": (rope, lambda m: m._rows_from(torch.zeros(1, H, T, Dh), 0)[0]),
             "nn.ALiBi": (nn.ALiBi(H), lambda m: m(queries, keys)),
             "nn.T5RelativeBias": (nn.T5RelativeBias(H), lambda m: m(queries, keys))}
    rows = table("scheme")
    assert [row[1].strip("`") for row in rows] == list(found)
    for _, name, _, shape, learned in rows:
        module, applied = found[name.strip("`")]
        assert [tuple(applied(module).shape)] == shapes(shape)
        assert bool(list(module.parameters())) == (learned == "yes")


# --- conventions ------------------------------------------------------------------------------------------------------

def test_true_attends_in_the_function_and_blocks_in_pytorchs_layer():
    x = torch.randn(1, 2, 4)
    first_key_only = torch.tensor([[True, False], [True, False]])
    out = F.scaled_dot_product_attention(x, x, x, attn_mask=first_key_only)
    assert torch.allclose(out, x[:, :1].expand(1, 2, 4))
    _, weights = nn.MultiheadAttention(4, 1, batch_first=True)(x, x, x, attn_mask=~first_key_only)
    assert torch.equal(weights[0], torch.tensor([[1.0, 0.0], [1.0, 0.0]]))


def test_pytorchs_causal_is_aligned_top_left_and_ours_bottom_right():
    q, k, v = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    assert torch.allclose(F.scaled_dot_product_attention(q, k, v, is_causal=True), v[:, :, :1])
    assert torch.allclose(F.attention(q, k, v, causal=True), F.attention(q, k, v))


def test_what_a_query_that_sees_nothing_gets():
    """F.attention: zeros. nn.MultiHeadAttention: zeros if it is padding, else the bias of out_proj."""
    blind = torch.tensor([[False, False, False], [False, True, True], [False, True, True]])     # query 0 sees no key
    q = torch.randn(1, 1, 3, 4)
    out = F.attention(q, q, q, blind)
    assert torch.equal(out[0, 0, 0], torch.zeros(4)) and (out[0, 0, 1:] != 0).all()
    layer, x = nn.MultiHeadAttention(4, 1), torch.randn(1, 3, 4)
    assert torch.equal(layer(x, allowed=blind)[0, 0], layer.out_proj.bias)
    assert torch.equal(layer(x, valid_tokens=torch.tensor([[False, True, True]]))[0, 0], torch.zeros(4))


def test_outputs_at_padding_are_there_in_the_function():
    q, real = torch.randn(1, 1, 3, 4), torch.tensor([[True, True, False]])
    assert (F.attention(q, q, q, masks.padding_mask(real))[0, 0, 2] != 0).all()
