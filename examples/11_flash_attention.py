"""Attention without its table of weights.      python examples/11_flash_attention.py

Softmax needs the maximum and the sum of a whole row of scores. Here a row comes in pieces, each is used and forgotten, and the
result is the same: the idea of FlashAttention. It saves memory, not arithmetic: work is saved only by tiles that nobody
visits. Writes tiles.png and memory.png.      (guide 2.2, 6.1, 10.5)
"""
import argparse
import math
import time
import tracemalloc
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf.ops.flash_attention import Band, band_tiles
from tinygrad_tf.trace import count_flops

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-11"), help="folder for tiles.png and memory.png")
parser.add_argument("--quick", action="store_true", help="shorter sequences")
parser.add_argument("--device", help="cpu, cuda or cuda:N; memory and time are measured on the CPU")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
torch.manual_seed(0)

# --- 1. online softmax: one row, two scores at a time -------------------------------------------------------------------
scores = [1.0, 3.0, 2.0, 5.0, 4.0, 0.0]
values = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]                                  # one feature, to keep it short
m, l, acc = -math.inf, 0.0, 0.0                                                # the maximum, Σ e^(z − m), Σ e^(z − m) v so far

print("scores       max m   shrink   l = Σ e^(z − m)   acc = Σ e^(z − m) v")
for start in range(0, len(scores), 2):
    z, v = scores[start:start + 2], values[start:start + 2]
    higher = max(m, *z)
    shrink = math.exp(m - higher)                                              # brings what was summed to the new maximum
    l = l * shrink + sum(math.exp(s - higher) for s in z)
    acc = acc * shrink + sum(math.exp(s - higher) * x for s, x in zip(z, v))
    m = higher
    print(f"{z}   {m:5.0f}   {shrink:6.3f}   {l:15.3f}   {acc:19.3f}")
out, lse = acc / l, m + math.log(l)
weights = F.softmax(torch.tensor(scores), dim=0)
print(f"out = acc / l = {out:.3f}        lse = m + ln l = {lse:.3f}")
assert abs(out - (weights * torch.tensor(values)).sum().item()) < 1e-4, "as if the row had been there as a whole"
assert abs(math.exp(scores[4] - lse) - weights[4].item()) < 1e-6, "backward needs lse alone: p = e^(z − lse)"
print("The whole row at once gives the same, and from lse every weight comes back: backward keeps one number a row.\n")

# --- 2. the same function, whatever the tiles ---------------------------------------------------------------------------
q, k, v = (torch.randn(1, 2, 12, 8, requires_grad=True) for _ in range(3))     # [B, H, T, Dh]


def with_gradients(function, **options):
    """The output, and the gradients of its sum with respect to q, k and v."""
    q.grad = k.grad = v.grad = None
    out = function(q, k, v, **options)
    visited = getattr(out.node, "visited", 0)
    out.sum().backward()
    return [out, q.grad, k.grad, v.grad], visited


with torch.sdpa_backend("dense"):
    wanted, _ = with_gradients(F.scaled_dot_product_attention, is_causal=True)
print("tiles of rows × keys   visited   largest difference from dense, forward and backward")
for tile in (1, 1), (5, 3), (4, 7), (12, 12):
    found, visited = with_gradients(F.flash_attention, is_causal=True, tile=tile)
    difference = max((a - b).abs().max().item() for a, b in zip(found, wanted))
    print(f"{tile[0]:11d} × {tile[1]:<8d} {visited:7d}   {difference:.0e}")
    assert difference < 1e-5
print("It is exact: neither a window nor a low rank nor linear attention. Differences are those of rounding.\n")

