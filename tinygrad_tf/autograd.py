"""The engine: `Function` is one differentiable operation, `backward` walks the graph that its instances form.

An operation is a class with a `forward` (arrays in, one array out) directly above its `backward` (the gradient of the
output in, one gradient per tensor argument out). `Op.apply(...)` runs it on tensors; the instance is then the node of
the graph, and holds what backward needs in `self.saved`. A node knows the nodes before it and never its own output
tensor, so that a graph dies by reference counting alone.

What all operations share is here and not in them: sums over broadcast axes, casts to the operand's dtype, skipping
gradients that nobody wants, checks, and the order of the walk.
"""
import contextlib
import functools
import heapq
import inspect
import itertools
import math
import os
import sys
import threading
import weakref

import numpy as np

from .backend import (
    array_module,
    beside,
    casting,
    check_one_device,
    device_of,
    enter_quiet,
    is_writable,
    leave_quiet,
    on_one_device,
    owner,
    quiet,
    sum_to,
)
from .dtypes import BFLOAT16, FLOAT_KINDS, is_bfloat16, widened

Tensor = None                                   # set by register_tensor: the engine imports nothing below itself


def register_tensor(cls):
    """tensor.py hands its class to the engine."""
    global Tensor
    Tensor = cls
    return cls


# --- grad mode: one flag a thread ---------------------------------------------------------------------------------

class _Mode(threading.local):
    def __init__(self):
        self.enabled, self.before = True, []    # `before`: the modes to return to, one for each open context
        self.observers = ()                     # who is told of every operation of this thread: see `observing`
        self.step = None                        # what backward does at a node instead of `node_backward`: see anomaly.py
        self.gathered = None                    # where the gradients of leaves go, if not into `.grad`: see `gathering`


_mode = _Mode()


def is_grad_enabled():
    """True where operations are recorded: everywhere but inside `no_grad`."""
    return _mode.enabled


class set_grad_enabled:
    """Switches recording on or off: at once and for good; as a `with` block, until the block ends; as a decorator, inside."""

    def __init__(self, mode):
        self.mode, self.before = bool(mode), _mode.enabled
        _mode.enabled = self.mode

    def __call__(self, function):
        _mode.enabled = self.before             # it was meant for the function, not for here
        return (enable_grad if self.mode else no_grad)()(function)

    def __enter__(self):
        _mode.enabled = self.mode
        return self

    def __exit__(self, *error):
        _mode.enabled = self.before


class Mode(contextlib.ContextDecorator):
    """A context manager and decorator, for functions and generators; one object may be entered many times."""

    def __call__(self, function):
        if inspect.isgeneratorfunction(function):
            return self._generator(function)

        @functools.wraps(function)
        def inner(*args, **kwargs):
            with self:
                return function(*args, **kwargs)
        return inner

    def _generator(self, function):
        """The mode holds while the generator's body runs, and not in the caller between two values."""
        @functools.wraps(function)
        def inner(*args, **kwargs):
            body, step, value = function(*args, **kwargs), "send", None
            try:
                while True:
                    with self:
                        item = getattr(body, step)(value)
                    try:
                        step, value = "send", (yield item)
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step, value = "throw", error
            except StopIteration as end:
                return end.value
            finally:
                with self:
                    body.close()
        return inner


class _GradMode(Mode):
    def __new__(cls, function=None):            # `@no_grad` without parentheses decorates too
        self = super().__new__(cls)
        return self if function is None else self(function)

    def __enter__(self):
        _mode.before.append(_mode.enabled)
        _mode.enabled = self.mode

    def __exit__(self, *error):
        _mode.enabled = _mode.before.pop()


class no_grad(_GradMode):
    """Inside, operations are not recorded: no graph, no saved arrays. Also a decorator."""
    mode = False


class enable_grad(_GradMode):
    """Inside, operations are recorded again, also within `no_grad`. Also a decorator."""
    mode = True


