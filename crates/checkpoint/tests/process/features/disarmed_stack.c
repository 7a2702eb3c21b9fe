/* SS_AUTODISARM: an alternate stack that is disabled while its handler runs. */
#include <signal.h>
#include "feature.h"

static char bytes[65536];
static void on(int signal) { stack_t found; (void)signal; CHECK(!sigaltstack(0, &found)); EQUAL(found.ss_flags, SS_DISABLE); nap(3); }

static void begin(void) {
    stack_t stack = { .ss_sp = bytes, .ss_size = sizeof bytes, .ss_flags = (int)(1u << 31) };
    struct sigaction action = { .sa_handler = on, .sa_flags = SA_ONSTACK };
    CHECK(!sigaltstack(&stack, 0) && !sigaction(SIGUSR1, &action, 0));
}

FEATURE(begin(), CHECK(!raise(SIGUSR1)); stack_t found; CHECK(!sigaltstack(0, &found)); EQUAL(found.ss_flags, (int)(1u << 31)); CHECK(found.ss_sp == bytes), )
