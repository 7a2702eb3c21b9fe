/* Blocked pending signals: several of the same number in order, with their values, senders and codes. */
#include <signal.h>
#include "feature.h"

static sigset_t set;

static void begin(void) {
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN + 2);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2);
    CHECK(!sigprocmask(SIG_BLOCK, &set, 0));
    for (int i = 0; i < 20; i++) CHECK(!sigqueue(getpid(), SIGRTMIN + 2, (union sigval){ .sival_ptr = (void *)(0x123456789abcL + i) }));
    CHECK(!kill(getpid(), SIGUSR1) && !raise(SIGUSR2));
}

static void check(void) {
    sigset_t found;
    CHECK(!sigpending(&found) && sigismember(&found, SIGUSR1) && sigismember(&found, SIGUSR2) && sigismember(&found, SIGRTMIN + 2));
    CHECK(!sigismember(&found, SIGTERM));
}

static void end(void) {
    siginfo_t info;
    sigset_t one;
    for (int i = 0; i < 20; i++) {
        sigemptyset(&one);
        sigaddset(&one, SIGRTMIN + 2);
        EQUAL(sigwaitinfo(&one, &info), SIGRTMIN + 2);
        CHECK(info.si_value.sival_ptr == (void *)(0x123456789abcL + i));
        EQUAL(info.si_code, SI_QUEUE);
        EQUAL(info.si_pid, getpid());
        EQUAL(info.si_uid, getuid());
    }
    struct timespec none = { 0, 0 };
    CHECK(sigtimedwait(&one, &info, &none) == -1 && errno == EAGAIN);
    EQUAL(sigwaitinfo(&set, &info), info.si_signo);
    EQUAL(info.si_code, SI_USER);
    EQUAL(info.si_pid, getpid());
    EQUAL(sigwaitinfo(&set, &info), info.si_signo);
    EQUAL(info.si_code, SI_USER);
    EQUAL(info.si_pid, getpid());
    CHECK(sigtimedwait(&set, &info, &none) == -1);
}

FEATURE(begin(), check(), end())
