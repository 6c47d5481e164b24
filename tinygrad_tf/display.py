"""How a tensor prints: PyTorch's layout, with four decimals, aligned columns and `...` beyond 1000 elements."""
import math

import numpy as np

THRESHOLD, EDGE_ITEMS, LINE_WIDTH, PRECISION = 1000, 3, 80, 4


def tensor_repr(t, prefix="tensor("):
    """tensor([[1., 2.]], dtype=torch.float64, grad_fn=<MulBackward0>)"""
    from . import dtypes
    array = t.array.get() if hasattr(t.array, "get") else t.array
    notes = []
    if t.device.type != "cpu":
        notes.append(f"device='cuda:{t.device.index}'")
    if array.size == 0 and array.shape != (0,):
        notes.append(f"size={tuple(array.shape)}")
    plain = {"f": dtypes.get_default_dtype(), "i": dtypes.int64, "b": dtypes.bool_}
    empty_default = array.size == 0 and t.dtype is not dtypes.get_default_dtype()
    if empty_default or array.size and plain.get(array.dtype.kind) is not t.dtype:
        notes.append(f"dtype={t.dtype}")
    if t.node is not None:
        notes.append(f"grad_fn=<{t.node.name}Backward0>")
    elif t.requires_grad:
        notes.append("requires_grad=True")
    body = "[]" if array.size == 0 else _layout(array, _formatter(array), len(prefix))
    return _join(prefix + body, notes, len(prefix))


def _join(text, notes, indent):
    """Notes go on the last line while it stays within the line width, else on a line of their own."""
    width = len(text) - text.rfind("\n") - 1
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
    return array[np.ix_(*keep)].reshape(-1) if array.ndim else array.reshape(-1)


def _formatter(array):
    """A function element → text, all of one width."""
    shown = _shown(array)
    if array.dtype.kind != "f":
        width = max(len(str(v)) for v in shown.tolist())
        return lambda v: str(v).rjust(width)
    style = _float_style(shown.astype(np.float64))
    width = max(len(style(v)) for v in shown.tolist())
    return lambda v: style(v).rjust(width)


def _float_style(values):
    """Whole numbers as `2.`, else four decimals; scientific where the range is too wide for that."""
    finite = np.abs(values[np.isfinite(values) & (values != 0)])
    if finite.size == 0:
        return lambda v: f"{v:.0f}." if math.isfinite(v) else str(v)
    low, high = finite.min(), finite.max()
    whole = bool((np.trunc(finite) == finite).all())
    scientific = high / low > 1000 or high > 1e8 or (not whole and low < 1e-4)
    if whole and not (high / low > 1000 and high > 1e8 or high > 1e8):
        return lambda v: f"{v:.0f}." if math.isfinite(v) else str(v)
    if scientific:
        return lambda v: f"{v:.{PRECISION}e}" if math.isfinite(v) else str(v)
    return lambda v: f"{v:.{PRECISION}f}" if math.isfinite(v) else str(v)


def _layout(array, text, indent):
    """Nested brackets; a last axis is broken into lines of LINE_WIDTH, outer axes one block a line."""
    if array.ndim == 0:
        return text(array.item()).strip()
    folded = array.size > THRESHOLD
    return _block(array, text, indent, folded)


def _block(array, text, indent, folded):
    n = array.shape[0]
    cut = folded and n > 2 * EDGE_ITEMS
    rows = [*array[:EDGE_ITEMS], None, *array[-EDGE_ITEMS:]] if cut else list(array)
    if array.ndim == 1:
        cells = [" ..." if v is None else text(v.item()) for v in rows]
        per_line = max(1, (LINE_WIDTH - indent) // (len(text(array[0].item())) + 2))
        lines = [", ".join(cells[i:i + per_line]) for i in range(0, len(cells), per_line)]
        return "[" + f",\n{' ' * (indent + 1)}".join(lines) + "]"
    blocks = ["..." if r is None else _block(r, text, indent + 1, folded) for r in rows]
    return "[" + ("," + "\n" * (array.ndim - 1) + " " * (indent + 1)).join(blocks) + "]"
