"""Looking inside a model, and why a picture of attention is no explanation.

    python examples/27_seeing_inside.py [--quick] [--out DIR]

The task: "first 3 5 =" is 3, "second 3 5 =" is 5. A model of one layer and one head learns it, from several seeds. Its weights say which
number is looked at hardest, and that is the same number whichever is asked for: a key's score depends on the query and on that key alone.
So ask for the other one: the number with the large weight can be anything, and the one with the small weight decides. Replacing tokens
finds that out; the picture does not. Then a model of two layers, whose second one reads what the first has carried elsewhere: its
activations by name, its heads switched off, the logit lens, and a page to click through. About 20 seconds; `--quick` takes 10. Writes
seeing_inside.png, lens.png, patterns.png and, with `pip install attnview`, attention.html.      (guide 4.2)
"""
import argparse
import importlib.util
from pathlib import Path

import numpy as np

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.explain import (
    ablate_heads,
    attention_gradient,
    capture,
    draw_patterns,
    head_importance,
    intervene,
    log_probability,
    logit_lens,
    occlusion,
    to_html,
)
from tinygrad_tf.models import MiniGPT

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="two seeds instead of four")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-27"), help="folder for the pictures and the page")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
tune_allocator()
arguments.out.mkdir(parents=True, exist_ok=True)

N = 6                                                                   # the numbers 0 … 5 are tokens 0 … 5
WORDS = [*map(str, range(N)), "first", "second", "="]
FIRST, SECOND, EQUALS = N, N + 1, N + 2
PLACES = 1, 2                                                           # where the two numbers stand; position 0 says which is asked for


def question(which, a, b):
    return torch.tensor([[which, a, b, EQUALS]])                        # [1, 4]


