"""`RawModule` and `RawKernel` as CuPy has them, for NumPy arrays."""
import contextlib
import contextvars
import ctypes
import functools
import json
import sys
import threading
from dataclasses import dataclass

from .arguments import ArgumentError, Array, Bound, Parameter
from .compiler import compile_module
from .report import Fault, KernelError, Places, kernel_error, read_faults

SHARED_BY_DEFAULT = 48 << 10                    # bytes of dynamic shared memory that every launch may have
SHARED_AT_MOST = 227 << 10                      # and with max_dynamic_shared_size_bytes; the largest GPU's
GRID_AT_MOST = (2**31 - 1, 65535, 65535)
BLOCK_AT_MOST = (1024, 1024, 64)
BLOCKS_AT_MOST = 1 << 24                        # in all: the emulator's own limit, hours of work
_one_at_a_time = threading.Lock()               # a launch owns the process's signal handlers
_seed = contextvars.ContextVar("seed", default=0)


class LaunchError(KernelError, ValueError):
    """A GPU would refuse to launch this."""


@contextlib.contextmanager
def schedule(seed):
    """Within it kernels run in another order. 0: blocks and threads in order; 1: backwards; others: shuffled, the same for a seed."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


# ---- the structures of runtime.h and cuda_on_cpu.h ---------------------------------------------------------------------------

class Entry(ctypes.Structure):
    _fields_ = [("body", ctypes.c_void_p), ("parameters", ctypes.POINTER(Parameter)), ("count", ctypes.c_int),
                ("max_threads", ctypes.c_int)]


class Variable(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_size_t), ("bytes", ctypes.c_size_t), ("name", ctypes.c_char_p)]


class Launch(ctypes.Structure):
    _fields_ = [("body", ctypes.c_void_p), ("arguments", ctypes.POINTER(ctypes.c_void_p)),
                ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint), ("seed", ctypes.c_uint),
                ("checked", ctypes.c_uint), ("counting", ctypes.c_uint), ("seconds", ctypes.c_double), ("array_count", ctypes.c_uint),
                ("variable_count", ctypes.c_uint), ("arrays", ctypes.POINTER(Array)), ("variables", ctypes.POINTER(Variable))]


class Library:
    """A compiled module, loaded."""

    def __init__(self, folder, code, name):
        about = json.loads((folder / "kernel.json").read_text(encoding="utf-8"))
        self.dll = ctypes.CDLL(str(folder / "kernel.so"))
        for function in ("emulator_report", "emulator_printed", "emulator_traffic"):
            getattr(self.dll, function).restype = ctypes.c_char_p
        self.kernels, self.places, self.name = about["kernels"], Places(folder / "kernel.so", name, code), name
        self._variables = [(*variable.rpartition("::")[::2], at, size) for variable, at, size in about["variables"]]

    def static_shared_bytes(self, kernel):
        """Of the __shared__ variables that a kernel declares itself."""
        return sum(size for owner, _, _, size in self._variables if owner.partition("(")[0] == kernel)

    def variables(self, kernel):
        """The __shared__ variables that a kernel may touch: its own and those of functions. Other kernels' are out of bounds for it."""
        others = self.kernels.keys() - {kernel}
        found = [Variable(at, size, name.encode()) for owner, name, at, size in self._variables if owner.partition("(")[0] not in others]
        return (Variable * len(found))(*found)


class RawModule:
    """The kernels of a piece of CUDA C++.

    options: as for CuPy's compiler: -D, -I, -std=; "-G" compiles for a debugger. check: look at every access, and raise
    KernelError for what a kernel must not do. name: what the source is called in reports.
    """
    def __init__(self, *, code, options=(), check=True, name="kernel.cu"):
        self.code, self.options, self.check, self.name = code, tuple(options) if not isinstance(options, str) else options, check, name

    @functools.cached_property
    def library(self):
        return Library(compile_module(self.code, self.options, bool(self.check), self.name), self.code, self.name)

    def compile(self):
        """Compiles now, not when the first kernel is asked for."""
        return self.library

    def get_function(self, name):
        return RawKernel(self, name)


