"""The doctor on models that are broken on purpose: does it name what was planted?      python examples/26_doctor.py

Each fault below is a few lines that do something to a healthy MiniGPT, its batch, or what is known of them. The doctor is not told
which. At the end a table, planted by named: all on the diagonal, and nothing in the rows of healthy models. Writes confusion.png.
(guide 17.3)
"""
import argparse
import math
from pathlib import Path
from types import SimpleNamespace

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.data import ByteTokenizer, CharTokenizer, load_text, pack_sequences, pad_sequences
from tinygrad_tf.generation import Sampler
from tinygrad_tf.models import Decoder, EncoderDecoder, MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.optim import AdamW
from tinygrad_tf.optim.lr_scheduler import LambdaLR
from tinygrad_tf.training import examine

T, C, H = 24, 32, 4
TEXT = load_text()[10_000:30_000]
TOKENIZER = CharTokenizer.from_text(TEXT)
SENTENCES = [s for s in TEXT.replace("\n", " ").split(". ") if len(s) > T]
V_vocab = TOKENIZER.vocab_size


def texts(lengths=(25, 12, 18, 7), first=0):
    """Beginnings of sentences with an <eos>, as lists of so many ids."""
    return [[*TOKENIZER.encode(s)[:n - 1].tolist(), TOKENIZER.eos_id] for s, n in zip(SENTENCES[first:], lengths)]


def gpt(kind=MiniGPT, **options):
    return kind(V_vocab, T, C, H, 4 * C, 2, **{"dropout": 0.1, "norm_first": True, **options})


def patient(model=None, batch=None, **known):
    """A healthy case: a model, a batch with padding on the left, and what is known besides."""
    torch.manual_seed(0)
    model = gpt() if model is None else model()
    batch = pad_sequences(texts(), TOKENIZER.pad_id, "left") if batch is None else batch()
    return SimpleNamespace(model=model, batch=batch, known={"tokenizer": TOKENIZER, "train_text": TEXT, **known})


def report(p):
    """What the doctor says. It is told of an optimizer, and so that the model trains; None stands for no optimizer."""
    known = {"optimizer": AdamW(p.model.parameters(), lr=1e-3), **p.known} if "optimizer" not in p.known else p.known
    return examine(p.model, p.batch, **known)


# --- the faults -----------------------------------------------------------------------------------------------------------

FAULTS = {}                     # name → (the cause to be named, what it does to a patient)


def fault(cause, name):
    def add(plant):
        FAULTS[name] = cause, plant
        return plant
    return add


def changing(p, **arguments):
    """Every block of the model is called with these arguments in place of its own; a function gets the old ones."""
    def change(block, args, kwargs):
        return args, {**kwargs, **{name: new(kwargs) if callable(new) else new for name, new in arguments.items()}}
    for block in p.model.blocks:
        block.register_forward_pre_hook(change, with_kwargs=True)


def after(module, function):
    """What a module returns becomes function(it)."""
    module.register_forward_hook(lambda module, args, out: function(out))


def write(parameter, change):
    with torch.no_grad():
        parameter.copy_(change(parameter))


def ids_without_padding(more=1):
    """[B, T + more]"""
    return torch.tensor(texts((T + more,) * 4))


@fault("shifted labels", "targets are the inputs")
def _(p):
    inputs = ids_without_padding(0)
    p.batch = inputs, inputs


@fault("shifted labels", "targets are two places ahead")
def _(p):
    ids = ids_without_padding(2)
    p.batch = ids[:, :T], ids[:, 2:]


@fault("shifted labels", "targets are one place back")
def _(p):
    ids = ids_without_padding()
    p.batch = ids[:, 1:], ids[:, :T]


class ShiftsAgain(MiniGPT):
    """Takes targets that are one place ahead, and shifts them once more."""

    def forward(self, token_ids, targets=None, **options):
        logits, _ = super().forward(token_ids, **options)
        return logits, F.cross_entropy(logits[:, :-1].reshape(-1, V_vocab), targets[:, 1:].reshape(-1))


@fault("shifted labels", "the model shifts the targets, too")
def _(p):
    p.model = gpt(ShiftsAgain)


@fault("padding in the loss", "no −100 at padding")
def _(p):
    ids = p.batch.token_ids
    p.batch.targets = torch.cat([ids[:, 1:], p.batch.targets[:, -1:]], dim=1)


@fault("leak of future tokens", "no causal mask")
def _(p):
    changing(p, causal=False)


@fault("leak of future tokens", "a causal mask that is off by one")
def _(p):
    changing(p, causal=False, mask_mod=lambda kwargs: lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 1)


