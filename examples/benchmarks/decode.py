"""Time per generated token, ours and PyTorch eager's, side by side.      python examples/benchmarks/decode.py

One row, greedy, a preallocated cache on both sides, the same weights. The twin is written as one writes it in PyTorch: the same
layers, `F.scaled_dot_product_attention`, no_grad. Rounds take turns in one process, so that both meet the same machine; the
figure is the median of the ratios, with the smallest and the largest. Without PyTorch ours alone is timed. Also: how the cost of
a token grows with what is in the cache.
"""
import argparse
import json
import os
import platform
import statistics
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # before NumPy is loaded

import numpy as np
from turns import timed

import tinygrad_tf
from tinygrad_tf import nn
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.generation import stream
from tinygrad_tf.models import MiniGPT

MODELS = {"a": {"vocab_size": 65, "max_seq_len": 256, "dim": 128, "num_heads": 4, "num_layers": 4},
          "b": {"vocab_size": 512, "max_seq_len": 256, "dim": 384, "num_heads": 6, "num_layers": 6}}


def ours(**sizes):
    """MiniGPT, pre-norm, tanh-GELU of 4C."""
    tinygrad_tf.manual_seed(0)
    model = MiniGPT(hidden_dim=4 * sizes["dim"], dropout=0.0, norm_first=True, **sizes)
    for block in model.blocks:
        block.ffn.net[1] = nn.GELU("tanh")
    return model.eval()


def generator(model):
    """A function from the number of tokens to their ids, for our model."""
    prompt = tinygrad_tf.zeros(1, 1, dtype=tinygrad_tf.int64)
    return lambda n: [token.item() for token in stream(model, prompt, n, temperature=0)]


def twin(model):
    """The same for the same model in PyTorch."""
    import torch
    F, C, H = torch.nn.functional, model.embedding.token.weight.shape[1], model.blocks[0].attention.num_heads

    def linear(layer):
        copy = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        copy.load_state_dict({name: torch.tensor(p.detach().numpy()) for name, p in layer.named_parameters()})
        return copy

    def norm(layer):
        copy = torch.nn.LayerNorm(C)
        copy.load_state_dict({name: torch.tensor(p.detach().numpy()) for name, p in layer.named_parameters()})
        return copy

    class Block(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.norm1, self.norm2, attention = norm(block.norm1), norm(block.norm2), block.attention
            self.q, self.k, self.v, self.out = map(linear, (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj))
            self.up, self.down = linear(block.ffn.net[0]), linear(block.ffn.net[3])

        def forward(self, x, keys, values, t):
            h = self.norm1(x)
            q, k, v = (layer(h).view(1, 1, H, C // H).transpose(1, 2) for layer in (self.q, self.k, self.v))
            keys[:, :, t:t + 1], values[:, :, t:t + 1] = k, v
            out = F.scaled_dot_product_attention(q, keys[:, :, :t + 1], values[:, :, :t + 1])
            x = x + self.out(out.transpose(1, 2).reshape(1, 1, C))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    blocks = torch.nn.ModuleList(map(Block, model.blocks))
    final = norm(model.final_norm)
    token, position = (torch.tensor(table.weight.detach().numpy()) for table in (model.embedding.token, model.embedding.position))
    caches = [[torch.zeros(1, H, model.max_seq_len, C // H) for _ in range(2)] for _ in blocks]

    @torch.no_grad()
    def generate(n):
        ids = [0]
        for t in range(n):
            x = F.embedding(torch.tensor([[ids[-1]]]), token) + position[t]
            for block, (keys, values) in zip(blocks, caches):
                x = block(x, keys, values, t)
            ids.append(F.linear(final(x), token).argmax().item())
        return ids[1:]
    return generate


def growth(model, rounds, contexts=(16, 64, 128, 240)):
    """{tokens in the cache: µs a token}, the smallest of several, over 8 tokens each."""
    found = {}
    for context in contexts:
        times = []
        for _ in range(rounds):
            tokens = stream(model, tinygrad_tf.zeros(1, context, dtype=tinygrad_tf.int64), 9, temperature=0)
            next(tokens)                                        # the prefill, and the first token
            begin = time.perf_counter()
            list(tokens)
            times.append((time.perf_counter() - begin) / 8)
        found[context] = min(times) * 1e6
    return found


def measure(name, tokens, rounds, compare):
    """{"ours": seconds a token of each round, "torch": the same or nothing, "growth": {context: µs}}"""
    model = ours(**MODELS[name])
    generate, other = generator(model), twin(model) if compare else None
    first, found = generate(tokens), {"ours": [], "torch": []}
    if compare:
        assert first == other(tokens), "the twin writes another text"
    for _ in range(rounds):
        found["ours"].append(timed(lambda: generate(tokens)) / tokens)
        if compare:
            found["torch"].append(timed(lambda: other(tokens)) / tokens)
    return {**found, "growth": growth(model, rounds)}


def shown(name, found):
    mine, theirs = found["ours"], found["torch"]
    line = f"({name}) ours {statistics.median(mine) * 1e6:6.0f} µs a token"
    if theirs:
        ratios = sorted(a / b for a, b in zip(mine, theirs))
        line += (f", PyTorch eager {statistics.median(theirs) * 1e6:6.0f}: ratio {statistics.median(ratios):.2f} "
                 f"({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return line + "\n    " + ", ".join(f"after {context} tokens {cost:.0f} µs" for context, cost in found["growth"].items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", help="a file for the figures")
    arguments = parser.parse_args()
    tune_allocator()
    try:
        import torch
        torch.set_num_threads(1)
        peer = f"PyTorch {torch.__version__}"
    except ImportError:
        torch, peer = None, "no PyTorch"
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, {peer}, 1 thread, "
          f"{arguments.tokens} tokens, {arguments.rounds} rounds")
    results = {}
    for name in MODELS:
        results[name] = measure(name, arguments.tokens, arguments.rounds, torch is not None)
        print(shown(name, results[name]), flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
