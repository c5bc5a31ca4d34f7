// Behind common.cu: output and gradients of queries, keys and values by tensor cores. Sums are f32, and so is everything that is not a
// product, the softmax too. The factors of products are, where BF16 is 1, rounded to bf16 (to nearest, ties to even). Where it is
// 0, each is the sum of two numbers of tf32, the nearest one and, cut to tf32, what it leaves; a product is the sum of three. Left out
// are the product of two rests and the last bit of a rest: 2^-21 of a product or less.
//
// A warp has 16 rows of a tile: of queries, or of keys in attend_back_keys. Every lane has its part, a fragment, of the matrices
// that are multiplied. With g = lane / 4 and t = lane % 4 (PTX ISA, fragments of mma.m16n8k8 with tf32):
//
//     a   16 x 8   numbers 0 and 1: rows g and g + 8, column t; numbers 2 and 3: the same rows, column t + 4
//     b    8 x 8   number 0: row t of column g; number 1: row t + 4
//     c   16 x 8   numbers 0 and 1: row g, columns 2t and 2t + 1; numbers 2 and 3: row g + 8
//
// A fragment for bf16 (mma.m16n8k16) is two of these side by side, numbers t and t + 4 in one word. Which columns of a and rows of b
// are the first does not matter as long as both say the same, nor does the order of the columns of b and c. So a lane reads four
// numbers at a time, from different banks than the other lanes: of rows of 32 numbers 8t to 8t + 7, in their order, and as columns
// of b in four fragments 4g to 4g + 3. And a c becomes an a in the same lanes where row t of b is its row 2t, and row t + 4 its row
// 2t + 1.

#define WARP 32
#define WIDE ((WIDTH + 31) / 32 * 32) // columns, and zeros up to whole fragments
#define PITCH (WIDE + 4) // numbers between two rows
#if BF16
#define STEP 16 // columns of an a, rows of a b
typedef unsigned Word; // two numbers
#else
#define STEP 8
typedef float Word;
#endif
#define STEPS (32 / STEP) // of a row of 32 numbers
#define ROWS (WIDE / 32)

// Working memory of a block: left factors, and two stages of BLOCK rows of right factors, of which one is read while the other comes.
typedef struct {
    float left[TILE * PITCH], first[2][BLOCK * PITCH], second[2][BLOCK * PITCH];
    float most[2][BLOCK], share[2][BLOCK], mean[2][BLOCK];
    int lanes[TILE], low[2][BLOCK], high[2][BLOCK], at[2][BLOCK];
    unsigned draws[2][BLOCK];
    float slope[TILE * PITCH]; // not in attend_forward
} Memory;
typedef char memory_has_its_size[sizeof(Memory) == MEMORY && BLOCK == 32 ? 1 : -1];

typedef struct { float x[4]; } Four;
// Blocks that a multiprocessor should have registers for.
#ifndef EMULATED
#undef KERNEL
#define KERNEL extern "C" __global__ __launch_bounds__(THREADS, 3)
#endif

#ifdef EMULATED
#define __fmul_rn(x, y) ((x) * (y))

__device__ static Four four_at(const float *from) {
    Four four;
    for (int i = 0; i < 4; i++) four.x[i] = from[i];
    return four;
}

// Four numbers from a buffer to shared memory, or zeros; they are there once they were waited for.
__device__ static void request_four(float *to, const float *from, int is_there) {
    for (int i = 0; i < 4; i++) to[i] = is_there ? from[i] : 0.0f;
}

__device__ static void wait_for_requests(void) {}
#else
__device__ static Four four_at(const float *from) {
    float4 four = *(const float4 *)from;
    Four result = { { four.x, four.y, four.z, four.w } };
    return result;
}

