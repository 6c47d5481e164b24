"""Shards: the rows of a batch in threads, on one model.      python examples/30_shards.py [--quick] [--out DIR]

A mean over a batch is a sum of means over its parts, each by its share, and so is its gradient. First by hand; then at once, in threads;
then the same bits ten times; then dropout, which asks for more care; and the time, which is printed and proves nothing: a small
model spends it in Python, of which one thread runs at a time. About 10 seconds; `--quick` takes 3. Writes shards.png.
"""
import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")                              # before NumPy is loaded: one BLAS thread a shard

import tinygrad_tf as torch
from tinygrad_tf.data import LMBatch
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.training import Shards

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-30"), help="folder for shards.png")
parser.add_argument("--quick", action="store_true", help="smaller models, fewer steps")
arguments = parser.parse_args()
torch.set_default_device("cpu")                                                 # whose cores the threads share
torch.backend.tune_allocator()
V, T = 65, 16 if arguments.quick else 64


def model_of(C, dropout=0.0):
    torch.manual_seed(0)
    return MiniGPT(V, T, C, 4, 4 * C, 2, dropout, norm_first=True)


def batch_of(B):
    """Rows of which the first have few targets that count."""
    ids = torch.randint(0, V, (B, T + 1))
    targets = ids[:, 1:].clone()
    targets[:2, 3:] = -100
    return LMBatch(ids[:, :-1], targets)


def loss_of(part):
    return model(**part)[1]


def gradients(backward):
    """(loss, all gradients in one vector)"""
    model.zero_grad()
    torch.manual_seed(1)
    loss = backward()
    return loss, torch.cat([p.grad.reshape(-1) for p in model.parameters()])


# --- 1. by hand: one part after another -----------------------------------------------------------------------------------
model, batch = model_of(32), batch_of(6)


def whole():
    loss = loss_of(batch)
    loss.backward()
    return loss.item()


def by_hand():
    total = 0.0
    for part, share in batch.parts(2):
        loss = loss_of(part)
        print(f"  {len(part.token_ids)} rows, {part.num_targets} targets: {share:.4f} · {loss.item():.4f}")
        (share * loss).backward()
        total += share * loss.item()
    return total


loss, expected = gradients(whole)
print(f"loss of the batch {loss:.4f}, and of its parts, by their share of the targets:")
parts_loss, found = gradients(by_hand)
print(f"  = {parts_loss:.4f}; largest difference of a gradient {(found - expected).abs().max().item():.0e}\n")
assert abs(parts_loss - loss) < 1e-5 and torch.allclose(found, expected, atol=1e-6)

# --- 2. at once: the same to rounding, and the same bits each time --------------------------------------------------------
for threads in 1, 2, 3:
    with Shards(threads) as shards:
        runs = [gradients(lambda: shards.backward(loss_of, batch)) for _ in range(10)]
    same = sum(loss == runs[0][0] and torch.equal(g, runs[0][1]) for loss, g in runs)
    difference = (runs[0][1] - expected).abs().max().item()
    print(f"{threads} shard{'s' * (threads > 1)}: differs from the whole by {difference:.0e}; {same} of 10 runs have the same bits")
    assert same == 10 and difference < 1e-6 and (threads > 1 or difference == 0)

# --- 3. dropout: a stream of random numbers for each shard ------------------------------------------------------------------
model = model_of(32, dropout=0.2)
streams = {}
for threads in 2, 3:
    with Shards(threads) as shards:
        streams[threads] = [gradients(lambda: shards.backward(loss_of, batch)) for _ in range(2)]
again = all(torch.equal(first[1], second[1]) for first, second in streams.values())
print(f"\nwith dropout: the same bits again {again}; loss with 2 shards {streams[2][0][0]:.4f}, with 3 {streams[3][0][0]:.4f}")
assert again and streams[2][0][0] != streams[3][0][0]

# --- 4. time, side by side ------------------------------------------------------------------------------------------------
SIZES = (16, 32) if arguments.quick else (16, 32, 64, 128, 256)
ROUNDS = 3 if arguments.quick else 7
times = {1: [], 2: []}
batch = batch_of(8)
print(f"\nms for forward and backward of {len(batch.token_ids)} rows, on {os.cpu_count()} cores:   one thread   two shards   ratio")
for C in SIZES:
    model, found = model_of(C), {1: [], 2: []}
    with Shards(1) as one, Shards(2) as two:
        for shards in (one, two) * (ROUNDS + 1):
            begin = time.perf_counter()
            shards.backward(loss_of, batch)
            found[shards.threads].append(time.perf_counter() - begin)
    for threads, seconds in found.items():
        times[threads].append(1e3 * min(seconds[1:]))
    print(f"  C = {C:3d}{times[1][-1]:56.1f}{times[2][-1]:13.1f}{times[2][-1] / times[1][-1]:8.2f}")


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for threads, color, label in ((1, "#7570b3", "one thread"), (2, "#1b9e77", "two shards")):
        left.loglog(SIZES, times[threads], "o-", color=color, label=label)
    right.semilogx(SIZES, [b / a for a, b in zip(times[1], times[2])], "o-", color="#1b9e77")
    right.axhline(1, color="0.6", linewidth=0.8)
    right.axhline(0.5, color="0.6", linewidth=0.8, linestyle="--")
    right.annotate("nothing won", (SIZES[-1], 1), ha="right", va="bottom", fontsize=8, color="0.4")
    right.annotate("half the time", (SIZES[-1], 0.5), ha="right", va="bottom", fontsize=8, color="0.4")
    left.set(title="Forward and backward of a batch", ylabel="ms")
    ticks = [ms for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500) if min(times[1]) / 2 < ms < 2 * max(times[1])]
    left.set_yticks(ticks, map(str, ticks))
    right.set(title="Two shards ÷ one thread", ylim=(0, None))
    for axes in (left, right):
        axes.set_xlabel("C, features of a token")
        axes.set_xticks(SIZES, map(str, SIZES))
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "shards.png")
print(f"The picture: {arguments.out / 'shards.png'}")
