/* mlock and mlock2: locked memory. */
#include <sys/mman.h>
#include "feature.h"

static char *locked, *lazy, *closed;

static void begin(void) {
    locked = (char *)anonymous(3 * 4096, PROT_NONE, 0) + 4096;
    lazy = (char *)anonymous(18 * 4096, PROT_NONE, 0) + 4096;
    closed = (char *)anonymous(3 * 4096, PROT_READ | PROT_WRITE, 0) + 4096;
    CHECK(!mprotect(locked, 4096, PROT_READ | PROT_WRITE) && !mprotect(lazy, 16 * 4096, PROT_READ | PROT_WRITE));
    CHECK(!mlock(locked, 4096) && !mlock2(lazy, 16 * 4096, MLOCK_ONFAULT) && !mlock(closed, 4096));
    CHECK(!mprotect(closed, 4096, PROT_NONE));
    *locked = 'l', *lazy = 'z';
}

static void end(void) {
    unsigned char there[16];
    CHECK(has_flag(locked, " lo") && has_flag(lazy, " lo") && has_flag(closed, " lo") && !has_flag(locked - 4096, " lo"));
    CHECK(!mincore(lazy, 16 * 4096, there) && there[0] && !there[15]);
}

FEATURE(begin(), CHECK(*locked == 'l' && *lazy == 'z'), end())
