/* Code that the program writes and changes while it runs, as a JIT compiler does. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *code;
static int rounds;

static void check(void) {
    /* mov $rounds, %eax; ret */
    code[0] = 0xb8;
    rounds++;
    memcpy(code + 1, &rounds, 4);
    code[5] = 0xc3;
    EQUAL(((int (*)(void))code)(), rounds);
    nap(1);
    EQUAL(((int (*)(void))code)(), rounds);
}

FEATURE(code = anonymous(4096, PROT_READ | PROT_WRITE | PROT_EXEC, 0), check(), )
