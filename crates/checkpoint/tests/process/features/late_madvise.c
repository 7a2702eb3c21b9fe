/* New mappings get advice and lose it while the program is tracked: the advice at the time of the freeze counts. */
#include <sys/mman.h>
#include <sys/wait.h>
#include "feature.h"

enum { COUNT = 16 };
static char *slots[COUNT];
static long rounds;

static void check(void) {
    for (int i = 0; i < 3; i++) {
        int at = ++rounds % COUNT;
        if (slots[at]) CHECK(!munmap(slots[at], 4096 * (1 + at % 3)));
        slots[at] = anonymous(4096 * (1 + at % 3), PROT_READ | PROT_WRITE, 0);
        CHECK(!madvise(slots[at], 4096 * (1 + at % 3), at % 2 ? MADV_WIPEONFORK : MADV_DONTFORK));
        *slots[at] = at + 1;
    }
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        for (int i = 0; i < COUNT; i++) {
            if (!slots[i]) continue;
            unsigned char there;
            int gone = mincore(slots[i], 4096, &there);
            if (i % 2 ? gone || *slots[i] : !gone) _exit(1);
        }
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    EQUAL(status, 0);
}

FEATURE(, check(), )
