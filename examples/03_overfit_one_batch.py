"""Overfit one batch: the first thing to try with any model and loop.      python examples/03_overfit_one_batch.py

A model that cannot learn 32 tokens by heart has a bug. The loss starts near ln V_vocab = 4.605, since an untrained
model finds all tokens equally likely, and falls to almost nothing. The losses below are PyTorch's for the same seed;
ours agree within 0.5 %. Writes loss.png.      (guide 17.3, with the sizes of its training step)
"""
import argparse
import math
from pathlib import Path

import tinygrad_tf as torch
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.training import overfit_one_batch

PYTORCH = {0: 4.617, 10: 3.7330, 50: 1.1172, 100: 0.1074, 199: 0.0200}        # step: loss before that update

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/example-03"), help="folder for loss.png")
parser.add_argument("--quick", action="store_true", help="stop after step 100")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
steps = 101 if arguments.quick else 200

V_vocab, T, C, H, Cff, L, B = 100, 8, 24, 4, 96, 2, 4
torch.manual_seed(0)
model = MiniGPT(vocab_size=V_vocab, max_seq_len=32, dim=C, num_heads=H, hidden_dim=Cff, num_layers=L, dropout=0.0)
full_tokens = torch.randint(0, V_vocab, (B, T + 1))
inputs, targets = full_tokens[:, :-1], full_tokens[:, 1:]                      # the target of a token is the next one
print(f"inputs [B, T] = {list(inputs.shape)}   targets [B, T] = {list(targets.shape)}   logits [B, T, V_vocab] = "
      f"{list(model(inputs)[0].shape)}   parameters: {sum(p.numel() for p in model.parameters()):,}")

result = overfit_one_batch(model, (inputs, targets), steps, lr=3e-3)            # AdamW on a copy: the loop of chapter 13
losses = result.losses

print("\nstep   loss    PyTorch")
for step, expected in PYTORCH.items():
    if step < steps:
        print(f"{step:4d}   {losses[step]:.3f}   {expected:.3f}")
        assert math.isclose(losses[step], expected, rel_tol=5e-3), f"{losses[step]} at step {step}, expected {expected}"
assert abs(losses[0] - math.log(V_vocab)) < 0.1

assert result.learnt
predicted = result.model(inputs)[0].argmax(dim=-1)
right = (predicted == targets).float().mean().item()
print(f"\nIt now knows {right:.0%} of the {targets.numel()} tokens by heart.")
assert right == 1


def draw(losses, path):
    """The curve on a logarithmic axis. `Figure` without pyplot needs no display."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(losses, color="#08519c", label="tinygrad_tf")
    known = {step: loss for step, loss in PYTORCH.items() if step < len(losses)}
    axes.plot(list(known), list(known.values()), "o", color="#d95f02", label="PyTorch")
    axes.axhline(math.log(V_vocab), color="0.6", linewidth=0.8, linestyle="--")
    axes.annotate("ln V_vocab: every token equally likely", (len(losses), math.log(V_vocab)), xytext=(0, -4),
                  textcoords="offset points", ha="right", va="top", fontsize=9, color="0.35")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="MiniGPT learns one batch by heart")
    axes.legend(frameon=False, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


draw(losses, arguments.out / "loss.png")
print(f"The curve: {arguments.out / 'loss.png'}")
