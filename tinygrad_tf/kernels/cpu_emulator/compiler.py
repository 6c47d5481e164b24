"""From CUDA C++ to a shared library, by g++, kept on disk (cache.py): the same source and options are compiled once."""
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .cache import kept, key_of
from .report import KernelError

HERE = Path(__file__).parent
RUNTIME = ("scheduler.cpp", "checker.cpp", "instructions.cpp")
# Without what would merge or replace accesses, or make one of two equal kernels: the checker is to see those of the source,
# in their lines. And no fused multiply-add, which not every CPU has.
FLAGS = ["-std=gnu++17", "-fPIC", "-w", "-ffp-contract=off", "-fno-threadsafe-statics", "-fno-gnu-unique", "-fno-strict-aliasing",
         "-fno-tree-vectorize", "-fno-tree-loop-distribute-patterns", "-fno-store-merging", "-fno-ipa-icf", "-U_FORTIFY_SOURCE",
         f"-I{HERE}"]
CHECKS = ["-fsanitize=thread,bounds,signed-integer-overflow,integer-divide-by-zero", "--param=tsan-instrument-func-entry-exit=0"]
# Of a kernel alone: no exceptions, as on a GPU, and nothing by which g++ has the C library end the process. A large frame is touched
# page by page, so that it cannot step over the guard below the stack.
DEVICE_CODE = ["-fno-exceptions", "-fno-rtti", "-fno-stack-protector", "-fstack-clash-protection", "-fno-builtin-printf"]
# What a kernel may call that its source does not define: the emulator, the checks, copies that g++ makes calls of; and mathematics (-lm).
OFFERED = re.compile(r"cpu::|__(tsan|ubsan)_|(threadIdx|blockIdx|blockDim|gridDim|printf|__assert_fail|__cxa_pure_virtual|"
                     r"mem(cpy|set|move|cmp)|_GLOBAL_OFFSET_TABLE_|__tls_get_addr)$")
FOR_THE_GPU_ONLY = re.compile(r"-{1,2}(use_fast_math|lineinfo|generate-line-info|fmad|ftz|prec-div|prec-sqrt|maxrregcount|arch|"
                              r"gpu-architecture|gpu-code|ptxas-options|Xptxas|default-device|device-as-default-execution-space|extra-device-vectorization)\b")


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


# ---- compiling ------------------------------------------------------------------------------------------------------------

def compile_module(code, options, check, name):
    """The folder with kernel.so and kernel.json: {"kernels": {name: {"parameters": [...]}}, "variables": [[name, offset, bytes]]}."""
    reason = refusal()
    if reason:
        raise CompileError(reason)
    flags = _flags(options)
    own = [(HERE / file).read_text(encoding="utf-8") for file in sorted(p.name for p in HERE.glob("*.[hc]*") if p.suffix in (".h", ".cpp"))]
    key = key_of(_included(code, flags, name), flags, check, name, RUNTIME, own, Path(__file__).read_text(encoding="utf-8"), _compiler(),
                 os.uname().machine)
    return kept(key, lambda folder: _make_module(folder, code, flags, check, name, own))


def _included(code, flags, name):
    """The source, and where options name folders of headers also what comes from these: the key must change with them."""
    if not any(flag.startswith("-I") for flag in flags):
        return code
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cu").write_text(plain_shared(code), encoding="utf-8")
        return code, _preprocessed(flags, folder, code, name)


def _preprocessed(flags, folder, code, name):
    """kernel.cu of a folder after the preprocessor, which leaves __global__ and __launch_bounds__ in their places."""
    finding = ["-E", "-P", "-x", "c++", "-DCPU_FINDING_KERNELS", "-DCUDA_ON_CPU=1"]
    return _run([*finding, *FLAGS, *flags, "kernel.cu"], folder, code, name)


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
    _run([*FLAGS, *DEVICE_CODE, *others, *(CHECKS if check else []), "-c", "kernel.cpp", "-o", "kernel.o"], folder, code, name)
    _refuse_what_no_gpu_has(folder, code, name)
    runtime = kept("runtime-" + key_of(own, RUNTIME, FLAGS, _compiler(), os.uname().machine), _make_runtime)
    objects = [str(runtime / Path(file).with_suffix(".o")) for file in RUNTIME]
    _run(["-shared", "-Wl,-Bsymbolic,-z,defs", "-o", "kernel.so", "kernel.o", *objects, "-lrt"], folder, code, name)
    (folder / "kernel.o").unlink()
    about = {"kernels": kernels, "variables": _shared_variables(folder / "kernel.so")}
    (folder / "kernel.json").write_text(json.dumps(about), encoding="utf-8")


