// CUDA C++ on a CPU: as much of the language as kernels use, in plain C++ that g++ compiles.
//
// A CUDA thread is a fiber: a function with a stack of its own that runs until it reaches a barrier or a warp operation and
// then hands over to the scheduler (scheduler.cpp). With checks on, every load and store calls the checker (checker.cpp).
#pragma once
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define CUDA_ON_CPU 1

// ---- keywords ---------------------------------------------------------------------------------------------------------
#ifndef CPU_FINDING_KERNELS                     // (compiler.py looks for these two in the preprocessed source)
#define __global__
#define __launch_bounds__(...)
#endif
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
// One variable per block: all fibers of a block run in one thread of the operating system, one block after the other. The
// compiler lays all thread-local variables side by side, where the checker finds them, 128 bytes apart at least.
#define __shared__ static thread_local __attribute__((aligned(128)))
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(cpu::dynamic_shared())

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
extern const uint3 threadIdx, blockIdx;         // constant for a thread; the scheduler sets them when it switches to another
extern const dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---- what the scheduler and the checker offer --------------------------------------------------------------------------
namespace cpu {
unsigned char* dynamic_shared();
void block_barrier(int line);
int block_vote(int line, int predicate, char how);              // 'c'ount, 'a'nd, 'o'r
// All lanes in `mask` meet; each lays `bytes` of mail into its box. orders: what they stored before is seen by all after.
void exchange(int line, const char* op, unsigned mask, const void* mail, unsigned bytes, bool orders = false, bool whole_warp = false);
const void* mail_from(int lane);                // what that lane brought to the exchange just made
void take_mail(int lane, void* to, unsigned bytes);
unsigned who_came();                            // the lanes that were there
void check_atomic(const void* p, unsigned bytes);
[[noreturn]] void failed(int line, const char* what);

inline int thread_number() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
inline int lane() { return thread_number() % 32; }

template <class T> T shuffle(int line, const char* op, unsigned mask, T x, int from, int width) {
    static_assert(sizeof(T) <= 8, "a shuffle moves 4 or 8 bytes");
    exchange(line, op, mask, &x, sizeof x);
    int first = lane() / width * width;         // a lane beyond the ends of its group of `width` gets its own value back
    take_mail(from < first || from >= first + width ? lane() : from, &x, sizeof x);
    return x;
}
inline unsigned ballot(int line, const char* op, unsigned mask, int predicate) {
    exchange(line, op, mask, &predicate, sizeof predicate);
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i)
        if (who_came() >> i & 1) { int p; take_mail(i, &p, sizeof p); votes |= unsigned(p != 0) << i; }
    return votes;
}
template <class T, class F> __attribute__((no_sanitize("thread", "undefined"), noinline)) T change(T* p, F next) {
    T old = *p;
    *p = next(old);
    return old;
}
template <class T, class F> __attribute__((always_inline)) inline T atomic(T* p, F next) {
    check_atomic(p, sizeof(T));                 // called from the kernel's own line; the access itself is not checked once more
    return change(p, next);
}
}  // namespace cpu

// ---- barriers, shuffles, votes -----------------------------------------------------------------------------------------
#define __syncthreads() cpu::block_barrier(__LINE__)
#define __syncthreads_count(p) cpu::block_vote(__LINE__, p, 'c')
#define __syncthreads_and(p) cpu::block_vote(__LINE__, p, 'a')
#define __syncthreads_or(p) cpu::block_vote(__LINE__, p, 'o')
#define CPU_FULL_MASK(...) (unsigned(__VA_ARGS__ + 0) ? unsigned(__VA_ARGS__ + 0) : 0xffffffffu)     // __syncwarp() is __syncwarp(-1)
#define __syncwarp(...) cpu::exchange(__LINE__, "__syncwarp", CPU_FULL_MASK(__VA_ARGS__), nullptr, 0, true)
#define CPU_WIDTH(...) ((__VA_ARGS__ + 0) ? (__VA_ARGS__ + 0) : 32)
#define __shfl_sync(mask, x, from, ...) \
    cpu::shuffle(__LINE__, "__shfl_sync", mask, x, cpu::lane() / CPU_WIDTH(__VA_ARGS__) * CPU_WIDTH(__VA_ARGS__) + ((from) & (CPU_WIDTH(__VA_ARGS__) - 1)), CPU_WIDTH(__VA_ARGS__))
