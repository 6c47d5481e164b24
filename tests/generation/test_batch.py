"""The continuous batch: whatever joins, leaves, waits, slides or is interrupted, each row's text is the one that it writes alone."""
import functools
import gc
import re
import tracemalloc

import numpy as np
import pytest
from generation.tiny import LAYERS, V_VOCAB, model_of

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.data import ByteTokenizer, CharTokenizer
from tinygrad_tf.generation import (
    Batch,
    ConcatKVCache,
    KVCache,
    PagedKVCache,
    RollingKVCache,
    Sampler,
    complete,
    generate,
)
from tinygrad_tf.generation import text as text_module
from tinygrad_tf.generation.cache import LayerCache
from tinygrad_tf.models import EncoderDecoder, MiniGPT
from tinygrad_tf.nn import functional as F

CONTEXT, MOST = 48, 6
WARM = Sampler(temperature=1.3, top_k=9, frequency_penalty=0.2)
CACHES = {
    "preallocated": lambda: KVCache(LAYERS, CONTEXT),
    "paged": lambda: PagedKVCache(LAYERS, 24, block_size=4),        # two of the longest texts, and no third
    "concatenating": lambda: ConcatKVCache(LAYERS),
    "rolling": lambda: RollingKVCache(LAYERS, CONTEXT),
    "short rolling": lambda: RollingKVCache(LAYERS, 10, sinks=2, slack=3),
}
all_caches = pytest.mark.parametrize("kind", CACHES)
LETTERS = CharTokenizer("abcdefghi")                                # with the four special tokens: thirteen ids
NEVER = 10**6


def model(name="Decoder, GQA", context=CONTEXT):
    return model_of(name, max_seq_len=context)


def prompts(n, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V_VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(n)]


def filled(batch, texts, lengths=None, sampler=WARM, **options):
    """The rows of these prompts, with a seed and a length each."""
    return [batch.add(text, MOST if lengths is None else lengths[i], sampler=sampler, seed=i, **options) for i, text in enumerate(texts)]


def alone(i, kind="preallocated", name="Decoder, GQA", n=MOST, **which):
    """What row i of `prompts` writes when nobody else is there; of the caches a short rolling one alone changes it."""
    return all_alone(i, kind == "short rolling", name, **which)[:n]


@functools.cache
def all_alone(i, rolling, name, number=200, longest=30):
    cache = CACHES["short rolling"]() if rolling else None
    return complete(model(name), [prompts(number, longest=longest)[i]], MOST, cache=cache, sampler=WARM, seed=i)[0].new_ids


# --- two hundred prompts ----------------------------------------------------------------------------------------------------

@all_caches
def test_two_hundred_prompts_write_what_each_writes_alone(kind):
    """Eight at a time, of 1 to 30 tokens; where blocks are scarce, rows wait, and the newest are sent back. Of a short ring, eighty."""
    number = 80 if kind == "short rolling" else 200
    texts, lengths = prompts(200)[:number], np.random.default_rng(1).integers(1, MOST + 1, number).tolist()
    batch = Batch(model(), CACHES[kind](), max_rows=8)
    rows, in_a_step, bytes_held = filled(batch, texts, lengths), [], []
    while batch.live or batch.waiting:
        in_a_step.append(len(batch.step()))
        bytes_held.append(batch.cache.nbytes)
        assert batch.cache.lengths is None or len(batch.cache.lengths) == len(batch.live) <= 8
    for i, row in enumerate(rows):
        assert (row.number, row.finish_reason, row.prompt) == (i, "length", texts[i])
        assert row.new_ids == alone(i, kind)[:lengths[i]]
    assert max(in_a_step) <= 8 and sum(in_a_step) == sum(lengths)
    if kind != "paged":                                             # nothing is read twice, and no place is empty for long
        assert batch.speed.prefill_tokens == sum(map(len, texts)) and batch.speed.decode_tokens == sum(lengths) - number
        assert max(in_a_step) == 8 and len(in_a_step) < sum(lengths) / 8 + 3 * MOST
    else:
        assert batch.speed.prefill_tokens > sum(map(len, texts)) and batch.cache.blocks_in_use == 0
    if kind != "concatenating":
        assert len(set(bytes_held[20:])) == 1


