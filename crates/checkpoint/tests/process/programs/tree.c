/* A tree: children and grandchildren, sessions, groups, zombies, shared memory between them. */
#include "self.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

static volatile long *board;
enum { STOP, PING, PONG, GRAND, LEADER, COUNT };

static void child(void) {
    pid_t self = getpid(), parent = getppid(), group = getpgrp(), session = getsid(0);
    pid_t grand = fork();
    if (!grand) {
        CHECK(setsid() == getpid());
        pid_t me = getpid();
        while (!board[STOP]) {
            EQUAL(getpid(), me);
            EQUAL(getppid(), self);
            EQUAL(getsid(0), me);
            EQUAL(getpgrp(), me);
            board[GRAND]++;
            nap(1);
        }
        _exit(17);
    }
    while (!board[STOP]) {
        if (board[PING] > board[PONG]) board[PONG]++;
        EQUAL(getpid(), self);
        EQUAL(getppid(), parent);
        EQUAL(getpgrp(), group);
        EQUAL(getsid(0), session);
        nap(1);
    }
    int status;
    EQUAL(waitpid(grand, &status, 0), grand);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 17);
    _exit(18);
}

static void leader(void) {
    pid_t parent = getppid();
    CHECK(!setpgid(0, 0));
    while (!board[STOP]) {
        EQUAL(getppid(), parent);
        EQUAL(getpgrp(), getpid());
        board[LEADER]++;
        nap(1);
    }
    _exit(19);
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    board = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    strcpy((char *)board + 500000, "shared from the beginning");
    pid_t first = fork();
    if (!first) child();
    pid_t second = fork();
    if (!second) leader();
    pid_t exited = fork();
    if (!exited) _exit(42);
    pid_t killed = fork();
    if (!killed) for (;;) pause();
    kill(killed, SIGTERM);
    siginfo_t info;
    CHECK(!waitid(P_PID, exited, &info, WEXITED | WNOWAIT) && !waitid(P_PID, killed, &info, WEXITED | WNOWAIT));
    while (!board[GRAND] || !board[LEADER]) nap(1);
    ready();
    while (go_on()) {
        long grand = board[GRAND], led = board[LEADER], ping = ++board[PING];
        while (board[GRAND] == grand || board[LEADER] == led || board[PONG] < ping) nap(1);
        CHECK(!strcmp((char *)board + 500000, "shared from the beginning"));
        EQUAL(getpgid(second), second);
        beat();
    }
    board[STOP] = 1;
    int status;
    EQUAL(waitpid(first, &status, 0), first);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 18);
    EQUAL(waitpid(second, &status, 0), second);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 19);
    EQUAL(waitpid(exited, &status, 0), exited);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
    EQUAL(waitpid(killed, &status, 0), killed);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
    CHECK(waitpid(-1, &status, 0) == -1 && errno == ECHILD);
    return passed();
}
