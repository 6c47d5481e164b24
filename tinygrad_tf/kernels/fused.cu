// The small operations of a Transformer, each as one kernel: softmax, cross entropy, LayerNorm and RMSNorm, activations, Adam's
// step, dropout's mask. float32. The host code is fused.py; the formulas stand in tinygrad_tf/ops/.
//
// Why. A chain of array operations reads its whole input from memory and writes its whole output back at every link: softmax
// has six links. The arithmetic between is nearly free. A fused kernel reads once, keeps what is in between in registers
// and caches, and writes once; and it is started once, where every launch costs microseconds.
//
// How rows are shared out. A block of threads takes one row at a time, and thread t its elements t, t + blockDim.x, … : the 32
// threads of a warp then read 32 neighbouring numbers, which the memory delivers in one piece. Any row length will do, and
// any number of rows: a grid smaller than that goes on with row + gridDim.x. Sizes are `long long`, as x may hold more than 2³¹
// numbers. No operation here uses atomics: sums have a fixed order, and the same input gives the same bits.

#define LANES 32                                // threads of a warp: they run together and can read each other's registers
#define ALL 0xffffffffu                         // … all of them
#define MAX_THREADS 256

#define ROWS(row, rows) for (long long row = blockIdx.x; row < rows; row += gridDim.x)
#define MY_COLUMNS(i, n) for (long long i = threadIdx.x; i < n; i += blockDim.x)
#define MY_ELEMENTS(i, n) \
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)

// --- one number from all threads of a block -----------------------------------------------------------------------------

enum Op { SUM, MAX };

__device__ float combine(Op op, float a, float b) { return op == SUM ? a + b : fmaxf(a, b); }

// Σ or max of every thread's x, returned to every thread. First within each warp, by registers: after the step with `far` = 16
// lane 0 has the sum of lanes 0 and 16, and so on, until all lanes have everything. Then over the warps, by shared memory.
__device__ float block_reduce(Op op, float x) {
    __shared__ float of_warp[MAX_THREADS / LANES];
    for (int far = LANES / 2; far; far /= 2) x = combine(op, x, __shfl_xor_sync(ALL, x, far));
    __syncthreads();                            // everybody has read what the last reduction left here
    if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = x;
    __syncthreads();                            // every warp has written
    x = of_warp[0];
    for (int warp = 1; warp < blockDim.x / LANES; ++warp) x = combine(op, x, of_warp[warp]);
    return x;
}

// --- softmax ------------------------------------------------------------------------------------------------------------

// max x. It passes over NaN, which then comes back through e^(NaN − max). −inf alone: −inf − (−inf) = NaN, as it must be.
__device__ float row_max(const float* x, long long n) {
    float top = __int_as_float(0xff800000);     // −inf
    MY_COLUMNS(i, n) top = fmaxf(top, x[i]);
    return block_reduce(MAX, top);
}

__device__ float row_sum_of_exp(const float* x, float top, long long n) {       // without −max, e^89 would be inf already
    float total = 0.f;
    MY_COLUMNS(i, n) total += expf(x[i] - top);
    return block_reduce(SUM, total);
}

// y = e^(x − max x) / Σ e^(x − max x).   x, y: [rows, n]
// The row is read three times, but from memory only once: then it is in the cache.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
softmax_forward(const float* __restrict__ x, float* __restrict__ y, long long rows, long long n) {
    ROWS(row, rows) {
        const float* x_row = x + row * n;
        float top = row_max(x_row, n), total = row_sum_of_exp(x_row, top, n);
        MY_COLUMNS(i, n) y[row * n + i] = expf(x_row[i] - top) / total;
    }
}

