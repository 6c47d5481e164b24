"""Files of weights, whatever their format, as one mapping: name → array, read from the disk when it is asked for.

A safetensors file:

    8 bytes          the length of the header, little-endian
    the header       JSON {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …, "__metadata__": {str: str}}
    the rest         the numbers of all tensors, one after another; offsets count from here

A model in several such files has an index beside them, JSON {"weight_map": {name of the tensor: name of the file}}.
"""
import json
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from ..serialization import one_line
from . import gguf
from .mapped import MappedFile, Stored, WeightsError, countable, require_disjoint, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
         "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1"}
MAX_HEADER, MAX_AXES = 1 << 23, 32              # the bytes of JSON are enough for 60,000 tensors


class Weights(Mapping):
    """weights[name] -> NumPy array, memory of its own: float32 for all that is stored in fewer bits, else as it is stored.

    The file is mapped, a tensor is read each time that it is asked for. `metadata`: what the file says besides. After `close`, or
    a with block, nothing can be read.
    """

    def __init__(self, path, metadata, stored, files):
        self.path, self.metadata, self.stored, self.files = Path(path), metadata, stored, files

    def __getitem__(self, name):
        return self.stored[name].read()

    def __contains__(self, name):               # Mapping would read the tensor
        return name in self.stored

    def __iter__(self):
        return iter(self.stored)

    def __len__(self):
        return len(self.stored)

    def shape(self, name):
        """As PyTorch has it: a linear layer's weight is [out, in]."""
        return self.stored[name].shape

    def dtype_name(self, name):
        """How the numbers are stored, in the words of the format: "F32", "BF16", "Q4_1"."""
        return self.stored[name].dtype_name

    def close(self):
        for file in self.files:
            file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"Weights({str(self.path)!r}, {len(self):,} tensors)"


def open_weights(path):
    """path: a GGUF file, a safetensors file, or a folder with model.safetensors or its index -> Weights.

    Headers are checked before anything is allocated. Raises FileNotFoundError, or WeightsError for what is damaged or not supported.
    """
    path = Path(path)
    if not path.is_dir():
        return _open_file(path)
    if (path / SINGLE).exists():
        return _open_file(path / SINGLE)
    if (path / INDEX).exists():
        return _open_shards(path / INDEX)
    raise WeightsError(f"the folder {path} holds neither {SINGLE} nor {INDEX}; a .bin file is a pickle, a program, and is not read")


def _open_file(path):
    file = MappedFile(path)
    try:
        metadata, stored = (gguf.read_header if file.bytes(0, 4) == gguf.MAGIC else read_safetensors_header)(file)
        return Weights(path, metadata, stored, [file])
    except BaseException:
        file.close()
        raise


# --- safetensors --------------------------------------------------------------------------------------------------------

def read_safetensors_header(file):
    """MappedFile -> (metadata, {name: Stored}). Raises WeightsError."""
    length = int.from_bytes(file.bytes(0, 8), "little")
    if not 2 <= length <= min(MAX_HEADER, file.size - 8) or file.bytes(8, 1) != b"{":
        raise WeightsError(f"{file.path} is {_kind_of(file) or 'neither a GGUF nor a safetensors file, or torn: its header does not fit'}")
    header = parsed_json(file.path, file.bytes(8, length))
    metadata, start = header.pop("__metadata__", {}), 8 + length
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError(f"{file.path} is damaged: its __metadata__ must be texts by name")
    stored, places = {}, {}
    for name, entry in header.items():
        dtype_name, shape, (begin, end) = _checked(file.path, name, entry)
        places[name] = start + begin, start + end
        stored[name] = Stored(shape, dtype_name, partial(read_plain, file, dtype_name, shape, start + begin))
    require_disjoint(file.path, places, start, file.size, gaps=False)
    return metadata, stored


