/* Mappings that appear, are split, are merged and vanish all the time. */
#include <sys/mman.h>
#include "feature.h"

enum { SLOTS = 32 };
static unsigned char *slots[SLOTS];
static unsigned long sums[SLOTS];
static size_t sizes[SLOTS];
static long rounds;

static void check(void) {
    for (int i = 0; i < SLOTS; i++) if (slots[i]) EQUAL(sum(slots[i], sizes[i]), sums[i]);
    for (int i = 0; i < 4; i++) {
        int at = ++rounds * 11 % SLOTS;
        if (slots[at]) {
            CHECK(!munmap(slots[at], sizes[at]));
            slots[at] = 0;
        } else {
            sizes[at] = (1 + rounds % 5) * 4096;
            slots[at] = anonymous(sizes[at], PROT_READ | PROT_WRITE, 0);
            EQUAL(slots[at][sizes[at] - 1], 0);
            fill(slots[at], sizes[at], rounds);
            sums[at] = sum(slots[at], sizes[at]);
            if (rounds % 3 == 0) CHECK(!mprotect(slots[at], 4096, PROT_READ));
        }
    }
}

FEATURE(, check(), )
