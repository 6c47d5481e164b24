"""Beam search: against all texts, against its definition in plain Python, and the same with every cache."""
import functools
import itertools
import math

import pytest
from generation.tiny import HEADS, LAYERS, POSITIONS, T_MAX, V_VOCAB, TinyLM, enlarge

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.generation import ConcatKVCache, KVCache, PagedKVCache, QuantizedKVCache, RollingKVCache, beam_search, complete
from tinygrad_tf.models import Decoder, EncoderDecoder

INF, NAN = math.inf, math.nan
PROMPT = [3, 1, 4, 1, 5]
EARLY = (True, False, "never")


class Table(nn.Module):
    """logits of the next id: the row of the newest one. The least that can be searched, without a cache."""

    def __init__(self, logits, max_seq_len=99):
        super().__init__()
        self.vocab_size, self.max_seq_len = len(logits), max_seq_len
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, token_ids):
        return self.logits[token_ids], None


def table(*probabilities, **options):
    """The probabilities of each next id after id 0, 1, …"""
    return Table([[math.log(p) if p else -INF for p in row] for row in probabilities], **options)


def large(model):
    enlarge(model)
    return model.double().eval()


def counting(model):
    """A list that gets the shape of the ids of each pass from now on."""
    calls, forward = [], model.forward
    model.forward = lambda token_ids, **options: calls.append(tuple(token_ids.shape)) or forward(token_ids, **options)
    return calls


def next_logprobs(model, source=None):
    """ids → ln p of each next id, from all ids anew; each list of ids is read once."""
    known = {}

    def of(ids):
        if tuple(ids) not in known:
            with torch.no_grad():
                read = torch.tensor([ids])
                logits = model(read)[0] if source is None else model.decode(read, source)
            z = logits[0, -1].tolist()
            top = max(z)
            known[tuple(ids)] = [x - top - math.log(math.fsum(math.exp(y - top) for y in z)) for x in z]
        return known[tuple(ids)]
    return of


@functools.cache
def logprobs_of_tiny():
    return next_logprobs(TinyLM())


def logprob(logprobs, prompt, new):
    return math.fsum(logprobs([*prompt, *new[:i]])[token] for i, token in enumerate(new))


def by_definition(logprobs, prompt, longest, N, penalty=1.0, eos=(), early=False, at_end="length"):
    """The N kept texts as (score, Σ ln p, new ids, reason): every continuation of every beam is sorted."""
    beams, kept = [(0.0, [])], []
    for n in range(1, longest + 1):
        every = sorted(((total + p, [*new, token]) for total, new in beams for token, p in enumerate(logprobs([*prompt, *new]))),
                       key=lambda beam: -beam[0])
        kept += [(total / n ** penalty, total, new, "eos") for total, new in every[:N] if new[-1] in eos]
        kept = sorted(kept, key=lambda text: -text[0])[:N]
        beams = [beam for beam in every if beam[1][-1] not in eos][:N]
        if len(kept) == N:
            best = beams[0][0] / (longest if early == "never" and penalty > 0 else n) ** penalty if beams else -INF
            if early is True or best <= kept[-1][0]:
                return kept
    kept += [(total / longest ** penalty, total, new, at_end) for total, new in beams]
    return sorted(kept, key=lambda text: -text[0])[:N]


def told(beams):
    return [(beam.score, beam.logprob, beam.new_ids, beam.finish_reason) for beam in beams]


def assert_same(found, expected, tolerance=1e-9):
    """Texts, reasons and their order are equal, and so are the numbers, within the tolerance."""
    assert [text[2:] for text in found] == [text[2:] for text in expected]
    for one, other in zip(found, expected):
        assert one[:2] == pytest.approx(other[:2], rel=0, abs=tolerance)


