/* Execution of memory files, one of them mapped: no process may have them open for writing. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "feature.h"

static int files[2];

static void begin(void) {
    static const char script[] = "#!/bin/true\n";
    for (int i = 0; i < 2; i++) {
        files[i] = memfd_create("program", 0);
        EQUAL(write(files[i], script, sizeof script - 1), (long)sizeof script - 1);
    }
    CHECK(mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, files[1], 0) != MAP_FAILED);
}

static void check(void) {
    for (int i = 0; i < 2; i++) {
        int status;
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            char *none[] = { "program", 0 };
            syscall(SYS_execveat, files[i], "", none, none + 1, AT_EMPTY_PATH);
            _exit(errno);
        }
        CHECK(waitpid(child, &status, 0) == child);
        EQUAL(status, 0);
    }
}

FEATURE(begin(), check(), )