__device__ static void request_four(float *to, const float *from, int is_there) {
    unsigned place = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(place), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

__device__ static void wait_for_requests(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Two numbers rounded to bf16, the first in the lower half.
__device__ static unsigned bf16_pair(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// c += a b, by all lanes of a warp.
__device__ static void multiply_bf16(float c[4], const unsigned a[4], const unsigned b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ static void multiply_tf32(float c[4], const unsigned a[4], const unsigned b[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

#if !BF16
// The nearest number of tf32, and the rest, cut to tf32. It is cut and not rounded: then the sum of both splits into the same two.
__device__ static void split(float x, unsigned *upper, unsigned *lower) {
    *upper = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    *lower = __float_as_uint(x - __uint_as_float(*upper)) & 0xffffe000u;
}
#endif

// c[n] += a b[n], where what has a lower factor comes to low[n].
__device__ static void multiply(float c[4][4], float low[4][4], const Word a[4], Word b[4][2]) {
#if BF16
    UNROLL for (int n = 0; n < 4; n++) multiply_bf16(c[n], a, b[n]);
#else
    unsigned a_upper[4], a_lower[4], b_upper[4][2], b_lower[4][2];
    UNROLL for (int i = 0; i < 4; i++) split(a[i], &a_upper[i], &a_lower[i]);
    UNROLL for (int n = 0; n < 4; n++) UNROLL for (int i = 0; i < 2; i++) split(b[n][i], &b_upper[n][i], &b_lower[n][i]);
    UNROLL for (int n = 0; n < 4; n++) multiply_tf32(c[n], a_upper, b_upper[n]);
    UNROLL for (int n = 0; n < 4; n++) multiply_tf32(low[n], a_lower, b_upper[n]);
    UNROLL for (int n = 0; n < 4; n++) multiply_tf32(low[n], a_upper, b_lower[n]);
#endif
}

// Row of number i of a c in a tile, of which a warp has 16.
#define ROW(i) ((int)threadIdx.x / WARP * 16 + (int)threadIdx.x % WARP / 4 + (i) / 2 * 8)
// Its column, of 8.
#define COLUMN(i) ((int)threadIdx.x % 4 * 2 + (i) % 2)

// `count` rows to shared memory, each as many numbers behind `base` as `offset` says, with zeros where it is negative and behind the
// columns of a row.
#define LOAD(count, base, stride, to, offset) do { \
    const float *from = (base); \
    int fours = WIDTH % 4 == 0 && (stride) % 4 == 0 && (unsigned long long)from % 16 == 0; \
    UNROLL for (int part = 0; part < (count) * (WIDE / 4) / THREADS; part++) { \
        int place = part * THREADS + threadIdx.x, i = place / (WIDE / 4), x = place % (WIDE / 4) * 4; \
        long long number = (offset); \
        const float *numbers = from + (number < 0 ? 0 : number * (stride)) + x; \
        float *here = (to) + i * PITCH + x; \
        if (fours) request_four(here, numbers, number >= 0 && x < WIDTH); \
        else for (int c = 0; c < 4; c++) here[c] = number >= 0 && x + c < WIDTH ? numbers[c] : 0.0f; \
    } \
} while (0)

// The fragments of 32 numbers of a row, of which this lane has 8: of an a as every second number of each, or of a b.
__device__ static void row_fragments(const float *row, int stride, Word *to) {
    UNROLL for (int half = 0; half < 2; half++) {
        Four four = four_at(row + threadIdx.x % 4 * 8 + 4 * half);
#if BF16
        UNROLL for (int i = 0; i < 2; i++) to[(2 * half + i) * stride] = bf16_pair(four.x[2 * i], four.x[2 * i + 1]);
#else
        UNROLL for (int i = 0; i < 4; i++) to[(4 * half + i) * stride] = four.x[i];
#endif
    }
}

// Products of the rows of this warp, of those on the left, and BLOCK rows.
__device__ static void products(const float *left, const float *rows, float sums[4][4]) {
    float low[4][4];
    UNROLL for (int n = 0; n < 4; n++) UNROLL for (int i = 0; i < 4; i++) sums[n][i] = low[n][i] = 0.0f;
    UNROLL for (int part = 0; part < ROWS; part++) {
        Word a[STEPS][4], b[4][STEPS][2], of_step[4][2];
        UNROLL for (int i = 0; i < 2; i++) row_fragments(left + ROW(2 * i) * PITCH + 32 * part, 2, &a[0][i]);
        UNROLL for (int n = 0; n < BLOCK / 8; n++)
            row_fragments(rows + (8 * n + threadIdx.x % WARP / 4) * PITCH + 32 * part, 1, &b[n][0][0]);
        UNROLL for (int k = 0; k < STEPS; k++) {
            UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int j = 0; j < 2; j++) of_step[n][j] = b[n][k][j];
            multiply(sums, low, a[k], of_step);
        }
    }
    UNROLL for (int n = 0; n < 4; n++) UNROLL for (int i = 0; i < 4; i++) sums[n][i] += low[n][i];
}

// Adds to the rows of this warp the products of their weights with BLOCK rows. Tensor cores cut what they add to a sum, so that long
// sums are added outside of them.
__device__ static void add_products(float weights[BLOCK / 8][4], const float *rows, float result[WIDE / 8][4]) {
    UNROLL for (int part = 0; part < ROWS; part++) {
        float sums[4][4], low[4][4];
        UNROLL for (int n = 0; n < 4; n++) UNROLL for (int i = 0; i < 4; i++) sums[n][i] = low[n][i] = 0.0f;
        UNROLL for (int k = 0; k < BLOCK / STEP; k++) {
            const float *row = rows + (STEP * k + (int)threadIdx.x % 4 * 2) * PITCH + 32 * part + threadIdx.x % WARP / 4 * 4;
            Four four[2] = { four_at(row), four_at(row + PITCH) };
            Word a[4], b[4][2];
#if BF16
            Four next[2] = { four_at(row + 8 * PITCH), four_at(row + 9 * PITCH) };
            UNROLL for (int i = 0; i < 4; i++)
                a[i] = bf16_pair(weights[2 * k + i / 2][i % 2 * 2], weights[2 * k + i / 2][i % 2 * 2 + 1]);
            UNROLL for (int n = 0; n < 4; n++) {
                b[n][0] = bf16_pair(four[0].x[n], four[1].x[n]);
                b[n][1] = bf16_pair(next[0].x[n], next[1].x[n]);
            }
#else
            UNROLL for (int i = 0; i < 4; i++) a[i] = weights[k][i % 2 * 2 + i / 2];
            UNROLL for (int n = 0; n < 4; n++) UNROLL for (int i = 0; i < 2; i++) b[n][i] = four[i].x[n];
#endif
            multiply(sums, low, a, b);
        }
        UNROLL for (int n = 0; n < 4; n++) UNROLL for (int i = 0; i < 4; i++) result[4 * part + n][i] += sums[n][i] + low[n][i];
    }
}

// Over the four lanes that share rows of a c: the largest, and the sum.
__device__ static float row_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ static float row_sum(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// BLOCK keys of a stream of a tile, from number `first` on; there are none where `number` is not one of the tile's streams.
typedef struct { Stream s; int number, first; } Keys;

// Those at `first` or, where the stream has no such keys, the first ones of the next that has any.
__device__ static Keys keys_from(Keys keys, const Tile *tile, const Stream *streams) {
    while (keys.first >= keys.s.last && ++keys.number < tile->stream + tile->streams) {
        keys.s = streams[keys.number];
        keys.first = keys.s.first;
    }
    return keys;
}

// Requests keys and values, and writes the keys' numbers, -1 where there is none or it is hidden.
__device__ static void request_keys(const Header *h, Keys keys, int batch, int head, const int *hidden, const float *k, const float *v,
                                    const float *slot_k, const float *slot_v, int stage, Memory *m) {
    Stream s = keys.s;
    Place of_k = s.slots ? h->slot_k : h->k, of_v = s.slots ? h->slot_v : h->v;
    const int *hides = hidden + batch * (h->keys + h->slots) + (s.slots ? h->keys : 0) + s.start;
    int last = s.last, is_hiding = (int)h->hidden;
#define NUMBER(i) (keys.first + (i) < last && !(is_hiding && hides[(long long)(keys.first + (i)) * s.step]) ? keys.first + (i) : -1)
    LOAD(BLOCK, (s.slots ? slot_k : k) + row_of(of_k, batch, head, s.start), of_k.row * s.step, m->first[stage], NUMBER(i));
    LOAD(BLOCK, (s.slots ? slot_v : v) + row_of(of_v, batch, head, s.start), of_v.row * s.step, m->second[stage], NUMBER(i));
    if (threadIdx.x < BLOCK) m->at[stage][threadIdx.x] = NUMBER((int)threadIdx.x);
}

// Whether the lane with these bounds, at absolute position `t`, sees key number `number`.
__device__ static int sees_number(Stream s, int low, int high, long long t, int number) {
    if (number < low || number >= high) return 0;
    if (s.skip == 0) return 1;
    long long position = s.start + (long long)number * s.step, distance = position > t ? position - t : t - position;
    return distance % s.skip != 0;
}

// What tells a query's row from others, of those whose weights are dropped: `row` of dropout.rs.
__device__ static unsigned draw_of(const Header *h, int batch, int head, int query) {
    unsigned long long z = (unsigned long long)h->seed + ((long long)batch * h->heads + head) * h->queries + query;
    z = (z + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (unsigned)((z ^ z >> 31) >> 32);
}

// What the weight of a row and a key is multiplied by; slots are counted behind the keys.
__device__ static float kept(const Header *h, Stream s, unsigned row, int number) {
    unsigned x = row + (unsigned)(s.start + number * s.step + (s.slots ? (int)h->keys : 0)) * 0x9e3779b9u;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    x ^= x >> 16;
    return x < (unsigned)h->threshold ? 0.0f : __uint_as_float((unsigned)h->kept);
}

// What the forward pass left of a query: its largest logit and its share of a sum, and the product of its output and gradient.
typedef struct { float most, share, mean; } Left;
__device__ static Left left_of(const Header *h, int batch, int head, int query, const float *stats, const float *means) {
    Left left = { 0.0f, 0.0f, 0.0f };
    if (query < 0) return left;
    long long place = ((long long)batch * h->heads + head) * h->queries + query;
    float most = stats[2 * place];
    left.most = most == -INFINITY ? 0.0f : most;
    left.share = stats[2 * place + 1];
    left.mean = means[place];
    return left;
}

// The weight of a pair, which was multiplied by `kept`, in place of its logit, and the gradient of the logit in place of that of the
// weight.
__device__ static void slope_of(int seen, Left left, float kept, float factor, float scale, float *logit, float *slope) {
    float probability = seen ? exp2f(factor * *logit - left.most) * left.share : 0.0f;
    *logit = kept * probability;
    *slope = scale * probability * (kept * *slope - left.mean);
}

// Writes this thread's row number `half`, or adds it to a row in memory.
__device__ static void write_row(float result[WIDE / 8][4], int half, float factor, int add, float *to) {
    UNROLL for (int part = 0; part < ROWS; part++) UNROLL for (int i = 0; i < 2; i++) UNROLL for (int n = 0; n < 4; n++) {
        int x = 32 * part + 4 * COLUMN(i) + n;
        if (x < WIDTH) to[x] = factor * result[4 * part + n][2 * half + i] + (add ? to[x] : 0.0f);
    }
}

KERNEL void attend_forward(
    const Header *header, const Tile *tiles, const int *head_tiles, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, const float *slab, float factor, float *out, float *stats) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    const Header *h = header;
    int head = blockIdx.y, batch = blockIdx.z, me = threadIdx.x;
    if ((int)blockIdx.x >= head_tiles[2 * head + 1]) return;
    int number = head_tiles[2 * head] + blockIdx.x;
    Tile tile = tiles[number];
    if (me < TILE) m->lanes[me] = me < tile.queries ? queries[number * TILE + me] : -1;
    __syncthreads();
    LOAD(TILE, q + row_of(h->q, batch, head, 0), h->q.row, m->left, m->lanes[i]);
    unsigned draw[2] = { draw_of(h, batch, head, m->lanes[ROW(0)]), draw_of(h, batch, head, m->lanes[ROW(2)]) };
    float result[WIDE / 8][4], most[2] = { -INFINITY, -INFINITY }, sum[2] = { 0.0f, 0.0f };
    UNROLL for (int n = 0; n < WIDE / 8; n++) UNROLL for (int i = 0; i < 4; i++) result[n][i] = 0.0f;
    int stage = 0, end = tile.stream + tile.streams;
    Keys none = { { 0, 0, 0, 0, 0, 0 }, tile.stream - 1, 0 }, here = keys_from(none, &tile, streams);
    if (here.number < end) request_keys(h, here, batch, head, hidden, k, v, slot_k, slot_v, stage, m);
    while (here.number < end) {
        wait_for_requests();
        __syncthreads();
        Stream s = here.s;
        Keys next = here;
        next.first += BLOCK;
        next = keys_from(next, &tile, streams);
        if (next.number < end) request_keys(h, next, batch, head, hidden, k, v, slot_k, slot_v, stage ^ 1, m);
        const int *bound = bounds + (long long)here.number * 2 * TILE;
        float logits[BLOCK / 8][4];
        products(m->left, m->first[stage], logits);
        int is_whole = s.skip == 0 && !h->hidden && here.first + BLOCK <= s.last;
        UNROLL for (int half = 0; half < 2; half++) {
            float largest = most[half], total = 0.0f;
            int low = bound[ROW(2 * half)], high = bound[TILE + ROW(2 * half)];
            UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) logits[n][i] = __fmul_rn(factor, logits[n][i]);
            if (!is_whole || here.first < low || here.first + BLOCK > high) {
                long long t = h->offset + m->lanes[ROW(2 * half)];
                UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++)
                    if (!sees_number(s, low, high, t, m->at[stage][8 * n + COLUMN(i)])) logits[n][i] = -INFINITY;
            }
            UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++)
                largest = fmaxf(largest, logits[n][i]);
            largest = row_max(largest);
            float base = largest == -INFINITY ? 0.0f : largest, scale = exp2f(most[half] - base);
            UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) {
                logits[n][i] = exp2f(logits[n][i] - base);
                total += logits[n][i];
            }
            if (h->threshold) {
                UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++)
                    logits[n][i] *= kept(h, s, draw[half], here.first + 8 * n + COLUMN(i));
            }
            most[half] = largest;
            sum[half] = sum[half] * scale + total;
            UNROLL for (int n = 0; n < WIDE / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) result[n][i] *= scale;
        }
        add_products(logits, m->second[stage], result);
        here = next;
        stage ^= 1;
    }
    wait_for_requests(); // of a tile without keys
    UNROLL for (int half = 0; half < 2; half++) {
        float total = row_sum(sum[half]), share = total > 0.0f ? 1.0f / total : 0.0f;
        int query = m->lanes[ROW(2 * half)];
        if (query < 0) continue;
        write_row(result, half, share, 0, out + row_of(h->out, batch, head, query));
        if (me % 4 == 0) {
            long long place = ((long long)batch * h->heads + head) * h->queries + query;
            stats[2 * place] = most[half];
            stats[2 * place + 1] = share;
        }
    }
}

