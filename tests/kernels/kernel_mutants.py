"""Mistakes planted in flash_attention.cu one at a time, and who notices: the checks of the emulator, or the numbers.

`python tests/kernels/kernel_mutants.py` prints the table of all of them (a compilation each, some minutes);
tests/kernels/test_kernel_mutants.py runs some, and all with KERNEL_MUTANTS=all.
"""
import contextlib
import sys
from pathlib import Path
from unittest import mock

import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from kernels.flash_cases import Case, errors, inputs, reference

from tinygrad_tf.kernels import compile, flash
from tinygrad_tf.ops.flash_attention import Band

FILE = "flash_attention.cu"
TILE = flash.Tile(32, 32)                       # several tiles in a small case
WRONG = 1e-4                                    # an error from which the numbers are said to have noticed
CASES = (Case(77, 101, 32, Band(20, 85, 3), padding=True, heads=(4, 2)), Case(97, 100, 32, Band(2, 45, 0), B=1))


def source():
    return (compile.FOLDER / FILE).read_text(encoding="utf-8")


def replaced(old, new, which=0):
    """A change of the source: its which-th `old` becomes `new`."""
    def change(code):
        at = -1
        for _ in range(which + 1):
            at = code.index(old, at + 1)        # ValueError: the kernel has changed, and the mutant must be written anew
        return code[:at] + new + code[at + len(old):]
    return change


def removed(statement):
    return {f"{statement} number {n + 1} removed": replaced(statement, ";", n) for n in range(source().count(statement))}


MUTANTS = {
    **removed("__syncthreads();"), **removed("__syncwarp();"),
    "a barrier that half of the threads skip": replaced("__syncthreads();", "if (threadIdx.x < 64) __syncthreads();"),
    "a thread that returns before the barriers": replaced("float m[RM], l[RM];", "if (threadIdx.x == 77) return; float m[RM], l[RM];"),
    "a shuffle that some lanes of the warp skip":
        replaced("top = fmaxf(m[i], row_max(top));", "top = fmaxf(m[i], ty() % 4 ? row_max(top) : top);"),
    "a maximum over half of the lanes": replaced("int step = TX / 2; step;", "int step = TX / 4; step;"),
    "a sum over half of the lanes": replaced("int step = TX / 2; step;", "int step = TX / 4; step;", 1),
    "load: rows past the end": replaced("first + r < end ?", "true ?"),
    "load: one row too many": replaced("first + r < end ?", "first + r <= end ?"),
    "load: the next column": replaced("matrix[(first + r) * row_stride + d]", "matrix[(first + r) * row_stride + d + 1]"),
    "load: half of the tile": replaced("i < ROWS * (D / 4); i += THREADS", "i < ROWS * (D / 8); i += THREADS"),
    "store: rows past the end": replaced("if (first + row(i) < end)", "if (true)"),
    "store: the last row forgotten": replaced("if (first + row(i) < end)", "if (first + row(i) < end - 1)"),
    "store: columns of another thread": replaced("4 * column(v)]) = acc", "4 * (tx() / 2 + TX * v)]) = acc"),
    "dot_rows: columns tx + TY j": replaced("B[column(j) * LD + d]", "B[(tx() + TY * j) * LD + d]"),
    "dot_rows: the last component left out": replaced("s[i][j] = fmaf(a[i].w, b.w, s[i][j]);", ""),
    "add_product: a row of X too far": replaced("X[(c + k) * LD", "X[(c + k + 1) * LD"),
    "add_product: NaN in what is hidden": replaced("if (hidden) add_product<true>(acc, P, X);", "if (false) ;"),
    "P: written transposed": replaced("P[row(i) * LDP + column(j)] = s", "P[column(j) * LDP + row(i)] = s"),
    "rows 8 bytes too near for 16-byte access": replaced("LD = D + 4", "LD = D + 2"),
    "no rescale of acc": replaced("multiply(acc[i], decay);", ""),
    "no rescale of l": replaced("l[i] *= decay;", ""),
    "the old maximum kept": replaced("top = fmaxf(m[i], row_max(top));", "top = row_max(top);"),
    "a row without a key not guarded": replaced("top == NEG_INF ? 0.f : top", "top"),
    "0/0 not guarded": replaced("l[i] == 0.f ? 0.f : 1.f / l[i]", "1.f / l[i]"),
    "lse in base 2": replaced("m[i] * LN2 + logf(l[i])", "m[i] + logf(l[i])"),
    "lse past the end": replaced("tx() == 0 && m0 + row(i) < Tq", "tx() == 0"),
    "the band one key too far right": replaced("j <= p + right &&", "j <= p + right + 1 &&"),
    "the band one key too short on the left": replaced("p - left <= j &&", "p - left < j &&"),
    "the band without query_offset": replaced("int p = i + offset;", "int p = i;"),
    "a tile with a hidden corner taken for full": replaced("j1 - 1 <= i0 + offset + right", "j1 - 1 <= i1 + offset + right"),
    "a tile hidden on the left taken for full": replaced("i1 - 1 + offset - left <= j0", "i0 + offset - left <= j0"),
    "padding forgotten in sees_all": replaced("i0 + offset + right && !valid", "i0 + offset + right"),
    "first key one too late": replaced("max(0, i0 + offset - left)", "max(0, i0 + offset - left + 1)"),
    "last key dropped": replaced("min(i1, Tq) + offset + right)", "min(i1, Tq) + offset + right - 1)"),
    "first query one too late": replaced("max(0, j0 - right - offset)", "max(0, j0 - right - offset + 1)"),
    "last query dropped": replaced("min(j1, Tk) + left - offset)", "min(j1, Tk) + left - offset - 1)"),
    "padding of another batch": replaced("valid_tokens + (long long)b * Tk", "valid_tokens"),
    "key head h % Hkv": replaced("hk = h / (H / Hkv)", "hk = h % Hkv"),
    "one head of the group left out": replaced("h < (hk + 1) * group", "h < (hk + 1) * group - (group > 1)"),
    "shared tiles that overlap": replaced("V = K + BN * LD, *P", "V = K + (BN - 1) * LD, *P"),
    "a tile that is never loaded": replaced("load_tile<BN>(V, v, sv.row, n0, end);", ""),
    "two blocks that write the same rows": replaced("sdk.row, n0, Tk, grad_k", "sdk.row, 0, Tk, grad_k"),
    "delta forgotten": replaced("p * (dp - delta)", "p * dp"),
    "delta of the wrong row": replaced("d_o += b * sdo.batch + h * sdo.head + i * sdo.row", "d_o += b * sdo.batch + h * sdo.head"),
    "NaN of a hidden dP": replaced("p == 0.f ? 0.f : p * (dp - delta)", "p * (dp - delta)"),
    "dK without the scale": replaced("multiply(grad_k[i], scale);", ""),
    "dQ without the scale": replaced("EACH(i, RM) multiply(acc[i], scale);", ""),
    "statistics of another head": replaced("((long long)b * H + h) * Tq + m0 + i;", "((long long)b * H + hk) * Tq + m0 + i;"),
    "too little shared memory": None,           # the host's mistake: one row less than the kernel uses
    "a float sent as 8 bytes": None,
}


