"""Fake quantisation: rounding that gradients pass, how far the levels should reach, and training with it.

    python examples/19_fake_quantisation.py

First the staircase and the gradient that stands in for its own, which is 0. Then what rounding does to a matrix of weights, over
bits, granularities and ways to choose a range. Then a small MiniGPT at 3 bits: in float, rounded, and trained while rounded.
Writes fake_quantisation.png.      (guide 11.3)
"""
import argparse
import copy
from functools import partial
from pathlib import Path

import numpy as np

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf.data import BatchSampler, CharTokenizer, evaluation_batches, load_text, split_train_validation
from tinygrad_tf.generation import inference
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.quantization import Scheme, convert, fake_quantize, limits, mse_limits, percentile_limits, prepare_qat, scale_and_zero

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-19"), help="folder for fake_quantisation.png")
parser.add_argument("--quick", action="store_true", help="fewer steps of training")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
torch.manual_seed(0)

# --- 1. the staircase, and the gradient that is put in its place ----------------------------------------------------------
s, q_max = 0.5, 3                                                              # 3 bits, symmetric: −3 … 3, steps of 0.5
x = torch.linspace(-2.5, 2.5, 1001, requires_grad=True)
y = torch.fake_quantize_per_tensor_affine(x, s, 0, -q_max, q_max)
y.backward(torch.ones_like(y))                                                 # dy = 1, so that dx is what passes
inside = (x.detach() / s).round().abs() <= q_max
assert len(y.unique()) == 2 * q_max + 1 and (y - x).detach()[inside].abs().max() <= s / 2 + 1e-6
assert x.grad.tolist() == inside.float().tolist()
print(f"3 bits: {len(y.unique())} levels, {[round(v, 1) for v in y.unique().tolist()]}. No x up to the last level moves by more than "
      f"s/2 = {s / 2}.")
print(f"The slope of a staircase is 0; straight through it, dx = dy from {x.detach()[inside].min().item():.3f} to "
      f"{x.detach()[inside].max().item():.3f}, half a step beyond the last levels, and 0 outside.\n")

# --- 2. the error, over bits --------------------------------------------------------------------------------------------------
# Rows of different size, and some numbers far out, as in trained weights.
random = np.random.default_rng(0)
W = torch.tensor((random.standard_t(5, (64, 256)) * np.exp(0.5 * random.standard_normal((64, 1)))).astype(np.float32))    # [out, in]
BITS = list(range(2, 9))
PARTS = {"one scale": {}, "a scale per row": {"granularity": "channel"}, "per 32 numbers": {"granularity": "group", "group_size": 32}}
RANGES = {"min and max": limits, "99.9 %": partial(percentile_limits, percentile=99.9), "smallest squared error": mse_limits}


def error(bits, limits_of=limits, **parts):
    """√(Σ (W − Ŵ)² / Σ W²) for a symmetric scheme."""
    scheme = Scheme(bits, **parts)
    W_hat = fake_quantize(W, scheme, *scale_and_zero(*limits_of(W.array, scheme), scheme))
    return ((W_hat - W).square().sum() / W.square().sum()).sqrt().item()


by_parts = {name: [error(bits, **parts) for bits in BITS] for name, parts in PARTS.items()}
by_range = {name: [error(bits, limits_of) for bits in BITS] for name, limits_of in RANGES.items()}
print("What rounding leaves wrong in W [64, 256], as a share of W:")
print(" " * 26 + "".join(f"{bits:>7d}" for bits in BITS) + " bits")
for name, errors in [*by_parts.items(), *list(by_range.items())[1:]]:
    print(f"  {name:24s}" + "".join(f"{e:7.1%}" for e in errors))
one, row, group = (np.array(by_parts[name]) for name in PARTS)
plain, percentile, searched = (np.array(by_range[name]) for name in RANGES)
assert (one > row).all() and (row > group).all(), "finer parts follow the weights more closely"
assert (searched <= plain * (1 + 1e-6)).all() and searched[1] < plain[1] / 2, "at few bits it pays to clip what is far out"
assert percentile[1] < plain[1] and percentile[-1] > plain[-1], "at many bits it does not"
assert all(1.6 < a / b < 2.8 for a, b in zip(group[1:], group[2:])), "a bit more halves the step"
print("A bit more halves the error, roughly. Clipping the rarest numbers helps at 3 bits and harms at 8; searching knows when.\n")

