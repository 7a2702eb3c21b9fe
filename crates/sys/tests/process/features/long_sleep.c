/* A sleep that the move interrupts ends when it was to end, not later by what it had slept already. */
#include <pthread.h>
#include "feature.h"

static volatile int woken;
static double began;

static double now(void) {
    struct timespec time;
    CHECK(!clock_gettime(CLOCK_BOOTTIME, &time));
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void *body(void *unused) {
    /* Long enough to be asleep during both moves on any machine: then it is cut short. */
    struct timespec time = { 1000000, 0 }, rest = { 0, 0 };
    began = now();
    while (nanosleep(&time, &rest)) CHECK(errno == EINTR);
    woken = 1;
    return unused;
}

static pthread_t thread;

FEATURE(CHECK(!pthread_create(&thread, 0, body, 0)), EQUAL(woken, 0), )
