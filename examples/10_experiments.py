"""Experiments: what the text claims, measured.      python examples/10_experiments.py [--quick] [--out DIR]

Each function below is one claim with its number: how far windows see, why scores are divided by √Dh, what depth does to
gradients, and the exercises of the guide's section 20. Each prints what it found and asserts it; with --out the two
curves are drawn to experiments.png.      (guide 2.2, 4.1, 9.3, 20, 21)
"""
import argparse
import math
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
import tinygrad_tf.nn.functional as F
from tinygrad_tf.nn.masks import causal_mask, receptive_field, sliding_window_mask
from tinygrad_tf.ops.attention import attention_weights

# --- 1. the receptive field (guide 2.2) -------------------------------------------------------------------------------

def layers_by_paths(T, W):
    """Layers until the last token can hear of the first: the mask alone is asked, one more step along it with each layer."""
    allowed, layers = sliding_window_mask(T, W), 1
    while not receptive_field(allowed, layers)[-1, 0]:
        layers += 1
    return layers


def layers_by_gradient(T, W):
    """The same, asked of real attention layers: at which depth does the last output first feel the first input?"""
    torch.manual_seed(0)
    x = torch.randn(1, T, 8, requires_grad=True)
    hidden, layers = x, 0
    while True:
        hidden, layers, x.grad = nn.MultiHeadAttention(8, num_heads=2)(hidden, allowed=sliding_window_mask(T, W)), layers + 1, None
        hidden[0, -1].sum().backward(retain_graph=True)
        if x.grad[0, 0].abs().max() > 0:
            return layers


def layers_needed():
    """A layer with window W looks W − 1 tokens back, so L layers look L (W − 1) back: ⌈(T − 1) / (W − 1)⌉ reach them all."""
    print("1. Receptive field: layers of window W until token T − 1 hears of token 0\n   T    W   paths   gradient   ⌈(T−1)/(W−1)⌉")
    for T, W in [(12, 3), (12, 4), (12, 12), (9, 2), (7, 5)]:
        expected = math.ceil((T - 1) / (W - 1))
        paths, gradient = layers_by_paths(T, W), layers_by_gradient(T, W)
        print(f"  {T:2d}   {W:2d}   {paths:5d}   {gradient:8d}   {expected:13d}")
        assert paths == gradient == expected
    assert layers_by_paths(12, 3) == 6


# --- 2. the variance of scores (guide 4.1) ----------------------------------------------------------------------------

def variance():
    """A dot product of C independent products of mean 0 and variance 1 has variance C; divided by √C it has 1."""
    torch.manual_seed(0)
    print("\n2. Variance of q · k for q, k ~ N(0, 1)\n      C   var(q·k)   var(q·k/√C)")
    for C in (4, 64, 1024):
        scores = (torch.randn(4096, C) * torch.randn(4096, C)).sum(dim=-1)
        raw, scaled = scores.var().item(), (scores / math.sqrt(C)).var().item()
        print(f"   {C:4d}   {raw:8.1f}   {scaled:11.3f}")
        assert abs(raw / C - 1) < 0.1 and abs(scaled - 1) < 0.1


# --- 3. saturation (guide 4.1) ----------------------------------------------------------------------------------------

def entropy_of_weights(C, scale, Tq=256, Tk=64):
    """Mean entropy of the rows of softmax(scale · Q Kᵀ), in nats; mean largest weight; mean slope Σ p (1 − p) of a row."""
    torch.manual_seed(C)
    p = F.softmax(scale * torch.randn(Tq, C) @ torch.randn(Tk, C).T, dim=-1)
    entropy = -(p * p.clamp(min=1e-30).log()).sum(dim=-1)
    return entropy.mean().item(), p.amax(dim=-1).mean().item(), (p * (1 - p)).sum(dim=-1).mean().item()


def saturation(widths=(4, 64, 1024)):
    """Without 1/√C the rows go one-hot as C grows, and with p → 0 or 1 the slope p (1 − p) of softmax goes to 0."""
    print(f"\n3. Softmax over 64 random keys; an even row has entropy ln 64 = {math.log(64):.2f}\n"
          "                 without 1/√C                    with 1/√C\n"
          "      C   entropy   largest p   slope    entropy   largest p   slope")
    curve = {C: (entropy_of_weights(C, 1.0), entropy_of_weights(C, 1 / math.sqrt(C))) for C in widths}
    for C, (raw, scaled) in curve.items():
        print(f"   {C:4d}   {raw[0]:7.2f}   {raw[1]:9.2f}   {raw[2]:5.2f}    {scaled[0]:7.2f}   {scaled[1]:9.2f}   {scaled[2]:5.2f}")
    raw, scaled = ([pair[i][0] for pair in curve.values()] for i in (0, 1))
    assert raw == sorted(raw, reverse=True) and raw[-1] < 0.2
    assert min(scaled) > 3.5 and max(scaled) - min(scaled) < 0.3
    assert curve[1024][0][2] < 0.1 < 0.9 < curve[1024][1][2]
    return curve


