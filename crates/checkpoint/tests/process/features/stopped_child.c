/* A child that job control has stopped stays stopped, and its parent is notified only once. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include "feature.h"

static volatile long *turns;
static volatile int hits;
static pid_t child;
static void on(int signal) { (void)signal; hits++; }

static void begin(void) {
    int status;
    turns = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    signal(SIGCHLD, on);
    CHECK((child = fork()) >= 0);
    if (!child) { prctl(PR_SET_PDEATHSIG, 9); for (;;) { ++*turns; nap(1); } }
    while (!*turns) nap(1);
    CHECK(!kill(child, SIGSTOP));
    EQUAL(waitpid(child, &status, WUNTRACED), child);
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    while (hits < 1) nap(1);
}

static void check(void) {
    int status;
    long before = *turns;
    nap(5);
    EQUAL(*turns, before);
    EQUAL(waitpid(child, &status, WUNTRACED | WNOHANG), 0);
    EQUAL(hits, 1);
}

FEATURE(begin(), check(), long before = *turns; CHECK(!kill(child, SIGCONT)); while (*turns == before) nap(1))