@contextlib.contextmanager
def observing(observe, alone=False):
    """Inside, this thread calls observe(node, args, out) after every operation: its instance, what it was applied to, its tensor.

    alone: nobody else is told of these operations.
    """
    before = _mode.observers
    _mode.observers = (observe,) if alone else (*before, observe)
    try:
        yield
    finally:
        _mode.observers = before


def is_observed():
    """Whether this thread is within `observing`."""
    return bool(_mode.observers)


def is_watched():
    """Whether somebody looks on as this thread computes: `observing`, or anomaly mode in backward."""
    return bool(_mode.observers or _mode.step)


def inference_mode(mode=True):
    """PyTorch's name for no_grad, here the same; mode=False records."""
    return no_grad() if mode is True else enable_grad() if mode is False else no_grad(mode)


# --- autocast: in which type an operation runs ----------------------------------------------------------------------
#
# Each operation says on which of PyTorch's lists for CUDA it stands: `Function.autocast`. Where amp.py has switched autocast on, the
# arguments are cast to what that list asks for, here and nowhere else. float64 is never cast, as in PyTorch.

LOW = "low"                                     # the type of autocast: products of matrices
FLOAT32 = "float32"                             # sums, exponentials, logarithms, powers, norms, losses
WIDEST = "widest"                               # the widest among the arguments


def autocasted(how, *args):
    """The arguments of an operation of the list `how`, its float tensors in the type that autocast runs it in. Others stay."""
    if not casting.dtypes or how is None:
        return args
    lows = [_low_there(a) for a in args]
    if how == WIDEST and not any(low is not None and a.array.dtype == np.float32 for a, low in zip(args, lows)):
        return args
    return tuple([a if low is None else _cast(a, low if how == LOW else np.float32) for a, low in zip(args, lows)])


def _low_there(x):
    """The type of autocast where x is; None where autocast is off there, and for all but tensors of floats of up to 32 bits."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.array.itemsize <= 4:
        return casting.dtypes.get(device_of(x.array).type)
    return None


def _cast(x, dtype):
    """x in a NumPy dtype, by the operation Cast. That of a weight is kept until the outermost autocast ends, or the weight changes."""
    if x.array.dtype == dtype:
        return x
    if casting.casts is None or x.node is not None or not x.requires_grad:
        return Function.registry["Cast"].apply(x, dtype)
    _, version, written, kept = casting.casts.get(id(x), (None,) * 4)
    if version is not x.version or written != x.version.written or kept.array.dtype != dtype or _mode.enabled and not kept.requires_grad:
        kept = Function.registry["Cast"].apply(x, dtype)
        casting.casts[id(x)] = x, x.version, x.version.written, kept     # x too: while it is held here, nobody else has its id
    return kept


def without_autocast(function, *args, **kwargs):
    """function(…) with autocast off."""
    before, casting.dtypes = casting.dtypes, {}
    try:
        return function(*args, **kwargs)
    finally:
        casting.dtypes = before


def autocast_of_now():
    """run(function, *args, **kwargs), which at any time runs a function under the autocast of now; each time weights are cast anew."""
    dtypes, named, keeps, depth = casting.dtypes, casting.named, casting.casts is not None, len(casting.blocks)

    def run(function, *args, **kwargs):
        before = dict(vars(casting))
        vars(casting).update(dtypes=dtypes, named=named, casts={} if keeps else None, blocks=[None] * depth)
        try:
            return function(*args, **kwargs)
        finally:
            vars(casting).update(before)
    return run


def under_autocast(how):
    """A decorator: to autocast the function is one operation of the list `how`, whatever it is made of. None: no list."""
    def decorate(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            if casting.dtypes:
                values = autocasted(how, *args, *kwargs.values())
                args, kwargs = values[:len(args)], dict(zip(kwargs, values[len(args):]))
            return without_autocast(function, *args, **kwargs)
        return run
    return decorate


# --- one operation = one node -------------------------------------------------------------------------------------

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_next_id = itertools.count().__next__
_RELEASED = object()                            # what `saved` becomes once backward has used it


class Absent:
    """What `saved` is where a node let go of its numbers: `again()` brings them back when backward comes.      (utils/checkpoint.py)"""
    __slots__ = ()

    def again(self):
        raise TypeError(f"{type(self).__name__} defines no again")


def _user_line():
    """(file, line) of the nearest caller outside this package."""
    return _line_at(*_user_place(sys._getframe(2)))


def _user_place(frame):
    """(code, how far in it) of the nearest caller outside this package. Not its frame: a frame would keep its variables alive."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


