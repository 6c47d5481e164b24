"""MiniGPT trained in float32, float16 with a GradScaler, and bfloat16: losses and times.    python examples/benchmarks/precision.py

The same seed, batches and schedule. The table: the mean training loss of the last 51 steps (by default steps 250 to 300) and what
it differs by from float32's, the validation loss (always evaluated in float32), the median time of a step in units of float32's,
and the scale of the loss at the end. Training is chaotic: the row "control" is float32 throughout, from weights that were rounded to
float16 once, at the beginning, and what it differs by is chance. So the means over several seeds are compared; exit status 1 where one
differs by more than --tolerance. On a CPU 16 bits save no time: what is rounded is multiplied in float32. Without ml_dtypes bfloat16
is left out.
"""
import argparse
import dataclasses
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")            # before NumPy is imported

import numpy as np  # noqa: E402

import tinygrad_tf as torch  # noqa: E402
from tinygrad_tf.backend import tune_allocator  # noqa: E402
from tinygrad_tf.training import PRESETS, Trainer  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--tolerance", type=float, default=0.01, help="largest relative difference of the mean loss from float32's")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
arguments = parser.parse_args()
tune_allocator()

LAST, CONTROL = 51, "control"
rows = ["float32", CONTROL, "float16", *(["bfloat16"] if importlib.util.find_spec("ml_dtypes") else [])]
config = dataclasses.replace(PRESETS[arguments.preset], steps=arguments.steps, eval_every=arguments.steps)


def measure(row, seed):
    """(mean loss of the last steps, validation loss, seconds of a step, scale at the end) of one run."""
    settings = dataclasses.replace(config, seed=seed, precision="float32" if row == CONTROL else row)
    with tempfile.TemporaryDirectory() as folder:
        trainer, took = Trainer(settings, ["python-docs"], Path(folder) / "run", arguments.device), []
        if row == CONTROL:
            with torch.no_grad():
                for p in trainer.model.parameters():
                    p.copy_(p.half())
        trainer.run(report=lambda **numbers: took.append(time.perf_counter()))
        losses, validation = trainer.metrics.column("train_loss")[1], trainer.metrics.column("validation_loss")[1][-1]
    return float(np.mean(losses[-LAST:])), float(validation), statistics.median(np.diff(took)), trainer.scaler.get_scale()


print(f"{arguments.preset}, {config.steps} steps of {config.batch_size} × {config.context} tokens, C = {config.dim}, L = {config.layers}")
print("seed   precision   mean loss of the last steps   difference   validation   difference   time of a step    scale", flush=True)
found = {row: [] for row in rows}
for seed in arguments.seeds:
    for row in rows:
        loss, validation, seconds, scale = measure(row, seed)
        found[row].append((loss, validation, seconds))
        loss32, validation32, seconds32 = found["float32"][-1]
        print(f"{seed:4d}   {row:9s}   {loss:27.4f}   {loss / loss32 - 1:+10.2%}   {validation:10.4f}   "
              f"{validation / validation32 - 1:+10.2%}   {seconds / seconds32:5.2f} × {1e3 * seconds32:4.0f} ms   {scale:6.0f}", flush=True)
means = {row: np.mean(found[row], axis=0) for row in rows}
for row, (loss, validation, _) in means.items():
    loss32, validation32, _ = means["float32"]
    print(f"mean   {row:9s}   {loss:27.4f}   {loss / loss32 - 1:+10.2%}   {validation:10.4f}   {validation / validation32 - 1:+10.2%}")
worst = max(abs(loss / means["float32"][0] - 1) for row, (loss, *_) in means.items() if row != CONTROL)
print(f"Largest difference of the mean loss over {len(arguments.seeds)} seeds: {worst:.2%}; allowed: {arguments.tolerance:.0%}")
sys.exit(worst > arguments.tolerance)
