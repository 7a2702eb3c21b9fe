/* One thread that sleeps and waits in many ways: no call reports that the thread was stopped, and none ends too
 * early. */
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/select.h>
#include "feature.h"

static double now(void) {
    struct timespec time;
    CHECK(!clock_gettime(CLOCK_MONOTONIC, &time));
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void check(void) {
    static int word, rounds;
    struct timespec time = { 0, 9000000 }, rest = { 0, 0 };
    struct timeval value = { 0, 9000 };
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGRTMAX);
    double began = now();
    switch (rounds++ % 7) {
        case 0: EQUAL(nanosleep(&time, 0), 0); break;
        case 1: EQUAL(nanosleep(&time, &rest), 0); break;
        case 2: EQUAL(clock_nanosleep(CLOCK_MONOTONIC, 0, &time, &rest), 0); break;
        case 3: EQUAL(poll(0, 0, 9), 0); break;
        case 4: EQUAL(select(0, 0, 0, 0, &value), 0); break;
        case 5: CHECK(syscall(SYS_futex, &word, FUTEX_WAIT, 0, &time, 0, 0) == -1 && errno == ETIMEDOUT); break;
        case 6: CHECK(sigtimedwait(&one, 0, &time) == -1 && errno == EAGAIN); break;
    }
    if (now() - began < 0.0089) fail(__LINE__, "way %d took %f", rounds % 7, now() - began);
}

FEATURE(, check(), )
