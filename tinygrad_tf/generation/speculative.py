"""Speculative decoding (guide 12.2): a cheap draft proposes tokens, the target reads them all in one pass; the text is the target's.

    draft       x_1 … x_k, each drawn from q_i, which is what the draft makes of the text and x_1 … x_{i−1}
    verify      one pass of the target gives p_1 … p_{k+1}: from what it would draw after 0, 1, …, k of them
    accept      x_i stands with probability min(1, p_i(x_i) / q_i(x_i)); the first that does not ends the run
    correct     in its place comes a token drawn from max(p_i − q_i, 0) / Σ; where all stand, a bonus token drawn from p_{k+1}

A token y comes out with probability  q(y) · min(1, p(y) / q(y)) + (1 − Σ_x min(p, q)) · residual(y)
                                    = min(p(y), q(y)) + max(p(y) − q(y), 0) = p(y),
whatever q is: a bad draft costs time, and changes nothing. So "rejected" does not mean that the target would not write
it, nor "accepted" that it is its most probable.    (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)
"""
import time
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from ..arguments import optional_functions, type_name
from ..autograd import constant
from ..creation import tensor
from ..models.common import device_of_model
from ..ops.shape import cat
from ..random import chosen
from . import token_path
from .batch import Batch, Row, as_before_an_error, check_seed, checked_cache, context_limit, padded
from .cache import check_size
from .inference import inference
from .sampling import Sampler

# --- the rule: float64 NumPy, and no chance but what is handed in -------------------------------------------------------------

def acceptance(p, q):
    """min(1, p / q): with what probability a token stands that the draft drew with q. 0 / 0 is 0: neither would write it."""
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    return np.where(q > 0, np.minimum(p, q) / np.where(q > 0, q, 1), (p > 0).astype(np.float64))


