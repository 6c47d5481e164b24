"""The KV cache: keys and values of past tokens, so that a new token costs one row of attention (guide 9.8)."""
from numbers import Integral

from ..autograd import constant
from ..backend import array_module, check_one_device
from ..dtypes import bool_


class KVCache:
    """Keys and values of every layer, each [B, Hkv, capacity, Dh], allocated once and written from the left.

    Unlike the guide's concatenation nothing is moved when a token comes. What does not fit raises ValueError before
    anything is changed. Inference only: what is cached has no history.
    """

    def __init__(self, num_layers, capacity):
        for name, value in ("num_layers", num_layers), ("capacity", capacity):
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"KVCache: {name} must be an integer, got {value!r} of type {type(value).__name__}")
            if value < 1:
                raise ValueError(f"KVCache: {name} must be at least 1, got {value}")
        self.capacity, self.valid_tokens = capacity, None
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]

    def layer(self, i):
        return self.layers[i]

    @property
    def length(self):
        """Tokens that every layer holds. RuntimeError where a forward pass was cut short and the layers disagree."""
        lengths = {layer.length for layer in self.layers}
        if len(lengths) > 1:
            raise RuntimeError(f"KVCache: its layers hold {sorted(lengths)} tokens, because a forward pass did not reach all of them; "
                               f"reset() it and read the text anew")
        return lengths.pop()

    @property
    def nbytes(self):
        """2 · L · B · capacity · Hkv · Dh · itemsize once the first token has come (guide 9.8)."""
        return sum(a.nbytes for layer in self.layers for a in (layer.k, layer.v) if a is not None)

    def agree_on_padding(self, valid_tokens):
        """Takes valid_tokens [B, length + T] for the next pass, None = all real; ValueError where it calls a cached token otherwise.

        What is padding was decided when its key was written: later tokens that took it for real would attend to it.
        """
        if self.length and not _equal(self.valid_tokens, valid_tokens, self.length):
            raise ValueError(f"KVCache: valid_tokens says of the {self.length} cached tokens something else than when they were read"
                             f"{', with padding' if valid_tokens is None else ''}; pass the same, and one more column for each new token")
        self.valid_tokens = None if valid_tokens is None else valid_tokens.detach().to(bool_).clone()

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
        self._check(k, v, end)
        if self.k is None:
            self.k, self.v = (self._allocate(a.array) for a in (k, v))
        self.k[:, :, self.length:end], self.v[:, :, self.length:end] = k.array, v.array
        self.length = end
        return constant(self.k[:, :, :end]), constant(self.v[:, :, :end])

    def _check(self, k, v, end):
        if k.requires_grad or v.requires_grad:
            raise RuntimeError("KVCache: gradients cannot flow through cached keys and values; use it under no_grad()")
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"KVCache: {k.shape[2]} keys came with {v.shape[2]} values; every token has one of each")
        if end > self.capacity:
            raise ValueError(f"KVCache: {k.shape[2]} new tokens after {self.length} exceed the capacity of {self.capacity}; reset it, "
                             f"or allocate a larger one")
        check_one_device("KVCache", [a for a in (k.array, v.array, self.k) if a is not None])
        for a, cached in (k, self.k), (v, self.v):
            if cached is not None and _row(a.array) != _row(cached):
                raise ValueError(f"KVCache: holds {_row(cached)}, got {_row(a.array)}; use one cache for one batch of one model")

    def _allocate(self, a):
        B, Hkv, _, Dh = a.shape
        return array_module(a).zeros((B, Hkv, self.capacity, Dh), dtype=a.dtype)


def _equal(one, other, length):
    """Whether two valid_tokens [B, ≥ length] say the same of the first tokens; None = all real."""
    if one is None or other is None:
        return all(valid is None or bool(valid[:, :length].all()) for valid in (one, other))
    one, other = one[:, :length], other[:, :length].to(bool_)
    return one.shape == other.shape and bool((one == other).all())


def _row(a):
    """What must be the same for every token of a cache."""
    B, Hkv, _, Dh = a.shape
    return f"[B, Hkv, Dh] = [{B}, {Hkv}, {Dh}] of {a.dtype}"