# --- 4. gradients by depth (guide 9.3) --------------------------------------------------------------------------------

def gradient_norms(depth, norm_first, seed=0, B=4, T=16, C=32):
    """‖gradient‖ of each block's parameters at the first step, with weights that keep the variance (std 1/√in)."""
    torch.manual_seed(seed)
    blocks = nn.ModuleList([nn.TransformerBlock(C, 4, 4 * C, dropout=0.0, norm_first=norm_first) for _ in range(depth)])
    for linear in (module for module in blocks.modules() if isinstance(module, nn.Linear)):
        nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features))
        nn.init.zeros_(linear.bias)
    head, final_norm = nn.Linear(C, 50), nn.LayerNorm(C)
    x, targets = torch.randn(B, T, C), torch.randint(0, 50, (B * T,))
    for block in blocks:
        x = block(x, causal=True)
    x = final_norm(x) if norm_first else x
    F.cross_entropy(head(x).reshape(B * T, 50), targets).backward()
    return [math.sqrt(sum(p.grad.square().sum().item() for p in block.parameters())) for block in blocks]


def average_norms(depth, norm_first, seeds):
    rows = [gradient_norms(depth, norm_first, seed) for seed in range(seeds)]
    return [sum(column) / seeds for column in zip(*rows)]


def norms_by_depth(depths=(1, 2, 4, 8, 16, 24), seeds=3):
    """At the start of training the gradient of the *last* block stays large in post-norm and shrinks like 1/√L in pre-norm.

    In pre-norm the residual stream grows with each block, to variance ~ L, and the final norm divides by its size. That is
    why post-norm needs a warm-up (Xiong et al. 2020). In neither order do gradients vanish on their way to the first block.
    """
    print("\n4. Norm of the gradient by depth L, first and last block\n"
          "           post-norm          pre-norm\n    L    first    last     first    last   last·√L")
    curves = {}
    for L in depths:
        post, pre = curves[L] = average_norms(L, False, seeds), average_norms(L, True, seeds)
        print(f"   {L:2d}   {post[0]:6.2f}  {post[-1]:6.2f}    {pre[0]:6.2f}  {pre[-1]:6.2f}    {pre[-1] * math.sqrt(L):6.2f}")
        assert post[0] > 0.5 * post[-1] and pre[0] >= pre[-1]
    (post_1, pre_1), (post_24, pre_24) = ([norms[-1] for norms in curves[L]] for L in (depths[0], depths[-1]))
    assert 0.5 < post_24 / post_1 < 1.5, "post-norm: the last block does not notice the depth"
    assert pre_24 / pre_1 < 0.4, "pre-norm: its gradient falls"
    return curves


# --- 5. the exercises (guide 20) --------------------------------------------------------------------------------------

def exercises():
    """Four small questions, each with the answer computed."""
    print("\n5. Exercises")
    blocked = ~causal_mask(3)
    print(f"   the causal mask for T = 3, 1 = blocked:  {blocked.int().tolist()}")
    assert blocked.int().tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 8) for _ in range(3))
    scores = (q @ k.transpose(-2, -1) / math.sqrt(8)).masked_fill(~causal_mask(4), -math.inf)
    by_hand = F.softmax(scores, dim=-1) @ v
    gap = (by_hand - F.scaled_dot_product_attention(q, k, v, is_causal=True)).abs().max().item()
    print(f"   by hand and scaled_dot_product_attention differ by at most {gap:.1e}")
    assert gap <= 1.2e-7, "one float32 step at 1"

    layer = nn.MultiHeadAttention(48, num_heads=4)
    print(f"   C = 48, H = 4: head_dim = {layer.head_dim}")
    assert layer.head_dim == 12

    x = torch.randn(2, 5, 48, requires_grad=True)
    layer(x, causal=True).sum().backward()
    largest = {name: p.grad.abs().max().item() for name, p in layer.named_parameters()}
    print("   largest gradient: " + "  ".join(f"{name} {value:.0e}" for name, value in largest.items() if "proj.bias" in name))
    # b_K adds the same q · b_K to every score of a row (no RoPE here), and softmax sees differences only: no loss can depend on it.
    assert largest.pop("k_proj.bias") < 1e-5 and min(largest.values()) > 1e-3