def _make_runtime(folder):
    for file in RUNTIME:
        made = folder / Path(file).with_suffix(".o")
        _run([*FLAGS, "-O2", "-c", str(HERE / file), "-o", str(made)], folder, "", file)


def _run(arguments, folder, code, name):
    command = [_compiler()[0], *arguments]
    done = _tool(*command, cwd=folder)
    if done.returncode:
        raise CompileError(_explain(done.stderr, code, name))
    return done.stdout


def _tool(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, "LC_ALL": "C"}, **options)


def _refuse_what_no_gpu_has(folder, code, name):
    """CompileError for what belongs to the host, and could end the process: functions of other libraries, code that runs on loading.

    The linker names whatever the kernel calls and is not given: here it is given mathematics and g++'s own arithmetic, and no C library.
    """
    tried = _tool(_compiler()[0], "-shared", "-nodefaultlibs", "-Wl,-z,defs", "-o", "nothing.so", "kernel.o", "-lm", "-lgcc", cwd=folder)
    found = re.findall(r"^(?:.*?([^/\n:]+):(\d+):)?.*undefined (?:reference to|symbol:) [`'\"]?(.+?)['\"]?$", tried.stderr, re.MULTILINE)
    (folder / "nothing.so").unlink(missing_ok=True)
    told = [_at(file, line, f"{what} is not for kernels: it is neither in this source nor the emulator's", code, name)
            for file, line, what in sorted(set(found), key=lambda at: int(at[1] or 0)) if not OFFERED.match(what)]
    if told:
        raise CompileError(_complaint(name, told) + "\nA kernel has its own functions, CUDA's, those of <cmath>, memcpy, memset, printf. "
                           "assert(...) or __trap() stops a launch; memory is __shared__, or an array that is passed.")
    sections = _tool("readelf", "--sections", "--wide", str(folder / "kernel.o")).stdout
    if re.search(r"\.(init_array(?!\.00099)|fini_array|ctors|dtors)", sections):     # 99: that of -fsanitize=thread
        raise CompileError(_complaint(name, [f"{name}: a variable outside of the kernels has a value that must be computed when the "
                                             "module is loaded, or a function runs then: no GPU does that. Give it a constant"]))


def _at(file, line, words, code, name):
    """Words, with the line where it is one of the source."""
    lines = code.splitlines()
    if not line:
        return f"{name}: {words}"
    ours = file in (name, "kernel.cu") and int(line) <= len(lines)
    return f"{name if ours else file}:{line}: {words}" + (f"\n    {int(line):4d} | {lines[int(line) - 1].strip()}" if ours else "")


def _complaint(name, told):
    return f"{name} does not compile for the CPU emulator:\n" + "\n".join(told[:8])


# (what g++ says, a word of the source, what it means)
HINTS = ((r"Error: |\basm\b|__cvta", r"\basm\b",
          "Inline PTX is for the GPU alone: put it between #ifndef CUDA_ON_CPU and #endif (ptx.h has what takes its place)."),
         ("-fexceptions", "", "A GPU has no exceptions: assert(...) and __trap() stop a launch."),
         ("-fno-rtti", "", "A GPU does not know the types of objects: no typeid, no dynamic_cast."))


def _explain(stderr, code, name):
    """The first errors, each with its line of the source, and a hint where the cause is known."""
    found = re.findall(r"^[^\n:]*?([^/\n:]+):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", stderr, re.MULTILINE)
    hints = [hint for sign, word, hint in HINTS if re.search(sign, stderr) and re.search(word, code)]
    return "\n".join([_complaint(name, [_at(*error, code, name) for error in found] or [stderr[-2000:]]), *hints])


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
                      f'cpu::entry<{kernel}>({about["bounds"]}); }}\n' for kernel, about in kernels.items())
    return f'{"".join([*bf16, *headers, touch, *others])}#line 1 "{name}"\n{code}\n#line 1 "entries"\n{entries}'


def _shared_variables(library):
    """[function::name, offset, bytes] of the thread-local variables in a library, which is what __shared__ makes of variables."""
    said = _tool("readelf", "--syms", "--wide", "--demangle", str(library)).stdout
    rows = re.findall(r"^ *\d+: ([0-9a-f]+) +(\w+) TLS +\w+ +\w+ +\d+ (.+)$", said, re.MULTILINE)
    return sorted({(name, int(offset, 16), int(size, 0)) for offset, size, name in rows if not name.endswith("::first")})
