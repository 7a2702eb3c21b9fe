/* Dispositions of all signals: handlers with their flags and masks, ignored signals, defaults. */
#include <signal.h>
#include "feature.h"

static struct sigaction wanted[65];
static void on(int signal) { (void)signal; }

static void begin(void) {
    for (int i = 1; i < 65; i++) {
        if (i == SIGKILL || i == SIGSTOP || i == 32 || i == 33 || i == SIGSEGV) continue;
        struct sigaction action = { .sa_handler = i % 3 == 0 ? on : i % 3 == 1 ? SIG_IGN : SIG_DFL, .sa_flags = i % 2 ? SA_RESTART : SA_NODEFER | SA_ONSTACK };
        sigaddset(&action.sa_mask, 1 + i % 31);
        CHECK(!sigaction(i, &action, 0) && !sigaction(i, 0, &wanted[i]));
    }
}

static void check(void) {
    for (int i = 1; i < 65; i++) {
        struct sigaction found;
        if (i == SIGKILL || i == SIGSTOP || i == 32 || i == 33 || i == SIGSEGV) continue;
        CHECK(!sigaction(i, 0, &found));
        CHECK(found.sa_handler == wanted[i].sa_handler && found.sa_flags == wanted[i].sa_flags);
        CHECK(!memcmp(&found.sa_mask, &wanted[i].sa_mask, 8));
    }
}

FEATURE(begin(), check(), )
