"""The KV cache: what is kept, what that saves, and what it costs.      python examples/14_kv_cache.py

Keys and values of past tokens do not change, so each step computes those of one token. Five kinds of cache keep them: four write
the text that is written without one, the fifth rounds. Then their bytes, by the guide's formula, and the time per token over
the length of the context. The weights are random: none of this depends on what a model has learned. Writes
time_per_token.png.      (guide 9.8)
"""
import argparse
import statistics
import time
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.generation import Batch, ConcatKVCache, KVCache, PagedKVCache, QuantizedKVCache, RollingKVCache, complete, inference
from tinygrad_tf.models import Decoder
from tinygrad_tf.trace import count_flops, kv_cache_bytes

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-14"), help="folder for time_per_token.png")
parser.add_argument("--quick", action="store_true", help="a smaller model and shorter contexts")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
torch.manual_seed(0)
quick = arguments.quick

# --- 1. the cache grows by one --------------------------------------------------------------------------------------------
# Token n has the key n, so that one sees what lies where. The guide's cache joins arrays, the other has its places from the start.
joined, allocated = ConcatKVCache(num_layers=1), KVCache(num_layers=1, capacity=5)
for n in 1, 2, 3:
    new = torch.full((1, 1, 1, 1), n)                                          # [B, Hkv, T, Dh]: one token
    keys, _ = joined.layer(0).update(new, new)
    same, _ = allocated.layer(0).update(new, new)
    print(f"step {n}: only K{n}, V{n} are computed   cache = {keys.flatten().tolist()}   in memory: joined "
          f"{joined.layer(0).k.flatten().tolist()}, allocated once {allocated.layer(0).k.flatten().tolist()}")
    assert keys.flatten().tolist() == same.flatten().tolist() == list(range(1, n + 1))

C, H, T = 12, 3, 6
attention, x = nn.MultiHeadAttention(C, H), torch.randn(1, T, C)
with torch.no_grad():
    whole = attention(x, causal=True)                                          # [B, T, C]
    cache, steps = KVCache(1, T), []
    for t in range(T):
        steps.append(attention(x[:, t:t + 1], causal=True, cache=cache.layer(0)))
assert torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-6)
print(f"An attention layer, token by token, is the layer over all {T} at once.\n")

# --- 2. one text, whatever the cache --------------------------------------------------------------------------------------
V_vocab, context, C, H, Hkv, L = 100, 64, 32, 4, 2, 2
Dh = C // H


def random_decoder(context, C, L):
    """Its weights are eight times as large as a new model's: each token that it sees changes what comes next."""
    torch.manual_seed(1)
    model = Decoder(V_vocab, context, C, H, 3 * C, L, num_kv_heads=Hkv)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(8)
    return model.eval()


model = random_decoder(context, C, L)
prompts, n = [[5, 17, 42], [8, 8, 61, 3, 99, 2, 40], list(range(10, 22))], 20   # rows of 3, 7 and 12 tokens, filled up while they are read
texts = [row.ids for row in complete(model, prompts, n, use_cache=False)]
other = complete(model, [[6, *prompts[0][1:]]], n, use_cache=False)[0]
assert other.new_ids != texts[0][3:], "the first token counts, to the end"
KINDS = {
    "ConcatKVCache": lambda: ConcatKVCache(L),
    "KVCache": lambda: KVCache(L, context),
    "PagedKVCache": lambda: PagedKVCache(L, num_blocks=16, block_size=4),
    "RollingKVCache, W = 32": lambda: RollingKVCache(L, window=32, slack=4),
    "RollingKVCache, W = 8": lambda: RollingKVCache(L, window=8, slack=4),
    "QuantizedKVCache, 8 bits": lambda: QuantizedKVCache(L, context, bits=8),
    "QuantizedKVCache, 4 bits": lambda: QuantizedKVCache(L, context, bits=4),
}
ids = torch.tensor([texts[2]])                                                 # [1, 32]: the longest row, to be read by all kinds
with inference(model):
    logits = model(ids)[0]                                                     # [1, 32, V_vocab]
