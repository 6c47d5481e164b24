"""The PTX emulator: instructions one by one against NumPy, the library's kernels as NVIDIA's compiler reads them, planted faults."""
import re
from functools import partial

import numpy as np
import pytest
from kernels.flash_cases import CAUSAL, OUTPUTS, Case, errors, inputs, reference
from kernels.kernel_mutants_mma import Small

from tinygrad_tf import philox
from tinygrad_tf.kernels import compile, flash, fused, ptx_emulator
from tinygrad_tf.kernels.cpu_emulator import refusal as no_gcc
from tinygrad_tf.kernels.ptx_emulator import PtxError, RawModule, UnknownInstruction, cuda_to_ptx
from tinygrad_tf.ops.flash_attention import Band

pytestmark = pytest.mark.host("runs kernels on the emulators, with NumPy arrays")
compiled = pytest.mark.skipif(bool(ptx_emulator.refusal()), reason=str(ptx_emulator.refusal()))
both = pytest.mark.skipif(bool(ptx_emulator.refusal() or no_gcc()), reason=str(ptx_emulator.refusal() or no_gcc()))

REGISTERS = ".reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<60>; .reg .f32 %f<40>; .reg .b64 %rd<40>; .reg .f64 %d<9>;"
MODULE = f""".version 8.0
.target sm_80
.address_size 64
DECLARED
.visible .entry kernel(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{ {REGISTERS}
ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2];
mov.u32 %r0, %tid.x; mul.wide.u32 %rd0, %r0, 4; add.s64 %rd11, %rd1, %rd0; add.s64 %rd12, %rd2, %rd0;
BODY
ret;
}}"""


def kernel(body, declared=".extern .shared .align 16 .b8 smem[];"):
    return RawModule(ptx=MODULE.replace("DECLARED", declared).replace("BODY", body)).get_function("kernel")


def launch(body, x, y, threads=32, shared=0):
    """Runs PTX statements: %rd1, %rd2, %rd3 are the arrays; %r0 the thread, %rd11 and %rd12 its 4-byte places in the first two."""
    kernel(body)((1,), (threads,), (x, y, None), shared_mem=shared)
    return y


def compute(body, *columns, out=np.uint32):
    """`body` computes %r9 of %r1, %r2 and %r3, a column each; as an array of `out`."""
    x = np.zeros((len(columns[0]), 4), np.uint32)
    for n, column in enumerate(columns):
        x[:, n] = np.ascontiguousarray(column).view(np.uint32)
    return launch("mul.wide.u32 %rd5, %r0, 16; add.s64 %rd5, %rd1, %rd5; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd5]; "
                  "mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r3; " + body + " st.global.u32 [%rd12], %r9;",
                  x, np.zeros(len(x), np.uint32), threads=len(x)).view(out)


# --- one instruction at a time ----------------------------------------------------------------------------------------

WORDS = np.random.default_rng(0).integers(0, 2**32, (3, 96), dtype=np.uint64).astype(np.uint32)
WORDS[:, :8] = [[0, 1, 2**31, 2**32 - 1, 7, 2**31 - 1, 255, 65536], [1, 3, 1, 2**32 - 1, 40, 31, 8, 5], [5, 0, 33, 64, 4, 1, 32, 31]]
FLOATS = np.random.default_rng(1).standard_normal((3, 96), dtype=np.float32) * np.float32(8)
FLOATS[:, :8] = [[0, -0.0, np.inf, np.nan, 1, 2.5, -3.5, 1e-40], [1, 2, 3, 1, np.nan, -np.inf, 1e30, 3], [2, 1, 4, 1, 0, 2, 1, -1e-39]]
a, b, c = WORDS
sa, sb, sc = WORDS.view(np.int32)
f, g, h = FLOATS
long = [x.astype(np.int64) for x in (sa, sb, sc)]
wide = [x.astype(np.uint64) for x in WORDS]


def normal(x):
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


