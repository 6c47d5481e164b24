"""A strict stand-in for CuPy on machines without a GPU: NumPy underneath, CuPy's refusals on top.

`install()` puts it where `import cupy` finds it; `pytest --device strict` does so, and the whole suite then runs on "cuda".

Refused, with CuPy's exception, is every implicit move between host and device and every function, keyword and method that
CuPy does not have (data/cupy_names.json.gz has its names). Refused too, although CuPy would go on, is what there is silently wrong
or slow: NumPy functions on device arrays, NumPy arrays as indices, indices out of bounds, one cell assigned several values,
float32 that becomes float64. `counts` says how often the host waited for the device, and what was copied.

Not seen from here: the numbers of CuPy's own kernels, streams, races, speed.
"""
import contextlib
import functools
import gzip
import inspect
import json
import sys
import threading
import types
import warnings
import weakref
from pathlib import Path

import numpy as np

NAMES = json.loads(gzip.decompress((Path(__file__).with_name("data") / "cupy_names.json.gz").read_bytes()))
__version__ = NAMES["version"]
__path__ = []                                   # so that `import cupy.cuda` finds its way

counts = types.SimpleNamespace(syncs=0, uploads=0, downloads=0, launches=0)
settings = types.SimpleNamespace(devices=1, checked_kernels=False, float64_alarm=True, synchronize=True)


@contextlib.contextmanager
def changed(**values):
    """The settings with other values, inside: `with changed(devices=2): …`"""
    before = dict(vars(settings))
    vars(settings).update(values)
    try:
        yield settings
    finally:
        vars(settings).update(before)


class DeviceSynchronized(RuntimeError):
    """The host waited for the device inside `cupyx.allow_synchronize(False)`."""


class RepeatedIndex(RuntimeError):
    """One cell is assigned several values. CuPy goes on, and any of them may stay."""


class Float64Alarm(TypeError):
    """float32 went in and float64 came out, and nobody asked for it: slow on a GPU, and a wider result than the library promises."""


def _sync():
    counts.syncs += 1
    if not settings.synchronize:
        raise DeviceSynchronized("Device synchronized")


# --- devices, streams, memory ------------------------------------------------------------------------------------------

class CUDARuntimeError(RuntimeError):
    """What CUDA itself refuses."""


_current = threading.local()


class Device:
    """One of `settings.devices` GPUs that do not exist."""

    def __init__(self, device=None):
        self.id = _current.__dict__.get("device", 0) if device is None else int(device)
        self._before = []

    def use(self):
        if not 0 <= self.id < settings.devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        _current.device = self.id

    def __enter__(self):
        self._before.append(_current.__dict__.get("device", 0))
        self.use()
        return self

    def __exit__(self, *error):
        _current.device = self._before.pop()

    def synchronize(self): _sync()
    def __eq__(self, other): return isinstance(other, Device) and self.id == other.id
    def __hash__(self): return hash(self.id)
    def __int__(self): return self.id
    def __repr__(self): return f"<CUDA Device {self.id}>"

    compute_capability = "90"
    pci_bus_id = "0000:00:00.0"
    mem_info = (1 << 36, 1 << 36)
    attributes = {"MaxSharedMemoryPerBlock": 49152, "MaxSharedMemoryPerBlockOptin": 232448, "MultiProcessorCount": 132, "WarpSize": 32,
                  "MaxThreadsPerBlock": 1024, "ComputeCapabilityMajor": 9, "ComputeCapabilityMinor": 0}


class Stream:
    """Everything has happened by the time that a stream is asked: the order of streams is not modelled."""
    ptr, done = 0, True

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=0): self.null = null
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def use(self): return self
    def synchronize(self): _sync()
    def record(self, event=None): return Event() if event is None else event
    def wait_event(self, event): pass


Stream.null = Stream(null=True)


class Event:
    """A point of a stream, long past."""
    done = True

    def __init__(self, block=False, disable_timing=False, interprocess=False): pass
    def record(self, stream=None): pass
    def synchronize(self): _sync()


class MemoryPool:
    """Counts the bytes of the device arrays that are alive."""
    def used_bytes(self): return _alive.bytes
    def total_bytes(self): return _alive.bytes
    def free_bytes(self): return 0
    def n_free_blocks(self): return 0
    def free_all_blocks(self, stream=None): pass
    def free_all_free(self): pass
    def get_limit(self): return 0
    def set_limit(self, size=None, fraction=None): pass


