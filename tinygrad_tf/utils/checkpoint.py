"""Gradient checkpointing: of a function its inputs alone are kept for backward, which runs it once more. (Chen et al., arXiv 1604.06174)

L blocks keep L inputs, and what one block saved while backward is in it: memory for the price of a second forward.

forward     the function runs as always; each node of its graph lets go of what it saved           `Region.let_go`
backward    the first of these nodes that is reached has the function run again: a second graph, whose nodes
            hand what they saved to those of the first, and vanish                                  `Region.fill`

So the graph that is walked is the one of the first run: hooks, the order of sums and the way to each `.grad` are those without
a checkpoint, and so are the numbers, bit for bit.
"""
import weakref
from contextvars import ContextVar, copy_context
from typing import NamedTuple

import numpy as np

from ..arguments import require_bools, tensors_in, type_name, whole_number
from ..autograd import Absent, autocast_of_now, enable_grad, is_grad_enabled, observing, told, versions_of
from ..dtypes import is_float, limits
from ..random import replayed, states_at_first_use
from ..tensor import Tensor

SAMPLE = 256                                    # numbers of an output that are kept, to see that the second run computes them too

_in_a_region, _again = ContextVar("in_a_region", default=False), ContextVar("again", default=False)


def recomputing():
    """True inside the second run: for a function that counts its calls, or keeps a mean of what it has seen."""
    return _again.get()


def checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, determinism_check="default", **kwargs):
    """function(*args, **kwargs), whose graph keeps nothing but these arguments: backward runs the function again.

    It must do the same then. The same random numbers are drawn, from whatever generators, and what the `with` blocks around this
    call decided holds again; preserve_rng_state=False says that nothing is drawn. RuntimeError from backward where a tensor that was read
    has been written to since, where other operations run, or where other numbers come out (determinism_check="none" trusts them).
    Without gradients it is the plain call. PyTorch's reentrant kind (use_reentrant=True) is not there: ValueError.
    """
    _check_options(function, use_reentrant, preserve_rng_state, determinism_check)
    if not is_grad_enabled() or _in_a_region.get():         # inside another one, whose second run makes this one anew
        return function(*args, **kwargs)
    return Region(function, args, kwargs, determinism_check == "default").forward(preserve_rng_state)


def checkpoint_sequential(functions, segments, input, use_reentrant=False, preserve_rng_state=True):
    """functions[-1](… functions[0](input)) in `segments` runs of equal length, each but the last a checkpoint.

    functions: nn.Sequential or a list. The last run is longer where the length is no multiple. With √L segments, √L inputs and
    the graph of √L functions are kept. ValueError unless there are 1 to len(functions) segments.
    """
    functions, segments = list(functions), whole_number("checkpoint_sequential", "segments", segments)
    if not 1 <= segments <= len(functions):
        raise ValueError(f"checkpoint_sequential: {len(functions)} functions cannot be cut into {segments} segments; "
                         f"expected 1 to {len(functions)}")
    size = len(functions) // segments
    for start in range(0, size * (segments - 1), size):
        input = checkpoint(_run_all, functions[start:start + size], input, use_reentrant=use_reentrant,
                           preserve_rng_state=preserve_rng_state)
    return _run_all(functions[size * (segments - 1):], input)


def _run_all(functions, x):
    for function in functions:
        x = function(x)
    return x


def _check_options(function, use_reentrant, preserve_rng_state, determinism_check):
    if not callable(function):
        raise TypeError(f"checkpoint: the function comes first, then its arguments; got {type_name(function)}")
    if use_reentrant not in (None, False):
        raise ValueError(f"checkpoint: use_reentrant must be False, got {use_reentrant!r}: here the graph of the first run is kept, and no "
                         f"backward runs within backward")
    require_bools("checkpoint", preserve_rng_state=preserve_rng_state)
    if determinism_check not in ("default", "none"):
        raise ValueError(f'checkpoint: determinism_check must be "default" or "none", got {determinism_check!r}')


# --- one call ---------------------------------------------------------------------------------------------------------

class LetGo(Absent):
    """Stands for what one node saved. Filled by the second run, in which the same place may be let go of again: nested checkpoints."""
    __slots__ = ("region", "value", "__weakref__")

    def __init__(self, region):
        self.region = region

    def again(self):
        if self.region is not None:
            self.region.fill()
        return self.value.again() if isinstance(self.value, Absent) else self.value

    def take(self, value):
        self.value, self.region = value, None


class Step(NamedTuple):
    """One recorded operation of the first run. `place` refers weakly to its `LetGo`: the region must not keep the graph alive."""
    what: str
    line: tuple
    place: object

    def __str__(self):
        return f"{self.what} (called at {self.line[0]}:{self.line[1]})"


