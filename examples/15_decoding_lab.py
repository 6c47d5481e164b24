"""One real distribution, and what each rule of decoding makes of it.      python examples/15_decoding_lab.py [--quick] [--out DIR]

A small model is trained on the text that every Python carries. Where it is sure of the next character and where it is not, the
same rules keep different characters: greedy, temperature, top-k, top-p, min-p. Then penalties, draws counted against the exact
probabilities, and beam search, which finds likelier texts than greedy decoding. About 15 seconds on a laptop; `--quick` takes 4. Writes
decoding.png.      (guide 12.1)
"""
import argparse
import math
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
import tinygrad_tf.nn.functional as F
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.data import BatchSampler, CharTokenizer, load_text, split_train_validation
from tinygrad_tf.generation import Sampler, beam_search, complete, inference
from tinygrad_tf.models import Decoder

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps and draws")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-15"), help="folder for decoding.png")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
quick = arguments.quick
tune_allocator()

# --- a model that has learned something: the loop of example 08, in short ---------------------------------------------------
T, B, C, H, Cff, L, steps, lr = (32, 8, 32, 4, 80, 1, 400, 2e-2) if quick else (64, 8, 64, 4, 160, 2, 600, 1e-2)
text = load_text()
tokenizer = CharTokenizer.from_text(text)
train_ids, validation_ids = (tokenizer.encode(part) for part in split_train_validation(text))
V_vocab = tokenizer.vocab_size
torch.manual_seed(0)
model = Decoder(V_vocab, T, C, H, Cff, L, num_kv_heads=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - 0.9 * step / steps))
sampler = BatchSampler(train_ids, context=T, batch_size=B, seed=0)
for _ in range(steps):
    inputs, targets = (torch.as_tensor(ids) for ids in sampler.next())
    optimizer.zero_grad()
    _, loss = model(inputs, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
model.eval()
parameters = [p.detach().clone() for p in model.parameters()]
print(f"{steps} steps of training, loss of the last batch {loss.item():.2f} nats a character, V_vocab = {V_vocab}\n")

# --- 1. two places of one text --------------------------------------------------------------------------------------------
# After each character of held-out passages the model has a distribution over the next. Its entropy, Σ −p ln p, says how unsure it is.
passages = validation_ids[:40 * T].reshape(40, T)
with inference(model):
    everywhere = model(torch.as_tensor(passages))[0].reshape(-1, V_vocab)      # logits [40 · T, V_vocab]


def entropy(p):
    return sum(-x * math.log(x) for x in p if x > 0)


def shown(text):
    return "".join({" ": "␣", "\n": "↵"}.get(character, character) for character in text)


entropies = [entropy(p) if i % T >= 8 else math.nan for i, p in enumerate(Sampler().probabilities(everywhere).tolist())]
places = {"sure": entropies.index(min(e for e in entropies if e == e)), "unsure": entropies.index(max(e for e in entropies if e == e))}
logits = everywhere[list(places.values())]                                     # [2, V_vocab]
before = {name: shown(tokenizer.decode(passages.reshape(-1)[place - 7:place + 1])) for name, place in places.items()}
own = dict(zip(places, Sampler().probabilities(logits)))                       # of each place p [V_vocab]
for name, p in own.items():
    print(f"{name:7s}after …{before[name]}   " + "  ".join(f"{shown(tokenizer.decode([i]))} {p[i]:.3f}" for i in p.argsort()[:-7:-1])
          + f"   entropy {entropy(p):.2f}")

# --- 2. the rules ---------------------------------------------------------------------------------------------------------
RULES = {
    "the model's own": Sampler(), "temperature 0.5": Sampler(0.5), "temperature 2": Sampler(2.0), "greedy": Sampler(0),
    "top-k 5": Sampler(top_k=5), "top-p 0.8": Sampler(top_p=0.8), "min-p 0.1": Sampler(min_p=0.1),
    "temperature 2, top-p 0.8": Sampler(2.0, top_p=0.8),
}
after = {rule: sampler.probabilities(logits) for rule, sampler in RULES.items()}       # of each, [2, V_vocab]
print("\n                              where it is sure: kept, entropy       where it is unsure: kept, entropy")
for rule, rows in after.items():
    print(f"  {rule:27s}" + "".join(f"{(row > 0).sum():22d}{entropy(row):9.2f}" for row in rows))


def kept(rule, place):
    """The ids that can be drawn."""
    return {i for i, x in enumerate(after[rule][list(places).index(place)]) if x > 0}


def smallest_set(p, share):
    """Top-p, as it is defined: the likeliest ids, until they have `share` together."""
    found, total = set(), 0.0
    for i in sorted(range(len(p)), key=lambda i: -p[i]):
        if total >= share:
            break
        found.add(i)
        total += p[i]
    return found


for place, row in own.items():
    assert kept("greedy", place) == {int(row.argmax())} and len(kept("top-k 5", place)) == 5
    assert kept("top-p 0.8", place) == smallest_set(row, 0.8)
    assert kept("min-p 0.1", place) == {i for i, x in enumerate(row) if x >= 0.1 * row.max()}
    assert kept("top-p 0.8", place) <= kept("temperature 2, top-p 0.8", place), "temperature comes first, and evens out what top-p sees"
    n = list(places).index(place)
    assert entropy(after["temperature 0.5"][n]) < entropy(row) < entropy(after["temperature 2"][n])
assert len(kept("top-p 0.8", "sure")) < len(kept("top-p 0.8", "unsure"))
print("Top-k keeps five in both places; top-p and min-p keep few where the model is sure. Temperature removes none.\n")

# --- 3. counting draws ----------------------------------------------------------------------------------------------------
N = 5_000 if quick else 50_000
print(f"{N:,} draws where it is unsure: largest distance of a count from N p, in standard deviations √(N p (1 − p) + 1)")
for rule, sampler in RULES.items():
    exact = after[rule][1]
    drawn = sampler(logits[1:].expand(N, V_vocab), generator=torch.Generator().manual_seed(0))[:, 0].cpu()
    counts = torch.bincount(drawn, minlength=V_vocab).tolist()
    distance = max(abs(n - N * x) / math.sqrt(N * x * (1 - x) + 1) for n, x in zip(counts, exact))
    print(f"  {rule:27s}{distance:5.2f}")
    assert distance < 6 and all(n == 0 for n, x in zip(counts, exact) if x == 0), "what is removed is never drawn"

# --- 4. decisions change, parameters do not -------------------------------------------------------------------------------
prompt, n = "The ", T - 4
texts = {rule: complete(model, [prompt], n, tokenizer=tokenizer, sampler=RULES[rule], seed=0)[0]
         for rule in ("greedy", "temperature 0.5", "the model's own", "temperature 2")}
print(f"\nOne model, one prompt, {prompt!r}:")
for rule, row in texts.items():
    print(f"  {rule:27s}{(prompt + row.text)!r}")
assert len({row.text for row in texts.values()}) == len(texts)
assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters())), "no rule touches a parameter"

