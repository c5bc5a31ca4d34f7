
// Behind common.cu: states, results and gradients.

// What every part of `span` rows adds to the states, [heads, parts, features, columns], and what it leaves of those before it,
// `totals` [heads, parts, width of a decay]: keys with values, or if `later` queries with the gradients of their results.
// Blocks: parts and tiles of the state, heads, samples.
KERNEL void linear_states(
    const Header *header, const float *q, const float *k, const float *v, const float *grad, const float *keep,
    const float *angles, const float *logs, float lean, int reversed, int later, int span, float *totals, float *states) {
    __shared__ float left[CHUNK * PITCH], right[CHUNK * PITCH];
#if DECAY == PER_ROW
    __shared__ float factor[CHUNK], step[CHUNK];
#endif
    Given given = given_of(header, q, k, v, grad, keep, angles, logs, lean, reversed), *g = &given;
    const Header *h = header;
    int x_kind = later ? QUERIES : KEYS, z_kind = later ? SLOPES : VALUES, me = threadIdx.x;
    int width = (int)h->features, columns = (int)h->columns, across = (columns + COLUMNS - 1) / COLUMNS;
    int part = blockIdx.x % h->parts, tile = blockIdx.x / h->parts;
    int x0 = tile / across * COLUMNS, z0 = tile % across * COLUMNS;
    long long last = (long long)(part + 1) * span, count = rows_of(h, x_kind);
    if (last > count) last = count;
    float sums[4][8];
    int row = me / 8 * 4, column = me % 8;
    for (int a = 0; a < 4; a++) for (int b = 0; b < 8; b++) sums[a][b] = 0.0f;
    for (long long first = (long long)part * span; first < last; first += CHUNK) {
        __syncthreads();
        Rows xs = rows_from(g, x_kind, first), zs = rows_from(g, z_kind, first);
        load(&xs, x0, COLUMNS, PITCH, left);
        load(&zs, z0, COLUMNS, PITCH, right);
#if DECAY == PER_ROW
        if (me < CHUNK) step[me] = step_of(g, first + me, 0);
        __syncthreads();
        if (me < CHUNK) {
            float product = 1.0f;
            for (int i = later ? 0 : me + 1; i < (later ? me + 1 : CHUNK); i++) product *= step[i];
            factor[me] = product;
            // the row whose product has all steps
            if (tile == 0 && me == (later ? CHUNK - 1 : 0)) totals[home(g) * h->parts + part] = later ? product : product * step[0];
        }
        __syncthreads();
#elif DECAY == PER_CHANNEL
        __syncthreads();
        if (me < COLUMNS) {
            float product = 1.0f;
            for (int n = 0; n < CHUNK; n++) {
                int i = later ? n : CHUNK - 1 - n;
                float own = step_of(g, first + i, x0 + me);
                if (later) product *= own;
                left[i * PITCH + me] *= product;
                if (!later) product *= own;
            }
            if (z0 == 0 && x0 + me < width) totals[(home(g) * h->parts + part) * width + x0 + me] = product;
        }
        __syncthreads();
#else
        __syncthreads();
#endif
        for (int i = 0; i < CHUNK; i++) {
            float weight = 1.0f;
#if DECAY == PER_ROW
            weight = factor[i];
#endif
            for (int a = 0; a < 4; a++) {
                float x = weight * left[i * PITCH + row + a];
                for (int b = 0; b < 8; b++) sums[a][b] += x * right[i * PITCH + column + 8 * b];
            }
        }
    }
    float *to = states + (home(g) * h->parts + part) * width * columns;
    for (int a = 0; a < 4; a++) for (int b = 0; b < 8; b++) {
        int x = x0 + row + a, z = z0 + column + 8 * b;
        if (x < width && z < columns) to[(long long)x * columns + z] = sums[a][b];
    }
}

