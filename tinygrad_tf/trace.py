"""What flowed through a module: every intermediate under the guide's letters, and what it costs.

    print(trace(model, x))          name, operation, shape in numbers and letters, min / mean / max, the line of code
    count_parameters(model)         count_flops(model, x)         saved_bytes(loss)         kv_cache_bytes(L, B, T, Hkv, Dh)

The engine tells of every operation (`autograd.observing`), forward hooks say in which module it ran. The letters follow
from the flow of data and not from the names of variables: a product that reaches a softmax, whose result enters another
product, is Q Kᵀ, A and A V, in whatever class it stands. Tracing reads and never writes: results, gradients and random
streams are those of the module called without it.
"""
import contextlib
import difflib
import inspect
import linecache
import math
import os
import re
import sys
import threading
from dataclasses import asdict, dataclass, field

import numpy as np

from .arguments import tensors_in
from .autograd import Function, constant, no_grad, observing
from .backend import CPU, at_least_float32, owner, to_device
from .dtypes import is_float, widened
from .nn.module import Module
from .ops.flash_attention import band_tiles
from .ops.softmax import softmax
from .tensor import Tensor

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Where operations and one-operation layers are defined: the line of interest is the one that called them.
MACHINERY = tuple(PACKAGE + path.replace("/", os.sep) for path in (
    "autograd.py", "tensor.py", "creation.py", "arguments.py", "ops/",
    *(f"nn/{name}.py" for name in ("functional", "module", "layers", "activations", "containers"))))

FORMULAS = {"scores": "Q Kᵀ", "scaled": "/ √{width}", "biased": "+ bias", "masked": "+ M", "A": "softmax over keys", "heads": "A V"}
SHAPES = {"Q": ("B H Tq Dh", "B Tq C"), "K": ("B Hkv Tk Dh", "B Tk C"), "KT": ("B Hkv Dh Tk", "B C Tk", "B Hkv 1 Dh Tk"),
          "M": ("Tq Tk", "B H Tq Tk"), "heads": ("B H Tq Dh", "B Tq C", "B Hkv G Tq Dh"),
          **dict.fromkeys(("scores", "scaled", "biased", "masked", "A"), ("B H Tq Tk", "B Tq Tk", "B Hkv G Tq Tk"))}
SHAPES["V"] = SHAPES["K"]
OPERATIONS = {"CrossEntropy": "loss", "NLLLoss": "loss", "MSELoss": "loss"}
ALIASES = {"scores": "S", "A": "attn", "O": "out", "M": "mask"}


# --- the table --------------------------------------------------------------------------------------------------------

class Table(list):
    """Rows of equal length under `header`; print it for aligned text."""

    def __init__(self, header, rows):
        super().__init__(tuple(row) for row in rows)
        self.header = header

    def __str__(self):
        lines = [self.header, *([str(cell) for cell in row] for row in self)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


class Counts(dict):
    """{name: number}. Under "" stands the whole; a module's number includes all that lies below it. Prints as a table."""

    @property
    def total(self):
        return self[""]

    def __str__(self):
        return str(Table(["", "count"], [(name or "total", f"{n:,}") for name, n in self.items()]))


@dataclass
class Row:
    """One intermediate. min, mean and max are over the finite values; `nan` and `inf` count the others."""
    name: str
    op: str
    module: str
    shape: tuple
    letters: str
    dtype: str
    min: float | None
    mean: float | None
    max: float | None
    nan: int
    inf: int
    flops: int
    where: str
    code: str
    aliases: list = field(default_factory=list)

    @property
    def cells(self):
        odd = ", ".join(f"{n} {kind}" for n, kind in ((self.nan, "NaN!"), (self.inf, "inf")) if n)
        numbers = ["" if x is None else f"{x:.4g}" for x in (self.min, self.mean, self.max)]
        return self.name, self.op, str(list(self.shape)), self.letters, self.dtype, *numbers, odd, self.where, self.code[:60]


class Trace:
    """What `trace` returns: rows in the order in which they were computed.

    print(t)            the table                        t["attention.A"]    the row of a name; t["attn"] finds it by its other names
    t.output            what the module returned         t.sizes             what each letter stands for
    t.flops             Counts by module                 t.below(path)       the rows of one module
    t.attention_steps() each step of each attention: formula, code, shape
    """

    def __init__(self, rows, sizes, groups, output):
        self.rows, self.sizes, self.groups, self.output = rows, sizes, groups, output
        self._index = {}
        for row in rows:
            self._index.setdefault(row.name, row)
        for row in rows:
            for alias in row.aliases:
                self._index.setdefault(alias, row)

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)

    def __contains__(self, name):
        return name in self._index

    def __getitem__(self, name):
        if name not in self._index:
            close = difflib.get_close_matches(str(name), self._index, n=3, cutoff=0.3)
            raise KeyError(f"trace: nothing is named {name!r}; names like it: {', '.join(close) or 'none'}; all: print(trace)")
        return self._index[name]

    @property
    def flops(self):
        return _by_module((row.module, row.flops) for row in self.rows)

    def below(self, path):
        """The part of the trace that ran in the module `path`; ValueError where nothing did."""
        inside = [row for row in self.rows if row.module == path or row.module.startswith(path + ".") or row.name.startswith(path + ".")]
        if not inside:
            raise ValueError(f"trace: nothing ran in {path!r}; modules that ran: {', '.join(sorted({r.module for r in self.rows} - {''}))}")
        kept = {id(row) for row in inside}
        return Trace(inside, self.sizes, [g for g in self.groups if all(id(row) in kept for _, row in g)], self.output)

    def attention_steps(self):
        """(step, code, shape) for each attention that ran: Q Kᵀ, / √Dh, + M where there is a mask, softmax, A V.    (guide 4.1)"""
        return Table(["step", "code", "shape"], [
            (FORMULAS[step].format(width=_width(row)), row.code, row.letters) for group in self.groups for step, row in group])

    def to_dict(self):
        """Plain values, ready for JSON."""
        return {"sizes": dict(self.sizes), "rows": [asdict(row) for row in self.rows]}

    def __str__(self):
        sizes = ", ".join(f"{letter} = {n}" for letter, n in self.sizes.items())
        table = Table(["name", "operation", "shape", "letters", "dtype", "min", "mean", "max", "not finite", "line", "code"],
                      [row.cells for row in self.rows])
        return f"{sizes}\n{table}" if sizes else str(table)

    def __repr__(self):
        return f"<Trace of {len(self.rows)} intermediates; print() shows them>"


