"""What the doctor looks for in a run: its texts, what it writes, what it waits for, its learning rate.              (guide 17.3)

Each function performs one test, which its docstring tells, and returns what it measured, or None. See `doctor.check`.
"""
import math
import time

import numpy as np

from ..arguments import described
from ..autograd import IGNORED, no_grad, observing
from ..backend import array_module
from ..creation import as_tensor
from ..data.token_file import held
from ..generation import Sampler
from ..ops.sdpa import DENSE_SCORES, DENSE_SCORES_OF_A_BAND, DENSE_SCORES_ON_GPU
from ..random import Generator
from .checks import listed
from .doctor import NOT_FINITE, REPEATS, SLOW, STUCK, TARGETS, TOO_LOW, check, host

LONG, LONG_OF_PIECES = 64, 16   # letters or bytes that two texts do not share by chance; and so many pieces of words
PIECES = 512                    # from so many different tokens on they are pieces of words
AT_ONCE = 1 << 20               # tokens of a training text that are looked at together
COMMON = 0.2                    # share of a validation text that may stand in training: a manual cites itself, 13 % of Python's own
REPEATED = 0.4                  # share of a training text that may have stood there before: 23 % of that manual, half of a text given twice
ROWS, PROMPT, WRITTEN = 4, 8, 32        # texts that the model writes, tokens of their beginnings, and of what follows
GRAM = 4                        # tokens in a row that come again
LOOPS = 0.5                     # share of such grams, from which on an output repeats
REAL = 0.5                      # share of real tokens in a batch, below which more than half of the work is thrown away
STEPS = 4                       # of the optimizer, after which the loss of the batch itself has not risen
RISEN = 0.25                    # by this share of itself, and by as many nats, a loss may rise by chance
SOFTER = 1e-2, 1e-4, 1e-6             # factors of a learning rate, at one of which that loss then falls
SMALLEST = 1e-5                 # ‖Δw‖ / ‖w‖ of an update; 1e-3 is usual, and rounding is 1e-7


# --- texts ----------------------------------------------------------------------------------------------------------------

def hashes(ids, n):
    """uint64 [N − n + 1], one for each run of n tokens, a power of two: h₂ₘ[i] = h_m[i] · f^m + h_m[i + m], modulo 2⁶⁴."""
    h, factor = np.asarray(ids).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), 0xBF58476D1CE4E5B9
    h ^= h >> np.uint64(29)
    for m in (1 << k for k in range(n.bit_length() - 1)):
        h = h[:-m] * np.uint64(factor) + h[m:]
        factor = factor * factor % 2**64
    return h


def _length(*texts):
    """How many tokens make a run that is no chance."""
    return LONG_OF_PIECES if max(int(ids.max(initial=0)) for ids in texts) >= PIECES else LONG


def covered(found, n, size):
    """The share of `size` tokens that lie in one of the runs of n tokens for which found[i] holds, i its first token."""
    edges = np.zeros(size + 1, np.int64)
    edges[:len(found)] += found
    edges[n:n + len(found)] -= found
    return float((np.cumsum(edges[:-1]) > 0).mean()) if size else 0.0


def shared(train, validation, n):
    """The share of the validation ids that lie in runs of n which stand in the training ids, too. These are read piece by piece."""
    wanted, places = np.unique(hashes(validation, n), return_inverse=True) if len(validation) >= n else ([], [])
    found = np.zeros(len(wanted), bool)
    for start in range(0, len(train), AT_ONCE) if len(wanted) else ():
        piece = train[start:start + AT_ONCE + n - 1]
        if len(piece) >= n:
            found |= np.isin(wanted, hashes(piece, n))
    return covered(found[places], n, len(validation)) if len(wanted) else 0.0


def repeated(ids, n):
    """The share of the ids that lie in runs of n which stood before in the same text."""
    if len(ids) < n:
        return 0.0
    found = np.ones(len(ids) - n + 1, bool)
    found[np.unique(hashes(ids, n), return_index=True)[1]] = False
    return covered(found, n, len(ids))


@check("overlapping texts", TOO_LOW, needs=("splits",), of_model=False,
       advice="split by document or by position (data.split_train_validation) before windows are cut, and leave out documents that are "
              "there twice; a random split of windows or lines puts neighbours of each into the other part")