def learned(seed, num_layers, num_heads, steps=400, B=128):
    """A model that has seen random questions, in evaluation mode. "second" is asked in a third of them."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = MiniGPT(len(WORDS), 4, 48, num_heads, 192, num_layers, dropout=0.0, norm_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 2) / 20, 1 - step / steps))
    for _ in range(steps):
        a, b, second = rng.integers(N, size=B), rng.integers(N, size=B), rng.random(B) < 0.35
        ids = np.stack([np.where(second, SECOND, FIRST), a, b, np.full(B, EQUALS)], axis=1)
        targets = np.full_like(ids, -100)                               # only what follows "=" counts
        targets[:, -1] = np.where(second, b, a)
        optimizer.zero_grad()
        _, loss = model(torch.as_tensor(ids), torch.as_tensor(targets))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def row(numbers):
    return "  ".join(f"{x:6.2f}" for x in numbers)


# every question once
pairs = [(a, b) for a in range(N) for b in range(N) if a != b]
every = torch.tensor([[which, a, b, EQUALS] for which in (FIRST, SECOND) for a, b in pairs])                # [60, 4]
answers = torch.tensor([a for a, _ in pairs] + [b for _, b in pairs])


def share_right(model):
    with torch.no_grad():
        return (model(every)[0][:, -1].argmax(dim=-1) == answers).float().mean().item()


# --- 1. the largest weight, and what decides ---------------------------------------------------------------------------------------
shown, topmost = [], 0
for seed in range(2 if arguments.quick else 4):
    model = learned(seed, num_layers=1, num_heads=1)
    assert share_right(model) > 0.97
    A = {which: capture(model, question(which, 3, 5), names="*.hook_pattern").array("blocks.0.attn.hook_pattern")[0, 0, -1]
         for which in (FIRST, SECOND)}                                                                      # of "=": [Tk]
    ratio = {which: A[which][1] / A[which][2] for which in A}
    assert abs(ratio[FIRST] / ratio[SECOND] - 1) < 1e-3, "3 and 5 share their weight in one way, whichever is asked for"
    asked, answer = (SECOND, 5) if ratio[SECOND] > 1 else (FIRST, 3)                                        # for the one looked at less
    ids = question(asked, 3, 5)
    heavy, light = PLACES if asked == SECOND else PLACES[::-1]
    drop = occlusion(model, ids, log_probability(answer), range(N))                                         # [4]; 0: nothing happens
    print(f"seed {seed}   {row(A[asked])}   weights of \"=\" on  {'  '.join(WORDS[i] for i in ids[0].tolist())}")
    print(f"         {row(drop)}   nats that the answer {answer} loses when a number stands there instead")
    assert A[asked][heavy] > A[asked][light] and abs(drop[heavy]) < 0.1 and drop[light] > 3
    with torch.no_grad():
        said = {place: [model(torch.tensor([[n if t == place else i for t, i in enumerate(ids[0].tolist())]]))[0][0, -1].argmax().item()
                        for n in range(N)] for place in PLACES}
    assert said[heavy] == [answer] * N, "whatever stands where it looks hardest, the answer is the same"
    assert said[light] == list(range(N)), "and it is always what stands where it looks less"
    weights = capture(model, every, names="*.hook_pattern").array("blocks.0.attn.hook_pattern")[:, 0, -1]   # [60, Tk]
    unasked = np.array([2] * len(pairs) + [1] * len(pairs))
    topmost += int((weights.argmax(axis=1) == unasked).sum())
    shown.append((seed, A[asked], drop, asked))
print(f"Of the two numbers the model looks harder at the one that is not asked for, and only the other one decides. In {topmost} of "
      f"{len(shown) * 60} questions the largest weight of all is on a number that does not matter.")
assert topmost > 0

# Two other questions, and two other answers: a bit more of each weight (times the weight); and a weight of 0, the others growing.
other = 8 - answer
found = attention_gradient(model, ids, score=lambda output: output[0][:, -1, answer] - output[0][:, -1, other])
gradient = found["blocks.0.attn"][0, 0, -1]                              # of "=": [Tk]
print(f"\nattention × gradient of logit({answer}) − logit({other}), last seed:   {row(gradient)}")


def without(key):
    """−inf in the scores of one key: nobody reads it, and the other weights grow."""
    blocked = torch.arange(4) == key
    return lambda scores: scores.masked_fill(blocked, -torch.inf)


for place in PLACES:
    with torch.no_grad(), intervene(model, {"blocks.0.attn.hook_attn_scores": without(place)}):
        p = model(ids)[0][0, -1].softmax(-1)
    print(f"nobody reads {WORDS[ids[0, place].item()]}: p({answer}) = {p[answer].item():.2f}")
print("Nobody there is another thing than somebody else there: the other weights grow, and the model has never met that.")

# --- 2. two layers: the second reads what the first has carried there ----------------------------------------------------------------
model = learned(0, num_layers=2, num_heads=2)
assert share_right(model) > 0.97
seen = capture(model, every)
print(f"\n{seen}\n")
ids = question(SECOND, 3, 5)
print("Where \"=\" looks, in each head, and what the answer needs:   second     3       5       =")
for name, A in capture(model, ids, names="*.hook_pattern").items():
    for head in range(2):
        print(f"  {name.removesuffix('.attn.hook_pattern')}, head {head}  {row(A[0, head, -1].tolist()):>70s}")
drop = occlusion(model, ids, log_probability(5), range(N))
print(f"  {'nats lost when another number stands there':42s}{row(drop):>47s}\n")
assert abs(drop[1]) < 0.5 and drop[2] > 3
lens = logit_lens(model, ids)
print(lens.table(decode=WORDS.__getitem__))
assert torch.equal(lens[-1], model(ids)[0]), "the last line of the lens is what the model says"

targets = torch.full_like(every, -100)
targets[:, -1] = answers
zero, mean = (head_importance(model, every, targets, mean_of=of) for of in (None, seen))
print("\nBy how much the loss rises, in nats, when a head writes zeros, or its mean:")
for layer, head in np.ndindex(*zero.shape):
    with ablate_heads(model, {(layer, head)}):
        right = share_right(model)
    print(f"  layer {layer}, head {head}   {zero[layer, head]:7.3f}  {mean[layer, head]:7.3f}   {right:4.0%} right with zeros")
with ablate_heads(model, {(layer, head) for layer, head in np.ndindex(*zero.shape)}):
    assert share_right(model) < 0.5, "without any attention nobody knows the numbers"

# --- the pictures ------------------------------------------------------------------------------------------------------------------
tokens = [WORDS[i] for i in ids[0].tolist()]
one = capture(model, ids, names="*.hook_pattern")
lens.draw(arguments.out / "lens.png", tokens, decode=WORDS.__getitem__)
draw_patterns(one, arguments.out / "patterns.png", tokens, columns=4)
if importlib.util.find_spec("attnview"):
    to_html(one, tokens, arguments.out / "attention.html")
    print(f"\nThe page: {arguments.out / 'attention.html'}")
else:
    print("\nA page to click through: pip install attnview")


def draw(path):
    """For each seed: where the last token looks, and what the answer needs."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(2.6 * len(shown) + 1, 4.6), layout="constrained")
    axes = figure.subplots(2, len(shown), sharey="row", squeeze=False)
    for (seed, A, drop, asked), (top, bottom) in zip(shown, axes.T):
        colors = ["#bbbbbb", *(("#d95f02", "#1b9e77") if asked == SECOND else ("#1b9e77", "#d95f02")), "#bbbbbb"]
        for place, numbers in (top, A), (bottom, np.nan_to_num(drop)):
            place.bar(range(4), numbers, color=colors)
            place.set_xticks(range(4), [WORDS[asked], "3", "5", "="])
            place.spines[["top", "right"]].set_visible(False)
        top.set_title(f"seed {seed}")
    axes[0, 0].set_ylabel("attention of “=”")
    axes[1, 0].set_ylabel("nats lost when replaced")
    figure.suptitle("Where the model looks (top), and what its answer needs (bottom):\norange is looked at harder, green is asked for")
    figure.savefig(path, dpi=110)


draw(arguments.out / "seeing_inside.png")
print(f"The picture: {arguments.out / 'seeing_inside.png'}")
