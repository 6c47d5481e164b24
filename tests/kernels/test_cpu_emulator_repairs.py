"""Each fault beside its repair: the emulator names the fault, its line and its remedy, and is silent about the repaired kernel.

The kernels below are compiled twice. ONLY(x) is there in the repaired ones alone; EITHER(wrong, right) is what it says. Tensor
core instructions against NumPy stand at the end.
"""
import functools
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_tf.kernels import cpu_emulator
from tinygrad_tf.kernels.cpu_emulator import Fault, KernelError, LaunchError, RawModule, schedule, uninitialised, unwritten

pytestmark = [pytest.mark.skipif(cpu_emulator.refusal() is not None, reason=str(cpu_emulator.refusal())),
              pytest.mark.host("the emulator runs on NumPy arrays")]
SEEDS = (0, 1, 2, 3)

SOURCE = r'''
#ifdef CUDA_ON_CPU                      // mma, ldmatrix and copies in the background
#endif
#ifdef REPAIRED
#define ONLY(...) __VA_ARGS__
#define EITHER(wrong, right) right
#else
#define ONLY(...)
#define EITHER(wrong, right) wrong
#endif
#define KERNEL(name) extern "C" __global__ void name(const float* a, float* x, int n)
#define I (int)threadIdx.x

KERNEL(barrier_after_store) {
    __shared__ float s[64];
    s[I] = a[I];                                                            // <- barrier_after_store
    ONLY(__syncthreads();)
    x[I] = s[63 - I];                                                       // <- barrier_after_store
}
KERNEL(barrier_before_next_round) {
    __shared__ float s[64];
    for (int round = 0; round < 3; ++round) {
        s[I] = a[I] + round;                                                // <- barrier_before_next_round
        __syncthreads();
        x[I] = s[63 - I];                                                   // <- barrier_before_next_round
        ONLY(__syncthreads();)
    }
}
KERNEL(barrier_of_a_warp) {
    __shared__ float s[64];
    s[I] = a[I];                                                            // <- barrier_of_a_warp
    ONLY(__syncwarp();)
    x[I] = s[I ^ 1];                                                        // <- barrier_of_a_warp
}
KERNEL(a_warp_barrier_is_none_for_the_block) {
    __shared__ float s[64];
    s[I] = a[I];                                                            // <- a_warp_barrier_is_none_for_the_block
    EITHER(__syncwarp(), __syncthreads());
    x[I] = s[I ^ 32];                                                       // <- a_warp_barrier_is_none_for_the_block
}
KERNEL(barrier_for_global_memory) {
    x[I] = a[I];                                                            // <- barrier_for_global_memory
    ONLY(__syncthreads();)
    float other = x[63 - I];                                                // <- barrier_for_global_memory
    __syncthreads();
    x[I] = other;
}
KERNEL(half_of_the_block_at_a_barrier) {
    if (EITHER(I >= 32, false)) return;
    __syncthreads();                                                        // <- half_of_the_block_at_a_barrier
    x[I] = 0.f;
}
KERNEL(two_barriers_in_two_branches) {
    if (I < 32) x[I] = 0.f;
    else x[I] = 1.f;
    if (EITHER(I < 32, true)) __syncthreads();                              // <- two_barriers_in_two_branches
    else __syncthreads();                                                   // <- two_barriers_in_two_branches
}
KERNEL(blocks_share_an_element) {
    int i = blockIdx.x * EITHER(63, 64) + I;
    x[i] = a[i];                                                            // <- blocks_share_an_element
    ONLY(x[i] = a[i];)
}
KERNEL(block_reads_what_another_writes) {
    int i = blockIdx.x * 64 + I;
    x[i] = a[i];                                                            // <- block_reads_what_another_writes
    __syncthreads();
    if (x[EITHER(I, i)] > 1e9f) x[i] = 0.f;                                 // <- block_reads_what_another_writes
}
KERNEL(counting_without_atomics) {
    EITHER(x[0] += 1.f, atomicAdd(x, 1.f));                                 // <- counting_without_atomics
}
KERNEL(atomics_and_a_plain_load) {
    atomicAdd(x, 1.f);                                                      // <- atomics_and_a_plain_load
    ONLY(__syncthreads();)
    if (x[0] < 0.f) x[1 + I] = 0.f;                                         // <- atomics_and_a_plain_load
}
KERNEL(store_past_the_end) {
    if (I EITHER(<=, <) n) x[64 + I] = 0.f;                                 // <- store_past_the_end
}
KERNEL(load_past_the_end) {
    x[I] = a[64 + EITHER(I + 1, I)];                                        // <- load_past_the_end
}
KERNEL(load_before_the_beginning) {
    x[I] = a[EITHER(I - 1, max(I - 1, 0))];                                 // <- load_before_the_beginning
}
KERNEL(an_index_of_a_shared_array) {
    __shared__ float s[8][8];
    s[I / 8][I % 8] = a[I];
    __syncthreads();
    x[I] = s[I % 8][I / 8 + EITHER(1, 0)];                                  // <- an_index_of_a_shared_array
}
KERNEL(a_pointer_past_a_shared_array) {
    __shared__ float s[64];
    float* p = s + EITHER(1, 0);
    p[I] = a[I];                                                            // <- a_pointer_past_a_shared_array
    __syncthreads();
    x[I] = s[63 - I];
}
KERNEL(a_load_past_a_shared_array) {
    __shared__ float s[64];
    s[I] = a[I];
    __syncthreads();
    x[I] = (&s[0])[I + EITHER(1, 0)];                                       // <- a_load_past_a_shared_array
}
KERNEL(past_dynamic_shared_memory) {
    extern __shared__ float d[];
    d[I + EITHER(64, 0)] = a[I];                                            // <- past_dynamic_shared_memory
    x[I] = 0.f;
}
KERNEL(a_null_pointer) {
    const float* volatile nowhere = EITHER(nullptr, a);
    x[I] = nowhere[I];                                                      // <- a_null_pointer
}
KERNEL(calls_a_function_that_is_nowhere) {
    float (*volatile nowhere)(float) = EITHER(nullptr, fabsf);
    x[I] = nowhere(a[I]);
}
KERNEL(another_array_by_accident) {
    x[I] = a[I + EITHER(5000000, 0)];                                       // <- another_array_by_accident
}
KERNEL(shared_memory_nobody_set) {
    __shared__ float s[64];
    if (I < EITHER(63, 64)) s[I] = a[I];
    __syncthreads();
    x[I] = s[63 - I];                                                       // <- shared_memory_nobody_set
}
KERNEL(shared_memory_of_the_block_before) {
    __shared__ float s[64];
    if (blockIdx.x == 0 || EITHER(false, true)) s[I] = a[I];
    __syncthreads();
    x[blockIdx.x * 64 + I] = s[I];                                          // <- shared_memory_of_the_block_before
}
KERNEL(adding_to_an_output_nobody_set) {
    x[I] EITHER(+=, =) a[I];                                                // <- adding_to_an_output_nobody_set
}
KERNEL(misaligned_vector) {
    if (I < 16) reinterpret_cast<float4*>(x + EITHER(2, 4))[I] = reinterpret_cast<const float4*>(a)[I];     // <- misaligned_vector
}
KERNEL(shuffle_from_a_lane_that_returned) {
    if (I >= EITHER(48, 64)) return;
    x[I] = __shfl_down_sync(0xffffffffu, a[I], 16);                         // <- shuffle_from_a_lane_that_returned
}
KERNEL(shuffle_from_outside_of_the_mask) {
    float v = 0.f;
    if (I % 32 < 16) v = __shfl_sync(0x0000ffffu, a[I], I % 32 + EITHER(1, 0));     // <- shuffle_from_outside_of_the_mask
    x[I] = v;
}
KERNEL(not_in_its_own_mask) {
    x[I] = __shfl_sync(EITHER(0x7fffffffu, 0xffffffffu), a[I], 0);          // <- not_in_its_own_mask
}
KERNEL(shuffle_in_a_branch) {
    float v = a[I];
    if (I % 32 < 16 EITHER(, || true)) v = __shfl_xor_sync(0xffffffffu, v, 1);      // <- shuffle_in_a_branch
    __syncthreads();
    x[I] = v;
}
KERNEL(copy_not_waited_for) {
    __shared__ __align__(16) float s[256];
    copy_async(s + 4 * I, a + 4 * I);                                       // <- copy_not_waited_for
    copy_commit();
    copy_wait<EITHER(1, 0)>();
    __syncthreads();
    x[I] = s[I];                                                            // <- copy_not_waited_for
    copy_wait<0>();
}
KERNEL(copy_waited_for_by_its_thread_alone) {
    __shared__ __align__(16) float s[256];
    copy_async(s + 4 * I, a + 4 * I);                                       // <- copy_waited_for_by_its_thread_alone
    copy_commit();
    copy_wait<0>();
    ONLY(__syncthreads();)
    x[I] = s[255 - I];                                                      // <- copy_waited_for_by_its_thread_alone
}
KERNEL(copy_under_way_at_the_end) {
    __shared__ __align__(16) float s[256];
    copy_async(s + 4 * I, a + 4 * I);                                       // <- copy_under_way_at_the_end
    copy_commit();
    ONLY(copy_wait<0>();)
}
KERNEL(matrix_product_of_half_a_warp) {
    float c[4] = {};
    const unsigned b[4] = {};
    if (I % 32 < EITHER(16, 32)) mma(c, b, 0, 0);                           // <- matrix_product_of_half_a_warp
    x[I] = c[0];
}
KERNEL(waiting_in_a_loop) {
    volatile float* flag = x;
    if (I == 0) { EITHER(while (flag[0] != 1.f) {}, flag[1] = 0.f); }
    __syncthreads();
    if (I == 1) flag[0] = 1.f;
}
KERNEL(runs_for_ever) {
    volatile int go = EITHER(1, 0);
    while (go) {}
    x[I] = 0.f;
}
KERNEL(needs_a_megabyte) {                                                  // <- needs_a_megabyte
    volatile float local[EITHER(1 << 18, 1 << 8)];
    for (int i = 0; i < sizeof local / 4; i += 1024) local[i] = a[I];
    x[I] = local[0];
}
KERNEL(calls_itself_for_ever) {
    struct Deep { static float er(volatile float* p, int k) { volatile float pad[64]; pad[k & 63] = *p; return er(pad, k + 1) + pad[0]; } };
    volatile float start = 0.f;
    x[I] = EITHER(Deep::er(&start, 0), start);
}
KERNEL(divides_by_zero) {
    x[I] = I / EITHER((n - 64), n);                                         // <- divides_by_zero
}
KERNEL(index_beyond_32_bits) {
    EITHER(int, long long) row = 100000 + I;
    x[I] = row * 100000;                                                    // <- index_beyond_32_bits
}
KERNEL(stores_to_const) {
    EITHER(const_cast<float*>(a), x)[I] = 0.f;                              // <- stores_to_const
}
KERNEL(an_assertion) {
    assert(n == EITHER(63, 64));                                            // <- an_assertion
    x[I] = 0.f;
}
KERNEL(stops_itself) {
    if (n == EITHER(64, 63)) __builtin_trap();                              // <- stops_itself
    x[I] = 0.f;
}
struct Shape { __device__ Shape(int n) { see(n); } __device__ void see(int n) { if (n) area(); } virtual float area() const = 0; };
struct Square : Shape { using Shape::Shape; float area() const override { return 4.f; } };
KERNEL(calls_a_pure_virtual_function) {
    Square square(EITHER(n, 0));
    const Shape* volatile shape = &square;
    x[I] = shape->area();
}
KERNEL(a_variable_of_the_module) {
    static float total;
    if (I == 0) EITHER(total, x[0]) = a[I];                                 // <- a_variable_of_the_module
    __syncthreads();
    if (I == 1) x[1] = EITHER(total, x[0]);
}
'''