// What parts add becomes what those before each, or if `later` behind it, have added up; with `whole`, the first becomes the sum
// of all. Blocks: elements of a state / THREADS, heads, samples.
KERNEL void linear_scan(const Header *header, const float *totals, int later, int whole, float *states) {
    const Header *h = header;
    long long size = h->features * h->columns, at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= size) return;
    long long first = ((long long)blockIdx.z * h->heads + blockIdx.y) * h->parts;
    int width = DECAY == PER_CHANNEL ? (int)h->features : 1, channel = DECAY == PER_CHANNEL ? (int)(at / h->columns) : 0;
    float carried = 0.0f;
    for (int n = 0; n < h->parts; n++) {
        long long part = first + (later ? h->parts - 1 - n : n);
        float added = states[part * size + at];
        if (!whole) states[part * size + at] = carried;
        carried = DECAY == NONE ? carried + added : totals[part * width + channel] * carried + added;
    }
    if (whole) states[first * size + at] = carried;
}

// Products of the rows of this thread, 4 of x and 8 of y.
__device__ static void products(const float *x, const float *y, float sums[4][8]) {
    int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8 * 8;
    for (int c = 0; c < DEPTH; c++) {
        float right[8];
        for (int b = 0; b < 8; b++) right[b] = y[(column + b) * DEPTH_PITCH + c];
        for (int a = 0; a < 4; a++) {
            float left = x[(row + a) * DEPTH_PITCH + c];
            for (int b = 0; b < 8; b++) sums[a][b] += left * right[b];
        }
    }
}

#if DECAY == PER_CHANNEL
// Products of queries and the keys up to each, where every channel decays by the steps between them: the steps from behind the 8
// keys of this thread to its query times those from the key to the end of the 8; where both are among them, one step after another.
__device__ static void decayed_products(const float *queries, const float *keys, const float *steps, float sums[4][8]) {
    int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8 * 8;
    if (column > row + 3) return;
    for (int c = 0; c < DEPTH; c++) {
        if (column + 8 <= row) {
            float right[8], product = 1.0f, left = 1.0f;
            for (int b = 7; b >= 0; b--) {
                right[b] = keys[(column + b) * DEPTH_PITCH + c] * product;
                product *= steps[(column + b) * PITCH + c];
            }
            for (int i = column + 8; i < row; i++) left *= steps[i * PITCH + c];
            for (int a = 0; a < 4; a++) {
                left *= steps[(row + a) * PITCH + c];
                float x = queries[(row + a) * DEPTH_PITCH + c] * left;
                for (int b = 0; b < 8; b++) sums[a][b] += x * right[b];
            }
        } else {
            for (int a = 0; a < 4; a++) {
                float x = queries[(row + a) * DEPTH_PITCH + c];
                for (int b = 7; b >= 0; b--) if (column + b <= row + a) {
                    sums[a][b] += x * keys[(column + b) * DEPTH_PITCH + c];
                    x *= steps[(column + b) * PITCH + c];
                }
            }
        }
    }
}
#endif

// Weighs the pairs of row i by the steps between, and clears what it does not see: rows before it, or if `later` behind it, and
// itself if `own`. What the state is worth at the row comes to `factor`; gives the sum of the row.
__device__ static float weigh(int i, int later, int own, Memory *m) {
    float product = 1.0f, sum = 0.0f, *pairs = m->pairs + i * PITCH;
    for (int n = 0; n < CHUNK; n++) {
        int j = later ? n : CHUNK - 1 - n, is_seen = later ? j > i : j < i;
        if (DECAY == PER_ROW && later && is_seen) product *= m->step[j];
        pairs[j] = is_seen || (own && j == i) ? pairs[j] * product : 0.0f;
        sum += pairs[j];
        if (DECAY == PER_ROW && !later && (is_seen || j == i)) product *= m->step[j];
    }
    m->factor[i] = product;
    return sum;
}

