/* A private mapping of /dev/zero, the traditional way to allocate memory. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;

static void begin(void) {
    int zero = open("/dev/zero", O_RDWR);
    CHECK(zero >= 0);
    memory = mmap(0, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE, zero, 0);
    CHECK(memory != MAP_FAILED && !close(zero));
    fill(memory, 32768, 5);
}

FEATURE(begin(), EQUAL(memory[32767], (32767 * 7 + 5) >> 3 & 255); EQUAL(memory[32768], 0); memory[40000] = 0, )
