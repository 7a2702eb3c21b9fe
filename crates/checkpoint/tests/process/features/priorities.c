/* Scheduling policies, priorities, nice values and CPU affinity of each thread. */
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include "feature.h"

static volatile int stop;
static const struct { int policy, priority, nice; } wanted[] = { { SCHED_OTHER, 0, 5 }, { SCHED_BATCH, 0, -3 }, { SCHED_IDLE, 0, 0 }, { SCHED_FIFO, 3, 0 }, { SCHED_RR, 7, 0 },
    { SCHED_RR | SCHED_RESET_ON_FORK, 1, 0 } };

static void *body(void *number) {
    long i = (long)number;
    struct sched_param how = { wanted[i].priority };
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(0, &set);
    CHECK(!sched_setscheduler(0, wanted[i].policy, &how) && !sched_setaffinity(0, sizeof set, &set));
    if (wanted[i].nice) CHECK(!setpriority(PRIO_PROCESS, 0, wanted[i].nice));
    while (!stop) {
        EQUAL(sched_getscheduler(0), wanted[i].policy);
        CHECK(!sched_getparam(0, &how) && how.sched_priority == wanted[i].priority);
        if (wanted[i].nice) EQUAL(getpriority(PRIO_PROCESS, 0), wanted[i].nice);
        CPU_ZERO(&set);
        CHECK(!sched_getaffinity(0, sizeof set, &set) && CPU_COUNT(&set) == 1 && CPU_ISSET(0, &set));
        nap(3);
    }
    return 0;
}

static pthread_t threads[6];

FEATURE(for (long i = 0; i < 6; i++) CHECK(!pthread_create(&threads[i], 0, body, (void *)i)), EQUAL(sched_getscheduler(0), SCHED_OTHER), stop = 1; for (int i = 0; i < 6; i++) CHECK(!pthread_join(threads[i], 0)))
