/* Memory of memfd_create that grows, mapped at two addresses, one with an offset. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *one, *other;

static void begin(void) {
    int memory = memfd_create("a name", 0);
    CHECK(memory >= 0 && !ftruncate(memory, 16 * 4096));
    one = mmap(0, 16 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    other = mmap(0, 8 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 8 * 4096);
    CHECK(one != MAP_FAILED && other != MAP_FAILED && !close(memory));
    fill(one, 8 * 4096, 1);
}

static void check(void) {
    static long rounds;
    rounds++;
    one[8 * 4096 + rounds % 32768] = rounds;
    nap(1);
    EQUAL(other[rounds % 32768], rounds & 255);
    EQUAL(one[30000], (30000 * 7 + 1) >> 3 & 255);
}

FEATURE(begin(), check(), )
