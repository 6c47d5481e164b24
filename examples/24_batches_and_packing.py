"""Texts of unequal length in one batch: padded on the right, on the left, and packed.      python examples/24_batches_and_packing.py

Three layouts of the same texts give the same logits, loss and gradients, those of each text alone: who is seen, who counts and
where a token stands are three things, and each is needed. Packing fills the rows; then how full they are, on paragraphs of
Python's manual. At the end a file of tokens, and an epoch that goes on at the exact window. Writes layouts.png.
(guide 15.2, 15.3)
"""
import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import tinygrad_tf as torch
from tinygrad_tf.data import ByteTokenizer, CharTokenizer, EpochSampler, LMBatch, TokenFile, load_text, pack_sequences, pad_sequences
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.nn.masks import and_masks, causal_mod, create_mask, packing_mod, padding_mod

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-24"), help="folder for layouts.png")
parser.add_argument("--quick", action="store_true", help="fewer paragraphs")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
torch.manual_seed(0)

# --- 1. three layouts of five texts ---------------------------------------------------------------------------------------
words = ["to be", "or", "not to be", "that", "is the question"]
tokenizer = CharTokenizer.from_text("".join(words))
texts = [[*tokenizer.encode(word).tolist(), tokenizer.eos_id] for word in words]
T = max(map(len, texts)) - 1                                                    # the last token of a row is not read, but predicted
LAYOUTS = {
    "padded right": pad_sequences(texts, tokenizer.pad_id),
    "padded left": pad_sequences(texts, tokenizer.pad_id, padding_side="left"),
    "packed": pack_sequences(texts, T, tokenizer.pad_id),
}


def letters(ids, real=None):
    """A character for each token: · for a space, ¶ for <eos>, _ for padding."""
    shown = {tokenizer.pad_id: "_", tokenizer.eos_id: "¶"}
    return ["_" if real is not None and not r else shown.get(i, tokenizer.decode([i])).replace(" ", "·")
            for i, r in zip(ids, real or [True] * len(ids))]


for name, batch in LAYOUTS.items():
    print(f"{name}: {len(batch.token_ids)} rows of {T}, {batch.real_share:.0%} of the places are real, {batch.num_targets} targets count")
    for ids, real, targets, positions in zip(*(batch[n].tolist() for n in ("token_ids", "valid_tokens", "targets", "position_ids"))):
        counted = "".join("_" if t == -100 else letters([t])[0] for t in targets)
        print(f"   reads {''.join(letters(ids, real))}   predicts {counted}   stands at {' '.join(map(str, positions))}")
assert len({batch.num_targets for batch in LAYOUTS.values()}) == 1, "each token but the first of a text is predicted once"

# --- 2. the same numbers --------------------------------------------------------------------------------------------------
V_vocab, C, H = tokenizer.vocab_size, 24, 4
MODELS = {
    "MiniGPT: a table of positions": MiniGPT(V_vocab, T, C, H, 4 * C, 2, dropout=0.0, norm_first=True).double(),
    "Decoder: RoPE, two heads a key": Decoder(V_vocab, T, C, H, 64, 2, num_kv_heads=2).double(),
}
for model in MODELS.values():
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8) if p.ndim > 1 else p                                      # so that each token that is read matters


def run(model, batch):
    """(logits, loss, all gradients in one tensor)"""
    model.zero_grad(set_to_none=True)
    logits, loss = model(**batch)
    loss.backward()
    return logits.detach(), loss.item(), torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def alone(model):
    """The same of each text by itself; a text weighs what its targets weigh."""
    model.zero_grad(set_to_none=True)
    count, total, logits = sum(len(ids) - 1 for ids in texts), 0.0, []
    for ids in texts:
        found, loss = model(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]))
        weight = (len(ids) - 1) / count
        (loss * weight).backward()
        logits.append(found.detach()[0])
        total += loss.item() * weight
    return torch.cat(logits), total, torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def order_of(name):
    """(row, column) of each token that predicts, text by text."""
    batch = LAYOUTS[name]
    if name == "packed":
        return [(p.row, p.column + i) for p in sorted(batch.pieces) for i in range(len(texts[p.text]) - 1)]
    return [(row, column) for row, targets in enumerate(batch.targets.tolist()) for column, t in enumerate(targets) if t != -100]


