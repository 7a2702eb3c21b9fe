/* timer_create: IDs, clocks, targets, values; deleted timers stay deleted. */
#include <signal.h>
#include "feature.h"

enum { COUNT = 12 };
static timer_t timers[COUNT];
static volatile long hits[COUNT], strange;

static void on(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    int i = info->si_value.sival_int - 100;
    if (info->si_code != SI_TIMER || i < 0 || i >= COUNT) strange++; else hits[i]++;
}

static void begin(void) {
    static const clockid_t clocks[] = { CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_BOOTTIME, CLOCK_TAI, CLOCK_PROCESS_CPUTIME_ID };
    struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART };
    CHECK(!sigaction(SIGRTMIN + 1, &action, 0));
    for (int i = 0; i < COUNT; i++) {
        struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 1, .sigev_value.sival_int = 100 + i };
        CHECK(!timer_create(clocks[i % 5], &event, &timers[i]));
        struct itimerspec time = { { 0, 4000000 + i * 100000 }, { 0, 1000000 } };
        CHECK(!timer_settime(timers[i], 0, &time, 0));
    }
    CHECK(!timer_delete(timers[3]) && !timer_delete(timers[7]));
    struct itimerspec never = { { 0, 0 }, { 0, 0 } }, far = { { 5, 6 }, { 7000, 0 } };
    CHECK(!timer_settime(timers[5], 0, &never, 0) && !timer_settime(timers[6], 0, &far, 0));
}

static void check(void) {
    struct itimerspec found;
    long before[COUNT];
    memcpy(before, (void *)hits, sizeof before);
    for (int i = 0; i < COUNT; i++) {
        if (i == 3 || i == 7) { EQUAL(timer_gettime(timers[i], &found), -1); continue; }
        CHECK(!timer_gettime(timers[i], &found));
        if (i == 5) CHECK(!found.it_value.tv_sec && !found.it_value.tv_nsec && !found.it_interval.tv_nsec);
        else if (i == 6) CHECK(found.it_value.tv_sec > 5000 && found.it_value.tv_sec < 7000 && found.it_interval.tv_sec == 5 && found.it_interval.tv_nsec == 6);
        else { EQUAL(found.it_interval.tv_nsec, 4000000 + i * 100000); while (hits[i] == before[i]); }
    }
    EQUAL(strange, 0);
}

FEATURE(begin(), check(), timer_t more; struct sigevent none = { .sigev_notify = SIGEV_NONE }; CHECK(!timer_create(CLOCK_MONOTONIC, &none, &more)); for (int i = 0; i < COUNT; i++) CHECK(i == 3 || i == 7 || timers[i] != more))
