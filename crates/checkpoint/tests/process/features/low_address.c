/* Memory at low addresses (MAP_32BIT, and the lowest address that the kernel allows), as used by programs that are not
 * position-independent. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *low, *lower;

static void begin(void) {
    low = anonymous(65536, PROT_READ | PROT_WRITE, MAP_32BIT);
    lower = mmap((void *)0x20000, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(lower == (void *)0x20000);
    fill(low, 65536, 9);
    *lower = 42;
}

FEATURE(begin(), EQUAL(low[65535], (65535 * 7 + 9) >> 3 & 255); EQUAL(*lower, 42), )
