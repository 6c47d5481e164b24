"""Matrix products: matmul of any rank, and the linear layer."""
import numpy as np

from ..autograd import LOW, WIDEST, Function, under_autocast
from ..backend import array_module, as_rows, sum_rows
from ..dtypes import is_float


def _shape_error(op, a, b, why):
    return RuntimeError(f"{op}: shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied: {why}")


class Matmul(Function):
    """y = a b.    a: [..., n, k]  b: [..., k, m]  y: [..., n, m];  leading axes broadcast

    da = dy bᵀ,  db = aᵀ dy; the engine sums over the axes that were broadcast.
    """
    autocast = LOW

    def forward(self, a, b):
        if a.dtype != b.dtype:
            raise RuntimeError(f"matmul: both operands must have one dtype, got {a.dtype} and {b.dtype}; convert one with .to(dtype)")
        if a.shape[-1] != b.shape[-2]:
            raise _shape_error("matmul", a, b, f"the last axis of the first ({a.shape[-1]}) must equal the second-last of the "
                                               f"second ({b.shape[-2]}); is a transpose missing?")
        self.saved = (a if self.needs[1] else None), (b if self.needs[0] else None)
        self.one_matrix = b.ndim == 2 and a.ndim > 2
        try:
            return product(a, b)
        except ValueError:
            raise _shape_error("matmul", a, b, "the leading (batch) axes do not broadcast") from None

    def backward(self, dy):
        a, b = self.saved
        da = product(dy, b.swapaxes(-1, -2)) if self.needs[0] else None
        if not self.needs[1]:
            return da, None
        if self.one_matrix:                     # one flat GEMM instead of a batch of them and a sum
            return da, product(as_rows(a).T, as_rows(dy))
        return da, product(a.swapaxes(-1, -2), dy)


class Linear(Function):
    """y = x Wᵀ + b.    x: [..., in]  W: [out, in]  b: [out] or None  y: [..., out]         (guide 3)

    dx = dy W,  dW = dyᵀ x,  db = Σ dy, with all leading axes flattened into one: a single GEMM each.
    """
    autocast = LOW

    def forward(self, x, w, b):
        if w.dtype != x.dtype or b is not None and b.dtype != x.dtype:
            raise RuntimeError(f"linear: input {x.dtype}, weight {w.dtype}"
                               f"{'' if b is None else f' and bias {b.dtype}'} must have one dtype; convert with .to(dtype)")
        rows = as_rows(x)
        self.saved = (rows if self.needs[1] else None), (w if self.needs[0] else None)
        y = wide(rows) @ wide(w).T
        if b is not None:
            y += b
        return y.astype(x.dtype, copy=False).reshape(*x.shape[:-1], w.shape[0])

    def backward(self, dy):
        x, w = self.saved
        rows = as_rows(dy)
        dx = product(rows, w).reshape(*dy.shape[:-1], w.shape[1]) if self.needs[0] else None
        dw = product(rows.T, x) if self.needs[1] else None
        db = sum_rows(rows) if self.needs[2] else None
        return dx, dw, db


def wide(x):
    """Half precision in float32, in which it is multiplied and summed; all else as it is."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and is_float(x.dtype) else x


def product(a, b):
    """a @ b; a stack of matrices times one matrix is one flat GEMM. float16 is multiplied in float32: NumPy's own is 290 times slower."""
    a32 = wide(a)
    if a32 is not a:
        return product(a32, wide(b)).astype(a.dtype)
    if b.ndim == 2 and a.ndim > 2:
        return (as_rows(a) @ b).reshape(*a.shape[:-1], b.shape[-1])
    return a @ b


def matmul(input, other):
    """The product of two tensors: vectors are rows or columns, leading axes broadcast."""
    if not (hasattr(input, "array") and hasattr(other, "array")):
        raise TypeError(f"matmul: expected two tensors, got {type(input).__name__} and {type(other).__name__}")
    if input.ndim == 0 or other.ndim == 0:
        raise RuntimeError(f"matmul: both arguments need at least 1 dimension, got shapes {tuple(input.shape)} and {tuple(other.shape)}; "
                           f"use * for a number")
    row, column = input.ndim == 1, other.ndim == 1
    y = Matmul.apply(input.unsqueeze(0) if row else input, other.unsqueeze(-1) if column else other)
    y = y.squeeze(-1) if column else y
    return y.squeeze(-1 if column else -2) if row else y


def linear(input, weight, bias=None):
    x, w, b = input.array, weight.array, None if bias is None else bias.array
    if w.ndim != 2 or x.ndim == 0 or x.shape[-1] != w.shape[-1]:
        raise RuntimeError(f"linear: input {x.shape} and weight {w.shape} do not fit: weight is [out, in] and the last axis of input "
                           f"must be {w.shape[-1] if w.ndim else '?'}")
    if b is not None and b.shape != w.shape[:1]:
        raise RuntimeError(f"linear: bias {b.shape} must be {w.shape[:1]}, one number for each output of weight {w.shape}")
    return Linear.apply(input, weight, bias)


def mm(input, mat2):
    """Matrix [n, k] times matrix [k, m]; nothing is broadcast."""
    return _of_rank("mm", 2, input, mat2)


def bmm(input, mat2):
    """Matrices [B, n, k] times matrices [B, k, m], one by one."""
    return _of_rank("bmm", 3, input, mat2)


def mv(input, vec):
    """Matrix [n, k] times vector [k]."""
    if input.ndim != 2 or vec.ndim != 1:
        raise RuntimeError(f"mv: expected a matrix and a vector, got shapes {tuple(input.shape)} and {tuple(vec.shape)}")
    return matmul(input, vec)


