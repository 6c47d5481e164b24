"""A row, or a few, times a matrix in whole numbers, whose weights are never made: what a token needs of a `QuantizedLinear`.

    y = Σ_g s_g (P_g − z_g X_g),    P_g = Σ x_i q_i,  X_g = Σ x_i  over the numbers i of part g

So a scale multiplies a sum, not each weight, and codes become floats a block at a time, in one buffer that stays in cache. Nor are codes
of 4 bits put in order: of all bytes, the lower halves are a matrix that meets x_0, x_2 …, and the upper halves, 16 times as large as
they stand there, one that meets x_1 / 16, x_3 / 16 …
"""
import math

import numpy as np

from ..autograd import array_of, constant, no_grad
from .packing import unpack

BLOCK = 3 * 2 ** 16             # of codes that are floats at a time: 0.75 MiB, within a core's own cache


class RowProduct:
    """x ↦ (x / t) Ŵᵀ + b of a `QuantizedLinear` on the CPU, with the arrays that it has now.    x: [..., in]  y: [..., out]"""

    def __init__(self, layer):
        self.layer = layer
        self.packed, self.t, self.bias = map(array_of, (layer.packed, layer.input_scale, layer.bias))
        self.factors, self.writes, scheme, C = (layer.scale, layer.zero_point), None, layer.scheme, layer.in_features
        self.scheme, self.out, n = scheme, layer.out_features, scheme.group_size or C          # n numbers of a row share a scale
        self.per = 8 // scheme.bits if 8 % scheme.bits == 0 and n % (8 // scheme.bits) == 0 else 1      # codes of a byte, if all are whole
        self.shape, self.step = (C // max(n, 1), n), max(1, BLOCK * self.per // max(C, 1))

    def __call__(self, x):
        rows = (x if self.t is None else x / self.t).reshape(math.prod(x.shape[:-1]), *self.shape).swapaxes(0, 1)       # [G, B, n]
        (G, B, n), per = rows.shape, self.per
        turns = [np.multiply(rows[:, :, i::per], rows.dtype.type(2.0 ** (-self.scheme.bits * i)), order="C") for i in range(per)]
        (scale, zero), total = self._factors(rows.dtype), None
        if zero is not None:
            total = rows.sum(axis=2, keepdims=True)
        y, room = np.empty((B, self.out), rows.dtype), np.empty(self.step * G * n // per, rows.dtype)
        for start in range(0, self.out, self.step):
            part = slice(start, start + self.step)
            sums = self._sums(turns, self.packed[part], room)
            if zero is not None:
                sums -= zero[..., part] * total
            sums *= scale[..., part]
            np.add.reduce(sums, axis=0, out=y[:, part])
        if self.bias is not None:
            y += self.bias
        if not np.isfinite(y).all():            # of huge numbers, whose sums overflow before the scale makes them small
            return self._by_the_layer(x)
        return y.reshape(*x.shape[:-1], self.out)

    def _by_the_layer(self, x):
        with no_grad():
            return self.layer(constant(x)).array

    def _sums(self, turns, packed, room):
        """P [G, B, R] of R rows of codes."""
        (G, _, n), bits = turns[0].shape, self.scheme.bits
        weights = room[:len(packed) * G * n].reshape(len(packed), G * n)
        columns, sums = weights.reshape(len(packed), G, n).transpose(1, 2, 0), None
        for i, x in enumerate(turns):
            weights[...] = (unpack(packed, bits, G * n, self.scheme.symmetric) if self.per == 1 else
                            packed & np.uint8((2 ** bits - 1) << bits * i))
            sums = x @ columns if sums is None else np.add(sums, x @ columns, out=sums)
        return sums

    def _factors(self, dtype):
        """s and z as [G or 1, 1, out]; made anew where the buffers were written to, as by load_state_dict. z: None where it is 0."""
        writes = dtype, *(None if part is None else part.version.written for part in self.factors)
        if writes != self.writes:
            scale, zero = map(array_of, self.factors)
            if zero is None and self.per > 1:
                zero = np.array(2 ** (self.scheme.bits - 1))                # in a byte, codes begin at 0
            self.made, self.writes = tuple(None if part is None else self._beside(part.astype(dtype)) for part in (scale, zero)), writes
        return self.made

    def _beside(self, numbers):
        parts = numbers.shape[1] if numbers.ndim == 2 else 1
        return np.ascontiguousarray(np.broadcast_to(numbers.T, (parts, self.out)))[:, None]
