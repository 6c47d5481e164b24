"""Speculative decoding: a cheap draft proposes, the model verifies.      python examples/16_speculative_decoding.py [--quick] [--color]

Two drafts, a smaller model and a look into the text itself, each propose four characters at a time; the target reads all
of them in one pass. Which stand, which are replaced, and what comes as a bonus is shown character by character. Greedy texts are
the same with and without, and drawn ones have the same distribution: exactly, and counted. About 20 seconds on a laptop; `--quick`
takes 4. Writes speculation.png.      (guide 12.2)
"""
import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.data import BatchSampler, CharTokenizer, load_text, split_train_validation
from tinygrad_tf.generation import ModelDraft, NGramDraft, Sampler, complete, inference, speculative_generate
from tinygrad_tf.generation.speculative import acceptance, overlap, residual
from tinygrad_tf.models import Decoder

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="smaller models, fewer steps and draws")
parser.add_argument("--color", action="store_true", help="colours, also where standard output is no terminal")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-16"), help="folder for speculation.png")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
quick, in_color = arguments.quick, arguments.color or sys.stdout.isatty()
tune_allocator()

# --- a target and a smaller model: the loop of example 08, in short -------------------------------------------------------
T, k, context = 64, 4, 32 if quick else 64                                     # k: how many tokens are proposed at a time
text = load_text()
tokenizer = CharTokenizer.from_text(text)
train_ids, validation_ids = (tokenizer.encode(part) for part in split_train_validation(text))
V_vocab = tokenizer.vocab_size


def trained(C, H, L, steps, lr, B=8):
    torch.manual_seed(0)
    model = Decoder(V_vocab, T, C, H, 5 * C // 2, L, num_kv_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - 0.9 * step / steps))
    sampler = BatchSampler(train_ids, context, batch_size=B, seed=0)
    for _ in range(steps):
        inputs, targets = (torch.as_tensor(ids) for ids in sampler.next())
        optimizer.zero_grad()
        _, loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"  C = {C:2d}, L = {L}: {sum(p.numel() for p in model.parameters()):7,} parameters, loss of the last batch {loss.item():.2f}")
    return model.eval()


print("Target and draft:")
target = trained(32, 4, 1, 250, 2e-2) if quick else trained(64, 4, 2, 600, 1e-2)
small = trained(16, 2, 1, 120, 2e-2) if quick else trained(32, 4, 1, 300, 1e-2)
DRAFTS = {"a smaller model": lambda: ModelDraft(small), "n-gram": lambda: NGramDraft(n=3)}

# --- 1. the rule, at one real place ---------------------------------------------------------------------------------------
# The draft proposes x with probability q(x); x stands with probability min(1, p(x) / q(x)); else a token comes from max(p − q, 0) / Σ.
prompt = tokenizer.encode("The value of the ").tolist()
with inference(target), inference(small):
    p, q = (Sampler().probabilities(model(torch.tensor([prompt]))[0][:, -1])[0] for model in (target, small))       # [V_vocab]
stands, instead = acceptance(p, q), residual(p, q)
print("\nAfter 'The value of the ':       p      q   stands with   drawn instead of a rejected one")
for i in np.argsort(-np.maximum(p, q))[:6]:
    print(f"  {tokenizer.decode([i])!r:22s}{p[i]:10.3f}{q[i]:7.3f}{stands[i]:14.3f}{instead[i]:34.3f}")
comes_out = q * stands + (1 - (q * stands).sum()) * instead
print(f"A proposal stands in Σ min(p, q) = {overlap(p, q):.3f} of cases. What comes out differs from p by {abs(comes_out - p).max():.0e}")
assert abs(comes_out - p).max() < 1e-12 and abs((q * stands).sum() - overlap(p, q)) < 1e-12

# --- 2. what became of each proposal -------------------------------------------------------------------------------------
COLORS = {"accepted": "#74c476", "rejected": "#fb6a4a", "corrected": "#6baed6", "bonus": "#fdd0a2", "plain": "#d9d9d9"}
SIGNS = {"accepted": "✓", "rejected": "✗", "corrected": "→", "bonus": "+", "plain": "·"}
ANSI = {"accepted": "\033[32m", "rejected": "\033[9;31m", "corrected": "\033[1;34m", "bonus": "\033[1;33m", "plain": ""}


def shown(token):
    return {" ": "␣", "\n": "↵"}.get(tokenizer.decode([token]), tokenizer.decode([token]))


def painted(token, mark):
    return f"{ANSI[mark]}{shown(token)}\033[0m" if in_color else f"{SIGNS[mark]}{shown(token)}"


# The chance is drawn in another order than by the target alone, so a drawn text is another one, and just as likely to come. A greedy
# text is the same one.
print("\nTemperature 0.5. Each row is one pass of the target:   "
      + "   ".join((ANSI[mark] + mark + "\033[0m") if in_color else f"{sign} {mark}" for mark, sign in SIGNS.items()))
n, rounds = T - len(prompt), {}
alone = complete(target, [prompt], n)[0]
for name, draft in DRAFTS.items():
    runs = rounds[name] = []
    (row,), report = speculative_generate(target, [prompt], n, draft(), k, sampler=Sampler(0.5), seed=1, on_event=runs.append)
    print(f"{name}: {n} tokens in {report.rounds} passes, {tokenizer.decode(row.ids)!r}")
    for run in runs[:8]:
        print("    " + (" " * (not in_color)).join(painted(*mark) for mark in run.marks))
    assert report.tokens == n == sum(run.taken for run in runs) and report.rounds < n
    (greedy,), _ = speculative_generate(target, [prompt], n, draft(), k)
    assert greedy.ids == alone.ids, "greedy, these are the tokens of the target alone"
