"""CUDA C++ to PTX, with NVIDIA's compiler and without a GPU: nvcc where it is on PATH, else NVRTC from its wheel."""
import ctypes
import ctypes.util
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

OPTIONS = ("-std=c++17", "-ftz=true", "-lineinfo")         # CuPy's; line numbers for messages
NAME = "kernel.cu"


class CompilerMissing(ImportError):
    """Neither nvcc nor NVRTC is installed."""


@functools.lru_cache(maxsize=64)
def _compile(code, options, arch, compiler):
    return compiler(code, (f"-arch=compute_{arch}", *OPTIONS, *options))


def compile_ptx(code, options=(), arch="80"):
    """The PTX text of CUDA C++ for compute_`arch`. CompilerMissing: what to install; ValueError: what the compiler said."""
    return _compile(code, tuple(options), arch, find_compiler())


def refusal():
    """None where CUDA C++ can be compiled to PTX, or the reason in words."""
    if shutil.which("nvcc") or nvrtc_library():
        return None
    return ('PTX needs NVIDIA\'s compiler, and there is none: put nvcc on PATH, or pip install "tinygrad_tf[cuda-compile]" '
            '(neither needs a GPU or a driver)')


def find_compiler():
    """The function that compiles here: `nvcc` or `nvrtc`."""
    if refusal():
        raise CompilerMissing(refusal())
    return nvcc if shutil.which("nvcc") else nvrtc


def nvcc(code, options):
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, NAME), Path(folder, "kernel.ptx")
        source.write_text(code, encoding="utf-8")
        done = subprocess.run(["nvcc", "-ptx", *options, "-o", str(result), str(source)], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"nvcc cannot compile this:\n{done.stdout}{done.stderr}")
        return result.read_text(encoding="utf-8")


# --- NVRTC ------------------------------------------------------------------------------------------------------------

def nvrtc(code, options):
    library = ctypes.CDLL(nvrtc_library())
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), NAME.encode(), 0, None, None))
    try:
        options = [option.encode() for option in (*options, *(f"-I{folder}" for folder in _header_folders()))]
        failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if failed:
            raise ValueError(f"NVRTC cannot compile this:\n{_text(library, 'ProgramLog', program, size)}")
        return _text(library, "PTX", program, size)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library, what, program, size):
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode()


def _check(library, status):
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")


def nvrtc_library():
    """The path of libnvrtc: that of a wheel (nvidia-cuda-nvrtc), else of a toolkit; None where there is none."""
    names = ("lib/libnvrtc.so.*", "bin/nvrtc64_*.dll", "bin/*/nvrtc64_*.dll")
    found = [path for folder in _wheel_folders() for name in names for path in sorted(folder.glob(name))]
    return str(found[0]) if found else ctypes.util.find_library("nvrtc")


def _wheel_folders():
    """The folders of NVIDIA's wheels: nvidia/cu13 since CUDA 13, nvidia/cuda_nvrtc and others before."""
    spec = importlib.util.find_spec("nvidia")
    return [folder for place in (spec.submodule_search_locations if spec else []) for folder in sorted(Path(place).glob("cu*"))]


def _header_folders():
    """Where cuda_fp16.h and the like are, if they are."""
    folders = [folder / "include" for folder in _wheel_folders()] + [Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"), "include")]
    return [folder for folder in folders if (folder / "cuda_runtime.h").exists()]
