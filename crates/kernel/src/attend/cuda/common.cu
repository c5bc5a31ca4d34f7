// Pattern softmax attention, forward and backward, without a stored score matrix.
//
// A block of THREADS threads computes a tile of up to TILE queries of one head, or the gradients of BLOCK keys. The compiler's
// command line sets WIDTH, the width of a head, BLOCK, the number of keys at a time, RELATIVE, whether logits depend on
// distances, and MEMORY, the bytes of a block's working memory. Every sum runs in an order that follows from the plan, without
// atomics: the same bits every time. Logits are in units of ln 2.
//
// This is plain C apart from the CUDA qualifiers: the tests compile it for the CPU as well.

#define THREADS 128
#define TILE 64

#ifndef KERNEL
#define KERNEL extern "C" __global__
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef SHARED_MEMORY
#define SHARED_MEMORY extern __shared__ float memory[]
#endif

// What a thread sums stays in registers: their loops must have no indices that are known at run time only.
#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

// Where the rows of an operand lie: start, and the distance of samples, heads and rows.
typedef struct { long long start, batch, head, row; } Place;

// Sizes and places: the same words in the same order as `header` in tables.rs writes them.
typedef struct {
    long long keys, slots, queries, heads, offset, hidden; // hidden: whether some keys are
    Place q, k, v, slot_k, slot_v, out, d_q, d_k, d_v, d_slot_k, d_slot_v;
    // rows of the tables, length of a segment, slots per segment; start of [table | u | v | slot table] and of its gradient
    long long distances, slot_distances, segment, rank, slab, d_slab;
    // dropout of the weights: draws below the threshold drop (0: none does), the bits of what others are multiplied by, the seed
    long long threshold, kept, seed;
} Header;

// Candidate keys of a tile: key number i stands at start + i * step; numbers from first to last are seen by some lane.
typedef struct { int start, step, slots, skip, first, last; } Stream;

// Queries of a tile: its streams, and how many lanes it has.
typedef struct { int stream, streams, queries; } Tile;

__device__ static long long row_of(Place p, int batch, int head, long long i) {
    return p.start + batch * p.batch + head * p.head + i * p.row;
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
