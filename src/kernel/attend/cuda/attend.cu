// Pattern softmax attention, forward and backward, in f32 without a stored score matrix.
//
// A block of THREADS threads computes a tile of up to TILE queries of one head, or the gradients of BLOCK keys. The compiler's
// command line sets WIDTH, the width of a head, BLOCK, the number of keys at a time, and MEMORY, the bytes of a block's working
// memory. Every sum runs in an order that follows from the plan, without atomics: the same bits every time. Logits are in
// units of ln 2.
//
// This is plain C apart from the CUDA qualifiers: the tests compile it for the CPU as well.

#define THREADS 128
#define TILE 64
#define PITCH (WIDTH + 1)
#define KEYS (BLOCK / 8) // keys per thread of a tile of logits: 16 x 8 threads, 4 queries each
#define COLUMNS ((WIDTH + 7) / 8)

// Working memory of a block.
typedef struct {
    float left[TILE * PITCH], slope[TILE * PITCH], keys[BLOCK * PITCH], values[BLOCK * PITCH];
    float weights[TILE * (BLOCK + 1)], slopes[TILE * (BLOCK + 1)], most[TILE], share[TILE], mean[TILE];
    int lanes[TILE], home[BLOCK], at[BLOCK];
} Memory;
typedef char memory_has_its_size[sizeof(Memory) == MEMORY ? 1 : -1];

#ifndef KERNEL
#define KERNEL extern "C" __global__
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef SHARED_MEMORY
#define SHARED_MEMORY extern __shared__ float memory[]
#endif

// Where the rows of an operand lie: start, and the distance of samples, heads and rows.
typedef struct { long long start, batch, head, row; } Place;

// Sizes and places: the same words in the same order as `header` in tables.rs writes them.
typedef struct {
    long long keys, slots, queries, heads, offset, hidden; // hidden: whether some keys are
    Place q, k, v, slot_k, slot_v, out, d_q, d_k, d_v, d_slot_k, d_slot_v;
} Header;

// Candidate keys of a tile: key number i stands at start + i * step; numbers from first to last are seen by some lane.
typedef struct { int start, step, slots, skip, first, last; } Stream;

// Queries of a tile: its streams, and how many lanes it has.
typedef struct { int stream, streams, queries; } Tile;

__device__ static long long row_of(Place p, int batch, int head, long long i) {
    return p.start + batch * p.batch + head * p.head + i * p.row;
}

// Rows of up to `count` lanes or keys to shared memory, zeros behind them.
__device__ static void load(const float *from, Place place, int batch, int head, const int *rows, int count, int size,
                            float *to) {
    for (int at = threadIdx.x; at < size * WIDTH; at += THREADS) {
        int i = at / WIDTH, x = at % WIDTH;
        float value = 0.0f;
        if (i < count && rows[i] >= 0) value = from[row_of(place, batch, head, rows[i]) + x];
        to[i * PITCH + x] = value;
    }
}

// Keys and values (or those of slots) at BLOCK positions to shared memory.
__device__ static void load_keys(const Header *h, int slots, int batch, int head, const int *at, const float *k,
                                 const float *v, const float *slot_k, const float *slot_v, Memory *to) {
    load(slots ? slot_k : k, slots ? h->slot_k : h->k, batch, head, at, BLOCK, BLOCK, to->keys);
    load(slots ? slot_v : v, slots ? h->slot_v : h->v, batch, head, at, BLOCK, BLOCK, to->values);
}

// Positions of BLOCK keys of a stream from number `first` on; -1 where there is none or the key is hidden.
__device__ static void positions(const Header *h, Stream s, int first, int batch, const int *hidden, int *to) {
    if (threadIdx.x < BLOCK) {
        int number = first + threadIdx.x, position = s.start + number * s.step;
        long long at = batch * (h->keys + h->slots) + (s.slots ? h->keys : 0) + position;
        int seen = number < s.last && !(h->hidden && hidden[at]);
        to[threadIdx.x] = seen ? position : -1;
    }
}

// Products of 4 queries (rows of a) and KEYS keys (rows of b) of this thread.
__device__ static void products(const float *a, const float *b, float sums[4][KEYS]) {
    int query = threadIdx.x / 8 * 4, key = threadIdx.x % 8 * KEYS;
    for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++) sums[i][j] = 0.0f;
    for (int x = 0; x < WIDTH; x++) {
        float left[4], right[KEYS];
        for (int i = 0; i < 4; i++) left[i] = a[(query + i) * PITCH + x];
        for (int j = 0; j < KEYS; j++) right[j] = b[(key + j) * PITCH + x];
        for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++) sums[i][j] += left[i] * right[j];
    }
}

