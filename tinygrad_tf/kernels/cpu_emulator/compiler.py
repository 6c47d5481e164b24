"""From CUDA C++ to a shared library, by g++, kept on disk: the same source and options are compiled once."""
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .report import KernelError

HERE = Path(__file__).parent
RUNTIME = ("scheduler.cpp", "checker.cpp", "instructions.cpp")
# Without what would merge or replace accesses, or make one of two equal kernels: the checker is to see those of the source,
# in their lines. And no fused multiply-add, which not every CPU has.
FLAGS = ["-std=gnu++17", "-fPIC", "-w", "-ffp-contract=off", "-fno-threadsafe-statics", "-fno-gnu-unique", "-fno-strict-aliasing",
         "-fno-tree-vectorize", "-fno-tree-loop-distribute-patterns", "-fno-store-merging", "-fno-ipa-icf", f"-I{HERE}"]
CHECKS = ["-fsanitize=thread,bounds,signed-integer-overflow,integer-divide-by-zero", "--param=tsan-instrument-func-entry-exit=0",
          "-U_FORTIFY_SOURCE"]
FOR_THE_GPU_ONLY = re.compile(r"-{1,2}(use_fast_math|lineinfo|generate-line-info|fmad|ftz|prec-div|prec-sqrt|maxrregcount|arch|"
                              r"gpu-architecture|gpu-code|ptxas-options|Xptxas|default-device|device-as-default-execution-space|extra-device-vectorization)\b")
DAYS_KEPT = 30


class CompileError(KernelError):
    """g++ is missing, or does not accept the kernel."""


# ---- the compiler --------------------------------------------------------------------------------------------------------

def refusal():
    """None where kernels can be compiled and run, or the reason in words."""
    if not sys.platform.startswith("linux"):
        return ("The CPU emulator of CUDA kernels runs on Linux: on Windows use it in WSL, on macOS in a Linux container "
                "(docker run -it gcc:13), or anywhere in a Colab notebook.")
    compiler, version = _compiler()
    if compiler is None:
        return ("The CPU emulator of CUDA kernels needs g++ 12 or newer, and there is none: install it (Debian, Ubuntu: "
                "apt install g++; Fedora: dnf install gcc-c++), or set the environment variable CXX to where it is.")
    if version < 12:
        return f"The CPU emulator of CUDA kernels needs g++ 12 or newer (for _Float16); {compiler} is {_describe(version)}."
    missing = [tool for tool in ("readelf", "addr2line") if not shutil.which(tool)]
    return f"The CPU emulator of CUDA kernels needs {' and '.join(missing)} (package binutils)." if missing else None


def _describe(version):
    return f"version {version}" if version else "not GCC (Clang is not supported)"


def _compiler():
    """The first of $CXX, g++, g++-15 … g++-12 that is GCC 12 or newer; else what there is; (None, 0) where there is nothing."""
    return _first_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.cache
def _first_compiler(cxx, path):
    names = [*([cxx] if cxx else []), "g++", *(f"g++-{n}" for n in range(15, 11, -1))]
    found = [(name, _gcc_version(name)) for name in names if shutil.which(name)]
    return next((pair for pair in found if pair[1] >= 12), found[0] if found else (None, 0))


