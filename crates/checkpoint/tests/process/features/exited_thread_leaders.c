/* Sessions and process groups with ended leaders, as left by daemons that fork twice, and jobs of shells. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include "feature.h"

#define CHILDREN 5

static volatile struct { pid_t pid, session, group; } *children;

static pid_t root;

/* A member of a group that waits until it is killed. */
static void member(int number, int own_group) {
    if (own_group) setpgid(0, 0);
    if (fork()) _exit(0);
    while (getppid() != root) nap(1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    children[number].session = getsid(0);
    children[number].group = getpgid(0);
    children[number].pid = getpid();
    for (;;) pause();
}

static void reap(int until) {
    for (int i = 0; i < until; i++) CHECK(wait(0) > 0);
}

static void begin(void) {
    children = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    root = getpid();
    CHECK(!prctl(PR_SET_CHILD_SUBREAPER, 1));
    /* Two members in one session, and a third in the same session with its own group; all leaders have ended. */
    if (!fork()) {
        setsid();
        if (!fork()) member(0, 0);
        if (!fork()) member(1, 0);
        if (!fork()) member(2, 1);
        _exit(0);
    }
    /* One member in another session, and one in its own group of this session. */
    if (!fork()) {
        setsid();
        member(3, 0);
    }
    if (!fork()) member(4, 1);
    reap(6);
    for (int i = 0; i < CHILDREN; i++) while (!children[i].pid) nap(1);
    CHECK(children[0].session == children[2].session && children[0].group == children[1].group);
    CHECK(children[2].group != children[0].group && children[3].session != children[0].session);
    EQUAL(children[4].session, getsid(0));
}

static void check(void) {
    for (int i = 0; i < CHILDREN; i++) {
        EQUAL(getsid(children[i].pid), children[i].session);
        EQUAL(getpgid(children[i].pid), children[i].group);
        CHECK(kill(children[i].session, 0) || children[i].session == getpid());
        CHECK(kill(children[i].group, 0));
    }
}

static void end(void) {
    /* The members are this process's children, and it has no others. */
    for (int i = 0; i < CHILDREN; i++) {
        CHECK(!kill(-children[i].group, 0));
        CHECK(!kill(children[i].pid, SIGKILL));
        CHECK(waitpid(children[i].pid, 0, 0) == children[i].pid);
    }
    CHECK(wait(0) < 0 && errno == ECHILD);
}

FEATURE(begin(), check(), end())
