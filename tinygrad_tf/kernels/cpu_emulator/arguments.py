"""What a launch passes to a kernel: NumPy arrays as pointers, NumPy scalars by value, as CuPy does with its own.

A kernel runs on copies of the arrays, each between two fences, so that a store that goes astray hurts nobody. The copies
lie as far from a multiple of 256 as the array does from the beginning of its memory: CuPy's memory begins at such multiples.
"""
import ctypes

import numpy as np

from .report import KernelError

FENCE = 1 << 16                                 # bytes; more than the emulator's largest block of shared memory would need to jump
FENCE_BYTE = 0xA5
POISON = np.array([0xF5, 0x7F], np.uint8)       # a NaN in float16, bfloat16, float32 and float64; as in runtime.h


class ArgumentError(KernelError, TypeError):
    """An argument does not fit the kernel's parameter."""


# ---- memory that nobody has set ------------------------------------------------------------------------------------------------

def uninitialised(shape, dtype=np.float32):
    """An array like `np.empty`, whose every element is recognised as "not set yet": a checked kernel that reads one is told so.

    All bytes are f5 7f: NaN for floats, 2146795509 for int32. (An array of single bytes is recognised four bytes at a time.)
    """
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = np.resize(POISON, array.nbytes)
    return array


def unwritten(array):
    """True where an element of an array from `uninitialised` has still not been set.    [...] → bool [...]"""
    unset = np.resize(POISON, array.dtype.itemsize) if array.dtype.itemsize > 1 else POISON[:1]
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
    if array.dtype.itemsize > 1:
        return (raw == unset).all(axis=-1)
    flat = raw.reshape(-1)
    return (flat == np.resize(POISON, flat.size)).reshape(array.shape)


# ---- what the kernel declares -----------------------------------------------------------------------------------------------------

class Parameter(ctypes.Structure):
    """cpu::Parameter: kind f (floating point), b (bfloat16), i (integer), V (a struct), ? (void)."""
    _fields_ = [("kind", ctypes.c_char), ("pointer", ctypes.c_bool), ("constant", ctypes.c_bool), ("element_bytes", ctypes.c_ubyte),
                ("bytes", ctypes.c_uint)]

    def words(self):
        kind, size = self.kind.decode(), self.element_bytes if self.pointer else self.bytes
        names = {"f": {2: "half", 4: "float", 8: "double"}, "b": {2: "bfloat16"},
                 "i": {1: "char or bool", 2: "short", 4: "int", 8: "long long"}}
        name = names.get(kind, {}).get(size) or ("void" if kind == "?" else f"struct of {size} bytes")
        return ("const " if self.constant else "") + name + ("*" if self.pointer else "")


def numpy_kind(dtype):
    """The kind of a parameter that such an array fits; u: raw bits, which fit any of their size."""
    if dtype.name == "bfloat16":
        return "b"
    return {"f": "f", "i": "i", "b": "i", "u": "u", "c": "f"}.get(dtype.kind, "V")


def fits(dtype, parameter):
    kind, wanted = numpy_kind(dtype), parameter.kind.decode()
    if wanted == "?":
        return True
    if wanted == "V":
        return parameter.pointer or dtype.itemsize == parameter.bytes
    size = parameter.element_bytes if parameter.pointer else parameter.bytes
    return dtype.itemsize == size and (kind in (wanted, "u") or (wanted == "i" and parameter.pointer and size == 2 and kind in "fb"))


HINTS = {"int": "np.int32(n)", "float": "np.float32(x)", "long long": "np.int64(n)", "double": "np.float64(x)"}


def scalar(value, parameter, name):
    """The bytes of a scalar or a struct that is passed by value, as CuPy would send it: a Python int in 8 bytes, a float as a double."""
    sent = np.asarray(value) if isinstance(value, (bool, int, float, complex, np.generic, np.ndarray)) else None
    if sent is None or sent.size != 1 or sent.dtype == object:
        raise ArgumentError(f"{name} is {parameter.words()}: pass a NumPy scalar, not {described(value)}")
    if isinstance(value, np.ndarray) and parameter.kind != b"V":
        raise ArgumentError(f"{name} is {parameter.words()}: pass a NumPy scalar, not {described(value)}, which CuPy would "
                            f"pass as a pointer")
    if fits(sent.dtype, parameter) and (parameter.kind != b"f" or sent.dtype.kind == "f"):
        return sent
    hint = HINTS.get(parameter.words(), "a NumPy scalar of that type")
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        raise ArgumentError(f"{name} is {parameter.words()}, but a Python {type(value).__name__} is sent as {sent.dtype} ({sent.nbytes} "
                            f"bytes) by CuPy, and the kernel would read garbage: pass {hint}")
    raise ArgumentError(f"{name} is {parameter.words()}, got {described(value)}: pass {hint}")


def described(value):
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, shape {value.shape}"
    return f"{type(value).__name__}" + (f" {value!r}" if isinstance(value, (bool, int, float, str, np.generic)) else "")


