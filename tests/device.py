"""The device that this run of the suite tests (`pytest --device cpu|strict|cuda`), and numbers to and from it.

strict: "cuda" with tests/strict_cupy.py in CuPy's place;  cuda: the real CuPy on a GPU.
"""
import numpy as np

import tinygrad_tf
from tinygrad_tf.backend import module_of, to_device


def host(x):
    """The numbers of a tensor (PyTorch's too) or an array as a NumPy array; containers of them likewise, and anything else as it is.

    On the CPU it is the memory itself, as `x.array` is.
    """
    if isinstance(x, (list, tuple)):
        return [host(v) for v in x]
    if isinstance(x, dict):
        return {name: host(v) for name, v in x.items()}
    x = x.array if isinstance(x, tinygrad_tf.Tensor) else x.detach().numpy() if hasattr(x, "detach") else x
    return to_device(x, tinygrad_tf.device("cpu")) if hasattr(x, "dtype") else x


def placed(array, beside=None):
    """An array on the device under test, or on that of a tensor: where a test makes its own arrays for operations."""
    return to_device(np.asarray(array), tinygrad_tf.get_default_device() if beside is None else beside.device)


def xp():
    """The array library of the device under test."""
    return module_of(tinygrad_tf.get_default_device())


def share_memory(a, b):
    """True where two tensors or arrays overlap."""
    return bool(xp().shares_memory(*(x.array if isinstance(x, tinygrad_tf.Tensor) else x for x in (a, b))))


def strict_counts():
    """How often the host waited, and what was copied, so far; None where nobody counts."""
    return getattr(xp(), "counts", None)