def overlap(case):
    """Long runs of tokens of the validation text do not stand in the training text."""
    train, validation = map(held, case.splits)
    n = _length(train, validation)
    if (share := shared(train, validation, n)) > COMMON:
        return f"{share:.0%} of the validation text lies in runs of {n} tokens that stand in the training text, too"


@check("duplicates in training", REPEATS, needs=("corpus",), of_model=False,
       advice="leave out documents and lines that are there again: what stands there often is learnt by heart, and written again")
def duplicates(case):
    """Long runs of tokens do not come again in the training text."""
    ids = held(case.corpus)[:8 * AT_ONCE]
    n = _length(ids)
    if (share := repeated(ids, n)) > REPEATED:
        return f"{share:.0%} of the training text lies in runs of {n} tokens that stood there before"


# --- what it writes ---------------------------------------------------------------------------------------------------------

def written(case, sampler):
    """ids [ROWS, ≤ WRITTEN] as lists, up to <eos>: what the model writes after the beginnings of the batch's rows."""
    rows = [row[text == 0][:PROMPT] for row, text in zip(host(case.ids), case.texts) if (text == 0).any()][:ROWS]
    length = min(map(len, rows))
    ids, generator = np.stack([row[:length] for row in rows]), Generator().manual_seed(case.seed)
    left_out = dict.fromkeys((*TARGETS, "valid_tokens", "target_valid", "position_ids", "segment_ids"))
    others = {name: x[:len(rows)] for name, x in case.arguments.items() if name not in left_out}
    for _ in range(WRITTEN):
        window = as_tensor(ids[:, -case.ids.shape[1]:], device=case.ids.device)
        logits = case.run(**{**others, **left_out, case.ids_name: window})[0]
        ids = np.concatenate([ids, host(sampler(logits[:, -1], ids, generator))], axis=1)
    eos = getattr(case.tokenizer, "eos_id", None)
    return [row[:row.index(eos)] if eos in row else row for row in ids[:, length:].tolist()]


def looped(rows):
    """The share of the runs of GRAM tokens that stood in their row before."""
    grams = [[tuple(row[i:i + GRAM]) for i in range(len(row) - GRAM + 1)] for row in rows]
    return sum(len(row) - len(set(row)) for row in grams) / max(1, sum(map(len, grams)))


@check("temperature too low", REPEATS, needs=("sampler", "is_language_model"), explained_by=("duplicates in training", "NaN or infinity"),
       advice="the likeliest token after a repetition is to repeat again: sample with a temperature near 1 and top_p, or a "
              "repetition_penalty")
def temperature(case):
    """What repeats with this sampler repeats at temperature 1 as well."""
    if (share := looped(written(case, case.sampler))) > LOOPS and (other := looped(written(case, Sampler()))) < share / 2:
        return (f"temperature {case.sampler.temperature:g}: {share:.0%} of all runs of {GRAM} tokens stood in the same text before; at "
                f"temperature 1 it is {other:.0%}")


@check("<eos> is never a target", REPEATS, needs=("tokenizer", "targets", "padded", "is_language_model"), of_model=False,
       advice="end each text with tokenizer.eos_id before it is padded, and let that target count: with pad_id = eos_id, a loss that "
              "ignores padding ignores the ends as well")
def end_is_learnt(case):
    """Texts that end within the batch, which padding shows, end with a target <eos> that counts; where it is read, or texts are written."""
    ids, targets, eos = host(case.ids), host(case.targets), case.tokenizer.eos_id
    asked = case.sampler is not None or case.samples is not None or (ids == eos).any()
    if eos is not None and asked and not (targets == eos).any():
        return (f"{(case.texts < 0).any(1).sum()} of {len(targets)} texts end within the batch, and none of its "
                f"{(targets != IGNORED).sum()} targets is <eos>, {eos}: the model cannot learn to stop")


@check("<eos> does not stop it", REPEATS, needs=("samples", "tokenizer"), of_model=False,
       advice="generate with eos_id=tokenizer.eos_id: what comes after the end was never trained")
