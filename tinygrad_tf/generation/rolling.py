"""A cache of constant size: the last W tokens, and, as an option, the first few (attention sinks, arXiv 2309.17453)."""
import numpy as np

from ..backend import array_module, device_of, to_device
from .cache import Cache, LayerCache, check_size
from .places import Places


class RollingKVCache(Cache):
    """Token q sees q − window + 1 … q, and tokens 0 … sinks − 1. Memory does not grow: sinks + window + slack slots a row.

    Token p ≥ sinks lies in slot sinks + (p − sinks) mod (window + slack). `slack` tokens can be trimmed again, such as a draft
    that was rejected; passes of up to slack + 1 tokens are written in place. A token keeps the position at which it was read.

    A model reads on beyond its context only where its positions do not end: with RoPE or ALiBi, not with a table.
    """

    def __init__(self, num_layers, window, sinks=0, slack=16):
        check_size("RollingKVCache", "sinks", sinks, least=0)
        check_size("RollingKVCache", "slack", slack, least=0)
        super().__init__(num_layers, window=window)
        self.window, self.sinks, self.slack = window, sinks, slack

    def reset(self):
        super().reset()
        self.newest = np.zeros(0, np.int64)     # [B], how far each row was ever written: `ring` tokens earlier all is overwritten

    def _layer(self):
        return RollingLayer(self)

    @property
    def ring(self):
        return self.window + self.slack

    def slots(self, end):
        return self.sinks + self.ring

    def slot_of(self, positions):
        return np.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.ring)

    def positions_at(self, lengths):
        """Which token lies in each slot of rows that hold so many, −1 = none.    [B, slots]"""
        first, later = np.arange(self.sinks), np.arange(self.ring)
        lengths = lengths[:, None]
        newest = self.sinks + later + (lengths - 1 - self.sinks - later) // self.ring * self.ring       # ≡ slot, and below its length
        return np.concatenate([np.where(first < lengths, first, -1), np.where(newest >= self.sinks, newest, -1)], axis=1)

    def _places(self, starts, T, new):
        places = Places(starts, T, new, None, self.window, self.sinks)
        if places.aligned and places.end <= self.window:            # nothing has left yet: as in any other cache
            return places
        if places.fresh:
            keys = places.queries
        elif T <= self.slack + 1:
            keys = self.positions_at(places.ends)
        else:                                                       # the old ones, then the new columns: all are needed at once
            keys = np.concatenate([self.positions_at(starts), places.queries], axis=1)
        return Places(starts, T, new, keys, self.window, self.sinks)

    def _make_room(self, places):
        """Also what a pass writes that breaks off overwrites what was there; a row that begins anew needs none of it."""
        anew = places.starts <= self.sinks
        self.newest = places.ends if places.fresh else np.where(anew, places.ends, np.maximum(self.newest, places.ends))

    def reorder(self, rows):
        rows, _ = self._checked_rows("reorder", rows)
        super().reorder(rows)
        self.newest = self.newest[rows]

    def fork(self, rows=None):
        rows, _ = self._checked_rows("fork", rows)
        other = super().fork(rows)
        other.newest = self.newest[rows]
        return other

    def _take_rows(self, other, held):
        sizes = [(cache.window, cache.sinks, cache.slack) for cache in (self, other)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"RollingKVCache.join: window, sinks and slack must be the same, got {sizes[0]} and {sizes[1]}")
        super()._take_rows(other, held)
        B = 0 if self.lengths is None else len(self.lengths)
        self.newest = np.concatenate([self.newest[:B], other.newest[:len(held)]])

    def _check_trim(self, held, lengths):
        newest = self.newest[:len(held)]
        back = (newest - lengths)[(newest > self.sinks + self.ring) & (self.sinks < lengths) & (lengths < held)]
        if back.size and back.max() > self.slack:
            raise ValueError(f"RollingKVCache.trim: what came more than slack={self.slack} tokens ago is overwritten, and "
                             f"{int(back.max())} tokens are to be taken back; build it with a larger slack")


class RollingLayer(LayerCache):
    """One layer's ring."""

    _waiting = None                 # a long pass, which overwrites what an error would need: written when the pass has ended

    def _write(self, new, places):
        self._allocate(new, max(len(places), self.cache.rows), self.cache.slots(0))
        in_place = places.fresh or places.aligned or places.T <= self.cache.slack + 1
        self._waiting = None if in_place else new
        if in_place:
            self._put(new, places)

    def keep(self, places):
        if self._waiting is not None:
            self._put(self._waiting, places)
        self._waiting = None
        super().keep(places)

    def _put(self, new, places):
        """The new tokens that are among the last of their row, or the first."""
        def found():
            at, ends = places.queries, places.ends[:, None]
            return np.nonzero((at >= 0) & ((at >= ends - self.cache.ring) | (at < self.cache.sinks)))
        kept = places.once("rolling", found)
        b, t = (places.index(device_of(new[0]), f"rolling {i}", lambda i=i: kept[i]) for i in range(2))
        slots = places.index(device_of(new[0]), "slots", lambda: self.cache.slot_of(places.queries[kept]))
        for field, a in zip(self.fields, new):
            field[b, :, slots] = a[b, :, t]

    def _read(self, new, places):
        B = len(places)
        if places.aligned:
            return [field[:B, :, :places.num_keys] for field in self.fields]
        if self._waiting is None:
            return [field[:B] for field in self.fields]
        return [array_module(a).concatenate([field[:B], a], axis=2) for field, a in zip(self.fields, new)]

    def _rows(self, rows):
        """Copies of these rows, all slots: a ring has no end."""
        index = to_device(rows, device_of(self.fields[0]))
        return [field[index] for field in self.fields]