def difference(model, name, batch):
    """The largest one to the texts alone, of (logits, loss, gradients)."""
    rows, columns = zip(*order_of(name))
    (logits, loss, gradients), (expected, expected_loss, expected_gradients) = run(model, batch), alone(model)
    return ((logits[list(rows), list(columns)] - expected).abs().max().item(), abs(loss - expected_loss),
            (gradients - expected_gradients).abs().max().item())


print("\nLargest difference to each text alone, in float64:        logits     loss   gradients")
for title, model in MODELS.items():
    for name, batch in LAYOUTS.items():
        found = difference(model, name, batch)
        print(f"  {title:32s}{name:14s}" + "".join(f"{value:12.0e}" for value in found))
        assert max(found) < 1e-10

# --- 3. each part is needed -----------------------------------------------------------------------------------------------
columns = torch.arange(T)
model = MODELS["MiniGPT: a table of positions"]


def without(name, what, **changed):
    batch = LAYOUTS[name]
    found = difference(model, name, LMBatch(**{key: batch[key] for key in batch.keys()} | changed, pieces=batch.pieces))
    print(f"  {name:14s}{what:48s}{found[0]:8.1e}{found[1]:10.1e}")
    return found


def next_ids(batch):
    """Targets without any −100: whatever stands one place further."""
    return torch.cat([batch.token_ids[:, 1:], torch.full((len(batch.token_ids), 1), tokenizer.pad_id)], dim=1)


print("\nOne part left out:                                              logits      loss")
assert without("padded left", "no valid_tokens: padding is read", valid_tokens=None)[0] > 1e-2
assert without("padded left", "columns as positions: texts begin late", position_ids=columns)[0] > 1e-2
seen, counted, _ = without("padded right", "no −100: padding counts", targets=next_ids(LAYOUTS["padded right"]))
assert seen < 1e-10 < 1e-2 < counted, "valid_tokens do not do it: the logits are right, the loss is not"
assert without("packed", "no segment_ids: texts read their neighbours", segment_ids=None)[0] > 1e-2
assert without("packed", "columns as positions: texts begin late", position_ids=columns)[0] > 1e-2
seen, counted, _ = without("packed", "no −100 at the joins: ¶ predicts the next text", targets=next_ids(LAYOUTS["packed"]))
assert seen < 1e-10 < 1e-2 < counted

# --- 4. how full the rows are ---------------------------------------------------------------------------------------------
context, rows = (128, 8) if arguments.quick else (256, 16)
in_bytes = ByteTokenizer()
paragraphs = [in_bytes.encode(p).tolist()[:context + 1] for p in load_text().split("\n\n") if p.strip()][:200 if arguments.quick else 2000]
rng = np.random.default_rng(0)
rng.shuffle(paragraphs)


def padded_batches(sequences):
    return [pad_sequences(sequences[i:i + rows], in_bytes.pad_id) for i in range(0, len(sequences), rows)]


packed = pack_sequences(paragraphs, context, in_bytes.pad_id)
WAYS = {
    f"padded, {rows} at random in a batch": padded_batches(paragraphs),
    "padded, like lengths together": padded_batches(sorted(paragraphs, key=len)),
    f"packed to rows of {context}, as they come": [pack_sequences(paragraphs, context, in_bytes.pad_id, order="given")],
    "packed, the longest first": [packed],
}
print(f"\n{len(paragraphs)} paragraphs of Python's manual, of {min(map(len, paragraphs))} to {max(map(len, paragraphs))} bytes, "
      f"{statistics.median(map(len, paragraphs)):.0f} in the middle:   places      real")
share = {}
for name, batches in WAYS.items():
    places = sum(batch.token_ids.numel() for batch in batches)
    share[name] = sum(batch.real_share * batch.token_ids.numel() for batch in batches) / places
    print(f"  {name:56s}{places:12,}{share[name]:10.1%}")
shares = list(share.values())
assert shares[0] < shares[1] < shares[3] and shares[3] > 0.97 and shares[2] > 0.9

torch.manual_seed(0)
model = MiniGPT(in_bytes.vocab_size, context, 64, 4, 256, 2, dropout=0.0, norm_first=True)


def seconds(batch):
    """Of a training step without the update, the middle one of several."""
    taken = []
    for _ in range(2 if arguments.quick else 4):
        model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        model(**batch)[1].backward()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


