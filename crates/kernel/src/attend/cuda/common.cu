// Pattern softmax attention, forward and backward, without a stored score matrix.
//
// A block of THREADS threads computes a tile of up to TILE queries of one head, or the gradients of BLOCK keys (with tensor cores of TILE). The compiler's
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
#define SHARED_MEMORY extern __shared__ __align__(16) float memory[]
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
