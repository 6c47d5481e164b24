"""Where a token stands, told in five ways.      python examples/05_positions.py

Attention sees a set: shuffle the tokens and their outputs are shuffled, and no more. The order must be put in: added to the
embedding (learned, sinusoidal), by turning q and k (RoPE), or added to the scores (ALiBi, T5). This shows what each does to
one tiny input, and the three promises of RoPE. Writes positions.png.      (guide 9.1, 9.5, 10.1, 18.3)
"""
import argparse
import math
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
import tinygrad_tf.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-05"), help="folder for positions.png")
parser.add_argument("--quick", action="store_true", help="draw fewer points")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)

torch.manual_seed(0)
B, H, T, Dh = 1, 2, 5, 16
positions = torch.arange(T)                                                    # [T]
earlier_or_same = torch.ones(T, T, dtype=torch.bool).tril()                    # [T, T], True = may attend


def weights(q, k, bias=0.0):
    """softmax(q kᵀ / √Dh + bias) under the causal mask.    q, k: [B, H, T, Dh] → [B, H, T, T]"""
    scores = q @ k.transpose(-2, -1) / math.sqrt(Dh) + bias
    return F.softmax(scores.masked_fill(~earlier_or_same, -math.inf), dim=-1)


def show(name, row):
    print(f"{name:<24}", "  ".join(f"{w:.3f}" for w in row.tolist()))


def largest(x):
    return x.abs().max().item()


# --- 1. attention alone knows no order ----------------------------------------------------------------------------------
x = torch.randn(B, H, T, Dh)                                                   # q = k = v, to keep it short
order = torch.randperm(T)
shuffled = F.scaled_dot_product_attention(x[:, :, order], x[:, :, order], x[:, :, order])
assert torch.allclose(shuffled, F.scaled_dot_product_attention(x, x, x)[:, :, order], atol=1e-6)
print("Without positions, shuffled tokens give the same outputs, shuffled.\n")

# --- 2. the same word five times: whom does the last one look at? -------------------------------------------------------
word = torch.randn(1, 1, Dh).expand(B, T, Dh)                                  # [B, T, Dh], five equal rows


def heads(x):
    """[B, T, Dh] for each of the heads: [B, H, T, Dh]"""
    return x.unsqueeze(1).expand(B, H, T, Dh)


learned, sinusoidal = nn.LearnedPositions(T, Dh)(word), nn.SinusoidalPositionEncoding(Dh)(word)
turned = nn.RotaryEmbedding(Dh)(heads(word))
alibi, t5 = nn.ALiBi(H), nn.T5RelativeBias(H)
nn.init.normal_(t5.table.weight)                                               # as if it had been trained
found = {
    "no positions": weights(heads(word), heads(word)),
    "learned (added to x)": weights(heads(learned), heads(learned)),
    "sinusoidal (added to x)": weights(heads(sinusoidal), heads(sinusoidal)),
    "RoPE (q and k turned)": weights(turned, turned),
    "ALiBi (added to scores)": weights(heads(word), heads(word), alibi(positions, positions)),
    "T5 (added to scores)": weights(heads(word), heads(word), t5(positions, positions)),
}
print("Weights of the last of five equal tokens, first head:   token 0 … 4")
for name, A in found.items():
    show(name, A[0, 0, -1].detach())
    assert A.shape == (B, H, T, T) and torch.allclose(A.sum(dim=-1), torch.ones(B, H, T), atol=1e-6)
    assert (largest(A[0, 0, -1] - 1 / T) < 1e-6) == (name == "no positions"), "only without positions are all tokens alike"
nearer = found["ALiBi (added to scores)"][0, 0, -1]
assert (nearer[1:] > nearer[:-1]).all(), "with ALiBi, nearer is heavier"

# --- 3. RoPE: a dot product depends on the distance alone ---------------------------------------------------------------
rope = nn.RotaryEmbedding(64)
q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)


def dot(m, n):
    """Score of q at position m with k at position n."""
    return (rope(q, offset=m) * rope(k, offset=n)).sum().item() / math.sqrt(64)


print("\nq at position shift + distance, k at position shift:\ndistance   shift 0     shift 5     shift 50    spread")
for distance in (0, 1, 5, 20):
    scores = [dot(shift + distance, shift) for shift in (0, 5, 50)]
    spread = max(scores) - min(scores)
    print(f"{distance:8d}  " + "  ".join(f"{s:10.6f}" for s in scores) + f"    {spread:.0e}")
    assert spread < 1e-6
assert len({round(dot(d, 0), 3) for d in (0, 1, 5, 20)}) == 4, "other distances give other scores"

# --- 4. decoding: a new token stands where the cache ends ---------------------------------------------------------------
rope, past = nn.RotaryEmbedding(Dh), 20
q, k, v = (torch.randn(B, H, past + 1, Dh) for _ in range(3))
cached_keys = rope(k)                                                          # the cache holds turned keys
whole = F.scaled_dot_product_attention(rope(q), cached_keys, v, is_causal=True)[:, :, -1:]
new = q[:, :, -1:]
right = F.scaled_dot_product_attention(rope(new, offset=past), cached_keys, v)
wrong = F.scaled_dot_product_attention(rope(new), cached_keys, v)              # as if it were the first token
print(f"\nDecoding token {past}: error {largest(right - whole):.0e} with offset={past}, {largest(wrong - whole):.2f} with offset=0")
assert largest(right - whole) < 1e-6 and largest(wrong - whole) > 0.2

