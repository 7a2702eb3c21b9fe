/* PR_SET_MEMORY_MERGE: equal pages of the whole process may be merged. */
#include <sys/mman.h>
#include <sys/prctl.h>
#include "feature.h"

static unsigned char *memory;

static void begin(void) {
    NEEDS(prctl(67, 1, 0, 0, 0));
    memory = anonymous(64 * 4096, PROT_READ | PROT_WRITE, 0);
    for (int i = 0; i < 64; i++) memset(memory + i * 4096, 'm', 4096);
}

FEATURE(begin(), EQUAL(prctl(68, 0, 0, 0, 0), 1); EQUAL(memory[64 * 4096 - 1], 'm'), )
