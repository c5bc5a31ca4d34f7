// Sums of linear attention, forward and backward, in f32 without a matrix of the length squared.
//
// All of them are sums over pairs: row i of the result is sum_j w_ij (x_i . y_j) z_j over the rows j of its chunk that it sees, and
// w_i x_i S with what the chunks before it have added up, S = sum_j w_j y_j z_j^T. What x, y and z are says which result it is:
//
//     output      x = phi(q)        y = phi(k)        z = values          S = sums over keys before
//     d values    x = phi(k)        y = phi(q)        z = d numerators    S = sums over queries behind ("later")
//     d phi(q)    x = d numerators  y = values        z = phi(k)          S^T of the first
//     d phi(k)    x = values        y = d numerators  z = phi(q)          S^T of the second
//
// Where results are divided, values have a column of ones behind them that sums up the denominator, and d numerators have its
// gradient there. The compiler's command line sets ACTIVATION and TURN, how rows become features, DECAY, whether sums decay (NONE,
// PER_ROW, PER_CHANNEL), and MEMORY, the bytes of a block's working memory. Widths are arguments. Every sum runs in an order that
// follows from the sizes, without atomics: the same bits every time. Decays are products of the steps between two rows, never
// quotients: a step that forgets all spoils no later one.
//
// This is plain C apart from the CUDA qualifiers: the tests compile it for the CPU as well.

#define THREADS 128
#define WARP 32
#define CHUNK 64 // rows
#define DEPTH 32 // columns of x and y at a time
#define COLUMNS 64 // columns of z at a time
#define PITCH (COLUMNS + 1)
#define DEPTH_PITCH (DEPTH + 1)

#define NONE 0
#define PER_ROW 1
#define PER_CHANNEL 2

#define IDENTITY 0
#define LEAKY 1
#define ELU1 2

#ifndef KERNEL
#define KERNEL extern "C" __global__
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef SHARED_MEMORY
#define SHARED_MEMORY extern __shared__ float memory[]
#endif

// Working memory of a block.
typedef struct {
    union {
        struct { float x[CHUNK * DEPTH_PITCH], y[CHUNK * DEPTH_PITCH]; } in;
        float z[CHUNK * PITCH];
    } side;
    float pairs[CHUNK * PITCH], state[DEPTH * PITCH], factor[CHUNK], den[CHUNK], step[CHUNK];
#if DECAY == PER_CHANNEL
    float steps[CHUNK * PITCH];
#endif
} Memory;
typedef char memory_has_its_size[sizeof(Memory) == MEMORY ? 1 : -1];

// Where the rows of an operand lie: start, the distance of samples, heads and rows, and how many heads it has (those of a call that
// share one are neighbours).
typedef struct { long long start, batch, head, row, heads; } Place;

// Sizes and places: the same words in the same order as `header` in launch.rs writes them.
typedef struct {
    // columns: of values, with the one of the denominator; masked: whether some keys are hidden
    long long heads, queries, keys, features, values, columns, parts, masked, guard;
    Place q, k, v, out, grad, d_q, d_k, d_v;
} Header;

// What rows are of.
#define QUERIES 0 // features
#define KEYS 1 // features
#define VALUES 2
#define SLOPES 3 // gradients of numerators and denominators

// What a block reads. `reversed`: rows are counted from the last position, for sums over the keys behind a query.
typedef struct {
    const Header *h;
    const float *q, *k, *v, *grad, *keep, *angles, *logs;
    float lean;
    int reversed, batch, head, group;
} Given;

__device__ static Given given_of(const Header *h, const float *q, const float *k, const float *v, const float *grad,
                                 const float *keep, const float *angles, const float *logs, float lean, int reversed) {
    Given g;
    g.h = h, g.q = q, g.k = k, g.v = v, g.grad = grad, g.keep = keep, g.angles = angles, g.logs = logs;
    g.lean = lean, g.reversed = reversed, g.batch = blockIdx.z, g.head = blockIdx.y;
    g.group = (int)(g.head * h->q.heads / h->heads);
    return g;
}

__device__ static long long row_of(Place p, const Given *g, long long i) {
    return p.start + g->batch * p.batch + (p.heads == g->h->heads ? g->head : g->group) * p.head + i * p.row;
}

// A head of a sample.
__device__ static long long home(const Given *g) { return (long long)g->batch * g->h->heads + g->head; }

__device__ static long long rows_of(const Header *h, int kind) {
    return kind == QUERIES || kind == SLOPES ? h->queries : h->keys;
}

__device__ static int width_of(const Header *h, int kind) { return (int)(kind < VALUES ? h->features : h->columns); }

// The position of row i.
__device__ static long long position(const Given *g, int kind, long long i) {
    return g->reversed ? rows_of(g->h, kind) - 1 - i : i;
}

