"""The generation loop: prefill the prompt in one pass, then decode token by token from the cache (guide 9.8)."""
from ..autograd import no_grad
from ..ops.shape import cat
from .cache import KVCache
from .sampling import sample


def stream(model, prompt_ids, max_new_tokens, temperature=1.0, top_k=None, generator=None, use_cache=True):
    """Yields the next ids [B, 1], one step at a time, for a prompt [B, T].

    Beyond the model's context the window slides: the newer half of it is kept and read anew from position 0. The model
    runs in eval mode and without gradients while a token is computed; its mode is restored at the end.
    """
    if prompt_ids.ndim != 2 or prompt_ids.shape[1] == 0:
        raise ValueError(f"generate: the prompt must be ids [B, T] with at least one token, got shape {tuple(prompt_ids.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"generate: max_new_tokens must be ≥ 0, got {max_new_tokens}")
    return _stream(model, prompt_ids, max_new_tokens, temperature, top_k, generator, use_cache)


def _stream(model, ids, max_new_tokens, temperature, top_k, generator, use_cache):
    was_training, context = model.training, model.max_seq_len
    cache = KVCache(len(model.blocks), context) if use_cache else None
    model.eval()
    try:
        ids = ids[:, -context:]
        unseen = ids
        for _ in range(max_new_tokens):
            if ids.shape[1] > context:
                ids = unseen = ids[:, -(context + 1) // 2:]
                if use_cache:
                    cache.reset()
            with no_grad():
                logits, _ = model(unseen if use_cache else ids, cache=cache)
                unseen = sample(logits[:, -1], temperature, top_k, generator)
                ids = cat([ids, unseen], dim=1)
            yield unseen
    finally:
        model.train(was_training)


def generate(model, prompt_ids, max_new_tokens, **options):
    """The prompt and its continuation, ids [B, T + max_new_tokens]; options as in `stream`."""
    return cat([prompt_ids, *stream(model, prompt_ids, max_new_tokens, **options)], dim=1)
