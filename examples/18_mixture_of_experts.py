"""A mixture of experts: who computes which token, and what keeps all of them busy.
python examples/18_mixture_of_experts.py [--quick]

A router sends each token to k of E feed-forward networks. First one layer, by hand: the choice, the rows of each expert, what a
full one drops, and the dense form that gives the same numbers. Then three MiniGPTs from one router that prefers an expert: left
alone it sends nearly all tokens there; a balance loss, or a bias that is moved against the load, undoes it. Half a minute on a
laptop; `--quick` takes a few seconds. Writes experts.png.      (guide 11.1)
"""
import argparse
from pathlib import Path

import numpy as np

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.data import BatchSampler, CharTokenizer, load_text, split_train_validation
from tinygrad_tf.generation import inference
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn.moe import routings, update_biases
from tinygrad_tf.trace import count_flops

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="fewer steps")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-18"), help="folder for experts.png")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
tune_allocator()

# --- 1. one layer -------------------------------------------------------------------------------------------------------
# r = W_r x [E];  the k largest are chosen, g = softmax of these;  y = Σ g_i Expert_i(x)
words = "each token goes to two of four experts".split()
C, E, k = 12, 4, 2
torch.manual_seed(4)
moe, x = nn.MoE(C, 24, E, k), torch.randn(len(words), C)
y, routing = moe(x, return_routing=True)
plan = routing.plan
print("token      chosen    weights       rows")
for word, experts, weights, rows in zip(words, routing.experts.tolist(), routing.weights.tolist(), plan.places.tolist()):
    print(f"{word:10s} {experts[0]}, {experts[1]}      {weights[0]:.2f}, {weights[1]:.2f}    {rows[0]:2d}, {rows[1]:2d}")
start = 0
for i, count in enumerate(plan.counts):
    mine = ", ".join(words[t] for t in plan.tokens[start:start + count].tolist())
    print(f"expert {i} computes rows {start:2d} to {start + count - 1:2d}:  {mine}")
    start += count

torch.manual_seed(4)
dense = nn.DenseMoE(C, 24, E, k)                                                # the same seed, the same weights
flops = count_flops(moe, x).total, count_flops(dense, x).total
print(f"Every expert for every token, times 0 where it was not chosen, gives the same: off by {(y - dense(x)).abs().max().item():.0e}, "
      f"for {flops[1]:,} operations instead of {flops[0]:,}.")
assert torch.allclose(y, dense(x), atol=1e-6) and flops[0] < 0.6 * flops[1]

moe.capacity_factor = 1.0                                                       # ⌈8 · 2 / 4⌉ = 4 rows an expert, in training
_, routing = moe(x, return_routing=True)
print(f"With a capacity of 4, {routing.num_dropped} of {len(words) * k} pairs are dropped: "
      + ", ".join(f"{words[t]} goes without {routing.experts[t, rank].item()}" for t, rank in routing.dropped.nonzero().tolist()))
assert max(routing.plan.counts) <= 4 and routing.num_dropped == sum(max(n - 4, 0) for n in routing.plan.wanted)

# --- 2. three models from one biased router -----------------------------------------------------------------------------
T, C, H, L, E, k, B = 32, 32, 4, 2, 4, 1, 16
steps, warmup = (120, 10) if arguments.quick else (600, 20)
text = load_text()
tokenizer = CharTokenizer.from_text(text)
train_ids, validation_ids = (tokenizer.encode(part) for part in split_train_validation(text))


def biased_model(bias_rate):
    """A feature of each token is 1, and the router gives expert 0 a logit of 2 for it."""
    torch.manual_seed(0)
    model = MiniGPT(tokenizer.vocab_size, T, C, H, 4 * C, L, dropout=0.0, norm_first=True, ffn=lambda: nn.MoE(
        C, 4 * C, E, k, router="softmax_topk", ffn="gelu", bias=True, bias_rate=bias_rate))
    with torch.no_grad():
        for block in model.blocks:
            block.norm2.weight[0], block.norm2.bias[0] = 0.0, 1.0
            block.ffn.router.weight[0, 0] = 2.0
    return model


