"""Processes that take turns: each library lives in one of its own and is asked for one measurement at a time (A B A B …).

A machine whose speed drifts then favours no one, and nothing that one library does to its process reaches another. The parent
writes a line of JSON and reads one; the end of its input ends the process.
"""
import argparse
import contextlib
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLOWING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")         # set on some machines for old builds: NumPy's products suffer
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def at_least_one(text):
    """For argparse: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def make_folder(path):
    """Makes it, before the work: a folder that cannot be written to is told in a sentence, and costs nobody ten minutes."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        sys.exit(f"--out {path} cannot be written to: {error.strerror}")


def environment(threads, **more):
    """This process's environment, with so many threads in a matrix product, and without what would slow NumPy down."""
    kept = {name: value for name, value in os.environ.items() if name not in SLOWING}
    return {**kept, **dict.fromkeys(THREADS, str(threads)), **more}


class Worker:
    """A process at work on `command`. RuntimeError with its last words, from here and from `ask`, where it ends early."""

    def __init__(self, command, threads, **variables):
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                        text=True, encoding="utf-8", env=environment(threads, **variables))
        self.hello = self._answer()

    def ask(self, message=None):
        with contextlib.suppress(BrokenPipeError):          # it has ended: _answer says why
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.close()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines() or [f"it ended with status {self.process.returncode}"]
        raise RuntimeError(next((line for line in reversed(said) if re.match(r"[\w.]+(Error|Exception)\b", line)), said[-1]))

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def serve(prepare):
    """The worker's side: prepare() gives what is said first, and a function from message to answer. Prints go to stderr meanwhile."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        hello, answer = prepare()
        print(json.dumps(hello), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def timed(run, calls=1):
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


class Clock:
    """Seconds a call of each of `cases` ({name: function}): as many calls a turn as take `turn` seconds, one at least.

    Before each turn a call that does not count: the others have had the caches and the cores, which no step within a run finds so cold.
    """

    def __init__(self, cases, turn):
        self.cases, self.turn, self.calls = cases, turn, {}

    def __call__(self, case):
        run = self.cases[case]
        if case not in self.calls:
            run()                                           # what is loaded, compiled and paged in at first use
            self.calls[case] = max(1, round(self.turn / timed(run)))
        run()
        return timed(run, self.calls[case])


def memory():
    """{"resident": bytes now, "peak": the most there ever were}, as the operating system counts them; None where it does not.

    Linux also has ru_maxrss, but there a process that starts another hands down its own.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file)
        return {name: 1024 * int(lines[key].split()[0]) for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))}
    except (OSError, KeyError):
        return dict.fromkeys(("resident", "peak"), _most_resident())


def settled():
    """memory(), after freed memory has gone back to the system and the count of the peak has started anew, where this can be done."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)                    # glibc
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")     # Linux
    return memory()


def _most_resident():
    try:
        import resource
    except ImportError:                                     # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def processor():
    """The processor's own name, where /proc has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
