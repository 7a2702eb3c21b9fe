/* MAP_GROWSDOWN: a mapping that grows below its start when touched there. */
#include <sys/mman.h>
#include "feature.h"

static char *top, *lowest;

static void begin(void) {
    char *room = anonymous(4 << 20, PROT_NONE, MAP_NORESERVE);
    CHECK(!munmap(room, 4 << 20));
    lowest = top = mmap(room + (3 << 20), 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_FIXED, -1, 0);
    CHECK(top != MAP_FAILED);
    memset(top, 'g', 16384);
}

static void check(void) {
    static int rounds;
    if (++rounds % 8 == 0 && top - lowest < (1 << 20)) {
        lowest -= 4096;
        *lowest = 'd';
    }
    for (char *at = lowest; at < top; at += 4096) EQUAL(*at, 'd');
    EQUAL(top[16383], 'g');
}

FEATURE(begin(), check(), CHECK(has_flag(top, "gd")); *(lowest - 4096) = 1)
