"""What each trick gives: the training step of train_step.py with one of them undone at a time.

    python examples/benchmarks/ablation.py [--size a b] [--only NAME …] [--rounds 9] [--quick] [--out FOLDER]

The library has no switches for its tricks. This script undoes them from outside, in a process of its own for each, which takes turns
with a process in which nothing is undone; printed is how many times as long the step takes without the trick, turn by turn. In the
last line all of them are undone. Writes ablation.json and ablation.png.
"""
import argparse
import json
import math
import os
import statistics
from pathlib import Path

import train_step
from turns import Worker, at_least_one, make_folder, processor, serve, timed

# --- in a worker: the tricks, undone -------------------------------------------------------------------------------------------
#
# Each function undoes one, before the model is made.

def allocator():
    """Freed arrays go back to the system, as the C library would have it. (See `prepare`, which leaves tune_allocator out.)"""


def whole_arrays():
    """Activations and AdamW over whole arrays, not in pieces that stay in the cache; AdamW one parameter at a time."""
    from tinygrad_tf.ops import _rows
    from tinygrad_tf.optim import pieces
    _rows.PIECE = pieces.PIECE = math.inf
    pieces.SMALL = 0


def row_sums():
    """Sums and maxima of rows by NumPy's own `sum` and `max`, not by products with ones and by argmax."""
    from tinygrad_tf.ops import _rows, attention
    fast, moderate = _rows._has_fast_rows, attention.exp_of_moderate

    def with_fast_rows(z):                                  # softmax without its maximum stays, which asks the same question
        _rows._has_fast_rows = fast
        found = moderate(z)
        _rows._has_fast_rows = slow
        return found

    def slow(x, axis):
        return False
    _rows._has_fast_rows, attention.exp_of_moderate = slow, with_fast_rows


def softmax_shift():
    """Attention takes the maximum of each row off its scores, also where none is large."""
    from tinygrad_tf.ops import attention
    attention.exp_of_moderate = lambda z: (None, None)


def new_sums():
    """Where two gradients meet, their sum is a new array; the first to reach a leaf is copied."""
    from tinygrad_tf import autograd
    autograd._REFERENCES = -1


def flat_products():
    """A linear layer as B products of [T, C], not as one of [B · T, C]."""
    from tinygrad_tf.ops.linear import Linear

    def forward(self, x, w, b):
        self.saved = x, w
        return x @ w.T if b is None else x @ w.T + b

    def backward(self, dy):
        x, w = self.saved
        axes = tuple(range(dy.ndim - 1))
        dw = (dy.swapaxes(-1, -2) @ x).sum(axes[:-1]) if self.needs[1] else None
        return dy @ w if self.needs[0] else None, dw, dy.sum(axes) if self.needs[2] else None
    Linear.forward, Linear.backward = forward, backward


def einsum():
    """A linear layer by einsum."""
    import numpy as np

    from tinygrad_tf.ops.linear import Linear

    def forward(self, x, w, b):
        self.saved = x, w
        y = np.einsum("...i,oi->...o", x, w)
        return y if b is None else y + b

    def backward(self, dy):
        x, w = self.saved
        axes = tuple(range(dy.ndim - 1))
        return np.einsum("...o,oi->...i", dy, w), np.einsum("bto,bti->oi", dy, x), dy.sum(axes) if self.needs[2] else None
    Linear.forward, Linear.backward = forward, backward


def cubes():
    """x ** 3 in GELU, which calls `pow` for each element."""
    import numpy as np

    from tinygrad_tf.ops.activation import GeluTanh

    def curve(self, xp, x, y, slope=None):
        c = np.float32(math.sqrt(2 / math.pi))
        t = np.tanh(c * (x + np.float32(0.044715) * x ** 3))
        y[...] = 0.5 * x * (1 + t)
        if slope is not None:
            slope[...] = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * np.float32(0.044715) * x * x)
    GeluTanh.curve = curve


