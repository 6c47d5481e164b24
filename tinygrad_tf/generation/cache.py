"""The KV cache: keys and values of past tokens, so that a new token costs one row of attention (guide 9.8).

A cache stores no padding: the row that has read n tokens holds n keys, whatever its neighbours hold. Five kinds share the
interface of `Cache`:

KVCache             allocated once, written from the left
ConcatKVCache       the guide's: as long as the text, moved whenever a token comes
PagedKVCache        blocks from a pool, lent out as rows grow, shared by forks           paged.py
RollingKVCache      the last W tokens, and the first few                                 rolling.py
QuantizedKVCache    8 or 4 bits a number                                                 quantized.py
"""
import copy
import weakref
from contextlib import contextmanager, nullcontext
from numbers import Integral

import numpy as np

from ..arguments import optional_tensors, require_tensors
from ..autograd import constant
from ..backend import CPU, array_module, check_one_device, device_of, to_device
from .places import Places


class Cache:
    """What all kinds share: how many tokens each row holds, and the pass in which a model reads more.

        with cache.reading(B, T, valid_tokens) as places:       # nothing that does not fit gets in
            … layer i calls cache.layer(i).update(k, v) …
                                                                # now the tokens count; after an error none of them does
    Models do this in their forward pass. Inference only: what is cached has no history.
    """

    codec = None                    # how numbers are stored; None: as they come. See quantized.py
    rows = 0                        # for how many rows memory is allocated, where there are fewer
    window, sinks = None, 0         # of a rolling cache

    def __init__(self, num_layers, **sizes):
        for name, value in {"num_layers": num_layers, **sizes}.items():
            check_size(type(self).__name__, name, value)
        self.layers = [self._layer() for _ in range(num_layers)]
        self.places = None          # of the pass that is going on
        self.reset()

    def _layer(self):
        return LayerCache(self)

    def layer(self, i):
        return LayerView(self, self.layers[i])

    def reset(self):
        """Forgets all tokens and keeps the memory."""
        self._check_no_pass("reset")
        self._padding = None
        for layer in self.layers:
            layer.lengths = None

    def abandon(self):
        """reset(), also in the middle of a pass: nobody is reading any more, because an interrupt came between two of its lines."""
        self.places = None
        self.reset()

    @property
    def lengths(self):
        """Tokens in each row, [B]; None before the first. RuntimeError where layers were filled one by one, and disagree."""
        first = self.layers[0].lengths
        if not all(layer.lengths is first for layer in self.layers) and any(not _same(first, layer.lengths) for layer in self.layers):
            lengths = sorted({layer.length for layer in self.layers})
            raise RuntimeError(f"{type(self).__name__}: its layers hold {lengths} tokens, because a forward pass did not reach all of "
                               f"them; reset() it and read the text anew")
        return first

    @property
    def length(self):
        """Columns that were read, padding included: what the valid_tokens of the next pass may speak of."""
        if self._padding is not None:
            return self._padding.shape[1]
        lengths = self.lengths
        return 0 if lengths is None or not len(lengths) else int(lengths.max())

    @property
    def nbytes(self):
        """The memory of all layers. For a cache of capacity T:  2 · L · B · T · Hkv · Dh · bytes of a number   (guide 9.8)"""
        return sum(layer.nbytes for layer in self.layers)

    # --- a pass ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, B, T, valid_tokens=None):
        """The pass of a model over T more columns; yields its `Places`. ValueError, before anything changes, for what does not fit.

        valid_tokens: [B, T] of the new columns, or [B, length + T] of all, which must then say of the old ones what they said
        when they were read. None: all new tokens are real.
        """
        if self.places is not None:
            raise RuntimeError(f"{type(self).__name__}: a pass is going on already; one cache serves one forward pass at a time")
        new = self._new_columns(B, T, valid_tokens)
        lengths = self.lengths
        if lengths is not None and len(lengths) != B:
            raise ValueError(f"{type(self).__name__}: holds B={len(lengths)} rows, got B={B}; use one cache for one batch of one model, or "
                             f"reset() it")
        padding = self._padding_with(new, B, T)
        self.places = places = self._places(np.zeros(B, np.int64) if lengths is None else lengths, T, new)
        try:
            with self._room(places):
                yield places
            for layer in self.layers:
                layer.keep(places)
            self._padding = padding
        finally:
            if self.places is places:           # not where `abandon` came first
                self.places = None

    def _places(self, starts, T, new):
        return Places(starts, T, new)

    def _room(self, places):
        """Around a pass: ValueError where it does not fit; what was taken for it is given back after an error."""
        self._make_room(places)
        return nullcontext()

    def _make_room(self, places):
        """ValueError where the pass does not fit."""

    def _left(self):
        """Gives back what no token needs any more: some were forgotten."""

    def _new_columns(self, B, T, valid_tokens):
        """bool [B, T], or None where all are real."""
        if valid_tokens is None:
            return None
        optional_tensors(type(self).__name__, valid_tokens=valid_tokens)
        past, shape = self.length, tuple(valid_tokens.shape)
        if shape not in ((B, T), (B, past + T)):
            raise ValueError(f"{type(self).__name__}: valid_tokens must have one entry for each new token, [{B}, {T}], or for each token, "
                             f"cached ones included, [{B}, {past + T}]; got {shape}")
        valid = _as_bools(type(self).__name__, valid_tokens)
        if shape[1] != T and not np.array_equal(valid[:, :past], self._read_columns(B)):
            raise ValueError(f"{type(self).__name__}: valid_tokens says of the {past} cached tokens something else than when they were "
                             f"read; pass the same, and one more column for each new token, or the new columns alone")
        new = valid[:, shape[1] - T:]
        return None if new.all() else new

    def _read_columns(self, B):
        """Which of the columns that were read are real tokens.    bool [B, length]"""
        if self._padding is not None:
            return self._padding
        lengths = self.lengths
        return np.arange(self.length) < (np.zeros(B) if lengths is None else lengths)[:, None]

    def _padding_with(self, new, B, T):
        """The columns with those of a pass; None where every row is full, or, after `trim` and the like, filled from the left."""
        if new is None and self._padding is None and self._even():
            return None
        return np.concatenate([self._read_columns(B), np.ones((B, T), bool) if new is None else new], axis=1)

    def _even(self):
        lengths = self.lengths
        return lengths is None or len(set(lengths.tolist())) < 2

    # --- rows -----------------------------------------------------------------------------------------------------------

    def fits(self, more=()):
        """Whether one more token of each row, and further rows of so many tokens, find room beside each other."""
        return True

    def trim(self, lengths):
        """Forgets what came after `lengths`, a number or one for each row; ValueError where a row does not hold as many."""
        held, lengths = self._held("trim"), self._whole("trim", "lengths", lengths)
        if lengths.shape not in ((), held.shape) or ((lengths < 0) | (lengths > held)).any():
            raise ValueError(f"{type(self).__name__}.trim: rows hold {held.tolist()} tokens, got {lengths.tolist()}; a number, or one for "
                             f"each row, says how many stay")
        lengths = np.broadcast_to(lengths, held.shape).copy()
        self._check_trim(held, lengths)
        self._set_lengths(lengths)
        self._left()

    def _check_trim(self, held, lengths):
        """ValueError where what should come back was overwritten."""

    def reorder(self, rows):
        """Row i becomes what row rows[i] was. Rows may be left out, or come more than once: then B changes."""
        rows, held = self._checked_rows("reorder", rows)
        for layer in self.layers:
            layer.reorder(rows)
        self._set_lengths(held[rows])

    def fork(self, rows=None):
        """A cache of the same kind with copies of these rows, or of all; what either reads later is its own."""
        rows, held = self._checked_rows("fork", rows)
        other = self.empty()
        for layer, source in zip(other.layers, self.layers):
            layer.copy_from(source, rows)
        other._set_lengths(held[rows])
        return other

    def join(self, other):
        """Takes over the rows of another cache of this kind, which is reset: they come after its own."""
        held = other._held("join") if type(other) is type(self) else None
        if held is None or other is self or (other.codec, len(other.layers)) != (self.codec, len(self.layers)):
            raise TypeError(f"{type(self).__name__}.join: needs another cache of the same kind and layers, got {other!r}")
        mine = self._held("join")
        for layer, more in zip(self.layers, other.layers):
            layer.check_join(more)
        self._take_rows(other, held)
        self._set_lengths(np.concatenate([mine, held]))
        other.reset()

    def _take_rows(self, other, held):
        for layer, more in zip(self.layers, other.layers):
            layer.join(more)

    def empty(self):
        """A cache like this one, without memory of its own yet."""
        other = copy.copy(self)
        other.layers, other.places, other.rows = [other._layer() for _ in self.layers], None, 0
        other.reset()
        return other

    def _set_lengths(self, lengths):
        self._padding = None
        for layer in self.layers:
            layer.lengths = lengths if len(lengths) else None       # without rows it is as new, and serves any B

    def _held(self, method):
        self._check_no_pass(method)
        return np.zeros(0, np.int64) if self.lengths is None else self.lengths

    def _check_no_pass(self, method):
        if self.places is not None:
            raise RuntimeError(f"{type(self).__name__}.{method}: a pass is going on; wait for its end")

    def _checked_rows(self, method, rows):
        """(rows [B], None meaning all, how many tokens each row holds)"""
        held = self._held(method)
        rows = np.arange(len(held)) if rows is None else self._whole(method, "rows", rows)
        if rows.ndim != 1:
            raise TypeError(f"{type(self).__name__}.{method}: rows must be whole numbers [B], got {rows.tolist()}")
        if rows.size and not (0 <= rows.min() and rows.max() < len(held)):
            raise IndexError(f"{type(self).__name__}.{method}: there are {len(held)} rows, got {rows.tolist()}")
        return rows, held

    def _whole(self, method, what, values):
        """A number, or several in a list, an array or a tensor, as int64; TypeError for others."""
        values = values.tolist() if hasattr(values, "tolist") else values
        try:
            found = np.asarray(values if isinstance(values, Integral) else list(values))
        except (TypeError, ValueError):
            found = np.asarray(None)
        if found.dtype.kind not in "iu" and (found.size or found.ndim != 1):
            raise TypeError(f"{type(self).__name__}.{method}: {what} must be whole numbers, got {values!r}")
        return found.astype(np.int64)

    def __repr__(self):
        lengths = None if self.lengths is None else self.lengths.tolist()
        return f"{type(self).__name__}(layers={len(self.layers)}, tokens in its rows={lengths}, {self.nbytes:,} bytes)"


