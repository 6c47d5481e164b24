"""The gradient cases of every operation, as one table: `case(op, function, *inputs)`.

An input is a recipe (`normal(3, 4)`, `positive(5)`, `ids([0, 2, 2])`, …), so that each use of a case gets tensors of its
own. Values keep away from kinks: `away` from 0, `distinct` from ties. Every op has a case with a single element and one
with none; a test says so.
"""
import math
import zlib
from typing import NamedTuple

import numpy as np

import tinygrad_tf
from tinygrad_tf import manual_seed, tensor
from tinygrad_tf.autograd import Function
from tinygrad_tf.ops import (
    activation,
    arithmetic,
    attention,
    dropout,
    embedding,
    index,
    linear,
    loss,
    moe,
    norm,
    quantize,
    reduce,
    rotary,
    sdpa,
    shape,
    softmax,
)
from tinygrad_tf.ops.kernel_attention import KernelAttention
from tinygrad_tf.quantization.linear import PackedLinear, round_to_nearest
from tinygrad_tf.quantization.packing import pack
from tinygrad_tf.tensor import ToDevice


class Case(NamedTuple):
    op: str
    function: object
    recipes: tuple
    note: str

    @property
    def name(self):
        return f"{self.op}: {self.note}"

    def inputs(self):
        """Fresh input tensors, the same ones every time."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        return tuple(make(random) for make in self.recipes)


CASES = []


def case(op, function, *recipes, note=""):
    note = note or ", ".join(getattr(r, "note", "?") for r in recipes)
    if any(c.op == op and c.note == note for c in CASES):
        raise ValueError(f"two cases of {op} are called {note!r}; give one of them another note=")
    CASES.append(Case(op, function, recipes, note))


def cases_of(op):
    return [c for c in CASES if c.op == op]


ELSEWHERE = {                                   # ops that know no float64, which central differences need → where a formula in float64
    KernelAttention.__name__: "kernels/test_flash_kernel.py"}      # is what their gradients are compared with, and mutants with them


def differentiable_ops():
    """The registered ops of the package, but for those of `ELSEWHERE`. A class without a backward of its own or inherited is a base
    class, and no op."""
    return {name: cls for name, cls in sorted(Function.registry.items()) if name not in ELSEWHERE
            and cls.__module__.startswith(tinygrad_tf.__name__ + ".") and cls.backward is not Function.backward}


# --- recipes --------------------------------------------------------------------------------------------------------

def recipe(note, values, requires_grad=True, dtype=np.float64):
    """A function of a random generator that makes one input tensor."""
    def make(random):
        return tensor(np.array(values(random), dtype=dtype), requires_grad=requires_grad)
    make.note = note
    return make


def normal(*size):
    return recipe(str(size), lambda r: r.standard_normal(size))


def positive(*size):
    return recipe(f"positive {size}", lambda r: r.uniform(0.5, 2, size))


def away(*size):
    """Values of both signs at least 0.3 away from 0."""
    return recipe(f"away from 0 {size}", lambda r: r.uniform(0.3, 2, size) * r.choice([-1, 1], size))


def distinct(*size):
    """Values that differ by at least 0.25, in random order: no ties."""
    n = math.prod(size)
    return recipe(f"distinct {size}", lambda r: (r.permutation(n) - n / 2 + 0.1).reshape(size) / 4)


def fixed(values, note=None):
    """These very values, differentiated."""
    return recipe(note or str(values), lambda r: values)


def constant(values):
    """These very values, not differentiated."""
    return recipe(f"constant {np.shape(values)}", lambda r: values, requires_grad=False)


def spaced(first, step):
    """first, first + step, …"""
    return lambda *size: fixed(first + step * np.arange(math.prod(size)).reshape(size), note=f"{size}")


def integers(values):
    return recipe(f"integers {np.shape(values)}", lambda r: values, requires_grad=False, dtype=np.int64)


def booleans(values):
    return recipe(f"booleans {np.shape(values)}", lambda r: values, requires_grad=False, dtype=bool)


# --- arithmetic -----------------------------------------------------------------------------------------------------

for op, function, left, right in [
        ("Add", arithmetic.add, normal, normal), ("Sub", arithmetic.sub, normal, normal), ("Mul", arithmetic.mul, normal, normal),
        ("Div", arithmetic.div, normal, away), ("Pow", arithmetic.pow, positive, normal)]:
    case(op, function, left(3, 4), right(3, 4))
    case(op, function, left(2, 3, 4), right(4))
    case(op, function, left(4), right(2, 3, 4))
    case(op, function, left(3, 1), right(1, 4))
    case(op, function, left(2, 3), right())
    case(op, function, left(), right(2, 3))
    case(op, function, left(), right())
    case(op, function, left(1), right(5, 1))
    case(op, function, left(1, 1), right(1))
    case(op, function, left(0, 3), right(3))
    case(op, function, left(2, 0), right(0))
    case(op, function, left(2, 1), right(0))
    case(op, lambda a, f=function: f(a, 2.5), left(3, 4), note="tensor and number")
    case(op, lambda b, f=function: f(2.5, b), right(3, 4), note="number and tensor")
    case(op, lambda a, f=function: f(a, a), positive(3), note="one tensor twice")

for op, function in [("Maximum", arithmetic.maximum), ("Minimum", arithmetic.minimum), ("Remainder", arithmetic.remainder)]:
    left, right = spaced(0.35, 0.7), spaced(1.5, -0.9)          # the two have no values in common, nor whole quotients
    case(op, function, left(3, 4), right(3, 4))
    case(op, function, left(2, 3, 4), right(4))
    case(op, function, left(4), right(3, 4))
    case(op, function, left(3, 1), right(4))
    case(op, function, left(), right(2, 3))
    case(op, function, left(), right())
    case(op, function, left(0, 3), right(3))
    case(op, lambda a, f=function: f(a, 2.0), left(3, 4), note="tensor and number")

case("Add", lambda a, b: arithmetic.add(a, b, alpha=-1.5), normal(3), normal(3), note="alpha")
case("Sub", lambda a, b: arithmetic.sub(a, b, alpha=-1.5), normal(3), normal(3), note="alpha")
case("Pow", lambda x: arithmetic.pow(x, 0), away(4), note="exponent 0")
case("Pow", lambda x: arithmetic.pow(x, 1), away(4), note="exponent 1")
case("Pow", lambda x: arithmetic.pow(x, 2), normal(4), note="exponent 2")
case("Pow", lambda x: arithmetic.pow(x, 3), normal(4), note="exponent 3")
case("Pow", lambda x: arithmetic.pow(x, -1), away(4), note="exponent -1")
case("Pow", lambda x: arithmetic.pow(x, 0.5), positive(4), note="exponent 0.5")
case("Pow", lambda x: arithmetic.pow(x, 2), fixed([0.0, -1.0, 2.0]), note="square at 0")
case("Pow", lambda x, n: arithmetic.pow(x, n), away(3), constant([2.0, 0.0, 3.0]), note="negative base, whole exponents")
case("Pow", lambda n: arithmetic.pow(tensor(np.array([0.0, 2.0])), n), positive(2), note="base 0, exponent differentiated")

ELEMENTARY = [("Neg", arithmetic.neg, normal), ("Exp", arithmetic.exp, normal), ("Log", arithmetic.log, positive),
              ("Log1p", arithmetic.log1p, positive), ("Sqrt", arithmetic.sqrt, positive), ("Rsqrt", arithmetic.rsqrt, positive),
              ("Tanh", arithmetic.tanh, normal), ("Sigmoid", arithmetic.sigmoid, normal), ("Sin", arithmetic.sin, normal),
              ("Cos", arithmetic.cos, normal), ("Abs", arithmetic.abs_, away), ("Round", arithmetic.round, spaced(-3.3, 0.75)),
              ("Relu", activation.relu, away), ("LeakyRelu", activation.leaky_relu, away), ("Erf", activation.erf, normal),
              ("Gelu", activation.gelu, normal), ("GeluTanh", lambda x: activation.gelu(x, approximate="tanh"), normal),
              ("Silu", activation.silu, normal), ("Softplus", activation.softplus, normal)]
for op, function, values in ELEMENTARY:
    for size in [(3, 4), (2, 1, 3), (1,), (), (0,), (2, 0)]:
        case(op, function, values(*size))
for name in ("floor", "ceil", "trunc", "sign"):
    case("Round", getattr(arithmetic, name), fixed([-1.3, 0.6, 2.2]), note=name)

case("Clamp", lambda x: arithmetic.clamp(x, -1.03, 1.06), distinct(3, 4), note="both limits")
case("Clamp", lambda x: arithmetic.clamp(x, min=0.05), distinct(3, 4), note="min")
case("Clamp", lambda x: arithmetic.clamp(x, max=0.05), distinct(3, 4), note="max")
case("Clamp", lambda x, low, high: arithmetic.clamp(x, low, high), distinct(3, 4), fixed([[-0.5], [-1.5], [0.13]]), fixed([1.17]),
     note="limits that want gradients")
case("Clamp", lambda x: arithmetic.clamp(x, -1, 1), fixed([0.3]), note="one element")
case("Clamp", lambda x: arithmetic.clamp(x, -1, 1), normal(0, 2), note="no element")

for size in [(3, 4), (1,), (0, 2)]:             # float64 to float64: rounding to another type has no slope
    case("Cast", lambda x: arithmetic.Cast.apply(x, np.dtype(np.float64)), normal(*size))
    case("ToDevice", lambda x: ToDevice.apply(x, tinygrad_tf.device("cpu")), normal(*size))


# --- reductions -----------------------------------------------------------------------------------------------------

for op, function, values in [
        ("Sum", reduce.sum, normal), ("Mean", reduce.mean, normal), ("Amax", reduce.amax, distinct), ("Amin", reduce.amin, distinct),
        ("Var", reduce.var, normal), ("Norm", lambda x, dim=None, keepdim=False: reduce.norm(x, 2, dim, keepdim), away)]:
    case(op, function, values(2, 3, 4), note="all")
    case(op, lambda x, f=function: f(x, dim=1), values(2, 3, 4), note="dim 1")
    case(op, lambda x, f=function: f(x, dim=-1), values(3, 3), note="dim -1")
    case(op, lambda x, f=function: f(x, dim=(0, -1)), values(2, 3, 4), note="dims 0, -1")
    case(op, lambda x, f=function: f(x, dim=(1, 2), keepdim=True), values(2, 3, 4), note="dims 1, 2 keepdim")
    case(op, lambda x, f=function: f(x, dim=0, keepdim=True), values(3, 4), note="dim 0 keepdim")
    case(op, lambda x, f=function: f(x, dim=1), values(0, 3), note="no element")
    if op == "Var":
        case(op, lambda x: reduce.var(x, correction=0), values(1), note="one element")
        case(op, lambda x: reduce.var(x, dim=1, correction=0), values(3, 4), note="correction 0")
    else:
        case(op, function, values(1), note="one element")
        case(op, function, values(), note="0-d")

for op, function in [("Sum", reduce.sum), ("Mean", reduce.mean)]:
    case(op, lambda x, f=function: f(x, dim=0), normal(1, 3), note="one row")
    case(op, lambda x, f=function: f(x.expand(4, 3), dim=0), normal(1, 3), note="of an expanded tensor")
case("Sum", lambda x: reduce.sum(x, dim=0), normal(0, 3), note="over no element")
for p in (1, 1.5, 3, math.inf, -math.inf, 0):
    case("Norm", lambda x, p=p: reduce.norm(x, p, dim=1), distinct(3, 4), note=f"p = {p}")
case("Norm", lambda x: reduce.std(x, dim=1), normal(3, 4), note="std")
case("Norm", lambda x: reduce.std(x, dim=(0, -1), unbiased=False, keepdim=True), normal(3, 2, 4), note="biased std of two axes")
case("Norm", reduce.norm, fixed([0.0, 0.0, 2.0]), note="zeros among the elements")
case("Norm", lambda x: reduce.norm(x, 3), fixed([0.0, 0.0, 2.0]), note="p = 3, zeros among the elements")

for op, function, values in [("Prod", reduce.prod, away), ("Cumsum", reduce.cumsum, normal)]:
    for dim in (0, 1, -1):
        case(op, lambda x, f=function, dim=dim: f(x, dim), values(2, 3, 2), note=f"dim {dim}")
    case(op, lambda x, f=function: f(x, 0), values(1), note="one element")
    case(op, lambda x, f=function: f(x, 0), values(), note="0-d")
    case(op, lambda x, f=function: f(x, 1), values(0, 3), note="no element")
    case(op, lambda x, f=function: f(x, 0), values(0, 3), note="over no element")
case("Prod", reduce.prod, away(2, 3), note="all")
case("Prod", lambda x: reduce.prod(x, 1, keepdim=True), away(2, 3), note="keepdim")
case("Prod", lambda x: reduce.prod(x, 1), fixed([[0.0, 2.0, 3.0], [0.0, 2.0, 0.0], [1.0, 2.0, 3.0]]),
     note="none, one and two zeros in a row")


# --- shape ----------------------------------------------------------------------------------------------------------

case("Reshape", lambda x: shape.reshape(x, 4, 3), normal(3, 4))
case("Reshape", lambda x: shape.reshape(x, 2, -1), normal(3, 4), note="-1")
case("Reshape", lambda x: shape.reshape(shape.transpose(x, 0, 1), 12), normal(3, 4), note="of a transposed tensor")
case("Reshape", lambda x: shape.reshape(x, ()), normal(1), note="one element to 0-d")
case("Reshape", lambda x: shape.reshape(x, 0, 5), normal(2, 0), note="no element")
case("Reshape", lambda x: shape.squeeze(x), normal(2, 1, 3), note="squeeze")
case("Reshape", lambda x: shape.unsqueeze(x, -1), normal(2, 3), note="unsqueeze")
case("Reshape", lambda x: shape.flatten(x, 1), normal(2, 3, 2), note="flatten")

case("Permute", lambda x: shape.permute(x, 2, 0, 1), normal(2, 3, 4))
case("Permute", lambda x: shape.permute(x, (-1, 0, 1)), normal(2, 3, 4), note="negative axes")
case("Permute", lambda x: shape.transpose(x, -1, 0), normal(3, 3), note="transpose of a square")
case("Permute", lambda x: shape.transpose(x, 0, 1), normal(1, 1), note="one element")
case("Permute", lambda x: shape.transpose(x, 0, 1), normal(0, 2), note="no element")
case("Permute", lambda x: shape.movedim(x, (0, 1), (-1, 0)), normal(2, 3, 4), note="movedim")

case("Expand", lambda x: shape.expand(x, 3, 4), normal(3, 1))
case("Expand", lambda x: shape.expand(x, 2, -1, 4), normal(3, 1), note="new axis and -1")
case("Expand", lambda x: shape.expand(x, 2, 3), normal(), note="0-d")
case("Expand", lambda x: shape.expand(x, 5), normal(1), note="one element")
case("Expand", lambda x: shape.expand(x, 2, 0, 3), normal(0, 3), note="no element")
case("Expand", lambda x: shape.expand(x, 0, 3), normal(1, 3), note="to no element")

case("Contiguous", shape.clone, normal(3, 4))
case("Contiguous", lambda x: shape.contiguous(shape.transpose(x, 0, 1)), normal(3, 4), note="of a transposed tensor")
case("Contiguous", shape.clone, normal(1))
case("Contiguous", shape.clone, normal(0, 3))

for dim in (0, 1, -1):
    case("Cat", lambda a, b, c, dim=dim: shape.cat([a, b, c], dim), normal(2, 2), normal(2, 2), normal(2, 2), note=f"dim {dim}")
case("Cat", lambda a, b: shape.cat([a, b], 1), normal(2, 1), normal(2, 3), note="sizes differ")
case("Cat", lambda a: shape.cat([a, a]), normal(3), note="one tensor twice")
case("Cat", lambda a: shape.cat([a]), normal(1), note="one element")
case("Cat", lambda a, b: shape.cat([a, b]), normal(0, 3), normal(2, 3), note="no element in one")
case("Cat", lambda a, b: shape.cat([a, b]), constant([[1.0, 2.0]]), normal(2, 2), note="a constant first")
case("Cat", lambda a, b: shape.stack([a, b], -1), normal(2, 3), normal(2, 3), note="stack")

for function in (shape.tril, shape.triu):
    name = function.__name__
    case("Triangle", function, normal(3, 3), note=f"{name}")
    case("Triangle", lambda x, f=function: f(x, 1), normal(2, 3, 4), note=f"{name}, diagonal 1")
    case("Triangle", lambda x, f=function: f(x, -1), normal(4, 2), note=f"{name}, diagonal -1")
    case("Triangle", function, normal(1, 1), note=f"{name}, one element")
    case("Triangle", function, normal(0, 3), note=f"{name}, no element")

case("Diagonal", lambda x: shape.diagonal(x), normal(3, 4))
case("Diagonal", lambda x: shape.diagonal(x, -1, 0, 2), normal(3, 2, 4), note="offset -1 of axes 0 and 2")
case("Diagonal", lambda x: shape.diagonal(x), normal(1, 1), note="one element")
case("Diagonal", lambda x: shape.diagonal(x), normal(0, 2), note="no element")
case("Flip", lambda x: shape.flip(x, 0), normal(3, 4), note="dim 0")
case("Flip", lambda x: shape.flip(x, (1, -1)), normal(2, 3, 4), note="dims 1, -1")
case("Flip", lambda x: shape.flip(x, 0), normal(1))
case("Flip", lambda x: shape.flip(x, 0), normal(0))

case("Roll", lambda x: shape.roll(x, 1, 0), normal(3, 4), note="dim 0")
case("Roll", lambda x: shape.roll(x, (2, -1), (0, -1)), normal(3, 4), note="two dims")
case("Roll", lambda x: shape.roll(x, 5), normal(3, 4), note="flattened")
case("Roll", lambda x: shape.roll(x, 1, 0), normal(1))
case("Roll", lambda x: shape.roll(x, 1, 0), normal(0, 2))

case("Repeat", lambda x: shape.repeat(x, 2, 3), normal(3, 4))
case("Repeat", lambda x: shape.repeat(x, 2, 1, 3), normal(4, 2), note="a new axis")
case("Repeat", lambda x: shape.repeat(x, 3), normal(1), note="one element")
case("Repeat", lambda x: shape.repeat(x, 3, 1), normal(0, 2), note="no element")
case("Repeat", lambda x: shape.repeat(x, 0, 2), normal(3, 2), note="0 times")
case("Repeat", lambda x: shape.tile(x, 2), normal(3, 2), note="tile")

for dim in (0, 1, -1):
    case("RepeatInterleave", lambda x, dim=dim: shape.repeat_interleave(x, 3, dim), normal(2, 3, 2), note=f"dim {dim}")
case("RepeatInterleave", lambda x: shape.repeat_interleave(x, 2), normal(2, 3), note="flattened")
case("RepeatInterleave", lambda x: shape.repeat_interleave(x, 2, 0), normal(1))
case("RepeatInterleave", lambda x: shape.repeat_interleave(x, 2, 0), normal(0, 3))
case("RepeatInterleave", lambda x: shape.repeat_interleave(x, 0, 0), normal(2, 3), note="0 times")

case("Pad", lambda x: shape.pad(x, (1, 2)), normal(2, 3), note="last axis")
case("Pad", lambda x: shape.pad(x, (1, 0, 0, 2), value=7.0), normal(2, 3), note="two axes, value")
case("Pad", lambda x: shape.pad(x, (-1, 2, 1, -1)), normal(3, 4), note="crop and pad")
case("Pad", lambda x: shape.pad(x, (2, 1)), normal(1))
case("Pad", lambda x: shape.pad(x, (2, 1)), normal(0))


# --- index ----------------------------------------------------------------------------------------------------------

for note, i in [("int", 1), ("negative int", -1), ("slice", slice(1, None)), ("step", slice(None, None, 2)), ("None and …", (None, ..., 0)),
                ("int and slice", (1, slice(0, 2))), ("two ints", (1, 2)), ("no element", slice(2, 2)),
                ("list with repeats", ([0, 2, 2, 0],)), ("negative list", ([-1, 0, -1],)), ("two lists", ([0, 2, 0], [1, 1, 1])),
                ("list and slice", (slice(None), [3, 3, 0])), ("two-dimensional list", ([[0, 1], [1, 1]],))]:
    case("GetItem", lambda x, i=i: x[i], normal(3, 4), note=note)
case("GetItem", lambda x, i: x[i], normal(3, 4), integers([2, 2, 1]), note="tensor with repeats")
case("GetItem", lambda x, m: x[m], normal(2, 3), booleans([[True, False, True], [False, False, True]]), note="boolean mask")
case("GetItem", lambda x, m: x[m], normal(2, 3), booleans([True, False]), note="boolean rows")
case("GetItem", lambda x, i: shape.transpose(x, 0, 1)[i], normal(3, 4), integers([0, 0, 3]), note="of a transposed tensor")
case("GetItem", lambda x: x[0], normal(1), note="one element")
case("GetItem", lambda x: x[1:], normal(0, 3), note="of no element")
case("GetItem", lambda x, i: index.index_select(x, 1, i), normal(3, 4), integers([1, 1, 3]), note="index_select")

case("Gather", lambda x, i: index.gather(x, 1, i), normal(2, 3), integers([[0, 0, 2, 0], [1, 2, 2, 1]]), note="repeats, dim 1")
case("Gather", lambda x, i: index.gather(x, 0, i), normal(3, 2), integers([[0, 2]]), note="dim 0, smaller index")
case("Gather", lambda x, i: index.gather(x, -1, i), normal(1), integers([0]), note="one element")
case("Gather", lambda x, i: index.gather(x, 0, i), normal(3, 2), integers(np.zeros((0, 2))), note="no element")

case("Gather", lambda x, i: index.gather(x, 0, i), normal(0, 2), integers(np.zeros((0, 2))), note="of no element")

case("Scatter", lambda x, i, s: index.scatter(x, 1, i, s), normal(2, 4), integers([[0, 2], [3, 1]]), normal(2, 2), note="dim 1")
case("Scatter", lambda x, i, s: index.scatter(x, 0, i, s), normal(3, 2), integers([[2, 0]]), normal(2, 2), note="dim 0, larger source")
case("Scatter", lambda x, i: index.scatter(x, 1, i, 7.0), normal(2, 4), integers([[0, 0], [3, 1]]), note="a number, repeats")
case("Scatter", lambda x, i, s: index.scatter(x, 0, i, s), normal(1), integers([0]), normal(1), note="one element")
case("Scatter", lambda x, i, s: index.scatter(x, 0, i, s), normal(0), integers(np.zeros(0)), normal(0), note="no element")

case("ScatterAdd", lambda x, i, s: index.scatter_add_(x, 1, i, s), normal(2, 3), integers([[0, 0, 2, 0], [1, 2, 2, 1]]), normal(2, 4),
     note="repeats")
case("ScatterAdd", lambda x, i, s: index.scatter_add_(x, 0, i, s), normal(3, 2), integers([[2, 0]]), normal(3, 2), note="larger source")
case("ScatterAdd", lambda x, i, s: index.scatter_add_(x, 0, i, s), normal(1), integers([0]), normal(1), note="one element")
case("ScatterAdd", lambda x, i, s: index.scatter_add_(x, 0, i, s), normal(2), integers(np.zeros(0)), normal(0), note="no element")

case("IndexAdd", lambda x, i, s: index.index_add(x, 0, i, s), normal(3, 2), integers([2, 0, 2, 2]), normal(4, 2), note="repeats")
case("IndexAdd", lambda x, i, s: index.index_add(x, -1, i, s, alpha=-2), normal(2, 3), integers([1, 1]), normal(2, 2), note="dim -1, alpha")
case("IndexAdd", lambda x, i, s: index.index_add(x, 0, i, s), normal(1), integers([0]), normal(1), note="one element")
case("IndexAdd", lambda x, i, s: index.index_add(x, 0, i, s), normal(3, 2), integers(np.zeros(0)), normal(0, 2), note="no element")


def set_item(i):
    def function(x, value):
        y = shape.clone(x)
        y[i] = value
        return y
    return function


for note, i, size in [("int", 1, (4,)), ("value broadcast", slice(0, 2), (4,)), ("number", (0, 0), ()), ("list", ([2, 0],), (2, 4)),
                      ("column", (slice(None), 1), (3,)), ("…", ..., (3, 4)), ("0-d value", slice(None), ()),
                          ("no element", slice(1, 1), (4,))]:
    case("SetItem", set_item(i), normal(3, 4), normal(*size), note=note)
case("SetItem", set_item(0), normal(1), normal(), note="one element")
case("SetItem", set_item(slice(None)), normal(0), normal(1), note="of no element")

CHOICE = [[True, False, True], [False, False, True]]
case("Where", index.where, booleans(CHOICE), normal(2, 3), normal(2, 3))
case("Where", index.where, booleans(CHOICE), normal(3), normal(2, 1))
case("Where", index.where, booleans(CHOICE[0]), normal(2, 3), normal())
case("Where", lambda c, a: index.where(c, a, -1.0), booleans(CHOICE), normal(2, 3), note="a number for b")
case("Where", lambda c, b: index.where(c, 2.0, b), booleans(CHOICE), normal(2, 3), note="a number for a")
case("Where", index.where, booleans(True), normal(1), normal(1), note="one element")
case("Where", index.where, booleans(np.zeros((0, 3))), normal(3), normal(0, 3), note="no element")

case("MaskedFill", lambda x, m: index.masked_fill(x, m, 3.0), normal(2, 3), booleans(CHOICE))
case("MaskedFill", lambda x, m: index.masked_fill(x, m, 3.0), normal(2, 3), booleans([True, False, False]), note="blocked broadcast")
case("MaskedFill", lambda x, m: index.masked_fill(x, m, 3.0), normal(3), booleans(CHOICE), note="x broadcast")
case("MaskedFill", index.masked_fill, normal(2, 3), booleans(CHOICE), normal(), note="0-d value")
case("MaskedFill", lambda x, m: index.masked_fill(x, m, 3.0), normal(1), booleans([False]), note="one element")
case("MaskedFill", lambda x, m: index.masked_fill(x, m, 3.0), normal(0, 2), booleans([True, False]), note="no element")


# --- linear ---------------------------------------------------------------------------------------------------------

for a, b in [((3, 4), (4, 2)), ((3, 3), (3, 3)), ((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 2)), ((2, 3, 4), (4, 2)), ((2, 3, 4), (2, 4, 2)),
             ((3, 4), (2, 4, 2)), ((2, 1, 3, 4), (3, 4, 2)), ((1, 1), (1, 1)), ((0, 3), (3, 2)), ((3, 0), (0, 2)), ((0, 2, 3), (3, 2)),
             ((2, 0, 3), (2, 3, 2)), ((4,), (3, 4, 2)), ((3, 2, 4), (4,))]:
    case("Matmul", linear.matmul, normal(*a), normal(*b))
case("Matmul", lambda x: linear.matmul(x, shape.transpose(x, 0, 1)), normal(2, 3), note="x xᵀ")

for size in [(4,), (3, 4), (2, 3, 4), (0, 4), (2, 0, 4)]:
    case("Linear", linear.linear, normal(*size), normal(2, 4), normal(2))
case("Linear", linear.linear, normal(3, 3), normal(3, 3), note="without bias, square")
case("Linear", linear.linear, normal(1, 1), normal(1, 1), normal(1), note="one element")
case("Linear", lambda x, w: linear.linear(x, w), constant(np.eye(3)), normal(2, 3), note="constant input")

for equation, *sizes in [("ij,jk->ik", (2, 3), (3, 2)), ("bhqd,bhkd->bhqk", (2, 2, 2, 3), (2, 2, 3, 3)), ("i,j->ij", (2,), (3,)),
    ("ij->ji", (2, 3)),
                         ("ij->i", (2, 3)), ("ij->", (2, 2)), ("ij,ij->", (2, 2), (2, 2)), ("ij,jk,kl->il", (2, 2), (2, 3), (3, 2)),
                         ("...ij,jk->...ik", (2, 2, 3), (3, 2)), ("ij,k->i", (2, 3), (2,)), ("i,i", (3,), (3,)), ("i->i", (1,)),
                             ("ij,jk->ik", (0, 3), (3, 2))]:
    case("Einsum", lambda *xs, e=equation: linear.einsum(e, *xs), *(normal(*size) for size in sizes), note=f"{equation} {sizes}")


# --- activations and softmax ----------------------------------------------------------------------------------------

FAR = fixed([-9.0, -3.0, -0.2, 0.4, 2.5, 8.0], note="far from 0 and near it")
for op, function in [("Erf", activation.erf), ("Gelu", activation.gelu), ("GeluTanh", lambda x: activation.gelu(x, approximate="tanh")),
                     ("Silu", activation.silu), ("Softplus", activation.softplus), ("Tanh", arithmetic.tanh),
                         ("Sigmoid", arithmetic.sigmoid)]:
    case(op, function, FAR)
case("LeakyRelu", lambda x: activation.leaky_relu(x, 0.3), away(5), note="slope 0.3")

for op, function in [("Softmax", softmax.softmax), ("LogSoftmax", softmax.log_softmax), ("LogSumExp", softmax.logsumexp)]:
    for dim in (0, 1, -1):
        case(op, lambda x, f=function, dim=dim: f(x, dim), normal(2, 3, 4), note=f"dim {dim}")
    case(op, lambda x, f=function: f(x, -1), normal(3, 3), note="square")
    case(op, lambda x, f=function: f(x, 0), normal(), note="0-d")
    case(op, lambda x, f=function: f(x, -1), normal(3, 1), note="one element in each row")
    case(op, lambda x, f=function: f(x, 0), normal(1), note="one element")
    case(op, lambda x, f=function: f(x, -1), normal(0, 3), note="no element")
    case(op, lambda x, f=function: f(x * 300.0, -1), fixed([[0.001, 1.0, 1.002], [-2.0, -2.001, 0.5]]), note="large scores")
for op, function in [("Softmax", softmax.softmax), ("LogSumExp", softmax.logsumexp),
    ("LogSoftmax", lambda x, dim: softmax.log_softmax(x, dim)[x > -9])]:
    case(op, lambda x, m, f=function: f(x.masked_fill(m, -math.inf), -1), normal(2, 3),
         booleans([[False, True, False], [False, False, True]]),
         note="blocked scores")
case("LogSumExp", lambda x: softmax.logsumexp(x, (0, -1), keepdim=True), normal(2, 3, 4), note="two axes, keepdim")
case("LogSumExp", lambda x: softmax.logsumexp(x, (0, 1)), normal(2, 3), note="all axes")


# --- norms, dropout, embedding --------------------------------------------------------------------------------------

for size, shape_of_norm in [((3, 4), (4,)), ((2, 3, 4), (4,)), ((2, 3, 4), (3, 4)), ((5,), (5,)), ((4, 4), (4,)), ((1,), (1,)),
    ((0, 3), (3,)), ((2, 1, 3), (3,))]:
    case("LayerNorm", lambda x, w, b, s=shape_of_norm: norm.layer_norm(x, s, w, b), normal(*size), normal(*shape_of_norm),
         normal(*shape_of_norm))
    case("RMSNorm", lambda x, w, s=shape_of_norm: norm.rms_norm(x, s, w, eps=1e-6), normal(*size), normal(*shape_of_norm))
case("LayerNorm", lambda x: norm.layer_norm(x, 4), normal(3, 4), note="without weight and bias")
case("LayerNorm", lambda x, w: norm.layer_norm(x, 4, w), normal(3, 4), normal(4), note="without bias")
case("LayerNorm", lambda x, b: norm.layer_norm(x, 4, None, b), normal(3, 4), normal(4), note="without weight")
case("LayerNorm", lambda x, w, b: norm.layer_norm(x, 4, w, b, eps=0.5), normal(3, 4), normal(4), normal(4), note="a large eps")
case("LayerNorm", lambda x, w: norm.layer_norm(x + 100.0, 4, w), normal(3, 4), normal(4), note="beside a large mean")
case("RMSNorm", lambda x: norm.rms_norm(x, 4), normal(3, 4), note="without weight")
case("RMSNorm", lambda x, w: norm.rms_norm(x, 4, w, eps=0.5), normal(3, 4), normal(4), note="a large eps")


def seeded(function):
    """The function with the same random numbers at each call."""
    def same(*args):
        manual_seed(0)
        return function(*args)
    return same


for size in [(4, 5), (2, 3, 4), (1,), (0, 3)]:
    case("Dropout", seeded(lambda x: dropout.dropout(x, 0.4)), normal(*size))
case("Dropout", seeded(lambda x: dropout.dropout(x, 0.9)), normal(20), note="p = 0.9")
case("Dropout", lambda x: dropout.dropout(x, 1.0), normal(3), note="p = 1")

case("Embedding", embedding.embedding, integers([1, 3, 1, 0, 1]), normal(4, 3), note="repeated ids")
case("Embedding", embedding.embedding, integers([[0, 2], [2, 2]]), normal(3, 3), note="ids of two axes")
case("Embedding", lambda i, w: embedding.embedding(i, w, padding_idx=2), integers([0, 1, 3]), normal(4, 2),
     note="padding_idx that does not occur")
case("Embedding", embedding.embedding, integers(0), normal(1, 1), note="one element")
case("Embedding", embedding.embedding, integers([]), normal(3, 2), note="no id")
case("Embedding", embedding.embedding, integers([]), normal(0, 2), note="no element")


# --- losses ---------------------------------------------------------------------------------------------------------

WEIGHTS = constant([0.5, 2.0, 1.5])
for op, function in [("CrossEntropy", loss.cross_entropy), ("NLLLoss", loss.nll_loss)]:
    for reduction in ("mean", "sum", "none"):
        case(op, lambda x, t, f=function, r=reduction: f(x, t, reduction=r), normal(4, 3), integers([2, 0, 0, 1]), note=reduction)
        case(op, lambda x, t, w, f=function, r=reduction: f(x, t, w, reduction=r), normal(4, 3), integers([2, 0, 0, 1]), WEIGHTS,
             note=f"{reduction}, weights")
        case(op, lambda x, t, f=function, r=reduction: f(x, t, ignore_index=0, reduction=r), normal(4, 3), integers([2, 0, 0, 1]),
             note=f"{reduction}, ignored")
        case(op, lambda x, t, f=function, r=reduction: f(x, t, reduction=r), normal(2, 3, 2, 2),
             integers(np.arange(8).reshape(2, 2, 2) % 3), note=f"{reduction}, classes on axis 1 of 4")
    case(op, lambda x, t, f=function: f(x, t), normal(3), integers(1), note="one row without a batch")
    case(op, lambda x, t, f=function: f(x, t), normal(3, 3), integers([0, 1, 2]), note="square")
    case(op, lambda x, t, f=function: f(x, t), normal(1, 1), integers([0]), note="one element")
    case(op, lambda x, t, f=function: f(x, t, reduction="sum"), normal(0, 3), integers([]), note="no element")
    case(op, lambda x, t, f=function: f(x, t, reduction="sum"), normal(2, 3), integers([-100, -100]), note="all ignored")
for reduction in ("mean", "sum", "none"):
    case("CrossEntropy", lambda x, t, r=reduction: loss.cross_entropy(x, t, reduction=r, label_smoothing=0.2), normal(4, 3),
         integers([2, -100, 0, 1]), note=f"{reduction}, label smoothing")
    case("CrossEntropy", lambda x, t, w, r=reduction: loss.cross_entropy(x, t, w, reduction=r, label_smoothing=0.2), normal(4, 3),
         integers([2, 0, -100, 1]), WEIGHTS, note=f"{reduction}, label smoothing, weights")
case("CrossEntropy", lambda x, t: loss.cross_entropy(x * 300.0, t), fixed([[1.0, 1.001, -2.0], [0.5, 0.3, 0.501]]), integers([0, 0]),
     note="large scores")


# --- attention ------------------------------------------------------------------------------------------------------

attend = sdpa.scaled_dot_product_attention
SEES = [[True, False, True], [False, False, False], [True, True, False]]        # the second query sees nothing


def attend_weights(q, k, v, *mask, **options):
    return attention.attention_weights(q, k, *mask, **options)


def attend_in_tiles(*x, **options):
    return sdpa.flash_attention(*x, **options, tile=(2, 3))


for op, function, values in [("Attention", attend, True), ("AttentionWeights", attend_weights, False),
                             ("TiledAttention", attend_in_tiles, True)]:
    def with_values(q, k, v, values=values):
        return (normal(*q), normal(*k), normal(*v)) if values else (normal(*q), normal(*k), constant(np.zeros(v)))
    three = with_values((3, 2), (3, 2), (3, 2))
    case(op, function, *three, note="[T, Dh]")
    case(op, function, *with_values((2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 3)), note="[B, H, T, Dh], Tq ≠ Tk, Dv ≠ Dh")
    case(op, function, *with_values((3, 3), (3, 3), (3, 3)), note="all square")
    case(op, function, *with_values((2, 3, 2), (3, 2), (3, 2)), note="one key for a batch of queries")
    case(op, lambda *x, f=function: f(*x, is_causal=True), *with_values((2, 4, 2), (2, 4, 2), (2, 4, 2)), note="causal")
    case(op, lambda *x, f=function: f(*x, is_causal=True), *with_values((3, 2), (5, 2), (5, 2)), note="causal, Tq < Tk")
    case(op, lambda *x, f=function: f(*x, scale=0.3), *three, note="scale")
    case(op, function, *three, booleans(SEES), note="boolean mask, a query that sees nothing")
    case(op, function, *with_values((2, 2, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2)),
         booleans([[[[True, True, False]]], [[[False, True, True]]]]), note="padding")
    case(op, function, *three, normal(3, 3), note="float mask with gradient")
    case(op, function, *with_values((2, 2, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2)), normal(2, 1, 3), note="float mask broadcast")
    case(op, function, *with_values((2, 2, 3, 2), (2, 3, 2), (2, 3, 2)), normal(2, 1, 3, 3), note="float mask with more axes than the keys")
    case(op, function, *three, constant(np.where(SEES, 0.0, -np.inf)), note="float mask of −inf")
    case(op, lambda *x, f=function: f(*x, enable_gqa=True), *with_values((4, 3, 2), (2, 3, 2), (2, 3, 2)), note="grouped heads")
    case(op, function, *with_values((1, 1), (1, 1), (1, 1)), note="one element")
    case(op, function, *with_values((0, 2), (3, 2), (3, 2)), note="no query")
    case(op, function, *with_values((3, 2), (0, 2), (0, 2)), note="no key")
case("Attention", seeded(lambda q, k, v: attend(q, k, v, dropout_p=0.4)), normal(2, 4, 2), normal(2, 4, 2), normal(2, 4, 2), note="dropout")
case("Attention", seeded(lambda q, k, v: attend(q, k, v, dropout_p=0.4, is_causal=True)), normal(4, 2), normal(4, 2), normal(4, 2),
     note="causal, dropout")
case("Attention", lambda x: attend(x, x, x), normal(3, 2), note="one tensor three times")

case("TiledAttention", lambda *x: attend_in_tiles(*x, window=2), normal(5, 2), normal(5, 2), normal(5, 2), note="window")
case("TiledAttention", lambda *x: attend_in_tiles(*x, window=(1, 2), query_offset=-2), normal(2, 6, 2), normal(5, 2), normal(5, 3),
     note="a band that begins before the keys")
case("TiledAttention", lambda *x: attend_in_tiles(*x, is_causal=True, query_offset=3), normal(4, 2), normal(7, 2), normal(7, 2),
     note="ends aligned")
case("TiledAttention", seeded(lambda *x: attend_in_tiles(*x, dropout_p=0.4)), normal(2, 4, 2), normal(2, 4, 2), normal(2, 4, 2),
     normal(4, 4), note="dropout, float mask with gradient")
case("TiledAttention", seeded(lambda *x: attend_in_tiles(*x, dropout_p=0.4, window=2, enable_gqa=True)), normal(4, 4, 2), normal(2, 4, 2),
     normal(2, 4, 2), note="grouped heads, window, dropout")


# --- squared activation ---------------------------------------------------------------------------------------------

for size in [(3, 4), (2, 1, 3), (1,), (), (0,), (2, 0)]:
    case("ReluSquared", activation.relu_squared, away(*size))
case("ReluSquared", activation.relu_squared, FAR)


# --- rotary ---------------------------------------------------------------------------------------------------------

def turned(layout):
    """RoPE by any angles: cos and sin of a constant input [..., T, R/2]."""
    return lambda x, angles: rotary.rotary(x, angles.detach().cos(), angles.detach().sin() * 1.5, layout)


def angles(*size):
    return constant(0.4 + 0.7 * np.arange(math.prod(size)).reshape(size))


for layout in rotary.LAYOUTS:
    case("Rotary", turned(layout), normal(3, 4), angles(3, 2), note=f"{layout}, [T, Dh]")
    case("Rotary", turned(layout), normal(2, 2, 3, 4), angles(3, 2), note=f"{layout}, [B, H, T, Dh]")
    case("Rotary", turned(layout), normal(2, 2, 3, 4), angles(2, 1, 3, 2), note=f"{layout}, positions of each row")
    case("Rotary", turned(layout), normal(2, 3, 7), angles(3, 2), note=f"{layout}, a part of the head")
    case("Rotary", turned(layout), normal(4, 4), angles(4, 2), note=f"{layout}, square")
    case("Rotary", turned(layout), normal(1), angles(0), note=f"{layout}, one element, not turned")
    case("Rotary", turned(layout), normal(0, 4), angles(0, 2), note=f"{layout}, no element")


# --- rounding, whose gradient is a definition -------------------------------------------------------------------------

def of_value(meant, op):
    """op's gradient under the values of meant(x), of which it is the slope by definition: op itself has slope 0, and jumps."""
    def function(x, *rest):
        y = op(x, *rest)
        return y + (meant(x, *rest) - y).detach()
    return function