def _line_at(code, place):
    """(file, line) of a place in a code. In a long function Python takes longer to find it than for the operation: so, only when asked."""
    if code is None:
        return "<library>", 0
    return code.co_filename, next((line for start, end, line in code.co_lines() if start <= place < end), None) or 0


class Function:
    """A differentiable operation. Subclasses define

        forward(self, *args)   arrays where tensors were passed, everything else as it is; returns one array;
                               keeps what backward needs in `self.saved` (one array or a tuple)
        backward(self, dy)     returns the gradient of each tensor argument in order (None where there is none);
                               `self.needs[i]` says whether argument i wants one

    `autocast` is the list that the operation stands on: LOW, FLOAT32, WIDEST, or None: it runs in the type of its arguments.
    `in_float32`: where its float tensors are all bfloat16, both get float32 arrays, and what they return is rounded. False: forward
    gets bfloat16, to move it or to hand it to a kernel.
    `Function.registry` holds every operation by name: the tests walk it, so that none goes unchecked.
    """
    __slots__ = ("saved", "inputs", "needs", "id", "shape", "dtype", "versions", "called", "__weakref__", "__dict__")
    registry = {}
    retained = hooks = None                     # of the tensor that this node has made: see `retain` and `Tensor.register_hook`
    autocast = None
    in_float32 = True
    mixes = False                               # may a single number on the CPU meet tensors of a GPU? As in PyTorch, element by element
    lets_go = False                             # may its gradients be written to, if nobody else holds them? Plain arrays: the library's

    def __init_subclass__(cls):
        Function.registry[cls.__name__] = cls
        cls.lets_go = cls.__module__.startswith(__package__ + ".")

    @classmethod
    def apply(cls, *args):
        """Runs forward on the arrays of `args` and returns a Tensor, recorded when grad mode and the inputs ask for it."""
        node, recording = cls(), _mode.enabled
        node.saved = None
        if casting.dtypes:
            args = autocasted(cls.autocast, *args)
        node.inputs, node.needs = inputs, needs = [], []
        tensors, arrays, versions = [], [], []
        for a in args:
            if isinstance(a, Tensor):
                need, version = recording and a._requires_grad, a.version
                tensors.append(a)
                arrays.append(a.array)
                versions.append(version)
                needs.append(need)
                inputs.append((a.node or a) if need else None)
                if recording and a.seen != version.recorded:
                    a.check_history()
            else:
                arrays.append(a)
                needs.append(False)
                inputs.append(None)
        if not tensors:
            raise _without_tensors(cls.__name__, args)
        if len(tensors) > 1 and "cupy" in sys.modules and not on_one_device([t.array for t in tensors]):
            return cls.apply(*_met(cls, args, tensors))
        forward = node._rounded if BFLOAT16 and cls.in_float32 and _all_bfloat16(tensors) else node.forward
        first = tensors[0].array
        before = enter_quiet()
        try:
            out = forward(*arrays) if isinstance(first, np.ndarray) else beside(first, forward, *arrays)
        finally:
            leave_quiet(before)
        if type(out) is not type(first):        # NumPy turns 0-d results into scalars
            out = _as_output(cls.__name__, out, first)
        version = _version_in(out, tensors) or Version()
        recorded = True in needs and out.dtype.kind in FLOAT_KINDS
        if recorded:
            versions.append(version)
            node.versions, node.shape, node.dtype = versions, out.shape, out.dtype
            node.id, node.called = _next_id(), _user_place(sys._getframe(1))
        out = Tensor._wrap(out, node if recorded else None, version)
        if _mode.observers:
            for observe in _mode.observers:
                observe(node, args, out)
        return out

    def _rounded(self, *arrays):
        """forward in float32, and bfloat16 made of a float32 result."""
        out = self.forward(*map(widened, arrays))
        return out.astype(BFLOAT16[0]) if getattr(out, "dtype", None) == np.float32 else out

    def forward(self, *args):
        raise TypeError(f"{type(self).__name__} defines no forward")

    def backward(self, dy):
        raise TypeError(f"{type(self).__name__} defines no backward")

    @property
    def name(self):
        return type(self).__name__

    @property
    def line(self):
        """(file, line) that called the operation."""
        return _line_at(*self.called)

    def __repr__(self):
        return f"<{self.name}Backward>"


