/* A mapping with parts that are unmapped from its middle and mapped again. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;
static long rounds;

static void begin(void) {
    memory = anonymous(256 * 4096, PROT_READ | PROT_WRITE, 0);
    for (int i = 0; i < 256; i++) memory[i * 4096] = i;
}

static void check(void) {
    int page = ++rounds * 37 % 256;
    CHECK(!munmap(memory + page * 4096, 4096));
    nap(1);
    CHECK(mmap(memory + page * 4096, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == memory + page * 4096);
    EQUAL(memory[page * 4096], 0);
    memory[page * 4096] = page;
    for (int i = 0; i < 256; i++) EQUAL(memory[i * 4096], i);
}

FEATURE(begin(), check(), )
