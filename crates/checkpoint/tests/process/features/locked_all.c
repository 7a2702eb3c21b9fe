/* mlockall: later mappings are locked too. */
#include <sys/mman.h>
#include <sys/resource.h>
#include "feature.h"

static char *before, *after;

static void begin(void) {
    struct rlimit much = { 1 << 30, 1 << 30 };
    if (setrlimit(RLIMIT_MEMLOCK, &much)) errno = 0;
    before = anonymous(8192, PROT_READ | PROT_WRITE, 0);
    NEEDS(mlockall(MCL_CURRENT | MCL_FUTURE));
    *before = 1;
}

static void check(void) {
    unsigned char there = 0;
    after = anonymous(4096, PROT_READ | PROT_WRITE, 0);
    CHECK(!mincore(after, 4096, &there));
    EQUAL(there & 1, 1);
    CHECK(!munmap(after, 4096));
}

FEATURE(begin(), check(), CHECK(has_flag(before, " lo")))