# --- 6. attention on paper (guide 21) ---------------------------------------------------------------------------------

def shares(row):
    """softmax of a list, −inf allowed; plain Python, as one would on paper."""
    powers = [math.exp(z - max(row)) for z in row]
    return [power / sum(powers) for power in powers]


def on_paper(Q, K, allowed):
    """The weights of one head as nested lists: dot products, the mask, softmax row by row."""
    Dh = len(Q[0])
    scores = [[sum(a * b for a, b in zip(q, k)) / math.sqrt(Dh) for k in K] for q in Q]
    return [shares([z if see else -math.inf for z, see in zip(row, seen)]) for row, seen in zip(scores, allowed)]


def hand_check():
    """Three tokens, Dh = 1: scores that can be done in the head. A row asks, a column answers."""
    print("\n6. Attention on paper, against the library. Q = K = [1, 2, 3]ᵀ, so Q Kᵀ = [[1,2,3],[2,4,6],[3,6,9]]")
    Q = K = [[1.0], [2.0], [3.0]]
    causal = [[j <= i for j in range(3)] for i in range(3)]
    last_is_padding = [[j < 2 for j in range(3)] for _ in range(3)]
    for name, allowed in ("causal", causal), ("last key is padding", last_is_padding):
        paper = on_paper(Q, K, allowed)
        library = attention_weights(torch.tensor(Q), torch.tensor(K), attn_mask=torch.tensor(allowed)).tolist()
        print(f"   {name}:")
        for row in paper:
            print("     ", "  ".join(f"{weight:.3f}" for weight in row))
        assert all(math.isclose(a, b, abs_tol=1e-6) for left, right in zip(paper, library) for a, b in zip(left, right))
    weights = on_paper(Q, K, causal)
    assert weights[0] == [1, 0, 0] and math.isclose(weights[1][1], 1 / (1 + math.exp(-2)))      # scores 2 and 4
    wrong_way = on_paper(Q, K, [list(column) for column in zip(*causal)])
    print(f"   the causal mask transposed gives token 0 {wrong_way[0][2]:.3f} of token 2: it looks ahead")
    assert wrong_way[0][2] > 0.6
    assert all(row[2] == 0 and math.isclose(sum(row), 1) for row in on_paper(Q, K, last_is_padding))    # also the padding's own row


# --- the picture ------------------------------------------------------------------------------------------------------

def draw(entropies, norms, path):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    widths = list(entropies)
    left.semilogx(widths, [scaled[0] for _, scaled in entropies.values()], "o-", color="#08519c", label="with 1/√C")
    left.semilogx(widths, [raw[0] for raw, _ in entropies.values()], "s--", color="#d95f02", label="without")
    left.axhline(math.log(64), color="0.6", linewidth=0.8, linestyle=":")
    left.annotate("ln 64: all keys weigh the same", (widths[0], math.log(64)), xytext=(0, 3), textcoords="offset points", fontsize=9,
                  color="0.35")
    left.set(xlabel="C, features in a dot product", ylabel="entropy of a row (nats)", title="Softmax over 64 random keys", ylim=(0, 4.6))
    left.set_xticks(widths, [str(C) for C in widths], minor=False)
    left.minorticks_off()
    for i, (name, color) in enumerate([("post-norm", "#d95f02"), ("pre-norm", "#08519c")]):
        for place, at, style in ("last", -1, "o-"), ("first", 0, "s:"):
            right.plot(list(norms), [curves[i][at] for curves in norms.values()], style, color=color,
                       markerfacecolor="white" if at == 0 else color, label=f"{name}, {place} block")
    right.set(xlabel="L, blocks", ylabel="norm of the gradient", title="Gradient of a block before the first step", ylim=(0, None))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer depths, one seed")
    parser.add_argument("--device", help="cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, help="folder for experiments.png")
    arguments = parser.parse_args()
    torch.set_default_device(arguments.device)
    layers_needed()
    variance()
    entropies = saturation((4, 16, 64, 256, 1024))
    norms = norms_by_depth((1, 8, 24), seeds=1) if arguments.quick else norms_by_depth()
    exercises()
    hand_check()
    if arguments.out:
        draw(entropies, norms, arguments.out / "experiments.png")
        print(f"\nThe curves: {arguments.out / 'experiments.png'}")
    print("\nAll of it holds.")


if __name__ == "__main__":
    main()