def clipped(low, high):
    """What straight-through estimation takes x for: half a step beyond the last levels it no longer moves."""
    return lambda x, *rest: arithmetic.clamp(x, low, high)


def per_tensor(x):
    return quantize.fake_quantize_per_tensor_affine(x, 0.5, 1, -1, 3)


def per_channel(axis, scale):
    scale = constant(scale)
    return lambda x: quantize.fake_quantize_per_channel_affine(x, scale(None), integers([0, 1, 2])(None), axis, -1, 3)


def clipped_channels(axis, scale):
    def limit(level):                           # of zero points 0, 1, 2
        numbers = np.array(scale) * (level - np.arange(3.0))
        return constant(numbers.reshape(3, 1) if axis == 0 else numbers)(None)
    return lambda x: arithmetic.clamp(x, limit(-1.5), limit(3.5))


for size in [(3, 4), (2, 2, 3), (6,), (1,), (), (0,), (2, 0)]:
    case("FakeQuantize", of_value(clipped(-1.25, 1.25), per_tensor), normal(*size))
case("FakeQuantize", of_value(clipped(-1.25, 1.25), per_tensor), fixed([-1.26, -1.24, -0.3, 0.1, 0.99, 1.01, 1.24, 1.26]),
     note="at both ends of the range")
for axis in (0, 1):
    case("FakeQuantize", of_value(clipped_channels(axis, [0.4, 0.6, 0.8]), per_channel(axis, [0.4, 0.6, 0.8])), normal(3, 3),
         note=f"channels of axis {axis}")
