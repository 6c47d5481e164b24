"""MiniGPT: the decoder-only language model of the guide's section 13, and its pre-norm sibling from the same parts."""
from .. import nn
from ..nn.positions import InputEmbedding
from .common import init_weights, next_token_loss, reading, run_block, within


class MiniGPT(nn.Module):
    """ids [B, T] → logits [B, T, V_vocab]:  embeddings → num_layers blocks → final norm → tied head.         (guide 13.2)

    `norm_first=False` is the guide's post-norm model (its last two LayerNorms stand back to back, which is harmless);
    `norm_first=True` moves each norm before its sublayer, which trains deeper stacks and needs the final norm.
    The head shares its weight with the token embedding; every Linear and Embedding starts from N(0, 0.02²).
    `ffn` is a function that makes the feed-forward network of one block: `lambda: nn.MoE(dim, hidden_dim, num_experts=8)`.
    GPT-2 is norm_first=True with activation="gelu_tanh"; activation and norm_eps are those of `nn.TransformerBlock`.
    """

    checkpoint_blocks = False           # True: of a block only its input is kept for backward (docs/gradient_checkpointing.md)

    def __init__(self, vocab_size, max_seq_len, dim, num_heads, hidden_dim, num_layers, dropout=0.1, norm_first=False, *, ffn=None,
                 activation="gelu", norm_eps=1e-5):
        super().__init__()
        if isinstance(ffn, nn.Module):
            raise TypeError(f"MiniGPT: ffn must be a function that makes a network for each block, as lambda: nn.MoE({dim}, {hidden_dim}) "
                            f"does, got a {type(ffn).__name__}, which all blocks would share")
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.embedding = InputEmbedding(vocab_size, dim, max_seq_len)
        self.blocks = nn.ModuleList([nn.TransformerBlock(dim, num_heads, hidden_dim, dropout, norm_first, activation, norm_eps=norm_eps,
                                                         ffn=None if ffn is None else ffn()) for _ in range(num_layers)])
        self.final_norm = nn.LayerNorm(dim, norm_eps)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.apply(init_weights)
        self.lm_head.weight = self.embedding.token.weight

    def forward(self, token_ids, targets=None, valid_tokens=None, position_ids=None, cache=None, segment_ids=None):
        """(logits, loss); loss is None without targets. Targets are the ids one place ahead, −100 where none counts.

        cache: a cache of `generation`; token_ids then holds only the tokens that it has not seen, and valid_tokens those, [B, T],
        or all, [B, past + T]. In padded rows positions count the real tokens, unless position_ids [B, T] says otherwise.
        segment_ids [B, T], with several texts in a row: a token sees its own text, −1 is padding, positions begin anew in each.
        Raises ValueError for shapes that do not fit, IndexError for ids outside the vocabulary.
        """
        with reading(self, token_ids, targets, valid_tokens, position_ids, cache, segment_ids) as (position_ids, valid_tokens):
            x = self.embedding(token_ids, position_ids)                                 # [B, T, C]
            own_text = within(segment_ids)
            for i, block in enumerate(self.blocks):
                x = run_block(self, block, x, causal=True, valid_tokens=valid_tokens, cache=None if cache is None else cache.layer(i),
                              mask_mod=own_text)
        logits = self.lm_head(self.final_norm(x))                                       # [B, T, V_vocab]
        return logits, None if targets is None else next_token_loss(logits, targets)
