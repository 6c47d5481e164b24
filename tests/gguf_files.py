"""A writer of GGUF files for tests, of true ones and of such as nobody should write: each part is bytes, made alone."""
import struct

import numpy as np

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "I8": 24, "I16": 25,
           "I32": 26, "I64": 27, "F64": 28, "BF16": 30}
U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(content):
    """A Python value as type and bytes."""
    if isinstance(content, list):
        kinds = [value(item) for item in content] or [(U32, b"")]
        return ARRAY, struct.pack("<IQ", kinds[0][0], len(content)) + b"".join(data for _, data in kinds)
    kind, form = {bool: (BOOL, "<?"), int: (U32, "<I"), float: (F32, "<f"), str: (STRING, None)}[type(content)]
    return kind, struct.pack(form, content) if form else string(content)


def entry(key, kind, data):
    return string(key) + struct.pack("<I", kind) + data


def tensor(name, axes, kind, offset, num_axes=None):
    """axes: the innermost first"""
    return string(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes) if num_axes is None else num_axes, *axes, kind, offset)


def start(num_tensors, num_entries, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, num_tensors, num_entries)


def aligned(data, alignment=32):
    return data + bytes(-len(data) % alignment)


def gguf(metadata=None, tensors=None, version=3):
    """metadata: {key: bool, int, float, str, or a list of these}; tensors: {name: (kind, array)} -> the bytes of a file."""
    metadata, tensors = metadata or {}, tensors or {}
    alignment = metadata.get("general.alignment", 32)
    header, data = start(len(tensors), len(metadata), version), b""
    header += b"".join(entry(key, *value(content)) for key, content in metadata.items())
    for name, (kind, x) in tensors.items():
        header += tensor(name, x.shape[::-1], NUMBERS[kind], len(data))
        data = aligned(data + stored(kind, x), alignment)
    return aligned(header, alignment) + data


def stored(kind, x):
    """The numbers of an array as the bytes of a tensor; rows of Q8_0 and Q4_1 are rounded to the nearest step."""
    if kind == "BF16":
        return (x.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    if kind[0] in "FI":
        return x.astype(f"<{kind[0].lower()}{int(kind[1:]) // 8}").tobytes()
    rows = x.astype(np.float32).reshape(-1, 32)
    if kind == "Q8_0":
        d = (abs(rows).max(1, keepdims=True) / 127).astype("<f2")
        q = np.rint(rows / np.where(d == 0, 1, d).astype(np.float32)).clip(-127, 127).astype("i1")
        return np.concatenate([d.view("u1"), q.view("u1")], axis=1).tobytes()
    m = rows.min(1, keepdims=True).astype("<f2")
    d = ((rows.max(1, keepdims=True) - m) / 15).astype("<f2")
    q = np.rint((rows - m) / np.where(d == 0, 1, d).astype(np.float32)).clip(0, 15).astype("u1")
    return np.concatenate([d.view("u1"), m.view("u1"), q[:, :16] | q[:, 16:] << 4], axis=1).tobytes()