_alive = types.SimpleNamespace(bytes=0)
_pool = MemoryPool()


def _dies(nbytes):
    _alive.bytes -= nbytes


def get_default_memory_pool(): return _pool
def get_default_pinned_memory_pool(): return _pool
def is_available(): return True


cuda = types.ModuleType("cupy.cuda")
cuda.Device, cuda.Stream, cuda.Event, cuda.MemoryPool, cuda.is_available = Device, Stream, Event, MemoryPool, is_available
cuda.get_current_stream = lambda device_id=-1: Stream.null
cuda.get_device_id = lambda: Device().id
cuda.get_elapsed_time = lambda start_event, end_event: 0.0
cuda.runtime = types.ModuleType("cupy.cuda.runtime")
cuda.runtime.CUDARuntimeError = CUDARuntimeError
cuda.runtime.getDeviceCount = lambda: settings.devices
cuda.runtime.getDevice = lambda: Device().id
cuda.runtime.deviceSynchronize = _sync
cuda.runtime.memGetInfo = lambda: Device.mem_info
cuda.runtime.runtimeGetVersion = cuda.runtime.driverGetVersion = lambda: 13000
cuda.runtime.getDeviceProperties = lambda device: {"name": b"strict stand-in", "multiProcessorCount": 132, "major": 9, "minor": 0,
                                                   "totalGlobalMem": 1 << 36, "sharedMemPerBlockOptin": 232448}


# --- the array ---------------------------------------------------------------------------------------------------------

IMPLICIT = "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."


class Flags:
    """CuPy's flags: there is no `writeable` among them."""

    def __init__(self, c_contiguous, f_contiguous, owndata):
        self.c_contiguous, self.f_contiguous, self.owndata = c_contiguous, f_contiguous, owndata

    fnc = property(lambda self: self.f_contiguous and not self.c_contiguous)
    forc = property(lambda self: self.f_contiguous or self.c_contiguous)

    def __getitem__(self, name):
        return getattr(self, name.lower())


class ndarray:
    """An array "on the device": wraps a NumPy array and is none, so that NumPy cannot take it for one."""
    __slots__ = ("_a", "base", "_device", "__weakref__")
    __array_ufunc__ = None                      # np.exp(x) and np_array + x: TypeError
    __hash__ = None
    __module__ = "cupy"

    def __init__(self, shape, dtype=float, order="C"):
        self._take(np.zeros(shape, dtype, order), None)

    def _take(self, array, base):
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise ValueError(f"Unsupported dtype {array.dtype}")
        self._a, self.base, self._device = array, base, Device().id
        if base is None:
            _alive.bytes += array.nbytes
            weakref.finalize(self, _dies, array.nbytes).atexit = False

    def __array__(self, *args, **kwargs):
        raise TypeError(IMPLICIT)

    def __array_function__(self, function, *args):
        raise TypeError(f"numpy.{function.__name__} was called on a device array: use xp.{function.__name__}")

    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    strides = property(lambda self: self._a.strides)
    shape = property(lambda self: self._a.shape, lambda self, shape: setattr(self._a, "shape", shape))
    device = property(lambda self: Device(self._device))
    flags = property(lambda self: Flags(self._a.flags.c_contiguous, self._a.flags.f_contiguous, self.base is None))
    data = property(lambda self: types.SimpleNamespace(ptr=self._a.ctypes.data, device_id=self._device))
    T = property(lambda self: _wrap(self._a.T, (self,)))
    mT = property(lambda self: _wrap(self._a.mT, (self,)))
    real = property(lambda self: _wrap(self._a.real, (self,)))
    imag = property(lambda self: _wrap(self._a.imag, (self,)))

    # --- to the host: the host waits
    def get(self, stream=None, order="C", out=None, blocking=True):
        _sync()
        counts.downloads += 1
        if out is None:
            return self._a.copy()
        out[...] = self._a
        return out

    def set(self, arr, stream=None):
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise ValueError(f"Shape or dtype mismatch: {arr.shape} {arr.dtype}, {self.shape} {self.dtype}")
        counts.uploads += 1
        self._a[...] = arr

    def item(self): return self.get().item()
    def tolist(self): return self.get().tolist()
    def tobytes(self, order="C"): return self.get().tobytes(order)
    def __float__(self): return float(self.item())
    def __int__(self): return int(self.item())
    def __bool__(self): return bool(self.get())
    def __repr__(self): return repr(self.get())
    def __str__(self): return str(self.get())
    def __format__(self, spec): return format(self.get(), spec)
    def __reduce__(self): return asarray, (self.get(),)
    def __copy__(self): return self.copy()
    def __deepcopy__(self, memo): return self.copy()

    def __index__(self): raise TypeError("'ndarray' object cannot be interpreted as an integer")
    def __contains__(self, value): raise TypeError("`in` on a device array waits for the device once an element: use (x == value).any()")
    def __len__(self): return len(self._a)

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self._a)))

    # --- indexing
    def _key(self, key):
        return tuple(_index(i) for i in (key if isinstance(key, tuple) else (key,)))

    def __getitem__(self, key):
        found = self._key(key)
        if not any(isinstance(i, (np.ndarray, list)) or i is Ellipsis for i in found):
            found = (*found, Ellipsis)          # a single element is a 0-d view, not a number
        return _wrap(self._a[found], (self,))

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray):
            if value.ndim:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = value.item()
        if isinstance(value, (list, tuple)):
            raise TypeError(f"Unsupported type {type(value)}")
        found, value = self._key(key), _bare(value)
        if np.size(value) > 1 and any(isinstance(i, (np.ndarray, list)) and np.asarray(i).dtype.kind in "iu" for i in found):
            cells = np.arange(self.size).reshape(self.shape)[found]
            if np.unique(cells).size != cells.size:
                raise RepeatedIndex("one cell is assigned several values: which one stays is undefined on a GPU (to add, use add.at)")
        with np.errstate(all="ignore"):
            self._a[found] = value

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        with np.errstate(all="ignore"):
            return _wrap(self._a.astype(dtype, order, casting or "unsafe", copy=copy), (self,), explicit=True)

    def fill(self, value):
        self[...] = value

    def view(self, dtype=None, type=None):
        return _wrap(self._a.view() if dtype is None else self._a.view(dtype), (self,), explicit=True)