def residual(p, q):
    """max(p − q, 0) / Σ max(p − q, 0): what the token is drawn from that replaces the first rejected one.    p, q: [..., V]

    Where p = q there is nothing left, and nothing that could have been rejected: then it is p.
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    left = np.maximum(p - q, 0)
    total = left.sum(axis=-1, keepdims=True)
    return np.divide(left, total, out=p.copy(), where=total > 0)


def overlap(p, q):
    """Σ_x min(p(x), q(x)) = Σ_x q(x) · min(1, p(x) / q(x)) = 1 − ½ Σ_x |p(x) − q(x)|: the acceptance to be expected.    [..., V] → [...]"""
    return np.minimum(np.asarray(p, np.float64), q).sum(axis=-1)


def judge(p, q, drafted, coins):
    """(n, distribution [V]): how many of the k drafted ids stand, and what the token after them is drawn from.

    p: [k + 1, V], the target's after 0, …, k of them   q: [k, V], what each was drawn from   coins: [k], uniform in [0, 1)
    """
    k = len(drafted)
    of_drafts = np.arange(k), np.asarray(drafted, np.int64)
    stands = np.asarray(coins) < acceptance(p[of_drafts], q[of_drafts])
    n = k if stands.all() else int(stands.argmin())
    return n, residual(p[n], q[n]) if n < k else p[k]


def draw(p, u):
    """The first id x with p(0) + … + p(x) > u, u uniform in [0, 1): never one with p(x) = 0.    p: [..., V]  u: [...] → int64 [...]"""
    sums = np.cumsum(p, axis=-1)
    return (sums <= np.asarray(u)[..., None] * sums[..., -1:]).sum(axis=-1)


def one_hot(ids, V):
    """q of a draft that leaves nothing to chance.    [k] → [k, V]"""
    q = np.zeros((len(ids), V))
    q[np.arange(len(ids)), ids] = 1
    return q


def distributions(logits, samplers, rows, drafted):
    """What each sampler makes of its row of logits, when those ids come after the text of its row.    [N, V] → float64 [N, V]

    Penalties count what was drafted before: the text that p_i and q_i continue ends with x_{i−1}.
    """
    found = np.empty(tuple(logits.shape))
    for sampler in dict.fromkeys(samplers):
        group = [i for i, other in enumerate(samplers) if other is sampler]
        history = [[*rows[i].ids, *drafted[i]] for i in group] if sampler.uses_history else None
        found[group] = sampler.probabilities(logits if len(group) == len(samplers) else logits[group], history)
    return found


# --- drafts -------------------------------------------------------------------------------------------------------------------

class Proposal(NamedTuple):
    """ids x_1 … x_n, and q [n, V], float64: what each was drawn from; None where nothing was left to chance."""
    ids: list
    q: np.ndarray | None = None


class Draft:
    """Who proposes. `propose` is all that another kind needs; it must draw each id from the q that it gives, or not draw at all."""

    model = cache = None            # of a draft that is a model
    sampler = None                  # its own; None: that of each row, or no draws

    def propose(self, rows, counts, uniforms):
        """A `Proposal` of up to counts[i] ids for each `Row`, which continue row.window; draw id j with uniforms[i][j]."""
        raise NotImplementedError(f"{type(self).__name__} must have propose(rows, counts, uniforms)")

    def reset(self):
        """Nothing is kept of any row."""


class NGramDraft(Draft):
    """A draft without a model: looks where the newest tokens stood before, and proposes what followed then.

    Of the newest n tokens, or as many of them as stood before, the latest such place is taken. Good where a text quotes
    itself: code, a summary, an answer about a given text. (prompt lookup decoding; LLMA, Yang et al., arXiv 2304.04487)
    """

    def __init__(self, n=3):
        check_size("NGramDraft", "n", n)
        self.n = n

    def propose(self, rows, counts, uniforms):
        return [Proposal(self.followers(row.ids, count)) for row, count in zip(rows, counts)]

    def followers(self, ids, count):
        """The ids that came next then: `count` of them, where need be read on into what is copied; [] if nothing stood before."""
        place, text = self._place(ids), list(ids)
        if place is None:
            return []
        for i in range(place, place + count):
            text.append(text[i])
        return text[len(ids):]

    def _place(self, ids):
        """Behind the latest earlier occurrence of the longest ending of the text that has one."""
        for size in range(min(self.n, len(ids) - 1), 0, -1):
            ending = ids[-size:]
            for end in range(len(ids) - 1, size - 1, -1):
                if ids[end - size:end] == ending:
                    return end
        return None


class ModelDraft(Draft):
    """A smaller model of the same vocabulary, with a cache of its own, of any kind; None: a KVCache of its context.

    It does not read its last proposal: so after a rejection its cache is trimmed, and when all stood, the row has two tokens
    to read. Rows that reach the end of its context get fewer proposals, and then none.
    sampler: what makes q of its logits; None: the sampler of each row. The nearer q is to p, the more is accepted.
    """

    def __init__(self, model, cache=None, sampler=None):
        if not (sampler is None or isinstance(sampler, Sampler)):
            raise TypeError(f"ModelDraft: sampler must be a generation.Sampler, got {type_name(sampler)}")
        self.model, self.sampler, self.cache = model, sampler, checked_cache(model, cache, 1)
        self.limit = context_limit(model, self.cache)
        self._held = {}                                 # Row → where its window began, in the order of the cache's rows

    def reset(self):
        self.cache.reset()
        self._held = {}

    def propose(self, rows, counts, uniforms):
        try:
            with inference(self.model):
                return self._propose(rows, [min(n, self._room(row)) for row, n in zip(rows, counts)], uniforms)
        except BaseException:
            self.reset()                                # whatever it held can be read anew
            raise

    def _room(self, row):
        """For so many proposals there are positions; the last is not read."""
        return np.inf if self.limit is None else self.limit - len(row.window) + 1

    def _propose(self, rows, counts, uniforms):
        """Token by token, for all rows that want one more."""
        count, uniforms = dict(zip(rows, counts)), dict(zip(rows, uniforms))
        ids, q = {row: [] for row in rows}, {row: [] for row in rows}
        held, logits = self._catch_up([row for row in rows if count[row] > 0])
        going = list(range(len(held)))                  # those of the cache's rows that want one more
        while going:
            active = [held[i] for i in going]
            found = distributions(logits[going], [self.sampler or row.sampler for row in active], active, [ids[row] for row in active])
            drawn = draw(found, [uniforms[row][len(ids[row])] for row in active])
            for row, token, q_row in zip(active, drawn.tolist(), found):
                ids[row].append(token)
                q[row].append(q_row)
            going = [i for i in going if len(ids[held[i]]) < count[held[i]]]
            if going:
                logits = self._read([ids[row][-1:] if len(ids[row]) < count[row] else [] for row in held], self.cache)
        self._held = {row: row.first for row in held}
        return [Proposal(ids[row], np.array(q[row]) if q[row] else None) for row in rows]

    def _catch_up(self, rows):
        """(rows in the order of the cache, logits [B, V] after the newest id of each): forgets what was rejected, reads what is new."""
        known = [self._held.get(row) == row.first for row in rows]
        staying, joining = ([row for row, k in zip(rows, known) if k is wanted] for wanted in (True, False))
        logits = [self._go_on(staying)] if staying else []
        if not staying:
            self.cache.reset()
        if joining:
            logits.append(self._join(joining) if staying else self._read([row.window for row in joining], self.cache))
        return staying + joining, cat(logits) if logits else None

    def _go_on(self, rows):
        """The newest id of a row is always one that was not read: the target's own, which came in the place of a draft or after all."""
        places = {row: i for i, row in enumerate(self._held)}
        self.cache.reorder([places[row] for row in rows])
        kept = [min(int(n), len(row.window) - 1) for row, n in zip(rows, self.cache.lengths)]
        self.cache.trim(kept)
        return self._read([row.window[n:] for row, n in zip(rows, kept)], self.cache)

    def _join(self, rows):
        apart = self.cache.empty()
        try:
            logits = self._read([row.window for row in rows], apart)
            self.cache.join(apart)
            return logits
        finally:
            apart.reset()                               # empty already, unless there was an error, whose frames would keep its blocks

    def _read(self, parts, cache):
        """Logits [B, V] after the last of the new ids of each row; where there are none, of no meaning."""
        ids, valid = padded(parts, "right")
        if ids.shape[1] == 1 and valid is None and cache.lengths is not None:
            logits = token_path.next_logits(self.model, ids[:, 0], cache)
            if logits is not None:
                return constant(logits)
        device = device_of_model(self.model)
        options = {} if valid is None else {"valid_tokens": tensor(valid, device=device)}
        logits = self.model(tensor(ids, device=device), cache=cache, **options)[0]
        return _picked(logits, np.arange(len(parts)), [max(len(part), 1) - 1 for part in parts])