def compiling(source, name, change):
    """Inside, kernels come from the source after the change; None: as it is. ValueError for a change of nothing."""
    from tinygrad_tf.kernels.cpu_emulator import RawModule
    code = change(source) if change else source
    if change and code == source:
        raise ValueError(f"{name}: changes nothing")
    modules = {}

    def function(file, options, kernel, xp):
        if options not in modules:
            modules[options] = RawModule(code=code, options=options)
        return modules[options].get_function(kernel)
    return mock.patch.object(flash, "function", function)


@contextlib.contextmanager
def planted(name):
    """Inside, kernels are compiled from the changed source. None: from the right one."""
    shared_bytes, argument = flash.Float32.shared_bytes, compile.argument
    patches = [compiling(source(), name, MUTANTS.get(name)), mock.patch.dict(flash.Float32.tiles, {32: (TILE,)})]
    if name == "too little shared memory":
        patches.append(mock.patch.object(flash.Float32, "shared_bytes", lambda *args: shared_bytes(*args) - 4 * 36))
    if name == "a float sent as 8 bytes":
        patches.append(mock.patch.object(compile, "argument", lambda x: np.float64(x) if isinstance(x, float) else argument(x)))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def spoiled(given):
    """NaN in the padding, and in one key of batch 0 that some queries do not see."""
    k, v = given.k.copy(), given.v.copy()
    k[~given.valid_tokens[:, None].repeat(k.shape[1], 1)] = v[~given.valid_tokens[:, None].repeat(v.shape[1], 1)] = np.nan
    return given._replace(k=k, v=v)


def run(case, given):
    o, lse = flash.forward(given.q, given.k, given.v, given.valid_tokens, case.band, case.scale)
    return o, lse, *flash.backward(given.q, given.k, given.v, o, lse, given.d_o, given.valid_tokens, case.band, case.scale)


def noticed(name):
    """What the emulator says, or how far the numbers are off; None where the mistake goes unseen."""
    with planted(name), poisoned_outputs():
        return verdict(wrong_numbers)


def verdict(wrong_numbers):
    """What the emulator says of the kernels that run inside, else what wrong_numbers() returns."""
    from tinygrad_tf.kernels.cpu_emulator import KernelError
    try:
        return wrong_numbers()
    except KernelError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"check: {lines[min(1, len(lines) - 1)]}"


def wrong_numbers():
    for case in CASES:
        given = inputs(case)
        got = run(case, spoiled(given) if case.padding else given)
        if max(errors(got, reference(case, given))) > WRONG:
            return f"numbers: an error of {max(errors(got, reference(case, given))):.1g}"
    case = Case(65, 70, 32, Band(right=0), B=1)
    given = inputs(case)
    hidden = given._replace(k=given.k.copy(), v=given.v.copy())
    hidden.k[:, :, 40:], hidden.v[:, :, 40:] = np.nan, np.nan
    for got, want in zip(run(case, hidden), run(case, given)):
        rows = slice(0, 40) if got.shape[2] == case.Tq else slice(case.Tq, None)        # who sees none of these keys; unseen keys
        if not np.array_equal(got[:, :, rows], want[:, :, rows]):
            return "numbers: a NaN that a query does not see reaches it"
    return None


def poisoned_outputs():
    """What a kernel does not write is NaN."""
    return mock.patch.multiple(flash._Run, _new=lambda self, heads, rows: np.full((self.B, heads, rows, self.head_dim), np.nan, self.dtype),
                               _statistic=lambda self: np.full((self.B, self.H, self.Tq), np.nan, np.float32))


def print_table(mutants, noticed, words):
    """Every mutant, or those whose names have one of the words, and who noticed it."""
    chosen = [n for n in mutants if not words or any(word in n for word in words)]
    print(f"{'as it is':52s} {noticed(None) or 'nothing to notice'}")
    verdicts = {}
    for name in chosen:
        verdicts[name] = noticed(name)
        print(f"{name:52s} {verdicts[name] or 'NOT NOTICED'}"[:150], flush=True)
    print(f"{sum(v is not None for v in verdicts.values())} of {len(verdicts)} noticed")


if __name__ == "__main__":
    print_table(MUTANTS, noticed, sys.argv[1:])
