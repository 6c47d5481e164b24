"""The CPU emulator of CUDA kernels: right kernels give NumPy's numbers in every order; CuPy's rules; compiling, processes, threads.

Kernels that are wrong stand in test_cpu_emulator_repairs.py, those of the finer kind in test_cpu_emulator_language.py.
"""
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_tf.kernels import cpu_emulator
from tinygrad_tf.kernels.cpu_emulator import (
    ArgumentError,
    CompileError,
    KernelError,
    LaunchError,
    RawModule,
    cache,
    compiler,
    schedule,
    uninitialised,
    unwritten,
)

pytestmark = [pytest.mark.skipif(cpu_emulator.refusal() is not None, reason=str(cpu_emulator.refusal())),
              pytest.mark.host("the emulator runs on NumPy arrays")]
SEEDS = (0, 1, 7)
i32, f32 = np.int32, np.float32


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(f32)


# --- kernels that are right ---------------------------------------------------------------------------------------------

RIGHT = RawModule(name="right.cu", code=r'''
extern "C" __global__ void saxpy(const float* x, float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void block_sum(const float* x, float* sums, int n) {
    __shared__ float part[64];
    int i = blockIdx.x * 64 + threadIdx.x;
    part[threadIdx.x] = i < n ? x[i] : 0.f;
    __syncthreads();
    for (int half = 32; half; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}
extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
    __shared__ float tile[16][17];
    int r = blockIdx.y * 16 + threadIdx.y, c = blockIdx.x * 16 + threadIdx.x;
    if (r < rows && c < columns) tile[threadIdx.y][threadIdx.x] = x[r * columns + c];
    __syncthreads();
    r = blockIdx.x * 16 + threadIdx.y; c = blockIdx.y * 16 + threadIdx.x;
    if (r < columns && c < rows) y[r * rows + c] = tile[threadIdx.x][threadIdx.y];
}
extern "C" __global__ void histogram(const int* x, int* counts, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&counts[x[i]], 1);
}
extern "C" __global__ void softmax_row(const float* x, float* y, int n) {
    extern __shared__ float row[];
    x += blockIdx.x * n; y += blockIdx.x * n;
    float top = -3e38f, sum = 0.f;
    for (int i = threadIdx.x; i < n; i += 32) { row[i] = x[i]; top = fmaxf(top, row[i]); }
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    for (int i = threadIdx.x; i < n; i += 32) { row[i] = expf(row[i] - top); sum += row[i]; }
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    for (int i = threadIdx.x; i < n; i += 32) y[i] = row[i] / sum;
}
extern "C" __global__ void scan(const int* x, int* y) {
    int sum = x[threadIdx.x], lane = threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
        int left = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += left;
    }
    y[threadIdx.x] = sum;
}
extern "C" __global__ void votes(const int* x, unsigned* y) {
    int mine = x[threadIdx.x];
    y[threadIdx.x] = __ballot_sync(0xffffffffu, mine) ^ (__any_sync(0xffffffffu, mine) << 1) ^ (__all_sync(0xffffffffu, mine) << 2);
}
extern "C" __global__ void shuffles(const float* x, float* y, int by, int width) {
    float v = x[threadIdx.x];
    y[threadIdx.x] = __shfl_sync(0xffffffffu, v, by, width);
    y[32 + threadIdx.x] = __shfl_up_sync(0xffffffffu, v, by, width);
    y[64 + threadIdx.x] = __shfl_down_sync(0xffffffffu, v, by, width);
    y[96 + threadIdx.x] = __shfl_xor_sync(0xffffffffu, v, by, width);
}
''')


@pytest.fixture(params=SEEDS, ids=lambda seed: f"order {seed}")
def order(request):
    with schedule(request.param):
        yield request.param


def run(kernel, grid, block, *args, **options):
    RIGHT.get_function(kernel)(grid, block, args, **options)