def _index(i):
    """One part of an index as NumPy takes it."""
    if isinstance(i, (np.ndarray, range)):
        raise TypeError(f"an index on the host, {type(i)}, would be uploaded silently: use a device array or a slice")
    if isinstance(i, list):
        counts.uploads += 1
        if any(isinstance(j, np.ndarray) for j in i):
            raise TypeError("an index on the host would be uploaded silently: use a device array or a slice")
        return [_bare(j) for j in i] if i else np.empty(0, int)
    if isinstance(i, slice):
        if any(isinstance(j, (ndarray, np.ndarray)) for j in (i.start, i.stop, i.step)):
            raise TypeError("'ndarray' object cannot be interpreted as an integer")
        return i
    if isinstance(i, ndarray):
        i = _bare(i)
        if i.dtype.kind not in "biu":
            raise IndexError(f"arrays used as indices must be of integer or boolean type. (actual: {i.dtype})")
        if i.dtype.kind == "b":
            _sync()
    return i


# --- between the wrapper and NumPy ---------------------------------------------------------------------------------------

def _bare(x):
    """What NumPy computes with; arrays of the host, and of another device than the current one, are refused."""
    if isinstance(x, ndarray):
        if x._device != _current.__dict__.get("device", 0):
            raise ValueError(f"Array device must be same as the current device: array device = {x._device} while current = "
                             f"{Device().id}")
        return x._a
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    if isinstance(x, (list, tuple)):
        return type(x)(map(_bare, x))
    return x


def _arrays(values):
    for x in values:
        if isinstance(x, ndarray):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _arrays(x)