def _width(row):
    """What the scores are divided by the root of: in one head all C features, in several Dh."""
    return "Dh" if "H" in row.letters else "C"


def _by_module(pairs):
    """Sums (path, number) pairs into each path and all above it."""
    counts = Counts({"": 0})
    for path, n in pairs:
        for end in [0, *(i for i, c in enumerate(path) if c == "."), len(path)] if path else [0]:
            counts[path[:end]] = counts.get(path[:end], 0) + n
    return counts


# --- running and recording --------------------------------------------------------------------------------------------

def trace(module, *inputs, **kwargs):
    """Runs module(*inputs, **kwargs) once and returns a `Trace` of every intermediate. Any callable does; TypeError for others.

    Inside the one fused operation `Attention` its steps are computed again, one a line, and stand before it in the table.
    """
    return _record(module, inputs, kwargs, values=True)


def _record(module, inputs, kwargs, values):
    if not callable(module):
        raise TypeError(f"trace: expected a module or a function, got {type(module).__name__}; call it as trace(module, x)")
    recorder = _Recorder(values)
    recorder.take_inputs(module, inputs, kwargs)
    output = recorder.run(module, inputs, kwargs)
    return _Namer(recorder.records, recorder.calls).trace(output)


@dataclass
class _Record:
    """One operation: the row that it becomes, the module call that it ran in, and its arguments.

    sources: for each tensor that it was given the number of the record that made it, or None; shapes: their shapes; plain: the rest
    """
    row: Row
    call: "_Call"
    index: int
    sources: list = ()
    shapes: list = ()
    plain: list = ()
    letter: str = ""
    home: str = ""                                                  # the module whose letter it is
    form: str = ""                                                  # the letter whose shape it has

    def mark(self, letter, home):
        """A first letter stays: one tensor may be Q, K and V."""
        if letter and not self.letter:
            self.letter, self.home = letter, home

    @property
    def op(self):
        return self.row.op.partition(" ")[0]                        # "Matmul in Attention" is a Matmul


@dataclass
class _Call:
    """One call of a module: `start` is the number of records before it."""
    path: str
    start: int
    inputs: list
    outputs: list = field(default_factory=list)
    is_attention: bool = False
    frame: object = None                            # of Module.__call__: the call lasts as long as this is being run


