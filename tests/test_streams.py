"""Seeds at the level of tensors and layers: PyTorch's numbers (record_streams.py), and the losses that follow from them.

Equal bit for bit where only integers and multiplications take part; to 5 units in the last place where a logarithm or a cosine does.
"""
import io

import numpy as np
import pytest
from device import host
from record_streams import DATA, PROGRAMS, SEEDS, draw

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
import tinygrad_tf.nn.functional as F
from tinygrad_tf.models import MiniGPT

HOST = pytest.mark.host("dropout on another device has a counter-based stream of its own")
programs = pytest.mark.parametrize("program", [pytest.param(p, marks=HOST) if p in ("dropout", "mixed") else p for p in PROGRAMS])
EXACT = {"rand", "randint", "randperm", "bernoulli", "dropout", "multinomial", "linear"}


def assert_same(program, expression, ours, theirs):
    exact = program in EXACT and ours.dtype != np.float64 or ours.dtype.kind in "iub"
    eps = 0 if exact else np.finfo(ours.dtype).eps
    np.testing.assert_allclose(ours, theirs, rtol=5 * eps, atol=3 * eps, err_msg=expression)


@pytest.mark.parametrize("seed", SEEDS)
@programs
def test_draws_what_pytorch_drew(program, seed):
    with np.load(DATA) as data:
        theirs = data[f"{program}/{seed}"]
    for expression, ours in draw(torch, program, seed):
        assert_same(program, expression, ours, theirs[:ours.nbytes].view(ours.dtype).reshape(ours.shape))
        theirs = theirs[ours.nbytes:]
    assert theirs.size == 0


@pytest.mark.torch
@programs
def test_draws_what_pytorch_draws_here(program):
    pytorch = pytest.importorskip("torch")
    for seed in range(5):
        for (expression, ours), (_, theirs) in zip(draw(torch, program, seed), draw(pytorch, program, seed)):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, expression
            assert_same(program, expression, ours, theirs)


# --- the state at the level of tensors --------------------------------------------------------------------------------

def test_the_state_is_a_uint8_tensor_that_goes_back():
    torch.randn(3)                                              # leaves the other half of a pair behind
    state = torch.get_rng_state()
    assert isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.shape == (5056,)
    expected = torch.randn(1), torch.rand(700)
    torch.set_rng_state(state)
    assert (torch.randn(1) == expected[0]).all() and (torch.rand(700) == expected[1]).all()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    torch.set_rng_state(torch.load(file))
    assert (torch.randn(1) == expected[0]).all()
    for bad in (state[:-1], torch.zeros(5056, dtype=torch.uint8)):
        with pytest.raises(RuntimeError):
            torch.set_rng_state(bad)
    for bad in (state.long(), [1, 2], None):
        with pytest.raises(TypeError):
            torch.set_rng_state(bad)


@pytest.mark.torch
def test_the_state_travels_to_pytorch_and_back():
    pytorch = pytest.importorskip("torch")
    torch.manual_seed(3)
    torch.randn(3)
    pytorch.set_rng_state(pytorch.from_numpy(host(torch.get_rng_state())))
    assert pytorch.randn(1).item() == pytest.approx(torch.randn(1).item(), rel=1e-6)
    torch.set_rng_state(torch.from_numpy(host(pytorch.get_rng_state())))
    assert (host(torch.rand(9)) == host(pytorch.rand(9))).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_layers_of_every_float_type_start_with_numbers_of_that_type(dtype):
    for layer in (nn.Linear(20, 30, dtype=dtype), nn.Embedding(20, 30, dtype=dtype)):
        assert all(p.dtype == dtype and p.isfinite().all() and p.float().std() > 0 for p in layer.parameters())


# --- what follows from the streams ------------------------------------------------------------------------------------

class Attention(nn.Module):
    """Causal self-attention (guide 8), written with PyTorch's names alone."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (p(x).reshape(B, T, self.num_heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-2, -1) / (C // self.num_heads) ** 0.5
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden_dim):
        super().__init__()
        self.attention = Attention(dim, num_heads)
        self.ffn = nn.Sequential(nn.Linear(dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.ffn(x))


class Model(nn.Module):
    """The guide's post-norm model (13.2) with a tied head, from layers only."""

    def __init__(self, vocab_size, max_seq_len, dim, num_heads, hidden_dim, num_layers):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab_size, dim), nn.Embedding(max_seq_len, dim)
        self.blocks = nn.ModuleList([Block(dim, num_heads, hidden_dim) for _ in range(num_layers)])
        self.final_norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, vocab_size, bias=False)
        self.apply(self.start)
        self.lm_head.weight = self.token.weight

    @staticmethod
    def start(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids, targets):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.final_norm(x))
        return logits, F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


SIZES = {"vocab_size": 100, "max_seq_len": 32, "dim": 24, "num_heads": 4, "hidden_dim": 96, "num_layers": 2}
PYTORCH = {0: 4.61676, 10: 3.7330, 50: 1.1172, 100: 0.1074, 199: 0.0200}       # loss before that step; measured with PyTorch 2.13


@pytest.mark.parametrize("make", [Model, lambda **sizes: MiniGPT(**sizes, dropout=0.0)], ids=["from layers", "MiniGPT"])
def test_200_steps_on_one_batch_follow_pytorch(make):
    """The guide's model and batch (13.3), seed 0, without dropout, AdamW with lr 3e-3, nothing clipped."""
    torch.manual_seed(0)
    model = make(**SIZES)
    tokens = torch.randint(0, 100, (4, 9))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(200):
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for step, expected in PYTORCH.items():
        assert losses[step] == pytest.approx(expected, rel=5e-3), step


@HOST
def test_one_step_of_the_guide_with_dropout():
    """Guide 13.3: the loss 4.6168, the gradient norm 1.3932, and the perplexity 101.166 = e^loss."""
    torch.manual_seed(0)
    model = MiniGPT(**SIZES, dropout=0.1)
    tokens = torch.randint(0, 100, (4, 9))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    assert f"{float(loss):.4f} {float(norm):.4f} {float(torch.exp(loss.detach())):.3f}" == "4.6168 1.3932 101.166"
