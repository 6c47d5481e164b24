"""Runs CUDA C++ on the CPU: the same `.cu` text, compiled by g++, on NumPy arrays, one fiber per CUDA thread.

    module = RawModule(code=source, options=("-DTILE=32",))
    kernel = module.get_function("transpose")
    kernel((4, 4), (32, 8), (x, y, np.int32(100)))              # as cupy.RawKernel: grid, block, arguments

With check=True every access is looked at: races, missing barriers, out of bounds, unset memory, ... raise a KernelError that
names the line. check=False is several times faster. `schedule(seed=…)` sets the order of blocks and threads.   (docs/emulator.md)
"""
from .arguments import ArgumentError, uninitialised, unwritten
from .compiler import CompileError, refusal
from .module import LaunchError, RawKernel, RawModule, Traffic, schedule
from .report import Fault, KernelError

__all__ = ["ArgumentError", "CompileError", "Fault", "KernelError", "LaunchError", "RawKernel", "RawModule", "Traffic", "refusal",
           "schedule", "uninitialised", "unwritten"]
