// Runs kernels on the CPU, block after block, every thread of a block a coroutine that runs until it waits. SOURCE is the file of
// the kernels and CALLS one that defines `call`, which hands the arguments to kernel number so-and-so.
//
// What CUDA leaves undefined is reported as a fault: barriers, shuffles and products of a warp that not all threads reach, and,
// where TRACED is set and the compiler tells every access (its thread sanitizer, whose library is replaced by trace.c), races
// between threads, reads of shared memory that nobody wrote, and accesses beyond shared memory and buffers.

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <ucontext.h>
#else
#include <pthread.h>
#endif

#define BLOCK_THREADS 128
#define WARP_LANES 32

typedef struct { unsigned x, y, z; } Index;
static Index threadIdx, blockIdx, gridDim;

// ---------------------------------------------------------------------------------------------------------- faults

// What was found, one line each: of accesses, which repeat themselves, the first few only.
static char faults[1 << 15];
static int fault_count, accesses;

static void fault(const char *format, ...) {
    if (fault_count++ >= 100) return;
    size_t used = strlen(faults);
    va_list rest;
    va_start(rest, format);
    vsnprintf(faults + used, sizeof faults - used - 1, format, rest);
    va_end(rest);
    strcat(faults, "\n");
}

const char *found_faults(int *count) {
    *count = fault_count;
    return faults;
}

// ---------------------------------------------------------------------------------------------------------- threads

// What a thread waits for: nothing, a barrier of the block, a shuffle or a product of its warp; or it has returned.
typedef enum { RUNS, BARRIER, SHUFFLE, PRODUCT, RETURNED } State;

typedef struct {
    State state;
    int line, distance;
    unsigned mask;
    float given, taken;
    // fragments of this lane, and columns of a
    float *c;
    const unsigned *a, *b;
    int inner;
} Thread;

static Thread threads[BLOCK_THREADS];
// Barriers of the block that were passed, and blocks that were begun.
static unsigned passed, blocks_begun;

static void start_threads(void);
static void resume(int thread);
static void wait_here(void);

static void barrier_here(int line) {
    Thread *me = &threads[threadIdx.x];
    me->state = BARRIER, me->line = line;
    wait_here();
}

static float shuffle_here(unsigned mask, float value, int distance, int line) {
    Thread *me = &threads[threadIdx.x];
    unsigned lane = threadIdx.x % WARP_LANES;
    if (!(mask >> lane & 1)) fault("line %d: lane %u calls a shuffle with mask %08x, in which it is not", line, lane, mask);
    me->state = SHUFFLE, me->line = line, me->mask = mask, me->distance = distance, me->given = value;
    wait_here();
    return me->taken;
}

static void product_here(float *c, const unsigned *a, const unsigned *b, int inner, int line) {
    Thread *me = &threads[threadIdx.x];
    me->state = PRODUCT, me->line = line, me->c = c, me->a = a, me->b = b, me->inner = inner;
    wait_here();
}

