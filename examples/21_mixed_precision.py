"""Mixed precision: what 16 bits cannot hold, and how to train with them all the same.      python examples/21_mixed_precision.py

The numbers of float16 and bfloat16; which operation autocast runs in which type; how small the gradients of a Transformer are, beside
what float16 can hold; and five runs from the same weights: in float32, all in float16 (it ends at once), under autocast alone (small
gradients vanish, and it goes astray), with a GradScaler, and in bfloat16. An overflow is planted: that step is left out, the scale
halves. Writes mixed_precision.png.      (guide 16.3)
"""
import argparse
import importlib.util
import math
from pathlib import Path

import numpy as np

import tinygrad_tf as torch
from tinygrad_tf.amp import GradScaler
from tinygrad_tf.autograd import observing
from tinygrad_tf.data import BatchSampler, CharTokenizer, load_text
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.optim import AdamW

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-21"), help="folder for mixed_precision.png")
parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
quick, kind = arguments.quick, torch.get_default_device().type
has_bfloat16 = importlib.util.find_spec("ml_dtypes") is not None
lows = [torch.float16, *([torch.bfloat16] if has_bfloat16 else [])]

# --- 1. the numbers there are ---------------------------------------------------------------------------------------------
print("             largest   smallest   first after 1     2⁻²⁶ is   70000 is   1 + 2⁻¹¹ is")
for dtype in torch.float32, *lows:
    info, numbers = torch.finfo(dtype), torch.tensor([2.0 ** -26, 70000.0, 1 + 2.0 ** -11])
    small, large, near = numbers.to(dtype).float().tolist()
    print(f"  {str(dtype)[6:]:8s}   {info.max:7.1e}    {info.tiny * info.eps:7.1e}   {1 + info.eps:13.7f}   {small:9.1e}   {large:8.0f}   "
          f"{near:.7f}")
assert torch.tensor(70000.0).half().item() == math.inf and torch.tensor(2.0 ** -26).half().item() == 0
weight, update = torch.tensor([1.0]), torch.tensor([2.0 ** -12])
halves, full = weight.half(), weight.clone()
for _ in range(1000):
    halves, full = halves + update.half(), full + update
print(f"A weight of 1 that is raised by 2⁻¹² a thousand times: {halves.item():.3f} in float16, {full.item():.3f} in float32. "
      f"So the weights stay float32.\n")
assert halves.item() == 1 and full.item() > 1.24

# --- 2. what autocast decides ---------------------------------------------------------------------------------------------
text = load_text(["python-docs"])
tokenizer = CharTokenizer.from_text(text)
ids = tokenizer.encode(text)
T, C, H, L, B, steps = (32, 32, 2, 2, 6, 48) if quick else (48, 48, 4, 2, 8, 96)


def new_model():
    torch.manual_seed(0)
    return MiniGPT(tokenizer.vocab_size, T, C, H, 4 * C, L, dropout=0.0, norm_first=True)


def batches(B=B):
    sampler = BatchSampler(ids, T, B, seed=0)
    while True:
        yield [torch.tensor(part) for part in sampler.next()]


model, (x, y) = new_model(), next(batches())
runs_in, weights_cast = {}, []


def note(node, args, out):
    runs_in.setdefault(node.name, set()).add(str(out.dtype)[6:])
    if node.name == "Cast" and args[0].is_leaf:
        weights_cast.append(args[0])


with observing(note), torch.autocast(kind, dtype=torch.float16):
    _, loss = model(x, y)
loss.backward()
for what, names in {"in float16": ("Linear", "Attention", "Gelu"), "in float32": ("Embedding", "LayerNorm", "Add", "CrossEntropy")}.items():
    print(f"MiniGPT under autocast, {what}:  " + "  ".join(name for name in names if runs_in.get(name) == {what[3:]}))
    assert all(runs_in[name] == {what[3:]} for name in names if name in runs_in)
assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
assert len(weights_cast) == len({id(w) for w in weights_cast}), "a weight is cast once"
print(f"{len(weights_cast)} weights and biases are cast to float16, once each; all {len(list(model.parameters()))} parameters and their "
      f"gradients are float32.\n")

# --- 3. how small gradients are -------------------------------------------------------------------------------------------
# What a step averages over, a real run does in parts: each part's loss is divided by their number, and with it every gradient.
parts = 2 ** 20 // (B * T)
smallest, normal, largest = 2.0 ** -24, 2.0 ** -14, 65504.0             # float16: below `normal` it has fewer digits, below `smallest` none


def gradients_inside(model, x, y):
    """|gradient| at the results of all products, in float32: under autocast these are float16."""
    found = []

    def watch(node, args, out):
        if node.name in ("Linear", "Attention") and out.requires_grad:
            out.register_hook(lambda g: found.append(np.abs(g.cpu().numpy()).reshape(-1)))
    with observing(watch):
        _, loss = model(x, y)
    (loss / parts).backward()
    return np.concatenate(found)


sizes = gradients_inside(new_model(), x, y)
sizes = sizes[sizes > 0]
lost, kept = np.mean(sizes < smallest / 2), np.mean(sizes * 2 ** 16 < smallest / 2)
print(f"Of {2 ** 20:,} tokens in {parts:,} parts: gradients from {sizes.min():.0e} to {sizes.max():.0e}, median {np.median(sizes):.0e}")
print(f"  in float16 {lost:.0%} become 0 and {np.mean(sizes < normal):.0%} lose digits; times 2¹⁶ {kept:.1%} and "
      f"{np.mean(sizes * 2 ** 16 < normal):.0%}, the largest is {sizes.max() * 2 ** 16:.1f} of {largest:.0f}\n")