// Per query: the product of the output and its gradient. Where one key has all the weight, the output is its value, and both are
// multiplied with the gradient alike: the gradient of the logit, their difference, is then 0 in attend_back_queries. A block has a tile
// of neighbouring queries.
KERNEL void attend_means(const Header *header, const float *out, const float *grad, float *means) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    const Header *h = header;
    int head = blockIdx.y, batch = blockIdx.z, start = blockIdx.x * TILE, warp = threadIdx.x / WARP;
#define NEIGHBOUR(i) (start + (i) < h->queries ? start + (i) : -1)
    LOAD(TILE, grad + row_of(h->out, batch, head, 0), h->out.row, m->left, NEIGHBOUR(i));
    LOAD(TILE, out + row_of(h->out, batch, head, 0), h->out.row, m->first[0], NEIGHBOUR(i));
    wait_for_requests();
    __syncthreads();
    float sums[4][4];
    products(m->left, m->first[0] + warp / 2 * BLOCK * PITCH, sums);
    // of 16 rows and 32 columns: those that are the same query
    UNROLL for (int n = 0; n < 4; n++) UNROLL for (int i = 0; i < 4; i++) {
        int query = start + ROW(i);
        if (ROW(i) == warp / 2 * BLOCK + 8 * n + COLUMN(i) && query < h->queries)
            means[((long long)batch * h->heads + head) * h->queries + query] = sums[n][i];
    }
}