# --- what it finds --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("eos", [(), (2,), (0, 3)], ids=str)
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -0.5])
def test_enough_beams_find_all_texts_in_their_order(eos, penalty):
    """N = V^n: every text of up to n = 3 ids, which ends at its first eos, with the score of its definition."""
    V, n = 4, 3
    model = large(Decoder(V, 16, 8, 2, 16, 2))
    logprobs = next_logprobs(model)
    texts = [list(new) for length in range(1, n + 1) for new in itertools.product(range(V), repeat=length)
             if not set(new[:-1]) & set(eos) and (length == n or new[-1] in eos)]
    expected = sorted(((logprob(logprobs, [1, 2], new) / len(new) ** penalty, logprob(logprobs, [1, 2], new), new,
                        "eos" if new[-1] in eos else "length") for new in texts), key=lambda text: -text[0])
    found = beam_search(model, [1, 2], n, num_beams=V ** n, length_penalty=penalty, eos_id=eos, num_return=V ** n, early_stopping="never")
    assert_same(told(found), expected)
    assert math.fsum(math.exp(beam.logprob) for beam in found) == pytest.approx(1, abs=1e-9)      # each text once, and all of them


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("eos", [None, 7, (2, 7, 9)], ids=str)
@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0, -1.0])
@pytest.mark.parametrize("N", [1, 3, 15])
def test_the_search_is_its_definition(N, penalty, eos, early):
    model = TinyLM()
    ends = () if eos is None else (eos,) if isinstance(eos, int) else eos
    found = beam_search(model, PROMPT, 6, num_beams=N, length_penalty=penalty, eos_id=eos, early_stopping=early, num_return=N)
    assert_same(told(found), by_definition(logprobs_of_tiny(), PROMPT, 6, N, penalty, ends, early))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("eos", [None, 2, 7, 9])
@pytest.mark.parametrize("prompt", [[0], PROMPT, [12, 11, 10]], ids=str)
def test_one_beam_is_greedy_decoding(prompt, eos, early):
    model = TinyLM()
    row, = complete(model, [prompt], 8, eos_id=eos, logprobs=True)
    beam, = beam_search(model, prompt, 8, num_beams=1, eos_id=eos, early_stopping=early)
    assert (beam.ids, beam.new_ids, beam.finish_reason) == (row.ids, row.new_ids, row.finish_reason)
    assert beam.logprob == pytest.approx(sum(row.logprobs), abs=1e-9) and beam.score == pytest.approx(beam.logprob / len(row.new_ids))


def test_what_greedy_decoding_misses():
    """After 0 comes 1 with 0.5, but nothing likely follows; 2 with 0.4, and then surely 3."""
    model = table([0, .5, .4, .1], [.25, .25, .25, .25], [0, 0, .1, .9], [.25, .25, .25, .25])
    greedy, best = (beam_search(model, [0], 2, num_beams=n, use_cache=False)[0] for n in (1, 2))
    assert greedy.new_ids == [1, 0] and greedy.logprob == pytest.approx(math.log(.5 * .25))
    assert best.new_ids == [2, 3] and best.logprob == pytest.approx(math.log(.4 * .9)) and best.score == pytest.approx(best.logprob / 2)


EOS = 3
# From 0: the end at once with 0.3, or a long text 1 2 2 2 …, each id with 0.9 and 0.1 for the end.
LONG_OR_SHORT = ([0, .7, 0, .3], [0, 0, 1, 0], [0, 0, .9, .1], [0, 0, 0, 1])


@pytest.mark.parametrize("penalty, first", [(0.0, [1, 2, 2, 2]), (1.0, [1, 2, 2, 2]), (10, [1, 2, 2, 2]), (-1.0, [EOS]), (-10, [EOS])])
def test_the_penalty_orders_by_length(penalty, first):
    found = beam_search(table(*LONG_OR_SHORT), [0], 4, num_beams=4, num_return=4, length_penalty=penalty, eos_id=EOS, use_cache=False,
                        early_stopping="never")
    assert found[0].new_ids == first
    assert [beam.score for beam in found] == sorted((beam.logprob / len(beam.new_ids) ** penalty for beam in found), reverse=True)
    assert sorted(beam.new_ids for beam in found) == [[1, 2, 2, 2], [1, 2, 2, EOS], [1, 2, EOS], [EOS]]
    assert {tuple(beam.new_ids): beam.finish_reason for beam in found}[1, 2, 2, 2] == "length"


@pytest.mark.parametrize("early, penalty, passes, best", [
    (True, 1.0, 2, [1, EOS]), (False, 1.0, 3, [1, EOS]), ("never", 1.0, 12, [1, 4] + [0] * 10), ("never", 0.0, 3, [EOS]),
    ("never", -1.0, 3, [EOS])], ids=str)
def test_when_it_stops(early, penalty, passes, best):
    """Two texts end at once. The beam 1 4 is better, and one step later worse; but with the sure 0 0 0 … it would win in the end."""
    anything = [1 / 6] * 6
    model = table([1, 0, 0, 0, 0, 0], [0, 0, .1, .3, .6, 0], anything, anything, anything, [0, .6, 0, .4, 0, 0])
    calls = counting(model)
    found = beam_search(model, [5], 12, num_beams=2, num_return=2, length_penalty=penalty, eos_id=EOS, early_stopping=early,
                        use_cache=False)
    assert len(calls) == passes and found[0].new_ids == best
    assert_same(told(found), by_definition(next_logprobs(Table(model.logits.tolist())), [5], 12, 2, penalty, (EOS,), early))


