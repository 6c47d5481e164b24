"""Speculative decoding: the target's distribution, exactly and drawn; the greedy text with every cache and draft; what is reported."""
import functools
import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf.generation import ConcatKVCache, KVCache, PagedKVCache, QuantizedKVCache, RollingKVCache, Sampler, complete, speculative
from tinygrad_tf.generation.speculative import (
    Draft,
    ModelDraft,
    NGramDraft,
    Proposal,
    SpeculativeBatch,
    acceptance,
    draw,
    judge,
    one_hot,
    overlap,
    residual,
    speculative_generate,
)
from tinygrad_tf.models import Decoder, EncoderDecoder, MiniGPT

ALMOST_1 = 1 - 2.0 ** -53


# --- the rule -----------------------------------------------------------------------------------------------------------------

def distribution(rng, V, zeros=0.0):
    p = rng.random(V) * (rng.random(V) >= zeros)
    p[rng.integers(V)] += 0.1
    return p / p.sum()


def pairs(seed=0, V=6):
    """(p, q): random ones, some with zeros, one-hot ones, equal and disjoint ones, and some that differ in the last digit."""
    rng = np.random.default_rng(seed)
    for zeros in (0.0, 0.0, 0.3, 0.6, 0.9):
        p, q = distribution(rng, V, zeros), distribution(rng, V, zeros)
        yield from [(p, q), (p, p), (p, one_hot([1], V)[0]), (one_hot([1], V)[0], q), (p, np.nextafter(p, 1))]
    yield one_hot([0], V)[0], one_hot([1], V)[0]
    yield np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.25, 0.75])


@pytest.mark.parametrize("p, q", list(pairs()))
def test_one_token_has_the_distribution_of_the_target(p, q):
    """Σ_x q(x) a(x) [x = y] + (1 − Σ_x q(x) a(x)) residual(y) = p(y), and Σ_x q(x) a(x) = Σ min(p, q) = 1 − ½ Σ |p − q|"""
    a, left = acceptance(p, q), residual(p, q)
    assert ((0 <= a) & (a <= 1)).all() and (left >= 0).all() and abs(left.sum() - 1) < 1e-12
    np.testing.assert_allclose(q * a + (1 - (q * a).sum()) * left, p, rtol=0, atol=1e-12)
    assert abs((q * a).sum() - overlap(p, q)) < 1e-12 and abs(1 - np.abs(p - q).sum() / 2 - overlap(p, q)) < 1e-12


