/* MAP_DROPPABLE: memory that may lose its content, but not its mapping. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;

static void begin(void) {
    memory = mmap(0, 8192, PROT_READ | PROT_WRITE, 8 /* MAP_DROPPABLE */ | MAP_ANONYMOUS, -1, 0);
    NEEDS(memory == MAP_FAILED ? -1 : 0);
    memory[5000] = 17;
}

FEATURE(begin(), CHECK(memory[5000] == 17 || !memory[5000]); memory[5000] = 17, CHECK(has_flag(memory, " dp")))
