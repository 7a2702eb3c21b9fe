/* A child that job control has stopped, and its parent has not waited for: that is still told, with the signal. */
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
        /* Its own group has a parent in another of the session, so that it is stopped by all of these. */
        CHECK(!setpgid(children[i], children[i]) && !kill(children[i], stops[i]));
    }
}

static void check(void) {
    for (int i = 0; i < 3; i++) {
        siginfo_t found = { .si_pid = 0 };
        /* The first time it may not have stopped yet. */
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
