"""Is there a GPU? `device = "cuda" if torch.cuda.is_available() else "cpu"` asks here."""
import importlib.util

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


def synchronize():
    """Waits until the GPU has done what it was given; nothing to wait for without one."""
    if is_available():
        require_cupy().cuda.Device().synchronize()
