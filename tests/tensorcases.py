"""Expressions on small tensors, evaluated by PyTorch when they are recorded and by this package when they are tested.

A case is an expression in which `torch` is the library and x, y, z are tensors made from a recipe: "f4:2,3" is float32 of
shape (2, 3), "i8:" an int64 number; after the type `!` and flags: p positive, s with inf, NaN and zeros, T transposed memory.
Expressions with `;` are statements that leave their result in `r`. An outcome holds the results and the gradients of all float
inputs under a fixed upstream gradient, or the name of the error.
"""
import gzip
import json
import math
import os
import warnings
import zlib

import numpy as np

DTYPES = {"b": "bool", "u1": "uint8", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "f2": "float16", "f4": "float32",
          "f8": "float64"}
TOLERANCE = {"float16": (4e-3, 2e-3), "float32": (2e-5, 2e-6), "float64": (1e-11, 1e-12)}
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tensor.json.gz")


def recorded(group):
    with gzip.open(PATH, "rt", encoding="utf-8") as file:
        return json.load(file)[group]


# --- inputs ---------------------------------------------------------------------------------------------------------

def values(recipe):
    """The numbers of a recipe as an array, always the same ones."""
    kind, _, shape = recipe.partition(":")
    kind, _, flags = kind.partition("!")
    shape = tuple(int(n) for n in shape.split(",") if n)
    random = np.random.default_rng(zlib.crc32(recipe.encode()))
    if kind == "b":
        x = random.integers(0, 2, shape).astype(bool)
    elif kind == "u1":
        x = random.integers(0, 5, shape)
    elif kind[0] == "i":
        x = random.integers(-4, 5, shape)
    else:
        x = np.round(random.standard_normal(shape) * 2, 1)
    if "p" in flags:
        x = abs(x) + (0.5 if kind[0] == "f" else 1)
    if "s" in flags:
        x = np.where(random.random(shape) < 0.4, random.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], shape), x)
    return np.asarray(x).astype(DTYPES[kind]), "T" in flags


def make(library, recipe):
    array, transposed = values(recipe)
    if transposed:
        array = np.ascontiguousarray(array.T).T
    x = library.from_numpy(array).to(library.get_default_device())
    return x.requires_grad_() if x.is_floating_point() else x


# --- running --------------------------------------------------------------------------------------------------------

def flat(result, library):
    """All tensors and values in nested tuples and lists."""
    if isinstance(result, (tuple, list)) and not isinstance(result, library.Size):
        return [leaf for part in result for leaf in flat(part, library)]
    return [result]


def evaluate(library, expression, names):
    scope = {"torch": library, "np": np, "inf": math.inf, "nan": math.nan, **names}
    if ";" not in expression:
        return eval(expression, scope)
    exec(expression.replace(";", "\n"), scope)
    return scope["r"]


def outcome(library, case):
    """{"out": [...], "grad": [...]} or {"error": name}; with this package no NumPy warning may escape."""
    expression, *recipes = case
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if library.__name__ == "torch" else "error")
            inputs = [make(library, r) for r in recipes]
            results = flat(evaluate(library, expression, dict(zip("xyz", inputs))), library)
            for i, y in enumerate(results):
                if isinstance(y, library.Tensor) and y.requires_grad:
                    upstream = np.round(np.random.default_rng(i).standard_normal(tuple(y.shape)), 1)
                    y.backward(library.from_numpy(np.array(upstream)).to(y), retain_graph=True)
    except Warning:
        raise
    except Exception as error:
        return {"error": error_name(error)}
    leaves = [x.grad for x in inputs if x.is_floating_point()]
    return {"out": [entry(y, library) for y in results], "grad": [g if g is None else entry(g, library)[:3] for g in leaves]}


def error_name(error):
    """PyTorch's NotImplementedError is a RuntimeError."""
    return "RuntimeError" if isinstance(error, NotImplementedError) else type(error).__name__


def entry(y, library):
    if not isinstance(y, library.Tensor):
        return y if isinstance(y, (bool, int, float, str)) else repr(y)
    digits = {"torch.float16": 5, "torch.float32": 9}.get(str(y.dtype), 17)
    numbers = [float(f"{v:.{digits}g}") if isinstance(v, float) else v for v in y.detach().reshape(-1).tolist()]
    return [str(y.dtype), list(y.shape), numbers, y.requires_grad]


# --- comparing ------------------------------------------------------------------------------------------------------

def assert_same(got, want, case):
    """Values within the rounding of the least precise float among the inputs and results; all else exactly."""
    if "error" in want or "error" in got:
        assert got == want, f"{case}: {got} instead of {want}"
        return
    loosest = [TOLERANCE[DTYPES[r.partition(":")[0].partition("!")[0]]] for r in case[1:] if r[0] == "f"]
    for kind in ("out", "grad"):
        assert len(got[kind]) == len(want[kind]), case
        for g, w in zip(got[kind], want[kind]):
            assert_entry(g, w, loosest, f"{case} {kind}: {g} instead of {w}")


