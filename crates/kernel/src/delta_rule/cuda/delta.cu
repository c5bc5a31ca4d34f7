// The delta rule, forward and backward, in f32: chunk after chunk, in the form of crates/kernel/src/delta_rule/cpu.
//
// A block of THREADS threads walks over the chunks of one head and COLUMNS columns of its values, with its part of the state in
// shared memory; the columns of a state do not see each other. What all columns add to (gradients of queries, keys, betas and
// decays) is written per block and summed afterwards in their order. The compiler's command line sets WIDTH, the width of a key,
// rounded up to whole tiles, and MEMORY, the bytes of a block's working memory. Every sum runs in an order that follows from the
// sizes, without atomics: the same bits every time.
//
// This is plain C apart from the CUDA qualifiers: the tests compile it for the CPU as well.

#define THREADS 128
#define CHUNK 32
#define COLUMNS 32
#define PITCH (COLUMNS + 1)
#define KEY_PITCH (WIDTH + 1)

#ifndef KERNEL
#define KERNEL extern "C" __global__
#endif
#ifndef SHARED_MEMORY
#define SHARED_MEMORY extern __shared__ float memory[]
#endif
// Columns of a triangular system stay in registers: their loops must have no indices that are known at run time only.
#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

typedef struct {
    float keys[CHUNK * KEY_PITCH], queries[CHUNK * KEY_PITCH];
    float state[WIDTH * PITCH], slope[WIDTH * PITCH]; // S, and in the backward pass the gradient of the state behind the chunk
    float y[CHUNK * PITCH], u[CHUNK * PITCH], d_out[CHUNK * PITCH], d_y[CHUNK * PITCH];
    float b[CHUNK * PITCH], p[CHUNK * PITCH], d_b[CHUNK * PITCH], d_p[CHUNK * PITCH]; // pairs and their gradients
    float step[CHUNK], since[CHUNK], rest[CHUNK], beta[CHUNK], flow[CHUNK];
} Memory;
typedef char memory_has_its_size[sizeof(Memory) == MEMORY ? 1 : -1];

// The same words in the same order as `header` in launch.rs writes them. decays, masked: whether there are any.
typedef struct { long long heads, length, key_width, value_width, decays, masked; } Header;

typedef struct {
    const Header *h;
    const float *rows, *beta, *log_decay, *keep;
    int head, batch, z0;
    long long home, row;
} Given;

__device__ static Given given_of(const Header *h, const float *rows, const float *beta, const float *log_decay, const float *keep) {
    Given g;
    g.h = h, g.rows = rows, g.beta = beta, g.log_decay = log_decay, g.keep = keep;
    g.head = blockIdx.y, g.batch = blockIdx.z, g.z0 = blockIdx.x * COLUMNS;
    g.home = (long long)g.batch * h->heads + g.head, g.row = h->heads * (2 * h->key_width + h->value_width);
    return g;
}

// Where the query (0), key (1) or value (2) of this head at a position begins in rows [q heads | k heads | v heads].
__device__ static long long place(const Given *g, int part, long long at) {
    long long width = part == 2 ? g->h->value_width : g->h->key_width;
    return (g->batch * g->h->length + at) * g->row + part * g->h->heads * g->h->key_width + g->head * width;
}

__device__ static float kept(const Given *g, long long at) {
    return g->h->masked ? g->keep[g->batch * g->h->length + at] : 1.0f;
}

// Products of 2 x 4 elements of this thread in a tile of 32 x 32: a [32, depth] and b [depth, 32] with these strides.
__device__ static void product(const float *a, int a_row, int a_depth, const float *b, int b_depth, int b_column, int depth,
                               float sums[2][4]) {
    int row = threadIdx.x / 8 * 2, column = threadIdx.x % 8;
    for (int c = 0; c < depth; c++) {
        float right[4];
        for (int j = 0; j < 4; j++) right[j] = b[c * b_depth + (column + 8 * j) * b_column];
        for (int i = 0; i < 2; i++) {
            float left = a[(row + i) * a_row + c * a_depth];
            for (int j = 0; j < 4; j++) sums[i][j] += left * right[j];
        }
    }
}

