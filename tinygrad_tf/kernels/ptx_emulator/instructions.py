"""What each PTX instruction does. One table; what is not in it raises UnknownInstruction, modifiers included.

A row has the opcode with the modifiers that choose the meaning, the types it takes, other modifiers that may stand there, the
types of the operands (t: the instruction's own, 2t: twice as wide), and the function from operands to result. Rows
without operand types work on `threads` itself: memory, shuffles, matrices. The semantics are those of NVIDIA's "PTX ISA", section 9.7.
"""
from typing import NamedTuple

import numpy as np

from .memory import SHARED_WINDOW, UNSIGNED, Fault, first
from .program import Instruction, UnknownInstruction

SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32}
SMALLEST = np.finfo(np.float32).smallest_normal
LANE = np.arange(32)


def numpy_type(kind):
    """The NumPy type that a register is looked at with. bf16, which NumPy lacks, and pairs of halves stay bits."""
    if kind == "pred":
        return np.dtype(bool)
    return np.dtype(FLOATS[kind] if kind in FLOATS else (SIGNED if kind[0] == "s" else UNSIGNED)[int(kind[1:])])


def bits(kind):
    return numpy_type(kind).itemsize * 8


# --- numbers ----------------------------------------------------------------------------------------------------------

def flush(x):
    """.ftz: a float32 too small for a full mantissa is ±0. CuPy compiles with it."""
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x) if x.dtype == np.float32 else x


def multiply_high(i, a, b):
    """The upper half of the product."""
    wide = numpy_type(i.types[0][0] + "64")
    return (a.astype(wide) * b.astype(wide) >> wide.type(32)).astype(a.dtype)


def multiply_wide(i, a, b):
    wide = numpy_type(double(i.types[0]))
    return a.astype(wide) * b.astype(wide)


def double(kind):
    return kind[0] + str(2 * bits(kind))