def test_a_text_that_was_displaced_does_not_keep_the_search_going():
    """Kept are EOS, 0.3, and 1 2 EOS, 0.28; then 1 2 2 EOS, 0.17, is not, and the beam 1 2 2 2, 0.25, is worse than both."""
    model = table([0, .7, 0, .3], [0, 0, 1, 0], [0, 0, .6, .4], [0, 0, 0, 1])
    calls = counting(model)
    found = beam_search(model, [0], 20, num_beams=2, num_return=2, length_penalty=0, eos_id=EOS, use_cache=False)
    assert [beam.new_ids for beam in found] == [[EOS], [1, 2, EOS]] and len(calls) == 4


def test_several_ends_leave_room_for_a_beam_that_goes_on():
    """The two likeliest ids both end the text, and the third is the best in the long run."""
    model = table([0, .25, .4, .35], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])
    beam, = beam_search(model, [0], 6, num_beams=1, eos_id=(2, 3), use_cache=False, early_stopping="never")
    assert beam.new_ids == [1] * 6 and beam.score == pytest.approx(math.log(.25) / 6)


def test_an_end_that_is_not_among_the_best_is_dropped():
    """With two beams, an eos that ranks third is no text, though four candidates are looked at."""
    model = table([0, .5, .3, .2], [0, .5, .5, 0], [0, .5, .5, 0], [0, 0, 0, 1])
    found = beam_search(model, [0], 2, num_beams=2, num_return=2, length_penalty=-10, eos_id=EOS, use_cache=False)
    assert [beam.new_ids for beam in found] == [[1, 1], [1, 2]]            # a penalty by which the eos would have won


def test_a_beam_that_has_no_continuation_but_ends():
    """All beams end in one step, and nothing is left to search."""
    found = beam_search(table([0, .6, .4], [0, 0, 1], [0, 0, 1]), [0], 9, num_beams=3, num_return=3, eos_id=2, use_cache=False)
    assert [(beam.new_ids, beam.finish_reason) for beam in found] == [([1, 2], "eos"), ([2], "eos")]


def test_what_has_no_probability_is_never_written():
    model = table([0, 1, 0], [.5, 0, .5], [0, 0, 1])
    found = beam_search(model, [0], 2, num_beams=5, num_return=5, use_cache=False)
    assert [beam.new_ids for beam in found] == [[1, 0], [1, 2]]             # equals: the smaller id comes first


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("row", [0, 2])
def test_a_row_without_a_distribution_raises(row, bad):
    """Also where another beam has one."""
    logits = [[0.0, 1.0, 1.0] for _ in range(3)]
    logits[row] = [bad] * 3 if bad == -INF else [0.0, bad, 1.0]
    with pytest.raises(ValueError, match="NaN or \\+inf, or is all -inf"):
        beam_search(Table(logits), [0], 4, num_beams=2, use_cache=False)


# --- caches -----------------------------------------------------------------------------------------------------------------------

CACHES = {
    "KVCache": lambda: KVCache(LAYERS, T_MAX),
    "concatenating": lambda: ConcatKVCache(LAYERS),
    "paged": lambda: PagedKVCache(LAYERS, 40, block_size=3),
    "rolling, W ≥ T": lambda: RollingKVCache(LAYERS, T_MAX),
    "default": lambda: None,
}
every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


@every_cache
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("chunk", [None, 2])
def test_every_cache_gives_the_same_beams(make, position, chunk):
    """As without one; and the sums are those of a pass over the whole text."""
    model, cache, options = TinyLM(position, HEADS["GQA"]), make(), {"num_beams": 4, "num_return": 4, "eos_id": 7}
    found = beam_search(model, PROMPT, 7, cache=cache, prefill_chunk=chunk, **options)
    assert_same(told(found), told(beam_search(model, PROMPT, 7, use_cache=False, **options)))
    logprobs = next_logprobs(model)
    for beam in found:
        assert beam.ids == PROMPT + beam.new_ids
        assert beam.logprob == pytest.approx(logprob(logprobs, PROMPT, beam.new_ids), rel=0, abs=1e-9)
    assert cache is None or cache.length == 0
    if cache is not None:                               # and once more with the same cache
        assert told(beam_search(model, PROMPT, 7, cache=cache, prefill_chunk=chunk, **options)) == told(found)


