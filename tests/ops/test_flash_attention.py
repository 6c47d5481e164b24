"""Attention in tiles: equal to dense in everything but memory, the tiles that it visits, and the choice among backends."""
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from device import host, share_memory
from twins import assert_leaves_memory_alone

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf import nn
from tinygrad_tf.gradcheck import gradcheck
from tinygrad_tf.nn import masks
from tinygrad_tf.ops import flash_attention as flash_module
from tinygrad_tf.ops import sdpa
from tinygrad_tf.ops.flash_attention import Band, band_tiles, keep_mask
from tinygrad_tf.ops.sdpa import sdpa_backend
from tinygrad_tf.trace import count_flops, saved_bytes

pytestmark = pytest.mark.filterwarnings("error")
TILES = [(1, 1), (5, 3), (4, 7), (12, 12), None]
B, H, DH, DV = 2, 4, 3, 5
PATTERNS = {"none": {}, "causal": {"causal": True}, "window": {"window": 3}, "local": {"window": (2, 1)}}
SIZES = [(7, 7), (5, 13), (11, 6)]
OFFSETS = {"top-left": lambda Tq, Tk: 0, "ends": lambda Tq, Tk: Tk - Tq, "before": lambda Tq, Tk: -4, "beyond": lambda Tq, Tk: Tk + 2}


# --- a plain reference in float64 --------------------------------------------------------------------------------------

def visible_by_position(options, Tq, Tk, offset):
    p, j = np.arange(Tq)[:, None] + offset, np.arange(Tk)
    window = options.get("window")
    left, right = (window - 1, 0) if isinstance(window, int) else window or (Tk + Tq + 99, Tk + Tq + 99)
    return (j >= p - left) & (j <= p + (0 if options.get("causal") else right))