def test_the_rule_in_numbers():
    p, q = [0.5, 0.2, 0.3, 0.0, 0.0], [0.1, 0.4, 0.3, 0.2, 0.0]
    np.testing.assert_allclose(acceptance(p, q), [1, 0.5, 1, 0, 0])
    np.testing.assert_allclose(residual(p, q), [1, 0, 0, 0, 0])
    assert overlap(p, q) == pytest.approx(0.6) and acceptance(0.3, 0) == 1 and acceptance(0, 0) == 0
    assert (residual(p, p) == p).all() and one_hot([2, 0], 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    for rule in acceptance, residual, overlap:                  # a row at a time, or many
        assert np.array_equal(rule([p, q], [q, q]), [rule(p, q), rule(q, q)])


@pytest.mark.parametrize("p", [[0.25, 0.5, 0.25], [0, 0.5, 0, 0.5, 0], [1.0], [0, 1, 0], [1e-300, 1], [0.1] * 10])
def test_a_draw_has_its_distribution(p):
    """Of equally spaced u each id gets its share; never one of probability 0, not at the ends either."""
    n = 4000
    found = np.bincount([draw(p, (i + 0.5) / n) for i in range(n)], minlength=len(p))
    assert np.abs(found - np.array(p) * n).max() <= 1
    assert (draw([p, p[::-1]], [0.3, 0.6]) == [draw(p, 0.3), draw(p[::-1], 0.6)]).all()         # a row at a time, or many
    possible = np.flatnonzero(p)
    assert (draw(p, 0.0), draw(p, ALMOST_1)) == (possible[0], possible[-1])


# --- every path -----------------------------------------------------------------------------------------------------------------

def random_tables(seed, V, length, zeros):
    """The next token's distribution after each text shorter than `length`."""
    rng = np.random.default_rng(seed)
    return {text: distribution(rng, V, zeros) for n in range(length) for text in itertools.product(range(V), repeat=n)}


def every_path(target, draft, k, length, text=()):
    """{text of `length` ids: its probability}: all drafts × all coins × all tokens, through `judge`, round after round."""
    if len(text) == length:
        return {text: 1.0}
    n, found = min(k, length - len(text) - 1), {}
    for drafted in itertools.product(range(len(target[()])), repeat=n):
        before = [text + drafted[:i] for i in range(n + 1)]
        p, q = np.array([target[t] for t in before]), np.array([draft[t] for t in before])[:n]
        a = [min(1, p[i][x] / q[i][x]) if q[i][x] else 0 for i, x in enumerate(drafted)]
        for outcome in itertools.product((True, False), repeat=n):
            chance = math.prod(q[i][x] for i, x in enumerate(drafted)) * math.prod(
                a_i if stands else 1 - a_i for a_i, stands in zip(a, outcome))
            if chance:                                          # coins close to the border at a
                coins = [a_i - 1e-9 if stands else a_i + 1e-9 for a_i, stands in zip(a, outcome)]
                accepted, following = speculative.judge(p, q, drafted, coins)
                for token in np.flatnonzero(following):
                    later = every_path(target, draft, k, length, text + drafted[:accepted] + (int(token),))
                    for whole, share in later.items():
                        found[whole] = found.get(whole, 0) + chance * following[token] * share
    return found


def assert_target(target, found, length):
    wanted = {text: math.prod(target[text[:i]][x] for i, x in enumerate(text)) for text in itertools.product(
        range(len(target[()])), repeat=length)}
    for text, p in wanted.items():
        assert abs(found.get(text, 0) - p) < 1e-12, text


TABLES = [(zeros, k, length) for zeros in (0.0, 0.5) for k, length in ((1, 2), (2, 2), (2, 3), (3, 3))]


@pytest.mark.parametrize("zeros, k, length", TABLES)
def test_all_paths_together_are_the_target(zeros, k, length):
    """p(y_1) p(y_2 | y_1) … to within 1e-12, for a draft of its own, one that is the target, and one without chance."""
    target, other = (random_tables(seed, 3, length, zeros) for seed in (1, 2))
    certain = {text: one_hot([sum(text) % 3], 3)[0] for text in target}
    for draft in other, target, certain:
        assert_target(target, every_path(target, draft, k, length), length)


def all_or_none(p, q, drafted, coins):
    n, following = judge(p, q, drafted, coins)
    return (n, following) if n == len(drafted) else (0, residual(p[0], q[0]))


def bonus_of_the_last_draft(p, q, drafted, coins):
    n, following = judge(p, q, drafted, coins)
    return n, p[max(n - 1, 0)] if n == len(drafted) else following


WRONG = {"all stand": ("acceptance", lambda p, q: np.ones(np.shape(p))), "none stands": ("acceptance", lambda p, q: np.zeros(np.shape(p))),
         "q / p": ("acceptance", lambda p, q: acceptance(q, p)), "p alone": ("acceptance", lambda p, q: p),
         "p again": ("residual", lambda p, q: p), "the other way": ("residual", lambda p, q: residual(q, p)),
         "all or none": ("judge", all_or_none), "the bonus of another place": ("judge", bonus_of_the_last_draft)}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_another_distribution(what, monkeypatch):
    monkeypatch.setattr(speculative, *WRONG[what])
    target, draft = (random_tables(seed, 3, 3, 0.0) for seed in (1, 2))
    with pytest.raises(AssertionError):
        assert_target(target, every_path(target, draft, 2, 3), 3)


# --- what is drawn --------------------------------------------------------------------------------------------------------------

V, NEW, DRAWS, ROWS = 5, 3, 20_000, 1000
PROMPT = [1, 2, 0, 1, 2]                                        # its ending stood before: there is something to copy
SAMPLER = Sampler(temperature=1.3)


def randomized(model, seed, std):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(std * torch.randn(p.shape, generator=generator))
    return model.double().eval()


def language_model(seed=1, std=0.4, noise=0.0, size=V, context=10):
    """A model of one layer; `noise` moves its weights somewhat."""
    torch.manual_seed(0)
    return randomized(randomized(MiniGPT(size, context, 8, 2, 16, 1, dropout=0.0), seed, std), 7, noise)


DRAFTS = {"a good one": lambda: ModelDraft(language_model(noise=0.08)), "a bad one": lambda: ModelDraft(language_model(seed=2, std=0.6)),
          "n-grams": lambda: NGramDraft()}


@functools.cache
def exact():
    """[V, V, V]: the probability of each continuation of PROMPT, from the uncached model."""
    texts = list(itertools.product(range(V), repeat=NEW - 1))
    with torch.no_grad():
        logits = language_model()(torch.tensor([[*PROMPT, *text] for text in texts]))[0][:, len(PROMPT) - 1:]
    p = np.stack([SAMPLER.probabilities(logits[:, i], [[*PROMPT, *text[:i]] for text in texts]) for i in range(NEW)], axis=1)
    first = p[np.arange(len(texts)), 0, [text[0] for text in texts]]
    second = p[np.arange(len(texts)), 1, [text[1] for text in texts]]
    return ((first * second)[:, None] * p[:, 2]).reshape(V, V, V)


def texts_drawn(draft, seed, draws=DRAWS, sampler=SAMPLER):
    """[draws, NEW], by batches of many rows; and all runs."""
    generator, found, runs = torch.Generator().manual_seed(seed), [], []
    for _ in range(draws // ROWS):
        rows, _ = speculative_generate(language_model(), [PROMPT] * ROWS, NEW, draft, k=2, sampler=sampler, generator=generator,
                                       max_rows=ROWS, on_event=runs.append)
        found += [row.new_ids for row in rows]
    return np.array(found), runs


def critical(freedom, surprise=1e-5):
    """What χ² exceeds with this probability (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + NormalDist().inv_cdf(1 - surprise) * math.sqrt(spread)) ** 3


def surprise(texts):
    """χ² = Σ (count − n p)² / (n p) over all texts [n, tokens], divided by its critical value."""
    length = texts.shape[1]
    wanted = len(texts) * exact().sum(axis=tuple(range(length, NEW))).ravel()
    counts = np.bincount(np.ravel_multi_index(texts.T, (V,) * length), minlength=V ** length)
    assert wanted.min() >= 5
    return float(((counts - wanted) ** 2 / wanted).sum()) / critical(len(wanted) - 1)


@pytest.mark.host("the rule is the host's; fewer draws are made on every device below")
@pytest.mark.parametrize("kind", DRAFTS)
def test_texts_have_the_distribution_of_the_target(kind):
    """Three tokens together, 20,000 times: χ² is below what chance exceeds once in 100,000."""
    texts, runs = texts_drawn(DRAFTS[kind](), seed=3)
    assert texts.shape == (DRAWS, NEW) and surprise(texts) < 1
    outcomes = [sum(len(run.drafted) == 2 and run.accepted == n for run in runs) for n in range(3)]
    assert min(outcomes) > DRAWS / 100                          # neither rejections nor bonus tokens were rare


@pytest.mark.parametrize("what", ["all stand", "p again"])
def test_texts_by_a_wrong_rule_have_not(what, monkeypatch):
    monkeypatch.setattr(speculative, *WRONG[what])
    texts, _ = texts_drawn(DRAFTS["a bad one"](), seed=3, draws=4000)
    assert surprise(texts[:, :2]) > 3


def test_a_draft_may_have_a_sampler_of_its_own():
    draft = ModelDraft(language_model(), sampler=Sampler(temperature=0.7, top_k=3))
    texts, runs = texts_drawn(draft, seed=5, draws=4000)
    assert surprise(texts[:, :2]) < 1
    assert 0.3 < sum(run.accepted for run in runs) / sum(run.tested for run in runs) < 0.95


def test_critical_values():
    """With two degrees of freedom χ² is exceeded with probability e^(−χ²/2); for 30 a table says 59.70 at 0.001."""
    for freedom, chance, wanted in (2, 1e-5, 10 * math.log(10)), (30, 0.001, 59.70):
        assert 0.999 * wanted < critical(freedom, chance) < 1.08 * wanted


# --- greedy: the same text ------------------------------------------------------------------------------------------------------

PROMPTS = [[3, 9, 4], [1, 2, 3, 1, 2, 3], [5]]
SIZE, CONTEXT, MORE = 13, 12, 8                                 # with 8 more tokens, the second prompt comes to the end of the context


@functools.cache
def target(context=CONTEXT):
    torch.manual_seed(0)
    return randomized(Decoder(SIZE, context, 16, 4, 32, 1, num_kv_heads=2), 6, 0.7)


@functools.cache
def relative():
    """The target, a little off."""
    model = Decoder(SIZE, CONTEXT, 16, 4, 32, 1, num_kv_heads=2).double()
    model.load_state_dict(target().state_dict())
    return randomized(model, 3, 0.08)


@functools.cache
def stranger(context=CONTEXT):
    return language_model(seed=5, std=0.5, size=SIZE, context=context)


CACHES = {
    "no cache": lambda: {"use_cache": False},
    "concatenating": lambda: {"cache": ConcatKVCache(1)},
    "preallocated": lambda: {"cache": KVCache(1, CONTEXT)},
    "paged": lambda: {"cache": PagedKVCache(1, 10, block_size=4)},
    "rolling": lambda: {"cache": RollingKVCache(1, CONTEXT, slack=5)},
    "quantised": lambda: {"cache": QuantizedKVCache(1, CONTEXT)},
}
PROPOSERS = {
    "the target": lambda: ModelDraft(target()),
    "a relative": lambda: ModelDraft(relative(), ConcatKVCache(1)),
    "a stranger, paged": lambda: ModelDraft(stranger(), PagedKVCache(1, 10, block_size=4)),
    "a relative, rolling": lambda: ModelDraft(relative(), RollingKVCache(1, 4, slack=5)),          # its positions do not end
    "a stranger, quantised": lambda: ModelDraft(stranger(), QuantizedKVCache(1, CONTEXT, bits=4)),
    "n-grams": lambda: NGramDraft(),
}
every_draft = pytest.mark.parametrize("draft", PROPOSERS)


def told(rows):
    return [(row.ids, row.finish_reason) for row in rows]


@functools.cache
def plain(kind):
    return told(complete(target(), PROMPTS, MORE, **CACHES[kind]()))


@pytest.mark.parametrize("kind", CACHES)
@every_draft
def test_the_greedy_text(draft, kind):
    """One prompt, and three of unequal lengths, one of which comes to the end of the context; k = 1, 3, 5."""
    assert [reason for _, reason in plain(kind)] == ["length", "length" if kind == "rolling" else "context", "length"]
    for k, prompts in itertools.product((1, 3, 5), (PROMPTS[:1], PROMPTS)):
        rows, report = speculative_generate(target(), prompts, MORE, PROPOSERS[draft](), k, **CACHES[kind]())
        assert told(rows) == plain(kind)[:len(prompts)]
        if draft == "the target" and kind != "quantised":
            assert report.accepted == report.drafted > 0


def test_some_drafts_stand_and_some_do_not():
    """What the table above is worth: of three drafts none stood, and some, and all."""
    runs = []
    for draft in "a relative", "n-grams":
        speculative_generate(target(), PROMPTS, MORE, PROPOSERS[draft](), 3, on_event=runs.append)
    speculative_generate(target(), PROMPTS, MORE, PROPOSERS["the target"](), 3, on_event=runs.append)
    assert {run.accepted for run in runs if len(run.drafted) == 3} == {0, 1, 2, 3}


@pytest.mark.parametrize("draft", ["a relative, rolling", "a stranger, paged", "n-grams"])
@pytest.mark.parametrize("window, sinks", [(5, 0), (4, 2)])
def test_a_rolling_cache_gives_back_what_a_rejected_draft_overwrote(draft, window, sinks):
    """A text far longer than window and context: as without drafts. slack = k is enough, and one less is refused."""
    sampler = Sampler(temperature=0, frequency_penalty=1.0)              # a text that does not go round in circles
    wanted = told(complete(target(), PROMPTS, 30, cache=RollingKVCache(1, window, sinks), sampler=sampler))
    assert wanted != told(complete(target(99), PROMPTS, 30, sampler=sampler))       # the window matters
    for k in 1, 3, 5:
        runs = []
        rows, _ = speculative_generate(target(), PROMPTS, 30, PROPOSERS[draft](), k, cache=RollingKVCache(1, window, sinks, slack=k),
                                       sampler=sampler, on_event=runs.append)
        assert told(rows) == wanted
        assert draft == "a stranger, paged" or any(run.accepted < len(run.drafted) for run in runs[-20:])   # it has no places there
        with pytest.raises(ValueError, match=f"the target's RollingKVCache keeps slack={k - 1}; build it with slack={k}"):
            speculative_generate(target(), PROMPTS, 30, NGramDraft(), k, cache=RollingKVCache(1, window, sinks, slack=k - 1))


@pytest.mark.parametrize("draft", ["a relative", "a relative, rolling", "n-grams"])
@pytest.mark.parametrize("options", [{"padding": "left"}, {"prefill_chunk": 2}, {"prefill_chunk": 1, "max_rows": 2},
                                     {"padding": "left", "prefill_chunk": 3}, {"at_limit": "slide"},
                                     {"at_limit": "slide", "use_cache": False}, {"max_rows": 1}], ids=str)
def test_all_else_is_as_in_a_batch(draft, options):
    """The options, with a text that is longer than the context where that may slide; and ln p of each token."""
    options = {**options, "logprobs": True}
    wanted = complete(target(), PROMPTS, 20, **options)
    rows, _ = speculative_generate(target(), PROMPTS, 20, PROPOSERS[draft](), 3, **options)
    assert told(rows) == told(wanted)
    for row, other in zip(rows, wanted):
        np.testing.assert_allclose(row.logprobs, other.logprobs, rtol=0, atol=1e-9)


@every_draft
def test_penalties_count_what_is_drafted(draft):
    """Greedy, so that one wrong count would show; and a draft with the history of the target's agrees with it in everything."""
    sampler = Sampler(temperature=0, repetition_penalty=1.6, frequency_penalty=0.9, logit_bias={3: 0.5})
    wanted = told(complete(target(), PROMPTS, MORE, sampler=sampler))
    assert wanted != plain("preallocated")
    rows, report = speculative_generate(target(), PROMPTS, MORE, PROPOSERS[draft](), 5, sampler=sampler)
    assert told(rows) == wanted
    if draft == "the target":
        assert report.accepted == report.drafted > 0


@pytest.mark.parametrize("k", [1, 4])
def test_a_draft_that_is_the_target_stands(k):
    """Drawn ones too, by all filters: p = q, so that all stand, and each pass gives k + 1 tokens."""
    sampler = Sampler(temperature=0.9, top_k=9, top_p=0.95, min_p=0.01, presence_penalty=0.3, repetition_penalty=1.2)
    rows, report = speculative_generate(target(), [[1], [2, 3]] * 10, 2 * (k + 1), ModelDraft(target()), k, sampler=sampler, seed=0)
    assert report.accepted == report.tested == report.drafted == 40 * k and report.rounds == 40
    assert report.acceptance_rate == 1 and report.expected_rate == pytest.approx(1, abs=1e-6) and report.tokens_per_pass == k + 1
    assert len({tuple(row.new_ids) for row in rows}) > 8


def test_greedy_text_by_a_draft_that_draws():
    """With the row's numbers. Without a draw nothing is taken from the default generator, with some they are from there."""
    draft, first = ModelDraft(relative(), sampler=Sampler(temperature=1.5)), set()
    state = torch.get_rng_state()
    for seed in range(5):
        runs = []
        rows, report = speculative_generate(target(), PROMPTS, MORE, draft, 3, seed=seed, on_event=runs.append)
        assert told(rows) == plain("preallocated") and 0 < report.acceptance_rate < 1
        first.add(tuple(runs[0].drafted))
    assert len(first) > 2
    speculative_generate(target(), PROMPTS, MORE, ModelDraft(relative()))
    assert torch.equal(state, torch.get_rng_state())
    speculative_generate(target(), PROMPTS, MORE, draft)
    assert not torch.equal(state, torch.get_rng_state())


# --- rows -----------------------------------------------------------------------------------------------------------------------

def seeded(prompts, draft, seed=0, **options):
    return told(speculative_generate(target(), prompts, MORE, draft, 3, sampler=Sampler(temperature=1.2), seed=seed, **options)[0])


@every_draft
def test_a_row_does_not_depend_on_its_neighbours(draft):
    """Alone, together, a few at a time, without room for all, and with a draft that has served before: one text a seed."""
    alone = [seeded([prompt], PROPOSERS[draft](), seed=i)[0] for i, prompt in enumerate(PROMPTS)]
    used = PROPOSERS[draft]()
    for options in {}, {"max_rows": 2}, {"padding": "left", "prefill_chunk": 2}, {"use_cache": False}, {"cache": PagedKVCache(1, 6, 4)}:
        assert seeded(PROMPTS, used, **options) == alone
    assert seeded(PROMPTS, used, seed=100) != alone


def test_where_blocks_are_few_less_is_drafted():
    """A pool that holds one row's whole text and no more drafts."""
    cache = PagedKVCache(1, CONTEXT // 2, block_size=2)
    rows, _ = speculative_generate(target(), PROMPTS, MORE, NGramDraft(), 5, cache=cache)
    assert told(rows) == plain("preallocated") and cache.blocks_in_use == 0
    with pytest.raises(ValueError, match="blocks"):
        speculative_generate(target(), PROMPTS, MORE, NGramDraft(), 5, cache=PagedKVCache(1, 2, block_size=2))


@every_draft
def test_a_run_ends_at_eos(draft):
    """Whatever stood behind it; with several ids, and with one that comes at once."""
    texts = [ids[len(prompt):] for prompt, (ids, _) in zip(PROMPTS, plain("preallocated"))]
    for eos_id in [texts[0][2]], [texts[1][1], texts[2][3]], [texts[0][0]]:
        wanted = told(complete(target(), PROMPTS, MORE, eos_id=eos_id))
        rows, report = speculative_generate(target(), PROMPTS, MORE, PROPOSERS[draft](), 5, eos_id=eos_id)
        assert told(rows) == wanted and "eos" in [row.finish_reason for row in rows]
        assert report.tokens == sum(len(row.new_ids) for row in rows)


class Letters:
    """Each id is a letter, and ids above 9 are two."""

    def encode(self, text):
        return ["abcdefghij".index(letter) for letter in text]

    def decode(self, ids):
        return "".join("abcdefghij"[i] if i < 10 else "xy" for i in ids)


@every_draft
def test_stop_strings_and_pieces(draft):
    """A stop string within a run, and over its border; the pieces of all steps are the text."""
    prompts = ["dje", "bcdbcd", "f"]
    whole = complete(target(), prompts, MORE, tokenizer=Letters())
    for stop in [], [whole[0].text[2:5]], [whole[1].text[1:3], whole[2].text[-2:]]:
        wanted = complete(target(), prompts, MORE, tokenizer=Letters(), stop=stop)
        batch = SpeculativeBatch(target(), PROPOSERS[draft](), tokenizer=Letters(), k=4)
        rows = [batch.add(prompt, MORE, stop=stop) for prompt in prompts]
        pieces = {row: "" for row in rows}
        for row in batch:
            pieces[row] += row.piece
        assert told(rows) == told(wanted) and [row.text for row in rows] == [row.text for row in wanted]
        assert [pieces[row] for row in rows] == [row.text for row in rows]


@pytest.mark.parametrize("context", [2, 4, 7])
@pytest.mark.parametrize("at_limit", ["stop", "slide"])
def test_a_draft_with_a_smaller_context(context, at_limit):
    """It proposes as long as it has positions; then the target writes on alone."""
    runs = []
    rows, _ = speculative_generate(target(), PROMPTS, MORE, ModelDraft(stranger(context)), 3, at_limit=at_limit, on_event=runs.append)
    assert told(rows) == told(complete(target(), PROMPTS, MORE, at_limit=at_limit))
    begins = {row: len(row.prompt) for row in rows}
    for run in runs:                                            # of n drafts it reads the text and n − 1
        wanted = min(3, MORE - begins[run.row] + len(run.row.prompt) - 1, CONTEXT - begins[run.row], context + 1 - begins[run.row])
        assert begins[run.row] > CONTEXT or len(run.drafted) == max(wanted, 0)
        begins[run.row] += run.taken


def test_rows_may_join_and_leave():
    runs = []
    batch = SpeculativeBatch(target(), PROPOSERS["a relative"](), k=3, on_event=runs.append)
    first = batch.add(PROMPTS[0], MORE)
    gone = batch.add(PROMPTS[0][::-1], MORE)
    batch.step()
    second = batch.add(PROMPTS[1], MORE)
    batch.remove(gone)
    batch.step()
    third = batch.add(PROMPTS[2], MORE)
    batch.run()
    assert told([first, second, third]) == plain("preallocated") and gone.finish_reason is None and len(gone.new_ids) < 5
    assert batch.speed.prefill_tokens == sum(map(len, PROMPTS)) + 3
    prompts = {run.row: run for run in reversed(runs)}.values()                     # the first of each row
    assert batch.speed.decode_tokens == sum(len(run.ids) for run in runs) - sum(len(run.ids) for run in prompts)
    assert batch.cache.lengths is None and batch.draft.cache.lengths is None        # nothing is held of rows that have ended


class Failing:
    """A model that fails once, in its nth pass."""

    def __init__(self, model, n):
        self.model, self.n = model, n

    def __enter__(self):
        forward = self.model.forward

        def failing(*args, **options):
            self.n -= 1
            logits = forward(*args, **options)
            if self.n == 0:
                raise KeyboardInterrupt
            return logits
        self.model.forward = failing
        return self

    def __exit__(self, *error):
        del self.model.forward


def interrupted(who, n):
    """(rows, passes that were left to the interruption); one row of four joins while another goes on."""
    draft = ModelDraft(relative(), PagedKVCache(1, 10, block_size=4))
    batch = SpeculativeBatch(target(), draft, k=3, max_rows=2)
    rows = [batch.add(prompt, length, sampler=Sampler(temperature=1.2), seed=i)
            for i, (prompt, length) in enumerate(zip([*PROMPTS, [7, 7]], (3, 6, 8, 4)))]
    with Failing(who(), n) as failing:
        try:
            batch.run()
        except KeyboardInterrupt:
            assert batch.waiting and not batch.live
            assert who is target or draft.cache.blocks_in_use == 0          # with the frames of the error still there
            batch.run()
    assert batch.report.tokens == sum(len(row.new_ids) for row in rows)
    return rows, failing.n


@pytest.mark.parametrize("who", [target, relative], ids=["the target", "the draft"])
def test_an_interrupted_step_changes_no_text(who):
    """Drawn texts, interrupted in each of the passes: the step that is made again uses the same numbers."""
    wanted, left = interrupted(who, 999)
    for n in range(1, 999 - left + 1):
        rows, left = interrupted(who, n)
        assert told(rows) == told(wanted) and left <= 0
    assert n > 6


def test_a_row_that_has_ended_does_not_come_back_after_an_error():
    """Row 0 comes to its end in the step in which the tokenizer has no text for the token of row 1."""
    class Few(Letters):
        def decode(self, ids):
            if broken:
                raise KeyError(ids[0])
            return super().decode(ids)
    broken = True
    batch = SpeculativeBatch(target(), NGramDraft(), tokenizer=Few(), k=1)
    text = plain("preallocated")[0][0][len(PROMPTS[0]):]
    done = batch.add(PROMPTS[0], MORE, eos_id=text[0])
    other = batch.add(PROMPTS[1], 2)
    with pytest.raises(KeyError):
        batch.step()
    broken = False
    batch.run()
    assert done.new_ids == text[:1] and done.finish_reason == "eos" and other.finish_reason == "length"


def test_a_tokenizer_that_fails_loses_nothing():
    """At each of its calls: the rest of the run is given in the next step, and each run is told once."""
    class Once(Letters):
        def decode(self, ids):
            self.calls -= 1
            if self.calls == 0:
                raise KeyError(ids[0])
            return super().decode(ids)
    wanted = complete(target(), PROMPTS, MORE, tokenizer=Letters(), stop=["zz"])
    for calls in range(1, sum(len(row.new_ids) for row in wanted) + 1):
        runs, tokenizer = [], Once()
        tokenizer.calls = calls
        batch = SpeculativeBatch(target(), ModelDraft(target()), tokenizer=tokenizer, k=2, on_event=runs.append)
        rows = [batch.add(prompt, MORE, stop=["zz"]) for prompt in PROMPTS]
        pieces = {row: "" for row in rows}
        for _ in range(2):
            try:
                for row in batch:
                    pieces[row] += row.piece
            except KeyError:
                pass
        assert told(rows) == told(wanted) and [pieces[row] for row in rows] == [row.text for row in wanted]
        assert batch.report.tokens == sum(run.taken for run in runs) == sum(len(row.new_ids) for row in rows)


# --- drafts ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ids, n, count, wanted", [
    ([1, 2, 3, 9, 1, 2, 3], 3, 2, [9, 1]),
    ([1, 2, 3, 9, 1, 2, 3], 3, 9, [9, 1, 2, 3, 9, 1, 2, 3, 9]),             # it reads on into what it copies
    ([7, 2, 3, 5, 4, 2, 3], 3, 1, [5]),                                     # the longest ending that stood before: of two
    ([1, 2, 8, 1, 2, 9, 1, 2], 3, 1, [9]),                                  # the latest place
    ([2, 3, 8, 3, 9, 2, 3], 3, 1, [8]),                                     # the longer ending before the later place
    ([2, 3, 8, 3, 9, 2, 3], 1, 1, [9]),
    ([4, 4, 4], 3, 3, [4, 4, 4]), ([1, 2, 3], 3, 4, []), ([1], 3, 4, []), ([1, 1], 3, 0, []),
])
def test_n_grams(ids, n, count, wanted):
    before = list(ids)
    assert NGramDraft(n).followers(ids, count) == wanted and ids == before


def passes(draft, prompts):
    """The columns of each pass of the draft, and the runs."""
    columns, runs, forward = [], [], draft.model.forward

    def recorded(token_ids, **options):
        columns.append(token_ids.shape[1])
        return forward(token_ids, **options)
    draft.model.forward = recorded
    try:
        speculative_generate(target(), prompts, MORE, draft, 2, sampler=Sampler(temperature=1.5), seed=4, on_event=runs.append)
    finally:
        del draft.model.forward
    return columns, [run for run in runs if run.drafted]


@pytest.mark.parametrize("draft", [kind for kind in PROPOSERS if kind not in ("n-grams", "the target")])
def test_a_model_draft_reads_each_token_once(draft):
    """The prompt; then one token, or two where all proposals stood, whose last it has not read; then its proposals but the last."""
    wanted = []
    columns, runs = passes(PROPOSERS[draft](), PROMPTS[:1])
    for run, before in zip(runs, [None, *runs]):
        first = 3 if before is None else 2 if before.accepted == len(before.drafted) else 1
        wanted += [first] + [1] * (len(run.drafted) - 1)
    assert columns == wanted
    columns, _ = passes(PROPOSERS[draft](), PROMPTS)
    assert columns[0] == 6 and set(columns[1:]) == {1, 2}


class Watched(ModelDraft):
    """Compares each q with what the model makes of the text anew, without a cache."""
    compared = 0

    def propose(self, rows, counts, uniforms):
        proposals = super().propose(rows, counts, uniforms)
        for row, (ids, q) in zip(rows, proposals):
            for i in range(len(ids)):
                with torch.no_grad():
                    logits = self.model(torch.tensor([[*row.window, *ids[:i]]]))[0][:, -1]
                np.testing.assert_allclose(q[i], row.sampler.probabilities(logits)[0], rtol=0, atol=1e-6)
                self.compared += 1
        return proposals


@pytest.mark.parametrize("at_limit", ["stop", "slide"])
@pytest.mark.parametrize("cache", [lambda: ConcatKVCache(1), lambda: KVCache(1, CONTEXT), lambda: PagedKVCache(1, 12, block_size=4),
                                   lambda: RollingKVCache(1, CONTEXT, slack=3)], ids=["concatenating", "preallocated", "paged", "rolling"])
def test_q_is_what_the_draft_makes_of_the_text(cache, at_limit):
    """Whatever was rejected before, while rows join and leave, and when the window has slid."""
    draft = Watched(relative(), cache())
    speculative_generate(target(), [*PROMPTS, [7, 7], [0]], 25, draft, 3, sampler=Sampler(temperature=1.2), seed=8, max_rows=3,
                         at_limit=at_limit, eos_id=11)
    assert draft.compared > 40


class Fixed(Draft):
    """Proposes what it is told, whatever the text."""

    def __init__(self, ids, q=None):
        self.ids, self.q = ids, q

    def propose(self, rows, counts, uniforms):
        return [Proposal(self.ids[:n] if self.q is None else self.ids, self.q) for n in counts]


def test_a_draft_of_ones_own():
    for ids in [], [0], [4, 4, 4], [12, 0, 1, 3]:
        assert told(speculative_generate(target(), PROMPTS, MORE, Fixed(ids))[0]) == plain("preallocated")
    with pytest.raises(ValueError, match="Fixed.propose: up to 4 ids were asked for, and a row of q for each; got 5 ids and 5 rows of q"):
        speculative_generate(target(), PROMPTS, MORE, Fixed([1] * 5, one_hot([1] * 5, SIZE)))
    with pytest.raises(ValueError, match="got 2 ids and 1 rows of q"):
        speculative_generate(target(), PROMPTS, MORE, Fixed([1] * 2, one_hot([1], SIZE)))
    with pytest.raises(NotImplementedError, match=r"Draft must have propose\(rows, counts, uniforms\)"):
        speculative_generate(target(), PROMPTS, MORE, Draft())


def test_an_encoder_decoder_with_n_grams():
    """Two sources, each with its own text."""
    torch.manual_seed(4)
    model = randomized(EncoderDecoder(SIZE, SIZE, 8, CONTEXT, 16, 2, 32, 1, dropout=0.0), 2, 0.5)
    with torch.no_grad():
        source = model.encode(torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]]))
    wanted = told(complete(model, [[1], [1, 2]], MORE, source=source))
    assert wanted[0][0][1:] != wanted[1][0][2:]
    assert told(speculative_generate(model, [[1], [1, 2]], MORE, NGramDraft(2), 3, source=source)[0]) == wanted


