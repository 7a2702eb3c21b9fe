/* No clock runs backwards. */
#include <sys/time.h>
#include "feature.h"

static const clockid_t clocks[] = { CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_MONOTONIC_RAW, CLOCK_MONOTONIC_COARSE, CLOCK_BOOTTIME, CLOCK_TAI };
static struct timespec last[6];

static void check(void) {
    for (int i = 0; i < 6; i++) {
        for (int direct = 0; direct < 2; direct++) {
            struct timespec now;
            CHECK(!(direct ? syscall(SYS_clock_gettime, clocks[i], &now) : clock_gettime(clocks[i], &now)));
            CHECK(now.tv_sec > last[i].tv_sec || (now.tv_sec == last[i].tv_sec && now.tv_nsec >= last[i].tv_nsec));
            last[i] = now;
        }
    }
}

FEATURE(, check(), )