// dx = y · (dy − Σ dy · y)
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
softmax_backward(const float* __restrict__ dy, const float* __restrict__ y, float* __restrict__ dx, long long rows,
                 long long n) {
    ROWS(row, rows) {
        const float *dy_row = dy + row * n, *y_row = y + row * n;
        float dot = 0.f;
        MY_COLUMNS(i, n) dot += dy_row[i] * y_row[i];
        dot = block_reduce(SUM, dot);
        MY_COLUMNS(i, n) dx[row * n + i] = (dy_row[i] - dot) * y_row[i];
    }
}

// y = x − max x − ln Σ e^(x − max x)
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
log_softmax_forward(const float* __restrict__ x, float* __restrict__ y, long long rows, long long n) {
    ROWS(row, rows) {
        const float* x_row = x + row * n;
        float top = row_max(x_row, n), log_total = logf(row_sum_of_exp(x_row, top, n));
        MY_COLUMNS(i, n) y[row * n + i] = x_row[i] - top - log_total;
    }
}

// dx = dy − e^y · Σ dy
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
log_softmax_backward(const float* __restrict__ dy, const float* __restrict__ y, float* __restrict__ dx, long long rows,
                     long long n) {
    ROWS(row, rows) {
        const float *dy_row = dy + row * n, *y_row = y + row * n;
        float total = 0.f;
        MY_COLUMNS(i, n) total += dy_row[i];
        total = block_reduce(SUM, total);
        MY_COLUMNS(i, n) dx[row * n + i] = dy_row[i] - expf(y_row[i]) * total;
    }
}

// p = softmax(x),  loss = −ln p_t, as ln Σ e^(x − max x) − (x_t − max x): p_t itself may have vanished.   t: [rows], 0 ≤ t < n
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
cross_entropy_forward(const float* __restrict__ x, const long long* __restrict__ target, float* __restrict__ p,
                      float* __restrict__ loss, long long rows, long long n) {
    ROWS(row, rows) {
        const float* x_row = x + row * n;
        float top = row_max(x_row, n), total = row_sum_of_exp(x_row, top, n);
        MY_COLUMNS(i, n) p[row * n + i] = expf(x_row[i] - top) / total;
        if (threadIdx.x == 0) loss[row] = logf(total) - (x_row[target[row]] - top);
    }
}

// dx = a · (p − [i = t]); 0 in a row that does not count, whatever stands there.   a: [rows], what the loss of a row weighs
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
cross_entropy_backward(const float* __restrict__ p, const long long* __restrict__ target,
                       const unsigned char* __restrict__ counted, const float* __restrict__ a, float* __restrict__ dx,
                       long long rows, long long n) {
    ROWS(row, rows) {
        float weight = a[row];
        MY_COLUMNS(i, n) dx[row * n + i] = counted[row] ? p[row * n + i] * weight - (i == target[row] ? weight : 0.f) : 0.f;
    }
}

// --- LayerNorm (centred) and RMSNorm (not) --------------------------------------------------------------------------------

// y = x̂ · w + b,  x̂ = (x − μ) · r,  r = 1/√(mean((x − μ)²) + eps);  RMSNorm has μ = 0.
// x, y, x̂: [rows, n]   w, b: [n] or null   r: [rows]
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
norm_forward(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b,
             float* __restrict__ y, float* __restrict__ x_hat, float* __restrict__ r, long long rows, long long n,
             float eps, int centred) {
    ROWS(row, rows) {
        const float* x_row = x + row * n;
        float mean = 0.f, square = 0.f;
        if (centred) {                          // the same for all threads: nobody misses a barrier inside block_reduce
            MY_COLUMNS(i, n) mean += x_row[i];
            mean = block_reduce(SUM, mean) / n;
        }
        MY_COLUMNS(i, n) square += (x_row[i] - mean) * (x_row[i] - mean);
        float scale = 1.f / sqrtf(block_reduce(SUM, square) / n + eps);
        if (centred && scale == 0.f) scale = __int_as_float(0x7fffffff);        // σ² = ∞ → NaN: zeros would pass for a result
        MY_COLUMNS(i, n) {
            float unit = (x_row[i] - mean) * scale;
            x_hat[row * n + i] = unit;
            y[row * n + i] = unit * (w ? w[i] : 1.f) + (b ? b[i] : 0.f);
        }
        if (threadIdx.x == 0) r[row] = scale;
    }
}

