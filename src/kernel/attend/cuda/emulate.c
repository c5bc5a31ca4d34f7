// Runs the kernels of attend.cu on the CPU, block after block, with a thread of the system for every thread of a block.

#include <math.h>
#include <pthread.h>

typedef struct { unsigned x, y, z; } Index;
static __thread Index threadIdx, blockIdx;
static Index gridDim;
static pthread_barrier_t barrier;

#define KERNEL static
#define __device__
#define __global__
#define __shared__
#define SHARED_MEMORY static float memory[1 << 16]
#define __syncthreads() pthread_barrier_wait(&barrier)

#include SOURCE

#define AT(n, type) (*(type *)a[n])
#define PLAN AT(0, const Header *), AT(1, const Tile *), AT(2, const int *), AT(3, const Stream *), AT(4, const int *), \
    AT(5, const int *), AT(6, const unsigned char *)
#define OPERANDS(n) AT(n, const float *), AT(n + 1, const float *), AT(n + 2, const float *), AT(n + 3, const float *), \
    AT(n + 4, const float *)

static void call(int kernel, void **a) {
    switch (kernel) {
    case 0: attend_forward(PLAN, OPERANDS(7), AT(12, float), AT(13, float *), AT(14, float *)); break;
    case 1: attend_means(AT(0, const Header *), AT(1, const float *), AT(2, const float *), AT(3, float *)); break;
    case 2:
        attend_back_queries(PLAN, OPERANDS(7), AT(12, const float *), AT(13, const float *), AT(14, const float *),
                            AT(15, float), AT(16, float), AT(17, float *));
        break;
    default:
        attend_back_keys(AT(0, const Header *), AT(1, const Tile *), AT(2, const int *), AT(3, const int *),
                         AT(4, const Stream *), AT(5, const int *), AT(6, const int *), AT(7, const unsigned char *),
                         OPERANDS(8), AT(13, const float *), AT(14, const float *), AT(15, const float *), AT(16, float),
                         AT(17, float), AT(18, int), AT(19, float *));
    }
}

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

// The size of `Memory`; 0 if it does not fit.
unsigned long memory_bytes(void) { return sizeof(Memory) <= sizeof(float) << 16 ? sizeof(Memory) : 0; }

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