@pytest.mark.parametrize("heads", HEADS)
def test_a_quantised_cache_within_its_error(heads):
    model = TinyLM("RoPE", HEADS[heads])
    logprobs = next_logprobs(model)
    for beam in beam_search(model, PROMPT, 7, num_beams=4, num_return=4, cache=QuantizedKVCache(LAYERS, T_MAX, bits=8)):
        assert beam.logprob == pytest.approx(logprob(logprobs, PROMPT, beam.new_ids), abs=0.3)


@pytest.mark.parametrize("chunk, prefill", [(None, [11]), (4, [4, 4, 3])], ids=str)
def test_beams_share_the_blocks_of_the_prompt(chunk, prefill):
    model, N, size = TinyLM(), 6, 2
    cache, used, forward = PagedKVCache(LAYERS, 30, block_size=size), [], model.forward

    def counted(token_ids, **options):
        logits = forward(token_ids, **options)
        used.append((token_ids.shape, cache.blocks_in_use))
        return logits
    model.forward = counted
    prompt = [*PROMPT, 2, 6, 5, 3, 5, 8]                # 11 tokens: 6 blocks, of which the last has room for one more
    found = beam_search(model, prompt, 3, num_beams=N, num_return=N, cache=cache, prefill_chunk=chunk)
    assert [tuple(shape) for shape, _ in used] == [*((1, T) for T in prefill), (N, 1), (N, 1)]      # the prompt is read once
    assert used[len(prefill) - 1][1] == 6 and 6 < max(blocks for _, blocks in used) <= 5 + 2 * N < N * 6
    assert cache.blocks_in_use == 0 and sorted(cache.pool.free) == list(range(30)) and not cache.pool.holders.any()
    assert len({tuple(beam.new_ids) for beam in found}) == N
    assert_same(told(found), told(beam_search(TinyLM(), prompt, 3, num_beams=N, num_return=N)))


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_after_an_error_the_cache_is_empty(make):
    model, cache, forward, calls = TinyLM(), make(), TinyLM().forward, []

    def fails(token_ids, cache):
        calls.append(cache)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(token_ids, cache=cache)
    model.forward = fails
    with pytest.raises(KeyboardInterrupt):
        beam_search(model, PROMPT, 7, cache=cache)
    assert calls[-1].length == 0
    assert not isinstance(cache, PagedKVCache) or cache.blocks_in_use == 0


def test_a_pool_that_is_too_small_raises_and_loses_nothing():
    cache = PagedKVCache(LAYERS, 4, block_size=2)
    with pytest.raises(ValueError, match="PagedKVCache"):
        beam_search(TinyLM(), PROMPT, 7, num_beams=8, cache=cache)
    assert cache.blocks_in_use == 0


# --- where it ends ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache": ConcatKVCache(LAYERS)}], ids=str)
def test_the_context_ends_the_texts(options):
    """A prompt of all positions but two: two more tokens are read, and a third is written."""
    prompt = [i % V_VOCAB for i in range(T_MAX - 2)]
    found = beam_search(TinyLM("learned"), prompt, 9, num_beams=3, num_return=3, **options)
    assert_same(told(found), by_definition(next_logprobs(TinyLM("learned")), prompt, 3, 3, at_end="context"))
    assert {beam.finish_reason for beam in beam_search(TinyLM("learned"), prompt, 3, **options)} == {"length"}


def test_a_smaller_cache_is_a_smaller_context():
    found = beam_search(TinyLM(), PROMPT, 9, cache=KVCache(LAYERS, 7))
    assert len(found[0].new_ids) == 3 and found[0].finish_reason == "context"
    with pytest.raises(ValueError, match="5 tokens, and the context is 4"):
        beam_search(TinyLM(), PROMPT, 9, cache=KVCache(LAYERS, 4))


def test_a_rolling_cache_reads_on():
    found = beam_search(TinyLM("RoPE"), PROMPT, 2 * T_MAX, num_beams=3, cache=RollingKVCache(LAYERS, 6, sinks=1))
    assert len(found[0].new_ids) == 2 * T_MAX and found[0].finish_reason == "length"
    inside = TinyLM("RoPE", max_seq_len=3 * T_MAX)
    expected = beam_search(inside, PROMPT, 2 * T_MAX, num_beams=3, cache=RollingKVCache(LAYERS, 6, sinks=1, slack=40))
    assert_same(told(found), told(expected))


def test_no_new_tokens():
    beam, = beam_search(TinyLM(), PROMPT, 0, num_beams=3, num_return=3)
    assert (beam.ids, beam.new_ids, beam.logprob, beam.score, beam.finish_reason) == (PROMPT, [], 0.0, 0.0, "length")


# --- arguments --------------------------------------------------------------------------------------------------------------------

