"""What to watch while a run trains, in files that can be read at any moment: metrics.jsonl, speed.csv, monitor.png (guide 17.2).

metrics.csv holds what a run computes, and two equal runs write equal ones. Here is also what differs: time and memory.
"""
import json
import math
import os
import sys
import time
from numbers import Integral
from pathlib import Path

import numpy as np

from ..cuda import memory_allocated
from ..serialization import replacing
from .callbacks import Callback
from .metrics import DARK, PALE, PART, Metrics, draw_losses, new_figure, read_metrics, smoothed, thinned, write_png

SPEED = ("step", "tokens_per_second", "memory_bytes")
FIRST_PICTURE = 0.5             # seconds that one is held to cost before there was any
MOST_NAMES = 8                  # of parts of the model, beside their curves
MiB = 2 ** 20
PANELS = {                      # title, what a healthy run shows there, what the axis counts
    "loss": ("Loss", "falls, validation stays near training", "nats per token"),
    "gradient_norm": ("Gradient norm, before clipping", "moves within bounds", ""),
    "learning_rate": ("Learning rate", "follows its schedule", ""),
    "tokens_per_second": ("Tokens per second", "level", ""),
    "memory_bytes": ("Memory", "level in the end", "MiB"),
    "expert_load": ("Load of the fullest expert", "near 1", "in fair shares"),
}


class Monitor(Callback):
    """Writes a line of metrics.jsonl at each step, speed.csv at each checkpoint, and draws monitor.png now and then.

    A picture is drawn after a checkpoint, and `seconds` after the last one; but not before `share` of the time may be spent on it. The
    run computes the same with it and without. Where a file cannot be written, an OSError ends the run, whose last checkpoint is whole.
    """

    def __init__(self, seconds=10.0, share=0.05):
        if not (seconds >= 0 and 0 < share <= 1):
            raise ValueError(f"Monitor: seconds must be at least 0 and share in (0, 1], got {seconds} and {share}")
        self.seconds, self.share, self.speed = seconds, share, None

    def on_start(self, trainer):
        """Drops what the files have of steps that are yet to be made: the run was stopped after its last checkpoint, or begins anew."""
        self.lines = Path(trainer.folder) / "metrics.jsonl"
        self.speed = Metrics(trainer.folder, fields=SPEED, name="speed.csv")
        self.drawn_at, self.drawn_step, self.cost = time.monotonic(), None, FIRST_PICTURE
        kept = _whole_lines(self.lines, trainer.step)
        with replacing(self.lines) as file:
            file.writelines(line for _, line in kept)
        for row, _ in kept:
            self.speed.add(**row)
        self.speed.write()

    def on_step(self, trainer, numbers):
        row = {**numbers, "tokens_per_second": _rate(numbers), "memory_bytes": memory_bytes(trainer.device)}
        _append(self.lines, _as_line(row))
        self.speed.add(**row)
        self._draw_if_due(trainer, self.seconds)

    def on_save(self, trainer, path):
        if self.speed is not None:                      # None: the run saves once before it starts
            self.speed.write()
            self._draw_if_due(trainer, 0)

    def on_end(self, trainer, complete):
        if self.drawn_step != trainer.step:
            self.draw(trainer)
        self.speed = None

    def _draw_if_due(self, trainer, seconds):
        since = time.monotonic() - self.drawn_at
        if since >= seconds and since * self.share >= self.cost:
            self.draw(trainer)

    def draw(self, trainer):
        """monitor.png, six panels: all that there is since the first step."""
        begun = time.monotonic()
        columns = {name: table.column(name) for table in (trainer.metrics, self.speed) for name in table.fields}
        _draw(lambda panels: _draw_run(panels, columns), Path(trainer.folder) / "monitor.png")
        self.drawn_at, self.drawn_step = time.monotonic(), trainer.step
        self.cost = self.drawn_at - begun


# --- the lines ------------------------------------------------------------------------------------------------------------

def _as_line(row):
    """A JSON object; what is no finite number is null, since not every reader of JSON knows NaN."""
    return json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False).encode() + b"\n"


def _plain(value):
    if value is None or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def _append(path, line):
    """Opened for each line: nothing waits in a buffer, and whoever follows the file sees it at once."""
    try:
        with open(path, "ab") as file:
            file.write(line)
    except OSError as error:                            # of a full disk, which does not say which file
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _whole_lines(path, last):
    """[(row, its line)] of the steps up to `last`, in their order; of two lines about one step the later, and none that is not ours."""
    found = {}
    with open(path if path.is_file() else os.devnull, "rb") as file:
        for line in file:
            row = _parsed(line)
            if row and 0 < row["step"] <= last:
                found[row["step"]] = row, line
    return [found[step] for step in sorted(found)]


def _parsed(line):
    """The row of a line, None where it is none: a JSON object of numbers, or null, with a step."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else {}
        ours = type(row["step"]) is int and all(name in row for name in SPEED) and all(map(_is_number, row.values()))
        return row if ours else None
    except (ValueError, TypeError, LookupError, RecursionError, AttributeError):
        return None


def _is_number(value):
    return value is None or type(value) in (int, float) and abs(value) <= sys.float_info.max


# --- what differs from run to run -----------------------------------------------------------------------------------------

def _rate(numbers):
    tokens, seconds = numbers.get("tokens"), numbers.get("seconds")
    return tokens / seconds if tokens is not None and seconds else None


def memory_bytes(device):
    """Of the arrays that are alive on a GPU; for the CPU `resident_bytes`."""
    return memory_allocated(device) if device.type == "cuda" else resident_bytes()


def resident_bytes():
    """The memory of this process that is in RAM now; where there is no /proc, the most that there ever was; None on Windows."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _most_resident_bytes()


