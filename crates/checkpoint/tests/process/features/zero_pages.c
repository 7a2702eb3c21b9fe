/* Pages that were only read, and pages written with zeros: both stay zero, and neither gets old content. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;
static long rounds;

static void begin(void) {
    memory = anonymous(64 * 4096, PROT_READ | PROT_WRITE, 0);
    for (int i = 0; i < 64; i++) if (i % 2) memory[i * 4096] = 0; else EQUAL(memory[i * 4096], 0);
}

static void check(void) {
    for (int i = 0; i < 64; i++) for (int j = 0; j < 4096; j += 256) EQUAL(memory[i * 4096 + j], 0);
    int page = ++rounds % 64;
    memory[page * 4096 + 256] = 1;
    nap(1);
    if (page % 3) memory[page * 4096 + 256] = 0; else CHECK(!madvise(memory + page * 4096, 4096, MADV_DONTNEED));
}

FEATURE(begin(), check(), )
