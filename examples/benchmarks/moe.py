"""Sparse dispatch beside the dense form of a mixture of experts.      python examples/benchmarks/moe.py

One step of one layer, forward and backward, float32: E experts of hidden width 4C, k for each token. The dense form lets every
expert compute every token, so k / E of its time is what a sparse one could reach at best. Both have the same weights; rounds
take turns in one process, and the figure is the median of the ratios, with the smallest and the largest. The parts of the sparse step
are timed too: the products, and what it costs to sort, move and bring back.
"""
import argparse
import json
import os
import platform
import statistics
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # before NumPy is loaded

import numpy as np

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.ops.moe import combine, dispatch, plan_dispatch

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--tokens", type=int, default=4096)
parser.add_argument("--dim", type=int, default=384)
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--top-k", type=int, default=2)
parser.add_argument("--ffn", default="gelu", help="gelu, swiglu, … (default: gelu)")
parser.add_argument("--json", help="a file for the figures")
arguments = parser.parse_args()
n, C, E, k = arguments.tokens, arguments.dim, arguments.experts, arguments.top_k


def layer(form):
    torch.manual_seed(0)
    return form(C, 4 * C, E, k, ffn=arguments.ffn, bias=True)


def step(layer, x, dy):
    """(seconds of a forward and backward pass, the result, the gradient of x)"""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    begin = time.perf_counter()
    y = layer(x)
    y.backward(dy)
    return time.perf_counter() - begin, y, x.grad


def moving(layer, x, dy):
    """Seconds of the same without the experts: router, plan, dispatch, combine, forward and backward."""
    x = x.detach().requires_grad_()
    begin = time.perf_counter()
    _, experts, weights = layer.router(x)
    plan = plan_dispatch(experts.array, E)
    combine(dispatch(x, plan), weights, plan).backward(dy)
    return time.perf_counter() - begin


tune_allocator()
torch.manual_seed(1)
sparse, dense, x, dy = layer(nn.MoE), layer(nn.DenseMoE), torch.randn(n, C), torch.randn(n, C)
print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, 1 thread: {n} tokens, "
      f"C = {C}, E = {E} experts of {4 * C}, k = {k}, {arguments.ffn}, {arguments.rounds} rounds")
found, wanted = step(sparse, x, dy), step(dense, x, dy)             # once to warm up, and to compare
load = sparse(x, return_routing=True)[1].load
print("load of the experts: " + "  ".join(f"{share:.2f}" for share in load))
assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found[1:], wanted[1:])), "the two forms differ"
times = {"sparse": [], "dense": [], "moving": []}
for _ in range(arguments.rounds):
    times["sparse"].append(step(sparse, x, dy)[0])
    times["dense"].append(step(dense, x, dy)[0])
    times["moving"].append(moving(sparse, x, dy))
ratios = sorted(a / b for a, b in zip(times["sparse"], times["dense"]))
middle = {name: statistics.median(values) * 1e3 for name, values in times.items()}
print(f"dense {middle['dense']:.0f} ms, sparse {middle['sparse']:.0f} ms, of which router, sorting and moving {middle['moving']:.0f} ms")
print(f"sparse ÷ dense {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}); k / E = {k / E:.3f}")
if arguments.json:
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump({"tokens": n, "dim": C, "experts": E, "top_k": k, "times": times, "ratios": ratios}, file, indent=1)
