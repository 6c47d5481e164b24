"""Low-bit weights of a trained run in one table: bytes, error, perplexity, speed; with and without training for them.

    tinygrad-tf train --preset small --out runs/small
    python examples/benchmarks/quantized.py --run runs/small [--steps 300] [--tokens N] [--json FILE]

The rows of `tinygrad-tf quantize`, and at 3 bits quantisation-aware training: the run goes on for some steps with weights that are
rounded in every forward pass, the gradient going straight through. Beside it stands what the same steps, batches and learning rate make
of the float weights, rounded to nearest at the end: only so is seen what the training for it is worth. Errors behind ± are standard
errors over windows of the held-out text; those of a difference are of the windows' differences.
"""
import argparse
import json
import os
import platform
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # before NumPy is loaded

import numpy as np

import tinygrad_tf as torch
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.data import BatchSampler, evaluation_batches, load_text
from tinygrad_tf.nn.utils import clip_grad_norm_
from tinygrad_tf.optim import AdamW, decay_groups
from tinygrad_tf.quantization import INT4, convert, output_errors, prepare_qat, quantize_model
from tinygrad_tf.quantization.table import as_text, compare
from tinygrad_tf.training.parts import encode_split  # noqa: E402
from tinygrad_tf.training.quantized import calibration_batch, title, variants, write_speed
from tinygrad_tf.training.state import load_model

parser = argparse.ArgumentParser()
parser.add_argument("--run", type=Path, required=True, help="the folder of a trained run")
parser.add_argument("--steps", type=int, default=300, help="of training on, with rounded weights and without; 0 leaves both out")
parser.add_argument("--lr", type=float, default=3e-4, help="of these steps, falling to 0")
parser.add_argument("--tokens", type=int, help="measure on the first N held-out tokens only (default: all)")
parser.add_argument("--json", help="a file for the figures")
arguments = parser.parse_args()
THREE = replace(INT4, bits=3)

tune_allocator()
model, tokenizer, state = load_model(arguments.run)
T, config = model.max_seq_len, state["config"]
_, train_ids, held_out = encode_split(load_text(state["sources"]), tokenizer)
batch = torch.tensor(calibration_batch(train_ids, T))


def trained_on(model):
    """The model after some more steps; the batches are the same for whoever asks."""
    torch.manual_seed(1)
    optimizer = AdamW(decay_groups(model, config["weight_decay"]), lr=arguments.lr, betas=(0.9, 0.99))
    sampler = BatchSampler(train_ids, T, config["batch_size"], seed=1)
    model.train()
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * (1 - step / arguments.steps)
        inputs, targets = map(torch.tensor, sampler.next())
        _, loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), config["clip"])
        optimizer.step()
        if step % 50 == 0:
            print(f"  step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval()


models = {"float32": model}
for scheme, method in variants(INT4, "gptq"):
    print(f"making {title(scheme, method)}", flush=True)
    models[title(scheme, method)] = quantize_model(model, scheme, method, batch)
if arguments.steps:
    print(f"training on, {arguments.steps} steps: float32", flush=True)
    further = trained_on(load_model(arguments.run)[0])
    print("the same with weights rounded to 3 bits", flush=True)
    aware = convert(trained_on(prepare_qat(load_model(arguments.run)[0], THREE, scale_dtype=np.float16, keep=["embedding", "lm_head"])))
    models[f"float32, {arguments.steps} steps on"] = further
    models[f"{title(THREE, 'rtn')}, {arguments.steps} steps on"] = quantize_model(further, THREE)
    models[f"{title(THREE, 'gptq')}, {arguments.steps} steps on"] = quantize_model(further, THREE, "gptq", batch)
    models[f"{title(THREE, 'QAT')}, {arguments.steps} steps"] = quantize_model(aware, THREE)

ids = held_out[:None if arguments.tokens is None else arguments.tokens + 1]
rows = compare(models, list(evaluation_batches(ids, T, 16)), write_speed)
print(f"\n{platform.processor() or platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, 1 thread; "
      f"{len(ids) - 1:,} held-out characters in windows of {T}\n")
print(as_text(rows))

print("\nShare of a layer's output that rounding changes, Σ |x (W − Ŵ)ᵀ|² / Σ |x Wᵀ|² on the calibration batch: mean, largest layer")
for bits in (4, 3, 2):
    for method in ("rtn", "awq", "gptq"):
        name = title(replace(INT4, bits=bits), method)
        errors = output_errors(model, models[name], batch)
        if method == "rtn":
            nearest = errors
        assert all(errors[layer] <= nearest[layer] for layer in nearest), f"{name} is worse than rounding to nearest somewhere"
        print(f"  {name:28s} {np.mean(list(errors.values())):.5f}   {max(errors.values()):.5f}")
if arguments.json:
    Path(arguments.json).write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