for granularity, group_size in [("tensor", None), ("channel", None), ("group", 2)]:
    for symmetric in (True, False):
        scheme = quantize.Scheme(3, symmetric, granularity, group_size)
        case("FakeQuantize", of_value(lambda x: x, lambda x, s=scheme: quantize.fake_quantize(x, s)), normal(3, 4),
             note=f"{granularity}, {'symmetric' if symmetric else 'asymmetric'}, scales of x: a constant, and nothing is clipped")


# --- mixture of experts ---------------------------------------------------------------------------------------------

def planned(ids, **options):
    return moe.plan_dispatch(ids.array, num_experts=4, **options)


CHOSEN = integers([[1, 3], [3, 0], [1, 0], [3, 1], [1, 3]])           # of 5 tokens; nobody chose expert 2
ONE, NONE = integers([[0]]), integers(np.zeros((0, 2)))
for note, chosen, size, options in [("two ranks", CHOSEN, (5, 3), {}), ("a full expert drops", CHOSEN, (5, 3), {"capacity": 2}),
                                    ("one rank, square", integers([[2], [0], [2]]), (3, 3), {}), ("one element", ONE, (1, 1), {}),
                                    ("no element", NONE, (0, 3), {}), ("all dropped", CHOSEN, (5, 2), {"capacity": 0})]:
    case("Dispatch", lambda x, ids, o=options: moe.dispatch(x, planned(ids, **o)), normal(*size), chosen, note=note)