# --- 5. two layouts, one function ---------------------------------------------------------------------------------------
half_split = nn.RotaryEmbedding(Dh, layout="half_split")
converted = half_split(nn.interleaved_to_half_split(x, Dh))
assert torch.equal(converted, nn.interleaved_to_half_split(rope(x), Dh))
assert torch.allclose(weights(converted, converted), weights(rope(x), rope(x)), atol=1e-6)
print("half-split = interleaved after conversion:", nn.interleaved_to_half_split(torch.arange(8), 8).tolist())
print(f"without it, weights are off by up to {largest(weights(half_split(x), half_split(x)) - weights(rope(x), rope(x))):.2f}")

# --- 6. ALiBi is a bias and no mask -------------------------------------------------------------------------------------
bias = alibi(positions, positions)                                             # [H, T, T]
assert (bias[:, ~earlier_or_same] == 0).all(), "the future gets the largest bias that there is"
print("ALiBi, first head, last row:", bias[0, -1].tolist(), "  the future is not hidden: mask it as ever")


# --- the picture --------------------------------------------------------------------------------------------------------

def draw(path, length):
    """Four panels. `Figure` without pyplot needs no display."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 8.4), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 2).flat, (draw_waves, draw_arrows, draw_distance, draw_slopes)):
        panel(figure, axes, length)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_waves(figure, axes, length):
    pe = nn.SinusoidalPositionEncoding(64, length).pe[0]
    image = axes.imshow(pe.cpu().numpy(), aspect="auto", cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes)
    axes.set(title="Sinusoidal: PE[position, feature], C = 64", xlabel="feature: even sin, odd cos; slower to the right", ylabel="position")


def draw_arrows(figure, axes, length):
    """Three pairs of features, all (1, 0) before turning, on circles of their own."""
    pairs, shown = {0: "#d95f02", 2: "#1b9e77", 4: "#7570b3"}, 6
    y = nn.RotaryEmbedding(Dh)(torch.tensor([1.0, 0.0]).repeat(Dh // 2).expand(shown, Dh))      # [positions, Dh]
    for place, (i, color) in enumerate(pairs.items()):
        left = 2.8 * place
        axes.plot([left + math.cos(t / 30) for t in range(190)], [math.sin(t / 30) for t in range(190)], color="0.8", linewidth=1)
        for position in range(shown):
            a, b = y[position, 2 * i:2 * i + 2].tolist()
            axes.annotate("", (left + a, b), (left, 0), arrowprops={"arrowstyle": "->", "color": color, "alpha": 1 - position / 9})
            if i == 0 or position in (0, shown - 1) and i == 2:                # arrows of slower pairs lie close together
                axes.text(left + 1.16 * a, 1.16 * b, position, color=color, ha="center", va="center", fontsize=10)
        axes.text(left, -1.5, f"pair {i}\n{10000 ** (-2 * i / Dh):.3g} rad per position", color=color, ha="center", va="top")
    axes.set(title="RoPE: three pairs, each at positions 0 to 5 (paler = later)", xlim=(-1.4, 7), ylim=(-2.3, 1.5), aspect="equal")
    axes.axis("off")


def draw_distance(figure, axes, length):
    """q = k = ones: the score is Σ cos(distance · θ), whatever the positions are."""
    rope, ones = nn.RotaryEmbedding(64), torch.ones(1, 1, length, 64)
    for shift, style in (0, {"color": "#9ecae1", "linewidth": 6}), (50, {"color": "#08306b", "linewidth": 1.4}):
        scores = (rope(ones[:, :, :1], offset=shift) * rope(ones, offset=shift)).sum(dim=-1)[0, 0] / 64
        axes.plot(scores.tolist(), label=f"q at position {shift}", **style)
    axes.set(title="RoPE: q · k / Dh of equal vectors", xlabel="distance between q and k", ylabel="q · k / Dh")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def draw_slopes(figure, axes, length):
    keys = torch.arange(32)
    bias = nn.ALiBi(8)(torch.tensor([31]), keys)[:, 0]                         # [H, Tk]
    for h, row in enumerate(bias):
        axes.plot(keys.tolist(), row.tolist(), color=(0.03, 0.15 + 0.09 * h, 0.45 + 0.06 * h))
        if h != 6:                                                             # 1/128 and 1/256 would lie on each other
            lowest, m = -6, 2.0 ** -(h + 1)
            inside = row[0].item() > lowest
            place = (0, row[0].item()) if inside else (31 + lowest / m, lowest)
            axes.annotate(f"1/{2 ** (h + 1)}", place, xytext=(-4, 0) if inside else (2, 6), textcoords="offset points",
                          ha="right", va="center" if inside else "bottom", fontsize=9)
    axes.set(title="ALiBi: bias of 8 heads, slopes 1/2 to 1/256", xlabel="key j (the query is token 31)", ylabel="bias = −m (31 − j)",
             xlim=(-4, 31), ylim=(-6, 0.2))
    axes.spines[["top", "right"]].set_visible(False)


draw(arguments.out / "positions.png", 64 if arguments.quick else 128)
print(f"\nThe picture: {arguments.out / 'positions.png'}")