def fused():
    """LayerNorm, GELU, attention and cross entropy from small operations, each of which keeps and makes arrays of its own."""
    import tinygrad_tf as torch
    from tinygrad_tf.nn import functional as F

    def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
        centred = x - x.mean(-1, keepdim=True)
        return centred / ((centred * centred).mean(-1, keepdim=True) + eps).sqrt() * weight + bias

    def gelu(x, approximate="none"):
        return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())

    def attention(q, k, v, is_causal):
        T = q.shape[-2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    def cross_entropy(logits, targets):
        shifted = logits - logits.amax(-1, keepdim=True)
        return (shifted.exp().sum(-1).log() - shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).mean()
    F.layer_norm, F.gelu, F.scaled_dot_product_attention, F.cross_entropy = layer_norm, gelu, attention, cross_entropy
    torch.nn.LayerNorm.forward = lambda self, x: layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def settings():
    """NumPy's setting for floating-point errors is made anew for each operation."""
    import numpy as np

    from tinygrad_tf import autograd
    autograd.enter_quiet, autograd.leave_quiet = lambda: np.seterr(all="ignore"), lambda before: np.seterr(**before)


def subnormals():
    """Numbers below 1.2e-38 are computed with as they are."""
    import tinygrad_tf as torch
    torch.set_flush_denormal(False)


def float64():
    """float64 everywhere."""
    import tinygrad_tf as torch
    torch.set_default_dtype(torch.float64)


TRICKS = {"allocator": allocator, "float32": float64, "fused operations": fused, "flat products": flat_products,
          "products, not einsum": einsum, "x · x · x": cubes, "pieces": whole_arrays, "row sums and maxima": row_sums,
          "softmax without its maximum": softmax_shift,
          "sums in place": new_sums, "error setting made once": settings, "subnormals as 0": subnormals}
EXCLUDED_FROM_ALL = ("products, not einsum", "x · x · x")      # of what is undone together: others stand in their place


def undo(name):
    for trick in [name] if name in TRICKS else [] if name is None else [t for t in TRICKS if t not in EXCLUDED_FROM_ALL]:
        TRICKS[trick]()


ALL = "all of them"


def prepare(name, sizes, calls):
    """A worker: its first loss, and a function that answers with the seconds of a step."""
    import tinygrad_tf as torch
    torch.set_flush_denormal(True)
    undo(name)
    if name not in ("allocator", ALL):
        torch.backend.tune_allocator()
    step = train_step.build(torch, torch.nn, torch.nn.functional, **sizes)
    return [step() for _ in range(2)][0], lambda message: timed(step, calls)


# --- here: in turns ------------------------------------------------------------------------------------------------------------

def measure(size, names, rounds, quick):
    """[{"trick", "size", "ratio": {…}, "seconds", "loss"}], a process for each trick beside one that has them all."""
    sizes, calls = (train_step.QUICK, 1) if quick else (train_step.SIZES[size], train_step.STEPS_A_TURN[size])
    command = [__file__, "--worker"]

    def worker(name):
        return Worker([*command, json.dumps([name, sizes, calls])], 1)
    base = worker(None)
    for name in names:
        other = worker(name)
        pairs = [(other.ask(), base.ask()) for _ in range(rounds)]
        other.close()
        ratios = [without / with_ for without, with_ in pairs]
        yield {"trick": name, "size": size, "loss": other.hello, "base_loss": base.hello, "seconds": [without for without, _ in pairs],
               "base_seconds": [with_ for _, with_ in pairs],
               "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}}
    base.close()


def draw(rows, path):
    from matplotlib.figure import Figure
    names, sizes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("trick", "size"))
    figure = Figure(figsize=(8, 0.45 * len(names) + 1.4), layout="constrained")
    axis, height = figure.add_subplot(), 0.8 / len(sizes)
    for row in rows:
        y = names.index(row["trick"]) + (sizes.index(row["size"]) - (len(sizes) - 1) / 2) * height
        axis.barh(y, row["ratio"]["median"] - 1, height, left=1, color=f"C{sizes.index(row['size'])}",
                  label=f"size {row['size']}" if row["trick"] == names[0] else None)
        axis.plot([row["ratio"]["min"], row["ratio"]["max"]], [y, y], color="black", linewidth=0.8)
    axis.set(yticks=range(len(names)), yticklabels=names, xlabel="time of a training step without it ÷ with it",
             title=f"What each trick gives: {processor()}, 1 thread")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=sorted(train_step.SIZES), default=["a"])
    parser.add_argument("--only", nargs="+", choices=[*TRICKS, ALL], default=[*TRICKS, ALL])
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds: does it run?")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-ablation"))
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return serve(lambda: prepare(*arguments.worker))
    make_folder(arguments.out)
    print(f"{processor()}, {os.cpu_count()} cores, 1 thread: a training step without the trick ÷ with it", flush=True)
    rows = []
    for size in arguments.size:
        for row in measure(size, arguments.only, 2 if arguments.quick else arguments.rounds, arguments.quick):
            rows.append(row)
            print("size {size}  {trick:22s}".format(**row) + "{median:6.2f}  ({min:.2f} to {max:.2f})".format(**row["ratio"]), flush=True)
    (arguments.out / "ablation.json").write_text(json.dumps({"machine": processor(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    draw(rows, arguments.out / "ablation.png")
    print(f"written: ablation.json and ablation.png in {arguments.out}")


if __name__ == "__main__":
    main()
