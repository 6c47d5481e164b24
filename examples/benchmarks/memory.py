"""Is memory flat while a model trains?      python examples/benchmarks/memory.py [--steps 1000] [--every 500]

Prints, every few steps, the live tensors, the objects that only the garbage collector could free, the bytes that Python and
NumPy have allocated (tracemalloc), and the resident size of the process. The collector is off while steps are made, and
finds nothing: graphs die by reference counting alone. Tracing makes steps slower: this measures memory, not time.
"""
import argparse
import gc
import tracemalloc

import numpy as np

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.training.monitor import resident_bytes


def live_tensors():
    """How many tensors exist, garbage that waits for the collector included."""
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


class Training:
    """Steps of a small MiniGPT with dropout on random tokens: forward, backward, clipping, AdamW."""

    def __init__(self, B=8, T=32, C=64, H=4, layers=2, V_vocab=100):
        torch.manual_seed(0)
        self.shape, self.V_vocab = (B, T + 1), V_vocab
        self.model = MiniGPT(V_vocab, T, C, H, 4 * C, layers, dropout=0.1, norm_first=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self):
        tokens = torch.randint(0, self.V_vocab, self.shape)
        self.optimizer.zero_grad()
        _, loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def run(self, steps):
        for _ in range(steps):
            self.step()


def measure(training, steps, every):
    """Rows (step, live tensors, garbage objects, traced bytes, resident bytes), after `every` steps to warm up.

    Bytes are read after a collection, which also empties the lists in which CPython keeps freed tuples for their next use.
    """
    rows = np.zeros((steps // every, 5), np.int64)      # now, so that the measurement itself allocates nothing that stays
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        training.run(every)                             # fills what is filled once: caches, and tracemalloc's own view of them
        gc.collect()
        for i in range(len(rows)):
            training.run(every)
            rows[i] = (i + 1) * every, live_tensors(), gc.collect(), tracemalloc.get_traced_memory()[0], resident_bytes()
    finally:
        tracemalloc.stop()
        gc.enable()
    return rows.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=500)
    arguments = parser.parse_args()
    tune_allocator()
    training = Training()
    rows = measure(training, arguments.steps, arguments.every)
    print(f"{'step':>6}  {'live tensors':>12}  {'garbage':>7}  {'traced bytes':>12}  {'resident MiB':>12}")
    for step, tensors, garbage, traced, resident in rows:
        print(f"{step:6d}  {tensors:12,d}  {garbage:7,d}  {traced:12,d}  {resident / 2**20:12.1f}")


if __name__ == "__main__":
    main()
