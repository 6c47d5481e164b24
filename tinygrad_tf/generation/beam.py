"""Beam search: of all texts that begin with a prompt, a few that are likely as a whole.

Greedy decoding takes the likeliest token at each place, and cannot go back. Beam search keeps several open texts, the beams: in
each step it continues every beam with every id, and the likeliest continuations are the next beams. Two beams, and Σ ln p:

    <bos> a      −0.7            a dog      −1.6                what greedy decoding would write
    <bos> the    −0.9     →      the cat    −1.0        →  …

The prompt is read once. Beams are rows of a cache: the row of a beam is a copy of the row that it continues, `cache.reorder`.
"""
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from ..arguments import type_name
from ..creation import tensor
from ..dtypes import float64
from ..models.encoder_decoder import Source
from ..nn import functional as F
from .batch import Batch
from .cache import check_size
from .inference import inference
from .sampling import INF, check_number

STEEPEST = 10           # of length_penalty: n^10 is a number for every length n, and leaves none but the longest texts


@dataclass(frozen=True)
class Beam:
    """One text: `ids`, the prompt and what was written.

    logprob = Σ ln p(new id | all ids before it)        score = logprob / len(new_ids)^length_penalty

    finish_reason: "eos", "length" or "context", as of a `Row`; an eos stays in `ids`, and counts in both formulas.
    """
    ids: list
    new_ids: list
    logprob: float
    score: float
    finish_reason: str


def beam_search(model, prompt, max_new_tokens, *, num_beams=4, length_penalty=1.0, eos_id=None, early_stopping=False, num_return=1,
                cache=None, use_cache=True, prefill_chunk=None, source=None):
    """The num_return best `Beam`s that the search finds for one prompt, ids [T] or [1, T], best score first; fewer where there are fewer.

    The definition is Hugging Face's. With num_beams = N and E ids in eos_id, each step sorts the N (1 + E) likeliest continuations:

    - the first N of them that do not end in an eos are the next beams
    - one that ends in an eos is kept if it is among the first N of all; of all that were kept, the N of the best scores stay
    - when max_new_tokens are written, or the model has no further position, the beams are kept too

    The search ends before that when N texts are kept and
        early_stopping=True         always
        early_stopping=False        no beam would score better than the worst of them if it ended now
        early_stopping="never"      no beam can ever score better: at best it gets no less likely, and as long as lets it score best
    length_penalty: 0 compares sums, 1 means for each token; the larger, the longer the texts. num_beams=1 is greedy decoding
    (but for "never"), and N ≥ V^max_new_tokens finds the best of all texts. Sums are float64; of equals the earlier beam, then the
    smaller id, comes first. What has probability 0 is never written.

    Several prompts: call it several times. cache, use_cache, prefill_chunk: of `Batch`; the cache is empty afterwards, and in a
    `PagedKVCache` the beams share the blocks of the prompt. source: of an encoder–decoder, what encode() returned for one row.
    ValueError or TypeError for options out of range and for what `Batch.add` refuses, and for logits with NaN or +inf.
    """
    check_size("beam_search", "num_beams", num_beams)
    check_size("beam_search", "num_return", num_return)
    if num_return > num_beams:
        raise ValueError(f"beam_search: num_return={num_return} texts were asked for, num_beams={num_beams} are kept; search with more")
    _check_rules(length_penalty, early_stopping)
    if source is not None:
        _check_source(source)
    batch = Batch(model, cache, use_cache=use_cache, max_rows=num_beams, prefill_chunk=prefill_chunk, source=source)
    row = batch.add(_one(prompt), max_new_tokens, eos_id=eos_id)
    search = Search(row, batch.limit, num_beams, length_penalty, early_stopping)
    _read(batch, search)
    return search.kept[:num_return]


def _read(batch, search):
    """Gives the search the logits of its beams, until it is over."""
    cache = batch.cache
    try:
        with inference(batch.model):
            parents = search.step(batch._prefill(search.open, cache)) if search.open else []
            while parents:
                if cache is None:
                    logits = batch._prefill(search.open, None)
                else:
                    cache.reorder(parents)
                    logits = batch._decode(search.open)
                parents = search.step(logits)
    finally:
        if cache is not None:
            cache.reset()


class Open(NamedTuple):
    """A beam, as a `Row` is seen by the passes of a `Batch`."""
    logprob: float
    ids: list
    number: int                 # of its row in the source

    window = property(lambda self: self.ids)


