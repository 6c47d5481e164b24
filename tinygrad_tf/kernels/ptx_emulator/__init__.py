"""Executes PTX, the assembly language that NVIDIA's compiler makes of CUDA C++, on NumPy arrays: a second reading of a kernel.

    module = RawModule(code=open("kernel.cu").read(), options=("-DHEAD_DIM=64",))
    module.get_function("add")((blocks,), (threads,), (x, y, np.int32(n)), shared_mem=0)

The shape of cupy.RawModule, as with `cpu_emulator`. There g++ compiles the CUDA C++ and our header says what each
intrinsic does; here the compiler that CuPy uses has read it, and `instructions` says what each PTX instruction does. Needs nvcc, or the
wheels of the extra `cuda-compile`; a GPU and a driver are not needed. (docs/emulator.md; the PTX ISA manual)
"""
from .cuda_to_ptx import CompilerMissing, compile_ptx, refusal
from .machine import PtxError, RawKernel
from .program import UnknownInstruction, parse


class RawModule:
    """The kernels of a CUDA C++ source, compiled to PTX for an architecture (80 is compute_80); or of PTX itself: ptx=..."""

    def __init__(self, *, code=None, options=(), arch="80", ptx=None):
        self.ptx = compile_ptx(code, options, arch) if ptx is None else ptx
        self._entries = parse(self.ptx)

    def get_function(self, name):
        """A new kernel object, as CuPy does; ValueError where there is no kernel of that name."""
        if name not in self._entries:
            raise ValueError(f"there is no kernel {name!r} in this module; there are {', '.join(self._entries) or 'none'}")
        return RawKernel(self._entries[name])