def _all_bfloat16(tensors):
    floats = [t.array for t in tensors if t.array.dtype.kind in FLOAT_KINDS]
    return bool(floats) and all(map(is_bfloat16, floats))


def _as_output(op, out, like):
    """What forward returned, as an array."""
    if not hasattr(out, "dtype") or isinstance(out, Tensor):
        raise TypeError(f"{op}: forward must return an array, got {type(out).__name__}; is a `return` missing?")
    return array_module(like).asarray(out) if isinstance(out, np.generic) else out      # not so an array that has moved: `.to("cuda")`


def _without_tensors(op, args):
    return TypeError(f"{op}: expected a Tensor, got {', '.join(type(a).__name__ for a in args) or 'nothing'}; "
                     f"make one with tinygrad_tf.tensor(...)")


def _met(cls, args, tensors):
    """The arguments on one device: where `cls.mixes`, 0-d tensors of the CPU move to the GPU of the others; else RuntimeError."""
    there = next(t.device for t in tensors if t.device.type != "cpu")
    moves = [cls.mixes and isinstance(a, Tensor) and a.ndim == 0 and a.device.type == "cpu" for a in args]
    met = [a.to(there) if move else a for a, move in zip(args, moves)]
    check_one_device(cls.__name__, [a.array for a in met if isinstance(a, Tensor)])
    return met


# --- in-place writes: who notices --------------------------------------------------------------------------------
#
# One `Version` belongs to one piece of memory, and all tensors that view it share it. Two things can go stale by a write:
#   what a node saved     writes and nodes are numbered by one clock: a number above the node's is a write after it. Where one of
#                         `node.versions` has such a number, backward looks whether it is memory that the node saved
#   a tensor's history    after a *recorded* write its memory holds the result of another node than its own:
#                         `tensor.seen` remembers version.recorded, and whoever uses the tensor compares (check_history)

IGNORED = -100                                  # the label that losses leave out by default, PyTorch's ignore_index


class Version:
    """What has been written in place to one piece of memory: the number of the last write, and how many became part of a graph.

    `leaves` refers weakly to the leaves that require a gradient and lie here. `bounds` says what ids lie here on a GPU.
    """
    written, memory, recorded, leaves, bounds = 0, None, 0, (), None

    def wrote(self, array):
        """Notes a write to `array`, which lies here."""
        self.written, self.memory = _next_id(), id(owner(array))

    def is_of(self, saved):
        """Whether one of the saved arrays lies here. They were there at the last write already, so that no two memories had one id."""
        return self.memory in _memories(saved)

    def note_bounds(self, ids):
        """Keeps the range of what is being uploaded here from the host, if it is integers: they may become ids or labels."""
        if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and ids.size:
            low, high = int(ids.min()), int(ids.max())
            self.bounds = self.written, low, high, low if low >= 0 else int(ids.min(where=ids != IGNORED, initial=high))

    def inherit_bounds(self, version):
        """The ids here are among those of another memory."""
        if version.bounds is not None and version is not self and version.bounds[0] == version.written:
            self.bounds = self.written, *version.bounds[1:]

    def known_bounds(self, apart_from=None):
        """(low, high) of the ids in this memory, (−∞, ∞) where nobody knows. apart_from=IGNORED: of the labels that count."""
        if self.bounds is None or self.bounds[0] != self.written:
            return -math.inf, math.inf
        _, low, high, lowest_label = self.bounds
        return (lowest_label if apart_from == IGNORED else low), high

    def add_leaf(self, tensor):
        self.leaves = (*(leaf for leaf in self.leaves if leaf() is not None and leaf() is not tensor), weakref.ref(tensor))

    def has_leaf(self):
        """True while a leaf that requires a gradient lies in this memory."""
        found = (leaf() for leaf in self.leaves)
        return any(t is not None and t.requires_grad and t.version is self for t in found)


