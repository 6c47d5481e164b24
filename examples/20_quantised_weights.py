"""Weights in 8, 4, 3 and 2 bits: how they lie in bytes, three ways to round them, and what each costs.

    python examples/20_quantised_weights.py [--quick] [--out DIR]

First one row of a matrix, down to its bytes. Then a small model is trained, and its layers are rounded: each weight to the nearest level;
with inputs scaled by their size (AWQ); column by column, the columns still to come repairing what was broken (GPTQ). One table has the
bytes, the error, the perplexity with its standard error, and the speed, which smaller weights alone do not raise. The smallest good one
is written to a file and read back. About 20 seconds; `--quick` takes 6. Writes quantised_weights.png.      (guide 11.3)
"""
import argparse
from dataclasses import replace
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.data import BatchSampler, CharTokenizer, evaluation_batches, load_text, split_train_validation
from tinygrad_tf.generation import Sampler, complete
from tinygrad_tf.models import Decoder
from tinygrad_tf.quantization import INT4, QuantizedLinear, Scheme, bits_per_weight, output_errors, quantize_model, quantized_linears
from tinygrad_tf.quantization.table import as_text, compare
from tinygrad_tf.training.quantized import title, variants, write_speed

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps, less held-out text")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-20"), help="folder for quantised_weights.png and the file of weights")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
quick = arguments.quick
tune_allocator()
arguments.out.mkdir(parents=True, exist_ok=True)