def assert_entry(got, want, loosest, message):
    if isinstance(want, float) and isinstance(got, float):
        assert np.isclose(got, want, rtol=2e-5, atol=0, equal_nan=True), message
    elif not isinstance(want, list) or want is None:
        assert got == want and type(got) is type(want), message
    else:
        assert got[:2] == want[:2] and got[3:] == want[3:], message
        tolerances = [*loosest, *(v for k, v in TOLERANCE.items() if k in want[0])]
        rtol, atol = max(tolerances) if "float" in want[0] else (0, 0)
        with np.errstate(invalid="ignore"):
            assert np.allclose(got[2], want[2], rtol=rtol, atol=atol, equal_nan=True), message


# --- the tables -----------------------------------------------------------------------------------------------------

def each(expressions, *inputs):
    """Every expression with every tuple of recipes."""
    return [(e, *(i if isinstance(i, tuple) else (i,))) for e in expressions.split("\n") if e.strip() for i in inputs]


def _arithmetic():
    binary = ["x + y", "x - y", "x * y", "x / y", "x // y.detach()", "x % y", "x ** y", "x == y", "x < y", "x >= y",
              "torch.maximum(x, y)", "torch.minimum(x, y)", "torch.add(x, y, alpha=2)"]
    pairs = [("f4:2,3", "f4:3"), ("f4:2,1", "f8:"), ("i8:2,3", "f2:2,3"), ("i4:3", "u1:2,1"), ("b:3", "i8:3"), ("f4:0", "f4:1"),
             ("i8:2", "f4:"), ("f4!s:3,4", "f4!s:3,4"), ("f2!s:6", "f2:6"), ("b:3", "b:3"), ("f4:2,3", "f4:2,4")]
    cases = [(e, *p) for e in binary for p in pairs if not (e == "x // y.detach()" and "f" in p[0])]
    unary = "neg abs exp log log1p sqrt rsqrt tanh sigmoid sin cos square reciprocal round floor ceil trunc sign".split()
    cases += [(f"x.{u}()", r) for u in unary for r in ("f4:2,3", "i8:3", "b:2", "f8!s:3,4", "f2!p:3", "f4:", "f4!T:2,3")]
    cases += [(f"torch.{u}(x)", r) for u in ("isnan", "isinf", "isfinite", "logical_not", "bitwise_not") for r in ("f4!s:6", "i8:3", "b:3")]
    scalars = ["2", "-3", "0", "2.5", "True", "np.float64(0.5)", "np.int32(-2)", "300", "inf"]
    for s in scalars:
        for r in ("f4:3", "i8:3", "u1:3", "b:2", "f2:2"):
            cases += [(f"x + {s}", r), (f"{s} - x", r), (f"x * {s}", r), (f"x == {s}", r)]
            cases += [(f"{s} / x", r), (f"x ** {s}", r)] if s not in ("True", "np.int32(-2)") else []
    cases += each("x // y\nx % y\ntorch.div(x, y, rounding_mode='floor')\ntorch.div(x, y, rounding_mode='trunc')",
                  ("i8:7", "i8!p:7"), ("i8:7", "i8:7"), ("u1:4", "u1:4"), ("b:2", "b:2"), ("i4:5", "i1!p:5"))
    cases += each("x & y\nx | y\nx ^ y\n2 & x\nTrue ^ x", ("i8:4", "i4:4"), ("b:4", "b:4"), ("f4:2", "f4:2"))
    cases += each("x ** 0\nx ** 1\nx ** 2\nx ** 3\nx ** -1\n2 ** x\n0 ** x\nx ** x", "f4:5", "f8!s:8", "i8!p:3")
    cases += each("x.clamp(-1, 1)\nx.clamp(min=0)\nx.clamp(max=0.5)\nx.clamp(1, -1)\nx.clamp()\nx.clamp(min=y)\nx.clamp(max=y)\n"
                  "x.clamp(y, y + 1)\ntorch.clamp(x, -1.5, 1)", ("f4:2,3", "f4:3"), ("i8:2,3", "i8:3"), ("f4!s:2,3", "f4:2,3"))
    cases += each("torch.lerp(x, y, 0.3)\ntorch.lerp(x, y, y)\ntorch.addcmul(x, y, y, value=2)\ntorch.addcdiv(x, y, y + 10)\n"
                  "torch.sub(x, y, alpha=0.5)\nx.round(decimals=1)\nx.round(decimals=-1)", ("f4:2,3", "f4:3"))
    return cases + [("torch.sub(x, y, alpha=0.5)", "i8:2", "i8:2"), ("torch.add(x, y, alpha=2)", "u1:3", "b:3"), ("x + 'a'", "f4:2"),
                    ("x + None", "f4:2"), ("torch.eq(2, 3)", "f4:2"), ("x == None", "f4:2"), ("-x", "b:2"), ("x < 'a'", "f4:2"),
                    ("x ** 0.5", "f4!p:5"), ("x ** 0.5", "f4:5")]