def check_array(array, parameter, name):
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"{name} is {parameter.words()}: pass a NumPy array, or None for a null pointer, not {described(array)}")
    if array.dtype.hasobject or not fits(array.dtype, parameter):
        raise ArgumentError(f"{name} is {parameter.words()}, got {described(array)}")
    if not parameter.constant and not array.flags.writeable:
        raise ArgumentError(f"{name} is {parameter.words()}, which may be written to, but the array is read-only: pass a copy, or "
                            f"declare the parameter const")


# ---- copies between fences -----------------------------------------------------------------------------------------------------------

class Array(ctypes.Structure):
    """cpu::Array of runtime.h"""
    _fields_ = [("start", ctypes.c_size_t), ("bytes", ctypes.c_size_t), ("origin", ctypes.c_size_t), ("name", ctypes.c_char_p),
                ("inside", ctypes.c_char_p), ("element_bytes", ctypes.c_uint), ("writable", ctypes.c_uint)]


def extent(array):
    """(first byte, one past the last byte) of an array's elements in memory."""
    if not array.size:
        return array.ctypes.data, array.ctypes.data
    return np.lib.array_utils.byte_bounds(array)


def offset_in_memory(array, low):
    """How far `low` is from the beginning of the memory that the array is a view of."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    return low - root.ctypes.data


class Piece:
    """One stretch of memory: an array, or several that overlap."""

    def __init__(self, views):
        """views: list of (name, array, writable)"""
        self.views = views
        bounds = [extent(array) for _, array, _ in views]
        self.low, self.high = min(low for low, _ in bounds), max(high for _, high in bounds)
        self.raw = np.full(self.high - self.low + 2 * FENCE + 512, FENCE_BYTE, np.uint8)
        aligned = -(-(self.raw.ctypes.data + FENCE) // 256) * 256
        self.start = aligned - self.raw.ctypes.data + offset_in_memory(views[0][1], self.low) % 256
        for _, array, _ in views:
            self.copy_of(array)[...] = array

    def copy_of(self, array):
        return np.ndarray(array.shape, array.dtype, self.raw, self.start + self.position(array), array.strides)

    def position(self, array):
        return array.ctypes.data - self.low

    def pointer(self, array):
        return self.raw.ctypes.data + self.start + self.position(array)

    def gaps(self):
        """None, or for each byte whether it belongs to an element of some array."""
        inside = np.zeros(self.high - self.low, np.uint8)
        for _, array, _ in self.views:
            np.ndarray((*array.shape, array.itemsize), np.uint8, inside, self.position(array), (*array.strides, 1))[...] = 1
        return None if inside.all() else inside.tobytes()

    def description(self):
        _, first, _ = self.views[0]
        names = list(dict.fromkeys(name for name, _, _ in self.views))
        return Array(self.raw.ctypes.data + self.start, self.high - self.low, self.pointer(first), " or ".join(names).encode(), self.gaps(),
                     first.itemsize, any(writable for _, _, writable in self.views))

    def copy_back(self):
        for _, array, writable in self.views:
            if writable:
                array[...] = self.copy_of(array)

    def broken(self):
        """True where bytes of a fence have changed."""
        end = self.start + self.high - self.low
        return bool((self.raw[:self.start] != FENCE_BYTE).any() or (self.raw[end:] != FENCE_BYTE).any())


def pieces(views):
    """Arrays that overlap in memory are copied as one."""
    groups, end = [], None
    for view in sorted((view for view in views if view[1].size), key=lambda view: extent(view[1])):
        low, high = extent(view[1])
        if end is not None and low < end:
            groups[-1].append(view)
            end = max(end, high)
        else:
            groups.append([view])
            end = high
    return [Piece(group) for group in groups] + [Piece([view]) for view in views if not view[1].size]


class Bound:
    """The arguments of one launch, in the form in which the kernel takes them."""

    def __init__(self, kernel, parameters, names, values):
        if len(values) != len(parameters):
            raise ArgumentError(f"{kernel} takes {len(parameters)} arguments ({', '.join(names)}), got {len(values)}")
        views, self._values = [], [None] * len(values)
        for i, (value, parameter, name) in enumerate(zip(values, parameters, names)):
            title = f"{kernel}: argument {i} (`{name}`)"
            if not parameter.pointer:
                self._values[i] = scalar(value, parameter, title).copy()
            elif value is not None:
                check_array(value, parameter, title)
                views.append((name, value, not parameter.constant))
        self.pieces = pieces(views)
        for i, (value, parameter) in enumerate(zip(values, parameters)):
            if parameter.pointer:
                self._values[i] = np.array([0 if value is None else self._pointer(value)], np.uint64)
        self.addresses = (ctypes.c_void_p * max(len(values), 1))(*(value.ctypes.data for value in self._values))
        self.arrays = (Array * max(len(self.pieces), 1))(*(piece.description() for piece in self.pieces))

    def _pointer(self, array):
        return next(piece.pointer(array) for piece in self.pieces if any(array is view[1] for view in piece.views))

    def finish(self):
        """Copies back what the kernel has written; the names of arrays beside which it wrote."""
        for piece in self.pieces:
            piece.copy_back()
        return [piece.views[0][0] for piece in self.pieces if piece.broken()]
