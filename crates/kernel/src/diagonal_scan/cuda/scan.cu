// h_t = a h_{t-1} + x_t over complex diagonal states, chunk after chunk: what every chunk adds up from nothing, the states that
// come to each, and its rows from these. A thread has a state of a chunk. Rows are numbered in the order of the recurrence. Every
// sum runs in an order that follows from the sizes, without atomics: the same bits every time.
//
// This is plain C apart from the CUDA qualifiers: the tests compile it for the CPU as well.

#define THREADS 128
#define CHUNK 64 // rows

#ifndef KERNEL
#define KERNEL extern "C" __global__
#endif

// The same words in the same order as `header` in mod.rs writes them. reversed: from the last position on; conjugate: of a. Rows
// of x and y have `x_row` and `y_row` numbers, of which those of the recurrence begin at `x_at` and `y_at`.
typedef struct { long long length, states, chunks, reversed, conjugate, x_row, x_at, y_row, y_at, part; } Header;

typedef struct { float re, im; } Complex;

// a h + x.
__device__ static Complex next(Complex a, Complex h, Complex x) {
    Complex sum = { a.re * h.re - a.im * h.im + x.re, a.re * h.im + a.im * h.re + x.im };
    return sum;
}

// Where row i of a sample begins, in rows of this length.
__device__ static long long place(const Header *h, long long i, long long row) {
    return (blockIdx.z * h->length + (h->reversed ? h->length - 1 - i : i)) * row;
}

__device__ static Complex read_state(const Header *h, const float *from) {
    Complex number = { from[0], from[h->states] };
    return number;
}

__device__ static void write_state(const Header *h, Complex number, float *to) {
    to[0] = number.re;
    to[h->states] = number.im;
}

__device__ static Complex factor(const Header *h, const float *a, long long state) {
    Complex number = read_state(h, a + state);
    if (h->conjugate) number.im = -number.im;
    return number;
}

__device__ static long long first_row(void) { return (long long)blockIdx.y * CHUNK; }

__device__ static long long end_row(const Header *h) {
    return first_row() + CHUNK < h->length ? first_row() + CHUNK : h->length;
}

// Numbers of a state in [samples, chunks, 2 states].
__device__ static float *of_chunk(const Header *h, long long chunk, long long state, float *ends) {
    return ends + (blockIdx.z * h->chunks + chunk) * 2 * h->states + state;
}

// What every chunk adds up. Blocks: states / THREADS, chunks, samples.
KERNEL void scan_ends(const Header *header, const float *x, const float *a, float *ends) {
    const Header *h = header;
    long long state = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (state >= h->states) return;
    Complex sum = { 0.0f, 0.0f }, step = factor(h, a, state);
    for (long long i = first_row(); i < end_row(h); i++)
        sum = next(step, sum, read_state(h, x + place(h, i, h->x_row) + h->x_at + state));
    write_state(h, sum, of_chunk(h, blockIdx.y, state, ends));
}

// What chunks add up becomes the state before each: all but the last chunk are whole. Blocks: states / THREADS, 1, samples.
KERNEL void scan_carry(const Header *header, const float *a, float *ends) {
    const Header *h = header;
    long long state = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (state >= h->states) return;
    Complex carried = { 0.0f, 0.0f }, none = carried, step = factor(h, a, state), steps = step;
    for (int i = 1; i < CHUNK; i++) steps = next(step, steps, none);
    for (long long chunk = 0; chunk < h->chunks; chunk++) {
        float *at = of_chunk(h, chunk, state, ends);
        Complex added = read_state(h, at);
        write_state(h, carried, at);
        carried = next(steps, carried, added);
    }
}

// The states. Blocks: states / THREADS, chunks, samples.
KERNEL void scan_rows(const Header *header, const float *x, const float *a, float *ends, float *y) {
    const Header *h = header;
    long long state = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (state >= h->states) return;
    Complex sum = read_state(h, of_chunk(h, blockIdx.y, state, ends)), step = factor(h, a, state);
    for (long long i = first_row(); i < end_row(h); i++) {
        sum = next(step, sum, read_state(h, x + place(h, i, h->x_row) + h->x_at + state));
        write_state(h, sum, y + place(h, i, h->y_row) + h->y_at + state);
    }
}

// The part of each chunk in the gradient of a: x, the gradients of states, with the conjugates of the states y before. Blocks:
// states / THREADS, chunks, samples.
KERNEL void scan_slopes(const Header *header, const float *x, const float *y, float *parts) {
    const Header *h = header;
    long long state = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (state >= h->states) return;
    Complex sum = { 0.0f, 0.0f };
    for (long long i = first_row(); i < end_row(h); i++) {
        if (i == 0) continue;
        Complex before = read_state(h, y + place(h, i - 1, h->y_row) + h->y_at + state);
        before.im = -before.im;
        sum = next(read_state(h, x + place(h, i, h->x_row) + h->x_at + state), before, sum);
    }
    write_state(h, sum, of_chunk(h, blockIdx.y, state, parts + h->part));
}
