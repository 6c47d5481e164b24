"""The doctor on runs: texts that overlap or repeat, decoding that loops, ends that are not learnt, waiting, learning rates.

Each planted fault is named, and nothing else is; sound runs get no complaint.
"""
import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf.data import BatchSampler, ByteTokenizer, CharTokenizer, TokenFile, load_text, pad_sequences, split_train_validation
from tinygrad_tf.generation import Sampler
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.ops.sdpa import sdpa_backend
from tinygrad_tf.optim import SGD, AdamW
from tinygrad_tf.optim.lr_scheduler import LambdaLR, warmup_cosine
from tinygrad_tf.training import checks_of_runs, examine
from tinygrad_tf.training.checks_of_runs import covered, hashes, looped, repeated, shared
from tinygrad_tf.training.doctor import CHECKS

T, C = 16, 16
MANUAL = load_text()
TEXT = MANUAL[10_000:40_000]
TOKENIZER = CharTokenizer.from_text(MANUAL)
TRAIN, VALIDATION = split_train_validation(TEXT)
BYTES = ByteTokenizer()
OURS = [one.cause for one in CHECKS if one.look.__module__ == checks_of_runs.__name__]


def gpt(**options):
    return MiniGPT(TOKENIZER.vocab_size, T, C, 2, 4 * C, 1, **{"dropout": 0.1, "norm_first": True, **options})


def rows():
    inputs, targets = BatchSampler(TOKENIZER.encode(TEXT), T, 4).next()
    return torch.tensor(inputs), torch.tensor(targets)


def texts(*lengths, eos=True):
    ids = TOKENIZER.encode(TEXT)
    return pad_sequences([[*ids[50 * n:50 * n + length].tolist(), *[TOKENIZER.eos_id] * eos] for n, length in enumerate(lengths)],
                         TOKENIZER.pad_id)


def updated(optimizer, model, batch, steps=3, scheduler=(), per_update=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(*batch)[1].backward()
        optimizer.step()
        for one in scheduler:
            for _ in range(per_update):
                one.step()
    return optimizer


def sound(**options):
    """A model, a batch, and all that the doctor may know of a run in which nothing is wrong."""
    torch.manual_seed(0)
    model, batch = gpt(**options), rows()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, 2, 100))
    updated(optimizer, model, batch, 4, [scheduler])
    return model, batch, {
        "tokenizer": TOKENIZER, "optimizer": optimizer, "scheduler": scheduler, "train_text": TRAIN, "validation_text": VALIDATION,
        "sampler": Sampler(0.8), "samples": [[5, 6, 7, TOKENIZER.eos_id, TOKENIZER.pad_id]], "loading": (1e-4, 1e-2)}


def causes(model, batch, known, on_device=OURS, **more):
    """On a device, where the stand-in takes its time, of some checks alone."""
    checks = None if torch.get_default_device().type == "cpu" else on_device
    found = examine(model, batch, **{"checks": checks, **known, **more})
    assert not found.failed, str(found)
    return found.causes


# --- planted faults ------------------------------------------------------------------------------------------------------------

PLANTED = {}


def plant(cause):
    def add(function):
        PLANTED[function.__name__] = cause, function
        return function
    return add


@plant("overlapping texts")
def windows_at_random(model, batch, known):
    known.update(train_text=TEXT, validation_text=TEXT[3000:3500] + TEXT[20_000:20_500])


@plant("overlapping texts")
def paragraphs_at_random(model, batch, known):
    """Of a manual that says many things twice."""
    paragraphs = MANUAL.split("\n\n")
    np.random.default_rng(0).shuffle(paragraphs)
    train, validation = split_train_validation("\n\n".join(paragraphs))
    known.update(train_text=train, validation_text=validation)


@plant("overlapping texts")
def documents_twice_as_ids(model, batch, known):
    known.update(train_ids=TOKENIZER.encode(TRAIN + VALIDATION[:1000]), validation_ids=TOKENIZER.encode(VALIDATION))


@plant("duplicates in training")
def a_page_ten_times(model, batch, known):
    known.update(train_text=TEXT[:2000] * 10)


@plant("duplicates in training")
def most_documents_twice(model, batch, known):
    known.update(train_ids=TOKENIZER.encode(TRAIN[:8000] * 2 + TRAIN[8000:9000]), train_text=None)


@plant("temperature too low")
def greedy(model, batch, known):
    known.update(sampler=Sampler(0))


@plant("temperature too low")
def cold(model, batch, known):
    known.update(sampler=Sampler(0.01, top_k=5))