@pytest.mark.parametrize("n", [1, 63, 64, 1000])
def test_saxpy(order, n):
    x, y = floats(n), floats(n, seed=1)
    want = f32(2) * x + y
    run("saxpy", (-(-n // 64),), (64,), x, y, f32(2), i32(n))
    np.testing.assert_allclose(y, want, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 64, 1000])
def test_a_reduction_in_shared_memory(order, n):
    x, sums = floats(n), uninitialised(-(-n // 64))
    run("block_sum", (len(sums),), (64,), x, sums, i32(n))
    np.testing.assert_allclose(sums.sum(), x.sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (33, 50)])
def test_a_transpose_by_tiles(order, shape):
    x, y = floats(*shape), uninitialised(shape[::-1])
    run("transpose", (-(-shape[1] // 16), -(-shape[0] // 16)), (16, 16), x, y, i32(shape[0]), i32(shape[1]))
    np.testing.assert_array_equal(y, x.T)


def test_a_histogram_with_atomics(order):
    x, counts = np.random.default_rng(0).integers(0, 7, 500).astype(i32), np.zeros(7, i32)
    run("histogram", (4,), (128,), x, counts, i32(500))
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=7))


@pytest.mark.parametrize("n", [1, 31, 100])
def test_a_softmax_by_shuffles(order, n):
    x = floats(5, n)
    y = uninitialised(x.shape)
    run("softmax_row", (5,), (32,), x, y, i32(n), shared_mem=4 * n)
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-5)


def test_a_scan(order):
    x, y = np.arange(1, 65, dtype=i32), np.zeros(64, i32)
    run("scan", (1,), (64,), x, y)
    np.testing.assert_array_equal(y, x.reshape(2, 32).cumsum(1).reshape(-1))


@given(st.lists(st.booleans(), min_size=32, max_size=32))
@settings(max_examples=15)
def test_votes(truths):
    x, y = np.array(truths, i32), np.zeros(32, np.uint32)
    run("votes", (1,), (32,), x, y)
    assert (y == (sum(t << i for i, t in enumerate(truths)) ^ any(truths) << 1 ^ all(truths) << 2)).all()


@given(st.integers(0, 31), st.sampled_from([2, 4, 8, 16, 32]))
@settings(max_examples=25)
def test_shuffles(by, width):
    x, y = floats(32), np.zeros(128, f32)
    run("shuffles", (1,), (32,), x, y, i32(by), i32(width))
    lane, first = np.arange(32), np.arange(32) // width * width
    sources = first + by % width, lane - by, lane + by, lane ^ by
    for got, source in zip(y.reshape(4, 32), sources):
        inside = (source >= first) & (source < first + width)
        np.testing.assert_array_equal(got, x[np.where(inside, source, lane)])


# --- CuPy's rules ------------------------------------------------------------------------------------------------------------

TWO, FOUR = f32(2), i32(4)


def saxpy(x, y, a=TWO, n=FOUR, grid=(1,), block=(4,), **options):
    RIGHT.get_function("saxpy")(grid, block, (x, y, a, n), **options)


@pytest.mark.parametrize("arguments, error, words", [
    (dict(a=2.0), ArgumentError, "np.float32"),
    (dict(n=4), ArgumentError, "np.int32"),
    (dict(a=np.float64(2)), ArgumentError, "float"),
    (dict(a=i32(2)), ArgumentError, "float"),
    (dict(x=np.zeros(4)), ArgumentError, "float64"),
    (dict(x=[1.0, 2.0]), ArgumentError, "NumPy array"),
    (dict(x=None), KernelError, "null"),
    (dict(block=(2048,)), LaunchError, "1024"),
    (dict(grid=(0,)), LaunchError, "grid"),
    (dict(grid=(1, 70000)), LaunchError, "65535"),
    (dict(block=(1.5,)), LaunchError, "block"),
    (dict(shared_mem=60000), LaunchError, "max_dynamic_shared_size_bytes = 60000"),
])
def test_what_a_gpu_or_cupy_would_refuse_or_misread(arguments, error, words):
    with pytest.raises(error) as caught:
        saxpy(**{"x": floats(4), "y": floats(4), **arguments})
    assert words in str(caught.value)


def test_more_than_48_kb_must_be_asked_for():
    kernel, x = RIGHT.get_function("softmax_row"), floats(1, 15000)
    y = uninitialised(x.shape)
    with pytest.raises(LaunchError):
        kernel((1,), (32,), (x, y, i32(15000)), shared_mem=60000)
    kernel.max_dynamic_shared_size_bytes = 60000
    kernel((1,), (32,), (x, y, i32(15000)), shared_mem=60000)
    assert abs(y.sum() - 1) < 1e-4
    with pytest.raises(LaunchError, match="no GPU"):
        kernel.max_dynamic_shared_size_bytes = 1 << 20


def test_arrays_may_be_views_and_read_only_and_empty():
    base = floats(8)
    x, y = base[::2], floats(4, seed=1)
    x.flags.writeable = False
    with pytest.raises(KernelError, match="view with gaps"):
        saxpy(x, y, n=i32(8), block=(8,))       # a kernel that takes a strided array for a contiguous one runs into the gaps
    with pytest.raises(ArgumentError, match="read-only"):
        saxpy(y, x)
    saxpy(floats(0), floats(0), n=i32(0))
    inner, before = base[2:6], base.copy()
    saxpy(floats(4), inner)
    np.testing.assert_array_equal(base[[0, 1, 6, 7]], before[[0, 1, 6, 7]])
    assert (inner != before[2:6]).all()


def test_what_was_never_written_is_told():
    y = uninitialised((3, 64))
    assert unwritten(y).all() and np.isnan(y).all()
    run("scan", (1,), (64,), np.ones(64, i32), y[1].view(i32))
    assert unwritten(y)[[0, 2]].all() and not unwritten(y)[1].any()


def test_a_wrong_number_of_arguments_and_an_unknown_kernel():
    with pytest.raises(ArgumentError, match="takes 4 arguments .x, y, a, n., got 2"):
        RIGHT.get_function("saxpy")((1,), (1,), (floats(1), floats(1)))
    with pytest.raises(KernelError, match="no kernel 'sxapy', but: saxpy"):
        RIGHT.get_function("sxapy")


def test_traffic_is_counted_line_by_line():
    """A tile without padding: the 16 threads that read a column meet in one bank."""
    for columns, factor in ((18, 1), (16, 8)):
        module = RawModule(code=RIGHT.code.replace("tile[16][17]", f"tile[16][{columns}]"))
        kernel = module.get_function("transpose")
        kernel.count_traffic = True
        x = floats(16, 16)
        kernel((1, 1), (16, 16), (x, uninitialised((16, 16)), i32(16), i32(16)))
        read = next(t for t in kernel.traffic if t.space == "shared" and t.access == "load")
        assert read.factor == pytest.approx(factor, rel=0.15), read


# --- compiling ----------------------------------------------------------------------------------------------------------------

def test_a_compile_error_shows_the_line_of_the_kernel():
    with pytest.raises(CompileError) as caught:
        RawModule(code='extern "C" __global__ void f(float* x) {\n    x[0] = y;\n}\n').compile()
    assert "kernel.cu:2" in str(caught.value) and "x[0] = y;" in str(caught.value)


@pytest.mark.parametrize("code, words", [
    ("int f() { return 1; }", "no kernel"),
    ("__global__ void f(float* x) { x[0] = 1; }", 'extern "C"'),
    ('extern "C" __global__ void f(int* x) { asm("mov.u32 %0, %laneid;" : "=r"(x[0])); }', "PTX"),
])
def test_what_is_no_kernel_for_the_emulator(code, words):
    with pytest.raises(KernelError) as caught:
        RawModule(code=code).get_function("f")
    assert words in str(caught.value)


def test_without_a_compiler_there_is_a_sentence(monkeypatch):
    for found, words in (((None, 0), "apt install g++"), (("g++", 11), "version 11"), (("g++", 0), "Clang")):
        monkeypatch.setattr(compiler, "_compiler", lambda found=found: found)
        assert words in compiler.refusal()
        with pytest.raises(CompileError, match="g\\+\\+ 12"):
            RawModule(code="// other\n" + RIGHT.code).compile()
    monkeypatch.setattr(sys, "platform", "win32")
    assert "WSL" in compiler.refusal()


SMALL = 'extern "C" __global__ void one(float* x) { x[threadIdx.x] = %d.f; }'


def bring_runtime(folder):
    """The runtime as this run has compiled it, for another cache: it takes seconds, and is not what these tests are about."""
    RIGHT.compile()
    for made in cache.cache_folder().glob("runtime-*"):
        shutil.copytree(made, folder / made.name, dirs_exist_ok=True)


def test_a_cache_that_cannot_be_written_is_replaced(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    bring_runtime(Path(cache._private_folder().name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    x = uninitialised(1)
    RawModule(code=SMALL % 5).get_function("one")((1,), (1,), (x,))
    assert x == 5 and (tmp_path / "file").read_text() == ""


def test_processes_that_compile_the_same_at_once_do_not_disturb_each_other(tmp_path):
    program = ("import numpy as np; from tinygrad_tf.kernels.cpu_emulator import RawModule; x = np.zeros(1, np.float32)\n"
               f"RawModule(code={SMALL % 7!r}).get_function('one')((1,), (1,), (x,)); print(x[0])")
    path = os.pathsep.join(p for p in sys.path if p)
    bring_runtime(tmp_path / "tinygrad_tf" / "kernels")
    several = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": path}) for _ in range(3)]
    assert [process.communicate(timeout=100)[0].strip() for process in several] == ["7.0"] * 3
    assert not list((tmp_path / "tinygrad_tf" / "kernels").glob("new-*"))


def test_threads_take_turns():
    results = []

    def work(seed):
        with schedule(seed):
            x, sums = floats(200, seed=seed), uninitialised(4)
            for _ in range(5):
                run("block_sum", (4,), (64,), x, sums, i32(200))
            results.append(abs(sums.sum() - x.sum()) < 1e-4)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