// The pairs of a chunk in shared memory. Of its denominators: what its own keys add.
__device__ static void pairs_of(const Given *g, int x_kind, int y_kind, long long first, int within, int later, int own, Memory *m) {
    float sums[4][8];
    int me = threadIdx.x, row = me / 8 * 4, column = me % 8 * 8;
    for (int a = 0; a < 4; a++) for (int b = 0; b < 8; b++) sums[a][b] = 0.0f;
    if (me < CHUNK) {
        m->step[me] = DECAY == PER_ROW ? step_of(g, first + me, 0) : 1.0f;
        m->factor[me] = 1.0f;
        m->den[me] = 0.0f;
    }
    if (!within) return;
    // where every channel decays on its own, queries are rows, and columns if `later`
    int turned = DECAY == PER_CHANNEL && x_kind < VALUES && later;
    Rows xs = rows_from(g, turned ? y_kind : x_kind, first), ys = rows_from(g, turned ? x_kind : y_kind, first);
    for (int c = 0; c < width_of(g->h, x_kind); c += DEPTH) {
        load(&xs, c, DEPTH, DEPTH_PITCH, m->side.in.x);
        load(&ys, c, DEPTH, DEPTH_PITCH, m->side.in.y);
#if DECAY == PER_CHANNEL
        if (x_kind < VALUES) load_steps(g, first, c, DEPTH, PITCH, m->steps);
        __syncthreads();
        if (x_kind < VALUES) decayed_products(m->side.in.x, m->side.in.y, m->steps, sums);
        else products(m->side.in.x, m->side.in.y, sums);
#else
        __syncthreads();
        products(m->side.in.x, m->side.in.y, sums);
#endif
        __syncthreads();
    }
    for (int a = 0; a < 4; a++) for (int b = 0; b < 8; b++)
        m->pairs[turned ? (column + b) * PITCH + row + a : (row + a) * PITCH + column + b] = sums[a][b];
    __syncthreads();
    if (me < CHUNK) m->den[me] = weigh(me, later, own, m);
    __syncthreads();
}

// sums += x_i S for the columns of z from z0 on; S is read transposed where z are features. `den` gets what the last column of
// values is worth, where outputs are divided, and `den_eps` is added to what that column sums.
__device__ static void across_of(const Given *g, int x_kind, long long first, int z0, int later, int divided, float den_eps,
                                 const float *state, Memory *m, float sums[4][8]) {
    const Header *h = g->h;
    int me = threadIdx.x, row = me / 8 * 4, column = me % 8;
    int depth = width_of(h, x_kind), is_turned = x_kind >= VALUES, width = (int)(is_turned ? h->features : h->values);
    float den = 0.0f;
    Rows xs = rows_from(g, x_kind, first);
    for (int c = 0; c < depth; c += DEPTH) {
        load(&xs, c, DEPTH, DEPTH_PITCH, m->side.in.x);
        for (int at = me; at < DEPTH * PITCH; at += THREADS) {
            int x = c + at / PITCH, z = at % PITCH < COLUMNS ? z0 + at % PITCH : is_turned ? width : (int)h->values;
            int is_there = x < depth && (z < width || (divided && at % PITCH == COLUMNS));
            float value = 0.0f;
            if (is_there) value = is_turned ? state[(long long)z * h->columns + x] : state[(long long)x * h->columns + z];
            if (is_there && (is_turned ? x : z) == h->values) value += den_eps;
            m->state[at] = value;
        }
#if DECAY == PER_CHANNEL
        if (!is_turned) {
            load_steps(g, first, c, DEPTH, PITCH, m->steps);
            __syncthreads();
            float product = 1.0f;
            if (me < DEPTH) for (int n = 0; n < CHUNK; n++) {
                int i = later ? CHUNK - 1 - n : n;
                if (!later) product *= m->steps[i * PITCH + me];
                m->side.in.x[i * DEPTH_PITCH + me] *= product;
                if (later) product *= m->steps[i * PITCH + me];
            }
        }
#endif
        __syncthreads();
        for (int x = 0; x < DEPTH; x++) for (int a = 0; a < 4; a++) {
            float left = m->side.in.x[(row + a) * DEPTH_PITCH + x];
            for (int b = 0; b < 8; b++) sums[a][b] += left * m->state[x * PITCH + column + 8 * b];
        }
        if (divided && me < CHUNK) for (int x = 0; x < DEPTH; x++)
            den += m->side.in.x[me * DEPTH_PITCH + x] * m->state[x * PITCH + COLUMNS];
        __syncthreads();
    }
    if (divided && me < CHUNK) m->den[me] += m->factor[me] * den;
}