# --- 1. one row, down to its bytes --------------------------------------------------------------------------------------------
row = nn.Linear(8, 1, bias=False)                                              # W [1, 8]
row.weight.data.copy_(torch.tensor([[0.7, -0.7, 0.21, -0.1, 1.0, -0.5, 0.3, 0.0]]))
layer = QuantizedLinear.from_linear(row, Scheme(bits=4, granularity="group", group_size=4))
codes = [[byte & 15, byte >> 4] for byte in layer.packed.flatten().tolist()]   # two in a byte, the first in its lower half
q = [code - 8 for pair in codes for code in pair]
print("W        ", "  ".join(f"{w:5.2f}" for w in row.weight.flatten().tolist()))
print("q        ", "  ".join(f"{n:5d}" for n in q), "   whole numbers from -7 to 7")
print("stored   ", "     ".join(f"   {byte:02x}  " for byte in layer.packed.flatten().tolist()), " q + 8, two in a byte")
print("s        ", "".join(f"{s:<28.4f}" for s in layer.scale.flatten().tolist()), "the largest of four / 7, float16")
print("s · q    ", "  ".join(f"{w:5.2f}" for w in layer.weight.flatten().tolist()))
s = layer.scale.float().flatten().tolist()
assert all(abs(w - s[i // 4] * q[i]) <= s[i // 4] / 2 + 1e-6 for i, w in enumerate(row.weight.flatten().tolist())), "half a step at most"
assert layer.weight_nbytes == 8 * 4 // 8 + 2 * 2, "4 bits for each weight, and a float16 for each 4 of them"
print(f"{layer.weight_nbytes} bytes in place of {4 * 8}; with groups of 32, 4 + 16 / 32 = 4.5 bits a weight.\n")

# --- 2. a model that has learned something: the loop of example 08, in short --------------------------------------------------
T, B, C, H, Cff, L, steps, lr = (32, 8, 32, 4, 64, 2, 400, 1e-2) if quick else (64, 8, 64, 4, 160, 2, 600, 1e-2)
text = load_text()
tokenizer = CharTokenizer.from_text(text)
train_ids, held_out = (tokenizer.encode(part) for part in split_train_validation(text))
held_out = held_out[:4000 if quick else 12000]
torch.manual_seed(0)
model = Decoder(tokenizer.vocab_size, T, C, H, Cff, L, num_kv_heads=2)
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
print(f"{steps} steps of training, loss of the last batch {loss.item():.2f} nats a character\n")

# --- 3. three ways to round its layers ----------------------------------------------------------------------------------------
# AWQ and GPTQ look at a calibration batch: what goes into each layer when the model reads some of the training text.
calibration = torch.as_tensor(BatchSampler(train_ids, T, 32, seed=1).next()[0])                   # ids [32, T]
ways = variants(INT4)
models = {way: quantize_model(model, *way, calibration) for way in ways}
errors = {way: output_errors(model, models[way], calibration) for way in ways}                     # {layer: share of its output}
print("Σ |x (W − Ŵ)ᵀ|² / Σ |x Wᵀ|² on the calibration batch, of each layer:")
print(f"  {'4 bits, groups of 32':30s}{'rtn':>9s}{'awq':>9s}{'gptq':>9s}")
for name in quantized_linears(models[ways[-1]]):
    print(f"  {name:30s}" + "".join(f"{errors[INT4, method][name]:9.5f}" for method in ("rtn", "awq", "gptq")))
for bits in (4, 3, 2):
    scheme = replace(INT4, bits=bits)
    for name, nearest in errors[scheme, "rtn"].items():
        assert errors[scheme, "gptq"][name] <= nearest * 1.0001 and errors[scheme, "awq"][name] <= nearest * 1.0001, name
print("GPTQ and AWQ are never worse than rounding to nearest, in no layer: where their search ends worse, that is what they return.\n")

# --- 4. the table -------------------------------------------------------------------------------------------------------------
rows = compare({"float32": model, **{title(*way): models[way] for way in ways}}, list(evaluation_batches(held_out, T, 16)), write_speed)
print(as_text(rows))
by_name = {row.name: row for row in rows}
four = models[INT4, "gptq"]
floats = sum(4 * layer.in_features * layer.out_features for layer in quantized_linears(four).values())
stored = sum(layer.weight_nbytes for layer in quantized_linears(four).values())
assert bits_per_weight(four) == 4.5 and stored == floats * 4.5 / 32, "stored bytes are what they claim"
assert by_name["float32"].memory - by_name[title(INT4, "gptq")].memory == floats - stored
assert abs(by_name["int8, per channel, rtn"].difference[0]) < 0.005, "8 bits cost next to nothing"
assert by_name[title(replace(INT4, bits=2), "rtn")].difference[0] > by_name[title(INT4, "rtn")].difference[0] + 0.02
print(f"The quantised matrices: {stored:,} bytes of {floats:,}. The embedding, which is the head too, and the norms stay float32.")

# --- 5. to a file and back -----------------------------------------------------------------------------------------------------
path = arguments.out / "int4.safetensors"
torch.save(four.state_dict(), path)
read = quantize_model(Decoder(tokenizer.vocab_size, T, C, H, Cff, L, num_kv_heads=2), INT4).eval()      # the layers; their numbers follow
read.load_state_dict(torch.load(path))
prompt = tokenizer.encode(text[:20])
texts = [complete(m, [prompt], 40, tokenizer=tokenizer, sampler=Sampler(0))[0].text for m in (four, read)]
assert texts[0] == texts[1]
print(f"{path}: {path.stat().st_size:,} bytes. Read back, it writes the same: {texts[0]!r}")


# --- the picture ----------------------------------------------------------------------------------------------------------------

def draw(path):
    """Left, what is lost against what is saved; right, the error of each layer."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
    colors = {"rtn": "#d95f02", "awq": "#7570b3", "gptq": "#1b9e77"}
    points = {"8 bits, rtn": ("0.4", ways[:2])}
    points |= {f"2, 3 and 4 bits, {method}": (color, [(replace(INT4, bits=bits), method) for bits in (2, 3, 4)])
               for method, color in colors.items()}
    for label, (color, shown) in points.items():
        found = [by_name[title(*way)] for way in shown]
        losses, spread = zip(*(row.difference for row in found))
        left.errorbar([row.bits for row in found], losses, spread, fmt="o-", color=color, capsize=3, linewidth=1, label=label)
    left.axhline(0, color="0.6", linewidth=1)
    left.set_yscale("symlog", linthresh=0.01)
    left.set(ylim=(-0.005, 2 * max(row.difference[0] for row in rows)), xlabel="stored bits a weight",
             ylabel="nats a character above float32 (linear below 0.01)", title="What is lost, for what is stored (± standard error)")
    left.legend(frameon=False)
    names = list(errors[INT4, "rtn"])
    for method, color in colors.items():
        right.plot([errors[INT4, method][name] for name in names], range(len(names)), "o", color=color, label=method)
    right.set(xscale="log", yticks=range(len(names)), yticklabels=names, xlabel="Σ |x (W − Ŵ)ᵀ|² / Σ |x Wᵀ|²",
              title="4 bits, groups of 32: the error of each layer")
    right.invert_yaxis()
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)


draw(arguments.out / "quantised_weights.png")
print(f"The picture: {arguments.out / 'quantised_weights.png'}")
