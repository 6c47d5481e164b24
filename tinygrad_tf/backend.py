"""Which array library an array belongs to, devices, and the few calls that differ between NumPy and CuPy.

`xp = array_module(x)` is the first line of a forward or backward that needs it: arrays of the CPU (NumPy) and of a GPU
(CuPy) live side by side in one process. CuPy is imported on the first request for a "cuda" device and not before.
"""
import contextlib
import contextvars
import ctypes
import functools
import math
import operator
import os
import platform
import re
import sys
import threading

import numpy as np

quiet = np.errstate(all="ignore")               # a decorator: inf and NaN are results, as in PyTorch, and not warnings


def _ways_to_be_quiet():
    """(enter, leave) of `quiet`: before = enter(), and leave(before). Where NumPy keeps that setting in a context variable, it is put in
    place as it is, for 0.1 µs: `quiet` takes 1 to 2 µs to make it anew, and each operation is within it.
    """
    with np.errstate(all="ignore"):
        for variable, setting in contextvars.copy_context().items():
            if variable.name == "numpy.ufunc.extobj":
                return functools.partial(variable.set, setting), variable.reset
    return functools.partial(np.seterr, all="ignore"), lambda before: np.seterr(**before)


enter_quiet, leave_quiet = _ways_to_be_quiet()


def quietly(function, *args):
    """function(*args) within `quiet`."""
    before = enter_quiet()
    try:
        return function(*args)
    finally:
        leave_quiet(before)


class device:
    """Where an array lives: `device("cpu")`, `device("cuda")`, `device("cuda:1")`, `device("cuda", 1)`.

    Raises TypeError for what is no name or no number, RuntimeError for a name that is unknown, two numbers, or one below 0.
    """
    __slots__ = ("type", "index")

    def __init__(self, name, index=None):
        if isinstance(name, device) and index is None:
            name, index = name.type, name.index
        if not isinstance(name, str):
            raise TypeError(f"device: expected a name such as 'cpu' or 'cuda:1', got {name!r}")
        if index is not None and (isinstance(index, bool) or not hasattr(index, "__index__")):
            raise TypeError(f"device: the number beside {name!r} must be an int, got {index!r}")
        found = re.fullmatch("(cpu|cuda)(?::(0|[1-9][0-9]{0,8}))?", name)
        if not found:
            raise RuntimeError(f"device {name!r} is unknown; the devices are 'cpu', 'cuda' and 'cuda:N'")
        kind, number = found.groups()
        if number and index is not None:
            raise RuntimeError(f"device: {name!r} has a number already, and {index} was given beside it: write device({kind!r}, {index})")
        self.type, self.index = kind, int(number) if number else None if index is None else operator.index(index)
        if (self.index or 0) < 0:
            raise RuntimeError(f"device: the number of a device is 0 or more, got {name!r} and {index}")

    def __eq__(self, other):
        return isinstance(other, device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self):
        return hash((self.type, self.index))

    def __str__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __repr__(self):
        return f"device(type={self.type!r}" + (")" if self.index is None else f", index={self.index})")


CPU = device("cpu")
_default_device = None


def get_default_device():
    """What `set_default_device` said, else the environment variable TINYGRAD_TF_DEVICE, else the CPU."""
    if _default_device is not None:
        return _default_device
    try:
        return device(os.environ.get("TINYGRAD_TF_DEVICE") or "cpu")
    except RuntimeError as error:
        raise RuntimeError(f"environment variable TINYGRAD_TF_DEVICE: {error}") from None


def set_default_device(name):
    """New tensors are made on this device from now on; None returns to TINYGRAD_TF_DEVICE or the CPU."""
    global _default_device
    _default_device = None if name is None else device(name)


def require_cupy():
    """CuPy, or one sentence that says what to install."""
    try:
        import cupy
    except ImportError:
        raise RuntimeError("device 'cuda' needs CuPy, which is not installed: `pip install cupy-cuda12x[ctk]` for "
                           "CUDA 12, `pip install cupy-cuda13x[ctk]` for CUDA 13") from None
    if not cupy.cuda.is_available():
        raise RuntimeError("device 'cuda' was asked for and CuPy is installed, but it finds no NVIDIA GPU or driver: "
                           "see what `nvidia-smi` says, or use device 'cpu'")
    return cupy


