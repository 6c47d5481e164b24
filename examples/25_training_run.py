"""A run that is watched, interrupted, resumed and compared.      python examples/25_training_run.py [--quick] [--device cuda] [--out DIR]

A small mixture of experts learns letters, with a Monitor beside it: the six signals of the guide's table, a line a step. The same run is
then stopped in the middle and goes on; its newest checkpoint is torn in two, and it goes on from the one before: each time it ends with the
same bits. Last, other schedules beside it. About 12 seconds on a laptop; `--quick` takes 6. Writes monitor.png and schedules.png.
(guide 16.1, 16.4, 17.2)
"""
import argparse
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import tinygrad_tf as torch
from tinygrad_tf.data import load_text
from tinygrad_tf.optim.lr_scheduler import SCHEDULES
from tinygrad_tf.training import Callback, TrainConfig, Trainer
from tinygrad_tf.training.metrics import read_metrics
from tinygrad_tf.training.monitor import Monitor, draw_runs

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="fewer steps")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-25"), help="folder for the pictures")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
steps, every = (40, 10) if arguments.quick else (120, 20)
arguments.out.mkdir(parents=True, exist_ok=True)
work = tempfile.TemporaryDirectory()
folder = Path(work.name)
text = folder / "text.txt"
text.write_text(load_text()[:60_000], encoding="utf-8")


def new_run(name, schedule="cosine", callbacks=()):
    config = TrainConfig(context=32, dim=32, layers=2, heads=4, experts=4, batch_size=8, steps=steps, lr=2e-2, warmup=every // 2,
                         schedule=schedule, eval_every=every)
    return Trainer(config, text, folder / name, callbacks=[Monitor(), *callbacks])


# --- 1. watched -----------------------------------------------------------------------------------------------------------
through = new_run("cosine")
assert through.run()
rows = read_metrics(through.folder / "metrics.jsonl")
print("step   training   validation   gradient norm, of the parts                    learning rate   tokens/s    MiB   load")
for row in rows[every - 1::every]:
    parts = {name.removeprefix("gradient_norm/"): norm for name, norm in row.items() if name.startswith("gradient_norm/")}
    print(f"{row['step']:4d}{row['train_loss']:11.3f}{row['validation_loss']:13.3f}{row['gradient_norm']:11.2f}, of "
          f"{'  '.join(f'{norm:.2f}' for norm in parts.values()):28s}{row['learning_rate']:18.5f}{row['tokens_per_second']:11,.0f}"
          f"{row['memory_bytes'] / 2**20:7.0f}{row['expert_load']:7.2f}")
    assert abs(sum(norm ** 2 for norm in parts.values()) - row["gradient_norm"] ** 2) < 1e-4 * row["gradient_norm"] ** 2
print(f"The parts: {', '.join(parts)}. Their squares add up to that of the whole.\n")
assert [row["step"] for row in rows] == list(range(1, steps + 1)) and rows[-1]["validation_loss"] < rows[every - 1]["validation_loss"]
shutil.copy(through.folder / "monitor.png", arguments.out / "monitor.png")


# --- 2. interrupted, resumed ----------------------------------------------------------------------------------------------

class StopAt(Callback):
    """What Ctrl-C does, at a step that is known."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, numbers):
        if trainer.step == self.step:
            trainer.stop()


def same_as_through(trainer):
    """Weights, and every number that was computed on the way."""
    weights = all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), through.model.parameters()))
    return weights and (trainer.folder / "metrics.csv").read_bytes() == (through.folder / "metrics.csv").read_bytes()


middle = steps // 2 + 3                                                         # no evaluation is due there
stopped = new_run("stopped", callbacks=[StopAt(middle)])
assert not stopped.run() and stopped.step == middle
with open(stopped.folder / "metrics.jsonl", "a", encoding="utf-8") as file:     # as if it had been killed a little later
    file.write(f'{{"step": {middle + 1}, "train_lo')
resumed = Trainer.resume(stopped.folder, callbacks=[Monitor()])
assert resumed.step == middle and resumed.run() and same_as_through(resumed)
assert [row["step"] for row in read_metrics(resumed.folder / "metrics.jsonl")] == list(range(1, steps + 1))
print(f"Stopped after step {middle}, half a line in its metrics, and resumed: weights and metrics.csv are equal bit for bit to those of "
      f"the run that was left alone.")

# --- 3. the newest checkpoint is torn -------------------------------------------------------------------------------------
newest = resumed.folder / "checkpoint.safetensors"
size = newest.stat().st_size
newest.unlink()                                                                 # best.safetensors may be another name of it
newest.write_bytes((resumed.folder / f"checkpoint-{steps - every:06d}.safetensors").read_bytes()[:size // 2])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    older = Trainer.resume(resumed.folder, callbacks=[Monitor()])
print(f"\nOf {os.path.basename(newest)} only the first {size // 2:,} bytes are left:\n  {caught[0].message}".replace(str(folder), "…"))
assert older.step == steps - every and "the one before it is used instead" in str(caught[0].message)
assert older.run() and same_as_through(older)
print(f"Resumed at step {steps - every}, it ends with the same bits again.\n")

# --- 4. compared ----------------------------------------------------------------------------------------------------------
schedules = ["cosine", "wsd"] if arguments.quick else list(SCHEDULES)
for schedule in schedules[1:]:
    assert new_run(schedule, schedule).run()
print("schedule    learning rate at the end / its peak    validation loss")
for schedule in schedules:
    rows = read_metrics(folder / schedule)
    rates = [row["learning_rate"] for row in rows]
    print(f"{schedule:12s}{rates[-1]:22.5f} / {max(rates):.5f}{rows[-1]['validation_loss']:19.3f}")
    assert rates[:every // 2] == [row["learning_rate"] for row in read_metrics(through.folder)][:every // 2], "all warm up alike"
    assert (rates[-1] == max(rates)) == (schedule == "constant") and max(rates) == 2e-2
print("Which one wins so short a race is chance; what a rate does to loss and norms is in the picture.")
draw_runs([folder / schedule for schedule in schedules], arguments.out / "schedules.png")
print(f"\nThe pictures: {arguments.out / 'monitor.png'}, {arguments.out / 'schedules.png'}")
work.cleanup()