def _reduce():
    shapes = ["f4:2,3", "f4:", "f8:2,0,3", "i8:2,3", "b:2,3", "f4!s:3,4", "f2:3", "f4!T:3,2"]
    whole = "torch.{0}(x)\nx.{0}(0)\nx.{0}(-1, keepdim=True)\nx.{0}(3)"
    cases = [c for f in ("sum", "amax", "amin", "any", "all") for c in each(whole.format(f), *shapes)]
    cases += [c for f in ("mean", "var", "std") for c in each(whole.format(f), *shapes) if c[0][-2] != "3" or "f" in c[1]]
    cases += [c for f in ("prod", "max", "min") for c in each(whole.format(f), *(r for r in shapes
                                                                                 if "s" not in r))]    # NaN: see the tests
    cases += [c for f in ("argmax", "argmin") for c in each(whole.format(f) + f"\nx.{f}(keepdim=True)", "f4:2,3", "f4:", "i8:2,3",
                                                            "f4!s:3,4")]
    cases += each("x.sum((0, 1))\nx.sum(())\nx.sum((0, -1), keepdim=True)\nx.mean((0, 2))\nx.sum((0, 0))\nx.amax((1, 2))\nx.var((0, 1))\n"
                  "x.all(())\nx.sum(True)\nx.sum(1.5)\nx.cumsum(1)\nx.cumsum(-4)\nx.count_nonzero()\nx.count_nonzero(dim=1)\n"
                  "x.std((0, 1), keepdim=True)", "f4:2,3,4", "i8:2,3,4")
    cases += each("torch.sum(x, dtype=torch.float64)\ntorch.prod(x, 0, dtype=torch.int16)\ntorch.mean(x, dtype=torch.float32)\n"
                  "x.cumsum(0, dtype=torch.float32)\ntorch.sum(x, dtype=torch.bool)", "i8:2,3", "b:2,3", "u1:4")
    cases += each("x.norm(1)\nx.norm(3, dim=0)\nx.norm(inf)\nx.norm(-inf, dim=1)\nx.norm(0.5)\nx.norm('fro')\nx.norm(p=2, dim=(0, 1), "
                  "keepdim=True)\n(x * 0).norm()\n(x * 0).norm(1)", "f8!p:2,3")
    cases += each("x.var(correction=0)\nx.var(correction=2)\nx.std(unbiased=False)\nx.var(False)\n"
                  "x.var(1, False, True)\nx.std(0, correction=0)",
                  "f8:2,3")
    return cases + [("x.norm(inf)", "f4:0"), ("x.norm(-1)", "f4:0"), ("x.max()", "f4:0"), ("x.max(0)", "f4:0"), ("x.argmax()", "f4:0"),
                    ("torch.tensor([[2., 2], [1, 3]], requires_grad=True).std(1)", ),
                    ("torch.tensor([0., 2, 0], requires_grad=True).prod()", ),
                    ("torch.tensor([1, nan, 3]).max(0)", ), ("torch.tensor([1, nan, 3]).argmin()", ), ("torch.max(x, y)", "f4:3", "f4:3"),
                    ("torch.tensor([1, 3, 3.]).max(0)", ), ("x.prod()", "f8:0"), ("x.cumsum(0)", "b:")]


