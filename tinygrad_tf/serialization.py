"""`save` and `load`: nested dicts, lists and tuples of tensors and plain values, in one file that runs no code.

The file is a safetensors file. Its tensors bear the path that led to them ("model.blocks.0.weight"), so that other programs
read a saved state dict by its own names; one entry of its metadata holds the rest as JSON. Nothing is pickled: a pickle is
a program, and whoever loads it runs it.
"""
import errno
import hashlib
import json
import os
import secrets
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from . import dtypes
from .arguments import type_name
from .autograd import constant
from .backend import CPU, to_device
from .backend import device as Device
from .nn.module import Parameter
from .ops.shape import as_shape
from .size import Size
from .tensor import Tensor

FORMAT = 1
_METADATA = "tinygrad_tf.save"  # the one entry: the order of several would be random, and equal objects would give unequal files
_MAX_DEPTH = 200                # of objects in objects; JSON and Python both recurse
_MAX_REPEATED = 10**6           # values in containers that were met before: shared ones are written out each time, 2ⁿ for n in each other
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {list: "list", tuple: "tuple", Size: "Size"}
_MAKERS = {"list": list, "tuple": tuple, "Size": lambda sizes: Size(as_shape("Size", (tuple(sizes),)))}
_MAX_HEADER = 10**8             # of bytes; safetensors has the same bound
_SAFETENSORS = {"F64": dtypes.float64, "F32": dtypes.float32, "F16": dtypes.float16, "BF16": dtypes.bfloat16, "I64": dtypes.int64,
                "I32": dtypes.int32, "I16": dtypes.int16, "I8": dtypes.int8, "U8": dtypes.uint8, "BOOL": dtypes.bool_}
_WRITTEN_BY_OTHERS = "it was not written by tinygrad_tf.save, or was damaged since"


# --- writing ------------------------------------------------------------------------------------------------------------

def save(obj, f):
    """Writes an object to a path, atomically, or to an open binary file.

    It may hold tensors and Parameters, None, bool, int, float and str, and lists, tuples and dicts of these, with plain values
    as keys: state dicts of modules and optimizers do. TypeError names the place of anything else. Tensors with the same
    memory and shape are stored once and share memory again when loaded; other views are stored by themselves. Whether a
    tensor requires a gradient is kept, its history is not.
    """
    tree, tensors = _Packer().run(obj)
    data = _as_bytes(tree, tensors)
    if hasattr(f, "write"):
        f.write(data)
    else:
        write_atomically(f, data)


def _as_bytes(tree, tensors):
    from safetensors.numpy import save as to_safetensors
    document = {"format": FORMAT, "sha256": _sha256(tensors, tree), "object": tree}
    return to_safetensors(tensors, metadata={_METADATA: json.dumps(document)})


def _sha256(tensors, tree):
    return content_digest(tensors, json.dumps(tree)).tobytes().hex()


class _Packer:
    """An object as a tree of JSON, and its tensors by name. Plain values stand for themselves, all else is {kind: content}."""

    def __init__(self):
        self.arrays, self.names, self.open = {}, {}, []
        self.seen, self.repeated = set(), 0

    def run(self, obj):
        return self.pack(obj, ()), self.arrays

    def pack(self, obj, path):
        if type(obj) in _PLAIN:
            return obj
        if isinstance(obj, Tensor):
            return self.pack_tensor(obj, path)
        if id(obj) in self.open or len(path) >= _MAX_DEPTH:
            raise ValueError(f"save: {_place(path)} contains itself, or lies more than {_MAX_DEPTH} levels deep")
        self.count_repeated(obj, path)
        self.open.append(id(obj))
        packed = self.pack_container(obj, path)
        self.open.pop()
        return packed

    def count_repeated(self, obj, path):
        """Refuses what is small in memory and without end in a file, as after a = [a, a] thirty times."""
        if id(obj) in self.seen and isinstance(obj, (dict, list, tuple)):
            self.repeated += 1 + len(obj)
            if self.repeated > _MAX_REPEATED:
                raise ValueError(f"save: {_place(path)} is one of the containers that occur again and again: written out each time they "
                                 f"hold more than {_MAX_REPEATED} values; save each once, and put numbers into a tensor")
        self.seen.add(id(obj))

    def pack_container(self, obj, path):
        if isinstance(obj, dict):
            return {"dict": [[_checked_key(key, path), self.pack(value, (*path, key))] for key, value in obj.items()]}
        if type(obj) in _SEQUENCES:
            return {_SEQUENCES[type(obj)]: [self.pack(value, (*path, i)) for i, value in enumerate(obj)]}
        raise TypeError(f"save: {_place(path)} is a {type_name(obj)}; tensors, None, bool, int, float, str, and dicts, lists and tuples "
                        f"of these can be saved{_hint(obj)}")

    def pack_tensor(self, x, path):
        memory = (x.data_ptr(), x.shape, x.stride(), x.dtype, str(x.device))
        if memory not in self.names:
            self.names[memory] = name = self.unused_name(path)
            self.arrays[name] = np.asarray(to_device(x.array, CPU), order="C")
        kind = "parameter" if isinstance(x, Parameter) else "tensor"
        return {kind: self.names[memory], "requires_grad": x.requires_grad}

    def unused_name(self, path):
        name = wanted = ".".join(str(key) for key in path).encode("utf-8", "replace").decode() or "tensor"
        while name in self.arrays or name == "__metadata__":
            name = f"{wanted}#{len(self.arrays)}"
        return name


