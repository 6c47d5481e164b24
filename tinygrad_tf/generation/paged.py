"""A cache in blocks: memory is lent out as rows grow, and rows that begin alike share it (vLLM's PagedAttention, arXiv 2309.06180).

A row's table lists its blocks: token p lies in block table[p // block_size], at place p % block_size. A block that several
rows share is copied before one of them writes to it.
"""
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np

from ..backend import array_module, device_of
from .cache import Cache, LayerCache, check_size


class BlockPool:
    """num_blocks blocks; which are free, and how many rows hold each of the others. The numbers are in the layers of one model."""

    def __init__(self, num_layers, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(num_blocks))[::-1]
        self.holders = np.zeros(num_blocks, np.int64)
        self.fields = [None] * num_layers                   # of each layer: arrays [num_blocks, Hkv, block_size, …]
        self.like = [None] * num_layers

    def take(self):
        block = self.free.pop()
        self.holders[block] = 1
        return block

    def share(self, block):
        self.holders[block] += 1
        return block

    def give_back(self, block):
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self.free.append(block)

    def copy(self, block):
        """A block of one's own with the numbers of this one, in every layer."""
        own = self.take()
        for fields in self.fields:
            for field in fields or ():
                field[own] = field[block]
        return own


class PagedKVCache(Cache):
    """Blocks of block_size tokens from a pool of num_blocks, which all forks share. ValueError, before anything changes, if none is free.

    `fork` and `reorder` copy no numbers: their rows share blocks until one is written to. What `reset`, `trim` and `reorder`
    leave goes back to the pool; so do the rows of a fork that is dropped.
    """

    def __init__(self, num_layers, num_blocks, block_size=16):
        check_size("PagedKVCache", "num_layers", num_layers)
        check_size("PagedKVCache", "num_blocks", num_blocks)
        check_size("PagedKVCache", "block_size", block_size)
        self.pool, self.tables = BlockPool(num_layers, num_blocks, block_size), []
        super().__init__(num_layers)

    def _layer(self):
        return PagedLayer(self)

    @property
    def blocks_in_use(self):
        return self.pool.num_blocks - len(self.pool.free)

    @property
    def nbytes_in_use(self):
        """The part of `nbytes` that is lent out, to this cache and its forks."""
        return self.nbytes * self.blocks_in_use // self.pool.num_blocks

    def reset(self):
        super().reset()
        self._drop_tables()

    def __del__(self):
        self._drop_tables()

    def _drop_tables(self):
        for table in self.__dict__.get("tables", ()):
            for block in table:
                self.pool.give_back(block)
        self.tables = []

    # --- a pass ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _room(self, places):
        """Blocks for what the rows are about to write, also in place of those that they share. What is left goes back at the end."""
        before = self.tables
        after = [list(table) for table in before] or [[] for _ in range(len(places))]
        work = self._to_do(after, places.starts, places.ends)
        needed = sum(missing + len(shared) for missing, shared in work)
        if needed > len(self.pool.free):
            raise ValueError(f"PagedKVCache: {places.T} new tokens after {int(places.starts.max())} need {needed} blocks, and of "
                             f"{self.pool.num_blocks} {len(self.pool.free)} are free; let rows leave, reset or trim, or build it with more")
        copied, taken = [], []
        try:
            for table, (missing, shared) in zip(after, work):
                for i in shared:
                    copied.append(table[i])
                    taken.append(self.pool.copy(table[i]))
                    table[i] = taken[-1]
                for _ in range(missing):
                    taken.append(self.pool.take())
                    table.append(taken[-1])
            self.tables = after
            yield
        except BaseException:
            self.tables, copied = before, taken
            raise
        finally:
            for block in copied:
                self.pool.give_back(block)

    def _left(self):
        if self.places is not None:                         # at its end, or its error, all is put in order
            return
        held = [layer.lengths for layer in self.layers if layer.lengths is not None]
        longest = np.max(held, axis=0) if held else []
        for table, length in zip_longest(self.tables, longest, fillvalue=0):
            needed = -(-int(length) // self.pool.block_size)
            for block in table[needed:]:
                self.pool.give_back(block)
            del table[needed:]
        del self.tables[len(longest):]

    def _to_do(self, tables, starts, ends):
        """For each row (how many blocks it lacks, which of its own it shares and is about to write to).

        Of rows that share a block the one with the most tokens comes last: where nobody else holds it then, it writes in place, and
        overwrites nothing that the others would need after an error.
        """
        size, holders, work = self.pool.block_size, self.pool.holders.copy(), [(0, [])] * len(tables)
        for row in np.argsort(starts, kind="stable"):
            table, first, last = tables[row], starts[row] // size, -(-ends[row] // size)
            if ends[row] > starts[row]:
                shared = [i for i in range(first, min(last, len(table))) if holders[table[i]] > 1]
                holders[[table[i] for i in shared]] -= 1
                work[row] = max(last - len(table), 0), shared
        return work

    # --- rows -----------------------------------------------------------------------------------------------------------

    def fits(self, more=()):
        lengths = np.zeros(0, np.int64) if self.lengths is None else self.lengths
        needed = sum(missing + len(shared) for missing, shared in self._to_do(self.tables, lengths, lengths + 1))
        return bool(needed + sum(-(-n // self.pool.block_size) for n in more) <= len(self.pool.free))

    def reorder(self, rows):
        rows, held = self._checked_rows("reorder", rows)
        tables = self._shared_tables(rows)
        self._drop_tables()
        self.tables = tables
        self._set_lengths(held[rows])

    def fork(self, rows=None):
        rows, held = self._checked_rows("fork", rows)
        other = self.empty()
        other.tables = self._shared_tables(rows)
        other._set_lengths(held[rows])
        return other

    def empty(self):
        """A cache without tokens that borrows from the same pool."""
        other = object.__new__(type(self))
        other.pool, other.tables = self.pool, []
        Cache.__init__(other, len(self.layers))
        return other

    def join(self, other):
        if getattr(other, "pool", None) is not self.pool:
            raise TypeError("PagedKVCache.join: needs a cache of the same pool: make it with empty() or fork()")
        super().join(other)

    def _take_rows(self, other, held):
        self.tables += other.tables
        other.tables = []                                   # they are not given back when it is reset

    def _shared_tables(self, rows):
        return [[self.pool.share(block) for block in self.tables[row]] for row in rows]


class PagedLayer(LayerCache):
    """One layer's blocks."""

    @property
    def _number(self):
        return self.cache.layers.index(self)

    @property
    def fields(self):
        return self.cache.pool.fields[self._number]

    @fields.setter
    def fields(self, fields):
        raise ValueError("PagedKVCache: its pool holds keys of another shape, dtype or device; use one pool for one model")

    @property
    def like(self):
        return self.cache.pool.like[self._number]

    @like.setter
    def like(self, like):
        self.cache.pool.like[self._number] = like

    def _write(self, new, places):
        pool = self.cache.pool
        if self.fields is None:
            xp = array_module(new[0])
            pool.fields[self._number] = [xp.zeros((pool.num_blocks, a.shape[1], pool.block_size, *a.shape[3:]), dtype=a.dtype) for a in new]
        b, t, block, place = (places.index(device_of(new[0]), f"paged {i}", lambda i=i: self._targets(places)[i]) for i in range(4))
        for field, a in zip(self.fields, new):
            field[block, :, place] = a[b, :, t]

    def _targets(self, places):
        """(b, t, its block, its place in it) of every new token."""
        b, t = places.real
        at = places.queries[places.real]
        return b, t, self._table()[b, at // self.cache.pool.block_size], at % self.cache.pool.block_size

    def _table(self):
        """[B, longest], filled up with block 0, whose numbers nobody sees there."""
        tables = self.cache.tables
        table = np.zeros((len(tables), max(map(len, tables), default=0)), np.int64)
        for row, blocks in zip(table, tables):
            row[:len(blocks)] = blocks
        return table

    def _read(self, new, places):
        blocks = -(-places.num_keys // self.cache.pool.block_size)
        table = places.index(device_of(new[0]), "table", lambda: self._table()[:, :blocks])
        return [self._gather(field, table)[:, :, :places.num_keys] for field in self.fields]

    def _gather(self, field, table):
        """[B, blocks] of field [num_blocks, Hkv, block_size, …] → [B, Hkv, blocks · block_size, …]"""
        B, n = table.shape
        _, Hkv, size, *rest = field.shape
        return field[table].swapaxes(1, 2).reshape(B, Hkv, n * size, *rest)
