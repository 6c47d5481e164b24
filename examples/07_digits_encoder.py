"""Read handwritten digits with an encoder.      python examples/07_digits_encoder.py [--quick] [--out DIR]

An image of 8 × 8 grey values is read as a sequence of 8 tokens, its rows: attention lets each row look at all others, up
and down. 1,437 images to learn from, 360 held out, of which at least 95 % must be read right. About 9 seconds on a laptop;
`--quick` takes 2. Writes digits.png: the images to whose right class the model gave the least probability. Needs
scikit-learn, which carries the images: pip install 'tinygrad_tf[examples]'      (guide 14)
"""
import argparse
import logging
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
import tinygrad_tf.nn.functional as F
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.generation import inference
from tinygrad_tf.models import Encoder, EncoderClassifier

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-07"), help="folder for digits.png")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
quick = arguments.quick
try:
    from sklearn.datasets import load_digits
except ImportError:
    print("The images of the digits come with scikit-learn, which is not installed:  pip install 'tinygrad_tf[examples]'")
    sys.exit(0 if quick else 2)

# --- images, shuffled once, and split ---------------------------------------------------------------------------------
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.images[order] / 16).astype(np.float32)                     # [N, T, 8] = [1797, 8, 8], 0 white to 1 black
classes = digits.target[order].astype(np.int64)                             # [N]
test, train = slice(0, 360), slice(360, None)
assert not {image.tobytes() for image in images[test]} & {image.tobytes() for image in images[train]}, "a test image was trained on"
N, T, width = images[train].shape
print(f"{N:,} images to train on, {len(images[test])} held out; each is T = {T} tokens, its rows, of {width} grey values")


# --- the model ----------------------------------------------------------------------------------------------------------
class Rows(nn.Module):
    """rows [B, T, 8] → W row + b + position row [B, T, C]: what the table of ids is for text."""

    def __init__(self, dim):
        super().__init__()
        self.projection, self.position = nn.Linear(width, dim), nn.Embedding(T, dim)

    def forward(self, rows, position_ids):
        return self.projection(rows) + self.position(position_ids)


C, H, L, B, steps = (32, 4, 1, 32, 300) if quick else (64, 4, 2, 32, 1500)
tune_allocator()
torch.manual_seed(0)
encoder = Encoder(None, T, C, H, 2 * C, L, dropout=0.1, embedding=Rows(C))
model = EncoderClassifier(encoder, num_classes=10, pooling="mean")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - 0.95 * step / steps))
print(f"rows [B, T, 8] = [{B}, {T}, {width}] → x [B, T, C] = [{B}, {T}, {C}] → mean over T → logits [B, 10]   "
      f"H = {H}, L = {L}, parameters: {sum(p.numel() for p in model.parameters()):,}")


def probabilities(images):
    """[N, 10], in evaluation mode and without a graph."""
    with inference(model):
        return F.softmax(model(torch.as_tensor(images))[0], dim=-1).cpu().numpy()


def accuracy(part):
    return float((probabilities(images[part]).argmax(axis=-1) == classes[part]).mean())


# --- train --------------------------------------------------------------------------------------------------------------
started, random = time.perf_counter(), np.random.default_rng(1)
for step in tqdm(range(1, steps + 1), desc="training", unit="step", disable=None):
    batch = random.integers(train.start, len(images), B)
    optimizer.zero_grad()
    _, loss = model(torch.as_tensor(images[batch]), torch.as_tensor(classes[batch]))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % (steps // 5) == 0:
        tqdm.write(f"step {step:4d}   loss {loss.item():.3f}   training accuracy {accuracy(train):.3f}")
found = accuracy(test)
print(f"test accuracy {found:.3f} after {time.perf_counter() - started:.0f} s")
assert found >= (0.75 if quick else 0.95), "the encoder must read the held-out digits"

# --- the images to whose right class it gave the least probability ------------------------------------------------------
logging.getLogger("matplotlib").setLevel(logging.ERROR)                     # its first run says that it builds a font cache
from matplotlib.figure import Figure  # noqa: E402

p = probabilities(images[test])
certainty = p[np.arange(len(p)), classes[test]]                             # what it gave the right class
figure = Figure(figsize=(9, 3.8), layout="constrained")
for axes, i in zip(figure.subplots(2, 6).flat, certainty.argsort()):
    guess, truth = p[i].argmax(), classes[test][i]
    axes.imshow(images[test][i], cmap="gray_r")
    axes.set_title(f"{'' if guess == truth else '✗ '}reads {guess} ({p[i, guess]:.0%})\nis {truth} ({certainty[i]:.0%})", fontsize=9,
                   color="0.2" if guess == truth else "C3")
    axes.set(xticks=[], yticks=[])
figure.suptitle(f"The held-out digits to whose right class the encoder gave the least probability (accuracy {found:.1%})")
arguments.out.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.out / "digits.png", dpi=130)
print(f"Written: {arguments.out / 'digits.png'}")
