"""One call on a machine with an NVIDIA GPU: is everything right there, is it repeatable, and how fast is it?

    python examples/benchmarks/gpu_check.py [--budget 420] [--out FOLDER]       on a GPU, through CuPy
    python examples/benchmarks/gpu_check.py --dry [--quick]                     without one: the same script on the stand-ins

In this order, so that a run that is cut short still says something: the device; every operation and both attention kernels
against float64 on NumPy; the same bits in every run; a model that trains as on the CPU; registers and spills; then speed against
the dense path and against PyTorch's attention, where PyTorch for CUDA is installed. What is left when the time is up is
skipped, and said to be. Writes gpu_check.json; the exit status is 0 if nothing was wrong. Needs a checkout: the cases are those
of tests/gradcases.py. A dry run proves that the script works, and says nothing of a GPU: the stand-in for CuPy computes with
NumPy, and the kernels run on the emulator, T ≤ 128.
"""
import argparse
import importlib.util
import itertools
import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import tinygrad_tf as torch
from tinygrad_tf import sdpa_backend
from tinygrad_tf.backend import require_cupy
from tinygrad_tf.gradcheck import gradient_error
from tinygrad_tf.kernels import flash
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.ops.flash_attention import Band

TESTS = Path(__file__).resolve().parents[2] / "tests"
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}  # of an operation: max|Δ| / max(1, max|reference|)
KERNEL_TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
CAUSAL, OPEN = dict(right=0), dict()
COLUMNS, TITLES = "{:<9} {:>4} {:>6}  {:<16} {:<16} {:<16} {}", ("dtype", "Dh", "T", "kernels", "TFLOP/s", "dense path", "PyTorch")


class Check:
    """What was found so far, what was wrong, and the time that is left."""

    def __init__(self, options):
        self.options, self.started = options, time.monotonic()
        self.failed, self.skipped, self.found = [], [], {}

    def left(self):
        return self.options.budget - (time.monotonic() - self.started)

    def section(self, name, work, needs=0.0):
        """Runs one section; an error in it is a failure, and the next one begins."""
        if self.options.only not in name:
            return
        print(f"\n== {name}  ({self.left():.0f} s left)", flush=True)
        if self.left() < needs:
            self.skipped.append(name)
            print("   skipped: out of time", flush=True)
            return
        try:
            self.found[name] = work(self)
        except Exception as error:              # the next section still says something
            self.expect(False, f"{name}: {type(error).__name__}: {error}")

    def expect(self, right, what):
        if not right:
            self.failed.append(what)
            print(f"   FAILED {what}", flush=True)


# --- the device -------------------------------------------------------------------------------------------------------

def device(check):
    cupy = require_cupy()
    facts = dict(cupy=cupy.__version__, numpy=np.__version__, python=platform.python_version(),
                 shared_bytes=cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])
    if check.options.dry:
        facts["name"] = "none: a dry run on the stand-ins, which are not a GPU"
    else:
        facts.update(name=torch.cuda.get_device_name(), capability=torch.cuda.get_device_capability(),
                     driver=cupy.cuda.runtime.driverGetVersion(), runtime=cupy.cuda.runtime.runtimeGetVersion())
    for name, value in facts.items():
        print(f"   {name:<14} {value}")
    return facts


# --- operations -------------------------------------------------------------------------------------------------------

def operations(check):
    """Every case of tests/gradcases.py: outputs and gradients on the GPU, in float64 and float32, against float64 on NumPy."""
    cases = {place: gradcases(place) for place in ("cpu", "cuda")}
    worst = {}
    for one, other in zip(cases["cpu"], cases["cuda"]):
        if check.options.quick and worst.get(one.op, {}).get("cases", 0) >= 1:
            continue
        row = worst.setdefault(one.op, {"cases": 0})
        row["cases"] += 1
        try:
            for dtype, error in case_errors(one, other):
                row[dtype] = max(row.get(dtype, 0.0), error)
                check.expect(error <= TOLERANCE[dtype], f"{one.name}: {dtype} differs by {error:.1e}")
        except Exception as error:
            check.expect(False, f"{one.name}: {type(error).__name__}: {error}")
    for op, row in sorted(worst.items()):
        print(f"   {op:<24} {row['cases']:3d} cases   " + "   ".join(f"{d} {row[d]:.1e}" for d in TOLERANCE if d in row))
    return worst


