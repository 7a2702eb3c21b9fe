/* sigsuspend: the temporary mask, and the mask restored afterwards. */
#include <pthread.h>
#include <signal.h>
#include "feature.h"

static volatile int hits, stop;
static void on(int signal) { (void)signal; hits++; }
static pthread_t waiter, poker;

static void *poke(void *unused) {
    while (!stop) { CHECK(!pthread_kill(waiter, SIGUSR1)); nap(7); }
    return unused;
}

static void begin(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    CHECK(!sigprocmask(SIG_BLOCK, &set, 0));
    signal(SIGUSR1, on);
    waiter = pthread_self();
    CHECK(!pthread_create(&poker, 0, poke, 0));
}

static void check(void) {
    sigset_t none, now;
    sigemptyset(&none);
    int before = hits;
    CHECK(sigsuspend(&none) == -1 && errno == EINTR);
    EQUAL(hits, before + 1);
    CHECK(!sigprocmask(0, 0, &now) && sigismember(&now, SIGUSR1));
}

FEATURE(begin(), check(), stop = 1; CHECK(!pthread_join(poker, 0)))
