"""A run's folder belongs to one process at a time, and is left clean whatever became of the process before."""
import errno
import os
import re
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import BEST, CHECKPOINT

try:
    import fcntl
except ImportError:             # Windows: there is no lock on a folder
    fcntl = None

_OUTPUTS = (CHECKPOINT, BEST, "config.toml", "metrics.csv", "metrics.jsonl", "speed.csv", "loss.png", "monitor.png", "sample.txt")
_NAMES = "|".join([*map(re.escape, _OUTPUTS), r"checkpoint-\d{6,}\.safetensors"])
_HALF_WRITTEN = re.compile(rf"\.({_NAMES})\.(\d+)\.[0-9a-f]{{8}}\.tmp")         # as write_atomically names them
_HELD = (errno.EAGAIN, errno.EACCES)


@contextmanager
def locked(folder):
    """Within it no other process trains in the folder; BlockingIOError where one does already.

    The lock is on the folder itself: it leaves no file, and the system drops it with the process, however that ends. Where
    there are no such locks (Windows, some network disks) none is taken.
    """
    if fcntl is None or not Path(folder).is_dir():
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor, folder):
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise BlockingIOError(error.errno, "another process trains in this folder", str(folder)) from None


def remove_leftovers(folder):
    """Deletes what a process that was killed while it wrote has left half done: files with our names, and nobody else's."""
    for path in Path(folder).iterdir():
        name = _HALF_WRITTEN.fullmatch(path.name)
        if name and path.is_file() and not _is_alive(int(name[2])):
            path.unlink(missing_ok=True)


def _is_alive(pid):
    if os.name != "posix":
        return True             # to ask would stop it: there, signal 0 is Ctrl-C
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:     # somebody else's
        pass
    return True
