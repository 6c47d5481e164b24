"""The emulator beside the process that it runs in: a kernel cannot end it, C++'s headers do not change it, its cache stays small."""
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tinygrad_tf.kernels import cpu_emulator
from tinygrad_tf.kernels.cpu_emulator import CompileError, KernelError, RawModule, cache, uninitialised
from tinygrad_tf.kernels.cpu_emulator.module import Library

pytestmark = [pytest.mark.skipif(cpu_emulator.refusal() is not None, reason=str(cpu_emulator.refusal())),
              pytest.mark.host("the emulator runs on NumPy arrays")]
KERNEL = 'extern "C" __global__ void f(float* x, int n) '
both = pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])


def refused(code, check=False):
    """What the refusal to compile says. Nothing of the code runs."""
    with pytest.raises(CompileError) as caught:
        RawModule(code=code, check=check).compile()
    return str(caught.value)


# --- what belongs to the host -----------------------------------------------------------------------------------------------

HEADERS = "\n".join(f"#include <{name}>" for name in ("array", "csetjmp", "csignal", "cstdio", "cstdlib", "exception", "pthread.h",
                                                      "unistd.h")) + "\njmp_buf place;\n__device__ float elsewhere(float x);\n"
# (name in the report, statement). All but the last end the process or change it; the last stands nowhere.
HOST = [("exit", "exit(2);"), ("exit", "__builtin_exit(1);"), ("abort", "abort();"), ("quick_exit", "quick_exit(1);"),
        ("_exit", "_exit(1);"), ("raise", "raise(SIGKILL);"), ("pthread_exit", "pthread_exit(0);"),
        ("std::terminate()", "std::terminate();"),
        ("malloc", "x[0] = *(float*)malloc(n);"), ("free", "free(x);"), ("operator new[]", "x[0] = (new float[n])[1];"),
        ("longjmp", "longjmp(place, 1);"), ("syscall", "syscall(60, 1);"), ("stderr", "x[0] = *(char*)stderr;"),
        ("std::__throw_out_of_range", "x[0] = std::array<float, 3>{}.at(n);"), ("elsewhere(float)", "x[0] = elsewhere(1.f);")]


@both
@pytest.mark.parametrize("calls", [HOST[:8], HOST[8:]], ids=["that end the process", "others"])
def test_functions_of_the_host_are_refused_with_their_lines(calls, check):
    code = HEADERS + KERNEL + "{\n" + "\n".join(f"if (n == {i}) {{ {call} }}" for i, (_, call) in enumerate(calls)) + "\n}\n"
    said = refused(code, check)
    for i, (name, _) in enumerate(calls):
        place = r"array:\d+" if "throw" in name else f"kernel.cu:{i + 2 + HEADERS.count(chr(10))}"     # array: C++'s own header
        assert re.search(rf"{place}: {re.escape(name)}.* is not for kernels", said), said
    assert "assert(...) or __trap() stops a launch" in said


@pytest.mark.parametrize("code, words", [
    (KERNEL + "{ if (n) throw 1; }", "no exceptions"),
    (KERNEL + "{ try { x[0] = 1.f; } catch (int) { x[0] = 2.f; } throw; }", "no exceptions"),
    ("#include <typeinfo>\n" + KERNEL + "{ x[0] = typeid(x) == typeid(n); }", "no typeid"),
    ("struct S { int a = 1; ~S() { a = 0; } };\n" + KERNEL + "{ static S s; x[0] = s.a; }", "__cxa_atexit is not for kernels"),
    ("volatile int one = 1; int two = one + 1;\n" + KERNEL + "{ x[0] = two; }", "Give it a constant"),
    ("__attribute__((constructor)) static void g() { asm volatile(\"\"); }\n" + KERNEL + "{}", "when the module is loaded"),
    ("__attribute__((destructor)) static void g() { asm volatile(\"\"); }\n" + KERNEL + "{}", "when the module is loaded"),
], ids=["throw", "catch", "typeid", "a destructor", "a computed variable", "a constructor", "at the end"])
def test_what_runs_outside_of_a_launch_or_unwinds_it_is_refused(code, words):
    assert words in refused(code)