// sums = factor sums + pairs z, for the columns of z from z0 on. Where the channels of z decay on their own, the sums go through
// the steps one after another, and only rows that are seen take part.
__device__ static void within_of(const Given *g, int z_kind, long long first, int z0, int within, int later, Memory *m,
                                 float sums[4][8]) {
    int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8;
    Rows zs = rows_from(g, z_kind, first);
#if DECAY == PER_CHANNEL
    if (z_kind < VALUES) {
        load(&zs, z0, COLUMNS, PITCH, m->side.z);
        load_steps(g, first, z0, COLUMNS, PITCH, m->steps);
        __syncthreads();
        for (int n = 0; n < CHUNK; n++) for (int a = 0; a < 4; a++) {
            int j = later ? CHUNK - 1 - n : n, i = row + a;
            if (later ? j < i : j > i) continue;
            float weight = m->pairs[i * PITCH + j];
            for (int b = 0; b < 8; b++) {
                int at = j * PITCH + column + 8 * b;
                if (!later) sums[a][b] *= m->steps[at];
                sums[a][b] += weight * m->side.z[at];
                if (later && j > i) sums[a][b] *= m->steps[at];
            }
        }
        __syncthreads();
        return;
    }
#endif
    for (int a = 0; a < 4; a++) for (int b = 0; b < 8; b++) sums[a][b] *= m->factor[row + a];
    if (!within) return;
    load(&zs, z0, COLUMNS, PITCH, m->side.z);
    __syncthreads();
    for (int j = 0; j < CHUNK; j++) for (int a = 0; a < 4; a++) {
        float weight = m->pairs[(row + a) * PITCH + j];
        for (int b = 0; b < 8; b++) sums[a][b] += weight * m->side.z[j * PITCH + column + 8 * b];
    }
    __syncthreads();
}

// Outputs, or if `later` the gradients of values, of one chunk and COLUMNS columns. `within`: rows see their chunk up to themselves
// and the state before it, else the state of all. `add`: to what is there, with the denominators `before`. `divide`: by the
// guarded denominators, which are kept in `dens`. Blocks: chunks and tiles of columns, heads, samples.
KERNEL void linear_out(
    const Header *header, const float *q, const float *k, const float *v, const float *grad, const float *keep,
    const float *angles, const float *logs, float lean, int reversed, int later, int within, int own, int add, int divide,
    float den_eps, float eps, const float *states, const float *before, float *dens, float *out) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    Given given = given_of(header, q, k, v, grad, keep, angles, logs, lean, reversed), *g = &given;
    const Header *h = header;
    int x_kind = later ? KEYS : QUERIES, y_kind = later ? QUERIES : KEYS, z_kind = later ? SLOPES : VALUES;
    int divided = !later && h->columns > h->values, me = threadIdx.x, row = me / 8 * 4, column = me % 8;
    long long count = rows_of(h, x_kind), chunks = (count + CHUNK - 1) / CHUNK;
    int chunk = blockIdx.x % chunks, z0 = blockIdx.x / chunks * COLUMNS;
    long long first = (long long)chunk * CHUNK, part = home(g) * h->parts + (within ? chunk : 0);
    float sums[4][8];
    for (int a = 0; a < 4; a++) for (int b = 0; b < 8; b++) sums[a][b] = 0.0f;
    pairs_of(g, x_kind, y_kind, first, within, later, own, m);
    across_of(g, x_kind, first, z0, later, divided, den_eps, states + part * h->features * h->columns, m, sums);
    within_of(g, z_kind, first, z0, within, later, m, sums);
    if (me < CHUNK) {
        float inverse = 1.0f, slope, den = m->den[me];
        if (divided && first + me < count) {
            long long place = home(g) * count + position(g, x_kind, first + me);
            if (add) den += before[place];
            if (z0 == 0) dens[place] = den;
            if (divide) inverse = invert((int)h->guard, eps, den, &slope);
        }
        m->den[me] = inverse;
    }
    __syncthreads();
    for (int a = 0; a < 4; a++) {
        if (first + row + a >= count) continue;
        float *to = out + row_of(later ? h->d_v : h->out, g, position(g, x_kind, first + row + a));
        for (int b = 0; b < 8; b++) {
            int z = z0 + column + 8 * b;
            if (z >= h->values) continue;
            float sum = add ? to[z] + sums[a][b] : sums[a][b];
            to[z] = m->den[row + a] * sum;
        }
    }
}