KERNEL void attend_back_queries(
    const Header *header, const Tile *tiles, const int *head_tiles, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, const float *slab, const float *grad, const float *stats, const float *means, float factor, float scale,
    float *grads) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    const Header *h = header;
    int head = blockIdx.y, batch = blockIdx.z, me = threadIdx.x;
    if ((int)blockIdx.x >= head_tiles[2 * head + 1]) return;
    int number = head_tiles[2 * head] + blockIdx.x;
    Tile tile = tiles[number];
    if (me < TILE) m->lanes[me] = me < tile.queries ? queries[number * TILE + me] : -1;
    __syncthreads();
    LOAD(TILE, q + row_of(h->q, batch, head, 0), h->q.row, m->left, m->lanes[i]);
    LOAD(TILE, grad + row_of(h->out, batch, head, 0), h->out.row, m->slope, m->lanes[i]);
    int query[2] = { m->lanes[ROW(0)], m->lanes[ROW(2)] };
    Left left[2] = { left_of(h, batch, head, query[0], stats, means), left_of(h, batch, head, query[1], stats, means) };
    unsigned draw[2] = { draw_of(h, batch, head, query[0]), draw_of(h, batch, head, query[1]) };
    float result[WIDE / 8][4];
    UNROLL for (int n = 0; n < WIDE / 8; n++) UNROLL for (int i = 0; i < 4; i++) result[n][i] = 0.0f;
    int stage = 0, end = tile.stream + tile.streams;
    Keys none = { { 0, 0, 0, 0, 0, 0 }, tile.stream - 1, 0 }, here = keys_from(none, &tile, streams);
    if (here.number < end) request_keys(h, here, batch, head, hidden, k, v, slot_k, slot_v, stage, m);
    while (here.number < end) {
        wait_for_requests();
        __syncthreads();
        Stream s = here.s;
        Keys next = here;
        next.first += BLOCK;
        next = keys_from(next, &tile, streams);
        if (next.number < end) request_keys(h, next, batch, head, hidden, k, v, slot_k, slot_v, stage ^ 1, m);
        const int *bound = bounds + (long long)here.number * 2 * TILE;
        float logits[BLOCK / 8][4], slopes[BLOCK / 8][4];
        products(m->left, m->first[stage], logits);
        products(m->slope, m->second[stage], slopes);
        UNROLL for (int half = 0; half < 2; half++) {
            int low = bound[ROW(2 * half)], high = bound[TILE + ROW(2 * half)];
            UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) {
                int seen = sees_number(s, low, high, h->offset + query[half], m->at[stage][8 * n + COLUMN(i)]);
                float keep = h->threshold ? kept(h, s, draw[half], here.first + 8 * n + COLUMN(i)) : 1.0f;
                slope_of(seen, left[half], keep, factor, scale, &logits[n][i], &slopes[n][i]);
            }
        }
        add_products(slopes, m->first[stage], result);
        here = next;
        stage ^= 1;
    }
    wait_for_requests(); // of a tile without keys
    UNROLL for (int half = 0; half < 2; half++)
        if (query[half] >= 0) write_row(result, half, 1.0f, 1, grads + row_of(h->d_q, batch, head, query[half]));
}