def _version_in(array, tensors):
    """The `Version` of the first tensor in whose memory the array lies; None where there is none."""
    for t in tensors:
        if t.array is array:
            return t.version
    if array.base is not None:
        mine = owner(array)
        for t in tensors:
            if owner(t.array) is mine:
                return t.version
    return None


def _memories(saved):
    """The ids of the memories in which the saved arrays lie."""
    return {id(owner(array)) for array in (saved if isinstance(saved, tuple) else (saved,)) if hasattr(array, "base")}


def versions_of(saved, tensors):
    """The `Version` of each of the tensors in whose memory one of the saved arrays lies."""
    memories = _memories(saved)
    return [t.version for t in tensors if isinstance(t, Tensor) and id(owner(t.array)) in memories]


def constant(array):
    """A tensor without history around an array: what comparisons, argmax, … return."""
    return Tensor._wrap(array if array.ndim else array_module(array).asarray(array), None, Version())


def array_of(x):
    """The array of a tensor; anything else as it is."""
    return x.array if isinstance(x, Tensor) else x


# --- the walk -----------------------------------------------------------------------------------------------------

@quiet
def backward(root, gradient=None, retain_graph=False):
    """Adds d(root · gradient)/d(leaf) to `.grad` of every leaf below `root`."""
    beside(root.array, _walk, root, gradient, retain_graph)


def _walk(root, gradient, retain_graph):
    """From the root to the leaves.

    Nodes are numbered as they are made, so an input's number is always smaller than its user's: taking the largest
    number first visits every node after all of its users. The walk keeps a heap and no recursion.
    """
    dy = _root_gradient(root, gradient)
    if root.node is None:
        return _accumulate(root, dy, mine=False)
    root.check_history()
    step = _mode.step or node_backward
    waiting = {root.node.id: [root.node, dy, False]}        # id → node, its gradient so far, is that memory ours to write into?
    hooked = {}                                             # the same for leaves with hooks: these see the whole gradient, once
    heap = [-root.node.id]
    while heap:
        node, dy, _ = waiting.pop(-heapq.heappop(heap))
        if node.hooks or node.retained:
            dy = _show(node, dy)
        gradients = step(node, dy) if isinstance(dy, np.ndarray) else beside(dy, step, node, dy)
        for i in range(len(gradients)):
            g = gradients[i]
            if g is None:
                continue
            source, mine = node.inputs[i], node.lets_go and g.base is None and sys.getrefcount(g) <= _REFERENCES
            if isinstance(source, Tensor):
                _reach_leaf(source, g, hooked, mine)
            elif source.id in waiting:
                _add_waiting(waiting[source.id], g, mine)
            else:
                waiting[source.id] = [source, g, mine]
                heapq.heappush(heap, -source.id)
        if not retain_graph and node.saved is not None:
            node.saved = _RELEASED
    for leaf, g, _ in hooked.values():
        _accumulate(leaf, g, mine=False)


def _root_gradient(root, gradient):
    """The upstream gradient of the root as an array: ones for a single number, else what the caller gave."""
    if not root.requires_grad:
        raise RuntimeError("backward: this tensor does not require grad and has no graph; build it from a tensor made "
                           "with requires_grad=True, outside no_grad()")
    xp = array_module(root.array)
    if gradient is None:
        if root.array.size != 1:
            raise RuntimeError(f"backward: grad can be implicitly created only for scalar outputs, this tensor has shape "
                               f"{tuple(root.shape)}; reduce it (.sum(), .mean()) or pass backward(gradient)")
        return xp.ones_like(root.array)
    if not isinstance(gradient, Tensor):
        raise TypeError(f"backward: gradient must be a Tensor or None, got {type(gradient).__name__}")
    if gradient.array.shape != root.array.shape:
        raise RuntimeError(f"backward: gradient has shape {tuple(gradient.shape)} but the tensor has shape "
                           f"{tuple(root.shape)}; they must be equal")
    check_one_device("backward", [root.array, gradient.array])
    return gradient.array.astype(root.array.dtype, copy=False)