def gradcases(place):
    """The table of cases with what it makes at import time on that device."""
    torch.set_default_device(place)
    spec = importlib.util.spec_from_file_location(f"gradcases_{place}", TESTS / "gradcases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CASES


def case_errors(one, other):
    """(dtype, error) of a case. `one` is for the CPU, `other` is the same for the GPU."""
    if "dropout" in one.name.lower():           # draws other numbers on a GPU, by design: its gradient is checked there
        torch.set_default_device("cuda")
        yield "float64", gradient_error(other.function, other.inputs())
        return
    wanted = outputs_and_gradients(one, "cpu", torch.float64)
    dtypes = ("float64", "float32") if all_float(one) else ("float64",)
    for dtype in dtypes:
        found = outputs_and_gradients(other, "cuda", getattr(torch, dtype))
        yield dtype, max((difference(a, b) for a, b in zip(found, wanted, strict=True)), default=0.0)


def all_float(case):
    """False for the cases that ask for float64 by name."""
    return case.op not in ("Cast", "ToDevice")


def outputs_and_gradients(case, place, dtype):
    """The output and all gradients of a case on a device, as NumPy arrays."""
    torch.set_default_device(place)
    inputs = [x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in case.inputs()]
    y = case.function(*inputs)
    random = np.random.default_rng(0)
    y.backward(torch.tensor(random.standard_normal(tuple(y.shape)), dtype=y.dtype, device=y.device))
    return [host(y)] + [host(x.grad) for x in inputs if x.grad is not None]


def host(x):
    return x.detach().cpu().numpy().astype(np.float64)


def difference(found, wanted):
    """max|Δ| / max(1, max|wanted|); equal infinities are no difference, NaN where none is wanted is infinite."""
    if not wanted.size:
        return 0.0 if found.shape == wanted.shape else math.inf
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, abs(found - wanted)).max()
    finite = abs(wanted[np.isfinite(wanted)])
    return math.inf if np.isnan(gap) else float(gap / max(1.0, finite.max(initial=0.0)))


# --- attention kernels ------------------------------------------------------------------------------------------------

def attention_cases(check):
    """(B, H, Hkv, Tq, Tk, Dh, band, padded): sizes chosen to break things."""
    cases = [(1, 1, 1, 1, 1, 64, OPEN, False), (2, 4, 2, 77, 113, 64, CAUSAL, True), (2, 8, 1, 65, 63, 128, OPEN, True),
             (1, 2, 2, 128, 100, 64, dict(left=16, right=0), False), (1, 2, 1, 1, 128, 128, CAUSAL, False),
             (1, 2, 2, 50, 50, 64, dict(left=7, right=3), True)]
    if check.options.quick:
        return cases[:2]
    if not check.options.dry:
        cases += [(2, 8, 2, 1000, 1500, 64, CAUSAL, True), (1, 4, 4, 2049, 2049, 128, CAUSAL, False), (1, 4, 4, 1500, 257, 80, OPEN, True)]
    return cases


def kernels(check):
    """Both tiers against dense attention in float64 on NumPy: o, dq, dk, dv."""
    rows = []
    for dtype, case in itertools.product(KERNEL_TOLERANCE, attention_cases(check)):
        q, k, v, d_o, valid, band, scale = attention_inputs(*case)
        rounded = [as_float64(as_dtype(x, dtype), dtype) for x in (q, k, v, d_o)]
        wanted = dense_in_float64(*rounded, valid, band, scale)
        found = run_kernels(dtype, q, k, v, d_o, valid, band, scale)
        errors = [relative(as_float64(a, dtype), b) for a, b in zip(found, wanted, strict=True)]
        print(f"   {dtype:<9} B, H, Hkv, Tq, Tk, Dh = {case[:6]}  {case[6]} {'padded' if case[7] else ''}  "
              + " ".join(f"{e:.1e}" for e in errors), flush=True)
        check.expect(max(errors) <= KERNEL_TOLERANCE[dtype], f"{dtype} {case}: {max(errors):.1e}")
        rows.append(dict(dtype=dtype, case=str(case), errors=errors))
    return rows


