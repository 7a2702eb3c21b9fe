/* vfork and exec of another program, all the time. */
#include <spawn.h>
#include <sys/wait.h>
#include "feature.h"

extern char **environ;

static void check(void) {
    pid_t child;
    int status;
    char *words[] = { "true", 0 };
    CHECK(!posix_spawn(&child, "/bin/true", 0, 0, words, environ));
    EQUAL(waitpid(child, &status, 0), child);
    EQUAL(status, 0);
    nap(15);
}

FEATURE(, check(), )