INTEGERS = {
    "add.s32 %r9, %r1, %r2;": a + b, "sub.s32 %r9, %r1, %r2;": a - b, "mul.lo.s32 %r9, %r1, %r2;": a * b, "neg.s32 %r9, %r1;": -a,
    "mad.lo.s32 %r9, %r1, %r2, %r3;": a * b + c, "mul.hi.u32 %r9, %r1, %r2;": wide[0] * wide[1] >> 32,
    "mul.hi.s32 %r9, %r1, %r2;": long[0] * long[1] >> 32, "abs.s32 %r9, %r1;": np.abs(long[0]),
    "mul.wide.s32 %rd4, %r1, %r2; shr.u64 %rd4, %rd4, 32; cvt.u32.u64 %r9, %rd4;": long[0] * long[1] >> 32,
    "mul.wide.u32 %rd4, %r1, %r2; mov.b64 {%r8, %r9}, %rd4;": wide[0] * wide[1] >> 32,
    "mov.b64 %rd4, {%r1, %r2}; shr.u64 %rd4, %rd4, 32; cvt.u32.u64 %r9, %rd4;": b,
    "cvt.s64.s32 %rd4, %r1; mad.wide.s32 %rd4, %r2, 8, %rd4; shr.u64 %rd4, %rd4, 3; cvt.u32.u64 %r9, %rd4;": long[1] * 8 + long[0] >> 3,
    "max.u32 %r8, %r2, 1; div.u32 %r9, %r1, %r8;": a // np.maximum(b, 1),
    "max.u32 %r8, %r2, 1; rem.u32 %r9, %r1, %r8;": a % np.maximum(b, 1),
    "or.b32 %r8, %r2, 16; div.s32 %r9, %r1, %r8;": np.trunc(sa / (sb | 16).astype(float)).astype(np.int64),
    "or.b32 %r8, %r2, 16; rem.s32 %r9, %r1, %r8;": np.fmod(long[0], long[1] | 16),
    "min.s32 %r9, %r1, %r2;": np.minimum(sa, sb), "max.u32 %r9, %r1, %r2;": np.maximum(a, b), "not.b32 %r9, %r1;": ~a,
    "and.b32 %r9, %r1, %r2;": a & b, "or.b32 %r9, %r1, %r2;": a | b, "xor.b32 %r9, %r1, %r2;": a ^ b,
    "shl.b32 %r9, %r1, %r3;": wide[0] << np.minimum(wide[2], 32), "shr.u32 %r9, %r1, %r3;": wide[0] >> np.minimum(wide[2], 32),
    "shr.s32 %r9, %r1, %r3;": long[0] >> np.minimum(wide[2], 31).astype(np.int64),
    "shf.l.wrap.b32 %r9, %r1, %r2, %r3;": (wide[0] | wide[1] << 32) << (wide[2] & 31) >> 32,
    "shf.r.clamp.b32 %r9, %r1, %r2, %r3;": (wide[0] | wide[1] << 32) >> np.minimum(wide[2], 32),
    "lop3.b32 %r9, %r1, %r2, %r3, 0xE8;": a & b | a & c | b & c, "lop3.b32 %r9, %r1, %r2, %r3, 0x96;": a ^ b ^ c,
    "bfi.b32 %r9, %r1, %r2, 4, 8;": b & ~np.uint32(0xFF0) | (a & 0xFF) << 4, "bfe.u32 %r9, %r1, 4, 8;": a >> 4 & 0xFF,
    "bfe.s32 %r9, %r1, 4, 8;": sa << 20 >> 24, "prmt.b32 %r9, %r1, %r2, 0x5410;": a & 0xFFFF | b << 16,
    "prmt.b32 %r9, %r1, %r2, 0xBB26;": b >> 16 & 0xFF | (a >> 16 & 0xFF) << 8 | np.where(a >> 31, np.uint32(0xFFFF0000), np.uint32(0)),
    "popc.b32 %r9, %r1;": np.bitwise_count(a), "cvt.u16.u32 %h1, %r1; cvt.s32.s16 %r9, %h1;": a.astype(np.int16),
    "cvt.u16.u32 %h1, %r1; cvt.u32.u16 %r9, %h1;": a.astype(np.uint16),
    "mov.b32 {%h1, %h2}, %r1; mov.b32 %r9, {%h2, %h1};": a << 16 | a >> 16,
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r9, %r1, %r2, %p1;": np.minimum(sa, sb), "mov.u32 %r9, -2;": np.full(96, -2),
    "setp.hi.u32 %p1, %r1, %r2; mov.u32 %r9, %r2; @%p1 mov.u32 %r9, %r1;": np.maximum(a, b),
    "setp.ge.s32 %p1, %r1, 0; setp.lt.and.s32 %p2, %r2, 0, %p1; selp.b32 %r9, 1, 0, %p2;": (sa >= 0) & (sb < 0),
    "setp.ge.s32 %p1, %r1, 0; setp.lt.s32 %p2, %r2, 0; xor.pred %p3, %p1, %p2; not.pred %p3, %p3; selp.b32 %r9, 1, 0, %p3;":
        (sa >= 0) == (sb < 0),
}
with np.errstate(all="ignore"):
    NUMBERS = {
        "add.f32 %f9, %f1, %f2;": f + g, "add.ftz.f32 %f9, %f1, %f3;": normal(normal(f) + normal(h)), "sub.f32 %f9, %f1, %f2;": f - g,
        "mul.ftz.f32 %f9, %f1, %f3;": normal(normal(f) * normal(h)), "fma.rn.f32 %f9, %f1, %f2, %f3;": f.astype(float) * g + h,
        "div.rn.f32 %f9, %f1, %f2;": f / g, "min.f32 %f9, %f1, %f2;": np.fmin(f, g), "max.f32 %f9, %f1, %f2;": np.fmax(f, g),
        "neg.f32 %f9, %f1;": -f, "abs.f32 %f9, %f1;": np.abs(f), "copysign.f32 %f9, %f2, %f1;": np.copysign(f, g),
        "ex2.approx.ftz.f32 %f9, %f1;": np.exp2(normal(f).astype(float)), "lg2.approx.f32 %f9, %f1;": np.log2(f.astype(float)),
        "rcp.rn.f32 %f9, %f2;": 1 / g, "sqrt.rn.f32 %f9, %f1;": np.sqrt(f), "rsqrt.approx.f32 %f9, %f1;": 1 / np.sqrt(f.astype(float)),
        "tanh.approx.f32 %f9, %f1;": np.tanh(f.astype(float)),
    "cvt.rni.f32.f32 %f9, %f1;": np.rint(f), "cvt.rmi.f32.f32 %f9, %f1;": np.floor(f),
        "cvt.sat.f32.f32 %f9, %f1;": np.nan_to_num(np.clip(f, 0, 1)), "cvt.rn.f32.s32 %f9, %r1;": f.view(np.int32).astype(np.float32),
        "cvt.f64.f32 %d1, %f1; mul.f64 %d1, %d1, 0d3FB999999999999A; cvt.rn.f32.f64 %f9, %d1;": f.astype(float) * 0.1,
        "mov.f32 %f9, 0f40490FDB;": np.full(96, np.pi),
    }


