
// Behind attend.cu: gradients of what depends on distances.

// Gradients of BLOCK neighbouring rows of a head's table (rows of the slot table are counted behind those of keys), over all
// samples. `visits` lists for every block the tiles and streams whose pairs may lie at any of these distances. `parts` gets
// the part of these rows in the gradient of v.
KERNEL void attend_back_distances(
    const Header *header, const Tile *tiles, const int *blocks, const int *visits, const Stream *streams, const int *bounds,
    const int *queries, const int *hidden, const float *q, const float *k, const float *v, const float *slot_k,
    const float *slot_v, const float *slab, const float *grad, const float *stats, const float *means, float factor, float scale,
    int shared, int samples, float *parts, float *grads) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    int head = blockIdx.y, me = threadIdx.x;
    const Header *h = header;
    int own = (int)((h->distances + BLOCK - 1) / BLOCK), slots = (int)blockIdx.x >= own;
    int start = (slots ? (int)blockIdx.x - own : (int)blockIdx.x) * BLOCK;
    int count = (int)(slots ? h->slot_distances : h->distances);
    const int *range = blocks + 2 * ((shared ? 0 : head) * gridDim.x + blockIdx.x);
    const float *table = slab + h->slab + table_at(h, slots, head);
    const float *u = slots ? 0 : slab + h->slab + bias_at(h, 0, head), *bias = slots ? 0 : slab + h->slab + bias_at(h, 1, head);
    if (me < BLOCK) m->at[me] = start + me < count ? start + me : -1;
    for (int at = me; at < BLOCK * WIDTH; at += THREADS) {
        int i = at / WIDTH, x = at % WIDTH;
        m->keys[i * PITCH + x] = start + i < count ? table[(start + i) * WIDTH + x] : 0.0f;
    }
    enum { GROUP = (BLOCK + 15) / 16 };
    float sum[GROUP][COLUMNS], total[GROUP];
    int group = me / 8 * GROUP, column = me % 8, row = me / 8 * 4, key = me % 8 * KEYS;
    for (int i = 0; i < GROUP; i++) {
        total[i] = 0.0f;
        for (int x = 0; x < COLUMNS; x++) sum[i][x] = 0.0f;
    }
    for (int batch = 0; batch < samples; batch++) for (int visit = range[0]; visit < range[1]; visit++) {
        int number = visits[2 * visit], stream = visits[2 * visit + 1];
        Tile tile = tiles[number];
        Stream s = streams[stream];
        const int *low = bounds + stream * 2 * TILE, *high = low + TILE;
        __syncthreads();
        recall(h, batch, head, number, tile, queries, stats, means, m->lanes, m->most, m->share, m->mean);
        set_bases(h, slots, m);
        __syncthreads();
        load(q, h->q, batch, head, m->lanes, tile.queries, TILE, m->left);
        load(grad, h->out, batch, head, m->lanes, tile.queries, TILE, m->slope);
        __syncthreads();
        float logits[4][KEYS], slopes[4][KEYS];
        products(m->left, m->keys, logits);
        if (bias) lean(bias, m->keys, m, logits);
        for (int i = 0; i < 4; i++) for (int j = 0; j < KEYS; j++) slopes[i][j] = 0.0f;
        // the keys at these distances from the lanes, as far as the stream has them
        Range keys = reach(m, start, start + BLOCK - 1, slots ? h->slots : h->keys);
        int nearest = s.start + s.first * s.step, furthest = s.start + (s.last - 1) * s.step;
        if (keys.first < nearest) keys.first = nearest;
        if (keys.end > furthest + 1) keys.end = furthest + 1;
        Place place_k = slots ? h->slot_k : h->k, place_v = slots ? h->slot_v : h->v;
        const float *all_k = (slots ? slot_k : k) + row_of(place_k, batch, head, 0);
        const float *all_v = (slots ? slot_v : v) + row_of(place_v, batch, head, 0);
        for (int first = keys.first; first < keys.end; first += BAND) {
            load_band(all_k, place_k.row, first, keys.end, u, m);
            skewed(m, m->left, m->at, first, logits);
            load_band(all_v, place_v.row, first, keys.end, 0, m);
            skewed(m, m->slope, m->at, first, slopes);
        }
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < KEYS; j++) {
            int lane = row + i, position = m->base[lane] - m->at[key + j], shift = position - s.start;
            int seen = m->at[key + j] >= 0 && position >= keys.first && position < keys.end && shift % s.step == 0;
            float steep = 0.0f;
            if (seen) {
                long long place = batch * (h->keys + h->slots) + (slots ? h->keys : 0) + position;
                seen = !(h->hidden && hidden[place]);
                if (seen && sees(s, low, high, lane, h->offset + m->lanes[lane], shift / s.step, position)) {
                    float p = exp2f(factor * logits[i][j] - m->most[lane]) * m->share[lane];
                    steep = scale * p * (slopes[i][j] - m->mean[lane]);
                }
            }
            m->slopes[lane * (BLOCK + 1) + key + j] = steep;
        }
        __syncthreads();
        for (int lane = 0; lane < TILE; lane++) for (int i = 0; i < GROUP; i++) {
            if (group + i >= BLOCK) continue;
            float steep = m->slopes[lane * (BLOCK + 1) + group + i];
            total[i] += steep;
            for (int x = 0; x < COLUMNS; x++) {
                int element = column + 8 * x;
                if (element < WIDTH) sum[i][x] += steep * m->left[lane * PITCH + element];
            }
        }
    }
    __syncthreads();
    for (int i = 0; i < GROUP; i++) {
        if (group + i >= BLOCK || start + group + i >= count) continue;
        float *to = grads + h->d_slab + table_at(h, slots, head) + (long long)(start + group + i) * WIDTH;
        for (int x = 0; x < COLUMNS; x++) {
            int element = column + 8 * x;
            if (element < WIDTH) to[element] += sum[i][x] + (bias ? total[i] * bias[element] : 0.0f);
        }
    }
    if (column == 0) for (int i = 0; i < GROUP; i++) if (group + i < BLOCK) m->lean[group + i] = total[i];
    __syncthreads();
    for (int x = me; x < WIDTH; x += THREADS) {
        float part = 0.0f;
        for (int i = 0; i < BLOCK; i++) part += m->lean[i] * m->keys[i * PITCH + x];
        parts[((long long)head * gridDim.x + blockIdx.x) * WIDTH + x] = part;
    }
}

// Gradients of the biases u and v: the parts of all blocks of keys, and of all blocks of distances, in order.
KERNEL void attend_back_biases(
    const Header *header, const float *key_parts, int key_blocks, int samples, const float *distance_parts, int distance_blocks,
    float *grads) {
    const Header *h = header;
    int head = blockIdx.y, own_keys = (int)((h->keys + BLOCK - 1) / BLOCK), own = (int)((h->distances + BLOCK - 1) / BLOCK);
    for (int x = threadIdx.x; x < WIDTH; x += THREADS) {
        float u = 0.0f, v = 0.0f;
        for (int batch = 0; batch < samples; batch++) for (int block = 0; block < own_keys; block++)
            u += key_parts[(((long long)batch * h->heads + head) * key_blocks + block) * WIDTH + x];
        for (int block = 0; block < own; block++) v += distance_parts[((long long)head * distance_blocks + block) * WIDTH + x];
        grads[h->d_slab + bias_at(h, 0, head) + x] += u;
        grads[h->d_slab + bias_at(h, 1, head) + x] += v;
    }
}