#define ZEROS { { 0.0f, 0.0f, 0.0f, 0.0f }, { 0.0f, 0.0f, 0.0f, 0.0f } }
// The elements of this thread in a tile: rows i, columns j; `at` their place in a matrix of such a pitch.
#define FOR_TILE(i, j) for (int i = 0; i < 2; i++) for (int j = 0; j < 4; j++)
#define ROW(i) ((int)threadIdx.x / 8 * 2 + (i))
#define COLUMN(j) ((int)threadIdx.x % 8 + 8 * (j))

// Weighs row t of two squares one behind another in memory by the steps between t and each column: the first (`which` 0) keeps
// what lies below its diagonal, the second the diagonal too.
__device__ static void weigh(const Memory *m, int t, int which, float *square) {
    float product = 1.0f;
    for (int s = CHUNK - 1; s >= 0; s--) {
        int is_seen = s < t || (which && s == t);
        square[t * PITCH + s] = is_seen ? square[t * PITCH + s] * product : 0.0f;
        if (s <= t) product *= m->step[s];
    }
}

// Reads a chunk: keys, queries and values, zeros behind the last; forms decays and pairs.
__device__ static void load_chunk(const Given *g, long long first, Memory *m) {
    const Header *h = g->h;
    int me = threadIdx.x;
    __syncthreads();
    for (int n = me; n < CHUNK * WIDTH; n += THREADS) {
        int i = n / WIDTH, x = n % WIDTH, is_there = first + i < h->length && x < h->key_width;
        m->queries[i * KEY_PITCH + x] = is_there ? g->rows[place(g, 0, first + i) + x] : 0.0f;
        m->keys[i * KEY_PITCH + x] = is_there ? g->rows[place(g, 1, first + i) + x] : 0.0f;
    }
    for (int n = me; n < CHUNK * COLUMNS; n += THREADS) {
        int i = n / COLUMNS, z = n % COLUMNS, is_there = first + i < h->length && g->z0 + z < h->value_width;
        m->y[i * PITCH + z] = is_there ? g->rows[place(g, 2, first + i) + g->z0 + z] : 0.0f;
    }
    if (me < CHUNK) {
        long long at = first + me, step = g->home * h->length + at;
        int is_there = at < h->length;
        m->beta[me] = is_there ? g->beta[step] * kept(g, at) : 0.0f;
        m->step[me] = is_there && h->decays ? expf(g->log_decay[step] * kept(g, at)) : 1.0f;
    }
    __syncthreads();
    float squares[2][2][4] = { ZEROS, ZEROS };
    product(m->keys, KEY_PITCH, 1, m->keys, 1, KEY_PITCH, WIDTH, squares[0]);
    product(m->queries, KEY_PITCH, 1, m->keys, 1, KEY_PITCH, WIDTH, squares[1]);
    FOR_TILE(i, j) {
        m->b[ROW(i) * PITCH + COLUMN(j)] = squares[0][i][j];
        m->p[ROW(i) * PITCH + COLUMN(j)] = squares[1][i][j];
    }
    if (me < CHUNK) {
        float since = 1.0f, rest = 1.0f;
        for (int i = 0; i <= me; i++) since *= m->step[i];
        for (int i = me + 1; i < CHUNK; i++) rest *= m->step[i];
        m->since[me] = since;
        m->rest[me] = rest;
    }
    __syncthreads();
    if (me < 2 * CHUNK) weigh(m, me % CHUNK, me / CHUNK, me < CHUNK ? m->b : m->p);
    __syncthreads();
}

// Y = V - since (K S) - B U and U = beta Y, row after row: a thread per column.
__device__ static void solve(Memory *m) {
    float seen[2][4] = ZEROS;
    product(m->keys, KEY_PITCH, 1, m->state, PITCH, 1, WIDTH, seen);
    FOR_TILE(i, j) m->y[ROW(i) * PITCH + COLUMN(j)] -= m->since[ROW(i)] * seen[i][j];
    __syncthreads();
    if (threadIdx.x < COLUMNS) {
        float y[CHUNK];
        UNROLL for (int t = 0; t < CHUNK; t++) y[t] = m->y[t * PITCH + threadIdx.x];
        UNROLL for (int s = 0; s < CHUNK; s++) {
            float u = m->beta[s] * y[s];
            m->y[s * PITCH + threadIdx.x] = y[s];
            m->u[s * PITCH + threadIdx.x] = u;
            UNROLL for (int t = 0; t < CHUNK; t++) if (t > s) y[t] -= m->b[t * PITCH + s] * u;
        }
    }
    __syncthreads();
}

