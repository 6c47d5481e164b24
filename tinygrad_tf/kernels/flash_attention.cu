// Flash attention, forward and backward, in float32 and plain CUDA C++.                          (docs/kernels.md; guide 10.5)
//
//     O = softmax(scale · Q Kᵀ) V, over the keys that a query may see     Q, O: [B, H, Tq, Dh]     K, V: [B, Hkv, Tk, Dh]
//
// The matrix of scores, [Tq, Tk], never exists. A block of 128 threads owns a tile of BM queries and walks over the keys,
// BN at a time, with a softmax that is corrected as it goes. All the arithmetic is in two products of tiles:
//
//     dot_rows       s[r][c]   = Σ_d A[r][d] · B[c][d]         Q Kᵀ,  dO Vᵀ                       (sum over the head)
//     add_product    acc[r][d] += Σ_c P[r][c] · X[c][d]        P V,  dS K,  Pᵀ dO,  dSᵀ Q         (sum over the streamed tile)
//
// Threads lie as TY rows of TX neighbours. A thread computes the scores at rows ty + TY·i and columns tx + TX·j: the TX
// threads that share a row are in one warp, so that a maximum over the row is log2(TX) shuffles.
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef BLOCK_N
#define BLOCK_N 64
#endif

constexpr int D = HEAD_DIM;
constexpr int BM = BLOCK_M;                         // rows that a block owns: queries, in flash_dkdv keys
constexpr int BN = BLOCK_N;                         // rows that it streams through shared memory at a time: the others
constexpr int THREADS = 128;
constexpr int TX = D < 32 ? 4 : 8;                  // threads that share a row; each has at least four of its D columns
constexpr int TY = THREADS / TX;
constexpr int RM = BM / TY, RN = BN / TX;           // a thread's share of a tile of scores: RM rows, RN columns
constexpr int RV = D / (4 * TX);                    // ... and of an output row: RV times 4 columns
constexpr int LD = D + 4;                           // distance of two rows of a tile in shared memory. The 4 more let 8 threads
                                                    // read 8 rows at once without two of them meeting in one memory bank
constexpr int LDP = BN + TX;                        // the same for P
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
static_assert(D % (4 * TX) == 0 && BM % TY == 0 && BN % TX == 0 && BN % 4 == 0, "HEAD_DIM, BLOCK_M, BLOCK_N");

#define NEG_INF __int_as_float(0xff800000)          // no header, hence no INFINITY
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; ++i)      // unrolled, so that arrays indexed by i stay in registers
#ifndef DYNAMIC_SHARED                              // the emulator has its own
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#endif

struct Stride { long long batch, head, row; };      // distances in elements; the last axis has none. 64 bits: B·H·T·Dh may exceed 2³¹

__device__ __forceinline__ int tx() { return threadIdx.x % TX; }
__device__ __forceinline__ int ty() { return threadIdx.x / TX; }
__device__ __forceinline__ int row(int i) { return ty() + TY * i; }
__device__ __forceinline__ int column(int j) { return tx() + TX * j; }

// ---- who sees whom ----------------------------------------------------------------------------------------------------

// Query i stands at position i + offset among the keys, and sees from `left` keys before it to `right` keys behind it.
struct Band {
    int Tq, Tk, offset, left, right;
    const unsigned char* valid;                     // [Tk] of this batch: 0 for padding; or null

    __device__ __forceinline__ bool sees(int i, int j) const {
        int p = i + offset;
        return i < Tq && j < Tk && p - left <= j && j <= p + right && (!valid || valid[j]);
    }
    // Do all queries of [i0, i1) see all keys of [j0, j1)? Most tiles are such, and skip the questions above.
    __device__ __forceinline__ bool sees_all(int i0, int i1, int j0, int j1) const {
        return i1 <= Tq && j1 <= Tk && i1 - 1 + offset - left <= j0 && j1 - 1 <= i0 + offset + right && !valid;
    }
    // The keys that some query of [i0, i1) sees lie in [first_key, end_key), the queries that see some key of [j0, j1) likewise.
    __device__ __forceinline__ int first_key(int i0) const { return max(0, i0 + offset - left); }
    __device__ __forceinline__ int end_key(int i1) const { return min(Tk, min(i1, Tq) + offset + right); }
    __device__ __forceinline__ int first_query(int j0) const { return max(0, j0 - right - offset); }
    __device__ __forceinline__ int end_query(int j1) const { return min(Tq, min(j1, Tk) + left - offset); }
};

