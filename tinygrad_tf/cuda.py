"""The GPU under PyTorch's names: is there one, how many, what is it called, how much memory is in use; and waiting for it.

`device = "cuda" if torch.cuda.is_available() else "cpu"` asks here. Nothing is imported until a function that needs CuPy is
called, and without a GPU questions are answered (none, 0 bytes) and waiting is over at once; naming one raises RuntimeError.

`device`, wherever it is an argument: None (the current GPU), a number, "cuda:1" or a `tinygrad_tf.device`. With and without a GPU
ValueError for what is none of these, RuntimeError for a name that is unknown.
"""
import importlib.util

from . import random
from .backend import device as make_device
from .backend import require_cupy, require_gpu


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
    """From now on "cuda" means this GPU in this thread: a number, or "cuda:1". ValueError where no number is named."""
    if device is None or _named(device).index is None:
        raise ValueError(f"cuda.set_device: expected a GPU with its number, such as 1 or 'cuda:1', got {device!r}")
    _gpu(device).use()


def get_device_name(device=None):
    """The name that the driver has for a GPU."""
    number = _gpu(device).id
    return require_cupy().cuda.runtime.getDeviceProperties(number)["name"].decode()


def get_device_capability(device=None):
    """(major, minor), the generation of the instruction set: (8, 0) is an A100, (9, 0) an H100."""
    capability = _gpu(device).compute_capability
    return int(capability[:-1]), int(capability[-1])


def synchronize(device=None):
    """Waits until the GPU has done what it was given: time nothing without it, for launching a kernel does not wait for it."""
    device = _named(device)
    if is_available():
        _gpu(device).synchronize()


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


def _named(device):
    """The device that an argument means; nothing is asked of a GPU."""
    if device is None:
        return make_device("cuda")
    if isinstance(device, int) and not isinstance(device, bool):
        return make_device("cuda", device)
    if not isinstance(device, (str, make_device)):
        raise ValueError(f"cuda: expected None, a number, a name such as 'cuda:0' or a device, got {device!r}")
    found = make_device(device)
    if found.type != "cuda":
        raise ValueError(f"cuda: expected a GPU such as 'cuda:0', got {str(found)!r}")
    return found


def _gpu(device):
    """CuPy's object for the GPU that an argument means. RuntimeError where it is not there."""
    device = _named(device)
    return require_gpu(device).cuda.Device(device.index)        # None: the current one


def _pool(device, use):
    """What `use` finds in CuPy's memory pool on a GPU; 0 without one."""
    device = _named(device)
    if not is_available():
        return 0
    with _gpu(device):
        return use(require_cupy().get_default_memory_pool())
