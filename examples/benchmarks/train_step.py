"""One training step of a small GPT: tinygrad_tf beside PyTorch eager, the very same model code on both sides.

    python examples/benchmarks/train_step.py [--size a|b] [--threads 1] [--rounds 15]

Each library runs in a process of its own and takes its turn, a few steps at a time (A B A B …), so that a machine whose
speed drifts favours neither. Printed are the median, minimum and maximum of the time per step, and the median of the
ratios, turn by turn. Installs nothing; a library that is missing is left out. PyTorch's MKL takes a slow path on AMD
processors, so a ratio holds for the kind of machine that it was measured on.
"""
import argparse
import importlib
import importlib.util
import platform
import statistics

from turns import Worker, serve, timed

SIZES = {"a": dict(V=65, T=64, B=12, L=4, H=4, C=128), "b": dict(V=512, T=256, B=8, L=6, H=6, C=384)}
QUICK = dict(V=17, T=8, B=2, L=1, H=2, C=16)     # a tiny model, for --quick: does it run?
LIBRARIES = ("tinygrad_tf", "torch")
STEPS_A_TURN = {"a": 10, "b": 1}


def gpt(torch, nn, F, V, T, B, L, H, C):
    """Pre-norm decoder, tanh-GELU of width 4C, learned positions, tied head: ids and targets [B, T] to their loss."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
            self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))
            self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

        def forward(self, x):
            h = self.norm1(x)
            q, k, v = (proj(h).reshape(-1, T, H, C // H).transpose(1, 2) for proj in (self.q, self.k, self.v))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(a.transpose(1, 2).reshape(-1, T, C))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(V, C), nn.Embedding(T, C)
            self.blocks = nn.ModuleList([Block() for _ in range(L)])
            self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
            self.head.weight = self.token.weight

        def forward(self, ids, targets):
            x = self.token(ids) + self.position(torch.arange(T))
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).reshape(-1, V), targets.reshape(-1))

    return GPT()


def build(torch, nn, F, shards=1, **sizes):
    """A function of one step of that model, with AdamW and the norm of the gradients clipped to 1. It returns the loss.

    shards: parts of the batch at once, in ours.
    """
    torch.manual_seed(0)
    model = gpt(torch, nn, F, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, sizes["V"], (sizes["B"], sizes["T"] + 1))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    backward = whole if shards == 1 else importlib.import_module("tinygrad_tf.training").Shards(shards).backward

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = backward(model, inputs, targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss
    return step


def whole(model, *batch):
    """The gradients of all rows at once; the loss."""
    loss = model(*batch)
    loss.backward()
    return loss.item()


def modules(library, threads):
    """torch, torch.nn and torch.nn.functional of a library, ready to be timed.

    Subnormal numbers count as 0 in both: this model, whose head is an embedding as nn.Embedding begins it, makes thousands of them.
    """
    torch, nn, F = (importlib.import_module(library + part) for part in ("", ".nn", ".nn.functional"))
    torch.set_flush_denormal(True)
    if library == "torch":
        torch.set_num_threads(threads)
    else:
        torch.backend.tune_allocator()
    return torch, nn, F


def prepare(library, size, threads):
    """The losses of the first steps, and a function that answers with the seconds per step of one turn."""
    step = build(*modules(library, threads), **SIZES[size])
    losses = [step() for _ in range(3)]
    return losses, lambda message: timed(step, STEPS_A_TURN[size])


def measure(size, threads, rounds):
    """{library: [seconds per step of each turn]}, and the losses of the first steps, which must agree."""
    found = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    command = [__file__, "--size", size, "--threads", str(threads), "--worker"]
    workers = {name: Worker([*command, name], threads) for name in found}
    losses = {name: worker.hello for name, worker in workers.items()}
    times = {name: [] for name in found}
    for _ in range(rounds):
        for name, worker in workers.items():
            times[name].append(worker.ask())
    for worker in workers.values():
        worker.close()
    return times, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="a")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return serve(lambda: prepare(arguments.worker, arguments.size, arguments.threads))
    times, losses = measure(arguments.size, arguments.threads, arguments.rounds)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {arguments.threads} thread(s), "
          f"size {arguments.size}: {SIZES[arguments.size]}")
    print(f"{'library':14s}{'median ms':>11s}{'min':>9s}{'max':>9s}   loss of the first three steps")
    for name, seconds in times.items():
        ms = [1000 * s for s in seconds]
        print(f"{name:14s}{statistics.median(ms):11.2f}{min(ms):9.2f}{max(ms):9.2f}   {', '.join(f'{v:.4f}' for v in losses[name])}")
    if len(times) < 2:
        print("PyTorch is not installed: no ratio.")
        return
    ratios = [a / b for a, b in zip(times["tinygrad_tf"], times["torch"])]
    print(f"tinygrad_tf ÷ torch: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
