/* Terabytes of reserved addresses with few populated pages, as in programs of Go and Java and with sanitizers. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;
static size_t room = 8L << 40;

static void begin(void) {
    memory = anonymous(room, PROT_NONE, MAP_NORESERVE);
    for (size_t at = 0; at < room; at += room / 32) {
        CHECK(!mprotect(memory + at, 1 << 21, PROT_READ | PROT_WRITE));
        memory[at + 12345] = at >> 38;
    }
}

static void check(void) {
    for (size_t at = 0; at < room; at += room / 32) EQUAL(memory[at + 12345], (at >> 38) & 255);
}

FEATURE(begin(), check(), )
