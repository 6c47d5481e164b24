// `__nv_bfloat16`: the upper half of a float32, computed with in float32 and rounded to nearest even after each operation.
#pragma once
#include "cuda_on_cpu.h"

namespace cpu {
inline float bfloat16_to_float(unsigned short x) { return same_bits<float>(unsigned(x) << 16); }
inline unsigned short float_to_bfloat16(float x) {
    unsigned u = same_bits<unsigned>(x);
    return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
}  // namespace cpu

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) : bits(cpu::float_to_bfloat16(x)) {}
    operator float() const { return cpu::bfloat16_to_float(bits); }
    __nv_bfloat16& operator+=(float x) { return *this = __nv_bfloat16(float(*this) + x); }
    __nv_bfloat16& operator-=(float x) { return *this = __nv_bfloat16(float(*this) - x); }
    __nv_bfloat16& operator*=(float x) { return *this = __nv_bfloat16(float(*this) * x); }
    __nv_bfloat16& operator/=(float x) { return *this = __nv_bfloat16(float(*this) / x); }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
template <> struct cpu::Kind<__nv_bfloat16> { static constexpr char value = 'b'; };

inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { __nv_bfloat16 b; b.bits = x; return b; }