class Region:
    """The call of one function, and how to repeat it."""

    def __init__(self, function, args, kwargs, checks):
        self.call, self.checks, self.context = (function, args, kwargs), checks, copy_context()
        self.autocast = autocast_of_now()
        self.name = getattr(function, "__name__", type(function).__name__)
        self.steps, self.states, self.read, self.ended = [], {}, {}, False

    def forward(self, preserve_rng_state):
        function, args, kwargs = self.call
        for tensor in tensors_in([args, kwargs]):
            self.read[id(tensor.version)] = tensor.version, tensor.array.shape
        mine = _in_a_region.set(True)
        try:
            with observing(_Watch(self)), states_at_first_use() as self.states:
                output = self.autocast(function, *args, **kwargs)
        finally:
            _in_a_region.reset(mine)
        self._close(output, preserve_rng_state)
        return output

    def _close(self, output, preserve_rng_state):
        """From now on the second run may come. What dies with the first one is nobody's to write to: it is remembered weakly."""
        if self.states and not preserve_rng_state:
            raise RuntimeError(f"checkpoint: {self.name} draws random numbers, with preserve_rng_state=False it would draw others for "
                               f"backward; leave preserve_rng_state=False out")
        self.read = [(weakref.ref(version), version.written, shape) for version, shape in self.read.values()]
        self.sample, self.ended = self._sampled(output), True

    def let_go(self, node, args, out):
        """The node of an operation loses what it saved. Which memory that was must be known before."""
        place = None
        if node.saved is not None:
            node.versions = versions_of(node.saved, [*args, out])
            node.saved = LetGo(self)
            place = weakref.ref(node.saved)
        self.steps.append(Step(_described(node, args), node.line, place))

    # --- the second run -----------------------------------------------------------------------------------------------

    def fill(self):
        """Runs the function again and gives each node of the first run what it had saved. All of it, or RuntimeError and nothing."""
        if not self.ended:
            raise RuntimeError(f"checkpoint: backward came before {self.name} had ended; call backward outside the function")
        self._check_memory()
        nodes = self.context.run(self._run_again)
        for step, node in zip(self.steps, nodes):
            place = step.place and step.place()
            if place is not None:
                place.take(node.saved)
        self.call = self.context = None

    def _run_again(self):
        """The nodes of a second graph, found to be that of the first run."""
        function, args, kwargs = self.call
        nodes, steps = [], []
        _again.set(True)                        # in the context of the first run, which nobody else is in
        try:
            with replayed(self.states), enable_grad(), observing(_collecting(nodes, steps), alone=True):
                output = self.autocast(function, *args, **kwargs)
        except Exception as error:
            raise told(error, f"checkpoint: {self.name} failed when backward ran it again: {error}") from error
        self._check_steps(steps)
        self._check_numbers(output)
        return nodes

    def _check_memory(self):
        for version, written, shape in self.read:
            if version() is not None and version().written != written:
                raise RuntimeError(f"checkpoint: a tensor of shape {tuple(shape)} that {self.name} read was modified by an inplace "
                                   f"operation after the forward pass: backward, which runs it again, would compute with other numbers; "
                                   f"write to a .clone() instead, or call backward first")

    def _check_steps(self, steps):
        for number, (before, now) in enumerate(zip(self.steps, steps), start=1):
            if before.what != now.what:
                raise self._differs(f"operation {number} was {before}, and is now {now}")
        if len(self.steps) != len(steps):
            raise self._differs(f"there were {len(self.steps)} operations, now there are {len(steps)}")

    def _check_numbers(self, output):
        sample = self._sampled(output)
        if len(sample) != len(self.sample) or not all(map(_equal, self.sample, sample)):
            raise self._differs("its results are other numbers")

    def _sampled(self, output):
        return [_sample(tensor.array) for tensor in tensors_in(output)] if self.checks else []

    def _differs(self, how):
        return RuntimeError(f"checkpoint: {self.name} drew another graph when backward ran it again: {how}. It must do the same both "
                            f"times: does it depend on something that has changed, such as model.training or a number that it counts?")


class _Watch:
    """Told of every operation of the first run. What it reads and has not made itself lies outside: it must not change until backward."""

    def __init__(self, region):
        self.region, self.made = region, {}

    def __call__(self, node, args, out):
        read = self.region.read
        for a in args:
            if isinstance(a, Tensor) and id(a.version) not in self.made:
                read[id(a.version)] = a.version, a.array.shape
        if id(out.version) not in read:
            self.made[id(out.version)] = out.version
        if out.node is node:
            self.region.let_go(node, args, out)


def _collecting(nodes, steps):
    def observe(node, args, out):
        if out.node is node:
            nodes.append(node)
            steps.append(Step(_described(node, args), node.line, None))
    return observe


def _described(node, args):
    """What must be the same in both runs: the operation, its numbers, who wants a gradient, the shape and dtype of its result."""
    numbers = "".join(f", {a!r}" for a in args if isinstance(a, (bool, int, float, str)))
    wanted = [i for i, need in enumerate(node.needs) if need]
    return f"{node.name}{numbers} for arguments {wanted} → {node.dtype} {list(node.shape)}"


def _sample(array):
    """A few numbers from all over an array, in float64; none of a GPU's, for which the host would have to wait."""
    if not isinstance(array, np.ndarray) or not array.size:
        return array.shape, array.dtype, None
    return array.shape, array.dtype, array.flat[::-(-array.size // SAMPLE)].astype(np.float64)


def _equal(before, now):
    """A BLAS may round differently where memory lies differently; who drew another number is farther off than √eps."""
    if before[:2] != now[:2] or before[2] is None:
        return before[:2] == now[:2]
    near = float(limits(before[1]).eps) ** 0.5 if is_float(before[1]) else 0
    size = np.abs(before[2][np.isfinite(before[2])]).max(initial=0)
    return bool(np.isclose(before[2], now[2], rtol=near, atol=near * size, equal_nan=True).all())