def attention_inputs(B, H, Hkv, Tq, Tk, Dh, band, padded):
    random = np.random.default_rng([B, H, Tq, Tk, Dh])
    q, d_o, k, v = (random.standard_normal(size).astype(np.float32)
                    for size in ((B, H, Tq, Dh), (B, H, Tq, Dh), (B, Hkv, Tk, Dh), (B, Hkv, Tk, Dh)))
    valid = np.arange(Tk) < np.linspace(Tk - 3, 0, B)[:, None] if padded else None         # of two, the last is all padding
    return q, k, v, d_o, valid, Band(Tk - Tq if "right" in band else 0, **band), 1 / math.sqrt(Dh)


def as_dtype(x, dtype):
    """float32 → the dtype that a kernel reads; bfloat16 as its bits in uint16, rounded to nearest even."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = x.view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def as_float64(x, dtype):
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) if dtype == "bfloat16" else x.astype(np.float64)


def dense_in_float64(q, k, v, d_o, valid, band, scale):
    torch.set_default_device("cpu")
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (q, k, v))
    allowed = None if valid is None else torch.tensor(valid)[:, None, None, :]
    with sdpa_backend("dense"):
        o = F.scaled_dot_product_attention(q, k, v, allowed, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
                                           query_offset=band.query_offset, window=(band.left, band.right))
    o.backward(torch.tensor(d_o))
    return [host(x) for x in (o, q.grad, k.grad, v.grad)]


def run_kernels(dtype, q, k, v, d_o, valid, band, scale):
    cupy = require_cupy()
    q, k, v, d_o = (cupy.asarray(as_dtype(x, dtype)) for x in (q, k, v, d_o))
    valid = None if valid is None else cupy.asarray(valid)
    tier = tier_of(dtype)
    o, lse = flash.forward(q, k, v, valid, band, scale, tier)
    return [x.get() for x in (o, *flash.backward(q, k, v, o, lse, d_o, valid, band, scale, tier))]


def tier_of(dtype):
    return flash.TIERS[dtype]


def relative(found, wanted):
    """‖Δ‖ / ‖wanted‖; where the right answer is 0, against numbers of size 0.1."""
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 0.1 * math.sqrt(wanted.size)))


def repeatability(check):
    """The kernels use no atomics: the same inputs give the same bits, and another result is a race."""
    size = (1, 2, 2, 100, 100, 64, CAUSAL, False) if check.options.dry else (4, 16, 4, 2000, 2000, 64, CAUSAL, True)
    runs, same = (2 if check.options.dry else 20), {}
    for dtype in KERNEL_TOLERANCE:
        inputs = attention_inputs(*size)
        first, *others = [[x.tobytes() for x in run_kernels(dtype, *inputs)] for _ in range(runs)]
        same[dtype] = all(run == first for run in others)
        print(f"   {dtype:<9} {runs} runs, identical: {same[dtype]}", flush=True)
        check.expect(same[dtype], f"{dtype}: runs differ")
    return same


# --- a model ----------------------------------------------------------------------------------------------------------

def training(check):
    """A MiniGPT takes the same steps on both devices: losses of float32."""
    losses = {place: train(place, check) for place in ("cpu", "cuda")}
    gap = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    for place, values in losses.items():
        print(f"   {place:<5} " + " ".join(f"{x:.5f}" for x in values))
    check.expect(gap < 1e-3, f"losses differ by {gap:.1e}")
    return dict(losses, gap=gap)


def train(place, check):
    torch.set_default_device("cpu")
    torch.manual_seed(0)
    B, T, C, L, steps = (2, 16, 32, 1, 2) if check.options.dry else (8, 256, 128, 4, 10)
    model = MiniGPT(65, T, C, 4, 4 * C, L, dropout=0.0, norm_first=True).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 65, (B, T + 1)).to(place)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- resources --------------------------------------------------------------------------------------------------------

def resources(check):
    """What the driver says of each kernel: registers, and bytes of local memory a thread, where spills go."""
    if check.options.dry:
        print("   only the driver of a GPU knows")
        return {}
    found = {}
    cupy = require_cupy()
    from tinygrad_tf.kernels.compile import function
    for dtype, Dh, name in itertools.product(KERNEL_TOLERANCE, (64, 128), ("flash_forward", "flash_dkdv", "flash_dq")):
        tier = tier_of(dtype)
        tile, shared = flash.choose_tile(tier, name, Dh, cupy)
        a = function(tier.file, tier.options(Dh, tile), name, cupy).attributes
        found[f"{dtype} Dh {Dh} {name}"] = row = dict(registers=a["num_regs"], local_bytes=a["local_size_bytes"], shared_bytes=shared)
        print(f"   {dtype:<9} Dh {Dh:<4} {name:<14} {row}")
        check.expect(row["local_bytes"] <= 64, f"{dtype} Dh {Dh} {name} spills: {row['local_bytes']} bytes a thread")
    return found


# --- speed ------------------------------------------------------------------------------------------------------------

def speed(check):
    """Milliseconds of forward and of backward: the kernels, the dense path, and PyTorch's scaled_dot_product_attention."""
    sizes = [(64, 128)] if check.options.dry else [(Dh, T) for T in (512, 1024, 2048, 4096, 8192, 16384) for Dh in (64, 128)]
    rows = []
    print("   milliseconds, forward / backward; TFLOP/s of the kernels\n   " + COLUMNS.format(*TITLES))
    for (Dh, T), dtype in itertools.product(sizes, KERNEL_TOLERANCE):
        if check.left() < 30:
            check.skipped.append(f"speed of T = {T}, Dh = {Dh}, {dtype} and what follows")
            print("   out of time")
            break
        row = dict(dtype=dtype, Dh=Dh, T=T, **kernel_speed(check, dtype, T, Dh))
        if dtype == "float32":
            row.update(attempt("dense", dense_speed, check, T, Dh))
        row.update(attempt("torch", torch_speed, check, dtype, T, Dh))
        rows.append(row)
        print("   " + COLUMNS.format(dtype, Dh, T, *(pair(row, name) for name in ("kernel", "tflops", "dense", "torch"))), flush=True)
    if check.options.dry:
        print("   these are times of an emulator on a CPU, and only show that this part of the script works")
    return rows


