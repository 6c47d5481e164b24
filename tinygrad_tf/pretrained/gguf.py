"""GGUF: a whole model in one file, its sizes, its tokenizer, its weights in few bits. (ggml's format, versions 2 and 3)

    bytes     what; numbers are little-endian, a string is its length, uint64, and then UTF-8
    4         GGUF
    4 8 8     version uint32 | number of tensors uint64 | number of entries uint64
    …         entries    key string | type uint32 | value                                   array: type uint32 | count uint64 | values
    …         tensors    name string | number of axes uint32 | their lengths uint64, the innermost first | type uint32 | offset uint64
    0 to 31   zeros, up to a multiple of general.alignment, 32 if it is not said
    …         the numbers of the tensors; offsets count from here

Numbers of few bits stand in blocks along the innermost axis. A block's layout is the dtype in `KINDS`; d is a step, m a smallest value:

    Q8_0   32 numbers, 34 bytes    d d | q₀ q₁ … q₃₁                         x = d q            q int8
    Q4_0   32 numbers, 18 bytes    d d | q₁₆q₀ q₁₇q₁ … q₃₁q₁₅                x = d (q − 8)      two a byte: the low half of byte j is q_j,
    Q4_1   32 numbers, 20 bytes    d d m m | q₁₆q₀ … q₃₁q₁₅                  x = d q + m        the high half q_{j+16}
    Q5_0   32 numbers, 22 bytes    d d | h h h h | q₁₆q₀ … q₃₁q₁₅            x = d (q − 16)     bit j of h is the fifth of q_j
    Q5_1   32 numbers, 24 bytes    d d m m | h h h h | q₁₆q₀ … q₃₁q₁₅        x = d q + m
    Q4_K   256 numbers, 144 bytes  d d m m | 12 of scales | 128 of q         x = d s q − m t    s, t of 6 bits for each 32 numbers
    Q6_K   256 numbers, 210 bytes  128 of q | 64 of q | s₀ … s₁₅ | d d       x = d s (q − 32)   4 + 2 bits; s int8 for each 16 numbers
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from .mapped import Stored, WeightsError, countable, require_disjoint, shown

MAGIC, ALIGNMENT = b"GGUF", 32
MAX_AXES, MAX_TENSORS, MAX_ENTRIES = 4, 1 << 16, 1 << 16
MAX_STRING, MAX_VALUES, MAX_HEADER = 1 << 22, 1 << 21, 1 << 26                  # bytes of one, values in all arrays, bytes of all
MAX_ALIGNMENT = 1 << 16
CHUNK_NUMBERS = 1 << 16                         # that are computed together: they stay in the cache


# --- numbers in blocks --------------------------------------------------------------------------------------------------

def from_bfloat16(x):
    """uint16 -> float32: the missing half is zeros."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def halves(q):
    """uint8 [..., n] -> uint8 [..., 2n]: the low four bits of all bytes, then the high ones"""
    return np.concatenate([q & 15, q >> 4], axis=-1)


def five_bits(block):
    """uint8 [N, 32]: four bits from `q`, the fifth from `h`"""
    return halves(block["q"]) | np.unpackbits(block["h"], axis=1, bitorder="little") << 4


def stepped(q, d, m=None):
    """d q + m    q: integers [N, n] or [N, groups, n]; a step, and a smallest value, for each of its rows -> float32"""
    x = q.astype(np.float32)
    x *= d.astype(np.float32)[..., None]
    if m is not None:
        x += m.astype(np.float32)[..., None]
    return x