def test_a_kernel_may_define_what_it_calls():
    """A name alone is not refused; and what g++ computes itself, such as tables of vectors, is no code that runs on loading."""
    code = """
        __device__ float exit(float x) { return 2.f * x; }
        __constant__ float4 table[2] = {{1.f, 2.f, 3.f, 4.f}, make_float4(5.f, 6.f, 7.f, 8.f)};
        static const float root = sqrtf(16.f);
        extern "C" __global__ void f(float* x, int n) { x[threadIdx.x] = exit(table[threadIdx.x].y) + root + lgammaf(2.f) + __popc(n); }"""
    for check in (True, False):
        x = uninitialised(2)
        RawModule(code=code, check=check).get_function("f")((1,), (2,), (x, np.int32(3)))
        np.testing.assert_allclose(x, [4 + 4 + 2, 12 + 4 + 2], atol=1e-6)


ENDINGS = """
extern "C" __global__ void traps(float* x, int n) { if (n) __builtin_trap(); }
extern "C" __global__ void breaks(float* x, int n) { if (n) { BREAKPOINT } }
extern "C" __global__ void needs_too_much(float* x, int n) { volatile float local[1 << 20]; local[n] = 1.f; x[0] = local[n]; }
extern "C" __global__ void takes_too_much(float* x, int n) { volatile char* p = (char*)__builtin_alloca(n << 22); *p = 1; x[0] = *p; }
extern "C" __global__ void calls_nowhere(float* x, int n) { void (*volatile g)() = (void (*)())(size_t)(n - 1); g(); x[0] = 1.f; }
extern "C" __global__ void prints_nowhere(float* x, int n) { printf((const char*)(size_t)(n - 1)); }
extern "C" __global__ void overwrites_its_stack(float* x, int n) {
    float local[4], *volatile p = local;
    for (int i = 0; i < 400 * n; ++i) p[i] = 1e30f;
    x[0] = local[1];
}
extern "C" __global__ void divides(float* x, int n) { x[0] = n / (n - 1); }
""".replace("BREAKPOINT", 'asm volatile("int3");' if platform.machine() == "x86_64" else "__builtin_trap();")


@pytest.mark.parametrize("name", re.findall(r"void (\w+)\(float", ENDINGS))
def test_without_checks_too_the_process_goes_on_after_a_signal(name):
    kernel, x = RawModule(code=ENDINGS, check=False).get_function(name), np.zeros(4, np.float32)
    for _ in range(2):
        with pytest.raises(KernelError) as caught:
            kernel((1,), (2,), (x, np.int32(1)))
        assert [fault.line for fault in caught.value.faults if not 0 <= fault.line <= ENDINGS.count("\n")] == []
        assert caught.value.faults[0].kind == "stack overflow" or "too_much" not in name


# --- headers ----------------------------------------------------------------------------------------------------------------

@both
@pytest.mark.parametrize("headers", ["cstdio cassert cstdlib cmath cstring cstdint climits cfloat limits algorithm type_traits",
                                     "stdio.h assert.h stdlib.h math.h string.h stdint.h",
                                     "cuda_runtime.h cuda_fp16.h cuda_bf16.h stdio.h", ""])
def test_printf_and_assert_are_the_emulators_whatever_is_included(headers, check, capsys):
    code = "".join(f"#include <{name}>\n" for name in headers.split()) + KERNEL + """{
        assert(n < 9);
        if (threadIdx.x) return;
        int arguments = printf("%d of %s\\n", n, "9") + printf("100%%") + printf("plain\\n") + printf("%c", '\\n');
        x[0] = arguments;
        """ + ('std::printf("std\\n");' if "cstdio" in headers else "") + "\n}\n"
    kernel, x = RawModule(code=code, check=check, options=("-DUNUSED=1",)).get_function("f"), uninitialised(1)
    kernel((1,), (32,), (x, np.int32(3)))
    assert capsys.readouterr().out == "3 of 9\n100%plain\n\n" + "std\n" * ("cstdio" in headers) and x[0] == 3
    with pytest.raises(KernelError, match=rf"kernel.cu:{2 + len(headers.split())}: assert\(n < 9\) is false"):
        kernel((1,), (32,), (x, np.int32(9)))


