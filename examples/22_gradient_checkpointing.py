"""Gradient checkpointing: memory for time.      python examples/22_gradient_checkpointing.py

Training keeps what every block computed until backward has used it: memory grows with the number of blocks. A checkpointed block
keeps its input alone, and runs once more when backward comes. The gradients are the same, bit for bit, dropout included; what is
saved is counted, and what it costs is measured. Writes memory.png.
"""
import argparse
import math
import time
import tracemalloc
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.trace import saved_bytes
from tinygrad_tf.utils.checkpoint import checkpoint, checkpoint_sequential, recomputing

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-22"), help="folder for memory.png")
parser.add_argument("--quick", action="store_true", help="smaller blocks, and fewer of them")
arguments = parser.parse_args()
torch.set_default_device("cpu")                                                 # tracemalloc sees the host's memory
torch.manual_seed(0)
B, T, C, H = (4, 64, 32, 2) if arguments.quick else (4, 128, 128, 4)
depths = (1, 4, 9) if arguments.quick else (1, 2, 4, 9, 16)
MiB = 2 ** 20

# --- 1. one function ------------------------------------------------------------------------------------------------------
calls = []


def f(x):
    calls.append("again" if recomputing() else "first")
    return torch.nn.functional.dropout(x.exp().sin(), 0.5)


x = torch.randn(6, requires_grad=True)
y = checkpoint(f, x)
print(f"after forward:  f has run {calls}, and the graph keeps {saved_bytes(y).total} bytes")
y.sum().backward()
print(f"after backward: f has run {calls}, with the same dropout: x.grad is 0 where y is: "
      f"{((x.grad == 0) == (y == 0)).tolist()}\n")
assert calls == ["first", "again"] and ((x.grad == 0) == (y == 0)).all()

# --- 2. a model: one attribute, the same gradients ------------------------------------------------------------------------
ids = torch.randint(0, 50, (B, T + 1))


def gradients(checkpoint_blocks):
    torch.manual_seed(1)
    model = MiniGPT(50, T, C, H, 4 * C, num_layers=3, dropout=0.1, norm_first=True)
    model.checkpoint_blocks = checkpoint_blocks
    _, loss = model(ids[:, :-1], ids[:, 1:])
    kept = saved_bytes(loss).total
    loss.backward()
    return kept, [loss.detach(), *(p.grad for p in model.parameters())]


(kept, plain), (kept_less, same) = gradients(False), gradients(True)
assert all(torch.equal(a, b) for a, b in zip(plain, same))
print(f"MiniGPT, 3 blocks: the loss and {len(plain) - 1} gradients are equal bit for bit; kept for backward "
      f"{kept / MiB:.2f} MiB, with model.checkpoint_blocks = True {kept_less / MiB:.2f} MiB\n")

# --- 3. memory over depth -------------------------------------------------------------------------------------------------
WAYS = {
    "all kept": lambda blocks, x: checkpoint_sequential(blocks, 1, x),          # one segment: no checkpoint
    "√L segments": lambda blocks, x: checkpoint_sequential(blocks, math.isqrt(len(blocks)), x),
    "each block": lambda blocks, x: [x := checkpoint(block, x) for block in blocks][-1],
}


def make_blocks(L):
    """Blocks whose gradients have their memory already: it is the same in all ways, and would hide what differs."""
    torch.manual_seed(2)
    blocks = [nn.TransformerBlock(C, H, 4 * C, dropout=0.1, norm_first=True) for _ in range(L)]
    for p in (p for block in blocks for p in block.parameters()):
        p.grad = torch.zeros_like(p)
    return blocks


def measure(way, L):
    """Bytes after each block that has run, and when backward comes to it; the peak; the gradient of x."""
    seen = []

    def note(*_):
        seen.append(tracemalloc.get_traced_memory()[0] - before)

    def watched(block):
        def run(x):
            y = block(x)
            note()
            if not recomputing():
                y.register_hook(note)
            return y
        return run
    blocks = [watched(block) for block in make_blocks(L)]
    torch.manual_seed(3)
    x = torch.randn(B, T, C, requires_grad=True)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    y = way(blocks, x)
    y.backward(torch.ones(B, T, C))
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return seen, peak, x.grad


