// Runs kernels on the CPU, block after block, with a thread of the system for every thread of a block. SOURCE is the file
// of the kernels and CALLS one that defines `call`, which hands the arguments to kernel number so-and-so.

#include <math.h>
#include <pthread.h>

#define WARP_THREADS 128

typedef struct { unsigned x, y, z; } Index;
static __thread Index threadIdx, blockIdx;
static Index gridDim;
static pthread_barrier_t barrier;
static float exchanged[WARP_THREADS];

#define KERNEL static
#define __device__
#define __global__
#define __shared__ static
#define SHARED_MEMORY static float memory[MEMORY / sizeof(float)]
#define __syncthreads() pthread_barrier_wait(&barrier)

// All threads of a block take part, which CUDA asks of a warp only.
static inline float __shfl_xor_sync(unsigned all, float value, int distance) {
    (void)all;
    exchanged[threadIdx.x] = value;
    __syncthreads();
    float other = exchanged[threadIdx.x ^ distance];
    __syncthreads();
    return other;
}

#include SOURCE
#include CALLS

_Static_assert(THREADS == WARP_THREADS, "blocks of another size");

typedef struct { int kernel; unsigned thread; void **arguments; } Work;

static void *work(void *given) {
    Work *w = given;
    threadIdx.x = w->thread;
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
                call(w->kernel, w->arguments);
                __syncthreads();
            }
    return 0;
}

void launch(int kernel, unsigned x, unsigned y, unsigned z, void **arguments) {
    static Work works[THREADS];
    pthread_t threads[THREADS];
    gridDim.x = x, gridDim.y = y, gridDim.z = z;
    pthread_barrier_init(&barrier, 0, THREADS);
    for (int i = 0; i < THREADS; i++) {
        works[i].kernel = kernel, works[i].thread = i, works[i].arguments = arguments;
        pthread_create(&threads[i], 0, work, &works[i]);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], 0);
    pthread_barrier_destroy(&barrier);
}
