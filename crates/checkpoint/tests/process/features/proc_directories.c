/* Directories of /proc, which the process has in its own PID namespace after a move. */
#include "feature.h"

static int descriptors, threads;
static char own[16];

static void begin(void) {
    snprintf(own, sizeof own, "%d", (int)getpid());
    descriptors = open("/proc/self/fd", O_RDONLY | O_DIRECTORY);
    threads = open("/proc/self/task", O_PATH | O_DIRECTORY);
    CHECK(descriptors >= 0 && threads >= 0);
}

static void check(void) {
    char number[16];
    snprintf(number, sizeof number, "%d", threads);
    CHECK(!faccessat(descriptors, number, F_OK, AT_SYMLINK_NOFOLLOW));
    CHECK(!faccessat(threads, own, F_OK, 0));
}

FEATURE(begin(), check(), )
