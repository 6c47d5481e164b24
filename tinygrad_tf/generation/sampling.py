"""From logits to the next token: temperature, top-k, and a draw (guide 12.1)."""
from .. import creation
from ..dtypes import float32
from ..ops.arithmetic import isfinite, isnan
from ..ops.softmax import softmax


def sample(logits, temperature=1.0, top_k=None, generator=None):
    """logits [B, V_vocab] → ids [B, 1].

    temperature 0 is greedy (the first of equals); top_k keeps the k largest logits, a k beyond V_vocab keeps all.
    An id whose logit is −inf is never drawn. Raises ValueError for a negative temperature, k < 1, NaN, or a row that is all −inf.
    """
    if not temperature >= 0:
        raise ValueError(f"sample: temperature must be 0 (greedy) or positive, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"sample: top_k must be at least 1, or None to keep all, got {top_k}")
    if isnan(logits).any() or not isfinite(logits).any(dim=-1).all():
        raise ValueError("sample: logits contain NaN, or a row without a single finite value; nothing can be drawn from it")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.to(float32) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        values, ids = logits.topk(top_k, dim=-1)
        logits = creation.full_like(logits, -float("inf")).scatter_(-1, ids, values)
    return creation.multinomial(softmax(logits, dim=-1), 1, generator=generator)