# --- what happened ------------------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Run:
    """One round of one row: the first `accepted` of the ids `drafted` stand, then comes the target's own `token`.

    overlap: Σ_x min(p_i(x), q_i(x)), summed over the drafts that were tested: the accepted ones, and the first that was rejected.
    taken: how many tokens the row took, fewer than accepted + 1 where one of them ended it; piece: the text that they made certain.
    """
    row: Row
    drafted: list
    accepted: int
    token: int
    overlap: float
    taken: int = 0
    piece: str = ""

    @property
    def ids(self):
        return [*self.drafted[:self.accepted], self.token]

    @property
    def tested(self):
        return min(self.accepted + 1, len(self.drafted))

    @property
    def marks(self):
        """[(id, what became of it)]: "accepted"; "rejected", and then "corrected", what came in its place; "bonus", after drafts that
        all stood; "plain", where nothing was drafted. Without what a row did not take, and without drafts behind a rejected one.
        """
        rejected = self.accepted < self.tested
        own = "corrected" if rejected else "bonus" if self.drafted else "plain"
        marks = [*((x, "accepted") for x in self.drafted[:self.accepted]), (self.token, own)][:self.taken]
        if rejected and self.taken > self.accepted:
            marks.insert(self.accepted, (self.drafted[self.accepted], "rejected"))
        return marks


