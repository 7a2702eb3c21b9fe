/* ioprio_set: the I/O priority of each thread. */
#include <pthread.h>
#include "feature.h"

static volatile int stop;
static long get(void) { return syscall(SYS_ioprio_get, 1, 0); }
static void *body(void *unused) {
    CHECK(!syscall(SYS_ioprio_set, 1, 0, 3 << 13));
    while (!stop) { EQUAL(get(), 3 << 13); nap(1); }
    return unused;
}
static pthread_t thread;

FEATURE(CHECK(!syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 6)); CHECK(!pthread_create(&thread, 0, body, 0)), EQUAL(get(), 2 << 13 | 6), stop = 1; CHECK(!pthread_join(thread, 0)))
