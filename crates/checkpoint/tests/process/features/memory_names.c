/* PR_SET_VMA_ANON_NAME: names of anonymous memory. */
#include <sys/mman.h>
#include <sys/prctl.h>
#include "feature.h"

static char *memory;

static void end(void) {
    char text[1024];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    while (fgets(text, sizeof text, maps)) found |= !!strstr(text, "[anon:a name]");
    fclose(maps);
    CHECK(found);
}

FEATURE(memory = anonymous(8192, PROT_READ | PROT_WRITE, 0); NEEDS(prctl(0x53564d41, 0, memory, 4096, "a name")), *memory = 1, end())
