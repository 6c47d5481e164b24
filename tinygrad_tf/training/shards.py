"""Shards of a batch: each thread takes some rows through forward and backward, all on one and the same model.    (docs/threads.md)

A loss that is a mean is Σ share_i · loss_i over parts of its rows, and so are its gradients. Parts one after another are accumulation;
shards are computed at once, for NumPy lets other threads run while it computes. What backward adds to a leaf is kept apart for each
part, and added up when all have ended, in the order of the parts: the sums never depend on which thread was faster.
"""
import importlib.util
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial

from .. import random
from ..arguments import described, require_tensors, tensors_in, type_name, whole_number
from ..autograd import IGNORED, add_gathered, autocast_of_now, gathering, is_grad_enabled, is_watched, set_grad_enabled
from ..data import LMBatch
from ..data.collate import row_slices
from ..nn.moe import is_collecting
from ..tensor import Tensor

BLAS_VARIABLES = "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"       # the first that is set counts


class Shards:
    """`threads` parts of a batch at once, on the CPU, each with one BLAS thread. A `with` block, or `close()` at the end.

        with Shards(2) as shards:
            for batch in batches:
                optimizer.zero_grad()
                loss = shards.backward(lambda batch: model(**batch)[1], batch)
                optimizer.step()

    Until it is closed BLAS has one thread in the whole process. With one thread it does nothing at all.
    """

    def __init__(self, threads):
        self.threads = whole_number("Shards", "threads", threads, least=1)
        self.opened, self.process = ExitStack(), None       # a fork has no threads but its own: it begins anew

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """Ends the threads, and gives BLAS its own back. What is computed afterwards begins anew."""
        self.opened.close()
        self.process = None

    def backward(self, loss_of, *batch):
        """The gradients of loss_of(*batch), which are added to `.grad` as by `backward()`. Returns the loss, a number.

        batch: an `LMBatch`, whose loss is a mean over its targets, or tensors of B rows each, over which the loss is a mean.
        """
        def one(share, *part):
            loss = _checked_loss(loss_of(*part))
            (share * loss).backward()
            return share * loss.item()
        return sum(self.map(one, _parts(batch, self.threads)))

    def map(self, function, parts):
        """[function(*part) for part in parts], at once. Gradients of leaves come to `.grad` when all have ended, and hooks see the sum.

        An error is that of the first part that has one; then, and after Ctrl-C, no `.grad` has changed (but with one thread). Each part
        draws from a generator of its own, seeded from the default one. Where somebody looks on, they follow one another in this thread.
        """
        parts = [tuple(part) for part in parts]
        if self.threads == 1 or not parts:
            return [function(*part) for part in parts]
        _check_device(parts)
        seed = int(random.chosen().randint(0, 2**62, 1)[0])
        tasks = [_task(function, part, random.Generator().manual_seed(seed + i)) for i, part in enumerate(parts)]
        results, gathered = zip(*(task() for task in tasks) if is_watched() or is_collecting() else self._at_once(tasks))
        add_gathered(gathered)
        return list(results)

    def _at_once(self, tasks):
        futures, pool = [], self._pool()
        try:
            futures.extend(pool.submit(task) for task in tasks)
            wait(futures)
        finally:
            wait(futures)                                   # after Ctrl-C too: nobody still reads weights that are about to change
        return [futures.pop(0).result() for _ in tasks]     # an error must not keep its own future alive

    def _pool(self):
        with _one_blas_thread.lock:
            if self.process != os.getpid():
                opened, limit = ExitStack(), _blas_limit()
                opened.enter_context(_one_blas_thread(limit))
                self.pool = opened.enter_context(ThreadPoolExecutor(self.threads, "shard", initializer=limit))
                self.opened, self.process = opened, os.getpid()
            return self.pool


class _one_blas_thread:
    """BLAS has one thread in this process as long as any of these is open, and then again what it had."""
    lock, number, opened = threading.RLock(), 0, ExitStack()

    def __init__(self, limit):
        self.limit = limit

    def __enter__(self):
        cls = _one_blas_thread
        with cls.lock:
            if cls.number == 0:
                cls.opened.enter_context(self.limit())
            cls.number += 1

    def __exit__(self, *error):
        cls = _one_blas_thread
        with cls.lock:
            cls.number -= 1
            if cls.number == 0:
                cls.opened.close()


def _blas_limit():
    """A function that keeps BLAS to one thread, until the context that it returns is left. ImportError where nothing can."""
    if importlib.util.find_spec("threadpoolctl"):
        from threadpoolctl import threadpool_limits
        return partial(threadpool_limits, 1, "blas")
    if next((os.environ[name] for name in BLAS_VARIABLES if name in os.environ), None) == "1":
        return ExitStack
    raise ImportError(f"Shards: each thread must have one BLAS thread, else they crowd each other out: pip install threadpoolctl, or set "
                      f"{BLAS_VARIABLES[0]}=1 before Python starts")


def _task(function, part, generator):
    """A function for any thread: (function(*part) under the modes of this one, the gradients that it made)."""
    enabled, autocast, context = is_grad_enabled(), autocast_of_now(), copy_context()

    def run():
        with set_grad_enabled(enabled), random.drawing_from(generator), gathering() as gathered:
            return autocast(function, *part), gathered
    return partial(context.run, run)


def _parts(batch, n):
    """(share, *tensors) or (share, LMBatch) of n parts at most, of as many rows as possible each."""
    if len(batch) == 1 and isinstance(batch[0], LMBatch):
        return [(share, part) for part, share in batch[0].parts(n)]
    require_tensors("Shards.backward", **{f"batch[{i}]": x for i, x in enumerate(batch)})
    rows = {tuple(x.shape[:1]) for x in batch}
    if len(rows) != 1 or rows & {(), (0,)}:
        raise ValueError(f"Shards.backward: expected tensors of the same number of rows, at least one, got "
                         f"{', '.join(map(described, batch)) or 'none'}")
    if any(x.array.dtype.kind == "i" and (x.array == IGNORED).any() for x in batch):
        raise ValueError(f"Shards.backward: some targets are {IGNORED} and do not count, so the shares of the parts are not those of their "
                         f"rows; pass an LMBatch, which counts them, or use Shards.map")
    (B,), = rows
    return [((some.stop - some.start) / B, *(x[some] for x in batch)) for some in row_slices(B, n)]


def _checked_loss(loss):
    if not isinstance(loss, Tensor):
        raise TypeError(f"Shards.backward: the function must return the loss, a Tensor of one number, got {type_name(loss)}")
    return loss


def _check_device(parts):
    for part in parts:
        tensors = tensors_in([dict(x) if isinstance(x, LMBatch) else x for x in part])
        if gpu := next((t.device for t in tensors if t.device.type != "cpu"), None):
            raise RuntimeError(f"Shards: threads share the cores of a CPU, and this batch is on {gpu}, which computes many rows at once by "
                               f"itself: use one thread there")
