"""Weights that are stored in a few bits: how they are rounded, kept as bytes, and multiplied by (guide 11.3)."""
from typing import Any, NamedTuple

import numpy as np

from ..arguments import described, require_tensors, whole_number
from ..autograd import WIDEST, Function, constant
from ..backend import array_module, as_rows, at_least_float32, sum_rows
from ..creation import ones, zeros
from ..nn.layers import Linear
from ..nn.module import Module, Parameter
from ..ops._rows import require_float
from ..ops.quantize import Scheme, dequantized, limits, quantized, scale_and_zero
from .packing import pack, unpack

INT4 = Scheme(bits=4, granularity="group", group_size=32)
BLOCK = 2 ** 18                 # of weights that are unpacked at a time: 1 MiB as float32


# --- a matrix in whole numbers ------------------------------------------------------------------------------------------

class Codes(NamedTuple):
    """W ≈ s · (q − z) / t.    W, q: [out, in]  s, z: one for each part of W  t: [in], or None, which is 1"""
    q: Any
    scale: Any
    zero_point: Any
    input_scale: Any = None


def fitted(weight, scheme, name="weight"):
    """(s, z) of each part, by its smallest and largest weight. s is rounded to float16 here, before anything is divided by it.

    ValueError, with the name, for NaN, infinity, and weights that are too large.
    """
    xp, (scale, zero_point) = array_module(weight), scale_and_zero(*limits(weight, scheme), scheme, dtype=np.float16)
    if not xp.isfinite(scale).all():
        why = "its largest number is too large for a scale in float16" if xp.isfinite(weight).all() else "it holds NaN or infinity"
        raise ValueError(f"{name}, {tuple(weight.shape)}, cannot be stored in {scheme.bits} bits: {why}; repair it, or leave its layer out")
    return scale, zero_point


def round_to_nearest(weight, scheme, name="weight"):
    """The Codes in which each weight is the nearest level of its part. A part of zeros stays zeros; errors as in `fitted`."""
    scale, zero_point = fitted(weight, scheme, name)
    return Codes(quantized(weight, scale, zero_point, scheme), scale, zero_point)


def restored(codes, scheme, dtype=None):
    """Ŵ = s · (q − z) / t, [out, in]"""
    weight = dequantized(codes.q, codes.scale, codes.zero_point, scheme, dtype)
    return weight if codes.input_scale is None else weight / codes.input_scale.astype(weight.dtype)


# --- multiplying by it ----------------------------------------------------------------------------------------------------

class PackedLinear(Function):
    """y = x Ŵᵀ + b,  Ŵ = s · (q − z).    x: [..., in]  q: [out, bytes of a row]  y: [..., out]        (guide 11.3)

    dx = dy Ŵ,  db = Σ dy; Ŵ is a constant. A few of its rows are unpacked at a time, in backward once more.
    """
    autocast = WIDEST

    def forward(self, x, packed, scale, zero_point, b, scheme):
        if b is not None and b.dtype != x.dtype:
            raise RuntimeError(f"QuantizedLinear: input {x.dtype} and bias {b.dtype} must have one dtype; convert with .to(dtype)")
        xp, rows = array_module(x), at_least_float32(as_rows(require_float("QuantizedLinear", x)))
        self.saved, self.scheme, self.in_features = (packed, scale, zero_point), scheme, x.shape[-1]
        y = xp.empty((rows.shape[0], packed.shape[0]), rows.dtype)
        for part, w in unpacked(self.saved, scheme, self.in_features, rows.dtype):
            y[:, part] = rows @ w.T
        if b is not None:
            y += b
        return y.astype(x.dtype, copy=False).reshape(*x.shape[:-1], packed.shape[0])

    def backward(self, dy):
        xp, rows, dx = array_module(dy), at_least_float32(as_rows(dy)), None
        if self.needs[0]:
            dx = xp.zeros((rows.shape[0], self.in_features), rows.dtype)
            for part, w in unpacked(self.saved, self.scheme, self.in_features, rows.dtype):
                dx += rows[:, part] @ w
            dx = dx.reshape(*dy.shape[:-1], self.in_features)
        return dx, None, None, None, sum_rows(rows) if self.needs[4] else None, None