# --- 3. a small MiniGPT at 3 bits ---------------------------------------------------------------------------------------------
T, B, C, L, H = 32, 16, 48, 1, 4
steps, more = (200, 60) if arguments.quick else (500, 150)
scheme = Scheme(3)                                                             # one scale for each matrix
text = load_text()
tokenizer = CharTokenizer.from_text(text)
train, held_out = map(tokenizer.encode, split_train_validation(text))
held_out = held_out[:256 * T + 1]                                              # 256 windows


def fit(model, steps, lr, seed):
    """AdamW on random windows; the learning rate falls to 0."""
    sampler, optimizer = BatchSampler(train, T, B, seed), torch.optim.AdamW(model.train().parameters(), lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        inputs, targets = map(torch.tensor, sampler.next())                    # [B, T]
        optimizer.zero_grad()
        model(inputs, targets)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def losses(model):
    """The mean loss of each held-out window, [256]."""
    found = []
    with inference(model):
        for inputs, targets in evaluation_batches(held_out, T, 64):
            logits = model(torch.tensor(inputs))[0]                            # [B, T, V_vocab]
            loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), reduction="none")
            found.append(loss.reshape(*targets.shape).mean(dim=1).cpu().numpy())
    return np.concatenate(found)


def standard_error(values):
    return values.std(ddof=1) / len(values) ** 0.5


model = fit(MiniGPT(tokenizer.vocab_size, T, C, H, 4 * C, L, dropout=0.0, norm_first=True), steps, 3e-3, seed=1)
in_float = fit(copy.deepcopy(model), more, 1e-3, seed=2)                       # as many steps as the one trained while rounded
MODELS = {
    "float": in_float,
    "rounded": convert(prepare_qat(in_float, scheme)),
    "rounded, searched range": convert(prepare_qat(in_float, scheme, limits_of=mse_limits)),
    "trained while rounded": convert(fit(prepare_qat(model, scheme), more, 1e-3, seed=2)),
}
found = {name: losses(m) for name, m in MODELS.items()}
print(f"A MiniGPT of {sum(p.numel() for p in model.parameters()):,} numbers after {steps} + {more} steps; matrices of 3 bits:")
for name, values in found.items():
    cost = values - found["float"]
    print(f"  {name:24s}loss {values.mean():.4f} ± {standard_error(values):.4f}   cost {cost.mean():+.4f} ± {standard_error(cost):.4f}")
gain = found["rounded"] - found["trained while rounded"]
share = gain.mean() / (found["rounded"] - found["float"]).mean()
print(f"Training while rounded wins back {share:.0%} of what rounding costs: {gain.mean():.4f} ± {standard_error(gain):.4f} nats a "
      f"character.")
assert gain.mean() > 3 * standard_error(gain) and share > 0.5
levels = MODELS["trained while rounded"].blocks[0].attention.q_proj.weight.unique()
assert len(levels) <= 7, "7 levels and no other number"


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path):
    """The staircase with its gradient; the error by granularity and by range; the losses."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 8), layout="constrained")
    (stairs, bars), (granularity, ranges) = figure.subplots(2, 2)
    stairs.plot(x.tolist(), x.tolist(), color="#bbbbbb", linewidth=1, label="x")
    stairs.plot(x.tolist(), y.tolist(), color="#1f78b4", label="y, rounded")
    stairs.plot(x.tolist(), x.grad.tolist(), color="#d95f02", linestyle="--", label="dx for dy = 1")
    stairs.set(title="3 bits: the staircase, and the gradient put in its place", xlabel="x")
    panels = (granularity, by_parts, "Who shares a scale (min and max)"), (ranges, by_range, "How far the levels reach (one scale)")
    for axes, curves, title in panels:
        for (name, errors), color in zip(curves.items(), ("#d95f02", "#1f78b4", "#1b9e77")):
            axes.plot(BITS, errors, marker="o", markersize=4, color=color, label=name)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set(title=title, xlabel="bits", ylabel="error of W")
    for axes in stairs, granularity, ranges:
        axes.legend(frameon=False)
    costs = {name: values - found["float"] for name, values in found.items() if name != "float"}
    bars.bar([name.replace(" ", "\n", 1) for name in costs], [cost.mean() for cost in costs.values()], capsize=4,
             yerr=[standard_error(cost) for cost in costs.values()], color=["#d95f02", "#e7a35f", "#1b9e77"])
    bars.axhline(0, color="black", linewidth=0.8)
    bars.set(title="MiniGPT at 3 bits: loss above float, held-out windows", ylabel="nats a character")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "fake_quantisation.png")
print(f"The picture: {arguments.out / 'fake_quantisation.png'}")
