"""Train a modern decoder on real text: RMSNorm, RoPE, GQA, SwiGLU.      python examples/08_modern_decoder_text.py [--quick] [--out DIR]

The loop is that of example 04; the model is `models.Decoder`, whose parts replaced MiniGPT's one by one. It
must beat what counting three characters achieves. About 40 seconds on a laptop; `--quick` takes 2. Writes sample.txt.
(guide 10, 14, 9.8)
"""
import argparse
import time
from pathlib import Path

from tqdm import tqdm

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.data import BatchSampler, CharTokenizer, baselines, load_text, split_train_validation
from tinygrad_tf.generation import KVCache, generate
from tinygrad_tf.models import Decoder
from tinygrad_tf.training import evaluate

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-08"), help="folder for sample.txt")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
quick = arguments.quick
T, B, C, H, Hkv, Cff, L, steps, lr = (32, 12, 32, 4, 2, 96, 2, 150, 1e-2) if quick else (64, 12, 96, 6, 2, 256, 4, 1000, 5e-3)
tune_allocator()

# --- text, and what counting alone achieves -----------------------------------------------------------------------------
text = load_text()
train_text, validation_text = split_train_validation(text)
tokenizer = CharTokenizer.from_text(text)
train_ids, validation_ids = tokenizer.encode(train_text), tokenizer.encode(validation_text)
V_vocab = tokenizer.vocab_size
ngram = baselines(train_ids, validation_ids, V_vocab)
print("n-gram baselines, nats per character: ", "  ".join(f"{n}: {nats:.3f}" for n, nats in ngram.items()))

# --- train --------------------------------------------------------------------------------------------------------------
torch.manual_seed(0)
model = Decoder(V_vocab, T, C, H, Cff, L, num_kv_heads=Hkv)
optimizer = torch.optim.AdamW(torch.optim.decay_groups(model, 0.1), lr=lr, betas=(0.9, 0.99))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - 0.9 * step / steps))
sampler = BatchSampler(train_ids, context=T, batch_size=B, seed=0)
print(f"ids [B, T] = [{B}, {T}] → logits [B, T, V_vocab] = [{B}, {T}, {V_vocab}]   C = {C}, H = {H}, Hkv = {Hkv}, Cff = {Cff}, L = {L}, "
      f"parameters: {sum(p.numel() for p in model.parameters()):,}")
started = time.perf_counter()
for step in tqdm(range(1, steps + 1), desc="training", unit="step", disable=None):
    inputs, targets = (torch.as_tensor(ids) for ids in sampler.next())
    optimizer.zero_grad()
    _, loss = model(inputs, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % (steps // 5) == 0:
        tqdm.write(f"step {step:4d}   training loss {loss.item():.3f}   {step * B * T / (time.perf_counter() - started):,.0f} tokens/s")
validation_loss, rival = evaluate(model, validation_ids, T), 1 if quick else 3
print(f"validation loss {validation_loss:.3f}; the {rival}-gram model has {ngram[rival]:.3f}; {time.perf_counter() - started:.0f} s")
assert validation_loss < ngram[rival], "the model must beat the counts"

# --- write ----------------------------------------------------------------------------------------------------------------
# The cache holds keys that RoPE has turned: a new token turns its own key and query only. Beyond the context the window slides.
prompt = torch.as_tensor(tokenizer.encode("The ")[None])                     # [B, T] = [1, 4]
cached, uncached = (generate(model, prompt, 3 * T, temperature=0.8, use_cache=use_cache, generator=torch.Generator().manual_seed(0))
                    for use_cache in (True, False))
assert torch.equal(cached, uncached), "the cache must not change a single token"
print(f"cached = uncached, token for token: {cached.shape[1]} tokens")

cache = KVCache(L, T)
with torch.no_grad():
    model(prompt, cache=cache)
assert cache.nbytes == 2 * L * 1 * T * Hkv * (C // H) * 4                     # K and V, float32
print(f"KV cache: 2 · L · B · T · Hkv · Dh · 4 bytes = {cache.nbytes:,}; with Hkv = H it would be {cache.nbytes * H // Hkv:,}")

sample = tokenizer.decode(cached[0].cpu().numpy())
print("\nA sample (temperature 0.8):\n" + sample)
arguments.out.mkdir(parents=True, exist_ok=True)
(arguments.out / "sample.txt").write_text(sample, encoding="utf-8")