// ---- tiles ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float4& four(float& x) { return reinterpret_cast<float4&>(x); }      // 16 bytes in one instruction
__device__ __forceinline__ const float4& four(const float& x) { return reinterpret_cast<const float4&>(x); }
__device__ __forceinline__ float4 zeros() { return make_float4(0.f, 0.f, 0.f, 0.f); }

// Rows [first, first + ROWS) of a matrix → shared memory; rows from `end` on are 0.
template <int ROWS>
__device__ void load_tile(float* tile, const float* matrix, long long row_stride, int first, int end) {
    for (int i = threadIdx.x; i < ROWS * (D / 4); i += THREADS) {
        int r = i / (D / 4), d = i % (D / 4) * 4;
        four(tile[r * LD + d]) = first + r < end ? four(matrix[(first + r) * row_stride + d]) : zeros();
    }
}

// A thread's rows of acc → rows [first, end) of a matrix.
__device__ __forceinline__ void store_tile(float* matrix, long long row_stride, int first, int end, const float4 (&acc)[RM][RV]) {
    EACH(i, RM)
        if (first + row(i) < end)
            EACH(v, RV) four(matrix[(first + row(i)) * row_stride + 4 * column(v)]) = acc[i][v];
}

__device__ __forceinline__ void clear(float4 (&acc)[RM][RV]) {
    EACH(i, RM) EACH(v, RV) acc[i][v] = zeros();
}

__device__ __forceinline__ void multiply(float4 (&acc)[RV], float factor) {
    EACH(v, RV) { acc[v].x *= factor; acc[v].y *= factor; acc[v].z *= factor; acc[v].w *= factor; }
}

__device__ __forceinline__ void dot_rows(float (&s)[RM][RN], const float* A, const float* B) {
    EACH(i, RM) EACH(j, RN) s[i][j] = 0.f;
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        float4 a[RM];
        EACH(i, RM) a[i] = four(A[row(i) * LD + d]);
        EACH(j, RN) {
            float4 b = four(B[column(j) * LD + d]);
            EACH(i, RM) {
                s[i][j] = fmaf(a[i].x, b.x, s[i][j]);
                s[i][j] = fmaf(a[i].y, b.y, s[i][j]);
                s[i][j] = fmaf(a[i].z, b.z, s[i][j]);
                s[i][j] = fmaf(a[i].w, b.w, s[i][j]);
            }
        }
    }
}

// SKIP_ZEROS is for tiles in which something is hidden: its weight is 0, and 0 · NaN would be NaN. Padding may hold anything.
template <bool SKIP_ZEROS>
__device__ __forceinline__ void add_product(float4 (&acc)[RM][RV], const float* P, const float* X) {
#pragma unroll 2
    for (int c = 0; c < BN; c += 4) {
        float p[RM][4];
        EACH(i, RM) four(p[i][0]) = four(P[row(i) * LDP + c]);
        EACH(k, 4) EACH(v, RV) {
            float4 x = four(X[(c + k) * LD + 4 * column(v)]);
            EACH(i, RM) {
                if (SKIP_ZEROS && p[i][k] == 0.f) continue;
                acc[i][v].x = fmaf(p[i][k], x.x, acc[i][v].x);
                acc[i][v].y = fmaf(p[i][k], x.y, acc[i][v].y);
                acc[i][v].z = fmaf(p[i][k], x.z, acc[i][v].z);
                acc[i][v].w = fmaf(p[i][k], x.w, acc[i][v].w);
            }
        }
    }
}