class _Recorder:
    """Listens to one thread while one module runs. Holds on to what it saw: an id is a name only as long as its object lives."""

    def __init__(self, values):
        self.values, self.thread = values, threading.get_ident()
        self.records, self.kept, self.known = [], [], {}
        root = _Call("", 0, [])
        self.calls, self.stack = [root], [root]

    def take_inputs(self, module, inputs, kwargs):
        """A row for each tensor that goes in, under the name of the argument."""
        for name, value in _argument_names(module, inputs, kwargs):
            for tensor in tensors_in(value):
                source = self.finder(tensor)
                if source is None:
                    self._add(name, "input", tensor)
                else:
                    self.records[source].row.aliases.append(name)
                self.calls[0].inputs.append(self.finder(tensor))

    def run(self, module, inputs, kwargs):
        with contextlib.ExitStack() as stack:
            for path, child in module.named_modules() if isinstance(module, Module) else ():
                if path:
                    stack.enter_context(child.register_forward_pre_hook(self._entered(path), prepend=True, with_kwargs=True))
                    stack.enter_context(child.register_forward_hook(self._left(path)))
            stack.callback(self._let_go)
            with observing(self.observe):
                output = module(*inputs, **kwargs)
        self.calls[0].outputs = [self.finder(t) for t in tensors_in(output)]
        return output

    def _entered(self, path):
        def hook(module, args, kwargs):
            if threading.get_ident() == self.thread:
                sources = [self.finder(t) for t in tensors_in([args, kwargs])]
                self._leave_ended_calls()
                self.calls.append(_Call(path, len(self.records), sources, frame=_frame_of_call()))
                self.stack.append(self.calls[-1])
        return hook

    def _left(self, path):
        def hook(module, args, out):
            if threading.get_ident() == self.thread:
                self._leave_ended_calls()
                self.stack.pop().outputs = [self.finder(t) for t in tensors_in(out)]
        return hook

    def _leave_ended_calls(self):
        """Takes calls from the stack that an exception ended, where someone caught it."""
        running, frame = set(), sys._getframe(1)
        while frame is not None and len(self.stack) > 1 and frame is not self.stack[-1].frame:
            running.add(frame)
            frame = frame.f_back
        if frame is None:
            while len(self.stack) > 1 and self.stack[-1].frame not in running:
                self.stack.pop()

    def _let_go(self):
        for call in self.calls:                     # a frame keeps its variables alive
            call.frame = None

    def observe(self, node, args, out):
        """Called by the engine after each operation."""
        inside = self._look_inside(node, args) if self.values and node.name in INSIDE else None
        record = self._add("", node.name, out, args, node=out.node)
        record.row.flops = FLOPS[node.name](*args) if node.name in FLOPS else 0
        if inside is not None:                      # the last step is this result: its numbers, which NaN in a blocked value spoils
            record.sources, last = [inside], self.records[inside].row
            last.min, last.mean, last.max, last.nan, last.inf = (getattr(record.row, name) for name in ("min", "mean", "max", "nan", "inf"))

    def _look_inside(self, node, args):
        """Records the steps of a fused operation like any others; returns the number of the last."""
        with observing(lambda *seen: self._observe_inside(node.name, *seen), alone=True):
            INSIDE[node.name](*(self._given(name, a) for name, a in zip(INSIDE_ARGUMENTS[node.name], args)))
        return len(self.records) - 1

    def _given(self, name, arg):
        """An argument of a fused operation without its history, so that no graph grows; a row of its own where nothing made it."""
        if not isinstance(arg, Tensor):
            return arg
        if self.finder(arg) is None:
            self._add(name, "given", arg)
        wide = constant(at_least_float32(arg.array))
        self.known[id(wide.array)] = self.finder(arg)
        self.kept.append(wide.array)
        return wide

    def _observe_inside(self, op, node, args, out):
        self._add("", f"{node.name} in {op}", out, args)

    def _add(self, name, op, tensor, args=None, node=None):
        self._leave_ended_calls()
        where, code = ("", "") if args is None else _line(self.run)
        tensors = [a for a in args or () if isinstance(a, Tensor)]
        numbers = _statistics(tensor.array) if self.values else (None, None, None, 0, 0)
        row = Row(name, op, self.stack[-1].path, tuple(tensor.shape), "", str(tensor.dtype).rpartition(".")[2], *numbers, 0, where, code)
        record = _Record(row, self.stack[-1], len(self.records), [self.finder(t) for t in tensors], [tuple(t.shape) for t in tensors],
                         [a for a in args or () if not isinstance(a, Tensor)])
        self.records.append(record)
        if self.values:                             # who only counts needs no names, and no memory
            self.kept.append((tensor.array, node))
            self.known[id(tensor.array)] = record.index
            self.known[id(node or tensor.array)] = record.index
        return record

    def finder(self, tensor):
        """The number of the record that made a tensor. By its node first: an array may have been written to since."""
        by_node = None if tensor.node is None else self.known.get(id(tensor.node))
        return self.known.get(id(tensor.array)) if by_node is None else by_node


