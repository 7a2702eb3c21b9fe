/* Threads begin and end all the time. */
#include <pthread.h>
#include "feature.h"

static __thread long local = 5;
static void *body(void *number) { local += (long)number; nap((long)number % 3); EQUAL(local, 5 + (long)number); return number; }

static void check(void) {
    static long rounds;
    pthread_t threads[6];
    rounds++;
    for (long i = 0; i < 6; i++) CHECK(!pthread_create(&threads[i], 0, body, (void *)(rounds + i)));
    for (long i = 0; i < 6; i++) { void *result; CHECK(!pthread_join(threads[i], &result)); EQUAL(result, rounds + i); }
}

FEATURE(, check(), )
