"""The logit lens: what a model would say if it had to speak after each layer."""
from collections.abc import Sequence

import numpy as np

from ..generation.inference import inference
from ..ops.softmax import softmax
from ..trace import Table
from .capture import capture, host
from .points import layers

WIDEST = 24                                     # tokens in a picture; more would be too small to read


class Lens(Sequence):
    """lens[l]: logits [B, T, V_vocab] after l layers: lens[0] of the embedding alone, lens[-1] those of the model. print(lens.table())"""

    def __init__(self, logits):
        self._logits = logits

    def __getitem__(self, layer):
        return self._logits[layer]

    def __len__(self):
        return len(self._logits)

    def probabilities(self, row=0, position=-1):
        """float array [L + 1, V_vocab] of what follows that position."""
        return np.stack([host(softmax(x[row, position].float(), -1).array) for x in self])

    def table(self, row=0, position=-1, decode=str, k=3):
        """After each layer the k likeliest tokens, and how probable that is which the model says in the end, and at which rank."""
        p = self.probabilities(row, position)
        said = int(p[-1].argmax())
        lines = [("embedding" if l == 0 else f"layer {l - 1}", "  ".join(f"{_text(decode, i)} {q[i]:.3f}" for i in _best(q, k)),
                  f"{q[said]:.3f}", int((q > q[said]).sum()) + 1) for l, q in enumerate(p)]
        return Table(["after", "likeliest", f"p({_text(decode, said)})", "rank"], lines)

    def draw(self, path, tokens=None, row=0, decode=str):
        """A picture: the likeliest token at each place after each layer, the darker the more probable. tokens: names of the places."""
        from ..training.metrics import new_figure, write_png
        T = min(self[0].shape[1], WIDEST)
        start = self[0].shape[1] - T
        p = np.stack([host(softmax(x[row, start:].float(), -1).array) for x in self])         # [L + 1, T, V_vocab]
        figure = new_figure(2 + 0.72 * T, 1.4 + 0.34 * len(self))
        axes = figure.subplots()
        axes.imshow(p.max(axis=-1), cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower")
        for l, t in np.ndindex(p.shape[:2]):
            axes.text(t, l, _text(decode, p[l, t].argmax())[:10], ha="center", va="center", fontsize=7, parse_math=False,
                      color="white" if p[l, t].max() > 0.6 else "black")
        axes.set_yticks(range(len(self)), ["embedding", *(f"layer {l}" for l in range(len(self) - 1))], fontsize=7)
        shown = [str(start + t) for t in range(T)] if tokens is None else [repr(str(x))[1:-1][:12] for x in list(tokens)[start:start + T]]
        for label in axes.set_xticks(range(T), shown, fontsize=7, rotation=45, ha="right") and axes.get_xticklabels():
            label.set_parse_math(False)
        axes.set(title="What follows each token, read after each layer", xlabel="token")
        write_png(figure, path)


def logit_lens(model, *inputs, **kwargs):
    """A `Lens`: lm_head(final_norm(x)) of the residual stream x before the first layer and after each; in evaluation mode, without graph.

    The last is what the model returns, bit for bit. Of post-norm models x is what a block returns. It is a probe of what can be read off,
    not of what the model has: nothing was trained to be read there, and early layers may have it in a form that the head does not read.
    ValueError for a model without blocks, final_norm and lm_head.
    """
    if any(getattr(model, part, None) is None for part in ("blocks", "final_norm", "lm_head")):
        raise ValueError(f"logit_lens: {type(model).__name__} has no head that reads its last layer; it takes a model with blocks, "
                         f"final_norm and lm_head, such as MiniGPT, Decoder or EncoderDecoder")
    blocks = [name.rpartition(".")[0] for name in layers(model)]
    after = [f"{name}.hook_resid_post" if block.norm_first else f"{name}.hook_normalized_resid_post"
             for name, block in zip(blocks, model.blocks)]
    names = [f"{blocks[0]}.hook_resid_pre", *after]
    with inference(model):
        seen = capture(model, *inputs, names=names, **kwargs)
        return Lens([model.lm_head(model.final_norm(seen[name])) for name in names])


def _best(p, k):
    return np.argsort(-p, kind="stable")[:k]


def _text(decode, i):
    """A token on one line, a space as a dot that can be seen."""
    return repr(decode(int(i)))[1:-1].replace(" ", "·")
