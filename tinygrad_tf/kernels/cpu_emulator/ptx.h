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
void multiply(int line, float* c, const float* operands);
void load_matrices(int line, unsigned* r, const void* row, bool transposed);
void start_copy(void* to, const void* from, bool there);
void commit_copies();
void wait_for_copies(int pending);
}  // namespace cpu

#define CPU_INSTRUCTION __attribute__((always_inline)) inline
CPU_INSTRUCTION unsigned pack(float low, float high) { return cpu::to_16_bits(low) | unsigned(cpu::to_16_bits(high)) << 16; }
CPU_INSTRUCTION float unpack(unsigned short x) { return cpu::from_16_bits(x); }
// c += a b for the matrices whose fragments a warp holds (instructions.cpp says who holds what)
CPU_INSTRUCTION void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line = __builtin_LINE()) {
    const unsigned pairs[6] = {a[0], a[1], a[2], a[3], b0, b1};
    float operands[12];
    for (int i = 0; i < 12; ++i) operands[i] = cpu::from_16_bits(pairs[i / 2] >> i % 2 * 16);
    cpu::multiply(line, c, operands);
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
#undef CPU_INSTRUCTION
