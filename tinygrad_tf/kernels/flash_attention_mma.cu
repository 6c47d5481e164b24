// FlashAttention on tensor cores: float16 or bfloat16 operands, float32 accumulation, sm_80 and later.
//
//     S = scale * Q K^T      P = softmax over the keys that a query sees      O = P V
//
// Read flash_attention.cu first: same kernels, same arguments, same tiles streaming past, same two products,
//
//     dot_rows     s[r][c]    = sum over d of A[r][d] B[c][d]      Q K^T, K Q^T, dO V^T, V dO^T
//     add_product  acc[r][d] += sum over c of P[r][c] X[c][d]      P V, P^T dO, dS^T Q, dS K
//
// but one instruction, mma.sync.m16n8k16, now multiplies a 16 x 16 by a 16 x 8 matrix with the registers of a whole warp.
//
// Who holds what. With g = lane / 4 and t = lane % 4, lane 4g + t of the warp holds these elements of a result:
//
//              column 0  1    2  3    4  5    6  7
//        row 0      lane 0   lane 1   lane 2   lane 3         c[0], c[1]: row g,     columns 2t and 2t + 1
//        row 1      lane 4   lane 5   lane 6   lane 7         c[2], c[3]: row g + 8, columns 2t and 2t + 1
//        ...
//        row 7      lane 28  lane 29  lane 30  lane 31
//        row 8      lane 0   lane 1   lane 2   lane 3     <-  the same again for rows 8 to 15
//        ...
//
// Left operand, 16 rows x 16 deep, two 16-bit values in a register: the same picture four times over,
//
//        a[0]: rows 0-7,  depth 0-7      a[2]: rows 0-7,  depth 8-15
//        a[1]: rows 8-15, depth 0-7      a[3]: rows 8-15, depth 8-15
//
// Right operand, 16 deep x 8 columns: b0 (depth 0-7) and b1 (depth 8-15); lane 4g + t holds depths 2t, 2t + 1 of column g.
//
// So two results side by side (16 x 16), rounded to 16 bits, are already a left operand: P and dS go from the product that
// makes them into the product that uses them and never leave the registers. And the four lanes of a row are neighbours
// ("a quad"): a row's maximum needs two shuffles.
//
// A warp owns STRIPS strips of 16 rows, whole. Every right operand that it loads serves all its strips, so two strips halve
// the shared-memory traffic of a product and double the registers.
//
// Compile-time parameters:
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef BF16
#define BF16 0              // 1: bfloat16, 0: float16
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef FORWARD_STRIPS
#define FORWARD_STRIPS 2    // a block of the forward pass owns 16 * FORWARD_STRIPS * WARPS queries ...
#endif
#ifndef FORWARD_TILE
#define FORWARD_TILE 64     // ... and this many keys stream past at a time
#endif
#ifndef BACKWARD_STRIPS
#define BACKWARD_STRIPS 1
#endif
#ifndef BACKWARD_TILE
#define BACKWARD_TILE 64
#endif

typedef unsigned short half_t;                  // the bits of a float16 or bfloat16
constexpr int D = HEAD_DIM, THREADS = 32 * WARPS;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f, LOWEST = -1e38f;
#define NEG_INF __int_as_float(0xff800000)      // the compiler that CuPy uses has no <math.h>, hence no INFINITY
static_assert(D % 16 == 0 && FORWARD_TILE % 16 == 0 && BACKWARD_TILE % 16 == 0, "the products work on blocks of 16");

// Rows of a tile in shared memory lie D + 8 values apart, not D. ldmatrix reads 16 bytes from each of 8 rows at once; the 32
// banks are 4 bytes wide and hold 128 bytes. With D = 64 all 8 rows would start in bank 0 and wait for one another; a shift
// of 16 bytes a row puts them into 8 different groups of 4 banks:
//
//        row        0    1    2    3    4     5     6     7
//        banks     0-3  4-7  8-11 ...  16-19 ...   ...  28-31
constexpr int PITCH = D + 8;

struct Stride { long long batch, head, row; };  // in elements; the last axis is contiguous, rows are 16-byte aligned

