"""Attention patterns to look at: a picture, and a page to click through, which needs nothing but a browser."""
import numpy as np

from ..serialization import write_atomically
from .points import chosen

PATTERNS = "*attn.hook_pattern"
DIGITS = 5                                      # of a weight on a page: 0.00001 of a row is nothing to look at


def draw_patterns(captured, path, tokens=None, key_tokens=None, row=0, names=PATTERNS, columns=6):
    """A picture of the patterns of one row of the batch: a small map for each head, a query in each line, a key in each column."""
    from ..training.metrics import new_figure, write_png
    maps = [(f"{name.removesuffix('.hook_pattern')}, head {h}", A) for name, heads in _patterns(captured, names, row).items()
            for h, A in enumerate(heads)]
    lines = -(-len(maps) // columns)
    figure = new_figure(2.1 * min(columns, len(maps)), 2.2 * lines)
    axes = figure.subplots(lines, min(columns, len(maps)), squeeze=False).ravel()
    for place, (title, A) in zip(axes, maps):
        place.imshow(A, cmap="Blues", vmin=0, vmax=1)
        place.set_title(title, fontsize=7, parse_math=False)
        _tick(place, A.shape, tokens, key_tokens if key_tokens is not None else tokens)
    for place in axes[len(maps):]:
        place.set_axis_off()
    write_png(figure, path)


def to_html(captured, tokens, path, key_tokens=None, row=0, names=PATTERNS):
    """A page for the patterns of one row: layers, heads and tokens to click on. One file, which loads nothing; written atomically.

    tokens: a text for each of the Tq places, shown as it is; key_tokens for the Tk, where these are others (cross-attention). ValueError
    where their number is another one. H · Tq · Tk numbers a layer, up to 9 bytes each. Needs the package `attnview` (ImportError).
    """
    try:
        from attnview import AttentionPattern, AttentionStudy, render_html
    except ImportError:
        raise ImportError("to_html draws with the package attnview, which is not installed: pip install attnview (or "
                          "pip install 'tinygrad_tf[viz]')") from None
    queries, keys = _texts(tokens), _texts(tokens if key_tokens is None else key_tokens)
    found = _patterns(captured, names, row)
    for name, A in found.items():
        if A.shape[1:] != (len(queries), len(keys)):
            raise ValueError(f"to_html: {name} has {A.shape[1]} queries and {A.shape[2]} keys, but there are {len(queries)} tokens and "
                             f"{len(keys)} key tokens; pass one text for each place")
        if not np.isfinite(A).all():
            raise ValueError(f"to_html: {name} is not finite: detect_anomaly() tells where that began")
    shown = [AttentionPattern.from_data(A.astype(np.float64).round(DIGITS), query_tokens=queries, key_tokens=keys) for A in found.values()]
    study = AttentionStudy(tuple(shown), tuple(_texts(name.removesuffix(".hook_pattern") for name in found)))
    write_atomically(path, render_html(study, title="Attention"))


def _patterns(captured, names, row):
    """{name: A [H, Tq, Tk]} of one row of the batch."""
    found = {name: captured.array(name) for name in chosen(captured, names)}
    for name, A in found.items():
        if not name.endswith("hook_pattern"):
            raise ValueError(f"explain: {name} is no pattern: what is shown are weights, of which each row sums to 1")
        if not 0 <= row < A.shape[0]:
            raise IndexError(f"explain: there is no row {row} in a batch of {A.shape[0]}")
    return {name: A[row] for name, A in found.items()}


def _texts(tokens):
    """Texts of which none is a place that attnview fills in, __QUERY__, or code that it looks for: a mark that nobody sees parts those."""
    return [str(token).replace("__", "_\u2060_").replace("=>", "=\u2060>") for token in tokens]


def _tick(axes, shape, tokens, key_tokens):
    """Names at the places, as long as they can be read."""
    for n, texts, set_ticks, labels in (shape[0], tokens, axes.set_yticks, axes.get_yticklabels), (
            shape[1], key_tokens, axes.set_xticks, axes.get_xticklabels):
        if texts is None or n > 16:
            set_ticks([])
            continue
        set_ticks(range(n), [repr(str(x))[1:-1][:10] for x in texts], fontsize=5)
        for label in labels():
            label.set_parse_math(False)
            label.set_rotation(90 if set_ticks == axes.set_xticks else 0)
