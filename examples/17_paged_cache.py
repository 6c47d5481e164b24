"""A cache in blocks: lent out as rows grow, given back, shared by what begins alike.      python examples/17_paged_cache.py [--quick]

A preallocated cache keeps the longest text that might come for each row. A paged one lends a block of a few tokens when a
row needs it. Here rows join and leave, forks share the blocks of their prompt until one of them writes, beams do so in each step,
and a pool that is too small lets rows wait: the texts are those of rows written one by one. The weights are random: memory does not
depend on them. Writes blocks.png.      (guide 9.8)
"""
import argparse
import random
from pathlib import Path

import tinygrad_tf as torch
from tinygrad_tf.generation import Batch, KVCache, PagedKVCache, Sampler, beam_search, complete, inference
from tinygrad_tf.models import Decoder
from tinygrad_tf.trace import kv_cache_bytes

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-17"), help="folder for blocks.png")
parser.add_argument("--quick", action="store_true", help="fewer rows")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
V_vocab, T, C, H, Hkv, L = 100, 64, 32, 4, 2, 2
LETTERS = "ABCDEFGHIJKLMNOPQRST"                                               # of the rows
torch.manual_seed(1)
model = Decoder(V_vocab, T, C, H, 3 * C, L, num_kv_heads=Hkv).eval()
with torch.no_grad():
    for p in model.parameters():
        if p.ndim == 2:
            p.mul_(8)                                                          # so that each token that is read changes what comes next

# --- 1. tables, forks, and a copy before a write --------------------------------------------------------------------------
# A row has a table of blocks: its token p lies in block table[p // 4], at place p % 4.
cache = PagedKVCache(L, num_blocks=8, block_size=4)
prompt = list(range(10))


def told(what):
    tables = "   ".join(f"row {i}: {table}" for i, table in enumerate(cache.tables))
    print(f"  {what:38s}{cache.blocks_in_use} of 8 blocks   {tables}")
    return cache.blocks_in_use


print("Blocks of 4 tokens:")
with inference(model):
    model(torch.tensor([prompt]), cache=cache)
    assert told("a prompt of 10 tokens") == 3
    cache.reorder([0, 0, 0])
    assert told("three rows that continue it") == 3
    logits = model(torch.tensor([[7], [8], [9]]), cache=cache)[0]              # [3, 1, V_vocab]
    assert told("each reads a token of its own") == 5
    assert all(table[:2] == cache.tables[0][:2] for table in cache.tables) and len({table[2] for table in cache.tables}) == 3
    for i, token in enumerate((7, 8, 9)):
        alone = model(torch.tensor([prompt + [token]]))[0][:, -1]
        assert torch.allclose(logits[i], alone, atol=1e-4), "a row sees its own tokens and none of the others"
    cache.reorder([2])
    assert told("rows 0 and 1 leave") == 3
    cache.trim(8)
    assert told("what came after token 8 is forgotten") == 2
    cache.reset()
    assert told("reset") == 0
print("The last block was half full, and shared: two rows got a copy of it, the third wrote in place.\n")

# --- 2. rows join and leave -----------------------------------------------------------------------------------------------
rng, size, max_rows = random.Random(3), 4, 5
asked = [([rng.randrange(V_vocab) for _ in range(rng.randint(2, 24))], rng.randint(4, 24)) for _ in range(10 if arguments.quick else 20)]
sampler = Sampler(0.8)


def written(cache, watch=lambda batch: None):
    """The ids of all rows, of one continuous batch; watch(batch) is called after each step."""
    batch = Batch(model, cache, max_rows=max_rows)
    rows = [batch.add(prompt, n, sampler=sampler, seed=i) for i, (prompt, n) in enumerate(asked)]
    while batch.live or batch.waiting:
        batch.step()
        watch(batch)
    return [row.ids for row in rows]


one_by_one = [complete(model, [prompt], n, sampler=sampler, seed=i)[0].ids for i, (prompt, n) in enumerate(asked)]
owners, held = [], []                                                          # of each step: {block: row}, tokens in all rows


