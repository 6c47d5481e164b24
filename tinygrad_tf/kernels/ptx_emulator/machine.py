"""The machine: registers of all threads, who moves next, and the launch.

A register is an array with one element per thread. Of the threads that can move, those with the lowest program counter
move, together: so those that took different branches meet again behind them. At a barrier or an instruction of a whole warp
(.sync) a thread waits until all that it concerns are there. Blocks run in waves, each wave whole.
"""
import re

import numpy as np

from ..compile import EMULATED_SHARED_BYTES
from .instructions import bits, members, numpy_type
from .memory import SHARED_WINDOW, UNSIGNED, Copies, Fault, GlobalMemory, SharedMemory, first
from .program import ENDS_A_RUN, UnknownInstruction

WAVE = 1 << 13                                  # threads at a time
ADDRESS = re.compile(r"\[\s*([^\]+\s]+)\s*(?:\+\s*(-?\w+))?\s*\]")


class PtxError(RuntimeError):
    """A launch that a GPU would refuse, or an access that it might not survive: kernel, instruction, thread."""


class RawKernel:
    """Called as CuPy's: kernel(grid, block, args, shared_mem=bytes)."""
    shared_limit = EMULATED_SHARED_BYTES

    def __init__(self, entry):
        self.entry, self.name, self.max_dynamic_shared_size_bytes = entry, entry.name, 48 << 10

    def __call__(self, grid, block, args, *, shared_mem=0):
        grid, block = ((*(int(n) for n in size), 1, 1)[:3] for size in (grid, block))
        self._check(grid, block, shared_mem)
        memory = GlobalMemory()
        parameters = self._parameters(args, memory)
        threads, blocks = _size(block), _size(grid)
        step = max(WAVE // threads, 1)
        for begin in range(0, blocks, step):
            Threads(self.entry, grid, block, range(begin, min(begin + step, blocks)), parameters, memory, shared_mem).run()

    def _check(self, grid, block, shared_mem):
        if not 0 < _size(block) <= self.entry.max_threads or not all(0 < n <= m for n, m in zip(grid, (2**31 - 1, 65535, 65535))):
            raise PtxError(f"{self.name}: a grid of {grid} blocks of {block} threads cannot be launched; a block may have "
                           f"{self.entry.max_threads} threads, a grid (2³¹ − 1, 65535, 65535) blocks, and neither 0")
        total = self.entry.static_bytes + shared_mem
        if shared_mem > self.max_dynamic_shared_size_bytes or total > self.shared_limit:
            raise PtxError(f"{self.name}: {shared_mem} bytes of dynamic and {self.entry.static_bytes} of static shared memory; allowed are "
                           f"{self.max_dynamic_shared_size_bytes} dynamic (kernel.max_dynamic_shared_size_bytes), "
                           f"and {self.shared_limit} in all")

    def _parameters(self, args, memory):
        """The bytes that the kernel gets."""
        if len(args) != len(self.entry.parameters):
            raise PtxError(f"{self.name}: got {len(args)} arguments, takes {len(self.entry.parameters)}")
        data = bytearray(self.entry.parameter_bytes)
        for n, (value, (offset, size, kind)) in enumerate(zip(args, self.entry.parameters.values())):
            data[offset:offset + size] = self._argument(n, value, size, kind, memory)
        return bytes(data)

    def _argument(self, n, value, size, kind, memory):
        pointer = isinstance(value, np.ndarray) and value.dtype.names is None
        if value is None or pointer:
            value = np.uint64(0 if value is None else memory.add(value, f"argument {n} ({value.dtype} {value.shape})"))
        elif not isinstance(value, (np.generic, np.ndarray)):
            raise PtxError(f"{self.name}: argument {n} must be an array, None or a NumPy scalar, got {type(value).__name__} {value!r}; "
                           f"CuPy would send a Python number as 8 bytes, so write np.int32(…) or np.float32(…)")
        if value.nbytes != size or (kind[0] == "f") != (value.dtype.kind == "f"):
            raise PtxError(f"{self.name}: argument {n} is {'a pointer' if pointer else value.dtype} of {value.nbytes} bytes, "
                           f"the kernel takes {kind} of {size} bytes")
        return value.tobytes()


def _size(three):
    return three[0] * three[1] * three[2]


class Threads:
    """Some blocks of a launch. What instructions see of it are the threads that execute them: `n` of them, `active`."""

    def __init__(self, entry, grid, block, blocks, parameters, memory, dynamic_bytes):
        self.entry, self.parameters, self.memory = entry, parameters, memory
        warps = -(-_size(block) // 32)
        self.per_block, self.total = warps * 32, len(blocks) * warps * 32
        self.every = np.arange(self.total)
        self.warp_of, self.block_of, in_block = self.every // 32, self.every // self.per_block, self.every % self.per_block
        self.special = _special_registers(grid, block, blocks[0] + self.block_of, in_block)
        self.shared = SharedMemory(len(blocks), entry.static_bytes + dynamic_bytes, self.warp_of)
        self.copies = Copies(self.shared, self.total)
        self.registers, self.constants = {}, {}
        self.pc = np.where(in_block < _size(block), 0, len(entry.code))             # the last warp may have lanes without a thread
        self.waiting = np.zeros(self.total, bool)
        self.active, self.n, self.current = slice(None), self.total, None

    # --- who moves next ---

    def run(self):
        code, end = self.entry.code, len(self.entry.code)
        with np.errstate(all="ignore"):
            while (alive := self.pc < end).any():
                ready = alive & ~self.waiting
                if not ready.any():
                    self._nobody_moves(alive)
                at = int(self.pc[ready].min())
                here = alive & (self.pc == at)
                if code[at].synchronizes:
                    here = self._meet(code[at], here, alive)
                if here.any():
                    self._run_from(at, here)

    def _run_from(self, at, here):
        """Runs to the end of a run of instructions: all of `here` execute all of it."""
        self._activate(np.flatnonzero(here))
        end = self.entry.run_end[at]
        self.pc[self.active] = end
        for i in self.entry.code[at:end]:
            self.current = i
            if i.parts[0] in ENDS_A_RUN:
                self._jump(i)
            elif i.guard is None:
                self._execute(i)
            else:
                everyone = self.every[self.active]
                self._activate(everyone[self.condition(i)])
                if self.n:
                    self._execute(i)
                self._activate(everyone)

    def _execute(self, i):
        try:
            i.run(self)
        except Fault as fault:
            raise PtxError(self._tell(fault)) from None

    def _activate(self, threads):
        self.n = len(threads)
        self.active = threads if self.n < self.total else slice(None)

    def _jump(self, i):
        target = self.entry.labels[i.operands[0]] if i.parts[0] == "bra" else len(self.entry.code)
        threads = self.every[self.active]
        self.pc[threads if i.guard is None else threads[self.condition(i)]] = target

    def condition(self, i):
        """Where the guard is true."""
        return np.broadcast_to(self.read(i.guard, "pred") ^ i.negated, self.n)

    def _meet(self, i, here, alive):
        """Of those that have arrived at a .sync instruction, the ones whose partners are all there; the others wait."""
        self.current = i
        self._activate(np.flatnonzero(here))
        if i.guard is not None:
            passing = self.every[self.active][~self.condition(i)]
            self.pc[passing] += 1
            here[passing] = False
            self._activate(np.flatnonzero(here))
        if i.parts[0] in ("bar", "barrier") and "warp" not in i.modifiers:
            missing = (alive & ~here).reshape(-1, self.per_block).any(1)[self.block_of]
        else:
            arrived, missing = self.warp_bits(np.ones(self.n, bool)), np.ones(self.total, bool)
            missing[self.active] = members(self, i) & ~arrived != 0
        self.waiting |= here
        self.waiting &= ~here | missing
        return here & ~missing

    def _nobody_moves(self, alive):
        places = [f"{(self.waiting & (self.pc == at)).sum()} threads wait, first {self._who(first(self.waiting & (self.pc == at)))}, "
                  f"at {self.entry.code[at]}" for at in np.unique(self.pc[alive])]
        raise PtxError(f"{self.entry.name}: nobody can move, as not all threads reach the same barrier:\n  " + "\n  ".join(places))

    # --- registers ---

    def read(self, operand, kind):
        """An operand as an array of type `kind`: [n], or 0-d for a number."""
        if operand in self.special:
            value = self.special[operand]
        elif operand[0] == "!":
            return ~self.read(operand[1:], kind)
        elif operand[0].isdigit() or operand[0] == "-" or operand in self.entry.shared:
            return self._constant(operand, kind)
        else:
            value = self._register(operand)
        value, wanted = value[self.active], bits(kind)
        if kind != "pred" and value.dtype.itemsize * 8 != wanted:
            value = value.astype(UNSIGNED[wanted])
        return value.view(numpy_type(kind))

    def write(self, name, value):
        """Into a wider register with the sign of an .s type, with zeros otherwise."""
        if name == "_":
            return
        register, value = self._register(name), np.asarray(value)
        if register.dtype != bool and value.dtype.itemsize != register.dtype.itemsize:
            value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{register.dtype.itemsize}")
        register[self.active] = value if register.dtype == bool else value.view(register.dtype)

    def move(self, i):
        """mov, also of a pair of halves to or from a register of twice the width: the first one is the lower."""
        to, source = i.operands
        kind = i.types[-1]
        if isinstance(source, list):
            half = f"u{bits(kind) // len(source)}"
            value = np.uint64(0)
            for n, name in enumerate(source):
                value = value | self.read(name, half).astype(np.uint64) << np.uint64(n * bits(half))
            self.write(to, value.astype(UNSIGNED[bits(kind)]))
        elif isinstance(to, list):
            value, half = self.read(source, f"u{bits(kind)}"), bits(kind) // len(to)
            for n, name in enumerate(to):
                self.write(name, (value >> value.dtype.type(n * half)).astype(UNSIGNED[half]))
        else:
            self.write(to, self.read(source, kind))

    def _register(self, name):
        """All of it; before the first write all ones, a NaN."""
        if name not in self.registers:
            kind = self.entry.type_of(name)
            ones = True if kind == "pred" else UNSIGNED[bits(kind)](2 ** bits(kind) - 1)
            self.registers[name] = np.full(self.total, ones)
        return self.registers[name]

    def _constant(self, text, kind):
        key = text, kind
        if key not in self.constants:
            self.constants[key] = _number(text, kind, self.entry.shared)
        return self.constants[key]

    # --- warps ---

    @property
    def lane(self):
        return self.every[self.active] % 32

    def warp_bits(self, said):
        """For each active thread, one bit for every lane of its warp: set where an active thread said True."""
        everyone = np.zeros(self.total, bool)
        everyone[self.active] = said
        words = (everyone.reshape(-1, 32).astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
        return words[self.warp_of[self.active]]

    def from_lanes(self, operand, lane, members):
        """The operand of another lane of the warp, which must be one of the members."""
        absent = members >> lane.astype(np.uint32) & np.uint32(1) == 0
        if absent.any():
            raise Fault(f"reads lane {lane[first(absent)]}, which is not in the mask {members[first(absent)]:#x}", first(absent))
        everyone = np.zeros(self.total, np.uint32)
        everyone[self.active] = self.read(operand, "u32")
        return everyone[self.every[self.active] // 32 * 32 + lane]

    def block_barrier(self):
        self.shared.barrier(np.unique(self.block_of[self.active]), self.shared.block_barrier)

    def warp_barrier(self):
        self.shared.barrier(np.unique(self.warp_of[self.active]), self.shared.warp_barrier)

    # --- memory ---

    def place(self, operand, i):
        """(space, [n] addresses) of [%rd1+16]. Without a space the address tells: shared memory has a window of its own."""
        space, address = next((m for m in i.modifiers if m in ("global", "shared")), None), self.address(operand)
        if space is None:
            inside = (address >= SHARED_WINDOW) & (address < SHARED_WINDOW + (1 << 24))
            if inside.any() and not inside.all():
                raise UnknownInstruction(f"one generic access, both to shared and to global memory: {i}")
            space, address = ("shared", address - SHARED_WINDOW) if inside.any() else ("global", address)
        return space, address

    def address(self, operand):
        """32-bit addresses, of shared memory, wrap around; variables there are such addresses too."""
        base, offset = ADDRESS.fullmatch(operand).groups()
        wide = base not in self.entry.shared and bits(self.entry.type_of(base)) == 64
        address = self.read(base, "u64" if wide else "u32").astype(np.int64) + int(offset or "0", 0)
        return np.broadcast_to(address if wide else address & 0xFFFFFFFF, self.n)

    def load(self, space, address, width, count, some=None):
        """`some`: the active threads that really load."""
        if space == "global":
            return self.memory.load(address, width, count)
        thread = self.every[self.active] if some is None else self.every[self.active][some]
        return self.shared.load(self.block_of[thread], thread, address, width, count)

    def store(self, space, address, values):
        if space == "global":
            return self.memory.store(address, values)
        thread = self.every[self.active]
        return self.shared.store(self.block_of[thread], thread, address, values)

    def parameter(self, operand, n, kind):
        name, offset = ADDRESS.fullmatch(operand).groups()
        return np.frombuffer(self.parameters, kind, 1, self.entry.parameters[name][0] + int(offset or "0", 0) + n * kind.itemsize)[0]

    def copy_async(self, to, source, size, valid):
        """Reads now; what it read stands in shared memory after a wait."""
        thread, address = self.every[self.active], self.address(source)
        data, some = np.zeros((self.n, size), np.uint8), valid > 0
        if (address % size).any() or (valid > size).any():
            raise Fault(f"cp.async of {size} bytes from an address that is no multiple of it, or of more valid bytes than that")
        for count in np.unique(valid[some]):
            rows = valid == count
            data[rows, :count] = self.memory.load(address[rows], 8, count, aligned=1)
        self.copies.issue(self.block_of[thread], thread, self.address(to), data)

    def commit_copies(self):
        self.copies.commit(self.every[self.active])

    def wait_for_copies(self, newest):
        self.copies.wait(self.every[self.active], newest)

    # --- messages ---

    def _tell(self, fault):
        return f"{self.entry.name}: {fault} [{self._who(self.every[self.active][fault.at])}]\n  {self.current}"

    def _who(self, thread):
        at = {name: tuple(int(self.special[f"%{register}.{axis}"][thread]) for axis in "xyz")
              for name, register in (("thread", "tid"), ("block", "ctaid"))}
        return f"thread {at['thread']} of block {at['block']}"


def _special_registers(grid, block, block_number, in_block):
    """%tid.x and so on, an array each: the x axis runs fastest."""
    values = {"%laneid": in_block % 32, "%warpid": in_block // 32}
    for name, index, size in (("tid", in_block, block), ("ctaid", block_number, grid)):
        axes = index % size[0], index // size[0] % size[1], index // (size[0] * size[1])
        for axis, value, length in zip("xyz", axes, size):
            values[f"%{name}.{axis}"] = value
            values[f"%n{name}.{axis}"] = np.full(len(in_block), length)
    return {name: value.astype(np.uint32) for name, value in values.items()}


def _number(text, kind, shared):
    """A number in PTX: 17, -1, 0x1F, 0f3F800000 (the bits of a float32), 0d… (of a float64); or a shared variable's address."""
    if text in shared:
        return np.array(shared[text], numpy_type(kind))
    if text[:2].lower() in ("0f", "0d"):
        width = 32 if text[1] in "fF" else 64
        return np.array(int(text[2:], 16), UNSIGNED[width]).view(f"f{width // 8}")
    if kind == "pred" or "." in text:
        return np.array(float(text), numpy_type(kind))
    return np.array(int(text.rstrip("U"), 0) & 2 ** bits(kind) - 1, UNSIGNED[bits(kind)]).view(numpy_type(kind))