// The results [samples, length, heads * values], and if `keep_states` the state before every chunk, [samples, heads, chunks, keys,
// values]. Blocks: tiles of columns, heads, samples.
KERNEL void delta_forward(const Header *header, const float *rows, const float *beta, const float *log_decay, const float *keep,
                          int keep_states, float *states, float *out) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    Given given = given_of(header, rows, beta, log_decay, keep), *g = &given;
    const Header *h = header;
    long long chunks = (h->length + CHUNK - 1) / CHUNK;
    for (int n = threadIdx.x; n < WIDTH * COLUMNS; n += THREADS) m->state[n / COLUMNS * PITCH + n % COLUMNS] = 0.0f;
    for (long long chunk = 0; chunk < chunks; chunk++) {
        long long first = chunk * CHUNK;
        load_chunk(g, first, m);
        float *before = states + (g->home * chunks + chunk) * h->key_width * h->value_width + g->z0;
        if (keep_states) for (int n = threadIdx.x; n < h->key_width * COLUMNS; n += THREADS) {
            int x = n / COLUMNS, z = n % COLUMNS;
            if (g->z0 + z < h->value_width) before[x * h->value_width + z] = m->state[x * PITCH + z];
        }
        solve(m);
        float result[2][4] = ZEROS;
        product(m->queries, KEY_PITCH, 1, m->state, PITCH, 1, WIDTH, result);
        FOR_TILE(i, j) result[i][j] *= m->since[ROW(i)];
        product(m->p, PITCH, 1, m->u, PITCH, 1, CHUNK, result);
        FOR_TILE(i, j) {
            long long at = first + ROW(i);
            int z = g->z0 + COLUMN(j);
            if (at < h->length && z < h->value_width)
                out[((g->batch * h->length + at) * h->heads + g->head) * h->value_width + z] = result[i][j];
        }
        __syncthreads();
        FOR_TILE(i, j) m->u[ROW(i) * PITCH + COLUMN(j)] *= m->rest[ROW(i)];
        __syncthreads();
        for (int x = 0; x < WIDTH; x += 32) {
            float added[2][4] = ZEROS;
            product(m->keys + x, 1, KEY_PITCH, m->u, PITCH, 1, CHUNK, added);
            FOR_TILE(i, j) {
                float *to = m->state + (x + ROW(i)) * PITCH + COLUMN(j);
                *to = m->since[CHUNK - 1] * *to + added[i][j];
            }
        }
    }
}

// dU = P^T dO + rest (K D) and dY = beta (dU - B^T dY), from the last row on; the products dU Y, which the gradients of betas sum,
// come to d_b.
__device__ static void solve_back(Memory *m) {
    float slopes[2][4] = ZEROS;
    product(m->keys, KEY_PITCH, 1, m->slope, PITCH, 1, WIDTH, slopes);
    FOR_TILE(i, j) slopes[i][j] *= m->rest[ROW(i)];
    product(m->p, 1, PITCH, m->d_out, PITCH, 1, CHUNK, slopes);
    FOR_TILE(i, j) m->d_y[ROW(i) * PITCH + COLUMN(j)] = slopes[i][j];
    __syncthreads();
    if (threadIdx.x < COLUMNS) {
        float d_u[CHUNK];
        UNROLL for (int t = 0; t < CHUNK; t++) d_u[t] = m->d_y[t * PITCH + threadIdx.x];
        UNROLL for (int n = 0; n < CHUNK; n++) {
            int s = CHUNK - 1 - n, at = s * PITCH + threadIdx.x;
            float d_y = m->beta[s] * d_u[s];
            m->d_b[at] = d_u[s] * m->y[at];
            m->d_y[at] = d_y;
            UNROLL for (int t = 0; t < CHUNK; t++) if (t < s) d_u[t] -= m->b[s * PITCH + t] * d_y;
        }
    }
    __syncthreads();
}

