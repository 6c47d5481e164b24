"""Every combination of heads, masks and positions in one table, against a plain reference.

heads × sight × rows × position. The mask of a query is what its sight (all, causal, window) and its row (whole, padded on the
left or right, packed) both allow. The reference is NumPy with a loop over heads. Its gradient needs no backward: NumPy's numbers may be
complex, and for an analytic f, Im f(x + i·ε) / ε is f'(x) to the last digit, since nothing is subtracted.
"""
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.generation import KVCache
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.nn import masks

B, T, C, H, DH = 2, 7, 16, 4, 4
PADDED = 3                                                      # places of padding in the first row
WINDOW, BUCKETS, FARTHEST = 3, 8, 6

HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}                          # the number of key and value heads
SIGHTS = ("all", "causal", "window")
ROWS = ("whole", "left", "right", "packed")
POSITIONS = ("none", "learned", "sinusoidal", "rope interleaved", "rope half-split", "alibi", "t5")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}         # of the largest number of the reference

VALID = {"left": np.arange(T) >= np.array([[PADDED], [0]]), "right": np.arange(T) < np.array([[T - PADDED], [T]])}
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])
PLACES = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 0, 1]])      # within each text

# What is left out of each table, with the reason; a reason is tested as well as the rest.
EXCLUDED = {
    "equal": {},
    "future": {("sight", "all"): "not causal: every query sees the later tokens too"},
    "cached": {("sight", "all"): "not causal: a token would see keys that have not come yet"},
}


class Cell(NamedTuple):
    heads: str
    sight: str
    rows: str
    position: str

    def __str__(self):
        return ", ".join(self)

    def excluded(self, table):
        return any(getattr(self, axis) == value for axis, value in EXCLUDED[table])


PRODUCT = list(itertools.starmap(Cell, itertools.product(HEADS, SIGHTS, ROWS, POSITIONS)))
TABLES = {table: [cell for cell in PRODUCT if not cell.excluded(table)] for table in EXCLUDED}


def every_cell(table):
    return pytest.mark.parametrize("cell", TABLES[table], ids=str)


def test_the_tables_are_whole():
    """Tried and excluded cells together are the product; the numbers stand here so that none goes missing unseen."""
    assert len(PRODUCT) == len(set(PRODUCT)) == 3 * 3 * 4 * 7 == 252
    for table, tried in {"equal": 252, "future": 168, "cached": 168}.items():
        excluded = [cell for cell in PRODUCT if cell.excluded(table)]
        reasons = {f"{axis} {value}: {reason}" for (axis, value), reason in EXCLUDED[table].items()}
        print(f"{table}: {len(PRODUCT)} cells = {len(TABLES[table])} tried + {len(excluded)} excluded {reasons or ''}")
        assert len(TABLES[table]) == tried and tried + len(excluded) == len(PRODUCT)
        assert all(any(getattr(cell, axis) == value for cell in excluded) for axis, value in EXCLUDED[table])


# --- the library --------------------------------------------------------------------------------------------------------

class Positioned(nn.Module):
    """Attention with any position scheme, whether it is added to x, turns q and k, or is added to the scores."""

    def __init__(self, num_kv_heads, sight, position):
        super().__init__()
        self.causal = sight != "all"
        self.added = {"learned": nn.LearnedPositions, "sinusoidal": lambda n, dim: nn.SinusoidalPositionEncoding(dim, n)}.get(
            position, lambda n, dim: None)(T + PADDED, C)
        self.attention = nn.MultiHeadAttention(
            C, H, num_kv_heads, window=WINDOW if sight == "window" else None,
            rope=nn.RotaryEmbedding(DH, layout=position[5:].replace("-", "_")) if position.startswith("rope") else None,
            relative_bias={"alibi": nn.ALiBi(H, bidirectional=not self.causal),
                           "t5": nn.T5RelativeBias(H, BUCKETS, FARTHEST, bidirectional=not self.causal)}.get(position))
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)             # large enough for all of it to matter

    def forward(self, x, valid_tokens=None, position_ids=None, segment_ids=None, cache=None):
        """position_ids are those of the new tokens; so are the places at which learned positions are looked up."""
        if self.added is not None:
            counted = nn.positions.count_positions(x.shape[1] + (0 if cache is None else cache.length), valid_tokens)
            x = self.added(x, counted[..., -x.shape[1]:] if position_ids is None else position_ids)
        mod = None if segment_ids is None else masks.packing_mod(segment_ids, causal=False)
        return self.attention(x, causal=self.causal, valid_tokens=valid_tokens, position_ids=position_ids, mask_mod=mod, cache=cache)


