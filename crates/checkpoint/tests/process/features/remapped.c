/* mremap: a mapping moves and changes its size, and keeps its content. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;
static size_t pages = 64;
static long rounds;

static void check(void) {
    for (size_t i = 0; i < pages; i++) EQUAL(memory[i * 4096 + 1], i & 255);
    size_t now = 32 + ++rounds * 7 % 64;
    void *away = anonymous(128 * 4096, PROT_NONE, 0);
    memory = mremap(memory, pages * 4096, now * 4096, MREMAP_MAYMOVE | MREMAP_FIXED, away);
    CHECK(memory == away);
    CHECK(now == 128 || !munmap(memory + now * 4096, (128 - now) * 4096));
    for (; pages < now; pages++) memory[pages * 4096 + 1] = pages;
    pages = now;
}

static void begin(void) {
    memory = anonymous(pages * 4096, PROT_READ | PROT_WRITE, 0);
    for (size_t i = 0; i < pages; i++) memory[i * 4096 + 1] = i;
}

FEATURE(begin(), check(), )