def _statistics(x):
    """min, mean and max of the finite values (None where there is none), how many are NaN, and how many infinite."""
    x, nan, inf = widened(to_device(x, CPU)), 0, 0
    if is_float(x.dtype):
        finite = np.isfinite(x)
        nan = int(np.isnan(x).sum())
        inf = int(x.size - finite.sum()) - nan
        x = x[finite] if nan or inf else x
    if not x.size:
        return None, None, None, nan, inf
    return float(x.min()), float(x.mean(dtype="float64")), float(x.max()), nan, inf


def _frame_of_call():
    """The frame of the innermost Module.__call__."""
    frame = sys._getframe(1)
    while frame.f_code is not Module.__call__.__code__:
        frame = frame.f_back
    return frame


def _argument_names(module, inputs, kwargs):
    """(name, value) of the arguments, by the signature of forward; "X" for what is called x or input."""
    function = module.forward if isinstance(module, Module) else module
    try:
        bound = inspect.signature(function).bind(*inputs, **kwargs).arguments
    except (TypeError, ValueError):                 # no signature, or a call that is wrong: running it says how
        bound = {**{f"input {i}": x for i, x in enumerate(inputs)}, **kwargs}
    return [("X" if name in ("x", "input", "inputs") else name, value) for name, value in bound.items()]


def _line(run):
    """("file:line", its text) of the nearest caller that is neither the engine nor a layer of one operation."""
    frame, last = sys._getframe(1), None
    while frame is not None and frame.f_code is not run.__func__.__code__:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(MACHINERY) and (file != __file__ or name.startswith("attention_")):
            last = file, frame.f_lineno
            break
        frame = frame.f_back
    if last is None:
        return "", ""
    short = last[0][len(PACKAGE):] if last[0].startswith(PACKAGE) else os.path.basename(last[0])
    return f"{short}:{last[1]}", linecache.getline(*last).strip()


# --- fused operations, one step a line --------------------------------------------------------------------------------

def attention_scores_in_steps(q, k, bias, scale):
    """What `AttentionWeights` computes in one: softmax(scale · q kᵀ + bias), zeros where a query sees nothing."""
    if q.shape[-1] == 0:                            # a score_mod was at work: the bias is the scores themselves
        masked = bias
    else:
        scores = q @ k.transpose(-2, -1)
        scaled = scores * scale
        masked = scaled if bias is None else scaled + bias
    if bias is not None and np.isnan(float(masked.array.sum())):    # NaN in a key: where it is blocked it does not count
        masked = masked.masked_fill(constant(bias.array == -math.inf), -math.inf)
    sees_nothing = constant((masked.array == -math.inf).all(axis=-1, keepdims=True))
    if bias is not None and sees_nothing.array.any():
        A = softmax(masked.masked_fill(sees_nothing, 0.0), -1)
        A = A.masked_fill(sees_nothing, 0.0)
    else:
        A = softmax(masked, -1)
    return A


def attention_in_steps(q, k, v, bias, keep, scale):
    """What `Attention` computes in one: (softmax(scale · q kᵀ + bias) · keep) v."""
    A = attention_scores_in_steps(q, k, bias, scale)
    if keep is not None:
        A = A * constant(keep)
    heads = A @ v
    return heads


INSIDE = {"Attention": attention_in_steps, "AttentionWeights": attention_scores_in_steps}
INSIDE_ARGUMENTS = {"Attention": ("Q", "K", "V", "M", "keep", "scale"), "AttentionWeights": ("Q", "K", "M", "scale")}


# --- names and letters ------------------------------------------------------------------------------------------------

SCORE_OPS = {"Div", "Mul", "Add", "Sub", "MaskedFill", "Where", "Cast", "Tanh", "Clamp", "Reshape"}     # between Q Kᵀ and softmax
WEIGHT_OPS = {"Dropout", "Mul", "MaskedFill", "Where", "Cast", "Reshape", "AttentionWeights"}           # between softmax and A V
PRODUCTS = {"Matmul", "Einsum"}
VERY_LOW = -1e4                                 # a score of this or less is one that is blocked
DEPTH = 16                                      # operations between a product and its softmax at most
LETTERS = ("B", "T", "Tq", "Tk", "C", "H", "Hkv", "G", "Dh", "Cff", "V_vocab")
PLACES = {"first": "B T Tq Tk", "middle": "T Tq Tk H Hkv G", "last": "C Dh Cff V_vocab T Tk Tq", "ids": "B T Tq Tk H"}
OTHERWISE = {"Tq": "T", "Tk": "T", "Hkv": "H", "C": "Dh", "Dh": "C"}