def _checked_key(key, path):
    if type(key) not in _PLAIN:
        raise TypeError(f"save: the dict {_place(path)} has the key {key!r}, a {type_name(key)}; keys can be None, bool, int, float "
                        f"and str")
    return key


def _place(path):
    """How Python would reach it: obj['groups'][0]."""
    return "obj" + "".join(f"[{key!r}]" for key in path)


def _hint(obj):
    if isinstance(obj, np.ndarray):
        return "; wrap it with tinygrad_tf.from_numpy(...)"
    if isinstance(obj, np.generic):
        return "; .item() makes a plain number of it"
    return "; save its .state_dict()" if hasattr(obj, "state_dict") else ""


def write_atomically(path, data):
    """Bytes or text to a file that is, at every moment, the old one or the new one, for every thread and process.

    A link stays and what it leads to is written; a file keeps its permissions. OSError names the file.
    """
    with replacing(path) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


@contextmanager
def replacing(path):
    """An open binary file for what is to stand at `path`: it takes that place at the end, flushed; after an error nothing has changed."""
    target = Path(os.path.realpath(Path(path)))
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "there is a folder or a device, and no file that could be replaced", str(path))
    temporary = _beside(target)
    try:
        with _renamed_at_the_end(temporary, target) as file:
            yield file
    except OSError as error:
        if error.filename not in (None, str(temporary)):        # of another file, which is read meanwhile
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


