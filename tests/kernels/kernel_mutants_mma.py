"""Mistakes planted in flash_attention_mma.cu one at a time, and who notices: the checks of the emulator, or the numbers.

`python tests/kernels/kernel_mutants_mma.py` prints the table of all of them (a compilation each, some minutes);
tests/kernels/test_flash_mma.py runs some, and all with KERNEL_MUTANTS=all.
"""
import contextlib
import sys
from pathlib import Path
from unittest import mock

import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from kernels.flash_cases import Case, errors, inputs, reference
from kernels.kernel_mutants import compiling, print_table, replaced, verdict

from tinygrad_tf.kernels import compile, flash
from tinygrad_tf.ops.flash_attention import Band

FILE = "flash_attention_mma.cu"
WRONG = 5e-3                                    # ten times the rounding of float16
CASES = (Case(77, 83, 32, Band(10, 60, 2), padding=True), Case(97, 90, 32, Band(0, 28, 5), heads=(4, 2), B=1),
         Case(45, 70, 32, heads=(1, 1), B=1))   # padding in tiles within the band; tiles cut by it on both sides; cut by the end alone


class Small(flash.Float16):
    """Two warps and small tiles: several tiles in a small case."""
    threads = 64
    tiles = {32: (flash.TilePair(flash.Tile(64, 32), flash.Tile(32, 32)),)}


def source():
    return (compile.FOLDER / FILE).read_text(encoding="utf-8")


KERNELS = ("flash_forward", "flash_dkdv", "flash_dq")


def in_each(what, old, new):
    """The same mistake in each of the three kernels, whose loops begin alike."""
    return {f"{name}: {what}": replaced(old, new, n) for n, name in enumerate(KERNELS)}


def moved_before(statement, place):
    """The first `statement` stands before the first `place` instead."""
    def change(code):
        at = code.index(place)
        return code[:at] + statement + code[at:].replace(statement, "", 1)
    return change


