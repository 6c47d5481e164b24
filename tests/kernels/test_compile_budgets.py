"""What the kernels take of a GPU, from NVIDIA's compiler and without one: registers, shared memory, spills.

`python tests/kernels/test_compile_budgets.py` prints the table.
"""
import functools
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

from kernels import offline

from tinygrad_tf.kernels import compile, flash

SHARED_KB = {"75": 64, "80": 163, "86": 99, "89": 99, "90": 227, "120": 99}     # of a block, at most: CUDA C++ Programming Guide
REGISTERS = 65536                               # of a multiprocessor, so that at least one block must fit into it
CONFIGURATIONS = [                              # (arch, tier or file, head dim): at most 12
    *(("80", flash.Float32, head_dim) for head_dim in (16, 64, 128)), ("90", flash.Float32, 32), ("90", flash.Float32, 128),
    *(("80", flash.Float16, head_dim) for head_dim in (64, 128)), ("90", flash.Float16, 128),
    *(("90", flash.BFloat16, head_dim) for head_dim in (64, 128)), ("80", "fused.cu", None), ("90", "fused.cu", None)]
SPILLS = {"Float32": 32, "Float16": 0, "BFloat16": 0, "fused.cu": 0}            # bytes a thread, in memory instead of registers

pytestmark = pytest.mark.host("compiles; runs nothing")
compilers = pytest.mark.parametrize("compiler", [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=str(reason)))
    for name in offline.COMPILERS for reason in [offline.missing(name)]])
configurations = pytest.mark.parametrize("arch, tier, head_dim", CONFIGURATIONS, ids=lambda x: getattr(x, "__name__", str(x)))


def name_of(tier):
    return getattr(tier, "__name__", tier)


def tile_of(arch, tier, head_dim, kernel):
    """The first of the table that the GPU can hold, as `flash` chooses."""
    return next(tile for tile in tier.tiles[head_dim] if tier.shared_bytes(kernel, head_dim, tile) <= SHARED_KB[arch] << 10)


@functools.cache
def usage(compiler, arch, tier, head_dim):
    """[(Usage, bytes of dynamic shared memory, threads of a block)] of one configuration's kernels, each with its tile."""
    if isinstance(tier, str):
        source = (compile.FOLDER / tier).read_text(encoding="utf-8")
        return [(u, 0, 256) for u in offline.COMPILERS[compiler](source, arch)[1]]
    source, found = (compile.FOLDER / tier.file).read_text(encoding="utf-8"), []
    names = ("flash_forward", "flash_dkdv", "flash_dq")
    tiles = {name: tile_of(arch, tier, head_dim, name) for name in names}
    for tile in dict.fromkeys(tiles.values()):
        _, all_kernels = offline.COMPILERS[compiler](source, arch, tier.options(head_dim, tile))
        found += [(u, tier.shared_bytes(u.kernel, head_dim, tile), tier.threads) for u in all_kernels if tiles.get(u.kernel) == tile]
    return found


@configurations
@compilers
def test_registers_shared_memory_and_spills(compiler, arch, tier, head_dim):
    rows = usage(compiler, arch, tier, head_dim)
    assert len(rows) >= 3
    for u, dynamic, threads in rows:
        assert max(u.spilled, u.stack) <= SPILLS[name_of(tier)], u
        assert dynamic + u.static_shared <= SHARED_KB[arch] << 10, u
        assert 0 < u.registers * threads <= REGISTERS, u


@pytest.mark.parametrize("tier", list(flash.TIERS.values()), ids=name_of)
def test_some_tile_fits_every_gpu_that_a_tier_is_for(tier):
    for arch, head_dim in ((arch, head_dim) for arch in SHARED_KB for head_dim in tier.tiles):
        if int(arch) >= tier.capability:
            for kernel in ("flash_forward", "flash_dkdv", "flash_dq"):
                assert tile_of(arch, tier, head_dim, kernel)


@compilers
def test_a_kernel_that_spills_is_seen(compiler):
    code = """extern "C" __global__ void __launch_bounds__(1024, 2) many(float* x) {
        float a[64];                            // more than the 32 registers that 2 blocks of 1024 threads leave to each
        #pragma unroll
        for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = a[i] * a[63 - i];
    }"""
    _, [u] = offline.COMPILERS[compiler](code, "80")
    assert u.kernel == "many" and u.spilled > 32 and u.registers <= 32


def test_a_name_that_cupy_no_longer_has_is_a_reason_to_skip(monkeypatch):
    if offline.refusal():
        pytest.skip(offline.refusal())
    from cupy.cuda import compiler
    monkeypatch.delattr(compiler, "_get_arch")
    assert "_get_arch" in offline.refusal()


def print_table():
    print("compiler  arch   kernels             Dh  kernel            registers  spilled B  shared KB (of)")
    for compiler in offline.COMPILERS:
        if offline.missing(compiler):
            print(f"{compiler}: skipped, {offline.missing(compiler)}")
            continue
        for arch, tier, head_dim in CONFIGURATIONS:
            for u, dynamic, _ in usage(compiler, arch, tier, head_dim):
                print(f"{compiler:9} {u.arch:6} {name_of(tier):18} {head_dim or '':>3}  {u.kernel:24} {u.registers:3} {u.spilled:9} "
                      f"{(dynamic + u.static_shared) / 1024:10.1f} ({SHARED_KB[arch]})")


if __name__ == "__main__":
    print_table()