different = {}
print(f"{len(prompts)} prompts of {[len(p) for p in prompts]} tokens together, {n} new tokens each:")
print("                           tokens as without a cache   largest difference of a logit, read one by one")
for name, make in KINDS.items():
    found = [row.ids for row in complete(model, prompts, n, cache=make())]
    same = sum(a == b for one, two in zip(found, texts) for a, b in zip(one, two)) - sum(map(len, prompts))
    cache = make()
    with inference(model):
        parts = [model(ids[:, :5], cache=cache)[0]] + [model(ids[:, t:t + 1], cache=cache)[0] for t in range(5, ids.shape[1])]
    different[name] = (torch.cat(parts, dim=1) - logits).abs().max().item()
    print(f"  {name:26s}{same:9d} of {n * len(prompts)}   {different[name]:25.0e}")
    if name in list(KINDS)[:4]:
        assert found == texts and different[name] < 1e-4 * logits.abs().max().item()
assert different["RollingKVCache, W = 8"] > 0.1, "what has left the window is not seen: that is another function"
assert 1e-4 < different["QuantizedKVCache, 8 bits"] < different["QuantizedKVCache, 4 bits"]
print(f"The window of 8 forgets, and the quantised ones round: logits go up to {logits.abs().max().item():.0f}.\n")

# --- 3. bytes: 2 · L · B · T · Hkv · Dh · bytes of a number ---------------------------------------------------------------
lengths = [len(prompt) for prompt in prompts]
padded = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])     # [B, T] = [3, 12]
valid_tokens = torch.tensor([[True] * n + [False] * (max(lengths) - n) for n in lengths])


def bytes_of(name):
    """What a cache takes when it has read these rows; a paged one, what of its blocks is lent out."""
    cache = KINDS[name]()
    with inference(model):
        model(padded, valid_tokens=valid_tokens, cache=cache)
    assert cache.lengths.tolist() == lengths, "no padding is kept"
    return getattr(cache, "nbytes_in_use", cache.nbytes)


