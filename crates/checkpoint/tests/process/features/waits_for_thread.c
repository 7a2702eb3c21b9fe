/* pthread_join of a thread that ends after the move: the kernel clears the thread's ID and wakes the waiter. */
#include <pthread.h>
#include "feature.h"

static volatile int stop, joined;

static void *body(void *unused) { while (!stop) nap(1); return (char *)unused + 5; }
static pthread_t thread, waiter;
static void *wait_for(void *unused) { void *result; CHECK(!pthread_join(thread, &result)); EQUAL(result, 5); joined = 1; return unused; }

FEATURE(CHECK(!pthread_create(&thread, 0, body, 0)); CHECK(!pthread_create(&waiter, 0, wait_for, 0)), EQUAL(joined, 0), stop = 1; CHECK(!pthread_join(waiter, 0)); EQUAL(joined, 1))
