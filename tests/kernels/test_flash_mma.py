"""flash_attention_mma.cu (float16 and bfloat16, tensor cores) on the emulator, against the definition in float64 of the rounded inputs."""
import os
import shutil

import numpy as np
import pytest
from kernels import kernel_mutants_mma as mutants
from kernels.flash_cases import CAUSAL, OUTPUTS, Case, errors, inputs, reference
from kernels.kernel_mutants_mma import Small, run

from tinygrad_tf.kernels import compile, flash
from tinygrad_tf.ops.flash_attention import Band

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: the emulator compiles kernels with it"),
              pytest.mark.host("runs the kernels on the emulator, with NumPy arrays")]
F16, BF16 = flash.Float16, flash.BFloat16
TOLERANCE = {F16: 1e-3, BF16: 8e-3}             # half a unit in the last place is 5e-4 and 4e-3 of a value; several roundings
LSE_TOLERANCE = 2e-6                            # lse is float32 throughout


class SmallBF16(Small):
    bf16 = 1


# --- 16-bit numbers without a library -------------------------------------------------------------------------------

def bits(x):
    """uint16: the upper half of a float32, rounded to nearest even, is a bfloat16."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, (u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def floats(x):
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def rounded(case, tier):
    """(what the kernel gets, the same numbers as floats)"""
    if not tier.bf16:
        given = inputs(case, np.float16)
        return given, given
    given = inputs(case)
    given = given._replace(**{name: bits(getattr(given, name)) for name in ("q", "k", "v", "d_o")})
    return given, given._replace(**{name: floats(getattr(given, name)) for name in ("q", "k", "v", "d_o")})


def wrong(case, tier, given=None):
    """The outputs whose error is above the tolerance."""
    given, numbers = given or rounded(case, tier)
    got = run(case, given, tier)
    want = reference(case, numbers)
    assert [x.shape for x in got] == [x.shape for x in want] and {x.dtype for x in got[:1] + got[2:]} == {given.q.dtype}
    found = dict(zip(OUTPUTS, errors([floats(x) for x in got], want)))
    bound = TOLERANCE[BF16 if tier.bf16 else F16]
    return {name: e for name, e in found.items() if not e <= (LSE_TOLERANCE if name == "lse" else bound)}


# --- right numbers --------------------------------------------------------------------------------------------------

REAL = [                                        # with the tiles that a GPU gets
    (F16, Case(77, 133, 64, CAUSAL, heads=(2, 1), B=1)), (F16, Case(133, 70, 64, Band(-20, 40, 5), padding=True, heads=(2, 2))),
    (BF16, Case(65, 129, 64, Band(64, None, 0), padding=True)), (BF16, Case(130, 65, 64, heads=(4, 2), B=1)),
    (F16, Case(65, 66, 128, Band(1, 20, 0), padding=True, heads=(1, 1))), (F16, Case(5, 133, 128, Band(128, None, 0), heads=(3, 1), B=1)),
    (BF16, Case(70, 66, 128, CAUSAL, padding=True, B=1)), (BF16, Case(130, 33, 128, heads=(2, 2), B=1)),
    (F16, Case(33, 70, 80, Band(37, None, 0), B=1)), (BF16, Case(33, 40, 10, CAUSAL, Dv=60, B=1)),
]
SMALL = [                                       # tiles of 32 and 64 rows, 32 columns: many tiles in small cases
    Case(1, 1, 32), Case(1, 133, 32), Case(133, 1, 32), Case(63, 65, 32), Case(65, 63, 32, heads=(4, 1)), Case(64, 64, 32, CAUSAL),
    Case(77, 133, 32, CAUSAL), Case(133, 77, 32, CAUSAL, padding=True), Case(77, 133, 32, Band(56, None, 0), heads=(6, 2), B=1),
    Case(133, 77, 32, Band(-56, None, 0)), Case(133, 133, 32, Band(0, 9, 0)), Case(133, 65, 32, Band(-10, 20, 0), padding=True),
    Case(133, 133, 32, Band(0, 5, 5), heads=(3, 3), B=1), Case(65, 257, 32, Band(100, 30, 30), B=1), Case(77, 65, 32, Band(3, 0, 0)),
    Case(65, 133, 32, Band(0, None, 17)), Case(65, 133, 32, Band(0, 17, None)), Case(65, 133, 32, Band(40, -3, 70)),
    Case(40, 50, 32, Band(1000, 3, 0)), Case(40, 50, 32, Band(-1000, None, 0)), Case(40, 50, 32, Band(1000, None, 0), padding=True),
    Case(40, 50, 32, Band(flash.LONGEST, None, 0)), Case(40, 50, 32, Band(-flash.LONGEST, None, None)), Case(33, 40, 5, CAUSAL),
]


@pytest.mark.parametrize("tier, case", REAL, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_outputs_and_gradients(tier, case):
    assert not wrong(case, tier)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_outputs_and_gradients_over_many_tiles(case):
    assert not wrong(case, Small) and not wrong(case, SmallBF16)


@pytest.mark.parametrize("tier, head_dim", [(F16, 16), (BF16, 32)])
def test_small_heads_have_their_own_kernels(head_dim, tier):
    assert not wrong(Case(40, 50, head_dim, Band(4, 20, 0), padding=True), tier)


@pytest.mark.parametrize("scale", [0.0, -0.7, 0.7])
def test_any_scale(scale, monkeypatch):
    monkeypatch.setattr(Case, "scale", scale)
    assert not wrong(Case(40, 50, 32, CAUSAL, padding=True), Small)


def test_large_scores_do_not_overflow():
    case = Case(40, 50, 32, CAUSAL)
    given = inputs(case, np.float16)
    given = given._replace(q=given.q * np.float16(30), k=given.k * np.float16(30))
    found = wrong(case, Small, (given, given))
    assert not {n: e for n, e in found.items() if e > 3e-3}         # scores of a thousand: their last bit is 6e-5 of P


def test_a_score_that_is_not_a_number_is_not_hidden():
    case = Case(40, 50, 32, B=1)
    given = inputs(case, np.float16)
    given.q[0, 0, 3] = np.nan
    o, lse, *_ = run(case, given, Small)
    assert np.isnan(o[0, 0, 3]).all() and np.isnan(lse[0, 0, 3]) and np.isfinite(np.delete(o[0, 0], 3, axis=0)).all()


# --- every order of threads and blocks, every run: the same bits ------------------------------------------------------

ORDERED = [(F16, Case(70, 66, 64, Band(-5, 40, 5), padding=True, B=1)), (BF16, Case(66, 40, 128, CAUSAL, B=1)),
           (Small, SMALL[7]), (SmallBF16, SMALL[9])]


@pytest.mark.parametrize("seed", [1, 7])        # reversed, shuffled
@pytest.mark.parametrize("tier, case", ORDERED, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_no_order_of_threads_and_blocks_changes_a_bit(tier, case, seed):
    from tinygrad_tf.kernels.cpu_emulator import schedule
    given, _ = rounded(case, tier)
    want = run(case, given, tier)
    with schedule(seed=seed):
        assert all(np.array_equal(a, b) for a, b in zip(want, run(case, given, tier)))


def test_two_runs_agree_bit_for_bit():
    case = SMALL[10]
    given, _ = rounded(case, Small)
    assert all(np.array_equal(a, b) for a, b in zip(run(case, given, Small), run(case, given, Small)))


# --- NaN and inf in hidden places -------------------------------------------------------------------------------------

@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tier", [Small, SmallBF16])
def test_padding_may_hold_anything(tier, value):
    case = Case(65, 77, 32, CAUSAL, padding=True)
    given, _ = rounded(case, tier)
    value = bits(np.float32(value)) if tier.bf16 else value
    bad = given._replace(k=given.k.copy(), v=given.v.copy())
    for x in (bad.k, bad.v):
        x[0, :, 2 * case.Tk // 3:] = x[1] = value
    assert all(np.array_equal(a, b) for a, b in zip(run(case, given, tier), run(case, bad, tier)))


def test_a_nan_beyond_the_band_of_a_block_is_never_read():
    """Within the keys that a block streams, 0 · NaN is NaN as in any dense product; what no query of the block sees stays out."""
    case = Case(128, 128, 32, CAUSAL, B=1)
    given = inputs(case, np.float16)
    bad = given._replace(k=given.k.copy(), v=given.v.copy())
    bad.k[:, :, 96:] = bad.v[:, :, 96:] = np.nan
    for name, got, want in zip(("o", "lse", "dq"), run(case, bad, Small), run(case, given, Small)):
        assert np.array_equal(got[:, :, :64], want[:, :, :64]), name         # the second block of 64 queries sees keys 0 to 127


# --- one instruction at a time ----------------------------------------------------------------------------------------

ONE_WARP = """
typedef unsigned short half_t;                      // CUDA_ON_CPU: the emulator has the instructions
extern "C" __global__ void product(const half_t* a, const half_t* b, const half_t* b_trans, float* c, float* c_trans) {
    DYNAMIC_SHARED(half_t, tile);                   // a: 16 x 16, b: 16 x 16 (columns as rows), b_trans: 16 x 16
    int lane = threadIdx.x;
    for (int i = lane; i < 32; i += 32) {
        copy_async(tile + 8 * i, a + 8 * i, true);
        copy_async(tile + 256 + 8 * i, b + 8 * i, true);
        copy_async(tile + 512 + 8 * i, b_trans + 8 * i, true);
    }
    copy_commit();
    copy_wait<0>();
    __syncwarp();
    unsigned left[4], right[4], other[4];
    ldmatrix(left, tile + lane % 16 * 16 + lane / 16 * 8);
    ldmatrix(right, tile + 256 + (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * 8);
    ldmatrix_trans(other, tile + 512 + lane % 16 * 16 + lane / 16 * 8);
    for (int n = 0; n < 2; ++n) {
        float x[4] = {1, 2, 3, 4}, y[4] = {0, 0, 0, 0};
        mma(x, left, right[2 * n], right[2 * n + 1]);
        mma(y, left, other[2 * n], other[2 * n + 1]);
        for (int e = 0; e < 4; ++e) {
            int at = (lane / 4 + e / 2 * 8) * 16 + 8 * n + 2 * (lane % 4) + e % 2;
            c[at] = x[e];
            c_trans[at] = y[e];
        }
    }
}
extern "C" __global__ void copies(const half_t* from, half_t* to, int there) {
    DYNAMIC_SHARED(half_t, tile);
    copy_async(tile + 8 * threadIdx.x, from + 8 * threadIdx.x, (int)threadIdx.x < there);
    copy_commit();
    copy_wait<0>();
    for (int i = 0; i < 8; ++i) to[8 * threadIdx.x + i] = tile[8 * threadIdx.x + i];
}
extern "C" __global__ void roundings(const float* from, unsigned* packed, float* back) {
    unsigned x = pack(from[2 * threadIdx.x], from[2 * threadIdx.x + 1]);
    packed[threadIdx.x] = x;
    back[2 * threadIdx.x] = unpack(x & 0xffff);
    back[2 * threadIdx.x + 1] = unpack(x >> 16);
}
"""


def one_warp(kernel, tier, *args):
    from tinygrad_tf.kernels.cpu_emulator import RawModule
    module = RawModule(code=ONE_WARP, options=(f"-DBF16={tier.bf16}",))
    compile.launch(module.get_function(kernel), (1,), 32, args, 3 * 512)


@pytest.mark.parametrize("tier", [F16, BF16])
def test_mma_and_ldmatrix_are_a_matrix_product(tier):
    random = np.random.default_rng(3)
    a, b, b_trans = (random.standard_normal((16, 16)).astype(np.float32) for _ in range(3))
    a, b, b_trans = (bits(x) if tier.bf16 else x.astype(np.float16) for x in (a, b, b_trans))
    c, c_trans = np.full((2, 16, 16), np.nan, np.float32)
    one_warp("product", tier, a, b, b_trans, c, c_trans)
    a, b, b_trans = (floats(x).astype(np.float64) for x in (a, b, b_trans))
    start = np.where(np.arange(16)[:, None] < 8, 1, 3) + np.arange(16) % 2        # x = {1, 2, 3, 4}: the accumulator is added to
    assert np.abs(c - (a @ b.T + start)).max() < 1e-5 and np.abs(c_trans - a @ b_trans).max() < 1e-5


@pytest.mark.parametrize("there", [0, 5, 32])
def test_a_copy_that_is_not_there_is_zeros_and_reads_nothing(there):
    to = np.full(256, 7, np.uint16)
    given = np.arange(1, 257, dtype=np.uint16)[:8 * there]          # reading past its end would be noticed
    one_warp("copies", F16, given if there else np.zeros(1, np.uint16), to, there)
    assert np.array_equal(to, np.pad(given, (0, 256 - given.size)))


@pytest.mark.parametrize("tier", [F16, BF16])
def test_rounding_is_to_nearest_even(tier):
    ties = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]
    edges = [0, -0.0, 1, 65504, 65520, 1e-7, -3e-8, 3e38, np.inf, -np.inf, np.pi, np.nan]
    x = np.array([*ties, *edges, *np.random.default_rng(0).standard_normal(48) * 100], np.float32)
    packed, back = np.zeros(32, np.uint32), np.zeros(64, np.float32)
    one_warp("roundings", tier, x, packed, back)
    with np.errstate(over="ignore"):
        want = floats(bits(x)) if tier.bf16 else x.astype(np.float16).astype(np.float32)
    assert np.array_equal(back, want, equal_nan=True) and np.array_equal(packed & 0xFFFF, packed.view(np.uint16)[::2])


# --- host code --------------------------------------------------------------------------------------------------------

def test_the_tier_follows_the_dtype():
    half, single, raw = (np.zeros((1, 1, 2, 64), t) for t in (np.float16, np.float32, np.uint16))
    assert flash.refusal(half, half, half) is None and flash.refusal(raw, raw, raw, BF16) is None
    assert flash.refusal(half, single, half)[0] is TypeError and flash.refusal(raw, raw, raw)[0] is TypeError
    assert "uint16" in flash.refusal(raw, raw, raw)[1]


@pytest.mark.parametrize("tier", [F16, BF16])
def test_every_gpu_since_sm_80_has_a_tile(tier):
    for head_dim, table in tier.tiles.items():
        for kernel in mutants.KERNELS:
            assert tier.shared_bytes(kernel, head_dim, table[-1]) <= 99 << 10


def test_rows_anywhere_in_memory():
    case = Case(33, 40, 32, CAUSAL, padding=True)
    given, _ = rounded(case, SmallBF16)

    def apart(x):
        wide = np.full((*x.shape[:2], 2 * x.shape[2], x.shape[3] + 8), 0x7FFF, x.dtype)
        wide[:, :, ::2, :-8] = x
        return wide[:, :, ::2, :-8]
    strided = given._replace(q=apart(given.q), k=given.k.swapaxes(1, 2).copy().swapaxes(1, 2), v=np.asfortranarray(given.v),
                             d_o=apart(given.d_o))
    assert all(np.array_equal(a, b) for a, b in zip(run(case, given, SmallBF16), run(case, strided, SmallBF16)))


def test_arrays_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = Case(33, 40, 32, CAUSAL, padding=True)
    given, _ = rounded(case, BF16)
    typed = given._replace(**{n: getattr(given, n).view(ml_dtypes.bfloat16) for n in ("q", "k", "v", "d_o")})
    got = run(case, typed)
    assert got[0].dtype == ml_dtypes.bfloat16
    assert all(np.array_equal(a.view(np.uint16), b.view(np.uint16)) for a, b in zip(run(case, given, BF16), got))


@pytest.mark.parametrize("kernel", mutants.KERNELS)
def test_no_access_to_shared_memory_waits_for_a_bank(kernel, monkeypatch):
    counted = compile.function(F16.file, F16.options(64, F16.tiles[64][0]), kernel, np)
    monkeypatch.setattr(counted, "count_traffic", True)
    assert not wrong(Case(40, 70, 64, B=1), F16)
    shared = [line for line in counted.traffic if line.space == "shared"]
    assert {line.bytes for line in shared} >= {4, 16} and all(line.factor == 1 for line in shared)


# --- planted mistakes -------------------------------------------------------------------------------------------------

SOME = ["flash_dq: no __syncthreads", "flash_forward: no copy_wait", "rescale by the other row's factor", "load: padding is read",
        "P: rows g and g + 8 exchanged"]
CHOSEN = list(mutants.MUTANTS) if os.environ.get("KERNEL_MUTANTS") == "all" else SOME


def test_the_kernel_as_it_is_passes():
    assert mutants.noticed(None) is None


@pytest.mark.parametrize("name", CHOSEN)
def test_a_planted_mistake_is_noticed(name):
    assert mutants.noticed(name) is not None


def test_every_mutant_changes_the_source_and_every_barrier_has_one():
    code = mutants.source()
    assert all(change(code) != code for change in mutants.MUTANTS.values() if change) and len(mutants.MUTANTS) >= 60
    assert code.count("__syncthreads();") == 3 and code.count("__syncwarp();") == 2 and code.count("copy_wait<0>();") == 3