@all_caches
def test_memory_stays_flat(kind):
    """The last fifteen rows need no more than those before, with Python's collector of cycles off: what rows leave is freed at once.

    A little, 150 kB, is for what Python keeps of small objects. Fifteen rows that were not freed would be 1 MB of preallocated places.
    """
    cache = KVCache(LAYERS, 256) if kind == "preallocated" else CACHES[kind]()
    batch = Batch(model(), cache, max_rows=5)
    rows, peaks, n = filled(batch, prompts(15) * 3, [4] * 45), [], 0
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(3):
            tracemalloc.reset_peak()
            n += 15
            while sum(row.finish_reason is not None for row in rows[:n]) < n:
                batch.step()
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
        gc.enable()
    assert peaks[2] < 1.1 * peaks[1] + 150_000


@pytest.mark.parametrize("name", ["MiniGPT", "GQA, RoPE", "MQA, ALiBi"])
@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_neighbours_do_not_matter(name, max_rows):
    """Other models, other company, another order: the seed and the prompt alone decide."""
    texts = prompts(20, longest=9)
    order = np.random.default_rng(max_rows).permutation(20).tolist()
    batch = Batch(model(name), max_rows=max_rows)
    rows = {i: batch.add(texts[i], 6, sampler=WARM, seed=i) for i in order[:15]}
    batch.step()
    rows |= {i: batch.add(texts[i], 6, sampler=WARM, seed=i) for i in order[15:]}           # while others write
    batch.run()
    assert {i: row.new_ids for i, row in rows.items()} == {i: alone(i, name=name, n=6, number=20, longest=9) for i in range(20)}
    assert len({tuple(row.new_ids) for row in rows.values()}) > 12


def test_greedy_rows_need_no_seed():
    texts = prompts(12)
    together = complete(model(), texts, 9, max_rows=5)
    assert [row.new_ids for row in together] == [complete(model(), [text], 9)[0].new_ids for text in texts]


def test_rows_with_samplers_of_their_own():
    """Greedy ones and others, in one step."""
    samplers = [Sampler(0), Sampler(0.7), WARM, Sampler(1.0, top_p=0.8), Sampler(2.0, min_p=0.05)]
    texts, batch = prompts(10), Batch(model(), max_rows=4)
    rows = [batch.add(text, 8, sampler=samplers[i % 5], seed=i) for i, text in enumerate(texts)]
    batch.run()
    for i, row in enumerate(rows):
        assert row.new_ids == complete(model(), [texts[i]], 8, sampler=samplers[i % 5], seed=i)[0].new_ids


@pytest.mark.parametrize("chunk", [1, 5, 11])
@pytest.mark.parametrize("padding", ["left", "right"])
@all_caches
def test_chunks_and_sides_change_nothing(kind, padding, chunk):
    """Nor does reading all anew for each token."""
    texts = prompts(200)[:9]
    batch = Batch(model(), CACHES[kind](), max_rows=4, prefill_chunk=chunk, padding=padding, logprobs=True)
    rows = filled(batch, texts, [5] * 9)
    batch.run()
    assert [row.new_ids for row in rows] == [alone(i, kind)[:5] for i in range(9)]
    if kind == "preallocated":
        uncached = Batch(model(), use_cache=False, max_rows=4, prefill_chunk=chunk, padding=padding, logprobs=True)
        others = filled(uncached, texts, [5] * 9)
        uncached.run()
        assert [row.new_ids for row in others] == [row.new_ids for row in rows]
        assert np.allclose([row.logprobs for row in others], [row.logprobs for row in rows], rtol=0, atol=1e-9)


@all_caches
def test_log_probabilities_are_those_of_the_model(kind):
    """ln softmax of the logits of one pass over the whole text, before temperature and the like."""
    gpt, texts = model(), [text[:8] for text in prompts(9)]
    batch = Batch(gpt, CACHES[kind](), max_rows=4, logprobs=True)
    rows = filled(batch, texts, [3] * 9 if kind == "short rolling" else None)
    batch.run()
    for row in rows:
        if kind == "short rolling" and len(row.ids) > 10:
            continue                                                # the whole text does not fit into its window
        logits = gpt(torch.tensor([row.ids]))[0][0].detach()
        expected = F.log_softmax(logits, dim=-1)[len(row.prompt) - 1:-1].tolist()
        assert np.allclose(row.logprobs, [lp[token] for lp, token in zip(expected, row.new_ids)], rtol=0, atol=1e-9)
        assert len(row.logprobs) == len(row.new_ids) and max(row.logprobs) <= 0
    assert Batch(gpt).add([1], 1).logprobs == []


# --- how rows end -----------------------------------------------------------------------------------------------------------

