"""Records which functions, methods and keywords CuPy has → data/cupy_names.json.gz, which tests/strict_cupy.py refuses the rest by.

    python tests/record_cupy_names.py           needs `pip install cupy-cuda13x`; importing it needs no GPU

{"version": …, "ufuncs": […], module or class: {name: None, or [[parameter, kind, has a default], …] where the signature is known}}.
Compiled methods have no signature that Python could read; the first line of their docstrings is one.
"""
import ast
import gzip
import importlib
import inspect
import json
import re
from pathlib import Path

FILE = Path(__file__).with_name("data") / "cupy_names.json.gz"
MODULES = ["cupy", "cupy.linalg", "cupy.fft", "cupy.random", "cupy.cuda", "cupy.cuda.runtime", "cupyx"]
CLASSES = ["cupy.ndarray", "cupy.random.Generator", "cupy.cuda.Device", "cupy.cuda.Stream", "cupy.cuda.Event", "cupy.cuda.MemoryPool",
           "cupy.cuda.PinnedMemoryPool", "cupy.RawModule", "cupy.RawKernel", "cupy.ufunc", "cupy._core.flags.Flags"]


def names():
    """The whole record, from the CuPy that is installed."""
    found = {"version": importlib.import_module("cupy").__version__}
    found["ufuncs"] = sorted(n for n, f in vars(importlib.import_module("cupy")).items() if type(f).__name__ in ("ufunc", "_UFunc"))
    for place in MODULES:
        found[place] = _members(importlib.import_module(place))
    for place in CLASSES:
        module, _, name = place.rpartition(".")
        found[place] = _members(getattr(importlib.import_module(module), name), methods=True)
    return found


def _members(owner, methods=False):
    public = [n for n in dir(owner) if not n.startswith("_") or methods and n.startswith("__")]
    return {n: _parameters(getattr(owner, n, None), methods) for n in public}


def _parameters(thing, method):
    if not callable(thing) or inspect.isclass(thing):
        return None
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return _documented(thing)
    found = [[p.name, int(p.kind), p.default is not p.empty] for p in signature.parameters.values()]
    return [p for p in found if p[0] != "self"] if method else found


def _documented(thing):
    """`_ndarray_base.sum(self, axis=None, dtype=None)` → its parameters; None where the docstring does not begin so."""
    head = re.match(r"\w[\w.]*\((.*?)\)(?: ->.*)?$", (thing.__doc__ or "").strip().split("\n")[0])
    if head is None:
        return None
    text = re.sub(r"\b(?:int|bool|str|tuple|list|_ndarray_base|ndarray|Py_ssize_t) (?=\w)", "", head[1])
    try:
        arguments = ast.parse(f"def f({text}): pass").body[0].args
    except SyntaxError:
        return None
    plain = [a.arg for a in arguments.posonlyargs + arguments.args]
    found = [[n, 1, i >= len(plain) - len(arguments.defaults)] for i, n in enumerate(plain) if n != "self"]
    found += [[arguments.vararg.arg, 2, False]] if arguments.vararg else []
    found += [[a.arg, 3, d is not None] for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return found + ([[arguments.kwarg.arg, 4, False]] if arguments.kwarg else [])


if __name__ == "__main__":
    FILE.write_bytes(gzip.compress(json.dumps(names(), sort_keys=True).encode(), mtime=0))
    print(f"{FILE}: {FILE.stat().st_size} bytes")