// Whether lane `lane` at absolute position `t` sees key number `number` at `position`.
__device__ static int sees(Stream s, const int *low, const int *high, int lane, long long t, int number, int position) {
    if (position < 0 || number < low[lane] || number >= high[lane]) return 0;
    if (s.skip == 0) return 1;
    long long distance = position > t ? position - t : t - position;
    return distance % s.skip != 0;
}

KERNEL void attend_forward(
    const Header *header, const Tile *tiles, const int *head_tiles, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, float factor, float *out, float *stats) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    float *left = m->left, *keys = m->keys, *values = m->values, *weights = m->weights;
    float *most = m->most, *sum = m->share, *correction = m->mean;
    int *lanes = m->lanes, *at = m->at;
    const Header *h = header;
    int head = blockIdx.y, batch = blockIdx.z;
    if ((int)blockIdx.x >= head_tiles[2 * head + 1]) return;
    int number = head_tiles[2 * head] + blockIdx.x;
    Tile tile = tiles[number];
    int me = threadIdx.x, row = me / 8 * 4, column = me % 8;
    if (me < TILE) {
        lanes[me] = me < tile.queries ? queries[number * TILE + me] : -1;
        most[me] = -INFINITY;
        sum[me] = 0.0f;
    }
    float result[4][COLUMNS];
    for (int i = 0; i < 4; i++) for (int x = 0; x < COLUMNS; x++) result[i][x] = 0.0f;
    __syncthreads();
    load(q, h->q, batch, head, lanes, tile.queries, TILE, left);
    for (int stream = tile.stream; stream < tile.stream + tile.streams; stream++) {
        Stream s = streams[stream];
        const int *low = bounds + stream * 2 * TILE, *high = low + TILE;
        for (int first = s.first; first < s.last; first += BLOCK) {
            positions(h, s, first, batch, hidden, at);
            __syncthreads();
            load_keys(h, s.slots, batch, head, at, k, v, slot_k, slot_v, m);
            __syncthreads();
            float logits[4][KEYS];
            products(left, keys, logits);
            for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++) {
                int lane = row + i, key = column * KEYS + j;
                long long t = h->offset + lanes[lane];
                int seen = sees(s, low, high, lane, t, first + key, at[key]);
                weights[lane * (BLOCK + 1) + key] = seen ? factor * logits[i][j] : -INFINITY;
            }
            __syncthreads();
            if (me < TILE) {
                float old = most[me], largest = old, total = 0.0f;
                for (int key = 0; key < BLOCK; key++) largest = fmaxf(largest, weights[me * (BLOCK + 1) + key]);
                float base = largest == -INFINITY ? 0.0f : largest;
                for (int key = 0; key < BLOCK; key++) {
                    float weight = exp2f(weights[me * (BLOCK + 1) + key] - base);
                    weights[me * (BLOCK + 1) + key] = weight;
                    total += weight;
                }
                float scale = exp2f(old - base);
                most[me] = largest;
                correction[me] = scale;
                sum[me] = sum[me] * scale + total;
            }
            __syncthreads();
            for (int i = 0; i < 4; i++) {
                float scale = correction[row + i];
                for (int x = 0; x < COLUMNS; x++) result[i][x] *= scale;
            }
            for (int key = 0; key < BLOCK; key++) for (int i = 0; i < 4; i++) {
                float weight = weights[(row + i) * (BLOCK + 1) + key];
                for (int x = 0; x < COLUMNS; x++) {
                    int element = column + 8 * x;
                    if (element < WIDTH) result[i][x] += weight * values[key * PITCH + element];
                }
            }
            __syncthreads();
        }
    }
    for (int i = 0; i < 4; i++) {
        int lane = row + i;
        if (lanes[lane] < 0) continue;
        float share = sum[lane] > 0.0f ? 1.0f / sum[lane] : 0.0f;
        float *to = out + row_of(h->out, batch, head, lanes[lane]);
        for (int x = 0; x < COLUMNS; x++) {
            int element = column + 8 * x;
            if (element < WIDTH) to[element] = result[i][x] * share;
        }
        if (column == 0 && stats) {
            long long place = ((long long)batch * h->heads + head) * h->queries + lanes[lane];
            stats[2 * place] = most[lane];
            stats[2 * place + 1] = share;
        }
    }
}

