/* A file that is written through a shared mapping, and has the written content. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;
static char path[512];
static long rounds;

static void begin(void) {
    snprintf(path, sizeof path, "%s/file", folder);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0 && !ftruncate(file, 64 * 4096));
    memory = mmap(0, 64 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(memory != MAP_FAILED && !close(file));
    fill(memory, 64 * 4096, 0);
}

static void check(void) {
    long at = ++rounds * 4099 % (64 * 4096);
    memory[at] = rounds;
    nap(1);
    EQUAL(memory[at], rounds & 255);
}

static void end(void) {
    static unsigned char bytes[64 * 4096];
    CHECK(!msync(memory, 64 * 4096, MS_SYNC));
    int file = open(path, O_RDONLY);
    EQUAL(read(file, bytes, sizeof bytes), sizeof bytes);
    CHECK(!memcmp(bytes, memory, sizeof bytes));
    CHECK(has_flag(memory, " sh"));
}

FEATURE(begin(), check(), end())
