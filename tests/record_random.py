"""Records in tests/data/random.npz what PyTorch's CPU generator draws:  python tests/record_random.py

A program is a list of calls (name, arguments) on one generator; `torch_draw` makes one of them with PyTorch, and
tests/test_random.py makes the same calls with ours.
"""

from pathlib import Path

import numpy as np

DATA = Path(__file__).with_name("data") / "random.npz"
SEEDS = (0, 2**40 + 7)
F32, F64 = np.float32, np.float64


def weights(shape, dtype=F32):
    """Unnormalised weights with zeros among them, in the first and the last place too."""
    p = (np.arange(np.prod(shape), dtype=dtype).reshape(shape) * 7) % 5
    p[..., 0], p[..., -1] = 0, 0
    return p


def call(name, **arguments):
    return name, arguments


PROGRAMS = {
    "rand": [call("rand", shape=n, dtype=d) for d in (F32, F64) for n in (1, 15, (2, 3), 0, 16, 17, (3, 11))],
    "uniform": [call("uniform", shape=n, low=low, high=high, dtype=d) for d in (F32, F64)
                for n, low, high in ((5, 0, 1), (17, -0.1, 0.1), (20, 3.3, 7.9), (3, 2, 2))],
    "randn": [call("randn", shape=n, dtype=d) for d in (F32, F64)
              for n in (3, 1, 0, 2, 15, 1, 16, 1, 17, 31, (4, 8), 33)],
    "normal": [call("normal", shape=n, mean=mean, std=std, dtype=d) for d in (F32, F64)
               for n in (3, 18) for mean, std in ((0, 0.02), (1.5, 0.3), (-4, 0))],
    "exponential": [call("exponential", shape=n, rate=rate, dtype=d) for d in (F32, F64)
                    for n in (1, 18) for rate in (1, 0.3)],
    "randint": [call("randint", low=low, high=high, shape=(2, 5), dtype=np.int64) for low, high in
                ((0, 10), (-5, 3), (0, 2**28 - 1), (0, 2**28), (0, 2**32), (-2**40, 2**41), (-2**63, 2**63 - 1))],
    "randint dtypes": [call("randint", low=0, high=high, shape=6, dtype=d) for d, high in
                       ((np.int32, 2**31), (np.int32, 100), (np.int16, 2**15), (np.uint8, 256), (np.bool_, 2),
                        (F32, 2**24), (F64, 2**40))],
    "randperm": [call("randperm", n=n) for n in (0, 1, 2, 3, 10, 100)],
    "bernoulli": [call("bernoulli", p=0.3, shape=(3, 6)), call("bernoulli", p=0.0, shape=2),
                  call("bernoulli", p=1.0, shape=2), call("bernoulli", p=np.linspace(0, 1, 18, dtype=F32)),
                  call("bernoulli", p=np.linspace(0, 1, 18)), call("rand", shape=2),
                  call("bernoulli", p=np.array([0.2, 0.7], F32), shape=(9, 2)), call("rand", shape=2)],
    "dropout": [call("dropout_keep", shape=n, p=p) for n in (1, (4, 9), 0) for p in (0.1, 0.5, 0, 1)],
    "multinomial": [call("multinomial", p=weights(shape, d), num_samples=n, replacement=replacement)
                    for d in (F32, F64) for shape in ((12,), (3, 30))
                    for n, replacement in ((1, False), (4, False), (1, True), (40, True))],
    "mixed": [call("randn", shape=3), call("rand", shape=5), call("randn", shape=1),
              call("randint", low=0, high=9, shape=4, dtype=np.int64), call("randn", shape=20),
              call("dropout_keep", shape=(2, 5), p=0.2),
              call("randn", shape=2, dtype=F64), call("randperm", n=6), call("rand", shape=1, dtype=F64),
              call("normal", shape=1, mean=2, std=3), call("multinomial", p=weights((9,)), num_samples=1),
              call("exponential", shape=3), call("randn", shape=1), call("randn", shape=0), call("randn", shape=1)],
    "long": [call("rand", shape=40000), call("randn", shape=40001), call("dropout_keep", shape=40000, p=0.1),
             call("randint", low=0, high=65, shape=2000), call("randperm", n=1000), call("rand", shape=3)],
}


def torch_draw(name, *, shape=None, dtype=None, p=None, **arguments):
    """The call's result from PyTorch's default generator, as an array."""
    import torch

    shape = (shape,) if isinstance(shape, int) else shape
    if dtype is not None:
        dtype = getattr(torch, np.dtype(dtype).name)
    p = torch.from_numpy(p) if isinstance(p, np.ndarray) else p
    calls = {
        "rand": lambda: torch.rand(shape, dtype=dtype),
        "randn": lambda: torch.randn(shape, dtype=dtype),
        "uniform": lambda: torch.empty(shape, dtype=dtype).uniform_(arguments["low"], arguments["high"]),
        "normal": lambda: torch.empty(shape, dtype=dtype).normal_(arguments["mean"], arguments["std"]),
        "exponential": lambda: torch.empty(shape, dtype=dtype).exponential_(arguments.get("rate", 1)),
        "randint": lambda: torch.randint(arguments["low"], arguments["high"], shape, dtype=dtype),
        "randperm": lambda: torch.randperm(arguments["n"]),
        "bernoulli": lambda: torch.bernoulli(p) if shape is None else torch.empty(shape).bernoulli_(p),
        "dropout_keep": lambda: torch.nn.functional.dropout(torch.ones(shape), p) != 0,
        "multinomial": lambda: torch.multinomial(p, **arguments),
    }
    return calls[name]().numpy()


def brief(array):
    """The last 32 elements: they depend on all the words before them."""
    return array.reshape(-1)[-32:] if array.size > 200 else array


def main():
    import torch

    recorded = {}
    for program, calls in PROGRAMS.items():
        for seed in SEEDS:
            torch.manual_seed(seed)
            drawn = [brief(torch_draw(name, **arguments)) for name, arguments in calls]
            recorded[f"{program}/{seed}"] = np.frombuffer(b"".join(x.tobytes() for x in drawn), np.uint8)
            if program == "mixed" and seed == 0:
                recorded["state after mixed/0"] = torch.get_rng_state().numpy()
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(DATA, **recorded)


if __name__ == "__main__":
    main()