few = 2 if arguments.quick else rows
for name, batch in ("padded", pad_sequences(paragraphs[:few], in_bytes.pad_id)), ("packed", packed.rows(list(range(few)))):
    print(f"  a step, {name}: {batch.num_targets / seconds(batch):6,.0f} targets a second, {batch.real_share:.0%} real")

# --- 5. a file of tokens, and an epoch that goes on -----------------------------------------------------------------------
with tempfile.TemporaryDirectory() as folder:
    file = TokenFile.write(Path(folder) / "manual.tokens", paragraphs, in_bytes)
    sampler = EpochSampler(file, context, batch_size=rows, seed=0)
    whole = [sampler.next()[0][:, 0].tolist() for _ in range(6)]
    sampler = EpochSampler(file, context, batch_size=rows, seed=0)
    for _ in range(2):
        sampler.next()
    state = sampler.state_dict()
    resumed = EpochSampler(TokenFile(file.path, in_bytes), context, batch_size=rows, seed=0)
    resumed.load_state_dict(state)
    assert [resumed.next()[0][:, 0].tolist() for _ in range(4)] == whole[2:]
    del sampler, resumed                                                        # the file is open as long as somebody reads it
    print(f"\n{file!r}".replace(folder, "…"))
    print(f"An epoch has {(len(file) - 1) // context} windows. Interrupted after two batches, with the state {state}, it goes on as if "
          f"nothing had been.")
    del file


# --- the picture ----------------------------------------------------------------------------------------------------------

def visible(batch, row):
    """[T, T]: who sees whom in a row."""
    mods = [causal_mod, padding_mod(batch.valid_tokens)] + ([] if batch.segment_ids is None else [packing_mod(batch.segment_ids)])
    return create_mask(and_masks(*mods), len(batch.token_ids), None, T, T)[row, 0].cpu().numpy()


def text_of(name, batch):
    """[B, T]: the number of the text that stands there, −1 for padding."""
    owner = np.where(batch.valid_tokens.cpu().numpy(), np.arange(len(batch.token_ids))[:, None], -1)
    for p in batch.pieces:
        owner[p.row, p.column:p.column + p.length] = p.text
    return owner


def draw(path):
    """On the left the rows of each layout, a colour for each text; on the right who sees whom in its first row."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    figure, colors = Figure(figsize=(11, 10.5), layout="constrained"), colormaps["Set2"].colors
    panels = figure.subplots(3, 2, width_ratios=[1.35, 1])
    for (left, right), (name, batch) in zip(panels, LAYOUTS.items()):
        owner, targets = text_of(name, batch), batch.targets.cpu().numpy()
        shown = np.array([[colors[t] if t >= 0 else (0.93, 0.93, 0.93) for t in row] for row in owner])
        left.imshow(shown, aspect="auto")
        for row, (ids, real) in enumerate(zip(batch.token_ids.tolist(), batch.valid_tokens.tolist())):
            for column, letter in enumerate(letters(ids, real)):
                left.text(column, row - 0.1, letter if real[column] else "", ha="center", va="center", fontsize=11)
                if targets[row, column] == -100 and real[column]:
                    left.text(column, row + 0.33, "−100", ha="center", va="center", fontsize=6, color="#a50f15")
        left.set(title=f"{name}: {len(owner)} × {T}, {batch.real_share:.0%} real", xticks=[], yticks=range(len(owner)), ylabel="row")
        left.set_xticks(np.arange(T + 1) - 0.5, minor=True)
        left.set_yticks(np.arange(len(owner) + 1) - 0.5, minor=True)
        left.grid(which="minor", color="white", linewidth=1.5)
        left.tick_params(which="minor", length=0)
        number = len(owner) - 1 if name == "packed" else 0
        mask, keys = visible(batch, number), owner[number]
        right.imshow([[colors[keys[j]] if mask[i, j] else (0.97, 0.97, 0.97) for j in range(T)] for i in range(T)])
        marks = letters(batch.token_ids[number].tolist(), batch.valid_tokens[number].tolist())
        right.set(title=f"row {number}: who (down) sees whom (across)", xticks=range(T), yticks=range(T))
        right.set_xticklabels(marks, fontsize=8)
        right.set_yticklabels(marks, fontsize=8)
        for axes in left, right:
            axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "layouts.png")
print(f"\nThe picture: {arguments.out / 'layouts.png'}")