// The gradients of the pairs, weighed as these are; then dY and dO become what they give to keys and queries as readers of S.
__device__ static void slopes_of_pairs(Memory *m) {
    float squares[2][2][4] = { ZEROS, ZEROS };
    int me = threadIdx.x;
    product(m->d_y, PITCH, 1, m->u, 1, PITCH, COLUMNS, squares[0]);
    product(m->d_out, PITCH, 1, m->u, 1, PITCH, COLUMNS, squares[1]);
    FOR_TILE(i, j) {
        m->d_b[ROW(i) * PITCH + COLUMN(j)] = -squares[0][i][j];
        m->d_p[ROW(i) * PITCH + COLUMN(j)] = squares[1][i][j];
    }
    __syncthreads();
    if (me < 2 * CHUNK) weigh(m, me % CHUNK, me / CHUNK, me < CHUNK ? m->d_b : m->d_p);
    FOR_TILE(i, j) {
        int at = ROW(i) * PITCH + COLUMN(j);
        m->d_y[at] *= -m->since[ROW(i)];
        m->d_out[at] *= m->since[ROW(i)];
    }
    __syncthreads();
}

// Gradients of queries and keys, to rows [2 heads * keys] of `parts`. What flows over the steps of this thread's rows, that is what
// they read of earlier ones less what they write for later ones, comes to d_y.
__device__ static void keys_and_queries(const Given *g, long long first, Memory *m, float *parts) {
    const Header *h = g->h;
    float flow[2] = { 0.0f, 0.0f };
    for (int x = 0; x < WIDTH; x += 32) {
        float query[2][4] = ZEROS, reader[2][4] = ZEROS, writer[2][4] = ZEROS;
        product(m->d_out, PITCH, 1, m->state + x * PITCH, 1, PITCH, COLUMNS, query);
        product(m->d_p, PITCH, 1, m->keys + x, KEY_PITCH, 1, CHUNK, query);
        product(m->d_y, PITCH, 1, m->state + x * PITCH, 1, PITCH, COLUMNS, reader);
        product(m->d_b, PITCH, 1, m->keys + x, KEY_PITCH, 1, CHUNK, reader);
        product(m->u, PITCH, 1, m->slope + x * PITCH, 1, PITCH, COLUMNS, writer);
        FOR_TILE(i, j) writer[i][j] *= m->rest[ROW(i)];
        product(m->d_b, 1, PITCH, m->keys + x, KEY_PITCH, 1, CHUNK, writer);
        product(m->d_p, 1, PITCH, m->queries + x, KEY_PITCH, 1, CHUNK, writer);
        FOR_TILE(i, j) {
            int c = x + COLUMN(j), from = ROW(i) * KEY_PITCH + c;
            flow[i] += m->queries[from] * query[i][j] + m->keys[from] * (reader[i][j] - writer[i][j]);
            if (first + ROW(i) >= h->length || c >= h->key_width) continue;
            float *to = parts + ((g->batch * h->length + first + ROW(i)) * 2 * h->heads + g->head) * h->key_width + c;
            to[0] = query[i][j];
            to[h->heads * h->key_width] = reader[i][j] + writer[i][j];
        }
    }
    __syncthreads();
    for (int i = 0; i < 2; i++) m->y[ROW(i) * PITCH + COLUMN(0)] = flow[i];
    __syncthreads();
}

// Gradients of decays: a step is passed by what crosses the end of the chunk, `through`, and going back from there by what flows
// over each row.
__device__ static void decays(const Given *g, long long first, const float *behind, Memory *m, float *slopes) {
    const Header *h = g->h;
    float own = 0.0f;
    int me = threadIdx.x;
    if (first + CHUNK < h->length) for (int n = me; n < h->key_width * COLUMNS; n += THREADS) {
        int x = n / COLUMNS, z = n % COLUMNS;
        if (g->z0 + z < h->value_width) own += behind[x * h->value_width + z] * m->slope[x * PITCH + z];
    }
    m->u[me / COLUMNS * PITCH + me % COLUMNS] = own;
    if (me < CHUNK) {
        float sum = 0.0f;
        for (int lane = 0; lane < 8; lane++) sum += m->y[me * PITCH + lane];
        m->flow[me] = sum;
    }
    __syncthreads();
    if (me == 0) {
        float sum = 0.0f;
        for (int n = 0; n < THREADS; n++) sum += m->u[n / COLUMNS * PITCH + n % COLUMNS];
        for (int i = CHUNK - 1; i >= 0; i--) {
            sum += m->flow[i];
            if (first + i < h->length) slopes[g->home * h->length + first + i] = sum * kept(g, first + i);
        }
    }
}

