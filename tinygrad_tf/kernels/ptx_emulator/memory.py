"""The two memories of a kernel, with every access checked.

Global memory is the arrays that were passed; each has an address beyond 32 bits, far from the next, so that an offset that
overflowed leads nowhere. Shared memory remembers of every two bytes who wrote them, and when.
"""
import ctypes
from typing import NamedTuple

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FIRST_ADDRESS, DISTANCE = 7 << 40, 1 << 36
SHARED_WINDOW = 6 << 40                         # where shared memory stands among the generic addresses
IN_FLIGHT = np.iinfo(np.int32).max              # written at a time to come: cp.async has been issued and not waited for


class Fault(Exception):
    """What is wrong, and which of the accessing threads is the first to do it."""

    def __init__(self, message, at=0):
        super().__init__(message)
        self.at = int(at)


def first(wrong):
    return int(np.argmax(np.atleast_1d(wrong)))


class Region(NamedTuple):
    """The bytes from the first to the last element of one argument, at addresses low to high."""
    low: int
    high: int
    data: np.ndarray                            # uint8, the array's own memory
    writable: bool
    name: str

    def elements(self, dtype):
        """(the memory as whole elements at multiples of their size, the address of the first)"""
        skip, size = -self.low % dtype.itemsize, dtype.itemsize
        count = max(self.high - self.low - skip, 0) // size
        return self.data[skip:skip + count * size].view(dtype), self.low + skip