def trained(balance):
    """(the model, the load [steps, L, E], loss of the last batches)"""
    model = biased_model(bias_rate=0.02 if balance == "bias" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1 - 0.9 * step / steps))
    sampler, load, losses = BatchSampler(train_ids, T, batch_size=B, seed=0), [], []
    for _ in range(steps):
        inputs, targets = (torch.as_tensor(ids) for ids in sampler.next())
        optimizer.zero_grad()
        with routings() as routed:                                              # what each mixture decided in this pass
            _, loss = model(inputs, targets)
        beside = 0.02 * sum(r.balance_loss() for r in routed) if balance == "loss" else 0
        (loss + beside).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        update_biases(model)                                                    # does something only where there is a bias
        load.append([r.load for r in routed])
        losses.append(loss.item())
    return model.eval(), np.array(load), float(np.mean(losses[-20:]))


names = {"none": "left alone", "loss": "balance loss", "bias": "bias of the router"}
models, loads = {}, {}
print(f"\n{E} experts, each token to {k}; the fullest expert of any layer, in units of its fair share (at most {E}):")
print("                      first step   last 20 steps   loss of the text")
for balance, name in names.items():
    models[balance], loads[balance], loss = trained(balance)
    first, last = (E * part.mean(axis=0).max() for part in (loads[balance][:1], loads[balance][-20:]))
    print(f"{name:20s} {first:10.2f} {last:15.2f} {loss:18.3f}")
    assert first > 3
    assert last < 2 if balance != "none" else last > 3, "with a remedy nobody has twice its share; without, one has most"

# --- 3. what an expert reads --------------------------------------------------------------------------------------------
ids = torch.as_tensor(validation_ids[:T * 400].reshape(-1, T))
with inference(models["loss"]), routings() as routed:
    models["loss"](ids)
letters, chosen = ids.cpu().numpy().reshape(-1), routed[0].experts[..., 0].cpu().numpy().reshape(-1)          # of the first layer
counts = np.zeros((tokenizer.vocab_size, E))
np.add.at(counts, (letters, chosen), 1)
often = np.argsort(-counts.sum(axis=1), kind="stable")[:40]
shares = counts[often] / counts[often].sum(axis=1, keepdims=True)                # of each of the 40 commonest characters
shown = [tokenizer.decode([i]).replace(" ", "␣").replace("\n", "⏎") for i in often]
print("\nThe characters of which an expert of the first layer reads most:")
for i in range(E):
    print(f"  expert {i}: " + " ".join(shown[j] for j in np.argsort(-shares[:, i], kind="stable")[:8] if shares[j, i] > 0.5))
assert (shares.max(axis=1) > 0.5).mean() > 0.5, "most characters have an expert of their own"


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path):
    """Above, the share of each expert over the steps, first layer; below, which expert reads which character."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(13, 7), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=[1.5, 1])
    colors = ["#1f78b4", "#d95f02", "#33a02c", "#6a3d9a"]
    for column, (balance, name) in enumerate(names.items()):
        axes = figure.add_subplot(grid[0, column])
        around = 1 + steps // 60
        smooth = np.array([loads[balance][max(0, i - around):i + 1, 0].mean(axis=0) for i in range(steps)])      # [steps, E]
        axes.stackplot(range(1, steps + 1), smooth.T, colors=colors, labels=[f"expert {i}" for i in range(E)], linewidth=0)
        for i in range(1, E):
            axes.axhline(i / E, color="white", linewidth=0.8, linestyle="--")
        last = E * loads[balance][-20:, 0].mean(axis=0).max()
        axes.set(title=f"{name}: the fullest has {last:.2f} × its share", xlabel="step", xlim=(1, steps), ylim=(0, 1))
        axes.title.set_fontsize(10.5)
        if column == 0:
            axes.set_ylabel("share of the tokens, first layer")
    figure.axes[0].legend(loc="upper right", fontsize=9, framealpha=0.9)
    axes = figure.add_subplot(grid[1, :])
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    image = axes.imshow(shares[order].T, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    axes.set(title="which expert reads which character (model with balance loss, first layer, held-out text)",
             xticks=range(len(order)), xticklabels=[shown[j] for j in order],
             yticks=range(E), yticklabels=[f"expert {i}" for i in range(E)])
    figure.colorbar(image, ax=axes, label="share of the character", pad=0.01)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "experts.png")
print(f"\nThe picture: {arguments.out / 'experts.png'}")
