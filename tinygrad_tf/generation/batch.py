"""The one generator: rows of text that are written together, a token each in every step (guide 9.8, 12).

    prefill     a row joins: its prompt is read in one pass, or in chunks
    decode      every step reads the newest token of each row, and draws the next
    leave       a row that has ended makes room; the next one joins between two steps     (continuous batching)

A row's state is its ids and its random numbers, nothing else: what is in the cache can always be read anew. So a row may be
sent back to wait, the window may slide, a step may be interrupted, and the text stays the same.
"""
import inspect
import time
from collections import deque
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from ..arguments import type_name
from ..autograd import constant
from ..creation import tensor
from ..data.collate import padded as filled_up
from ..models.common import device_of_model
from ..models.encoder_decoder import Source
from ..nn import functional as F
from ..ops.shape import cat, stack
from ..random import Generator, chosen
from . import token_path
from .cache import Cache, KVCache, check_size
from .inference import inference, uninterrupted
from .sampling import Sampler, check_number
from .text import TextStream

LIMITS = ("stop", "slide")


@contextmanager
def as_before_an_error(generator):
    """Within it Ctrl-C waits, and after an error the generator is as it was: the numbers of a draw are used, or not yet drawn."""
    state = generator.get_state()
    try:
        with uninterrupted():
            yield
    except BaseException:
        generator.set_state(state)
        raise


class RowGenerator(Generator):
    """The random numbers of one row. Those for a token are the same however often they are drawn, until the row has it: `go_on`."""

    _drawn = None

    def exponential(self, *args, **options):
        if self._drawn is None:
            with as_before_an_error(self):
                self._drawn = super().exponential(*args, **options)
        return self._drawn

    def go_on(self):
        self._drawn = None


class Row:
    """One text: `ids`, the prompt and what was written, as far as it has got; `finish_reason` says why it ended, None while it has not.

    "length"    max_new_tokens are written
    "eos"       the newest id is one of eos_id; it stays in `ids` and gives no text
    "stop"      the text has come to a stop string, and ends before it
    "context"   the model has no position for a further token
    """

    def __init__(self, number, prompt, max_new_tokens, sampler, generator, eos_ids, stream):
        self.number, self.prompt, self.ids, self.max_new_tokens = number, prompt, list(prompt), max_new_tokens
        self.sampler, self.generator, self.eos_ids, self.stream = sampler, generator, eos_ids, stream
        self.logprobs, self.piece, self.finish_reason, self.first = [], "", None, 0

    @property
    def new_ids(self):
        return self.ids[len(self.prompt):]

    @property
    def text(self):
        """What was written, as far as it is certain."""
        return self.stream.text if self.stream else None

    @property
    def window(self):
        """The ids that the model reads, or has read."""
        return self.ids[self.first:] if self.first else self.ids

    def take(self, token):
        """The next token; sets `piece`, the text that is certain now and was not before. Of an error nothing is left."""
        ends = token in self.eos_ids
        self.piece = self.stream.push(token) if self.stream and not ends else ""
        self.ids.append(token)
        if isinstance(self.generator, RowGenerator):
            self.generator.go_on()
        if ends:
            return self.finish("eos")
        if self.stream and self.stream.stopped is not None:
            return self.finish("stop")
        if len(self.ids) - len(self.prompt) >= self.max_new_tokens:
            self.finish("length")

    def finish(self, reason):
        self.finish_reason = reason
        if self.stream:
            self.piece += self.stream.flush()

    def __repr__(self):
        return f"Row({self.number}, {len(self.prompt)} + {len(self.new_ids)} ids, finish_reason={self.finish_reason!r})"


@dataclass
class Speed:
    """How long the passes of the model took, and how many tokens they read."""
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, kind, tokens, seconds):
        setattr(self, f"{kind}_tokens", getattr(self, f"{kind}_tokens") + tokens)
        setattr(self, f"{kind}_seconds", getattr(self, f"{kind}_seconds") + seconds)

    def __str__(self):
        def rate(tokens, seconds):
            return f"{tokens:,} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):,.0f} tokens/s)"
        return (f"prefill {rate(self.prefill_tokens, self.prefill_seconds)}, "
                f"decode {rate(self.decode_tokens, self.decode_seconds)}")


