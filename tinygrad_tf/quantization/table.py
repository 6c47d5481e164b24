"""What low-bit weights cost and save, in one table: bytes, error, perplexity with standard errors, speed."""
import io
import math
import time
from dataclasses import dataclass

import numpy as np

from ..autograd import no_grad
from ..backend import CPU, to_device
from ..creation import as_tensor
from ..nn import functional as F
from ..serialization import save
from .model import bits_per_weight, quantized_linears

COLUMNS = ("weights", "bits a weight", "memory", "file", "output error", "perplexity", "nats above the first", "reads, tokens/s",
           "writes, tokens/s")


@dataclass
class Row:
    """One model. Sizes in bytes, losses in nats a token, speeds in tokens a second."""
    name: str
    bits: float                 # that are stored for each weight of the quantised matrices, scales included
    memory: int                 # all parameters and buffers
    file: int                   # the state dict as a safetensors file
    error: float                # RMS of what changed in the logits / RMS of the first model's logits
    loss: tuple                 # (mean, its standard error)
    difference: tuple           # the same of the loss above that of the first model, window by window
    reads: float                # a forward pass over windows; the median of the batches
    writes: float = None        # one token after another; None where nobody measured

    @property
    def perplexity(self):
        """(exp(loss), its standard error, exp(loss) · that of the loss)"""
        return math.exp(self.loss[0]), math.exp(self.loss[0]) * self.loss[1]


def compare(models, batches, write_speed=None):
    """A Row for each of {name: model}; the others are compared with the first.

    batches: [(inputs, targets), …] of held-out text, as `data.evaluation_batches` gives them. Each goes through all models in turn,
    so that all meet the same machine. write_speed: a function of a model → tokens a second.
    """
    if not models or not batches:
        raise ValueError(f"compare: at least one model and one batch are needed, got {len(models)} and {len(batches)}")
    for model in models.values():
        model.eval()
    measured = [_measured(list(models.values()), *batch) for batch in batches]
    tokens = np.concatenate([np.full(len(targets), targets.shape[1]) for _, targets in batches])
    losses = np.concatenate([losses for losses, _, _ in measured], axis=1)                  # [models, windows]
    changes = sum(changes for _, changes, _ in measured)
    speeds = np.median([targets.size / seconds for (_, targets), (_, _, seconds) in zip(batches, measured)], axis=0)
    return [Row(name, bits_per_weight(model) if quantized_linears(model) else 32, memory_bytes(model), file_bytes(model),
                math.sqrt(changes[i] / changes[-1]), mean_and_error(losses[i], tokens), mean_and_error(losses[i] - losses[0], tokens),
                speeds[i], write_speed and write_speed(model)) for i, (name, model) in enumerate(models.items())]


def _measured(models, inputs, targets):
    """Of one batch: Σ loss [models, windows]; Σ |change of the logits|² of each, and Σ |logits|² of the first; seconds of each."""
    inputs, targets = (as_tensor(ids, device=next(models[0].parameters()).device) for ids in (inputs, targets))
    losses, changes, seconds, first = [], [], [], None
    for model in models:                                                    # logits are large: no more than two at a time
        loss, logits, taken = _read(model, inputs, targets)
        first = logits if first is None else first
        losses.append(loss), changes.append(np.square(logits - first).sum()), seconds.append(taken)
    return np.array(losses), np.array([*changes, np.square(first).sum()]), np.array(seconds)


def _read(model, inputs, targets):
    """(Σ loss of each window, logits, seconds)"""
    begin = time.perf_counter()
    with no_grad():
        logits, _ = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none").reshape(*targets.shape)
    losses = to_device(loss.array, CPU).sum(axis=1, dtype=np.float64)       # here a GPU is waited for
    return losses, to_device(logits.array, CPU).astype(np.float64), time.perf_counter() - begin


def mean_and_error(sums, tokens):
    """(m, its standard error) of m = Σ sums / Σ tokens over windows, which may differ in length and are taken as independent.

    error² = n / (n − 1) · Σ (sums − m · tokens)² / (Σ tokens)²; for windows of one length that is variance / n. NaN for one window.
    """
    n, mean = len(sums), sums.sum() / tokens.sum()
    spread = np.square(sums - mean * tokens).sum()
    return float(mean), math.sqrt(n / (n - 1) * spread) / float(tokens.sum()) if n > 1 else math.nan


def memory_bytes(model):
    """Of all parameters and buffers, tied ones once."""
    return sum(t.array.nbytes for tensors in (model.parameters(), model.buffers()) for t in tensors)


def file_bytes(model):
    """Of the state dict as `save` writes it: a safetensors file."""
    file = io.BytesIO()
    save(model.state_dict(), file)
    return file.tell()


def as_text(rows):
    """The rows as a Markdown table, and a line about speed."""
    cells = [COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [[cell.rjust(width) for cell, width in zip(line, widths)] for line in cells]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    for line, cell in zip(lines, [COLUMNS[0], "-" * widths[0], *(row.name for row in rows)]):
        line[0] = cell.ljust(widths[0])                                     # names stand on the left
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", speed_line(rows)])


def _cells(row):
    perplexity, difference = (f"{mean:{sign}.4f} ± {error:.4f}" for sign, (mean, error) in (("", row.perplexity), ("+", row.difference)))
    writes = "" if row.writes is None else f"{row.writes:,.0f}"
    return (row.name, f"{row.bits:.2f}", f"{row.memory:,}", f"{row.file:,}", f"{row.error:.4f}", perplexity, difference,
            f"{row.reads:,.0f}", writes)


def speed_line(rows):
    """How much smaller the smallest model is than the first, and how fast, as measured."""
    first, smallest = rows[0], min(rows, key=lambda row: row.memory)
    writes = "" if None in (first.writes, smallest.writes) else f", writes at {smallest.writes / first.writes:.2f}"
    return (f"Smaller is not faster by itself: {smallest.name} takes {smallest.memory / first.memory:.2f} times the bytes of {first.name}, "
            f"and reads at {smallest.reads / first.reads:.2f} times its speed{writes}. Each product unpacks its weights first.")