# --- the cache: without a compiler, for it does not matter what is kept -------------------------------------------------------

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache that holds 3500 bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "BYTES_KEPT", 3500)
    return cache.cache_folder()


def store(key, size=1000, unused_for=3600):
    """Asks the cache for a key; from now on as if that had been some seconds ago."""
    found = cache.kept(key, lambda new: (new / "file").write_bytes(bytes(size)))
    assert (found / "file").stat().st_size == size
    then = time.time() - unused_for
    os.utime(found, (then, then))
    return found


def keys(folder):
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_what_was_unused_for_longest_makes_room(folder):
    for i in range(6):
        store(f"{i}", unused_for=3600 - i)
    assert keys(folder) == {"3", "4", "5"}
    assert cache.kept("3", None)                # found, and not made anew
    store("6", unused_for=1800), store("7", unused_for=1800)
    assert keys(folder) == {"3", "6", "7"}


def test_what_is_in_use_stays_however_large(folder):
    for i in range(6):
        store(f"{i}", unused_for=cache.SECONDS_IN_USE / 2)
    assert keys(folder) == set("012345")


def test_one_that_is_larger_than_the_cache_stays_alone(folder):
    store("small")
    store("large", 9000)
    assert keys(folder) == {"large"}


def test_what_is_older_than_a_month_goes_whatever_its_size(folder):
    store("old", 1, unused_for=86400 * cache.DAYS_KEPT + 60)
    store("young", 1, unused_for=86400 * cache.DAYS_KEPT - 600)
    store("new", 1)
    assert keys(folder) == {"young", "new"}


def test_what_failed_leaves_nothing(folder):
    with pytest.raises(CompileError, match="no"):
        cache.kept("failed", lambda new: (_ for _ in ()).throw(CompileError("no")))
    assert keys(folder) == set()


def test_who_asks_for_what_is_being_dropped_waits_and_gets_another(folder, monkeypatch):
    dropped, rename, found = store("0", 3000), os.rename, []
    asking = threading.Thread(target=lambda: found.append(store("0", 3000, unused_for=0)))

    def rename_while_another_asks(source, target):
        if source == dropped:
            asking.start()
            asking.join(0.2)
            assert asking.is_alive() and (dropped / "file").exists()
        rename(source, target)
    monkeypatch.setattr(os, "rename", rename_while_another_asks)
    store("1", 3000)
    asking.join(10)
    assert found == [dropped] and (dropped / "file").exists()


MANY = """
import os, sys, time
from tinygrad_tf.kernels.cpu_emulator import cache
cache.BYTES_KEPT = 20000
def make(new):
    for name in "ab":
        (new / name).write_bytes(bytes(1000))
made = 0
for turn in range(60):
    key = f"{sys.argv[1]}-{turn * 7 % 10}"          # in use by this process alone: none may take it away before it is read
    folder = cache.kept(key, make)
    assert [len((folder / name).read_bytes()) for name in "ab"] == [1000, 1000]
    shared = cache.kept(f"{turn % 3}", make)        # and some that all of them ask for, and let grow old
    os.utime(folder, (1e9 + turn, time.time() - 3600))
print("whole")
"""


def test_processes_that_make_room_for_one_another_find_nothing_halved(tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    several = [subprocess.Popen([sys.executable, "-c", MANY, str(n)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
               for n in range(3)]
    assert [process.communicate(timeout=100) for process in several] == [("whole\n", "")] * 3
    left = tmp_path / "tinygrad_tf" / "kernels"
    assert not [path for path in left.iterdir() if path.name.startswith(("new-", "old-"))]
    assert len(keys(left)) <= 3 + 10 + 1        # 10 hold 20000 bytes; the shared ones, and the last, are in use


def test_faults_have_their_lines_after_the_cache_has_dropped_the_module(tmp_path):
    module = RawModule(code=KERNEL + "{\n    x[n] = 1.f;\n}\n")
    copy = shutil.copytree(Path(module.library.dll._name).parent, tmp_path / "copy")
    module.library = Library(copy, module.code, module.name)
    kernel = module.get_function("f")
    shutil.rmtree(copy)
    with pytest.raises(KernelError, match="kernel.cu:2: store of 4 bytes"):
        kernel((1,), (1,), (np.zeros(4, np.float32), np.int32(4)))