def _root(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _wrap(result, inputs=(), explicit=False):
    """NumPy's result as device arrays: an input itself, a view of an input, or new memory. No number leaves the device."""
    if isinstance(result, np.generic):
        result = np.asarray(result)
    if isinstance(result, np.ndarray):
        for x in inputs:
            if result is x._a:
                return x
        if result.dtype == np.float64 and not explicit and settings.float64_alarm:
            _alarm(inputs)
        if not (result.size and any(n > 1 and step == 0 for n, step in zip(result.shape, result.strides))):
            _make_writable(result)              # NumPy forbids it for every result of broadcast_to
        y = ndarray.__new__(ndarray)
        y._take(result, _base_of(result, inputs))
        return y
    if isinstance(result, (list, tuple)):
        wrapped = [_wrap(r, inputs, explicit) for r in result]
        return wrapped if isinstance(result, list) else tuple(wrapped)
    return result


def _make_writable(result):
    with warnings.catch_warnings():             # of broadcast_arrays, whose results know that they are asked
        warnings.simplefilter("ignore")
        if not result.flags.writeable:
            result.setflags(write=True)


def _base_of(result, inputs):
    if result.base is None:
        return None
    root = _root(result)
    return next((x if x.base is None else x.base for x in inputs if _root(x._a) is root), None)


def _alarm(inputs):
    kinds = {x.dtype for x in inputs if x.dtype.kind == "f"}
    if kinds and np.dtype(np.float64) not in kinds:
        raise Float64Alarm(f"{' and '.join(map(str, kinds))} became float64: give scalars as Python numbers, and convert integers first")


# Arguments that count or name axes: CuPy wants them on the host.
_HOST_SIDE = {"axis", "axes", "axis1", "axis2", "shape", "newshape", "reps", "order", "ddof", "k", "offset", "num", "source",
              "destination", "indices_or_sections", "shift", "ndmin", "start", "stop", "step", "N", "M", "minlength", "pad_width",
              "keepdims", "kth"}
_FIRST_IS_ARRAY = {"a", "x", "m", "arr", "array", "ar", "ary", "x1", "element"}
_LISTS_OF_ARRAYS = {"concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"}
_WAITS = {"nonzero", "unique", "flatnonzero", "argwhere", "compress", "extract", "bincount", "isin", "in1d", "union1d", "intersect1d",
          "setdiff1d", "unique_values", "unique_counts", "unique_inverse", "unique_all", "trim_zeros", "histogram", "percentile",
          "quantile"}
_DEVICE_TRUTH = {"allclose", "array_equal", "array_equiv", "count_nonzero"}     # NumPy answers with a number, CuPy with a 0-d array


@functools.cache
def _signature(place, name):
    parameters = NAMES[place].get(name)
    if parameters is None:
        return None
    return inspect.Signature([inspect.Parameter(n, inspect._ParameterKind(kind), default=None if optional else inspect.Parameter.empty)
                              for n, kind, optional in parameters])


def _check_call(place, name, args, kwargs):
    """TypeError for a keyword that CuPy does not have, and for a device array where a number of the host belongs."""
    signature = _signature(place, name)
    if signature is None:
        return
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{name}() of CuPy: {error}") from None
    for parameter, value in given.items():
        if parameter in _HOST_SIDE and any(True for _ in _arrays([value])):
            raise TypeError("'ndarray' object cannot be interpreted as an integer")
        if parameter == "repeats" and isinstance(value, ndarray):
            raise ValueError("cupy.ndaray cannot be specified as `repeats` argument.")
    first, value = next(iter(given.items()), (None, None))
    if first in _FIRST_IS_ARRAY and place == "cupy" and isinstance(value, (list, np.ndarray)) or isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if name in _LISTS_OF_ARRAYS and not all(isinstance(x, ndarray) for x in value):
        raise TypeError("Only cupy arrays can be concatenated")
    if given.get("kind") not in (None, "stable") and "sort" in name:
        raise ValueError(f"sort kind {given['kind']!r} is not supported: only 'stable' is")


def _run(function, place, name, self, args, kwargs):
    """NumPy's function on device arrays, as CuPy's of this name would run."""
    _check_call(place, name, args, kwargs)
    inputs = (*self, *_arrays(args), *_arrays(kwargs.values()))
    if name in _WAITS or name == "where" and len(args) == 1:
        _sync()
    counts.launches += 1
    bare = [_bare(x) for x in args]
    with np.errstate(all="ignore"):
        result = function(*bare, **{n: _bare(x) for n, x in kwargs.items()})
    if name in _DEVICE_TRUTH:
        result = np.asarray(result)
    explicit = kwargs.get("dtype") is not None or name in ("zeros", "ones", "empty", "full", "arange", "linspace")
    return _wrap(result, inputs, explicit)


def _method(name):
    def method(self, *args, **kwargs):
        return _run(getattr(_bare(self), name), "cupy.ndarray", name, (self,), args, kwargs)
    method.__name__ = name
    return method


for _name, _parameters in NAMES["cupy.ndarray"].items():
    if _parameters is not None and not _name.startswith("_") and _name not in vars(ndarray) and hasattr(np.ndarray, _name):
        setattr(ndarray, _name, _method(_name))


def _operator(name):
    plain = getattr(np.ndarray, name)

    def operator(self, *other):
        if other and isinstance(other[0], (list, tuple, np.ndarray)):
            raise TypeError(f"Unsupported type {type(other[0])}")
        with np.errstate(all="ignore"):
            result = plain(_bare(self), *map(_bare, other))
        counts.launches += 1
        return result if result is NotImplemented else _wrap(result, (self, *_arrays(other)))
    return operator


for _name in ("add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()):
    for _form in ("__{}__", "__r{}__", "__i{}__"):
        if _form.format(_name) in NAMES["cupy.ndarray"]:
            setattr(ndarray, _form.format(_name), _operator(_form.format(_name)))
for _name in "neg pos abs invert lt le gt ge eq ne divmod rdivmod".split():
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))


