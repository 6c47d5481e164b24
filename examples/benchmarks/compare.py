"""Ours beside PyTorch eager, JAX, HIPS/autograd, DeZero and tinygrad: training, decoding, attention, and operation by operation.

    python examples/benchmarks/compare.py [--only w1a w2b w3 ops …] [--threads 1 2] [--rounds 9] [--libraries tinygrad_tf torch …]
                                          [--unlocked] [--quick] [--out FOLDER]

    w1a, w1b   a training step of the model of train_step.py; the very same code runs on ours and on PyTorch; with several threads ours
               uses them in two ways, for the matrix products and for shards of the batch
    w2a, w2b   a token of greedy decoding, one row, of decode.py
    w3         causal attention, B = 1, H = 8, Dh = 64, T = 1024 to 8192, and with the whole table of scores up to 4096
    ops        operation by operation, at the shapes of w1a and w1b

Each library runs in a process of its own and takes its turn (A B A B …). A library that is missing is left out, and named. Ratios are to
PyTorch's time, turn by turn; who is slow takes fewer turns. Memory is what the operating system counts: the peak, and by how
much it exceeds what the process held after a tiny step (w3: when its inputs were made). --unlocked also runs PyTorch on MKL's
fast path, which MKL keeps from AMD's processors: gcc compiles one line for that. Writes compare.json, table.txt and three pictures.
"""
import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import peers
import train_step
from turns import THREADS, Clock, Worker, at_least_one, make_folder, memory, processor, serve, settled

LIBRARIES = ("tinygrad_tf", "torch", *peers.STEPS)
TITLES = {"tinygrad_tf": "tinygrad_tf", "torch": "PyTorch eager", "jax": "JAX jit", "autograd": "HIPS/autograd", "dezero": "DeZero",
          "tinygrad": "tinygrad TinyJit"}
UNLOCKED = "PyTorch eager, unlocked"
ALL_SCORES = ", all scores"
WORKLOADS = ("w1a", "w1b", "w2a", "w2b", "w3", "opsa", "opsb")
BOTH = ("forward", "forward + backward")
REST = 0.05                                     # seconds in which threads of the last turn, which wait by spinning, fall asleep
PATIENCE = 60                                   # seconds for one library and case, after which three turns are enough


# --- in a worker: what is timed ----------------------------------------------------------------------------------------------

def training(library, threads, sizes):
    if library in peers.STEPS:
        return {"step": peers.STEPS[library](threads, **sizes)}
    return {"step": train_step.build(*train_step.modules(library, threads), **sizes)}


def decoding(library, threads, sizes):
    """PyTorch's twin copies our model's weights, so that its process holds both libraries."""
    import decode
    train_step.modules(library, threads)
    model = decode.ours(**sizes["model"])
    generate = decode.generator(model) if library == "tinygrad_tf" else decode.twin(model)
    return {"token": lambda: generate(sizes["tokens"])}


def attention(library, threads, sizes):
    torch, _, F = train_step.modules(library, threads)
    q, k, v = (torch.randn(*sizes["shape"], requires_grad=True) for _ in range(3))
    upstream = torch.randn(*sizes["shape"])

    def whole_table():
        return torch.sdpa_backend("dense") if library == "tinygrad_tf" else sdpa_kernel(SDPBackend.MATH)
    if library == "torch":
        from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward():
        with whole_table() if sizes["dense"] else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return timed_both(forward, [q, k, v], upstream)


def timed_both(forward, leaves, upstream):
    """Forward with its record for backward; and both, the gradients dropped."""
    def backward():
        forward().backward(upstream)
        for leaf in leaves:
            leaf.grad = None
    return dict(zip(BOTH, (forward, backward)))


def operations(library, threads, sizes):
    """{"linear, forward": function, …}"""
    if library in ("jax", "autograd"):
        table = peers.operations(library, threads, **sizes)
    else:
        torch, nn, F = train_step.modules(library, threads)
        table = {**pytorch_operations(torch, F, **sizes), **optimizer_operations(torch, nn, F, **sizes)}
    return {f"{name}, {kind}": run for name, cases in table.items() for kind, run in cases.items()}


