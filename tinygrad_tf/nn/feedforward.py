"""Gated feed-forward networks: SwiGLU and its relatives. The plain one, `FeedForward`, stands in `blocks`."""
from .activations import ACTIVATIONS
from .layers import Dropout, Linear
from .module import Module


class GatedFeedForward(Module):
    """y = W_down · dropout(σ(W_gate x) ⊙ W_up x).    x, y: [B, T, C]  W_gate, W_up: [Cff, C]  W_down: [C, Cff]

    One branch says what, the other how much of it; nothing passes between tokens. `activation` names σ and the network:
    "sigmoid" GLU, "relu" ReGLU, "gelu" GEGLU, "silu" SwiGLU (guide 9.2, 10.3; Shazeer 2020, "GLU variants"). Three
    matrices instead of two: Cff = 8C/3 has as many weights as the plain network with 4C.
    """

    def __init__(self, dim, hidden_dim, activation="silu", bias=False, dropout=0.0):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"GatedFeedForward: activation {activation!r} is unknown; there are {', '.join(ACTIVATIONS)}")
        self.gate_proj = Linear(dim, hidden_dim, bias)
        self.up_proj = Linear(dim, hidden_dim, bias)
        self.down_proj = Linear(hidden_dim, dim, bias)
        self.activation, self.dropout = ACTIVATIONS[activation](), Dropout(dropout)

    def forward(self, x):
        return self.down_proj(self.dropout(self.activation(self.gate_proj(x)) * self.up_proj(x)))


class SwiGLU(GatedFeedForward):
    """y = W_down · (SiLU(W_gate x) ⊙ W_up x)       (guide 10.3)"""

    def __init__(self, dim, hidden_dim, bias=False, dropout=0.0):
        super().__init__(dim, hidden_dim, "silu", bias, dropout)


class GEGLU(GatedFeedForward):
    """y = W_down · (GELU(W_gate x) ⊙ W_up x)       (guide 9.2)"""

    def __init__(self, dim, hidden_dim, bias=False, dropout=0.0):
        super().__init__(dim, hidden_dim, "gelu", bias, dropout)
