/* Ended children stay zombies for their parent, with all exit codes and signals. */
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include "feature.h"

static pid_t children[8];
static const int signals[] = { SIGTERM, SIGKILL, SIGUSR1, SIGALRM };

static void begin(void) {
    struct rlimit none = { 0, 0 };
    CHECK(!setrlimit(RLIMIT_CORE, &none));
    for (int i = 0; i < 8; i++) {
        CHECK((children[i] = fork()) >= 0);
        if (!children[i]) { if (i >= 4) raise(signals[i - 4]); _exit(i * 50); }
        siginfo_t info;
        CHECK(!waitid(P_PID, children[i], &info, WEXITED | WNOWAIT));
    }
}

static void check(void) {
    for (int i = 0; i < 8; i++) {
        siginfo_t info;
        CHECK(!waitid(P_PID, children[i], &info, WEXITED | WNOWAIT | WNOHANG));
        EQUAL(info.si_pid, children[i]);
        EQUAL(info.si_status, i < 4 ? i * 50 : signals[i - 4]);
    }
}

FEATURE(begin(), check(), int status; for (int i = 0; i < 8; i++) { EQUAL(waitpid(children[i], &status, 0), children[i]); EQUAL(status, i < 4 ? i * 50 << 8 : signals[i - 4]); } CHECK(wait(&status) == -1))