// Per query: the product of the output and its gradient.
KERNEL void attend_means(const Header *header, const float *out, const float *grad, float *means) {
    const Header *h = header;
    int head = blockIdx.y, batch = blockIdx.z;
    long long query = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (query >= h->queries) return;
    long long place = row_of(h->out, batch, head, query);
    float sum = 0.0f;
    for (int x = 0; x < WIDTH; x++) sum += out[place + x] * grad[place + x];
    means[((long long)batch * h->heads + head) * h->queries + query] = sum;
}

// Probabilities of this thread's 4 x KEYS pairs, and the gradients of their logits.
__device__ static void differentiate(Stream s, const int *low, const int *high, const int *lanes, const int *at, int first,
                                     long long offset, const float *most, const float *share, const float *mean,
                                     float factor, float scale, float logits[4][KEYS], float slopes[4][KEYS]) {
    int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8 * KEYS;
    for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++) {
        int lane = row + i, key = column + j;
        int number = s.step > 0 && at[key] >= 0 ? (at[key] - s.start) / s.step : first + key;
        float p = 0.0f;
        if (sees(s, low, high, lane, offset + lanes[lane], number, at[key]))
            p = exp2f(factor * logits[i][j] - most[lane]) * share[lane];
        logits[i][j] = p;
        slopes[i][j] = scale * p * (slopes[i][j] - mean[lane]);
    }
}

// Saved numbers of the lanes of a tile.
__device__ static void recall(const Header *h, int batch, int head, int number, Tile tile, const int *queries,
                              const float *stats, const float *means, int *lanes, float *most, float *share, float *mean) {
    int me = threadIdx.x;
    if (me >= TILE) return;
    int query = me < tile.queries ? queries[number * TILE + me] : -1;
    long long place = ((long long)batch * h->heads + head) * h->queries + query;
    lanes[me] = query;
    most[me] = query < 0 || stats[2 * place] == -INFINITY ? 0.0f : stats[2 * place];
    share[me] = query < 0 ? 0.0f : stats[2 * place + 1];
    mean[me] = query < 0 ? 0.0f : means[place];
}

KERNEL void attend_back_queries(
    const Header *header, const Tile *tiles, const int *head_tiles, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, const float *grad, const float *stats, const float *means, float factor, float scale, float *grads) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    float *left = m->left, *slope = m->slope, *keys = m->keys, *values = m->values, *weights = m->weights;
    float *most = m->most, *share = m->share, *mean = m->mean;
    int *lanes = m->lanes, *at = m->at;
    const Header *h = header;
    int head = blockIdx.y, batch = blockIdx.z;
    if ((int)blockIdx.x >= head_tiles[2 * head + 1]) return;
    int number = head_tiles[2 * head] + blockIdx.x;
    Tile tile = tiles[number];
    int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8;
    recall(h, batch, head, number, tile, queries, stats, means, lanes, most, share, mean);
    float result[4][COLUMNS];
    for (int i = 0; i < 4; i++) for (int x = 0; x < COLUMNS; x++) result[i][x] = 0.0f;
    __syncthreads();
    load(q, h->q, batch, head, lanes, tile.queries, TILE, left);
    load(grad, h->out, batch, head, lanes, tile.queries, TILE, slope);
    for (int stream = tile.stream; stream < tile.stream + tile.streams; stream++) {
        Stream s = streams[stream];
        const int *low = bounds + stream * 2 * TILE, *high = low + TILE;
        for (int first = s.first; first < s.last; first += BLOCK) {
            positions(h, s, first, batch, hidden, at);
            __syncthreads();
            load_keys(h, s.slots, batch, head, at, k, v, slot_k, slot_v, m);
            __syncthreads();
            float logits[4][KEYS], slopes[4][KEYS];
            products(left, keys, logits);
            products(slope, values, slopes);
            differentiate(s, low, high, lanes, at, first, h->offset, most, share, mean, factor, scale, logits, slopes);
            for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++)
                weights[(row + i) * (BLOCK + 1) + column * KEYS + j] = slopes[i][j];
            __syncthreads();
            for (int key = 0; key < BLOCK; key++) for (int i = 0; i < 4; i++) {
                float weight = weights[(row + i) * (BLOCK + 1) + key];
                for (int x = 0; x < COLUMNS; x++) {
                    int element = column + 8 * x;
                    if (element < WIDTH) result[i][x] += weight * keys[key * PITCH + element];
                }
            }
            __syncthreads();
        }
    }
    for (int i = 0; i < 4; i++) {
        if (lanes[row + i] < 0) continue;
        float *to = grads + row_of(h->d_q, batch, head, lanes[row + i]);
        for (int x = 0; x < COLUMNS; x++) {
            int element = column + 8 * x;
            if (element < WIDTH) to[element] += result[i][x];
        }
    }
}

