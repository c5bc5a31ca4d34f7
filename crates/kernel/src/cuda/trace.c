// Every access of a kernel to memory, as the compiler's thread sanitizer tells it, held against what CUDA allows: between two
// barriers a word is written by one thread and read by no other; blocks of a grid do not share what one of them writes; shared memory
// is written before it is read; and no access leaves shared memory or a buffer.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

unsigned traced_thread(void);
unsigned traced_barrier(void);
unsigned traced_block(void);
void traced_fault(const char *text);

#define WORD 4
#define SEVERAL 0xffffffffu
#define SHARED (-1)

// Who wrote and who read a word last. Blocks are counted from 1; SEVERAL: different ones.
typedef struct {
    unsigned write_block, write_barrier, write_thread, read_block, read_barrier, read_thread;
    unsigned last_reader; // a block, also where several have read
} Shadow;

// Words that a kernel moves: of buffers, read and written, each once; the same once per block; of shared memory, what a thread reads
// again before the next barrier not counted, as it may keep it in a register.
enum { ONCE = 0, PER_BLOCK = 2, OF_SHARED = 4 };
static long moved[6];

// Memory that is watched: `bytes` from `start` on may be used; what lies `before` and `behind` them may not.
typedef struct {
    uintptr_t start;
    long bytes, before, behind;
    int argument; // SHARED: shared memory
    Shadow *words;
} Watched;

#define MOST 64
static Watched watched[MOST];
static int count;
// The kernel has the caller's addresses in it: nothing is traced outside of a launch.
static int on;

static void forget(void) {
    for (int i = 0; i < count; i++) free(watched[i].words);
    count = 0;
}

static void watch(uintptr_t start, long bytes, long before, long behind, int argument) {
    if (count == MOST) abort();
    Shadow *words = calloc(bytes / WORD + 1, sizeof(Shadow));
    watched[count++] = (Watched){ start, bytes, before, behind, argument, words };
}

// Bytes that were moved, and how many of those that the kernels declare with a size were written by the last block.
void trace_counts(long *counts) {
    for (int i = 0; i < 6; i++) counts[i] = WORD * moved[i];
    counts[6] = 0;
    for (int i = 1; i < count; i++) if (watched[i].argument == SHARED)
        for (long word = 0; word < watched[i].bytes / WORD; word++) counts[6] += watched[i].words[word].write_block ? WORD : 0;
}

void trace_launch(void *dynamic, long bytes, long asked, void *fixed, long fixed_bytes, const long *buffers, int buffer_count) {
    forget();
    memset(moved, 0, sizeof moved);
    if (asked > bytes) asked = bytes;
    watch((uintptr_t)dynamic, asked, 0, bytes - asked, SHARED);
    if (fixed_bytes) watch((uintptr_t)fixed, fixed_bytes, 0, 0, SHARED);
    for (const long *one = buffers; one < buffers + 4 * buffer_count; one += 4)
        watch((uintptr_t)one[0], one[1], one[2], one[2], (int)one[3]);
    on = 1;
}

// Shared memory is another one in every block.
void trace_block(void) {
    for (int i = 0; i < count; i++)
        if (watched[i].argument == SHARED) memset(watched[i].words, 0, (watched[i].bytes / WORD + 1) * sizeof(Shadow));
}

static void tell(const Watched *memory, long offset, const char *what) {
    char text[300];
    unsigned me = traced_thread();
    if (memory->argument == SHARED) snprintf(text, sizeof text, "thread %u %s byte %ld of shared memory", me, what, offset);
    else snprintf(text, sizeof text, "thread %u %s byte %ld of argument %d", me, what, offset, memory->argument);
    traced_fault(text);
}

static void with(const Watched *memory, long offset, const char *what, unsigned other) {
    char text[100];
    if (other == SEVERAL) snprintf(text, sizeof text, "%s, without a barrier between them, the same", what);
    else snprintf(text, sizeof text, "%s thread %u, without a barrier between them,", what, other);
    tell(memory, offset, text);
}

