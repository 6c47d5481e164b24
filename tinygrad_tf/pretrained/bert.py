"""BERT from the library's encoder: its embedding of three tables, and the head that guesses hidden words. (Devlin et al. 2019)"""
from .. import nn
from ..creation import zeros_like
from ..models import Encoder
from ..models.common import next_token_loss


class BertEmbedding(nn.Module):
    """x = dropout(LayerNorm(E_token[id] + E_type[type] + E_position[position])).    tokens: ids [B, T], or [B, T, 2]  x: [B, T, C]

    The type tells the first of two sentences from the second: 0 or 1 beside each id in tokens [B, T, 2], and 0 everywhere without.
    """

    def __init__(self, vocab_size, dim, max_seq_len, num_types=2, dropout=0.1, norm_eps=1e-12):
        super().__init__()
        self.token = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(max_seq_len, dim)
        self.type = nn.Embedding(num_types, dim)
        self.norm, self.dropout = nn.LayerNorm(dim, norm_eps), nn.Dropout(dropout)

    def forward(self, tokens, position_ids):
        ids, types = (tokens, zeros_like(tokens)) if tokens.ndim == 2 else (tokens[..., 0], tokens[..., 1])
        return self.dropout(self.norm(self.token(ids) + self.type(types) + self.position(position_ids)))


class MaskedLM(nn.Module):
    """logits = E_token · LayerNorm(GELU(W h + b)) + b_vocab of the state h of each token.    tokens: [B, T]  logits: [B, T, V_vocab]

    What BERT was trained with: to guess tokens that were hidden from it. targets [B, T] are −100 where none was.
    """

    def __init__(self, encoder, vocab_size, norm_eps=1e-12):
        super().__init__()
        self.encoder, self.activation = encoder, nn.GELU()
        self.transform, self.norm = nn.Linear(encoder.dim, encoder.dim), nn.LayerNorm(encoder.dim, norm_eps)
        self.decoder = nn.Linear(encoder.dim, vocab_size)
        self.decoder.weight = encoder.embedding.token.weight

    def forward(self, tokens, targets=None, valid_tokens=None, position_ids=None):
        states = self.encoder(tokens, valid_tokens, position_ids)                       # [B, T, C]
        logits = self.decoder(self.norm(self.activation(self.transform(states))))
        return logits, None if targets is None else next_token_loss(logits, targets)


def bert(vocab_size, max_seq_len, dim, num_heads, hidden_dim, num_layers, dropout=0.1, num_types=2, norm_eps=1e-12):
    """The `Encoder` as BERT has it: post-norm, with a norm behind the embedding."""
    embedding = BertEmbedding(vocab_size, dim, max_seq_len, num_types, dropout, norm_eps)
    return Encoder(None, max_seq_len, dim, num_heads, hidden_dim, num_layers, dropout, norm_first=False, embedding=embedding,
                   norm_eps=norm_eps)