def pytorch_operations(torch, F, V, T, B, L, H, C):
    def leaf(*shape):
        return torch.randn(*shape, requires_grad=True)
    ids, targets = torch.randint(0, V, (B, T)), torch.randint(0, V, (B * T,))
    x, wide, heads, vector = (B, T, C), (B, T, 4 * C), (B, H, T, C // H), (C,)
    table = {                                               # name → (function of the leaves, the shapes of these)
        "linear": (F.linear, x, (4 * C, C), (4 * C,)),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (C,), w, b), x, vector, vector),
        "rms_norm": (lambda x, w: F.rms_norm(x, (C,), w), x, vector),
        "softmax": (lambda x: F.softmax(x, dim=-1), (B, H, T, T)),
        "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), wide),
        "gelu exact": (F.gelu, wide),
        "silu": (F.silu, wide),
        "embedding": (lambda table: F.embedding(ids, table), (V, C)),
        "cross_entropy": (lambda logits: F.cross_entropy(logits, targets), (B * T, V)),
        "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), heads, heads, heads)}
    cases = {}
    for name, (function, *shapes) in table.items():
        leaves = [leaf(*shape) for shape in shapes]
        upstream = torch.randn(function(*leaves).shape)
        cases[name] = timed_both(lambda function=function, leaves=leaves: function(*leaves), leaves, upstream)
    return cases


def optimizer_operations(torch, nn, F, **sizes):
    """On all parameters of the model. The bound of clip shrinks, so that each call has something to scale."""
    parameters = list(train_step.gpt(torch, nn, F, **sizes).parameters())
    for p in parameters:
        p.grad = torch.randn(*p.shape)
    optimizer, bound = torch.optim.AdamW(parameters, lr=1e-3), itertools.count(1)
    return {"AdamW": {"step": optimizer.step},
            "clip": {"step": lambda: nn.utils.clip_grad_norm_(parameters, 1 / (1 + 1e-4 * next(bound)))}}


KINDS = {"w1": training, "w2": decoding, "w3": attention, "op": operations}


def warm_up(kind, library, threads, sizes):
    """A tiny step, for what is loaded, compiled and made at first use: it is no part of what training or attention needs."""
    if kind is training and sizes != train_step.QUICK:
        training(library, threads, train_step.QUICK)["step"]()
    elif kind is attention:
        for run in attention(library, threads, {**sizes, "shape": (1, 2, 64, 8)}).values():
            run()


def prepare(spec):
    """A worker's first word, the names of its cases; and a function that answers a case with seconds and memory."""
    kind, needed = KINDS[spec["workload"][:2]], (spec["library"], spec["threads"], spec["sizes"])
    warm_up(kind, *needed)
    earlier, before = memory()["peak"], settled()["resident"]
    cases = kind(*needed)
    if kind is attention:                                   # without its inputs
        earlier, before = memory()["peak"], settled()["resident"]
    clock = Clock(cases, spec["turn"])

    def answer(case):
        seconds, peak = clock(case) / spec["sizes"].get("tokens", 1), memory()["peak"]
        return {"seconds": seconds} if peak is None else {"seconds": seconds, "peak": max(peak, earlier), "extra": max(0, peak - before)}
    return list(cases), answer


# --- here: who takes part, in turns ------------------------------------------------------------------------------------------

def plans(workloads, quick):
    """(label, workload, sizes, [(suffix of a library's name, changes of the sizes)]): for each of these a set of processes."""
    for workload in workloads:
        if workload == "w3":
            for T in (32, 64) if quick else (1024, 2048, 4096, 8192):
                sizes = {"shape": (1, 2, T, 8) if quick else (1, 8, T, 64), "dense": False}
                yield f"W3, T = {T}", workload, sizes, [("", {})] + [(ALL_SCORES, {"dense": True})] * (T <= (32 if quick else 4096))
        elif workload.startswith("w2"):
            yield f"W2 ({workload[-1]})", workload, decoder_sizes(workload[-1], quick), [("", {})]
        else:
            sizes = train_step.QUICK if quick else train_step.SIZES[workload[-1]]
            label = f"W1 ({workload[-1]})" if workload.startswith("w1") else f"operations ({workload[-1]})"
            yield label, workload, sizes, [("", {})]


def decoder_sizes(name, quick):
    import decode
    model = {**decode.MODELS[name], **({"dim": 16, "num_heads": 2, "num_layers": 1} if quick else {})}
    return {"model": model, "tokens": 8 if quick else 200}


def takes_part(library, workload, sizes):
    """Ours and PyTorch in all, the others in training, JAX and HIPS/autograd also operation by operation; in quick mode only in (a)."""
    all_of_them = sizes != train_step.QUICK or workload[-1] == "a"
    peers_too = {"w1": LIBRARIES, "op": ("jax", "autograd")}.get(workload[:2], ()) if all_of_them else ()
    return library in ("tinygrad_tf", "torch", *peers_too)


