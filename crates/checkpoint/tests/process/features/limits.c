/* All resource limits, soft and hard. */
#include <sys/resource.h>
#include "feature.h"

static struct rlimit wanted[16];

static void begin(void) {
    for (int i = 0; i < 16; i++) {
        CHECK(!getrlimit(i, &wanted[i]));
        if (i == RLIMIT_NPROC || i == RLIMIT_AS || i == RLIMIT_DATA) continue;
        if (wanted[i].rlim_max > 1 << 20) wanted[i].rlim_max = (1 << 20) * 4 - i;
        if (wanted[i].rlim_cur > wanted[i].rlim_max) wanted[i].rlim_cur = wanted[i].rlim_max - i;
        CHECK(!setrlimit(i, &wanted[i]));
    }
}

FEATURE(begin(), for (int i = 0; i < 16; i++) { struct rlimit found; CHECK(!getrlimit(i, &found)); EQUAL(found.rlim_cur, wanted[i].rlim_cur); EQUAL(found.rlim_max, wanted[i].rlim_max); }, )
