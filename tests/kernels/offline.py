"""Compiles CUDA C++ as CuPy would, to machine code, on a machine without a GPU; and with nvcc, where it is on PATH.

Only this file knows private names of CuPy 14.2: two functions that ask the GPU are replaced for the moment of compiling, and the
loading of the result. `refusal()` says in words what is missing; nothing else of CuPy is touched.
"""
import io
import re
import shutil
import subprocess
import tempfile
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

PATCHED = ("_get_arch", "_get_arch_for_options_for_nvrtc", "function", "_kernel_cache_backend")
USED = ("_compile_module_with_cache", "_empty_file_preprocess_cache")
KERNEL = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'(.*?)(?=Compiling entry|\Z)", re.S)


class Usage(NamedTuple):
    """What ptxas says that a thread, and a block, of one kernel takes."""
    kernel: str
    arch: str
    registers: int
    static_shared: int
    stack: int
    spilled: int                                # bytes stored because registers ran out


class Loaded:
    """In place of CuPy's module, which would hand the machine code to the driver."""

    def load(self, cubin):
        self.cubin = cubin

    def _set_mapping(self, mapping):
        pass


def refusal():
    """None where CuPy's compiler can be used, or the reason in words."""
    try:
        from cupy._core import core
        from cupy.cuda import compiler
        from cupy_backends.cuda.libs import nvrtc
        nvrtc.getVersion()
    except Exception as error:                  # a missing wheel shows itself in many ways
        return f'CuPy or NVRTC is missing ({type(error).__name__}: {error}); pip install "tinygrad_tf[cuda-compile]"'
    gone = [name for name in PATCHED + USED if not hasattr(compiler, name)]
    gone += [] if hasattr(core, "assemble_cupy_compiler_options") else ["assemble_cupy_compiler_options"]
    return f"this version of CuPy has no {', '.join(gone)}: see tests/kernels/offline.py" if gone else None


def with_cupy(source, arch, options=()):
    """(machine code, [Usage]) of CuPy's own pipeline for sm_`arch`: the same headers, the same options, NVRTC."""
    from cupy._core import core
    from cupy.cuda import compiler
    log, asked = io.StringIO(), core.assemble_cupy_compiler_options((*options, "--ptxas-options=-v"))
    no_cache = types.SimpleNamespace(load=lambda name: None, save=lambda *args: None)
    replaced = (lambda: arch, lambda asked_arch=None: (f"-arch=sm_{arch}", "cubin"), types.SimpleNamespace(Module=Loaded), no_cache)
    with mock.patch.multiple(compiler, **dict(zip(PATCHED, replaced))):
        compiler._empty_file_preprocess_cache.clear()
        module = compiler._compile_module_with_cache(source, asked, arch=arch, log_stream=log)
    return module.cubin, usages(log.getvalue())


def with_nvcc(source, arch, options=()):
    """The same of nvcc, which is another compiler front end."""
    with tempfile.TemporaryDirectory() as folder:
        file, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        file.write_text(source, encoding="utf-8")
        command = ["nvcc", "-cubin", f"-arch=sm_{arch}", "-std=c++17", "-ftz=true", "-Xptxas", "-v", *options]
        done = subprocess.run([*command, "-o", str(cubin), str(file)], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"nvcc cannot compile this:\n{done.stdout}{done.stderr}")
        return cubin.read_bytes(), usages(done.stderr)


COMPILERS = {"CuPy": with_cupy, "nvcc": with_nvcc}


def missing(compiler):
    """None where it is here, or the reason in words."""
    return refusal() if compiler == "CuPy" else None if shutil.which("nvcc") else "nvcc is not on PATH"


def usages(log):
    def number(pattern, text):
        found = re.search(pattern, text)
        return int(found[1]) if found else 0
    figures = (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes stack frame", r"(\d+) bytes spill stores")
    return [Usage(name, arch, *(number(figure, text) for figure in figures)) for name, arch, text in KERNEL.findall(log)]