# --- what is reported -----------------------------------------------------------------------------------------------------------

def marks_of(drafted, accepted, token, taken):
    return [(i, mark[0]) for i, mark in speculative.Run(None, drafted, accepted, token, 0.0, taken).marks]


def test_marks():
    """a = accepted, r = rejected, c = corrected, b = bonus, p = plain."""
    assert marks_of([1, 2, 3], 3, 9, 4) == [(1, "a"), (2, "a"), (3, "a"), (9, "b")]
    assert marks_of([1, 2, 3], 1, 9, 2) == [(1, "a"), (2, "r"), (9, "c")]
    assert marks_of([1, 2, 3], 0, 9, 1) == [(1, "r"), (9, "c")]
    assert marks_of([], 0, 9, 1) == [(9, "p")]
    assert marks_of([1, 2, 3], 2, 9, 2) == [(1, "a"), (2, "a")] and marks_of([1, 2, 3], 3, 9, 1) == [(1, "a")]    # an eos within


@every_draft
def test_the_report_is_the_sum_of_the_runs(draft):
    runs = []
    rows, report = speculative_generate(target(), PROMPTS, MORE, PROPOSERS[draft](), 3, sampler=Sampler(temperature=1.5), seed=2,
                                        eos_id=7, on_event=runs.append)
    for row in rows:
        marks = [mark for run in runs if run.row is row for mark in run.marks]
        assert [i for i, mark in marks if mark != "rejected"] == row.new_ids
    assert report.rounds == len(runs) and report.drafted == sum(len(run.drafted) for run in runs)
    assert report.accepted == sum(run.accepted for run in runs) and report.tokens == sum(len(row.new_ids) for row in rows)
    assert report.tested - report.accepted == sum(run.accepted < len(run.drafted) for run in runs)
    assert report.prefills == 3 and min(report.prefill_seconds, report.target_seconds, report.draft_seconds) > 0
    assert f"{report.accepted} of {report.tested} tested drafts accepted" in str(report)


