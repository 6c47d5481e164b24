"""From a `.cu` file to a kernel that can be launched, and what all launches share.

CuPy's `RawModule` compiles for the GPU that is there (and keeps the result on disk); for NumPy arrays the emulator's
`RawModule` compiles the same text with g++, or (`with use("ptx"):`) with NVIDIA's compiler. All are called in the same way.
"""
import contextlib
import contextvars
import functools
import importlib
from pathlib import Path

import numpy as np

from ..arguments import type_name
from ..backend import array_module

FOLDER = Path(__file__).parent
EMULATED_SHARED_BYTES = 99 << 10                # what a block may have on the emulator: that of a GPU for PCs (sm_86, sm_89)
STRIDE = np.dtype([("batch", np.int64), ("head", np.int64), ("row", np.int64)])     # `struct Stride` of the kernels
EMULATORS = {"c++": ".cpu_emulator", "ptx": ".ptx_emulator"}
_emulator = contextvars.ContextVar("emulator", default="c++")


@contextlib.contextmanager
def use(emulator):
    """What runs kernels on NumPy arrays inside of this `with`: "c++", g++'s reading of the source; "ptx", that of NVIDIA's compiler."""
    if emulator not in EMULATORS:
        raise ValueError(f"use takes one of {', '.join(map(repr, EMULATORS))}, got {emulator!r}")
    before = _emulator.set(emulator)
    try:
        yield
    finally:
        _emulator.reset(before)


def load(file, options, xp):
    """The compiled module of a file of this folder, for the current device of `xp` (CuPy), or for the emulator (NumPy)."""
    return _load(file, tuple(options), xp, _current_device(xp))


def function(file, options, name, xp):
    """One kernel of that module."""
    return _function(file, tuple(options), name, xp, _current_device(xp))


@functools.cache
def _load(file, options, xp, device):
    return _raw_module(xp, device)(code=(FOLDER / file).read_text(encoding="utf-8"), options=options)


@functools.cache
def _function(file, options, name, xp, device):
    return _load(file, options, xp, device).get_function(name)


def _current_device(xp):
    """The number of a GPU; for NumPy the emulator."""
    return _emulator.get() if xp is np else xp.cuda.Device().id


def _raw_module(xp, device):
    return xp.RawModule if xp is not np else importlib.import_module(EMULATORS[device], __package__).RawModule


def shared_limit(xp):
    """How many bytes of shared memory one block may ask for on the current device."""
    return EMULATED_SHARED_BYTES if xp is np else xp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]


def launch(kernel, grid, threads, args, shared=0):
    """Runs `kernel` on a grid of blocks of `threads` threads with `shared` bytes of dynamic shared memory each."""
    if shared > kernel.max_dynamic_shared_size_bytes:       # more than 48 KB must be asked for, once
        kernel.max_dynamic_shared_size_bytes = shared
    kernel(grid, (threads,), tuple(argument(a) for a in args), shared_mem=shared)


def argument(value):
    """Numbers in the four bytes of a kernel's `int` and `float`: CuPy would send Python's in eight, and the kernel read garbage."""
    if isinstance(value, int):
        return np.int32(value)
    return np.float32(value) if isinstance(value, float) else value


def strides(x):
    """The distances between batches, heads and rows of [B, H, T, Dh], in elements, as a struct that is passed by value."""
    return np.array([tuple(n // x.itemsize for n in x.strides[:3])], STRIDE)


def rows_aligned(x):
    """True where kernels may read the rows of x 16 bytes at a time: no gaps within a row, each row at a multiple of 16 bytes."""
    address = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    return x.strides[-1] == x.itemsize and not any(n % 16 for n in (address, *x.strides[:-1]))


def require_arrays(op, **given):
    """TypeError for what is no array of NumPy or CuPy."""
    stranger = no_array(**given)
    if stranger:
        raise TypeError(f"{op}: {stranger}")


def no_array(**given):
    """What is said of the first that is no array; None where all are."""
    for name, x in given.items():
        if not isinstance(x, np.ndarray) and array_module(x) is np:
            return f"{name} must be an array of NumPy or CuPy, got {type_name(x)}; the array of a Tensor is its .array"
    return None
