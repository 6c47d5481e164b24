"""A file of weights, mapped: what is looked at is read from the disk, and nothing else."""
import math
import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .config import PretrainedError


class WeightsError(PretrainedError):
    """A file that holds no weights, or weights that are not read here; its message is one sentence."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: what is known of it before it is read."""

    shape: tuple
    dtype_name: str                             # as the format calls it
    read: Callable                              # () -> NumPy array, memory of its own


class MappedFile:
    """The bytes of a file by their places.    file.bytes(start, count), file.array(dtype, count, start), file.size"""

    def __init__(self, path):
        """Raises FileNotFoundError, WeightsError, OSError."""
        self.path = Path(path)
        if not self.path.is_file():             # a pipe would be waited for
            if not self.path.exists():
                raise FileNotFoundError(f"there is no file {path}")
            raise WeightsError(f"{path} is no file of weights, but a folder or a device")
        with self.path.open("rb") as file:
            self.size = file.seek(0, 2)
            if self.size == 0:                  # which cannot be mapped
                raise WeightsError(f"{path} is empty")
            self.data = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)

    def bytes(self, start, count):
        return self.data[start:start + count]

    def array(self, dtype, count, start):
        """count elements from a byte on, a view of the file: copy it before the file is closed."""
        if self.data.closed:
            raise WeightsError(f"{self.path} has been closed: read its tensors before that")
        return np.frombuffer(self.data, dtype, count, start)

    def close(self):
        with suppress(BufferError):             # a thread that reads at this moment; its view keeps the map until it is done
            self.data.close()


def countable(shape):
    """Whether these are lengths of axes that some memory could hold, beside an axis of length 0 too."""
    return all(type(n) is int and n >= 0 for n in shape) and math.prod(max(n, 1) for n in shape) < 1 << 60


def require_disjoint(path, places, start, end, gaps):
    """Raises WeightsError unless the tensors, {name: (first byte, byte behind)}, lie between start and end, none on another.

    gaps: whether there may be bytes that belong to none.
    """
    behind, before = start, None
    for name, (first, last) in sorted(places.items(), key=lambda item: item[1]):
        if not start <= first <= last <= end:
            raise WeightsError(f"{path} is torn or damaged: the tensor {shown(name)} would end at byte {last}, and the file has {end}")
        if first < behind:
            raise WeightsError(f"{path} is damaged: the tensors {shown(before)} and {shown(name)} overlap")
        if first > behind and not gaps:
            raise WeightsError(f"{path} is damaged: the bytes before the tensor {shown(name)} belong to none")
        behind, before = last, name
    if behind < end and not gaps:
        raise WeightsError(f"{path} is damaged: the bytes behind its last tensor belong to none")


def shown(name):
    """A name of a file in an error: not longer than a line, whatever stands in it."""
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