@pytest.mark.parametrize("body", INTEGERS)
def test_integer_instructions(body):
    np.testing.assert_array_equal(compute(body, a, b, c), np.asarray(INTEGERS[body]).astype(np.int64).astype(np.uint32))


@pytest.mark.parametrize("body", NUMBERS)
def test_float_instructions(body):
    np.testing.assert_array_equal(compute(body + " mov.b32 %r9, %f9;", f, g, h, out=np.float32), NUMBERS[body].astype(np.float32))


def test_fused_multiply_add_is_rounded_once():
    """1 + 2⁻²⁴ + 2⁻⁷⁰ is above the middle between two float32, by less than float64 can tell."""
    one, tiny = np.full(32, 1, np.float32), np.float32(2.0**-35) * np.ones(32, np.float32)
    above = compute("mov.f32 %f4, 0f33800000; fma.rn.f32 %f9, %f2, %f2, %f4; fma.rn.f32 %f9, %f2, %f2, %f1; mov.b32 %r9, %f9;",
                    np.nextafter(one, np.float32(2)) * one, tiny, out=np.float32)
    assert (above == np.nextafter(np.float32(1), np.float32(2))).all()
    x, y = np.float32(1 + 2.0**-12), np.float32(2.0**-60)           # x·x = 1 + 2⁻¹¹ + 2⁻²⁴: the middle; y tips it
    for sign, want in ((1, 1 + 2.0**-11 + 2.0**-23), (-1, 1 + 2.0**-11)):
        got = compute("fma.rn.f32 %f9, %f1, %f1, %f2; mov.b32 %r9, %f9;", np.full(32, x), np.full(32, sign * y), out=np.float32)
        assert (got == np.float32(want)).all()
    down = compute("fma.rm.f32 %f9, %f1, %f1, %f2; mov.b32 %r9, %f9;", one, np.full(32, -y), out=np.float32)
    assert (down == np.nextafter(np.float32(1), np.float32(0))).all()


@pytest.mark.parametrize("name, ordered", {"lt": np.less, "eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal}.items())
def test_comparisons_with_nan_are_false_unless_they_say_unordered(name, ordered):
    nan = np.isnan(f) | np.isnan(g)
    for suffix, want in (("", ordered(f, g) & ~nan), ("u", ordered(f, g) | nan)):
        np.testing.assert_array_equal(compute(f"setp.{name}{suffix}.f32 %p1, %f1, %f2; selp.b32 %r9, 1, 0, %p1;", f, g), want)


def test_whole_numbers_of_floats_are_clamped_and_nan_is_0():
    x = np.array([0.5, 1.5, -1.5, 3e9, -3e9, np.nan, np.inf, -2.7], np.float32).repeat(4)
    signed, most, least = partial(compute, out=np.int32), 2**31 - 1, -(2**31)
    for name, want in {"rzi": [0, 1, -1, most, least, 0, most, -2], "rni": [0, 2, -2, most, least, 0, most, -3],
                       "rmi": [0, 1, -2, most, least, 0, most, -3], "rpi": [1, 2, -1, most, least, 0, most, -2]}.items():
        np.testing.assert_array_equal(signed(f"cvt.{name}.s32.f32 %r9, %f1;", x), np.repeat(want, 4))
    np.testing.assert_array_equal(compute("cvt.rzi.u32.f32 %r9, %f1;", x), np.repeat([0, 1, 0, 3 * 10**9, 0, 0, 2**32 - 1, 0], 4))


def test_sixteen_bit_numbers_round_to_nearest_even():
    x = np.concatenate([np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, np.nan, np.inf, 1e-6, 65520, -0.0, 7e4], np.float32), f[8:32]])
    pair = compute("cvt.rn.bf16x2.f32 %r9, %f1, %f2;", x, g[:32])
    np.testing.assert_array_equal(pair[:4] >> 16, [0x3F80, 0x3F82, 0x7FFF, 0x7F80])         # a tie down, a tie up
    np.testing.assert_allclose((pair & 0xFFFF0000).view(np.float32)[4:], x[4:], rtol=2.0**-8)
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16)
        pair = compute("cvt.rn.f16x2.f32 %r9, %f1, %f2;", x, g[:32])
        np.testing.assert_array_equal((pair >> 16).astype(np.uint16).view(np.float16), halves)
        back = compute("cvt.rn.f16.f32 %h1, %f1; cvt.f32.f16 %f9, %h1; mov.b32 %r9, %f9;", x, out=np.float32)
        np.testing.assert_array_equal(back, halves.astype(np.float32))


