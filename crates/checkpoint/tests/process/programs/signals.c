/* Handlers, masks, alternate stacks, pending signals with their values, for a thread and for the process. */
#include "self.h"
#include <pthread.h>
#include <signal.h>

static volatile int stop, hits, last_value, on_alternate;
static char alternate[32768];

static void handler(int signal, siginfo_t *info, void *context) {
    char here;
    hits++;
    last_value = info->si_value.sival_int;
    on_alternate = &here >= alternate && &here < alternate + sizeof alternate;
    (void)signal, (void)context;
}

static void *other(void *unused) {
    sigset_t mask, pending;
    siginfo_t info;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    CHECK(!pthread_sigmask(SIG_BLOCK, &mask, 0) && !pthread_sigmask(0, 0, &pending) && sigismember(&pending, SIGUSR1) == 1);
    CHECK(!pthread_kill(pthread_self(), SIGUSR2));
    while (!stop) {
        CHECK(!sigpending(&pending) && sigismember(&pending, SIGUSR2) == 1);
        nap(1);
    }
    EQUAL(sigwaitinfo(&mask, &info), SIGUSR2);
    EQUAL(info.si_pid, getpid());
    return unused;
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    stack_t stack = { .ss_sp = alternate, .ss_size = sizeof alternate }, found;
    CHECK(!sigaltstack(&stack, 0));
    struct sigaction action = { .sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK }, read;
    sigaddset(&action.sa_mask, SIGHUP);
    CHECK(!sigaction(SIGUSR1, &action, 0));
    CHECK(!sigaction(SIGRTMIN + 3, &action, 0));
    signal(SIGPIPE, SIG_IGN);
    sigset_t blocked, mask;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGRTMIN + 3);
    sigaddset(&blocked, SIGTERM);
    CHECK(!sigprocmask(SIG_BLOCK, &blocked, 0));
    for (int i = 1; i <= 3; i++) CHECK(!sigqueue(getpid(), SIGRTMIN + 3, (union sigval){ .sival_int = 500 + i }));
    /* A signal that the process sends to itself is delivered before `sigqueue` returns only if no other thread can
     * take it. */
    sigset_t hit;
    sigemptyset(&hit);
    sigaddset(&hit, SIGUSR1);
    CHECK(!sigprocmask(SIG_BLOCK, &hit, 0));
    pthread_t thread;
    CHECK(!pthread_create(&thread, 0, other, 0));
    CHECK(!sigprocmask(SIG_UNBLOCK, &hit, 0));
    ready();
    while (go_on()) {
        int before = hits;
        CHECK(!sigqueue(getpid(), SIGUSR1, (union sigval){ .sival_int = before }));
        EQUAL(hits, before + 1);
        EQUAL(last_value, before);
        CHECK(on_alternate);
        CHECK(!sigaltstack(0, &found) && found.ss_sp == alternate && found.ss_size == sizeof alternate);
        CHECK(!sigaction(SIGUSR1, 0, &read) && read.sa_sigaction == handler && sigismember(&read.sa_mask, SIGHUP));
        CHECK(!sigprocmask(0, 0, &mask) && sigismember(&mask, SIGTERM) && !sigismember(&mask, SIGUSR1));
        CHECK(!sigaction(SIGPIPE, 0, &read) && read.sa_handler == SIG_IGN);
        beat();
        nap(1);
    }
    for (int i = 1; i <= 3; i++) {
        siginfo_t info;
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, SIGRTMIN + 3);
        EQUAL(sigwaitinfo(&one, &info), SIGRTMIN + 3);
        EQUAL(info.si_value.sival_int, 500 + i);
        EQUAL(info.si_code, SI_QUEUE);
    }
    stop = 1;
    CHECK(!pthread_join(thread, 0));
    return passed();
}
