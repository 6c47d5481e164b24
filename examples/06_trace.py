"""What flows through attention, and what it costs.      python examples/06_trace.py

    trace(module, x)     every intermediate with its shape in letters     count_parameters, count_flops, saved_bytes, kv_cache_bytes

Two tables of the guide come out of real runs: the four steps of attention (4.1), and one head beside several (6); then who
sees whom and what it costs (2.2), parameters, FLOPs and memory (6.1), the KV cache (9.8). Writes trace.json.
"""
import argparse
import json
import math
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.nn import masks
from tinygrad_tf.trace import attention_flops, compare_shapes, count_flops, count_parameters, kv_cache_bytes, saved_bytes, trace

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="shorter sequences")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-06"), help="folder for trace.json")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
B, T, C, H = 2, 5, 12, 3
Dh = C // H


class SingleHead(nn.Module):
    """Attention as one writes it the first time. Nothing in it knows of `trace`."""

    def __init__(self, dim):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        Q, K, V = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        scores = Q @ K.transpose(-2, -1)
        scores = scores / math.sqrt(x.shape[-1])
        attn = torch.softmax(scores, dim=-1)
        return attn @ V


# --- 1. Everything that flows, and the four steps -----------------------------------------------------------------------
torch.manual_seed(0)
x = torch.randn(B, T, C)
single = trace(SingleHead(C), x)
print(single)
print("\nThe four steps of attention, one head:")
print(single.attention_steps())
assert [shape for _, _, shape in single.attention_steps()] == ["[B, T, T]"] * 3 + ["[B, T, C]"]

# --- 2. One head beside several. The library's attention is one fused operation: its steps are computed again ------------
multi = trace(nn.MultiHeadAttention(C, H), x)
print(f"\nOne head beside H = {H}:")
print(compare_shapes(single, multi))
assert multi["scores"].letters == "[B, H, T, T]" and multi["O"].letters == single["X"].letters

# --- 3. More heads cost no parameters -------------------------------------------------------------------------------------
print("\nParameters, C = 48:")
for heads in 1, 4, 8:
    counts = count_parameters(nn.TransformerBlock(48, heads, 4 * 48))
    print(f"H = {heads}   attention {counts['attention']:,} = 4 C² + 4 C   feed-forward {counts['ffn']:,} = 8 C² + 5 C")
    assert counts["attention"] == 4 * 48 ** 2 + 4 * 48 and counts["ffn"] == 8 * 48 ** 2 + 5 * 48

# --- 4. Where the work is: projections grow with T, scores and A V with T² -------------------------------------------------
print("\n    T   projections   scores and A V   saved for backward")
layer, lengths = nn.MultiHeadAttention(C, H), (8, 24, 48) if arguments.quick else (8, 24, 48, 96, 192, 384)
for n in lengths:
    data = torch.randn(1, n, C)
    flops = count_flops(layer, data)
    projections = sum(flops[f"{name}_proj"] for name in ("q", "k", "v", "out"))
    kept = saved_bytes(layer(data))
    print(f"{n:5d}   {projections:11,}   {flops.total - projections:14,}   {kept.total:,} bytes, of which A {4 * H * n * n:,}")
    assert projections == 8 * n * C * C and flops.total - projections == 4 * n * n * C and kept.total >= 4 * H * n * n
print(f"At T = 2 C = {2 * C}, scores and A V cost as much as all four projections; beyond it, more.")

# --- 5. Who sees whom, and the pairs that a kernel which skips the rest would compute ---------------------------------------
n, W, G = 64, 8, 2
blocks = torch.eye(8, dtype=torch.bool)
modes = {
    "full": (masks.full_mask(n), n * n),
    "causal": (masks.causal_mask(n), n * (n + 1) // 2),
    "sliding window": (masks.sliding_window_mask(n, W), n * W - W * (W - 1) // 2),
    "block-sparse": (masks.block_sparse_mask(n, 8, blocks), 8 * 8 * 8),
    "local + global": (masks.global_token_mask(n, W // 2, G), None),
    "cross, Tk = 16": (masks.full_mask(n, 16), n * 16),
}
print(f"\nT = {n}, W = {W}, G = {G}:   pairs seen   FLOPs of scores and A V for one head")
for name, (mask, expected) in modes.items():
    pairs = masks.count_visible(mask)
    print(f"{name:27s}{pairs:10,}   {attention_flops(pairs, Dh):,}")
    assert expected is None or pairs == expected
local_global = masks.count_visible(modes["local + global"][0])
assert local_global <= n * (W + 1) + 2 * n * G, "O(T W + T G)"

# --- 6. The KV cache -----------------------------------------------------------------------------------------------------------
size = kv_cache_bytes(layers=32, B=1, T=4096, kv_heads=8, head_dim=128, itemsize=2)
print(f"\nKV cache, 32 layers, 4096 tokens, 8 key heads of 128 features, 2 bytes each: {size:,} bytes = {size >> 20} MiB")
assert size == 512 << 20

arguments.out.mkdir(parents=True, exist_ok=True)
path = arguments.out / "trace.json"
path.write_text(json.dumps(multi.to_dict(), indent=1), encoding="utf-8")
print(f"Wrote {path}")