def test_what_is_not_in_the_table_is_refused_with_its_line():
    for statement in ("sin.exact.f32 %f1, %f2;", "add.sat.s32 %r1, %r2, %r3;", "fma.rz.f32 %f1, %f1, %f1, %f1;", "bar.sync 1, 64;",
                      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};", "cvt.sat.s32.f32 %r1, %f1;",
                      "ld.local.u32 %r1, [%rd1];", "brx.idx %r1, table;"):
        with pytest.raises(UnknownInstruction, match=re.escape(statement.partition(" ")[0]) + r".*PTX line \d+"):
            launch(statement, np.zeros(32, np.uint32), np.zeros(32, np.uint32))
    with pytest.raises(UnknownInstruction, match="%clock"):
        launch("mov.u32 %r1, %clock;", np.zeros(32, np.uint32), np.zeros(32, np.uint32))


# --- branches, barriers, warps ------------------------------------------------------------------------------------------

def test_threads_that_took_different_branches_meet_again():
    body = """and.b32 %r1, %r0, 3; mov.u32 %r9, 0;
        LOOP: setp.eq.s32 %p1, %r1, 0; @%p1 bra DONE; add.s32 %r9, %r9, %r0; sub.s32 %r1, %r1, 1; bra.uni LOOP;
        DONE: bar.warp.sync 0xffffffff; st.global.u32 [%rd12], %r9;"""
    y = launch(body, np.zeros(64, np.uint32), np.zeros(64, np.uint32), threads=64)
    np.testing.assert_array_equal(y, np.arange(64) % 4 * np.arange(64))