def test_rows_end_for_reasons_of_their_own():
    """In one batch, at different times: each as it would alone."""
    gpt, batch = model("MiniGPT", 16), Batch(model("MiniGPT", 16), tokenizer=LETTERS, max_rows=3)
    texts = [LETTERS.decode([4 + i % 9 for i in range(k, k + 4)]) for k in range(8)]
    plain = [complete(gpt, [text], NEVER, tokenizer=LETTERS, sampler=Sampler(3.0), seed=i)[0] for i, text in enumerate(texts)]
    options = [({"max_new_tokens": i + 1}, {"eos_id": row.new_ids[5]}, {"stop": row.text[3:5]}, {})[i % 4]
               for i, row in enumerate(plain)]
    rows = [batch.add(text, **{"max_new_tokens": NEVER, "sampler": Sampler(3.0), "seed": i, **option})
            for i, (text, option) in enumerate(zip(texts, options))]
    batch.run()
    for i, (row, other) in enumerate(zip(rows, plain)):
        assert row.finish_reason == ["length", "eos", "stop", "context"][i % 4]
        assert row.new_ids == other.new_ids[:len(row.new_ids)]
        if i % 4 == 0:
            assert len(row.new_ids) == i + 1 and row.text == LETTERS.decode(row.new_ids)
        elif i % 4 == 1:
            end = other.new_ids.index(options[i]["eos_id"])
            assert row.new_ids == other.new_ids[:end + 1] and row.text == LETTERS.decode(row.new_ids[:-1])
        elif i % 4 == 2:
            assert row.text == other.text[:other.text.index(options[i]["stop"])]
        else:
            assert len(row.ids) == 17 and row.text == other.text        # the sixteenth position still gives a token


@pytest.mark.parametrize("kind, context", [("preallocated", CONTEXT), *((kind, 16) for kind in ("no cache", "paged", "concatenating",
                                                                                                 "rolling"))])
@pytest.mark.parametrize("prompt", [1, 5, 15, 16])
def test_the_end_of_the_context(kind, context, prompt):
    """"stop": as many tokens as there are positions, and one more, which is not read. A cache may end before the model."""
    name = "MiniGPT"                                                # a table of positions
    caches = {"no cache": None, "preallocated": KVCache(LAYERS, 16)}
    options = {"cache": caches[kind] if kind in caches else CACHES[kind](), "use_cache": kind != "no cache"}
    row, other = complete(model(name, context), [[2] * prompt, [3]], NEVER, **options)
    assert (len(row.ids), row.finish_reason) == (len(other.ids), other.finish_reason) == (17, "context")
    exact, = complete(model(name, context), [[2] * prompt], 17 - prompt, **options)
    assert exact.ids == row.ids and exact.finish_reason == "length"


@pytest.mark.parametrize("kind", ["no cache", "preallocated", "paged", "concatenating", "rolling"])
@pytest.mark.parametrize("name", ["MiniGPT", "GQA, RoPE"])
def test_sliding_is_the_stream_of_the_single_prompt(kind, name):
    """Rows come to the end of the context at different times, some begin beyond it; each slides as it would alone."""
    gpt, texts = model(name, 16), BESIDE_THE_CONTEXT
    if kind == "rolling" and name != "MiniGPT":
        pytest.skip("has no limit, and so does not slide")
    options = {"use_cache": False} if kind == "no cache" else {"cache": CACHES[kind]()}
    rows = complete(gpt, texts, 20, sampler=Sampler(1.5), seed=0, at_limit="slide", max_rows=4, **options)
    for i, row in enumerate(rows):
        assert row.ids == slid(name, i) and row.finish_reason == "length"


BESIDE_THE_CONTEXT = prompts(4, seed=3, longest=24) + [[1] * 16, [2] * 17]


@functools.cache
def slid(name, i):
    prompt, generator = torch.tensor([BESIDE_THE_CONTEXT[i]]), torch.Generator().manual_seed(i)
    return generate(model(name, 16), prompt, 20, temperature=1.5, generator=generator).tolist()[0]


def test_a_rolling_cache_has_no_limit():
    """Far beyond the context, at either setting; and its memory is that of the first step."""
    gpt, texts = model("GQA, RoPE", 16), prompts(4, longest=40)
    found = []
    for at_limit, max_rows in ("stop", 3), ("slide", 1):
        batch = Batch(gpt, CACHES["short rolling"](), max_rows=max_rows, at_limit=at_limit)
        rows = filled(batch, texts, [30] * 4)
        batch.step()
        before = batch.cache.nbytes
        batch.run()
        assert batch.cache.nbytes == before and {row.finish_reason for row in rows} == {"length"}
        found.append([row.new_ids for row in rows])
    assert found[0] == found[1]


