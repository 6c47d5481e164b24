"""What of CUDA C++ the emulator has: small types, vectors, atomics, votes, arguments by value; and faults of the finer kind.

All kernels run with checks: a false alarm would raise.
"""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_tf.kernels import cpu_emulator
from tinygrad_tf.kernels.cpu_emulator import ArgumentError, KernelError, RawKernel, RawModule, schedule, uninitialised, unwritten

pytestmark = [pytest.mark.skipif(cpu_emulator.refusal() is not None, reason=str(cpu_emulator.refusal())),
              pytest.mark.host("the emulator runs on NumPy arrays")]

RIGHT = RawModule(name="language.cu", code=r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#define FULL 0xffffffffu

template <int WARPS> __device__ __forceinline__ float block_sum(float x) {      // in a template, and twice in a row
    __shared__ float part[WARPS];
    for (int o = 16; o; o /= 2) x += __shfl_xor_sync(FULL, x, o);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.f;
    for (int w = 0; w < WARPS; ++w) x += part[w];
    return x;
}
extern "C" __global__ void __launch_bounds__(128) sums(const float* x, float* sum, float* sum_of_squares, int n) {
    float s = 0.f, q = 0.f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) { s += x[i]; q += x[i] * x[i]; }
    s = block_sum<4>(s);
    q = block_sum<4>(q);
    if (threadIdx.x == 0) { *sum = s; *sum_of_squares = q; }
}
extern "C" __global__ void reverse_in_warps(const float* x, float* y) {            // within a warp __syncwarp is enough
    __shared__ float s[128];
    for (int round = 0; round < 2; ++round) {
        s[threadIdx.x] = round ? s[threadIdx.x] : x[threadIdx.x];
        __syncwarp();
        float v = s[threadIdx.x ^ 31];
        __syncwarp();
        s[threadIdx.x] = v + round;
    }
    y[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void small_types(unsigned char* bytes, half* halves, __nv_bfloat16* brains, bool* odd) {
    __shared__ unsigned char s[64];                                               // neighbours in one word, each thread its own
    int i = threadIdx.x;
    s[i] = i;
    bytes[i] = 2 * s[i];
    halves[i] = __float2half(i / 3.f);
    brains[i] = __float2bfloat16(i / 3.f);
    __syncthreads();
    odd[i] = s[63 - i] & 1;
}
extern "C" __global__ void votes_of_a_block(const int* x, int* out) {
    int p = x[threadIdx.x];
    int count = __syncthreads_count(p), every = __syncthreads_and(p), some = __syncthreads_or(p);
    if (threadIdx.x == 70) { out[0] = count; out[1] = every; out[2] = some; }
}
extern "C" __global__ void atomics(int* a, unsigned long long* big, float* f, unsigned* u) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicMax(&a[0], t); atomicMin(&a[1], -t); atomicOr(&a[2], 1 << t % 8); atomicSub(&a[3], 2);
    atomicXor(&a[4], t); atomicAnd(&a[5], ~(1 << t % 8)); atomicExch(&a[6], 7); atomicCAS(&a[7], 0, 5);
    atomicAdd(big, 1ull << 33);
    atomicAdd(f, 0.5f);
    atomicInc(&u[0], 9u); atomicDec(&u[1], 9u);
}
struct Scale { long long rows; float factor; };
__constant__ float table[4] = {1.f, 10.f, 100.f, 1000.f};
extern "C" __global__ void by_value(float* x, Scale scale, double shift) {
    if (threadIdx.x >= scale.rows) return;                                        // leaving early, with no barrier to come
    x[threadIdx.x] = x[threadIdx.x] * scale.factor * table[threadIdx.x % 4] + shift;
}
extern "C" __global__ void vectors(const float4* x, float4* y, const int2* pairs, int* total) {
    float4 v = x[threadIdx.x];
    y[threadIdx.x] = make_float4(v.w, v.z, v.y, v.x);
    total[threadIdx.x] = pairs[threadIdx.x].x + pairs[threadIdx.x].y;
}
extern "C" __global__ void odd_block(const float* x, float* sum) {                 // 48 threads: half a warp at the end
    float v = x[threadIdx.x];
    unsigned mask = threadIdx.x < 32 ? FULL : 0xffffu;
    for (int o = 8; o; o /= 2) v += __shfl_down_sync(mask, v, o, 16);
    if (threadIdx.x % 16 == 0) atomicAdd(sum, v);
    __syncthreads();
}
extern "C" __global__ void speaks(int n) {
    if (threadIdx.x == 0) printf("block %d of %d\n", blockIdx.x, n);
}
extern "C" __global__ void nothing() {}
#ifdef CUDA_ON_CPU
extern "C" __global__ void rounded(const float* x, unsigned* y, float* z) {
    y[threadIdx.x] = pack(x[threadIdx.x], -x[threadIdx.x]);
    z[threadIdx.x] = unpack(y[threadIdx.x] & 0xffff);
}
extern "C" __global__ void copied(const float* x, float* y, int there) {
    __shared__ float s[128];
    copy_async(s + 4 * threadIdx.x, x + 4 * threadIdx.x, threadIdx.x < there);
    copy_commit();
    copy_wait<0>();
    __syncwarp();
    for (int i = threadIdx.x; i < 128; i += 32) y[i] = s[i];
}
#endif
""")
SCALE = np.dtype([("rows", np.int64), ("factor", np.float32)], align=True)


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def zeros(n=64, dtype=np.float32):
    return np.zeros(n, dtype)


def run(kernel, grid, block, *args):
    RIGHT.get_function(kernel)((grid,), (block,), args)


@pytest.fixture(params=(0, 1, 7), ids="order {}".format, autouse=True)
def order(request):
    with schedule(request.param):
        yield request.param


# --- the language ------------------------------------------------------------------------------------------------------

def test_shared_memory_in_a_template():
    x, s, q = data(777), uninitialised(1), uninitialised(())
    run("sums", 1, 128, x, s, q, np.int32(777))
    assert np.allclose([s[0], q], [x.sum(dtype=float), np.square(x, dtype=float).sum()], rtol=1e-5, atol=1e-4)


def test_barriers_of_a_warp():
    x, y = data(128), uninitialised(128)
    run("reverse_in_warps", 1, 128, x, y)
    assert (y == x + 1).all()


def test_types_smaller_than_a_word():
    a, h, b, odd = uninitialised(64, np.uint8), uninitialised(64, np.float16), uninitialised(64, np.uint16), zeros(64, bool)
    run("small_types", 1, 64, a, h, b, odd)
    third = np.arange(64, dtype=np.float32) / np.float32(3)
    assert (a == 2 * np.arange(64)).all() and (h == third.astype(np.float16)).all()
    assert (b == to_bits(third, bf16=1)).all() and (odd == (np.arange(64) % 2 == 0)).all()


@pytest.mark.parametrize("no", [(), (5,), range(96)])
def test_votes_of_a_block(no):
    x, out = np.ones(96, np.int32), uninitialised(3, np.int32)
    x[list(no)] = 0
    run("votes_of_a_block", 1, 96, x, out)
    assert out.tolist() == [x.sum(), x.all(), x.any()]


def test_atomics():
    a, big, f, u = np.array([0, 0, 0, 0, 0, 255, 0, 0], np.int32), zeros(1, np.uint64), zeros(1), zeros(2, np.uint32)
    run("atomics", 2, 33, a, big, f, u)
    assert a.tolist() == [65, -65, 255, -132, np.bitwise_xor.reduce(np.arange(66)), 0, 7, 5]
    assert (big[0], f[0], u.tolist()) == (66 << 33, 33, [66 % 10, 10 - 66 % 10])


@pytest.mark.parametrize("which", [(slice(None),), (0, ...), (0,)], ids=["[1]", "0-d", "scalar"])
def test_arguments_by_value(which):
    x, scale = np.ones(40, np.float32), np.array([(30, 2.0)], SCALE)[which]
    run("by_value", 1, 40, x, scale, 0.25)                          # a Python float is what CuPy sends as a double
    assert np.allclose(x, np.where(np.arange(40) < 30, 2.0 * 10.0 ** (np.arange(40) % 4) + 0.25, 1))


def test_vectors():
    x, y, pairs, total = data(32, 4), uninitialised((32, 4)), np.arange(64, dtype=np.int32), uninitialised(32, np.int32)
    run("vectors", 1, 32, x, y, pairs, total)
    assert (y == x[:, ::-1]).all() and (total == pairs[::2] + pairs[1::2]).all()


def test_a_view_is_misaligned_where_it_would_be_on_a_gpu():
    """CuPy's memory begins at a multiple of 256."""
    memory, rest = zeros(32 * 4 + 8), (zeros(128), zeros(64, np.int32), zeros(32, np.int32))
    run("vectors", 1, 32, memory[4:132], *rest)
    with pytest.raises(KernelError, match="no multiple of 16"):
        run("vectors", 1, 32, memory[1:129], *rest)


def test_a_block_that_is_no_multiple_of_32():
    x, s = data(48), zeros(1)
    run("odd_block", 1, 48, x, s)
    assert np.isclose(s[0], x.sum(), atol=1e-5)


def test_printf(capsys):
    run("speaks", 3, 32, np.int32(3))
    assert sorted(capsys.readouterr().out.splitlines()) == ["block 0 of 3", "block 1 of 3", "block 2 of 3"]


def test_no_arguments():
    RIGHT.get_function("nothing")((2, 2), (4, 4, 4), ())


def test_float64_of_numpy_is_not_called_a_python_float():
    with pytest.raises(ArgumentError, match=r"`n`\) is int, got float64"):
        run("speaks", 1, 1, np.float64(3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.uint8, np.int64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
def test_unwritten_elements_of_every_type_and_shape(dtype, shape):
    x = uninitialised(shape, dtype)
    assert (x.shape, x.dtype, unwritten(x).shape) == (shape, dtype, shape) and unwritten(x).all()
    assert np.dtype(dtype).kind != "f" or np.isnan(x).all()
    x[...] = 1
    assert not unwritten(x).any()


@pytest.mark.parametrize("name", ["T", "N", "A", "first", "lane", "bits", "mask", "value", "PENDING", "op", "line"])
def test_definitions_of_options_do_not_reach_the_emulators_own_headers(name):
    code = f'#ifdef CUDA_ON_CPU\n#endif\n#include <cuda_fp16.h>\nextern "C" __global__ void f(int* out) {{ out[threadIdx.x] = {name}; }}'
    out = zeros(4, np.int32)
    RawKernel(code, "f", options=(f"-D{name}=5",))((1,), (4,), (out,))
    assert (out == 5).all()


# --- 16 bits -----------------------------------------------------------------------------------------------------------------

def to_bits(x, bf16):
    if not bf16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(b, bf16):
    return (b.astype(np.uint32) << 16).view(np.float32) if bf16 else b.view(np.float16).astype(np.float32)


SIXTEEN_BITS = [RawModule(code=RIGHT.code, options=(f"-DBF16={bf16}",)) for bf16 in (0, 1)]


@pytest.mark.parametrize("bf16", (0, 1))
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=32, max_size=32))
@settings(max_examples=20)
def test_rounding_to_16_bits(bf16, values):
    x, y, z = np.array(values, np.float32), uninitialised(32, np.uint32), uninitialised(32)
    SIXTEEN_BITS[bf16].get_function("rounded")((1,), (32,), (x, y, z))
    assert (y == to_bits(x, bf16) | to_bits(-x, bf16).astype(np.uint32) << 16).all() and (z == from_bits(to_bits(x, bf16), bf16)).all()


@pytest.mark.parametrize("there", (0, 1, 31, 32))
def test_copies_bring_zeros_where_nothing_is(there):
    x, y = data(4 * there), uninitialised(128)
    run("copied", 1, 32, x, y, np.int32(there))
    assert (y[:4 * there] == x).all() and (y[4 * there:] == 0).all()


# --- faults of the finer kind ---------------------------------------------------------------------------------------------------

FAULTS = {                                      # kernel → (kind, words of the report, threads); the line ends in its name
    "barrier_of_half_a_warp": ("race in a warp", "put __syncwarp()", 32),
    "another_threads_variable": ("out of bounds", "another thread's local variable", 2),
    "an_index_of_a_local_array": ("out of bounds", "index 4 of an array of type 'float [4]'", 1),
    "the_same_value_twice": ("race between warps", "this store, and the store by thread", 64),
    "unset_bytes": ("uninitialised", "load of `bytes[", 32),
    "a_copy_that_is_not_committed": ("copy", "must be committed and waited for", 16),
    "a_wait_for_one_copy_too_few": ("copy", "must be committed and waited for", 16),
    "a_copy_from_4_bytes_on": ("misaligned", "no multiple of 16", 2),
    "equal_to_another_kernel": ("out of bounds", "null pointer", 2),
    "equal_to_one_kernel": ("out of bounds", "null pointer", 2),
}
WRONG = r"""
#ifdef CUDA_ON_CPU                              // for the copies
#endif
#define KERNEL(name) extern "C" __global__ void name(float* x, const unsigned char* bytes, float* nowhere)
KERNEL(barrier_of_half_a_warp) {
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x];
    __syncwarp(threadIdx.x < 16 ? 0xffffu : 0xffff0000u);
    x[threadIdx.x] = s[threadIdx.x ^ 16];                               // <- barrier_of_half_a_warp
}
KERNEL(another_threads_variable) {
    __shared__ float* local;
    float mine = x[0];
    if (threadIdx.x == 0) local = &mine;
    __syncthreads();
    x[threadIdx.x] = *local;                                            // <- another_threads_variable
    __syncthreads();
}
KERNEL(an_index_of_a_local_array) {
    float local[4];
    for (int i = 0; i <= 4 * blockDim.x; ++i) local[i] = x[i];          // <- an_index_of_a_local_array
    x[0] = local[0] + local[3];
}
KERNEL(the_same_value_twice) {
    x[0] = 5;                                                           // <- the_same_value_twice
}
KERNEL(unset_bytes) {
    x[threadIdx.x] = bytes[threadIdx.x];                                // <- unset_bytes
}
KERNEL(a_copy_that_is_not_committed) {
    __shared__ float s[64];
    copy_async(s + 4 * threadIdx.x, x + 4 * threadIdx.x);
    copy_wait<0>();
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];                                    // <- a_copy_that_is_not_committed
    copy_commit();
    copy_wait<0>();
}
KERNEL(a_wait_for_one_copy_too_few) {
    __shared__ float s[128];
    for (int i = 0; i < 2; ++i) { copy_async(s + 64 * i + 4 * threadIdx.x, x + 4 * threadIdx.x); copy_commit(); }
    copy_wait<1>();
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x] + s[64 + threadIdx.x];              // <- a_wait_for_one_copy_too_few
    copy_wait<0>();
}
KERNEL(a_copy_from_4_bytes_on) {
    __shared__ float s[8];
    copy_async(s + 4 * threadIdx.x, x + 4 * threadIdx.x + 1);           // <- a_copy_from_4_bytes_on
    copy_commit();
    copy_wait<0>();
}
KERNEL(equal_to_another_kernel) {
    nowhere[threadIdx.x] = 1;                                           // <- equal_to_another_kernel
}
KERNEL(equal_to_one_kernel) {
    nowhere[threadIdx.x] = 1;                                           // <- equal_to_one_kernel
}
"""
FAULTY = {check: RawModule(code=WRONG, name="wrong.cu", check=check) for check in (True, False)}


@pytest.mark.parametrize("kernel", FAULTS)
def test_a_fault_is_found_in_its_line(kernel):
    kind, words, threads = FAULTS[kernel]
    with pytest.raises(KernelError) as caught:
        FAULTY[True].get_function(kernel)((1,), (threads,), (zeros(), uninitialised(64, np.uint8), None))
    line = next(n for n, text in enumerate(WRONG.splitlines(), 1) if text.endswith(f"<- {kernel}"))
    assert any(fault.kind == kind and fault.line == line for fault in caught.value.faults), caught.value
    assert words in str(caught.value) and f"wrong.cu:{line}: " in str(caught.value)


def test_the_table_is_complete():
    assert {line[7:line.index(")")] for line in WRONG.splitlines() if line.startswith("KERNEL(")} == set(FAULTS)


def test_a_race_is_found_where_the_numbers_are_right(order):
    """It is not luck that decides: without checks each half of the warp reads what the other half has stored, in this order."""
    x = zeros()
    kernels = {check: FAULTY[check].get_function("barrier_of_half_a_warp") for check in FAULTY}
    if order == 0:
        x[:] = np.arange(64)
        kernels[False]((1,), (32,), (x, None, None))
        assert (x[:32] == np.arange(32) ^ 16).all()
    with pytest.raises(KernelError, match="race"):
        kernels[True]((1,), (32,), (x, None, None))


def test_a_null_pointer_is_named_without_checks_too():
    with pytest.raises(KernelError, match=r"null pointer \(address (0|4)\)"):
        FAULTY[False].get_function("equal_to_one_kernel")((1,), (2,), (zeros(), zeros(64, np.uint8), None))