// Requests BLOCK queries of a tile and the gradients of their outputs. What else is known of them is read by its thread and comes
// to memory later.
typedef struct { Left left; int query, low, high; unsigned draw; } Lane;
__device__ static Lane request_queries(const Header *h, int number, int stream, int first, int batch, int head, const Tile *tiles,
                                       const int *queries, const int *bounds, const float *q, const float *grad, const float *stats,
                                       const float *means, int stage, Memory *m) {
    int count = tiles[number].queries - first;
    const int *of_tile = queries + number * TILE + first;
#define QUERY(i) ((i) < count ? of_tile[i] : -1)
    LOAD(BLOCK, q + row_of(h->q, batch, head, 0), h->q.row, m->first[stage], QUERY(i));
    LOAD(BLOCK, grad + row_of(h->out, batch, head, 0), h->out.row, m->second[stage], QUERY(i));
    Lane lane = { { 0.0f, 0.0f, 0.0f }, -1, 0, 0, 0 };
    if (threadIdx.x >= BLOCK) return lane;
    lane.query = QUERY((int)threadIdx.x);
    lane.left = left_of(h, batch, head, lane.query, stats, means);
    lane.draw = draw_of(h, batch, head, lane.query);
    const int *bound = bounds + (long long)stream * 2 * TILE + first + threadIdx.x;
    lane.low = bound[0];
    lane.high = bound[TILE];
    return lane;
}