@plant("<eos> is never a target")
def texts_without_an_end(model, batch, known):
    return texts(17, 12, 9, 14, eos=False)


@plant("<eos> is never a target")
def ends_that_are_padding(model, batch, known):
    """pad_id = eos_id, and a loss that ignores it."""
    batch = texts(16, 12, 9, 14)
    batch.token_ids = batch.token_ids.masked_fill(~batch.valid_tokens, TOKENIZER.eos_id)
    batch.targets = batch.targets.masked_fill(batch.targets == TOKENIZER.eos_id, -100)
    known.update(sampler=None, samples=None)
    return batch


@plant("<eos> does not stop it")
def written_on_and_on(model, batch, known):
    known.update(samples=[[5, 6, 7], torch.tensor([5, TOKENIZER.eos_id, 6, 7])])


@plant("few real tokens")
def one_long_text(model, batch, known):
    return texts(16, 3, 2, 4)


@plant("slow data loading")
def waits(model, batch, known):
    known.update(loading=(0.3, 0.1))


@plant("learning rate 0")
def no_rate(model, batch, known):
    known.update(optimizer=AdamW(model.parameters(), lr=0.0), scheduler=None)


@plant("learning rate 0")
def a_schedule_that_has_ended(model, batch, known):
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: max(0, 3 - step) / 3)
    known.update(optimizer=updated(optimizer, model, batch, 3, [scheduler]), scheduler=scheduler)


@plant("learning rate too high")
def adamw_at_1(model, batch, known):
    known.update(optimizer=AdamW(model.parameters(), lr=1.0), scheduler=None)


@plant("learning rate too high")
def adamw_at_1000(model, batch, known):
    known.update(optimizer=AdamW(model.parameters(), lr=1e3), scheduler=None)


@plant("learning rate too high")
def sgd_at_1000(model, batch, known):
    known.update(optimizer=SGD(model.parameters(), lr=1e3), scheduler=None)


@plant("learning rate too low")
def adamw_at_a_billionth(model, batch, known):
    known.update(optimizer=AdamW(model.parameters(), lr=1e-9), scheduler=None)


@plant("learning rate too low")
def the_rate_of_adamw_for_sgd(model, batch, known):
    known.update(optimizer=SGD(model.parameters(), lr=1e-5), scheduler=None)


@plant("learning-rate schedule")
def a_step_for_each_micro_batch(model, batch, known):
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step + 1, 2, 100))
    known.update(optimizer=updated(optimizer, model, batch, 3, [scheduler], per_update=4), scheduler=scheduler)


@plant("learning-rate schedule")
def before_the_optimizer(model, batch, known):
    known["scheduler"].step()


@plant("learning-rate schedule")
def another_optimizer(model, batch, known):
    known["scheduler"] = LambdaLR(AdamW(model.parameters(), lr=1e-3), lambda step: 1.0)


@plant("learning-rate schedule")
def a_rate_that_was_written_over(model, batch, known):
    known["optimizer"].param_groups[0]["lr"] = 5e-4


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_fault_is_named_and_nothing_else(name):
    cause, function = PLANTED[name]
    model, batch, known = sound()
    batch = function(model, batch, known) or batch
    assert causes(model, batch, known, on_device=[cause]) == [cause]


def test_each_check_has_a_fault():
    assert {cause for cause, _ in PLANTED.values()} | {"dense attention"} == set(OURS)


# --- sound runs ----------------------------------------------------------------------------------------------------------------

def decoder():
    return Decoder(TOKENIZER.vocab_size, T, C, 2, 32, 1)


SOUND = {
    "as it is": lambda model, batch, known: batch,
    "padded, with ends": lambda model, batch, known: texts(16, 12, 9, 14),
    "padded, without ends, and nothing is written": lambda model, batch, known: known.update(sampler=None, samples=None) or
    texts(17, 12, 9, 14, eos=False),
    "ids instead of texts": lambda model, batch, known: known.update(train_ids=TOKENIZER.encode(TRAIN),
                                                                     validation_ids=TOKENIZER.encode(VALIDATION)),
    "a warm-up that begins at 0": lambda model, batch, known: begin_at_0(model, known),
    "SGD": lambda model, batch, known: known.update(optimizer=SGD(model.parameters(), lr=0.3, momentum=0.9), scheduler=None),
    "penalties": lambda model, batch, known: known.update(sampler=Sampler(0.9, top_p=0.9, repetition_penalty=1.2)),
    "a schedule by the epoch": lambda model, batch, known: by_the_epoch(model, batch, known),
    "the end of a cosine": lambda model, batch, known: at_the_end(model, batch, known),
}


