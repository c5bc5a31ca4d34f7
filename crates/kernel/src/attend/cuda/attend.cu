
// Behind tiles.cu: output and gradients of queries, keys and values.

// Adds to this thread's elements of a tile, 4 queries and every eighth column, the products of weights and rows.
__device__ static void add_products(const float *weights, const float *rows, float result[4][COLUMNS]) {
    int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8;
    for (int key = 0; key < BLOCK; key++) {
        float right[COLUMNS];
        for (int x = 0; x < COLUMNS; x++) right[x] = column + 8 * x < WIDTH ? rows[key * PITCH + column + 8 * x] : 0.0f;
        for (int i = 0; i < 4; i++) {
            float weight = weights[(row + i) * (BLOCK + 1) + key];
            for (int x = 0; x < COLUMNS; x++) result[i][x] += weight * right[x];
        }
    }
}

KERNEL void attend_forward(
    const Header *header, const Tile *tiles, const int *head_tiles, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, const float *slab, float factor, float *out, float *stats) {
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
#if RELATIVE
        set_bases(h, s.slots, m);
#endif
        for (int first = s.first; first < s.last; first += BLOCK) {
            positions(h, s, first, batch, hidden, at);
            __syncthreads();
            load_keys(h, s.slots, batch, head, at, k, v, slot_k, slot_v, m);
            __syncthreads();
            float logits[4][KEYS];
            products(left, keys, logits);
#if RELATIVE
            int loaded, from = s.start + first * s.step, to = from + (BLOCK - 1) * s.step;
            relate(h, s.slots, head, slab, from, to, at, &loaded, m, logits);
#endif
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
            add_products(weights, values, result);
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

// differentiate for this thread's 4 x KEYS pairs.
__device__ static void differentiate_all(Stream s, const int *low, const int *high, const Memory *m, int first, long long offset,
                                         float factor, float scale, float logits[4][KEYS], float slopes[4][KEYS]) {
    int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8 * KEYS;
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < KEYS; j++)
        differentiate(s, low, high, m->lanes, m->at, first, offset, m->most, m->share, m->mean, factor, scale, row + i,
                      column + j, &logits[i][j], &slopes[i][j]);
}

KERNEL void attend_back_queries(
    const Header *header, const Tile *tiles, const int *head_tiles, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, const float *slab, const float *grad, const float *stats, const float *means, float factor, float scale,
    float *grads) {
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
#if RELATIVE
        set_bases(h, s.slots, m);
#endif
        for (int first = s.first; first < s.last; first += BLOCK) {
            positions(h, s, first, batch, hidden, at);
            __syncthreads();
            load_keys(h, s.slots, batch, head, at, k, v, slot_k, slot_v, m);
            __syncthreads();
            float logits[4][KEYS], slopes[4][KEYS];
            products(left, keys, logits);
            products(slope, values, slopes);
#if RELATIVE
            int loaded, from = s.start + first * s.step, to = from + (BLOCK - 1) * s.step;
            relate(h, s.slots, head, slab, from, to, at, &loaded, m, logits);
#endif
            differentiate_all(s, low, high, m, first, h->offset, factor, scale, logits, slopes);
            for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++)
                weights[(row + i) * (BLOCK + 1) + column * KEYS + j] = slopes[i][j];
            __syncthreads();
            add_products(weights, keys, result);
#if RELATIVE
            Range range = reach(m, from, to, s.slots ? h->slot_distances : h->distances);
            for (int band = range.first; band < range.end; band += BAND) {
                if (band != loaded) load_distances(h, s.slots, head, slab, band, m);
                loaded = band;
                for (int key = 0; key < BLOCK; key++) for (int i = 0; i < 4; i++) {
                    float weight = weights[(row + i) * (BLOCK + 1) + key];
                    const float *line = m->band + in_band(m, row + i, at[key], band) * PITCH;
                    for (int x = 0; x < COLUMNS; x++) {
                        int element = column + 8 * x;
                        if (element < WIDTH) result[i][x] += weight * line[element];
                    }
                }
            }
#endif
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
    const float *slot_v, const float *slab, const float *grad, const float *stats, const float *means, float factor, float scale,
    int shared, float *parts, float *grads) {
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
#if RELATIVE
    // keys were multiplied with q + u
    float total[GROUP];
    for (int i = 0; i < GROUP; i++) total[i] = 0.0f;
    const float *u = is_slots ? 0 : slab + h->slab + bias_at(h, 0, head);
#endif
    for (int visit = range[0]; visit < range[1]; visit++) {
        int number = visits[2 * visit], stream = visits[2 * visit + 1];
        Tile tile = tiles[number];
        Stream s = streams[stream];
        const int *low = bounds + stream * 2 * TILE, *high = low + TILE;
        __syncthreads();
        recall(h, batch, head, number, tile, queries, stats, means, lanes, most, share, mean);
#if RELATIVE
        set_bases(h, is_slots, m);
#endif
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
#if RELATIVE
        int loaded;
        relate(h, is_slots, head, slab, start, start + BLOCK - 1, at, &loaded, m, logits);
#endif
        differentiate_all(s, low, high, m, 0, h->offset, factor, scale, logits, slopes);
        for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++) {
            int place = (row + i) * (BLOCK + 1) + column * KEYS + j;
            weights[place] = logits[i][j];
            slopes_of[place] = slopes[i][j];
        }
        __syncthreads();
        for (int lane = 0; lane < TILE; lane++) for (int i = 0; i < GROUP; i++) {
            if (group + i >= BLOCK) continue;
            float weight = weights[lane * (BLOCK + 1) + group + i], steep = slopes_of[lane * (BLOCK + 1) + group + i];
#if RELATIVE
            total[i] += steep;
#endif
            for (int x = 0; x < COLUMNS; x++) {
                int element = column + 8 * x;
                if (element >= WIDTH) continue;
                sum_v[i][x] += weight * slope[lane * PITCH + element];
                sum_k[i][x] += steep * left[lane * PITCH + element];
            }
        }
    }
#if RELATIVE
    for (int i = 0; i < GROUP; i++) for (int x = 0; x < COLUMNS; x++)
        if (u && column + 8 * x < WIDTH) sum_k[i][x] += total[i] * u[column + 8 * x];
    // the part of these keys in the gradient of u
    if (column == 0) for (int i = 0; i < GROUP; i++) if (group + i < BLOCK) m->lean[group + i] = total[i];
    __syncthreads();
    for (int x = me; x < WIDTH; x += THREADS) {
        float sum = 0.0f;
        for (int key = 0; key < BLOCK; key++) sum += m->lean[key] * keys[key * PITCH + x];
        parts[(((long long)batch * h->heads + head) * gridDim.x + blockIdx.x) * WIDTH + x] = sum;
    }
#endif
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