// To nearest, ties to even, as cvt.rn.bf16x2.f32 does.
static unsigned to_bf16(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static unsigned bf16_pair(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }

static unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// What the emulation does itself is no kernel's.
#define UNWATCHED __attribute__((no_sanitize("thread")))

// Products by all threads: of f32, where the source calls `count_product` behind each, and of fragments.
static long products_of_f32, products_of_fragments;
UNWATCHED static void count_product(void) { products_of_f32++; }

#define EMULATED
#define KERNEL static
#define __device__
#define __global__
#ifdef TRACED
#define __shared__ static __attribute__((section("shared_memory")))
#else
#define __shared__ static
#endif
#define SHARED_MEMORY float *memory = dynamic_memory
#define __syncthreads() barrier_here(__LINE__)
#define multiply_bf16(c, a, b) product_here(c, a, b, 16, __LINE__)
#define multiply_tf32(c, a, b) product_here(c, a, b, 8, __LINE__)
#define __shfl_xor_sync(mask, value, distance) shuffle_here(mask, value, distance, __LINE__)

// What a launch asks for: more than any device has, and the kernel may use as much as was asked for.
static _Alignas(16) float dynamic_memory[(256 << 10) / sizeof(float)];

#include SOURCE
#include CALLS

_Static_assert(THREADS == BLOCK_THREADS, "blocks of another size");

typedef struct { int kernel; void **arguments; } Work;
static Work work;

static void body(void) {
    call(work.kernel, work.arguments);
    threads[threadIdx.x].state = RETURNED;
}

// Lets all lanes of a warp go on that wait for the same shuffle, if they are those of its mask.
static int shuffled(int warp) {
    Thread *lanes = threads + warp * WARP_LANES;
    int first = 0;
    while (first < WARP_LANES && lanes[first].state != SHUFFLE) first++;
    if (first == WARP_LANES) return 0;
    unsigned mask = lanes[first].mask, here = 0;
    for (int lane = 0; lane < WARP_LANES; lane++) {
        const Thread *one = &lanes[lane];
        if (one->state == SHUFFLE && one->line == lanes[first].line && one->mask == mask) here |= 1u << lane;
    }
    if (here != mask) return 0;
    for (int lane = 0; lane < WARP_LANES; lane++) {
        if (!(here >> lane & 1)) continue;
        int from = lane ^ lanes[lane].distance;
        if (from >= WARP_LANES || !(mask >> from & 1)) {
            fault("line %d: lane %d takes a value of lane %d, which is not in the mask %08x", lanes[lane].line, lane, from, mask);
            from = lane;
        }
        lanes[lane].taken = lanes[from].given;
    }
    for (int lane = 0; lane < WARP_LANES; lane++) if (here >> lane & 1) lanes[lane].state = RUNS;
    return 1;
}

// Half a word as a number.
UNWATCHED static float from_bf16(unsigned word, int half) {
    unsigned bits = (half ? word >> 16 : word & 0xffff) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// A word as a number of tf32, which has the upper 10 bits of the fraction.
UNWATCHED static float from_tf32(unsigned word) { return __uint_as_float(word & 0xffffe000u); }

// Lets the lanes of a warp go on if all wait for the same product, mma.m16n8k16 with fragments of bf16 or mma.m16n8k8 with those of
// tf32, and sums in f32: number i of a lane stands where the tables of the PTX ISA ("Matrix Fragments for ...") say. What is counted is
// the time in products of bf16: those of tf32 take twice as long.
UNWATCHED static int multiplied(int warp) {
    Thread *lanes = threads + warp * WARP_LANES;
    float a[16][16] = { 0 }, b[16][8] = { 0 };
    for (int lane = 0; lane < WARP_LANES; lane++)
        if (lanes[lane].state != PRODUCT || lanes[lane].line != lanes[0].line) return 0;
    for (int lane = 0; lane < WARP_LANES; lane++) {
        int group = lane >> 2, within = lane % 4;
        if (lanes[0].inner == 8) {
            for (int i = 0; i < 4; i++) a[group + (i & 1) * 8][within + (i >> 1) * 4] = from_tf32(lanes[lane].a[i]);
            for (int i = 0; i < 2; i++) b[within + i * 4][group] = from_tf32(lanes[lane].b[i]);
            continue;
        }
        for (int i = 0; i < 8; i++) {
            int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8, column = within * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            a[row][column] = from_bf16(lanes[lane].a[i / 2], i % 2);
        }
        for (int i = 0; i < 4; i++) b[within * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = from_bf16(lanes[lane].b[i / 2], i % 2);
    }
    for (int lane = 0; lane < WARP_LANES; lane++) {
        for (int i = 0; i < 4; i++) {
            int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, column = lane % 4 * 2 + (i & 1);
            float sum = lanes[lane].c[i];
            for (int k = 0; k < lanes[0].inner; k++) sum += a[row][k] * b[k][column];
            lanes[lane].c[i] = sum;
        }
        lanes[lane].state = RUNS;
    }
    products_of_fragments += 16 * 8 * 16;
    return 1;
}

static int count_of(State state, int from, int to) {
    int count = 0;
    for (int i = from; i < to; i++) count += threads[i].state == state;
    return count;
}

// Nobody can go on: says which barrier or shuffle was not reached by whom.
static void stuck(void) {
    for (int i = 0; i < BLOCK_THREADS; i++) {
        const Thread *one = &threads[i];
        int warp = i / WARP_LANES * WARP_LANES;
        if (one->state == SHUFFLE || one->state == PRODUCT) {
            int here = 0;
            for (int lane = warp; lane < warp + WARP_LANES; lane++)
                here += threads[lane].state == one->state && threads[lane].line == one->line;
            int number = i / WARP_LANES;
            if (one->state == PRODUCT) fault("line %d: a product is reached by %d lanes of warp %d only", one->line, here, number);
            else fault("line %d: a shuffle with mask %08x is reached by %d lanes of warp %d only", one->line, one->mask, here, number);
            return;
        }
    }
    int line = 0, here = 0;
    for (int i = 0; i < BLOCK_THREADS; i++) if (threads[i].state == BARRIER && !line) line = threads[i].line;
    for (int i = 0; i < BLOCK_THREADS; i++) here += threads[i].state == BARRIER && threads[i].line == line;
    fault("line %d: a barrier is reached by %d of %d threads only (%d have returned)", line, here, BLOCK_THREADS,
          count_of(RETURNED, 0, BLOCK_THREADS));
}

// Lets all threads go on that wait for the same barrier.
static int met(void) {
    for (int i = 0; i < BLOCK_THREADS; i++)
        if (threads[i].state != BARRIER || threads[i].line != threads[0].line) return 0;
    for (int i = 0; i < BLOCK_THREADS; i++) threads[i].state = RUNS;
    passed++;
    return 1;
}

static void begin_block(void);

static void run_block(void) {
    blocks_begun++, passed++;
    begin_block();
    for (int i = 0; i < BLOCK_THREADS; i++) threads[i].state = RUNS;
    start_threads();
    for (;;) {
        for (int i = 0; i < BLOCK_THREADS; i++) if (threads[i].state == RUNS) {
            threadIdx.x = i;
            resume(i);
        }
        if (count_of(RETURNED, 0, BLOCK_THREADS) == BLOCK_THREADS) return;
        int goes = met();
        for (int warp = 0; warp < BLOCK_THREADS / WARP_LANES; warp++) goes |= shuffled(warp) | multiplied(warp);
        if (!goes) {
            stuck();
            return;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- coroutines

#define STACK (256 << 10)

#ifdef __linux__
static ucontext_t contexts[BLOCK_THREADS], scheduler;
static char *stacks;

static void entry(void) {
    body();
    swapcontext(&contexts[threadIdx.x], &scheduler);
}

static void start_threads(void) {
    if (!stacks) stacks = malloc((size_t)STACK * BLOCK_THREADS);
    for (int i = 0; i < BLOCK_THREADS; i++) {
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks + (size_t)STACK * i;
        contexts[i].uc_stack.ss_size = STACK;
        contexts[i].uc_link = &scheduler;
        makecontext(&contexts[i], entry, 0);
    }
}

static void resume(int thread) { swapcontext(&scheduler, &contexts[thread]); }
static void wait_here(void) { swapcontext(&contexts[threadIdx.x], &scheduler); }
#else
// A thread of the system each, of which one runs at a time.
static pthread_mutex_t turn_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turns[BLOCK_THREADS + 1];
static int turn = BLOCK_THREADS;

static void pass_turn(int from, int to) {
    pthread_mutex_lock(&turn_lock);
    turn = to;
    pthread_cond_signal(&turns[to]);
    while (turn != from) pthread_cond_wait(&turns[from], &turn_lock);
    pthread_mutex_unlock(&turn_lock);
}

static void *entry(void *given) {
    int thread = (int)(intptr_t)given;
    pthread_mutex_lock(&turn_lock);
    while (turn != thread) pthread_cond_wait(&turns[thread], &turn_lock);
    pthread_mutex_unlock(&turn_lock);
    body();
    pthread_mutex_lock(&turn_lock);
    turn = BLOCK_THREADS;
    pthread_cond_signal(&turns[BLOCK_THREADS]);
    pthread_mutex_unlock(&turn_lock);
    return 0;
}

static void start_threads(void) {
    static int ready;
    for (int i = 0; !ready && i <= BLOCK_THREADS; i++) pthread_cond_init(&turns[i], 0);
    ready = 1;
    for (int i = 0; i < BLOCK_THREADS; i++) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, STACK);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_create(&thread, &attributes, entry, (void *)(intptr_t)i);
        pthread_attr_destroy(&attributes);
    }
}

static void resume(int thread) { pass_turn(BLOCK_THREADS, thread); }
static void wait_here(void) { pass_turn((int)threadIdx.x, BLOCK_THREADS); }
#endif

// ---------------------------------------------------------------------------------------------------------- what trace.c asks

unsigned traced_thread(void) { return threadIdx.x; }
unsigned traced_barrier(void) { return passed; }
unsigned traced_block(void) { return blocks_begun; }
void traced_fault(const char *text) {
    if (accesses++ < 10) fault("block [%u, %u, %u]: %s", blockIdx.x, blockIdx.y, blockIdx.z, text);
}

#ifdef TRACED
void trace_launch(void *dynamic, long bytes, long asked, void *fixed, long fixed_bytes, const long *buffers, int count);
void trace_block(void);
void trace_counts(long *counts);
extern char __start_shared_memory[] __attribute__((weak)), __stop_shared_memory[] __attribute__((weak));
static void begin_block(void) { trace_block(); }
#else
static void begin_block(void) {}
#endif

// Bytes of shared memory that the kernels of the source declare with a size.
long fixed_shared(void) {
#ifdef TRACED
    return __stop_shared_memory - __start_shared_memory;
#else
    return 0;
#endif
}

// Of the last launch: what `trace_counts` tells, products of f32, and those of fragments.
void counts(long *to) {
#ifdef TRACED
    trace_counts(to);
#else
    for (int i = 0; i < 7; i++) to[i] = 0;
#endif
    to[7] = products_of_f32, to[8] = products_of_fragments;
}

// `buffers`: address, bytes, a margin on both sides, and the number of the argument.
void launch(int kernel, unsigned x, unsigned y, unsigned z, void **arguments, long shared, const long *buffers, int count) {
    work.kernel = kernel, work.arguments = arguments;
    gridDim.x = x, gridDim.y = y, gridDim.z = z;
    fault_count = accesses = 0, faults[0] = 0, products_of_f32 = products_of_fragments = 0;
#ifdef TRACED
    trace_launch(dynamic_memory, sizeof dynamic_memory, shared, __start_shared_memory, fixed_shared(), buffers, count);
#else
    (void)shared, (void)buffers, (void)count, (void)dynamic_memory;
#endif
    for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) {
                run_block();
                if (fault_count) return;
            }
}
