/* A handler runs on its alternate stack while the program is moved; each thread has its own alternate stack, and one
 * thread has none. */
#include <pthread.h>
#include <signal.h>
#include "feature.h"

static volatile int stop, inside;
static __thread char *stack_of_thread;

static void on(int signal) {
    char here;
    stack_t found;
    (void)signal;
    CHECK(&here >= stack_of_thread && &here < stack_of_thread + 65536);
    while (!stop) {
        inside++;
        CHECK(!sigaltstack(0, &found));
        EQUAL(found.ss_flags, SS_ONSTACK);
        CHECK(found.ss_sp == stack_of_thread && found.ss_size == 65536);
        nap(1);
    }
}

static void *on_own_stack(void *unused) {
    static char bytes[65536];
    stack_t stack = { .ss_sp = bytes, .ss_size = sizeof bytes };
    stack_of_thread = bytes;
    CHECK(!sigaltstack(&stack, 0) && !raise(SIGUSR1));
    return unused;
}

static pthread_t thread;

static void begin(void) {
    struct sigaction action = { .sa_handler = on, .sa_flags = SA_ONSTACK };
    CHECK(!sigaction(SIGUSR1, &action, 0));
    CHECK(!pthread_create(&thread, 0, on_own_stack, 0));
}

static void check(void) {
    stack_t found;
    CHECK(!sigaltstack(0, &found));
    EQUAL(found.ss_flags, SS_DISABLE);
    for (int before = inside; inside == before;) nap(1);
}

FEATURE(begin(), check(), stop = 1; CHECK(!pthread_join(thread, 0)))
