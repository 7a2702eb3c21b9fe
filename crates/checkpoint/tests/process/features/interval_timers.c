/* ITIMER_REAL, ITIMER_VIRTUAL and ITIMER_PROF go on, each with its interval. */
#include <signal.h>
#include <sys/time.h>
#include "feature.h"

static volatile long hits[3], rounds;
static void real(int signal) { (void)signal; hits[0]++; }
static void virtual(int signal) { (void)signal; hits[1]++; }
static void prof(int signal) { (void)signal; hits[2]++; }

static void begin(void) {
    signal(SIGALRM, real), signal(SIGVTALRM, virtual), signal(SIGPROF, prof);
    for (int i = 0; i < 3; i++) {
        struct itimerval timer = { { 0, 10000 + i * 4000 }, { 0, 10000 } };
        CHECK(!setitimer(i, &timer, 0));
    }
}

static void check(void) {
    long before[3] = { hits[0], hits[1], hits[2] };
    while (hits[0] == before[0] || hits[1] == before[1] || hits[2] == before[2]) rounds++;
    for (int i = 0; i < 3; i++) {
        struct itimerval found;
        CHECK(!getitimer(i, &found));
        /* The kernel rounds intervals to its ticks. */
        CHECK(found.it_interval.tv_usec >= 10000 + i * 4000 && found.it_interval.tv_usec <= 24000 + i * 4000);
    }
}

FEATURE(begin(), check(), )
