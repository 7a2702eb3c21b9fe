/* Transparent huge pages, complete ones and ones with holes. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;
static const size_t huge = 2 << 20;
static long rounds;

static void begin(void) {
    unsigned char *room = anonymous(5 * huge, PROT_READ | PROT_WRITE, 0);
    memory = (unsigned char *)(((unsigned long)room + huge - 1) & ~(huge - 1));
    NEEDS(madvise(memory, 4 * huge, MADV_HUGEPAGE));
    for (size_t at = 0; at < 4 * huge; at += 4096) memory[at] = at >> 12;
}

static void check(void) {
    size_t page = ++rounds * 97 % 2048;
    CHECK(!madvise(memory + page * 4096, 4096, MADV_DONTNEED));
    EQUAL(memory[page * 4096], 0);
    memory[page * 4096] = page;
    for (size_t at = 0; at < 2048; at++) EQUAL(memory[at * 4096], at & 255);
}

FEATURE(begin(), check(), CHECK(has_flag(memory, " hg")))