def pair(row, name):
    """A cell of the table: "forward / backward" of a row, or why there is nothing."""
    found = [row[key] for key in (f"{name}_forward", f"{name}_backward") if key in row]
    return " / ".join(f"{x:.3g}" for x in found) or row.get(name, "")


def attempt(name, measure, *args):
    """What was measured, or why not: PyTorch may be missing, and T² too large for the memory."""
    try:
        return measure(*args)
    except Exception as error:
        return {name: f"not measured ({type(error).__name__}: {str(error).splitlines()[0][:80]})"}


def shape(check, T, Dh):
    """[B, H, T, Dh] of about the same work for each T."""
    return (1, 1, T, Dh) if check.options.dry else (max(1, 8192 // T), 1024 // Dh, T, Dh)


def kernel_speed(check, dtype, T, Dh):
    cupy, tier = require_cupy(), tier_of(dtype)
    size = shape(check, T, Dh)
    random = np.random.default_rng(0)
    q, k, v, d_o = (cupy.asarray(as_dtype(random.standard_normal(size, dtype=np.float32), dtype)) for _ in range(4))
    band, scale = Band(0, None, 0), 1 / math.sqrt(Dh)
    o, lse = flash.forward(q, k, v, None, band, scale, tier)
    forward = milliseconds(check, lambda: flash.forward(q, k, v, None, band, scale, tier))
    backward = milliseconds(check, lambda: flash.backward(q, k, v, o, lse, d_o, None, band, scale, tier))
    work = 2 * size[0] * size[1] * T * T * Dh                   # multiply–adds of two products, half of them masked, two FLOPs each
    return dict(kernel_forward=forward, kernel_backward=backward, tflops_forward=work / forward / 1e9,
                tflops_backward=2.5 * work / backward / 1e9)


def dense_speed(check, T, Dh):
    torch.set_default_device("cuda")
    q, k, v, d_o = (torch.randn(*shape(check, T, Dh)) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def run():
        with sdpa_backend("dense"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    forward = milliseconds(check, run, 5)
    return dict(dense_forward=forward, dense_backward=milliseconds(check, lambda: run().backward(d_o), 5) - forward)


def torch_speed(check, dtype, T, Dh):
    """PyTorch on the same GPU, float32 without TF32. ImportError or RuntimeError where there is none."""
    import torch as pytorch
    if not pytorch.cuda.is_available():
        raise RuntimeError("this PyTorch has no CUDA")
    pytorch.backends.cuda.matmul.allow_tf32 = False
    q, k, v, d_o = (pytorch.randn(*shape(check, T, Dh), device="cuda", dtype=getattr(pytorch, dtype)) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    attention = pytorch.nn.functional.scaled_dot_product_attention
    o = attention(q, k, v, is_causal=True)
    return dict(torch_forward=torch_milliseconds(pytorch, lambda: attention(q, k, v, is_causal=True)),
                torch_backward=torch_milliseconds(pytorch, lambda: pytorch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)))


def milliseconds(check, run, rounds=10):
    """The median time of a call, by the events of the GPU."""
    cupy = require_cupy()
    if check.options.dry:
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    run()
    times = []
    for _ in range(rounds):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    return statistics.median(times)


def torch_milliseconds(pytorch, run, rounds=10):
    run()
    times = []
    for _ in range(rounds):
        start, end = pytorch.cuda.Event(enable_timing=True), pytorch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


# --- the script -------------------------------------------------------------------------------------------------------

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="no GPU: the stand-in for CuPy and the emulator of kernels, T ≤ 128")
    parser.add_argument("--quick", action="store_true", help="one case of each operation, two of each kernel")
    parser.add_argument("--only", default="", metavar="WORD", help="only the sections with this word in their name, e.g. kernels")
    parser.add_argument("--budget", type=float, default=420, help="seconds, after which what is left is skipped")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for gpu_check.json")
    check = Check(parser.parse_args(argv))
    if not (TESTS / "gradcases.py").exists():
        sys.exit("gpu_check.py needs a checkout of the repository: the cases of the operations are in its tests/ folder")
    sys.path.insert(0, str(TESTS))
    if check.options.dry:
        import strict_cupy
        strict_cupy.install()
    elif not torch.cuda.is_available():
        sys.exit("There is no GPU here, or no CuPy: `python examples/benchmarks/gpu_check.py --dry` rehearses on stand-ins")
    check.section("device", device)
    check.section("operations", operations)
    check.section("attention kernels", kernels, needs=20)
    check.section("repeatability", repeatability, needs=20)
    check.section("training", training, needs=20)
    check.section("resources", resources, needs=20)
    check.section("speed", speed, needs=30)
    return finish(check)


def finish(check):
    check.options.out.mkdir(parents=True, exist_ok=True)
    path = check.options.out / "gpu_check.json"
    path.write_text(json.dumps(dict(failed=check.failed, skipped=check.skipped, dry=check.options.dry, **check.found), indent=1))
    print(f"\nwritten: {path}")
    for what in check.skipped:
        print(f"skipped: {what}")
    print("\n".join(f"FAILED: {what}" for what in check.failed) or "nothing was wrong" + (" (dry run)" if check.options.dry else ""))
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