def node_backward(node, dy):
    """The gradients of one node's inputs, each summed to its input's shape and cast to its dtype."""
    if node.saved is _RELEASED:
        raise RuntimeError(f"backward through {_where(node)} a second time: what it saved was freed by the first call; "
                           f"run the forward pass again, or call the first backward with retain_graph=True")
    for version in node.versions:
        if version.written > node.id and (isinstance(node.saved, Absent) or version.is_of(node.saved)):
            raise RuntimeError(f"backward through {_where(node)}: an array that it needs was modified by an inplace operation "
                               f"after the forward pass; write to a .clone() instead")
    if isinstance(node.saved, Absent):
        node.saved = node.saved.again()
    try:
        gradients = node.backward(widened(dy) if BFLOAT16 else dy)
    except Exception as error:
        raise told(error, f"backward of {_where(node)} failed: {error}") from error
    if not isinstance(gradients, tuple):
        gradients = (gradients,)
    if len(gradients) > len(node.inputs):
        raise RuntimeError(f"backward of {_where(node)} returned {len(gradients)} gradients for {len(node.inputs)} arguments")
    found = []
    for source, g in zip(node.inputs, gradients):
        if source is None or g is None:
            found.append(None)
        else:
            like = source.array if isinstance(source, Tensor) else source
            fits = isinstance(g, np.ndarray) and g.dtype is like.dtype and g.shape == like.shape
            found.append(g if fits else _fit(node, like.shape, like.dtype, g))
    return found


def _fit(node, shape, wanted, g):
    """A gradient in the shape and dtype of the input it belongs to."""
    if not hasattr(g, "dtype") or isinstance(g, Tensor):
        raise TypeError(f"backward of {_where(node)} returned a {type(g).__name__} as a gradient; it must return arrays, in a tuple "
                        f"where there are several, and None where there is none")
    if g.shape != shape:
        if g.ndim >= len(shape):
            with contextlib.suppress(ValueError):
                g = sum_to(g, shape)
        if g.shape != shape:
            raise RuntimeError(f"backward of {_where(node)} returned a gradient of shape {g.shape} for an input of shape {shape}")
    if g.dtype != wanted:
        if g.dtype.kind not in FLOAT_KINDS:
            raise RuntimeError(f"backward of {_where(node)} returned a gradient of dtype {g.dtype}, expected a float type")
        g = g.astype(wanted)
    return g


def _references():
    """What Python counts of an array that a list, a variable of `_walk` and nobody else holds: 3 with the argument, or less in a
    Python that lends arguments. No iterator stands between the list and the variable: some keep what they gave, at times.
    """
    gradients = [np.empty(0)]
    g = gradients[0]
    return min(sys.getrefcount(g), 3)                       # it is more where a tracer has asked for the variables


_REFERENCES = _references()                     # more: it is dy, or saved, or somebody else's; or views of it are


def _add_waiting(entry, g, mine):
    """Adds to what waits for a node. Written in place is only what nobody else holds, `mine`."""
    if entry[2]:
        entry[1] += g
    elif mine:
        g += entry[1]
        entry[1], entry[2] = g, True
    else:
        entry[1], entry[2] = array_module(g).asarray(entry[1] + g), True


def _reach_leaf(leaf, g, hooked, mine):
    """A gradient has come to a leaf: into its `.grad`, or among those that wait for hooks; nowhere if it was frozen since forward."""
    if not leaf._requires_grad:
        return
    if not leaf.hooks:
        _accumulate(leaf, g, mine)
    elif id(leaf) in hooked:
        _add_waiting(hooked[id(leaf)], g, mine)
    else:
        hooked[id(leaf)] = [leaf, g, mine]