class ThroughTheCall(Positioned):
    """The same by hand with one F.attention, the biases as score functions, padding as a mod."""

    def forward(self, x, valid_tokens=None, position_ids=None, segment_ids=None):
        layer, where = self.attention, torch.arange(x.shape[1]) if position_ids is None else position_ids
        where = where if valid_tokens is None else nn.positions.count_positions(x.shape[1], valid_tokens)
        x = x if self.added is None else self.added(x, where)
        q = layer.q_proj(x).unflatten(-1, (H, DH)).transpose(1, 2)
        k, v = layer.keys_and_values(x)
        if layer.rope is not None:
            q, k = layer.rope(q, where), layer.rope(k, where)
        mods = [masks.full_mod]
        if valid_tokens is not None:
            mods.append(masks.padding_mod(valid_tokens))
        if segment_ids is not None:
            mods.append(masks.packing_mod(segment_ids, causal=self.causal))
        out = F.attention(q, k, v, mask_mod=masks.and_masks(*mods), causal=self.causal, window=layer.window, score_mod=self.score_mod())
        out = layer.out_proj(out.transpose(1, 2).flatten(2))
        return out if valid_tokens is None else out * valid_tokens[..., None]

    def score_mod(self):
        bias = self.attention.relative_bias
        if bias is None:
            return None
        return lambda score, b, h, q_idx, kv_idx: score + bias(q_idx[:, 0], kv_idx[0])[h[0, :, 0, 0]]


def model_of(cell, kind=Positioned, dtype=torch.float64):
    torch.manual_seed(1)
    return kind(HEADS[cell.heads], cell.sight, cell.position).to(dtype)


def given(rows):
    """The arguments that describe such rows."""
    if rows == "packed":
        return {"segment_ids": torch.tensor(SEGMENTS), "position_ids": torch.tensor(PLACES)}
    return {} if rows == "whole" else {"valid_tokens": torch.tensor(VALID[rows])}


def run_with_gradient(model, x, dy, **options):
    """(y, dL/dx of L = Σ y · dy)"""
    x = x.detach().clone().requires_grad_()
    y = model(x, **options)
    y.backward(dy)
    return y.detach(), x.grad


# --- the reference ------------------------------------------------------------------------------------------------------

def places(rows):
    """The position of each token: padding is not counted.    [B, T]"""
    if rows in VALID:
        return np.maximum(np.cumsum(VALID[rows], axis=1) - 1, 0)
    return PLACES if rows == "packed" else np.tile(np.arange(T), (B, 1))


def may_see(cell, b, i, j):
    if cell.sight != "all" and j > i or cell.sight == "window" and j <= i - WINDOW:
        return False
    return SEGMENTS[b, i] == SEGMENTS[b, j] if cell.rows == "packed" else cell.rows == "whole" or VALID[cell.rows][b, j]


