"""The generation loop: prefill the prompt in one pass, then decode token by token from the cache (guide 9.8)."""
from contextlib import contextmanager
from numbers import Integral

from ..arguments import require_tensors
from ..autograd import no_grad
from ..ops.shape import cat
from .cache import KVCache
from .sampling import check_number, check_options, sample


@contextmanager
def inference(model):
    """Within it the model is in eval mode and no graph is recorded; then each module gets back the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def stream(model, prompt_ids, max_new_tokens, temperature=1.0, top_k=None, generator=None, use_cache=True):
    """Yields the next ids [B, 1], one step at a time, for a prompt [B, T]; options as in `sample`.

    Beyond the model's context the window slides: the newer half of it is kept and read anew from position 0. The model
    is in inference mode only while a token is computed: between two tokens its caller may train it, or leave.
    ValueError or TypeError, before the first token, for a prompt of another rank or without a token, and for bad options.
    """
    require_tensors("generate", prompt_ids=prompt_ids)
    if prompt_ids.ndim != 2 or prompt_ids.shape[1] == 0:
        raise ValueError(f"generate: the prompt must be ids [B, T] with at least one token, got shape {tuple(prompt_ids.shape)}")
    check_number("generate", "max_new_tokens", max_new_tokens, Integral, "an integer")
    if max_new_tokens < 0:
        raise ValueError(f"generate: max_new_tokens must be at least 0, got {max_new_tokens}")
    check_options(temperature, top_k)
    cache = KVCache(len(model.blocks), model.max_seq_len) if use_cache else None
    return _stream(model, prompt_ids, max_new_tokens, cache, temperature, top_k, generator)


def _stream(model, ids, max_new_tokens, cache, temperature, top_k, generator):
    context = model.max_seq_len
    ids = unseen = ids[:, -context:]
    for _ in range(max_new_tokens):
        if ids.shape[1] > context:
            ids = unseen = ids[:, -(context // 2 + 1):]
            if cache is not None:
                cache.reset()
        with inference(model):
            logits, _ = model(ids if cache is None else unseen, cache=cache)
            unseen = sample(logits[:, -1], temperature, top_k, generator)
            ids = cat([ids, unseen], dim=1)
        yield unseen


def generate(model, prompt_ids, max_new_tokens, **options):
    """The prompt and its continuation, ids [B, T + max_new_tokens]; options as in `stream`."""
    tokens = list(stream(model, prompt_ids, max_new_tokens, **options))         # which checks the prompt
    return cat([prompt_ids, *tokens], dim=1)
