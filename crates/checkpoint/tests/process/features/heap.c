/* brk: the heap grows and shrinks, and keeps its end. */
#include <sys/mman.h>
#include "feature.h"

static char *end;
static long rounds;

static void check(void) {
    CHECK(sbrk(0) == end);
    long step = ++rounds % 2 ? 1 << 16 : -(1 << 16);
    CHECK(sbrk(step) != (void *)-1);
    end += step;
    if (step > 0) { EQUAL(end[-1], 0); fill(end - step, step, 3); }
}

FEATURE(end = sbrk(0), check(), )