# --- 5. penalties ---------------------------------------------------------------------------------------------------------
# For an id that stands in the text already, n times:  (z / r where z > 0, else z · r) − presence − n · frequency
history = texts["greedy"].ids
with inference(model):
    z = model(torch.tensor([history[-T:]]))[0][:, -1]                          # [1, V_vocab]
there = sorted(set(history))
print(f"\nAfter greedy decoding {len(there)} different characters stand in {len(history)}. Their share of the next draw:")
unpenalized = Sampler().probabilities(z)[0][there].sum()
for options in {}, {"repetition_penalty": 1.3}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5}:
    sampler = Sampler(**options)
    share = sampler.probabilities(z, [history])[0][there].sum()
    text = complete(model, [prompt], n, tokenizer=tokenizer, sampler=Sampler(0, **options))[0].text
    print(f"  {str(options or 'no penalty'):30s}{share:6.3f}   greedy, with it: {(prompt + text)!r}")
    assert share < unpenalized or not options
banned = tokenizer.encode("e")[0]
assert Sampler(logit_bias={banned: -math.inf}).probabilities(z)[0][banned] == 0

# --- 6. beams: the likeliest text is not made of the likeliest characters ---------------------------------------------------
def log_probability(ids, start):
    """Σ ln p(id | all ids before it), over the ids from `start` on; read in one pass."""
    with inference(model):
        ln_p = F.log_softmax(model(torch.tensor([ids[:-1]]))[0].double(), dim=-1)[0]
    return sum(ln_p[i, ids[i + 1]].item() for i in range(start - 1, len(ids) - 1))