class ufunc:
    """An element-wise function: arrays of the device and numbers in, arrays of the device out."""
    _AT = {"add", "subtract", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor"}
    _ATOMIC = ("int32", "float16", "float32", "float64", "complex64", "complex128", "uint32", "uint64")

    def __init__(self, name):
        self.__name__, self._f = name, getattr(np, name)

    def __call__(self, *args, **kwargs):
        for x in (*args, *kwargs.values()):
            if isinstance(x, (list, np.ndarray)):
                raise TypeError(f"Unsupported type {type(x)}")
        if unknown := kwargs.keys() - {"out", "dtype", "casting"}:
            raise TypeError(f"Wrong arguments {dict.fromkeys(unknown)}")
        return _run(self._f, "cupy", self.__name__, (), args, kwargs)

    def at(self, a, indices, b=None):
        if self.__name__ not in self._AT:
            raise NotImplementedError(f"`{self.__name__}.at` is not supported yet")
        if a.dtype not in self._ATOMIC:
            raise TypeError(f"scatter_{self.__name__} only supports {', '.join(self._ATOMIC)} as data type, got {a.dtype}")
        self._f.at(_bare(a), a._key(indices), _bare(b))

    def reduce(self, *args, **kwargs): return self._variant("reduce", args, kwargs)
    def accumulate(self, *args, **kwargs): return self._variant("accumulate", args, kwargs)
    def outer(self, *args, **kwargs): return self._variant("outer", args, kwargs)

    def _variant(self, name, args, kwargs):
        return _run(getattr(self._f, name), "cupy.ufunc", name, (), args, kwargs)


class _Grid:
    """ogrid, mgrid, r_, c_: what is written with brackets."""
    def __init__(self, grid): self.grid = grid
    def __getitem__(self, key):
        _check_call("cupy", "arange", (), {"start": key, "stop": None, "step": None, "dtype": None})
        return _wrap(self.grid[_bare(key)], explicit=True)


# --- from the host: the doors ----------------------------------------------------------------------------------------------

def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    """A device array of values of the host or of the device; a copy unless it is one already and copy is False."""
    if isinstance(obj, ndarray):
        if obj._device != Device().id:          # CuPy copies from device to device
            return _wrap(obj._a.copy()).astype(dtype or obj.dtype, copy=False)
        return _wrap(np.array(_bare(obj), dtype, copy=copy or None, order=order, ndmin=ndmin), (obj,), explicit=True)
    held = list(_arrays([obj]))
    if held:
        return _wrap(np.array(_bare(obj), dtype, ndmin=ndmin), held, explicit=True)
    counts.uploads += 1
    return _wrap(np.array(obj, dtype, order=order, ndmin=ndmin), explicit=True)


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    return array(a, dtype, bool(copy), order or "K", blocking=blocking)


def asanyarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    return asarray(a, dtype, order, copy=copy, blocking=blocking)


def ascontiguousarray(a, dtype=None):
    return asarray(a, dtype, "C")


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    return a.get(stream, order, out) if isinstance(a, ndarray) else np.asarray(a, order=order)


def get_array_module(*args):
    return sys.modules[__name__] if any(isinstance(x, ndarray) for x in args) else np


def may_share_memory(a, b, max_work=None): return np.may_share_memory(_bare(a), _bare(b))
def shares_memory(a, b, max_work=None): return np.shares_memory(_bare(a), _bare(b))


# --- kernels: run by the CPU emulator of the package -----------------------------------------------------------------------

class RawModule:
    """CUDA C++ that the CPU runs. `settings.checked_kernels` also looks for races and bad accesses, slowly."""

    def __init__(self, code=None, *, path=None, options=(), backend="nvrtc", translate_cucomplex=False,
                 enable_cooperative_groups=False, name_expressions=None, jitify=False):
        if code is None or path is not None or backend != "nvrtc":
            raise ValueError("the stand-in takes source code for NVRTC")
        from tinygrad_tf.kernels.cpu_emulator import RawModule as Emulated
        self._module = Emulated(code=code, options=tuple(options), check=settings.checked_kernels)

    def compile(self, log_stream=None): pass
    def get_function(self, name): return _Kernel(self._module.get_function(name), name)


class RawKernel:
    """One kernel of a source of its own."""
    def __new__(cls, code, name, options=(), **other):
        return RawModule(code, options=options).get_function(name)


class _Kernel:
    def __init__(self, kernel, name):
        object.__setattr__(self, "_kernel", kernel)
        object.__setattr__(self, "name", name)

    def __setattr__(self, name, value): setattr(self._kernel, name, value)
    def __getattr__(self, name): return getattr(self._kernel, name)

    def __call__(self, grid, block, args, *, shared_mem=0, stream=None, enable_cooperative_groups=False):
        counts.launches += 1
        self._kernel(tuple(grid), tuple(block), tuple(_argument(a) for a in args), shared_mem=shared_mem)


def _argument(x):
    """A kernel's argument as the emulator takes it. CuPy passes a Python int as 64 bits and a float as a double; so does it."""
    if isinstance(x, np.ndarray) and not (x.size == 1 and x.dtype.names):
        raise TypeError(f"Unsupported type {type(x)}")
    return x if isinstance(x, np.ndarray) else _bare(x)


# --- random numbers --------------------------------------------------------------------------------------------------------

class Generator:
    """The methods that cupy.random.Generator has, and no others; not NumPy's stream, so that nobody can rely on equal numbers."""

    def __init__(self, seed=None):
        self._generator = np.random.default_rng(None if seed is None else [seed, 0xC0DE])

    def __getattr__(self, name):
        if name not in NAMES["cupy.random.Generator"]:
            raise AttributeError(f"'cupy.random.Generator' object has no attribute {name!r}")
        return lambda *args, **kwargs: _run(getattr(self._generator, name), "cupy.random.Generator", name, (),
                                            args, {"dtype": np.float64, **kwargs} if name == "random" else kwargs)


class _Names(types.ModuleType):
    """A module of CuPy: NumPy's functions of the names that CuPy has."""

    def __init__(self, name, source):
        super().__init__(name)
        self.source = source

    def __getattr__(self, name):
        thing = _found(self.__name__, name, self.source)
        setattr(self, name, thing)
        return thing


def _found(place, name, source):
    if name.startswith("__") or name not in NAMES[place]:
        raise AttributeError(f"module {place!r} has no attribute {name!r}")
    thing = getattr(source, name, None)
    if thing is None:
        raise NotImplementedError(f"{place}.{name} exists in CuPy, and not in this stand-in: add it here")
    if isinstance(thing, type) or not callable(thing):
        return _Grid(thing) if name in ("ogrid", "mgrid", "r_", "c_") else thing
    if place == "cupy" and name in NAMES["ufuncs"]:
        return ufunc(name)

    def function(*args, **kwargs):
        return _run(thing, place, name, (), args, kwargs)
    function.__name__ = name
    return function


random = _Names("cupy.random", None)
random.default_rng = random.Generator = Generator
linalg = _Names("cupy.linalg", np.linalg)
fft = _Names("cupy.fft", np.fft)


def __getattr__(name):
    thing = _found("cupy", name, np)
    globals()[name] = thing                     # the next look is at a plain name
    return thing


cupyx = _Names("cupyx", None)
cupyx.DeviceSynchronized = DeviceSynchronized
cupyx.allow_synchronize = lambda allow: changed(synchronize=allow)
cupyx.rsqrt = lambda x: _wrap(1 / np.sqrt(_bare(x)), (x,))
cupyx.empty_pinned = lambda shape, dtype=float, order="C": np.empty(shape, dtype, order)
cupyx.zeros_pinned = lambda shape, dtype=float, order="C": np.zeros(shape, dtype, order)
cupyx.empty_like_pinned = lambda a, dtype=None: np.empty(a.shape, dtype or a.dtype)


def modules():
    """What `import` finds under which name once this is installed."""
    return {"cupy": sys.modules[__name__], "cupy.cuda": cuda, "cupy.cuda.runtime": cuda.runtime, "cupy.random": random,
            "cupy.linalg": linalg, "cupyx": cupyx}


def install():
    """From here on `import cupy` finds this module."""
    sys.modules.update(modules())
    return sys.modules[__name__]