@pytest.mark.parametrize("wrap", [lambda ids: ids, tuple, set, np.array, torch.tensor, lambda ids: [np.int32(i) for i in ids]])
def test_several_eos(wrap):
    """The first of them that comes ends the row; it stays in the ids and gives no text."""
    plain, = complete(model(), [[1, 2, 3]], 10, tokenizer=LETTERS, sampler=Sampler(2.0), seed=4)
    chosen = [plain.new_ids[6], plain.new_ids[3]]
    first = min(plain.new_ids.index(i) for i in chosen)
    row, = complete(model(), [[1, 2, 3]], 10, tokenizer=LETTERS, sampler=Sampler(2.0), seed=4, eos_id=wrap(chosen))
    assert row.new_ids == plain.new_ids[:first + 1] and row.finish_reason == "eos"
    assert row.text == LETTERS.decode(row.new_ids[:-1])
    one, = complete(model(), [[1, 2, 3]], 10, sampler=Sampler(2.0), seed=4, eos_id=plain.new_ids[first])
    assert one.new_ids == row.new_ids and one.text is None


def test_no_new_tokens():
    """The row has ended when it is added; the model is not asked."""
    gpt = model()
    batch = Batch(gpt, tokenizer=LETTERS, logprobs=True)
    row = batch.add("abc", 0, stop="x")
    assert (row.finish_reason, row.text, row.piece, row.new_ids, row.logprobs) == ("length", "", "", [], [])
    batch.run()
    assert list(batch) == [] and batch.step() == [] and batch.speed.prefill_tokens == 0
    rows = complete(gpt, ["a", "bc"], 0, tokenizer=LETTERS, on_token=lambda row: 1 / 0)
    assert [row.text for row in rows] == ["", ""]
    assert complete(gpt, [], 5) == []


@pytest.mark.parametrize("kind", ["preallocated", "paged", "rolling"])
def test_a_row_that_is_removed(kind):
    """While it waits or writes; it keeps what it has, and the others do not notice."""
    texts, batch = prompts(200)[:7], Batch(model(), CACHES[kind](), max_rows=4)
    rows = filled(batch, texts)
    for _ in range(3):
        batch.step()
    for i in 1, 6, 1:
        batch.remove(rows[i])
    kept = len(rows[1].new_ids)
    assert kept > 0 and batch.cache.lengths.tolist() == [len(row.ids) - 1 for row in batch.live]
    batch.run()
    batch.remove(rows[0])
    batch.remove(Batch(model()).add([1], 1))
    for i, row in enumerate(rows):
        expected = alone(i, kind)
        assert row.new_ids == expected[:{1: kept, 6: 0}.get(i, MOST)]
        assert row.finish_reason == (None if i in (1, 6) else "length")
    assert batch.step() == []


# --- text ---------------------------------------------------------------------------------------------------------------------

class Scripted(nn.Module):
    """Writes script k after a prompt that begins with the id k, whatever comes between; without a cache."""

    def __init__(self, scripts, vocab_size):
        super().__init__()
        self.scripts, self.vocab_size, self.max_seq_len, self.blocks = scripts, vocab_size, NEVER, nn.ModuleList([])
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, token_ids, valid_tokens=None):
        valid = np.ones(token_ids.shape, bool) if valid_tokens is None else np.array(valid_tokens.tolist())
        logits = np.zeros((*token_ids.shape, self.vocab_size))
        for b, row in enumerate(np.array(token_ids.tolist())):
            script = self.scripts[row[valid[b]][0]]
            for t, n in enumerate(valid[b].cumsum()):
                logits[b, t, script[min(max(n - 1, 0), len(script) - 1)]] = 9.0
        return torch.tensor(logits), None


def scripted(tokenizer, texts, **options):
    """(batch, the ids of each text): row k, added as [k], writes text k."""
    ids = [tokenizer.encode(text).tolist() for text in texts]
    return Batch(Scripted(ids, tokenizer.vocab_size), tokenizer=tokenizer, use_cache=False, **options), ids


EMOJI = "👩🏽\u200d🚀"
TEXTS = ["abcabcabd and on", "é🙂🙂é|ende", f"{EMOJI}{EMOJI} fin", "aaaaab", "no end", "🙂"]
STOPS = {"none": (), "in the middle": "abd", "emoji": "🙂é", "half of an emoji": "\u200d🚀", "of two, the first": ["|en", "d"],
         "overlapping": "aaab", "the first character": ["a", "é", "👩"], "long": "abcabcabd and on and on"}


def cut(text, stops):
    """(the text before the stop string that ends first, of those the one that begins first; whether there is one)"""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if end >= len(stop) and text[end - len(stop):end] == stop]
        if begins:
            return text[:min(begins)], True
    return text, False


