"""Where a token stands: position embeddings (guide 9.1)."""
from .. import creation
from ..dtypes import int64
from .layers import Embedding
from .module import Module


class InputEmbedding(Module):
    """x = E_token[ids] + E_position[0 … T−1].    ids: [B, T]  x: [B, T, C]         (guide 9.1)

    `position_ids` [B, T] replaces 0 … T−1, for padded batches and for decoding from a cache. Positions at or beyond
    `max_seq_len` raise IndexError: a learned table has no row for them.
    """

    def __init__(self, vocab_size, dim, max_seq_len):
        super().__init__()
        self.token = Embedding(vocab_size, dim)
        self.position = Embedding(max_seq_len, dim)

    def forward(self, token_ids, position_ids=None):
        if token_ids.ndim != 2:
            raise ValueError(f"InputEmbedding: token_ids must have shape [B, T], got {tuple(token_ids.shape)}")
        if position_ids is None:
            position_ids = creation.arange(token_ids.shape[1], device=token_ids.device)
        elif position_ids.shape != token_ids.shape:
            raise ValueError(f"InputEmbedding: position_ids must have shape [B, T] = {tuple(token_ids.shape)}, got "
                             f"{tuple(position_ids.shape)}")
        return self.token(token_ids) + self.position(position_ids.to(device=token_ids.device, dtype=int64))