def test_speedup():
    """Two prompts read in 3 s; then 10 rounds in 5 s gave 30 tokens: alone, 3 + 30 · 0.5 s. The draft took 2 s."""
    report = speculative.Report(rounds=12, prefills=2, tokens=32, prefill_seconds=3.0, target_seconds=5.0, draft_seconds=2.0)
    assert report.seconds == 10 and report.speedup == pytest.approx(18 / 10) and report.tokens_per_pass == pytest.approx(32 / 12)
    _, report = speculative_generate(target(), PROMPTS, MORE, NGramDraft(), use_cache=False)
    assert math.isnan(report.speedup)


@pytest.mark.parametrize("draft", ["a relative", "a relative, rolling", "n-grams"])
def test_acceptance_is_the_mean_overlap(draft):
    """Within five standard deviations of a coin; and it is neither 0 nor 1."""
    rows, report = speculative_generate(target(), PROMPTS * 60, MORE, PROPOSERS[draft](), 3, sampler=Sampler(temperature=1.2), seed=0,
                                        max_rows=180)
    alpha = report.expected_rate
    assert 0.05 < alpha < 0.95 and report.tested > 400
    assert abs(report.acceptance_rate - alpha) < 5 * math.sqrt(alpha * (1 - alpha) / report.tested)