@dataclass
class Report:
    """What speculation brought: the sums over all runs. A round is one row's share of one pass of the target.

    prefills                    rounds that read a row's text too, from its beginning
    drafted, tested, accepted   ids that were proposed, that the rule was asked about, and that stood
    overlap                     Σ_x min(p(x), q(x)), over those that were tested
    tokens                      that were written
    prefill_seconds, target_seconds, draft_seconds      the target's passes over whole texts, and all its others; the draft
    """
    rounds: int = 0
    prefills: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    overlap: float = 0.0
    tokens: int = 0
    prefill_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0

    def add(self, run):
        self.rounds += 1
        self.drafted += len(run.drafted)
        self.tested += run.tested
        self.accepted += run.accepted
        self.overlap += run.overlap
        self.tokens += run.taken

    def add_seconds(self, draft, target, prefill, prefills):
        self.draft_seconds += draft
        self.target_seconds += target
        self.prefill_seconds += prefill
        self.prefills += prefills

    @property
    def acceptance_rate(self):
        """accepted / tested; NaN where nothing was drafted. In the long run it is `expected_rate`."""
        return _ratio(self.accepted, self.tested)

    @property
    def expected_rate(self):
        """The mean of Σ_x min(p(x), q(x)) over what was tested."""
        return _ratio(self.overlap, self.tested)

    @property
    def tokens_per_pass(self):
        """From 1, the target's own token, to k + 1. With acceptance α at every place:  (1 − α^{k+1}) / (1 − α)"""
        return _ratio(self.tokens, self.rounds)

    @property
    def seconds(self):
        return self.prefill_seconds + self.target_seconds + self.draft_seconds

    @property
    def speedup(self):
        """(prefill_seconds + (tokens − prefills) · t) / seconds,  t = target_seconds / (rounds − prefills)

        An estimate: it takes a pass over a single token to last as long as one over k + 1. Where that counts, run the target
        alone, and measure. NaN where there was no other pass than over whole texts.
        """
        t = _ratio(self.target_seconds, self.rounds - self.prefills)
        return _ratio(self.prefill_seconds + (self.tokens - self.prefills) * t, self.seconds)

    def __str__(self):
        return (f"{self.accepted:,} of {self.tested:,} tested drafts accepted ({self.acceptance_rate:.1%}), {self.tokens_per_pass:.2f} "
                f"tokens a pass, {self.tokens:,} in {self.seconds:.2f} s (draft {self.draft_seconds:.2f} s)")


def _ratio(a, b):
    return a / b if b else float("nan")


# --- the batch ----------------------------------------------------------------------------------------------------------------

