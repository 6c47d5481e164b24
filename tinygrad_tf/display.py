"""How a tensor prints: PyTorch's layout, with four decimals, aligned columns and `...` beyond 1000 elements."""
import math

import numpy as np

from . import dtypes
from .dtypes import widened

THRESHOLD, EDGE_ITEMS, LINE_WIDTH, PRECISION = 1000, 3, 80, 4


def tensor_repr(t):
    """tensor([[1., 2.]], dtype=torch.float64, grad_fn=<MulBackward0>)"""
    array = widened(t.array.get() if hasattr(t.array, "get") else t.array)
    indent = len("tensor(")
    body = _block(array, *_formatter(array), indent, array.size > THRESHOLD) if array.size else "[]"
    return _join("tensor(" + body, _notes(t), indent)


def _notes(t):
    """What PyTorch says after the numbers: the device, the shape where it cannot be seen, an unusual dtype, the history."""
    empty, default = t.array.size == 0, dtypes.get_default_dtype()
    if t.device.type != "cpu":
        yield f"device='{t.device}'"
    if empty and t.ndim != 1:
        yield f"size={tuple(t.shape)}"
    if t.dtype not in ((default,) if empty else (default, dtypes.int64, dtypes.bool_)):
        yield f"dtype={t.dtype}"
    if t.node is not None:
        yield f"grad_fn=<{t.node.name}Backward0>"
    elif t.requires_grad:
        yield "requires_grad=True"


def _join(text, notes, indent):
    """Notes go on the last line while it stays within the line width, else on a line of their own."""
    width = len(text) - text.rfind("\n") + 1
    for note in notes:
        if width + len(note) + 2 > LINE_WIDTH:
            text, width = f"{text},\n{' ' * indent}{note}", indent + len(note)
        else:
            text, width = f"{text}, {note}", width + len(note) + 2
    return text + ")"


def _shown(array):
    """The elements that appear in print."""
    if array.size <= THRESHOLD:
        return array.reshape(-1)
    keep = [np.r_[0:EDGE_ITEMS, n - EDGE_ITEMS:n] if n > 2 * EDGE_ITEMS else np.arange(n) for n in array.shape]
    return array[np.ix_(*keep)].reshape(-1)


def _formatter(array):
    """(a function element → text, its width). The widest element that is neither 0 nor inf nor NaN sets the width of all."""
    shown = _shown(array)
    if array.dtype.kind != "f":
        width = max(len(str(v)) for v in shown.tolist())
        return lambda v: str(v).rjust(width), width
    measured = shown[np.isfinite(shown) & (shown != 0)].astype(np.float64)
    style = _float_style(np.abs(measured))
    width = max([len(style(v)) for v in measured.tolist()], default=1)
    return lambda v: style(v).rjust(width), width


def _float_style(sizes):
    """Whole numbers as `2.`, others with four decimals; scientific where the range is too wide for that."""
    low, high = (sizes.min(), sizes.max()) if sizes.size else (1, 1)
    whole = bool((sizes == np.ceil(sizes)).all())
    if high / low > 1000 or high > 1e8 or not whole and low < 1e-4:
        return lambda v: f"{v:.{PRECISION}e}"
    if whole:
        return lambda v: f"{v:.0f}." if math.isfinite(v) else str(v)
    return lambda v: f"{v:.{PRECISION}f}"


def _block(array, text, width, indent, folded):
    """Nested brackets; a last axis is broken into lines of LINE_WIDTH, outer axes one block a line."""
    if array.ndim == 0:
        return text(array.item())
    cut = folded and len(array) > 2 * EDGE_ITEMS
    rows = [*array[:EDGE_ITEMS], None, *array[-EDGE_ITEMS:]] if cut else array
    if array.ndim == 1:
        cells = [" ..." if v is None else text(v.item()) for v in rows]
        per_line = max(1, (LINE_WIDTH - indent) // (width + 2))
        lines = [", ".join(cells[i:i + per_line]) for i in range(0, len(cells), per_line)]
        return "[" + f",\n{' ' * (indent + 1)}".join(lines) + "]"
    blocks = ["..." if r is None else _block(r, text, width, indent + 1, folded) for r in rows]
    return "[" + ("," + "\n" * (array.ndim - 1) + " " * (indent + 1)).join(blocks) + "]"
