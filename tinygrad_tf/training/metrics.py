"""The numbers of a run: rows in metrics.csv, and the curve in loss.png. No times: two runs with one seed write equal files."""
import csv
import io
import json
import logging
import math
import reprlib
from pathlib import Path

import numpy as np

from ..backend import CPU, array_module, at_least_float32, to_device
from ..nn.utils import get_total_norm
from ..serialization import one_line, write_atomically

FIELDS = ("step", "learning_rate", "train_loss", "gradient_norm", "validation_loss")
WITH_EXPERTS = (*FIELDS, "expert_load")         # of the fullest expert of all layers, in units of its fair share
PART = "gradient_norm/"                         # + embedding, blocks.0, …
PALE, DARK = "#9ecae1", "#08519c"               # each batch, a moving mean
MOST_POINTS = 1000                              # pairs of them, of one curve in a picture


def fields_of(model, experts=False):
    """The columns of a run: FIELDS, the load of the fullest expert where there are some, and a gradient norm for each part of the model."""
    parts = dict.fromkeys(part_of(name) for name, _ in model.named_parameters())
    return (WITH_EXPERTS if experts else FIELDS) + tuple(PART + part for part in parts)


def part_of(name):
    """The part of a model that a parameter belongs to: the first word of its name, with the number of a block."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


def norms_by_module(model):
    """{"gradient_norm/<part>": ‖g‖₂} of the gradients g in each part; the squares add up to that of all, as `clip_grad_norm_` sees it.

    Tied parameters count once, in the part that is named first; 0 where there is no gradient.
    """
    grads = {PART + part_of(name): [] for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        if p.grad is not None and p.numel():
            grads[PART + part_of(name)].append(p.grad)
    squares = iter(_sums_of_squares([g.array for part in grads.values() for g in part]))
    return {part: _root(sum(next(squares) for _ in gs), gs) for part, gs in grads.items()}


def _sums_of_squares(arrays):
    """Σ x² of each array, as numbers; a GPU is waited for once."""
    if not arrays:
        return []
    flat = [at_least_float32(a.reshape(-1)) for a in arrays]
    with np.errstate(over="ignore", invalid="ignore"):
        sums = array_module(*flat).stack([array_module(a).vdot(a, a) for a in flat])
    return to_device(sums, CPU).tolist()


def _root(square, gradients):
    """√square; where the squares may have left the range of float32, the norm with the largest element divided out."""
    return math.sqrt(square) if 1e-24 < square < 1e36 else get_total_norm(gradients).item()


class Metrics:
    """Rows of `fields`, one a step, kept in memory; what was not measured at a step is NaN here and empty in the file."""

    def __init__(self, folder, table=(), fields=FIELDS, name="metrics.csv"):
        """table: what `table()` gave, [N, fields]: a checkpoint holds it, and the files in `folder` are written from it alone."""
        self.folder, self.fields, self.name = Path(folder), tuple(fields), name
        self.rows = np.asarray(table, dtype=np.float64).reshape(-1, len(fields)).tolist()

    def table(self):
        return np.array(self.rows, dtype=np.float64).reshape(-1, len(self.fields))

    def add(self, **row):
        self.rows.append([math.nan if row.get(name) is None else float(row[name]) for name in self.fields])

    def complete(self, **numbers):
        """Puts what was measured later into the last row."""
        for name, value in numbers.items():
            self.rows[-1][self.fields.index(name)] = float(value)

    def column(self, name):
        """(steps, values) where the column is filled."""
        i = self.fields.index(name)
        steps, values = np.array([(row[0], row[i]) for row in self.rows], dtype=np.float64).reshape(-1, 2).T
        filled = ~np.isnan(values)
        return steps[filled].astype(int), values[filled]

    def write(self):
        """The file, every number with all its digits."""
        lines = [",".join(self.fields), *(",".join(map(_cell, row)) for row in self.rows)]
        write_atomically(self.folder / self.name, "\n".join(lines) + "\n")

    def draw(self, baselines=None, unit="character", bytes_per_unit=None):
        """loss.png: training loss (pale: each batch, dark: a moving mean), validation loss, and the n-gram baselines.

        unit: what a token is called. bytes_per_unit: of UTF-8, in the mean; with it, the axis on the right says bits per byte.
        """
        figure = new_figure(8, 4.8)
        axes = figure.subplots()
        train = self.column("train_loss")
        draw_losses(axes, train, self.column("validation_loss"))
        _draw_baselines(axes, baselines or {})
        axes.set(xlabel="step", ylabel=f"loss (nats per {unit})", title="MiniGPT: training and validation loss",
                 xlim=(0, max(train[0][-1:], default=1) * 1.13))       # room for the names of the baselines
        axes.legend(frameon=False, loc="upper right")
        axes.spines[["top", "right"]].set_visible(False)
        if bytes_per_unit:
            bits = 1 / (math.log(2) * bytes_per_unit)
            axes.secondary_yaxis("right", functions=(lambda nats: nats * bits, lambda b: b / bits)).set_ylabel("bits per byte")
        write_png(figure, self.folder / "loss.png")


def _cell(value):
    return "" if math.isnan(value) else repr(value).removesuffix(".0")


def read_metrics(path):
    """The rows of a metrics.csv, a speed.csv or a metrics.jsonl: a list of {name: number, or None where nothing was measured}.

    Of a run's folder the fuller one of its files. A last line that is only half there, as a run that goes on may have it, is left out.
    ValueError for what is none of these files.
    """
    path = Path(path)
    if path.is_dir():
        path = path / ("metrics.jsonl" if (path / "metrics.jsonl").exists() else "metrics.csv")
    try:
        return _rows_of_lines(path) if path.suffix == ".jsonl" else _rows_of_csv(path)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path} holds no metrics of a run ({one_line(error)})") from None


def _rows_of_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        names, *lines = csv.reader(file, strict=True)
        return [_row({name: float(text) if text else None for name, text in zip(names, line, strict=True)}) for line in lines]


def _rows_of_lines(path):
    """Of a file with a JSON object in each line."""
    with path.open("rb") as file:
        return [_row(json.loads(line)) for line in file if line.endswith(b"\n")]


def _row(found):
    """A row, when it is one."""
    if not (isinstance(found, dict) and all(v is None or type(v) in (int, float) for v in found.values())):
        raise ValueError(f"expected names and numbers, got {reprlib.repr(found)}")
    return {**found, "step": int(found["step"])}


def draw_losses(axes, train, validation):
    """Two curves, each as (steps, values): pale every batch, dark a moving mean, and what is held out."""
    axes.plot(*thinned(*train), color=PALE, linewidth=0.6, label="training, each batch")
    means, window = smoothed(*train)
    axes.plot(*means, color=DARK, linewidth=1.6, label=f"training, mean of {window} batches")
    axes.plot(*validation, color="#d95f02", linewidth=1.6, marker="o", markersize=4, label="validation")


def _draw_baselines(axes, baselines):
    """A dashed line for each, its name at the right end, beyond the curves: above the line, or below it where the one above is near."""
    low, high = axes.get_ylim()
    above = math.inf
    for n, nats in sorted(baselines.items(), key=lambda item: -item[1]):
        near = above - nats < 0.04 * (high - low)
        axes.axhline(nats, color="0.55", linewidth=0.8, linestyle="--", zorder=0)
        axes.annotate(f"{n}-gram {nats:.2f}", (1, nats), xycoords=("axes fraction", "data"), xytext=(0, -2 if near else 2),
                      textcoords="offset points", ha="right", va="top" if near else "bottom", fontsize=8, color="0.35")
        above = math.inf if near else nats


def moving_mean(values, around):
    """y_i = mean(x_i … x_{i+2·around}), the mean around x_{i+around}; full windows only.    x: [N], y: [N − 2·around], or [0]

    A window cut at an end would lean to one side, and a falling curve would begin below the batches that it sums up.
    """
    window = 2 * around + 1
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[window:] - sums[:-window]) / window


def smoothed(steps, values):
    """((steps, moving mean), its window): a fiftieth of the values on each side."""
    around = max(1, len(values) // 50)
    return thinned(steps[around:len(steps) - around], moving_mean(values, around)), 2 * around + 1


def thinned(steps, values):
    """Fewer points that look the same, spikes and all: of each of many equal stretches the lowest and the highest."""
    if len(values) <= 2 * MOST_POINTS:
        return steps, values
    edges = np.linspace(0, len(values), MOST_POINTS + 1).astype(int)
    kept = sorted({a + i for a, b in zip(edges, edges[1:]) for i in (values[a:b].argmin(), values[a:b].argmax())})
    return steps[kept], values[kept]


def new_figure(width, height, dpi=130, layout="constrained"):
    logging.getLogger("matplotlib").setLevel(logging.ERROR)     # its first run says that it builds a font cache
    from matplotlib.figure import Figure
    return Figure(figsize=(width, height), dpi=dpi, layout=layout)   # no pyplot: works without a display


def write_png(figure, path):
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi="figure")
    write_atomically(path, image.getvalue())