def fused_multiply_add(i, a, b, c):
    """a·b + c, rounded once: to nearest, or down (.rm). In float64 the product is exact, and the sum all but exact."""
    product = a.astype(np.float64) * b
    total = product + c
    if "rm" in i.modifiers:
        nearest = total.astype(np.float32)
        above = (nearest > total) | (nearest == total) & (left_out(product, c, total) < 0)
        return np.where(above, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    middle = np.asarray((total.view(np.uint64) & np.uint64(0x1FFFFFFF)) == 0x10000000)      # between two float32
    if middle.any():
        rest = left_out(product, c, total)
        total = np.where(middle & (rest != 0), np.nextafter(total, np.where(rest > 0, np.inf, -np.inf)), total)
    return total.astype(np.float32)


def left_out(a, b, total):
    """a + b − total, exactly, where total is the rounded sum: Knuth's two-sum."""
    part = total - a
    return (a - (total - part)) + (b - part)


def divide(i, a, b):
    """Towards zero; there is no answer for a divisor of 0."""
    return (a - remainder(i, a, b)) // b


def remainder(i, a, b):
    if (b == 0).any():
        raise Fault("integer division by zero", first(b == 0))
    return np.fmod(a, b)                                            # the sign is that of a


def shift_left(i, a, count):
    """Counts beyond the width leave nothing."""
    width = bits(i.types[-1])
    return np.where(count >= width, a.dtype.type(0), a << np.minimum(count, width - 1).astype(a.dtype))


def shift_right(i, a, count):
    """.s types fill with the sign, however far."""
    width = bits(i.types[-1])
    shifted = a >> np.minimum(count, width - 1).astype(a.dtype)
    return shifted if i.types[-1][0] == "s" else np.where(count >= width, a.dtype.type(0), shifted)


def funnel_shift(i, low, high, count):
    """32 of the 64 bits high:low, shifted by count: the upper ones for .l, the lower ones for .r."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    count = (count & 31 if "wrap" in i.modifiers else np.minimum(count, 32)).astype(np.uint64)
    return (both << count >> np.uint64(32) if "l" in i.modifiers else both >> count).astype(np.uint32)


def bit_field_insert(i, a, b, position, length):
    """The lowest `length` bits of a take the place of those of b from `position` on."""
    position, length = position & 255, np.minimum(length & 255, 32)
    ones = ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)) << np.minimum(position, 32).astype(np.uint64)
    field = a.astype(np.uint64) << np.minimum(position, 32).astype(np.uint64)
    return (b & ~ones | field & ones).astype(np.uint32)


def bit_field_extract(i, a, position, length):
    """`length` bits of a from `position` on; .s32 repeats the uppermost of them."""
    position, length = (position & 255).astype(np.int64), (length & 255).astype(np.int64)
    if i.types[0] == "u32":
        return (a.astype(np.int64) >> np.minimum(position, 63) & (1 << np.minimum(length, 32)) - 1).astype(np.uint32)
    up = 63 - np.minimum(position + length - 1, 31)
    return np.where(length == 0, 0, a.astype(np.int64) << up >> up + np.minimum(position, 31)).astype(np.int32)


def permute_bytes(i, a, b, selector):
    """Byte n of the result is that byte of b:a which the n-th 4 bits of the selector name; bit 3: its sign, eight times."""
    both, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.uint32(0)
    for n in range(4):
        choice = selector >> np.uint32(4 * n)
        byte = (both >> (8 * (choice & 7)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
        byte = np.where(choice & 8, (byte >> np.uint32(7)) * np.uint32(255), byte)
        result = result | byte << np.uint32(8 * n)
    return result


def lookup_table(i, a, b, c, table):
    """lop3: bit by bit, the table's entry number abc (in binary)."""
    result = np.uint32(0)
    for n in range(8):
        row = (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        result = result | row & (np.uint32(0) - (table >> np.uint32(n) & np.uint32(1)))
    return result


COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
               "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}       # the latter of unsigned numbers
COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compare(i, a, b, other=None):
    """With NaN every comparison is false, but ltu, geu…, which are true. `setp.lt.and` combines the result with a predicate."""
    name = i.modifiers[0]
    if a.dtype.kind != "f":
        result = COMPARISONS[name](a, b)
    else:
        unordered = np.isnan(a) | np.isnan(b)
        if name in ("num", "nan"):
            result = unordered if name == "nan" else ~unordered
        else:
            result = COMPARISONS[name[:2]](a, b) & ~unordered | (unordered if len(name) == 3 else False)
    return result if other is None else COMBINATIONS[i.modifiers[1]](result, other)


APPROXIMATIONS = {"ex2": np.exp2, "lg2": np.log2, "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x, "sqrt": np.sqrt,
                  "sin": np.sin, "cos": np.cos, "tanh": np.tanh}


def approximate(i, x):
    """The nearest float32 to the true value; a GPU may be a unit or two in the last place off, where it says .approx."""
    return APPROXIMATIONS[i.parts[0]](x.astype(np.float64)).astype(np.float32)


# --- conversions ------------------------------------------------------------------------------------------------------

TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_bfloat16(x):
    """The upper 16 bits of a float32, rounded to nearest, ties to even; NaN is 0x7fff."""
    word = x.view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_bfloat16(x):
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_float16(x):
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16)).astype(np.uint16)


def to_integer(x, kind):
    """What does not fit becomes the nearest that does; NaN becomes 0."""
    limits = np.iinfo(numpy_type(kind))
    x = np.where(np.isnan(x), 0, x.astype(np.float64))
    inside = (x > float(limits.min)) & (x < float(limits.max))
    return np.where(inside, np.where(inside, x, 0).astype(limits.dtype), np.where(x > 0, limits.max, limits.min)).astype(limits.dtype)