@fault("leak of future tokens", "a causal mask that is transposed")
def _(p):
    changing(p, causal=False, mask_mod=lambda kwargs: lambda b, h, q_idx, kv_idx: kv_idx >= q_idx)


@fault("all-masked row", "a row of nothing but padding")
def _(p):
    p.batch = pad_sequences([*texts(), []], TOKENIZER.pad_id)


@fault("all-masked row", "a token that does not see itself")
def _(p):
    changing(p, mask_mod=lambda kwargs: lambda b, h, q_idx, kv_idx: kv_idx < q_idx)


class PlainAttention(nn.Module):
    """softmax(scores + M) V of one head, as it is often written: M is −∞ where there is no real key."""

    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, causal=True, valid_tokens=None, **options):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        allowed = torch.tril(torch.ones(x.shape[1], x.shape[1], device=x.device)).bool() & valid_tokens[:, None, :]
        scores = (q @ k.transpose(-2, -1) / math.sqrt(x.shape[-1])).masked_fill(~allowed, -math.inf)
        return F.softmax(scores, dim=-1) @ v


@fault("all-masked row", "softmax of −∞ alone, at padding on the left")
def _(p):
    p.model.blocks[0].attention = PlainAttention(C)


@fault("padding is read", "valid_tokens is forgotten")
def _(p):
    changing(p, valid_tokens=None)


@fault("padding is read", "the mask of padding is one of queries")
def _(p):
    changing(p, valid_tokens=None, allowed=lambda kwargs: kwargs["valid_tokens"][:, None, :, None])


@fault("padding is read", "positions count padding")
def _(p):
    p.batch.position_ids = torch.arange(p.batch.token_ids.shape[1])


@fault("padding is read", "texts in one row see each other")
def _(p):
    p.batch = pack_sequences(texts((9, 12, 18, 7)), T, TOKENIZER.pad_id)
    changing(p, mask_mod=None)


@fault("no gradient", ".detach() in the middle")
def _(p):
    after(p.model.blocks[0], lambda x: x.detach())


@fault("no gradient", "a layer that is frozen")
def _(p):
    p.model.blocks[1].ffn.requires_grad_(False)


@fault("no gradient", "a layer that is not used")
def _(p):
    p.model.adapter = nn.Linear(C, C)


class Silent(MiniGPT):
    forward = torch.no_grad()(MiniGPT.forward)


@fault("no gradient", "a forward pass in no_grad")
def _(p):
    p.model = gpt(Silent)


@fault("not in the optimizer", "a layer that came after the optimizer")
def _(p):
    p.known["optimizer"] = AdamW(p.model.parameters(), lr=1e-3)
    p.model.blocks[1].ffn = nn.FeedForward(C, 4 * C)


@fault("does not learn", "a gradient of the wrong sign")
def _(p):
    after(p.model.lm_head, lambda logits: 2 * logits.detach() - logits)


@fault("softmax before the loss", "softmax at the end of the model")
def _(p):
    after(p.model.lm_head, lambda logits: F.softmax(logits, dim=-1))


@fault("exploding layer", "weights that are a million times too large")
def _(p):
    write(p.model.blocks[1].ffn.net[3].weight, lambda w: w * 1e6)


@fault("exploding layer", "a residual path that is scaled up in each block")
def _(p):
    for block in p.model.blocks:
        after(block, lambda x: 200 * x)
    p.model.blocks[1].norm1 = nn.Identity()


@fault("exploding layer", "gradients that grow tenfold in each of six layers")
def _(p):
    p.model = MiniGPT(V_vocab, T, C, H, 4 * C, 6, dropout=0.0, norm_first=True)
    for block in p.model.blocks:
        after(block, lambda x: 10 * x - 9 * x.detach())


@fault("dead layer", "ReLU below 0 everywhere")
def _(p):
    p.model.blocks[1].ffn.net[1] = nn.ReLU()
    write(p.model.blocks[1].ffn.net[0].bias, lambda b: b - 100)


@fault("train/eval mode", "dropout that acts in evaluation")
def _(p):
    after(p.model.blocks[0], lambda x: F.dropout(x, 0.1))


@fault("train/eval mode", "model.train() forgotten after an evaluation")
def _(p):
    p.model.eval()


@fault("train/eval mode", "a block that was left in the other mode")
def _(p):
    p.model.blocks[0].eval()


@fault("untied weights", "the head is a copy of the embedding")
def _(p):
    p.model.lm_head.weight = nn.Parameter(p.model.lm_head.weight.detach().clone())


@fault("tokenizer does not fit", "the tokenizer of another model")
def _(p):
    p.known["tokenizer"] = ByteTokenizer()


