/* A sleep that a move interrupts continues with its remaining time, not from its beginning. */
#include <pthread.h>
#include <signal.h>
#include "feature.h"

static volatile int woken;
static struct timespec rest[2];
static const long slept_ms = 300, long_enough = 1000000;
static void on(int signal) { (void)signal; }

static void *body(void *number) {
    struct timespec time = { long_enough, 0 };
    int error = (long)number ? clock_nanosleep(CLOCK_MONOTONIC, 0, &time, &rest[1]) : nanosleep(&time, &rest[0]) ? errno : 0;
    EQUAL(error, EINTR);
    woken++;
    return 0;
}

static pthread_t threads[2];

static void begin(void) {
    struct sigaction action = { .sa_handler = on };
    CHECK(!sigaction(SIGUSR1, &action, 0));
    for (long i = 0; i < 2; i++) CHECK(!pthread_create(&threads[i], 0, body, (void *)i));
    nap(slept_ms);
}

static void end(void) {
    for (int i = 0; i < 2; i++) {
        CHECK(!pthread_kill(threads[i], SIGUSR1) && !pthread_join(threads[i], 0));
        double left = rest[i].tv_sec + rest[i].tv_nsec / 1e9;
        /* The sleep began somewhat after the thread was created. */
        CHECK(left > 0 && left < long_enough - slept_ms / 2e3);
    }
}

FEATURE(begin(), EQUAL(woken, 0), end())