def competitors(libraries, unlock):
    """[(name, library, variables of its process)]"""
    found = [(TITLES[library], library, {}) for library in libraries]
    return found + ([(UNLOCKED, "torch", {"LD_PRELOAD": str(unlock)})] if unlock and "torch" in libraries else [])


def compiled_unlock(folder):
    """A shared object that says yes to MKL's question about the maker of the processor; None, and a line that says why."""
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or "AuthenticAMD" not in cpu.read_text(encoding="utf-8", errors="replace"):
        return None, "unlocked: not an AMD processor, PyTorch is on its fast path already"
    if shutil.which("gcc") is None:
        return None, "unlocked: gcc is not installed"
    library = Path(folder) / "unlock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], check=True, text=True,
                   input="int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    return library, None


def ways_of(plan, library, threads):
    """[(suffix of the name, changes of the sizes, variables of the process)]. Several cores serve a training step of ours in two ways."""
    if library == "tinygrad_tf" and plan[1].startswith("w1") and threads > 1:
        return [(f", {threads} BLAS threads", {}, {}), (f", {threads} shards", {"shards": threads}, dict.fromkeys(THREADS, "1"))]
    return [(suffix, changes, {}) for suffix, changes in plan[3]]


def start(plan, competitor, threads, turn):
    """{name: worker, or the sentence that says why there is none}, one for each way in which the workload is run."""
    _, workload, sizes, _ = plan
    name, library, variables = competitor
    workers = {}
    for suffix, changes, more in ways_of(plan, library, threads):
        spec = {"workload": workload, "library": library, "threads": threads, "turn": turn, "sizes": {**sizes, **changes}}
        try:
            workers[name + suffix] = Worker([__file__, "--worker", json.dumps(spec)], threads, **variables, **more)
        except RuntimeError as error:
            workers[name + suffix] = str(error)
    return workers


def measure(plan, entrants, threads, rounds, turn):
    """Rows of one workload, case by case; a process that ends early gives a row with its last words."""
    label, workload, sizes, _ = plan
    workers = {}
    for competitor in entrants:
        if takes_part(competitor[1], workload, sizes):
            workers |= start(plan, competitor, threads, turn)
    for name, said in [(name, worker) for name, worker in workers.items() if isinstance(worker, str)]:
        yield {"workload": label, "threads": threads, "case": "all", "library": name, "error": said}
        del workers[name]
    for case in dict.fromkeys(case for worker in workers.values() for case in worker.hello):
        yield from in_turn({"workload": label, "threads": threads, "case": case}, workers, rounds)
    for worker in workers.values():
        worker.close()


def in_turn(row, workers, rounds):
    """The rows of one case. A worker that fails is taken out of `workers`."""
    taking = {name: worker for name, worker in workers.items() if row["case"] in worker.hello}
    answers, spent, errors = {name: [] for name in taking}, dict.fromkeys(taking, 0.0), {}
    for _, (name, worker) in itertools.product(range(rounds), taking.items()):
        if name in errors or (spent[name] > PATIENCE and len(answers[name]) >= 3):
            continue
        begin = time.perf_counter()
        try:
            answers[name].append(worker.ask(row["case"]))
            time.sleep(REST * (row["threads"] > 1))
        except RuntimeError as error:                       # out of memory, say
            errors[name] = str(error)
            del workers[name]
        spent[name] += time.perf_counter() - begin
    for name, found in answers.items():
        measured = {"error": errors[name]} if name in errors else summary(found, row["workload"].startswith(("W1", "W3")))
        yield {**row, "library": name, **measured}


