"""Whatever the cache, the batch and the chunks: one text.

caches × batches × readings × models × samplings, in one table. The reference is a short loop: one prompt, read whole and anew
for each token, without a cache. Then the same for what has a reference of its own: a rolling cache that is shorter than the
text, a quantised cache, and the encoder–decoder.
"""
import functools
import itertools
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from device import host
from generation.tiny import DH, HEADS, LAYERS, MODELS, POSITIONS, T_MAX, V_VOCAB, C, H, enlarge, model_of

import tinygrad_tf as torch
from tinygrad_tf.generation import (
    Batch,
    ConcatKVCache,
    KVCache,
    PagedKVCache,
    QuantizedKVCache,
    RollingKVCache,
    Sampler,
    batch,
    greedy_decode,
    sampling,
)
from tinygrad_tf.generation.cache import LayerCache
from tinygrad_tf.generation.paged import PagedLayer
from tinygrad_tf.generation.places import Places
from tinygrad_tf.models import EncoderDecoder
from tinygrad_tf.nn import functional as F

PROMPTS = ([3, 9, 4], [1, 2, 3, 4, 5, 6, 7], [5], [0, 12, 3, 4, 4], [7, 7])
NEW = 4                                                         # ids that are written after each
SLACK = 2                                                       # of rolling caches: passes of up to three tokens are written in place

CACHES = {
    "no cache": lambda: None,
    "concatenating": lambda: ConcatKVCache(LAYERS),
    "preallocated": lambda: KVCache(LAYERS, T_MAX),
    "paged": lambda: PagedKVCache(LAYERS, 20, block_size=4),    # prompts and chunks end inside a block
    "rolling": lambda: RollingKVCache(LAYERS, T_MAX, slack=SLACK),
}


class Rows(NamedTuple):
    """Which prompts a batch gets, how many tokens each writes, and how the batch is built."""
    numbers: tuple
    lengths: tuple
    options: dict


ALL = tuple(range(len(PROMPTS)))
BATCHES = {
    "one prompt": Rows((1,), (NEW,), {}),
    "left padding": Rows(ALL, (NEW,) * len(ALL), {"padding": "left"}),
    "right padding": Rows(ALL, (NEW,) * len(ALL), {"padding": "right"}),
    "continuous": Rows(ALL, (2, 4, 2, 2, 3), {"max_rows": 3}),  # rows 0 and 2 leave together, 3 and 4 join while 1 goes on
}
READINGS = {"whole": None, "in chunks": 3, "token by token": 1}
SAMPLINGS = {"greedy": Sampler(temperature=0), "seeded": Sampler(temperature=1.5, repetition_penalty=1.2)}

# What is left out of the table, with the reason, which is tested too.
EXCLUDED = {
    ("no cache", "in chunks"): "nothing holds the first chunk: each step reads the text whole",
    ("no cache", "token by token"): "nothing holds the first token: each step reads the text whole",
}


class Cell(NamedTuple):
    cache: str
    batch: str
    reading: str
    model: str
    sampling: str

    def __str__(self):
        return ("S21-A2: " if self.is_s21_a2 else "") + ", ".join(self)

    @property
    def excluded(self):
        return (self.cache, self.reading) in EXCLUDED

    @property
    def is_s21_a2(self):
        """Full forward = token by token with the same positions: learned ones and RoPE, left padding, a window cache."""
        return self[:3] == ("rolling", "left padding", "token by token") and self.model.endswith(("learned", "RoPE"))


PRODUCT = list(itertools.starmap(Cell, itertools.product(CACHES, BATCHES, READINGS, MODELS, SAMPLINGS)))
TRIED = [cell for cell in PRODUCT if not cell.excluded]
IN_FLOAT32 = TRIED[::29]
STEP = 1 if torch.get_default_device().type == "cpu" else 7     # on the stand-in for a GPU a pass takes many times as long: every seventh


def product_of(names, *axes):
    """A test for each combination, on the CPU."""
    return pytest.mark.parametrize(names, list(itertools.product(*axes))[::STEP], ids=str)


