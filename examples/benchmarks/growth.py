"""How the cost of a training step grows with T, C, L and the batch, and how much of it is matrix products.

    python examples/benchmarks/growth.py [--rounds 5] [--quick] [--out FOLDER]

The model of train_step.py, from V 65, T 128, B 8, L 4, H 4, C 128, with one of the four doubled again and again. Beside each step, in
turn with it, stand its matrix products alone, forward and backward at their shapes in plain NumPy (guard.py): the floor under it. On
one thread. Printed are both, the share of the products, and the exponent p of the growth since the line before: time ∝ xᵖ, 1 where
twice the size takes twice the time. Writes growth.json and growth.png.
"""
import argparse
import json
import math
import statistics
import time
from pathlib import Path

import guard  # sets the threads, before NumPy is loaded
import train_step
from turns import at_least_one, make_folder, processor, timed

BASE = dict(V=65, T=128, B=8, L=4, H=4, C=128)
VALUES = {"T": (32, 64, 128, 256, 512, 1024), "C": (32, 64, 128, 256, 512), "L": (1, 2, 4, 8, 16), "B": (1, 2, 4, 8, 16, 32)}
MEANINGS = {"T": "length of a text", "C": "width", "L": "layers", "B": "texts in a batch"}
TURN = 0.1                                      # seconds that a turn takes, about
WARM_UP = 20                                    # steps: from N(0, 1) the first softmaxes are so steep that tiny numbers slow products down


def measure(sizes, rounds):
    """Medians, in seconds, of a step and of its products, in turn."""
    runs = train_step.build(*train_step.modules("tinygrad_tf", 1), **sizes), guard.floor(**sizes)
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        if time.perf_counter() < begin + 20 * TURN:
            runs[0]()
    calls = [max(1, round(TURN / max(timed(run), timed(run)))) for run in runs]
    pairs = [[timed(run, n) for run, n in zip(runs, calls)] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*pairs)]


def rows_of(name, values, base, rounds):
    before = None
    for value in values:
        sizes = {**base, name: value}
        step, floor = measure(sizes, rounds)
        row = {"name": name, "value": value, "step": step, "floor": floor, "gflops": guard.flops(**sizes) / floor / 1e9}
        if before:
            row["exponent"] = math.log(step / before["step"]) / math.log(value / before["value"])
        before = row
        yield row


def shown(row):
    growth = f"{row['exponent']:6.2f}" if "exponent" in row else ""
    return (f"{row['name']} {row['value']:5d}{1e3 * row['step']:11.2f} ms{1e3 * row['floor']:11.2f} ms{row['floor'] / row['step']:8.0%}"
            f"{row['gflops']:10.0f}    {growth}")


def draw(rows, base, path):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    for i, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        axis, chosen = figure.add_subplot(2, 2, i + 1), [row for row in rows if row["name"] == name]
        x = [row["value"] for row in chosen]
        for key, label in (("step", "a training step"), ("floor", "its matrix products")):
            axis.loglog(x, [1e3 * row[key] for row in chosen], "o-", base=2, label=label)
        start = 1e3 * chosen[-1]["step"] / x[-1]
        axis.loglog(x, [start * v for v in x], ":", color="grey", base=2, label="twice the size, twice the time")
        axis.set_xticks(x, map(str, x))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set(xlabel=f"{name}, {MEANINGS[name]}", ylabel="ms")
        axis.legend(fontsize=8)
    figure.suptitle(f"{processor()}, 1 thread; from {', '.join(f'{k} {v}' for k, v in base.items())}", fontsize=10)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny models, two rounds: does it run?")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-growth"))
    arguments = parser.parse_args()
    make_folder(arguments.out)
    base, rounds = (train_step.QUICK, 2) if arguments.quick else (BASE, arguments.rounds)
    print(f"{processor()}, 1 thread, from {base}")
    print(f"{'':7s}{'step':>11s}   {'products':>11s}   {'share':>5s}   GFLOP/s    exponent")
    rows = []
    for name, values in VALUES.items():
        for row in rows_of(name, (2, 4) if arguments.quick else values, base, rounds):
            rows.append(row)
            print(shown(row), flush=True)
    found = {"machine": processor(), "base": base, "rows": rows}
    (arguments.out / "growth.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(rows, base, arguments.out / "growth.png")
    print(f"written: growth.json and growth.png in {arguments.out}")


if __name__ == "__main__":
    main()
