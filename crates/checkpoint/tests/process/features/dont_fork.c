/* Children born after the move lack MADV_DONTFORK memory, and have zeros in MADV_WIPEONFORK memory. */
#include <sys/mman.h>
#include <sys/wait.h>
#include "feature.h"

static char *kept, *wiped, *given;

static void begin(void) {
    kept = anonymous(8192, PROT_READ | PROT_WRITE, 0);
    wiped = anonymous(4096, PROT_READ | PROT_WRITE, 0);
    given = anonymous(4096, PROT_READ | PROT_WRITE, 0);
    CHECK(!madvise(kept, 8192, MADV_DONTFORK) && !madvise(wiped, 4096, MADV_WIPEONFORK));
    *kept = 'k', *wiped = 'w', *given = 'g';
}

static void check(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        unsigned char there;
        _exit(mincore(kept, 4096, &there) == -1 && errno == ENOMEM && !*wiped && *given == 'g' ? 7 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
    CHECK(*kept == 'k' && *wiped == 'w');
}

FEATURE(begin(), check(), )