class KVCache(Cache):
    """Keys and values of every layer, each [B, Hkv, capacity, Dh], allocated once and written from the left.

    Unlike the guide's concatenation nothing is moved when a token comes. What does not fit raises ValueError before
    anything is changed. rows: so many are allocated, for rows that will `join`.
    """

    def __init__(self, num_layers, capacity, rows=None, **sizes):
        super().__init__(num_layers, capacity=capacity, **({} if rows is None else {"rows": rows}), **sizes)
        self.capacity, self.rows = capacity, rows or 0

    def _make_room(self, places):
        if places.end > self.capacity:
            raise ValueError(f"{type(self).__name__}: {places.T} new tokens after {int(places.starts.max())} exceed the capacity of "
                             f"{self.capacity}; reset it, or allocate a larger one")

    def _take_rows(self, other, held):
        if len(held) and held.max() > self.capacity:
            raise ValueError(f"{type(self).__name__}.join: rows of {held.tolist()} tokens exceed the capacity of {self.capacity}")
        super()._take_rows(other, held)

    def slots(self, end):
        """How many places are to be there for rows of up to `end` tokens."""
        return self.capacity


class ConcatKVCache(Cache):
    """The guide's cache: k ← cat([k, new k]) along T. As long as the text, and moved as a whole whenever a token comes."""

    def __init__(self, num_layers):
        super().__init__(num_layers)

    def slots(self, end):
        return end