// Gradients from those of the results, `grad`: of values to `d_rows`; of queries and keys to `parts` [tiles, samples, length,
// 2 heads * keys]; of betas and decays to `d_betas` and `d_decays` [tiles, samples, heads, length]. Blocks: tiles of columns, heads,
// samples.
KERNEL void delta_backward(const Header *header, const float *rows, const float *beta, const float *log_decay, const float *keep,
                           const float *states, const float *grad, float *parts, float *d_betas, float *d_decays,
                           float *d_rows) {
    SHARED_MEMORY;
    Memory *m = (Memory *)memory;
    Given given = given_of(header, rows, beta, log_decay, keep), *g = &given;
    const Header *h = header;
    long long chunks = (h->length + CHUNK - 1) / CHUNK, size = h->key_width * h->value_width;
    long long all = (long long)gridDim.z * h->heads * h->length, own = blockIdx.x * all;
    int me = threadIdx.x;
    for (int n = me; n < WIDTH * COLUMNS; n += THREADS) m->slope[n / COLUMNS * PITCH + n % COLUMNS] = 0.0f;
    for (long long chunk = chunks - 1; chunk >= 0; chunk--) {
        long long first = chunk * CHUNK;
        const float *before = states + (g->home * chunks + chunk) * size + g->z0;
        load_chunk(g, first, m);
        for (int n = me; n < WIDTH * COLUMNS; n += THREADS) {
            int x = n / COLUMNS, z = n % COLUMNS, is_there = x < h->key_width && g->z0 + z < h->value_width;
            m->state[x * PITCH + z] = is_there ? before[x * h->value_width + z] : 0.0f;
        }
        for (int n = me; n < CHUNK * COLUMNS; n += THREADS) {
            int i = n / COLUMNS, z = n % COLUMNS, is_there = first + i < h->length && g->z0 + z < h->value_width;
            long long from = ((g->batch * h->length + first + i) * h->heads + g->head) * h->value_width + g->z0 + z;
            m->d_out[i * PITCH + z] = is_there ? grad[from] : 0.0f;
        }
        __syncthreads();
        solve(m);
        solve_back(m);
        FOR_TILE(i, j) {
            long long at = first + ROW(i);
            int z = g->z0 + COLUMN(j);
            if (at < h->length && z < h->value_width) d_rows[place(g, 2, at) + z] = m->d_y[ROW(i) * PITCH + COLUMN(j)];
        }
        if (me < CHUNK && first + me < h->length) {
            float sum = 0.0f;
            for (int z = 0; z < COLUMNS; z++) sum += m->d_b[me * PITCH + z];
            d_betas[own + g->home * h->length + first + me] = sum * kept(g, first + me);
        }
        __syncthreads();
        slopes_of_pairs(m);
        keys_and_queries(g, first, m, parts + 2 * own * h->key_width);
        if (h->decays) decays(g, first, before + size, m, d_decays + own);
        __syncthreads();
        for (int x = 0; x < WIDTH; x += 32) {
            float added[2][4] = ZEROS;
            product(m->keys + x, 1, KEY_PITCH, m->d_y, PITCH, 1, CHUNK, added);
            product(m->queries + x, 1, KEY_PITCH, m->d_out, PITCH, 1, CHUNK, added);
            FOR_TILE(i, j) {
                float *to = m->slope + (x + ROW(i)) * PITCH + COLUMN(j);
                *to = m->since[CHUNK - 1] * *to + added[i][j];
            }
        }
    }
}

// Sums of parts [tiles, count], to rows of `inner` elements that lie `stride` apart. Blocks: count / THREADS.
KERNEL void delta_sum(const float *parts, int tiles, long long count, int inner, int stride, float *sums) {
    long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= count) return;
    float sum = 0.0f;
    for (int tile = 0; tile < tiles; tile++) sum += parts[tile * count + at];
    sums[at / inner * stride + at % inner] = sum;
}