class _Namer:
    """Letters from the flow of data, sizes from letters, names from letters, modules and lines."""

    def __init__(self, records, calls):
        self.records, self.calls = records, calls
        self.users = [[] for _ in records]
        for record in records:
            for source in {s for s in record.sources if s is not None}:
                self.users[source].append(record)
        self.sizes, self.groups, self.local = {}, [], {}

    def trace(self, output):
        for record in self.records:
            if record.op == "Softmax":
                self._attention(record)
        self._find_sizes()
        self._find_names()
        for record in self.records:
            sizes = {**self.sizes, **self.local.get(record.index, {})}
            record.row.letters = _letters(record.row, record.letter or record.form, sizes)
        return Trace([r.row for r in self.records], self.sizes, [[(letter, r.row) for letter, r in group] for group in self.groups], output)

    # --- one attention

    def _attention(self, soft):
        """Letters around a softmax, if it is an attention's: a product reaches it, and its result enters another."""
        chain, (heads, V) = self._product_above(soft.sources[0]), self._product_below(soft)
        if chain is None or heads is None or len(chain[0].row.shape) < 2:
            return
        scores, call = chain[0], chain[0].call
        call.is_attention = True
        givers = {"Q": scores.sources[0], "K": self._untransposed(scores), "V": V}
        given = {letter: self.records[self._ungrouped(source)] for letter, source in givers.items() if source is not None}
        self._mark_steps(chain, soft, heads, call.path)
        for letter, record in given.items():
            record.mark(letter, call.path)
            record.row.aliases.append(_join(call.path, letter))         # also where it was marked before
        self.groups.append([(letter, r) for letter, r in (*((r.letter, r) for r in chain), ("A", soft), ("heads", heads))
                            if letter in FORMULAS])
        local = self._local_sizes(scores, given, call)
        for record in (r for r in self.records if r.letter or r.form):
            self.local.setdefault(record.index, local)
        self._know(**local)

    def _product_above(self, index, depth=0):
        """The records from a product down to this one, through what is done to scores; None where there is no product."""
        if index is None or depth > DEPTH:
            return None
        record = self.records[index]
        if record.op in PRODUCTS:
            return [record] if len(record.sources) == 2 else None
        for source in record.sources if record.op in SCORE_OPS else ():
            chain = self._product_above(source, depth + 1)
            if chain is not None:
                return [*chain, record]
        return None

    def _product_below(self, record, depth=0):
        """(the product that these weights enter, what made its other factor), or (None, None)."""
        for user in self.users[record.index] if depth <= DEPTH else ():
            if user.op in PRODUCTS and len(user.sources) == 2:
                return user, user.sources[user.sources[0] == record.index]
            if user.op in WEIGHT_OPS:
                found = self._product_below(user, depth + 1)
                if found[0] is not None:
                    return found
        return None, None

    def _mark_steps(self, chain, soft, heads, home):
        """Letters of what lies between the products, of the mask, and of what a fused operation made of them."""
        for record, letter in (chain[0], "scores"), (soft, "A"), *((r, _step(r)) for r in chain[1:]):
            record.mark(letter, home)
            record.form = "scores"
            for source in record.sources[1:] if letter == "masked" else ():
                if source is not None:
                    self.records[source].mark("M", home)
        grouped = [r for r in self.users[heads.index] if r.op == "Reshape" and len(r.row.shape) == 4 != len(heads.row.shape)]
        (grouped or [heads])[0].mark("heads", home)
        heads.form = "heads"
        if chain[0].sources[1] is not None and chain[0].op == "Matmul":
            self.records[chain[0].sources[1]].form = "KT"
        for after in self.users[soft.index]:
            after.form = "A" if after.op in WEIGHT_OPS and after.row.shape == soft.row.shape else after.form
        for fused in self.users[heads.index]:
            fused.form = "heads" if fused.op == "Attention" else fused.form

    def _ungrouped(self, index):
        """Q, K, V as [B, H, T, Dh], where grouped heads got an axis of their own."""
        record = self.records[index]
        source = record.sources[0] if record.op == "Reshape" and len(record.row.shape) == 5 else None
        return index if source is None or len(self.records[source].row.shape) != 4 else source

    def _untransposed(self, scores):
        """What made K, from the Kᵀ of a matrix product: one exchange of the last two axes taken back."""
        index = scores.sources[1]
        if scores.op != "Matmul" or index is None or self.records[index].op != "Permute":
            return index
        dims = list(self.records[index].plain[0])
        swapped = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2]
        return self.records[index].sources[0] if dims == swapped else index

    def _local_sizes(self, scores, given, call):
        """The letters of one attention, from the shapes of scores, Q and K, and of what its module was given."""
        shape = scores.row.shape
        X = next((self.records[i].row.shape for i in call.inputs if i is not None and len(self.records[i].row.shape) == 3), None)
        sizes = {"T": shape[-1]} if shape[-2] == shape[-1] else {"Tq": shape[-2], "Tk": shape[-1]}
        grouped = ("B", "H") if len(shape) == 5 and shape[2] == 1 else ("B", "Hkv", "G")
        sizes.update(zip({3: ("B",), 4: ("B", "H"), 5: grouped}.get(len(shape), ()), shape))
        if len(shape) == 3 and X is not None and shape[0] != X[0]:
            del sizes["B"]                          # batch and heads in one axis
        if X is not None:
            sizes["C"] = X[-1]
        width = scores.shapes[0][-1]
        if len(shape) == 4 and shape[1] == 1 and sizes.get("C") == width:       # one head: it has all features
            del sizes["H"]
        elif len(shape) < 4 and sizes.get("C", width) == width:
            sizes["C"] = width
        else:
            sizes["Dh"] = width
        if len(shape) == 5:
            sizes["H"] = shape[1] * shape[2]
        if len(shape) == 4 and "K" in given and len(given["K"].row.shape) == 4 and given["K"].row.shape[1] != shape[1]:
            sizes["Hkv"] = given["K"].row.shape[1]
        return sizes

    # --- sizes

    def _find_sizes(self):
        """What no attention told: B, T and C of what goes in, Cff and V_vocab of the layers."""
        root = next((self.records[i].row for i in self.calls[0].inputs if i is not None), None)
        if root is not None and len(root.shape) == (2 if root.dtype.startswith("int") else 3):
            self._know(B=root.shape[0])
            if "Tq" not in self.sizes:
                self._know(T=root.shape[1])
            if len(root.shape) == 3:
                self._know(C=root.shape[2])
        table = next((r.shapes[1] for r in self.records if r.op == "Embedding"), None)
        if table is not None:
            self._know(V_vocab=table[0], C=table[1])
        C, widths = self.sizes.get("C"), [(r.shapes[0][-1], r.row.shape[-1]) for r in self.records if r.op == "Linear"]
        hidden = next((outer for inner, outer in widths if inner == C != outer and (outer, C) in widths), None)
        if hidden is not None:
            self._know(Cff=hidden)
        self.sizes = {letter: self.sizes[letter] for letter in LETTERS if letter in self.sizes}

    def _know(self, **sizes):
        for letter, n in sizes.items():
            self.sizes.setdefault(letter, n)

    # --- names

    def _find_names(self):
        """One name a row, numbered where it comes again: the letter, else the module whose result it is, the variable, the operation."""
        outputs = self._outputs()
        last_of_line = {(id(r.call), r.row.where): r.index for r in self.records}
        taken = {}
        for r in self.records:
            paths = outputs.get(r.index, [])
            variable = _variable(r.row.code) if last_of_line[id(r.call), r.row.where] == r.index else ""
            own = [_join(r.call.path, name) if name else "" for name in (r.row.name, variable, OPERATIONS.get(r.op, r.op.lower()))]
            options = [_join(r.home, r.letter) if r.letter else "", own[0], *paths, *own[1:]]
            name = next(option for option in options if option)
            taken[name] = taken.get(name, 0) + 1
            r.row.name = name if taken[name] == 1 else f"{name}#{taken[name]}"
            r.row.aliases += [option for option in options[1:-1] if option and option != name]
            if r.letter in ALIASES:
                r.row.aliases.append(_join(r.home, ALIASES[r.letter]))

    def _outputs(self):
        """{record: names that it has as the result of a module}, outermost first; also tells inputs their X."""
        names = {}
        for call in (*self.calls[1:], self.calls[0]):           # the whole last: what its parts are called says more
            first = next((i for i in call.inputs if i is not None), None)
            if first is not None:
                self.records[first].row.aliases.append(_join(call.path, "X"))
            if call.outputs and call.outputs[0] is not None:
                own = call.outputs[0] >= call.start and self.records[call.outputs[0]].row.op not in ("input", "given")
                found = [_join(call.path, "O")] if call.is_attention else [call.path] if call.path else []
                found += [call.path] * call.is_attention + [_join(call.path, "out")]
                if own:
                    known = names.setdefault(call.outputs[0], [])
                    known[0 if call.is_attention else len(known):0] = [name for name in found if name]
                else:                               # a module that hands on what it was given: Identity, Dropout in evaluation
                    self.records[call.outputs[0]].row.aliases += [name for name in found if name]
        return names