#define __shfl_xor_sync(mask, x, bits, ...) cpu::shuffle(__LINE__, "__shfl_xor_sync", mask, x, cpu::lane() ^ (bits), CPU_WIDTH(__VA_ARGS__))
#define __shfl_down_sync(mask, x, by, ...) cpu::shuffle(__LINE__, "__shfl_down_sync", mask, x, cpu::lane() + int(by), CPU_WIDTH(__VA_ARGS__))
#define __shfl_up_sync(mask, x, by, ...) cpu::shuffle(__LINE__, "__shfl_up_sync", mask, x, cpu::lane() - int(by), CPU_WIDTH(__VA_ARGS__))
#define __ballot_sync(mask, p) cpu::ballot(__LINE__, "__ballot_sync", mask, p)
#define __any_sync(mask, p) (cpu::ballot(__LINE__, "__any_sync", mask, p) != 0)
#define __all_sync(mask, p) (cpu::ballot(__LINE__, "__all_sync", mask, !(p)) == 0)
inline void __threadfence() {}
inline void __threadfence_block() {}
extern "C" int printf(const char* format, ...);         // of the scheduler, as is what assert calls: also where <cstdio> or <cassert> follow
#define __trap() cpu::failed(__LINE__, "__trap()")

// ---- vectors: copied in one access of all their bytes, as on the GPU ------------------------------------------------------
namespace cpu {
template <class T, int N> struct Whole { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <class T> struct alignas(2 * sizeof(T)) Vector2 {
    union { struct { T x, y; }; typename Whole<T, 2>::type whole; };
    Vector2() = default;
    constexpr Vector2(T x, T y) : whole{x, y} {}
    Vector2(const Vector2& other) : whole(other.whole) {}
    Vector2& operator=(const Vector2& other) { whole = other.whole; return *this; }
};
template <class T> struct Vector3 { T x, y, z; };
template <class T> struct alignas(4 * sizeof(T)) Vector4 {
    union { struct { T x, y, z, w; }; typename Whole<T, 4>::type whole; };
    Vector4() = default;
    constexpr Vector4(T x, T y, T z, T w) : whole{x, y, z, w} {}
    Vector4(const Vector4& other) : whole(other.whole) {}
    Vector4& operator=(const Vector4& other) { whole = other.whole; return *this; }
};
}  // namespace cpu
#define CPU_VECTORS(T, name)                                                                                  \
    using name##2 = cpu::Vector2<T>; using name##4 = cpu::Vector4<T>;                                         \
    constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }                                             \
    constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CPU_VECTORS(float, float)
CPU_VECTORS(int, int)
CPU_VECTORS(unsigned, uint)
CPU_VECTORS(short, short)
CPU_VECTORS(unsigned short, ushort)
CPU_VECTORS(signed char, char)
CPU_VECTORS(unsigned char, uchar)
#undef CPU_VECTORS
using float3 = cpu::Vector3<float>;
using int3 = cpu::Vector3<int>;
using double2 = cpu::Vector2<double>;
using longlong2 = cpu::Vector2<long long>;
constexpr float3 make_float3(float x, float y, float z) { return {x, y, z}; }
constexpr double2 make_double2(double x, double y) { return {x, y}; }

