"""Writing a sequence from another one: encode once, then decode greedily, token by token (guide 9.8, 14)."""
from numbers import Integral

from ..arguments import optional_tensors, require_tensors
from ..creation import tensor
from ..dtypes import int64
from .batch import Batch
from .inference import inference
from .sampling import check_number


def greedy_decode(model, source_ids, bos_id, eos_id, max_new_tokens, source_valid=None, use_cache=True, *, cache=None, sampler=None,
                  seed=None):
    """ids [B, n], n ≤ max_new_tokens, without <bos>: at each place the most likely token, until every row has its <eos>.

    model: an `EncoderDecoder`; source_ids, source_valid: [B, Ts]. Rows that ended early go on with <eos>. The cache, any of
    `generation`, saves work and changes no token. sampler: a `Sampler` in place of the most likely token; row i draws with seed + i.
    ValueError where max_new_tokens is negative or more than the model has positions for, or the cache places, and for ids
    outside the vocabulary.
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
    with inference(model):
        batch = Batch(model, cache, use_cache=use_cache, max_rows=max(len(source_ids), 1), source=model.encode(source_ids, source_valid))
    if batch.limit is not None and max_new_tokens > batch.limit:
        raise ValueError(f"greedy_decode: the cache has places for {batch.limit} tokens of a row, and max_new_tokens={max_new_tokens}; "
                         f"allocate a larger one")
    rows = [batch.add([bos_id], max_new_tokens, sampler=sampler, seed=None if seed is None else seed + row, eos_id=eos_id)
            for row in range(len(source_ids))]
    batch.run()
    n = max((len(row.new_ids) for row in rows), default=0)
    ids = [row.new_ids + [eos_id] * (n - len(row.new_ids)) for row in rows]
    return tensor(ids, dtype=int64, device=source_ids.device).reshape(len(rows), n)