class GlobalMemory:
    def __init__(self):
        self.regions = []

    def add(self, array, name):
        """The address of the first element; the owner of the memory stands at a multiple of 256, as CuPy's arrays do."""
        low, high = np.lib.array_utils.byte_bounds(array)
        if array.size == 0:
            low = high = array.ctypes.data
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        base = FIRST_ADDRESS + len(self.regions) * DISTANCE + (low - np.lib.array_utils.byte_bounds(owner)[0]) % 256
        data = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
        self.regions.append(Region(base, base + high - low, data, array.flags.writeable, name))
        return base + array.ctypes.data - low

    def load(self, address, bits, count, aligned=None):
        """[n, count] values of `bits` bits from each address, which must be a multiple of the size of all of them."""
        values = np.empty((len(address), count), UNSIGNED[bits])
        for region, some in self._regions(address, bits // 8 * count, "load", aligned):
            memory, start = region.elements(values.dtype)
            values[some] = memory[(address[some] - start)[:, None] // (bits // 8) + np.arange(count)]
        return values

    def store(self, address, values):
        for region, some in self._regions(address, values.dtype.itemsize * values.shape[1], "store"):
            if not region.writable:
                raise Fault(f"global store into {region.name}, which is read-only")
            memory, start = region.elements(values.dtype)
            memory[(address[some] - start)[:, None] // values.dtype.itemsize + np.arange(values.shape[1])] = values[some]

    def _regions(self, address, size, what, aligned=None):
        """(region, which of the addresses lie in it), once every access has been found to be aligned and inside of one."""
        if (address % (aligned or size)).any():
            raise Fault(f"misaligned global {what} of {size} bytes", first(address % size))
        lows = np.array([region.low - DISTANCE // 2 for region in self.regions] or [FIRST_ADDRESS])
        index = np.searchsorted(lows, address, "right") - 1
        for k in np.unique(index):
            some = index == k
            region = self.regions[k] if 0 <= k < len(self.regions) else None
            outside = some if region is None else some & ((address < region.low) | (address + size > region.high))
            if outside.any():
                at = first(outside)
                raise Fault(f"global {what} out of bounds: {size} bytes at {_place(int(address[at]), region)}", at)
            yield region, some


def _place(address, region):
    if region is None or not abs(address - region.low) < DISTANCE // 2:
        return f"address {address:#x}, where no argument is" + (" (a null pointer)" if 0 <= address < 1 << 20 else "")
    return f"byte {address - region.low} of {region.name}, which has {region.high - region.low} bytes"


class SharedMemory:
    """[block, byte], and for every two bytes when they were written (0: never) and by which thread.

    A thread may read what another one wrote only if a barrier for both stood in between: `clock` counts barriers, and each
    block and each warp knows its last one. (A later write over something still to be read is not found here.)
    """

    def __init__(self, blocks, size, warp_of):
        self.size, self.warp_of = size, warp_of
        self.bytes = np.full((blocks, -(-size // 16) * 16), 0xFF, np.uint8)          # NaN in every float type
        self.written = np.zeros((blocks, self.bytes.shape[1] // 2), np.int32)
        self.writer = np.zeros(self.written.shape, np.int32)
        self.block_barrier, self.warp_barrier, self.clock = np.zeros(blocks, np.int32), np.zeros(warp_of.max() + 1, np.int32), 1

    def load(self, block, thread, address, bits, count):
        self.inside(address, bits // 8 * count, "load")
        self._readable(block, thread, address, bits // 8 * count)
        return self.bytes.view(UNSIGNED[bits])[block[:, None], address[:, None] // (bits // 8) + np.arange(count)]

    def store(self, block, thread, address, values):
        size = values.dtype.itemsize * values.shape[1]
        self.inside(address, size, "store")
        self._sign(block, thread, address, size, self.clock)
        self._put(block, address, values)

    def announce(self, block, thread, address, size):
        """These bytes will be written at some time to come."""
        self.inside(address, size, "store")
        self._sign(block, thread, address, size, IN_FLIGHT)

    def land(self, block, thread, address, values):
        self.written[self._halves(block, address, values.shape[1])] = self.clock
        self._put(block, address, values)

    def barrier(self, index, last):
        """A barrier for some blocks or warps: `last` is block_barrier or warp_barrier."""
        self.clock += 1
        last[index] = self.clock

    def inside(self, address, size, what):
        outside = (address < 0) | (address + size > self.size)
        if outside.any():
            at = first(outside)
            raise Fault(f"shared {what} out of bounds: {size} bytes at byte {address[at]} of {self.size}", at)
        if (address % size).any():
            raise Fault(f"misaligned shared {what} of {size} bytes", first(address % size))

    def _put(self, block, address, values):
        columns = address[:, None] // values.dtype.itemsize + np.arange(values.shape[1])
        self.bytes.view(values.dtype)[block[:, None], columns] = values

    def _sign(self, block, thread, address, size, time):
        halves = self._halves(block, address, size)
        in_flight = self.written[halves] == IN_FLIGHT
        if in_flight.any():
            raise Fault("shared store to where a cp.async, not waited for, is writing", first(in_flight.any(1)))
        self.written[halves], self.writer[halves] = time, thread[:, None]

    def _halves(self, block, address, size):
        return block[:, None], address[:, None] // 2 + np.arange(max(size // 2, 1))

    def _readable(self, block, thread, address, size):
        halves = self._halves(block, address, size)
        written = self.written[halves]
        recent = written >= self.block_barrier[block][:, None]
        if (recent | (written == 0)).any():
            self._judge(written, self.writer[halves], recent, thread)

    def _judge(self, written, writer, recent, thread):
        other = recent & (writer != thread[:, None]) & (written > 0)
        same_warp = self.warp_of[writer] == self.warp_of[thread][:, None]
        other &= ~(same_warp & (written < self.warp_barrier[self.warp_of[writer]]))
        for wrong, message in ((written == IN_FLIGHT, "shared load of what a cp.async, not waited for, is still writing"),
                               (written == 0, "shared load of what no thread has written"),
                               (other, "shared load of what another thread wrote, with no barrier in between")):
            if wrong.any():
                raise Fault(message, first(wrong.any(1)))


class Copies:
    """cp.async: copies that were issued and have not landed. They land as late as PTX allows: when their thread waits for them."""

    def __init__(self, shared, threads):
        self.shared, self.pending, self.committed = shared, [], np.zeros(threads, np.int64)     # groups, of each thread

    def issue(self, block, thread, address, data):
        self.shared.announce(block, thread, address, data.shape[1])
        self.pending.append((block, thread, self.committed[thread], address, data))

    def commit(self, thread):
        """What the thread has issued since its last commit is a group."""
        self.committed[thread] += 1

    def wait(self, thread, newest):
        """Until at most the `newest` groups of the thread are still to land; −1: all, committed or not."""
        waits, copies, self.pending = np.isin(np.arange(len(self.committed)), thread), self.pending, []
        for block, owner, group, address, data in copies:
            lands = waits[owner] & (group < self.committed[owner] - newest)
            self.shared.land(block[lands], owner[lands], address[lands], data[lands])
            if not lands.all():
                self.pending.append(tuple(part[~lands] for part in (block, owner, group, address, data)))
