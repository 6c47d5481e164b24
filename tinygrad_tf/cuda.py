"""The GPU under PyTorch's names: is there one, how many, what is it called, how much memory is in use; and waiting for it.

`device = "cuda" if torch.cuda.is_available() else "cpu"` asks here. Nothing is imported until a function that needs CuPy is
called, and without a GPU questions are answered (none, 0 bytes) and waiting is over at once; naming one raises RuntimeError.
"""
import importlib.util

from . import random
from .backend import device as make_device
from .backend import require_cupy


def is_available():
    """True where CuPy is installed and finds an NVIDIA GPU. Where CuPy is missing nothing is imported."""
    if importlib.util.find_spec("cupy") is None:
        return False
    try:
        require_cupy()
    except RuntimeError:
        return False
    return True


def device_count():
    """How many GPUs there are."""
    return require_cupy().cuda.runtime.getDeviceCount() if is_available() else 0


def current_device():
    """The number of the GPU that "cuda" means in this thread."""
    return require_cupy().cuda.Device().id


def set_device(device):
    """From now on "cuda" means this GPU in this thread: a number, or "cuda:1"."""
    require_cupy().cuda.Device(_number(device)).use()


def get_device_name(device=None):
    """The name that the driver has for a GPU."""
    return require_cupy().cuda.runtime.getDeviceProperties(_number(device))["name"].decode()


def get_device_capability(device=None):
    """(major, minor), the generation of the instruction set: (8, 0) is an A100, (9, 0) an H100."""
    capability = require_cupy().cuda.Device(_number(device)).compute_capability
    return int(capability[:-1]), int(capability[-1])


def synchronize(device=None):
    """Waits until the GPU has done what it was given: time nothing without it, for launching a kernel does not wait for it."""
    if is_available():
        require_cupy().cuda.Device(_number(device)).synchronize()


def memory_allocated(device=None):
    """Bytes of the arrays that are alive on a GPU."""
    return _pool(device, lambda pool: pool.used_bytes())


def memory_reserved(device=None):
    """The same and the freed memory that CuPy keeps for the next arrays."""
    return _pool(device, lambda pool: pool.total_bytes())


def empty_cache():
    """Gives memory that no array uses back to the driver, for other programs."""
    _pool(None, lambda pool: pool.free_all_blocks())


def manual_seed(seed):
    """The same as `tinygrad_tf.manual_seed`: one generator, on the host, decides the numbers of every device."""
    random.manual_seed(seed)


manual_seed_all = manual_seed


def _number(device):
    """The number of a GPU given as None (the current one), a number, "cuda:1" or a device."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    found = make_device(device)
    if found.type != "cuda":
        raise ValueError(f"cuda: expected a GPU such as 'cuda:0', got {str(found)!r}")
    return current_device() if found.index is None else found.index


def _pool(device, use):
    """What `use` finds in CuPy's memory pool on a GPU; 0 without one."""
    if not is_available():
        return 0
    cupy = require_cupy()
    with cupy.cuda.Device(_number(device)):
        return use(cupy.get_default_memory_pool())