def _step(record):
    """What an operation between the product and softmax does to the scores; "" for what only guards them or changes their form."""
    if record.op == "MaskedFill":
        return "" if record.plain and record.plain[0] > VERY_LOW else "masked"
    if record.op == "Where" or record.op in ("Add", "Sub") and record.row.inf:
        return "masked"
    return {"Mul": "scaled", "Div": "scaled", "Add": "biased", "Sub": "biased"}.get(record.op, "")


def _join(path, name):
    return f"{path}.{name}" if path and name else path or name


def _variable(code):
    """The variable that a line assigns, where it is one plain variable."""
    found = re.match(r"(?:self\.)?(\w+)\s*[-+*/@]?=(?!=)", code)
    return found[1] if found else ""


def _letters(row, role, sizes):
    """The shape in letters, each of which stands for just that number; a number where no letter does."""
    forms = {len(form.split()): form.split() for form in SHAPES.get(role, ())}
    form = forms.get(len(row.shape), [""] * len(row.shape))
    places = ["last"] * len(row.shape) if len(row.shape) == 1 else ["first", *["middle"] * (len(row.shape) - 2), "last"]
    letters = []
    for n, wanted, place in zip(row.shape, form, places):
        place = place if row.dtype.startswith("float") else "ids"
        letters.append(_letter(n, wanted, PLACES[place], sizes, () if wanted else letters))
    return f"[{', '.join(letters)}]"


