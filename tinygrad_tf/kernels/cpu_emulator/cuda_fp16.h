// `half`: 16 bits, computed with in float32 and rounded to nearest even after each operation.
#pragma once
#include "cuda_on_cpu.h"

namespace cpu {
inline float half_to_float(unsigned short x) { return float(same_bits<_Float16>(x)); }
inline unsigned short float_to_half(float x) { return same_bits<unsigned short>(_Float16(x)); }
}  // namespace cpu

struct __half {
    unsigned short bits;
    __half() = default;
    __half(float x) : bits(cpu::float_to_half(x)) {}
    operator float() const { return cpu::half_to_float(bits); }
    __half& operator+=(float x) { return *this = __half(float(*this) + x); }
    __half& operator-=(float x) { return *this = __half(float(*this) - x); }
    __half& operator*=(float x) { return *this = __half(float(*this) * x); }
    __half& operator/=(float x) { return *this = __half(float(*this) / x); }
};
struct alignas(4) __half2 {
    __half x, y;
};
using half = __half;
using half2 = __half2;
template <> struct cpu::Kind<__half> { static constexpr char value = 'f'; };

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline __half __hadd(__half a, __half b) { return float(a) + float(b); }
inline __half __hsub(__half a, __half b) { return float(a) - float(b); }
inline __half __hmul(__half a, __half b) { return float(a) * float(b); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short x) { __half h; h.bits = x; return h; }