// dx = r · (g − mean(g) − x̂ · mean(g · x̂)),  g = dy · w;  RMSNorm has no mean(g)
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
norm_backward(const float* __restrict__ dy, const float* __restrict__ x_hat, const float* __restrict__ r,
              const float* __restrict__ w, float* __restrict__ dx, long long rows, long long n, int centred) {
    ROWS(row, rows) {
        const float *dy_row = dy + row * n, *x_row = x_hat + row * n;
        float mean = 0.f, dot = 0.f;
        MY_COLUMNS(i, n) {
            float g = dy_row[i] * (w ? w[i] : 1.f);
            mean += g;
            dot += g * x_row[i];
        }
        mean = centred ? block_reduce(SUM, mean) / n : 0.f;
        dot = block_reduce(SUM, dot) / n;
        MY_COLUMNS(i, n) dx[row * n + i] = (dy_row[i] * (w ? w[i] : 1.f) - mean - x_row[i] * dot) * r[row];
    }
}

// dw = Σ_rows dy · x̂ and db = Σ_rows dy, as far as one chunk of rows: [chunks, n] each, which the host adds up. db: or null.
// Here a warp walks down 32 neighbouring columns: the 8 warps of a block take every 8th row, and shared memory joins them.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
norm_columns(const float* __restrict__ dy, const float* __restrict__ x_hat, float* __restrict__ dw,
             float* __restrict__ db, long long rows, long long n, long long chunk) {
    __shared__ float of_warp[2][MAX_THREADS / LANES][LANES];
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    long long i = (long long)blockIdx.x * LANES + lane, first = blockIdx.y * chunk, end = min(first + chunk, rows);
    float w_sum = 0.f, b_sum = 0.f;
    if (i < n) {
        for (long long row = first + warp; row < end; row += MAX_THREADS / LANES) {
            w_sum += dy[row * n + i] * x_hat[row * n + i];
            b_sum += dy[row * n + i];
        }
    }
    of_warp[0][warp][lane] = w_sum;
    of_warp[1][warp][lane] = b_sum;
    __syncthreads();                            // also for threads beyond the last column: a barrier waits for all
    if (warp == 0 && i < n) {
        for (int other = 1; other < MAX_THREADS / LANES; ++other) {
            w_sum += of_warp[0][other][lane];
            b_sum += of_warp[1][other][lane];
        }
        dw[blockIdx.y * n + i] = w_sum;
        if (db) db[blockIdx.y * n + i] = b_sum; // summed all the same: dy was read anyway, and the additions are free beside that
    }
}

// --- activations: y, and the slope dy/dx that backward multiplies by (null where nobody asks) --------------------------------

// y = x · Φ(x),  Φ = (1 + erf(x/√2)) / 2;   slope = Φ + x · φ,  φ = e^(−x²/2) / √(2π)
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
gelu(const float* __restrict__ x, float* __restrict__ y, float* __restrict__ slope, long long n) {
    MY_ELEMENTS(i, n) {
        float v = x[i], cdf = 0.5f * (1.f + erff(v * 0.70710678f));
        y[i] = v * cdf;
        if (slope) slope[i] = expf(-0.5f * v * v) * 0.39894228f * v + cdf;
    }
}

// y = x · σ,  σ = (1 + tanh u) / 2,  u = √(2/π) · (x + 0.044715 x³);   slope = σ + 2 u′ · (1 − σ) · y
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
gelu_tanh(const float* __restrict__ x, float* __restrict__ y, float* __restrict__ slope, long long n) {
    const float c = 0.79788456f, cubic = 0.044715f * c;
    MY_ELEMENTS(i, n) {
        float v = x[i], square = v * v, gate = 0.5f * (1.f + tanhf(v * (cubic * square + c)));
        y[i] = v * gate;
        if (slope) slope[i] = (6.f * cubic * square + 2.f * c) * (1.f - gate) * y[i] + gate;
    }
}