@under_autocast(WIDEST)
def dot(input, tensor):
    """Σ input · tensor of two vectors."""
    if input.ndim != 1 or tensor.ndim != 1:
        raise RuntimeError(f"dot: expected two 1-D tensors, got shapes {tuple(input.shape)} and {tuple(tensor.shape)}")
    return matmul(input, tensor)


def _of_rank(op, rank, a, b):
    if a.ndim != rank or b.ndim != rank or (rank == 3 and a.shape[0] != b.shape[0]):
        raise RuntimeError(f"{op}: expected two {rank}-D tensors{' with one batch size' if rank == 3 else ''}, got shapes "
                           f"{tuple(a.shape)} and {tuple(b.shape)}; matmul takes any rank")
    return matmul(a, b)


def outer(input, vec2):
    """y[i, j] = input[i] · vec2[j]"""
    if input.ndim != 1 or vec2.ndim != 1:
        raise RuntimeError(f"outer: expected two 1-D tensors, got shapes {tuple(input.shape)} and {tuple(vec2.shape)}")
    return input.unsqueeze(1) * vec2


class Einsum(Function):
    """A sum of products named by letters: "bik,bkj->bij". Each gradient is an einsum of dy with the other operands.

    A letter that occurs in one operand alone and not in the result was summed over: its gradient is repeated along it.
    """
    autocast = LOW

    def forward(self, equation, *xs):
        self.inputs_letters, self.output = equation
        spec = ",".join(self.inputs_letters) + "->" + self.output
        if len({x.dtype for x in xs}) > 1:
            raise RuntimeError(f"einsum {spec!r}: all operands must have one dtype, got {', '.join(str(x.dtype) for x in xs)}; convert "
                               f"one with .to(dtype)")
        dtype, self.saved = xs[0].dtype, tuple(map(wide, xs))
        return array_module(*xs).einsum(spec, *self.saved, optimize=len(xs) > 2).astype(dtype, copy=False)

    def backward(self, dy):
        return None, *(self._gradient(i, dy) if self.needs[i + 1] else None for i in range(len(self.saved)))

    def _gradient(self, i, dy):
        xp, mine = array_module(dy), self.inputs_letters[i]
        dy, others = wide(dy), [(s, x) for j, (s, x) in enumerate(zip(self.inputs_letters, self.saved)) if j != i]
        known = set(self.output).union(*(s for s, _ in others))
        reach = "".join(c for c in mine if c in known)
        spec = ",".join([self.output, *(s for s, _ in others)]) + "->" + reach
        g = xp.einsum(spec, dy, *(x for _, x in others), optimize=len(others) > 1)
        shape = self.saved[i].shape
        return xp.broadcast_to(g.reshape([n if c in known else 1 for c, n in zip(mine, shape)]), shape)


def einsum(equation, *operands):
    """Operands and result by letters, as in PyTorch, `...` included; axes of size 1 broadcast. A letter twice in one operand (a
    diagonal) is not supported.
    """
    if not isinstance(equation, str):
        raise TypeError(f"einsum: the equation comes first, as a str, got {type(equation).__name__}; e.g. einsum('ij,jk->ik', a, b)")
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not all(hasattr(x, "array") for x in operands):
        raise TypeError(f"einsum: expected tensors behind the equation, got {', '.join(type(x).__name__ for x in operands)}")
    inputs, output = _parse_einsum(equation.replace(" ", ""), [x.ndim for x in operands])
    if any(x.array.dtype == bool for x in operands):
        raise RuntimeError(f"einsum {equation!r}: bool is not multiplied and summed; convert with .to(dtype)")
    sizes = {}
    for letters, x in zip(inputs, operands):
        for c, n in zip(letters, x.array.shape):
            if n != 1 and sizes.setdefault(c, n) != n:
                raise RuntimeError(f"einsum {equation!r}: letter {c!r} stands for sizes {sizes[c]} and {n}; "
                                   f"shapes {[tuple(x.shape) for x in operands]}")
    shapes = [tuple(sizes.get(c, 1) for c in letters) for letters in inputs]
    return Einsum.apply((inputs, output), *(x if x.array.shape == s else x.expand(s) for x, s in zip(operands, shapes)))


def _parse_einsum(equation, ranks):
    """([letters of each operand], letters of the result), with `...` spelled out in capitals."""
    left, arrow, output = equation.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ranks):
        raise RuntimeError(f"einsum {equation!r}: names {len(inputs)} operands, got {len(ranks)}")
    extra = max([rank - len(s.replace("...", "")) for s, rank in zip(inputs, ranks) if "..." in s] or [0])
    dots = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation][:max(extra, 0)]
    spelled = []
    for s, rank in zip(inputs, ranks):
        named = len(s.replace("...", ""))
        s = s.replace("...", "".join(dots[len(dots) - (rank - named):]) if rank > named else "")
        if len(s) != rank or len(set(s)) != len(s) or s and not (s.isalpha() and s.isascii()):
            raise RuntimeError(f"einsum {equation!r}: operand {s!r} must name each of {rank} axes once, by letters")
        spelled.append(s)
    if not arrow:                               # by convention: letters that occur once, in alphabetical order
        letters = "".join(spelled)
        output = "".join(dots) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1 and c not in dots))
    output = output.replace("...", "".join(dots))
    if len(set(output)) != len(output) or set(output) - set("".join(spelled)):
        raise RuntimeError(f"einsum {equation!r}: the result {output!r} must name letters of the operands, each once")
    return spelled, output