def convert(i, a):
    to, source = i.types
    whole = next((TO_WHOLE[m] for m in i.modifiers if m in TO_WHOLE), None)
    if source == "bf16":
        a, source = from_bfloat16(a), "f32"
    if source[0] == "f" and to[0] in "us":
        return to_integer(whole(a), to)
    if to in ("bf16", "f16") and source == "f32":
        return (to_bfloat16 if to == "bf16" else to_float16)(a)
    if "sat" in i.modifiers:                                        # to [0, 1]; NaN becomes 0
        a = np.where(np.isnan(a), a.dtype.type(0), np.clip(a, 0, 1))
    return a.astype(numpy_type(to)) if whole is None else whole(a).astype(numpy_type(to))


def convert_pair(i, high, low):
    """Two float32 to a pair of 16-bit numbers: the first operand is the upper half."""
    half = to_bfloat16 if i.types[0] == "bf16x2" else to_float16
    return half(low).astype(np.uint32) | half(high).astype(np.uint32) << np.uint32(16)


# --- memory -----------------------------------------------------------------------------------------------------------

def vector(i):
    return next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4")), 1)


def names(operand):
    return operand if isinstance(operand, list) else [operand]


def load(threads, i):
    """ld.v4: four registers from consecutive places. An access must be aligned to its whole size."""
    space, address = threads.place(i.operands[1], i)
    kind, count = i.types[-1], vector(i)
    values = threads.load(space, address, bits(kind), count).view(numpy_type(kind))
    for n, name in enumerate(names(i.operands[0])):
        threads.write(name, values[:, n])


def store(threads, i):
    space, address = threads.place(i.operands[0], i)
    values = [np.broadcast_to(threads.read(name, "u" + str(bits(i.types[-1]))), threads.n) for name in names(i.operands[1])]
    threads.store(space, address, np.stack(values, 1))


def load_parameter(threads, i):
    for n, name in enumerate(names(i.operands[0])):
        threads.write(name, threads.parameter(i.operands[1], n, numpy_type(i.types[-1])))


def copy_async(threads, i):
    """cp.async: from global to shared memory, later. Of `size` bytes the first `valid` are read, the others become 0."""
    size = int(i.operands[2])
    valid = threads.read(i.operands[3], "u32") if len(i.operands) > 3 else size
    threads.copy_async(i.operands[0], i.operands[1], size, np.broadcast_to(valid, threads.n).astype(np.int64))


# --- warps ------------------------------------------------------------------------------------------------------------

def shuffle(threads, i):
    """A register of another lane of the warp. c: the last lane (bits 0-4) and the segment (bits 8-12); out of it: one's own."""
    to, _, in_range = names(i.operands[0])[0].partition("|")
    lane = threads.lane
    b, c = (np.broadcast_to(threads.read(operand, "u32"), threads.n).astype(np.int64) for operand in i.operands[2:4])
    segment = c >> 8 & 31
    least, last = lane & segment, lane & segment | c & 31 & ~segment
    mode = next(m for m in i.modifiers if m in ("up", "down", "bfly", "idx"))
    target = {"up": lane - (b & 31), "down": lane + (b & 31), "bfly": lane ^ b & 31, "idx": least | b & 31 & ~segment}[mode]
    inside = target >= last if mode == "up" else target <= last
    threads.write(to, threads.from_lanes(i.operands[1], np.where(inside, target, lane), members(threads, i)))
    if in_range:
        threads.write(in_range, inside)


def members(threads, i):
    """The lanes that take part, 32 bits, per thread; .aligned: all."""
    mask = threads.read(i.operands[-1], "u32") if i.parts[0] in ("shfl", "vote") or "warp" in i.modifiers else np.uint32(0xFFFFFFFF)
    return np.broadcast_to(mask, threads.n)


def vote(threads, i):
    """Of the members' predicates: all, any, or (ballot) each as one bit."""
    mine = np.broadcast_to(threads.read(i.operands[1], "pred"), threads.n)
    said = threads.warp_bits(mine) & members(threads, i)
    mode = next(m for m in i.modifiers if m in ("all", "any", "ballot"))
    threads.write(i.operands[0], {"all": said == members(threads, i), "any": said != 0, "ballot": said}[mode])


