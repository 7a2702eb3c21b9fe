/* 300 threads that wait for each other. */
#include <pthread.h>
#include "feature.h"

enum { COUNT = 300 };
static pthread_barrier_t barrier;
static volatile long phase, stop, late;
static pthread_t threads[COUNT];
static long tids[COUNT];

static void *body(void *number) {
    tids[(long)number] = syscall(SYS_gettid);
    for (;;) {

        pthread_barrier_wait(&barrier);
        if (stop) return 0;

        if (syscall(SYS_gettid) != tids[(long)number]) late++;
        pthread_barrier_wait(&barrier);
    }
}

static void begin(void) {
    pthread_attr_t how;
    CHECK(!pthread_attr_init(&how) && !pthread_attr_setstacksize(&how, 65536) && !pthread_barrier_init(&barrier, 0, COUNT + 1));
    for (long i = 0; i < COUNT; i++) CHECK(!pthread_create(&threads[i], &how, body, (void *)i));
}

/* Between the second barrier and the first, no thread reads the phase except at the beginning of its turn. */
static void check(void) { nap(20); phase++; pthread_barrier_wait(&barrier); pthread_barrier_wait(&barrier); }

FEATURE(begin(), check(), stop = 1; pthread_barrier_wait(&barrier); for (int i = 0; i < COUNT; i++) CHECK(!pthread_join(threads[i], 0)))
