"""A CUDA kernel without a GPU: written, run, broken, found.      python examples/12_cuda_kernel_on_cpu.py

A row softmax by a block of threads, as CUDA C++. The emulator compiles it with g++ and runs it on NumPy arrays, a fiber per
CUDA thread, looking at every access to memory. A barrier is removed, and the report names the line. Then the library's own
attention kernel runs in the same way. Writes banks.png. Without g++ it says what to install, and ends.      (docs/emulator.md)
"""
import argparse
import sys
from pathlib import Path

import numpy as np

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf.kernels import cpu_emulator
from tinygrad_tf.kernels.cpu_emulator import KernelError, RawModule, schedule, uninitialised, unwritten

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-12"), help="folder for banks.png")
parser.add_argument("--quick", action="store_true", help="a smaller attention, fewer orders of threads")
arguments = parser.parse_args()
if cpu_emulator.refusal():
    print(cpu_emulator.refusal())
    sys.exit()

# --- 1. a kernel ----------------------------------------------------------------------------------------------------------
# A block of 64 threads has a row. Each thread adds up every 64th element, alone; then the 64 sums become one, in six steps, each
# of which halves their number. All threads run the same text: `threadIdx.x` says which of them one is.
SOURCE = r"""
extern "C" __global__ void softmax_rows(const float* x, float* y, int n) {
    __shared__ float part[64];                      // one array for the whole block: all its threads see it
    x += blockIdx.x * n;                            // the row of this block
    y += blockIdx.x * n;
    float sum = 0.f;
    for (int j = threadIdx.x; j < n; j += 64) sum += expf(x[j]);
    part[threadIdx.x] = sum;
    __syncthreads();                                // nobody goes on before all have come here
    for (int half = 32; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    for (int j = threadIdx.x; j < n; j += 64) y[j] = expf(x[j]) / part[0];
}
"""
rows, n = 3, 100
x = np.random.default_rng(0).standard_normal((rows, n)).astype(np.float32)
wanted = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)


def run(source, seed=0, check=True):
    """The softmax of x by a kernel: `rows` blocks of 64 threads. An element that the kernel does not write stays NaN."""
    y = uninitialised(x.shape)
    kernel = RawModule(code=source, check=check).get_function("softmax_rows")
    with schedule(seed):
        kernel((rows,), (64,), (x, y, np.int32(n)))
    return y


y = run(SOURCE)
assert not unwritten(y).any()
print(f"1. {rows} blocks of 64 threads: largest difference from NumPy {abs(y - wanted).max():.0e}\n")
assert abs(y - wanted).max() < 1e-6

# --- 2. threads run in any order --------------------------------------------------------------------------------------------
orders = range(3 if arguments.quick else 8)
same = [np.array_equal(run(SOURCE, seed), y) for seed in orders]
print(f"2. In order, backwards, shuffled: equal bit for bit in {sum(same)} of {len(same)} orders of blocks and threads\n")
assert all(same)

# --- 3. the missing barrier ---------------------------------------------------------------------------------------------------
# The first barrier goes. Thread 0 may now add part[32] before thread 32 has stored it.
BARRIER = "    __syncthreads();                                // nobody"
broken = SOURCE.replace(BARRIER, BARRIER.replace("__syncthreads();", "                "))
assert broken != SOURCE
wrong = {seed: int((~(abs(run(broken, seed, check=False) - wanted).max(axis=1) < 1e-6)).sum()) for seed in orders}
print("3. Without the first __syncthreads, and without checks:")
for seed, count in wrong.items():
    print(f"   order {seed}: {count} of {rows} rows are wrong")
assert any(wrong.values())
for seed in orders:                                                         # with checks: in each order, also where it does no harm
    try:
        run(broken, seed)
        raise SystemExit("the race was not found")
    except KernelError as error:
        assert any(fault.kind.startswith("race") for fault in error.faults)
        if seed == 0:
            print(f"With checks, the report of order 0 (in each of the {len(orders)} a race is found):\n{error}\n")