@pytest.mark.parametrize("make", [lambda: ByteTokenizer(), lambda: CharTokenizer.from_text("".join(TEXTS))], ids=["bytes", "characters"])
@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("way", ["iterator", "callback", "step"])
def test_pieces_make_the_text(make, name, way):
    """Whole characters, nothing of a stop string, and together the text of the row, which ends before the stop string."""
    tokenizer, stop = make(), STOPS[name]
    stops = [stop] if isinstance(stop, str) else stop
    batch, ids = scripted(tokenizer, TEXTS, max_rows=4)
    pieces = {k: [] for k in range(len(TEXTS))}
    if way == "callback":
        rows = complete(batch.model, [[k] for k in pieces], max(map(len, ids)), tokenizer=tokenizer, stop=stop, use_cache=False, max_rows=4,
                        on_token=lambda row: pieces[row.number].append(row.piece))
    else:
        rows = [batch.add([k], max(map(len, ids)), stop=stop) for k in pieces]
        for row in batch if way == "iterator" else (row for _ in range(200) for row in batch.step()):
            pieces[row.number].append(row.piece)
    longest = max(map(len, ids))
    for k, row in enumerate(rows):
        written = tokenizer.decode(ids[k] + ids[k][-1:] * (longest - len(ids[k])))
        text, stopped = cut(written, stops)
        assert "".join(pieces[k]) == row.text == text
        assert row.finish_reason == ("stop" if stopped else "length") and len(pieces[k]) == len(row.new_ids)
        assert all("\ufffd" not in piece for piece in pieces[k]) or written.endswith("\ufffd")
        if stopped:                                                 # no token more than the stop string needs
            assert any(one in tokenizer.decode(row.new_ids) for one in stops)
            assert not any(one in tokenizer.decode(row.new_ids[:-1]) for one in stops)


def test_half_a_character_at_the_end():
    """The last bytes are no character: one U+FFFD, when the row has ended."""
    batch, ids = scripted(ByteTokenizer(), ["a🙂"])
    row, pieces = batch.add([0], 4), []
    for _ in batch:
        pieces.append(row.piece)
    assert pieces == ["a", "", "", "\ufffd"] and row.text == "a\ufffd"


def test_an_eos_ends_the_text_before_it():
    """Held back until then: what might have begun a stop string."""
    tokenizer = ByteTokenizer()
    batch, ids = scripted(tokenizer, ["stop?"])
    ids[0][4] = tokenizer.eos_id
    row, pieces = batch.add([0], 9, eos_id=tokenizer.eos_id, stop=["stop!", "stop?"]), []
    for _ in batch:
        pieces.append(row.piece)
    assert pieces == ["", "", "", "", "stop"] and (row.text, row.finish_reason, len(row.new_ids)) == ("stop", "eos", 5)


# --- interrupted --------------------------------------------------------------------------------------------------------------

class Interrupted:
    """In place of a function: Ctrl-C at some of its calls, before or after they have done their work."""

    def __init__(self, monkeypatch, owner, name, calls, after=False):
        self.count, function = 0, getattr(owner, name)

        def call(*args, **options):
            self.count += 1
            if self.count in calls and not after:
                raise KeyboardInterrupt
            found = function(*args, **options)
            if self.count in calls:
                raise KeyboardInterrupt
            return found
        monkeypatch.setattr(owner, name, call)


WHERE = {
    "the model": lambda gpt: (gpt, "forward", (1, 2, 5, 6, 9, 13, 14)),
    "its last layer, at the end": lambda gpt: (gpt.blocks[-1].ffn, "forward", (1, 3, 4, 8, 12), True),
    "a cache": lambda gpt: (LayerCache, "extend", (2, 3, 12, 27, 30, 41)),
    "a sampler": lambda gpt: (Sampler, "__call__", (1, 2, 7, 20)),
    "a sampler, at the end": lambda gpt: (Sampler, "__call__", (1, 3, 8), True),
    "a draw": lambda gpt: (torch.Generator, "multinomial", (1, 2, 6, 30, 31)),
    "a draw, at the end": lambda gpt: (torch.Generator, "multinomial", (1, 3, 7, 29, 30), True),
    "the text": lambda gpt: (text_module.TextStream, "push", range(2, 200, 6)),
    "a row": lambda gpt: (Batch, "_give", range(1, 200, 7)),
    "rows that leave": lambda gpt: (Batch, "_keep", range(2, 200, 3)),
}