// ---- atomics: one fiber runs at a time, so a plain read and write is one step; the checker must know that it is meant so -----
#define CPU_ATOMIC template <class T, class V = T> __attribute__((always_inline)) inline T
CPU_ATOMIC atomicAdd(T* p, V v) { return cpu::atomic(p, [=](T old) { return T(old + v); }); }
CPU_ATOMIC atomicSub(T* p, V v) { return cpu::atomic(p, [=](T old) { return T(old - v); }); }
CPU_ATOMIC atomicExch(T* p, V v) { return cpu::atomic(p, [=](T) { return T(v); }); }
CPU_ATOMIC atomicMin(T* p, V v) { return cpu::atomic(p, [=](T old) { return T(v) < old ? T(v) : old; }); }
CPU_ATOMIC atomicMax(T* p, V v) { return cpu::atomic(p, [=](T old) { return old < T(v) ? T(v) : old; }); }
CPU_ATOMIC atomicAnd(T* p, V v) { return cpu::atomic(p, [=](T old) { return T(old & v); }); }
CPU_ATOMIC atomicOr(T* p, V v) { return cpu::atomic(p, [=](T old) { return T(old | v); }); }
CPU_ATOMIC atomicXor(T* p, V v) { return cpu::atomic(p, [=](T old) { return T(old ^ v); }); }
CPU_ATOMIC atomicInc(T* p, V top) { return cpu::atomic(p, [=](T old) { return old >= T(top) ? T(0) : T(old + 1); }); }
CPU_ATOMIC atomicDec(T* p, V top) { return cpu::atomic(p, [=](T old) { return old == 0 || old > T(top) ? T(top) : T(old - 1); }); }
template <class T, class A, class B> __attribute__((always_inline)) inline T atomicCAS(T* p, A expected, B v) {
    return cpu::atomic(p, [=](T old) { return old == T(expected) ? T(v) : old; });
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------------
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    return std::common_type_t<A, B>(b) < std::common_type_t<A, B>(a) ? b : a;
}
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
    return std::common_type_t<A, B>(a) < std::common_type_t<A, B>(b) ? b : a;
}
namespace cpu {
template <class To, class From> inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
}  // namespace cpu
inline float __int_as_float(int x) { return cpu::same_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cpu::same_bits<float>(x); }
inline int __float_as_int(float x) { return cpu::same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cpu::same_bits<unsigned>(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 1.f ? 1.f : x > 0.f ? x : 0.f; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline double rsqrt(double x) { return 1. / sqrt(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
    return y;
}
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline void __stcg(T* p, T x) { *p = x; }
template <class T> inline void __stcs(T* p, T x) { *p = x; }

// ---- how Python learns what a kernel takes, and calls it --------------------------------------------------------------------
namespace cpu {
struct Parameter { char kind, pointer, constant, element_bytes; unsigned bytes; };     // kind: f, i, V (a struct), ? (void)
template <class T> struct Element { using type = T; };
template <class T> struct Element<Vector2<T>> { using type = T; };
template <class T> struct Element<Vector3<T>> { using type = T; };
template <class T> struct Element<Vector4<T>> { using type = T; };
template <class T> struct Kind { static constexpr char value = std::is_floating_point_v<T> ? 'f' : std::is_integral_v<T> || std::is_enum_v<T> ? 'i' : 'V'; };
template <> struct Kind<void> { static constexpr char value = '?'; };
template <class T> constexpr unsigned bytes_of() { if constexpr (std::is_void_v<T>) return 1; else return sizeof(T); }
template <class A> constexpr Parameter describe() {
    using T = std::remove_pointer_t<A>;
    using E = typename Element<std::remove_cv_t<T>>::type;
    return {Kind<std::conditional_t<std::is_pointer_v<A>, E, std::remove_cv_t<T>>>::value, std::is_pointer_v<A>, std::is_const_v<T>, char(bytes_of<E>()), bytes_of<T>()};
}
typedef void (*Body)(void** arguments);
struct Entry { Body body; const Parameter* parameters; int count, max_threads; };

template <class... A, size_t... I>              // unpacking the arguments is not the kernel's doing: not checked
__attribute__((no_sanitize("thread", "undefined"))) void call(void (*f)(A...), void** a, std::index_sequence<I...>) {
    f(*static_cast<std::remove_const_t<A>*>(a[I])...);
}
template <auto* kernel> struct Signature;
template <class... A, void (*kernel)(A...)> struct Signature<kernel> {
    static constexpr int count = sizeof...(A);
    static constexpr Parameter parameters[count + 1] = {describe<A>()...};
    __attribute__((no_sanitize("thread", "undefined"))) static void body(void** arguments) {
        call(kernel, arguments, std::index_sequence_for<A...>());
    }
};
template <auto* kernel> constexpr Entry entry(int max_threads = 0, int = 0, int = 0) {
    using S = Signature<kernel>;
    return {S::body, S::parameters, S::count, max_threads};
}
}  // namespace cpu
