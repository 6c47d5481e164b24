"""Train a small GPT on real text, and let it write.      python examples/04_train_and_generate.py

The loop is written out, from the library's parts: corpus → tokens → batches → loss → gradients → clip → AdamW. About 15
seconds on a laptop; `--quick` takes 2. Writes sample.txt. `training.Trainer` and the command `tinygrad-tf train` do the
same with checkpoints, regular validation, metrics and a picture.      (guide 13, 16, 9.8)
"""
import argparse
import time
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.data import BatchSampler, CharTokenizer, baselines, load_text, split_train_validation
from tinygrad_tf.generation import generate
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.training import evaluate

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-04"), help="folder for sample.txt")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
quick = arguments.quick
T, B, C, H, L, steps, lr = (32, 16, 32, 4, 2, 150, 8e-3) if quick else (64, 12, 64, 4, 3, 800, 4e-3)
tune_allocator()                                    # as the trainer does: keeps freed memory, and so saves time

# --- text, tokens, and what counting alone achieves -------------------------------------------------------------------
text = load_text()                                  # the English prose that every Python carries
train_text, validation_text = split_train_validation(text)
tokenizer = CharTokenizer.from_text(text)
train_ids, validation_ids = tokenizer.encode(train_text), tokenizer.encode(validation_text)
V_vocab = tokenizer.vocab_size
ngram = baselines(train_ids, validation_ids, V_vocab)
print(f"{len(train_ids):,} characters to train on, {len(validation_ids):,} held out, V_vocab = {V_vocab}")
print("n-gram baselines, nats per character: ", "  ".join(f"{n}: {nats:.3f}" for n, nats in ngram.items()))

# --- train ------------------------------------------------------------------------------------------------------------
torch.manual_seed(0)
model = MiniGPT(V_vocab, T, C, H, 4 * C, L, dropout=0.0, norm_first=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - 0.9 * step / steps))
sampler = BatchSampler(train_ids, context=T, batch_size=B, seed=0)
print(f"\nids [B, T] = [{B}, {T}] → x [B, T, C] = [{B}, {T}, {C}] → logits [B, T, V_vocab] = [{B}, {T}, {V_vocab}]   "
      f"H = {H}, L = {L}, parameters: {sum(p.numel() for p in model.parameters()):,}")
started = time.perf_counter()
for step in range(1, steps + 1):
    inputs, targets = (torch.as_tensor(ids) for ids in sampler.next())
    optimizer.zero_grad()
    logits, loss = model(inputs, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % (steps // 5) == 0:
        tokens_per_second = step * B * T / (time.perf_counter() - started)
        print(f"step {step:4d}   training loss {loss.item():.3f}   {tokens_per_second:,.0f} tokens/s", flush=True)

validation_loss = evaluate(model, validation_ids, T)
rival = 1 if quick else 2
print(f"validation loss {validation_loss:.3f}; the {rival}-gram model has {ngram[rival]:.3f}")
assert validation_loss < ngram[rival], "the model must beat the counts"

# --- write ------------------------------------------------------------------------------------------------------------
# With the KV cache a new token costs one row of attention; without it, the whole text is read again for each. The
# tokens are the same, also beyond the context, where the window slides.
prompt = torch.as_tensor(tokenizer.encode("The ")[None])                     # [B, T] = [1, 4]


def continuation(**options):
    return generate(model, prompt, 3 * T, generator=torch.Generator().manual_seed(0), **options)


for temperature in (0, 0.8):
    cached, uncached = (continuation(temperature=temperature, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, uncached), "the cache must not change a single token"
print(f"cached = uncached, token for token: {cached.shape[1]} tokens, greedy and at temperature 0.8")
sample = tokenizer.decode(cached[0].cpu().numpy())
print("\nA sample (temperature 0.8):\n" + sample)
arguments.out.mkdir(parents=True, exist_ok=True)
(arguments.out / "sample.txt").write_text(sample, encoding="utf-8")
