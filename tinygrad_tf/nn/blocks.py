"""The feed-forward network and the Transformer block."""
from .activations import ACTIVATIONS
from .attention import MultiHeadAttention
from .containers import Sequential
from .feedforward import GatedFeedForward
from .layers import Dropout, LayerNorm, Linear, RMSNorm
from .module import Module

# RMSNorm has no bias; guide 10.2
NORMS = {"layer": lambda dim, bias, eps: LayerNorm(dim, eps=1e-5 if eps is None else eps, bias=bias),
         "rms": lambda dim, bias, eps: RMSNorm(dim, eps=1e-6 if eps is None else eps)}
GATED = {"glu": "sigmoid", "reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


class FeedForward(Module):
    """y = W₂ · dropout(σ(W₁ x + b₁)) + b₂.    x, y: [B, T, C]  W₁: [Cff, C]  W₂: [C, Cff]          (guide 9.2)

    The same two layers for every token: nothing passes between positions. σ is "gelu", "gelu_tanh", "silu" or "relu".
    """

    def __init__(self, dim, hidden_dim, dropout=0.1, activation="gelu", bias=True):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"FeedForward: activation {activation!r} is unknown; there are {', '.join(ACTIVATIONS)}")
        self.net = Sequential(Linear(dim, hidden_dim, bias), ACTIVATIONS[activation](), Dropout(dropout),
                              Linear(hidden_dim, dim, bias))

    def forward(self, x):
        return self.net(x)


class TransformerBlock(Module):
    """Attention, then the feed-forward network, each with a residual and a norm.    x, y: [B, T, C]     (guide 9.3, 9.4)

    post-norm (norm_first=False)    x ← norm(x + dropout(sublayer(x)))          the original order
    pre-norm  (norm_first=True)     x ← x + dropout(sublayer(norm(x)))          the residual path stays free of norms

    Dropout acts on what a sublayer adds, and inside the feed-forward network; on attention weights it has its own rate.
    norm: "layer", with eps = 1e-5, or "rms", with 1e-6, unless norm_eps says otherwise.
    ffn: "glu", "reglu", "geglu" or "swiglu" for a gated network (guide 10.3), else an activation of `FeedForward`, which `activation`
    names too; or a module [B, T, C] → [B, T, C], such as `MoE(dim, hidden_dim)` (guide 11.1).
    rope, relative_bias, window, and what else is given by name (head_dim, qkv_bias, qk_norm), are those of `MultiHeadAttention`.
    The modern block (guide 10.5): norm_first=True, norm="rms", ffn="swiglu", bias=False, num_kv_heads below num_heads, rope.
    """

    def __init__(self, dim, num_heads, hidden_dim, dropout=0.1, norm_first=False, activation="gelu", *, num_kv_heads=None,
                 bias=True, attention_dropout=0.0, norm="layer", norm_eps=None, ffn=None, rope=None, relative_bias=None, window=None,
                 **attention):
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"TransformerBlock: norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
        self.norm_first = norm_first
        self.attention = MultiHeadAttention(dim, num_heads, num_kv_heads, bias, attention_dropout, rope=rope,
                                            relative_bias=relative_bias, window=window, **attention)
        self.ffn = ffn if isinstance(ffn, Module) else feed_forward(activation if ffn is None else ffn, dim, hidden_dim, dropout, bias)
        self.norm1, self.norm2 = NORMS[norm](dim, bias, norm_eps), NORMS[norm](dim, bias, norm_eps)
        self.dropout = Dropout(dropout)

    def forward(self, x, causal=False, valid_tokens=None, allowed=None, cache=None, *, position_ids=None, mask_mod=None,
                score_mod=None):
        """The arguments are those of `MultiHeadAttention`, whose weights `attention(…, return_weights=True)` returns."""
        visible = {"causal": causal, "valid_tokens": valid_tokens, "allowed": allowed, "cache": cache, "position_ids": position_ids,
                   "mask_mod": mask_mod, "score_mod": score_mod}
        if self.norm_first:
            x = x + self.dropout(self.attention(self.norm1(x), **visible))
            return x + self.dropout(self._feed(self.norm2(x), valid_tokens))
        x = self.norm1(x + self.dropout(self.attention(x, **visible)))
        return self.norm2(x + self.dropout(self._feed(x, valid_tokens)))

    def _feed(self, x, valid_tokens):
        """ffn(x). A mixture of experts is told which of the tokens are real: those of a cache come first, and are not among them."""
        if valid_tokens is None or not getattr(self.ffn, "routes_tokens", False):
            return self.ffn(x)
        return self.ffn(x, valid_tokens[:, valid_tokens.shape[1] - x.shape[1]:])

    def extra_repr(self):
        return f"norm_first={self.norm_first}"


def feed_forward(kind, dim, hidden_dim, dropout, bias):
    """The feed-forward network of that name: a gated one, or `FeedForward` with that activation."""
    if kind in GATED:
        return GatedFeedForward(dim, hidden_dim, GATED[kind], bias, dropout)
    if kind not in ACTIVATIONS:
        raise ValueError(f"TransformerBlock: ffn {kind!r} is unknown; there are {', '.join([*GATED, *ACTIVATIONS])}")
    return FeedForward(dim, hidden_dim, dropout, kind, bias)