def summary(answers, with_memory):
    seconds = [answer["seconds"] for answer in answers]
    found = {"seconds": seconds, "median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    if with_memory and "peak" in answers[-1]:
        found |= {"peak_bytes": answers[-1]["peak"], "extra_bytes": answers[-1]["extra"]}
    return found


def compared(rows):
    """The same rows with "ratio": time ÷ PyTorch's, turn by turn; ÷ that of the first library where PyTorch is not measured."""
    groups = {}
    for row in rows:
        groups.setdefault((row["workload"], row["threads"], row["case"]), []).append(row)
    for group in groups.values():
        measured = {row["library"]: row for row in group if "seconds" in row}
        base = measured.get(TITLES["torch"]) or next(iter(measured.values()), None)
        for row in measured.values():
            ratios = [a / b for a, b in zip(row["seconds"], base["seconds"])]
            row["ratio"] = {"to": base["library"], "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
            if base.get("extra_bytes"):
                row["ratio"]["extra_bytes"] = row["extra_bytes"] / base["extra_bytes"]
    return rows


# --- what is shown -----------------------------------------------------------------------------------------------------------

def duration(seconds):
    """"12.3 ms", three digits."""
    unit, factor = next((u, f) for u, f in (("s ", 1), ("ms", 1e3), ("µs", 1e6)) if seconds * f >= 1 or u == "µs")
    value = seconds * factor
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f} {unit}"


def shown(row):
    start = f"  {row['case']:34s} {row['library']:28s}"
    if "error" in row:
        return f"{start} failed: {row['error']}"
    ratio, times = row["ratio"], "".join(f"{duration(row[key]):>10s}" for key in ("median", "min", "max"))
    sizes = "".join(f"{row[key] / 2**20:8.0f} MiB" for key in ("peak_bytes", "extra_bytes") if key in row)
    sizes += f"{ratio['extra_bytes']:6.2f}" if "extra_bytes" in ratio else ""
    return f"{start}{times}{ratio['median']:8.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}){sizes}"


def table(rows):
    for (label, threads), group in itertools.groupby(rows, key=lambda row: (row["workload"], row["threads"])):
        group = list(group)
        base = next((row["ratio"]["to"] for row in group if "ratio" in row), "")
        memory = ": time          peak        extra ÷" * any("peak_bytes" in row for row in group)
        yield f"\n{label}, {threads} thread{'s' * (threads != 1)}\n{'':66s}{'median':>8s}{'min':>10s}{'max':>10s}   ÷ {base}{memory}"
        yield from map(shown, group)


def bars(axis, rows, colours):
    """Medians as bars, minimum and maximum as whiskers, in ms."""
    for i, row in enumerate(rows):
        low, middle, high = (1e3 * row[key] for key in ("min", "median", "max"))
        axis.barh(i, middle, color=colours[row["library"]])
        axis.plot([low, high], [i, i], color="black", linewidth=1)
        axis.annotate(f" {row['ratio']['median']:.2f}", (high, i), va="center", fontsize=8)
    axis.set(yticks=range(len(rows)), yticklabels=[row["library"] for row in rows], xlabel=f"ms; at its end: ÷ {rows[0]['ratio']['to']}")
    axis.margins(x=0.15)
    axis.invert_yaxis()


def draw_bars(figure_of, rows, colours):
    """A panel for each model and number of threads: one step, one token."""
    chosen = [row for row in rows if row["workload"].startswith(("W1", "W2")) and "seconds" in row]
    groups = {key: list(group) for key, group in itertools.groupby(chosen, key=lambda row: (row["workload"], row["threads"]))}
    figure = figure_of(len(groups), max(map(len, groups.values())))
    for i, ((label, threads), group) in enumerate(groups.items()):
        axis = figure.add_subplot(math.ceil(len(groups) / 2), min(2, len(groups)), i + 1)
        bars(axis, group, colours)
        axis.set_title(f"{label}: {'a step' if 'W1' in label else 'a token'}, {threads} thread(s)", fontsize=10)
    return figure


def draw_lengths(figure_of, rows, colours):
    """Time and memory against T, of forward and backward; one line a library, dashed where all scores are held."""
    chosen = [row for row in rows if row["workload"].startswith("W3") and row["case"] == BOTH[1] and "seconds" in row]
    threads = min(row["threads"] for row in chosen)
    figure = figure_of(2, 7)
    panels = (("median", "seconds", 1), ("extra_bytes", "MiB beyond the inputs", 2**20))
    for i, (key, label, unit) in enumerate(panels):
        axis = figure.add_subplot(1, 2, i + 1)
        for name in dict.fromkeys(row["library"] for row in chosen):
            points = [(int(row["workload"].split()[-1]), row[key] / unit) for row in chosen
                      if row["library"] == name and row["threads"] == threads and row.get(key)]
            if points:
                axis.loglog(*zip(*points), "o--" if name.endswith(ALL_SCORES) else "o-", color=colours[name], label=name)
        lengths = sorted({int(row["workload"].split()[-1]) for row in chosen})
        axis.set_xticks(lengths, map(str, lengths))
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set(xlabel="T", ylabel=label, title=f"causal attention, forward + backward, {threads} thread(s)")
        axis.legend(fontsize=8)
    return figure


def draw_operations(figure_of, rows, colours):
    """Microseconds of each operation with its backward, a bar a library."""
    from matplotlib.patches import Patch
    chosen = [row for row in rows if row["workload"].startswith("op") and "seconds" in row and not row["case"].endswith(", forward")]
    threads = min(row["threads"] for row in chosen)
    names, labels = (list(dict.fromkeys(row[key] for row in chosen)) for key in ("library", "workload"))
    figure, height = figure_of(2, 14), 0.8 / len(names)
    for i, label in enumerate(labels):
        axis = figure.add_subplot(1, len(labels), i + 1)
        here = [row for row in chosen if row["workload"] == label and row["threads"] == threads]
        cases = list(dict.fromkeys(row["case"].split(",")[0] for row in here))
        for row in here:
            y = cases.index(row["case"].split(",")[0]) + (names.index(row["library"]) - (len(names) - 1) / 2) * height
            axis.barh(y, 1e6 * row["median"], height, color=colours[row["library"]])
        axis.set(xscale="log", xlabel="µs, forward + backward", title=f"{label}, {threads} thread(s)")
        axis.set_yticks(range(len(cases)), cases)
        axis.invert_yaxis()
    figure.legend(handles=[Patch(color=colours[name], label=name) for name in names], loc="outside lower center", ncols=4, fontsize=9)
    return figure


PICTURES = {"steps": (("W1", "W2"), draw_bars), "lengths": ("W3", draw_lengths), "operations": ("op", draw_operations)}


def draw(rows, folder):
    """The pictures for which there is something to draw; their names."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    palette = dict(zip((*TITLES.values(), UNLOCKED), colormaps["tab10"].colors))
    colours = {name: palette.get(name) or palette[name.partition(", ")[0]] for name in (row["library"] for row in rows)}

    def figure_of(panels, lines):
        return Figure(figsize=(11, max(3, 0.4 * lines + 1.2) * math.ceil(panels / 2)), layout="constrained")
    measured = {name for name, (start, _) in PICTURES.items() for row in rows if "seconds" in row and row["workload"].startswith(start)}
    written = [name for name in PICTURES if name in measured]
    for name in written:
        PICTURES[name][1](figure_of, rows, colours).savefig(folder / f"{name}.png", dpi=110)
    return [f"{name}.png" for name in written]


# --- the command -------------------------------------------------------------------------------------------------------------

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:         # a folder on the path
        return "of unknown version"


def chosen_workloads(words):
    words = [word for many in words for word in many.split(",") if word]
    unknown = set(words) - {*WORKLOADS, "ops"}
    if unknown:
        sys.exit(f"--only: expected some of {', '.join((*WORKLOADS, 'ops'))}, got {', '.join(sorted(unknown))}")
    return [workload for workload in WORKLOADS if not words or workload in words or (workload.startswith("ops") and "ops" in words)]


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help=f"some of {', '.join(WORKLOADS)}; ops means both of its kind")
    parser.add_argument("--threads", type=at_least_one, nargs="+", default=[1], help="of a matrix product, and shards of a training step; "
                                                                                         "several numbers: one after the other")
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--unlocked", action="store_true", help="PyTorch also with MKL's fast path (AMD, needs gcc)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds: does it run?")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-compare"))
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    arguments = parsed()
    if arguments.worker:
        return serve(lambda: prepare(arguments.worker))
    make_folder(arguments.out)
    rounds, turn = (2, 0.002) if arguments.quick else (arguments.rounds, 0.2)
    libraries = [name for name in arguments.libraries if importlib.util.find_spec(name)]
    notes = [f"{TITLES[name]}: not installed, left out" for name in arguments.libraries if name not in libraries]
    versions = {name: version(name) for name in (*libraries, "numpy")}
    first = (f"{processor()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
             + ", ".join(f"{name} {version}" for name, version in versions.items()) + f"; {rounds} rounds")
    print(first, flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        unlock, why = compiled_unlock(folder) if arguments.unlocked else (None, None)
        notes += [why] if why else []
        for note in notes:
            print(note, flush=True)
        for threads, plan in itertools.product(arguments.threads, plans(chosen_workloads(arguments.only), arguments.quick)):
            new = compared(list(measure(plan, competitors(libraries, unlock), threads, rounds, turn)))
            print(*table(new), sep="\n", flush=True)
            rows += new
    found = {"machine": processor(), "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions, "rounds": rounds,
             "threads": arguments.threads, "quick": arguments.quick, "notes": notes, "rows": rows}
    (arguments.out / "compare.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (arguments.out / "table.txt").write_text("\n".join([first, *notes, *table(rows), ""]), encoding="utf-8")
    print("\nwritten: " + ", ".join(["compare.json", "table.txt", *draw(rows, arguments.out)]) + f" in {arguments.out}")


if __name__ == "__main__":
    main()