def begin_at_0(model, known):
    known["optimizer"] = optimizer = AdamW(model.parameters(), lr=1e-3)
    known["scheduler"] = LambdaLR(optimizer, lambda step: warmup_cosine(step, 10, 100))
    assert optimizer.param_groups[0]["lr"] == 0


def by_the_epoch(model, batch, known):
    known["optimizer"] = AdamW(model.parameters(), lr=1e-3)
    known["scheduler"] = LambdaLR(known["optimizer"], lambda epoch: 0.9 ** epoch)
    for _ in range(2):
        updated(known["optimizer"], model, batch, 3)
        known["scheduler"].step()


def at_the_end(model, batch, known):
    known["optimizer"] = AdamW(model.parameters(), lr=1e-3)
    known["scheduler"] = LambdaLR(known["optimizer"], lambda step: warmup_cosine(step + 1, 2, 8, floor=1e-6))
    updated(known["optimizer"], model, batch, 8, [known["scheduler"]])


@pytest.mark.parametrize("name", [name if name.startswith(("as", "padded, w")) else
                                  pytest.param(name, marks=pytest.mark.host("the same checks, of which the stand-in needs minutes"))
                                  for name in SOUND])
def test_a_sound_run_gets_no_complaint(name):
    model, batch, known = sound()
    batch = SOUND[name](model, batch, known) or batch
    assert causes(model, batch, known) == []


@pytest.mark.host("steps of training, of which the stand-in needs minutes")
@pytest.mark.parametrize("make", [gpt, decoder, lambda: gpt(norm_first=False, dropout=0.0)])
def test_a_model_that_has_learnt_gets_no_complaint(make):
    """At rates from 3e-4 to 1e-2, on a batch that it knows by heart."""
    torch.manual_seed(0)
    model, batch = make(), rows()
    optimizer = updated(AdamW(model.parameters(), lr=1e-2), model, batch, 60)
    for lr in (1e-2, 3e-4):
        optimizer.param_groups[0]["lr"] = lr
        assert causes(model, batch, {"optimizer": optimizer, "sampler": Sampler(1.0)}) == []


def test_nothing_of_the_run_changes():
    model, batch, known = sound()

    def state():
        return ([p.tolist() for p in model.parameters()], model.training, str(known["optimizer"].state_dict()),
                known["scheduler"].state_dict(), torch.get_rng_state().tolist())
    before = state()
    causes(model, batch, known)
    assert state() == before


# --- texts, in numbers ------------------------------------------------------------------------------------------------------

def test_a_proper_split_of_a_manual_that_cites_itself_is_well_below_the_limit():
    """The shares are what the comments of the limits say. A split at random is above: `paragraphs_at_random`."""
    train, validation = (np.frombuffer(part.encode(), np.uint8) for part in split_train_validation(MANUAL))
    assert 0.05 < shared(train, validation, 64) < 0.17 and 0.15 < repeated(train, 64) < 0.35


@pytest.mark.parametrize("n", [1, 2, 4, 16, 64])
def test_runs_are_told_apart_as_by_comparing_them(n):
    chance = np.random.default_rng(n)
    a, b = chance.integers(0, 3, 400), chance.integers(0, 3, 90)
    b[10:10 + n], a[200:200 + 2 * n] = a[100:100 + n], a[20:20 + 2 * n]

    def runs(ids):
        return [tuple(ids[i:i + n].tolist()) for i in range(len(ids) - n + 1)]
    known = set(runs(a))
    places = {i + j for i, run in enumerate(runs(b)) if run in known for j in range(n)}
    assert shared(a, b, n) == len(places) / len(b)
    again = [run in runs(a)[:i] for i, run in enumerate(runs(a))]
    assert repeated(a, n) == len({i + j for i, found in enumerate(again) if found for j in range(n)}) / len(a)
    assert len(set(hashes(a, n).tolist())) == len(known)


def test_a_long_training_text_is_read_piece_by_piece(monkeypatch, tmp_path):
    ids = BYTES.encode(MANUAL[:5000])
    assert shared(ids[:4000], ids[3000:4000], 64) == 1 and shared(ids[:3000], ids[3000:4000], 64) < 0.5
    file = TokenFile.write(tmp_path / "train", [ids[:4000]], BYTES)
    for size in (100, 1000, 3999):
        monkeypatch.setattr(checks_of_runs, "AT_ONCE", size)
        assert shared(file.ids, ids[3000:4000], 64) == 1
    del file


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65])
def test_short_texts_share_nothing_or_all(n):
    ids = np.arange(n)
    assert shared(ids, ids, 64) == shared(np.arange(200), ids, 64) == (n >= 64)
    assert repeated(ids, 64) == 0 and shared(ids, np.arange(200), 64) == (0 if n < 64 else n / 200)