def q4_k(block):
    """The 12 bytes are a, b, c, 4 each. a, b: 6 bits of s₀…s₃, t₀…t₃, above them the upper 2 of s₄…s₇, t₄…t₇; c: their lower 4."""
    a, b, c = np.split(block["s"], 3, axis=1)
    s = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    t = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)
    d, m = (block[name].astype(np.float32)[:, None] for name in "dm")
    return stepped(halves(block["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32), d * s, -m * t)


def q6_k(block):
    """Each 128 numbers have 64 bytes of lower bits, two a byte, and 32 bytes of upper bits, four a byte."""
    lower = halves(block["q"].reshape(-1, 2, 64))
    upper = np.concatenate([block["h"].reshape(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    q = (lower | upper << 4).view(np.int8) - np.int8(32)
    return stepped(q.reshape(-1, 16, 16), block["d"].astype(np.float32)[:, None] * block["s"])


@dataclass(frozen=True)
class Kind:
    """One way to store numbers.    numbers: N blocks in their layout -> N times `size` numbers"""

    name: str
    layout: np.dtype
    size: int = 1
    numbers: Callable = lambda x: x
    dtype: np.dtype = np.dtype(np.float32)      # that they become


def whole(name, layout):
    return Kind(name, np.dtype(layout), dtype=np.dtype(layout))


def blocks(name, size, layout, numbers):
    return Kind(name, np.dtype(layout), size, numbers)


D, M, H, Q = ("d", "<f2"), ("m", "<f2"), ("h", "u1", 4), ("q", "u1", 16)
KINDS = {                                       # by their number in the file
    0: whole("F32", "<f4"), 1: Kind("F16", np.dtype("<f2")), 30: Kind("BF16", np.dtype("<u2"), numbers=from_bfloat16),
    28: whole("F64", "<f8"), 24: whole("I8", "i1"), 25: whole("I16", "<i2"), 26: whole("I32", "<i4"), 27: whole("I64", "<i8"),
    2: blocks("Q4_0", 32, [D, Q], lambda b: stepped(halves(b["q"]).view(np.int8) - np.int8(8), b["d"])),
    3: blocks("Q4_1", 32, [D, M, Q], lambda b: stepped(halves(b["q"]), b["d"], b["m"])),
    6: blocks("Q5_0", 32, [D, H, Q], lambda b: stepped(five_bits(b).view(np.int8) - np.int8(16), b["d"])),
    7: blocks("Q5_1", 32, [D, M, H, Q], lambda b: stepped(five_bits(b), b["d"], b["m"])),
    8: blocks("Q8_0", 32, [D, ("q", "i1", 32)], lambda b: stepped(b["q"], b["d"])),
    12: blocks("Q4_K", 256, [D, M, ("s", "u1", 12), ("q", "u1", 128)], q4_k),
    14: blocks("Q6_K", 256, [("q", "u1", 128), ("h", "u1", 64), ("s", "i1", 16), D], q6_k),
}


def read_tensor(file, kind, shape, start):
    """The numbers of a tensor that begins at a byte of a MappedFile -> array of that shape."""
    count = math.prod(shape) // kind.size
    stored, x = file.array(kind.layout, count, start), np.empty((count, kind.size), kind.dtype)
    for i in range(0, count, chunk := max(CHUNK_NUMBERS // kind.size, 1)):
        x[i:i + chunk] = kind.numbers(stored[i:i + chunk]).reshape(-1, kind.size)
    return x.reshape(shape)


# --- the header -----------------------------------------------------------------------------------------------------------

NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}       # of entries
BOOL, STRING, ARRAY = 7, 8, 9


def read_header(file):
    """MappedFile -> (metadata, {name: Stored}). Raises WeightsError."""
    try:
        return Header(file).run()
    except Damaged as error:
        raise WeightsError(f"{file.path} is damaged, or no GGUF that is read here: {error}") from None


class Damaged(Exception):
    """What is wrong, before it is said in which file."""


class Header:
    """What is read from the front: `at` is the next byte. Nothing is believed: each length is held against what is left of the file."""

    def __init__(self, file):
        self.file, self.at, self.end, self.values = file, len(MAGIC), min(file.size, MAX_HEADER), 0

    def run(self):
        """(metadata, {name: Stored})"""
        version = self.number("<u4")
        if version not in (2, 3):
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            raise Damaged("its numbers are big-endian" if big else f"its version is {version}, and 2 and 3 are read")
        num_tensors, num_entries = self.number("<u8"), self.number("<u8")
        self.require(num_entries <= MAX_ENTRIES and num_tensors <= MAX_TENSORS, f"it says that it has {num_entries} entries and "
                     f"{num_tensors} tensors, and at most {MAX_ENTRIES} and {MAX_TENSORS} are read")
        metadata = self.named(num_entries, self.entry, "entry")
        found = self.named(num_tensors, self.tensor, "tensor")
        return metadata, self.placed(found, alignment_of(metadata))

    def require(self, true, said):
        if not true:
            raise Damaged(said)

    def named(self, count, read, what):
        """count times a name and what `read` makes of what follows -> dict"""
        found = {}
        for _ in range(count):
            name = self.string()
            self.require(name not in found, f"the {what} {shown(name)} stands there twice")
            found[name] = read(name)
        return found

    # --- one thing at the next byte -----------------------------------------------------------------------------------------

    def take(self, size):
        """Where the next `size` bytes begin, which are behind us from now on."""
        start, self.at = self.at, self.at + size
        if self.at > self.end:
            raise Damaged(f"its header ends at byte {self.end}, within what it says that it holds")
        return start

    def number(self, dtype):
        return self.numbers(dtype, 1)[0]

    def numbers(self, dtype, count):
        start = self.take(count * np.dtype(dtype).itemsize)
        return self.file.array(dtype, count, start).tolist()

    def string(self):
        start = self.take(8)
        length = int.from_bytes(self.file.bytes(start, 8), "little")
        self.require(length <= MAX_STRING, f"a string of it has {length} bytes, and at most {MAX_STRING} are read")
        try:
            return self.file.bytes(self.take(length), length).decode("utf-8")
        except UnicodeDecodeError:
            raise Damaged(f"the string at byte {start + 8} is no UTF-8") from None

    # --- entries ------------------------------------------------------------------------------------------------------------

    def entry(self, name):
        kind = self.number("<u4")
        if kind != ARRAY:
            return self.array(name, kind, 1)[0]
        kind, count = self.number("<u4"), self.number("<u8")
        self.values += count
        self.require(self.values <= MAX_VALUES, f"its arrays up to {shown(name)} have {self.values} values, and at most {MAX_VALUES} are "
                     f"read")
        return self.array(name, kind, count)

    def array(self, name, kind, count):
        """count values of one type -> list"""
        if kind == STRING:
            return [self.string() for _ in range(count)]
        self.require(kind in NUMBERS or kind == BOOL, f"the entry {shown(name)} has the type {kind}, which there is not")
        values = self.numbers(NUMBERS.get(kind, "<u1"), count)
        if kind == BOOL:
            self.require(not values or max(values) < 2, f"the entry {shown(name)} must be false or true")
            values = list(map(bool, values))
        return values

    # --- tensors ------------------------------------------------------------------------------------------------------------

    def tensor(self, name):
        """(its kind, its shape, the first byte behind the header)"""
        axes = self.number("<u4")
        self.require(axes <= MAX_AXES, f"the tensor {shown(name)} has {axes} axes, and at most {MAX_AXES} are read")
        shape, kind, offset = tuple(self.numbers("<u8", axes)[::-1]), self.number("<u4"), self.number("<u8")
        self.require(countable(shape), f"the tensor {shown(name)} has the shape {list(shape)}")
        self.require(kind in KINDS, f"the tensor {shown(name)} has the type {kind}, and only "
                     f"{', '.join(known.name for known in KINDS.values())} are read")
        kind = KINDS[kind]
        self.require(kind.size == 1 or shape and shape[-1] % kind.size == 0, f"the tensor {shown(name)} of the shape {list(shape)} is "
                     f"{kind.name}, and its rows are no whole blocks of {kind.size} numbers")
        return kind, shape, offset

    def placed(self, found, alignment):
        """{name: (kind, shape, offset)} -> {name: Stored}, all within the file and none on another."""
        start = -(-self.at // alignment) * alignment
        for name, (_, _, offset) in found.items():
            self.require(offset % alignment == 0, f"the tensor {shown(name)} begins at no multiple of {alignment} bytes")
        places = {name: (start + offset, start + offset + math.prod(shape) // kind.size * kind.layout.itemsize)
                  for name, (kind, shape, offset) in found.items()}
        require_disjoint(self.file.path, places, start, self.file.size, gaps=True)
        return {name: Stored(shape, kind.name, partial(read_tensor, self.file, kind, shape, places[name][0]))
                for name, (kind, shape, _) in found.items()}


def alignment_of(metadata):
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & alignment - 1:
        raise Damaged(f"its alignment must be a power of two of at most {MAX_ALIGNMENT}, and is {shown(alignment)}")
    return alignment
