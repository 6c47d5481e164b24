"""Sentences as vectors: the mean state of their tokens, of length 1; two that mean the same point the same way. (Reimers, Gurevych 2019)"""
from pathlib import Path

import numpy as np

from ..arguments import whole_number
from ..creation import as_tensor
from ..data.collate import padded
from ..generation import inference
from ..models import Encoder
from ..models.common import device_of_model
from ..nn import functional as F
from .config import PretrainedError
from .tokenizers import require_mean

LONGEST = 512                   # tokens of a sentence, where nothing else is said
LARGEST, READABLE = 20, 40      # inches of a picture, and rows that can still be told by their labels


def embed(known, sentences, batch_size=32):
    """Vectors [N, C] of N texts, each of length 1: v = m / ‖m‖, m = Σ_t state_t / T over the real tokens.

    known: a `Pretrained` with an encoder and its tokenizer. Texts that are longer than the model reads are cut at the end. Those of
    similar length are read together, padded to the longest. Raises PretrainedError, and TypeError for a str in the place of a list.
    """
    if isinstance(sentences, str):
        raise TypeError("embed: expected a list of texts, got one str; write [text]")
    if not isinstance(known.model, Encoder) or known.tokenizer is None:
        raise PretrainedError(f"embed: sentences are read by an encoder with a tokenizer, such as from_pretrained('minilm'), not by "
                              f"{type(known.model).__name__}")
    batch_size = whole_number("embed", "batch_size", batch_size, least=1)
    if known.path is not None:
        require_mean(known.path)
    rows = [framed(known, text) for text in sentences]
    vectors = np.zeros((len(rows), known.model.dim), np.float32)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    with inference(known.model):
        for start in range(0, len(rows), batch_size):
            chosen = order[start:start + batch_size]
            vectors[chosen] = mean_states(known.model, [rows[i] for i in chosen]).cpu().numpy()
    return vectors


def framed(known, text):
    """[CLS] … [SEP], as the model was trained."""
    tokenizer = known.tokenizer
    longest = min(known.longest_text or LONGEST, known.model.max_seq_len)
    return [tokenizer.bos_id, *tokenizer.encode(text)[:max(longest - 2, 0)].tolist(), tokenizer.eos_id]


def mean_states(model, rows):
    """v [B, C] of rows of ids."""
    ids, valid = (as_tensor(x, device=device_of_model(model)) for x in padded(rows))
    weights = valid.to(dtype=next(model.parameters()).dtype)
    states = model(ids, valid_tokens=valid)                                             # [B, T, C]
    means = (weights[:, None] @ states)[:, 0] / weights.sum(dim=-1, keepdim=True)
    return F.normalize(means, dim=-1)


def similarities(vectors):
    """cos of the angle between each two, [N, N]: 1 for the same direction, 0 for nothing in common."""
    return vectors @ vectors.T


def table(sentences, vectors, width=40):
    """The similarities as text: a number for each two sentences, the sentences at the left."""
    scores = similarities(vectors)
    labels = [text if len(text) <= width else text[:width - 1] + "…" for text in (" ".join(s.split()) for s in sentences)]
    widest = max(map(len, labels), default=0)
    head = " " * (widest + 5) + "".join(f"{i + 1:7d}" for i in range(len(labels)))
    return "\n".join([head, *(f"{i + 1:3d}  {label:{widest}s}" + "".join(f"{s:7.3f}" for s in row)
                             for i, (label, row) in enumerate(zip(labels, scores)))])


def draw(sentences, vectors, path):
    """The same as a picture: the darker, the more alike. However many there are, it fits on a screen; texts stand there while they fit."""
    from ..training.metrics import new_figure, write_png
    N = len(sentences)
    figure = new_figure(min(4.5 + 0.45 * N, LARGEST), min(1.6 + 0.4 * N, LARGEST))
    axes = figure.subplots()
    scores = similarities(vectors)
    image = axes.imshow(scores, cmap="Blues", vmin=0, vmax=1)
    if N <= READABLE:
        labels = [text if len(text) <= 40 else text[:39] + "…" for text in (" ".join(s.split()) for s in sentences)]
        axes.set_yticks(range(N), labels, fontsize=8, parse_math=False)         # a $ is a $
        axes.set_xticks(range(N), [str(i + 1) for i in range(N)], fontsize=8)
    if N <= READABLE // 2:
        for i, row in enumerate(scores):
            for j, s in enumerate(row):
                axes.text(j, i, f"{s:.2f}", ha="center", va="center", fontsize=7, color="white" if s > 0.6 else "black")
    figure.colorbar(image, label="cosine")
    write_png(figure, Path(path))