__device__ static int is_hidden(const Given *g, int kind, long long at) {
    return kind == KEYS && g->h->masked && g->keep[g->batch * g->h->keys + at] == 0.0f;
}

__device__ static float activate(float x, float lean) {
    if (ACTIVATION == LEAKY) return x > 0.0f ? x : lean * x;
    if (ACTIVATION == ELU1) return x > 0.0f ? x + 1.0f : expf(x);
    return x;
}

__device__ static float derive(float x, float lean) {
    if (ACTIVATION == LEAKY) return x > 0.0f ? 1.0f : lean;
    if (ACTIVATION == ELU1) return x > 0.0f ? 1.0f : expf(x);
    return 1.0f;
}

// Queries or keys as they are given.
__device__ static const float *raw(const Given *g, int kind, long long at) {
    return kind == QUERIES ? g->q + row_of(g->h->q, g, at) : g->k + row_of(g->h->k, g, at);
}

// Rows of a kind from one on, as they are read: `left` of them are there, and of their columns the first `plain` are elements.
typedef struct {
    const float *data, *angles, *keep;
    long long step;
    int kind, left, width, plain, turn;
    float lean;
} Rows;

__device__ static Rows rows_from(const Given *g, int kind, long long first) {
    const Header *h = g->h;
    Place p = kind == QUERIES ? h->q : kind == KEYS ? h->k : kind == VALUES ? h->v : h->grad;
    long long left = rows_of(h, kind) - first, at = left > 0 ? position(g, kind, first) : 0;
    Rows r;
    r.data = (kind == QUERIES ? g->q : kind == KEYS ? g->k : kind == VALUES ? g->v : g->grad) + row_of(p, g, at);
    r.kind = kind, r.left = left < CHUNK ? (int)left : CHUNK, r.width = width_of(h, kind);
    r.plain = kind == VALUES ? (int)h->values : r.width;
    r.turn = g->reversed ? -1 : 1, r.step = r.turn * p.row;
    r.angles = g->angles + 2 * at, r.keep = g->keep + g->batch * h->keys + at, r.lean = g->lean;
    if (kind != KEYS || !h->masked) r.keep = 0;
    return r;
}

// Column x of row i; 0 beyond the last of either. With TURN, the features of a channel are neighbours: by sine and by cosine.
__device__ static float element(const Rows *r, int i, int x) {
    if (i >= r->left || x >= r->width) return 0.0f;
    if (r->keep && r->keep[r->turn * i] == 0.0f) return 0.0f;
    if (r->kind >= VALUES) return x < r->plain ? r->data[i * r->step + x] : 1.0f;
#if TURN
    return activate(r->data[i * r->step + x / 2], r->lean) * r->angles[2 * r->turn * i + x % 2];
#else
    return activate(r->data[i * r->step + x], r->lean);
#endif
}

// A tile of CHUNK rows and some columns to shared memory, zeros where there are none.
__device__ static void load(const Rows *r, int column, int columns, int pitch, float *to) {
    for (int at = threadIdx.x; at < CHUNK * columns; at += THREADS) {
        int i = at / columns, x = at % columns;
        to[i * pitch + x] = element(r, i, column + x);
    }
}

// What row i keeps of the sums before it, in channel x; 1 behind the last row.
__device__ static float step_of(const Given *g, long long i, int x) {
#if DECAY == NONE
    return 1.0f;
#else
    int width = DECAY == PER_CHANNEL ? (int)g->h->features : 1;
    if (i >= g->h->keys || x >= width) return 1.0f;
    return expf(g->logs[(home(g) * g->h->keys + position(g, KEYS, i)) * width + x]);
#endif
}

__device__ static void load_steps(const Given *g, long long first, int column, int columns, int pitch, float *to) {
    for (int at = threadIdx.x; at < CHUNK * columns; at += THREADS) {
        int i = at / columns, x = at % columns;
        to[i * pitch + x] = step_of(g, first + i, column + x);
    }
}

// 1 / guard(den), and the derivative of guard at den: the guards of `Guard` in mod.rs, in its order, from 1 on.
__device__ static float invert(int guard, float eps, float den, float *slope) {
    float sign = den >= 0.0f ? 1.0f : -1.0f, size = fabsf(den);
    *slope = 1.0f;
    if (guard == 4) return 1.0f / (den + eps);
    if (guard == 1 && den > eps) return 1.0f / den;
    if (guard == 2 && size >= eps) return 1.0f / den;
    if (guard == 5 && size >= eps) return 1.0f / den;
    if (guard == 3 && size > eps) {
        *slope = sign;
        return 1.0f / size;
    }
    *slope = 0.0f;
    return guard == 5 ? 0.0f : (guard == 2 ? sign : 1.0f) / eps;
}