def test_the_table_is_whole():
    """Tried and excluded cells together are the product; the numbers stand here so that none goes missing unseen."""
    print(f"{len(PRODUCT)} cells = {len(TRIED)} tried + {len(PRODUCT) - len(TRIED)} excluded; {len(IN_FLOAT32)} in float32 too")
    for (kind, reading), reason in EXCLUDED.items():
        print(f"excluded: {kind} × {reading}: {reason}")
    models = len(HEADS) * len(POSITIONS) + 3                    # MiniGPT, post-norm and pre-norm, and Decoder
    assert len(MODELS) == models == 15 and len(set(PRODUCT)) == len(PRODUCT) == 5 * 4 * 3 * models * 2 == 1800
    assert len(TRIED) == 1560 and len(PRODUCT) - len(TRIED) == len(EXCLUDED) * 4 * models * 2 == 240
    assert sum(cell.is_s21_a2 for cell in TRIED) == 2 * len(HEADS) * len(SAMPLINGS)
    for sample in IN_FLOAT32, TRIED[::7]:
        assert all(set(names) == set(some) for names, some in zip(zip(*TRIED), zip(*sample)))


def test_nothing_holds_the_first_chunk():
    """The reason of the excluded cells: every pass reads whole texts, whatever the chunk."""
    model, shapes = model_of("MHA, RoPE"), []
    forward = type(model).forward
    with mock.patch.object(type(model), "forward", lambda self, ids, **options: shapes.append(ids.shape) or forward(self, ids, **options)):
        written(model, None, BATCHES["one prompt"], prefill_chunk=3)
    assert shapes == [(1, len(PROMPTS[1]) + n) for n in range(NEW)]


# --- the reference, and the library -----------------------------------------------------------------------------------------

def alone(read, prompt, new, sampler=SAMPLINGS["greedy"], seed=0):
    """(the ids written after one prompt, the logits [new, V] that they are drawn from).    read: ids [1, T] → logits [1, T, V]"""
    ids, logits, draw = list(prompt), [], torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(new):
            logits.append(read(torch.tensor([ids]))[:, -1])
            ids.append(sampler(logits[-1], [ids], draw).item())
    return ids[len(prompt):], np.concatenate(host(logits))


@functools.cache
def reference(name, sampling, number, window=None):
    model = model_of(name, window=window)
    return alone(lambda ids: model(ids)[0], PROMPTS[number], NEW, SAMPLINGS[sampling], seed=number)


def written(model, cache, rows, sampler=SAMPLINGS["greedy"], prompts=PROMPTS, **options):
    """{number: (row, the logits that it drew from)} of one batch."""
    seen, choose = {}, batch.choose

    def recorded(logits, live):
        for row, z in zip(live, host(logits)):
            seen.setdefault(row.number, []).append(z)
        return choose(logits, live)
    together = Batch(model, cache, use_cache=cache is not None, logprobs=True, **{**rows.options, **options})
    added = [together.add(prompts[i], new, sampler=sampler, seed=i) for i, new in zip(rows.numbers, rows.lengths)]
    with mock.patch.object(batch, "choose", recorded):
        together.run()
    return {i: (row, np.stack(seen[row.number])) for i, row in zip(rows.numbers, added)}


