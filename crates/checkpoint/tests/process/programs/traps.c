/* SIGTRAP caught together with all other signals, ignored, or caught, blocked and pending: each state persists. */
#include "self.h"
#include <signal.h>

/* Signals that a tracer may use, and the signal that the kernel forces upon a trapping thread. */
static const int WAITING[] = { SIGTRAP, SIGSTKFLT, SIGPWR, SIGXFSZ, SIGURG, SIGWINCH, SIGCHLD };
#define COUNT (sizeof WAITING / sizeof *WAITING)

static volatile int hits[65];
static void on_signal(int signal) { hits[signal]++; }

static int is_excluded(int signal) { return signal == SIGKILL || signal == SIGSTOP || signal == 32 || signal == 33; }

static void catch_all(void) {
    struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
    for (int i = 1; i < 65; i++) CHECK(is_excluded(i) || !sigaction(i, &action, 0));
}

static void check_all_caught(void) {
    struct sigaction found;
    for (int i = 1; i < 65; i++) {
        if (is_excluded(i)) continue;
        CHECK(!sigaction(i, 0, &found));
        if (found.sa_handler != on_signal) fail(__LINE__, "signal %d has another handler", i);
    }
}

int main(int count, char **words) {
    CHECK(count == 2 || count == 3);
    folder = words[1];
    const char *mode = count == 3 ? words[2] : "caught";
    int ignores = !strcmp(mode, "ignored"), waits = !strcmp(mode, "waiting");
    struct sigaction found;
    sigset_t set, mask;
    sigemptyset(&set);
    for (size_t i = 0; i < COUNT; i++) sigaddset(&set, WAITING[i]);
    if (ignores) CHECK(signal(SIGTRAP, SIG_IGN) != SIG_ERR);
    else catch_all();
    if (waits) {
        CHECK(!sigprocmask(SIG_BLOCK, &set, 0));
        for (size_t i = 0; i < COUNT; i++) CHECK(!raise(WAITING[i]));
    }
    ready();
    while (go_on()) {
        if (ignores) {
            CHECK(!sigaction(SIGTRAP, 0, &found) && found.sa_handler == SIG_IGN);
            CHECK(!raise(SIGTRAP));
        } else check_all_caught();
        if (waits) {
            CHECK(!sigprocmask(0, 0, &mask) && sigismember(&mask, SIGTRAP));
            CHECK(!sigpending(&mask));
            for (size_t i = 0; i < COUNT; i++) {
                if (sigismember(&mask, WAITING[i]) != 1) fail(__LINE__, "signal %d waits no more", WAITING[i]);
                EQUAL(hits[WAITING[i]], 0);
            }
        } else if (!ignores) {
            int before = hits[SIGTRAP];
            CHECK(!raise(SIGTRAP));
            __asm__ volatile("int3");
            EQUAL(hits[SIGTRAP], before + 2);
        }
        beat();
        nap(1);
    }
    if (waits) {
        CHECK(!sigprocmask(SIG_UNBLOCK, &set, 0));
        for (size_t i = 0; i < COUNT; i++) EQUAL(hits[WAITING[i]], 1);
    }
    return passed();
}