def turn(x, at, layout):
    """RoPE as products of complex planes, one pair of features at a time.    x: [..., B, T, DH]"""
    y = x.copy()
    for pair in range(DH // 2):
        a, b = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + DH // 2)
        cos, sin = (f(at * 10000 ** (-2 * pair / DH)) for f in (np.cos, np.sin))
        y[..., a], y[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
    return y


def bucket(steps, bidirectional):
    """T5's bucket of the distance j − i, in whole numbers and one logarithm."""
    n = BUCKETS // 2 if bidirectional else BUCKETS
    first = n if bidirectional and steps > 0 else 0
    d = abs(steps) if bidirectional else max(-steps, 0)
    if d < n // 2:
        return first + d
    return first + min(n - 1, n // 2 + int(math.log(d / (n // 2)) / math.log(FARTHEST / (n // 2)) * (n - n // 2)))


def bias_of(cell, model, h, steps):
    """What head h adds to a score of a query at i and a key at j = i + steps."""
    both = cell.sight == "all"
    if cell.position == "alibi":
        return -2.0 ** (-8 * (h + 1) / H) * (abs(steps) if both else max(-steps, 0))
    if cell.position == "t5":
        return model.attention.relative_bias.table.weight[bucket(steps, both), h].item()
    return 0.0


def reference(cell, model, x):
    """y of x [..., B, T, C], real or complex."""
    layer, at = model.attention, places(cell.rows)
    if cell.position == "learned":
        x = x + model.added.weight.detach().cpu().numpy()[at]
    if cell.position == "sinusoidal":
        angles = at[..., None] * 10000.0 ** (-np.arange(0, C, 2) / C)
        x = x + np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(B, T, C).astype(np.float32)     # a buffer in float32
    seen = np.array([[[may_see(cell, b, i, j) for j in range(T)] for i in range(T)] for b in range(B)])

    def project(linear, x, head=None):
        part = slice(None) if head is None else slice(head * DH, (head + 1) * DH)
        return x @ linear.weight.detach().cpu().numpy()[part].T + linear.bias.detach().cpu().numpy()[part]
    heads = []
    for h in range(H):
        shared = h * HEADS[cell.heads] // H
        q, k, v = project(layer.q_proj, x, h), project(layer.k_proj, x, shared), project(layer.v_proj, x, shared)
        if cell.position.startswith("rope"):
            q, k = (turn(y, at, cell.position[5:]) for y in (q, k))
        bias = np.array([[[bias_of(cell, model, h, int(at[b, j] - at[b, i])) for j in range(T)] for i in range(T)] for b in range(B)])
        e = np.exp(q @ k.swapaxes(-1, -2) / math.sqrt(DH) + bias) * seen
        total = e.sum(axis=-1, keepdims=True)
        heads.append(e / np.where(total == 0, 1, total) @ v)
    y = project(layer.out_proj, np.concatenate(heads, axis=-1))
    return y * VALID[cell.rows][..., None] if cell.rows in VALID else y


def reference_gradient(cell, model, x, dy, step=1e-30):
    """dL/dx of L = Σ y · dy: all elements at once, one copy of x for each."""
    moved = x + 1j * step * np.eye(x.size).reshape(x.size, *x.shape)
    return ((reference(cell, model, moved).imag / step) * dy).sum(axis=(1, 2, 3)).reshape(x.shape)


# --- equal ----------------------------------------------------------------------------------------------------------------

def largest_error(found, expected):
    """Relative to the largest number that is expected."""
    return np.abs(found.double().cpu().numpy() - expected).max() / np.abs(expected).max()


def errors_of(cell):
    """{(kind, dtype, what): largest error}, for outputs and gradients of the input."""
    x, dy = torch.randn(B, T, C), torch.randn(B, T, C)
    model = model_of(cell, dtype=torch.float64)
    arrays = x.double().cpu().numpy(), dy.double().cpu().numpy()
    y, dx = reference(cell, model, arrays[0]), reference_gradient(cell, model, *arrays)
    errors = {}
    for kind, dtype in itertools.product((Positioned, ThroughTheCall), TOLERANCE):
        found = run_with_gradient(model_of(cell, kind, dtype), x.to(dtype), dy.to(dtype), **given(cell.rows))
        assert found[0].dtype is found[1].dtype is dtype
        for what, ours, expected in zip(("output", "gradient"), found, (y, dx)):
            errors[kind, dtype, what] = largest_error(ours, expected)
    return errors


@every_cell("equal")
def test_every_cell_is_equal_to_the_reference(cell):
    for (kind, dtype, what), error in errors_of(cell).items():
        assert error < TOLERANCE[dtype], f"{what} of {kind.__name__} in {dtype}"


@pytest.mark.parametrize("position", POSITIONS[1:])
def test_the_table_tells_schemes_and_masks_apart(position):
    """Otherwise a scheme or a mask that does nothing would be equal to itself."""
    x = torch.randn(B, T, C, dtype=torch.float64)

    def y(heads="GQA", sight="causal", rows="whole", position=position):
        cell = Cell(heads, sight, rows, position)
        return model_of(cell)(x, **given(rows))
    base = y()
    others = [y(position=other) for other in POSITIONS if other != position]
    others += [y(sight=other) for other in SIGHTS if other != "causal"] + [y(rows=other) for other in ROWS[1:]]
    assert all(((base - other).abs() > 1e-3).any() for other in others)


# --- the future -----------------------------------------------------------------------------------------------------------

def in_chunks(model, x, chunks, valid_tokens=None, position_ids=None, segment_ids=None):
    """What a model makes of x that comes in parts, the earlier ones in a cache."""
    cache, parts, end = KVCache(1, T).layer(0), [], 0
    with torch.no_grad():
        for n in chunks:
            start, end = end, end + n
            parts.append(model(x[:, start:end], cache=cache, valid_tokens=None if valid_tokens is None else valid_tokens[:, :end],
                               position_ids=None if position_ids is None else position_ids[:, start:end],
                               segment_ids=None if segment_ids is None else segment_ids[:, :end]))
    return torch.cat(parts, dim=1)


def first_to_move(run, x):
    """For each t: the first place where an output changes after all tokens from t on have changed; T where none does."""
    before, moved = run(x), []
    for t in range(1, T):
        changed = x.clone()
        changed[:, t:] = torch.randn(B, T - t, C, dtype=x.dtype)
        places = (run(changed) != before).any(dim=-1).any(dim=0).nonzero()[:, 0].tolist()
        moved.append(min(places, default=T))
    return moved


@every_cell("future")
@pytest.mark.parametrize("chunks", [None, (2, 1, 4)], ids=["whole", "cached"])
def test_a_future_token_changes_no_earlier_output(cell, chunks):
    """Not by a single bit; the output at its own place does change."""
    model, options = model_of(cell), given(cell.rows)

    def run(x):
        return model(x, **options) if chunks is None else in_chunks(model, x, chunks, **options)
    assert first_to_move(run, torch.randn(B, T, C, dtype=torch.float64)) == list(range(1, T))


@pytest.mark.parametrize("cell", [cell for cell in PRODUCT if cell.excluded("future")], ids=str)
def test_in_an_excluded_cell_it_does(cell):
    model = model_of(cell)
    moved = first_to_move(lambda x: model(x, **given(cell.rows)), torch.randn(B, T, C, dtype=torch.float64))
    first = [min(list(text).index(text[t]) for text in SEGMENTS) if cell.rows == "packed" else 0 for t in range(1, T)]
    assert moved == first


@every_cell("cached")
def test_cached_is_uncached(cell):
    model, x = model_of(cell), torch.randn(B, T, C, dtype=torch.float64)
    whole = model(x, **given(cell.rows))
    for chunks in ((1,) * T, (2, 1, 4), (T,)):
        assert largest_error(in_chunks(model, x, chunks, **given(cell.rows)), whole.detach().cpu().numpy()) < 1e-12


# --- padding and packing ------------------------------------------------------------------------------------------------------

mixes = pytest.mark.parametrize("heads, sight, position", list(itertools.product(HEADS, SIGHTS, POSITIONS)))


def assert_close(found, expected):
    for a, b in zip(found, expected):
        assert a.shape == b.shape and largest_error(a, b.cpu().numpy()) < 1e-12


@mixes
def test_left_right_and_no_padding_are_one(heads, sight, position):
    """Outputs and gradients of real tokens, whatever stands in the padding; padding itself gives zeros and gets none."""
    model = model_of(Cell(heads, sight, "whole", position))
    x, dy = torch.randn(B, T, C, dtype=torch.float64), torch.randn(B, T, C, dtype=torch.float64)
    alone = run_with_gradient(model, x, dy)
    for left in 0, 1, PADDED:
        real = slice(left, left + T)
        padded_x, padded_dy = (1e3 * torch.randn(B, T + PADDED, C, dtype=torch.float64) for _ in range(2))
        padded_x[:, real], padded_dy[:, real] = x, dy
        valid = torch.zeros(B, T + PADDED, dtype=torch.bool)
        valid[:, real] = True
        found = run_with_gradient(model, padded_x, padded_dy, valid_tokens=valid)
        assert_close([f[:, real] for f in found], alone)
        assert all((f[~valid] == 0).all() for f in found)


@mixes
def test_packed_texts_are_separate_runs(heads, sight, position):
    model = model_of(Cell(heads, sight, "packed", position))
    x, dy = torch.randn(B, T, C, dtype=torch.float64), torch.randn(B, T, C, dtype=torch.float64)
    packed = run_with_gradient(model, x, dy, **given("packed"))
    for b in range(B):
        for text in np.unique(SEGMENTS[b]):
            places = torch.tensor(np.flatnonzero(SEGMENTS[b] == text))
            assert_close([f[b, places] for f in packed], [f[0] for f in run_with_gradient(model, x[b, places][None], dy[b, places][None])])


# --- whole models ---------------------------------------------------------------------------------------------------------------

V_VOCAB = 11
MODELS = {
    "MiniGPT, post-norm": lambda: MiniGPT(V_VOCAB, T + PADDED, C, H, 24, 2, dropout=0.0),
    "MiniGPT, pre-norm": lambda: MiniGPT(V_VOCAB, T + PADDED, C, H, 24, 2, dropout=0.0, norm_first=True),
    **{f"Decoder, {name}": lambda n=n: Decoder(V_VOCAB, T + PADDED, C, H, 24, 2, num_kv_heads=n) for name, n in HEADS.items()},
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def large(make):
    """In float64, its weights so large that every token matters."""
    model = make().double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10.0) if p.ndim > 1 else p.add_(0.1 * torch.randn(p.shape))
    return model


def padded_ids(ids, left):
    """ids [B, T] with PADDED places of other ids around them, `left` of them in front, and valid_tokens."""
    together, valid = torch.randint(V_VOCAB, (B, T + PADDED)), torch.zeros(B, T + PADDED, dtype=torch.bool)
    together[:, left:left + T], valid[:, left:left + T] = ids, True
    return together, valid


def read(model, ids, chunks=None, valid=None):
    """logits of ids, in one piece or in chunks with a cache."""
    with torch.no_grad():
        if chunks is None:
            return model(ids, valid_tokens=valid)[0]
        cache, ends = KVCache(2, T + PADDED), list(itertools.accumulate(chunks))
        return torch.cat([model(ids[:, end - n:end], cache=cache, valid_tokens=None if valid is None else valid[:, :end])[0]
                          for n, end in zip(chunks, ends)], dim=1)


@every_model
@pytest.mark.parametrize("left", [None, 0, PADDED], ids=["whole", "right", "left"])
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_a_future_token_changes_no_earlier_logits(make, left, cached):
    model, ids = large(make), torch.randint(V_VOCAB, (B, T))
    ids, valid = (ids, None) if left is None else padded_ids(ids, left)
    chunks = ((left or 0) + 2, 1, ids.shape[1] - (left or 0) - 3) if cached else None
    before = read(model, ids, chunks, valid)
    for t in range(left or 0, (left or 0) + T):
        changed = ids.clone()
        changed[:, t:] = (ids[:, t:] + 1) % V_VOCAB
        moved = (read(model, changed, chunks, valid) != before).any(dim=-1)
        assert not moved[:, :t].any() and moved[:, t].all()


@every_model
@pytest.mark.parametrize("chunks", [None, (4, 1, 5), (3,) + (1,) * T], ids=["whole", "cached", "token by token"])
def test_padding_changes_no_logits(make, chunks):
    model, ids = large(make), torch.randint(V_VOCAB, (B, T))
    alone = read(model, ids).cpu().numpy()
    for left in 0, 1, PADDED:
        together, valid = padded_ids(ids, left)
        assert largest_error(read(model, together, chunks, valid)[:, left:left + T], alone) < 1e-11


@every_model
def test_padding_changes_no_gradient(make):
    model, ids, targets = large(make), torch.randint(V_VOCAB, (B, T)), torch.randint(V_VOCAB, (B, T))
    expected = None
    for left in None, 0, 1, PADDED:
        together, valid = (ids, None) if left is None else padded_ids(ids, left)
        wanted = targets if left is None else torch.full((B, T + PADDED), -100)
        wanted[:, slice(None) if left is None else slice(left, left + T)] = targets
        model.zero_grad()
        model(together, wanted, valid_tokens=valid)[1].backward()
        gradients = [p.grad.cpu().numpy().copy() for p in model.parameters()]
        expected = gradients if expected is None else expected
        largest = max(np.abs(alone).max() for alone in expected)            # that of b_k is 0: it moves all scores of a query alike
        for found, alone in zip(gradients, expected):
            np.testing.assert_allclose(found, alone, rtol=0, atol=1e-12 * largest)