print(f"Greedy, with either draft and without: {tokenizer.decode(alone.ids)!r}\n")

# --- 3. how much stands ---------------------------------------------------------------------------------------------------
def fastest(write, *args, **options):
    """(the shortest of some times, what is returned); one more goes before, for what is slow but once"""
    times = []
    write(*args, **options)
    for _ in range(2 if quick else 3):
        begin = time.perf_counter()
        found = write(*args, **options)
        times.append(time.perf_counter() - begin)
    return min(times), found


prompts = [validation_ids[start:start + 16].tolist() for start in range(0, 8 * 300, 300)]
print(f"{len(prompts)} prompts together, k = {k}             accepted   Σ min(p, q)   tokens a pass    time ÷ that of the target alone")
for way, sampler in ("greedy", Sampler(0)), ("temperature 1", Sampler()):
    alone, _ = fastest(complete, target, prompts, n, sampler=sampler, seed=0)
    for name, draft in DRAFTS.items():
        took, (_, report) = fastest(speculative_generate, target, prompts, n, draft(), k, sampler=sampler, seed=0)
        print(f"  {way:14s}{name:18s}{report.acceptance_rate:12.3f}{report.expected_rate:14.3f}{report.tokens_per_pass:16.2f}"
              f"{took / alone:18.2f}")
        assert abs(report.acceptance_rate - report.expected_rate) < 5 * math.sqrt(0.25 / report.tested), "the rate is Σ min(p, q)"
        assert 1 <= report.tokens_per_pass <= k + 1
print("Fewer passes are not yet less time: with models this small a pass is mostly Python, whatever it reads, and the target alone takes a")
print("shorter path for single tokens. Where a pass costs the reading of large weights, tokens a pass is what counts.\n")

# --- 4. drawn texts have the target's distribution ------------------------------------------------------------------------
# Two tokens after one prompt, many times. Exact: p(x) for the first, Σ_x p(x) p(y | x) for the second.
N = 1_000 if quick else 10_000
with inference(target):
    then = Sampler().probabilities(target(torch.tensor([prompt + [x] for x in range(V_vocab)]))[0][:, -1])          # [V_vocab, V_vocab]
exact = p, p @ then


def chi_square(tokens, p):
    """(Σ (count − N p)² / (N p), what one in ten thousand fair samples exceeds); ids that are expected less than five times together."""
    counts, expected = np.bincount(tokens, minlength=len(p)), len(tokens) * p
    rare = expected < 5
    counts, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    freedom = len(counts) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3       # Wilson and Hilferty 1931
    return ((counts - expected) ** 2 / expected).sum(), limit


print(f"{N:,} texts of two tokens      χ² of the first   of the second    limit (one in ten thousand)   total variation, first token")
for name, draft in DRAFTS.items():
    generator = torch.Generator().manual_seed(0)
    rows, report = speculative_generate(target, [prompt] * N, 2, draft(), k, sampler=Sampler(), generator=generator, max_rows=200)
    tokens = np.array([row.new_ids for row in rows])                           # [N, 2]
    found = [chi_square(tokens[:, i], exact[i]) for i in range(2)]
    distance = 0.5 * abs(np.bincount(tokens[:, 0], minlength=V_vocab) / N - p).sum()
    print(f"  {name:20s}{found[0][0]:20.1f}{found[1][0]:16.1f}{found[0][1]:14.1f}, {found[1][1]:.1f}{distance:34.4f}")
    assert all(statistic < limit for statistic, limit in found)
wrong, limit = chi_square(np.random.default_rng(0).choice(V_vocab, N, p=q), p)
print(f"  {'the draft alone':20s}{wrong:20.1f}{'':16s}{limit:14.1f}{'':6s}{1 - overlap(p, q):34.4f}   (1 − Σ min(p, q), exactly)")
assert wrong > limit, "had all proposals stood, it would show"


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path, count=14):
    """A row for each pass of the target: proposals, what became of them, and the target's own token behind a gap."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 5.8), layout="constrained")
    for axes, (name, runs) in zip(figure.subplots(1, 2), rounds.items()):
        for y, run in enumerate(runs[:count]):
            own = run.marks[-1]
            cells = [(x, "accepted" if i < run.accepted else "rejected" if i < run.tested else None) for i, x in enumerate(run.drafted)]
            for i, (token, mark) in enumerate([*cells, *[(None, None)] * (k - len(cells)), own]):
                if token is None:
                    continue
                x = i + 0.4 * (i == k)
                axes.barh(y, 0.92, left=x, height=0.86, color=COLORS[mark] if mark else "white", edgecolor="0.75", linewidth=0.7)
                axes.text(x + 0.46, y, shown(token), ha="center", va="center", fontsize=11, color="0.1" if mark else "0.7")
                if mark == "rejected":
                    axes.plot([x + 0.2, x + 0.72], [y, y], color="#a50f15", linewidth=1.2)
        passes, tokens = len(runs), sum(run.taken for run in runs)
        axes.set(title=f"draft: {name}\n{tokens} tokens in {passes} passes, the first {min(count, passes)} shown",
                 xlim=(-0.1, k + 1.5), ylim=(min(count, passes) - 0.4, -0.6),
                 xticks=[*(i + 0.46 for i in range(k)), k + 0.86], xticklabels=[*(f"x{i + 1}" for i in range(k)), "target's"],
                 yticks=range(min(count, passes)), yticklabels=range(1, min(count, passes) + 1), ylabel="pass of the target")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    labels = [*COLORS.items(), ("behind a rejected one: dropped", "white")]
    handles = [figure.axes[0].barh(-9, 0, color=color, edgecolor="0.75", label=label) for label, color in labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "speculation.png")
print(f"\nThe picture: {arguments.out / 'speculation.png'}")
