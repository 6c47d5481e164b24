"""Writing a sequence from another one: encode once, then decode greedily, token by token (guide 9.8, 14)."""
from numbers import Integral

from ..arguments import optional_tensors, require_tensors
from ..creation import full, zeros
from ..dtypes import bool_, int64
from ..ops.shape import cat
from .cache import KVCache
from .generator import inference
from .sampling import check_number


def greedy_decode(model, source_ids, bos_id, eos_id, max_new_tokens, source_valid=None, use_cache=True):
    """ids [B, n], n ≤ max_new_tokens, without <bos>: at each place the most likely token, until every row has its <eos>.

    model: an `EncoderDecoder`; source_ids, source_valid: [B, Ts]. Rows that ended early go on with <eos>. The cache saves
    work and changes no token. ValueError where max_new_tokens is negative or more than the model has positions for, and for
    ids outside the vocabulary.
    """
    check_number("greedy_decode", "max_new_tokens", max_new_tokens, Integral, "an integer")
    if not 0 <= max_new_tokens <= model.max_seq_len:
        raise ValueError(f"greedy_decode: max_new_tokens must be between 0 and the model's max_seq_len={model.max_seq_len}, got "
                         f"{max_new_tokens}")
    for name, token in ("bos_id", bos_id), ("eos_id", eos_id):
        check_number("greedy_decode", name, token, Integral, "an integer")
        if not 0 <= token < model.vocab_size:
            raise ValueError(f"greedy_decode: {name} must be one of the {model.vocab_size} ids of the target vocabulary, got {token}")
    require_tensors("greedy_decode", source_ids=source_ids)
    optional_tensors("greedy_decode", source_valid=source_valid)
    B, device = source_ids.shape[0], source_ids.device
    ids, ended = full((B, 1), bos_id, dtype=int64, device=device), zeros(B, 1, dtype=bool_, device=device)
    cache = KVCache(len(model.blocks), model.max_seq_len) if use_cache else None
    with inference(model):
        source = model.encode(source_ids, source_valid)
        while ids.shape[1] <= max_new_tokens and not ended.all():
            logits = model.decode(ids if cache is None else ids[:, -1:], source, cache=cache)
            best = logits[:, -1].argmax(dim=-1, keepdim=True).masked_fill(ended, eos_id)
            ids, ended = cat([ids, best], dim=1), ended | (best == eos_id)
    return ids[:, 1:]