// y = x · σ(x),  σ(x) = 1 / (1 + e^(−x));   slope = σ + (1 − σ) · y
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
silu(const float* __restrict__ x, float* __restrict__ y, float* __restrict__ slope, long long n) {
    MY_ELEMENTS(i, n) {
        float gate = 1.f / (1.f + expf(-x[i])), value = x[i] * gate;
        y[i] = value;
        if (slope) slope[i] = (1.f - gate) * value + gate;
    }
}

// --- Adam and AdamW ------------------------------------------------------------------------------------------------------

// g ← sign · g + penalty · p,  p ← shrink · p,  m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²,
// p ← p − rate · m / (√v / root + eps),  rate = lr / (1 − β₁ᵗ), root = √(1 − β₂ᵗ). `largest`: null, or the largest v so far, which then stands for v (AMSGrad).
// 1 − β comes as an argument of its own: 1.f − 0.999f would be off by 5e-5 of it.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
adam(float* __restrict__ p, const float* __restrict__ g, float* __restrict__ m, float* __restrict__ v,
     float* __restrict__ largest, long long n, float sign, float penalty, float shrink, float beta1, float rest1,
     float beta2, float rest2, float rate, float root, float eps) {
    MY_ELEMENTS(i, n) {
        float weight = p[i], slope = sign * g[i];
        if (penalty != 0.f) slope += penalty * weight;
        float mean = m[i] + rest1 * (slope - m[i]), square = beta2 * v[i] + rest2 * (slope * slope);
        m[i] = mean;
        v[i] = square;
        if (largest) {
            if (largest[i] > square || largest[i] != largest[i]) square = largest[i];       // NaN stays
            largest[i] = square;
        }
        p[i] = shrink * weight - rate * (mean / (sqrtf(square) / root + eps));
    }
}

// --- dropout's mask --------------------------------------------------------------------------------------------------------

// Philox4x32-10 (philox.py): four random words from a key and four counters.
__device__ void philox(unsigned k0, unsigned k1, unsigned c[4]) {
    for (int round = 0; round < 10; ++round) {
        unsigned long long first = 0xD2511F53ull * c[0], second = 0xCD9E8D57ull * c[2];
        c[0] = (unsigned)(second >> 32) ^ c[1] ^ k0;
        c[1] = (unsigned)second;
        c[2] = (unsigned)(first >> 32) ^ c[3] ^ k1;
        c[3] = (unsigned)first;
        k0 += 0x9E3779B9u;                      // wraps at 2³², as it must
        k1 += 0xBB67AE85u;
    }
}

// kept[h, i, j] = word j % 4 of the block (j / 4, i, h, 0) ≥ below, for heads h0 …, rows i0 …, keys j0 … of a tile.
// A thread draws one block and writes its one to four bytes.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
philox_keep(unsigned char* __restrict__ kept, long long heads, long long rows, long long keys, long long h0,
            long long i0, long long j0, unsigned k0, unsigned k1, unsigned below) {
    long long first = j0 / 4, blocks = (j0 + keys + 3) / 4 - first;
    MY_ELEMENTS(at, heads * rows * blocks) {
        long long block = first + at % blocks, line = at / blocks;              // line: a row of a head
        unsigned c[4] = {(unsigned)block, (unsigned)(i0 + line % rows), (unsigned)(h0 + line / rows), 0u};
        philox(k0, k1, c);
        for (int word = 0; word < 4; ++word) {
            long long j = 4 * block + word - j0;
            if (j >= 0 && j < keys) kept[line * keys + j] = c[word] >= below;
        }
    }
}