// acc += s · X: the scores of a row are spread over TX threads, so they go through shared memory. Only the warp that wrote
// a row of P reads it: the warp waits for itself, not for the block.
__device__ __forceinline__ void add_weighted(float4 (&acc)[RM][RV], const float (&s)[RM][RN], float* P, const float* X, bool hidden) {
    __syncwarp();                                   // the previous P has been read
    EACH(i, RM) EACH(j, RN) P[row(i) * LDP + column(j)] = s[i][j];
    __syncwarp();                                   // this one is complete
    if (hidden) add_product<true>(acc, P, X);
    else add_product<false>(acc, P, X);
}

__device__ __forceinline__ float row_max(float x) {
    for (int step = TX / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ __forceinline__ float row_sum(float x) {
    for (int step = TX / 2; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// ---- forward ----------------------------------------------------------------------------------------------------------

// Online softmax. So far a row has   m = max s,   l = Σ exp(s − m),   acc = Σ exp(s − m) v   over the keys met.
// New scores may raise m to m': what was summed is then multiplied by exp(m − m'), which makes it what it would have been with
// m' from the start. On return s holds exp(s − m'), and the caller adds s · V to acc. Exponentials are of base 2, for which a GPU
// has an instruction: m counts in units of scale · log2 e.
__device__ __forceinline__ void online_softmax(float (&s)[RM][RN], float (&m)[RM], float (&l)[RM], float4 (&acc)[RM][RV]) {
    EACH(i, RM) {
        float top = NEG_INF;
        EACH(j, RN) top = fmaxf(top, s[i][j]);
        top = fmaxf(m[i], row_max(top));
        float shift = top == NEG_INF ? 0.f : top;   // a row that has seen no key yet: −∞ − (−∞) would be NaN
        float decay = exp2f(m[i] - shift);
        m[i] = top;
        l[i] *= decay;                              // this thread's columns only; the threads of a row add up at the end
        multiply(acc[i], decay);
        EACH(j, RN) {
            s[i][j] = exp2f(s[i][j] - shift);
            l[i] += s[i][j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_forward(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
              const unsigned char* __restrict__ valid_tokens,       // [B, Tk], or null
              float* __restrict__ o, float* __restrict__ lse,       // lse: [B, H, Tq]
              Stride sq, Stride sk, Stride sv, Stride so,
              int H, int Hkv, int Tq, int Tk, int query_offset, int left, int right, float scale) {
    DYNAMIC_SHARED(float, shared);
    float *Q = shared, *K = Q + BM * LD, *V = K + BN * LD, *P = V + BN * LD;
    int b = blockIdx.z, h = blockIdx.y, hk = h / (H / Hkv);
    int m0 = (gridDim.x - 1 - blockIdx.x) * BM;     // the last queries first: with a causal band these have the most keys
    Band band = {Tq, Tk, query_offset, left, right, valid_tokens ? valid_tokens + (long long)b * Tk : nullptr};
    k += b * sk.batch + hk * sk.head;
    v += b * sv.batch + hk * sv.head;

    float m[RM], l[RM];
    float4 acc[RM][RV];
    EACH(i, RM) { m[i] = NEG_INF; l[i] = 0.f; }
    clear(acc);
    load_tile<BM>(Q, q + b * sq.batch + h * sq.head, sq.row, m0, Tq);

    int end = band.end_key(m0 + BM);
    for (int n0 = band.first_key(m0); n0 < end; n0 += BN) {
        __syncthreads();                            // all threads are done with the previous K and V
        load_tile<BN>(K, k, sk.row, n0, end);
        load_tile<BN>(V, v, sv.row, n0, end);
        __syncthreads();                            // and now these are complete

        float s[RM][RN];
        dot_rows(s, Q, K);
        EACH(i, RM) EACH(j, RN) s[i][j] *= scale * LOG2E;          // before anything is hidden: −∞ times a scale below 0 is +∞
        bool hidden = !band.sees_all(m0, m0 + BM, n0, n0 + BN);
        if (hidden)
            EACH(j, RN) EACH(i, RM)
                if (!band.sees(m0 + row(i), n0 + column(j))) s[i][j] = NEG_INF;
        online_softmax(s, m, l, acc);
        add_weighted(acc, s, P, V, hidden);
    }

    lse += ((long long)b * H + h) * Tq;
    EACH(i, RM) {
        l[i] = row_sum(l[i]);
        multiply(acc[i], l[i] == 0.f ? 0.f : 1.f / l[i]);           // a row that saw no key is 0, not the NaN of 0/0
        if (tx() == 0 && m0 + row(i) < Tq) lse[m0 + row(i)] = l[i] == 0.f ? NEG_INF : m[i] * LN2 + logf(l[i]);
    }
    store_tile(o + b * so.batch + h * so.head, so.row, m0, Tq, acc);
}

// ---- backward ---------------------------------------------------------------------------------------------------------
//
//     P = exp(scale · Q Kᵀ − lse),   dV = Pᵀ dO,   dP = dO Vᵀ,   dS = P · (dP − Δ),   dQ = scale · dS K,   dK = scale · dSᵀ Q
//
// with Δ = Σ_k P · dP, a number per query, which is Σ_d dO · O as well. P is computed again from lse: a tile of it needs no
// other tile. dK and dV sum over queries and dQ over keys, so each gets its own kernel, whose blocks own what they sum: nothing
// is added to memory that another block writes, and the result is the same, bit for bit, every time.

// Δ; one warp a row
extern "C" __global__ void
flash_delta(const float* __restrict__ o, const float* __restrict__ d_o, float* __restrict__ delta, Stride so, Stride sdo,
            int H, int Tq, long long rows) {
    long long at = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (at >= rows) return;                         // the whole warp: nobody is missing from the shuffles
    long long b = at / Tq / H, h = at / Tq % H, i = at % Tq;
    o += b * so.batch + h * so.head + i * so.row;
    d_o += b * sdo.batch + h * sdo.head + i * sdo.row;
    float sum = 0.f;
    for (int d = threadIdx.x % 32; d < D; d += 32) sum = fmaf(o[d], d_o[d], sum);
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) delta[at] = sum;
}

// dS = P · (dP − Δ). Where P is 0, dP may be the NaN of a key that the query does not see.
__device__ __forceinline__ float score_gradient(float p, float dp, float delta) { return p == 0.f ? 0.f : p * (dp - delta); }

// A block owns BM keys and streams the queries that see them, of all the heads that share these keys. Rows of its tiles are
// keys and columns are queries: dot_rows gives Pᵀ and dPᵀ right away, and nothing is ever transposed.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_dkdv(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ d_o,
           const float* __restrict__ lse, const float* __restrict__ delta, const unsigned char* __restrict__ valid_tokens,
           float* __restrict__ dk, float* __restrict__ dv, Stride sq, Stride sk, Stride sv, Stride sdo, Stride sdk, Stride sdv,
           int H, int Hkv, int Tq, int Tk, int query_offset, int left, int right, float scale) {
    DYNAMIC_SHARED(float, shared);
    float *K = shared, *V = K + BM * LD, *Q = V + BM * LD, *dO = Q + BN * LD, *P = dO + BN * LD;
    float *L = P + BM * LDP, *Delta = L + BN;
    int b = blockIdx.z, hk = blockIdx.y, n0 = blockIdx.x * BM, group = H / Hkv;
    Band band = {Tq, Tk, query_offset, left, right, valid_tokens ? valid_tokens + (long long)b * Tk : nullptr};
    load_tile<BM>(K, k + b * sk.batch + hk * sk.head, sk.row, n0, Tk);
    load_tile<BM>(V, v + b * sv.batch + hk * sv.head, sv.row, n0, Tk);

    float4 grad_k[RM][RV], grad_v[RM][RV];
    clear(grad_k);
    clear(grad_v);
    int end = band.end_query(n0 + BM);
    for (int h = hk * group; h < (hk + 1) * group; ++h)
        for (int m0 = band.first_query(n0); m0 < end; m0 += BN) {
            __syncthreads();
            load_tile<BN>(Q, q + b * sq.batch + h * sq.head, sq.row, m0, end);
            load_tile<BN>(dO, d_o + b * sdo.batch + h * sdo.head, sdo.row, m0, end);
            for (int i = threadIdx.x; i < BN; i += THREADS) {
                long long at = ((long long)b * H + h) * Tq + m0 + i;
                L[i] = m0 + i < end ? lse[at] : 0.f;
                Delta[i] = m0 + i < end ? delta[at] : 0.f;
            }
            __syncthreads();

            float p[RM][RN], ds[RM][RN];
            dot_rows(p, K, Q);
            EACH(i, RM) EACH(j, RN) p[i][j] = exp2f((p[i][j] * scale - L[column(j)]) * LOG2E);
            bool hidden = !band.sees_all(m0, m0 + BN, n0, n0 + BM);
            if (hidden)
                EACH(i, RM) EACH(j, RN)
                    if (!band.sees(m0 + column(j), n0 + row(i))) p[i][j] = 0.f;
            add_weighted(grad_v, p, P, dO, hidden);
            dot_rows(ds, V, dO);
            EACH(i, RM) EACH(j, RN) ds[i][j] = score_gradient(p[i][j], ds[i][j], Delta[column(j)]);
            add_weighted(grad_k, ds, P, Q, hidden);
        }
    EACH(i, RM) multiply(grad_k[i], scale);
    store_tile(dk + b * sdk.batch + hk * sdk.head, sdk.row, n0, Tk, grad_k);
    store_tile(dv + b * sdv.batch + hk * sdv.head, sdv.row, n0, Tk, grad_v);
}

// A block owns BM queries and streams the keys that they see, as in the forward pass.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_dq(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ d_o,
         const float* __restrict__ lse, const float* __restrict__ delta, const unsigned char* __restrict__ valid_tokens,
         float* __restrict__ dq, Stride sq, Stride sk, Stride sv, Stride sdo, Stride sdq,
         int H, int Hkv, int Tq, int Tk, int query_offset, int left, int right, float scale) {
    DYNAMIC_SHARED(float, shared);
    float *Q = shared, *dO = Q + BM * LD, *K = dO + BM * LD, *V = K + BN * LD, *P = V + BN * LD;
    int b = blockIdx.z, h = blockIdx.y, hk = h / (H / Hkv);
    int m0 = (gridDim.x - 1 - blockIdx.x) * BM;
    Band band = {Tq, Tk, query_offset, left, right, valid_tokens ? valid_tokens + (long long)b * Tk : nullptr};
    k += b * sk.batch + hk * sk.head;
    v += b * sv.batch + hk * sv.head;
    load_tile<BM>(Q, q + b * sq.batch + h * sq.head, sq.row, m0, Tq);
    load_tile<BM>(dO, d_o + b * sdo.batch + h * sdo.head, sdo.row, m0, Tq);

    float L[RM], Delta[RM];
    EACH(i, RM) {
        long long at = ((long long)b * H + h) * Tq + m0 + row(i);
        L[i] = m0 + row(i) < Tq ? lse[at] : 0.f;
        Delta[i] = m0 + row(i) < Tq ? delta[at] : 0.f;
    }
    float4 acc[RM][RV];
    clear(acc);
    int end = band.end_key(m0 + BM);
    for (int n0 = band.first_key(m0); n0 < end; n0 += BN) {
        __syncthreads();
        load_tile<BN>(K, k, sk.row, n0, end);
        load_tile<BN>(V, v, sv.row, n0, end);
        __syncthreads();

        float p[RM][RN], ds[RM][RN];
        dot_rows(p, Q, K);
        dot_rows(ds, dO, V);
        EACH(i, RM) EACH(j, RN) p[i][j] = exp2f((p[i][j] * scale - L[i]) * LOG2E);
        bool hidden = !band.sees_all(m0, m0 + BM, n0, n0 + BN);
        if (hidden)
            EACH(j, RN) EACH(i, RM)
                if (!band.sees(m0 + row(i), n0 + column(j))) p[i][j] = 0.f;
        EACH(i, RM) EACH(j, RN) ds[i][j] = score_gradient(p[i][j], ds[i][j], Delta[i]);
        add_weighted(acc, ds, P, K, hidden);
    }
    EACH(i, RM) multiply(acc[i], scale);
    store_tile(dq + b * sdq.batch + h * sdq.head, sdq.row, m0, Tq, acc);
}