def _shape():
    lines = """x.reshape(-1)\nx.reshape(3, -1)\nx.reshape(4, 2)\nx.reshape(-1, -1)\nx.view(6)\nx.T.reshape(6)\nx.T.view(6)\nx.reshape(2, -2)
x.flatten()\nx.flatten(1)\nx.flatten(1, 0)\nx.unsqueeze(0)\nx.unsqueeze(-1)\nx.unsqueeze(4)\nx.transpose(0, 1)\nx.transpose(0, 5)\nx.T\nx.mT
x.t()\nx.permute(1, 0)\nx.permute(0, 0)\nx.permute(0)\nx.movedim(0, 1)\nx.expand(2, 2, 3)\nx.expand(-1, 3)\nx.expand(3, 3)\nx.expand(3)
x.repeat(2, 1)\nx.repeat(2)\nx.repeat(2, 1, 2)\nx.tile(2)\nx.repeat_interleave(2)\nx.repeat_interleave(2, 1)\nx.repeat_interleave(-1)
x.repeat_interleave(torch.tensor([2, 0, 1]), 1)\nx.repeat_interleave(torch.tensor([2, 0]), 1)\nx.tril()\nx.triu(1)\nx.tril(-1)\nx.flip(0)
x.flip(0, 1)\nx.flip(2)\nx.flip(())\nx.roll(1)\nx.roll(1, 0)\nx.roll((1, -2), (0, 1))\nx.roll(1, (0, 1))\nx.roll(1, 2)\nx.diagonal()
x.diagonal(1)\nx.diagonal(-1, 1, 0)\nx.diagonal(0, 0, 0)\nx.diagonal(7)\nx.split(2)\nx.split(2, 1)\nx.split([1, 2], 1)\nx.split([1, 1], 1)
x.split(0)\nx.chunk(2, -1)\nx.chunk(5, 1)\nx.chunk(0)\nx.unbind(1)\nx.unbind(2)\nx.unflatten(1, (3, 1))\nx.unflatten(1, (-1, 2))\nx.T[0]
torch.cat([x, x])\ntorch.cat([x, x], 1)\ntorch.cat([x, x[0]])\ntorch.cat([])\ntorch.cat(x)\ntorch.stack([x, x], 1)\ntorch.stack([x, x[0]])
torch.stack([])\ntorch.stack([x], 5)\ntorch.nn.functional.pad(x, (1, 2))\ntorch.nn.functional.pad(x, (-1, 1, 0, 2), value=3)
torch.nn.functional.pad(x, (-2, -2))\ntorch.nn.functional.pad(x, (1,))\ntorch.meshgrid(x[0], x[1], indexing='xy')
torch.meshgrid(x[0], x[:, 0], indexing='ij')\ntorch.meshgrid(x, x, indexing='ij')\nx.squeeze()\nx.contiguous()\nx.clone()\nx.reshape(2.0, 3)
x.broadcast_to((4, 2, 3))\nx.stride()\nx.T.stride()\nx.T.is_contiguous()\nx.T.contiguous().stride()\nx.size(5)
x.size(-1)\nx.view(6)[2:].view(2, 2)
x.unsqueeze(0).squeeze(1)\nx.unsqueeze(0).squeeze((0, 1))"""
    few = """x.reshape(-1)\nx.view(-1)\nx.flatten()\nx.unsqueeze(0)\nx.T\nx.split(1)\nx.chunk(2)\nx.unbind()\nx.tril()\nx.flip(0)\nx.roll(1)
torch.cat([x, x])\ntorch.stack([x, x])\nx.repeat(2)\nx.repeat_interleave(2, 0)\nx.squeeze()\nx.transpose(0, 1)
x.expand(2, 0)\nx.roll(1, 0)"""
    cases = each(lines, "f4:2,3") + each(few, "f4:", "i8:0", "f8:0,3", "b:1")
    return cases + [("torch.cat([x, y])", "f4:2", "f8:3"), ("torch.cat([x, y])", "i4:2", "f2:2"), ("torch.cat([x, y])", "i8:0", "f4:2,3"),
                    ("x.squeeze((0, 2))", "f4:1,2,1"), ("x.diagonal(0, -2, -1)", "f4:2,3,3"), ("x.flatten(0, 1)", "f4:2,0,3"),
                    ("x.unflatten(1, (2, -1))", "f4:2,0,3"), ("x.movedim((0, 1), (-1, 0))", "f4:2,3,4"), ("x.mT", "f4:2"),
                    ("x.permute(2, 0, 1).reshape(4, 6)", "f4:2,3,4"), ("x.transpose(0, 1).unflatten(0, (3, 1))", "f4:2,3")]


INDICES = """0\n-1\n2\n-3\nNone\n...\nTrue\n()\n1:\n::2\n-1:\n5:\n::-1\n1.5\n'a'[0]\n0, 1\n..., 0\n:, 1\n:, ::2
1:, 1:\n:, None\n0, 0, 0\n[0, 1]
[1, 1, 0]\n[-1]\n[7]\n[]\n[[0, 1], [1, 0]]\n[True, False]\ntorch.tensor(1)\ntorch.tensor([0, 1, 1])
torch.tensor([[0], [1]])\nx > 0\nx[0] > 0
torch.tensor([0.5])\ntorch.tensor([1, 0], dtype=torch.uint8)\n:, torch.tensor([2, 0])\ntorch.tensor([0, 1]), torch.tensor([2, 2])
torch.tensor([[0], [1]]), torch.tensor([0, 2])\n0, torch.tensor([0, 2, 2])\n[0, 1], 1:\ntorch.tensor([0, 1]), torch.tensor([0, 1, 2])
None, torch.tensor([1, 1])\n:, x[0] > 0\ntorch.tensor([True, False]), 0\nnp.array([1, 0])\nnp.int64(1)\n1:torch.tensor(2)""".split("\n")