class Search:
    """The beams of one row, `open`, and the texts that have ended, `kept`. It knows no model: it is given logits."""

    def __init__(self, row, limit, num_beams, length_penalty, early_stopping):
        self.prompt, self.eos_ids, self.num_beams = row.prompt, row.eos_ids, num_beams
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        room = row.max_new_tokens if limit is None else limit + 1 - len(row.prompt)     # the last position gives one more token
        self.longest, self.reason = min((row.max_new_tokens, "length"), (room, "context"), key=lambda end: end[0])
        self.open, self.kept = [Open(0.0, row.prompt, row.number)], []
        if self.longest == 0:
            self._end()

    def step(self, logits):
        """A token for each beam, of logits [B, V]: which of them each beam continues; [] when the search is over."""
        beams, parents = [], []
        for rank, (total, parent, token) in enumerate(continuations(logits, [beam.logprob for beam in self.open], self._candidates)):
            beam = self.open[parent]._replace(logprob=total, ids=[*self.open[parent].ids, token])
            if token not in self.eos_ids:
                beams.append(beam)
                parents.append(parent)
            elif rank < self.num_beams:
                self._keep(beam, "eos")
            if len(beams) == self.num_beams:
                break
        self.open = beams
        if not beams or self._is_over(beams[0]):
            return []
        if self._length(beams[0]) == self.longest:
            return self._end()
        return parents

    @property
    def _candidates(self):
        """So many that num_beams of them go on, even if each beam ends in every eos."""
        return self.num_beams * (1 + len(self.eos_ids))

    def _is_over(self, best):
        """Whether no beam, of which this is the best, can replace a text that is kept."""
        if len(self.kept) < self.num_beams or self.early_stopping is True:
            return len(self.kept) == self.num_beams
        to_the_end = self.early_stopping == "never" and self.length_penalty > 0
        return self._score(best, self.longest if to_the_end else self._length(best)) <= self.kept[-1].score

    def _end(self):
        for beam in self.open:
            self._keep(beam, self.reason)
        self.open = []
        return []

    def _keep(self, beam, reason):
        text = Beam(beam.ids, beam.ids[len(self.prompt):], beam.logprob, self._score(beam, self._length(beam)), reason)
        self.kept = sorted([*self.kept, text], key=lambda kept: kept.score, reverse=True)[:self.num_beams]

    def _length(self, beam):
        return len(beam.ids) - len(self.prompt)

    def _score(self, beam, length):
        return beam.logprob / max(length, 1) ** self.length_penalty


def continuations(logits, totals, count):
    """(Σ ln p, beam, id) of the `count` likeliest, likeliest first, without those of probability 0.    logits [B, V]  totals: B numbers

    ValueError where a row of logits holds NaN or +inf, or is all −inf.
    """
    before = tensor(totals, dtype=float64, device=logits.device)
    together = (F.log_softmax(logits.to(float64), dim=-1) + before[:, None]).reshape(-1)
    best, places = (found.tolist() for found in together.topk(min(count, len(together))))
    if best[0] != best[0]:                                      # topk puts NaN first
        raise ValueError("beam_search: a row of logits holds NaN or +inf, or is all -inf; it has no distribution")
    return [(total, *divmod(place, logits.shape[1])) for total, place in zip(best, places) if total > -INF]


def _one(prompt):
    """Its ids [T]; ValueError for several prompts."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, (list, tuple)) or not any(isinstance(row, (list, tuple)) for row in ids):
        return ids                                              # which Batch.add checks
    if len(ids) > 1:
        raise ValueError(f"beam_search: the prompt must be ids [T] or [1, T], got {len(ids)} rows: call it once for each of them")
    return ids[0]


def _check_source(source):
    if not isinstance(source, Source):
        raise TypeError(f"beam_search: source must be what encode() returned, got {type_name(source)}")
    if len(source.states) != 1:
        raise ValueError(f"beam_search: source must have one row, got {len(source.states)}; call it once for each, with "
                         f"source.select([row])")


def _check_rules(length_penalty, early_stopping):
    check_number("beam_search", "length_penalty", length_penalty, Real, "a number")
    if not -STEEPEST <= length_penalty <= STEEPEST:
        raise ValueError(f"beam_search: length_penalty must be from {-STEEPEST} to {STEEPEST}, got {length_penalty}")
    if not (isinstance(early_stopping, bool) or early_stopping == "never"):
        raise ValueError(f"beam_search: early_stopping must be True, False or 'never', got {early_stopping!r}")
