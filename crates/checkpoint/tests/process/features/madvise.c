/* madvise: treatment of memory at fork and in a core dump, and read-ahead hints. */
#include <sys/mman.h>
#include "feature.h"

static const struct { int advice; const char *flag; } cases[] = { { MADV_DONTFORK, " dc" }, { MADV_DONTDUMP, " dd" }, { MADV_WIPEONFORK, " wf" },
    { MADV_SEQUENTIAL, " sr" }, { MADV_RANDOM, " rr" }, { MADV_NOHUGEPAGE, " nh" }, { MADV_HUGEPAGE, " hg" }, { MADV_MERGEABLE, " mg" } };
enum { CASES = sizeof cases / sizeof *cases };
static char *memory[CASES];

static void begin(void) {
    for (int i = 0; i < CASES; i++) {
        /* An inaccessible page keeps neighbouring mappings from merging. */
        memory[i] = anonymous(3 * 4096, PROT_NONE, 0) + 4096;
        CHECK(!mprotect(memory[i], 4096, PROT_READ | PROT_WRITE));
        NEEDS(madvise(memory[i], 4096, cases[i].advice));
        *memory[i] = i;
    }
}

FEATURE(begin(), for (int i = 0; i < CASES; i++) EQUAL(*memory[i], i),
    for (int i = 0; i < CASES; i++) if (!has_flag(memory[i], cases[i].flag)) fail(__LINE__, "%s is lost", cases[i].flag))