// ------------------------------------------------------------------------------------------- the instructions
#ifndef CUDA_ON_CPU                             // an emulator brings its own
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#if BF16
#define MMA_TYPES "f32.bf16.bf16.f32"
#else
#define MMA_TYPES "f32.f16.f16.f32"
#endif
__device__ __forceinline__ unsigned in_shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// c += a b: 16 x 16 by 16 x 8, fragments as in the picture above
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices from shared memory. Lane i GIVES the address of row i % 8 of matrix i / 8 and GETS, in r[m], the pair
// at row g, columns 2t and 2t + 1 of matrix m: the picture again.
__device__ __forceinline__ void ldmatrix(unsigned (&r)[4], const half_t* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(in_shared(row)) : "memory");
}
// The same, each matrix transposed: the pair at rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void ldmatrix_trans(unsigned (&r)[4], const half_t* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(in_shared(row)) : "memory");
}
// 16 bytes from global to shared memory, in the background and past the registers; zeros, and no read, unless `there`.
__device__ __forceinline__ void copy_async(half_t* to, const half_t* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(in_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// A thread's copies since its last commit become a group; wait until at most PENDING of its groups are on their way.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}
// Two floats, rounded to nearest even, in one register: `low` in the lower half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned r;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}
__device__ __forceinline__ float unpack(half_t x) {
#if BF16
    return __int_as_float((unsigned)x << 16);   // bfloat16 is the upper half of a float
#else
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
#endif
}
#endif

// ------------------------------------------------------------------------------------------------- who sees whom
// Query i stands at position p = i + offset among the keys and sees key j iff p - left <= j <= p + right, j < Tk and
// valid_tokens[j]. All of it as ints: positions stay below 2^29 and an unlimited side is 2^30, so no sum overflows.
struct Sight {
    int offset, left, right, Tk;
    const unsigned char* valid_tokens;          // of this batch element; null: every key is a real token

    __device__ __forceinline__ bool exists(int key) const { return key < Tk && (!valid_tokens || valid_tokens[key]); }
    __device__ __forceinline__ bool in_band(int query, int key) const {
        int p = query + offset;
        return p - left <= key && key <= p + right;
    }
    // Is nothing hidden between queries [q, q + queries) and keys [k, k + keys)?  Most tiles: they skip the tests above.
    __device__ __forceinline__ bool all(int q, int queries, int k, int keys) const {
        return !valid_tokens && k + keys <= Tk && q + queries - 1 + offset - left <= k && k + keys - 1 <= q + offset + right;
    }
    // Only keys [first_key, end_key) can be seen by queries [q, end), only queries [first_query, end_query) see keys [k, end).
    __device__ __forceinline__ int first_key(int q) const { return max(0, q + offset - left); }
    __device__ __forceinline__ int end_key(int end) const { return min(Tk, end + offset + right); }
    __device__ __forceinline__ int first_query(int k) const { return max(0, k - offset - right); }
    __device__ __forceinline__ int end_query(int end, int Tq) const { return min(Tq, end - offset + left); }
};
__device__ __forceinline__ Sight sight_of(int b, int offset, int left, int right, int Tk, const unsigned char* valid_tokens) {
    Sight s = {offset, left, right, Tk, valid_tokens ? valid_tokens + (long long)b * Tk : valid_tokens};
    return s;
}

// ---------------------------------------------------------------------------------------------- fragments of a warp
// 16 * STRIPS rows x COLUMNS columns of float32, spread over the warp: x[strip][block of 8 columns][element of the picture].
// A lane's rows are 8r + g (r = 0, 1, ... 2 STRIPS - 1), its columns column(c) (c = 0, 1, ... COLUMNS / 4 - 1).
#define FRAGMENTS(name, STRIPS, COLUMNS) float name[STRIPS][(COLUMNS) / 8][4]
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
__device__ __forceinline__ int row(int r) { return 8 * r + lane() / 4; }
__device__ __forceinline__ int column(int c) { return c / 2 * 8 + 2 * (lane() % 4) + c % 2; }

// visit(element, r, c) for each element that this lane holds
template <int STRIPS, int BLOCKS, class Visit>
__device__ __forceinline__ void each(float (&x)[STRIPS][BLOCKS][4], Visit visit) {
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < STRIPS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) visit(x[i][n][e], 2 * i + e / 2, 2 * n + e % 2);
}
template <int STRIPS, int BLOCKS>
__device__ __forceinline__ void clear(float (&x)[STRIPS][BLOCKS][4]) {
    each(x, [](float& y, int, int) { y = 0.f; });
}
// Hide what a query must not see. Rows are queries from q0 on and columns keys from k0 on, or the other way round.
template <bool ROWS_ARE_KEYS, int STRIPS, int BLOCKS>
__device__ __forceinline__ void hide(float (&x)[STRIPS][BLOCKS][4], const Sight& sight, int q0, int k0, float hidden) {
    each(x, [&](float& y, int r, int c) {
        int query = q0 + (ROWS_ARE_KEYS ? column(c) : row(r)), key = k0 + (ROWS_ARE_KEYS ? row(r) : column(c));
        if (!sight.in_band(query, key) || !sight.exists(key)) y = hidden;
    });
}
// The four lanes of a quad together hold a row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// ----------------------------------------------------------------------------------------------- tiles and products
// Start copying rows [first, first + ROWS) of a matrix to shared memory. Rows past the end, and rows that are no real token,
// become zeros and are not read: their weight is 0, but 0 * NaN is NaN, so what lies in padding must never reach a product.
template <int ROWS>
__device__ __forceinline__ void load_tile(half_t* tile, const half_t* from, long long row_stride, int first, int end,
                                          const unsigned char* valid_tokens) {
    constexpr int CHUNKS = D / 8;               // of 16 bytes
    static_assert(THREADS % CHUNKS == 0, "a thread keeps to its chunk of a row");
    int d = threadIdx.x % CHUNKS * 8;
#pragma unroll
    for (int r = threadIdx.x / CHUNKS; r < ROWS; r += THREADS / CHUNKS) {
        bool there = first + r < end && (!valid_tokens || valid_tokens[first + r]);
        copy_async(tile + r * PITCH + d, from + (there ? first + r : 0) * row_stride + d, there);
    }
}
// s[r][c] = sum over d of A[r][d] B[c][d]: this warp's rows of A against every row of B, both in shared memory.
template <int STRIPS, int BLOCKS>
__device__ __forceinline__ void dot_rows(float (&s)[STRIPS][BLOCKS][4], const half_t* A, const half_t* B) {
    clear(s);
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        unsigned a[STRIPS][4];
#pragma unroll
        for (int i = 0; i < STRIPS; ++i) ldmatrix(a[i], A + (16 * i + lane() % 16) * PITCH + d + lane() / 16 * 8);
#pragma unroll
        for (int n = 0; n < BLOCKS; n += 2) {
            unsigned b[4];                      // rows 8n to 8n + 7 at d and at d + 8, then rows 8n + 8 to 8n + 15 likewise
            ldmatrix(b, B + (8 * n + lane() / 16 * 8 + lane() % 8) * PITCH + d + lane() / 8 % 2 * 8);
#pragma unroll
            for (int i = 0; i < STRIPS; ++i) {
                mma(s[i][n], a[i], b[0], b[1]);
                mma(s[i][n + 1], a[i], b[2], b[3]);
            }
        }
    }
}
// acc[r][d] += sum over c of P[r][c] X[c][d]: P is in registers and is rounded here. The lane that holds P[r][c] as a result
// is the lane that must hold it as a left operand. X lies with its rows along c, hence the transposing load.
template <int STRIPS, int BLOCKS>
__device__ __forceinline__ void add_product(float (&acc)[STRIPS][D / 8][4], const float (&p)[STRIPS][BLOCKS][4], const half_t* X) {
#pragma unroll
    for (int c = 0; c < BLOCKS; c += 2) {
        unsigned a[STRIPS][4];
#pragma unroll
        for (int i = 0; i < STRIPS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) a[i][e] = pack(p[i][c + e / 2][e % 2 * 2], p[i][c + e / 2][e % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            unsigned b[4];                      // rows 8c to 8c + 7 and 8c + 8 to 8c + 15 of columns 8n.., then of columns 8n + 8..
            ldmatrix_trans(b, X + (8 * c + lane() % 16) * PITCH + 8 * n + lane() / 16 * 8);
#pragma unroll
            for (int i = 0; i < STRIPS; ++i) {
                mma(acc[i][n], a[i], b[0], b[1]);
                mma(acc[i][n + 1], a[i], b[2], b[3]);
            }
        }
    }
}
// This warp's rows, rounded, to global memory. They pass through shared memory, so that a thread writes 16 bytes in a row where
// a fragment has 4. `rows` held a left operand of this warp, so the warp alone has to agree, not the block.
template <int STRIPS>
__device__ __forceinline__ void store_rows(half_t* to, long long row_stride, int first, int end, half_t* rows, float (&x)[STRIPS][D / 8][4]) {
    constexpr int CHUNKS = D / 8;
    __syncwarp();                               // every lane has read what it wanted from these rows
#pragma unroll
    for (int r = 0; r < 2 * STRIPS; ++r)
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *reinterpret_cast<unsigned*>(rows + row(r) * PITCH + column(2 * n)) = pack(x[r / 2][n][r % 2 * 2], x[r / 2][n][r % 2 * 2 + 1]);
    __syncwarp();                               // and written what it has
#pragma unroll
    for (int i = lane(); i < 16 * STRIPS * CHUNKS; i += 32) {
        int r = i / CHUNKS, d = i % CHUNKS * 8;
        if (first + r < end)
            *reinterpret_cast<uint4*>(to + (first + r) * row_stride + d) = *reinterpret_cast<const uint4*>(rows + r * PITCH + d);
    }
}

// ------------------------------------------------------------------------------------------------------ forward
// A block owns the rows of one tile of Q; K and V stream past. Two stages of each: while the products work on one, the next
// tile is on its way into the other.
//
//        stage 0:  [copy 0][work 0][copy 2][work 2] ...
//        stage 1:          [copy 1][work 1][copy 3] ...         one barrier at each step
//
// Online softmax in base 2 (exp2 is an instruction): m is a row's maximum so far, l its sum, acc its output, both relative to
// m. Where a tile raises the maximum, what was summed shrinks by 2^(old m - new m). m starts below every score but finite:
// while a row has seen no key, 2^(-inf - m) is 0 and m - m is 0, where -inf - -inf would be NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
flash_forward(const half_t* __restrict__ q, const half_t* __restrict__ k, const half_t* __restrict__ v,
              const unsigned char* __restrict__ valid_tokens, half_t* __restrict__ o, float* __restrict__ lse,
              Stride sq, Stride sk, Stride sv, Stride so,
              int H, int Hkv, int Tq, int Tk, int query_offset, int left, int right, float scale) {
    constexpr int STRIPS = FORWARD_STRIPS, BN = FORWARD_TILE, WM = 16 * STRIPS, BM = WM * WARPS, STAGE = BN * PITCH;
    DYNAMIC_SHARED(half_t, shared);
    half_t *Qs = shared, *Ks = Qs + BM * PITCH, *Vs = Ks + 2 * STAGE;
    int b = blockIdx.z, h = blockIdx.y, hkv = h / (H / Hkv);
    int m0 = (gridDim.x - 1 - blockIdx.x) * BM;              // causal: the longest rows first
    int mine = WM * warp(), q0 = m0 + mine;                  // this warp's first row: in the tile, in the sequence
    q += b * sq.batch + h * sq.head;
    k += b * sk.batch + hkv * sk.head;
    v += b * sv.batch + hkv * sv.head;
    Sight sight = sight_of(b, query_offset, left, right, Tk, valid_tokens);
    int first = sight.first_key(m0), end = sight.end_key(min(m0 + BM, Tq));

    auto fetch = [&](int n0, int stage) {
        load_tile<BN>(Ks + stage * STAGE, k, sk.row, n0, Tk, sight.valid_tokens);
        load_tile<BN>(Vs + stage * STAGE, v, sv.row, n0, Tk, sight.valid_tokens);
        copy_commit();
    };
    if (first < end) {
        load_tile<BM>(Qs, q, sq.row, m0, Tq, nullptr);
        fetch(first, 0);
    }
    FRAGMENTS(acc, STRIPS, D);
    float m[2 * STRIPS], l[2 * STRIPS];
    clear(acc);
#pragma unroll
    for (int r = 0; r < 2 * STRIPS; ++r) m[r] = LOWEST, l[r] = 0.f;

    for (int n0 = first, stage = 0; n0 < end; n0 += BN, stage ^= 1) {
        copy_wait<0>();                                      // my part of this tile is here,
        __syncthreads();                                     // everyone's is; and everyone is done with the other stage
        if (n0 + BN < end) fetch(n0 + BN, stage ^ 1);

        FRAGMENTS(s, STRIPS, BN);
        dot_rows(s, Qs + mine * PITCH, Ks + stage * STAGE);
        each(s, [&](float& x, int, int) { x *= scale * LOG2E; });
        if (!sight.all(q0, WM, n0, BN)) hide<false>(s, sight, q0, n0, NEG_INF);

        float top[2 * STRIPS], decay[2 * STRIPS];
#pragma unroll
        for (int r = 0; r < 2 * STRIPS; ++r) top[r] = m[r];
        each(s, [&](float& x, int r, int) { top[r] = fmaxf(top[r], x); });
#pragma unroll
        for (int r = 0; r < 2 * STRIPS; ++r) {
            top[r] = quad_max(top[r]);
            decay[r] = exp2f(m[r] - top[r]);
            l[r] *= decay[r];
            m[r] = top[r];
        }
        each(s, [&](float& x, int r, int) { x = exp2f(x - m[r]), l[r] += x; });
        each(acc, [&](float& x, int r, int) { x *= decay[r]; });
        add_product(acc, s, Vs + stage * STAGE);
    }

    lse += ((long long)b * H + h) * Tq;
#pragma unroll
    for (int r = 0; r < 2 * STRIPS; ++r) {
        l[r] = quad_sum(l[r]);                               // each lane summed its own columns until now
        if (lane() % 4 == 0 && q0 + row(r) < Tq) lse[q0 + row(r)] = l[r] == 0.f ? NEG_INF : m[r] * LN2 + logf(l[r]);
    }
    each(acc, [&](float& x, int r, int) { x *= l[r] == 0.f ? 0.f : 1.f / l[r]; });    // no key at all: zeros
    store_rows(o + b * so.batch + h * so.head, so.row, q0, Tq, Qs + mine * PITCH, acc);
}

// ----------------------------------------------------------------------------------------------------- backward
//     delta_i = sum over d of dO_i O_i        P = exp(S - lse)        dS = P (dO V^T - delta)
//     dV = P^T dO        dK = scale dS^T Q        dQ = scale dS K
// dK and dV sum over queries, dQ over keys: two kernels, each of which owns what it sums and makes P anew. Seven products
// where one kernel would need five, but that one would add to dQ from many blocks at once, in an order that changes from
// run to run. Here nothing does: the same input gives the same bits.
//
// __launch_bounds__(threads, n): n blocks are to share a multiprocessor, so a thread may have 65536 / (n threads) registers.
// Left to itself, the compiler aims at one block more, lacks a few registers and parks them in slow memory (a "spill").

// A warp per row.
extern "C" __global__ void
flash_delta(const half_t* __restrict__ o, const half_t* __restrict__ d_o, float* __restrict__ delta,
            Stride so, Stride sdo, int H, int Tq, long long rows) {
    long long at = (long long)blockIdx.x * (blockDim.x / 32) + warp();
    if (at >= rows) return;
    long long b = at / Tq / H, h = at / Tq % H, i = at % Tq;
    o += b * so.batch + h * so.head + i * so.row;
    d_o += b * sdo.batch + h * sdo.head + i * sdo.row;
    float sum = 0.f;
    for (int d = 2 * lane(); d < D; d += 64) {               // two values, 4 bytes, a lane
        unsigned x = *reinterpret_cast<const unsigned*>(o + d), y = *reinterpret_cast<const unsigned*>(d_o + d);
        sum = fmaf(unpack(x & 0xffff), unpack(y & 0xffff), sum);
        sum = fmaf(unpack(x >> 16), unpack(y >> 16), sum);
    }
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane() == 0) delta[at] = sum;
}