// Writes the gradients of queries or keys from those of their features, columns z0 on, in `side.z`. Products of features and their
// gradients go to `dots` [heads, positions, width of a decay], where decays have gradients; those of rows are summed in `den`.
__device__ static void write_slopes(const Given *g, int kind, long long first, int z0, int add, int learned, Memory *m,
                                    float *dots, float *grads) {
    const Header *h = g->h;
    int me = threadIdx.x, per = TURN ? 2 : 1;
    for (int n = me; n < CHUNK * COLUMNS / per; n += THREADS) {
        int i = n / (COLUMNS / per), x = n % (COLUMNS / per);
        if (first + i >= rows_of(h, kind) || z0 + x * per >= h->features) continue;
        long long at = position(g, kind, first + i);
        const float *slope = m->side.z + i * PITCH + x * per;
        float sum = slope[0], *to = grads + row_of(kind == QUERIES ? h->d_q : h->d_k, g, at) + z0 / per + x;
#if TURN
        sum = slope[0] * g->angles[2 * at] + slope[1] * g->angles[2 * at + 1];
#endif
        sum = is_hidden(g, kind, at) ? 0.0f : sum * derive(raw(g, kind, at)[z0 / per + x], g->lean);
        *to = add ? *to + sum : sum;
    }
    if (!learned || DECAY == NONE) return;
    Rows own = rows_from(g, kind, first);
#if DECAY == PER_CHANNEL
    for (int n = me; n < CHUNK * COLUMNS; n += THREADS) {
        int i = n / COLUMNS, x = z0 + n % COLUMNS;
        if (first + i >= rows_of(h, kind) || x >= h->features) continue;
        float value = element(&own, i, x) * m->side.z[i * PITCH + n % COLUMNS];
        dots[(home(g) * h->keys + position(g, kind, first + i)) * h->features + x] = value;
    }
#else
    if (me < CHUNK) for (int x = 0; x < COLUMNS; x++) m->den[me] += element(&own, me, z0 + x) * m->side.z[me * PITCH + x];
#endif
}

// Gradients of queries, or if `later` of keys, of one chunk. Blocks: chunks, heads, samples.
KERNEL void linear_slopes(
    const Header *header, const float *q, const float *k, const float *v, const float *grad, const float *keep,
    const float *angles, const float *logs, float lean, int reversed, int later, int within, int own, int add, int learned,
    float den_eps, const float *states, float *dots, float *grads) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    Given given = given_of(header, q, k, v, grad, keep, angles, logs, lean, reversed), *g = &given;
    const Header *h = header;
    int x_kind = later ? VALUES : SLOPES, y_kind = later ? SLOPES : VALUES, me = threadIdx.x, row = me / 8 * 4, column = me % 8;
    int kind = later ? KEYS : QUERIES, z_kind = later ? QUERIES : KEYS;
    long long first = (long long)blockIdx.x * CHUNK, part = home(g) * h->parts + (within ? blockIdx.x : 0);
    pairs_of(g, x_kind, y_kind, first, within, later, own, m);
    __syncthreads();
    if (me < CHUNK) m->den[me] = 0.0f;
    for (int z0 = 0; z0 < h->features; z0 += COLUMNS) {
        float sums[4][8];
        for (int a = 0; a < 4; a++) for (int b = 0; b < 8; b++) sums[a][b] = 0.0f;
        across_of(g, x_kind, first, z0, later, 0, den_eps, states + part * h->features * h->columns, m, sums);
        within_of(g, z_kind, first, z0, within, later, m, sums);
        for (int a = 0; a < 4; a++) for (int b = 0; b < 8; b++) m->side.z[(row + a) * PITCH + column + 8 * b] = sums[a][b];
        __syncthreads();
        write_slopes(g, kind, first, z0, add, learned, m, dots, grads);
        __syncthreads();
    }
