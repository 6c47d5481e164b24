"""Language models small enough to run a thousand times: two layers, thirteen ids, float64."""
import functools

from tinygrad_tf import nn
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.models.common import reading
from tinygrad_tf.nn.positions import InputEmbedding
from tinygrad_tf.random import Generator

V_VOCAB, T_MAX, LAYERS, H, DH = 13, 16, 2, 4, 4
C = H * DH
HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}                          # the number of key and value heads
POSITIONS = ("learned", "sinusoidal", "RoPE", "ALiBi")


class TinyLM(nn.Module):
    """ids [B, T] → logits [B, T, V_vocab], with any heads and positions; put together as `Decoder` is."""

    def __init__(self, position="RoPE", num_kv_heads=H, window=None, max_seq_len=T_MAX):
        super().__init__()
        self.vocab_size, self.max_seq_len = V_VOCAB, max_seq_len
        self.endless_positions = position in ("RoPE", "ALiBi")
        added = {"learned": "learned", "sinusoidal": nn.SinusoidalPositionEncoding(C, max_seq_len)}.get(position)
        self.embedding = InputEmbedding(V_VOCAB, C, max_seq_len, added)
        self.blocks = nn.ModuleList([nn.TransformerBlock(C, H, 2 * C, 0.0, norm_first=True, activation="relu", num_kv_heads=num_kv_heads,
                                                         rope=nn.RotaryEmbedding(DH) if position == "RoPE" else None,
                                                         relative_bias=nn.ALiBi(H) if position == "ALiBi" else None, window=window)
                                     for _ in range(LAYERS)])
        self.final_norm = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, V_VOCAB, bias=False)
        self.lm_head.weight = self.embedding.token.weight
        enlarge(self)
        self.double().eval()

    def forward(self, token_ids, valid_tokens=None, position_ids=None, cache=None):
        """(logits, None)"""
        with reading(self, token_ids, None, valid_tokens, position_ids, cache) as (positions, valid_tokens):
            x = self.embedding(token_ids, positions)                                    # [B, T, C]
            if position_ids is not None or valid_tokens is not None:                    # else the attention counts by itself
                position_ids = positions
            for i, block in enumerate(self.blocks):
                x = block(x, causal=True, valid_tokens=valid_tokens, cache=None if cache is None else cache.layer(i),
                          position_ids=position_ids)
        return self.lm_head(self.final_norm(x)), None


def enlarge(model):
    """Weights from N(0, 0.7²), embeddings from N(0, 0.4²), biases from N(0, 0.2²); the gains of the norms stay 1.

    No distribution is flat then, and each token that is seen moves the logits by far more than rounding does.
    """
    draw = Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if not ("norm" in name and name.endswith("weight")):
            nn.init.normal_(p, std=0.2 if p.ndim == 1 else 0.4 if "embedding" in name else 0.7, generator=draw)


def of_the_library(kind, window=None, max_seq_len=T_MAX, **options):
    """MiniGPT or Decoder, whose single tokens take a path of their own on the CPU."""
    model = kind(V_VOCAB, max_seq_len, C, H, 2 * C, LAYERS, dropout=0.0, **options)
    enlarge(model)
    for block in model.blocks:
        block.attention.window = window
    return model.double().eval()


MODELS = {f"{heads}, {position}": functools.partial(TinyLM, position, n) for heads, n in HEADS.items() for position in POSITIONS}
MODELS |= {"MiniGPT": functools.partial(of_the_library, MiniGPT),
           "MiniGPT, pre-norm": functools.partial(of_the_library, MiniGPT, norm_first=True),
           "Decoder, GQA": functools.partial(of_the_library, Decoder, num_kv_heads=2)}


@functools.cache
def model_of(name, dtype=None, **options):
    """The same arguments give the same model; a window changes no weight, nor does max_seq_len unless positions are learned."""
    model = MODELS[name](**options)
    return model if dtype is None else model.to(dtype)
