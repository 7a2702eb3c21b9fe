/* A pending signal without sender information, because the kernel's limit of queued signals was reached. */
#include <signal.h>
#include <sys/resource.h>
#include "feature.h"

static sigset_t set;

static void begin(void) {
    struct rlimit none = { 0, 1000 }, some = { 1000, 1000 };
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    CHECK(!sigprocmask(SIG_BLOCK, &set, 0) && !setrlimit(RLIMIT_SIGPENDING, &none));
    CHECK(!kill(getpid(), SIGUSR1));
    CHECK(!setrlimit(RLIMIT_SIGPENDING, &some));
}

static void check(void) {
    sigset_t found;
    CHECK(!sigpending(&found));
    EQUAL(sigismember(&found, SIGUSR1), 1);
}

FEATURE(begin(), check(), siginfo_t info; EQUAL(sigwaitinfo(&set, &info), SIGUSR1))
