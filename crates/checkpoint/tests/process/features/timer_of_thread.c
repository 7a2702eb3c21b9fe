/* A timer that sends its signals to one thread. */
#include <pthread.h>
#include <signal.h>
#include "feature.h"

static volatile long hits, elsewhere, stop;
static __thread int mine;
static void on(int signal) { (void)signal; if (mine) hits++; else elsewhere++; }

static void *body(void *unused) {
    timer_t timer;
    struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN, ._sigev_un._tid = syscall(SYS_gettid) };
    struct itimerspec time = { { 0, 3000000 }, { 0, 3000000 } };
    mine = 1;
    CHECK(!timer_create(CLOCK_MONOTONIC, &event, &timer) && !timer_settime(timer, 0, &time, 0));
    while (!stop) nap(1);
    CHECK(!timer_delete(timer));
    return unused;
}

static pthread_t thread;

FEATURE(signal(SIGRTMIN, on); CHECK(!pthread_create(&thread, 0, body, 0)), for (long before = hits; hits == before;) nap(1); EQUAL(elsewhere, 0), stop = 1; CHECK(!pthread_join(thread, 0)))