@pytest.mark.parametrize("kind", ["preallocated", "paged", "short rolling", "no cache"])
@pytest.mark.parametrize("where", WHERE)
def test_an_interrupted_batch_goes_on(kind, where, monkeypatch):
    """Wherever Ctrl-C comes: ids, log-probabilities and pieces are those of a run without it, though the frames of the errors live on."""
    if kind == "no cache" and where == "a cache":
        return
    batch, rows, pieces, errors = undisturbed(kind)
    assert errors == []
    with monkeypatch.context() as patch:
        Interrupted(patch, *WHERE[where](model("MiniGPT", 24)))
        other_batch, others, other_pieces, errors = disturbed(kind)
    assert len(errors) >= 2
    for one, other in zip(rows, others):
        assert (one.new_ids, one.text, one.finish_reason) == (other.new_ids, other.text, other.finish_reason)
        assert np.allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-9) and len(one.logprobs) == len(other.logprobs)
    assert other_pieces == pieces and {row.finish_reason for row in rows} == {"length", "stop"}
    if kind == "paged":
        assert other_batch.cache.blocks_in_use == batch.cache.blocks_in_use == 0


def disturbed(kind):
    """A batch that goes on after each Ctrl-C: (it, its rows, the pieces of each, the errors)"""
    options = {"use_cache": False} if kind == "no cache" else {"cache": CACHES[kind]()}
    batch = Batch(model("MiniGPT", 24), tokenizer=LETTERS, max_rows=4, logprobs=True, at_limit="slide", prefill_chunk=7, **options)
    texts = [LETTERS.decode([4 + i % 9 for i in text]) for text in prompts(7, seed=2, longest=24)]
    rows, errors = filled(batch, texts, [3 + 2 * i for i in range(7)], stop=["de", "ei", "bcd"]), []
    pieces = {row: [] for row in rows}
    for _ in range(100):
        try:
            for row in batch:
                pieces[row].append(row.piece)
            break
        except KeyboardInterrupt as error:
            errors.append(error)
    return batch, rows, list(pieces.values()), errors


undisturbed = functools.cache(disturbed)


@pytest.mark.parametrize("where", ["the model", "a cache", "the text", "a row"])
def test_an_interrupted_batch_with_one_generator_for_all_rows(where, monkeypatch):
    """What was drawn is not drawn again, and no draw is skipped."""
    gpt, texts = model("MiniGPT", 48), prompts(4, seed=2, longest=9)

    def run():
        batch, generator, errors = Batch(gpt, tokenizer=LETTERS), torch.Generator().manual_seed(5), 0
        rows = [batch.add(text, 6 + i, sampler=WARM, generator=generator) for i, text in enumerate(texts)]
        while any(row.finish_reason is None for row in rows):
            try:
                batch.run()
            except KeyboardInterrupt:
                errors += 1
        return [row.new_ids for row in rows], errors
    expected, _ = run()
    Interrupted(monkeypatch, *WHERE[where](gpt))
    found, errors = run()
    assert found == expected and errors >= 2