def _index():
    cases = [(f"x[{i}]", "f4:2,3") for i in INDICES]
    cases += [(f"x[{i}]", "f4:2,3,4") for i in ("0, :, [0, 1]", "[0, 1], :, [2, 0]", ":, 0, [0, 1]", "0, [1, 1]", "[[0], [1]], 0", "..., 1",
                                                "None, 0, :, [3, 3]", "x > 0", "(x > 0)[:, :, 0]", "torch.tensor(0), :, [0, 1]")]
    cases += [(f"a = x * 1; a[{i}] = 5; r = a * a", "f4:2,3") for i in INDICES if "dtype=torch.uint8" not in i]
    cases += [(f"a = x * 1; a[{i}] = y; r = a * a", "f4:2,3", "f4:") for i in INDICES if "uint8" not in i]
    cases += [(f"a = x * 1; a[{i}] = y; r = a * a", "f4:2,3,4", s) for i, s in
              [("0, :, [0, 1]", "f4:3,2"), ("[0, 1], :, [2, 0]", "f4:2,3"), ("0", "f4:1,3,4"), ("x > 100", "f4:1,1"), ("1:", "f4:4"),
               (":, 0::2", "f4:2,2,1"), (":, ::2", "f4:3"), ("0, 0", "f4:1,1,1")]]
    cases += [(f"a = x * 1; a[{i}] += 2; r = a * a", "f4:2,3") for i in ("0", ":, 1:", "x > 0", "[0, 1]", "0, 1", "None", "...")]
    cases += each("a = torch.zeros(2, 4); a[:, 0::2] = x; a[:, 1::2] = x * y; r = a * a\n"
                  "a = torch.zeros(2, 2); a[0] += x[0]; a[1] += y[0]; a[0] *= 2; r = a * a\n"
                  "a = torch.zeros(2, 2); a[0] = x[0]; a[1] = a[0] * 2; r = a", ("f4:2,2", "f4:2,2"))
    chosen = """torch.where(z, x, y)\ntorch.where(z, x, 1.0)\ntorch.where(z, 2, y)\nx.where(z, y)\ntorch.where(z)
x.masked_fill(z, 7)\nx.masked_fill(z, y)\nx.masked_select(z)\ntorch.where(x > 0, x, y)"""
    cases += each(chosen, ("f4:2,3", "f4:2,3", "b:2,3"), ("f4:2,3", "f8:2,3", "b:3"), ("i8:2,3", "f4:2,3", "b:2,1"), ("f4!s:2,3",
                                                                                                                      "f4:2,3", "b:2,3"))
    cases += each("x.masked_fill(z, y.sum())\nx.masked_fill(z, -inf)", ("f4:2,3", "f8:2,3", "b:3"))
    cases += [("torch.where(z, 1, 0)", "f4:1", "f4:1", "b:3"), ("torch.where(z, 1.5, 0)", "f4:1", "f4:1", "b:3"), ("torch.where(z, x, y)",
              "f4:2", "f4:3", "b:2"), ("x.masked_fill(y, 0)", "f4:2", "f4:2"), ("x.masked_select(x)", "i8:2"),
              ("x.masked_fill(z, 1e5)", "i2:2",
              "f4:1", "b:2"), ("x.masked_fill(z, 300)", "u1:2", "f4:1", "b:2")]
    for ids in ("[[0, 1], [1, 0]]", "[[1]]", "[[5]]", "[[-1]]", "[0]", "[[0., 1]]"):
        cases += each(f"x.gather(0, torch.tensor({ids}))\nx.gather(1, torch.tensor({ids}))", "f4:3,3")
        cases += each(f"x.scatter(0, torch.tensor({ids}), 2.5)\nx.scatter_add(1, torch.tensor({ids}), y.detach())", ("f4:3,3", "f4:3,3"))
    cases += each("x.index_select(0, torch.tensor([1, 1]))\nx.index_select(1, torch.tensor([[0]]))\nx.index_select(0, torch.tensor([4]))\n"
                  "x.index_select(-1, torch.tensor(0))\nx.index_add(0, torch.tensor([1, 1, 0]), y)\nx.index_add(1, torch.tensor([0]), y)\n"
                  "x.index_add(0, torch.tensor([1, 1, 0]), y, alpha=2)\nx.scatter(0, torch.tensor([[0]]), y.double())\n"
                  "torch.take_along_dim(x, torch.tensor([[0], [2], [1]]), 1)\nx.scatter_add(0, torch.tensor([[0]]), 1)", ("f4:3,3",
                                                                                                                          "f4:3,3"))
    cases += each("x.sort()\nx.sort(dim=0, descending=True, stable=True)\nx.argsort(stable=True)\nx.topk(2)[0]\n"
                  "x.topk(2, 0, largest=False)[0]\n"
                  "x.topk(9)\nx.topk(0)\nx.sort(5)\nx.nonzero()\nx.long().unique()", "f4:3,4", "i8:3,4")
    return cases + [("torch.tensor([3, 1, 3, nan, 1.]).sort(stable=True)", ),
                    ("torch.tensor([3, 1, nan, 3, 1.]).sort(descending=True, stable=True)", ),
                    ("torch.tensor([1, nan, 3.]).topk(2)", ), ("x.nonzero()", "b:"), ("torch.nonzero(x, as_tuple=True)", "b:2,3"),
                    ("x.bincount()", "u1:5"),
                    ("x.bincount()", "i8:5"), ("x.bincount()", "u1:2,2"), ("torch.unique(x, return_counts=True)", "u1:8"),
                    ("x.sort()", "f4:"),
                    ("torch.searchsorted(torch.tensor([1, 3, 5]), x)", "i8:4"), ("torch.isin(x, torch.tensor([1, 2]))", "i8:2,3"),
                    ("x.topk(1)", "f4:")]