def end_is_obeyed(case):
    """Nothing is written after <eos> but padding."""
    eos, pad = case.tokenizer.eos_id, case.tokenizer.pad_id
    samples = {row: ids for row, ids in enumerate(map(_ids, case.samples)) if eos in ids}
    after = {row: [i for i in ids[ids.index(eos):] if i not in (eos, pad)] for row, ids in samples.items()}
    if rows := [row for row, ids in after.items() if ids]:
        return f"samples {listed(map(str, rows))} go on after <eos>, sample {rows[0]} for {len(after[rows[0]])} tokens"


def _ids(sample):
    ids = sample.tolist() if hasattr(sample, "tolist") else list(sample)
    if isinstance(sample, str) or not all(isinstance(i, int) for i in ids):
        raise TypeError(f"examine: samples must be lists of ids, <eos> and all, got {described(sample)}")
    return ids


# --- time ---------------------------------------------------------------------------------------------------------------------

@check("few real tokens", SLOW, needs=("padded",), of_model=False,
       advice="pack several texts into a row (data.pack_sequences), or put those of like length into one batch")
def few_real(case):
    """Half of the places of the batch or more hold real tokens."""
    if (share := float((case.texts >= 0).mean())) < REAL:
        return f"{share:.0%} of the {case.texts.size} places of the batch hold real tokens; the rest is computed, and thrown away"


@check("slow data loading", SLOW, needs=("loading", "gradients"), of_model=False,
       advice="encode once and keep the ids (data.TokenFile), cut windows instead of texts, and make the next batch while this one is "
              "computed")
def waits_for_data(case):
    """The next batch is there sooner than a step takes, by the best of a few tries: the noise of a machine only adds."""
    load, step = _measured(case) if callable(case.loading) else map(float, case.loading)
    if load > step:
        return f"a batch takes {load:.3g} s to load, and a step {step:.3g} s to compute: {load / (load + step):.0%} of the time is waiting"


def _measured(case):
    model = case.copy(training=True)
    return _best(case.loading), _best(lambda: case.run(model)[1].backward())


def _best(function):
    """Seconds, the least of three."""
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return min(taken)


@check("dense attention", SLOW, needs=("logits",),
       advice="F.scaled_dot_product_attention with is_causal, or nn.functional.attention with causal, window and valid_tokens, works in "
              "tiles where that pays; softmax(Q Kᵀ) V by hand, score_mod, returned weights and sdpa_backend('dense') do not")
def dense(case):
    """No table of attention weights is as large as one for which the library itself takes tiles."""
    found = []

    def observe(node, args, out):
        if (shape := _table(node, args, out)) and math.prod(shape) > _largest(case, out):
            found.append((shape, node.name))
    with observing(observe, alone=True):
        case.run()
    if found:
        shape, name = max(found, key=lambda table: math.prod(table[0]))
        return (f"{name} over weights of {list(shape)}, {math.prod(shape) * 4 / 2**20:,.0f} MiB in float32, and {len(found)} such tables "
                f"in one pass; tiles need none")


def _table(node, args, out):
    """The shape [..., Tq, Tk] of attention weights that an operation makes; None where it makes none."""
    if node.name == "Attention":
        return (*args[0].shape[:-1], args[1].shape[-2])
    square = out.ndim > 2 and out.shape[-1] == out.shape[-2]
    return tuple(out.shape) if node.name == "AttentionWeights" or node.name == "Softmax" and square else None


def _largest(case, out):
    if array_module(out.array) is not np:
        return DENSE_SCORES_ON_GPU
    return DENSE_SCORES_OF_A_BAND if case.is_language_model else DENSE_SCORES


# --- the learning rate --------------------------------------------------------------------------------------------------------

@check("learning rate 0", STUCK, needs=("optimizer",), of_model=False,
       advice="give the optimizer a rate; a schedule that counts from 1 has none at its first step, and one that has ended none at all")
def no_rate(case):
    """Some group of the optimizer has a rate; before its first update a warm-up may still begin at 0."""
    groups = case.optimizer.param_groups
    waits = not _updates(case.optimizer) and any(float(group.get("initial_lr", 0)) for group in groups)
    if not waits and not any(float(group["lr"]) for group in groups):
        return f"all {len(groups)} groups of the optimizer have lr = 0, after {_updates(case.optimizer)} updates"