def test_modes_are_restored_after_an_interruption(monkeypatch):
    gpt = model_of("MiniGPT", max_seq_len=48)
    gpt.train()
    try:
        batch = Batch(gpt)
        batch.add([1], 3)
        with monkeypatch.context() as patch:
            patch.setattr(gpt.blocks[-1].ffn, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                batch.step()
        assert all(module.training for module in gpt.modules()) and torch.is_grad_enabled()
        batch.run()
        assert all(module.training for module in gpt.modules())
    finally:
        gpt.eval()


def test_a_tokenizer_that_does_not_know_a_token():
    """The error names it; the row has not got it, nor lost it, and when the row is removed the others go on."""
    small, texts = CharTokenizer("abcdefg"), prompts(200)[:5]
    batch = Batch(model(), tokenizer=small)
    rows = filled(batch, texts)
    failed = None
    for _ in range(200):
        try:
            batch.run()
            break
        except IndexError:
            stuck = next(row for row in rows if row in batch.waiting and len(row.new_ids) < MOST
                         and alone(row.number)[len(row.new_ids)] >= small.vocab_size
                         and row is not failed)
            failed = stuck
            batch.remove(stuck)
    assert failed is not None and not (batch.live or batch.waiting)
    for row in rows:
        expected = alone(row.number)
        known = next((i for i, token in enumerate(expected) if token >= small.vocab_size), MOST)
        assert row.new_ids == expected[:known] and row.text == small.decode(expected[:known])
        assert row.finish_reason == ("length" if known == MOST else None)


# --- too little room ----------------------------------------------------------------------------------------------------------

def test_a_prompt_for_which_there_are_too_few_blocks():
    """ValueError, again and again; the row waits, and with it those behind it, until it is removed."""
    batch, texts = Batch(model(), PagedKVCache(LAYERS, 3, block_size=4)), [[1] * 5, [2] * 13, [3] * 2]
    rows = filled(batch, texts, [2] * 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="need 4 blocks, and of 3 3 are free"):
            batch.run()
        assert list(batch.waiting) == rows[1:] and batch.cache.blocks_in_use == 0 and rows[1].finish_reason is None
    batch.remove(rows[1])
    batch.run()
    for i in 0, 2:
        assert rows[i].new_ids == complete(model(), [texts[i]], 2, sampler=WARM, seed=i)[0].new_ids
    assert rows[1].new_ids == []


def test_a_row_that_grows_beyond_all_blocks():
    """It keeps what it has written, and goes on where there is more room."""
    texts = [[1] * 9, [2] * 4]
    batch = Batch(model(), PagedKVCache(LAYERS, 3, block_size=4))
    rows = filled(batch, texts, [8] * 2)
    expected = [complete(model(), [text], 8, sampler=WARM, seed=i)[0].new_ids for i, text in enumerate(texts)]
    with pytest.raises(ValueError, match="blocks") as caught:
        batch.run()
    assert rows[0].new_ids == expected[0][:4] and rows[0].finish_reason is None and batch.waiting[0] is rows[0]
    assert batch.cache.blocks_in_use == 0 and "let rows leave" in str(caught.value)
    batch.cache = PagedKVCache(LAYERS, 5, block_size=4)
    batch.run()
    assert [row.new_ids for row in rows] == expected


@pytest.mark.parametrize("num_blocks", [5, 6, 8, 11])
def test_the_oldest_rows_come_first(num_blocks):
    """With blocks for one long text and little more, rows are sent back; they end in the order in which they came, and all end."""
    batch, ended = Batch(model(), PagedKVCache(LAYERS, num_blocks, block_size=4), max_rows=8), []
    rows = filled(batch, [[i % V_VOCAB] * 4 for i in range(8)], [16] * 8)
    while batch.live or batch.waiting:
        ended += [row for row in batch.step() if row.finish_reason]
    assert ended == rows and batch.cache.blocks_in_use == 0
    assert batch.speed.prefill_tokens > 8 * 4


# --- what is refused ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("prompt, error", [
    ([], ValueError), ("", ValueError), ([[1, 2]], ValueError), ([1.5], ValueError), ([True], ValueError), ([None], ValueError),
    (["a"], ValueError), (np.zeros((1, 2), int), ValueError), (np.zeros(2), ValueError), ([V_VOCAB], IndexError), ([1, -1], IndexError),
    (5, TypeError), (np.int64(5), TypeError), (None, TypeError), (2.5, TypeError), ("abc", None), (range(3), None), ((1, 2), None),
], ids=repr)
def test_prompts(prompt, error):
    """Ids of the vocabulary, at least one; nothing is added for others."""
    batch = Batch(model(), tokenizer=LETTERS)
    if error is None:
        assert batch.add(prompt, 1).number == 0 and len(batch.waiting) == 1
        return
    with pytest.raises(error, match="Batch.add: .*(prompt|vocabulary)"):
        batch.add(prompt, 1)
    assert not batch.waiting and batch.add([1], 1).number == 0


def test_tensors_are_prompts():
    for dtype in torch.int64, torch.int32, torch.uint8:
        assert Batch(model()).add(torch.tensor([1, 2, 3]).to(dtype), 1).prompt == [1, 2, 3]
    for wrong in torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([True]), torch.zeros(0).long():
        with pytest.raises(ValueError, match="a prompt must be ids"):
            Batch(model()).add(wrong, 1)
    with pytest.raises(TypeError, match="no tokenizer"):
        Batch(model()).add("abc", 1)


def test_prompts_that_are_too_long():
    gpt = model("MiniGPT", 16)
    batch = Batch(gpt)
    with pytest.raises(ValueError, match="the prompt has 17 tokens, and the context is 16"):
        batch.add([1] * 17, 1)
    with pytest.raises(ValueError, match="the context is 9"):
        Batch(gpt, KVCache(LAYERS, 9)).add([1] * 10, 1)
    assert batch.add([1] * 16, 1).number == 0
    assert Batch(gpt, at_limit="slide").add([1] * 17, 1).window == [1] * 16
    assert Batch(model("GQA, RoPE", 16), RollingKVCache(LAYERS, 4)).add([1] * 99, 1).window == [1] * 99