@pytest.mark.parametrize("mode, b, c, source", [
    ("bfly", 5, 31, lambda i: i ^ 5), ("down", 3, 31, lambda i: np.where(i + 3 < 32, i + 3, i)),
    ("up", 2, 0, lambda i: np.where(i >= 2, i - 2, i)), ("idx", 7, 31, lambda i: 0 * i + 7),
    ("bfly", 1, 0x1C1F, lambda i: i ^ 1), ("idx", 1, 0x181F, lambda i: i // 8 * 8 + 1)])
def test_shuffles(mode, b, c, source):
    i = np.arange(32)
    y = launch(f"ld.global.u32 %r1, [%rd11]; shfl.sync.{mode}.b32 %r9|%p1, %r1, {b}, {c}, 0xffffffff; selp.b32 %r2, 0, 1000, %p1; "
               "add.s32 %r9, %r9, %r2; st.global.u32 [%rd12], %r9;", (i * i).astype(np.uint32), np.zeros(32, np.uint32))
    np.testing.assert_array_equal(y, source(i)**2 + 1000 * (source(i) == i) * (mode != "idx"))


def test_votes():
    i = np.arange(32)
    vote = """setp.lt.u32 %p1, %r0, 5; vote.sync.ballot.b32 %r1, %p1, 0xffffffff; vote.sync.any.pred %p2, %p1, 0xffffffff;
        vote.sync.all.pred %p3, %p1, 0xffffffff; @%p2 add.s32 %r1, %r1, 1000; @%p3 add.s32 %r1, %r1, 2000; st.global.u32 [%rd12], %r1;"""
    np.testing.assert_array_equal(launch(vote, i.astype(np.uint32), np.zeros(32, np.uint32)), 0b11111 + 1000 + 0 * i)


TROUBLE = {
    "nobody can move": "setp.lt.u32 %p1, %r0, 16; @%p1 bra END; bar.sync 0; END: bar.sync 0;",
    "nobody can move.*shfl": "setp.lt.u32 %p1, %r0, 16; @%p1 bra END; shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffffffff; END:",
    "reads lane 16, which is not in": "setp.ge.u32 %p1, %r0, 16; @%p1 bra END; shfl.sync.bfly.b32 %r1, %r0, 16, 31, 0xffff; END:",
    "out of bounds: 4 bytes at byte 128": "ld.global.u32 %r1, [%rd11+4];",
    "out of bounds: 4 bytes at byte -4": "st.global.u32 [%rd11+-4], %r1;",
    "null pointer": "ld.global.u32 %r1, [%rd3];", "misaligned global load of 8": "ld.global.v2.u32 {%r1, %r2}, [%rd11];",
    "address": "cvt.u32.u64 %r1, %rd11; cvt.u64.u32 %rd4, %r1; ld.global.u32 %r1, [%rd4];",         # a pointer kept in 32 bits
    "integer division by zero.*thread \\(1, 0, 0\\)": "and.b32 %r1, %r0, 1; sub.s32 %r1, 1, %r1; div.s32 %r2, %r0, %r1;",
    "shared store out of bounds": "mov.u32 %r1, smem; st.shared.u32 [%r1+256], %r0;",
    "no thread has written": "mov.u32 %r1, smem; ld.shared.u32 %r2, [%r1];", "misaligned shared": "st.shared.u32 [smem+2], %r0;",
    "no barrier in between": "shl.b32 %r1, %r0, 2; st.shared.u32 [%r1], %r0; ld.shared.u32 %r3, [smem];",
}


@pytest.mark.parametrize("message", TROUBLE)
def test_what_a_gpu_might_not_survive_is_an_error_with_its_place(message):
    with pytest.raises(PtxError, match="(?s)^kernel: .*" + message) as error:
        launch(TROUBLE[message], np.zeros(32, np.uint32), np.zeros(32, np.uint32), shared=256)
    assert re.search(r"(?s)thread \(\d+, 0, 0\) of block \(0, 0, 0\).*PTX line \d+", str(error.value))


def test_launches_that_a_gpu_refuses():
    x = np.zeros(32, np.uint32)
    for grid, block, args, shared, message in [
            ((1,), (2048,), (x, x, x), 0, "cannot be launched"), ((0,), (32,), (x, x, x), 0, "cannot be launched"),
            ((1, 70000), (32,), (x, x, x), 0, "cannot be launched"), ((1,), (32,), (x, x), 0, "2 arguments"),
            ((1,), (32,), (x, x, 1.0), 0, "np.float32"), ((1,), (32,), (x, x, np.int32(1)), 0, "4 bytes"),
            ((1,), (32,), (x, x, x), 49 << 10, "max_dynamic_shared_size_bytes")]:
        with pytest.raises(PtxError, match=message):
            kernel("")(grid, block, args, shared_mem=shared)
    with pytest.raises(ValueError, match="no kernel 'none'.*kernel"):
        RawModule(ptx=MODULE.replace("BODY", "").replace("DECLARED", "")).get_function("none")
    with pytest.raises(UnknownInstruction, match="cannot read 'BODY"):
        RawModule(ptx=MODULE)
    x.flags.writeable = False
    with pytest.raises(PtxError, match="read-only"):
        launch("st.global.u32 [%rd11], %r0;", x, x)


# --- memory -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("width, kind", [(1, "u8"), (2, "u16"), (4, "u32"), (8, "v2.u32"), (16, "v4.u32"), (8, "u64")])
def test_widths_of_loads_and_stores_through_shared_memory(width, kind):
    name = {"u8": "%h1", "u16": "%h1", "u32": "%r1", "v2.u32": "{%r1, %r2}", "v4.u32": "{%r1, %r2, %r3, %r4}", "u64": "%rd9"}[kind]
    x, y = np.random.default_rng(3).integers(0, 256, (2, 32 * width), dtype=np.uint8)
    body = f"""mul.wide.u32 %rd4, %r0, {width}; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4; mov.u32 %r8, smem;
        mad.lo.s32 %r8, %r0, {width}, %r8; ld.global.nc.{kind} {name}, [%rd5]; st.shared.{kind} [%r8], {name}; bar.warp.sync 0xffffffff;
        ld.shared.{kind} {name}, [%r8]; st.global.{kind} [%rd6], {name};"""
    np.testing.assert_array_equal(launch(body, x, y, shared=512), x)


def test_signed_loads_keep_their_sign_and_views_their_strides():
    x = np.arange(-64, 64, dtype=np.int8).reshape(2, 64)[:, ::2][1]
    y = launch("mul.wide.u32 %rd4, %r0, 2; add.s64 %rd4, %rd1, %rd4; ld.global.s8 %r1, [%rd4]; st.global.u32 [%rd12], %r1;", x,
               np.zeros(32, np.int32))
    np.testing.assert_array_equal(y, x)
    last_first = np.arange(32, dtype=np.uint32)[::-1]                       # the pointer is that of the first element, the last in memory
    y = launch("ld.global.u32 %r1, [%rd11+-124]; st.global.u32 [%rd12], %r1;", last_first, np.zeros(32, np.uint32))
    np.testing.assert_array_equal(y, np.arange(32))


COPY = """shl.b32 %r1, %r0, 4; mov.u32 %r2, smem; add.s32 %r1, %r1, %r2; mul.wide.u32 %rd4, %r0, 16; add.s64 %rd5, %rd1, %rd4;
    and.b32 %r3, %r0, 15; cp.async.cg.shared.global [%r1], [%rd5], 16, %r3; cp.async.commit_group;
    cp.async.cg.shared.global [%r1+512], [%rd5], 16; cp.async.commit_group; cp.async.wait_group PENDING; bar.sync 0;
    xor.b32 %r1, %r1, 16; ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r1+OFFSET]; xor.b32 %r8, %r0, 1;
    mul.wide.u32 %rd4, %r8, 16; add.s64 %rd6, %rd2, %rd4; st.global.v4.u32 [%rd6], {%r4, %r5, %r6, %r7};"""


def test_asynchronous_copies_land_when_they_are_waited_for():
    x = np.random.default_rng(4).integers(0, 256, (32, 16), dtype=np.uint8)
    kept = np.where(np.arange(16) < np.arange(32)[:, None] % 16, x, 0)      # of 16 bytes the first n, then zeros

    def copied(pending, offset, barrier="bar.sync 0;"):
        body = COPY.replace("PENDING", str(pending)).replace("OFFSET", str(offset)).replace("bar.sync 0;", barrier)
        return launch(body, x, np.zeros_like(x), shared=1024)
    np.testing.assert_array_equal(copied(1, 0), kept)
    np.testing.assert_array_equal(copied(0, 512), x)
    for pending, offset in [(2, 0), (1, 512)]:
        with pytest.raises(PtxError, match="not waited for"):
            copied(pending, offset)
    with pytest.raises(PtxError, match="no barrier in between"):
        copied(0, 0, barrier="")


def test_blocks_need_not_be_whole_warps_and_grids_run_in_waves():
    code = """.version 8.0
        .target sm_80
        .visible .entry count(.param .u64 p) { .reg .b32 %r<9>; .reg .b64 %rd<9>;
        ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ntid.x; mad.lo.s32 %r4, %r2, %r3, %r1;
        mul.wide.u32 %rd2, %r4, 4; add.s64 %rd3, %rd1, %rd2; bar.sync 0; st.global.u32 [%rd3], %r4; ret; }"""
    y = np.zeros(700 * 33, np.uint32)
    RawModule(ptx=code).get_function("count")((1, 700), (33,), (y,))
    np.testing.assert_array_equal(y, np.arange(700 * 33))


def test_generic_addresses_tell_shared_from_global_memory():
    body = """shl.b32 %r1, %r0, 2; cvt.u64.u32 %rd4, %r1; cvta.shared.u64 %rd4, %rd4; ld.u32 %r2, [%rd11]; st.u32 [%rd4], %r2;
        ld.u32 %r3, [%rd4]; cvta.to.shared.u64 %rd5, %rd4; ld.shared.u32 %r4, [%rd5]; add.s32 %r3, %r3, %r4; st.u32 [%rd12], %r3;"""
    np.testing.assert_array_equal(launch(body, np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32), shared=128), 2 * np.arange(32))


# --- matrices -------------------------------------------------------------------------------------------------------------

# A [16, 16], and B [16, 8] as 8 rows of 16 numbers (mma's `col`), come by ldmatrix from shared memory, in rows of 32 bytes
MATRICES = """shl.b32 %r1, %r0, 4; mov.u32 %r2, smem; add.s32 %r1, %r1, %r2; mul.wide.u32 %rd4, %r0, 16; add.s64 %rd5, %rd1, %rd4;
    ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd5]; st.shared.v4.u32 [%r1], {%r4, %r5, %r6, %r7};
    ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd5+512]; st.shared.v4.u32 [%r1+512], {%r4, %r5, %r6, %r7}; bar.sync 0;
    and.b32 %r3, %r0, 15; shl.b32 %r3, %r3, 5; shr.u32 %r8, %r0, 4; shl.b32 %r8, %r8, 4; add.s32 %r3, %r3, %r8; add.s32 %r3, %r3, %r2;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r3];
    """
LOAD_B = """and.b32 %r3, %r0, 7; shl.b32 %r3, %r3, 5; shr.u32 %r8, %r0, 3; and.b32 %r8, %r8, 1; shl.b32 %r8, %r8, 4; add.s32 %r3, %r3, %r8;
    add.s32 %r3, %r3, %r2; ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r14, %r15}, [%r3+512];"""
LOAD_B_TRANSPOSED = """and.b32 %r3, %r0, 15; shl.b32 %r3, %r3, 5; add.s32 %r3, %r3, %r2;
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r3+512];"""
PRODUCT = """mov.f32 %f1, 0f3F800000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
    mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 {%f1, %f2, %f3, %f4}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f1, %f2, %f3, %f4};
    shr.u32 %r20, %r0, 2; and.b32 %r21, %r0, 3; shl.b32 %r20, %r20, 5; shl.b32 %r21, %r21, 3; add.s32 %r20, %r20, %r21;
    cvt.u64.u32 %rd7, %r20; add.s64 %rd7, %rd2, %rd7; st.global.v2.f32 [%rd7], {%f1, %f2}; st.global.v2.f32 [%rd7+256], {%f3, %f4};"""


def product(body, kind, A, second):
    """1 + A B; `second` [8 or 16, 16] is what ldmatrix reads B from."""
    x = np.zeros((32, 16), np.float32)
    x[:16], x[16:16 + len(second)] = A, second
    halves = x.astype(np.float16).view(np.uint16) if kind == "f16" else (x.view(np.uint32) >> 16).astype(np.uint16)
    return launch(MATRICES + body + PRODUCT.replace("KIND", kind), halves, np.full((16, 8), np.nan, np.float32), shared=1024)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_matrix_products_from_ldmatrix(kind):
    A, B = (np.random.default_rng(n).integers(-8, 9, shape).astype(np.float32) for n, shape in ((5, (16, 16)), (6, (16, 8))))
    np.testing.assert_array_equal(product(LOAD_B, kind, A, B.T), 1 + A @ B)
    np.testing.assert_array_equal(product(LOAD_B_TRANSPOSED, kind, A, np.pad(B, ((0, 0), (0, 8)))), 1 + A @ B)


# --- the library's kernels ------------------------------------------------------------------------------------------------------

class SmallFloat32(flash.Float32):
    tiles = {32: (flash.Tile(32, 32),)}


class SmallBFloat16(Small):
    bf16 = 1


CASES = [(SmallFloat32, Case(77, 50, 32, Band(-5, None, 0), padding=True)),
         (SmallFloat32, Case(33, 70, 32, Band(37, 20, 3), heads=(2, 2), B=1)),
         (flash.Float32, Case(40, 33, 64, CAUSAL, B=1)), (Small, Case(77, 83, 32, Band(10, 60, 2), padding=True)),
         (Small, Case(5, 133, 32, Band(128, None, 0), heads=(4, 2), B=1)), (SmallBFloat16, Case(65, 70, 32, CAUSAL, heads=(2, 2), B=1)),
         (flash.Float16, Case(40, 70, 64, Band(30, 20, 0), B=1)), (flash.BFloat16, Case(40, 50, 128, Band(10, None, 0), padding=True))]
TOLERANCE = {"float32": 3e-6, "float16": 1e-3, "uint16": 8e-3}             # uint16: the bits of bfloat16
kinds = pytest.mark.parametrize("tier, case", CASES, ids=lambda x: getattr(x, "name", None) or x.__name__)


def floats(x):
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def given_to(tier, case):
    """(what the kernel gets, the same as ordinary floats)"""
    given = inputs(case, np.float16 if getattr(tier, "bf16", None) == 0 else np.float32)
    if getattr(tier, "bf16", None) == 1:
        arrays = {n: (getattr(given, n).view(np.uint32) >> 16).astype(np.uint16) for n in ("q", "k", "v", "d_o")}
        return given._replace(**arrays), given._replace(**{n: floats(x) for n, x in arrays.items()})
    return given, given


def run(tier, case, given):
    shared = case.band, case.scale, tier
    o, lse = flash.forward(given.q, given.k, given.v, given.valid_tokens, *shared)
    return [floats(x) for x in (o, lse, *flash.backward(given.q, given.k, given.v, o, lse, given.d_o, given.valid_tokens, *shared))]


def wrong(tier, case):
    given, numbers = given_to(tier, case)
    with compile.use("ptx"):
        found = dict(zip(OUTPUTS, errors(run(tier, case, given), reference(case, numbers))))
    return {n: e for n, e in found.items() if not e <= (2e-6 if n == "lse" else TOLERANCE[given.q.dtype.name])}


@compiled
@kinds
def test_flash_attention_as_the_compiler_reads_it(tier, case):
    assert not wrong(tier, case)


@both
@pytest.mark.parametrize("tier, case", [CASES[0], CASES[3], CASES[5]], ids=["float32", "float16", "bfloat16"])
def test_flash_attention_is_the_same_on_both_emulators(tier, case):
    """But for the fused multiply-adds that NVIDIA's compiler makes and g++ does not, and the order of sums in a matrix product."""
    given, _ = given_to(tier, case)
    results = []
    for emulator in compile.EMULATORS:
        with compile.use(emulator):
            results.append(run(tier, case, given))
    assert max(errors(*results)) <= TOLERANCE[given.q.dtype.name]


def fused_results():
    random = np.random.default_rng(7)
    x, dy = random.standard_normal((2, 5, 133), dtype=np.float32)
    w, b = random.standard_normal((2, 133), dtype=np.float32)
    p, m, v = (abs(t) for t in random.standard_normal((3, 5, 133), dtype=np.float32))
    y, x_hat, r = fused.norm(x, w, b, 1e-5, True)
    fused.adam(p, x, m, v, None, 3, 1e-2, (0.9, 0.99), 1e-8, shrink=0.9)
    return [fused.softmax(x), fused.softmax_backward(dy, x), fused.log_softmax(x), *fused.cross_entropy(x, np.arange(5)), y, x_hat, r,
            fused.norm_backward(dy, x_hat, r, w, True), *fused.norm_columns(dy, x_hat, w.shape),
            *(part for name in ("gelu", "gelu_tanh", "silu") for part in fused.activation(x, name, True)), p, m, v]


@compiled
def test_fused_kernels_as_the_compiler_reads_them():
    with compile.use("ptx"):
        got = fused_results()
    x, dy = np.random.default_rng(7).standard_normal((2, 5, 133), dtype=np.float32).astype(np.float64)
    e = np.exp(x)
    p = e / e.sum(1, keepdims=True)
    x_hat = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    want = {0: p, 2: np.log(p), 3: p, 4: -np.log(p)[np.arange(5), np.arange(5)], 6: x_hat, 9: (dy * x_hat).sum(0), 10: dy.sum(0),
            15: x / (1 + np.exp(-x))}
    assert {n: e for n, e in zip(want, errors([got[n] for n in want], want.values())) if not e < 2e-6} == {}


@both
def test_fused_kernels_are_the_same_on_both_emulators():
    results = []
    for emulator in compile.EMULATORS:
        with compile.use(emulator):
            results.append(fused_results())
    assert max(errors(*results)) < 2e-6


@compiled
def test_the_keep_mask_is_bit_for_bit_that_of_numpy():
    heads, rows, keys, below = range(2), range(3, 40), range(64, 200), int(0.1 * 2**32)
    with compile.use("ptx"):
        got = fused.philox_keep((12345, 678), heads, rows, keys, below, np)
    j = np.arange(keys.start // 4, keys.stop // 4, dtype=np.uint32)
    words = philox.words((12345, 678), j, np.array(rows, np.uint32)[:, None], np.array(heads, np.uint32)[:, None, None], np.uint32(0))
    want = np.stack(np.broadcast_arrays(*words), -1).reshape(got.shape) >= below
    assert want.any() and not want.all() and np.array_equal(got, want)


def test_use_chooses_the_emulator_and_puts_it_back():
    with compile.use("ptx"), compile.use("c++"):
        pass
    with pytest.raises(ValueError, match="'c\\+\\+', 'ptx'.*'gpu'"), compile.use("gpu"):
        pass
    with pytest.raises(KeyError), compile.use("ptx"):
        raise KeyError
    assert compile._current_device(np) == "c++"


# --- planted faults ---------------------------------------------------------------------------------------------------------

def in_ptx(pattern, new):
    """In every place of the compiler's output."""
    return lambda code: code, lambda ptx: _changed(re.sub(pattern, new, ptx), ptx)


def in_source(old, new, which=0):
    def change(code):
        parts = code.split(old)
        assert len(parts) > which + 1, f"not there: {old}"
        return old.join(parts[:which + 1]) + new + old.join(parts[which + 1:])
    return change, lambda ptx: ptx


def _changed(new, old):
    assert new != old
    return new


B_OPERAND = r"(mma\.sync[^{]*\{[^}]*\},\s*\{[^}]*\},\s*)\{([^,}]*),([^}]*)\}"
A_OPERAND = r"(mma\.sync[^{]*\{[^}]*\},\s*)\{([^,}]*),([^,}]*),([^}]*)\}"
FAULTS = {                                      # of the tensor-core kernel → who notices: a check of the emulator, or the numbers
    "ldmatrix reads 16 bytes further": (in_ptx(r"(ldmatrix[^\[]*\[%r\d+)\]", r"\1+16]"), "numbers|shared load"),
    "ldmatrix transposes when it should not": (in_ptx(r"\.x4\.shared", ".x4.trans.shared"), "numbers"),
    "mma with the halves of B swapped": (in_ptx(B_OPERAND, r"\1{\3,\2}"), "numbers"),
    "mma with two quarters of A swapped": (in_ptx(A_OPERAND, r"\1{\3,\2,\4}"), "numbers"),
    "no wait for copies": (in_ptx(r"cp\.async\.wait_(group\s+\d+|all);", ""), "not waited for"),
    "no barrier": (in_ptx(r"bar\.sync\s+0;", ""), "no barrier in between"),
    "a pointer kept in 32 bits": (in_ptx(r"cvta\.to\.global\.u64\s+(%rd\d+), (%rd\d+);", r"and.b64 \1, \2, 4294967295;"), "address"),
    "rows that are not there are read": (in_source("i < Tq ? lse[i] * LOG2E : 0.f", "lse[i] * LOG2E"), "out of bounds"),
    "a sum over the wrong lanes": (in_ptx(r"shfl\.sync\.bfly", "shfl.sync.down"), "numbers"),
    "the copy's zero fill is left out": (in_ptx(r"(cp\.async\.c[ag]\.shared\.global [^;]*, 16), %r\d+;", r"\1;"), "out of bounds|numbers"),
}


def noticed(monkeypatch, change):
    """"numbers", or the emulator's message, or None."""
    original, (before, after) = cuda_to_ptx.compile_ptx, change
    monkeypatch.setattr(ptx_emulator, "compile_ptx", lambda code, options, arch: after(original(before(code), options, arch)))
    for cache in (compile._load, compile._function):
        monkeypatch.setattr(compile, cache.__name__, cache.__wrapped__)
    try:
        return "numbers" if wrong(Small, Case(45, 70, 32, Band(10, 60, 2), padding=True)) else None
    except PtxError as error:
        return str(error)


@compiled
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault, monkeypatch):
    change, message = FAULTS[fault]
    assert re.search(message, noticed(monkeypatch, change) or "nobody")


@compiled
def test_without_a_fault_nothing_is_noticed(monkeypatch):
    assert noticed(monkeypatch, (lambda code: code, lambda ptx: ptx)) is None


# --- the compilers ----------------------------------------------------------------------------------------------------------

@compiled
def test_errors_name_the_line_of_the_source():
    code = 'extern "C" __global__ void add(float* y, int n) {\n  y[threadIdx.x + n] += 1.f;\n}\n'
    with pytest.raises(PtxError, match=r"(?s)add: global load out of bounds: 4 bytes at byte 128 of .*thread \(2, 0, 0\).*kernel.cu:2"):
        RawModule(code=code).get_function("add")((1,), (32,), (np.zeros(32, np.float32), np.int32(30)))
    with pytest.raises(ValueError, match="cannot compile"):
        RawModule(code=code.replace("+= 1.f", "+= what"))


@pytest.mark.skipif(cuda_to_ptx.nvrtc_library() is None, reason="no NVRTC: pip install nvidia-cuda-nvrtc")
def test_nvrtc_gives_ptx_too(monkeypatch):
    monkeypatch.setattr(cuda_to_ptx.shutil, "which", lambda name: None)
    assert cuda_to_ptx.find_compiler() is cuda_to_ptx.nvrtc
    y = np.zeros(40, np.float32)
    RawModule(code='extern "C" __global__ void fill(float* y) { y[threadIdx.x] = 2.f; }').get_function("fill")((1,), (40,), (y,))
    assert (y == 2).all()


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda_to_ptx.shutil, "which", lambda name: None)
    monkeypatch.setattr(cuda_to_ptx, "nvrtc_library", lambda: None)
    with pytest.raises(ImportError, match=r"tinygrad_tf\[cuda-compile\]"):
        RawModule(code="")
