// What the delta rule's queries, keys and values go through first: SiLU, and queries and keys divided by their length.
//
// Rows [q heads | k heads | v heads]; a warp per head of a part of a row. Plain C apart from the CUDA qualifiers: the tests compile
// it for the CPU as well.

#define THREADS 128
#define WARP 32

#ifndef KERNEL
#define KERNEL extern "C" __global__
#endif

// The sum over the lanes of a warp, in all of them.
__device__ static float warp_sum(float value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// x sigmoid(x), or x; and its derivative.
__device__ static float silu(float x, int active, float *slope) {
    float share = 1.0f / (1.0f + expf(-x));
    *slope = active ? x * share * (1.0f - share) + share : 1.0f;
    return active ? x * share : x;
}

// The vector of this warp: where it begins, its width (0 where there is none), and whether it is a query (0), key (1) or value (2).
typedef struct { long long start; int width, part; } Vector;
__device__ static Vector vector_of(long long rows, int heads, int key_width, int value_width) {
    long long number = (long long)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, row = number / (3 * heads);
    int head = (int)(number % heads), part = (int)(number / heads % 3);
    Vector v = { 0, 0, part };
    if (row >= rows) return v;
    v.width = part == 2 ? value_width : key_width;
    v.start = row * heads * (2 * key_width + value_width) + (long long)part * heads * key_width + (long long)head * v.width;
    return v;
}

// Blocks: rows * 3 heads / (THREADS / WARP).
KERNEL void delta_normalize(const float *x, long long rows, int heads, int key_width, int value_width, int silu_qk, int silu_v,
                            float eps, float scale, float *y) {
    Vector v = vector_of(rows, heads, key_width, value_width);
    int active = v.part == 2 ? silu_v : silu_qk;
    float sum = 0.0f, slope, factor = 1.0f;
    for (int at = threadIdx.x % WARP; at < v.width; at += WARP) {
        float a = silu(x[v.start + at], active, &slope);
        sum += a * a;
    }
    sum = warp_sum(sum);
    if (v.part < 2) factor = (v.part == 0 ? scale : 1.0f) / sqrtf(sum + eps);
    for (int at = threadIdx.x % WARP; at < v.width; at += WARP) y[v.start + at] = factor * silu(x[v.start + at], active, &slope);
}

// scale (dy - a (a . dy) / length^2) / length, through the activation. Blocks: rows * 3 heads / (THREADS / WARP).
KERNEL void delta_normalize_backward(const float *x, const float *dy, long long rows, int heads, int key_width, int value_width,
                                     int silu_qk, int silu_v, float eps, float scale, float *dx) {
    Vector v = vector_of(rows, heads, key_width, value_width);
    int active = v.part == 2 ? silu_v : silu_qk;
    float sum = 0.0f, along = 0.0f, slope, factor = 1.0f;
    for (int at = threadIdx.x % WARP; at < v.width; at += WARP) {
        float a = silu(x[v.start + at], active, &slope);
        sum += a * a;
        along += a * dy[v.start + at];
    }
    sum = warp_sum(sum) + eps;
    along = warp_sum(along) / sum;
    if (v.part < 2) factor = (v.part == 0 ? scale : 1.0f) / sqrtf(sum);
    else along = 0.0f;
    for (int at = threadIdx.x % WARP; at < v.width; at += WARP) {
        float a = silu(x[v.start + at], active, &slope);
        dx[v.start + at] = factor * (dy[v.start + at] - a * along) * slope;
    }
}
