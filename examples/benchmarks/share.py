"""What the engine costs: the share of autograd in a training step.            python examples/benchmarks/share.py [--size a|b]

One step of train_step.py is watched, and becomes a list of its operations: which class, which arrays, whose results. *Raw* is that
list again: the same calls of forward and backward on bare arrays, gradients summed over what was broadcast and added up where
several meet, then clipping and AdamW. No tensor, no graph, no check, no module. Both run in this process, a few at a time in turn:
share = (step − raw) ÷ step. --operations also times a chain of operations on 4 elements, where next to nothing is left but the engine,
beside PyTorch's where that is installed.
"""
import argparse
import importlib.util
import statistics

import guard  # noqa: F401  sets the threads, before NumPy is loaded
import numpy as np
import train_step
from turns import at_least_one, processor, timed

import tinygrad_tf as torch
from tinygrad_tf.autograd import observing
from tinygrad_tf.backend import sum_to


class Tape:
    """The operations of one forward pass, to be run again on arrays."""

    def __init__(self, run):
        self.seen = []
        with observing(lambda node, args, out: self.seen.append((node, args, out))):
            self.loss = run()
        made = {id(out): i for i, (_, _, out) in enumerate(self.seen)}
        self.calls = [(type(node), node.needs, [(made.get(id(a)), a) for a in args]) for node, args, _ in self.seen]

    def run(self):
        """Forward and backward. Returns (the loss, {id of a leaf: its gradient})."""
        nodes, results = [], []
        for kind, needs, args in self.calls:
            node = kind()
            node.saved, node.needs = None, needs
            nodes.append(node)
            results.append(node.forward(*(getattr(a, "array", a) if i is None else results[i] for i, a in args)))
        gradients, leaves, shapes, loss = {len(nodes) - 1: np.ones_like(results[-1])}, {}, [np.shape(y) for y in results], results[-1]
        results.clear()                                     # as in a step, where only what is saved outlives forward
        for n in range(len(nodes) - 1, -1, -1):
            if n in gradients:
                self._spread(n, nodes[n].backward(gradients.pop(n)), gradients, leaves, shapes)
            nodes[n] = None
        return loss, leaves

    def _spread(self, n, found, gradients, leaves, shapes):
        _, needs, args = self.calls[n]
        for g, need, (i, a) in zip(found if isinstance(found, tuple) else (found,), needs, args):
            if g is None or not need:
                continue
            key, into, shape = (id(a), leaves, a.array.shape) if i is None else (i, gradients, shapes[i])
            g = sum_to(g, shape)
            into[key] = into[key] + g if key in into else g


def build(sizes):
    """(step, raw), functions of one training step that return its loss: that of train_step.py, and the same of its twin on bare arrays."""
    library = train_step.modules("tinygrad_tf", 1)
    return train_step.build(*library, **sizes), raw_step(*library, **sizes)


def raw_step(torch, nn, F, **sizes):
    torch.manual_seed(0)
    model = train_step.gpt(torch, nn, F, **sizes)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    ids = torch.randint(0, sizes["V"], (sizes["B"], sizes["T"] + 1))
    tape = Tape(lambda: model(ids[:, :-1], ids[:, 1:]))

    def raw():
        optimizer.zero_grad()
        with np.errstate(all="ignore"):
            loss, gradients = tape.run()
        for p in parameters:
            p._grad = torch.autograd.constant(gradients[id(p)])
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return float(loss)
    return raw


def chain(torch, length):
    """A function of `length` operations on 4 elements, sums and products in turn, forward and backward."""
    x, y = torch.ones(2, 2, requires_grad=True), torch.full((2, 2), 1.001, requires_grad=True)

    def run():
        z = x
        for _ in range(length // 2):
            z = z * y + x
        z.sum().backward()
        x.grad = y.grad = None
    return run


def in_turns(first, second, rounds, calls):
    """[(seconds of the one, seconds of the other)], a pair a turn."""
    for run in (first, second):
        timed(run, 2)                                       # what is loaded and paged in at first use
    return [(timed(first, calls), timed(second, calls)) for _ in range(rounds)]


def medians(pairs):
    return [statistics.median(column) for column in zip(*pairs)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(train_step.SIZES), default="a")
    parser.add_argument("--rounds", type=at_least_one, default=30)
    parser.add_argument("--operations", action="store_true", help="also the cost of recording an operation, beside PyTorch's")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds: does it run?")
    arguments = parser.parse_args()
    sizes = train_step.QUICK if arguments.quick else train_step.SIZES[arguments.size]
    rounds, calls = (2, 1) if arguments.quick else (arguments.rounds, {"a": 5, "b": 1}[arguments.size])
    print(f"{processor()}, NumPy {np.__version__}, 1 thread, {rounds} rounds{'; a tiny model: its figures mean nothing' * arguments.quick}")
    step, raw = build(sizes)
    pairs = in_turns(step, raw, rounds, calls)
    share = statistics.median((a - b) / a for a, b in pairs)
    step, raw = (1e3 * t for t in medians(pairs))
    print(f"a step {step:.2f} ms, its calls on bare arrays {raw:.2f} ms: autograd's share {share:.1%}")
    if not arguments.operations:
        return
    length, ours = 200, chain(torch, 200)
    if importlib.util.find_spec("torch") is None:
        return print(f"an operation on 4 elements, recorded and backward: {1e6 * min(timed(ours) for _ in range(rounds)) / length:.2f} µs; "
                     f"PyTorch is not installed: no ratio.")
    pytorch, _, _ = train_step.modules("torch", 1)
    pairs = in_turns(ours, chain(pytorch, length), rounds, 1 if arguments.quick else 10)
    ours, theirs = (1e6 * t / length for t in medians(pairs))
    print(f"an operation on 4 elements, recorded and backward: {ours:.2f} µs, PyTorch {theirs:.2f} µs: ÷ PyTorch "
          f"{statistics.median(a / b for a, b in pairs):.2f}")


if __name__ == "__main__":
    main()