def _letter(n, wanted, usual, sizes, used):
    """The letter that the role says, else one that is usual in this place and not used yet, else the number."""
    options = [wanted, *OTHERWISE.get(wanted, "").split()]
    if n != 1 or "B" in usual and not used:
        options += sorted(usual.split(), key=lambda letter: letter in used)
    return next((letter for letter in options if sizes.get(letter) == n), str(n))


# --- counting ---------------------------------------------------------------------------------------------------------

def count_parameters(module):
    """Counts by module; a tied parameter counts once, where it stands first.

    Multi-head attention has 4 C² + 4 C whatever H is, a feed-forward network of width 4 C has 8 C² + 5 C.   (guide 6.1)
    """
    if not isinstance(module, Module):
        raise TypeError(f"count_parameters: expected a Module, got {type(module).__name__}")
    counts = _by_module((name.rpartition(".")[0], p.numel()) for name, p in module.named_parameters())
    return Counts({path: counts.get(path, 0) for path, _ in module.named_modules()})


def count_flops(module, *inputs, **kwargs):
    """Counts by module of the floating-point operations in the matrix products of module(*inputs, **kwargs), which is run once.

    Two for each multiply-add: Linear and GroupedLinear 2 · rows · in · out, Matmul 2 · n · k · m for each matrix, Attention
    4 · Tq · Tk · Dh for each head (scores, and weighted values), Einsum 2 · all its letters. What is blocked counts too: the dense
    computation does it; TiledAttention counts the tiles that its band touches. Backward costs about twice as much again. In all,
    attention has projections O(B T C²), scores and A V O(B T² C).
    """
    with no_grad():
        return _record(module, inputs, kwargs, values=False).flops


def attention_flops(pairs, head_dim, value_dim=None):
    """2 · pairs · (Dh + Dv): what `pairs` (query, key) pairs cost, of all heads and sentences together.        (guide 2.2)

    Dense attention has B · H · Tq · Tk pairs; a kernel that skips what is blocked has as many as are visible.
    """
    return 2 * pairs * (head_dim + (head_dim if value_dim is None else value_dim))


def _shape(x):
    return tuple(x.shape)


def _matmul_flops(a, b):
    return 2 * math.prod(np.broadcast_shapes(_shape(a)[:-2], _shape(b)[:-2])) * _shape(a)[-2] * _shape(a)[-1] * _shape(b)[-1]


def _linear_flops(x, weight, bias):
    return 2 * math.prod(_shape(x)[:-1]) * math.prod(_shape(weight))


def _grouped_flops(x, weight, bias, counts):
    return 2 * math.prod(_shape(x)) * _shape(weight)[1]


def _packed_flops(x, packed, *rest):
    return 2 * math.prod(_shape(x)) * _shape(packed)[0]


def _attention_flops(q, k, v, *rest):
    heads = math.prod(np.broadcast_shapes(_shape(q)[:-2], _shape(k)[:-2], _shape(v)[:-2]))
    return attention_flops(heads * _shape(q)[-2] * _shape(k)[-2], _shape(q)[-1], _shape(v)[-1])


def _tiled_flops(q, k, v, bias, allowed, valid, plan):
    """Of the tiles that the band touches; those that a mask leaves empty count, for that takes a look at the mask."""
    heads = math.prod(np.broadcast_shapes(_shape(q)[:-2], _shape(k)[:-2], _shape(v)[:-2]))
    pairs = sum(len(rows) * len(keys) for rows, keys in band_tiles(_shape(q)[-2], _shape(k)[-2], plan.band, plan.tile))
    return attention_flops(heads * pairs, _shape(q)[-1], _shape(v)[-1])


def _weights_flops(q, k, *rest):
    heads = math.prod(np.broadcast_shapes(_shape(q)[:-2], _shape(k)[:-2]))
    return attention_flops(heads * _shape(q)[-2] * _shape(k)[-2], _shape(q)[-1], 0)


