"""The folder of what has been compiled, for all processes: bounded in size and age, and never half of anything in it."""
import contextlib
import functools
import hashlib
import os
import tempfile
import time
from pathlib import Path

BYTES_KEPT = 256 << 20
DAYS_KEPT = 30
SECONDS_IN_USE = 600                            # what was asked for in this time stays: a process may be about to load it


def key_of(*parts):
    """A name for what is made of these."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


@functools.cache
def _private_folder():
    return tempfile.TemporaryDirectory(prefix="tinygrad_tf-")


def cache_folder():
    """$XDG_CACHE_HOME or ~/.cache; where that cannot be written, a folder of this process in the temporary one."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "tinygrad_tf" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return Path(_private_folder().name)
    return folder


def kept(key, make):
    """The folder `key` of the cache, filled by make(folder) where it is not there.

    It is filled under another name and then renamed, which is one step: another process never sees half of it.
    """
    cache = cache_folder()
    folder = cache / key
    if _found(folder):
        return folder
    with tempfile.TemporaryDirectory(prefix="new-", dir=cache) as new:
        make(Path(new))
        try:
            os.rename(new, folder)
        except OSError:                         # another process was faster; what it made is the same
            if not _found(folder):
                raise
            return folder
        os.mkdir(new)                           # for TemporaryDirectory to remove
    _forget_old(cache)
    return folder


def _found(folder):
    """True where it is there: from now on it counts as in use."""
    with _alone(folder.parent):
        try:
            os.utime(folder)
        except FileNotFoundError:
            return False
    return True


@contextlib.contextmanager
def _alone(cache):
    """One process at a time, so that none finds a folder that another is about to remove."""
    import fcntl  # Windows has none, and no emulator

    with open(cache / "lock", "ab") as file:
        with contextlib.suppress(OSError):      # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget_old(cache):
    """Removes what was unused for DAYS_KEPT, and of the rest that was unused for longest until BYTES_KEPT hold it.

    A folder is first moved away, which is one step: another process finds it whole or not at all.
    """
    with tempfile.TemporaryDirectory(prefix="old-", dir=cache, ignore_cleanup_errors=True) as old, _alone(cache):
        total, now = 0, time.time()
        for used, size, folder in sorted(_folders(cache), reverse=True):
            total += size
            if now - used > DAYS_KEPT * 86400 or (total > BYTES_KEPT and now - used > SECONDS_IN_USE):
                with contextlib.suppress(OSError):
                    os.rename(folder, Path(old, folder.name))


def _folders(cache):
    """(when last used, bytes, path) of each; those that another process is just making or removing may vanish meanwhile."""
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):
            if folder.is_dir():
                yield folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder
