"""`capture`: one run of a model, and every attention pattern and residual stream of it by name."""
import inspect
import threading
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

from ..autograd import constant, observing
from ..backend import CPU, array_module, at_least_float32, to_device
from ..dtypes import widened
from ..nn import MultiHeadAttention
from ..ops.attention import weights
from ..ops.sdpa import sdpa_backend
from ..trace import Table
from .points import attentions, chosen, points, unknown

TABLES = "hook_attn_scores", "hook_pattern"         # [B, H, Tq, Tk]: only the dense backend has them
CALL = inspect.signature(MultiHeadAttention.forward)
ARGUMENTS = {"Attention": (0, 1, 3, 5), "AttentionWeights": (0, 1, 2, 3)}       # where q, k, bias and scale stand


class Captured(Mapping):
    """{name: tensor}, in the order of computing; print it for the shapes. KeyError with names like it for one that is not there.

    output          what the model returned
    valid_tokens    {"blocks.0.attn": bool [B, T], or None where all tokens are real}
    """

    def __init__(self, values, output, valid_tokens):
        self._values, self.output, self.valid_tokens = values, output, valid_tokens

    def __getitem__(self, name):
        if name not in self._values:
            raise KeyError(unknown(name, self._values))
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def array(self, name):
        """A value as a NumPy array on the host."""
        return host(self[name].array)

    def matching(self, pattern):
        """{name: tensor} of the names that a glob matches; ValueError where none does."""
        return {name: self[name] for name in chosen(self._values, pattern)}

    def __str__(self):
        return str(Table(["name", "shape", "dtype"], [(name, list(x.shape), str(x.dtype).rpartition(".")[2]) for name, x in self.items()]))

    def __repr__(self):
        return f"<Captured: {len(self)} activations; print() shows them>"


def capture(model, *inputs, names=None, **kwargs):
    """Runs model(*inputs, **kwargs) once and keeps what flows under TransformerLens's names (docs/seeing_inside.md has the table).

    names: a name or glob, or several: "blocks.*.attn.hook_pattern"; None: everything. ValueError for one that matches nothing.
    Results, gradients and random streams are those of the call without it, bit for bit, but where patterns are asked for and attention
    would have run in tiles or a kernel: it then runs dense, which differs by rounding, and draws other dropout. Tensors are live: they
    have the graph where one is recorded. Patterns and scores are computed beside it, as copies without history.
    """
    recorder = _Recorder(model, chosen(points(model), names))
    with recorder.listening():
        output = model(*inputs, **kwargs)
    return Captured(recorder.values, output, recorder.valid_tokens)


def host(array):
    """The numbers as a NumPy array; bfloat16 as float32."""
    return widened(to_device(array, CPU))


