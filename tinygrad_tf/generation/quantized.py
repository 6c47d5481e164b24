"""A cache of whole numbers: 8 or 4 bits for each key and value (KIVI, arXiv 2402.02750, with one scale a group of features)."""
import numpy as np

from ..backend import array_module
from ..quantization.packing import pack, unpack
from .cache import KVCache, check_size


class GroupCodec:
    """x ≈ s · n,  s = max|x| / n_max over a group of features of one token and head,  n = round(x / s).    |x − s n| ≤ s / 2

    n_max = 127 (8 bits) or 7 (4 bits, two in a byte). x: [B, Hkv, T, Dh] → n [B, Hkv, T, Dh · bits / 8], s [B, Hkv, T, Dh / group],
    float32. A group of zeros stays zeros; one with NaN or infinity becomes NaN.
    """

    def __init__(self, bits, group):
        self.bits, self.group, self.largest = bits, group, 2 ** (bits - 1) - 1

    def encode(self, x):
        xp, Dh = array_module(x), x.shape[-1]
        group = Dh if self.group is None else self.group
        if Dh % group or (self.bits == 4 and Dh % 2):
            pairs = ", and pairs" if self.bits == 4 else ""
            raise ValueError(f"QuantizedKVCache: heads of {Dh} features do not divide into groups of {group}{pairs}")
        parts = x.astype(np.float32).reshape(*x.shape[:-1], Dh // group, group)
        scale = xp.abs(parts).max(axis=-1) / self.largest
        usable = xp.isfinite(scale) & (scale > 0)
        codes = xp.rint(xp.where(usable[..., None], parts, 0) / xp.where(usable, scale, 1)[..., None]).astype(np.int8).reshape(x.shape)
        return pack(codes, self.bits), scale

    def decode(self, codes, scale, dtype):
        codes = unpack(codes, self.bits, codes.shape[-1] * 8 // self.bits, signed=True)
        parts = codes.reshape(*scale.shape, codes.shape[-1] // scale.shape[-1])
        with np.errstate(invalid="ignore"):                 # 0 · ∞ = NaN, as promised
            return (parts * scale[..., None]).reshape(codes.shape).astype(dtype, copy=False)

    def __eq__(self, other):
        return isinstance(other, GroupCodec) and (self.bits, self.group) == (other.bits, other.group)

    def __hash__(self):
        return hash((self.bits, self.group))


class QuantizedKVCache(KVCache):
    """A `KVCache` that keeps whole numbers and their scales: a token's bytes shrink from 4 Dh to Dh · bits / 8 + 4 Dh / group, twice.

    bits: 8 or 4. group: features that share a scale, a divisor of Dh; None: a head's all. Every key is rounded once, when it
    is written, and read back rounded, also by the pass that brought it: reading in parts and at once give the same.
    """

    def __init__(self, num_layers, capacity, bits=8, group=None, rows=None):
        check_size("QuantizedKVCache", "bits", bits)
        if bits not in (4, 8):
            raise ValueError(f"QuantizedKVCache: bits must be 4 or 8, got {bits!r}")
        super().__init__(num_layers, capacity, rows, **({} if group is None else {"group": group}))
        self.codec = GroupCodec(bits, group)