@functools.cache
def compiled(repaired):
    return RawModule(code=SOURCE, options=("-DREPAIRED",) if repaired else (), name="faults.cu")


@dataclass
class Planted:
    kernel: str
    kind: str                                   # how the kind of the fault begins
    words: list = field(default_factory=list)
    grid: int = 1
    block: int = 64
    set_before: bool = False                    # the output holds zeros

    @property
    def lines(self):
        return [i for i, line in enumerate(SOURCE.splitlines(), 1) if line.endswith(f"// <- {self.kernel}")]

    def run(self, repaired, seed):
        a = np.random.default_rng(0).standard_normal(320).astype(np.float32)[:256 if self.kernel.startswith("copy") else 128]
        x = np.zeros(128, np.float32) if self.set_before else uninitialised(128)
        kernel = compiled(repaired).get_function(self.kernel)
        kernel.time_limit = 0.1
        with schedule(seed):
            kernel((self.grid,), (self.block,), (a, x, np.int32(64)), shared_mem=256)


TABLE = [
    Planted("barrier_after_store", "race between warps", ["put __syncthreads() between", "shared `s`"]),
    Planted("barrier_before_next_round", "race between warps", ["put __syncthreads() between"]),
    Planted("barrier_of_a_warp", "race in a warp", ["put __syncwarp()"]),
    Planted("a_warp_barrier_is_none_for_the_block", "race between warps", ["put __syncthreads() between"]),
    Planted("barrier_for_global_memory", "race between warps", ["`x["]),
    Planted("half_of_the_block_at_a_barrier", "divergent barrier", ["only 32 of the block's 64 threads"]),
    Planted("two_barriers_in_two_branches", "divergent barrier", ["wait"]),
    Planted("blocks_share_an_element", "race between blocks", ["`x[63]`", "Blocks run in any order"], grid=2),
    Planted("block_reads_what_another_writes", "race between blocks", ["another block's"], grid=2),
    Planted("counting_without_atomics", "race", ["`x[0]`"], set_before=True),
    Planted("atomics_and_a_plain_load", "race", ["atomic operation"], set_before=True),
    Planted("store_past_the_end", "out of bounds", ["store of 4 bytes at `x[128]`, but `x` ends at [127]"], block=128),
    Planted("load_past_the_end", "out of bounds", ["load of 4 bytes at `a[128]`, but `a` ends at [127]"]),
    Planted("load_before_the_beginning", "out of bounds", ["`a[-1]`"]),
    Planted("an_index_of_a_shared_array", "out of bounds", ["index 8", "float [8]"]),
    Planted("a_pointer_past_a_shared_array", "out of bounds", ["shared `s`, byte 256", "has 256 bytes"]),
    Planted("a_load_past_a_shared_array", "out of bounds", ["load of 4 bytes at shared `s`, byte 256", "has 256 bytes"]),
    Planted("past_dynamic_shared_memory", "out of bounds", ["dynamic shared memory, byte", "asked for shared_mem=256"]),
    Planted("a_null_pointer", "out of bounds", ["null pointer"]),
    Planted("calls_a_function_that_is_nowhere", "out of bounds", ["null pointer"]),
    Planted("another_array_by_accident", "out of bounds", ["wild pointer"]),
    Planted("shared_memory_nobody_set", "uninitialised", ["shared `s`, byte 252", "nobody has set in this block"]),
    Planted("shared_memory_of_the_block_before", "uninitialised", ["in this block"], grid=2),
    Planted("adding_to_an_output_nobody_set", "uninitialised", ["`x["]),
    Planted("misaligned_vector", "misaligned", ["no multiple of 16"]),
    Planted("shuffle_from_a_lane_that_returned", "absent lane", ["has returned"]),
    Planted("shuffle_from_outside_of_the_mask", "absent lane", ["lane 15 reads from lane 16", "not in the mask"]),
    Planted("not_in_its_own_mask", "mask", ["lane 31 is not in its own mask"]),
    Planted("shuffle_in_a_branch", "deadlock", ["nothing can go on", "waits at __syncthreads"]),
    Planted("copy_not_waited_for", "copy", ["copy_wait"]),
    Planted("copy_waited_for_by_its_thread_alone", "race", ["shared `s`"]),
    Planted("copy_under_way_at_the_end", "copy", ["a thread ends while a copy"]),
    Planted("matrix_product_of_half_a_warp", "absent lane", ["mma needs all 32 lanes", "only 16"]),
    Planted("waiting_in_a_loop", "time limit", ["0.1 s"], set_before=True),
    Planted("runs_for_ever", "time limit", ["0.1 s"]),
    Planted("needs_a_megabyte", "stack overflow", ["too large arrays"]),
    Planted("calls_itself_for_ever", "stack overflow", ["recursion"]),
    Planted("divides_by_zero", "arithmetic", ["divided by zero"]),
    Planted("index_beyond_32_bits", "arithmetic", ["100000 does not fit into 'int'"]),
    Planted("stores_to_const", "read-only", ["pointer to const"]),
    Planted("an_assertion", "stopped", ["assert(n == ", "is false"]),
    Planted("stops_itself", "stopped", ["stopped itself"]),
    Planted("calls_a_pure_virtual_function", "stopped", ["pure virtual"]),
    Planted("a_variable_of_the_module", "out of bounds", ["variable of the module"]),
]
every_planted = pytest.mark.parametrize("planted", TABLE, ids=lambda planted: planted.kernel)