def _linear():
    shapes = ["f8:3", "f8:3,3", "f8:2,3", "f8:3,2", "f8:2,3,4", "f8:4,3,2", "f8:2,1,3,3", "f8:", "f8:0,3", "f8:3,0", "f8:2,2,3"]
    cases = [("x @ y", a, b) for a in shapes for b in shapes]
    cases += each("torch.mm(x, y)\ntorch.bmm(x, y)\ntorch.mv(x, y)\ntorch.dot(x, y)\ntorch.outer(x, y)", ("f4:2,3", "f4:3,2"),
                  ("f4:2,2,3", "f4:2,3,1"), ("f4:2,2,3", "f4:1,3,1"), ("f4:2,3", "f4:3"), ("f4:3", "f4:3"), ("f4:3", "f4:2"))
    cases += each("torch.nn.functional.linear(x, y)\ntorch.nn.functional.linear(x, y, z)", ("f4:2,3", "f4:4,3", "f4:4"), ("f4:3",
                                                                                                                          "f4:2,3", "f4:2"),
                  ("f4:2,2,3", "f4:4,3", "f4:3"), ("f4:0,3", "f4:2,3", "f4:2"), ("f4:2,4", "f4:2,3", "f4:2"), ("f4:2,0", "f4:2,0", "f4:2"),
                  ("f4:2,3", "f8:4,3", "f4:4"), ("f4!s:2,3", "f4:4,3", "f4:4"))
    products = ["ij,jk->ik", "ij,jk", "ij,kj->ik", "ij,jk->j", "ij,jk->", "ij,jk->iik", "ij,jk->iz", "ij", "ij,j,k", "1j,jk"]
    cases += [(f"torch.einsum('{e}', x, y)", "f8:2,3", "f8:3,2") for e in products]
    cases += [(f"torch.einsum('{e}', x, y)", "f8:2,3,4", "f8:2,4,3") for e in ("bij,bjk->bik", "...ij,...jk->...ik", "bij,bji->",
                                                                               "bij,bjk->bk")]
    cases += [(f"torch.einsum('{e}', x)", "f8:2,3") for e in ("ij->ji", "ji", "ij->", "ij->i", "i j -> j i", "...->...", "i...->...i")]
    return cases + [("torch.einsum('ij,jk,kl->il', x, y, z)", "f8:2,3", "f8:3,2", "f8:2,2"), ("torch.einsum('i,j->ij', [x, y])",
                                                                                              "f8:2", "f8:3"),
                    ("torch.einsum('ij,jk', x, y)", "f4:2,3", "f8:3,2"), ("x @ y", "i8:2,3", "i8:3,2"), ("x @ y", "f2:2,3",
                                                                                                         "f2:3,2"), ("x @ y", "f4:2,3",
                    "f8:3,2"), ("x @ y", "i8:3", "f4:3"), ("x @ 2", "f4:3"), ("2 @ x", "f4:3"), ("x @ y.T", "f4!T:2,3", "f4:2,3"),
                    ("x @ y", "f4!s:2,3", "f4:3")]


