"""The modern decoder-only model: the parts that published models put together since GPT-2, in place of MiniGPT's."""
from .. import nn
from .common import init_weights, next_token_loss, reading, run_block, within


class Decoder(nn.Module):
    """ids [B, T] → logits [B, T, V_vocab]:  token embedding → num_layers modern blocks → RMSNorm → tied head.

    x ← x + attention(RMSNorm(x)),  x ← x + SwiGLU(RMSNorm(x)).        What differs from `MiniGPT` (guide 10):

    RMSNorm     rescales and does not centre: one gain, no shift
    RoPE        positions turn q and k in every layer; no table is added to the embedding
    GQA         num_kv_heads ≤ num_heads key and value heads: the KV cache shrinks by num_heads / num_kv_heads
    SwiGLU      a gated feed-forward network, W_gate, W_up: [Cff, C], W_down: [C, Cff]; Cff = 8C/3 has the size of 4C ungated
    no biases   in any linear layer

    What its relatives have besides, by name: tie_weights=False (a head of its own), window (Mistral), ffn, a function that makes the
    feed-forward network of one block (Mixtral: `nn.MoE`), head_dim, qkv_bias and qk_norm of `nn.MultiHeadAttention` (Qwen).
    """

    checkpoint_blocks = False           # as of MiniGPT
    endless_positions = True            # RoPE has no table that ends: with a rolling cache it reads on beyond max_seq_len

    def __init__(self, vocab_size, max_seq_len, dim, num_heads, hidden_dim, num_layers, dropout=0.0, num_kv_heads=None,
                 rope_base=10000.0, *, rope_layout="interleaved", norm_eps=1e-6, tie_weights=True, ffn=None, head_dim=None, **attention):
        super().__init__()
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.embedding = nn.Embedding(vocab_size, dim)
        Dh = dim // max(num_heads, 1) if head_dim is None else head_dim     # what is wrong with numbers of heads, the attention says
        rope = nn.RotaryEmbedding(Dh, rope_base, rope_layout, max_seq_len)                      # one table for all layers
        self.blocks = nn.ModuleList([nn.TransformerBlock(dim, num_heads, hidden_dim, dropout, norm_first=True, norm="rms",
                                                         norm_eps=norm_eps, ffn="swiglu" if ffn is None else ffn(), bias=False, rope=rope,
                                                         num_kv_heads=num_kv_heads, head_dim=head_dim, **attention)
                                     for _ in range(num_layers)])
        self.final_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.apply(init_weights)
        if tie_weights:
            self.lm_head.weight = self.embedding.weight

    def forward(self, token_ids, targets=None, valid_tokens=None, position_ids=None, cache=None, segment_ids=None):
        """(logits, loss): the arguments, the errors and their meaning are those of `MiniGPT`.

        position_ids [T] or [B, T] are what RoPE turns by; only their differences matter.
        """
        with reading(self, token_ids, targets, valid_tokens, position_ids, cache, segment_ids) as (positions, valid_tokens):
            x = self.embedding(token_ids)                                               # [B, T, C]
            if position_ids is not None or valid_tokens is not None:                    # else RoPE counts by itself
                position_ids = positions
            own_text = within(segment_ids)
            for i, block in enumerate(self.blocks):
                x = run_block(self, block, x, causal=True, valid_tokens=valid_tokens, cache=None if cache is None else cache.layer(i),
                              position_ids=position_ids, mask_mod=own_text)
        logits = self.lm_head(self.final_norm(x))                                       # [B, T, V_vocab]
        return logits, None if targets is None else next_token_loss(logits, targets)
