"""The numbers of a run: rows in metrics.csv, and the curve in loss.png. No times: two runs with one seed write equal files."""
import csv
import io
import math
from pathlib import Path

from .checkpoint import write_atomically

FIELDS = ("step", "learning_rate", "train_loss", "gradient_norm", "validation_loss")


class Metrics:
    """Rows of FIELDS, one a step; `validation_loss` is empty between evaluations. Kept in memory and written whole."""

    def __init__(self, folder, rows=()):
        self.folder, self.rows = Path(folder), list(rows)

    @classmethod
    def resume(cls, folder, step):
        """The rows up to a step: what an interrupted run wrote after its checkpoint is computed again."""
        try:
            with open(Path(folder) / "metrics.csv", newline="", encoding="utf-8") as file:
                rows = [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]
        except FileNotFoundError:
            rows = []
        return cls(folder, [{**row, "step": int(row["step"])} for row in rows if row["step"] <= step])

    def add(self, **row):
        self.rows.append({name: row.get(name) for name in FIELDS})

    def column(self, name):
        """(steps, values) where the column is filled."""
        filled = [(row["step"], row[name]) for row in self.rows if row[name] is not None]
        return [s for s, _ in filled], [v for _, v in filled]

    def write(self):
        text = io.StringIO()
        writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow({k: "" if v is None else v if k == "step" else repr(v) for k, v in row.items()})
        write_atomically(self.folder / "metrics.csv", text.getvalue())

    def draw(self, baselines=None):
        """loss.png: training loss (pale: every step, dark: its running mean), validation loss, and the n-gram baselines."""
        from matplotlib.figure import Figure
        figure = Figure(figsize=(8, 4.8), layout="constrained")     # no pyplot: works without a display
        axes = figure.subplots()
        steps, losses = self.column("train_loss")
        axes.plot(steps, losses, color="#9ecae1", linewidth=0.6, label="training, each batch")
        axes.plot(steps, _running_mean(losses), color="#08519c", linewidth=1.6, label="training, running mean")
        axes.plot(*self.column("validation_loss"), color="#d95f02", marker="o", markersize=4, label="validation")
        for n, nats in sorted((baselines or {}).items()):
            if n > 1:                                               # the unigram's 3.2 nats would flatten the rest
                axes.axhline(nats, color="0.55", linewidth=0.8, linestyle="--")
                axes.annotate(f"{n}-gram {nats:.2f}", (1, nats), xycoords=("axes fraction", "data"), xytext=(-4, 2),
                              textcoords="offset points", ha="right", fontsize=8, color="0.35")
        axes.set(xlabel="step", ylabel="loss (nats per character)", title="MiniGPT: loss")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=130)
        write_atomically(self.folder / "loss.png", image.getvalue())


def _running_mean(values, decay=0.98):
    """Exponential running mean, corrected at the start as in Adam."""
    mean, out = 0.0, []
    for i, v in enumerate(values, 1):
        mean = decay * mean + (1 - decay) * v
        out.append(mean / (1 - math.pow(decay, i)))
    return out
