/* Private memory with pages that appear, change and vanish. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;
static long rounds;

static void check(void) {
    long page = ++rounds % 512;
    memset(memory + page * 4096, (int)rounds, 4096);
    CHECK(!madvise(memory + rounds * 3 % 512 * 4096, 4096, MADV_DONTNEED));
    EQUAL(memory[rounds * 3 % 512 * 4096], 0);
    if (rounds * 3 % 512 != page) EQUAL(memory[page * 4096 + 77], rounds & 255);
}

FEATURE(memory = anonymous(512 * 4096, PROT_READ | PROT_WRITE, 0), check(), )