# --- matrices ---------------------------------------------------------------------------------------------------------
# Lane = 4·group + quad holds, of a 16-bit matrix of 8 rows, elements (group, 2·quad) and (group, 2·quad + 1) in one register.

GROUP, QUAD = LANE // 4, LANE % 4


def fragments(threads, operand):
    """[warp, lane, register] of a list of registers."""
    values = [np.broadcast_to(threads.read(name, "u32"), threads.n).reshape(-1, 32) for name in operand]
    return np.stack(values, 2)


def numbers(words, kind):
    """[..., register, half] of 16-bit numbers, the lower half first, as float64."""
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return (from_bfloat16(halves) if kind == "bf16" else halves.view(np.float16)).astype(np.float64)


def multiply_matrices(threads, i):
    """mma.m16n8k16: D = A B + C.   A: [16, 16]   B: [16, 8]   C, D: [16, 8], float32

    A: register r holds rows group + 8·(r % 2), columns 2·quad + 8·(r / 2); B: register r holds rows 2·quad + 8·r, column
    group; C and D: register r holds row group + 8·(r / 2), column 2·quad + r % 2.
    """
    a, b = (numbers(fragments(threads, operand), i.types[1]) for operand in i.operands[1:3])
    c = fragments(threads, i.operands[3]).view(np.float32)
    A, B, C = np.empty((len(a), 16, 16)), np.empty((len(a), 16, 8)), np.empty((len(a), 16, 8))
    for r in range(4):
        C[:, GROUP + 8 * (r // 2), 2 * QUAD + r % 2] = c[:, :, r]
        for half in range(2):
            A[:, GROUP + 8 * (r % 2), 2 * QUAD + half + 8 * (r // 2)] = a[:, :, r, half]
            if r < 2:
                B[:, 2 * QUAD + half + 8 * r, GROUP] = b[:, :, r, half]
    D = (A @ B + C).astype(np.float32)
    for r, name in enumerate(i.operands[0]):
        threads.write(name, D[:, GROUP + 8 * (r // 2), 2 * QUAD + r % 2].reshape(-1))


def load_matrices(threads, i):
    """ldmatrix: 8x8 matrices of 16-bit numbers. Lane n gives the address of row n % 8 of matrix n / 8; .trans swaps rows and columns."""
    count = len(i.operands[0])
    _, address = threads.place(i.operands[1], i)
    asked = np.broadcast_to(threads.lane < 8 * count, threads.n)                    # the other lanes' addresses do not count
    rows = threads.load("shared", address[asked], 16, 8, asked).reshape(-1, count, 8, 8)
    rows = rows.swapaxes(2, 3) if "trans" in i.modifiers else rows
    for m, name in enumerate(i.operands[0]):
        low, high = (rows[:, m, GROUP, 2 * QUAD + half].astype(np.uint32) for half in (0, 1))
        threads.write(name, (low | high << np.uint32(16)).reshape(-1))


# --- the table --------------------------------------------------------------------------------------------------------

class Row(NamedTuple):
    opcode: str
    types: str                                  # letters: u, s, b; or types
    also: str
    operands: str
    function: object

    def fits(self, i):
        needed = self.opcode.split(".")[1:]
        return (set(needed) <= set(i.modifiers) <= {*needed, *self.also.split()}
                and not ("sat" in i.modifiers and i.types[0] not in ("f32", "f64"))
                and all(kind in self.types.split() or kind[0] in self.types.split() and kind not in FLOATS for kind in i.types))


INTEGER = "u s b"
CACHE = "nc volatile relaxed weak cta gpu sys ca cg cs lu cv wb wt L1::no_allocate L1::evict_last L2::64B L2::128B L2::256B"
ROWS = [
    # opcode      types              other modifiers    operands      what it computes
    Row("add",     "u s f32 f64",    "rn ftz",          "t t",        lambda i, a, b: a + b),           # integers wrap
    Row("sub",     "u s f32 f64",    "rn ftz",          "t t",        lambda i, a, b: a - b),
    Row("mul",     "f32 f64",        "rn ftz",          "t t",        lambda i, a, b: a * b),
    Row("mul.lo",  "u s",            "",                "t t",        lambda i, a, b: a * b),           # the lower half
    Row("mul.hi",  "u32 s32",        "",                "t t",        multiply_high),
    Row("mul.wide", "u16 s16 u32 s32", "",              "t t",        multiply_wide),                   # the whole product
    Row("mad.lo",  "u s",            "",                "t t t",      lambda i, a, b, c: a * b + c),
    Row("mad.wide", "u16 s16 u32 s32", "",              "t t 2t",     lambda i, a, b, c: multiply_wide(i, a, b) + c),
    Row("fma",     "f32",            "rn rm ftz",       "t t t",      fused_multiply_add),
    Row("div",     "u s",            "",                "t t",        divide),
    Row("div",     "f32 f64",        "rn full approx ftz", "t t",     lambda i, a, b: a / b),
    Row("rem",     "u s",            "",                "t t",        remainder),
    Row("min",     INTEGER,          "",                "t t",        lambda i, a, b: np.minimum(a, b)),
    Row("max",     INTEGER,          "",                "t t",        lambda i, a, b: np.maximum(a, b)),
    Row("min",     "f32 f64",        "ftz",             "t t",        lambda i, a, b: np.fmin(a, b)),   # NaN loses
    Row("max",     "f32 f64",        "ftz",             "t t",        lambda i, a, b: np.fmax(a, b)),
    Row("neg",     "s f32 f64",      "ftz",             "t",          lambda i, a: -a),
    Row("abs",     "s f32 f64",      "ftz",             "t",          lambda i, a: np.abs(a)),
    Row("copysign", "f32 f64",       "",                "t t",        lambda i, a, b: np.copysign(b, a)),   # the sign of a on b
    *(Row(name,    "f32",            "approx rn ftz",   "t",          approximate) for name in APPROXIMATIONS),

    Row("and",     "b pred",         "",                "t t",        lambda i, a, b: a & b),
    Row("or",      "b pred",         "",                "t t",        lambda i, a, b: a | b),
    Row("xor",     "b pred",         "",                "t t",        lambda i, a, b: a ^ b),
    Row("not",     "b pred",         "",                "t",          lambda i, a: ~a),
    Row("shl",     "b",              "",                "t u32",      shift_left),
    Row("shr",     INTEGER,          "",                "t u32",      shift_right),
    Row("shf",     "b32",            "l r wrap clamp",  "t t u32",    funnel_shift),
    Row("bfi",     "b32",            "",                "t t u32 u32", bit_field_insert),
    Row("bfe",     "u32 s32",        "",                "t u32 u32",  bit_field_extract),
    Row("prmt",    "b32",            "",                "t t t",      permute_bytes),
    Row("lop3",    "b32",            "",                "t t t u32",  lookup_table),
    Row("popc",    "b32 b64",        "",                "t",          lambda i, a: np.bitwise_count(a).astype(np.uint32)),

    Row("setp",    "u s b f32 f64",  f"{' '.join(COMPARISONS)} equ neu ltu leu gtu geu num nan and or xor ftz",
                                                        "t t pred",   compare),
    Row("selp",    "u s b f32 f64",  "",                "t t pred",   lambda i, a, b, p: np.where(p, a, b)),
    Row("cvt",     "u s f16 bf16 f32 f64", "rn rni rzi rmi rpi ftz sat", "t", convert),
    Row("cvt.rn",  "f16x2 bf16x2 f32", "",              "t t",        convert_pair),
    Row("cvta.to.global", "u64",     "",                "t",          lambda i, a: a),                  # global and generic are one
    Row("cvta.global", "u64",        "",                "t",          lambda i, a: a),
    Row("cvta.to.shared", "u64",     "",                "t",          lambda i, a: a - np.uint64(SHARED_WINDOW)),
    Row("cvta.shared", "u64",        "",                "t",          lambda i, a: a + np.uint64(SHARED_WINDOW)),

    Row("mov",     "u s b f32 f64 pred", "",            "",           lambda threads, i: threads.move(i)),
    Row("ld.param", "u s b f32 f64", "v2 v4",           "",           load_parameter),
    Row("ld",      "u s b f32 f64",  f"v2 v4 global shared {CACHE}", "", load),
    Row("st",      "u s b f32 f64",  f"v2 v4 global shared {CACHE}", "", store),
    Row("cp.async.shared.global", "", f"{CACHE} shared::cta", "",     copy_async),
    Row("cp.async.commit_group", "", "",                "",           lambda threads, i: threads.commit_copies()),
    Row("cp.async.wait_group", "",   "",                "",           lambda threads, i: threads.wait_for_copies(int(i.operands[0]))),
    Row("cp.async.wait_all", "",     "",                "",           lambda threads, i: threads.wait_for_copies(-1)),
    Row("membar",  "",               "cta gl gpu",      "",           lambda threads, i: None),         # all see all at once
    Row("fence",   "",               "acq_rel sc cta gpu", "",        lambda threads, i: None),

    Row("shfl.sync", "b32",          "up down bfly idx", "",          shuffle),
    Row("vote.sync", "pred b32",     "all any ballot",  "",           vote),
    Row("activemask", "b32",         "",                "",           lambda threads, i: threads.write(
                                                                          i.operands[0], threads.warp_bits(np.ones(threads.n, bool)))),
    Row("bar.warp.sync", "",         "",                "",           lambda threads, i: threads.warp_barrier()),
    Row("bar.sync", "",              "",                "",           lambda threads, i: threads.block_barrier()),
    Row("barrier.sync", "",          "aligned",         "",           lambda threads, i: threads.block_barrier()),
    Row("mma.sync.aligned.m16n8k16.row.col", "f16 bf16 f32", "", "",  multiply_matrices),
    Row("ldmatrix.sync.aligned.m8n8", "b16", "x1 x2 x4 trans shared shared::cta", "", load_matrices),
    *(Row(name,    "",               "uni",             "",           None) for name in ("bra", "ret", "exit")),    # the machine's
]


def lookup(i: Instruction):
    """What runs an instruction: a function of the threads. UnknownInstruction where no row fits."""
    for row in ROWS:
        if row.opcode.split(".")[0] == i.parts[0] and row.fits(i):
            return _understand(row, i)
    raise UnknownInstruction(f"the PTX emulator does not know the instruction {i}")


def _understand(row, i):
    if row.opcode in ("bar.sync", "barrier.sync") and i.operands != ["0"]:
        raise UnknownInstruction(f"the PTX emulator knows barrier 0 for all threads of a block only, got {i}")
    if row.opcode.startswith("mma") and not (i.types[0] == i.types[3] == "f32" and i.types[1] == i.types[2] != "f32"):
        raise UnknownInstruction(f"the PTX emulator knows mma of two 16-bit matrices with float32 sums only, got {i}")
    if not row.operands:
        return lambda threads: row.function(threads, i)
    own = i.types[-1]
    kinds = [{"t": own, "2t": double(own)}.get(kind, kind) for kind in row.operands.split()]
    return _compute(row.function, i, kinds)


def _compute(function, i, kinds):
    to, *sources = i.operands
    after = flush if "ftz" in i.modifiers else lambda x: x
    return lambda threads: threads.write(to, after(np.asarray(
        function(i, *(after(threads.read(source, kind)) for source, kind in zip(sources, kinds))))))