class LayerView:
    """What `layer(i)` gives out: a layer, and with it its cache, which the layer alone does not keep alive.

    So no two objects hold each other, and a cache that is dropped is freed at once, with its arrays and blocks.
    """

    def __init__(self, cache, layer):
        self.cache, self.of = cache, layer

    def update(self, k, v):
        return self.of.update(k, v)             # while it runs, self keeps the cache

    def __getattr__(self, name):
        return getattr(self.of, name)

    length = property(lambda self: self.of.length, lambda self, length: setattr(self.of, "length", length))


class LayerCache:
    """One layer's part: keys and values as arrays [rows, Hkv, slots, Dh], or what a codec makes of them.

    Alone, outside a pass, `update` appends to all rows alike.
    """

    lengths = None                  # tokens in each row, [B]
    fields = None                   # the arrays: k, v, or of each what the codec makes of it
    like = None                     # [Hkv, Dh] and dtype of keys, and of values

    def __init__(self, cache):
        self._cache = weakref.ref(cache)

    cache = property(lambda self: self._cache())
    places = property(lambda self: self.cache.places)
    k = property(lambda self: self.fields and self.fields[0])
    v = property(lambda self: self.fields and self.fields[-1])

    @property
    def length(self):
        return 0 if self.lengths is None or not len(self.lengths) else int(self.lengths.max())

    @length.setter
    def length(self, length):
        if self.lengths is not None:
            self.lengths = np.minimum(self.lengths, length) if length else None
        self.cache._left()

    @property
    def nbytes(self):
        return sum(a.nbytes for a in self.fields or ())

    def update(self, k, v):
        """Writes k, v [B, Hkv, T, Dh] and returns all keys and values that there are then, [B, Hkv, S, Dh]; see `Places`."""
        self._check_tensors(k, v)
        if self.places is not None:
            return self._update(k, v, self.places)
        places = self._alone(k)
        with self.cache._room(places):
            found = self._update(k, v, places)
            self.keep(places)
        return found

    def _update(self, k, v, places):
        self._check(k, v, places)
        return tuple(map(constant, self.extend(k.array, v.array, places)))

    def extend(self, k, v, places):
        """`update` on arrays, within a pass; nothing is checked."""
        codec = self.cache.codec
        new = (k, v) if codec is None else (*self._encode(k), *self._encode(v))
        self._write(new, places)
        out = new if places.fresh else self._read(new, places)
        if codec is None:
            return out
        half = len(out) // 2
        return self._decode(out[:half]), self._decode(out[half:])

    def keep(self, places):
        """From now on the tokens of this pass count."""
        self.lengths = places.ends if len(places) else None

    def _alone(self, k):
        places = self.cache._places(np.zeros(k.shape[0], np.int64) if self.lengths is None else self.lengths, k.shape[2], None)
        if not places.aligned:
            raise RuntimeError(f"{self._name}: its rows differ, or it rolls; read with a model, or within cache.reading(B, T)")
        return places

    def _encode(self, a):
        return self.cache.codec.encode(a)

    def _decode(self, parts):
        return self.cache.codec.decode(*parts, dtype=self.like[0][1])

    # --- memory ---------------------------------------------------------------------------------------------------------

    def _write(self, new, places):
        cache = self.cache
        self._allocate(new, max(len(places), cache.rows), cache.slots(places.end))
        for field, a in zip(self.fields, new):
            put(field, a, places)

    def _read(self, new, places):
        return [field[places.seen] for field in self.fields]

    def _allocate(self, new, rows, slots):
        """Memory for so many rows and slots; what is there is kept."""
        if self.fields and self.fields[0].shape[0] >= rows and self.fields[0].shape[2] == slots:
            return
        kept = [field[:rows, :, :slots] for field in self.fields or ()]
        xp = array_module(new[0])
        self.fields = [xp.zeros((rows, a.shape[1], slots, *a.shape[3:]), dtype=a.dtype) for a in new]
        for field, a in zip(self.fields, kept):
            field[:a.shape[0], :, :a.shape[2]] = a

    def reorder(self, rows):
        if self.fields is None or np.array_equal(rows, np.arange(len(rows))):
            return
        taken = self._rows(rows)
        self._allocate(taken, len(rows), self.fields[0].shape[2])
        for field, a in zip(self.fields, taken):
            field[:len(rows), :, :a.shape[2]] = a

    def _rows(self, rows):
        """Copies of these rows, as far as they are filled."""
        used = min(self.length, self.fields[0].shape[2])
        index = to_device(rows, device_of(self.fields[0]))
        return [field[:, :, :used][index] for field in self.fields]

    def copy_from(self, source, rows):
        self.like = source.like
        if source.fields is None:
            return
        taken = source._rows(rows)
        self._allocate(taken, max(len(rows), self.cache.rows), source.fields[0].shape[2])
        for field, a in zip(self.fields, taken):
            field[:len(rows), :, :a.shape[2]] = a

    def join(self, other):
        if other.lengths is None or not other.fields:
            return
        B, more, length = 0 if self.lengths is None else len(self.lengths), len(other.lengths), max(self.length, other.length)
        taken = other._rows(np.arange(more))
        self._serve(other.like, device_of(other.fields[0]))
        self._allocate(taken, max(B + more, self.cache.rows), max(self.cache.slots(length), 0))
        for field, a in zip(self.fields, taken):
            field[B:B + more, :, :a.shape[2]] = a

    # --- checks ---------------------------------------------------------------------------------------------------------

    _name = property(lambda self: type(self.cache).__name__)

    def _check_tensors(self, k, v):
        require_tensors(self._name, k=k, v=v)
        if k.ndim != 4 or v.ndim != 4:
            raise ValueError(f"{self._name}: keys and values must be [B, Hkv, T, Dh], got {tuple(k.shape)} and {tuple(v.shape)}")
        if k.requires_grad or v.requires_grad:
            raise RuntimeError(f"{self._name}: gradients cannot flow through cached keys and values; use it under no_grad()")
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"{self._name}: {k.shape[2]} keys came with {v.shape[2]} values; every token has one of each")

    def _serve(self, rows, device):
        """From now on it holds such rows; after reset() it may serve another model."""
        if self.lengths is None and self.fields and (self.like != rows or device_of(self.fields[0]) != device):
            self.fields = None
        self.like = rows

    def check_join(self, other):
        if self.lengths is None or other.lengths is None:
            return
        if self.like != other.like:
            raise ValueError(f"{self._name}.join: holds [Hkv, Dh] and numbers of {self.like}, the other cache {other.like}; use one cache "
                             f"for one model")
        check_one_device(f"{self._name}.join", [layer.fields[0] for layer in (self, other) if layer.fields])

    def _check(self, k, v, places):
        rows = [_row(a.array) for a in (k, v)]
        check_one_device(self._name, [k.array, v.array, *((self.fields or ())[:1] if self.lengths is not None else ())])
        if not (len(k) == len(v) == len(places) and k.shape[2] == places.T):
            raise ValueError(f"{self._name}: this pass is over [B, T] = [{len(places)}, {places.T}], got keys {tuple(k.shape)} and values "
                             f"{tuple(v.shape)}; use one cache for one batch of one model")
        for row, held in zip(rows, rows if self.lengths is None else self.like):
            if row != held:
                raise ValueError(f"{self._name}: holds [Hkv, Dh] and numbers of {held}, got {row}; use one cache for one model")
        self._serve(rows, device_of(k.array))


def put(field, new, places):
    """field[b, :, position] = new[b, :, t] for every real token.    field: [rows, Hkv, slots, …]  new: [B, Hkv, T, …]"""
    if places.written is not None:
        field[places.written] = new
        return
    b, t = (places.index(device_of(field), f"real {i}", lambda i=i: places.real[i]) for i in range(2))
    slots = places.index(device_of(field), "slots", lambda: places.queries[places.real])
    field[b, :, slots] = new[b, :, t]


def check_size(name, what, value, least=1):
    """TypeError or ValueError unless value is a whole number of at least 1, or `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: {what} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: {what} must be at least {least}, got {value}")


def _as_bools(name, valid_tokens):
    valid = to_device(valid_tokens.array, CPU)
    if valid.dtype != bool and not ((valid == 0) | (valid == 1)).all():
        raise ValueError(f"{name}: valid_tokens must be boolean, True = a real token, or 0 and 1, got other numbers in "
                         f"{valid_tokens.dtype}")
    return valid.astype(bool)


def _same(one, other):
    return (one is None) == (other is None) and (one is other or np.array_equal(one, other))


def _row(a):
    """What must be the same for every token of a cache."""
    return (a.shape[1], a.shape[3]), a.dtype
