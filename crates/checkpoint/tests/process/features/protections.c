/* mprotect: every combination, with its content, and changes of it while the program is moved. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *memory;
static long rounds;

static void begin(void) {
    memory = anonymous(8 * 4096, PROT_READ | PROT_WRITE, 0);
    for (int i = 0; i < 8; i++) {
        /* ret */
        memset(memory + i * 4096, 0xc3, 4096);
        CHECK(!mprotect(memory + i * 4096, 4096, i));
    }
}

static void check(void) {
    for (int i = 4; i < 8; i++) ((void (*)(void))(memory + i * 4096 + 99))();
    int page = ++rounds % 8;
    CHECK(!mprotect(memory + page * 4096, 4096, PROT_READ | PROT_WRITE));
    EQUAL(memory[page * 4096 + 4095], 0xc3);
    memory[page * 4096] = 0xc3;
    CHECK(!mprotect(memory + page * 4096, 4096, page));
}

FEATURE(begin(), check(), for (int i = 0; i < 8; i++) { CHECK(has_flag(memory + i * 4096, " rd") == !!(i & 1)); CHECK(has_flag(memory + i * 4096, " wr") == !!(i & 2)); CHECK(has_flag(memory + i * 4096, " ex") == !!(i & 4)); })
