"""The feed-forward network and the Transformer block."""
from .activations import GELU, ReLU, SiLU
from .attention import MultiHeadAttention
from .containers import Sequential
from .layers import Dropout, LayerNorm, Linear
from .module import Module

ACTIVATIONS = {"gelu": GELU, "gelu_tanh": lambda: GELU("tanh"), "silu": SiLU, "relu": ReLU}


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
    """

    def __init__(self, dim, num_heads, hidden_dim, dropout=0.1, norm_first=False, activation="gelu", *, num_kv_heads=None,
                 bias=True, attention_dropout=0.0):
        super().__init__()
        self.norm_first = norm_first
        self.attention = MultiHeadAttention(dim, num_heads, num_kv_heads, bias, attention_dropout)
        self.ffn = FeedForward(dim, hidden_dim, dropout, activation, bias)
        self.norm1, self.norm2 = LayerNorm(dim, bias=bias), LayerNorm(dim, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(self, x, causal=False, valid_tokens=None, allowed=None, cache=None):
        """`causal`, `valid_tokens`, `allowed` and `cache` are those of `MultiHeadAttention`."""
        visible = {"causal": causal, "valid_tokens": valid_tokens, "allowed": allowed, "cache": cache}
        if self.norm_first:
            x = x + self.dropout(self.attention(self.norm1(x), **visible))
            return x + self.dropout(self.ffn(self.norm2(x)))
        x = self.norm1(x + self.dropout(self.attention(x, **visible)))
        return self.norm2(x + self.dropout(self.ffn(x)))

    def extra_repr(self):
        return f"norm_first={self.norm_first}"