MUTANTS = {
    # order
    **in_each("no __syncthreads", "        __syncthreads();", "        "),
    **in_each("no copy_wait", "        copy_wait<0>();", "        "),
    **in_each("the copy of the next tile not waited for", "copy_wait<0>();", "copy_wait<1>();"),
    "no __syncwarp before results overwrite a left operand": replaced("__syncwarp();", ""),
    "no __syncwarp between staging and storing rows": replaced("__syncwarp();", "", 1),
    "forward: the next tile over the one in use": replaced("fetch(n0 + BN, stage ^ 1)", "fetch(n0 + BN, stage)"),
    "dK dV: the next tile over the one in use": replaced("fetch(step + 1, stage ^ 1)", "fetch(step + 1, stage)"),
    "dQ: the next tile over the one in use": replaced("fetch(n0 + BN, stage ^ 1)", "fetch(n0 + BN, stage)", 1),
    "forward: the next tile fetched before the barrier":
        moved_before("        if (n0 + BN < end) fetch(n0 + BN, stage ^ 1);\n", "        __syncthreads();"),
    "a barrier that one warp skips": replaced("        __syncthreads();", "        if (warp() == 0) __syncthreads();"),
    "a shuffle that some lanes skip": replaced("l[r] = quad_sum(l[r]);", "if (q0 + row(r) < Tq) l[r] = quad_sum(l[r]);"),
    "lse and delta of the other stage": replaced("lse2[stage * BN + column(c)]", "lse2[column(c)]"),
    # fragments
    "halves of the right operand exchanged": replaced("mma(s[i][n], a[i], b[0], b[1])", "mma(s[i][n], a[i], b[1], b[0])"),
    "blocks of the right operand exchanged": replaced("mma(acc[i][n], a[i], b[0], b[1])", "mma(acc[i][n], a[i], b[2], b[3])"),
    "left operand: quarters a[1] and a[2] exchanged":
        replaced("A + (16 * i + lane() % 16) * PITCH + d + lane() / 16 * 8",
                 "A + (16 * i + lane() / 16 * 8 + lane() % 8) * PITCH + d + lane() / 8 % 2 * 8"),
    "left operand: the second strip is the first": replaced("A + (16 * i + lane() % 16)", "A + (lane() % 16)"),
    "right operand: rows of the first half twice": replaced("B + (8 * n + lane() / 16 * 8 + lane() % 8)", "B + (8 * n + lane() % 8)"),
    "X not transposed": replaced("ldmatrix_trans(b, X", "ldmatrix(b, X"),
    "X: a row too far": replaced("X + (8 * c + lane() % 16)", "X + (8 * c + lane() % 16 + 1)"),
    "P: rows g and g + 8 exchanged":
        replaced("pack(p[i][c + e / 2][e % 2 * 2], p[i][c + e / 2][e % 2 * 2 + 1])",
                 "pack(p[i][c + e / 2][2 - e % 2 * 2], p[i][c + e / 2][3 - e % 2 * 2])"),
    "P: its two halves exchanged": replaced("pack(p[i][c + e / 2]", "pack(p[i][c + 1 - e / 2]"),
    "column: t instead of 2t": replaced("2 * (lane() % 4) + c % 2", "lane() % 4 + c % 2"),
    "column: pairs apart": replaced("c / 2 * 8 + 2 * (lane() % 4) + c % 2", "c / 2 * 8 + lane() % 4 + c % 2 * 4"),
    "row: rows g + 8 taken for rows g": replaced("return 8 * r + lane() / 4", "return r / 2 * 16 + lane() / 4"),
    "each: rows and columns of an element exchanged": replaced("2 * i + e / 2, 2 * n + e % 2", "2 * i + e % 2, 2 * n + e / 2"),
    "a depth step left out": replaced("d < D; d += 16", "d < D - 16; d += 16"),
    # softmax
    "no rescale of acc": replaced("x *= decay[r]; });", "});"),
    "no rescale of l": replaced("l[r] *= decay[r];", ""),
    "rescale by the other row's factor": replaced("x *= decay[r];", "x *= decay[r ^ 1];"),
    "a maximum over half of a quad": replaced("return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));", "return x;"),
    "a sum over half of a quad": replaced("return x + __shfl_xor_sync(0xffffffffu, x, 2);", "return x;"),
    "the old maximum kept": replaced("m[r] = top[r];", ""),
    "a maximum that starts at -inf": replaced("LOWEST = -1e38f", "LOWEST = -__builtin_inff()"),
    "0 / 0 not guarded": replaced("x *= l[r] == 0.f ? 0.f : 1.f / l[r];", "x *= 1.f / l[r];"),
    "lse in base 2": replaced("m[r] * LN2 + logf(l[r])", "m[r] + logf(l[r])"),
    "lse past the end": replaced("lane() % 4 == 0 && q0 + row(r) < Tq", "lane() % 4 == 0"),
    # tiles and rows
    "load: no zeros past the end, the row is read":
        replaced("(there ? first + r : 0) * row_stride + d, there", "(first + r) * row_stride + d, true"),
    "load: no zeros, row 0 instead": replaced("row_stride + d, there)", "row_stride + d, true)"),
    "load: one row too many": replaced("first + r < end && (!valid", "first + r <= end && (!valid"),
    "load: padding is read": replaced(" && (!valid_tokens || valid_tokens[first + r])", ""),
    "load: half of the tile": replaced("r < ROWS; r += THREADS", "r < ROWS / 2; r += THREADS"),
    "V never loaded": replaced("load_tile<BN>(Vs + stage * STAGE, v, sv.row, n0, Tk, sight.valid_tokens);", ""),
    "store: rows past the end": replaced("if (first + r < end)\n", "if (true)\n"),
    "store: the last row forgotten": replaced("if (first + r < end)\n", "if (first + r < end - 1)\n"),
    "rows 8 bytes too near for 16-byte access": replaced("PITCH = D + 8", "PITCH = D + 4"),
    "shared tiles that overlap": replaced("*Vs = Ks + 2 * STAGE", "*Vs = Ks + STAGE"),
    # who sees whom
    "the band one key too far right": replaced("key <= p + right", "key <= p + right + 1"),
    "the band one key too short on the left": replaced("p - left <= key", "p - left < key"),
    "the band without query_offset": replaced("int p = query + offset;", "int p = query;"),
    "keys past the end are seen": replaced("return key < Tk && (", "return ("),
    "a tile with a hidden corner taken for full": replaced("k + keys - 1 <= q + offset + right", "k <= q + offset + right"),
    "a tile hidden on the left taken for full": replaced("q + queries - 1 + offset - left <= k", "q + offset - left <= k"),
    "a tile with padding taken for full": replaced("return !valid_tokens && k + keys", "return k + keys"),
    "a tile past the end taken for full": replaced("k + keys <= Tk &&", "k <= Tk &&"),
    "first key one too late": replaced("max(0, q + offset - left)", "max(0, q + offset - left + 1)"),
    "last key dropped": replaced("min(Tk, end + offset + right)", "min(Tk, end + offset + right - 1)"),
    "first query one too late": replaced("max(0, k - offset - right)", "max(0, k - offset - right + 1)"),
    "last query dropped": replaced("min(Tq, end - offset + left)", "min(Tq, end - offset + left - 1)"),
    "padding of another batch": replaced("valid_tokens + (long long)b * Tk", "valid_tokens"),
    "rows and columns of the mask exchanged in dK dV": replaced("hide<true>(p", "hide<false>(p"),
    "key head h % Hkv": replaced("hkv = h / (H / Hkv)", "hkv = h % Hkv"),
    "one head of the group left out": replaced("steps = group * tiles", "steps = (group > 1 ? group - 1 : 1) * tiles"),
    # gradients
    "delta forgotten": replaced("(x - deltas[stage * BN + column(c)])", "x"),
    "delta forgotten in dQ": replaced("(x - row_delta[r])", "x"),
    "delta: every second value left out": replaced("sum = fmaf(unpack(x >> 16), unpack(y >> 16), sum);", ""),
    "lse in base e taken for base 2": replaced("lse[at] * LOG2E", "lse[at]"),
    "dK without the scale": replaced("each(grad_k, [&](float& x, int, int) { x *= scale; });", ""),
    "dQ without the scale": replaced("each(grad_q, [&](float& x, int, int) { x *= scale; });", ""),
    "statistics of another head": replaced("(long long)h * Tq + m0 + i", "(long long)hkv * Tq + m0 + i"),
    "dV and dK exchanged": replaced("Vs + mine * PITCH, grad_v);", "Vs + mine * PITCH, grad_k);"),
    "two blocks that write the same rows": replaced("sdk.row, k0, Tk, Ks", "sdk.row, mine, Tk, Ks"),
    "too little shared memory": None,           # the host's mistake: a row less than the kernel uses
}


