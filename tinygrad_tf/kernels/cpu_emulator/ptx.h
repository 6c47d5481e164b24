// The instructions of tensor cores and of copies in the background, as functions: what flash_attention_mma.cu defines by
// inline PTX for the GPU is defined here for the CPU, from the descriptions of these instructions in the PTX ISA manual.
// Included where a kernel's source speaks of CUDA_ON_CPU. 16-bit values are float16, or bfloat16 with -DBF16=1.
#pragma once
#include "cuda_on_cpu.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#ifndef BF16
#define BF16 0
#endif

namespace cpu {
inline float from_16_bits(unsigned short x) { return BF16 ? bfloat16_to_float(x) : half_to_float(x); }
inline unsigned short to_16_bits(float x) { return BF16 ? float_to_bfloat16(x) : float_to_half(x); }

// c += a b for a warp: a 16 x 16, b 16 x 8, c 16 x 8. With g = lane / 4, t = lane % 4, a lane holds
//     a[r], r = 0..3:  row g + 8 (r % 2), columns 2t + 8 (r / 2) and one more, the first in the lower half
//     b[r], r = 0, 1:  column g, rows 2t + 8 r and one more
//     c[e], e = 0..3:  row g + 8 (e / 2), column 2t + e % 2
__attribute__((no_sanitize("thread", "undefined"))) inline void multiply(int line, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    exchange(line, "mma", 0xffffffffu, mine, sizeof mine, false, true);
    auto half_of = [](int lane, int r, int upper) __attribute__((no_sanitize("thread", "undefined"))) {     // mail is nobody's memory
        return from_16_bits(static_cast<const unsigned*>(mail_from(lane))[r] >> 16 * upper);
    };
    const int g = lane() / 4, t = lane() % 4;
    for (int e = 0; e < 4; ++e) {
        const int column = 2 * t + e % 2;
        float sum = c[e];
        for (int k = 0; k < 16; ++k)
            sum += half_of(4 * g + k % 8 / 2, e / 2 + k / 8 * 2, k % 2) * half_of(4 * column + k % 8 / 2, 4 + k / 8, k % 2);
        c[e] = sum;
    }
}
}  // namespace cpu

#define CPU_INSTRUCTION __attribute__((always_inline)) inline
CPU_INSTRUCTION void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line = __builtin_LINE()) {
    cpu::multiply(line, c, a, b0, b1);
}
// Four 8 x 8 matrices of 16-bit values in shared memory. Lane i gives the address of row i % 8 of matrix i / 8 and gets in r[m]
// row g, columns 2t and 2t + 1 of matrix m; transposed: rows 2t and 2t + 1, column g.
CPU_INSTRUCTION void ldmatrix(unsigned (&r)[4], const void* row, int line = __builtin_LINE()) {
    cpu::load_matrices(line, r, row, false);
}
CPU_INSTRUCTION void ldmatrix_trans(unsigned (&r)[4], const void* row, int line = __builtin_LINE()) {
    cpu::load_matrices(line, r, row, true);
}
// 16 bytes, global to shared, in the background; zeros unless `there`. They arrive when copy_wait returns, not before.
CPU_INSTRUCTION void copy_async(void* to, const void* from, bool there = true) { cpu::start_copy(to, from, there); }
CPU_INSTRUCTION void copy_commit() { cpu::commit_copies(); }
template <int PENDING> CPU_INSTRUCTION void copy_wait() { cpu::wait_for_copies(PENDING); }
CPU_INSTRUCTION unsigned pack(float low, float high) { return cpu::to_16_bits(low) | unsigned(cpu::to_16_bits(high)) << 16; }
CPU_INSTRUCTION float unpack(unsigned short x) { return cpu::from_16_bits(x); }
#undef CPU_INSTRUCTION
