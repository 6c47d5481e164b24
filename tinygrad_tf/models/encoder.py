"""The encoder-only model, which reads a sequence in both directions, and a classifier on top of it."""
from .. import nn
from ..arguments import optional_tensors, require_tensors
from ..creation import ones
from ..dtypes import bool_
from ..nn import functional as F
from ..nn.positions import InputEmbedding
from .common import check_length, init_weights, positions_of


class Encoder(nn.Module):
    """ids [B, T] → states [B, T, C]:  embeddings → num_layers blocks without a causal mask → final norm.        (guide 14)

    Every real token sees every real token, so a state says what its token means in this sentence. It cannot write text: the
    state of a token has seen the tokens after it. `norm_first=False` is the original order, and has no final norm.

    Tokens need not be words: `embedding`, a module that makes [B, T, C] of (tokens [B, T, …], position_ids [B, T]), takes
    the place of the table of ids, for rows or patches of an image, say; vocab_size is then None. activation and norm_eps are those of
    `nn.TransformerBlock`.
    """

    def __init__(self, vocab_size, max_seq_len, dim, num_heads, hidden_dim, num_layers, dropout=0.1, norm_first=True, embedding=None, *,
                 activation="gelu", norm_eps=1e-5):
        super().__init__()
        self.dim, self.max_seq_len = dim, max_seq_len
        self.embedding = InputEmbedding(vocab_size, dim, max_seq_len) if embedding is None else embedding
        self.blocks = nn.ModuleList([nn.TransformerBlock(dim, num_heads, hidden_dim, dropout, norm_first, activation, norm_eps=norm_eps)
                                     for _ in range(num_layers)])
        self.final_norm = nn.LayerNorm(dim, norm_eps) if norm_first else nn.Identity()
        self.apply(init_weights)

    def forward(self, tokens, valid_tokens=None, position_ids=None):
        """States [B, T, C] of ids [B, T]. Those of padding (valid_tokens [B, T] False) mean nothing: no token sees them.

        Positions count from the first real token of each row, unless position_ids [B, T] says otherwise. Raises ValueError
        for shapes that do not fit, IndexError for ids outside the vocabulary.
        """
        require_tensors("Encoder", tokens=tokens)
        optional_tensors("Encoder", valid_tokens=valid_tokens, position_ids=position_ids)
        if tokens.ndim < 2:
            raise ValueError(f"Encoder: tokens must have shape [B, T] or [B, T, …], got {tuple(tokens.shape)}")
        B, T = tokens.shape[:2]
        check_length(self, B, T, valid_tokens)
        if position_ids is None:
            position_ids = positions_of(tokens, valid_tokens)
        x = self.embedding(tokens, position_ids)                                        # [B, T, C]
        for block in self.blocks:
            x = block(x, valid_tokens=valid_tokens)
        return self.final_norm(x)


class EncoderClassifier(nn.Module):
    """logits = W · pooled(encoder(tokens)) + b.    tokens: [B, T]  pooled: [B, C]  logits: [B, num_classes]

    pooling "mean"      the mean state of the real tokens
    pooling "first"     the state of the first real token, before which the data puts a [CLS] of its own, as BERT does
    """

    def __init__(self, encoder, num_classes, pooling="mean"):
        super().__init__()
        if pooling not in ("mean", "first"):
            raise ValueError(f'EncoderClassifier: pooling must be "mean" or "first", got {pooling!r}')
        self.encoder, self.num_classes, self.pooling = encoder, num_classes, pooling
        self.head = nn.Linear(encoder.dim, num_classes)
        self.head.apply(init_weights)

    def forward(self, tokens, targets=None, valid_tokens=None, position_ids=None):
        """(logits [B, num_classes], loss); loss is None without targets, the classes [B]."""
        states = self.encoder(tokens, valid_tokens, position_ids)                    # [B, T, C]
        logits = self.head(self._pool(states, valid_tokens))
        return logits, None if targets is None else F.cross_entropy(logits, targets)

    def _pool(self, states, valid_tokens):
        """Σ_t weight_t · state_t, weights that sum to 1 over the real tokens; zeros where a row has none.    [B, C]"""
        B, T, _ = states.shape
        real = ones(B, T, dtype=bool_, device=states.device) if valid_tokens is None else valid_tokens.to(dtype=bool_)
        if self.pooling == "first":
            real = real & (real.long().cumsum(dim=-1) == 1)
        weights = real.to(device=states.device, dtype=states.dtype)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1)
        return (weights[:, None] @ states)[:, 0]

    def extra_repr(self):
        return f"pooling={self.pooling!r}"