def _most_resident_bytes():
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- the pictures ---------------------------------------------------------------------------------------------------------

def draw_runs(folders, path):
    """One picture of several runs, a colour for each, in the same six panels.

    Losses per token can be compared where text and tokenizer are the same. OSError for a folder without metrics.
    """
    names = [Path(folder).name for folder in folders]
    names = names if len(set(names)) == len(names) else list(map(str, folders))
    runs = {name: _columns(read_metrics(folder)) for name, folder in zip(names, folders)}
    _draw(lambda panels: _draw_side_by_side(panels, runs), path)


def _columns(rows):
    """{name: (steps, values)} of rows, as `Metrics.column` gives them."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [(row["step"], row[name]) for row in rows if row.get(name) is not None] for name in names}
    return {name: tuple(np.array(pairs, dtype=np.float64).reshape(-1, 2).T) for name, pairs in found.items()}


def _draw(fill, path):
    """A figure with the six panels, filled by a function, in a file."""
    figure = new_figure(13, 7, dpi=100, layout=None)    # a layout that is computed takes as long as the drawing
    figure.subplots_adjust(left=0.05, right=0.985, bottom=0.07, top=0.95, wspace=0.2, hspace=0.28)
    panels = dict(zip(PANELS, figure.subplots(2, 3).flat))
    fill(panels)
    for axes, (title, sign, unit) in zip(panels.values(), PANELS.values()):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_title(sign, loc="right", fontsize=8, color="0.45")
        axes.set(xlabel="step", ylabel=unit)
        axes.spines[["top", "right"]].set_visible(False)
    _set_scales(panels)
    write_png(figure, path)


def _set_scales(panels):
    norms, experts = panels["gradient_norm"], panels["expert_load"]
    norms.set_yscale("log")
    low, high = norms.get_ylim()
    norms.set_ylim(top=high * (high / low) ** 0.3)      # room for the names
    for name in "tokens_per_second", "memory_bytes":
        panels[name].set_ylim(0, 1.1 * panels[name].get_ylim()[1])
    if any(len(line.get_xdata()) for line in experts.lines):
        experts.axhline(1, color="0.55", linewidth=0.8, linestyle="--", zorder=0)
    else:
        experts.set_axis_off()
        experts.text(0.5, 0.5, "no experts in this model", transform=experts.transAxes, ha="center", color="0.45")


def _draw_run(panels, columns):
    draw_losses(panels["loss"], columns["train_loss"], columns["validation_loss"])
    panels["loss"].legend(frameon=False, fontsize=8)
    _draw_norms(panels["gradient_norm"], columns)
    for name in "learning_rate", "memory_bytes":
        panels[name].plot(*thinned(*_in_units(columns, name)), color=DARK, linewidth=1.4)
    for name in "tokens_per_second", "expert_load":
        curve = _in_units(columns, name)
        panels[name].plot(*thinned(*curve), color=PALE, linewidth=0.6)
        panels[name].plot(*smoothed(*curve)[0], color=DARK, linewidth=1.4)


def _draw_norms(axes, columns):
    """Grey the whole, in colours moving means: black of the whole, the others of its parts from the input on; some are named."""
    from matplotlib import colormaps
    parts = [name for name in columns if name.startswith(PART)]
    named = {parts[i] for i in np.linspace(0, len(parts) - 1, MOST_NAMES).astype(int)} if parts else ()
    axes.plot(*thinned(*columns["gradient_norm"]), color="0.75", linewidth=0.6)
    for name, color in zip(parts, colormaps["viridis"](np.linspace(0, 0.95, len(parts)))):
        label = name.removeprefix(PART) if name in named else None
        axes.plot(*smoothed(*columns[name])[0], color=color, linewidth=1, label=label)
    axes.plot(*smoothed(*columns["gradient_norm"])[0], color="black", linewidth=1.4, label="all")
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper right")


def _draw_side_by_side(panels, runs):
    """Moving means of what jumps from batch to batch; strong what is held out."""
    for i, (name, columns) in enumerate(runs.items()):
        color = f"C{i % 10}"
        for panel, column in {**dict(zip(PANELS, PANELS)), "loss": "train_loss"}.items():
            curve = _in_units(columns, column)
            even = panel in ("learning_rate", "memory_bytes")
            panels[panel].plot(*(thinned(*curve) if even else smoothed(*curve)[0]), color=color, linewidth=1)
        panels["loss"].plot(*_in_units(columns, "validation_loss"), color=color, linewidth=1.8, marker="o", markersize=4,
                           label=f" {name}" if name.startswith("_") else name)      # Matplotlib hides labels that begin with _
    for text in panels["loss"].legend(frameon=False, fontsize=8).get_texts():
        text.set_parse_math(False)              # a $ in the name of a folder is a $


def _in_units(columns, name):
    """(steps, values) as the axis counts them; empty where a run has none."""
    steps, values = columns.get(name, (np.empty(0), np.empty(0)))
    return steps, values / MiB if name == "memory_bytes" else values