// A block owns a tile of keys; the queries of all H / Hkv heads that share these keys stream past, head after head. Rows of
// the products are keys, columns are queries, so that P^T and dS^T come out as they are needed.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_dkdv(const half_t* __restrict__ q, const half_t* __restrict__ k, const half_t* __restrict__ v,
           const half_t* __restrict__ d_o, const float* __restrict__ lse, const float* __restrict__ delta,
           const unsigned char* __restrict__ valid_tokens, half_t* __restrict__ dk, half_t* __restrict__ dv,
           Stride sq, Stride sk, Stride sv, Stride sdo, Stride sdk, Stride sdv,
           int H, int Hkv, int Tq, int Tk, int query_offset, int left, int right, float scale) {
    constexpr int STRIPS = BACKWARD_STRIPS, BN = BACKWARD_TILE, WM = 16 * STRIPS, BM = WM * WARPS, STAGE = BN * PITCH;
    DYNAMIC_SHARED(half_t, shared);
    half_t *Ks = shared, *Vs = Ks + BM * PITCH, *Qs = Vs + BM * PITCH, *Os = Qs + 2 * STAGE;
    float *lse2 = reinterpret_cast<float*>(Os + 2 * STAGE), *deltas = lse2 + 2 * BN;      // two stages of both
    int b = blockIdx.z, hkv = blockIdx.y, group = H / Hkv;
    int n0 = blockIdx.x * BM, mine = WM * warp(), k0 = n0 + mine;
    q += b * sq.batch;
    d_o += b * sdo.batch;
    lse += (long long)b * H * Tq;
    delta += (long long)b * H * Tq;
    Sight sight = sight_of(b, query_offset, left, right, Tk, valid_tokens);
    int first = sight.first_query(n0), end = sight.end_query(min(n0 + BM, Tk), Tq);
    int tiles = first < end ? (end - first + BN - 1) / BN : 0, steps = group * tiles;

    auto fetch = [&](int step, int stage) {
        int h = hkv * group + step / tiles, m0 = first + step % tiles * BN;
        load_tile<BN>(Qs + stage * STAGE, q + h * sq.head, sq.row, m0, Tq, nullptr);
        load_tile<BN>(Os + stage * STAGE, d_o + h * sdo.head, sdo.row, m0, Tq, nullptr);
        copy_commit();
        for (int i = threadIdx.x; i < BN; i += THREADS) {    // seen after the next barrier, like the tiles
            bool there = m0 + i < Tq;
            long long at = (long long)h * Tq + m0 + i;
            lse2[stage * BN + i] = there ? lse[at] * LOG2E : 0.f;
            deltas[stage * BN + i] = there ? delta[at] : 0.f;
        }
    };
    if (steps) {
        load_tile<BM>(Ks, k + b * sk.batch + hkv * sk.head, sk.row, n0, Tk, sight.valid_tokens);
        load_tile<BM>(Vs, v + b * sv.batch + hkv * sv.head, sv.row, n0, Tk, sight.valid_tokens);
        fetch(0, 0);
    }
    FRAGMENTS(grad_k, STRIPS, D);
    FRAGMENTS(grad_v, STRIPS, D);
    clear(grad_k);
    clear(grad_v);

    for (int step = 0; step < steps; ++step) {
        int stage = step % 2, m0 = first + step % tiles * BN;
        copy_wait<0>();
        __syncthreads();
        if (step + 1 < steps) fetch(step + 1, stage ^ 1);

        FRAGMENTS(p, STRIPS, BN);
        FRAGMENTS(ds, STRIPS, BN);
        dot_rows(p, Ks + mine * PITCH, Qs + stage * STAGE);
        each(p, [&](float& x, int, int c) { x = exp2f(x * (scale * LOG2E) - lse2[stage * BN + column(c)]); });
        if (!sight.all(m0, BN, k0, WM)) hide<true>(p, sight, m0, k0, 0.f);
        add_product(grad_v, p, Os + stage * STAGE);
        dot_rows(ds, Vs + mine * PITCH, Os + stage * STAGE);
        each(ds, [&](float& x, int r, int c) { x = p[r / 2][c / 2][r % 2 * 2 + c % 2] * (x - deltas[stage * BN + column(c)]); });
        add_product(grad_k, ds, Qs + stage * STAGE);
    }
    each(grad_k, [&](float& x, int, int) { x *= scale; });
    store_rows(dv + b * sdv.batch + hkv * sdv.head, sdv.row, k0, Tk, Vs + mine * PITCH, grad_v);
    store_rows(dk + b * sdk.batch + hkv * sdk.head, sdk.row, k0, Tk, Ks + mine * PITCH, grad_k);
}