assert lost > 0.5 and kept < 0.05 and sizes.max() * 2 ** 16 < largest

# --- 4. five runs ---------------------------------------------------------------------------------------------------------
KINDS = ["float32", "all in float16", "autocast alone", "autocast + GradScaler", *(["autocast, bfloat16"] if has_bfloat16 else [])]
planted, interval = 5 * steps // 8, steps // 4  # at this step a gradient is made infinite


def train(name):
    """(losses, scales, where a step was left out, the model) of one run."""
    model, low = new_model(), torch.bfloat16 if "bfloat16" in name else torch.float16
    if name == "all in float16":
        model.half()
    optimizer, scaler = AdamW(model.parameters(), lr=3e-3), GradScaler(kind, growth_interval=interval, enabled="GradScaler" in name)
    losses, scales, left_out = [], [], []
    for step, (x, y) in zip(range(steps), batches()):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=low, enabled="autocast" in name):
            _, loss = model(x, y)
        scaler.scale(loss / parts).backward()
        if scaler.is_enabled() and step == planted:
            model.blocks[0].ffn.net[0].weight.grad[0, 0] = math.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if scaler.is_enabled() and all(torch.equal(a, p) for a, p in zip(before, model.parameters())):
            left_out.append(step)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        if not math.isfinite(losses[-1]):
            break
    return losses, scales, left_out, model


def mean(losses, end=10):
    return float(np.mean(losses[-end:]))


runs = {}
print(f"{steps} steps, AdamW: mean loss of the last 10")
for name in KINDS:
    with np.errstate(divide="ignore", invalid="ignore"):
        runs[name] = losses, scales, left_out, _ = train(name)
    ending = f"{mean(losses):.3f}" if len(losses) == steps else f"{losses[-1]} at step {len(losses)}"
    scale = f"   at step {planted} the scale goes from {scales[planted - 1]:.0f} to {scales[planted]:.0f}" if left_out else ""
    print(f"  {name:22s} {ending}{scale}")
full = mean(runs["float32"][0])
assert len(runs["all in float16"][0]) < 5 and not math.isfinite(runs["all in float16"][0][-1]), "eps = 1e-8 is 0 in float16: 0 / 0"
assert mean(runs["autocast alone"][0]) > full + 0.1, "most gradients have vanished"
for name in KINDS[3:]:
    assert abs(mean(runs[name][0]) / full - 1) < 0.05, "as float32"
_, scales, left_out, trained = runs["autocast + GradScaler"]
assert left_out == [planted] and scales[planted] == scales[planted - 1] / 2
assert all(scales[i] == 2 * scales[i - 1] for i in (interval - 1, 2 * interval - 1)), "it grows where nothing has overflowed for a while"
assert all(p.dtype is torch.float32 for p in trained.parameters())
print(f"The scaler keeps the run on the curve of float32; the overflow planted at step {planted} cost that step, and half of the scale.")


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 7), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    _draw_losses(figure.add_subplot(grid[:, 0]))
    _draw_sizes(figure.add_subplot(grid[0, 1]))
    _draw_scale(figure.add_subplot(grid[1, 1]))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_losses(axes):
    styles = {"float32": ("#000000", "-"), "all in float16": ("#e41a1c", "-"), "autocast alone": ("#ff7f00", "-"),
              "autocast + GradScaler": ("#1f78b4", "--"), "autocast, bfloat16": ("#33a02c", ":")}
    for name in KINDS:
        losses, (color, style) = np.array(runs[name][0]), styles[name]
        finite = losses[np.isfinite(losses)]
        around = np.convolve(np.pad(finite, 2, mode="edge"), np.ones(5) / 5, mode="valid")
        ended = len(losses) < steps
        axes.plot(range(len(finite)), around, style, color=color, label=f"{name}: NaN at step {len(losses)}" if ended else name,
                  marker="x" if ended else None, markersize=11, markeredgewidth=2)
    axes.set(title="Five runs from the same weights, mean of 5 batches", xlabel="step", ylabel="training loss, nats a character")
    axes.legend(frameon=False)


def _draw_sizes(axes):
    bins = np.linspace(-46, 18, 97)
    for values, color, label in (sizes, "#ff7f00", "gradients"), (sizes * 2 ** 16, "#1f78b4", "gradients · 2¹⁶"):
        axes.hist(np.log2(values), bins=bins, color=color, alpha=0.75, label=label)
    top = axes.get_ylim()[1] * 1.35
    for power, words in (-24, "2⁻²⁴\nsmallest"), (-14, "2⁻¹⁴\nnormal"), (16, "2¹⁶\noverflow"):
        axes.axvline(power, color="0.3", linewidth=1, linestyle="--")
        axes.text(power, 0.98 * top, f"{words} ", ha="right", va="top", fontsize=9)
    axes.set(title="Gradients at the products, beside the range of float16", xlabel="log₂ |gradient|", ylabel="how many", ylim=(0, top))
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(0.93, 0.5))


def _draw_scale(axes):
    axes.step(range(steps + 1), [2 ** 16, *scales], where="post", color="#1f78b4")
    axes.axvline(planted, color="#e41a1c", linewidth=1, linestyle=":")
    axes.annotate("inf in a gradient:\nthis step is left out", (planted, 2.0 ** 16.3), xytext=(8, 0), textcoords="offset points",
                  va="center", color="#e41a1c", fontsize=9)
    axes.set_yscale("log", base=2)
    axes.set(title="The scale of the loss", xlabel="step", ylim=(2 ** 15.5, 2 ** 18.5), yticks=[2 ** 16, 2 ** 17, 2 ** 18])


draw(arguments.out / "mixed_precision.png")
print(f"The picture: {arguments.out / 'mixed_precision.png'}")
