// Behind common.cu: output and gradients of queries, keys and values by tensor cores. The factors of products are rounded to bf16
// (to nearest, ties to even) and their sums are f32; all that is no product is f32, the softmax among it.
//
// A warp has 16 rows of a tile: of queries, or of keys in attend_back_keys. Every lane has its part, a fragment, of the matrices
// that are multiplied. With g = lane / 4 and t = lane % 4 (PTX ISA, fragments of mma.m16n8k16):
//
//     a   16 x 16   words 0 and 1: rows g and g + 8, columns 2t and 2t + 1; words 2 and 3: the same rows, columns 2t + 8 and 2t + 9
//     b   16 x 8    word 0: rows 2t and 2t + 1 of column g; word 1: rows 2t + 8 and 2t + 9
//     c   16 x 8    numbers 0 and 1: row g, columns 2t and 2t + 1; numbers 2 and 3: row g + 8
//
// so that two tiles of c side by side are the numbers of an a in the same lanes.

#define WARP 32
#define WIDE ((WIDTH + 15) / 16 * 16) // columns, and zeros up to a whole fragment
#define DEPTH (WIDE / 16)
// Words between two rows, and two columns: the lanes of a warp read their words of a fragment from different banks.
#define ROW_PITCH (WIDE / 2 + 4)
#define COLUMN_PITCH (TILE / 2 + 4)

// TILE rows of bf16 as words of two: neighbours in a row, and neighbours in a column.
typedef struct { unsigned rows[TILE * ROW_PITCH], columns[WIDE * COLUMN_PITCH]; } Pairs;

// Working memory of a block.
typedef struct {
    Pairs first, second;
    float most[TILE], share[TILE], mean[TILE];
    int lanes[TILE], home[BLOCK], at[BLOCK];
} Memory;
typedef char memory_has_its_size[sizeof(Memory) == MEMORY && BLOCK == TILE ? 1 : -1];

