"""Masks: each array against a predicate written down anew, against its mod, and against the counts of the guide's table."""

import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.nn import masks

BLOCKS = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]]).bool()
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, -1, 2], [5, 5, 5, 5, 5, 5, 5]])
VALID = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]).bool()
T = 7


def segment_of(b, i):
    return SEGMENTS.tolist()[b][i]


# name: (mod, the array, may query i of row b see key j?)
PATTERNS = {
    "full": (masks.full_mod, lambda: masks.full_mask(T), lambda b, i, j: True),
    "causal": (masks.causal_mod, lambda: masks.causal_mask(T), lambda b, i, j: j <= i),
    "window 3": (masks.sliding_window_mod(3), lambda: masks.sliding_window_mask(T, 3), lambda b, i, j: max(0, i - 3 + 1) <= j <= i),
    "window 1": (masks.sliding_window_mod(1), lambda: masks.sliding_window_mask(T, width=1), lambda b, i, j: i == j),
    "radius 2": (masks.local_mod(2), lambda: masks.local_mask(T, radius=2), lambda b, i, j: abs(i - j) <= 2),
    "radius 0": (masks.local_mod(0), lambda: masks.local_mask(T, 0), lambda b, i, j: i == j),
    "blocks": (masks.block_sparse_mod(3, BLOCKS), lambda: masks.block_sparse_mask(T, 3, BLOCKS),
               lambda b, i, j: BLOCKS.tolist()[i // 3][j // 3]),
    "blocks by function": (masks.block_sparse_mod(2, lambda q, k: q >= k), lambda: masks.block_sparse_mask(T, 2, lambda q, k: q >= k),
                           lambda b, i, j: i // 2 >= j // 2),
    "global, first 2": (masks.global_token_mod(1, 2), lambda: masks.global_token_mask(T, 1, 2),
                        lambda b, i, j: abs(i - j) <= 1 or i < 2 or j < 2),
    "global, listed": (masks.global_token_mod(1, [0, 4]), lambda: masks.global_token_mask(T, 1, torch.tensor([0, 4])),
                       lambda b, i, j: abs(i - j) <= 1 or i in (0, 4) or j in (0, 4)),
    "global, causal": (masks.global_token_mod(1, [3], causal=True), lambda: masks.global_token_mask(T, 1, (3,), causal=True),
                       lambda b, i, j: j <= i and (abs(i - j) <= 1 or i == 3 or j == 3)),
    "padding": (masks.padding_mod(VALID), lambda: masks.padding_mask(VALID), lambda b, i, j: VALID.tolist()[b][j]),
    "packing": (masks.packing_mod(SEGMENTS), lambda: masks.packing_mask(SEGMENTS),
                lambda b, i, j: segment_of(b, i) == segment_of(b, j) >= 0 and j <= i),
    "packing, both ways": (masks.packing_mod(SEGMENTS, causal=False), lambda: masks.packing_mask(SEGMENTS, causal=False),
                           lambda b, i, j: segment_of(b, i) == segment_of(b, j) >= 0),
}


def written_down(predicate, Tq=T, Tk=T, first=0):
    return np.array([[[[predicate(b, first + i, j) for j in range(Tk)] for i in range(Tq)]] for b in range(2)], bool)


@pytest.mark.parametrize("name", PATTERNS)
def test_array_and_mod_are_the_pattern(name):
    mod, array, predicate = PATTERNS[name]
    expected = written_down(predicate)
    full = masks.create_mask(mod, 2, 3, T, T)
    assert full.dtype is torch.bool and tuple(full.shape) == (2, 3, T, T)
    assert (full.cpu().numpy() == expected).all()
    assert array().dtype is torch.bool
    assert (np.broadcast_to(array().cpu().numpy(), (2, 1, T, T)) == expected).all()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("Tq, offset", [(3, None), (1, None), (3, 0), (4, 2)])
def test_queries_are_the_last_positions_unless_an_offset_says_otherwise(name, Tq, offset):
    mod, _, predicate = PATTERNS[name]
    found = masks.create_mask(mod, 2, None, Tq, T, query_offset=offset)
    assert (found.cpu().numpy() == written_down(predicate, Tq, T, T - Tq if offset is None else offset)).all()


@pytest.mark.parametrize("make, predicate", [(masks.causal_mask, lambda i, j: j <= i),
                                             (lambda *a, **k: masks.sliding_window_mask(a[0], 2, *a[1:], **k), lambda i, j: i - 2 < j <= i),
                                             (lambda *a, **k: masks.local_mask(a[0], 1, *a[1:], **k), lambda i, j: abs(i - j) <= 1)])
@pytest.mark.parametrize("Tq, Tk, offset", [(2, 5, None), (5, 2, None), (3, 3, 0), (2, 5, 0), (2, 5, -1), (0, 3, None), (3, 0, None)])
def test_planes_of_fewer_queries_than_keys(make, predicate, Tq, Tk, offset):
    first = Tk - Tq if offset is None else offset
    expected = [[predicate(first + i, j) for j in range(Tk)] for i in range(Tq)]
    found = make(Tq, Tk, query_offset=offset)
    assert tuple(found.shape) == (Tq, Tk) and found.tolist() == expected


def test_rows_of_the_guide():
    """Width counts the keys, the query's own among them; radius counts those on one side of it. The guide calls both `window`."""
    def rows(allowed):
        return allowed.sum(dim=-1).tolist()
    assert rows(masks.sliding_window_mask(6, width=3)) == [1, 2, 3, 3, 3, 3]
    assert rows(masks.local_mask(6, radius=1)) == [2, 3, 3, 3, 3, 2]
    assert rows(masks.local_mask(6, radius=3)) == [4, 5, 6, 6, 5, 4]
    assert rows(masks.causal_mask(6)) == [1, 2, 3, 4, 5, 6]
    assert rows(masks.full_mask(6)) == [6] * 6


@pytest.mark.parametrize("T, W, G", [(1, 1, 1), (6, 3, 1), (32, 5, 2), (64, 7, 4), (20, 20, 3)])
def test_costs_of_the_six_kinds_of_visibility(T, W, G):
    """Guide 2.2: T², T², TW, as the blocks say, TW + TG, Tq Tk."""
    r = W // 2
    assert masks.count_visible(masks.full_mask(T)) == T * T
    assert masks.count_visible(masks.causal_mask(T)) == T * (T + 1) // 2
    assert masks.count_visible(masks.sliding_window_mask(T, W)) == T * W - W * (W - 1) // 2 <= T * W
    local = T * (2 * r + 1) - r * (r + 1) if r < T else T * T
    assert masks.count_visible(masks.local_mask(T, r)) == min(local, T * T)
    with_global = masks.count_visible(masks.global_token_mask(T, r, G))
    assert local <= with_global <= local + 2 * T * G
    assert masks.count_visible(masks.full_mask(T, 2 * T + 1)) == T * (2 * T + 1)
    size = -(-T // 2)
    nb = -(-T // size)
    diagonal = masks.block_sparse_mask(T, size, torch.eye(nb).bool())
    assert masks.count_visible(diagonal) == size ** 2 + (T - size) ** 2
    assert isinstance(masks.count_visible(diagonal), int)


def test_masks_combine():
    def arrays(combine, *names):
        return masks.create_mask(combine(*(PATTERNS[n][0] for n in names)), 2, 1, T, T).cpu().numpy()
    names = ["causal", "radius 2", "padding", "packing, both ways"]
    separate = [masks.create_mask(PATTERNS[n][0], 2, 1, T, T).cpu().numpy() for n in names]
    assert (arrays(masks.and_masks, *names) == np.logical_and.reduce(separate)).all()
    assert (arrays(masks.or_masks, *names) == np.logical_or.reduce(separate)).all()
    assert (arrays(masks.and_masks, "causal") == separate[0]).all()
    assert (arrays(masks.and_masks, "causal", "packing, both ways") == arrays(masks.and_masks, "packing")).all()
    assert (arrays(masks.and_masks, "causal", "radius 2") == masks.sliding_window_mask(T, 3).cpu().numpy()).all()


def test_a_mod_may_depend_on_the_head():
    def wider_for_later_heads(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= h
    found = masks.create_mask(wider_for_later_heads, None, 3, 4, 4)
    assert [found[0, r].tolist() for r in range(3)] == [masks.local_mask(4, r).tolist() for r in range(3)]


@pytest.mark.parametrize("T, W", [(12, 3), (12, 2), (9, 4), (7, 7), (5, 9), (2, 2), (1, 3)])
def test_layers_needed_to_see_everything(T, W):
    """⌈(T − 1) / (W − 1)⌉; 6 for T = 12 and W = 3 (guide 2.2)."""
    allowed, layers = masks.sliding_window_mask(T, W), 0
    while not masks.receptive_field(allowed, layers)[-1].all():
        layers += 1
    assert layers == -(-(T - 1) // (W - 1))
    assert (T, W) != (12, 3) or layers == 6
    assert (masks.receptive_field(allowed, T) == masks.causal_mask(T)).all()


def test_a_global_token_is_two_layers_from_everywhere():
    assert not masks.receptive_field(masks.local_mask(12, 1), 2).all()
    assert masks.receptive_field(masks.global_token_mask(12, 1, [5]), 2).all()
    assert (masks.receptive_field(masks.full_mask(3) & False, 4) == torch.eye(3).bool()).all()        # the residual alone


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_receptive_field_is_what_changes(layers):
    torch.manual_seed(0)
    stack = nn.ModuleList([nn.MultiHeadAttention(8, 2, window=3) for _ in range(layers)]).double()
    x = torch.randn(1, 9, 8, dtype=torch.float64)

    def run(x):
        for layer in stack:
            x = x + layer(x)
        return x.detach().cpu().numpy()
    before, changed = run(x), np.zeros((9, 9), bool)
    for j in range(9):
        other = x.clone()
        other[:, j] += 1.0
        changed[:, j] = (run(other) != before).any(axis=(0, 2))
    assert (changed == masks.receptive_field(masks.sliding_window_mask(9, 3), layers).cpu().numpy()).all()


@pytest.mark.torch
@pytest.mark.parametrize("mod", [masks.causal_mod, masks.sliding_window_mod(3), masks.local_mod(2), masks.global_token_mod(1, 2)])
@pytest.mark.parametrize("Tq, Tk", [(1, 4), (1, 6), (4, 4), (4, 6)])
def test_mods_are_those_of_flex_attention(mod, Tq, Tk):
    pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    theirs = flex.create_mask(mod, 2, 3, Tq, Tk, device="cpu")
    ours = masks.create_mask(mod, 2, 3, Tq, Tk, query_offset=0)
    assert tuple(theirs.shape) == tuple(ours.shape) and theirs.tolist() == ours.tolist()


@pytest.mark.parametrize("call, error, words", [
    (lambda: masks.sliding_window_mask(4, 0), ValueError, "width must be at least 1"),
    (lambda: masks.sliding_window_mask(4, 2.5), TypeError, "whole number"),
    (lambda: masks.sliding_window_mask(4, True), TypeError, "whole number"),
    (lambda: masks.local_mask(4, -1), ValueError, "radius must be at least 0"),
    (lambda: masks.causal_mask(-1), ValueError, "at least 0"),
    (lambda: masks.causal_mask(3, query_offset=0.5), TypeError, "query_offset"),
    (lambda: masks.block_sparse_mask(7, 3, BLOCKS[:2]), ValueError, r"\(3, 3\)"),
    (lambda: masks.block_sparse_mask(7, 3, BLOCKS.float()), TypeError, "bool tensor"),
    (lambda: masks.block_sparse_mask(7, 0, BLOCKS), ValueError, "block_size"),
    (lambda: masks.global_token_mask(4, 1, [4]), ValueError, "beyond the 4 tokens"),
    (lambda: masks.global_token_mask(4, 1, torch.tensor(5)), ValueError, "beyond the 4 tokens"),
    (lambda: masks.global_token_mask(4, 1, torch.tensor(1.5)), TypeError, "whole number"),
    (lambda: masks.global_token_mask(4, 1, torch.tensor([[1]])), TypeError, "whole number"),
    (lambda: masks.global_token_mask(4, 1, None), TypeError, "whole number"),
    (lambda: masks.global_token_mask(4, 1, [-1]), ValueError, "at least 0"),
    (lambda: masks.global_token_mask(4, 1, 5), ValueError, "beyond the 4 tokens"),
    (lambda: masks.padding_mask(VALID.long()), TypeError, "bool tensor"),
    (lambda: masks.padding_mask(VALID[0]), ValueError, r"\[B, T\]"),
    (lambda: masks.packing_mask(SEGMENTS[0]), ValueError, r"\[B, T\]"),
    (lambda: masks.packing_mask(SEGMENTS.float()), ValueError, "whole numbers"),
    (lambda: masks.and_masks(), ValueError, "at least one"),
    (lambda: masks.create_mask(lambda b, h, q, k: q - k, 1, 1, 2, 2), TypeError, "bool tensor"),
    (lambda: masks.create_mask(lambda b, h, q, k: True, 1, 1, 2, 2), TypeError, "bool tensor"),
    (lambda: masks.create_mask(lambda b, h, q, k: SEGMENTS > 0, 1, 1, 2, 2), ValueError, "broadcasts to"),
    (lambda: masks.count_visible(torch.ones(2, 2)), TypeError, "bool tensor"),
    (lambda: masks.receptive_field(masks.causal_mask(2, 3)), ValueError, r"\[T, T\]"),
    (lambda: masks.receptive_field(masks.causal_mask(2), -1), ValueError, "layers")])
def test_what_is_no_mask_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


TABLES = {
    "packing": masks.packing_mod(torch.tensor([[0, 1]]), causal=False),
    "packing, causal": masks.packing_mod(torch.tensor([[0, 1]])),
    "block_sparse": masks.block_sparse_mod(1, torch.ones(2, 2).bool()),
    "block_sparse, wide": masks.block_sparse_mod(2, torch.ones(1, 1).bool()),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_query_before_the_first_key_is_in_no_table(name):
    """A negative place would be counted from the end of the table."""
    assert tuple(masks.create_mask(TABLES[name], 1, 1, 2, 2).shape) == (1, 1, 2, 2)
    assert masks.create_mask(TABLES[name], 1, 1, 0, 2).numel() == 0
    for Tq, Tk, offset in (4, 2, None), (1, 2, -1), (2, 2, -2):
        with pytest.raises(IndexError, match=f"{name.split(',')[0]}: a query stands before the first key"):
            masks.create_mask(TABLES[name], 1, 1, Tq, Tk, offset)
    with pytest.raises(IndexError):
        masks.create_mask(TABLES[name], 1, 1, 1, 2, 2)


@pytest.mark.parametrize("global_tokens", [1, [0], torch.tensor(1), torch.tensor([0]), range(1)], ids=repr)
def test_a_query_before_the_first_key_is_no_global_token(global_tokens):
    found = masks.create_mask(masks.global_token_mod(0, global_tokens), 1, 1, 4, 2)[0, 0]
    assert found.tolist() == [[True, False], [True, False], [True, True], [True, True]]     # of the queries at −2, −1, 0, 1