class RawKernel:
    """One kernel: kernel(grid, block, args, shared_mem=0).

    seed: the order of blocks and threads, None for that of `schedule`. time_limit: seconds of computing after which a launch
    is stopped. count_traffic: fill `traffic` with what each line moved (needs check=True).
    """
    def __init__(self, code, name, options=(), *, check=True):
        self._module = code if isinstance(code, RawModule) else RawModule(code=code, options=options, check=check)
        self.name = name
        self._library = library = self._module.library
        if name not in library.kernels:
            raise KernelError(f"{library.name} has no kernel {name!r}, but: {', '.join(library.kernels)}")
        if not hasattr(library.dll, name):
            raise KernelError(f'{library.name}: declare {name} extern "C": without it the compiler gives it a name under which CuPy does '
                              f'not find it')
        self._entry = Entry.in_dll(library.dll, f"emulator_entry_{name}")
        self._parameters = self._entry.parameters[:self._entry.count]
        names = library.kernels[name]["parameters"]
        self._names = names if len(names) == len(self._parameters) else [f"argument {i}" for i in range(len(self._parameters))]
        self._shared_limit, self._static_bytes = SHARED_BY_DEFAULT, library.static_shared_bytes(name)
        self._variables = library.variables(name)
        if self._static_bytes > SHARED_BY_DEFAULT:
            raise LaunchError(f"{name}: its __shared__ variables have {self._static_bytes} bytes; at most {SHARED_BY_DEFAULT} can be "
                              f"declared. More must be dynamic: extern __shared__ float s[]; and shared_mem at the launch")
        self.seed, self.time_limit, self.count_traffic, self.traffic = None, 60.0, False, []

    @property
    def max_dynamic_shared_size_bytes(self):
        return self._shared_limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size):
        if not 0 <= size <= SHARED_AT_MOST - self._static_bytes:
            raise LaunchError(f"{self.name}: max_dynamic_shared_size_bytes = {size}: no GPU has more than {SHARED_AT_MOST} for a block"
                              + (f", and {self._static_bytes} are taken by __shared__ variables" if self._static_bytes else ""))
        self._shared_limit = size

    def __call__(self, grid, block, args, *, shared_mem=0):
        grid, block = dimensions(grid, "grid"), dimensions(block, "block")
        self._check_launch(grid, block, shared_mem)
        if not isinstance(args, (tuple, list)):
            raise ArgumentError(f"{self.name}: the arguments must be a tuple, not {type(args).__name__}: "
                                f"kernel(grid, block, (x, y, np.int32(n)))")
        bound = Bound(self.name, self._parameters, self._names, args)
        with _one_at_a_time:
            faults = self._run(grid, block, bound, shared_mem)
        beside = bound.finish()
        if beside and not faults:
            faults = [Fault("out of bounds", 0, f"{self._library.name}: stores beside {', '.join(beside)}; check=True tells the line")]
        if faults:
            raise kernel_error(self.name, faults)

    def _check_launch(self, grid, block, shared_mem):
        threads = block[0] * block[1] * block[2]
        if not all(0 < n <= most for n, most in zip(grid, GRID_AT_MOST)):
            raise LaunchError(f"{self.name}: a grid of {grid} blocks: each of them 1 to {GRID_AT_MOST}")
        if grid[0] * grid[1] * grid[2] > BLOCKS_AT_MOST:
            raise LaunchError(f"{self.name}: a grid of {grid} is {grid[0] * grid[1] * grid[2]} blocks; the emulator runs at "
                              f"most {BLOCKS_AT_MOST}")
        if not all(0 < n <= most for n, most in zip(block, BLOCK_AT_MOST)) or threads > 1024:
            raise LaunchError(f"{self.name}: a block of {block} = {threads} threads: each of them 1 to {BLOCK_AT_MOST}, 1024 in all")
        if self._entry.max_threads and threads > self._entry.max_threads:
            raise LaunchError(f"{self.name}: {threads} threads, but __launch_bounds__ promised at most {self._entry.max_threads}")
        allowed = self._shared_limit
        if allowed <= SHARED_BY_DEFAULT:
            allowed = min(allowed, SHARED_BY_DEFAULT - self._static_bytes)
        if not 0 <= shared_mem <= allowed:
            raise LaunchError(f"{self.name}: shared_mem={shared_mem}, allowed are {allowed} bytes. More than {SHARED_BY_DEFAULT} must be "
                              f"asked for first: kernel.max_dynamic_shared_size_bytes = {shared_mem} (at most {SHARED_AT_MOST}, on many "
                              f"GPUs less)")

    def _run(self, grid, block, bound, shared_mem):
        library, seed = self._library, _seed.get() if self.seed is None else self.seed
        arguments = ctypes.cast(bound.addresses, ctypes.POINTER(ctypes.c_void_p))
        launch = Launch(self._entry.body, arguments, grid, block, shared_mem, seed & 0xFFFFFFFF, self._module.check,
                        self.count_traffic, self.time_limit, len(bound.pieces), len(self._variables),
                        bound.arrays, self._variables)
        found = library.dll.emulator_launch(ctypes.byref(launch))
        if found < 0:
            raise MemoryError(f"{self.name}: no memory for the stacks of {block[0] * block[1] * block[2]} threads")
        sys.stdout.write(library.dll.emulator_printed().decode(errors="replace"))
        if self.count_traffic:
            self.traffic = read_traffic(library.dll.emulator_traffic().decode(), library.places)
        return read_faults(library.dll.emulator_report().decode(errors="replace"), library.places) if found else []


def dimensions(sizes, what):
    """(4,) → (4, 1, 1)"""
    sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    if not 1 <= len(sizes) <= 3 or not all(hasattr(size, "__index__") for size in sizes):
        raise LaunchError(f"{what} must be one to three ints, not {sizes}")
    return (*(int(size) for size in sizes), 1, 1)[:3]


# ---- how well the accesses of a line go together ------------------------------------------------------------------------------

@dataclass(frozen=True)
class Traffic:
    """One line's accesses of one kind. passes: how often memory had to serve; ideal: how often it would with the best layout.

    Shared memory: passes through its 32 banks. Global memory: sectors of 32 bytes.
    """
    line: int
    space: str
    access: str
    bytes: int
    requests: int
    passes: int
    ideal: int

    @property
    def factor(self):
        return self.passes / max(self.ideal, 1)


def read_traffic(text, places):
    rows = [tuple(map(int, line.split("\t"))) for line in text.splitlines()]
    places.look_up(row[0] for row in rows)
    sums = {}
    for place, is_global, is_store, size, *counts in rows:
        key = places.line(place), "global" if is_global else "shared", "store" if is_store else "load", size
        sums[key] = [a + b for a, b in zip(sums.get(key, (0, 0, 0)), counts)]
    return [Traffic(*key, *counts) for key, counts in sorted(sums.items())]