for note, chosen, size, weights, options in [
        ("two ranks", CHOSEN, (10, 3), (5, 2), {}), ("a full expert drops", CHOSEN, (6, 3), (5, 2), {"capacity": 2}),
        ("one rank, square", integers([[2], [0], [2]]), (3, 3), (3, 1), {}), ("one element", ONE, (1, 1), (1, 1), {}),
        ("no element", NONE, (0, 3), (0, 2), {}), ("all dropped", CHOSEN, (0, 3), (5, 2), {"capacity": 0})]:
    case("Combine", lambda rows, g, ids, o=options: moe.combine(rows, g, planned(ids, **o)), normal(*size), normal(*weights), chosen,
         note=note)
for counts, out in [((2, 0, 3), 2), ((5,), 3), ((0, 0), 2), ((1, 1, 1), 3)]:
    N, E = sum(counts), len(counts)
    case("GroupedLinear", lambda x, w, b, c=counts: moe.grouped_linear(x, w, b, c), normal(N, 3), normal(E, out, 3), normal(E, out),
         note=f"rows {counts}")
case("GroupedLinear", lambda x, w: moe.grouped_linear(x, w, None, (2, 1)), normal(3, 2), normal(2, 2, 2), note="without bias")
case("GroupedLinear", lambda x, w, b: moe.grouped_linear(x, w, b, (1,)), normal(1, 1), normal(1, 1, 1), normal(1, 1), note="one element")


