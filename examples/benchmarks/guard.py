"""Has a training step become slower, measured against its own matrix products?      python examples/benchmarks/guard.py

The step of train_step.py, size a, beside a floor: the matrix products of its forward and backward at their shapes, in plain NumPy,
and nothing else. Both run in this process, a few at a time in turn, on one thread; the median of the ratios hardly depends on
how fast the machine is, nor on what else it does. It is printed beside the one in guard.json, with a warning where it is more
than a quarter larger. The exit status is 0 all the same: time decides no test. --record writes guard.json, on a quiet machine.
"""
import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")       # before NumPy is loaded
os.environ.pop("OPENBLAS_CORETYPE", None)                   # set on some machines for old builds: NumPy's products suffer
os.environ.pop("OPENBLAS_L2_SIZE", None)

import numpy as np
import train_step
from turns import at_least_one, processor, timed

RECORDED = Path(__file__).with_name("guard.json")
TOLERANCE = 1.25
LIMIT = 50                                      # seconds, however slow the machine is


def shapes(V, T, B, L, H, C):
    """{what: (how often in a step, shape of x, shape of y)} of the products x @ y of one forward pass."""
    N, Dh = B * T, C // H
    return {"q, k, v, out": (4 * L, (N, C), (C, C)), "up": (L, (N, C), (C, 4 * C)), "down": (L, (N, 4 * C), (4 * C, C)),
            "scores": (L, (B, H, T, Dh), (B, H, Dh, T)), "values": (L, (B, H, T, T), (B, H, T, Dh)), "head": (1, (N, C), (C, V))}


def products(**sizes):
    """[(x, y, out)] of a step: each product of forward, and its two of backward, dx = g @ yᵀ and dy = xᵀ @ g."""
    rng, found = np.random.default_rng(0), []
    for count, *operands in shapes(**sizes).values():
        x, y = (rng.standard_normal(shape, np.float32) for shape in operands)
        g, dx, dy = x @ y, np.empty_like(x), np.empty_like(y)
        found += count * [(x, y, np.empty_like(g)), (g, y.swapaxes(-1, -2), dx), (x.swapaxes(-1, -2), g, dy)]
    return found


def floor(**sizes):
    """A function of these products, one after the other."""
    todo = products(**sizes)

    def run():
        for x, y, out in todo:
            np.matmul(x, y, out=out)
    return run


def flops(**sizes):
    return sum(2 * x.size * y.shape[-1] for x, y, _ in products(**sizes))


def measure(rounds, calls, sizes):
    """(seconds a step, seconds of its products), a pair a turn; fewer turns where LIMIT is reached."""
    ours, least = train_step.build(*train_step.modules("tinygrad_tf", 1), **sizes), floor(**sizes)
    begin, pairs = time.perf_counter(), []
    for run in (ours, least):
        timed(run, 3)                                       # what is loaded, compiled and paged in at first use
    while len(pairs) < rounds and (not pairs or time.perf_counter() - begin < LIMIT):
        pairs.append((timed(ours, calls), timed(least, calls)))
    return pairs


def verdict(found, recorded):
    """The sentence beside the ratio; `recorded` is what guard.json holds, or None."""
    if recorded is None:
        return "Nothing is recorded to hold it against: --record, on a quiet machine."
    if found["sizes"] != recorded["sizes"]:
        return f"Another model than the recorded one, {recorded['sizes']}: nothing to hold it against."
    change, where = found["ratio"] / recorded["ratio"], f"{recorded['ratio']:.2f}, recorded {recorded['date']} on {recorded['machine']}"
    other = "" if found["machine"] == recorded["machine"] else " Another machine: its ratio may differ by itself."
    if change > TOLERANCE:
        return f"WARNING: {change - 1:.0%} more than {where}. The step has become slower beside its matrix products.{other}"
    return f"No warning: {change - 1:+.0%} beside {where}.{other}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=40)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds: does it run?")
    parser.add_argument("--record", action="store_true", help="keep the ratio, for others to be held against")
    parser.add_argument("--file", type=Path, default=RECORDED, help="instead of guard.json beside this script")
    arguments = parser.parse_args()
    if arguments.quick and arguments.record and arguments.file == RECORDED:
        parser.error("--record keeps what a full run has measured: leave --quick out, or name another --file")
    sizes, rounds, calls = (train_step.QUICK, 2, 2) if arguments.quick else (train_step.SIZES["a"], arguments.rounds, 5)
    pairs = measure(rounds, calls, sizes)
    ratio = statistics.median(step / least for step, least in pairs)
    step, least = (statistics.median(column) for column in zip(*pairs))
    found = {"ratio": round(ratio, 3), "machine": processor(), "numpy": np.__version__, "python": platform.python_version(),
             "date": date.today().isoformat(), "rounds": len(pairs), "sizes": sizes}
    print(f"{found['machine']}, NumPy {np.__version__}, Python {found['python']}, 1 thread, {len(pairs)} rounds")
    speed = flops(**sizes) / least / 1e9
    print(f"a step {1e3 * step:.2f} ms ÷ its matrix products {1e3 * least:.2f} ms ({speed:.0f} GFLOP/s) = {ratio:.2f}")
    print(verdict(found, json.loads(arguments.file.read_text(encoding="utf-8")) if arguments.file.exists() else None))
    if arguments.record:
        arguments.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"recorded in {arguments.file}")


if __name__ == "__main__":
    main()