#ifndef EMULATED
// Two numbers rounded to bf16, the first in the lower half.
__device__ static unsigned bf16_pair(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// c += a b, by all lanes of a warp.
__device__ static void multiply_add(float c[4], const unsigned a[4], const unsigned b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// Words of two elements of TILE rows, zeros where there are none, to `rows` and, if it is not null, to `columns`. A warp takes 16
// rows and 8 columns at a time, a lane two of each.
__device__ static void load(const float *from, Place place, int batch, int head, const int *numbers, unsigned *rows,
                            unsigned *columns) {
    int lane = threadIdx.x % WARP;
    for (int part = threadIdx.x / WARP; part < TILE / 16 * (WIDE / 8); part += THREADS / WARP) {
        int i = part / (WIDE / 8) * 16 + lane / 4 * 2, x = part % (WIDE / 8) * 8 + lane % 4 * 2;
        float element[2][2];
        for (int r = 0; r < 2; r++) for (int c = 0; c < 2; c++) {
            int is_there = numbers[i + r] >= 0 && x + c < WIDTH;
            element[r][c] = is_there ? from[row_of(place, batch, head, numbers[i + r]) + x + c] : 0.0f;
        }
        if (rows) for (int r = 0; r < 2; r++) rows[(i + r) * ROW_PITCH + x / 2] = bf16_pair(element[r][0], element[r][1]);
        if (columns) for (int c = 0; c < 2; c++)
            columns[(x + c) * COLUMN_PITCH + i / 2] = bf16_pair(element[0][c], element[1][c]);
    }
}

// The rows of this warp as fragments.
__device__ static void left_factor(const unsigned *rows, unsigned a[DEPTH][4]) {
    int lane = threadIdx.x % WARP;
    const unsigned *word = rows + (threadIdx.x / WARP * 16 + lane / 4) * ROW_PITCH + lane % 4;
    UNROLL for (int k = 0; k < DEPTH; k++) UNROLL for (int i = 0; i < 4; i++)
        a[k][i] = word[i % 2 * 8 * ROW_PITCH + i / 2 * 4 + 8 * k];
}

// Fragment number k of 8 lines, rows or columns, of this pitch from `first` on.
__device__ static void right_factor(const unsigned *lines, int pitch, int first, int k, unsigned b[2]) {
    int lane = threadIdx.x % WARP;
    const unsigned *word = lines + (first + lane / 4) * pitch + lane % 4 + 8 * k;
    b[0] = word[0];
    b[1] = word[4];
}

// Products of the rows of this warp and 8 rows from `first` on.
__device__ static void products(unsigned a[DEPTH][4], const unsigned *rows, int first, float sums[4]) {
    UNROLL for (int i = 0; i < 4; i++) sums[i] = 0.0f;
    UNROLL for (int k = 0; k < DEPTH; k++) {
        unsigned b[2];
        right_factor(rows, ROW_PITCH, first, k, b);
        multiply_add(sums, a[k], b);
    }
}

// Adds to the rows of this warp the products of 16 weights each with the rows from 16 k on that `columns` are of.
__device__ static void add_products(float weights[2][4], const unsigned *columns, int k, float result[WIDE / 8][4]) {
    unsigned a[4];
    UNROLL for (int i = 0; i < 4; i++) a[i] = bf16_pair(weights[i / 2][i % 2 * 2], weights[i / 2][i % 2 * 2 + 1]);
    UNROLL for (int n = 0; n < WIDE / 8; n++) {
        unsigned b[2];
        right_factor(columns, COLUMN_PITCH, 8 * n, k, b);
        multiply_add(result[n], a, b);
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

// Row and column of number i of a c in its tile of 16 rows of this warp and 8 columns.
#define ROW(i) ((int)threadIdx.x / WARP * 16 + (int)threadIdx.x % WARP / 4 + (i) / 2 * 8)
#define COLUMN(i) ((int)threadIdx.x % 4 * 2 + (i) % 2)

// Adds the numbers of this thread's row number `half` to a row in memory.
__device__ static void write_row(float result[WIDE / 8][4], int half, float factor, int add, float *to) {
    UNROLL for (int n = 0; n < WIDE / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) {
        int x = 8 * n + COLUMN(i);
        if (x < WIDTH) to[x] = factor * result[n][i] + (add ? to[x] : 0.0f);
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
    load(q, h->q, batch, head, m->lanes, m->first.rows, 0);
    __syncthreads();
    unsigned left[DEPTH][4];
    left_factor(m->first.rows, left);
    float result[WIDE / 8][4], most[2] = { -INFINITY, -INFINITY }, sum[2] = { 0.0f, 0.0f };
    UNROLL for (int n = 0; n < WIDE / 8; n++) UNROLL for (int i = 0; i < 4; i++) result[n][i] = 0.0f;
    for (int stream = tile.stream; stream < tile.stream + tile.streams; stream++) {
        Stream s = streams[stream];
        const int *low = bounds + stream * 2 * TILE, *high = low + TILE;
        for (int first = s.first; first < s.last; first += BLOCK) {
            positions(h, s, first, batch, hidden, m->at);
            __syncthreads();
            load(s.slots ? slot_k : k, s.slots ? h->slot_k : h->k, batch, head, m->at, m->first.rows, 0);
            load(s.slots ? slot_v : v, s.slots ? h->slot_v : h->v, batch, head, m->at, 0, m->second.columns);
            __syncthreads();
            float logits[BLOCK / 8][4];
            UNROLL for (int n = 0; n < BLOCK / 8; n++) products(left, m->first.rows, 8 * n, logits[n]);
            UNROLL for (int half = 0; half < 2; half++) {
                int lane = ROW(2 * half);
                long long t = h->offset + m->lanes[lane];
                float largest = most[half], total = 0.0f;
                UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) {
                    int key = 8 * n + COLUMN(i), seen = sees(s, low, high, lane, t, first + key, m->at[key]);
                    logits[n][i] = seen ? factor * logits[n][i] : -INFINITY;
                    largest = fmaxf(largest, logits[n][i]);
                }
                largest = row_max(largest);
                float base = largest == -INFINITY ? 0.0f : largest, scale = exp2f(most[half] - base);
                UNROLL for (int n = 0; n < BLOCK / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) {
                    logits[n][i] = exp2f(logits[n][i] - base);
                    total += logits[n][i];
                }
                most[half] = largest;
                sum[half] = sum[half] * scale + total;
                UNROLL for (int n = 0; n < WIDE / 8; n++) UNROLL for (int i = 2 * half; i < 2 * half + 2; i++)
                    result[n][i] *= scale;
            }
            UNROLL for (int part = 0; part < BLOCK / 16; part++) add_products(logits + 2 * part, m->second.columns, part, result);
            __syncthreads();
        }
    }
    UNROLL for (int half = 0; half < 2; half++) {
        float total = row_sum(sum[half]), share = total > 0.0f ? 1.0f / total : 0.0f;
        int lane = ROW(2 * half), query = m->lanes[lane];
        if (query < 0) continue;
        write_row(result, half, share, 0, out + row_of(h->out, batch, head, query));
        if (me % 4 == 0) {
            long long place = ((long long)batch * h->heads + head) * h->queries + query;
            stats[2 * place] = most[half];
            stats[2 * place + 1] = share;
        }
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
    int head = blockIdx.y, batch = blockIdx.z;
    if ((int)blockIdx.x >= head_tiles[2 * head + 1]) return;
    int number = head_tiles[2 * head] + blockIdx.x;
    Tile tile = tiles[number];
    recall(h, batch, head, number, tile, queries, stats, means, m->lanes, m->most, m->share, m->mean);
    __syncthreads();
    load(q, h->q, batch, head, m->lanes, m->first.rows, 0);
    load(grad, h->out, batch, head, m->lanes, m->second.rows, 0);
    __syncthreads();
    unsigned left[DEPTH][4], slope[DEPTH][4];
    left_factor(m->first.rows, left);
    left_factor(m->second.rows, slope);
    float result[WIDE / 8][4];
    UNROLL for (int n = 0; n < WIDE / 8; n++) UNROLL for (int i = 0; i < 4; i++) result[n][i] = 0.0f;
    for (int stream = tile.stream; stream < tile.stream + tile.streams; stream++) {
        Stream s = streams[stream];
        const int *low = bounds + stream * 2 * TILE, *high = low + TILE;
        for (int first = s.first; first < s.last; first += BLOCK) {
            positions(h, s, first, batch, hidden, m->at);
            __syncthreads();
            load(s.slots ? slot_k : k, s.slots ? h->slot_k : h->k, batch, head, m->at, m->first.rows, m->first.columns);
            load(s.slots ? slot_v : v, s.slots ? h->slot_v : h->v, batch, head, m->at, m->second.rows, 0);
            __syncthreads();
            for (int part = 0; part < BLOCK / 16; part++) {
                float logits[2][4], slopes[2][4];
                UNROLL for (int n = 0; n < 2; n++) {
                    products(left, m->first.rows, 16 * part + 8 * n, logits[n]);
                    products(slope, m->second.rows, 16 * part + 8 * n, slopes[n]);
                    UNROLL for (int i = 0; i < 4; i++)
                        differentiate(s, low, high, m->lanes, m->at, first, h->offset, m->most, m->share, m->mean, factor, scale,
                                      ROW(i), 16 * part + 8 * n + COLUMN(i), &logits[n][i], &slopes[n][i]);
                }
                add_products(slopes, m->first.columns, part, result);
            }
            __syncthreads();
        }
    }
    UNROLL for (int half = 0; half < 2; half++) {
        int query = m->lanes[ROW(2 * half)];
        if (query >= 0) write_row(result, half, 1.0f, 1, grads + row_of(h->d_q, batch, head, query));
    }
}

// Gradients of the keys and values at BLOCK neighbouring positions (slots are counted behind the keys), each warp those of 16 of
// them. `visits` lists, for every block of a head, the tiles and streams that may see any of them: ranges in `blocks`, entries
// (tile, stream).
KERNEL void attend_back_keys(
    const Header *header, const Tile *tiles, const int *blocks, const int *visits, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, const float *slab, const float *grad, const float *stats, const float *means, float factor, float scale,
    int shared, float *parts, float *grads) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    const Header *h = header;
    int head = blockIdx.y, batch = blockIdx.z, me = threadIdx.x;
    int key_blocks = (int)((h->keys + BLOCK - 1) / BLOCK);
    int is_slots = (int)blockIdx.x >= key_blocks;
    int start = (is_slots ? (int)blockIdx.x - key_blocks : (int)blockIdx.x) * BLOCK;
    int count = (int)(is_slots ? h->slots : h->keys);
    const int *range = blocks + 2 * ((shared ? 0 : head) * gridDim.x + blockIdx.x);
    if (me < BLOCK) {
        int position = start + me;
        long long place = batch * (h->keys + h->slots) + (is_slots ? h->keys : 0) + position;
        m->home[me] = position < count && !(h->hidden && hidden[place]) ? position : -1;
    }
    __syncthreads();
    load(is_slots ? slot_k : k, is_slots ? h->slot_k : h->k, batch, head, m->home, m->first.rows, 0);
    load(is_slots ? slot_v : v, is_slots ? h->slot_v : h->v, batch, head, m->home, m->second.rows, 0);
    __syncthreads();
    unsigned key[DEPTH][4], value[DEPTH][4];
    left_factor(m->first.rows, key);
    left_factor(m->second.rows, value);
    float sum_k[WIDE / 8][4], sum_v[WIDE / 8][4];
    UNROLL for (int n = 0; n < WIDE / 8; n++) UNROLL for (int i = 0; i < 4; i++) sum_k[n][i] = sum_v[n][i] = 0.0f;
    for (int visit = range[0]; visit < range[1]; visit++) {
        int number = visits[2 * visit], stream = visits[2 * visit + 1];
        Tile tile = tiles[number];
        Stream s = streams[stream];
        const int *low = bounds + stream * 2 * TILE, *high = low + TILE;
        __syncthreads();
        recall(h, batch, head, number, tile, queries, stats, means, m->lanes, m->most, m->share, m->mean);
        if (me < BLOCK) {
            int shift = m->home[me] - s.start;
            m->at[me] = m->home[me] >= 0 && shift >= 0 && shift % s.step == 0 ? m->home[me] : -1;
        }
        __syncthreads();
        load(q, h->q, batch, head, m->lanes, m->first.rows, m->first.columns);
        load(grad, h->out, batch, head, m->lanes, m->second.rows, m->second.columns);
        __syncthreads();
        // rows are keys and columns queries
        for (int part = 0; part < TILE / 16; part++) {
            float logits[2][4], slopes[2][4];
            UNROLL for (int n = 0; n < 2; n++) {
                products(key, m->first.rows, 16 * part + 8 * n, logits[n]);
                products(value, m->second.rows, 16 * part + 8 * n, slopes[n]);
                UNROLL for (int i = 0; i < 4; i++)
                    differentiate(s, low, high, m->lanes, m->at, 0, h->offset, m->most, m->share, m->mean, factor, scale,
                                  16 * part + 8 * n + COLUMN(i), ROW(i), &logits[n][i], &slopes[n][i]);
            }
            add_products(logits, m->second.columns, part, sum_v);
            add_products(slopes, m->first.columns, part, sum_k);
        }
    }
    UNROLL for (int half = 0; half < 2; half++) {
        int position = m->home[ROW(2 * half)];
        if (position < 0) continue;
        write_row(sum_k, half, 1.0f, 1, grads + row_of(is_slots ? h->d_slot_k : h->d_k, batch, head, position));
        write_row(sum_v, half, 1.0f, 1, grads + row_of(is_slots ? h->d_slot_v : h->d_v, batch, head, position));
    }
}