__device__ static void keep_lane(Lane lane, int stage, Memory *m) {
    int me = threadIdx.x;
    if (me >= BLOCK) return;
    m->most[stage][me] = lane.left.most, m->share[stage][me] = lane.left.share, m->mean[stage][me] = lane.left.mean;
    m->at[stage][me] = lane.query, m->low[stage][me] = lane.low, m->high[stage][me] = lane.high;
    m->draws[stage][me] = lane.draw;
}

// Gradients of the keys and values at TILE neighbouring positions (slots are counted behind the keys), each warp those of 16 of
// them. `visits` lists, for every block of a head, the tiles and streams that may see any of them: ranges in `blocks`, entries
// (tile, stream).
#ifndef EMULATED
#undef KERNEL
#define KERNEL extern "C" __global__ __launch_bounds__(THREADS, 2)
#endif
KERNEL void attend_back_keys(
    const Header *header, const Tile *tiles, const int *blocks, const int *visits, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, const float *slab, const float *grad, const float *stats, const float *means, float factor, float scale,
    int shared, float *parts, float *grads) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    const Header *h = header;
    int head = blockIdx.y, batch = blockIdx.z, me = threadIdx.x;
    int key_blocks = (int)((h->keys + TILE - 1) / TILE);
    int is_slots = (int)blockIdx.x >= key_blocks;
    int start = (is_slots ? (int)blockIdx.x - key_blocks : (int)blockIdx.x) * TILE;
    int count = (int)(is_slots ? h->slots : h->keys);
    const int *range = blocks + 2 * ((shared ? 0 : head) * gridDim.x + blockIdx.x);
    if (me < TILE) {
        int position = start + me;
        long long place = batch * (h->keys + h->slots) + (is_slots ? h->keys : 0) + position;
        m->lanes[me] = position < count && !(h->hidden && hidden[place]) ? position : -1;
    }
    __syncthreads();
    Place of_k = is_slots ? h->slot_k : h->k, of_v = is_slots ? h->slot_v : h->v;
    LOAD(TILE, (is_slots ? slot_k : k) + row_of(of_k, batch, head, 0), of_k.row, m->left, m->lanes[i]);
    LOAD(TILE, (is_slots ? slot_v : v) + row_of(of_v, batch, head, 0), of_v.row, m->slope, m->lanes[i]);
    int home[2] = { m->lanes[ROW(0)], m->lanes[ROW(2)] };
    float sum_k[WIDE / 8][4], sum_v[WIDE / 8][4];
    UNROLL for (int n = 0; n < WIDE / 8; n++) UNROLL for (int i = 0; i < 4; i++) sum_k[n][i] = sum_v[n][i] = 0.0f;
    int stage = 0, step = range[0] * (TILE / BLOCK), end = range[1] * (TILE / BLOCK);