def _accumulate(leaf, g, mine):
    """Adds to `leaf.grad`. The first gradient is stored: itself if it is `mine` (nobody else holds its memory), else a copy."""
    if _mode.gathered is not None:
        return _gather(_mode.gathered, leaf, g, mine)
    if leaf.hooks:
        g, mine = _after_hooks(leaf.hooks, g), False
    grad = leaf._grad
    if grad is None:
        leaf._grad = constant(g if mine else g.copy())
    elif not is_writable(grad.array):                       # one that was assigned, made by expand
        leaf._grad = constant(grad.array + g)
    else:
        grad.array += g
        grad.version.wrote(grad.array)


# --- gradients of several threads: apart, and then added up ----------------------------------------------------------

@contextlib.contextmanager
def gathering():
    """Inside, this thread's backward adds to the {id: [leaf, gradient]} that is yielded; `.grad` and the hooks of leaves stay alone.

    Each node can be walked through once, so RuntimeError where backward comes to one that was made before.
    """
    first, step, before = _next_id(), _mode.step or node_backward, (_mode.gathered, _mode.step)

    def own_step(node, dy):
        if node.id < first:
            raise RuntimeError(f"backward came to {_where(node)}, which ran before the shards began and would be walked through by each of "
                               f"them; call it inside the function, for each part")
        return step(node, dy)
    _mode.gathered, _mode.step = {}, own_step
    try:
        yield _mode.gathered
    finally:
        _mode.gathered, _mode.step = before


def is_gathering():
    """Whether this thread is within `gathering`, and others perhaps at work on the same modules."""
    return _mode.gathered is not None


def _gather(gathered, leaf, g, mine):
    if id(leaf) in gathered:
        gathered[id(leaf)][1] += g
    else:
        gathered[id(leaf)] = [leaf, g if mine else g.copy()]


def add_gathered(all_gathered):
    """Adds what was gathered to `.grad`, one after another; hooks of leaves see the sum."""
    total = {}
    for gathered in all_gathered:
        for leaf, g in gathered.values():
            _gather(total, leaf, g, mine=True)
    for leaf, g in total.values():
        _accumulate(leaf, g, mine=True)


def _after_hooks(hooks, g):
    """The gradient as the hooks leave it; RuntimeError where one returns another shape or dtype."""
    for hook in hooks:
        changed = hook(constant(g))
        if changed is None:
            continue
        if not isinstance(changed, Tensor) or changed.array.shape != g.shape or changed.array.dtype != g.dtype:
            got = f"{tuple(changed.shape)}, {changed.dtype}" if isinstance(changed, Tensor) else type(changed).__name__
            raise RuntimeError(f"backward: the hook {getattr(hook, '__name__', hook)!r} has changed the size or type of the gradient: "
                               f"expected a Tensor of {g.shape}, {g.dtype}, or None to leave it, got {got}")
        g = changed.array
    return g


def _show(node, dy):
    """Runs the hooks of a non-leaf tensor and keeps its gradient where `retain_grad` asked for it."""
    dy = _after_hooks(node.hooks or (), dy)
    tensor = node.retained() if node.retained else None
    if tensor is not None:
        _accumulate(tensor, dy, mine=False)
    return dy


class RemovableHook:
    """What `register_hook` returns: `remove()` takes the hook off again; also a `with` block."""

    def __init__(self, holder, hook):
        self.holder, self.hook = weakref.ref(holder), hook

    def remove(self):
        holder = self.holder()
        if holder is not None and holder.hooks:
            holder.hooks = [h for h in holder.hooks if h is not self.hook]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.remove()


def retain(tensor):
    """From now on backward also fills `.grad` of this non-leaf tensor. The node holds it weakly."""
    tensor.node.retained = weakref.ref(tensor)


def _where(node):
    return f"{node.name} (called at {node.line[0]}:{node.line[1]})"


def told(error, message):
    """The same kind of error with a message that says where; types that cannot be made from one string become RuntimeError."""
    try:
        return type(error)(message)
    except Exception:
        return RuntimeError(message)
