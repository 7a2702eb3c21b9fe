/* A private mapping of a file, some pages of it changed: those travel, the others are the file's. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;
static long rounds;

static void begin(void) {
    char path[512];
    static unsigned char bytes[20 * 4096 + 100];
    snprintf(path, sizeof path, "%s/file", folder);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    fill(bytes, sizeof bytes, 11);
    EQUAL(write(file, bytes, sizeof bytes), sizeof bytes);
    memory = mmap(0, sizeof bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    CHECK(memory != MAP_FAILED && !close(file));
    memory[4096] = 'c';
}

static void check(void) {
    EQUAL(memory[4096], 'c');
    for (int i = 4097; i < 20 * 4096 + 100; i += 511) if (i % 4096) EQUAL(memory[i], (i * 7 + 11) >> 3 & 255);
    long page = 2 + ++rounds % 18;
    memory[page * 4096] = rounds;
    nap(1);
    EQUAL(memory[page * 4096], rounds & 255);
    CHECK(!madvise(memory + page * 4096, 4096, MADV_DONTNEED));
    EQUAL(memory[page * 4096], (page * 4096 * 7 + 11) >> 3 & 255);
    EQUAL(memory[20 * 4096 + 101], 0);
}

FEATURE(begin(), check(), )