def reference(q, k, v, visible, bias, keep, dout):
    """[out, dq, dk, dv, dbias], with a copy of its key head for each query head, and the whole table of weights."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    z = np.where(visible, q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + bias, -np.inf)
    e = np.exp(z - np.maximum(z.max(axis=-1, keepdims=True, initial=-1e30), -1e30))
    p = e / np.maximum(e.sum(axis=-1, keepdims=True), 1e-300)
    dp = dout @ v.swapaxes(-1, -2) * keep
    dz = p * (dp - (dp * p).sum(axis=-1, keepdims=True))
    dk, dv = dz.swapaxes(-1, -2) @ q / math.sqrt(q.shape[-1]), (p * keep).swapaxes(-1, -2) @ dout
    dk, dv = (x.reshape(len(x), -1, group, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    return [(p * keep) @ v, dz @ k / math.sqrt(q.shape[-1]), dk, dv, dz]


def odd_blocks(b, h, q_idx, kv_idx):
    """A mask of blocks that differs from head to head."""
    return (q_idx // 3 + kv_idx // 2 + h) % 3 > 0


def assert_near(found, wanted, dtype, name):
    """max|Δ| / max|wanted|. Where a query sees one key alone its dq is 0, by cancelling: |Δ| is held against what cancels, of size 1."""
    tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype]
    assert found.dtype == dtype and found.shape == wanted.shape
    error, largest = np.abs(found - wanted).max(initial=0), np.abs(wanted).max(initial=0)
    assert error <= tolerance * max(largest, 0.5), f"{name}: {error:.1e} beside {largest:.1e}"


def check_case(pattern, offset, size, valid, kind, biased, Hkv, p, tile, dtype, seed):
    """One row of the table, forward and backward, in tiles and dense."""
    random, (Tq, Tk) = np.random.default_rng(seed), size
    arrays = [random.normal(size=s) for s in ((B, H, Tq, DH), (B, Hkv, Tk, DH), (B, Hkv, Tk, DV), (1, H, Tq, Tk), (B, H, Tq, DV))]
    arrays = [a.astype(dtype).astype(np.float64) for a in arrays]
    tokens, allowed = random.random((B, Tk)) > 0.3, random.random((B, 1, Tq, Tk)) > 0.4
    first = OFFSETS[offset](Tq, Tk)
    seen = visible_by_position(PATTERNS[pattern], Tq, Tk, first)
    options = {**PATTERNS[pattern], "query_offset": first, "dropout_p": p}
    if valid:
        seen, options["valid_tokens"] = seen & tokens[:, None, None], torch.tensor(tokens)
    if kind == "allowed":
        seen, options["allowed"] = seen & allowed, torch.tensor(allowed)
    if kind == "blocks":
        h, i, j = np.ogrid[:H, first:first + Tq, :Tk]
        seen, options["mask_mod"] = seen & odd_blocks(0, h, i, j), odd_blocks
    for backend in ("tiled", "dense") if p == 0 else ("tiled",):
        q, k, v, bias = (torch.tensor(a.astype(dtype), requires_grad=True) for a in arrays[:4])
        with sdpa_backend(backend, tile if backend == "tiled" else None):
            out = F.attention(q, k, v, bias=bias if biased else None, **options)
        keep = host(keep_mask(out)).reshape(B, H, Tq, Tk) if p else 1.0
        out.backward(torch.tensor(arrays[4].astype(dtype)))
        wanted = reference(*arrays[:3], seen, arrays[3] if biased else 0, keep, arrays[4])
        found = [out.detach(), q.grad, k.grad, v.grad, bias.grad]
        wanted[4] = wanted[4].sum(axis=0, keepdims=True)
        for name, a, b in zip(("out", "dq", "dk", "dv", "dbias"), found, wanted):
            if a is not None:
                assert_near(host(a), b, dtype, f"{backend} {name}: {pattern, offset, size, valid, kind, biased, Hkv, p, tile, dtype}")
        assert (bias.grad is not None) == biased


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("Hkv", [4, 2, 1])
def test_tiles_equal_dense_over_all_options(pattern, offset, Hkv):
    """The product of all options; tiles and dtypes take turns, so that each option meets each of them."""
    table = itertools.product(SIZES, (False, True), (None, "allowed", "blocks"), (False, True), (0.0, 0.4))
    turn = itertools.count(list(PATTERNS).index(pattern) + 3 * list(OFFSETS).index(offset) + Hkv)
    for size, valid, kind, biased, p in table:
        n = next(turn)
        check_case(pattern, offset, size, valid, kind, biased, Hkv, p, TILES[n % 5], ("float32", "float64")[n // 5 % 2], n)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [(1, 1), (12, 12), (13, 14), (1, 30), (30, 1)])
def test_each_tile_at_sizes_that_fit_and_that_do_not(tile, dtype, size):
    for pattern, kind, p in itertools.product(PATTERNS, (None, "blocks"), (0.0, 0.4)):
        check_case(pattern, "ends", size, True, kind, True, 2, p, tile, dtype, 1)


@pytest.mark.parametrize("q, k, v", [((3, 2), (4, 2), (4, 5)), ((2, 3, 2), (2, 4, 2), (2, 4, 2)),
                                     ((2, 2, 2, 3, 2), (2, 4, 2), (2, 1, 1, 4, 2)),
                                     ((1, 2), (1, 2), (1, 1)), ((3, 2), (3, 4, 2), (4, 2)), ((2, 3, 2), (4, 2), (5, 1, 4, 2)),
                                     ((0, 3, 4), (0, 3, 4), (0, 3, 4)), ((2, 0, 4), (2, 3, 4), (2, 3, 4)),
                                     ((2, 3, 4), (2, 0, 4), (2, 0, 4)),
                                     ((2, 3, 0), (2, 3, 0), (2, 3, 4)), ((2, 3, 4), (2, 3, 4), (2, 3, 0))], ids=str)
@pytest.mark.parametrize("mask", [None, "causal", "bool", "one number", "float"])
def test_all_leading_axes_and_sizes_that_dense_takes(q, k, v, mask):
    found = []
    for backend in ("dense", "tiled"):
        random = np.random.default_rng(0)
        tensors = [torch.tensor(random.normal(size=s), requires_grad=True) for s in (q, k, v)]
        size = (q[-2], k[-2])
        masks_ = {"bool": torch.tensor(random.random(size) > 0.5), "one number": torch.tensor(0.7, dtype=torch.float64, requires_grad=True),
                  "float": torch.tensor(random.normal(size=size), requires_grad=True)}
        with sdpa_backend(backend):
            out = F.scaled_dot_product_attention(*tensors, masks_.get(mask), is_causal=mask == "causal")
        out.backward(torch.tensor(np.random.default_rng(1).normal(size=out.shape)))
        tensors += [m for m in [masks_.get(mask)] if m is not None and m.requires_grad]
        found.append([host(out.detach()), *(host(t.grad) for t in tensors)])
    for a, b in zip(*found):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_flash_attention_is_scaled_dot_product_attention(tile):
    q, k, v = (torch.randn(2, 4, 12, 8) for _ in range(3))
    for options in ({}, {"is_causal": True}, {"attn_mask": masks.sliding_window_mask(12, 4)}, {"is_causal": True, "query_offset": 3},
                    {"window": 5}, {"window": (2, None)}, {"scale": 0.3}):
        wanted = F.scaled_dot_product_attention(q, k, v, **options)
        assert_near(host(F.flash_attention(q, k, v, **options, tile=tile)), host(wanted), "float32", str(options))
    few = k[:, :2], v[:, :1]
    wanted = F.scaled_dot_product_attention(q, *few, is_causal=True, enable_gqa=True)
    assert_near(host(F.flash_attention(q, *few, is_causal=True, enable_gqa=True, tile=tile)), host(wanted), "float32", "grouped")


def test_window_and_offset_of_scaled_dot_product_attention_are_those_of_a_mask():
    q, k, v = torch.randn(2, 5, 4), torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    for offset in (0, 4, -2, 11):
        for window, mask in ((3, masks.sliding_window_mask(5, 3, Tk=9, query_offset=offset)), ((1, 1), masks.local_mask(5, 1, 9, offset)),
                             ((None, 0), masks.causal_mask(5, 9, offset))):
            found = F.scaled_dot_product_attention(q, k, v, window=window, query_offset=offset)
            assert (found == F.scaled_dot_product_attention(q, k, v, mask)).all()
            half = torch.randn(5, 9) > 0
            found = F.scaled_dot_product_attention(q, k, v, half, window=window, query_offset=offset)
            assert (found == F.scaled_dot_product_attention(q, k, v, mask & half)).all()
            added = torch.randn(5, 9)
            found = F.scaled_dot_product_attention(q, k, v, added, window=window, query_offset=offset)
            assert (found == F.scaled_dot_product_attention(q, k, v, added.masked_fill(~mask, -math.inf))).all()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_gradcheck(p):
    q, k, v = (torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)

    def flash(q, k, v, bias):
        torch.manual_seed(1)
        return F.flash_attention(q, k, v, bias, p, window=3, tile=(2, 3))
    assert gradcheck(flash, (q, k, v, bias))


def test_float16_is_computed_in_float32():
    q, k = ((torch.randn(1, 8, 64) * 40).to(torch.float16) for _ in range(2))           # q · k is beyond float16
    v = torch.randn(1, 8, 4).to(torch.float16).requires_grad_()
    y = F.flash_attention(q, k, v, scale=1.0, tile=(3, 3))
    y.sum().backward()
    assert y.dtype == v.grad.dtype == torch.float16
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.detach().float(), scale=1.0)
    np.testing.assert_allclose(host(y.detach().float()), host(wanted), atol=2e-3)


@pytest.mark.host("groups of heads are for the CPU")
@pytest.mark.parametrize("at_once", [1, 32, 64, 96])
def test_heads_in_groups_are_all_heads_at_once(at_once, monkeypatch):
    """Also grouped, with a bias and a mask for each head, and what dropout draws."""
    random, found = np.random.default_rng(0), []
    q, k, v, bias = (random.normal(size=s) for s in ((3, 4, 9, 5), (3, 2, 9, 5), (3, 2, 9, 5), (1, 4, 9, 9)))
    allowed = torch.tensor(random.random((3, 1, 9, 9)) > 0.3)
    for size in (1 << 17, at_once):
        monkeypatch.setattr(flash_module, "AT_ONCE", size)
        torch.manual_seed(0)
        tensors = [torch.tensor(a, requires_grad=True) for a in (q, k, v, bias)]
        with sdpa_backend("tiled", (4, 4)):
            y = F.attention(*tensors[:3], allowed, bias=tensors[3], dropout_p=0.3)
        (y ** 2).sum().backward()
        found.append([host(y.detach()), *(host(t.grad) for t in tensors)])
    for a, b in zip(*found):
        np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", [0.1, 7.9, 8.1, 60.0, -60.0])
def test_scores_that_rise_or_fall_from_tile_to_tile(step):
    """The maximum of the first tile serves for later ones, or does not."""
    q, k = torch.ones(1, 1, 4, 1), (torch.arange(12.0) * step).reshape(1, 1, 12, 1)
    v = torch.randn(1, 1, 12, 3)
    wanted = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    assert_near(host(F.flash_attention(q, k, v, scale=1.0, tile=(2, 1))), host(wanted), "float32", str(step))


# --- five at once --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens", [None, [[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8], [[1, 0, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]]],
                         ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_rope_causal_grouped_heads_a_window_and_tiles_at_once(tokens, tile):
    """All five of guide 18.1, in one layer, and with padding: the same numbers and gradients as the dense table of weights."""
    valid = None if tokens is None else torch.tensor(tokens, dtype=torch.bool)
    found = []
    for backend in ("dense", "tiled"):
        torch.manual_seed(1)
        layer = nn.MultiHeadAttention(16, 4, 2, rope=nn.RotaryEmbedding(4), window=3).double()
        x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
        with sdpa_backend(backend, tile if backend == "tiled" else None):
            out = layer(x, causal=True, valid_tokens=valid)
        assert ops_of(out) & {"Attention", "TiledAttention"} == {"Attention" if backend == "dense" else "TiledAttention"}
        (out ** 2).sum().backward()
        found.append([host(out.detach()), host(x.grad), *(host(p.grad) for p in layer.parameters())])
    for a, b in zip(*found):
        np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-11)


def ops_of(out):
    """The names of the operations that made a tensor."""
    found, todo = set(), [out.node]
    while todo:
        node = todo.pop()
        if hasattr(node, "inputs"):
            found.add(node.name)
            todo += node.inputs
    return found


@pytest.mark.host("measures NumPy's memory")
def test_a_layer_with_padding_never_builds_the_mask():
    T = 2048
    layer, x = nn.MultiHeadAttention(8, 1, window=64), torch.randn(1, T, 8)
    valid = torch.ones(1, T, dtype=torch.bool)
    valid[:, :100] = False
    assert peak_bytes(lambda: layer(x, causal=True, valid_tokens=valid)) < T * T / 2        # a boolean mask alone would be T²


# --- memory ----------------------------------------------------------------------------------------------------------------

def peak_bytes(run):
    run()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def step(T, backend):
    q, k, v = (torch.zeros(1, 2, T, 16, requires_grad=True) for _ in range(3))
    with sdpa_backend(backend, (64, 64) if backend == "tiled" else None):
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


@pytest.mark.host("measures NumPy's memory")
def test_memory_grows_with_T_and_not_with_its_square():
    small, large = (peak_bytes(lambda T=T: step(T, "tiled")) for T in (1024, 2048))
    assert large < 2.2 * small and large < peak_bytes(lambda: step(2048, "dense")) / 8


def test_only_inputs_out_and_one_number_a_row_are_kept():
    kept = []
    for T in (64, 128):
        q, k, v = (torch.randn(1, 2, T, 16, requires_grad=True) for _ in range(3))
        y = F.flash_attention(q, k, v, is_causal=True)
        assert sum(a is not None for a in y.node.saved) == 5 and y.node.saved[0] is q.array
        kept.append(saved_bytes(y)["TiledAttention"])
    assert kept == [4 * 2 * T * (16 + 1) for T in (64, 128)]


def test_grouped_heads_are_not_copied():
    q, k, v = torch.randn(1, 6, 3, 4, requires_grad=True), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    node = F.flash_attention(q, k, v, enable_gqa=True).node.inputs[0]
    assert share_memory(node.saved[1], k) and share_memory(node.saved[2], v)


def test_it_leaves_memory_alone_and_runs_twice():
    q, k, v = (np.random.default_rng(0).normal(size=(2, 7, 4)) for _ in range(3))
    assert_leaves_memory_alone(lambda *x: F.flash_attention(*x, is_causal=True, tile=(3, 2)), q, k, v)
    assert_leaves_memory_alone(lambda *x: F.flash_attention(*x, tile=(3, 2)), q, k, v, q[0] @ k[0].T)
    assert_leaves_memory_alone(lambda *x: F.flash_attention(*x, None, 0.5, tile=(3, 2)), q, k, v)


def test_two_runs_are_identical():
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        q, k, v = (torch.randn(2, 3, 40, 8, requires_grad=True) for _ in range(3))
        y = F.flash_attention(q, k, v, None, 0.3, True, tile=(16, 8))
        y.backward(torch.randn(*y.shape))
        results.append([host(t) for t in (y.detach(), q.grad, k.grad, v.grad)])
    for a, b in zip(*results):
        assert (a == b).all()


@pytest.mark.host("a process of its own, on the CPU")
def test_the_benchmark_runs(tmp_path):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "examples" / "benchmarks" / "flash.py"), "--T", "64", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and "1/" in done.stdout.splitlines()[-1]
    row, = json.loads((tmp_path / "flash.json").read_text())["rows"]
    assert all(row[way]["bytes"] > 0 < row[way]["seconds"][0] for way in ("dense", "tiled", "dense window", "tiled window"))


# --- what is visited ---------------------------------------------------------------------------------------------------------

def by_hand(Tq, Tk, band, tile):
    """How many tiles of a whole grid hold a pair that the band allows."""
    seen = np.zeros((Tq, Tk), bool)
    for i, j in itertools.product(range(Tq), range(Tk)):
        p = i + band.query_offset
        seen[i, j] = (band.left is None or j >= p - band.left) and (band.right is None or j <= p + band.right)
    return sum(seen[a:a + tile[0], b:b + tile[1]].any() for a in range(0, Tq, tile[0]) for b in range(0, Tk, tile[1]))


@pytest.mark.parametrize("band", [Band(), Band(0, None, 0), Band(0, 2, 0), Band(3, 1, 1), Band(-5, 4, 0), Band(20, 3, 0), Band(0, None, 3)])
def test_tiles_beyond_the_band_are_not_visited(band):
    for Tq, Tk, tile in ((12, 12, (3, 3)), (7, 13, (4, 2)), (13, 5, (2, 4)), (9, 9, (1, 1)), (9, 9, (20, 20))):
        tiles = band_tiles(Tq, Tk, band, tile)
        assert len(tiles) == by_hand(Tq, Tk, band, tile)
        covered = np.zeros((Tq, Tk), int)
        for rows, keys in tiles:
            covered[rows.start:rows.stop, keys.start:keys.stop] += 1
            assert 0 < len(rows) <= tile[0] and 0 < len(keys) <= tile[1]
        assert covered.max(initial=0) <= 1                      # no pair twice
        whole = band.allowed(range(Tq), range(Tk), np)
        assert (covered[np.ones((Tq, Tk), bool) if whole is None else whole] == 1).all()
        q, k = torch.randn(Tq, 2, requires_grad=True), torch.randn(Tk, 2)
        y = F.flash_attention(q, k, k, window=(band.left, band.right), query_offset=band.query_offset, tile=tile)
        assert y.node.visited == len(tiles) and y.node.pairs == covered.sum()


def test_a_causal_mask_halves_the_tiles_and_a_window_makes_them_linear():
    visited = {}
    for name, options in (("full", {}), ("causal", {"is_causal": True}), ("window", {"window": 16})):
        for T in (64, 128):
            q = torch.randn(T, 2, requires_grad=True)
            visited[name, T] = F.flash_attention(q, q, q, tile=(8, 8), **options).node.visited
    assert [visited["full", T] for T in (64, 128)] == [64, 256] and [visited["causal", T] for T in (64, 128)] == [36, 136]
    assert visited["window", 128] - visited["window", 64] == 8 * 3 and visited["window", 64] == 1 + 2 + 6 * 3


def test_tiles_that_a_mask_leaves_empty_are_skipped():
    allowed = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    allowed[:, :, :4, 8:] = False
    allowed[0, :, 4:8, :4] = False                              # in one of two rows of the batch: still visited
    q, k, v = (torch.randn(2, 3, 12, 4, requires_grad=True) for _ in range(3))
    valid = torch.tensor([[True] * 8 + [False] * 4] * 2)
    with sdpa_backend("tiled", (4, 4)):
        assert F.attention(q, k, v, allowed).node.visited == 8
        assert F.attention(q, k, v, valid_tokens=valid).node.visited == 6
        assert F.attention(q, k, v, bias=torch.zeros(12, 12).masked_fill(~allowed[0, 0], -math.inf)).node.visited == 7
        assert F.attention(q, k, v, mask_mod=masks.block_sparse_mod(4, torch.eye(3, dtype=torch.bool))).node.visited == 3
        assert F.attention(q, k, v, allowed, causal=True, valid_tokens=valid).node.visited == 5
    with sdpa_backend("tiled", (4, 4)), torch.no_grad():
        assert F.attention(q, k, v, allowed & False).abs().max().item() == 0


def test_full_tiles_are_not_masked():
    """The rule of a full tile: no mask is made where the band hides nothing."""
    causal = Band(0, None, 0)
    assert causal.allowed(range(8, 12), range(0, 9), np) is None and causal.allowed(range(8, 12), range(0, 10), np) is not None
    assert Band(0, 4, 0).allowed(range(8, 10), range(5, 9), np) is None and Band(0, 3, 0).allowed(range(8, 10), range(5, 9), np) is not None


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 5}])
def test_flops_are_those_of_the_visited_tiles(options):
    q = torch.randn(1, 2, 20, 4, requires_grad=True)
    visited = F.flash_attention(q, q, q, **options, tile=(4, 4)).node.pairs
    counted = count_flops(lambda q: F.flash_attention(q, q, q, **options, tile=(4, 4)), q).total
    assert counted == 2 * 2 * visited * (4 + 4)


# --- rows that see nothing, and what must not leak ---------------------------------------------------------------------------

@pytest.mark.parametrize("tile", [(1, 1), (2, 3), None], ids=str)
@pytest.mark.parametrize("junk", [0.0, math.nan, math.inf])
def test_rows_that_see_nothing(tile, junk):
    """Zeros, a log-sum-exp of −inf, no gradient; whatever stands in them."""
    allowed = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    q, k, v = (torch.randn(2, n, 5) for n in (3, 4, 4))
    q[:, 1] = junk
    for t in (q, k, v):
        t.requires_grad_()
    y = F.flash_attention(q, k, v, allowed, tile=tile)
    lse = host(y.node.saved[-1])[..., 0]
    assert (lse[:, 1] == -np.inf).all() and np.isfinite(lse[:, [0, 2]]).all()
    upstream = torch.randn(2, 3, 5)
    upstream[:, 1] = junk
    y.backward(upstream)
    assert (host(y.detach())[:, 1] == 0).all() and (host(q.grad)[:, 1] == 0).all()
    assert all(np.isfinite(host(t)).all() for t in (y.detach(), q.grad, k.grad, v.grad))


def two_texts(how):
    """Positions 0 to 2 and 3 to 5 are two packed texts that must not see each other; causal inside each."""
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    allowed = masks.packing_mask(segments)
    return {"allowed": {"allowed": allowed}, "mod": {"mask_mod": masks.packing_mod(segments)},
            "bias": {"bias": torch.zeros(2, 1, 6, 6).masked_fill(~allowed, -math.inf)}}[how]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poisoned", ["q", "k", "v", "dout", "qkv"])
@pytest.mark.parametrize("how", ["allowed", "mod", "bias"])
@pytest.mark.parametrize("tile", [(1, 1), (2, 4), None], ids=str)
def test_nothing_leaks_through_a_mask(junk, poisoned, how, tile):
    """What stands in the second text changes nothing of the first: value, gradients of q, k and v; with dropout and without."""
    clean = {name: np.random.default_rng(i).normal(size=(2, 2, 6, 4)).astype(np.float32) for i, name in enumerate(("q", "k", "v", "dout"))}
    dirty = {name: a.copy() for name, a in clean.items()}
    for name in ("q", "k", "v") if poisoned == "qkv" else (poisoned,):
        dirty[name][:, :, 4] = junk
    for p in (0.0, 0.5):
        results = []
        for arrays in (clean, dirty):
            q, k, v = (torch.tensor(arrays[n], requires_grad=True) for n in "qkv")
            torch.manual_seed(1)
            with sdpa_backend("tiled", tile):
                y = F.attention(q, k, v, dropout_p=p, **two_texts(how))
            y.backward(torch.tensor(arrays["dout"]))
            results.append([host(t.detach())[:, :, :3] for t in (y, q.grad, k.grad, v.grad)])
        for name, wanted, found in zip(("out", "dq", "dk", "dv"), *results):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("tile", [(1, 1), (2, 2), (3, 4), None], ids=str)
def test_what_is_seen_is_not_hidden(junk, poisoned, tile):
    """NaN and inf that a query sees reach it and its gradients where they do in dense."""
    found = []
    for backend in ("dense", "tiled"):
        random = np.random.default_rng(0)
        tensors = [torch.tensor(random.normal(size=(6, 3)).astype(np.float32)) for _ in range(3)]
        tensors[poisoned][2, 1] = junk
        for t in tensors:
            t.requires_grad_()
        with sdpa_backend(backend, tile if backend == "tiled" else None):
            y = F.scaled_dot_product_attention(*tensors, is_causal=True)
        y.sum().backward()
        found.append([np.isfinite(host(t)) for t in (y.detach(), *(t.grad for t in tensors))])
    for name, a, b in zip(("out", "dq", "dk", "dv"), *found):
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert junk == 1e38 or not found[1][0].all()


# --- dropout -----------------------------------------------------------------------------------------------------------------

def test_the_keep_mask_does_not_depend_on_the_tiles():
    q = torch.randn(2, 3, 11, 4, requires_grad=True)
    seen = []
    for tile in TILES:
        torch.manual_seed(9)
        seen.append(host(keep_mask(F.flash_attention(q, q, q, dropout_p=0.25, tile=tile))))
    assert all((a == seen[0]).all() for a in seen) and set(np.unique(seen[0])) == {np.float32(0), np.float32(1 / 0.75)}
    assert seen[0].shape == (2, 3, 11, 11) and abs((seen[0] > 0).mean() - 0.75) < 0.05
    assert len({a.tobytes() for a in seen[0].reshape(6, -1)}) == 6          # every head draws its own


def test_each_call_draws_anew_and_a_seed_repeats_it():
    q = torch.randn(1, 8, 4)

    def call():
        return host(F.flash_attention(q, q, q, dropout_p=0.5))
    torch.manual_seed(1)
    first, second = call(), call()
    torch.manual_seed(1)
    assert (call() == first).all() and (first != second).any()


def test_dropout_of_everything_and_outside_of_probability():
    q = torch.randn(2, 3, 4, requires_grad=True)
    y = F.flash_attention(q, q, q, dropout_p=1.0)
    y.sum().backward()
    assert y.abs().max().item() == 0 and q.grad.abs().max().item() == 0
    for p in (-0.5, 1.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.flash_attention(q, q, q, dropout_p=p)


def test_keep_mask_says_what_it_wants():
    q = torch.randn(2, 3, 4, requires_grad=True)
    for y in (F.flash_attention(q, q, q), F.scaled_dot_product_attention(q, q, q, None, 0.5), q, q * 2):
        with pytest.raises(ValueError, match="keep_mask: expected the result of attention in tiles with dropout"):
            keep_mask(y)


# --- masks that are asked twice --------------------------------------------------------------------------------------------------

def test_a_mask_mod_that_changes_its_mind_is_found_out():
    segments = torch.tensor([[0, 0, 1, 1]])
    q = torch.randn(1, 1, 4, 2, requires_grad=True)
    with sdpa_backend("tiled", (2, 2)):
        y = F.attention(q, q, q, mask_mod=masks.packing_mod(segments))
    segments[0, 1] = 1
    with pytest.raises(RuntimeError, match="mask_mod allows other keys of queries 0 to 1"):
        y.sum().backward()


@pytest.mark.parametrize("what", ["allowed", "valid_tokens", "bias"])
def test_a_write_to_a_mask_between_forward_and_backward_is_found_out(what):
    value = {"allowed": torch.ones(4, 4, dtype=torch.bool), "valid_tokens": torch.ones(1, 4, dtype=torch.bool),
             "bias": torch.zeros(4, 4)}[what]
    q = torch.randn(1, 1, 4, 2, requires_grad=True)
    with sdpa_backend("tiled"):
        y = F.attention(q, q, q, **{what: value})
    value.zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


def test_a_mask_mod_is_no_step_of_the_model():
    """What it does in a tile is in no graph and in no trace."""
    limit, q = torch.tensor(1.5, requires_grad=True), torch.randn(1, 1, 4, 2)
    with sdpa_backend("tiled", (2, 2)):
        traced = torch.trace.trace(lambda q: F.attention(q, q, q, mask_mod=lambda b, h, i, j: (i - j) * limit < 2), q)
    assert [row.op for row in traced] == ["input", "TiledAttention"]


# --- the choice -----------------------------------------------------------------------------------------------------------------

def chosen(T=6, **options):
    q = torch.randn(1, 1, T, 4, requires_grad=True)
    return F.attention(q, q, q, **options).node.name


@pytest.mark.host("the sizes are those of the CPU")
def test_the_size_decides(monkeypatch):
    monkeypatch.setattr(sdpa, "DENSE_SCORES", 64)
    monkeypatch.setattr(sdpa, "DENSE_SCORES_OF_A_BAND", 16)
    assert [chosen(T) for T in (1, 8, 9)] == ["Attention", "Attention", "TiledAttention"]
    assert [chosen(T, causal=True) for T in (4, 5)] == [chosen(T, window=2) for T in (4, 5)] == ["Attention", "TiledAttention"]
    assert [chosen(T, causal=True, dropout_p=0.1) for T in (8, 9)] == ["Attention", "TiledAttention"]
    with sdpa_backend("dense"):
        assert chosen(100) == "Attention"
    q = torch.randn(1, 1, 9, 4, requires_grad=True)
    assert F.scaled_dot_product_attention(q, q, q).node.name == "TiledAttention"
    assert "TiledAttention" in ops_of(nn.MultiHeadAttention(4, 2)(torch.randn(1, 9, 4)))


def test_the_limits_of_dense_are_those_of_the_device_and_of_the_work_that_tiles_save():
    causal, window, radius = Band(0, None, 0), Band(0, 3, 0), Band(0, 2, 2)
    assert all(sdpa._dense_scores(who, 0.0, on_gpu=False) == sdpa.DENSE_SCORES_OF_A_BAND for who in (causal, window, radius))
    assert sdpa._dense_scores(Band(5), 0.0, on_gpu=False) == sdpa._dense_scores(causal, 0.1, on_gpu=False) == sdpa.DENSE_SCORES
    assert all(sdpa._dense_scores(who, p, on_gpu=True) == sdpa.DENSE_SCORES_ON_GPU for who in (Band(), causal) for p in (0.0, 0.1))


def test_scores_that_are_asked_for_stay_dense():
    with sdpa_backend("tiled"):
        q = torch.randn(1, 1, 6, 4, requires_grad=True)
        assert "AttentionWeights" in ops_of(F.attention(q, q, q, return_weights=True)[0])
        assert "Attention" in ops_of(F.attention(q, q, q, score_mod=lambda score, *where: score))


def test_backends_nest_and_end():
    assert chosen() == "Attention"
    with sdpa_backend("tiled"):
        assert chosen() == "TiledAttention"
        with sdpa_backend("dense"):
            assert chosen() == "Attention"
        with sdpa_backend(None):
            assert chosen() == "Attention"
        assert chosen() == "TiledAttention"
        with pytest.raises(KeyError), sdpa_backend("dense"):
            raise KeyError
        assert chosen() == "TiledAttention"
    assert chosen() == "Attention"


def test_a_backend_belongs_to_its_thread():
    """Two threads in two backends at the same time, step by step; a third knows of neither."""
    gate, found = threading.Barrier(3, timeout=20), {}

    def work(name):
        with sdpa_backend(name):
            gate.wait()
            found[name] = chosen()
            gate.wait()
    threads = [threading.Thread(target=work, args=(name,)) for name in ("tiled", "dense")]
    for t in threads:
        t.start()
    gate.wait()
    found["none"] = chosen()
    gate.wait()
    for t in threads:
        t.join()
    assert found == {"tiled": "TiledAttention", "dense": "Attention", "none": "Attention"}


def test_it_is_exported_where_it_is_looked_for():
    assert torch.sdpa_backend is sdpa_backend is F.sdpa_backend


Q = torch.randn(1, 4, 6, 8)


@pytest.mark.parametrize("call, error, words", [
    (lambda: sdpa_backend("flash").__enter__(), ValueError, "'dense', 'tiled', 'cuda', 'emulator' or None, got 'flash'"),
    (lambda: sdpa_backend("dense", (2, 2)).__enter__(), ValueError, "tile is for 'tiled'"),
    (lambda: sdpa_backend(None, (2, 2)).__enter__(), ValueError, "tile is for 'tiled'"),
    *[(lambda tile=tile: F.flash_attention(Q, Q, Q, tile=tile), ValueError, "two positive whole numbers")
      for tile in (3, (3,), (0, 3), (2.0, 2), "ab", (True, 2))],
    (lambda: F.flash_attention(Q, Q, Q, window=0), ValueError, "width must be at least 1"),
    (lambda: F.flash_attention(Q, Q, Q, window=(1, -1)), ValueError, "side of window must be at least 0"),
    (lambda: F.flash_attention(Q, Q, Q, window=(1, 2, 3)), ValueError, r"\(left, right\)"),
    (lambda: F.flash_attention(Q, Q, Q, window="wide"), TypeError, "width must be a whole number, got 'wide'"),
    (lambda: F.flash_attention(Q, Q, Q, query_offset=1.5), TypeError, "query_offset must be a whole number"),
    (lambda: F.flash_attention(Q, Q, Q, torch.ones(3, 6, dtype=torch.bool)), RuntimeError, r"attn_mask \(3, 6\) does not broadcast"),
    (lambda: F.flash_attention(Q, Q[:, :3], Q[:, :3]), RuntimeError, "enable_gqa=True"),
    (lambda: F.flash_attention(Q, Q, Q, Q[0, 0] @ Q[0, 0].T, is_causal=True), RuntimeError, "drop is_causal"),
    (lambda: F.attention(Q, Q, Q, valid_tokens=torch.ones(1, 5, dtype=torch.bool)), ValueError, r"valid_tokens.*\[B, Tk\] = \[1, 6\]"),
    (lambda: F.attention(Q, Q, Q, valid_tokens=torch.ones(1, 6)), ValueError, "valid_tokens must be a boolean")])
def test_wrong_calls(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.host("the kernels here are emulated")
@pytest.mark.parametrize("options, words", [
    ({"bias": torch.zeros(6, 6)}, "bias"), ({"allowed": torch.ones(6, 6, dtype=torch.bool)}, "boolean mask"),
    ({"dropout_p": 0.5}, "dropout"), ({"mask_mod": masks.causal_mod}, "mask_mod")])
def test_what_a_kernel_cannot_serve_is_refused_when_it_was_forced(options, words):
    with sdpa_backend("emulator"), pytest.raises(RuntimeError, match=rf"sdpa_backend\('emulator'\).*because.*{words}.*'tiled'"):
        F.attention(Q, Q, Q, **options)
    wide, double = torch.randn(1, 1, 2, 200), Q.double()
    for x, reason in ((wide, "128"), (double, "float64"), (Q[0], "4 axes")):
        with sdpa_backend("emulator"), pytest.raises(RuntimeError, match=rf"because.*{reason}"):
            F.scaled_dot_product_attention(x, x, x)


@pytest.mark.host("the kernels here are emulated")
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: the emulator compiles kernels with it")
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 3, "query_offset": 1}, {"window": (1, 2), "query_offset": -2},
                                     {"causal": True, "valid_tokens": torch.tensor([[True] * 3 + [False] * 2, [False] + [True] * 4])}])
def test_the_emulated_kernels_agree_with_dense_and_with_tiles(options):
    """Forward and backward, grouped heads, Tq ≠ Tk, queries that see nothing."""
    found = {}
    for backend in ("dense", "tiled", "emulator"):
        torch.manual_seed(2)
        q, k, v = (torch.randn(2, heads, n, 8, requires_grad=True) for heads, n in ((4, 4), (2, 5), (2, 5)))
        with sdpa_backend(backend):
            out = F.attention(q, k, v, **options)
        (out ** 2).sum().backward()
        found[backend] = [host(t.detach()) for t in (out, q.grad, k.grad, v.grad)]
    for backend in ("tiled", "emulator"):
        for a, b, name in zip(found[backend], found["dense"], ("out", "dq", "dk", "dv")):
            assert_near(a, b, "float32", f"{backend} {name}")


@pytest.mark.host("a tensor on the CPU")
def test_the_kernels_of_a_gpu_are_not_for_the_cpu():
    with sdpa_backend("cuda"), pytest.raises(RuntimeError, match=r"query is on the CPU.*\.to\('cuda'\).*sdpa_backend\('emulator'\)"):
        F.scaled_dot_product_attention(Q, Q, Q)


@pytest.mark.host("the stand-in for a kernel is NumPy")
def test_what_the_kernels_are_given(monkeypatch):
    """Bands, real keys and the scale as they are; a mask of keys alone, [B, 1, 1, Tk], as valid_tokens; heads ungrouped."""
    given = []

    class Apply:
        @staticmethod
        def apply(*arguments):
            given.append(arguments)
            return arguments[0]
    monkeypatch.setattr(sdpa, "KernelAttention", Apply)
    valid = torch.tensor([[True] * 5 + [False]])
    with sdpa_backend("emulator"):
        F.attention(Q, Q[:, :2], Q[:, :2], causal=True, query_offset=2, valid_tokens=valid, scale=0.5)
        F.scaled_dot_product_attention(Q, Q, Q, valid[:, None, None], window=3)
    (q, k, v, tokens, band, scale), (_, _, _, as_keys, window, _) = given
    assert q.shape == Q.shape and k.shape == v.shape == (1, 2, 6, 8) and tokens is valid and band == (2, None, 0) and scale == 0.5
    assert as_keys.shape == (1, 6) and (as_keys == valid).all() and window == (0, 2, 0)


def test_wide_heads_on_a_gpu_are_told_of_once(monkeypatch):
    monkeypatch.setattr(sdpa, "_warned", set())
    wide = torch.randn(1, 1, 2, 129)
    with pytest.warns(UserWarning, match="heads of 129 features are too wide"):
        sdpa._warn_of_wide_heads(wide, wide)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa._warn_of_wide_heads(wide, wide)
        sdpa._warn_of_wide_heads(Q, Q)


# --- scores far from 0: z − m must not round z away, and backward must meet the z of forward ----------------------------------------

def forced(backend, tile=None):
    def attend(*x, **options):
        with sdpa_backend(backend, tile) if tile else sdpa_backend(backend):
            return F.scaled_dot_product_attention(*x, **options)
    return attend


@pytest.mark.parametrize("low", [-1e4, -1e6, -1e9, -3e38])
@pytest.mark.parametrize("where", ["bias", "keys"])
def test_first_keys_far_below_the_others(where, low):
    """As a padding mask of large negative numbers on the left: what was the maximum of the first tiles must not stay in the scores."""
    def run(attend):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 40, 8) for _ in range(3))
        bias = torch.zeros(1, 1, 1, 40)
        if where == "bias":
            bias[..., :20] = low
        else:                                               # their scores alone are that low
            q[..., 0], k[..., 0] = 1.0, 0.0
            k[..., :20, 0] = max(low, -1e9)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, attn_mask=bias)
        out.backward(torch.ones_like(out))
        return [host(out.detach().array), *(host(x.grad.array) for x in leaves)]
    for a, b in zip(run(forced("tiled", (8, 8))), run(forced("dense")), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * max(1, np.abs(b).max())


@pytest.mark.parametrize("factor", [1e2, 1e4, 1e7])
def test_gradients_of_large_scores(factor):
    """dv is a product with the weights themselves: forward's and backward's are equal where both round z alike."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 80, 16) for _ in range(3))
    found = []
    for attend in forced("tiled", (16, 16)), forced("dense"):
        leaves = [x.clone().requires_grad_() for x in (q * factor, k, v)]
        attend(*leaves, is_causal=True).sum().backward()
        found.append(host(leaves[2].grad.array))
    assert np.abs(found[0] - found[1]).max() <= 2e-4 * np.abs(found[1]).max()