def test_nothing_to_do():
    rows, report = speculative_generate(target(), [], MORE, NGramDraft())
    assert rows == [] and math.isnan(report.acceptance_rate) and math.isnan(report.tokens_per_pass)
    (row,), report = speculative_generate(target(), PROMPTS[:1], 0, NGramDraft())
    assert row.new_ids == [] and row.finish_reason == "length" and report.rounds == 0
    (row,), report = speculative_generate(target(), PROMPTS[:1], 1, ModelDraft(target()))
    assert len(row.new_ids) == 1 and report.drafted == 0 and report.tokens_per_pass == 1


# --- what is refused ------------------------------------------------------------------------------------------------------------

def used_cache():
    cache = KVCache(1, 8)
    with torch.no_grad():
        target()(torch.tensor([[1]]), cache=cache)
    return cache


shared = ConcatKVCache(1)
REFUSED = [
    (ValueError, "k must be at least 1, got 0", lambda: speculative_generate(target(), PROMPTS, 3, NGramDraft(), 0)),
    (TypeError, "k must be an integer", lambda: speculative_generate(target(), PROMPTS, 3, NGramDraft(), 2.0)),
    (ValueError, "n must be at least 1, got 0", lambda: NGramDraft(0)),
    (TypeError, "n must be an integer", lambda: NGramDraft(True)),
    (TypeError, "draft must be a ModelDraft", lambda: speculative_generate(target(), PROMPTS, 3, target())),
    (TypeError, "sampler must be a generation.Sampler", lambda: ModelDraft(target(), sampler=0.7)),
    (TypeError, "a cache of tinygrad_tf.generation is needed", lambda: ModelDraft(target(), [])),
    (ValueError, "the cache has 2 layers, the model 1", lambda: ModelDraft(target(), ConcatKVCache(2))),
    (ValueError, "holds 1 tokens already", lambda: ModelDraft(target(), used_cache())),
    (ValueError, "one vocabulary; the target's has 13 ids, the draft's 5",
     lambda: speculative_generate(target(), PROMPTS, 3, ModelDraft(language_model()))),
    (ValueError, "the same cache", lambda: speculative_generate(target(), PROMPTS, 3, ModelDraft(target(), shared), cache=shared)),
    (ValueError, "up to k=4 drafts are rolled back, and the draft's RollingKVCache keeps slack=3",
     lambda: speculative_generate(target(), PROMPTS, 3, ModelDraft(target(), RollingKVCache(1, 4, slack=3)))),
    (TypeError, "on_event must be a function", lambda: speculative_generate(target(), PROMPTS, 3, NGramDraft(), on_event=1)),
    (ValueError, "max_new_tokens must be at least 0", lambda: speculative_generate(target(), PROMPTS, -1, NGramDraft())),
    (TypeError, "no tokenizer", lambda: speculative_generate(target(), ["abc"], 3, NGramDraft())),
    (ValueError, "give the batch a tokenizer", lambda: speculative_generate(target(), PROMPTS, 3, NGramDraft(), stop="a")),
    (ValueError, "give one of the two", lambda: speculative_generate(target(), PROMPTS, 3, NGramDraft(), seed=1,
                                                                     generator=torch.Generator())),
    (ValueError, "the prompt has 13 tokens, and the context is 12", lambda: speculative_generate(target(), [[1] * 13], 3, NGramDraft())),
    (TypeError, "prompts must be a list of prompts, got a str", lambda: speculative_generate(target(), "abc", 3, NGramDraft())),
    (IndexError, "outside the vocabulary", lambda: speculative_generate(target(), [[SIZE]], 3, NGramDraft())),
]


@pytest.mark.parametrize("error, message, call", REFUSED, ids=[message for _, message, _ in REFUSED])
def test_what_is_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()
