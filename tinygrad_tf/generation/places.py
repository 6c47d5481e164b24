"""Who stands where, and sees whom, when a model reads new tokens after cached ones (guide 9.8, 15.2)."""
import numpy as np

from ..autograd import constant
from ..backend import to_device


class Places:
    """The T new tokens of each of B rows, and the S keys that a layer of the cache will answer with.

    A position counts the tokens of a row's own text, from 0, padding left out: so a row never depends on its neighbours.

    starts, ends    [B], how many tokens each row holds before and after
    new             bool [B, T], True = a real token; None where all are
    queries         [B, T], positions of the new tokens
    keys            [B, S], positions of the keys; −1 = padding, or nothing there
    aligned         key j of every row is its token j, or the pass is the first, and its keys are its own columns: then causality
                    by index, and `new`, say it all, and no mask [B, T, S] is made
    fresh           no row holds anything yet: the keys are the new columns themselves, padding included
    start, end      how many tokens each row holds, where all hold as many; how many the longest holds afterwards
    num_keys        S
    written, seen   where in a layer's arrays [rows, Hkv, slots, Dh] the new tokens lie, None if they are not one block; where the keys do
    window, sinks   of a rolling cache: token q sees keys q − window + 1 … q, and the first `sinks`

    All of these are NumPy on the host. What goes to a device is made once, for all layers.
    """

    def __init__(self, starts, T, new=None, keys=None, window=None, sinks=0):
        self.starts, self.T, self.new, self.window, self.sinks = starts, T, new, window, sinks
        self.ends = starts + (T if new is None else new.sum(axis=1))
        self._keys, self._made, held = keys, {}, starts.tolist()        # a list: of a few numbers it is several times faster than an array
        even, self.fresh, self.start = new is None and len(set(held)) < 2, not any(held), held[0] if held else 0
        self.aligned = keys is None and (self.fresh or even)
        self.end = self.start + T if even and held else max(self.ends.tolist(), default=0)
        self.num_keys = keys.shape[1] if keys is not None else T if self.fresh else self.end
        rows, block = slice(len(held)), slice(self.start, self.start + T)
        self.written = (rows, slice(None), block) if new is None and self.aligned and held else None
        self.seen = rows, slice(None), slice(self.num_keys)

    def __len__(self):
        return len(self.starts)

    @property
    def queries(self):
        return self.once("queries", self._queries)

    def _queries(self):
        if self.new is None:
            return self.starts[:, None] + np.arange(self.T)
        return np.where(self.new, self.starts[:, None] + self.new.cumsum(axis=1) - 1, -1)

    @property
    def keys(self):
        return self.once("keys", self._found_keys)

    def _found_keys(self):
        if self._keys is not None:
            return self._keys
        if self.fresh:
            return self.queries
        places = np.arange(self.num_keys)
        return np.where(places < self.ends[:, None], places, -1)

    @property
    def real(self):
        """(b, t) of every new token that is real, as two index arrays."""
        return self.once("real", lambda: np.nonzero(self.queries >= 0))

    # --- for the layers, on their device --------------------------------------------------------------------------------

    def valid_tokens(self, device):
        """bool Tensor [B, T], or None where all new tokens are real."""
        return None if self.new is None else self._on(device, "new", lambda: self.new)

    def position_ids(self, device):
        """[T] where all rows count alike, else [B, T]; padding is given position 0."""
        if self.new is None and self.aligned:
            return self._on(device, "ids", lambda: np.arange(self.start, self.start + self.T))
        return self._on(device, "ids", lambda: np.maximum(self.queries, 0))

    def key_ids(self, device):
        """[B, S]; what is no token is given position 0, and is not seen."""
        return self._on(device, "key_ids", lambda: np.maximum(self.keys, 0))

    def allowed(self, device, window=None):
        """`mask` as a Tensor."""
        return self._on(device, ("allowed", window), lambda: self.mask(window))

    def mask(self, window=None):
        """bool [B, 1, T, S]: key ≤ query, and within both windows, a layer's own and the cache's."""
        return self.once(("mask", window), lambda: self._mask(window))

    def _mask(self, window):
        q, k = self.queries[:, None, :, None], self.keys[:, None, None, :]
        seen = (k >= 0) & (k <= q)
        if self.window is not None:
            seen &= (q - k < self.window) | (k < self.sinks)
        return seen if window is None else seen & (q - k < window)

    def index(self, device, name, make):
        """An index array that `make` computes once, as an array of that device."""
        return self.once((name, str(device)), lambda: to_device(np.ascontiguousarray(make()), device))

    def _on(self, device, name, make):
        return self.once((name, "tensor", str(device)), lambda: constant(to_device(np.ascontiguousarray(make()), device)))

    def once(self, name, make):
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]
