"""From logits to the next token: temperature, top-k, and a draw (guide 12.1)."""
from numbers import Integral, Real

from .. import creation
from ..arguments import require_tensors
from ..dtypes import float32
from ..ops.arithmetic import isfinite
from ..ops.softmax import softmax

SMALLEST = 2.0 ** -126         # the smallest normal float32: less could round to 0, and 0 / 0 is NaN


def sample(logits, temperature=1.0, top_k=None, generator=None):
    """logits [B, V_vocab] → ids [B, 1], drawn from softmax(logits / temperature).

    temperature 0 is greedy (the first of equals); top_k keeps the k largest logits, a k beyond V_vocab keeps all.
    An id whose logit is −inf is never drawn. Raises ValueError for a temperature that is negative or not finite, for
    k < 1, for logits of another shape, and for a row that holds NaN or +inf or is all −inf; TypeError for other types.
    """
    check_options(temperature, top_k)
    require_tensors("sample", logits=logits)
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"sample: logits must have shape [B, V_vocab] with at least one id to draw, got {tuple(logits.shape)}")
    device, logits = logits.device, logits.detach().cpu()       # one download a step; what follows is small, and the stream is here
    largest = logits.amax(dim=-1, keepdim=True)
    if not isfinite(largest).all():
        raise ValueError("sample: a row of logits holds NaN or +inf, or is all -inf; nothing can be drawn from it")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True).to(device)
    # The largest logit becomes 0, so that nothing overflows, however small the temperature is.
    logits = (logits - largest).to(float32) / max(temperature, SMALLEST)
    if top_k is not None and top_k < logits.shape[-1]:
        values, ids = logits.topk(top_k, dim=-1)
        logits = creation.full_like(logits, -float("inf")).scatter_(-1, ids, values)
    return creation.multinomial(softmax(logits, dim=-1), 1, generator=generator).to(device)


def check_options(temperature, top_k):
    check_number("sample", "temperature", temperature, Real, "a number")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"sample: temperature must be 0 (greedy) or positive and finite, got {temperature}")
    if top_k is None:
        return
    check_number("sample", "top_k", top_k, Integral, "an integer, or None to keep all")
    if top_k < 1:
        raise ValueError(f"sample: top_k must be at least 1, or None to keep all, got {top_k}")


def check_number(name, option, value, kind, what):
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}: {option} must be {what}, got {value!r} of type {type(value).__name__}")