def unpacked(stored, scheme, in_features, dtype):
    """(slice of rows, Ŵ of these rows) after each other, until all rows were there."""
    packed, scale, zero_point = stored
    zero_point = array_module(packed).zeros(scale.shape, np.uint8) if zero_point is None else zero_point
    step = max(1, BLOCK // max(1, in_features))
    for start in range(0, packed.shape[0], step):
        part = slice(start, start + step)
        q = unpack(packed[part], scheme.bits, in_features, scheme.symmetric)
        s, z = (a[part] if a.ndim else a for a in (scale, zero_point))          # one scale for the whole matrix has no rows
        yield part, dequantized(q, s, z, scheme, dtype)


# --- the layer ------------------------------------------------------------------------------------------------------------

class QuantizedLinear(Module):
    """y = (x / t) Ŵᵀ + b,  Ŵ = s · (q − z).    x: [..., in]  q: `bits` bits a weight  s, t: float16  b: a parameter; all else is fixed

    Buffers: `packed` [out, bytes of a row], uint8, or of 8 symmetric bits int8; `scale`; `zero_point` uint8, None if symmetric;
    `input_scale` t [in], None if it is 1. Without a layer to round, by `from_linear`, the weights are zeros.
    """

    def __init__(self, in_features, out_features, bias=True, scheme=INT4, input_scale=False, device=None, dtype=None):
        super().__init__()
        if not isinstance(scheme, Scheme):
            raise TypeError(f"QuantizedLinear: scheme must be a Scheme, such as Scheme(bits=4), got {described(scheme)}")
        self.in_features = whole_number("QuantizedLinear", "in_features", in_features, least=0)
        self.out_features, self.scheme = whole_number("QuantizedLinear", "out_features", out_features, least=0), scheme
        codes = round_to_nearest(zeros(out_features, in_features, device=device).array, scheme)
        self._store(codes._replace(input_scale=ones(in_features, dtype="float16", device=device).array if input_scale else None))
        self.register_parameter("bias", Parameter(zeros(out_features, device=device, dtype=dtype)) if bias else None)

    @classmethod
    def from_linear(cls, linear, scheme=INT4, codes=None, name="weight"):
        """Of the values of an `nn.Linear`, which stays as it is. codes: its weight, rounded; by default each number to the nearest."""
        if not isinstance(linear, Linear):
            raise TypeError(f"QuantizedLinear.from_linear: an nn.Linear is expected, got {described(linear)}")
        layer = cls(linear.in_features, linear.out_features, False, scheme, device=linear.weight.device)
        layer._store(round_to_nearest(linear.weight.array, scheme, name) if codes is None else codes)
        layer.bias = None if linear.bias is None else Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)
        return layer.train(linear.training)

    def _store(self, codes):
        packed, zero_point = pack(codes.q, self.scheme.bits), None if self.scheme.symmetric else codes.zero_point.astype(np.uint8)
        for name, array in zip(("packed", "scale", "zero_point", "input_scale"), (packed, codes.scale, zero_point, codes.input_scale)):
            self.register_buffer(name, None if array is None else constant(array))

    def forward(self, x):
        require_tensors("QuantizedLinear", input=x)
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise RuntimeError(f"QuantizedLinear: the last axis of the input must be in_features, {self.in_features}, got {tuple(x.shape)}")
        x = x if self.input_scale is None else x / self.input_scale
        return PackedLinear.apply(x, self.packed, self.scale, self.zero_point, self.bias, self.scheme)

    @property
    def weight(self):
        """Ŵ / t [out, in], float32, made anew at each look: a constant, for who has use for the matrix itself."""
        stored = self.packed.array, self.scale.array, None if self.zero_point is None else self.zero_point.array
        xp = array_module(stored[0])
        w = xp.empty((self.out_features, self.in_features), np.float32)
        for part, rows in unpacked(stored, self.scheme, self.in_features, w.dtype):
            w[part] = rows
        return constant(w if self.input_scale is None else w / self.input_scale.array.astype(w.dtype))

    def dequantize(self):
        """An `nn.Linear` with these weights: the reverse of `from_linear`, but for what rounding took."""
        linear = Linear(0, 0, bias=False)
        linear.in_features, linear.out_features, linear.weight = self.in_features, self.out_features, Parameter(self.weight)
        linear.bias = None if self.bias is None else Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return linear.train(self.training)

    @property
    def weight_nbytes(self):
        """Bytes of all that stands for the matrix: `packed`, `scale`, `zero_point`, `input_scale`."""
        return sum(buffer.array.nbytes for buffer in self.buffers())

    def extra_repr(self):
        sharing = f"group={self.scheme.group_size}" if self.scheme.granularity == "group" else f"a scale for each {self.scheme.granularity}"
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"bits={self.scheme.bits}, {sharing}{'' if self.scheme.symmetric else ', asymmetric'}"
                f"{'' if self.input_scale is None else ', input_scale=True'}")