# --- 3. which tiles, and in which order ---------------------------------------------------------------------------------
T, tile = 12, (3, 3)
for name, band in ("causal", Band(right=0)), ("window of 4", Band(left=3, right=0)):
    order = {(rows.start // 3, keys.start // 3): n for n, (rows, keys) in enumerate(band_tiles(T, T, band, tile), 1)}
    print(f"{name}: {len(order)} of {(T // 3) ** 2} tiles, in this order")
    for i in range(T // 3):
        print("   ", " ".join(f"{order[i, j]:2d}" if (i, j) in order else " ·" for j in range(T // 3)))
    assert len(order) == {"causal": 1 + 2 + 3 + 4, "window of 4": 1 + 2 + 2 + 2}[name]


# --- 4. memory ----------------------------------------------------------------------------------------------------------

def peak_bytes(backend, T):
    """The most that one forward and backward pass allocates, inputs aside: B = 1, H = 2, Dh = 32, causal."""
    q, k, v = (torch.randn(1, 2, T, 32, device="cpu", requires_grad=True) for _ in range(3))
    tracemalloc.start()
    with torch.sdpa_backend(backend, (64, 64) if backend == "tiled" else None):
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


lengths = (128, 256, 512, 1024) if arguments.quick else (128, 256, 512, 1024, 2048)
memory = {backend: [peak_bytes(backend, T) for T in lengths] for backend in ("dense", "tiled")}
print("\nPeak of one forward and backward pass in MiB, and how much more it is than at half of T")
for n, T in enumerate(lengths):
    grown = {backend: f"(× {found[n] / found[n - 1]:.1f})" if n else " " * 7 for backend, found in memory.items()}
    print(f"    T = {T:4d}   " + "   ".join(f"{backend} {found[n] / 2**20:7.2f} {grown[backend]}" for backend, found in memory.items()))
assert memory["dense"][-1] > 3.5 * memory["dense"][-2], "the table of scores: twice the length, four times the memory"
assert memory["tiled"][-1] < 2.3 * memory["tiled"][-2], "tiles: twice the length, twice the memory"

# --- 5. does a mask save work? ------------------------------------------------------------------------------------------
# The same window of 64 keys, twice: as a mask over all scores, and as a band that says which tiles there are.
W, lengths = 64, ((512, 1024) if arguments.quick else (512, 1024, 2048))
ways = {"full": ("dense", {}), "masked": ("dense", {"window": W}), "banded": ("tiled", {"window": W})}


def attend(way, q):
    backend, options = ways[way]
    with torch.sdpa_backend(backend, (64, 64) if backend == "tiled" else None):
        return F.scaled_dot_product_attention(q, q, q, **options)


def scores_computed(way, q):
    """Of one head: each costs two products of Dh = 32 multiply-adds, with a key and with a value; a multiply-add is two FLOPs."""
    return count_flops(lambda q: attend(way, q), q).total // (2 * 32 * 2 * 2)


def seconds(way, q):
    """The fastest of three."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        attend(way, q)
        found.append(time.perf_counter() - start)
    return min(found)


print(f"\nA window of {W} keys       scores computed               time, as a ratio to full attention")
print("      T        full      masked    banded          masked   banded")
for T in lengths:
    q = torch.randn(1, 2, T, 32, device="cpu")
    pairs = {way: scores_computed(way, q) for way in ways}
    took = {way: seconds(way, q) for way in ways}
    print(f"  {T:5d} {pairs['full']:11,} {pairs['masked']:11,} {pairs['banded']:9,}       {took['masked'] / took['full']:9.2f} "
          f"{took['banded'] / took['full']:8.2f}")
    blocks = T // 64
    assert pairs["masked"] == pairs["full"] == T * T, "a mask is laid over scores that were computed"
    assert pairs["banded"] == 64 * (64 * blocks + 63 * (blocks - 1)), "64 queries see their own 64 keys, and the 63 before them"
    assert (attend("masked", q) - attend("banded", q)).abs().max().item() < 1e-5, "and they are the same function"
print("Masked out is not left out: under the mask all scores are computed, and only the band makes work linear in T.")


# --- the pictures -------------------------------------------------------------------------------------------------------

def draw_tiles(path, T=12, size=3):
    """The tiles of a causal call over their scores, numbered as they are visited; and the maximum of the last row as it grows."""
    from matplotlib.figure import Figure
    torch.manual_seed(21)
    q, k = torch.randn(T, 8), torch.randn(T, 8)
    z = (q @ k.T / math.sqrt(8)).tolist()
    visits = band_tiles(T, T, Band(right=0), (size, size))
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow([[z[i][j] if j <= i else math.nan for j in range(T)] for i in range(T)], cmap="Blues")
    figure.colorbar(image, ax=left, label="score", shrink=0.85)
    for line in range(0, T + 1, size):
        left.plot([-0.5, T - 0.5], [line - 0.5] * 2, color="0.4", linewidth=0.8)
        left.plot([line - 0.5] * 2, [-0.5, T - 0.5], color="0.4", linewidth=0.8)
    for n, (rows, keys) in enumerate(visits, 1):
        left.text(keys.start + 1, rows.start + 1, n, ha="center", va="center", fontsize=13, color="#b30000",
                  bbox={"boxstyle": "circle,pad=0.2", "facecolor": "white", "edgecolor": "none"})
    for i in range(T // size):
        for j in range(i + 1, T // size):
            left.text(size * j + 1, size * i + 1, "not\nvisited", ha="center", va="center", fontsize=8, color="0.55")
    left.set(title="10 of 16 tiles, in the order of their visits", xlabel="key j", ylabel="query i", xticks=range(0, T, size),
             yticks=range(0, T, size), xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
    row, top = z[-1], -math.inf
    right.plot(range(T), row, "o", color="#6baed6", label="scores of the last query")
    for n, (_, keys) in enumerate(visits[-T // size:], len(visits) - T // size + 1):
        higher = max(top, *(row[j] for j in keys))
        edges = keys.start - 0.5, keys.stop - 0.5
        right.plot(edges, [higher] * 2, color="#b30000", linewidth=2, label="m after this tile" if keys.start == 0 else None)
        right.text(keys.start + 1, min(row) - 0.3, f"tile {n}\n× {math.exp(top - higher):.2f}", ha="center", va="top", color="#b30000")
        right.axvline(edges[1], color="0.4", linewidth=0.8)
        top = higher
    right.set(title="The last query: the maximum so far, and what each tile\nmultiplies the sums of the earlier ones by", xlabel="key j",
              ylabel="score", xticks=range(0, T, size), xlim=(-0.5, T - 0.5), ylim=(min(row) - 1.1, max(row) + 0.9))
    right.legend(frameon=False, loc="upper left", ncols=2)
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def draw_memory(path):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for (backend, found), color in zip(memory.items(), ("#d95f02", "#1b9e77")):
        T = [128 * 2 ** n for n in range(len(found))]
        axes.plot(T, [n / 2**20 for n in found], marker="o", color=color)
        grows = f"{backend}: grows with T{'²' if backend == 'dense' else ''}"
        axes.annotate(grows, (T[-1], found[-1] / 2**20), xytext=(-14, 0), color=color, textcoords="offset points", ha="right", va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set(title="Peak memory of causal attention, forward and backward", xlabel="T", ylabel="MiB (B = 1, H = 2, Dh = 32)",
             xticks=T, xticklabels=T)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


arguments.out.mkdir(parents=True, exist_ok=True)
draw_tiles(arguments.out / "tiles.png")
draw_memory(arguments.out / "memory.png")
print(f"\nThe pictures: {arguments.out / 'tiles.png'}, {arguments.out / 'memory.png'}")