@fault("tokenizer does not fit", "ids that the model has no row for")
def _(p):
    longer = CharTokenizer.from_text(TEXT + "".join(chr(0x4E00 + i) for i in range(9)))
    p.known["tokenizer"] = longer
    p.batch.token_ids[0, -1] = longer.vocab_size - 1


class Upper(CharTokenizer):
    """Loses the case of letters."""

    def decode(self, ids, **options):
        return super().decode(ids, **options).upper()


@fault("tokenizer does not fit", "a text does not come back")
def _(p):
    p.known["tokenizer"] = Upper.from_text(TEXT)


@fault("tokenizer does not fit", "a text of other letters")
def _(p):
    p.known["validation_text"] = "Преобразователь читает слова. " * 20


@fault("NaN or infinity", "a logarithm of what is negative")
def _(p):
    after(p.model.blocks[0], lambda x: (x - 1).log())


@fault("NaN or infinity", "a weight that is NaN")
def _(p):
    write(p.model.blocks[1].norm1.weight, lambda w: w * torch.where(torch.arange(C) == 3, math.nan, 1.0))


@fault("NaN or infinity", "a division by 0, in backward alone")
def _(p):
    after(p.model.blocks[1], lambda x: x + (x - x).abs().sqrt())


@fault("does not run", "a head of another width")
def _(p):
    p.model.final_norm = nn.LayerNorm(C + 1)


# --- faults of texts, of what is written, of time, of the learning rate ----------------------------------------------------

@fault("overlapping texts", "a held-out text that is a part of the other")
def _(p):
    p.known["validation_text"] = TEXT[4_000:8_000]


@fault("duplicates in training", "a text that is there four times")
def _(p):
    p.known["train_text"] = 4 * TEXT


@fault("temperature too low", "sampling at temperature 0.01")
def _(p):
    p.known["sampler"] = Sampler(temperature=0.01)


@fault("<eos> is never a target", "texts that are cut before their <eos>")
def _(p):
    p.batch = pad_sequences([[TOKENIZER.eos_id, *ids[:-1]] for ids in texts()], TOKENIZER.pad_id)


@fault("<eos> does not stop it", "<eos> is a token like any other to the generator")
def _(p):
    p.known["samples"] = [texts()[0], texts()[1] + texts()[2]]


@fault("few real tokens", "one long text among short ones")
def _(p):
    p.batch = pad_sequences(texts((25, 4, 3, 5)), TOKENIZER.pad_id)


@fault("slow data loading", "0.3 seconds for a batch, 0.1 for a step")
def _(p):
    p.known["loading"] = 0.3, 0.1


@fault("dense attention", "all scores of 1,100 tokens at once")
def _(p):
    ids = torch.tensor(TOKENIZER.encode(TEXT)[:2202].reshape(2, 1101))
    p.batch = {"token_ids": ids[:, :-1], "targets": ids[:, 1:], "valid_tokens": torch.ones(2, 1100).bool()}
    p.model = MiniGPT(V_vocab, 1100, C, H, C, 1, norm_first=True)
    p.model.blocks[0].attention = PlainAttention(C)


@fault("learning rate 0", "a schedule that has ended")
def _(p):
    p.known["optimizer"] = AdamW(p.model.parameters(), lr=0.0)


@fault("learning rate too high", "lr = 3")
def _(p):
    p.known["optimizer"] = AdamW(p.model.parameters(), lr=3.0)


@fault("learning rate too low", "lr = 1e-9")
def _(p):
    p.known["optimizer"] = AdamW(p.model.parameters(), lr=1e-9)


@fault("learning-rate schedule", "the schedule of another optimizer")
def _(p):
    p.known["optimizer"], other = (AdamW(p.model.parameters(), lr=1e-3) for _ in range(2))
    p.known["scheduler"] = LambdaLR(other, lambda step: 0.5)


# --- the healthy ----------------------------------------------------------------------------------------------------------

def rows():
    ids = ids_without_padding()
    return ids[:, :T], ids[:, 1:]


def sources():
    """For an encoder–decoder: one sentence into another; targets end with <eos>."""
    source, target = pad_sequences(texts(), TOKENIZER.pad_id), pad_sequences(texts((9, 20, 14, 25), 4), TOKENIZER.pad_id)
    return {"source_ids": source.token_ids, "source_valid": source.valid_tokens, "target_ids": target.token_ids,
            "targets": target.targets, "target_valid": target.valid_tokens}