def array_module(*arrays):
    """NumPy, or CuPy when any of the arrays is CuPy's."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and any(isinstance(a, cupy.ndarray) for a in arrays):
        return cupy
    return np


def is_writable(array):
    """False for memory that is read-only, or in which one place stands for several elements (expanded)."""
    if isinstance(array, np.ndarray):
        return array.flags.writeable
    expanded = any(n > 1 and step == 0 for n, step in zip(array.shape, array.strides))
    return not (array.size and expanded)        # CuPy's flags have no `writeable`: it writes wherever it is told to


def device_of(array):
    """The device on which an array lives."""
    return CPU if isinstance(array, (np.ndarray, np.generic)) else device("cuda", array.device.id)


def require_gpu(dev):
    """CuPy, where it has the GPU of this device, or one sentence that says which there are."""
    cupy = require_cupy()
    if dev.index:                               # 0 is there wherever there is one, which require_cupy knows
        there = cupy.cuda.runtime.getDeviceCount()
        if dev.index >= there:
            raise RuntimeError(f"device {str(dev)!r} was asked for, but there {'is one GPU' if there == 1 else f'are {there} GPUs'}: "
                               + " and ".join(repr(f"cuda:{n}") for n in range(there)))
    return cupy


def module_of(dev):
    """The array library that makes arrays on a device."""
    return np if dev.type == "cpu" else require_gpu(dev)


def same_place(here, wanted):
    """True when what is on device `here` needs no move to the device `wanted`; the CPU is one place, whatever its number."""
    return here.type == wanted.type and (here.type == "cpu" or wanted.index in (None, here.index))


def to_device(array, dev):
    """The array on a device: the same one when it is there already, else a copy."""
    if same_place(device_of(array), dev):
        return array
    if dev.type == "cpu":
        return array.get()
    cupy = require_gpu(dev)
    if array.dtype.kind == "V":
        require_bfloat16(cupy)
    with cupy.cuda.Device(dev.index or 0):
        return cupy.asarray(array)


def require_bfloat16(xp):
    """RuntimeError for an array library that does not know the type: CuPy before version 14."""
    if xp is not np and int(xp.__version__.partition(".")[0]) < 14:
        raise RuntimeError(f"torch.bfloat16 on a GPU needs CuPy 14 or later, this is CuPy {xp.__version__}: "
                           f"pip install --upgrade 'cupy-cuda12x[ctk]>=14' (or cupy-cuda13x), or use float16")


def on_one_device(arrays):
    """True where all arrays are on one device; without CuPy there is no other."""
    if "cupy" not in sys.modules:
        return True
    devices = [device_of(a) for a in arrays]
    return all(same_place(devices[0], dev) for dev in devices)


def beside(array, function, *args):
    """function(*args), with CuPy working on the GPU of this array: "cuda:1" needs no more than its name."""
    if isinstance(array, (np.ndarray, np.generic)):
        return function(*args)
    with array.device:
        return function(*args)


def check_one_device(op, arrays):
    """Raises where arrays of several devices meet in one operation."""
    if not on_one_device(arrays):
        found = list(dict.fromkeys(str(device_of(a)) for a in arrays))
        raise RuntimeError(f"{op}: all tensors must be on one device, got {' and '.join(found)}; "
                           f"move one of them with .to({found[0]!r})")


def numbers_beside(op, arrays):
    """Arrays for one operation: a 0-d array of the CPU, which is one number, goes to where the others are, as in PyTorch."""
    if on_one_device(arrays):
        return arrays
    there = next((device_of(a) for a in arrays if device_of(a).type != "cpu"), CPU)
    moved = [to_device(a, there) if a.ndim == 0 and device_of(a).type == "cpu" else a for a in arrays]
    check_one_device(op, moved)
    return moved


def owner(array):
    """The object that owns an array's memory: two arrays can overlap only if they have the same owner."""
    base = getattr(array, "base", None)
    while base is not None:
        array, base = base, getattr(base, "base", None)
    return array