def _einsum_flops(equation, *operands):
    """Each term of the sum is a product of all operands; with one operand nothing is multiplied."""
    sizes = {letter: n for letters, x in zip(equation[0], operands) for letter, n in zip(letters, _shape(x))}
    return 0 if len(operands) == 1 else len(operands) * math.prod(sizes.values())


FLOPS = {"Matmul": _matmul_flops, "Linear": _linear_flops, "GroupedLinear": _grouped_flops, "PackedLinear": _packed_flops,
         "Attention": _attention_flops, "AttentionWeights": _weights_flops, "TiledAttention": _tiled_flops,
         "KernelAttention": _attention_flops, "Einsum": _einsum_flops}


class SavedBytes(Counts):
    """Bytes by operation, largest first. `leaves`: those of parameters and other leaves, which live anyway and are not in the total."""
    leaves = 0


def saved_bytes(output):
    """What the graph of `output` keeps in memory for backward, as `SavedBytes` by operation. After backward there is nothing.

    Each piece of memory counts once, whole, for the first operation that saved it or a view of it. Dense attention keeps
    its weights, [B, H, T, T]: they grow with T².                        (guide 6.1)
    """
    outputs = tensors_in(output)
    if not outputs:
        raise TypeError(f"saved_bytes: expected a tensor, or tensors in a tuple, list or dict, got {type(output).__name__}")
    nodes = _nodes(outputs)
    leaves = {id(owner(t.array)) for node in nodes for t in node.inputs if isinstance(t, Tensor)}
    seen, found, kept_by_leaves = set(), {}, 0
    for node in nodes:
        for array in _arrays([node.saved, vars(node)]):
            memory = owner(array)
            if id(memory) in seen:
                continue
            seen.add(id(memory))
            n = getattr(memory, "nbytes", array.nbytes)
            if id(memory) in leaves:
                kept_by_leaves += n
            else:
                found[node.name] = found.get(node.name, 0) + n
    report = SavedBytes({"": sum(found.values()), **dict(sorted(found.items(), key=lambda item: -item[1]))})
    report.leaves = kept_by_leaves
    return report


def _nodes(outputs):
    """All nodes of the graph, in the order in which they were made."""
    found, waiting = {}, [t.node for t in outputs if t.node is not None]
    while waiting:
        node = waiting.pop()
        if node.id not in found:
            found[node.id] = node
            waiting += [source for source in node.inputs if isinstance(source, Function)]
    return [found[i] for i in sorted(found)]


def _arrays(value):
    """The arrays in a nest of tuples, lists and dicts."""
    if hasattr(value, "nbytes") and hasattr(value, "dtype"):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [array for item in values for array in _arrays(item)]


def kv_cache_bytes(layers, B, T, kv_heads, head_dim, itemsize=4):
    """2 · L · B · T · Hkv · Dh · s: keys and values of T tokens in every layer; s bytes a number.              (guide 9.8)"""
    sizes = {"layers": layers, "B": B, "T": T, "kv_heads": kv_heads, "head_dim": head_dim, "itemsize": itemsize}
    for name, n in sizes.items():
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"kv_cache_bytes: {name} must be an integer of at least 0, got {n!r}")
    return 2 * math.prod(sizes.values())


# --- single head beside many -------------------------------------------------------------------------------------------

def compare_shapes(single, multi):
    """(stage, shape in one, shape in the other) of two traces of attention, and what their scores are divided by.   (guide 6)

    Each must hold one attention, else ValueError.
    """
    stages = {"X": "X", "Q, K, V": "Q", "scores": "scores", "output of a head": "heads", "output": "O"}
    columns = [_column(t, stages.values()) for t in (single, multi)]
    return Table(["stage", "single head", "multi-head"], zip([*stages, "scores divided by"], *columns))


def _column(t, names):
    if len(t.groups) != 1:
        raise ValueError(f"compare_shapes: each trace must hold one attention, got {len(t.groups)}; cut it out with trace.below(path)")
    rows = dict(t.groups[0])
    path = rows["scores"].name.removesuffix("scores")
    found = [t[path + name] for name in names]
    return [*(row.letters for row in found), _divisor(rows)]


def _divisor(rows):
    """√C or √Dh, as measured: the ratio of the scores before and after they were scaled."""
    scores, scaled = rows["scores"], rows.get("scaled")
    if scaled is None or scores.max is None or scaled.max is None:
        return "not scaled" if scaled is None else "not finite"
    before, after = (max(abs(row.min), abs(row.max)) for row in (scores, scaled))
    n = (before / after) ** 2 if after else math.nan
    return f"√{_width(scores)} = √{n:.4g}"