def look(batch):
    owners.append({block: row.number for row, table in zip(batch.live, batch.cache.tables) for block in table})
    tokens = batch.cache.lengths.tolist() if batch.live else []
    held.append(sum(tokens))
    assert batch.cache.blocks_in_use == sum(-(-n // size) for n in tokens) == len(owners[-1]), "no block more than needed, none twice"


cache = PagedKVCache(L, num_blocks=60, block_size=size)
assert written(cache, look) == one_by_one
lent = [size * len(owner) for owner in owners]                                 # tokens that there would be room for
peak = max(lent)
print(f"{len(asked)} rows, up to {max_rows} at a time, in {len(owners)} steps; a letter is a row, a dot a free block:")
used = 1 + max(block for owner in owners for block in owner)
for step in range(0, len(owners), max(1, len(owners) // 12)):
    owner = owners[step]
    print(f"  step {step + 1:3d}   " + "".join(LETTERS[owner[block]] if block in owner else "·" for block in range(used)))
assert cache.blocks_in_use == 0, "all blocks came back"
allocated = KVCache(L, T, rows=max_rows)
assert written(allocated) == one_by_one
most = kv_cache_bytes(L, 1, peak, Hkv, C // H)
print(f"The texts are those of rows written one by one. Lent out at most {most:,} bytes, for {peak} tokens;")
print(f"the preallocated cache has {allocated.nbytes:,}, for {max_rows} × {T}. Unused in lent blocks: at most {size - 1} tokens a row.")
assert allocated.nbytes == kv_cache_bytes(L, max_rows, T, Hkv, C // H) > most
assert all(0 <= room - tokens <= max_rows * (size - 1) for room, tokens in zip(lent, held))

# --- 3. a pool that is too small ------------------------------------------------------------------------------------------
tight, live, sent_back, in_use = PagedKVCache(L, num_blocks=14, block_size=size), [], [], []


def count(batch):
    """Notes the rows that were live and are not, without having ended."""
    sent_back.extend(row for row in live if row.finish_reason is None and row not in batch.live)
    live[:] = batch.live
    in_use.append(batch.cache.blocks_in_use)


assert written(tight, count) == one_by_one
print(f"\nWith {tight.pool.num_blocks} blocks for all: {len(in_use)} steps, {len(sent_back)} times a row had to wait and was read anew. "
      f"The same texts.")
assert sent_back and max(in_use) <= tight.pool.num_blocks


# --- 4. beams share what they have in common ------------------------------------------------------------------------------

class Watched(PagedKVCache):
    """Notes after each step of a beam search the blocks of all beams."""

    def reorder(self, rows):
        super().reorder(rows)
        shared.append([list(table) for table in self.tables])


shared, width = [], 6
prompt, n = [rng.randrange(V_vocab) for _ in range(22)], 18
found = beam_search(model, prompt, n, num_beams=width, cache=Watched(L, num_blocks=64, block_size=size))
assert [beam.ids for beam in found] == [beam.ids for beam in beam_search(model, prompt, n, num_beams=width, use_cache=False)]
together = [len({block for table in tables for block in table}) for tables in shared]
apart = [sum(map(len, tables)) for tables in shared]
print(f"\n{width} beams of {len(prompt)} + {n} tokens share {together[-1]} blocks at the end, at most {max(together)} on the way; "
      f"each with its own, they would hold {apart[-1]}.")
assert all(a < b for a, b in zip(together, apart))


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path):
    """Above, who holds which block after each step; below, how many tokens that is."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    figure = Figure(figsize=(13, 7), layout="constrained")
    (left, right), (left_below, right_below) = figure.subplots(2, 2, height_ratios=[2.4, 1], width_ratios=[1.7, 1], sharex="col")
    colors = colormaps["tab20"].colors
    for x, owner in enumerate(owners, 1):
        for block, row in owner.items():
            left.barh(block, 1, left=x - 0.5, height=0.9, color=colors[row % 20], linewidth=0)
    begun = {}
    for x, owner in enumerate(owners, 1):
        for block, row in sorted(owner.items()):
            if row not in begun:
                begun[row] = block
                left.text(x - 0.2, block, LETTERS[row], ha="left", va="center", fontsize=9)
    left.set(title=f"{len(asked)} rows, up to {max_rows} at a time: a colour is a row, its letter stands where it joins",
             ylabel="block of the pool", ylim=(used - 0.4, -0.6), xlim=(0.3, len(owners) + 0.7))
    x = range(1, len(owners) + 1)
    left_below.plot(x, [max_rows * T] * len(x), color="#d95f02", label=f"preallocated: {max_rows} rows of {T}")
    left_below.step(x, lent, where="mid", color="#1f78b4", label=f"blocks lent out, × {size}")
    left_below.step(x, held, where="mid", color="0.35", linewidth=1, label="tokens")
    left_below.set(xlabel="step", ylabel="tokens", ylim=(0, 1.1 * max_rows * T))
    left_below.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0.92))
    shades, highest = colormaps["viridis_r"], max(block for tables in shared for table in tables for block in table)
    for x, tables in enumerate(shared, 1):
        holders = [block for table in tables for block in table]
        for block in set(holders):
            many = holders.count(block)
            right.barh(block, 1, left=x - 0.5, height=0.9, color=shades((many - 1) / (width - 1)), linewidth=0)
            right.text(x, block, many, ha="center", va="center", fontsize=7, color="white" if many > 3 else "0.2")
    right.set(title=f"{width} beams after one prompt: how many\nof them hold each block", ylim=(highest + 0.6, -0.6),
              yticks=range(0, highest + 1, 5))
    x = range(1, len(shared) + 1)
    right_below.step(x, [size * n for n in apart], where="mid", color="#d95f02", label="each beam with blocks of its own")
    right_below.step(x, [size * n for n in together], where="mid", color="#1f78b4", label="shared")
    right_below.set(xlabel="step", ylim=(0, 1.35 * size * max(apart)))
    right_below.legend(frameon=False, fontsize=9)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "blocks.png")
print(f"\nThe picture: {arguments.out / 'blocks.png'}")
