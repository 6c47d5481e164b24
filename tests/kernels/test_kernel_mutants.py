"""The tests of the kernel are tested: mistakes planted in its source are noticed. All of them with KERNEL_MUTANTS=all."""
import os
import shutil

import pytest
from kernels import kernel_mutants

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: the emulator compiles kernels with it"),
              pytest.mark.host("runs the kernels on the emulator, with NumPy arrays")]

SOME = ["__syncthreads(); number 1 removed", "__syncwarp(); number 2 removed", "load: one row too many", "no rescale of acc",
        "the band one key too far right", "a tile that is never loaded", "too little shared memory", "a float sent as 8 bytes"]
CHOSEN = list(kernel_mutants.MUTANTS) if os.environ.get("KERNEL_MUTANTS") == "all" else SOME


def test_the_kernel_as_it_is_passes():
    assert kernel_mutants.noticed(None) is None


@pytest.mark.parametrize("name", CHOSEN)
def test_a_planted_mistake_is_noticed(name):
    assert kernel_mutants.noticed(name) is not None


@pytest.mark.parametrize("name", [n for n, change in kernel_mutants.MUTANTS.items() if change])
def test_every_mutant_changes_the_source(name):
    assert kernel_mutants.MUTANTS[name](kernel_mutants.source()) != kernel_mutants.source()


def test_every_barrier_is_among_the_mutants():
    barriers = [name for name in kernel_mutants.MUTANTS if name.endswith("removed")]
    assert len(barriers) == 6 + 2 and len(kernel_mutants.MUTANTS) >= 50