def _gcc_version(compiler):
    """The major version; 0 for what calls itself g++ but is Clang, or does not run."""
    macros = subprocess.run([compiler, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True).stdout
    number = re.search(r"#define __GNUC__ (\d+)", macros)
    return int(number[1]) if number and "__clang__" not in macros else 0


# ---- the folder of what has been compiled ---------------------------------------------------------------------------------

@functools.cache
def _private_folder():
    return Path(tempfile.mkdtemp(prefix="tinygrad_tf-"))


def cache_folder():
    """$XDG_CACHE_HOME or ~/.cache; where that cannot be written, a folder of this process in the temporary one."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "tinygrad_tf" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return _private_folder()
    return folder


def _kept(key, make):
    """The folder `key` of the cache, filled by make(folder) where it is not there.

    It is filled under another name and then renamed, which is one step: another process never sees half of it.
    """
    cache = cache_folder()
    folder = cache / key
    if folder.exists():
        os.utime(folder)
        return folder
    _forget_old(cache)
    with tempfile.TemporaryDirectory(prefix="new-", dir=cache) as new:
        make(Path(new))
        try:
            os.rename(new, folder)
        except OSError:                         # another process was faster; what it made is the same
            if not folder.exists():
                raise
            return folder
        os.mkdir(new)                           # for TemporaryDirectory to remove
    return folder


def _forget_old(cache):
    for folder in cache.iterdir():
        try:
            if time.time() - folder.stat().st_mtime > DAYS_KEPT * 86400:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:                         # another process has removed it
            continue


def _key(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


# ---- compiling ------------------------------------------------------------------------------------------------------------

def compile_module(code, options, check, name):
    """The folder with kernel.so and kernel.json: {"kernels": {name: {"parameters": [...]}}, "variables": [[name, offset, bytes]]}."""
    reason = refusal()
    if reason:
        raise CompileError(reason)
    flags = _flags(options)
    own = [(HERE / file).read_text(encoding="utf-8") for file in sorted(p.name for p in HERE.glob("*.[hc]*") if p.suffix in (".h", ".cpp"))]
    key = _key(_included(code, flags, name), flags, check, name, FLAGS, CHECKS, RUNTIME, own, Path(__file__).read_text(encoding="utf-8"),
               _compiler(), os.uname().machine)
    return _kept(key, lambda folder: _make_module(folder, code, flags, check, name, own))


def _included(code, flags, name):
    """The source, and where options name folders of headers also what comes from these: the key must change with them."""
    if not any(flag.startswith("-I") for flag in flags):
        return code
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cu").write_text(plain_shared(code), encoding="utf-8")
        return code, _preprocessed(flags, folder, code, name)


def _preprocessed(flags, folder, code, name):
    """kernel.cu of a folder after the preprocessor, which leaves __global__ and __launch_bounds__ in their places."""
    return _run(["-E", "-P", "-x", "c++", "-DCPU_FINDING_KERNELS", "-DCUDA_ON_CPU=1", *FLAGS, *flags, "kernel.cu"], folder, code, name)


def _flags(options):
    """What g++ is told of the options for NVRTC or nvcc: definitions, folders, -G; what concerns the GPU alone is passed over."""
    if isinstance(options, str):
        raise CompileError(f"options must be a tuple of strings, not the string {options!r}")
    flags, debug = [], False
    for option in options:
        if option in ("-G", "--device-debug"):
            debug = True
        elif option.startswith(("-D", "-I", "-U", "-std=", "--std=")):
            flags.append(_absolute(option).replace("--std=", "-std=").replace("-std=c++", "-std=gnu++"))
        elif not FOR_THE_GPU_ONLY.match(option):
            raise CompileError(f"option {option!r} is not known: -D, -I, -U, -std=, -G, and those for the GPU alone, which are passed over")
    return [*flags, *(["-O0", "-g3", "-gdwarf-4"] if debug else ["-O2", "-g", "-gdwarf-4"])]


def _absolute(option):
    """g++ runs in another folder than the caller."""
    return f"-I{os.path.abspath(option[2:])}" if option.startswith("-I") else option


def _make_module(folder, code, flags, check, name, own):
    source = plain_shared(code)
    (folder / "kernel.cu").write_text(source, encoding="utf-8")
    kernels = find_kernels(_preprocessed(flags, folder, code, name))
    if not kernels:
        raise CompileError(f'{name}: no kernel in it. A kernel is a function that is declared extern "C" __global__ void name(...)')
    (folder / "kernel.cpp").write_text(_with_entries(source, kernels, name, flags), encoding="utf-8")
    others = [flag for flag in flags if not flag.startswith("-D")]
    _run([*FLAGS, *others, *(CHECKS if check else []), "-c", "kernel.cpp", "-o", "kernel.o"], folder, code, name)
    runtime = _kept("runtime-" + _key(own, RUNTIME, FLAGS, _compiler(), os.uname().machine), _make_runtime)
    objects = [str(runtime / Path(file).with_suffix(".o")) for file in RUNTIME]
    _run(["-shared", "-Wl,-Bsymbolic", "-o", "kernel.so", "kernel.o", *objects, "-lrt"], folder, code, name)
    (folder / "kernel.o").unlink()
    about = {"kernels": kernels, "variables": _shared_variables(folder / "kernel.so")}
    (folder / "kernel.json").write_text(json.dumps(about), encoding="utf-8")


def _make_runtime(folder):
    for file in RUNTIME:
        made = folder / Path(file).with_suffix(".o")
        _run([*FLAGS, "-O2", "-g", "-U_FORTIFY_SOURCE", "-c", str(HERE / file), "-o", str(made)], folder, "", file)


def _run(arguments, folder, code, name):
    command = [_compiler()[0], *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise CompileError(_explain(done.stderr, code, name))
    return done.stdout


def _explain(stderr, code, name):
    """The first errors, each with its line of the source, and a hint where the cause is known."""
    lines, told = code.splitlines(), []
    for found in re.finditer(r"^[^\n:]*?([^/\n:]+):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", stderr, re.MULTILINE):
        file, line, words = found[1], int(found[2]), found[3]
        ours = file in (name, "kernel.cu") and line <= len(lines)
        told.append(f"{name if ours else file}:{line}: {words}" + (f"\n    {line:4d} | {lines[line - 1].strip()}" if ours else ""))
    hint = "\nInline PTX is for the GPU alone: put it between #ifndef CUDA_ON_CPU and #endif (ptx.h has what takes its place)." \
        if re.search(r"\basm\b", code) and re.search(r"Error: |\basm\b|__cvta", stderr) else ""
    return f"{name} does not compile for the CPU emulator:\n" + "\n".join(told[:8] or [stderr[-2000:]]) + hint


# ---- what is in the source --------------------------------------------------------------------------------------------------

PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
KERNEL = re.compile(rf"__global__\s+(?P<before>(?:\w+\s+|__launch_bounds__\s*{PARENTHESES}\s*)*?)void\s+"
                    rf"(?P<after>__launch_bounds__\s*{PARENTHESES}\s*)?(?P<name>\w+)\s*(?P<parameters>{PARENTHESES})")


def find_kernels(preprocessed):
    """{name: {"parameters": [names], "bounds": what __launch_bounds__ says}}. Templates are left out: they have no plain name."""
    kernels = {}
    for found in KERNEL.finditer(preprocessed):
        if re.search(r"template\s*<[^;{}]*>\s*(static\s+|inline\s+)*$", preprocessed[:found.start()]):
            continue
        bounds = re.search(rf"__launch_bounds__\s*({PARENTHESES})", (found["before"] or "") + (found["after"] or ""))
        kernels[found["name"]] = {"parameters": parameter_names(found["parameters"][1:-1]), "bounds": bounds[1][1:-1] if bounds else ""}
    return kernels


def parameter_names(text):
    """int n, const float* __restrict__ x → ["n", "x"]"""
    pieces = re.split(r",(?![^<(\[]*[>)\]])", text) if text.strip() not in ("", "void") else []
    return [re.findall(r"\w+", piece.partition("=")[0].partition("[")[0])[-1] for piece in pieces]


def plain_shared(code):
    """`extern __shared__ float s[];` declares dynamic shared memory, and has no equal in C++: it becomes DYNAMIC_SHARED(float, s);"""
    return re.sub(r"extern\s+__shared__\s+((?:__align__|alignas)\s*\(\s*\d+\s*\)\s*)?([\w:]+(?:\s+\w+)*?)\s+(\w+)\s*\[\s*\]\s*;",
                  r"DYNAMIC_SHARED(\2, \3);", code)


def _with_entries(code, kernels, name, flags):
    """The source between the emulator's language and, for each kernel, an entry that tells Python how to call it.

    What -D defines comes behind the emulator's own headers, which are none of its business: but for BF16, which ptx.h asks for.
    """
    bf16, others = [], []
    for flag in flags:
        if flag.startswith("-D"):
            macro, _, value = flag[2:].partition("=")
            (bf16 if macro == "BF16" else others).append(f"#define {macro} {value if '=' in flag else 1}\n")
    wanted_by = {"cuda_on_cpu.h": "", "cuda_fp16.h": "cuda_fp16.h", "cuda_bf16.h": "cuda_bf16.h", "ptx.h": "CUDA_ON_CPU"}
    headers = [f'#include "{header}"\n' for header, word in wanted_by.items() if word in code]
    touch = 'extern "C" void* emulator_touch_static_shared() { __shared__ char first; return &first; }\n'
    entries = "".join(f'extern "C" {{ extern const cpu::Entry emulator_entry_{kernel}; const cpu::Entry emulator_entry_{kernel} = '
                      f'cpu::entry({", ".join(filter(None, [kernel, about["bounds"]]))}); }}\n' for kernel, about in kernels.items())
    return f'{"".join([*bf16, *headers, touch, *others])}#line 1 "{name}"\n{code}\n#line 1 "entries"\n{entries}'


def _shared_variables(library):
    """[function::name, offset, bytes] of the thread-local variables in a library, which is what __shared__ makes of variables."""
    said = subprocess.run(["readelf", "--syms", "--wide", "--demangle", str(library)], capture_output=True, text=True).stdout
    rows = re.findall(r"^ *\d+: ([0-9a-f]+) +(\w+) TLS +\w+ +\w+ +\d+ (.+)$", said, re.MULTILINE)
    return sorted({(name, int(offset, 16), int(size, 0)) for offset, size, name in rows if not name.endswith("::first")})
