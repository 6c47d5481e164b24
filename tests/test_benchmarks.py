"""examples/benchmarks/: compare.py and guard.py run to their end, and say what they should. No time that they measure is judged."""
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf.backend import flushing_denormal

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "benchmarks"
OPERATIONS = ["linear", "layer_norm", "rms_norm", "softmax", "gelu tanh", "gelu exact", "silu", "embedding", "cross_entropy", "attention"]
BOTH = ["forward", "forward + backward"]
TABLE = [f"{name}, {kind}" for name in OPERATIONS for kind in BOTH] + ["AdamW, step", "clip, step"]
ROWS = {("W1 (a)", "step"), ("W1 (b)", "step"), ("W2 (a)", "token"), ("W2 (b)", "token"),
        *((f"W3, T = {T}", kind) for T in (32, 64) for kind in BOTH),
        *((f"operations ({size})", case) for size in "ab" for case in TABLE)}
pytestmark = pytest.mark.host("processes of their own, on the CPU")


def run(script, *arguments, path=(), **variables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]), "PYTHONIOENCODING": "utf-8", **variables}
    done = subprocess.run([sys.executable, str(FOLDER / script), *map(str, arguments)], env=environment, capture_output=True, text=True,
                          encoding="utf-8", timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def compared(folder, *arguments, **options):
    """(compare.json, what was printed) of a quick run."""
    printed = run("compare.py", "--quick", "--out", folder, *arguments, **options)
    return json.loads((folder / "compare.json").read_text(encoding="utf-8")), printed


def test_every_row_is_there(tmp_path):
    found, printed = compared(tmp_path, "--libraries", "tinygrad_tf")
    rows = {(row["workload"], row["case"]): row for row in found["rows"] if row["library"] == "tinygrad_tf"}
    assert set(rows) == ROWS
    for row in found["rows"]:
        assert 0 < row["min"] <= row["median"] <= row["max"] and len(row["seconds"]) == 2 and row["threads"] == 1, row
        assert all(math.isfinite(row["ratio"][key]) for key in ("median", "min", "max")), row
        assert ("peak_bytes" in row) == row["workload"].startswith(("W1", "W3"))
    assert {row["library"] for row in found["rows"]} == {"tinygrad_tf", "tinygrad_tf, all scores"}
    assert printed.startswith(found["machine"]) and "W3, T = 64, 1 thread\n" in printed
    assert (tmp_path / "table.txt").read_text(encoding="utf-8").count("\n  ") >= len(found["rows"])
    assert {path.name for path in tmp_path.iterdir()} == {"compare.json", "table.txt", "steps.png", "lengths.png", "operations.png"}


def test_several_threads_are_used_in_two_ways(tmp_path):
    found, _ = compared(tmp_path, "--libraries", "tinygrad_tf", "--only", "w1a,w2a", "--threads", "1", "2")
    assert {(row["workload"], row["threads"], row["library"]) for row in found["rows"]} == {
        ("W1 (a)", 1, "tinygrad_tf"), ("W1 (a)", 2, "tinygrad_tf, 2 BLAS threads"), ("W1 (a)", 2, "tinygrad_tf, 2 shards"),
        ("W2 (a)", 1, "tinygrad_tf"), ("W2 (a)", 2, "tinygrad_tf")}


@pytest.mark.torch
def test_beside_pytorch(tmp_path):
    found, printed = compared(tmp_path, "--libraries", "tinygrad_tf", "torch", "--only", "w1a,opsa")
    assert {row["library"] for row in found["rows"]} == {"tinygrad_tf", "PyTorch eager"} and "failed" not in printed
    assert {row["ratio"]["to"] for row in found["rows"]} == {"PyTorch eager"} and len(found["rows"]) == 2 * (1 + len(TABLE))


def test_a_library_that_fails_is_named_and_the_others_go_on(tmp_path):
    (tmp_path / "jax.py").write_text("raise ValueError('no such processor')", encoding="utf-8")
    found, printed = compared(tmp_path / "out", "--libraries", "tinygrad_tf", "jax", "--only", "w1a", path=[tmp_path])
    assert {row["library"]: "error" in row for row in found["rows"]} == {"tinygrad_tf": False, "JAX jit": True}
    assert "failed: ValueError: no such processor" in printed


@pytest.fixture
def benchmarks(monkeypatch):
    """A function that imports a script of the folder. What they set for their own process is set back."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(os, "environ", dict(os.environ))    # threads: guard.py
    with flushing_denormal():                               # train_step.py
        yield importlib.import_module


def test_the_peers_train_the_same_model(benchmarks):
    """Three steps of train_step.py's model from the weights of peers.py, whose functions of arrays are run on NumPy."""
    peers, train_step, sizes = benchmarks("peers"), benchmarks("train_step"), dict(V=11, T=6, B=2, L=2, H=2, C=8)
    arrays, (inputs, targets) = peers.weights(np, **sizes), peers.batch(np, **sizes)
    model = train_step.gpt(torch, torch.nn, torch.nn.functional, **sizes)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.tensor(as_peers_have(name, arrays[peers_name(name)])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=peers.LR)
    state = (arrays, *({name: np.zeros_like(array) for name, array in arrays.items()} for _ in range(2)))
    for t in 1, 2, 3:
        optimizer.zero_grad()
        loss = model(torch.tensor(inputs), torch.tensor(targets))
        assert loss.item() == pytest.approx(peers.loss(np, state[0], inputs, targets, **sizes), rel=1e-5)
        loss.backward()
        gradients = {peers_name(name): as_peers_have(name, p.grad.numpy()).copy() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = peers.update(np, state[0], gradients, *state[1:], np.float32(t))


def peers_name(name):
    """blocks.0.norm1.weight → 0.norm1.w; token.weight → token"""
    name = name.removeprefix("blocks.").replace(".weight", ".w").replace(".bias", ".b")
    return name.removesuffix(".w") if name in ("token.w", "position.w") else name


def as_peers_have(name, array):
    """Or the other way round: their layers multiply by [in, out], PyTorch's by [out, in]."""
    return array.T if array.ndim == 2 and name.startswith("blocks") else array


def test_the_guard_prints_records_and_warns(tmp_path):
    file = tmp_path / "guard.json"
    assert "Nothing is recorded" in run("guard.py", "--quick", "--file", file, "--record")
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["ratio"] > 0 and found["machine"]
    for ratio, word in ((1e-6, "WARNING: "), (1e6, "No warning: -100%")):
        file.write_text(json.dumps({**found, "ratio": ratio, "machine": "an abacus"}), encoding="utf-8")
        printed = run("guard.py", "--quick", "--file", file)
        assert word in printed and "on an abacus. " in printed and "Another machine" in printed


def test_the_floor_has_every_product_of_a_step(benchmarks):
    """2 FLOPs for each weight and token, forward, and twice that backward; and the scores and values of attention."""
    guard, (V, T, B, L, H, C) = benchmarks("guard"), (65, 64, 12, 4, 4, 128)
    per_token = L * (4 * C * C + 8 * C * C + 2 * T * C) + V * C
    assert guard.flops(V=V, T=T, B=B, L=L, H=H, C=C) == 6 * B * T * per_token


def test_workers_lose_what_slows_numpy_down(benchmarks, monkeypatch):
    turns = benchmarks("turns")
    monkeypatch.setitem(os.environ, "OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setitem(os.environ, "OPENBLAS_L2_SIZE", "1")
    found = turns.environment(2, LD_PRELOAD="x")
    assert not {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} & set(found)
    assert [found[name] for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_PRELOAD")] == ["2", "2", "2", "x"]


def test_every_trick_can_be_undone_and_changes_no_result(tmp_path, benchmarks):
    """The first loss stays the same to rounding; in float64 the first weights are other numbers."""
    ablation = benchmarks("ablation")
    printed = run("ablation.py", "--quick", "--out", tmp_path)
    rows = json.loads((tmp_path / "ablation.json").read_text(encoding="utf-8"))["rows"]
    assert [row["trick"] for row in rows] == [*ablation.TRICKS, ablation.ALL] and printed.count("size a  ") == len(rows)
    for row in rows:
        assert row["trick"] in ("float32", ablation.ALL) or row["loss"] == pytest.approx(row["base_loss"], rel=1e-5), row
        assert 0 < row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"] and len(row["seconds"]) == 2
    assert (tmp_path / "ablation.png").exists()


def test_what_an_ablation_replaces_is_there():
    """Or nothing would be undone, and nobody would notice."""
    from tinygrad_tf import autograd
    from tinygrad_tf.ops import _rows, activation, attention, linear
    from tinygrad_tf.optim import pieces
    for place, name in [(_rows, "PIECE"), (_rows, "_has_fast_rows"), (pieces, "PIECE"), (pieces, "SMALL"), (attention, "exp_of_moderate"),
                        (autograd, "_REFERENCES"), (autograd, "enter_quiet"), (autograd, "leave_quiet"), (activation.GeluTanh, "curve"),
                        (linear.Linear, "backward")]:
        assert hasattr(place, name)


def test_growth_has_every_size(tmp_path, benchmarks):
    growth = benchmarks("growth")
    run("growth.py", "--quick", "--out", tmp_path)
    rows = json.loads((tmp_path / "growth.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == [name for name in growth.VALUES for _ in range(2)]
    assert all(row["step"] > 0 and row["floor"] > 0 and ("exponent" in row) == (i % 2) for i, row in enumerate(rows))
    assert (tmp_path / "growth.png").exists()


def test_the_share_is_printed():
    printed = run("share.py", "--quick", "--operations")
    assert "autograd's share" in printed and "an operation on 4 elements, recorded and backward" in printed


def test_the_raw_step_is_the_step(benchmarks):
    """What share.py holds the step against computes the same losses, bit for bit, and so the same weights."""
    share, sizes = benchmarks("share"), dict(V=17, T=8, B=2, L=2, H=2, C=16)
    step, raw = share.build(sizes)[0], share.build(sizes)[1]
    assert [step() for _ in range(4)] == [raw() for _ in range(4)]
