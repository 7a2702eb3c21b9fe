/* PR_SET_MDWE: writable memory may never become executable. */
#include <sys/mman.h>
#include <sys/prctl.h>
#include "feature.h"

static char *memory;

FEATURE(memory = anonymous(4096, PROT_READ | PROT_WRITE, 0); NEEDS(prctl(65, 1, 0, 0, 0)),
    EQUAL(prctl(66, 0, 0, 0, 0), 1); CHECK(mprotect(memory, 4096, PROT_READ | PROT_EXEC) == -1 && errno == EACCES), )