block = make_blocks(1)[0]
a = saved_bytes(block(torch.randn(B, T, C, requires_grad=True))).total          # what one block keeps
i = 4 * B * T * C                                                               # what a checkpoint keeps: the input
expected = {"all kept": lambda L: L * a, "√L segments": lambda L: math.isqrt(L) * i + -(-L // math.isqrt(L)) * a,
            "each block": lambda L: L * i + a}
print(f"B = {B}, T = {T}, C = {C}: a block keeps a = {a / MiB:.2f} MiB, its input has i = {i / MiB:.2f} MiB = a / {a / i:.0f}")
print("Most memory in MiB, measured (by the formula)")
print(f"{'L':>4s}{'all kept: L a':>22s}{'√L segments: √L (i + a)':>28s}{'each block: L i + a':>26s}")
peaks, through = {way: [] for way in WAYS}, {}
for L in depths:
    found = {way: measure(run, L) for way, run in WAYS.items()}
    assert all(torch.equal(gradient, found["all kept"][2]) for _, _, gradient in found.values())
    for way, (seen, peak, _) in found.items():
        peaks[way].append(peak)
        through[way] = seen
    print(f"{L:4d}" + "".join(f"{f'{peaks[way][-1] / MiB:.2f} ({expected[way](L) / MiB:.2f})':>{width}s}"
                              for way, width in zip(WAYS, (22, 28, 26))))
L = depths[-1]
growth = {way: (found[-1] - found[0]) / (L - 1) for way, found in peaks.items()}
print(f"A block more: {growth['all kept'] / MiB:.2f} MiB where all is kept, {growth['each block'] / MiB:.2f} with a checkpoint each.\n")
assert 0.9 * a < growth["all kept"] < 1.1 * a and i <= growth["each block"] < 2.5 * i
assert peaks["each block"][-1] < peaks["√L segments"][-1] < peaks["all kept"][-1]

# --- 4. the price: a second forward ---------------------------------------------------------------------------------------
model = nn.Sequential(*(nn.TransformerBlock(C, H, 4 * C, norm_first=True) for _ in range(4)))
x = torch.randn(B, T, C)


def seconds(run):
    """(forward, both), the fastest of some."""
    found = []
    for _ in range(3 if arguments.quick else 9):
        begin = time.process_time()
        y = run(x)
        between = time.process_time()
        y.sum().backward()
        found.append((between - begin, time.process_time() - begin))
    return map(min, zip(*found))


for run in (model, lambda x: WAYS["each block"](model, x)):
    run(x).sum().backward()                                                     # what is slow but once
(forward, plain), (_, checkpointed) = seconds(model), seconds(lambda x: WAYS["each block"](model, x))
print(f"Time: {checkpointed / plain:.2f} times as long; a second forward alone would be {1 + forward / plain:.2f}, "
      f"for forward takes {forward / plain:.0%} of a step here.")


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way, color in zip(WAYS, ("#d95f02", "#7570b3", "#1b9e77")):
        left.plot(depths, [peak / MiB for peak in peaks[way]], marker="o", markersize=4, color=color, label=way)
        right.plot([held / MiB for held in through[way]], marker="o", markersize=2.5, linewidth=1, color=color, label=way)
    left.set(title="The most memory of a step", xlabel="L, blocks", ylabel="MiB", xticks=depths, ylim=(0, None))
    right.set(title=f"Through one step, L = {L}", xlabel="blocks passed: forward | backward, and forward again", ylabel="MiB",
              ylim=(0, None))
    right.axvline(L - 0.5, color="0.7", linewidth=0.8, zorder=0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "memory.png")
print(f"The picture: {arguments.out / 'memory.png'}")
