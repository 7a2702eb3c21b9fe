/* Sessions and process groups of a tree, including groups with an ended leader. */
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include "feature.h"

enum { COUNT = 5 };
static volatile struct { pid_t pid, group, session; long turns; int wrong; } *rows;

static void be(int i) {
    prctl(PR_SET_PDEATHSIG, 9);
    if (i == 0) setsid();
    if (i == 1 || i == 2) setpgid(0, i == 1 ? 0 : rows[1].pid);
    rows[i].pid = getpid(), rows[i].group = getpgrp(), rows[i].session = getsid(0), rows[i].turns = 1;
    for (;;) {
        if (getpid() != rows[i].pid || getpgrp() != rows[i].group || getsid(0) != rows[i].session) rows[i].wrong = 1;
        rows[i].turns++;
        nap(1);
    }
}

static void begin(void) {
    rows = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(rows != MAP_FAILED);
    for (int i = 0; i < COUNT; i++) {
        pid_t child = fork();
        if (!child) be(i);
        while (!rows[i].turns) nap(1);
    }
    CHECK(rows[2].group == rows[1].pid && rows[0].session == rows[0].pid);
}

static void check(void) {
    for (int i = 0; i < COUNT; i++) {
        EQUAL(rows[i].wrong, 0);
        for (long before = rows[i].turns; rows[i].turns == before;) nap(1);
        EQUAL(getpgid(rows[i].pid), rows[i].group);
        EQUAL(getsid(rows[i].pid), rows[i].session);
    }
}

FEATURE(begin(), check(), )