@pytest.mark.parametrize("options, error, message", [
    ({"max_new_tokens": -1}, ValueError, "at least 0"), ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens"),
    ({"max_new_tokens": None}, TypeError, "max_new_tokens"), ({"max_new_tokens": True}, TypeError, "max_new_tokens"),
    ({"sampler": 0.7}, TypeError, "sampler must be"), ({"seed": 1, "generator": torch.Generator()}, ValueError, "one of the two"),
    ({"generator": 3}, TypeError, "generator"), ({"seed": "3"}, TypeError, "int"), ({"stop": ""}, ValueError, "empty"),
    ({"stop": 3}, TypeError, "stop"), ({"stop": None}, TypeError, "stop"), ({"stop": ["a", ""]}, ValueError, "empty"),
    ({"eos_id": V_VOCAB}, ValueError, "eos_id"), ({"eos_id": -1}, ValueError, "eos_id"),
    ({"eos_id": [1, V_VOCAB]}, ValueError, "eos_id"), ({"eos_id": "3"}, TypeError, "eos_id"),
    ({"eos_id": True}, TypeError, "eos_id"), ({"eos_id": 2.5}, TypeError, "eos_id"), ({"eos_id": [None]}, TypeError, "eos_id"),
], ids=lambda value: re.sub(r" at 0x\w+", "", str(value)))
def test_options_of_a_row(options, error, message):
    batch = Batch(model(), tokenizer=LETTERS)
    with pytest.raises(error, match=message):
        batch.add([1], **{"max_new_tokens": 1, **options})
    assert not batch.waiting and batch.add([1], 1).number == 0


def used():
    cache = KVCache(LAYERS, 8)
    with torch.no_grad():
        model()(torch.tensor([[1, 2]]), cache=cache)
    return cache


@pytest.mark.parametrize("options, error, message", [
    ({"max_rows": 0}, ValueError, "max_rows"), ({"max_rows": 1.0}, TypeError, "max_rows"), ({"max_rows": True}, TypeError, "max_rows"),
    ({"prefill_chunk": 0}, ValueError, "prefill_chunk"), ({"prefill_chunk": "4"}, TypeError, "prefill_chunk"),
    ({"padding": "middle"}, ValueError, "padding"), ({"at_limit": "go on"}, ValueError, "at_limit"), ({"cache": []}, TypeError, "KVCache"),
    ({"cache": KVCache}, TypeError, "KVCache"), ({"cache": KVCache(LAYERS + 1, 4)}, ValueError, "3 layers, the model 2"),
    ({"cache": used}, ValueError, "holds 2 tokens already"),
], ids=lambda value: re.sub(r" at 0x\w+", "", str(value)))
def test_options_of_a_batch(options, error, message):
    options = {name: value() if value is used else value for name, value in options.items()}
    with pytest.raises(error, match=message):
        Batch(model(), **options)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="give the batch a tokenizer"):
        Batch(model()).add([1], 1, stop="a")


def test_one_text_is_no_list_of_prompts():
    """Else its characters would be the prompts."""
    with pytest.raises(TypeError, match=r"complete: prompts must be a list of prompts, got a str: write \[prompt\]"):
        complete(model(), "abc", 3, tokenizer=LETTERS)


def test_a_row_says_how_far_it_is():
    batch = Batch(model(), tokenizer=LETTERS)
    row = batch.add("abc", 2, seed=1)
    assert repr(row) == "Row(0, 3 + 0 ids, finish_reason=None)"
    batch.run()
    assert repr(row) == "Row(0, 3 + 2 ids, finish_reason='length')" and row.ids == row.prompt + row.new_ids
    assert "prefill 3 tokens in" in str(batch.speed) and "decode 1 tokens in" in str(batch.speed)


def test_models_and_sources_that_do_not_fit_are_refused():
    """Each with what is missing: a source, an encoder–decoder, a row of the source, a model."""
    gpt = MiniGPT(9, 8, 8, 2, 16, 1)
    both = EncoderDecoder(9, 9, 8, 8, 8, 2, 16, 1)
    source = both.encode(torch.ones(2, 3, dtype=torch.int64))
    for model, options, said in ((both, {}, "pass source=model.encode"), (gpt, {"source": source}, "for an encoder–decoder"),
                                 (both, {"source": 5}, "got int with .*EncoderDecoder"), (5, {}, "`max_seq_len`, and `blocks`")):
        with pytest.raises(TypeError, match=said):
            Batch(model, **options)
    batch = Batch(both, source=source)
    rows = [batch.add([1], 2) for _ in range(2)]
    with pytest.raises(ValueError, match="source has 2 rows"):
        batch.add([1], 2)
    batch.run()
    assert [row.finish_reason for row in rows] == ["length"] * 2