@contextlib.contextmanager
def planted(name):
    """Inside, kernels are compiled from the changed source. None: from the right one."""
    shared_bytes = flash.Float16.shared_bytes
    missing = 2 * (32 + 8) if name == "too little shared memory" else 0
    with compiling(source(), name, MUTANTS.get(name)), \
            mock.patch.object(Small, "shared_bytes", lambda *args: shared_bytes(*args) - missing):
        yield


def spoiled(given):
    """NaN in the padding."""
    k, v, padding = given.k.copy(), given.v.copy(), ~given.valid_tokens[:, None]
    for x in (k, v):
        x[padding.repeat(x.shape[1], 1)] = np.nan
    return given._replace(k=k, v=v)


def run(case, given, tier=None):
    """(o, lse, dq, dk, dv); what a kernel does not write is NaN."""
    with unset_outputs():
        o, lse = flash.forward(given.q, given.k, given.v, given.valid_tokens, case.band, case.scale, tier)
        return o, lse, *flash.backward(given.q, given.k, given.v, o, lse, given.d_o, given.valid_tokens, case.band, case.scale, tier)


def unset_outputs():
    def unset(shape, dtype):
        return np.full(shape, 0x7FFF if dtype == np.uint16 else np.nan, dtype)
    return mock.patch.multiple(flash._Run, _new=lambda self, heads, rows: unset((self.B, heads, rows, self.head_dim), self.dtype),
                               _statistic=lambda self: unset((self.B, self.H, self.Tq), np.float32))


def noticed(name):
    """What the emulator says, or how far the numbers are off; None where the mistake goes unseen."""
    with planted(name):
        return verdict(wrong_numbers)


def wrong_numbers():
    for case in CASES:
        given = inputs(case, np.float16)
        got = run(case, spoiled(given) if case.padding else given, Small)
        error = max(errors(got, reference(case, given)))
        if error > WRONG:
            return f"numbers: an error of {error:.1g}"
    return None


if __name__ == "__main__":
    print_table(MUTANTS, noticed, sys.argv[1:])