class _Recorder:
    """Hooks on the modules of the wanted points, and an ear for the operation inside of an attention; of one thread."""

    def __init__(self, model, wanted):
        self.model, self.wanted, self.thread = model, wanted, threading.get_ident()
        self.values, self.valid_tokens = {}, {}
        self.inside, self.current = {}, None        # module → {short name: name} of what is seen inside; the module that runs
        self.ropes, self.turns = set(), []

    @contextmanager
    def listening(self):
        tables = any(name.endswith(TABLES) for name in self.wanted)
        with ExitStack() as stack:
            for name, attention in attentions(self.model).items():
                stack.enter_context(attention.register_forward_pre_hook(partial(self._note_real, name), with_kwargs=True))
            for point in self.wanted.values():
                self._listen(point, stack.enter_context)
            with sdpa_backend("dense") if tables else nullcontext(), observing(self._observe) if self.inside else nullcontext():
                yield

    def _listen(self, point, enter):
        if point.side == "inside":
            if point.module not in self.inside:
                enter(point.module.register_forward_pre_hook(self._enter, with_kwargs=True))
                enter(point.module.register_forward_hook(self._leave))
                if getattr(point.module, "rope", None) is not None and point.module.rope not in self.ropes:     # layers share one
                    self.ropes.add(point.module.rope)
                    enter(point.module.rope.register_forward_hook(self._turned))
            self.inside.setdefault(point.module, {})[point.name.rpartition(".")[2]] = point.name
        elif point.side == "input":
            enter(point.module.register_forward_pre_hook(lambda _, args, kwargs: self._keep(point, first(args, kwargs)), with_kwargs=True))
        else:
            enter(point.module.register_forward_hook(lambda _, args, out: self._keep(point, out)))

    def _keep(self, point, value):
        if threading.get_ident() == self.thread:
            with observing(_ignore, alone=True):            # to split heads is no step of the model
                self._store(point.name, point.shown(value))

    def _store(self, name, value):
        if name in self.values:
            raise RuntimeError(f"capture: the module of {name!r} ran twice in one call, and two activations cannot bear one name; capture "
                               f"the calls one at a time, or leave the name out of `names`")
        self.values[name] = value

    def _note_real(self, name, attention, args, kwargs):
        """Which of the queries are real tokens; of a cross-attention nobody is told."""
        call = CALL.bind(attention, *args, **kwargs).arguments
        if threading.get_ident() == self.thread and call.get("context") is None:
            valid, T = call.get("valid_tokens"), call["x"].shape[1]
            self.valid_tokens[name] = None if valid is None else valid[:, valid.shape[1] - T:]

    def _enter(self, module, args, kwargs):
        if threading.get_ident() == self.thread:
            self.current, self.turns = module, ["hook_rot_q", "hook_rot_k"]

    def _leave(self, module, args, out):
        if threading.get_ident() == self.thread:
            self.current = None

    def _turned(self, rope, args, out):
        """An attention turns q, and then k: [B, H, T, Dh], which is kept as [B, T, H, Dh]."""
        if threading.get_ident() == self.thread and self.turns:
            name = self.inside.get(self.current, {}).get(self.turns.pop(0))
            if name is not None:
                with observing(_ignore, alone=True):
                    self._store(name, out.transpose(1, 2))

    def _observe(self, node, args, out):
        """Called by the engine after each operation."""
        names = self.inside.get(self.current, {})
        if node.name == "Embedding" and "hook_pos_embed" in names:
            self._store(names["hook_pos_embed"], out)
        if names and node.name in ARGUMENTS:
            q, k, bias, scale = (args[i] for i in ARGUMENTS[node.name])
            self._look_inside(names, q.array, k.array, None if bias is None else bias.array, scale)

    def _look_inside(self, names, q, k, bias, scale):
        """The scores and weights of what the operation was given, computed as it does."""
        for short, compute in ("hook_attn_scores", scores), ("hook_pattern", pattern):
            if short in names:
                self._store(names[short], constant(compute(q, k, bias, scale)))


def _ignore(*seen):
    """In the place of those who observe."""


def first(args, kwargs):
    """The input that a layer is called with, x."""
    return args[0] if args else kwargs["x"]


def pattern(q, k, bias, scale):
    """softmax(scale · q kᵀ + bias), before dropout.    [B, H, Tq, Tk]"""
    bias = None if bias is None else at_least_float32(bias)
    return one_axis(weights(at_least_float32(q), at_least_float32(k), bias, scale)).astype(q.dtype, copy=False)


def scores(q, k, bias, scale):
    """scale · q kᵀ + bias, −inf where a key is not seen.    [B, H, Tq, Tk]"""
    xp = array_module(q)
    z = (at_least_float32(q) * scale) @ at_least_float32(k).swapaxes(-1, -2)
    if bias is not None:
        z = xp.where(bias == -xp.inf, -xp.inf, z + bias).astype(z.dtype, copy=False)
    return one_axis(z)


def one_axis(x):
    """[B, Hkv, G, …] as [B, Hkv · G, …]: what is grouped has five axes."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:]) if x.ndim == 5 else x