def _creation():
    made = """[1, 2]\n[1.0, 2]\n[True, 2]\n[True, False]\n[]\n[[], []]\n5\n5.5\n[[1, 2], [3]]\n2**40\n2**63\n[2**64]
-2**63\n1e40\nnp.float64(2)
np.float32(2)\n[np.float64(2)]\n[1.0, np.float64(2)]\n[np.float32(2), 2.5]\nnp.arange(3)\nnp.ones((2, 2))[:, ::2]
(1, (2, 3))[1]\nNone\n{1}\n[1, None]
300, dtype=torch.uint8\n-1, dtype=torch.uint8\n2.7, dtype=torch.int64\n[-2.7, 2.7], dtype=torch.int32
nan, dtype=torch.int64\n1e10, dtype=torch.int32
70000.0, dtype=torch.float16\n[1, 0, 3], dtype=torch.bool\n[1.5], dtype=float\n[1], dtype=int\n[1, 2], requires_grad=True\nrange(3)
[torch.tensor(1.5), 2]\nnp.array(['a'])\n[torch.tensor(1), torch.tensor(2)]""".split("\n")
    cases = [(f"torch.tensor({m})", ) for m in made]
    cases += [(f"torch.{e}", )
              for e in """zeros(2, 3)\nzeros((2, 3))\nzeros(())\nzeros(-1)\nzeros(2.5)\nzeros(size=(2,))\nones(2, dtype=torch.bool)
full((2,), 3)\nfull((2,), 3.0)\nfull((2,), True)\nfull((2,), 2.7, dtype=torch.int64)\nfull(2, 2)
full((2,), 300, dtype=torch.uint8)\narange(5)
full((2,), inf, dtype=torch.int64)\narange(2, 10, 3)\narange(5, 0, -2)\narange(5.0)\narange(0, 1, 0.1)
arange(0, 1, 0.3, dtype=torch.float64)
arange(5, 2)\narange(2, 5, 0)\narange(0)\narange(end=3)\narange(2.5, dtype=torch.int64)\narange(nan)\narange(0, inf)
arange(5, dtype=torch.int8)
linspace(0, 1, 5)\nlinspace(3, -2, 7)\nlinspace(0, 1, 1)\nlinspace(0, 1, 0)\nlinspace(0, 1, -1)
linspace(0, 10, 5, dtype=torch.int64)\neye(2, 3)
linspace(0, 1, 4, dtype=torch.float64)\neye(0)\neye(-1)\neye(2, dtype=torch.int64)\nfrom_numpy(np.ones(2, np.float32))\nfrom_numpy([1])
as_tensor([1, 2])\nas_tensor(np.ones(2))\nfinfo(torch.float32).max\nfinfo(torch.float16).eps\nfinfo(torch.int8)\niinfo(torch.int8).min
iinfo(torch.float32)\nfinfo().bits\nis_tensor(3)\nSize([2, 3])\nSize([2, 3]).numel()\nSize([2, 3])[1:]\nSize([2]) + (3,)\nSize([2]) * 2
Size([])\nSize([2, 3]) == (2, 3)\nget_default_dtype()\nset_default_dtype(torch.int64)\nfloat32.itemsize\ndevice('cuda:1').index\ndevice('x')
device('cuda', 1)\ndevice('cuda:x')\ndevice(None)\ncan_cast(torch.float64, torch.int32)
can_cast(torch.bool, torch.int8)\ndevice('cpu')""".split("\n")]
    cases += each("torch.zeros_like(x)\ntorch.ones_like(x, dtype=torch.int32)\ntorch.full_like(x, 2.5)\n"
                  "torch.zeros_like([1])\ntorch.isclose(x, x + 1e-9)\n"
                  "torch.allclose(x, x)\ntorch.allclose(x, x + 1)\ntorch.allclose(x, x.double())\n"
                  "torch.allclose(x, x[:1])\ntorch.isclose(x, 1)\n"
                  "torch.equal(x, x[:1])\ntorch.allclose(x, x, -1)\ntorch.result_type(x, 1)\ntorch.result_type(x, 2.5)", "f4:3", "i8:3")
    return cases + [("torch.isclose(torch.tensor([inf, -inf, nan]), torch.tensor([inf, inf, nan]))", ),
                    ("torch.isclose(torch.tensor([nan]), torch.tensor([nan]), equal_nan=True)", ),
                    ("torch.isclose(torch.tensor([100.]), torch.tensor([110.]), rtol=0.1)", ),
                    ("torch.allclose(torch.tensor([1]), torch.tensor([1]))", )]


def _tensor():
    lines = """a = x.clone(); a.{0}_({1}); r = a * a\na = x * 2; b = a; a.{0}_({1}); r = b"""
    cases = [c for m, arg in [("add", "y"), ("sub", "2"), ("mul", "y[0]"), ("div", "y + 10"), ("pow", "2"), ("fill", "y.sum()"),
                              ("copy", "y[0]"),
                              ("clamp", "-1, 1"), ("masked_fill", "x > 0, 1"), ("addcmul", "y, y"), ("lerp", "y, 0.5"), ("neg", ""),
                              ("zero", ""),
                              ("abs", ""), ("exp", ""), ("floor", ""), ("tril", ""), ("relu", ""), ("fill", "y"), ("add",
                                                                                                                   "torch.ones(5, 2, 3)"),
                              ("copy", "torch.ones(5)"), ("sigmoid", ""), ("add", "y, alpha=2"), ("index_add",
                                                                                                  "0, torch.tensor([1, 0]), y")]
             for c in each(lines.format(m, arg), ("f4:2,3", "f4:2,3"))]
    cases += [(f"a = x.clone(); b = a; a {o}= {v}; r = b", d, d) for o in ("+", "-", "*", "/", "//", "**", "%", "&", "|", "^")
              for v in ("2", "y.detach()", "2.5") for d in ("i8!p:3", "b:3", "f4!p:3") if not (o == "//" and d[0] == "f"
                                                                                               or o == "**" and "y" in v)]
    cases += each("""x.add_(1)\nx[0] = 1\nx[0].add_(1)\na = x * 1; b = a * a; a.add_(1); r = b\na = x * 1; b = a.exp(); b.mul_(2); r = b
a = x * 1; b = a + 1; a.add_(1); r = b\na = x.detach(); a.add_(1); r = x * x\na = x * 1; p, q = a.unbind(0); p.add_(1); r = a
a = x * x; b = x.detach(); b.add_(1); r = a\na = torch.zeros(2, 3); a[0] = x[0]; a[1] = x[1] * 2; r = a * a
a = torch.zeros(2, 3); a.add_(x); a.add_(x); r = a * a\na = x * 1; a[0].expand(2, 3).add_(1); r = a
a = x.clone(); a[:] = a.T.reshape(2, 3); r = a
a = x.clone(); a[1:] = a[:1]; r = a\na = x.clone(); a[:, 0] = a[:, 1] * 2; r = a * a\nx.item()\nx.tolist()\nbool(x)
int(x)\nlen(x)\nx.numpy()
x.detach().numpy().shape\nx.requires_grad\nx.is_leaf\n(x * 2).is_leaf\nx.dtype\nx.device\nx.ndim\nx.nbytes\nx.numel()
x.type()\nx.double()\nx.half()
x.to(torch.int32)\nx.to('cpu', torch.float64)\nx.to('nowhere')\nx.to(dtype='x')
x.type_as(torch.zeros(1, dtype=torch.float64))\nx.new_zeros(2)
x.new_full((2,), 2.5)\nx.new_tensor([1.5])\nx.detach()\nx.data\nx.backward()\nx.T.data_ptr() == x.data_ptr()\nx.foo\nx()\nlist(x)\nx in [x]
x.sum().item()\nx.element_size()\nx.is_floating_point()\nhash(x) == hash(x)\nx.long().requires_grad_()\nx.view_as(x)
x.equal(x)\nx.retain_grad()
x.detach().retain_grad()\nx.sum().backward(torch.ones(2))\nx.sum().requires_grad_(False)\nx.grad\nx.size()\nx.shape[1]
[9, 8, 7][x.long()[0, 0] * 0]
f'{x.sum():.3f}'\nf'{x.detach()[0, 0]}'\nf'{x:.3f}'\nmax(x[0])\nsum(x[0])""", "f4:2,3")
    return cases + [(e, r) for e in ("x.item()", "bool(x)", "int(x)", "float(x)", "len(x)", "list(x)", "not x", "x.__index__()",
                                     "list(range(x))", "x.tolist()")
                    for r in ("i8:", "f4:", "b:1", "f4:0")]


