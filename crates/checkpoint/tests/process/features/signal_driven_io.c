/* Signals for ready descriptors (F_SETOWN, F_SETSIG, O_ASYNC), sent to a process, a group, or a thread. */
#include <signal.h>
#include <sys/socket.h>
#include "feature.h"

static int pairs[3][2], signals[3];
static struct f_owner_ex owners[3];

static void begin(void) {
    sigset_t all;
    sigemptyset(&all);
    const int kinds[] = { F_OWNER_PID, F_OWNER_PGRP, F_OWNER_TID };
    const int ids[] = { getpid(), getpgrp(), gettid() };
    for (int i = 0; i < 3; i++) {
        signals[i] = SIGRTMIN + i;
        sigaddset(&all, signals[i]);
    }
    CHECK(!sigprocmask(SIG_BLOCK, &all, 0));
    for (int i = 0; i < 3; i++) {
        owners[i] = (struct f_owner_ex){ kinds[i], ids[i] };
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pairs[i]));
        CHECK(!fcntl(pairs[i][0], F_SETOWN_EX, owners + i));
        CHECK(!fcntl(pairs[i][0], F_SETSIG, signals[i]));
        CHECK(!fcntl(pairs[i][0], F_SETFL, O_ASYNC | O_NONBLOCK));
    }
}

static void check(void) {
    for (int i = 0; i < 3; i++) {
        struct f_owner_ex owner = { 0 };
        CHECK(!fcntl(pairs[i][0], F_GETOWN_EX, &owner));
        EQUAL(owner.type, owners[i].type);
        EQUAL(owner.pid, owners[i].pid);
        EQUAL(fcntl(pairs[i][0], F_GETSIG), signals[i]);
        EQUAL(fcntl(pairs[i][0], F_GETFL) & (O_ASYNC | O_NONBLOCK), O_ASYNC | O_NONBLOCK);
        EQUAL(fcntl(pairs[i][1], F_GETFL) & (O_ASYNC | O_NONBLOCK), 0);
        char byte = 'a' + i;
        EQUAL(write(pairs[i][1], &byte, 1), 1);
        sigset_t one;
        siginfo_t info;
        const struct timespec limit = { 60, 0 };
        sigemptyset(&one);
        sigaddset(&one, signals[i]);
        int got;
        do got = sigtimedwait(&one, &info, &limit);
        while (got < 0 && errno == EINTR);
        EQUAL(got, signals[i]);
        EQUAL(info.si_fd, pairs[i][0]);
        CHECK(info.si_band & 1);
        EQUAL(read(pairs[i][0], &byte, 1), 1);
        EQUAL(byte, 'a' + i);
        /* Free space for writing is reported too. */
        const struct timespec none = { 0, 0 };
        while (sigtimedwait(&one, &info, &none) > 0) {}
        errno = 0;
    }
}

FEATURE(begin(), check(), )