#define REQUEST(step, stage) request_queries(h, visits[(step) / (TILE / BLOCK) * 2], visits[(step) / (TILE / BLOCK) * 2 + 1], \
    (step) % (TILE / BLOCK) * BLOCK, batch, head, tiles, queries, bounds, q, grad, stats, means, stage, m)
    if (step < end) keep_lane(REQUEST(step, stage), stage, m);
    for (; step < end; step++, stage ^= 1) {
        wait_for_requests();
        __syncthreads();
        Lane next;
        if (step + 1 < end) next = REQUEST(step + 1, stage ^ 1);
        Stream s = streams[visits[step / (TILE / BLOCK) * 2 + 1]];
        int at[2];
        UNROLL for (int half = 0; half < 2; half++) {
            int shift = home[half] - s.start;
            at[half] = home[half] >= 0 && shift >= 0 ? s.step == 1 ? shift : shift % s.step == 0 ? shift / s.step : -1 : -1;
        }
        // rows are keys and columns queries
        float logits[BLOCK / 8][4], slopes[BLOCK / 8][4];
        products(m->left, m->first[stage], logits);
        products(m->slope, m->second[stage], slopes);
        UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int i = 0; i < 2; i++) {
            int lane = 8 * n + COLUMN(i), low = m->low[stage][lane], high = m->high[stage][lane];
            Left left = { m->most[stage][lane], m->share[stage][lane], m->mean[stage][lane] };
            UNROLL for (int half = 0; half < 2; half++) {
                int seen = sees_number(s, low, high, h->offset + m->at[stage][lane], at[half]);
                float keep = h->threshold ? kept(h, s, m->draws[stage][lane], at[half]) : 1.0f;
                slope_of(seen, left, keep, factor, scale, &logits[n][i + 2 * half], &slopes[n][i + 2 * half]);
            }
        }
        add_products(logits, m->second[stage], sum_v);
        add_products(slopes, m->first[stage], sum_k);
        if (step + 1 < end) keep_lane(next, stage ^ 1, m);
    }
    UNROLL for (int half = 0; half < 2; half++) {
        if (home[half] < 0) continue;
        write_row(sum_k, half, 1.0f, 1, grads + row_of(is_slots ? h->d_slot_k : h->d_k, batch, head, home[half]));
        write_row(sum_v, half, 1.0f, 1, grads + row_of(is_slots ? h->d_slot_v : h->d_v, batch, head, home[half]));
    }
}