// A block owns a tile of queries, as in the forward pass; keys and values stream past.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
flash_dq(const half_t* __restrict__ q, const half_t* __restrict__ k, const half_t* __restrict__ v,
         const half_t* __restrict__ d_o, const float* __restrict__ lse, const float* __restrict__ delta,
         const unsigned char* __restrict__ valid_tokens, half_t* __restrict__ dq,
         Stride sq, Stride sk, Stride sv, Stride sdo, Stride sdq,
         int H, int Hkv, int Tq, int Tk, int query_offset, int left, int right, float scale) {
    constexpr int STRIPS = BACKWARD_STRIPS, BN = BACKWARD_TILE, WM = 16 * STRIPS, BM = WM * WARPS, STAGE = BN * PITCH;
    DYNAMIC_SHARED(half_t, shared);
    half_t *Qs = shared, *Os = Qs + BM * PITCH, *Ks = Os + BM * PITCH, *Vs = Ks + 2 * STAGE;
    int b = blockIdx.z, h = blockIdx.y, hkv = h / (H / Hkv);
    int m0 = (gridDim.x - 1 - blockIdx.x) * BM, mine = WM * warp(), q0 = m0 + mine;
    k += b * sk.batch + hkv * sk.head;
    v += b * sv.batch + hkv * sv.head;
    lse += ((long long)b * H + h) * Tq;
    delta += ((long long)b * H + h) * Tq;
    Sight sight = sight_of(b, query_offset, left, right, Tk, valid_tokens);
    int first = sight.first_key(m0), end = sight.end_key(min(m0 + BM, Tq));

    auto fetch = [&](int n0, int stage) {
        load_tile<BN>(Ks + stage * STAGE, k, sk.row, n0, Tk, sight.valid_tokens);
        load_tile<BN>(Vs + stage * STAGE, v, sv.row, n0, Tk, sight.valid_tokens);
        copy_commit();
    };
    if (first < end) {
        load_tile<BM>(Qs, q + b * sq.batch + h * sq.head, sq.row, m0, Tq, nullptr);
        load_tile<BM>(Os, d_o + b * sdo.batch + h * sdo.head, sdo.row, m0, Tq, nullptr);
        fetch(first, 0);
    }
    FRAGMENTS(grad_q, STRIPS, D);
    float row_lse2[2 * STRIPS], row_delta[2 * STRIPS];
    clear(grad_q);
#pragma unroll
    for (int r = 0; r < 2 * STRIPS; ++r) {
        int i = q0 + row(r);
        row_lse2[r] = i < Tq ? lse[i] * LOG2E : 0.f;
        row_delta[r] = i < Tq ? delta[i] : 0.f;
    }

    for (int n0 = first, stage = 0; n0 < end; n0 += BN, stage ^= 1) {
        copy_wait<0>();
        __syncthreads();
        if (n0 + BN < end) fetch(n0 + BN, stage ^ 1);

        FRAGMENTS(p, STRIPS, BN);
        FRAGMENTS(ds, STRIPS, BN);
        dot_rows(p, Qs + mine * PITCH, Ks + stage * STAGE);
        each(p, [&](float& x, int r, int) { x = exp2f(x * (scale * LOG2E) - row_lse2[r]); });
        if (!sight.all(q0, WM, n0, BN)) hide<false>(p, sight, q0, n0, 0.f);
        dot_rows(ds, Os + mine * PITCH, Vs + stage * STAGE);
        each(ds, [&](float& x, int r, int c) { x = p[r / 2][c / 2][r % 2 * 2 + c % 2] * (x - row_delta[r]); });
        add_product(grad_q, ds, Ks + stage * STAGE);
    }
    each(grad_q, [&](float& x, int, int) { x *= scale; });
    store_rows(dq + b * sdq.batch + h * sdq.head, sdq.row, q0, Tq, Qs + mine * PITCH, grad_q);
}
