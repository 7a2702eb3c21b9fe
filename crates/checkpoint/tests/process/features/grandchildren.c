/* Orphans are reparented to the process that asked for them (PR_SET_CHILD_SUBREAPER). */
#include <sys/prctl.h>
#include <sys/wait.h>
#include "feature.h"

static void check(void) {
    int status, pipe_of_one = 0;
    pid_t child = fork();
    (void)pipe_of_one;
    CHECK(child >= 0);
    if (!child) { if (!fork()) { while (getppid() != getpgid(0) && getppid() == child) nap(1); nap(2); _exit(5); } _exit(4); }
    EQUAL(waitpid(child, &status, 0), child);
    EQUAL(status, 4 << 8);
    CHECK(wait(&status) > 0);
    EQUAL(status, 5 << 8);
}

FEATURE(CHECK(!prctl(PR_SET_CHILD_SUBREAPER, 1)), check(), int set = 0; CHECK(!prctl(PR_GET_CHILD_SUBREAPER, &set) && set))
