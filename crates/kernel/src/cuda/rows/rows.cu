// Row-wise kernels: LayerNorm, GELU, cross entropy, rows of a table, AdamW; forward and backward, in f32.
//
// A block has THREADS threads in warps of WARP; where a kernel says "a warp per row", it handles LINES rows. Every sum runs in
// an order that follows from the sizes, without atomics: the same bits every time. Indices of large arrays are long long.
//
// This is plain C apart from the CUDA qualifiers: the tests compile it for the CPU as well.

#define THREADS 128
#define WARP 32
#define LINES (THREADS / WARP)

#ifndef KERNEL
#define KERNEL extern "C" __global__
#define INFINITY __int_as_float(0x7f800000)
#endif

#define FOR_LANES(at, width) for (int at = threadIdx.x % WARP; at < (width); at += WARP)

// The sum over the lanes of a warp, in all of them.
__device__ static float warp_sum(float value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// The largest over the lanes of a warp, in all of them.
__device__ static float warp_max(float value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

// The row of this warp. All lanes of a warp take part in its sums, also where there is no such row.
__device__ static long long row_of_warp(void) { return (long long)blockIdx.x * LINES + threadIdx.x / WARP; }

// The element of this thread.
__device__ static long long element(void) { return (long long)blockIdx.x * THREADS + threadIdx.x; }

// Mean and 1 / sqrt(variance + eps) of a row.
__device__ static void moments(const float *x, int width, float eps, float *mean, float *root) {
    float sum = 0.0f, squares = 0.0f;
    FOR_LANES(at, width) sum += x[at];
    *mean = warp_sum(sum) / (float)width;
    FOR_LANES(at, width) squares += (x[at] - *mean) * (x[at] - *mean);
    *root = 1.0f / sqrtf(warp_sum(squares) / (float)width + eps);
}

// y = (x - mean) / sqrt(variance + eps) weight + bias; a warp per row.
KERNEL void layer_norm(const float *x, const float *weight, const float *bias, long long rows, int width, float eps, float *y) {
    long long row = row_of_warp();
    int live = row < rows ? width : 0;
    x += row * width, y += row * width;
    float mean, root;
    moments(x, live, eps, &mean, &root);
    FOR_LANES(at, live) y[at] = (x[at] - mean) * root * weight[at] + bias[at];
}

// dx = root (g - mean(g) - n mean(g n)) with g = dy weight and n the normalised row; mean and root of every row to `stats`.
// A warp per row.
KERNEL void layer_norm_backward(const float *x, const float *weight, const float *dy, long long rows, int width, float eps,
                                float *dx, float *stats) {
    long long row = row_of_warp();
    int live = row < rows ? width : 0;
    x += row * width, dy += row * width, dx += row * width;
    float mean, root, sum = 0.0f, product = 0.0f;
    moments(x, live, eps, &mean, &root);
    FOR_LANES(at, live) {
        float slope = dy[at] * weight[at];
        sum += slope;
        product += slope * (x[at] - mean) * root;
    }
    sum = warp_sum(sum) / (float)width;
    product = warp_sum(product) / (float)width;
    FOR_LANES(at, live) dx[at] = root * (dy[at] * weight[at] - sum - (x[at] - mean) * root * product);
    if (live && threadIdx.x % WARP == 0) {
        stats[2 * row] = mean;
        stats[2 * row + 1] = root;
    }
}

// Adds what the LINES warps of a block have summed for the WARP columns of the block.
__device__ static float over_lines(float sum) {
    __shared__ float sums[LINES][WARP];
    sums[threadIdx.x / WARP][threadIdx.x % WARP] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int line = 0; line < LINES; line++) total += sums[line][threadIdx.x % WARP];
    __syncthreads();
    return total;
}

// Column sums of dy n and of dy over `chunk` rows per block: parts [chunks, 2 width]. Blocks: chunks, columns / WARP.
KERNEL void layer_norm_parameters(const float *x, const float *dy, const float *stats, long long rows, int width, int chunk,
                                  float *parts) {
    int column = blockIdx.y * WARP + threadIdx.x % WARP;
    long long first = (long long)blockIdx.x * chunk, last = first + chunk < rows ? first + chunk : rows;
    float weight = 0.0f, bias = 0.0f;
    if (column < width) for (long long row = first + threadIdx.x / WARP; row < last; row += LINES) {
        float slope = dy[row * width + column];
        weight += slope * (x[row * width + column] - stats[2 * row]) * stats[2 * row + 1];
        bias += slope;
    }
    weight = over_lines(weight);
    bias = over_lines(bias);
    if (column < width && threadIdx.x < WARP) {
        parts[2LL * width * blockIdx.x + column] = weight;
        parts[2LL * width * blockIdx.x + width + column] = bias;
    }
}

// Column sums over `chunk` rows per block: parts [chunks, width]. Blocks: chunks, columns / WARP.
KERNEL void column_sums(const float *x, long long rows, int width, int chunk, float *parts) {
    int column = blockIdx.y * WARP + threadIdx.x % WARP;
    long long first = (long long)blockIdx.x * chunk, last = first + chunk < rows ? first + chunk : rows;
    float sum = 0.0f;
    if (column < width)
        for (long long row = first + threadIdx.x / WARP; row < last; row += LINES) sum += x[row * width + column];
    sum = over_lines(sum);
    if (column < width && threadIdx.x < WARP) parts[(long long)width * blockIdx.x + column] = sum;
}

// 64 well mixed bits of a counter: `mix` of dropout.rs.
__device__ static unsigned long long mix(unsigned long long counter) {
    unsigned long long z = (counter + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// y = x scale or, where the draw of an element is below the threshold, 0; one draw decides two elements.
KERNEL void dropout(const float *x, long long count, long long seed, long long threshold, float scale, float *y) {
    long long at = element();
    if (at >= count) return;
    unsigned long long draw = mix((unsigned long long)seed + at / 2);
    y[at] = (long long)(at % 2 ? draw >> 32 : draw & 0xffffffffu) < threshold ? 0.0f : x[at] * scale;
}

// x/2 (1 + erf(x / sqrt 2)).
KERNEL void gelu(const float *x, long long count, float *y) {
    long long at = element();
    if (at < count) y[at] = 0.5f * x[at] * (1.0f + erff(x[at] * 0.70710678f));
}

// dx = dy (P(x) + x p(x)) with the normal distribution P and its density p.
KERNEL void gelu_backward(const float *x, const float *dy, long long count, float *dx) {
    long long at = element();
    if (at >= count) return;
    float below = 0.5f * (1.0f + erff(x[at] * 0.70710678f)), density = 0.39894228f * expf(-0.5f * x[at] * x[at]);
    dx[at] = dy[at] * (below + x[at] * density);
}

// GELU of x + bias, rows of `width`.
KERNEL void bias_gelu(const float *x, const float *bias, long long count, int width, float *y) {
    long long at = element();
    if (at >= count) return;
    float value = x[at] + bias[at % width];
    y[at] = 0.5f * value * (1.0f + erff(value * 0.70710678f));
}

// GELU of x + bias, and the gradient of x; rows of `width`.
KERNEL void bias_gelu_backward(const float *x, const float *bias, const float *dy, long long count, int width, float *y,
                               float *dx) {
    long long at = element();
    if (at >= count) return;
    float value = x[at] + bias[at % width];
    float below = 0.5f * (1.0f + erff(value * 0.70710678f)), density = 0.39894228f * expf(-0.5f * value * value);
    y[at] = value * below;
    dx[at] = dy[at] * (below + value * density);
}

// y += bias, in `width` columns of rows that lie `stride` apart from `start` on.
KERNEL void add_bias(const float *bias, long long rows, int width, int stride, long long start, float *y) {
    long long at = element();
    if (at < rows * width) y[start + at / width * stride + at % width] += bias[at % width];
}

// y += x, from `start` on.
KERNEL void add(const float *x, long long count, long long start, float *y) {
    long long at = element();
    if (at < count) y[start + at] += x[at];
}

// log sum exp(z) - z_label; a warp per row.
KERNEL void cross_entropy(const float *logits, const int *labels, long long rows, int classes, float *losses) {
    long long row = row_of_warp();
    int live = row < rows ? classes : 0;
    logits += row * classes;
    float most = -INFINITY, sum = 0.0f;
    FOR_LANES(at, live) most = fmaxf(most, logits[at]);
    most = warp_max(most);
    FOR_LANES(at, live) sum += expf(logits[at] - most);
    sum = warp_sum(sum);
    if (live && threadIdx.x % WARP == 0) losses[row] = logf(sum) - (logits[labels[row]] - most);
}

// (softmax(z) - onehot(label)) grad; a warp per row.
KERNEL void cross_entropy_backward(const float *logits, const int *labels, const float *grad, long long rows, int classes,
                                   float *dx) {
    long long row = row_of_warp();
    int live = row < rows ? classes : 0;
    logits += row * classes, dx += row * classes;
    float most = -INFINITY, sum = 0.0f;
    FOR_LANES(at, live) most = fmaxf(most, logits[at]);
    most = warp_max(most);
    FOR_LANES(at, live) sum += expf(logits[at] - most);
    sum = warp_sum(sum);
    FOR_LANES(at, live) dx[at] = (expf(logits[at] - most) / sum - (at == labels[row] ? 1.0f : 0.0f)) * grad[row];
}

// Rows of a table; a warp per row.
KERNEL void table_rows(const float *table, const int *ids, long long rows, int width, float *y) {
    long long row = row_of_warp();
    if (row >= rows) return;
    FOR_LANES(at, width) y[row * width + at] = table[(long long)ids[row] * width + at];
}

// Sums of the rows order[first] to order[last - 1] of dy, for the range `ranges` [blocks, 2] of each block: parts
// [blocks, width]. Blocks: ranges, columns / THREADS.
KERNEL void range_sums(const float *dy, const int *order, const int *ranges, int width, float *parts) {
    int column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
    for (int at = ranges[2 * blockIdx.x]; at < ranges[2 * blockIdx.x + 1]; at++)
        sum += dy[(long long)order[at] * width + column];
    parts[(long long)blockIdx.x * width + column] = sum;
}

// One AdamW update of p (from `start` on) and its moments; the factors are those of `Factors` in adamw.rs.
KERNEL void adamw(const float *grad, long long start, long long count, float beta1, float beta2, float new1, float new2,
                  float keep, float rate, float root, float eps, float grad_scale, float *p, float *m, float *v) {
    long long at = element();
    if (at >= count) return;
    float slope = grad[at] * grad_scale;
    float first = beta1 * m[at] + new1 * slope, second = beta2 * v[at] + new2 * slope * slope;
    m[at] = first;
    v[at] = second;
    p[start + at] = p[start + at] * keep - rate * first / (sqrtf(second) * root + eps);
}