def test_coverage_and_loops():
    assert covered(np.array([True, False, False, True, False]), 3, 7) == 6 / 7
    assert looped([[1, 2, 3, 4] * 4]) == 9 / 13 and looped([[1, 2], []]) == looped([]) == 0 and looped([[1] * 5, [2, 3, 4, 5]]) == 1 / 3


# --- what is written ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sample", ["text", [1.5], [["a"]]])
def test_samples_are_ids(sample):
    found = examine(gpt(), rows(), tokenizer=TOKENIZER, samples=[sample], checks=["<eos> does not stop it"])
    assert "samples must be lists of ids" in found.failed["<eos> does not stop it"]


def test_an_end_is_an_end_and_padded_prompts_are_read_from_their_first_token():
    torch.manual_seed(0)
    model, batch = gpt(dropout=0.0), texts(16, 12, 9, 14)
    case = checks_of_runs.check.__globals__["Case"](model, batch, tokenizer=TOKENIZER)
    rows = checks_of_runs.written(case, Sampler(1.0))
    assert len(rows) == 4 and all(TOKENIZER.eos_id not in row for row in rows)
    whole = checks_of_runs.written(case, lambda logits, history, generator: torch.full((len(logits), 1), TOKENIZER.eos_id))
    assert whole == [[]] * 4
    seen = []
    checks_of_runs.written(case, lambda logits, history, generator: seen.append(history) or torch.zeros(len(logits), 1).long())
    assert seen[0].tolist() == batch.token_ids[:, :8].tolist()


# --- time -----------------------------------------------------------------------------------------------------------------------

class Clock:
    """Goes on only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def takes(self, seconds):
        def go_on(*args):
            self.now += seconds
        return go_on


@pytest.mark.parametrize("load, step, expected", [(3.0, 2.0, ["slow data loading"]), (1.0, 2.0, []), (2.0, 2.0, [])])
def test_loading_is_timed_against_a_step(monkeypatch, load, step, expected):
    clock, (model, batch, known) = Clock(), sound()
    monkeypatch.setattr(checks_of_runs, "time", clock)
    model.final_norm.register_forward_hook(lambda module, args, out: clock.takes(step)())
    assert causes(model, batch, known, loading=clock.takes(load)) == expected


def test_a_sampler_is_faster_than_a_step():
    model, batch, known = sound()
    sampler = BatchSampler(TOKENIZER.encode(TEXT), T, 4)
    state = sampler.state_dict()
    assert causes(model, batch, known, loading=sampler.next, checks=["slow data loading"]) in ([], ["slow data loading"])
    assert sampler.state_dict() != state                        # it was called: this is the one thing that the doctor moves


class ByHand(torch.nn.Module):
    """softmax(Q Kᵀ) V of one head."""

    def __init__(self, dim):
        super().__init__()
        self.qkv = torch.nn.Linear(dim, 3 * dim)

    def forward(self, x, **options):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)) / x.shape[-1] ** 0.5
        return F.softmax(scores.masked_fill(~torch.ones(scores.shape[-2:]).bool().tril(), -torch.inf), dim=-1) @ v


def test_attention_by_hand_or_forced_to_be_dense_is_named_where_tiles_would_pay(monkeypatch):
    for name in ("DENSE_SCORES_OF_A_BAND", "DENSE_SCORES_ON_GPU"):
        monkeypatch.setattr(checks_of_runs, name, 4 * 2 * T * T)
    model, batch, asked = gpt(), rows(), {"checks": ["dense attention"]}
    assert causes(model, batch, asked) == []                    # at the limit, dense is what the library takes
    for name in ("DENSE_SCORES_OF_A_BAND", "DENSE_SCORES_ON_GPU"):
        monkeypatch.setattr(checks_of_runs, name, 4 * T * T - 1)
    with sdpa_backend("dense"):
        (found,) = examine(model, batch, **asked)
    assert found.cause == "dense attention" and found.evidence.startswith(f"Attention over weights of [4, 2, {T}, {T}]")
    with sdpa_backend("tiled"):
        assert causes(model, batch, asked) == []
        model.blocks[0].attention = ByHand(C)
        (found,) = examine(model, batch, **asked)
    assert found.cause == "dense attention" and found.evidence.startswith(f"Softmax over weights of [4, {T}, {T}]")
