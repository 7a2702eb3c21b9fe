/* A program that catches every signal that is harmless by default, and ignores none: no handler runs without a
 * signal. */
#include <signal.h>
#include "feature.h"

static volatile int hits, sent;
/* The test continues a stopped program by SIGCONT. */
static void on(int signal) { hits += signal != SIGCONT; }

static void begin(void) {
    for (int i = 1; i < 65; i++) if (i != SIGKILL && i != SIGSTOP && i != 32 && i != 33) CHECK(signal(i, on) != SIG_ERR);
}

static void check(void) {
    EQUAL(hits, sent);
    CHECK(!raise(SIGURG));
    EQUAL(hits, ++sent);
}

FEATURE(begin(), check(), )