@every_planted
def test_a_fault_is_named_in_every_order(planted):
    for seed in SEEDS:
        with pytest.raises(KernelError) as caught:
            planted.run(False, seed)
        error = caught.value
        fault = next((fault for fault in error.faults if fault.kind.startswith(planted.kind)), None)
        assert fault, f"order {seed}: {error}"
        assert [word for word in planted.words if word not in str(error)] == [], error
        assert "[block " in str(error) and (fault.thread >= 0 or not planted.lines)
        if planted.lines:
            assert fault.line in planted.lines and f"faults.cu:{fault.line}" in str(error), error


@every_planted
def test_its_repair_is_not_complained_about_in_any_order(planted):
    for seed in SEEDS:
        planted.run(True, seed)


def test_the_table_has_every_kernel_of_the_source():
    assert sorted(compiled(False).library.kernels) == sorted(planted.kernel for planted in TABLE)


def test_every_kind_of_fault_is_planted():
    told = set(re.findall(r'"([\w ]+)"', Fault.__doc__)) - {"memory"}              # of which this machine has enough
    assert [kind for kind in sorted(told) if not any(kind.startswith(planted.kind) for planted in TABLE)] == []


# --- limits of shared memory ----------------------------------------------------------------------------------------------------

def test_declared_shared_memory_counts():
    module = RawModule(code="""
extern "C" __global__ void big(float* x) { __shared__ float s[13000]; s[0] = 1.f; __syncthreads(); x[0] = s[0]; }
extern "C" __global__ void some(float* x) { __shared__ float s[10000]; s[0] = 1.f; __syncthreads(); x[0] = s[0]; }""")
    with pytest.raises(LaunchError, match="52000 bytes; at most 49152 can be declared"):
        module.get_function("big")
    kernel, x = module.get_function("some"), uninitialised(1)
    with pytest.raises(LaunchError, match="allowed are 9152"):
        kernel((1,), (1,), (x,), shared_mem=9200)
    kernel((1,), (1,), (x,), shared_mem=9152)
    kernel.max_dynamic_shared_size_bytes = 100 << 10
    kernel((1,), (1,), (x,), shared_mem=100 << 10)
    with pytest.raises(LaunchError, match="40000 are taken"):
        kernel.max_dynamic_shared_size_bytes = 220 << 10