def _display():
    lists = [[1., 2, 3], [0.1, 0.22, 0.333], [1e-5, 1], [1000., 1.5], [1001., 1.5], [1e8, 1], [1e9], [-1.5, 22.25], [math.inf, 1],
             [math.inf, 1.5, -math.nan],
             [math.nan], [0., -0.], [0., 1e-5], [123456.789], [1e-45], [65504.], [10, 20000.], [-3., -4.], [12345, 0.1]]
    cases = [(f"repr(torch.tensor({v}, dtype=torch.{d}))", ) for v in lists for d in ("float32", "float64")]
    cases += [(f"repr(torch.tensor({v[0]}))", ) for v in lists]
    cases += [("repr(x)", f"{d}:{s}") for d in DTYPES for s in ("", "0", "2,3", "2,2,2")]
    cases += [("repr(x)", "f4!s:3,4"), ("repr(x.detach())", "f8!s:2,2,3"), ("repr(x)", "f4:0,3"), ("repr(x)", "i8:2,0")]
    cases += [(f"repr({e})", ) for e in ("torch.arange(30)", "torch.arange(1001)", "torch.arange(1000.0)[:40]",
                                         "torch.arange(1200).reshape(2, 600)",
                                         "torch.arange(1200.0).reshape(20, 3, 20)", "torch.ones(40) * -0.5",
                                         "torch.ones(2, 15, dtype=torch.float64)",
                                         "torch.arange(1100).reshape(1100, 1) * 3 - 7", "torch.ones(10, requires_grad=True)",
                                         "torch.zeros(7, 200)[:, :9]",
                                         "torch.ones(13, dtype=torch.float64, requires_grad=True)", "torch.ones(1, 1, 1, 2) * 1e6",
                                         "torch.zeros(2, 0, 3)",
                                         "torch.tensor([True] * 25)", "torch.arange(25, dtype=torch.int8)",
                                         "torch.ones(3, requires_grad=True) * 2")]
    return cases + [(f"str(torch.ones({n}, dtype=torch.float64, requires_grad=True) * 1.5)", ) for n in range(1, 14)]


GROUPS = {"arithmetic": _arithmetic, "reduce": _reduce, "shape": _shape, "index": _index, "linear": _linear, "creation": _creation,
          "tensor": _tensor, "display": _display}


def name(case):
    return " | ".join(case)


def cases(group):
    """{name: case}, each once."""
    return {name(c): c for c in GROUPS[group]()}


PROMOTION_OPERANDS = {"dim": "torch.ones(2, dtype=torch.{})", "0-d": "torch.ones((), dtype=torch.{})"}


def promotions():
    """{name: expression} whose result has the dtype that PyTorch gives the sum of two operands of each kind."""
    kinds = {f"{d} {k}": text.format(d) for k, text in PROMOTION_OPERANDS.items() for d in DTYPES.values()}
    numbers = {"bool": "True", "int": "3", "float": "2.5"}
    table = {f"{a} + {b}": f"torch.result_type({p}, {q})" for a, p in kinds.items() for b, q in kinds.items()}
    table |= {f"{a} + {b}": f"torch.result_type({p}, {q})" for a, p in kinds.items() for b, q in numbers.items()}
    return table