#if DECAY == PER_ROW
    if (learned && me < CHUNK && first + me < h->keys) dots[home(g) * h->keys + position(g, kind, first + me)] = m->den[me];
#endif
}

// d out / guard(den): gradients of numerators, and behind them those of denominators. A warp per row of a head.
// Blocks: queries / (THREADS / WARP), heads, samples.
KERNEL void linear_undivide(const Header *header, const float *out, const float *d_out, const float *dens, float eps, float *grad) {
    const Header *h = header;
    Given given = given_of(h, 0, 0, 0, 0, 0, 0, 0, 0.0f, 0), *g = &given;
    long long i = (long long)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    int live = i < h->queries ? (int)h->values : 0, lane = threadIdx.x % WARP;
    long long from = live ? row_of(h->out, g, i) : 0, to = live ? row_of(h->grad, g, i) : 0;
    float slope = 0.0f, inverse = live ? invert((int)h->guard, eps, dens[home(g) * h->queries + i], &slope) : 0.0f, sum = 0.0f;
    for (int x = lane; x < live; x += WARP) {
        float value = d_out[from + x] * inverse;
        grad[to + x] = value;
        sum += value * out[from + x];
    }
    for (int distance = WARP / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (live && lane == 0) grad[to + live] = -sum * slope;
}

// Gradients of the logarithms of decays of one chunk: step r is passed by all pairs of a key before it and a query at or behind
// it. Those across the end of the chunk are the product of the states on both sides of it; going back from there, a row adds
// what it reads and takes away what it writes. Blocks: chunks, heads, samples.
KERNEL void linear_log_slopes(const Header *header, const float *states, const float *later_states, const float *reads,
                              const float *writes, int reversed, float *slopes) {
#if DECAY == PER_ROW
    __shared__ float sums[THREADS];
#endif
    const Header *h = header;
    Given given = given_of(h, 0, 0, 0, 0, 0, 0, 0, 0.0f, reversed), *g = &given;
    int chunk = blockIdx.x, is_last = chunk + 1 == h->parts, me = threadIdx.x;
    long long size = h->features * h->columns, part = home(g) * h->parts + chunk, first = (long long)chunk * CHUNK;
    const float *before = states + (part + 1) * size, *behind = later_states + part * size;
    int width = DECAY == PER_CHANNEL ? (int)h->features : 1, inner = DECAY == PER_CHANNEL ? (int)h->columns : 0;
#if DECAY == PER_ROW
    float own = 0.0f;
    if (!is_last) for (long long at = me; at < size; at += THREADS) own += before[at] * behind[at];
    sums[me] = own;
    __syncthreads();
#endif
    for (int x = me; x < width; x += THREADS) {
        float sum = 0.0f;
        if (!is_last) for (int z = 0; z < inner; z++) sum += before[(long long)x * inner + z] * behind[(long long)x * inner + z];
#if DECAY == PER_ROW
        for (int lane = 0; lane < THREADS; lane++) sum += sums[lane];
#endif
        for (int i = CHUNK - 1; i >= 0; i--) {
            if (first + i >= h->keys) continue;
            long long at = (home(g) * h->keys + position(g, KEYS, first + i)) * width + x;
            sum += reads[at] - writes[at];
            slopes[at] = sum;
        }
    }
}

// The sums of the rows of heads that share one: x [samples, heads, size] to y [samples, heads / share, size].
// Blocks: size / THREADS, heads of y, samples.
KERNEL void linear_shared(const float *x, int share, long long size, float *y) {
    long long at = (long long)blockIdx.x * THREADS + threadIdx.x, group = (long long)blockIdx.z * gridDim.y + blockIdx.y;
    if (at >= size) return;
    float sum = 0.0f;
    for (int n = 0; n < share; n++) sum += x[(group * share + n) * size + at];
    y[group * size + at] = sum;
}
