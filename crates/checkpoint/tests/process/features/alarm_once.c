/* A timer that runs for a long time: its remaining time only shrinks, and a move does not shorten it. */
#include <signal.h>
#include <sys/time.h>
#include "feature.h"

static double left(void) {
    struct itimerval found;
    CHECK(!getitimer(ITIMER_REAL, &found));
    EQUAL(found.it_interval.tv_sec, 0);
    return found.it_value.tv_sec + found.it_value.tv_usec / 1e6;
}

static double now(void) {
    struct timespec time;
    CHECK(!clock_gettime(CLOCK_MONOTONIC, &time));
    return time.tv_sec + time.tv_nsec / 1e9;
}

static double due, before;

static void check(void) {
    double rest = left(), at = now();
    CHECK(rest > 0 && rest <= before);
    /* The timer pauses while the program is stopped, so it may only be late. */
    CHECK(at + rest > due - 0.05);
    before = rest;
}

static void begin(void) {
    struct itimerval timer = { { 0, 0 }, { 3000, 500000 } };
    before = 3001, due = now() + 3000.5;
    CHECK(!setitimer(ITIMER_REAL, &timer, 0));
}

FEATURE(begin(), check(), CHECK(alarm(0) > 2000))
