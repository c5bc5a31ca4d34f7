// Behind common.cu: tiles of f32 in shared memory, products of them, and logits that depend on distances.

#define PITCH (WIDTH + 1)
#define KEYS (BLOCK / 8) // keys per thread of a tile of logits: 16 x 8 threads, 4 queries each
#define COLUMNS ((WIDTH + 7) / 8)
#define BAND (TILE + BLOCK) // rows between the nearest and the furthest of a tile and BLOCK keys, where both are neighbours

// Working memory of a block.
typedef struct {
    float left[TILE * PITCH], slope[TILE * PITCH], keys[BLOCK * PITCH], values[BLOCK * PITCH];
    float weights[TILE * (BLOCK + 1)], slopes[TILE * (BLOCK + 1)], most[TILE], share[TILE], mean[TILE];
    int lanes[TILE], home[BLOCK], at[BLOCK];
#if RELATIVE
    float band[(BAND + 1) * PITCH], near[BAND + 1], lean[BLOCK]; // row BAND is zero
    int base[TILE];
#endif
} Memory;
typedef char memory_has_its_size[sizeof(Memory) == MEMORY ? 1 : -1];

// Positions of BLOCK keys of a stream from number `first` on; -1 where there is none or the key is hidden.
__device__ static void positions(const Header *h, Stream s, int first, int batch, const int *hidden, int *to) {
    if (threadIdx.x < BLOCK) {
        int number = first + threadIdx.x, position = s.start + number * s.step;
        long long at = batch * (h->keys + h->slots) + (s.slots ? h->keys : 0) + position;
        int seen = number < s.last && !(h->hidden && hidden[at]);
        to[threadIdx.x] = seen ? position : -1;
    }
}

// Whether lane `lane` at absolute position `t` sees key number `number` at `position`.
__device__ static int sees(Stream s, const int *low, const int *high, int lane, long long t, int number, int position) {
    if (position < 0 || number < low[lane] || number >= high[lane]) return 0;
    if (s.skip == 0) return 1;
    long long distance = position > t ? position - t : t - position;
    return distance % s.skip != 0;
}