@contextmanager
def _renamed_at_the_end(temporary, target):
    file = open(temporary, "xb")                # x: never somebody else's file
    try:
        with file:
            if target.exists():
                shutil.copymode(target, temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _flush_names(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush_names(folder):
    """A new name is on the disk when its folder is. Where no folder can be flushed (Windows, some network disks), the system sees to it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def alias(path, other):
    """`other` becomes a second name of the file at `path`, as at one moment; a copy of it where the disk knows no second names.

    Who writes one of them atomically leaves the other as it is.
    """
    path, other = Path(path), Path(other)
    temporary = _beside(other)
    try:
        os.link(path, temporary)
        os.replace(temporary, other)
        _flush_names(other.parent)
    except OSError:
        with path.open("rb") as file, replacing(other) as copy:
            shutil.copyfileobj(file, copy)
    finally:
        temporary.unlink(missing_ok=True)       # two names of one file: there replace does nothing


def _beside(target):
    """The name under which a file is written that is to stand at `target`; training/folder.py clears away what a killed process left."""
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def content_digest(tensors, text):
    """SHA-256 over the text and every tensor's name, dtype, shape and bytes, as uint8 [32]: one changed bit is seen."""
    digest = hashlib.sha256(text.encode())
    for name, array in sorted(tensors.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return np.frombuffer(digest.digest(), np.uint8)


# --- reading ------------------------------------------------------------------------------------------------------------

def load(f, map_location=None, *, weights_only=True):
    """The object that `save` wrote to a path or an open binary file; tensors come to `map_location`, the CPU if it is None.

    ValueError with one sentence for a pickle, for what PyTorch's own `torch.save` wrote, and for a damaged file.
    `weights_only` is accepted and changes nothing: there is never anything else in the file.
    """
    target = CPU if map_location is None else Device(map_location)
    name, data = _contents(f)
    arrays = _tensors_of(data, name)
    document = _document_of(data, name)
    if _sha256(arrays, document["object"]) != document["sha256"]:
        raise ValueError(f"load: {name} is damaged: its content does not have the SHA-256 that was stored with it")
    try:
        return _Unpacker(arrays, target).unpack(document["object"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"load: {name} describes no object that save writes ({type(error).__name__}: {one_line(error)})") from None


def _contents(f):
    """(what to call it, its bytes)"""
    if hasattr(f, "read"):
        name = getattr(f, "name", "the open file")
        data = _read(f, name)
        if not isinstance(data, bytes):
            raise TypeError(f"load: {name} must be opened in binary mode, as open(path, 'rb') does")
        return name, data
    if not Path(f).is_file():
        raise FileNotFoundError(f"load: there is no file {f}")
    with Path(f).open("rb") as file:
        return f, _read(file, f) if _has_the_size_it_says(file) else file.read(1000)     # enough to say what it is instead


def _read(file, name):
    try:
        return file.read()
    except MemoryError:
        raise MemoryError(f"load: {name} is larger than the free memory") from None


def _has_the_size_it_says(file):
    """Whether the header of a safetensors file fits its size: what is none can be larger than the memory."""
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length)) if length <= min(size, _MAX_HEADER) else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0) == size
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return False
    finally:
        file.seek(0)


def _tensors_of(data, name):
    from safetensors import SafetensorError, deserialize
    try:
        entries = deserialize(data)
        arrays = {key: np.frombuffer(entry["data"], _SAFETENSORS[entry["dtype"]].numpy).reshape(entry["shape"])
                  for key, entry in entries if entry["dtype"] in _SAFETENSORS}
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise ValueError(f"load: {name} {_kind_of(data) or f'is no safetensors file, or a damaged one ({one_line(error)})'}") from None
    if len(arrays) < len(entries):
        raise ValueError(f"load: {name} holds tensors of a type that there is not here; {_WRITTEN_BY_OTHERS}")
    return arrays


def _kind_of(data):
    """What a file that is no safetensors file is known to be."""
    if data[:4] == b"PK\x03\x04":
        return ("is a zip file, as PyTorch's torch.save writes it around a pickle; pickles run code and are not read: in PyTorch, "
                "write the tensors with safetensors.torch.save_file")
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "is a pickle; pickles run code when they are loaded and are not read: save its tensors with tinygrad_tf.save or safetensors"
    return None if data else "is empty"


def _document_of(data, name):
    """Our entry of the metadata: format, digest, and the object as JSON."""
    try:
        length = int.from_bytes(data[:8], "little")
        document = json.loads(json.loads(data[8:8 + length])["__metadata__"][_METADATA])
        document["format"], document["sha256"], document["object"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"load: {name} is a safetensors file, but {_WRITTEN_BY_OTHERS}; safetensors.numpy.load_file reads any "
                         f"such file") from None
    if document["format"] != FORMAT:
        raise ValueError(f"load: {name} has format {document['format']!r}, this version reads format {FORMAT}")
    return document


class _Unpacker:
    """The reverse of _Packer. What is stored once becomes one tensor, or aliases of one memory where they differ in kind."""

    def __init__(self, arrays, target):
        self.made = {}
        self.memory = {key: constant(to_device(array, target)) for key, array in arrays.items()}

    def unpack(self, tree):
        if type(tree) in _PLAIN:
            return tree
        (kind, content), *_ = tree.items()
        if kind == "dict":
            return {_plain(key): self.unpack(value) for key, value in content}
        if kind in ("tensor", "parameter"):
            return self.tensor(kind, content, tree["requires_grad"])
        return _MAKERS[kind](self.unpack(value) for value in content)

    def tensor(self, kind, name, requires_grad):
        key = kind, name, requires_grad
        if key not in self.made:
            x = self.memory[name]
            self.made[key] = Parameter(x, requires_grad) if kind == "parameter" else x.detach().requires_grad_(requires_grad)
        return self.made[key]


def _plain(key):
    if type(key) not in _PLAIN:
        raise TypeError(f"a {type(key).__name__} as a key")
    return key


def one_line(error):
    """The message of an error, whatever its line breaks."""
    return " ".join(str(error).split())
