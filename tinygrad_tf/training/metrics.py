"""The numbers of a run: rows in metrics.csv, and the curve in loss.png. No times: two runs with one seed write equal files."""
import io
import logging
import math
from pathlib import Path

import numpy as np

from ..serialization import write_atomically

FIELDS = ("step", "learning_rate", "train_loss", "gradient_norm", "validation_loss")
WITH_EXPERTS = (*FIELDS, "expert_load")         # of the fullest expert of all layers, in units of its fair share


class Metrics:
    """Rows of `fields`, one a step, kept in memory; what was not measured at a step is NaN here and empty in the file."""

    def __init__(self, folder, table=(), fields=FIELDS):
        """table: what `table()` gave, [N, fields]: a checkpoint holds it, and the files in `folder` are written from it alone."""
        self.folder, self.fields = Path(folder), fields
        self.rows = np.asarray(table, dtype=np.float64).reshape(-1, len(fields)).tolist()

    def table(self):
        return np.array(self.rows, dtype=np.float64).reshape(-1, len(self.fields))

    def add(self, **row):
        self.rows.append([math.nan if row.get(name) is None else float(row[name]) for name in self.fields])

    def column(self, name):
        """(steps, values) where the column is filled."""
        values = self.table()[:, self.fields.index(name)]
        filled = ~np.isnan(values)
        return self.table()[filled, 0].astype(int), values[filled]

    def write(self):
        """metrics.csv, every number with all its digits."""
        lines = [",".join(self.fields)]
        for step, *numbers in self.rows:
            lines.append(",".join([str(int(step)), *("" if math.isnan(v) else repr(v) for v in numbers)]))
        write_atomically(self.folder / "metrics.csv", "\n".join(lines) + "\n")

    def draw(self, baselines=None):
        """loss.png: training loss (pale: each batch, dark: a moving mean), validation loss, and the n-gram baselines."""
        logging.getLogger("matplotlib").setLevel(logging.ERROR)     # its first run says that it builds a font cache
        from matplotlib.figure import Figure
        figure = Figure(figsize=(8, 4.8), layout="constrained")     # no pyplot: works without a display
        axes = figure.subplots()
        self._draw_losses(axes)
        steps = self.column("train_loss")[0]
        _draw_baselines(axes, baselines or {})
        axes.set(xlabel="step", ylabel="loss (nats per character)", title="MiniGPT: training and validation loss",
                 xlim=(0, max(steps[-1:], default=1) * 1.13))       # room for the names of the baselines
        axes.legend(frameon=False, loc="upper right")
        axes.spines[["top", "right"]].set_visible(False)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=130)
        write_atomically(self.folder / "loss.png", image.getvalue())

    def _draw_losses(self, axes):
        steps, losses = self.column("train_loss")
        around = max(1, len(losses) // 50)
        axes.plot(steps, losses, color="#9ecae1", linewidth=0.6, label="training, each batch")
        axes.plot(steps[around:len(steps) - around], moving_mean(losses, around), color="#08519c", linewidth=1.6,
                  label=f"training, mean of {2 * around + 1} batches")
        axes.plot(*self.column("validation_loss"), color="#d95f02", linewidth=1.6, marker="o", markersize=4, label="validation")


def _draw_baselines(axes, baselines):
    """A dashed line for each, its name at the right end, beyond the curves."""
    for n, nats in sorted(baselines.items()):
        axes.axhline(nats, color="0.55", linewidth=0.8, linestyle="--", zorder=0)
        axes.annotate(f"{n}-gram {nats:.2f}", (1, nats), xycoords=("axes fraction", "data"), xytext=(0, 2),
                      textcoords="offset points", ha="right", va="bottom", fontsize=8, color="0.35")


def moving_mean(values, around):
    """y_i = mean(x_i … x_{i+2·around}), the mean around x_{i+around}; full windows only.    x: [N], y: [N − 2·around], or [0]

    A window cut at an end would lean to one side, and a falling curve would begin below the batches that it sums up.
    """
    window = 2 * around + 1
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[window:] - sums[:-window]) / window