// The probability of a pair in place of its logit, and the gradient of the logit in place of that of the probability.
__device__ static void differentiate(Stream s, const int *low, const int *high, const int *lanes, const int *at, int first,
                                     long long offset, const float *most, const float *share, const float *mean, float factor,
                                     float scale, int lane, int key, float *logit, float *slope) {
    int number = s.step > 0 && at[key] >= 0 ? (at[key] - s.start) / s.step : first + key;
    float p = 0.0f;
    if (sees(s, low, high, lane, offset + lanes[lane], number, at[key])) p = exp2f(factor * *logit - most[lane]) * share[lane];
    *logit = p;
    *slope = scale * p * (*slope - mean[lane]);
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

#if RELATIVE
#define NOWHERE (-(1 << 30))

// Of `slots` or else of keys: the first row of a head's table.
__device__ static long long table_at(const Header *h, int slots, int head) {
    if (!slots) return head * h->distances * WIDTH;
    return (h->heads * (h->distances + 2) + head * h->slot_distances) * WIDTH;
}

// Bias u (0) or v (1) of a head.
__device__ static long long bias_at(const Header *h, int which, int head) {
    return (h->heads * (h->distances + which) + head) * WIDTH;
}

// What a lane's distance to position p is more than -p.
__device__ static void set_bases(const Header *h, int slots, Memory *m) {
    if (threadIdx.x >= TILE) return;
    int query = m->lanes[threadIdx.x];
    long long t = h->offset + query;
    m->base[threadIdx.x] = query < 0 ? NOWHERE : (int)(slots ? t / h->segment * h->rank - 1 : t);
}

// Which of `count` rows lie at base - p for some lane and some p from `low` to `high`.
typedef struct { int first, end; } Range;
__device__ static Range reach(const Memory *m, int low, int high, long long count) {
    int nearest = -NOWHERE, furthest = NOWHERE;
    for (int lane = 0; lane < TILE; lane++) {
        int base = m->base[lane];
        if (base == NOWHERE) continue;
        nearest = base < nearest ? base : nearest;
        furthest = base > furthest ? base : furthest;
    }
    Range range = { nearest - high, furthest - low + 1 };
    if (range.first < 0) range.first = 0;
    if (range.end > count) range.end = (int)count;
    return range;
}

// Rows from number `first` on to the band, zeros where there are none, and their products with `bias` (null: zeros).
__device__ static void load_band(const float *from, long long stride, int first, long long count, const float *bias, Memory *m) {
    __syncthreads();
    for (int at = threadIdx.x; at < (BAND + 1) * WIDTH; at += THREADS) {
        int i = at / WIDTH, x = at % WIDTH;
        m->band[i * PITCH + x] = i < BAND && first + i < count ? from[(first + i) * stride + x] : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x <= BAND) {
        float sum = 0.0f;
        if (bias) for (int x = 0; x < WIDTH; x++) sum += bias[x] * m->band[threadIdx.x * PITCH + x];
        m->near[threadIdx.x] = sum;
    }
    __syncthreads();
}

// Row of the band at base - `position` of a lane; the row of zeros if there is none.
__device__ static int in_band(const Memory *m, int lane, int position, int first) {
    int row = m->base[lane] - position - first;
    return position >= 0 && row >= 0 && row < BAND ? row : BAND;
}

// Adds to this thread's pairs the products of 4 rows of `a` with each pair's own row of the band.
__device__ static void skewed(const Memory *m, const float *a, const int *at, int first, float sums[4][KEYS]) {
    int query = threadIdx.x / 8 * 4, key = threadIdx.x % 8 * KEYS, rows[4][KEYS];
    for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++) {
        rows[i][j] = in_band(m, query + i, at[key + j], first);
        sums[i][j] += m->near[rows[i][j]];
    }
    for (int x = 0; x < WIDTH; x++) for (int i = 0; i < 4; i++) {
        float left = a[(query + i) * PITCH + x];
        for (int j = 0; j < KEYS; j++) sums[i][j] += left * m->band[rows[i][j] * PITCH + x];
    }
}

// Products of a bias with BLOCK rows, added to this thread's pairs.
__device__ static void lean(const float *bias, const float *rows, Memory *m, float sums[4][KEYS]) {
    __syncthreads();
    if (threadIdx.x < BLOCK) {
        float sum = 0.0f;
        for (int x = 0; x < WIDTH; x++) sum += bias[x] * rows[threadIdx.x * PITCH + x];
        m->lean[threadIdx.x] = sum;
    }
    __syncthreads();
    int key = threadIdx.x % 8 * KEYS;
    for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++) sums[i][j] += m->lean[key + j];
}

// The table rows of keys (or slots) from position `low` to `high`, from `first` on, to the band.
__device__ static void load_distances(const Header *h, int slots, int head, const float *slab, int first, Memory *m) {
    const float *start = slab + h->slab, *bias = slots ? 0 : start + bias_at(h, 1, head);
    load_band(start + table_at(h, slots, head), WIDTH, first, slots ? h->slot_distances : h->distances, bias, m);
}

// Adds what logits of pairs with keys (or slots) at `at`, from `low` to `high`, have besides q . k. The band last loaded
// starts at row `*loaded`.
__device__ static void relate(const Header *h, int slots, int head, const float *slab, int low, int high, const int *at,
                              int *loaded, Memory *m, float logits[4][KEYS]) {
    if (!slots) lean(slab + h->slab + bias_at(h, 0, head), m->keys, m, logits);
    Range range = reach(m, low, high, slots ? h->slot_distances : h->distances);
    *loaded = -1;
    for (int first = range.first; first < range.end; first += BAND) {
        load_distances(h, slots, head, slab, first, m);
        skewed(m, m->left, at, first, logits);
        *loaded = first;
    }
}
#endif