def _updates(optimizer):
    """How many updates the optimizer has made, where it counts them."""
    return max((int(float(entry["step"])) for entry in optimizer.state.values() if "step" in entry), default=0)


def losses(case, factor=1.0, steps=STEPS):
    """The loss of the batch before each of a few steps of the optimizer at `factor` times its rates, and after the last. On copies."""
    model, optimizer = case.copies(training=False)
    found = []
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"]) * factor
    for _ in range(steps):
        optimizer.zero_grad()
        loss = case.run(model)[1]
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    with no_grad():
        return [*found, case.run(model)[1].item()]


@check("learning rate too high", NOT_FINITE, needs=("optimizer", "loss", "gradients"),
       explained_by=("NaN or infinity", "all-masked row", "exploding layer", "no gradient"),
       advice="divide it by 10 until the loss of the batch itself falls, warm up over more steps, and clip gradients")
def too_high(case):
    """A few steps on this batch do not raise its own loss, if steps at a fraction of the rate lower it."""
    found = losses(case)
    for factor in SOFTER if _risen(found) else ():
        if (softer := losses(case, factor))[-1] < softer[0]:
            return (f"{_rates(case)}: steps on this batch alone take its loss from {found[0]:.3f} to "
                    f"{', '.join(f'{loss:.3f}' for loss in found[1:])}; with {factor:g} of the rate it falls to {softer[-1]:.3f}")


def _risen(found):
    return not all(map(math.isfinite, found)) or found[-1] - found[0] > max(RISEN, RISEN * abs(found[0]))


def _rates(case):
    return "lr = " + ", ".join(sorted({f"{float(group['lr']):g}" for group in case.optimizer.param_groups}))


@check("learning rate too low", STUCK, needs=("optimizer", "gradients"),
       explained_by=("learning rate 0", "NaN or infinity", "no gradient", "dead layer", "not in the optimizer"),
       advice="multiply it by 10 until an update moves the weights by about a thousandth of themselves")
def too_low(case):
    """An update at the highest rate that the schedule starts from moves the weights by more than rounding does."""
    moved = _moved(case)
    if moved and (middle := float(np.median(moved))) < SMALLEST and any(float(group["lr"]) for group in case.optimizer.param_groups):
        return f"{_rates(case)}: an update moves the matrices by {middle:.1e} of themselves, in the median; 1e-03 is usual"


def _moved(case):
    """‖Δw‖ / ‖w‖ of each matrix that has a gradient, for one update."""
    model, optimizer = case.copies(training=False)
    for group in optimizer.param_groups:
        group["lr"] = max(float(group["lr"]), float(group.get("initial_lr", 0)))
    case.run(model)[1].backward()
    before = {name: host(p).astype(np.float64).copy() for name, p in model.named_parameters() if p.grad is not None and p.ndim > 1}
    optimizer.step()
    after = dict(model.named_parameters())
    return [float(np.linalg.norm(host(after[name]) - w) / max(np.linalg.norm(w), 1e-30)) for name, w in before.items()]


@check("learning-rate schedule", STUCK, needs=("optimizer", "scheduler"), of_model=False,
       advice="make it of this optimizer, and call scheduler.step() after optimizer.step(), once an update: not for each micro-batch, nor "
              "for a step that a GradScaler left out")
def schedule(case):
    """The schedule is of this optimizer, has set its rates, and has not made more steps than it."""
    if case.scheduler.optimizer is not case.optimizer:
        return "it sets the rates of another optimizer than the one that was given"
    made, updates = case.scheduler.last_epoch, _updates(case.optimizer)
    if made > updates and (updates or not case.optimizer.state):
        return f"it has made {made} steps, and the optimizer {updates} updates"
    rates, asked = [float(group["lr"]) for group in case.optimizer.param_groups], [float(lr) for lr in case.scheduler.get_last_lr()]
    if not np.allclose(rates, asked, rtol=1e-6, atol=0):
        return f"it asks for lr = {listed(f'{lr:g}' for lr in asked)}, and the optimizer has {listed(f'{lr:g}' for lr in rates)}"
