"""MiniGPT: the decoder-only language model of the guide's section 13, and its pre-norm sibling from the same parts."""
from .. import nn
from ..creation import arange
from ..dtypes import bool_
from ..nn import functional as F
from ..nn.positions import InputEmbedding


class MiniGPT(nn.Module):
    """ids [B, T] → logits [B, T, V_vocab]:  embeddings → num_layers blocks → final norm → tied head.         (guide 13.2)

    `norm_first=False` is the guide's post-norm model (its last two LayerNorms stand back to back, which is harmless);
    `norm_first=True` moves each norm before its sublayer, which trains deeper stacks and needs the final norm.
    The head shares its weight with the token embedding; every Linear and Embedding starts from N(0, 0.02²).
    """

    def __init__(self, vocab_size, max_seq_len, dim, num_heads, hidden_dim, num_layers, dropout=0.1, norm_first=False):
        super().__init__()
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.embedding = InputEmbedding(vocab_size, dim, max_seq_len)
        self.blocks = nn.ModuleList([nn.TransformerBlock(dim, num_heads, hidden_dim, dropout, norm_first=norm_first)
                                     for _ in range(num_layers)])
        self.final_norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.embedding.token.weight

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, token_ids, targets=None, valid_tokens=None, position_ids=None, cache=None):
        """(logits, loss); loss is None without targets. Targets are the ids one place ahead, −100 where none counts.

        cache: a `generation.KVCache`; token_ids then holds only the tokens that the cache has not seen, and valid_tokens
        all of them, [B, past + T]. In padded rows positions count from the first real token, unless position_ids [B, T]
        says otherwise. Raises ValueError for shapes that do not fit, IndexError for ids outside the vocabulary.
        """
        past = self._check_inputs(token_ids, targets, valid_tokens, cache)
        if position_ids is None:
            position_ids = self._positions(*token_ids.shape, past, valid_tokens, token_ids.device)
        x = self.embedding(token_ids, position_ids)                                     # [B, T, C]
        for i, block in enumerate(self.blocks):
            x = block(x, causal=True, valid_tokens=valid_tokens, cache=None if cache is None else cache.layer(i))
        logits = self.lm_head(self.final_norm(x))                                       # [B, T, V_vocab]
        return logits, None if targets is None else self._loss(logits, targets)

    def _check_inputs(self, token_ids, targets, valid_tokens, cache):
        """How many tokens the cache holds; ValueError, and nothing is changed, where something does not fit."""
        if token_ids.ndim != 2:
            raise ValueError(f"MiniGPT: token_ids must have shape [B, T], got {tuple(token_ids.shape)}")
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ValueError(f"MiniGPT: the cache has {len(cache.layers)} layers, the model {len(self.blocks)}; build "
                             f"KVCache(num_layers={len(self.blocks)}, capacity={self.max_seq_len})")
        (B, T), past = token_ids.shape, 0 if cache is None else cache.length
        if past + T > self.max_seq_len:
            raise ValueError(f"MiniGPT: {past + T} positions are needed but max_seq_len is {self.max_seq_len}; "
                             f"pass a shorter sequence or build the model with a larger max_seq_len")
        if valid_tokens is not None and tuple(valid_tokens.shape) != (B, past + T):
            raise ValueError(f"MiniGPT: valid_tokens must have one entry for each token, cached ones included, [{B}, {past + T}], "
                             f"got {tuple(valid_tokens.shape)}")
        if targets is not None and (targets.shape != token_ids.shape or not (targets != -100).any()):
            raise ValueError(f"MiniGPT: targets must have the shape of token_ids {tuple(token_ids.shape)} and contain a token other "
                             f"than -100, got shape {tuple(targets.shape)}")
        return past

    @staticmethod
    def _positions(B, T, past, valid_tokens, device):
        """0, 1, 2, … after what the cache holds; in padded rows counted from the first real token.    [B, T]"""
        if valid_tokens is None:
            return arange(past, past + T, device=device).expand(B, T)
        real = valid_tokens.to(device=device, dtype=bool_)
        return (real.long().cumsum(dim=-1) - 1).masked_fill(~real, 0)[:, past:]

    def _loss(self, logits, targets):
        return F.cross_entropy(logits.reshape(-1, self.vocab_size), targets.reshape(-1))
