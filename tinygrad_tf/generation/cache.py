"""The KV cache: keys and values of past tokens, so that a new token costs one row of attention (guide 9.8)."""
from ..autograd import constant
from ..backend import array_module


class KVCache:
    """Keys and values of every layer, each [B, Hkv, capacity, Dh], allocated once and written from the left.

    Unlike the guide's concatenation nothing is moved when a token comes. Writing past the capacity raises before
    anything is changed. Inference only: what is cached has no history.
    """

    def __init__(self, num_layers, capacity):
        if capacity < 1:
            raise ValueError(f"KVCache: capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]

    def layer(self, i):
        return self.layers[i]

    @property
    def length(self):
        """Tokens that every layer holds."""
        return self.layers[-1].length

    @property
    def nbytes(self):
        """2 · L · B · capacity · Hkv · Dh · itemsize once the first token has come (guide 9.8)."""
        return sum(a.nbytes for layer in self.layers for a in (layer.k, layer.v) if a is not None)

    def reset(self):
        """Forgets all tokens and keeps the memory."""
        for layer in self.layers:
            layer.length = 0


class LayerCache:
    """One layer's part."""

    def __init__(self, capacity):
        self.capacity, self.length = capacity, 0
        self.k = self.v = None

    def update(self, k, v):
        """Appends k, v [B, Hkv, T, Dh] and returns all that is cached, as views [B, Hkv, length, Dh]."""
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"KVCache: {k.shape[2]} new tokens after {self.length} exceed the capacity of {self.capacity}; reset it, or "
                             f"allocate a larger one")
        if self.k is None:
            self.k, self.v = (self._allocate(a.array) for a in (k, v))
        if self.k.shape[:2] != k.shape[:2]:
            raise ValueError(f"KVCache: holds [B, Hkv] = {self.k.shape[:2]}, got {tuple(k.shape[:2])}; use one cache for one batch")
        self.k[:, :, self.length:end], self.v[:, :, self.length:end] = k.array, v.array
        self.length = end
        return constant(self.k[:, :, :end]), constant(self.v[:, :, :end])

    def _allocate(self, a):
        B, Hkv, _, Dh = a.shape
        return array_module(a).zeros((B, Hkv, self.capacity, Dh), dtype=a.dtype)
