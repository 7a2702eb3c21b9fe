/* A stopped child that its parent has not waited for: waitid still reports the stop, with its signal. */
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include "feature.h"

static const int stops[] = { SIGTSTP, SIGSTOP, SIGTTIN };
static pid_t children[3];

static void begin(void) {
    for (int i = 0; i < 3; i++) {
        CHECK((children[i] = fork()) >= 0);
        if (!children[i]) { prctl(PR_SET_PDEATHSIG, 9); for (;;) pause(); }
        /* The child's own group has a parent in another group of the session, so the group is not orphaned and all
         * of these signals stop it. */
        CHECK(!setpgid(children[i], children[i]) && !kill(children[i], stops[i]));
    }
}

static void check(void) {
    for (int i = 0; i < 3; i++) {
        siginfo_t found = { .si_pid = 0 };
        /* In the first check the child may not have stopped yet. */
        CHECK(!waitid(P_PID, children[i], &found, WSTOPPED | WNOWAIT));
        EQUAL(found.si_pid, children[i]);
        EQUAL(found.si_code, CLD_STOPPED);
        EQUAL(found.si_status, stops[i]);
    }
}

static void end(void) {
    for (int i = 0; i < 3; i++) {
        int status;
        EQUAL(waitpid(children[i], &status, WUNTRACED), children[i]);
        CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == stops[i]);
        EQUAL(waitpid(children[i], &status, WUNTRACED | WNOHANG), 0);
        CHECK(!kill(children[i], SIGCONT));
    }
}

FEATURE(begin(), check(), end())