HEALTHY = {
    "MiniGPT, post-norm": dict(model=lambda: gpt(norm_first=False)),
    "MiniGPT, pre-norm, rows without padding": dict(batch=rows),
    "Decoder, padded on the right": dict(model=lambda: Decoder(V_vocab, T, C, H, 64, 2, num_kv_heads=2),
                                         batch=lambda: pad_sequences(texts(), TOKENIZER.pad_id)),
    "MiniGPT with experts, packed": dict(model=lambda: gpt(ffn=lambda: nn.MoE(C, 64, num_experts=4)),
                                         batch=lambda: pack_sequences(texts((9, 12, 18, 7)), T, TOKENIZER.pad_id)),
    "encoder–decoder": dict(model=lambda: EncoderDecoder(V_vocab, V_vocab, T, T, C, H, 4 * C, 2), batch=sources),
}


def trained(p, steps=20):
    """The patient after some steps, with the optimizer that made them."""
    arguments = p.batch if isinstance(p.batch, tuple) else ()
    options = {} if arguments else p.batch
    p.known["optimizer"] = optimizer = AdamW(p.model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        p.model(*arguments, **options)[1].backward()
        optimizer.step()
    return p


def planted(name):
    """The patient with that fault."""
    p = patient()
    FAULTS[name][1](p)
    return p


CAUSES = list(dict.fromkeys(cause for cause, _ in FAULTS.values()))


def diagnoses(quick=False):
    """{name: causes that the doctor names} of the faults, and of the healthy models, before and after some training."""
    first = {cause: name for name, (cause, _) in reversed(FAULTS.items())}
    names = [name for name, (cause, _) in FAULTS.items() if not quick or name == first[cause]]
    faulty = {name: report(planted(name)).causes for name in names}
    healthy = {name: report(patient(**parts)).causes for name, parts in HEALTHY.items()}
    if not quick:
        healthy |= {f"{name}, trained": report(trained(patient(**parts))).causes for name, parts in HEALTHY.items()}
    return faulty, healthy


# --- what is printed ------------------------------------------------------------------------------------------------------

def print_table(found):
    """A row for each patient, a column for each cause; X marks what was named, and · what was not."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGH"
    print("\n".join(f"   {letter}  {cause}" for letter, cause in zip(letters, CAUSES)))
    print(f"\n{'planted':52s}named  {' '.join(letters[:len(CAUSES)])}")
    for name, causes in found.items():
        print(f"{name:52s}       {' '.join('X' if cause in causes else '·' for cause in CAUSES)}")


def draw(faulty, healthy, path):
    """The same as squares, a colour for each cause; white rows are healthy."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    found = {**faulty, **healthy}
    figure = Figure(figsize=(10.5, 1.8 + 0.21 * len(found)), layout="constrained")
    axes, colors = figure.subplots(), colormaps["tab20"].colors
    for row, causes in enumerate(found.values()):
        for cause in causes:
            axes.scatter(CAUSES.index(cause), row, s=75, marker="s", color=colors[CAUSES.index(cause) % len(colors)])
    axes.axhspan(len(faulty) - 0.5, len(found) - 0.5, color="#e5f5e0", zorder=0)
    axes.annotate("healthy: nothing is named", (len(CAUSES) / 2 - 0.5, len(faulty) + len(healthy) / 2 - 0.5), ha="center", va="center",
                  color="#238b45")
    axes.set(xlim=(-0.6, len(CAUSES) - 0.4), ylim=(len(found) - 0.5, -0.5), title="planted (down) and named by the doctor (across)")
    axes.set_xticks(range(len(CAUSES)), CAUSES, rotation=50, ha="left", fontsize=8)
    axes.set_yticks(range(len(found)), found, fontsize=8)
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.grid(color="0.93", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one fault of each kind, and no training")
    parser.add_argument("--device", help="cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=Path("runs/example-26"), help="folder for confusion.png")
    arguments = parser.parse_args()
    torch.set_default_device(arguments.device)
    print("A MiniGPT whose causal mask is off by one:\n")
    print(report(planted("a causal mask that is off by one")))
    print("\nThe same without the fault:\n")
    print(report(patient()))
    faulty, healthy = diagnoses(arguments.quick)
    print(f"\n{len(faulty)} faults, {len(healthy)} healthy models:\n")
    print_table({**faulty, **healthy})
    wrong = {name: causes for name, causes in faulty.items() if causes != [FAULTS[name][0]]}
    assert not wrong, f"planted one thing, named another: {wrong}"
    assert not any(healthy.values()), f"false alarms: {healthy}"
    print("\nEach fault is named, and nothing else; no false alarm.")
    draw(faulty, healthy, arguments.out / "confusion.png")
    print(f"The picture: {arguments.out / 'confusion.png'}")


if __name__ == "__main__":
    main()