static void count_move(const Watched *memory, Shadow *word, unsigned block, unsigned barrier, unsigned me, int writes) {
    if (memory->argument == SHARED) {
        int is_kept = word->read_block == block && word->read_barrier == barrier && word->read_thread == me;
        moved[OF_SHARED + writes] += writes || !is_kept;
        return;
    }
    moved[ONCE + writes] += writes ? !word->write_block : !word->read_block;
    moved[PER_BLOCK + writes] += writes ? word->write_block != block : word->last_reader != block;
    if (!writes) word->last_reader = block;
}

static void touch(const Watched *memory, long offset, int writes) {
    Shadow *word = &memory->words[offset / WORD];
    unsigned block = traced_block(), barrier = traced_barrier(), me = traced_thread();
    count_move(memory, word, block, barrier, me, writes);
    int written = word->write_block != 0, elsewhere = written && word->write_block != block;
    if (!writes && memory->argument == SHARED && !written) {
        tell(memory, offset, "reads what nobody wrote:");
        word->write_block = block, word->write_barrier = barrier - 1, word->write_thread = me; // said once
        return;
    }
    if (elsewhere) tell(memory, offset, writes ? "writes what another block writes:" : "reads what another block writes:");
    else if (written && word->write_barrier == barrier && word->write_thread != me)
        with(memory, offset, writes ? "writes after" : "reads after the write of", word->write_thread);
    if (!writes) {
        unsigned thread = word->read_block == block && word->read_barrier == barrier && word->read_thread != me ? SEVERAL : me;
        word->read_block = word->read_block && word->read_block != block ? SEVERAL : block;
        word->read_barrier = barrier, word->read_thread = thread;
        return;
    }
    if (word->read_block && word->read_block != block) tell(memory, offset, "writes what another block reads:");
    else if (word->read_block && word->read_barrier == barrier && word->read_thread != me)
        with(memory, offset, "writes after the read of", word->read_thread);
    word->write_block = block, word->write_barrier = barrier, word->write_thread = me;
}

static void access_to(const void *at, long bytes, int writes) {
    if (!on) return;
    uintptr_t address = (uintptr_t)at;
    for (int i = 0; i < count; i++) {
        const Watched *memory = &watched[i];
        long offset = (long)(address - memory->start);
        if (offset < -memory->before || offset >= memory->bytes + memory->behind) continue;
        if (offset < 0 || offset + bytes > memory->bytes) {
            tell(memory, offset, writes ? "writes beyond the end:" : "reads beyond the end:");
            return;
        }
        for (long word = offset / WORD * WORD; word < offset + bytes; word += WORD) touch(memory, word, writes);
        return;
    }
}

// ---------------------------------------------------------------------------------------------------------- what the compiler calls

void __tsan_init(void) {}
void __tsan_func_entry(void *from) { (void)from; }
void __tsan_func_exit(void) {}

#define SIZE(n) \
    void __tsan_read##n(void *at) { access_to(at, n, 0); } \
    void __tsan_write##n(void *at) { access_to(at, n, 1); } \
    void __tsan_unaligned_read##n(void *at) { access_to(at, n, 0); } \
    void __tsan_unaligned_write##n(void *at) { access_to(at, n, 1); } \
    void __tsan_read_write##n(void *at) { access_to(at, n, 0), access_to(at, n, 1); } \
    void __tsan_unaligned_read_write##n(void *at) { access_to(at, n, 0), access_to(at, n, 1); }
SIZE(1)
SIZE(2)
SIZE(4)
SIZE(8)
SIZE(16)

void __tsan_read_range(void *at, long bytes) { access_to(at, bytes, 0); }
void __tsan_write_range(void *at, long bytes) { access_to(at, bytes, 1); }
void *__tsan_memset(void *to, int value, size_t bytes) { access_to(to, (long)bytes, 1); return memset(to, value, bytes); }
void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    access_to(from, (long)bytes, 0), access_to(to, (long)bytes, 1);
    return memcpy(to, from, bytes);
}
void *__tsan_memmove(void *to, const void *from, size_t bytes) {
    access_to(from, (long)bytes, 0), access_to(to, (long)bytes, 1);
    return memmove(to, from, bytes);
}
