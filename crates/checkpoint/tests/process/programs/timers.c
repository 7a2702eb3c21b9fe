/* Interval timers and timers of timer_create: IDs, signals, values, phases. */
#include "self.h"
#include <signal.h>
#include <sys/time.h>

static volatile long alarms, ticks, value;

static void on_alarm(int signal) { (void)signal; alarms++; }
static void on_tick(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    ticks++;
    value = info->si_value.sival_int;
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    signal(SIGALRM, on_alarm);
    struct sigaction action = { .sa_sigaction = on_tick, .sa_flags = SA_SIGINFO | SA_RESTART };
    CHECK(!sigaction(SIGRTMIN, &action, 0));
    timer_t dropped, ticking, far;
    struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN, .sigev_value.sival_int = 4711 };
    struct sigevent nothing = { .sigev_notify = SIGEV_NONE };
    CHECK(!timer_create(CLOCK_MONOTONIC, &nothing, &dropped));
    CHECK(!timer_create(CLOCK_MONOTONIC, &event, &ticking));
    CHECK(!timer_create(CLOCK_REALTIME, &nothing, &far));
    CHECK(!timer_delete(dropped));
    struct itimerspec often = { { 0, 5000000 }, { 0, 5000000 } }, once = { { 7, 0 }, { 500, 0 } }, left;
    CHECK(!timer_settime(ticking, 0, &often, 0) && !timer_settime(far, 0, &once, 0));
    struct itimerval real = { { 0, 7000 }, { 0, 7000 } }, found;
    CHECK(!setitimer(ITIMER_REAL, &real, 0));
    ready();
    long alarms_before = 0, ticks_before = 0;
    while (go_on()) {
        nap(20);
        CHECK(!getitimer(ITIMER_REAL, &found));
        EQUAL(found.it_interval.tv_usec, 7000);
        CHECK(!timer_gettime(ticking, &left));
        EQUAL(left.it_interval.tv_nsec, 5000000);
        CHECK(!timer_gettime(far, &left));
        EQUAL(left.it_interval.tv_sec, 7);
        CHECK(left.it_value.tv_sec > 300 && left.it_value.tv_sec <= 500);
        EQUAL(timer_gettime(dropped, &left), -1);
        if (ticks > ticks_before && alarms > alarms_before) {
            EQUAL(value, 4711);
            beat();
        }
        ticks_before = ticks, alarms_before = alarms;
    }
    return passed();
}