n, widths = min(16, T - 8), (1, 2, 4, 8)
prompts = [validation_ids[start:start + 6].tolist() for start in range(100, 100 + 6 * 40, 40)]
print(f"\nThe likeliest {n} characters after {len(prompts)} prompts: Σ ln p, the mean over the prompts")
means = {}
for width in widths:
    beams = [beam_search(model, ids, n, num_beams=width, length_penalty=0)[0] for ids in prompts]
    means[width] = sum(beam.logprob for beam in beams) / len(prompts)
    example = max(beams, key=lambda beam: beam.logprob)
    print(f"  {width} beam{'s' if width > 1 else ' '}   {means[width]:8.3f}   the likeliest: {tokenizer.decode(example.ids)!r}, "
          f"{example.logprob:.3f}")
    assert abs(log_probability(example.ids, 6) - example.logprob) < 1e-3, "read at once, the text is as likely"
    if width == 1:
        assert [beam.ids for beam in beams] == [row.ids for row in complete(model, prompts, n)], "one beam is greedy decoding"
assert means[8] > means[1]
gain = means[8] - means[1]
print(f"Eight beams find texts that are e^{gain:.2f} = {math.exp(gain):.1f} times as likely (geometric mean); likely is not lively.")


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path, count=16):
    """The likeliest characters of both places; below, what each rule makes of their probabilities. Blank: cannot be drawn."""
    from matplotlib.figure import Figure
    rules = [rule for rule in RULES if rule != "the model's own"]
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    axes = figure.subplots(2, 2, height_ratios=[1, 1.35])
    for column, (place, row) in enumerate(own.items()):
        order = sorted(range(len(row)), key=lambda i: -row[i])[:count]
        bars, grid = axes[:, column]
        bars.bar(range(count), [row[i] for i in order], color="#9ecae1")
        bars.set(title=f"{place}: after “…{before[place]}”, entropy {entropy(row):.2f}", xticks=[], xlim=(-0.5, count + 0.9),
                 ylabel="" if column else "the model's own p")
        bars.spines[["top", "right"]].set_visible(False)
        values = [[after[rule][column][i] for i in order] for rule in rules]
        grid.imshow([[x ** 0.5 if x > 0 else math.nan for x in line] for line in values], cmap="Blues", vmin=-0.12, vmax=1.1, aspect="auto")
        for y, line in enumerate(values):
            grid.text(count - 0.3, y, f"{(after[rules[y]][column] > 0).sum():3d}", va="center", fontsize=10)
            for x, value in enumerate(line):
                if value >= 0.005:
                    color = "white" if value > 0.3 else "0.15"
                    grid.text(x, y, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=7, color=color)
        grid.text(count - 0.3, -0.75, "kept", fontsize=9, va="center")
        grid.set(xticks=range(count), xticklabels=[shown(tokenizer.decode([i])) for i in order], xlim=(-0.5, count + 0.9),
                 yticks=range(len(rules)), yticklabels=[] if column else rules)
        grid.tick_params(length=0)
        grid.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "decoding.png")
print(f"The picture: {arguments.out / 'decoding.png'}")