B = len(prompts)
expected = {                                                                    # which T is kept, summed over the rows
    "ConcatKVCache": ("3 rows of 12, the longest", B * max(lengths)),
    "KVCache": (f"3 rows of {context}, the capacity", B * context),
    "PagedKVCache": ("1 + 2 + 3 blocks of 4", 4 * sum(-(-n // 4) for n in lengths)),
    "RollingKVCache, W = 8": ("3 rows of W + 4", B * (8 + 4)),
}
print(f"Rows of {lengths} tokens; L = {L}, Hkv = {Hkv}, Dh = {Dh}: a token is 2 · L · Hkv · Dh · 4 = {2 * L * Hkv * Dh * 4} bytes")
for name, (what, tokens) in expected.items():
    held = bytes_of(name)
    print(f"  {name:26s}{held:7,} bytes = {tokens:3d} tokens: {what}")
    assert held == kv_cache_bytes(L, 1, tokens, Hkv, Dh)
for bits in 8, 4:
    held = bytes_of(f"QuantizedKVCache, {bits} bits")
    print(f"  {f'QuantizedKVCache, {bits} bits':26s}{held:7,} bytes: {Dh * bits // 8} bytes for the key of a head, and 4 for its scale")
    assert held == 2 * L * B * context * Hkv * (Dh * bits // 8 + 4)
print(f"32 layers, 4096 tokens, Dh = 128, 2 bytes a number: {kv_cache_bytes(32, 1, 4096, 32, 128, 2) >> 20} MiB with Hkv = H = 32, "
      f"{kv_cache_bytes(32, 1, 4096, 8, 128, 2) >> 20} with Hkv = 8, {kv_cache_bytes(32, 1, 4096, 1, 128, 2) >> 20} with Hkv = 1\n")
assert kv_cache_bytes(32, 1, 4096, 8, 128, 2) == 512 << 20

# --- 4. one token more, over the length of the context --------------------------------------------------------------------
lengths = [16, 32, 64, 128, 256] if quick else [32, 64, 128, 256, 512, 1024, 2048]
C, L, W, turns, repeats = (32, 2, 32, 1, 5) if quick else (128, 4, 64, 3, 9)
model = random_decoder(lengths[-1] + repeats + 1, C, L)
text = torch.randint(0, V_vocab, (1, lengths[-1]))
ROLLING = f"RollingKVCache, W = {W}"
WAYS = {"no cache": lambda: None, "KVCache": lambda: KVCache(L, model.max_seq_len), ROLLING: lambda: RollingKVCache(L, W)}


def decode(way, T):
    """(seconds of each step after a prompt of T tokens, what was written); the step that reads the prompt does not count."""
    steps, took = repeats if WAYS[way]() else 3, []
    batch = Batch(model, WAYS[way](), use_cache=way != "no cache")
    row = batch.add(text[0, :T], steps + 1)
    batch.step()
    for _ in range(steps):
        begin = time.perf_counter()
        batch.step()
        took.append(time.perf_counter() - begin)
    return took, row.new_ids


def flops_per_token(way, T):
    """Of the products for token T + 1: counted, not timed."""
    cache = WAYS[way]()
    if cache is None:
        return count_flops(model, text[:, :T]).total
    with inference(model):
        model(text[:, :T - 1], cache=cache)
        return count_flops(model, text[:, T - 1:T], cache=cache).total


took, flops = {way: [] for way in WAYS}, {way: [] for way in WAYS}
for way in WAYS:
    decode(way, lengths[0])                                                     # what is slow but once
print(f"One more token after T: median milliseconds ({turns} × {repeats} steps; without a cache {turns} × 3), and MFLOP of the products")
print(" " * 13 + "".join(f"{way:>23s}" for way in WAYS))
for T in lengths:
    found = {way: [decode(way, T) for _ in range(turns)] for way in WAYS}
    for way in WAYS:
        took[way].append(statistics.median(seconds for turn, _ in found[way] for seconds in turn))
        flops[way].append(flops_per_token(way, T))
    print(f"  T = {T:4d}   " + "".join(f"{1e3 * took[way][-1]:11.2f} {flops[way][-1] / 1e6:11.3f}" for way in WAYS))
    written = {way: found[way][0][1][:4] for way in WAYS}
    assert written["KVCache"] == written["no cache"], "the same tokens"
each = 4 * L * C                                                                # a key: 2 Dh for its score, 2 Dh for its value, H heads
assert all(b - a == each * (T2 - T1) for a, b, T1, T2 in zip(flops["KVCache"], flops["KVCache"][1:], lengths, lengths[1:]))
assert len(set(flops[ROLLING][-2:])) == 1, "a window does not grow"
assert flops["no cache"][-1] > 2 * flops["no cache"][-2] and flops["KVCache"][-1] < 2 * flops["KVCache"][-2]
print(f"With a cache each token of context adds 4 · L · C = {each:,} operations to a step: the keys are not computed again, but read.")
print(f"Without one, a step costs {flops['no cache'][-1] / flops['KVCache'][-1]:.0f} times the operations at T = {lengths[-1]}, "
      f"{flops['no cache'][0] / flops['KVCache'][0]:.0f} times at T = {lengths[0]}.")


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path):
    """Both panels on logarithmic axes: a line of slope 1 is "twice the context, twice the cost"."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = (took, 1e3, "Measured: milliseconds a token"), (flops, 1e-6, "Counted: MFLOP of the products a token")
    for axes, (values, unit, title) in zip(figure.subplots(1, 2), panels):
        for (way, found), color in zip(values.items(), ("#d95f02", "#1f78b4", "#1b9e77")):
            axes.plot(lengths, [unit * v for v in found], marker="o", markersize=4, color=color, label=way)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set(title=title, xlabel="tokens before it", xticks=lengths, xticklabels=lengths)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "time_per_token.png")
print(f"The picture: {arguments.out / 'time_per_token.png'}")