def at_least_float32(x):
    """Statistics of half precision are computed in float32; wider types stay."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def as_rows(x, axes=1):
    """[..., C] → [n, C]: the last `axes` axes make one row. Also where there is no element, of which −1 could not tell n."""
    if x.ndim == 2 and axes == 1:
        return x
    shape, before = x.shape, x.ndim - axes
    return x.reshape(math.prod(shape[:before]), math.prod(shape[before:]))


def sum_rows(x):
    """Sum over all axes but the last, [..., C] → [C]. As a product with ones: BLAS is 4 to 5 times faster than `sum(0)`.

    Half precision is summed in float32: float16 counts ones no further than to 2048.
    """
    rows = at_least_float32(as_rows(x))
    return (ones_beside(rows, rows.shape[0]) @ rows).astype(x.dtype, copy=False)


def ones_beside(x, n):
    """n ones of the dtype of x, to be read only: those of NumPy, up to 2¹⁴, are made once."""
    return _kept_ones(n, x.dtype) if isinstance(x, np.ndarray) and n <= 1 << 14 else array_module(x).ones(n, dtype=x.dtype)


@functools.lru_cache(maxsize=32)
def _kept_ones(n, dtype):
    ones = np.ones(n, dtype)
    ones.flags.writeable = False
    return ones


def sum_to(x, shape):
    """The sum of x over the axes along which an operand of `shape` was broadcast; the reverse of broadcasting."""
    if x.shape == shape:
        return x
    extra = x.ndim - len(shape)
    if x.shape[extra:] == shape and len(shape) == 1 and x.size:
        return sum_rows(x)
    stretched = tuple(range(extra)) + tuple(i + extra for i, n in enumerate(shape) if n == 1 and x.shape[i + extra] != 1)
    return at_least_float32(x).sum(axis=stretched, keepdims=True).reshape(shape).astype(x.dtype, copy=False)


def first_outside(ids, size):
    """The first of the ids that is not in [0, size); None where all are. For errors: an id never wraps, as NumPy's would.

    On a GPU the host waits for the answer once: see `Version.bounds` for ids of which it is known beforehand.
    """
    if not ids.size or not _any_outside(ids, size):
        return None
    return int(ids[(ids < 0) | (ids >= size)].reshape(-1)[0])


def _any_outside(ids, size):
    if isinstance(ids, np.ndarray):
        return not (0 <= ids.min() and ids.max() < size)
    return bool(((ids < 0) | (ids >= size)).any())


def may_hold(condition):
    """Whether a 0-d condition holds; on a GPU True, for the host would have to wait to know. Guards work that changes nothing else."""
    return not isinstance(condition, (np.bool_, np.ndarray)) or bool(condition)


# Integers that CuPy cannot add atomically, and the type of the same width or the next wider one in which it can.
_ATOMIC = {"int64": np.uint64, "bool": np.int32, "int8": np.int32, "uint8": np.int32, "int16": np.int32}


def scatter_add(destination, index, values):
    """destination[index] += values, where repeated indices add up (plain `+=` would keep one of them).

    On a GPU the order of the sums, and so their last digits, vary from run to run.
    """
    xp, atomic = array_module(destination), _ATOMIC.get(destination.dtype.name)
    if xp is np or atomic is None:
        xp.add.at(destination, index, values)
    elif atomic is np.uint64:                   # sums modulo 2⁶⁴ are the same bits with and without a sign
        xp.add.at(destination.view(np.uint64), index, values.astype(np.int64, copy=False).view(np.uint64))
    else:
        total = destination.astype(atomic)
        xp.add.at(total, index, values.astype(atomic))
        destination[...] = total.astype(destination.dtype)


class _Casting(threading.local):
    """What autocast does in this thread: amp.py sets it, autograd.py obeys.

    dtypes: {"cpu": NumPy dtype} of the kinds of device where it is on. named: the same of those where it is off within a block that
    names a dtype. casts: the weights that were cast in the outermost block, None where they are not kept. blocks: what to return to.
    """

    def __init__(self):
        self.dtypes, self.named, self.casts, self.blocks = {}, {}, None, []


casting = _Casting()


def tune_allocator():
    """Keep freed memory in the process: returns True where this C library can.

    glibc hands large freed arrays back to the system and pages them in again at the next step, which makes a training
    step up to 1.5 times slower. The command line and the trainer call this once; `import tinygrad_tf` never does.
    """
    return _set_thresholds(32 << 20, 1 << 30)              # 32 MiB is the largest that glibc takes


def give_memory_back():
    """The reverse of `tune_allocator`: a large array that is freed leaves the process at once. For programs that need much memory once.

    To read a model and round it layer by layer, say; afterwards `tune_allocator` makes the rest fast again.
    """
    return _set_thresholds(128 << 10, 128 << 10)


def _set_thresholds(mmap, trim):
    """From which size on an array gets pages of its own, and how much free memory is kept. Whether this C library can."""
    m_trim_threshold, m_mmap_threshold = -1, -3            # names of <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(m_mmap_threshold, mmap) and mallopt(m_trim_threshold, trim))


def set_flush_denormal(mode):
    """Whether this thread, and those that it begins from now on, take subnormal numbers for 0. Returns True where this machine can.

    Those are the numbers below the smallest normal one, 1.2e-38 in float32. A processor takes some hundred times as long for them, and they
    come in masses: probabilities of hopeless tokens, the averages of Adam for rows without a gradient. `import tinygrad_tf` changes
    nothing; the trainer has it on while it runs. PyTorch's name. On x86 under Linux. RuntimeError where mode is no bool.
    """
    if not isinstance(mode, bool):
        raise RuntimeError(f"set_flush_denormal: expected True or False, got {mode!r}")
    before = _floating_point_environment()
    if before is None:
        return False
    library, environment = before
    flushes = 0x8040                                        # bits of MXCSR: operands count as 0, and results become 0
    environment[7] = environment[7] | flushes if mode else environment[7] & ~flushes
    library.fesetenv(environment)
    return flushes_denormal() == mode


def flushes_denormal():
    """Whether this thread takes subnormal numbers for 0 at present."""
    return not (np.full(1, 1e-39, np.float32) * 1).any()


@contextlib.contextmanager
def flushing_denormal():
    """Within, subnormal numbers are 0 where this machine can; afterwards it is as it was."""
    before = flushes_denormal()
    set_flush_denormal(True)
    try:
        yield
    finally:
        set_flush_denormal(before)


def _floating_point_environment():
    """(the C library, this thread's fenv_t, whose last word is MXCSR); None where that is laid out in another way."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        library, environment = ctypes.CDLL(None), (ctypes.c_uint32 * 8)()
        return None if library.fegetenv(environment) else (library, environment)
    except (OSError, AttributeError):
        return None
