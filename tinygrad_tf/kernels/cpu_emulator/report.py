"""What went wrong in a kernel, in the lines of its source."""
import os
import re
import subprocess
import weakref
from dataclasses import dataclass, field, replace


class KernelError(RuntimeError):
    """A kernel did what a kernel must not do. `faults`: what, where, how often."""

    def __init__(self, message, faults=()):
        super().__init__(message)
        self.faults = list(faults)


@dataclass(frozen=True)
class Fault:
    """One kind of fault at one line (0: not known), as block and thread first met it.

    kind: "race between blocks", "race between warps", "race in a warp", "divergent barrier", "deadlock", "absent lane", "mask",
    "out of bounds", "misaligned", "read-only", "uninitialised", "copy", "arithmetic", "stack overflow", "time limit", "stopped", "memory"
    """
    kind: str
    line: int
    message: str
    block: tuple = (0, 0, 0)
    thread: int = -1
    times: int = 1
    source: str = field(default="", repr=False)
    other_line: int = field(default=0, repr=False)

    def same_cause(self):
        """Races of a line with another, in either order and on whatever element, have one cause."""
        return self.kind.partition(" ")[0], *sorted((self.line, self.other_line))

    def __str__(self):
        who = f"block {','.join(map(str, self.block))}" + (f", thread {self.thread}" if self.thread >= 0 else "")
        often = f"; {self.times} times in all" if self.times > 1 else ""
        shown = f"\n    {self.line:4d} | {self.source}" if self.line else ""
        return f"{self.message}  [{who}{often}]{shown}"


class Places:
    """From addresses in a compiled module to lines of its source: what `addr2line` of g++'s binutils says.

    A place below 0 is a line already, 0 is unknown.
    """
    def __init__(self, library, name, code):
        self.name, self.lines = name, code.splitlines()
        self._library = os.open(library, os.O_RDONLY)       # the cache may drop the file while the module is in use
        weakref.finalize(self, os.close, self._library)
        self._known = {}

    def look_up(self, places):
        """Asks for all addresses at once: each question to addr2line starts a process."""
        new = sorted({place for place in places if place > 0} - self._known.keys())
        if not new:
            return
        command = ["addr2line", "-a", "-i", "-e", "/proc/self/fd/0", *map(hex, new)]
        said = subprocess.run(command, capture_output=True, text=True, stdin=self._library).stdout
        for place, frames in zip(new, re.split(r"^0x[0-9a-f]+\n", said, flags=re.MULTILINE)[1:]):
            self._known[place] = self._lines_of(frames)

    def _lines_of(self, frames):
        """Innermost first: an access in a helper that was inlined has a line there, and one where the helper was called."""
        found = [re.match(r"(.*):(\d+)", frame) for frame in frames.splitlines()]
        return [int(frame[2]) for frame in found if frame and frame[1].endswith(self.name)]

    def chain(self, place):
        return [-place] if place < 0 else self._known.get(place, [])

    def line(self, place):
        return next(iter(self.chain(place)), 0)

    def source(self, line):
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""

    def text(self, place):
        chain = self.chain(place)
        called = f" (called at line {', '.join(map(str, chain[1:]))})" if len(chain) > 1 else ""
        return f"{self.name}:{chain[0]}{called}" if chain else self.name


def read_faults(text, places):
    """The runtime's report: a line a fault, kind, place, other place, block, thread, times, words, between tabs."""
    rows = [line.split("\t", 6) for line in text.splitlines()]
    places.look_up(int(place) for row in rows for place in row[1:3])
    return merged(_fault(places, *row) for row in rows)


def merged(faults):
    """One fault for each cause; of races that between blocks or warps is the one to tell, for its remedy helps lanes as well."""
    groups = {}
    for fault in faults:
        groups.setdefault(fault.same_cause(), []).append(fault)
    return [replace(min(group, key=lambda fault: fault.kind == "race in a warp"), times=sum(fault.times for fault in group))
            for group in groups.values()]


def _fault(places, kind, at, other, block, thread, times, words):
    at, other = int(at), int(other)
    words = words.replace("{here}", places.text(at)).replace("{there}", places.text(other))
    line = places.line(at)
    return Fault(kind, line, f"{places.text(at)}: {words}", tuple(map(int, block.split(","))), int(thread), int(times), places.source(line),
                 places.line(other))


def kernel_error(name, faults):
    number = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
    return KernelError(f"{name}: {number} found by the CPU emulator\n" + "\n".join(map(str, faults)), faults)