def _kind_of(file):
    """What a file is known to be that is none of ours; torch.save writes a zip file around a pickle."""
    if file.bytes(0, 4) == b"PK\x03\x04" or file.bytes(0, 1) == b"\x80":
        return "a pickle, which is a program, and is not read (write its tensors with safetensors.torch.save_file)"
    return None


def parsed_json(path, data):
    """bytes -> dict; no name stands twice. Raises WeightsError."""
    def once(pairs):
        names = dict(pairs)
        if len(names) < len(pairs):
            raise ValueError("a name stands there twice")
        return names
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its JSON cannot be read ({one_line(error)})") from None
    if not isinstance(content, dict):
        raise WeightsError(f"{path} is damaged: its JSON must be an object")
    return content


def _checked(path, name, entry):
    """(dtype, shape, offsets) of a tensor, which fit each other. Raises WeightsError."""
    try:
        dtype_name, shape, offsets = entry["dtype"], tuple(entry["shape"]), tuple(entry["data_offsets"])
        whole = len(offsets) == 2 and len(shape) <= MAX_AXES and countable(shape) and countable(offsets[:1]) and countable(offsets[1:])
    except (TypeError, KeyError):
        whole = False
    if not whole or not isinstance(dtype_name, str):
        raise WeightsError(f"{path} is damaged: the tensor {shown(name)} needs a dtype, a shape and two offsets")
    if dtype_name not in TYPES:
        raise WeightsError(f"{path}: the tensor {shown(name)} has the dtype {shown(dtype_name)}, and only {', '.join(TYPES)} are read here")
    if offsets[1] - offsets[0] != math.prod(shape) * np.dtype(TYPES[dtype_name]).itemsize:
        raise WeightsError(f"{path} is damaged: the tensor {shown(name)} is {dtype_name} {shown(list(shape))}, and has "
                           f"{offsets[1] - offsets[0]} bytes")
    return dtype_name, shape, offsets


def read_plain(file, dtype_name, shape, start):
    x = file.array(TYPES[dtype_name], math.prod(shape), start)
    if dtype_name == "BF16":
        x = gguf.from_bfloat16(x)
    return x.astype({"F16": np.float32, "BOOL": np.bool_}.get(dtype_name, x.dtype)).reshape(shape)


# --- several files ------------------------------------------------------------------------------------------------------

def _open_shards(path):
    """path: the index, whose files lie beside it -> Weights."""
    content = parsed_json(path, _index_bytes(path))
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
        raise WeightsError(f"{path} is damaged: its weight_map must give the file of each tensor")
    with ExitStack() as opened:
        shards = {shard: opened.enter_context(_open_shard(path, shard)) for shard in sorted(set(names.values()))}
        lost = [name for name, shard in names.items() if name not in shards[shard]]
        if lost:
            raise WeightsError(f"{path} says that {shown(lost[0])} is in {shown(names[lost[0]])}, and it is not there "
                               f"({len(lost)} such tensors)")
        opened.pop_all()
    metadata = content.get("metadata")
    stored = {name: shards[shard].stored[name] for name, shard in names.items()}
    return Weights(path.parent, metadata if isinstance(metadata, dict) else {}, stored, list(shards.values()))


def _index_bytes(path):
    if not path.is_file() or path.stat().st_size > MAX_HEADER:
        raise WeightsError(f"{path} must be a file of at most {MAX_HEADER} bytes")
    return path.read_bytes()


def _open_shard(index, shard):
    """Only files beside the index: a name that leads elsewhere could open any file of the machine."""
    if shard != os.path.basename(shard) or not shard.endswith(".safetensors") or any(c in shard for c in "\\:\0"):
        raise WeightsError(f"{index} names the file {shown(shard)}: a part must be a .safetensors file in the same folder")
    try:
        return _open_file(index.with_name(shard))
    except OSError as error:
        raise WeightsError(f"{index} names the file {shown(shard)}, which cannot be read: {error.strerror or 'it is not there'}") from None
