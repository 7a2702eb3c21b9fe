/* The main thread's stack, which grows while the program is moved. */
#include <sys/mman.h>
#include "feature.h"

static long rounds;

static unsigned long deep(int depth) {
    char bytes[4000];
    fill(bytes, sizeof bytes, depth);
    unsigned long below = depth ? deep(depth - 1) : 0, here = sum(bytes, sizeof bytes);
    fill(bytes, sizeof bytes, depth);
    EQUAL(sum(bytes, sizeof bytes), here);
    return here + below;
}

static unsigned long wanted[64];

static void check(void) {
    int depth = ++rounds % 64 * 16;
    unsigned long found = deep(depth);
    if (!wanted[rounds % 64]) wanted[rounds % 64] = found;
    EQUAL(found, wanted[rounds % 64]);
}

FEATURE(, check(), )
