"""The encoder–decoder: one sequence read in both directions, another one written from left to right while looking at it."""
from typing import NamedTuple

from .. import nn
from ..nn.positions import InputEmbedding
from ..tensor import Tensor
from .common import check_inputs, init_weights, next_token_loss, reading
from .encoder import Encoder


class Source(NamedTuple):
    """What the decoder reads of a source: it is the same for every token that is written."""
    states: Tensor                  # [B, Ts, C], the encoder's
    keys_values: list               # of each decoder layer: K, V, each [B, H, Ts, Dh]
    valid_tokens: Tensor | None     # [B, Ts], True = a real token

    def select(self, rows):
        """The source of these rows, a list of numbers."""
        if rows == list(range(self.states.shape[0])):
            return self
        return Source(self.states[rows], [(k[rows], v[rows]) for k, v in self.keys_values],
                      None if self.valid_tokens is None else self.valid_tokens[rows])


class DecoderBlock(nn.Module):
    """Causal self-attention, then cross-attention, then the feed-forward network, each with a residual and a norm.

    pre-norm  (norm_first=True)     x ← x + dropout(sublayer(norm(x)))
    post-norm (norm_first=False)    x ← norm(x + dropout(sublayer(x)))          the original order       (guide 9.3, 14)
    """

    def __init__(self, dim, num_heads, hidden_dim, dropout=0.1, norm_first=True):
        super().__init__()
        self.norm_first = norm_first
        self.attention, self.cross_attention = nn.MultiHeadAttention(dim, num_heads), nn.MultiHeadAttention(dim, num_heads)
        self.ffn = nn.FeedForward(dim, hidden_dim, dropout)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, keys_values, valid_tokens=None, source_valid=None, cache=None, return_weights=False):
        """(x [B, T, C], cross-attention weights [B, H, T, Ts] or None). keys_values: what `cross_attention` made of the source."""
        h = self._before(self.norm1, x)
        x = self._after(self.norm1, x, self.attention(h, causal=True, valid_tokens=valid_tokens, cache=cache))
        h = self._before(self.norm2, x)
        out = self.cross_attention(h, keys_values, valid_tokens=source_valid, return_weights=return_weights)
        out, weights = out if return_weights else (out, None)
        x = self._after(self.norm2, x, out)
        return self._after(self.norm3, x, self.ffn(self._before(self.norm3, x))), weights

    def _before(self, norm, x):
        return norm(x) if self.norm_first else x

    def _after(self, norm, x, out):
        x = x + self.dropout(out)
        return x if self.norm_first else norm(x)


class EncoderDecoder(nn.Module):
    """source ids [B, Ts], target ids [B, T] → logits [B, T, V_target]                                       (guide 14)

    The encoder reads the source; each decoder layer looks at what was written so far, and then, by cross-attention, at the
    encoder's states. In training the decoder gets the right target, one place behind (`<bos>` first): teacher forcing. To
    write, `encode` once and `decode` token by token (`generation.greedy_decode`).
    """

    def __init__(self, source_vocab_size, target_vocab_size, max_source_len, max_target_len, dim, num_heads, hidden_dim, num_layers,
                 dropout=0.1, norm_first=True):
        super().__init__()
        self.vocab_size, self.max_seq_len = target_vocab_size, max_target_len
        self.encoder = Encoder(source_vocab_size, max_source_len, dim, num_heads, hidden_dim, num_layers, dropout, norm_first)
        self.embedding = InputEmbedding(target_vocab_size, dim, max_target_len)
        self.blocks = nn.ModuleList([DecoderBlock(dim, num_heads, hidden_dim, dropout, norm_first) for _ in range(num_layers)])
        self.final_norm = nn.LayerNorm(dim) if norm_first else nn.Identity()
        self.lm_head = nn.Linear(dim, target_vocab_size, bias=False)
        self.apply(init_weights)
        self.lm_head.weight = self.embedding.token.weight

    def forward(self, source_ids, target_ids, targets=None, source_valid=None, target_valid=None):
        """(logits [B, T, V_target], loss); loss is None without targets, −100 where none counts.

        source_valid [B, Ts] and target_valid [B, T]: True = a real token. Positions count from the first real token of a row.
        Raises ValueError for shapes that do not fit, IndexError for ids outside the vocabularies.
        """
        check_inputs(self, target_ids, targets, target_valid)
        logits = self.decode(target_ids, self.encode(source_ids, source_valid), target_valid)
        return logits, None if targets is None else next_token_loss(logits, targets)

    def encode(self, source_ids, source_valid=None):
        """The `Source` of ids [B, Ts]: its states, and K and V for the cross-attention of every decoder layer."""
        states = self.encoder(source_ids, source_valid)
        return Source(states, [block.cross_attention.keys_and_values(states) for block in self.blocks], source_valid)

    def decode(self, target_ids, source, target_valid=None, position_ids=None, cache=None, return_weights=False):
        """logits [B, T, V_target], or (logits, [the cross-attention weights [B, H, T, Ts] of each layer]) if return_weights.

        cache: a cache of `generation` for the self-attention; target_ids then holds only the tokens that it has not seen, and
        target_valid those, [B, T], or all, [B, past + T].
        """
        weights = []
        with reading(self, target_ids, None, target_valid, position_ids, cache) as (position_ids, target_valid):
            self._check_source(source, target_ids)
            x = self.embedding(target_ids, position_ids)                                # [B, T, C]
            for i, (block, keys_values) in enumerate(zip(self.blocks, source.keys_values)):
                layer = None if cache is None else cache.layer(i)
                x, seen = block(x, keys_values, target_valid, source.valid_tokens, layer, return_weights)
                weights.append(seen)
        logits = self.lm_head(self.final_norm(x))                                       # [B, T, V_target]
        return (logits, weights) if return_weights else logits

    def _check_source(self, source, target_ids):
        if not isinstance(source, Source) or source.states.shape[0] != target_ids.shape[0]:
            got = f"a batch of {source.states.shape[0]}" if isinstance(source, Source) else type(source).__name__
            raise ValueError(f"EncoderDecoder: source must be what encode() returned for a batch of {target_ids.shape[0]}, got {got}")
        if len(source.keys_values) != len(self.blocks):
            raise ValueError(f"EncoderDecoder: source has keys and values for {len(source.keys_values)} layers, the decoder has "
                             f"{len(self.blocks)}; encode() with the model that decodes")