class Batch:
    """Rows that share a model and a cache, up to max_rows at a time; `add` a prompt, then `step`, or iterate over tokens as they come.

        batch = Batch(model, tokenizer=tokenizer)
        rows = [batch.add(prompt, max_new_tokens=50, seed=i) for i, prompt in enumerate(prompts)]
        for row in batch:                           # a row that got a token
            print(row.number, row.piece)

    cache           any of `generation`, empty; None: a KVCache of the model's context. use_cache=False: all is read anew each step
    prefill_chunk   prompts are read so many columns at a time; a rolling cache's default is its window
    padding         "right" or "left": the side on which prompts that are read together are filled up. The text is the same
    at_limit        what happens to a row for whose next token the model has no position: "stop", or "slide": the newer half of the
                    context is read anew, from position 0. A rolling cache under RoPE has no limit
    source          of an encoder–decoder: what encode() returned, a row for each row of the batch, by number
    logprobs        whether rows note ln p of each token, by the model: before temperature and the like
    """

    def __init__(self, model, cache=None, tokenizer=None, *, use_cache=True, max_rows=16, prefill_chunk=None, padding="right",
                 at_limit="stop", source=None, logprobs=False):
        check_size("Batch", "max_rows", max_rows)
        if prefill_chunk is not None:
            check_size("Batch", "prefill_chunk", prefill_chunk)
        if padding not in ("left", "right"):
            raise ValueError(f"Batch: padding must be 'left' or 'right', got {padding!r}")
        if at_limit not in LIMITS:
            raise ValueError(f"Batch: at_limit must be 'stop' or 'slide', got {at_limit!r}")
        _check_model(model, source, use_cache)
        self.model, self.tokenizer, self.source, self.with_logprobs = model, tokenizer, source, logprobs
        self.cache = checked_cache(model, cache, max_rows) if use_cache else None
        self.max_rows, self.padding, self.at_limit = max_rows, padding, at_limit
        self.prefill_chunk = prefill_chunk or getattr(self.cache, "window", None)
        self.limit = context_limit(model, self.cache)
        self.live, self.joining, self.waiting, self.speed, self._added = [], [], deque(), Speed(), 0
        self._due, self._given = deque(), []            # of a step: who gets what, and who has got it
        self._unseen, self._interrupted = deque(), False        # rows that the iterator is still to give out

    def add(self, prompt, max_new_tokens, *, sampler=None, generator=None, seed=None, eos_id=None, stop=()):
        """A `Row` that joins at the next step with room: prompt is a str, for which the batch has a tokenizer, or ids.

        sampler: a `Sampler`; None: greedy. seed: its draws are its own, and its text does not depend on its neighbours; or a
        `generator`, which rows may share. eos_id: one id or several. stop: strings that end the text; see `TextStream`.
        """
        ids = self._ids(prompt)
        check_size("generate", "max_new_tokens", max_new_tokens, least=0)
        if not (sampler is None or isinstance(sampler, Sampler)):
            raise TypeError(f"Batch.add: sampler must be a generation.Sampler, got {type_name(sampler)}")
        if seed is not None:
            check_seed("Batch.add", seed)
            if generator is not None:
                raise ValueError("Batch.add: a seed makes a generator of the row's own: give one of the two")
            generator = RowGenerator().manual_seed(seed)
        chosen(generator)                               # TypeError for what is none
        stream = TextStream(self.tokenizer, stop) if self.tokenizer else None
        if stop and not stream:
            raise ValueError("Batch.add: stop strings are looked for in text: give the batch a tokenizer")
        if self.source is not None and self._added == len(self.source.states):
            raise ValueError(f"Batch.add: the source has {self._added} rows, and row {self._added} of the batch none")
        row = Row(self._added, ids, int(max_new_tokens), sampler or GREEDY, generator, _eos_ids(eos_id, self.model), stream)
        self._place(row)
        self._added += 1
        if max_new_tokens == 0:
            row.finish("length")
        else:
            self.waiting.append(row)
        return row

    def _ids(self, prompt):
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("Batch.add: the prompt is a str, and the batch has no tokenizer: give it one, or pass ids")
            prompt = self.tokenizer.encode(prompt)
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(ids, Iterable):
            raise TypeError(f"Batch.add: a prompt must be a str or ids [T], got {type_name(prompt)}")
        ids = list(ids)
        if not ids or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
            raise ValueError(f"Batch.add: a prompt must be ids [T] with at least one token, got {str(ids)[:80]}")
        vocab_size = getattr(self.model, "vocab_size", None)
        if vocab_size is not None and not all(0 <= i < vocab_size for i in ids):
            raise IndexError(f"Batch.add: the prompt holds an id outside the vocabulary, whose ids are 0 to {vocab_size - 1}")
        return [int(i) for i in ids]

    def _place(self, row):
        """Where the window of a new row begins. ValueError where the prompt has no place, and may not slide."""
        if self.limit is not None and len(row.ids) > self.limit:
            if self.at_limit == "stop":
                raise ValueError(f"Batch.add: the prompt has {len(row.ids)} tokens, and the context is {self.limit}: cut it, or build "
                                 f"the batch with at_limit='slide', which reads the last {self.limit}")
            row.first = len(row.ids) - self.limit

    def remove(self, row):
        """Takes a row out that has not ended; it keeps what it has."""
        self._due = deque(due for due in self._due if due[0] is not row)
        if row in self.waiting:
            self.waiting.remove(row)
        elif row in self.live:
            self._keep([other is not row for other in self.live])

    def __iter__(self):
        """Each row whenever it has got a token, until all have ended."""
        while self._unseen or self.live or self.waiting or self._given:
            if not self._unseen:
                self._unseen.extend(self.step())
            if self._unseen:
                yield self._unseen.popleft()            # who leaves the loop, and begins it anew, has missed none

    def run(self):
        """Writes until all rows have ended."""
        while self.live or self.waiting or self._given:
            self.step()

    # --- a step -----------------------------------------------------------------------------------------------------------

    def step(self):
        """A token for every row that is live then; returns them.

        After an error, or Ctrl-C, no row has lost anything; what was drawn by then, the next step gives.
        """
        try:
            if not (self._due or self._given):
                self._due = deque(zip(*self._next_tokens()))
            with uninterrupted():
                while self._due:
                    self._give(*self._due[0])
                    self._given.append(self._due.popleft()[0])
            self._keep([row.finish_reason is None for row in self.live])
            if self._interrupted:                       # those that have ended now are among the waiting
                self._all_wait()
        except BaseException:
            self._interrupted = True
            self._all_wait()
            raise
        self._interrupted = False
        rows, self._given = self._given, []
        return rows

    def _next_tokens(self):
        """(rows, the id that each gets, ln p of it or None)"""
        self._let_join()
        self._check_cache()
        logits = []
        if self.live:
            logits.append(self._decode(self.live))
        if self.joining:
            logits.append(self._join(self.joining))
        if not logits:
            return [], [], []
        logits = logits[0] if len(logits) == 1 else cat(logits)
        tokens = choose(logits, self.live)
        return list(self.live), tokens, self._logprobs(logits, tokens) if self.with_logprobs else [None] * len(tokens)

    def _check_cache(self):
        """RuntimeError where the cache does not hold what the live rows have read: somebody else uses it too."""
        held = None if self.cache is None else self.cache.lengths
        found, expected = [] if held is None else held.tolist(), [len(row.ids) - row.first - 1 for row in self.live]
        if self.cache is not None and found != expected:
            raise RuntimeError(f"Batch: its cache holds rows of {found} tokens, and its rows have read {expected}: another batch uses this "
                               f"cache, or it was reset. Give each batch a cache of its own; paged ones may share a pool, by empty()")

    def _give(self, row, token, logprob):
        row.take(token)
        if logprob is not None:
            row.logprobs.append(logprob)
        if row.finish_reason is None and self.at_limit == "stop" and self._is_full(row):
            row.finish("context")

    def _is_full(self, row):
        return self.limit is not None and len(row.ids) - row.first > self.limit

    def _let_join(self):
        """`joining`: the rows whose window is to be read in this step: those that slide, then, as far as there is room, those that wait."""
        leaving = [row for row in self.live if self.cache is None or self._is_full(row)]
        if leaving:
            self.joining += leaving
            self._keep([row not in leaving for row in self.live])
            for row in leaving:
                self._slide(row)
        self._make_room()
        while self.waiting and len(self.live) + len(self.joining) < self.max_rows and self._has_room([*self.joining, self.waiting[0]]):
            self._first_joins()
        if self.waiting and not self.live and not self.joining:
            self._first_joins()                                 # alone, or with an error that says what is too small

    def _first_joins(self):
        self.joining.append(self.waiting[0])                    # it is in one of the two lists at any time
        self.waiting.popleft()

    def _slide(self, row):
        if self._is_full(row):
            row.first = len(row.ids) - (self.limit // 2 + 1)

    def _has_room(self, joining):
        """Whether the cache holds these rows, and one more token of each live one."""
        return self.cache is None or self.cache.fits(len(row.window) + 1 for row in joining)

    def _make_room(self):
        """Where a pool of blocks has no place for one more token of each row, the newest rows wait, and are read anew later."""
        while len(self.live) > 1 and not self._has_room(self.joining):
            self.waiting.appendleft(self.live[-1])
            self._keep([True] * (len(self.live) - 1) + [False])

    def _keep(self, kept):
        if all(kept):
            return
        rows = [i for i, keep in enumerate(kept) if keep]
        self.live = [self.live[i] for i in rows]
        if self.cache is not None:
            self.cache.reorder(rows) if rows else self.cache.reset()

    def _all_wait(self):
        """Who has not ended waits, and is read anew; a row that is in two lists was on its way from one to the other."""
        self.waiting = deque(row for row in dict.fromkeys([*self.live, *self.joining, *self.waiting]) if row.finish_reason is None)
        self.live, self.joining = [], []
        for row in self.waiting:
            self._slide(row)
        if self.cache is not None:
            self.cache.abandon()

    # --- passes -----------------------------------------------------------------------------------------------------------

    def _decode(self, rows):
        """Logits [B, V] after the newest token of each row."""
        begin = time.perf_counter()
        newest = [row.ids[-1] for row in rows]
        found = None if self.source is not None else token_path.next_logits(self.model, np.array(newest), self.cache)
        logits = self._logits([[token] for token in newest], None, self.cache, rows)[:, -1] if found is None else constant(found)
        self.speed.add("decode", len(rows), time.perf_counter() - begin)
        return logits

    def _join(self, rows):
        """Logits [B, V] after the whole window of each row; the rows are live then."""
        begin = time.perf_counter()
        apart = self.cache if self.cache is None or not self.live else self.cache.empty()
        try:
            logits = self._prefill(rows, apart)
            if apart is not self.cache:
                self.cache.join(apart)
        except BaseException:
            if apart is not None:
                apart.reset()                           # the frames of an error live on, and with them the blocks would
            raise
        self.live, self.joining = self.live + rows, []
        if self.cache is None and all(row.new_ids for row in rows):         # all is read anew, for one token of each
            self.speed.add("decode", len(rows), time.perf_counter() - begin)
        else:
            self.speed.add("prefill", sum(len(row.window) for row in rows), time.perf_counter() - begin)
        return logits

    def _prefill(self, rows, cache):
        ids, valid = padded([row.window for row in rows], self.padding)
        last = [ids.shape[1] - 1] * len(rows) if self.padding == "left" else [len(row.window) - 1 for row in rows]
        chunk = self.prefill_chunk if cache is not None and self.prefill_chunk else ids.shape[1]
        found = [None] * len(rows)
        for start in range(0, ids.shape[1], chunk):
            part = slice(start, start + chunk)
            logits = self._logits(ids[:, part], None if valid is None else valid[:, part], cache, rows)
            for i, column in enumerate(last):
                if start <= column < start + chunk:
                    found[i] = logits[i, column - start]
        return stack(found)

    def _logits(self, ids, valid, cache, rows):
        """[B, T, V] of one pass of the model."""
        device = device_of_model(self.model)
        ids, valid = tensor(ids, device=device), None if valid is None else tensor(valid, device=device)
        options = {} if cache is None else {"cache": cache}
        with inference(self.model):
            if self.source is not None:
                return self.model.decode(ids, self.source.select([row.number for row in rows]), valid, **options)
            return self.model(ids, **options, **({} if valid is None else {"valid_tokens": valid}))[0]

    def _logprobs(self, logits, tokens):
        return F.log_softmax(logits.double(), dim=-1).gather(1, tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()


GREEDY = Sampler(temperature=0)


def choose(logits, rows):
    """The next id of each row, drawn from its row of logits [B, V] by its sampler, with its generator."""
    if len(rows) == 1 and not rows[0].sampler.uses_history:     # most often: the same in fewer words
        return [rows[0].sampler(logits, None, rows[0].generator).item()]
    tokens = [None] * len(rows)
    for sampler in dict.fromkeys(row.sampler for row in rows):
        group = [i for i, row in enumerate(rows) if row.sampler is sampler]
        generators = [rows[i].generator for i in group]
        shared = all(generator is generators[0] for generator in generators)
        history = [rows[i].ids for i in group] if sampler.uses_history else None
        drawn = sampler(logits if len(group) == len(rows) else logits[group], history, generators[0] if shared else generators)
        for i, (token,) in zip(group, drawn.tolist()):
            tokens[i] = token
    return tokens


def padded(windows, side):
    """(ids [B, T], valid_tokens bool [B, T], or None where all are of one length), T the longest; filled up with id 0."""
    ids, valid = filled_up(windows, side)
    return ids, None if valid.all() else valid


def _check_model(model, source, use_cache):
    """TypeError for what cannot write; an encoder–decoder needs a source, and no other model has one."""
    if not hasattr(model, "max_seq_len") or (use_cache and not hasattr(model, "blocks")):
        raise TypeError(f"Batch: a language model with `max_seq_len`, and `blocks` for a cache, is needed, such as MiniGPT, got "
                        f"{type_name(model)}")
    if source is None and hasattr(model, "decode"):
        raise TypeError(f"Batch: {type_name(model)} writes from a source: pass source=model.encode(source_ids)")
    if source is not None and not (isinstance(source, Source) and hasattr(model, "decode")):
        raise TypeError(f"Batch: source is for an encoder–decoder, and what its encode() returned; got {type_name(source)} with "
                        f"{type_name(model)}")


def checked_cache(model, cache, rows):
    """The cache, which must be empty and of the model's depth; by default a KVCache of its context."""
    if cache is None:
        return KVCache(len(model.blocks), model.max_seq_len, rows=rows)
    if not isinstance(cache, Cache):
        raise TypeError(f"a cache of tinygrad_tf.generation is needed, such as KVCache({len(model.blocks)}, {model.max_seq_len}), got "
                        f"{type_name(cache)}")
    if len(cache.layers) != len(model.blocks):
        raise ValueError(f"the cache has {len(cache.layers)} layers, the model {len(model.blocks)}")
    if cache.length:
        raise ValueError(f"the cache holds {cache.length} tokens already; reset() it first")
    return cache


def context_limit(model, cache):
    """How many tokens of a row can be read; None: any number."""
    if cache is not None and cache.window is not None and getattr(model, "endless_positions", False):
        return None
    return min(model.max_seq_len, getattr(cache, "capacity", model.max_seq_len))


def check_seed(op, seed):
    """TypeError for a seed that is neither None nor a whole number."""
    if seed is not None:
        check_number(op, "seed", seed, Integral, "an integer; row i has seed + i")


def _eos_ids(eos_id, model):
    ids = eos_id.tolist() if hasattr(eos_id, "tolist") else eos_id
    ids = () if ids is None else tuple(ids) if isinstance(ids, Iterable) else (ids,)
    for i in ids:
        check_number("Batch.add", "eos_id", i, Integral, "an integer, or several")
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size is not None and not all(0 <= i < vocab_size for i in ids):
        raise ValueError(f"Batch.add: eos_id must be of the vocabulary, 0 to {vocab_size - 1}, got {eos_id}")
    return frozenset(int(i) for i in ids)


def complete(model, prompts, max_new_tokens, *, cache=None, tokenizer=None, sampler=None, seed=None, eos_id=None, stop=(), on_token=None,
             **options):
    """The `Row`s of several prompts, each a str or ids, whatever their lengths, in their order, when all have ended.

    Greedy, unless a `sampler` draws: then row i draws with seed + i, and writes what it would write alone. on_token(row) is called
    at each token: `row.piece` is the text that it made certain. options: of `Batch`; the others: of `Batch.add`.
    """
    if isinstance(prompts, str):
        raise TypeError("complete: prompts must be a list of prompts, got a str: write [prompt]")
    if unknown := options.keys() - inspect.signature(Batch).parameters.keys():
        raise TypeError(f"complete: it takes no {', '.join(sorted(unknown))}; how to draw is a sampler=Sampler(temperature=…, top_k=…)")
    check_seed("complete", seed)
    batch = Batch(model, cache, tokenizer, **options)
    rows = [batch.add(prompt, max_new_tokens, sampler=sampler, seed=None if seed is None else seed + i, eos_id=eos_id, stop=stop)
            for i, prompt in enumerate(prompts)]
    for row in batch:
        if on_token is not None:
            on_token(row)
    return rows
