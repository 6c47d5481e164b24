"""Generation in lockstep: prompts [B, T] of one length, ids [B, 1] a step. Both are `Batch`, in fewer words (guide 9.8)."""
import numpy as np

from ..arguments import optional_tensors, require_tensors
from ..autograd import constant
from ..backend import to_device
from ..ops.shape import cat
from .batch import Batch
from .sampling import Sampler


def stream(model, prompt_ids, max_new_tokens, temperature=1.0, top_k=None, generator=None, use_cache=True, *, valid_tokens=None,
           cache=None, eos_id=None, at_limit="slide", prefill_chunk=None, **sampling):
    """Yields the next ids [B, 1], one step at a time, for a prompt [B, T]; temperature, top_k and `sampling` as in `Sampler`.

    valid_tokens [B, T]: True = a real token, for prompts that are padded, on either side. A row that has ended, with its eos_id or
    at the limit, goes on with its last id; the stream ends when all have. Beyond the model's context the window slides: the newer
    half of it is kept and read anew from position 0; or at_limit="stop". The model is in inference mode only while a token is
    computed: between two tokens its caller may train it, or leave. For texts, seeds and stop strings see `Batch`.
    ValueError or TypeError, before the first token, for a prompt of another rank or without a token, and for bad options.
    """
    require_tensors("generate", prompt_ids=prompt_ids)
    optional_tensors("generate", valid_tokens=valid_tokens)
    if prompt_ids.ndim != 2 or prompt_ids.shape[1] == 0:
        raise ValueError(f"generate: the prompt must be ids [B, T] with at least one token, got shape {tuple(prompt_ids.shape)}")
    sampler, prompts = Sampler(temperature, top_k, **sampling), prompt_ids.tolist()
    if valid_tokens is not None:
        if valid_tokens.shape != prompt_ids.shape:
            raise ValueError(f"generate: valid_tokens must have the shape of the prompt, {tuple(prompt_ids.shape)}, got "
                             f"{tuple(valid_tokens.shape)}")
        prompts = [[i for i, real in zip(*row) if real] for row in zip(prompts, valid_tokens.tolist())]
    batch = Batch(model, cache, use_cache=use_cache, max_rows=max(len(prompts), 1), at_limit=at_limit, prefill_chunk=prefill_chunk)
    rows = [batch.add(prompt, max_new_tokens, sampler=sampler, generator=generator, eos_id=eos_id) for prompt in prompts]
    return _tokens(batch, rows, prompt_ids.device)


def _tokens(batch, rows, device):
    while batch.live or batch.waiting:
        batch.step()
        yield constant(to_device(np.array([row.ids[-1:] for row in rows]), device))


def generate(model, prompt_ids, max_new_tokens, **options):
    """The prompt and its continuation, ids [B, T + n], n ≤ max_new_tokens; options as in `stream`."""
    tokens = list(stream(model, prompt_ids, max_new_tokens, **options))         # which checks the prompt
    return cat([prompt_ids, *tokens], dim=1)