class SpeculativeBatch(Batch):
    """A `Batch` whose rows get, in each step, from 1 to k + 1 tokens: as many proposals of `draft` as stand, and one of the target's.

    How many stand differs from row to row, and so do the lengths of the rows in the caches. All else is as in a `Batch`: rows
    join and leave, with any cache or none; a prompt's own pass verifies drafts already. A rolling cache needs slack ≥ k.
    A row's chance is its own: each round takes 2 k + 1 uniforms from its generator, k for the draft, k for the rule, 1 for the
    target's token; near max_new_tokens and the end of the context, where fewer are drafted, some are not used.

    on_event(run) is called with the `Run` of each row, when all rows of the step have theirs; `report` sums them up.
    """

    def __init__(self, model, draft, cache=None, tokenizer=None, *, k=4, on_event=None, **options):
        check_size("SpeculativeBatch", "k", k)
        optional_functions("SpeculativeBatch", on_event=on_event)
        super().__init__(model, cache, tokenizer, **options)
        _check_draft(draft, model, self.cache, k)
        self.draft, self.k, self.on_event = draft, int(k), on_event
        self.report, self._told, self._chance, self._drafted = Report(), [], {}, {}

    def step(self):
        """A run of tokens for every row that is live then; returns the rows. After an error nothing is lost, as in `Batch.step`."""
        rows = super().step()
        if not self.live:
            self.draft.reset()
        while self._told:
            run = self._told.pop(0)                     # one at a time: an error of on_event loses none of the others
            if self.on_event is not None:
                self.on_event(run)
        return rows

    def _give(self, row, run, logprobs):
        """Token by token, until one ends the row: those behind an eos are dropped."""
        while run.taken <= run.accepted and row.finish_reason is None:
            super()._give(row, run.ids[run.taken], logprobs and logprobs[run.taken])
            run.taken += 1
            run.piece += row.piece
        row.piece = run.piece
        if self._chance.pop(row, None) is not None:     # a step that was interrupted here has told it already
            self.report.add(run)
            self._told.append(run)

    # --- a round --------------------------------------------------------------------------------------------------------------

    def _next_tokens(self):
        """(rows, the `Run` of each, ln p of its ids or None); the cache then holds all of a row but its newest id."""
        self._let_join()
        self._check_cache()
        rows, joined = [*self.live, *self.joining], len(self.joining)
        if not rows:
            return [], [], []
        begin, prefilled, chance = time.perf_counter(), self.speed.prefill_seconds, [self._uniforms(row) for row in rows]
        proposals = self._proposals(rows, self._counts(rows), [u[:self.k] for u in chance])
        self._drafted = {row: ids for row, (ids, _) in zip(rows, proposals)}
        drafted = time.perf_counter()
        found = [self._decode(self.live)] if self.live else []
        decoded = time.perf_counter()
        found += [self._join(self.joining)] if joined else []
        runs, logprobs = self._judge(rows, proposals, *zip(*found), [u[self.k:] for u in chance])
        if self.cache is not None:
            self.cache.trim([len(row.window) + run.accepted for row, run in zip(rows, runs)])
        self.speed.add("decode", sum(run.accepted for run in runs[:len(rows) - joined]), drafted - begin)
        self.report.add_seconds(drafted - begin, decoded - drafted, self.speed.prefill_seconds - prefilled, joined)
        return rows, runs, logprobs

    def _uniforms(self, row):
        """A round's numbers in [0, 1); kept until the row has its tokens, so that a step that failed is made again with the same."""
        if row not in self._chance:
            if row.sampler.is_greedy and (self.draft.sampler or row.sampler).is_greedy:
                self._chance[row] = np.zeros(2 * self.k + 1)
            else:
                with as_before_an_error(chosen(row.generator)):
                    self._chance[row] = chosen(row.generator).rand(2 * self.k + 1, np.float64)
        return self._chance[row]

    def _counts(self, rows):
        """How many tokens to draft for each row: k; fewer where one more than that would be too many, or would find no block."""
        k = self.k
        while k and not self._has_room(self.joining, k):
            k -= 1
        room = [k if self.limit is None else self.limit - len(row.window) for row in rows]
        return [min(k, row.max_new_tokens - len(row.new_ids) - 1, more) for row, more in zip(rows, room)]

    def _has_room(self, joining, k=None):
        """Whether the cache holds these rows, one more token of each row, and k drafts of each."""
        k = self.k if k is None else k
        return self.cache is None or self.cache.fits(chain((len(row.window) + 1 + k for row in joining), repeat(k, len(self.live))))

    def _proposals(self, rows, counts, uniforms):
        proposals = self.draft.propose(rows, counts, uniforms)
        for count, (ids, q) in zip(counts, proposals):
            if len(ids) > count or not (q is None or len(q) == len(ids)):
                raise ValueError(f"{type(self.draft).__name__}.propose: up to {count} ids were asked for, and a row of q for each; got "
                                 f"{len(ids)} ids and {'no' if q is None else len(q)} rows of q")
        return proposals

    # Both passes give (logits [N, V] after 0, …, n drafts of each row, N = Σ (n + 1); p [N, V]).

    def _decode(self, rows):
        """A live row reads its newest id and its drafts."""
        if not any(self._drafted[row] for row in rows):
            logits = super()._decode(rows)
            return logits, self._p(rows, logits)
        begin = time.perf_counter()
        found = self._read(rows, [row.ids[-1:] for row in rows], self.cache)
        self.speed.add("decode", len(rows), time.perf_counter() - begin)
        return found

    def _prefill(self, rows, cache):
        """A row that joins reads its whole window and its drafts."""
        return self._read(rows, [row.window for row in rows], cache, self.prefill_chunk)

    def _read(self, rows, texts, cache, chunk=None):
        """In chunks of so many columns, where there is a cache."""
        drafted = [self._drafted[row] for row in rows]
        ids, valid = padded([[*text, *drafts] for text, drafts in zip(texts, drafted)], self.padding)
        B, T = ids.shape
        begins = [(T - len(drafts) if self.padding == "left" else len(text)) - 1 for text, drafts in zip(texts, drafted)]
        b = np.repeat(np.arange(B), [len(drafts) + 1 for drafts in drafted])
        t = np.concatenate([np.arange(begin, begin + len(drafts) + 1) for begin, drafts in zip(begins, drafted)])
        chunk, found, order = chunk if chunk and cache is not None else T, [], []
        for start in range(0, T, chunk):
            part = slice(start, start + chunk)
            logits = self._logits(ids[:, part], None if valid is None else valid[:, part], cache, rows)
            order.append(np.nonzero((start <= t) & (t < start + chunk))[0])
            found.append(_picked(logits, b[order[-1]], t[order[-1]] - start))
        logits = found[0] if len(found) == 1 else _picked(cat(found), np.argsort(np.concatenate(order)))
        return logits, self._p(rows, logits)

    def _p(self, rows, logits):
        texts = [(row, self._drafted[row][:n]) for row in rows for n in range(len(self._drafted[row]) + 1)]
        return distributions(logits, [row.sampler for row, _ in texts], *zip(*texts))

    def _judge(self, rows, proposals, logits, p, chance):
        """([Run], [ln p of its ids]) of each row. chance: for each row k uniforms for the rule, and one for the target's token."""
        logits, p, runs, logprobs, at = cat(logits), np.concatenate(p), [], [], 0
        for row, (ids, q), u in zip(rows, proposals, chance):
            run = _run(row, ids, p[at:at + len(ids) + 1], one_hot(ids, p.shape[1]) if q is None else q, u)
            runs.append(run)
            logprobs.append(self._logprobs(logits[at:at + len(run.ids)], run.ids) if self.with_logprobs else None)
            at += len(ids) + 1
        return runs, logprobs