def test_a_grid_no_memory_could_hold_is_refused():
    kernel = compiled(True).get_function("an_assertion")
    with pytest.raises(LaunchError, match="the emulator runs at most"):
        kernel((2**31 - 1, 65535), (64,), (np.zeros(64, np.float32), np.zeros(64, np.float32), np.int32(64)))
    with pytest.raises(TypeError, match="must be a tuple"):
        kernel((1,), (64,), np.zeros(3, np.float32))


def test_arrays_of_every_shape_and_stride():
    """A kernel gets a pointer to the first element, also of an array that runs backwards, has gaps, or shares memory with another."""
    kernel = RawModule(code="""extern "C" __global__ void twice(const float* a, float* x, long long step) {
        x[threadIdx.x] = 2.f * a[threadIdx.x * step];
    }""").get_function("twice")
    base = np.arange(16, dtype=np.float32)
    for view in (base, base[::-1], base[3::2], base[3:9], np.broadcast_to(base[:1], (5,)), base.reshape(4, 4)[:, 1]):
        x = uninitialised(view.shape)
        kernel((1,), (len(view),), (view, x, np.int64(view.strides[0] // 4)))
        np.testing.assert_array_equal(x, 2 * view)
    with pytest.raises(KernelError, match="race"):
        kernel((1,), (15,), (base[:15], base[1:], np.int64(1)))         # the same memory by two names: one thread's element is another's
    x = base.copy()
    kernel((1,), (16,), (x, x, np.int64(1)))
    np.testing.assert_array_equal(x, 2 * base)


# --- compiling --------------------------------------------------------------------------------------------------------------------

def test_what_stands_in_a_header_is_part_of_the_key(tmp_path):
    code = '#include "number.h"\nextern "C" __global__ void number(float* x) { x[0] = NUMBER; }'
    for number in (3, 4):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}.f\n", encoding="utf-8")
        x = uninitialised(1)
        RawModule(code=code, options=(f"-I{tmp_path}",)).get_function("number")((1,), (1,), (x,))
        assert x == number and not unwritten(x).any()


def test_another_compiler_by_name_is_passed_over_where_it_is_not_gcc(tmp_path, monkeypatch):
    """CXX=clang++ is common; g++ beside it serves."""
    monkeypatch.setenv("CXX", str(tmp_path / "clang++"))
    (tmp_path / "clang++").write_text("#!/bin/sh\necho '#define __clang__ 1'; echo '#define __GNUC__ 4'\n", encoding="utf-8")
    (tmp_path / "clang++").chmod(0o755)
    assert cpu_emulator.refusal() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not GCC (Clang is not supported)" in cpu_emulator.refusal()


# --- instructions of tensor cores ----------------------------------------------------------------------------------------------------

TENSOR = r'''
#ifdef CUDA_ON_CPU
#endif
// A fragment of a: registers of two 16-bit values. `memory` is [16, 16] for a, [16, 8] for b: ldmatrix brings both into their places.
extern "C" __global__ void product(const unsigned short* a, const unsigned short* b, float* c) {
    __shared__ __align__(16) unsigned short sa[16][24], sb[16][24];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += 32) sa[i / 16][i % 16] = a[i];
    for (int i = lane; i < 256; i += 32) sb[i / 16][i % 16] = i % 16 < 8 ? b[i / 16 * 8 + i % 16] : 0;
    __syncwarp();
    unsigned fa[4], fb[4];
    ldmatrix(fa, &sa[lane % 16][lane / 16 * 8]);
    ldmatrix_trans(fb, &sb[lane % 16][lane / 16 * 8]);
    float sum[4] = {};
    mma(sum, fa, fb[0], fb[1]);
    for (int e = 0; e < 4; ++e) c[(g + 8 * (e / 2)) * 8 + 2 * t + e % 2] = sum[e];
}
extern "C" __global__ void matrices(const unsigned short* x, unsigned* plain, unsigned* transposed) {
    __shared__ __align__(16) unsigned short s[32][8];
    const int lane = threadIdx.x;
    for (int j = 0; j < 8; ++j) s[lane][j] = x[lane * 8 + j];
    __syncwarp();
    unsigned r[4], q[4];
    ldmatrix(r, s[lane]);
    ldmatrix_trans(q, s[lane]);
    for (int m = 0; m < 4; ++m) { plain[m * 32 + lane] = r[m]; transposed[m * 32 + lane] = q[m]; }
}
'''


@functools.cache
def tensor_kernel(name, bfloat16=False):
    return RawModule(code=TENSOR, options=("-DBF16=1",) if bfloat16 else ()).get_function(name)


def bits(x, bfloat16):
    """The 16 bits of values that the type holds exactly."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if bfloat16 else x.astype(np.float16).view(np.uint16)


@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(0, 5))
@settings(max_examples=20)
def test_a_matrix_product_of_a_warp(seed, bfloat16, order):
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-16, 17, shape) / 8 for shape in ((16, 16), (16, 8)))         # exact in both types, as are the sums
    c = uninitialised((16, 8))
    with schedule(order):
        tensor_kernel("product", bfloat16)((1,), (32,), (bits(a, bfloat16), bits(b, bfloat16), c))
    np.testing.assert_array_equal(c, a @ b)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_ldmatrix_deals_out_rows_or_columns(seed):
    """Register m of lane 4g + t: row g, columns 2t and 2t + 1 of matrix m; transposed: column g, rows 2t and 2t + 1."""
    x = np.random.default_rng(seed).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    plain, transposed = np.zeros((4, 32), np.uint32), np.zeros((4, 32), np.uint32)
    tensor_kernel("matrices")((1,), (32,), (x, plain, transposed))
    pairs = plain.view(np.uint16).reshape(4, 8, 4, 2)                                  # [matrix, g, t, half]
    np.testing.assert_array_equal(pairs.reshape(4, 8, 8), x)
    np.testing.assert_array_equal(transposed.view(np.uint16).reshape(4, 8, 8), x.transpose(0, 2, 1))
