"""One script for the CPU and for a GPU.      python examples/13_device.py [--device cuda] [--quick] [--out DIR]

    device = "cuda" if torch.cuda.is_available() else "cpu"        model.to(device)        x.to(device)

Everything else is the same: this trains a small GPT for some steps on each device that there is and compares. Where there is no
GPU it says so, and what to install, and trains on the CPU alone. Writes device.json.
"""
import argparse
import copy
import json
import sys
import time
from pathlib import Path

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
from tinygrad_tf.generation import generate
from tinygrad_tf.models import MiniGPT

parser = argparse.ArgumentParser()
parser.add_argument("--device", help="cpu, cuda or cuda:N: compare the CPU with this one (default: a GPU if there is one)")
parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
parser.add_argument("--out", type=Path, default=Path("runs/example-13"), help="folder for device.json")
arguments = parser.parse_args()
V_vocab, T, C, H, L, B, steps = (20, 8, 16, 2, 2, 4, 4) if arguments.quick else (100, 64, 128, 4, 4, 16, 30)

# --- 1. Is there a GPU? --------------------------------------------------------------------------------------------------
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        print(f"cuda:{i}: {torch.cuda.get_device_name(i)}, compute capability {'.'.join(map(str, torch.cuda.get_device_capability(i)))}")
else:
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:                                              # the sentence that anybody gets who asks for one
        print(f"No GPU: {error}\nWith one, this script would train the same model there too, and compare the losses and the time.")
        if torch.device(arguments.device or "cpu").type == "cuda":
            sys.exit("so --device cuda cannot be served; leave it out")
wanted = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
devices = ["cpu"] if torch.device(wanted).type == "cpu" else ["cpu", wanted]

# --- 2. The same model on each ---------------------------------------------------------------------------------------------
# First weights and random tensors are drawn on the host and uploaded: one seed is one model, on every device. Dropout is not, so it is
# 0 here: on a GPU it has a stream of its own.
torch.manual_seed(0)
tokens = torch.randint(0, V_vocab, (B, T + 1), device="cpu")
first = MiniGPT(V_vocab, T, C, H, 4 * C, L, dropout=0.0, norm_first=True).to("cpu")


def train(device):
    """(losses as numbers, seconds a step, the trained model). The loop does not know where it runs."""
    model, batch = copy.deepcopy(first).to(device), tokens.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)                 # after .to(): its state lives where the parameters are
    losses = []
    for step in range(steps):
        if step == 1:                                                          # the first step also compiles kernels
            torch.cuda.synchronize()
            started = time.perf_counter()
        optimizer.zero_grad()
        _, loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())                                           # a number that stays on the device: nobody waits for it
    torch.cuda.synchronize()                                                   # launching is not computing: wait before the clock is read
    seconds = (time.perf_counter() - started) / (steps - 1)
    return [loss.item() for loss in losses], seconds, model


results = {}
for device in devices:
    losses, seconds, model = train(device)
    with torch.no_grad():
        text = generate(model, tokens[:1, :3].to(device), 5, temperature=0)
    assert {p.device.type for p in model.parameters()} == {torch.device(device).type} == {text.device.type}
    results[device] = {"losses": losses, "seconds per step": seconds, "text": text.tolist()}
    print(f"{device:8s} loss {losses[0]:.4f} → {losses[-1]:.4f}   {1000 * seconds:8.1f} ms a step   greedy: {text.tolist()[0]}")
    assert losses[-1] < losses[0]

# --- 3. Equal up to rounding -------------------------------------------------------------------------------------------------
if len(devices) == 2:
    apart = max(abs(a - b) for a, b in zip(*(r["losses"] for r in results.values())))
    print(f"largest difference between the losses: {apart:.1e}")
    assert apart < 1e-3, "the same steps must give the same losses, but for the order of sums"

# --- 4. What was trained on one device goes to another -----------------------------------------------------------------------
arguments.out.mkdir(parents=True, exist_ok=True)
torch.save(model.state_dict(), arguments.out / "weights.safetensors")          # on the host, whatever the device was
first.load_state_dict(torch.load(arguments.out / "weights.safetensors"))
assert all(p.device.type == "cpu" for p in first.parameters())
assert torch.allclose(first.lm_head.weight, model.lm_head.weight.cpu())
(arguments.out / "device.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
print(f"weights from {devices[-1]} loaded on the CPU; written to {arguments.out}/")