# --- 4. one step too far -------------------------------------------------------------------------------------------------------
for what, before, after in [("reads past the end of x", "j < n; j += 64) sum", "j <= n; j += 64) sum"),
                            ("a barrier that half of the block never reaches", BARRIER, "    if (threadIdx.x < 32)" + BARRIER[3:]),
                            ("sums nobody has set", "part[threadIdx.x] = sum;", "if (threadIdx.x < 40) part[threadIdx.x] = sum;")]:
    try:
        run(SOURCE.replace(before, after))
        raise SystemExit(f"not found: {what}")
    except KernelError as error:
        print(f"4. {what}:\n{error.faults[0]}")
print()

# --- 5. the 32 banks of shared memory -------------------------------------------------------------------------------------------
# A transpose goes through a tile in shared memory: rows are stored, columns are loaded. Word w lies in bank w % 32, and a bank
# serves one word at a time. In a tile 32 wide a whole column lies in one bank; a 33rd, unused, element in each row spreads it.
TRANSPOSE = r"""
extern "C" __global__ void transpose(const float* x, float* y) {
    __shared__ float tile[32][WIDTH];
    tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}
"""


def passes(width):
    """How often the banks must serve one warp that loads a column: counted, not computed."""
    kernel = RawModule(code=TRANSPOSE, options=(f"-DWIDTH={width}",)).get_function("transpose")
    kernel.count_traffic = True
    square, turned = np.arange(1024, dtype=np.float32).reshape(32, 32), uninitialised((32, 32))
    kernel((1,), (32, 32), (square, turned))
    assert np.array_equal(turned, square.T)
    return next(t.factor for t in kernel.traffic if (t.space, t.access) == ("shared", "load"))


conflicts = {width: passes(width) for width in (32, 33)}
print("5. A warp loads a column: the banks serve it " + ", ".join(f"{p:.0f}× with rows of {w}" for w, p in conflicts.items()))
assert conflicts == {32: 32, 33: 1}


def draw_banks(path):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    for axes, (width, count) in zip(figure.subplots(1, 2), conflicts.items()):
        banks = (np.arange(32)[:, None] * width + np.arange(width)) % 32
        image = axes.imshow(banks, cmap="twilight", vmin=0, vmax=32)
        axes.plot([5] * 32, range(32), "o", color="white", markeredgecolor="black", markersize=4.5)
        axes.set(title=f"tile[32][{width}]: column 5 lies in {len(set(banks[:, 5].tolist()))} bank{'s' * (width == 33)},\n"
                       f"served {count:.0f}×", xlabel="column of the tile", ylabel="row of the tile = lane that loads",
                 xticks=range(0, width, 8), yticks=range(0, 32, 8))
        axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=figure.axes, label="bank", shrink=0.85, ticks=range(0, 33, 8))
    figure.savefig(path, dpi=110)


arguments.out.mkdir(parents=True, exist_ok=True)
draw_banks(arguments.out / "banks.png")

# --- 6. the library's kernel ------------------------------------------------------------------------------------------------------
# The same emulator runs kernels/flash_attention.cu, unchanged: what a GPU would be given. Forward and backward.
T = 20 if arguments.quick else 70
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, T, 16, requires_grad=True, device="cpu") for _ in range(3))       # [B, H, T, Dh]
found = {}
for backend in ("dense", "emulator"):
    q.grad = k.grad = v.grad = None
    with torch.sdpa_backend(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    (out * out).sum().backward()
    found[backend] = [tensor.numpy().copy() for tensor in (out.detach(), q.grad, k.grad, v.grad)]
difference = max(abs(a - b).max() for a, b in zip(*found.values()))
print(f"\n6. The library's flash attention, T = {T}: largest difference from the dense one, forward and backward, {difference:.0e}")
assert difference < 1e-4
print(f"The picture: {arguments.out / 'banks.png'}.   It is not a GPU: what it cannot show stands in docs/emulator.md.")
