"""Attention with the whole table of scores, and in tiles: time and memory against T, on the CPU.

    python examples/benchmarks/flash.py [--T 512 1024 … 8192] [--rounds 3] [--quick] [--out FOLDER]

Forward and backward of causal attention, B = 1, H = 8, Dh = 64, float32; and of a window of the last 256 keys, as a mask that
dense adds to its scores, and as a band that tiles follow. Each measurement is a process of its own; the ways take turns, so that a
machine whose speed drifts favours none. Printed are the median time, and the peak of what NumPy allocates beyond q, k, v and
the gradient that comes in (tracemalloc, in a step that is not timed). Writes flash.json. Dense at T = 8192 takes 5 GB.
"""
import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
from turns import environment

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf.backend import tune_allocator

B, H, DH, WINDOW = 1, 8, 64, 256
WAYS = {                                        # name → (backend, options)
    "dense": ("dense", {"is_causal": True}),
    "tiled": ("tiled", {"is_causal": True}),
    "dense window": ("dense", {"window": WINDOW}),
    "tiled window": ("tiled", {"window": WINDOW})}


def step(way, T):
    """A function of one forward and backward pass. The gradients are dropped, and q, k and v are made once."""
    backend, options = WAYS[way]
    q, k, v = (torch.randn(B, H, T, DH, requires_grad=True) for _ in range(3))
    upstream = torch.randn(B, H, T, DH)

    def run():
        with torch.sdpa_backend(backend):
            F.scaled_dot_product_attention(q, k, v, **options).backward(upstream)
        q.grad = k.grad = v.grad = None
    return run


def worker(way, T, trace):
    """Prints the seconds of one step, or the bytes at its peak."""
    tune_allocator()
    step(way, 64)()                             # what is loaded and compiled at first use
    run = step(way, T)
    if trace:
        tracemalloc.start()
        run()
        print(tracemalloc.get_traced_memory()[1])
    else:
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start)


def ask(way, T, trace, threads):
    """What a worker process prints."""
    command = [sys.executable, __file__, "--worker", way, "--T", str(T)] + ["--trace"] * trace
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment(threads)).stdout)


def measure(lengths, rounds, threads):
    """A row for each T: {"T": T, way: {"seconds": [...], "bytes": n}}"""
    for T in lengths:
        row = {"T": T, **{way: {"seconds": [], "bytes": int(ask(way, T, True, threads))} for way in WAYS}}
        for _ in range(rounds):
            for way in WAYS:
                row[way]["seconds"].append(ask(way, T, False, threads))
        yield row


def shown(row):
    cells = [f"{statistics.median(row[way]['seconds']):9.3f} s {row[way]['bytes'] / 2**20:8.1f} MiB" for way in WAYS]
    dense, tiled = (row[way] for way in ("dense", "tiled"))
    seconds = statistics.median(a / b for a, b in zip(tiled["seconds"], dense["seconds"]))
    return f"{row['T']:6d}  " + "  ".join(cells) + f"   {seconds:5.2f}  1/{dense['bytes'] / tiled['bytes']:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--T", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="T = 128 and 256, once")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-flash"), help="folder for flash.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker, arguments.T[0], arguments.trace)
    lengths, rounds = ([128, 256], 1) if arguments.quick else (arguments.T, arguments.rounds)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, "
          f"{arguments.threads} thread(s), median of {rounds}; the last columns: tiled ÷ dense, causal, time and memory")
    print(f"{'T':>6s}  " + "  ".join(f"{way:>24s}" for way in WAYS) + f"   {'time':>5s}  memory")
    rows = []
    for row in measure(lengths, rounds, arguments.threads):
        rows.append(row)
        print(shown(row), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {"B": B, "H": H, "Dh": DH, "window": WINDOW, "threads": arguments.threads, "numpy": np.__version__, "rows": rows}
    (arguments.out / "flash.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