def _run(row, ids, p, q, u):
    accepted, following = judge(p, q, ids, u[:len(ids)])
    tested = min(accepted + 1, len(ids))
    return Run(row, ids, accepted, int(draw(following, u[-1])), float(overlap(p[:tested], q[:tested]).sum()))


def _picked(x, *index):
    """x[index] for NumPy indices, on the device of x."""
    return x[tuple(tensor(np.asarray(i, np.int64), device=x.device) for i in index)]


def _check_draft(draft, model, cache, k):
    if not isinstance(draft, Draft):
        raise TypeError(f"SpeculativeBatch: draft must be a ModelDraft(model), an NGramDraft() or another generation.Draft, got "
                        f"{type_name(draft)}")
    sizes = [getattr(m, "vocab_size", None) for m in (model, draft.model)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(f"SpeculativeBatch: draft and target must share one vocabulary; the target's has {sizes[0]} ids, the draft's "
                         f"{sizes[1]}")
    if draft.cache is not None and draft.cache is cache:
        raise ValueError("SpeculativeBatch: draft and target have the same cache; each needs one of its own")
    for whose, rolling in ("target", cache), ("draft", draft.cache):
        if getattr(rolling, "window", None) is not None and rolling.slack < k:
            raise ValueError(f"SpeculativeBatch: up to k={k} drafts are rolled back, and the {whose}'s RollingKVCache keeps slack="
                             f"{rolling.slack}; build it with slack={k} or more")


def speculative_generate(model, prompts, max_new_tokens, draft, k=4, *, cache=None, tokenizer=None, sampler=None, seed=None,
                         generator=None, eos_id=None, stop=(), on_event=None, **options):
    """(rows, report): the `Row`s of several prompts, each a str or ids, whatever their lengths, and the `Report` of all of them.

    draft: a `ModelDraft` or an `NGramDraft`, which proposes up to k tokens a round. The texts have the distribution that `sampler`,
    None: greedy, gives the target's texts; greedy ones are the same texts. seed: row i draws with seed + i, and writes what it
    would write alone; or a generator that all rows share. on_event: see `SpeculativeBatch`; the others: as in `complete`.
    """
    if isinstance(prompts, str):
        raise TypeError("speculative_generate: prompts must be a list of prompts, got a str: write [prompt]")
    check_seed("speculative_generate", seed)
    batch = SpeculativeBatch(model, draft, cache, tokenizer, k=k, on_event=on_event, **options)
    rows = [batch.add(prompt, max_new_tokens, sampler=sampler, seed=None if seed is None else seed + i, generator=generator,
                      eos_id=eos_id, stop=stop) for i, prompt in enumerate(prompts)]
    batch.run()
    return rows, batch.report