def test_a_prompt_in_every_form():
    model, options = TinyLM(), {"num_beams": 3, "num_return": 2}
    expected = told(beam_search(model, PROMPT, 4, **options))
    for prompt in tuple(PROMPT), [PROMPT], torch.tensor(PROMPT), torch.tensor([PROMPT]), torch.tensor([PROMPT]).cpu().numpy():
        assert told(beam_search(model, prompt, 4, **options)) == expected
    assert expected == told(beam_search(model, PROMPT, 4, num_beams=3, num_return=3))[:2]


def test_the_mode_and_the_random_numbers_are_left_alone():
    model, other = TinyLM().train(), TinyLM()
    model.blocks[0].eval()
    modes, before = [module.training for module in model.modules()], torch.get_rng_state().tolist()
    found = beam_search(model, PROMPT, 4)
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    assert told(found) == told(beam_search(other, PROMPT, 4)) and torch.get_rng_state().tolist() == before


@pytest.mark.parametrize("options, error, match", [
    ({"num_beams": 0}, ValueError, "num_beams must be at least 1, got 0"),
    ({"num_beams": 2.0}, TypeError, "num_beams must be an integer"),
    ({"num_beams": True}, TypeError, "num_beams must be an integer"),
    ({"num_return": 0}, ValueError, "num_return must be at least 1, got 0"),
    ({"num_return": 5}, ValueError, "num_return=5 .* num_beams=4"),
    ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0, got -1"),
    ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens must be an integer"),
    ({"length_penalty": NAN}, ValueError, "length_penalty must be from -10 to 10, got nan"),
    ({"length_penalty": INF}, ValueError, "length_penalty must be from"),
    ({"length_penalty": -11}, ValueError, "length_penalty must be from"),
    ({"length_penalty": "1"}, TypeError, "length_penalty must be a number"),
    ({"length_penalty": None}, TypeError, "length_penalty must be a number"),
    ({"early_stopping": "always"}, ValueError, "early_stopping must be True, False or 'never', got 'always'"),
    ({"early_stopping": 1}, ValueError, "early_stopping must be"),
    ({"early_stopping": None}, ValueError, "early_stopping must be"),
    ({"eos_id": V_VOCAB}, ValueError, "eos_id must be of the vocabulary"),
    ({"eos_id": 1.0}, TypeError, "eos_id|iterable"),
    ({"prefill_chunk": 0}, ValueError, "prefill_chunk must be at least 1"),
    ({"prompt": []}, ValueError, "at least one token"),
    ({"prompt": [[]]}, ValueError, "at least one token"),
    ({"prompt": [V_VOCAB]}, IndexError, "outside the vocabulary"),
    ({"prompt": [1.5]}, ValueError, "must be ids"),
    ({"prompt": [PROMPT, PROMPT]}, ValueError, "got 2 rows: call it once for each"),
    ({"prompt": [0] * (T_MAX + 1)}, ValueError, f"{T_MAX + 1} tokens, and the context is {T_MAX}"),
    ({"prompt": "text"}, TypeError, "str"),
    ({"cache": []}, TypeError, "a cache of tinygrad_tf.generation is needed"),
    ({"cache": KVCache(LAYERS + 1, T_MAX)}, ValueError, f"{LAYERS + 1} layers, the model {LAYERS}"),
    ({"source": [1]}, TypeError, "what encode"),
], ids=str)
def test_what_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        beam_search(**{"model": TinyLM(), "prompt": PROMPT, "max_new_tokens": 3, **options})


# --- from a source ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [*CACHES.values(), None], ids=[*CACHES, "no cache"])
def test_an_encoder_decoder(make):
    """<bos> is the prompt; padding of the source stays unseen by every beam."""
    model = large(EncoderDecoder(9, 8, 12, 10, 16, 4, 24, LAYERS, dropout=0.0))
    ids = torch.tensor([[3, 1, 4, 1, 5, 0, 0], [8, 2, 8, 1, 8, 2, 8]])
    with torch.no_grad():
        source = model.encode(ids, ids != 0)
        alone = model.encode(ids[:1, :5])
    cache = {"use_cache": False} if make is None else {"cache": make()}
    for row in 0, 1:
        found = beam_search(model, [1], 6, num_beams=4, num_return=4, eos_id=2, source=source.select([row]), **cache)
        one = alone if row == 0 else source.select([1])
        assert_same(told(found), by_definition(next_logprobs(model, one), [1], 6, 4, 1.0, (2,)))
    with pytest.raises(ValueError, match="one row, got 2"):
        beam_search(model, [1], 6, source=source)