def assert_one_text(found, expected, rows, tolerance=1e-9):
    """The same ids; logits, and what the rows note of them, within the tolerance.    expected: number → (ids, logits)"""
    for number, new in zip(rows.numbers, rows.lengths):
        (row, logits), (ids, wanted) = found[number], expected(number)
        ids, wanted = ids[:new], wanted[:new]
        assert row.new_ids == ids, f"row {number}"
        assert np.abs(logits - wanted).max() <= tolerance, f"row {number}"
        logprobs = wanted - np.log(np.exp(wanted).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(row.logprobs, logprobs[np.arange(new), ids], rtol=0, atol=2 * tolerance)


def check(cell, dtype=None, tolerance=1e-9, window=None):
    rows = BATCHES[cell.batch]
    found = written(model_of(cell.model, dtype, window=window), CACHES[cell.cache](), rows, SAMPLINGS[cell.sampling],
                    prefill_chunk=READINGS[cell.reading])
    assert_one_text(found, lambda number: reference(cell.model, cell.sampling, number, window), rows, tolerance)


@pytest.mark.parametrize("cell", TRIED[::STEP], ids=str)
def test_one_text(cell):
    check(cell)


@pytest.mark.parametrize("cell", IN_FLOAT32, ids=str)
def test_one_text_in_float32(cell):
    check(cell, torch.float32, 1e-4)


@pytest.mark.parametrize("cell", [cell for cell in TRIED if cell.sampling == "greedy" and cell.model in
                                  ("GQA, RoPE", "Decoder, GQA")][::STEP], ids=str)
def test_one_text_of_a_model_with_a_window(cell):
    check(cell, window=3)


def test_the_table_tells_models_apart():
    """Else heads, positions, samplings or a window that do nothing would be equal to themselves; and no distribution is flat."""
    every = [*itertools.product(MODELS, SAMPLINGS, (1,)), *itertools.product(["GQA, RoPE", "Decoder, GQA"], ["greedy"], (1,), (3,))]
    texts = [reference(*one) for one in every]
    for (ids, logits), (others, other_logits) in itertools.combinations(texts, 2):
        assert ids != others or np.abs(logits - other_logits).max() > 1e-3
    for one, (_, logits) in zip(every, texts):
        assert len({tuple(reference(*one[:2], number)[0]) for number in ALL}) > 1, one
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        assert (shares / shares.sum(axis=-1, keepdims=True)).max(axis=-1).mean() > 2 / V_VOCAB, one


def test_rows_join_while_others_run():
    """The continuous batch is one: two unequal rows join a third in one step."""
    rows, steps, choose = BATCHES["continuous"], [], batch.choose
    with mock.patch.object(batch, "choose", lambda logits, live: steps.append([row.number for row in live]) or choose(logits, live)):
        together = Batch(model_of("GQA, RoPE"), **rows.options)
        for number, new in zip(rows.numbers, rows.lengths):
            together.add(PROMPTS[number], new)
        together.run()
    assert steps == [[0, 1, 2]] * 2 + [[1, 3, 4]] * 2 + [[4]]


@pytest.mark.parametrize("name", ["GQA, RoPE", "MiniGPT"])
@pytest.mark.parametrize("chosen", SAMPLINGS)
def test_rows_that_wait_for_blocks_write_the_same(chosen, name):
    """A pool with room for the longest text and one block more: rows are sent back, and read anew later."""
    together = Batch(model_of(name), PagedKVCache(LAYERS, 4, block_size=4))
    rows = [together.add(prompt, NEW, sampler=SAMPLINGS[chosen], seed=number) for number, prompt in enumerate(PROMPTS)]
    together.run()
    assert [row.new_ids for row in rows] == [reference(name, chosen, number)[0] for number in ALL]
    assert together.speed.prefill_tokens > sum(map(len, PROMPTS))


FAULTS = {
    "the length of the cache is taken for the position": (
        Places, "position_ids", lambda self, device: torch.arange(self.end - self.T, self.end, device=device),
        Cell("rolling", "left padding", "token by token", "GQA, learned", "greedy")),
    "keys of another position": (
        Places, "key_ids", lambda self, device: torch.arange(self.num_keys, device=device).flip(0).expand(len(self), self.num_keys),
        Cell("preallocated", "right padding", "whole", "MHA, ALiBi", "greedy")),
    "places that hold nothing are seen": (
        Places, "mask", lambda self, window=None: self.keys[:, None, None, :] <= self.queries[:, None, :, None],
        Cell("concatenating", "right padding", "whole", "MHA, RoPE", "greedy")),
    "places that hold nothing are seen by the library's models": (
        Places, "mask", lambda self, window=None: self.keys[:, None, None, :] <= self.queries[:, None, :, None],
        Cell("paged", "continuous", "whole", "Decoder, GQA", "greedy")),
    "a chunk sees its own later tokens": (
        Places, "mask", lambda self, window=None: np.tile(self.keys[:, None, None, :] >= 0, (1, 1, self.T, 1)),
        Cell("preallocated", "left padding", "in chunks", "MHA, RoPE", "greedy")),
    "the last column for the last token": (
        batch, "padded", lambda windows, side, padded=batch.padded: padded(windows, "left"),
        Cell("preallocated", "right padding", "whole", "MHA, RoPE", "greedy")),
    "rows that leave keep their place": (
        LayerCache, "reorder", lambda self, rows: None,
        Cell("preallocated", "continuous", "whole", "MHA, learned", "greedy")),
    "blocks that are filled from the right": (
        PagedLayer, "_targets", lambda self, where, targets=PagedLayer._targets: (*targets(self, where)[:3], 3 - targets(self, where)[3]),
        Cell("paged", "one prompt", "in chunks", "MHA, learned", "greedy")),
    "a ring that is written one place off": (
        RollingKVCache, "slot_of", lambda self, positions: (positions + 1) % self.ring,
        Cell("rolling", "continuous", "whole", "MHA, learned", "greedy")),
    "rows that share random numbers": (
        sampling, "_drawn", lambda logits, draw, drawn=sampling._drawn: drawn(logits, draw[0] if isinstance(draw, list) else draw),
        Cell("no cache", "right padding", "whole", "MHA, learned", "seeded")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_table_notices(fault):
    owner, name, wrong, cell = FAULTS[fault]
    check(cell)
    with mock.patch.object(owner, name, wrong), pytest.raises(AssertionError):
        check(cell)


# --- S21-A2: every column, not the last alone -----------------------------------------------------------------------------------

@product_of("kind, chunk, name, window", [kind for kind in CACHES if kind != "no cache"], [1, SLACK + 1, SLACK + 2],
            [f"GQA, {position}" for position in POSITIONS], [None, 4])
def test_s21_a2_the_full_forward_is_the_cached_one(kind, chunk, name, window):
    """Left padding, the same positions: logits of each real token, in parts with a cache, whole without one, and alone.

    A window: of the model, or, where the cache rolls, of the cache in place of the model's.
    """
    windowed, prompts, parts = model_of(name, window=window), [PROMPTS[1] + [8, 0, 2], PROMPTS[0], PROMPTS[3]], []
    ids, valid = map(torch.tensor, batch.padded(prompts, "left"))
    rolls = kind == "rolling" and window is not None
    reader, cache = (model_of(name), RollingKVCache(LAYERS, window, slack=SLACK)) if rolls else (windowed, CACHES[kind]())
    with torch.no_grad():
        whole = host(windowed(ids, valid_tokens=valid)[0])
        for start in range(0, ids.shape[1], chunk):
            told = valid[:, :start + chunk] if start % 2 else valid[:, start:start + chunk]     # of all columns, or of the new ones
            parts.append(host(reader(ids[:, start:start + chunk], valid_tokens=told, cache=cache)[0]))
        for row, prompt in enumerate(prompts):
            one = host(windowed(torch.tensor([prompt]))[0])[0]
            for found in whole, np.concatenate(parts, axis=1):
                assert np.abs(found[row, -len(prompt):] - one).max() <= 1e-9
    assert cache.lengths.tolist() == list(map(len, prompts)) and cache.length == ids.shape[1]


# --- a rolling cache that is shorter than the text ------------------------------------------------------------------------------

WINDOW, LONG = 4, 20
LONG_PROMPTS = (PROMPTS[0], [(7 * i + i * i) % V_VOCAB for i in range(T_MAX + 5)], *PROMPTS[2:])
ENDLESS = "GQA, RoPE", "GQA, ALiBi", "Decoder, GQA"
ROLLING = "GQA, learned", "GQA, sinusoidal", "MiniGPT", *ENDLESS


def rolling_mask(T, sinks):
    """bool [T, T], by a loop over queries and keys."""
    return np.array([[key <= query and (query - key < WINDOW or key < sinks) for key in range(T)] for query in range(T)])


def attending(change):
    """Within it, F.attention(q, k, v) is what change(attention, q, k, v, options) makes of it."""
    return mock.patch.object(F, "attention", lambda q, k, v, attention=F.attention, **options: change(attention, q, k, v, options))


@functools.cache
def rolling_reference(name, sinks, number, prompts=PROMPTS, new=NEW):
    """Without a cache, by a mask; the model is the one that the cache serves, but for a context that is long enough."""
    model = model_of(name, **({"max_seq_len": T_MAX + 5 + LONG} if name in ENDLESS else {}))

    def masked(attention, q, k, v, options):
        return attention(q, k, v, **{**options, "allowed": torch.tensor(rolling_mask(q.shape[2], sinks))})
    with attending(masked):
        return alone(lambda ids: model(ids)[0], prompts[number], new)


@pytest.mark.parametrize("name", ROLLING)
def test_the_mask_of_a_rolling_cache_without_sinks_is_a_window(name):
    for number in ALL:
        (ids, logits), (expected, wanted) = reference(name, "greedy", number, WINDOW), rolling_reference(name, 0, number)
        assert ids == expected and np.abs(logits - wanted).max() <= 1e-9


@product_of("chunk, rows, sinks, name", [1, SLACK + 1, SLACK + 2, WINDOW + SLACK + 1], BATCHES, [0, 2], ROLLING)
def test_a_rolling_cache_is_a_window(chunk, rows, sinks, name):
    """Chunks around what is written in place (slack + 1), and one that is longer than the ring."""
    rows = BATCHES[rows]
    found = written(model_of(name), RollingKVCache(LAYERS, WINDOW, sinks, SLACK), rows, prefill_chunk=chunk)
    assert_one_text(found, lambda number: rolling_reference(name, sinks, number), rows)


@functools.cache
def long_reference(name, sinks, number):
    return rolling_reference.__wrapped__(name, sinks, number, LONG_PROMPTS, LONG)


@product_of("rows, sizes, name", BATCHES, [(0, SLACK, None), (2, 0, 1), (1, 5, T_MAX)], ENDLESS)
def test_a_rolling_cache_reads_on_beyond_the_context(rows, sizes, name):
    """Prompts and texts longer than max_seq_len and many windows long; memory does not grow.    sizes: sinks, slack, chunk"""
    sinks, slack, chunk = sizes
    numbers, lengths, options = BATCHES[rows]
    rows = Rows(numbers, tuple(LONG * new // NEW for new in lengths), options)
    cache = RollingKVCache(LAYERS, WINDOW, sinks, slack)
    found = written(model_of(name), cache, rows, prompts=LONG_PROMPTS, prefill_chunk=chunk)
    assert_one_text(found, lambda number: long_reference(name, sinks, number), rows)
    assert all(field.shape[2] == sinks + WINDOW + slack for layer in cache.layers for field in layer.fields)


@pytest.mark.parametrize("name", [name for name in ROLLING if name not in ENDLESS])
def test_a_table_of_positions_ends_all_the_same(name):
    (row, _), = written(model_of(name), RollingKVCache(LAYERS, WINDOW, slack=SLACK), Rows((1,), (LONG,), {})).values()
    assert row.finish_reason == "context" and len(row.ids) == T_MAX + 1


# --- a quantised cache --------------------------------------------------------------------------------------------------------------

CODES = {"8 bits": (8, None), "4 bits": (4, None), "8 bits, in pairs": (8, 2), "4 bits, in pairs": (4, 2)}


def rounded(x, bits, group):
    """(x to the nearest of the numbers that can be stored, by trying them all; the distance s of these).    x: [..., Dh]"""
    levels = np.arange(-(2 ** (bits - 1) - 1), 2 ** (bits - 1), dtype=np.float32)
    parts = x.astype(np.float32).reshape(*x.shape[:-1], -1, group or x.shape[-1])
    s = np.abs(parts).max(axis=-1, keepdims=True) / levels[-1]
    nearest = levels[np.abs(parts[..., None] - s[..., None] * levels).argmin(axis=-1)]
    return (s * nearest).reshape(x.shape).astype(x.dtype), np.broadcast_to(s, parts.shape).reshape(x.shape)


@functools.cache
def rounded_reference(name, code, number):
    """Without a cache: each pass rounds every key and value, and attends to them."""
    model = model_of(name)

    def to_rounded(attention, q, k, v, options):
        return attention(q, *(torch.tensor(rounded(host(x), *CODES[code])[0]) for x in (k, v)), **options)
    with attending(to_rounded):
        return alone(lambda ids: model(ids)[0], PROMPTS[number], NEW)


@product_of("name, rows, reading, code", ["GQA, RoPE", "MiniGPT"], BATCHES, READINGS, CODES)
def test_a_quantised_cache_is_a_model_of_rounded_keys(name, rows, reading, code):
    rows = BATCHES[rows]
    found = written(model_of(name), QuantizedKVCache(LAYERS, T_MAX, *CODES[code]), rows, prefill_chunk=READINGS[reading])
    assert_one_text(found, lambda number: rounded_reference(name, code, number), rows)
    for number in rows.numbers:                                 # the rounding is felt, but for a text of one token, whose weight is 1
        assert np.abs(found[number][1][0] - reference(name, "greedy", number)[1][0]).max() > 1e-6


@pytest.mark.parametrize("code", CODES)
def test_every_number_is_within_half_a_step(code):
    """In the pass that brings it, and in every later one."""
    k, v = (torch.randn(2, 2, 5, DH, dtype=torch.float64) * 10 ** torch.randn(2, 2, 5, 1, dtype=torch.float64) for _ in range(2))
    layer = QuantizedKVCache(1, 8, *CODES[code]).layer(0)
    first, later = layer.update(k[:, :, :3], v[:, :, :3]), layer.update(k[:, :, 3:], v[:, :, 3:])
    for found, x in zip((*first, *later), (k[:, :, :3], v[:, :, :3], k, v)):
        nearest, s = rounded(host(x), *CODES[code])
        assert found.dtype is torch.float64 and np.array_equal(host(found), nearest)
        assert (np.abs(host(found) - host(x)) <= s / 2 * (1 + 1e-5)).all() and (host(found) != host(x)).any()


# --- the encoder–decoder ------------------------------------------------------------------------------------------------------------

SOURCES = ([4, 1, 7], [2, 2, 9, 3, 0, 6], [5], [8, 3], [1, 6, 6, 0])
BOS, PREFIXES = 1, ([1], [1, 4, 2, 9, 5], [1, 3], [1, 8, 8, 6], [1])           # what is written already, of unequal lengths


@functools.cache
def translator():
    model = EncoderDecoder(11, V_VOCAB, 8, T_MAX, C, H, 2 * C, LAYERS, dropout=0.0)
    enlarge(model)
    return model.double().eval()


@functools.cache
def translation(number, prefix, new=NEW):
    """Alone: one source without padding, all read anew for each token."""
    model, source = translator(), torch.tensor([SOURCES[number]])
    return alone(lambda ids: model(source, ids)[0], prefix, new)


def padded_sources(side):
    return tuple(map(torch.tensor, batch.padded(SOURCES, side)))


ENDS = 2, 3                                                     # ids that some of these translations come to, at different places
KINDS = {**CACHES, "quantised": lambda: QuantizedKVCache(LAYERS, T_MAX)}


@pytest.mark.parametrize("kind, reading", [cell for cell in itertools.product(KINDS, READINGS) if cell not in EXCLUDED])
@pytest.mark.parametrize("rows, side", [("left padding", "right"), ("right padding", "left"), ("continuous", "left")])
def test_one_translation(rows, side, kind, reading):
    """Rows of a batch, each with its source, are what they are alone; 8 bits move the first logits by less than 0.1."""
    rows = BATCHES[rows]
    with torch.no_grad():
        source = translator().encode(*padded_sources(side))
    found = written(translator(), KINDS[kind](), rows, prompts=PREFIXES, source=source, prefill_chunk=READINGS[reading])
    if kind != "quantised":
        assert_one_text(found, lambda i: translation(i, tuple(PREFIXES[i])), rows)
    else:
        for i in rows.numbers:
            assert 0 < np.abs(found[i][1][0] - translation(i, tuple(PREFIXES[i]))[1][0]).max() < 0.1


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("eos", ENDS)
def test_greedy_decode_is_each_source_alone(eos, kind):
    """Up to its <eos>, which then fills its row until the last row has ended."""
    def decoded(ids, valid=None):
        return greedy_decode(translator(), ids, BOS, eos, 9, valid, use_cache=kind != "no cache", cache=CACHES[kind]()).tolist()
    texts = [translation(i, (BOS,), 9)[0] for i in range(len(SOURCES))]
    texts = [text[:text.index(eos) + 1] if eos in text else text for text in texts]
    n = max(map(len, texts))
    assert decoded(*padded_sources("right")) == [text + [eos] * (n - len(text)) for text in texts]
    assert [decoded(torch.tensor([source])) for source in SOURCES] == [[text] for text in texts]


def test_the_sources_tell_their_rows_apart():
    """Else a row that looks at its neighbour's source would write the same; and some rows end, others do not."""
    texts = [translation(i, (BOS,), 9) for i in range(len(SOURCES))]
    assert all(np.abs(one[1][0] - other[1][0]).max() > 1e-3 for one, other in itertools.combinations(texts, 2))
    assert all(0 < sum(eos in ids for ids, _ in texts) < len(texts) for eos in ENDS)
