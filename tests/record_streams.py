"""Random numbers of PyTorch at the level of tensors and layers, recorded in tests/data/streams.npz. Run with PyTorch 2.13 installed.

A program is a list of expressions, with | between them, that run one after the other from one seed: `torch`, `nn` and `F`
are the library. An expression gives a tensor or several.
"""
from pathlib import Path

import numpy as np

DATA = Path(__file__).with_name("data") / "streams.npz"
SEEDS = (0, 2**33 + 5)

PROGRAMS = {
    "rand": """
        torch.rand(3) | torch.rand(2, 3) | torch.rand((17,)) | torch.rand(4, dtype=torch.float64) |
        torch.rand(5, dtype=torch.float16) | torch.rand_like(torch.zeros(2, 2)) | torch.empty(3).uniform_(-1, 2) |
        torch.rand(0) | torch.rand(1)
    """,
    "randn": """
        torch.randn(3) | torch.randn(()) | torch.randn(15) | torch.randn(16) | torch.randn(1) | torch.randn(17) |
        torch.randn(4, 8) | torch.randn(33) | torch.randn(2, dtype=torch.float64) |
        torch.randn(20, dtype=torch.float16) | torch.randn(3, dtype=torch.float16) |
        torch.randn_like(torch.zeros(5)) | torch.empty(2, 10).normal_(1.0, 0.5) | torch.normal(2.0, 3.0, (4,)) |
        torch.normal(torch.arange(3.0), torch.ones(3)) | torch.normal(torch.zeros(2), 2.0) | torch.randn(1)
    """,
    "randint": """
        torch.randint(10, (5,)) | torch.randint(-3, 4, (2, 3)) | torch.randint(0, 2**40, (4,)) |
        torch.randint(0, 7, (3,), dtype=torch.int32) | torch.randint_like(torch.zeros(3), 9) |
        torch.zeros(4).random_(0, 6) | torch.randint(0, 2, (5,), dtype=torch.bool)
    """,
    "randperm": """
        torch.randperm(0) | torch.randperm(1) | torch.randperm(10) | torch.randperm(65) |
        torch.randperm(4, dtype=torch.int32)
    """,
    "bernoulli": """
        torch.bernoulli(torch.linspace(0, 1, 9)) | torch.bernoulli(torch.full((3, 3), 0.5, dtype=torch.float64)) |
        torch.zeros(9).bernoulli_(0.3) | torch.zeros(5, dtype=torch.long).bernoulli_() |
        torch.bernoulli(torch.full((9,), 0.5).half())
    """,
    "dropout": """
        F.dropout(torch.ones(3, 5), 0.4) | F.dropout(torch.ones(20), 0.1) | nn.Dropout(0.5)(torch.ones(7)) |
        F.dropout(torch.ones(4), 0.9, training=False) | F.dropout(torch.ones(3), 0.0) |
        F.dropout(torch.ones(2), 1.0) | F.dropout(torch.ones(6, dtype=torch.float16), 0.25) | torch.rand(1)
    """,
    "exponential": """
        torch.empty(5).exponential_() | torch.empty(18).exponential_(2.0) |
        torch.empty(3, dtype=torch.float64).exponential_()
    """,
    "multinomial": """
        torch.multinomial(torch.tensor([0.1, 0.0, 0.9]), 1) | torch.multinomial(torch.ones(3, 9), 4) |
        torch.multinomial(torch.arange(12.0), 20, replacement=True) |
        torch.softmax(torch.arange(65) / 9, dim=-1).multinomial(1)
    """,
    "linear": """
        list(nn.Linear(3, 2).parameters()) | list(nn.Linear(5, 7, bias=False).parameters()) |
        list(nn.Linear(24, 96).parameters()) | list(nn.Linear(3, 4, dtype=torch.float64).parameters()) |
        list(nn.Linear(5, 7, dtype=torch.float16).parameters())
    """,
    "embedding": """
        nn.Embedding(3, 4).weight | nn.Embedding(20, 8).weight | nn.Embedding(5, 3, padding_idx=1).weight |
        nn.Embedding(5, 5, dtype=torch.float16).weight | nn.Embedding(2, 2, dtype=torch.float64).weight
    """,
    "layers": """
        list(nn.LayerNorm(4).parameters()) | list(nn.MultiheadAttention(8, 2).parameters()) | torch.rand(1) |
        list(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4)).parameters()) |
        torch.randn(1)
    """,
    "init": """
        nn.init.normal_(torch.empty(4, 5), std=0.02) | nn.init.uniform_(torch.empty(3), -1, 1) |
        nn.init.xavier_uniform_(torch.empty(3, 5)) | nn.init.xavier_normal_(torch.empty(3, 5)) |
        nn.init.kaiming_uniform_(torch.empty(4, 3), nonlinearity='relu') |
        nn.init.kaiming_normal_(torch.empty(4, 5))
    """,
    "mixed": """
        torch.randn(3) | torch.rand(5) | torch.randn(1) | nn.Linear(2, 2).weight | torch.randint(9, (4,)) |
        torch.randn(20) | F.dropout(torch.ones(9), 0.2) | torch.randn(2, dtype=torch.float64) | torch.randperm(6) |
        nn.Embedding(2, 3).weight | torch.multinomial(torch.ones(9), 1) | torch.randn(1)
    """,
    "generator": """
        torch.rand(2, generator=g) | torch.randn(17, generator=g) | torch.randint(5, (3,), generator=g) |
        torch.randperm(5, generator=g) | torch.bernoulli(torch.full((4,), 0.5), generator=g) |
        torch.multinomial(torch.ones(5), 2, generator=g) | torch.rand(2)
    """,
    "state": """
        torch.get_rng_state() | torch.randn(1) | torch.rand(2) | torch.get_rng_state()[:16]
    """,
}


def draw(library, program, seed):
    """What the expressions give, as arrays in order."""
    library.manual_seed(seed)
    scope = {"torch": library, "nn": library.nn, "F": library.nn.functional, "g": library.Generator().manual_seed(seed + 1)}
    for expression in map(str.strip, PROGRAMS[program].split("|")):
        drawn = eval(expression, scope)
        for x in drawn if isinstance(drawn, list) else [drawn]:
            yield expression, x.detach().cpu().numpy()


def main():
    import torch
    data = {f"{program}/{seed}": b"".join(x.tobytes() for _, x in draw(torch, program, seed)) for program in PROGRAMS for seed in SEEDS}
    np.savez_compressed(DATA, **{key: np.frombuffer(drawn, np.uint8) for key, drawn in data.items()})


if __name__ == "__main__":
    main()