# --- low-bit weights: constants, of which x and the bias get their gradients ------------------------------------------

def low_bit(scheme, x_shape, out, note):
    """y = x Ŵᵀ + b with a Ŵ [out, in] of this scheme."""
    codes = round_to_nearest(np.sin(1 + np.arange(out * x_shape[-1])).reshape(out, x_shape[-1]), scheme)
    stored = [pack(codes.q, scheme.bits), codes.scale, *([] if scheme.symmetric else [codes.zero_point.astype(np.uint8)])]
    recipes = [recipe("stored", lambda r, a=array: a, requires_grad=False, dtype=array.dtype) for array in stored]

    def function(x, packed, scale, *rest):
        return PackedLinear.apply(x, packed, scale, None if scheme.symmetric else rest[0], rest[-1], scheme)
    case("PackedLinear", function, normal(*x_shape), *recipes, normal(out), note=note)


for size in [(3, 4), (4,), (2, 2, 4), (0, 4)]:
    low_bit(quantize.Scheme(4, granularity="group", group_size=2), size, 3, f"4 bits, groups, {size}")
for bits in (2, 3, 5, 7, 8):
    low_bit(quantize.Scheme(bits, granularity="channel"), (2, 3), 3, f"{bits} bits, channels")
    low_bit(quantize.Scheme(bits, False, "group", 3), (2, 3), 2, f"{bits} bits, asymmetric, groups")
low_bit(quantize.Scheme(4), (2, 5), 3, "4 bits, tensor, odd rows")
low_bit(quantize.Scheme(4, False), (5, 3), 3, "4 bits, asymmetric, tensor")
low_bit(quantize.Scheme(8), (1, 1), 1, "one element")
