"""examples/benchmarks/gpu_check.py, rehearsed without a GPU: it runs to its end, and it finds what is planted."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1]
SECTIONS = {"device", "operations", "attention kernels", "repeatability", "training", "resources", "speed"}
pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator of kernels needs g++"),
              pytest.mark.host("starts processes of its own, each with the stand-in")]


def dry_run(out, planted="", *options):
    """(exit status, gpu_check.json, what it printed) of a dry run, after the statements `planted`, which can name gpu_check."""
    program = f"import sys, gpu_check\n{planted}\nsys.exit(gpu_check.main(sys.argv[1:]))"
    path = os.pathsep.join([str(FOLDER / "examples" / "benchmarks"), str(FOLDER)])
    done = subprocess.run([sys.executable, "-c", program, "--dry", "--quick", "--out", str(out), *options], capture_output=True, text=True,
                          timeout=600, env={**os.environ, "PYTHONPATH": path})
    assert (out / "gpu_check.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((out / "gpu_check.json").read_text()), done.stdout


def test_a_dry_run_finds_nothing_wrong(tmp_path):
    status, found, printed = dry_run(tmp_path)
    assert status == 0 and found["failed"] == [] == found["skipped"], printed
    assert SECTIONS <= set(found) and found["dry"] and "not a GPU" in printed
    assert len(found["operations"]) > 70 and all("float64" in row for row in found["operations"].values())
    assert {row["dtype"] for row in found["attention kernels"]} == {"float32", "float16", "bfloat16"} == set(found["repeatability"])


FUSED = "import numpy as np; from tinygrad_tf.kernels import fused; right = fused.activation\n"
EXP = "import numpy; from tinygrad_tf.ops.arithmetic import Exp\n"
LIMITS = "from tinygrad_tf.kernels import flash; limits = flash._limits\n"
RUNS = "run, n = gpu_check.run_kernels, iter(range(999))\n"
PLANTED = [                                     # what, the statements, the section that must find it, a word of what it says
    ("a wrong fused kernel", FUSED + "fused.activation = lambda x, *args: "
     "[None if y is None else y * np.float32(1.01) for y in right(x, *args)]",
     "operations", "Gelu"),
    ("an error in an operation", EXP + "Exp.forward = lambda self, x: 1 / 0", "operations", "ZeroDivisionError"),
    ("a move that is not said", EXP + "Exp.forward = lambda self, x: numpy.exp(x)", "operations", "Exp"),
    ("a kernel that forgets the mask", LIMITS + "flash._limits = lambda band: (limits(band)[0], flash.UNLIMITED, flash.UNLIMITED)",
     "kernels", "right"),
    ("results that change", RUNS + "gpu_check.run_kernels = lambda *a: [x + x.dtype.type(next(n)) for x in run(*a)]",
     "repeatability", "runs differ"),
]


@pytest.mark.parametrize("planted, section, word", [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_planted_fault_is_found(planted, section, word, tmp_path):
    status, found, printed = dry_run(tmp_path, planted, "--only", section)
    assert status == 1 and found["failed"], printed
    assert any(word in what for what in found["failed"]), found["failed"]
    assert "FAILED" in printed and "nothing was wrong" not in printed


def test_out_of_time_is_said(tmp_path):
    status, found, printed = dry_run(tmp_path, "", "--budget", "0")
    assert status == 0 and set(found["skipped"]) >= SECTIONS - {"device", "operations"} and "skipped: speed" in printed