// Gradients of the keys and values at BLOCK neighbouring positions (slots are counted behind the keys). `visits` lists, for
// every block of a head, the tiles and streams that may see any of them: ranges in `blocks`, entries (tile, stream).
KERNEL void attend_back_keys(
    const Header *header, const Tile *tiles, const int *blocks, const int *visits, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, const float *grad, const float *stats, const float *means, float factor, float scale, int shared,
    float *grads) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    float *left = m->left, *slope = m->slope, *keys = m->keys, *values = m->values;
    float *weights = m->weights, *slopes_of = m->slopes, *most = m->most, *share = m->share, *mean = m->mean;
    int *lanes = m->lanes, *home = m->home, *at = m->at;
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
        home[me] = position < count && !(h->hidden && hidden[place]) ? position : -1;
    }
    __syncthreads();
    load_keys(h, is_slots, batch, head, home, k, v, slot_k, slot_v, m);
    // 128 threads: 8 columns of 16 groups of keys
    enum { GROUP = (BLOCK + 15) / 16 };
    float sum_k[GROUP][COLUMNS], sum_v[GROUP][COLUMNS];
    int group = me / 8 * GROUP, column = me % 8, row = me / 8 * 4;
    for (int i = 0; i < GROUP; i++) for (int x = 0; x < COLUMNS; x++) sum_k[i][x] = sum_v[i][x] = 0.0f;
    for (int visit = range[0]; visit < range[1]; visit++) {
        int number = visits[2 * visit], stream = visits[2 * visit + 1];
        Tile tile = tiles[number];
        Stream s = streams[stream];
        const int *low = bounds + stream * 2 * TILE, *high = low + TILE;
        __syncthreads();
        recall(h, batch, head, number, tile, queries, stats, means, lanes, most, share, mean);
        if (me < BLOCK) {
            int shift = home[me] - s.start;
            at[me] = home[me] >= 0 && shift >= 0 && shift % s.step == 0 ? home[me] : -1;
        }
        __syncthreads();
        load(q, h->q, batch, head, lanes, tile.queries, TILE, left);
        load(grad, h->out, batch, head, lanes, tile.queries, TILE, slope);
        __syncthreads();
        float logits[4][KEYS], slopes[4][KEYS];
        products(left, keys, logits);
        products(slope, values, slopes);
        differentiate(s, low, high, lanes, at, 0, h->offset, most, share, mean, factor, scale, logits, slopes);
        for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++) {
            int place = (row + i) * (BLOCK + 1) + column * KEYS + j;
            weights[place] = logits[i][j];
            slopes_of[place] = slopes[i][j];
        }
        __syncthreads();
        for (int lane = 0; lane < TILE; lane++) for (int i = 0; i < GROUP; i++) {
            if (group + i >= BLOCK) continue;
            float weight = weights[lane * (BLOCK + 1) + group + i], steep = slopes_of[lane * (BLOCK + 1) + group + i];
            for (int x = 0; x < COLUMNS; x++) {
                int element = column + 8 * x;
                if (element >= WIDTH) continue;
                sum_v[i][x] += weight * slope[lane * PITCH + element];
                sum_k[i][x] += steep * left[lane * PITCH + element];
            }
        }
    }
    for (int i = 0; i < GROUP; i++) {
        if (group + i >= BLOCK || home[group + i] < 0) continue;
        long long position = home[group + i];
        float *to_k = grads + row_of(is_slots ? h->d_slot_k : h->d_k, batch, head, position);
        float *to_v = grads + row_of(is_slots ? h->d_slot_v : h->d_v, batch, head, position);
        for (int x = 0; x < COLUMNS; x++) {
            int element = column + 8 * x;
            if (element >= WIDTH) continue;
            to_k[element] += sum_k[i][x];
            to_v[element] += sum_v[i][x];
        }
    }
}
