/* Peer credentials of unix sockets, which servers trust: the user and group of the peer. */
#include <signal.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include "feature.h"

enum { CLIENT = 1234, CLIENTS_GROUP = 1235, MAKER = 1236 };

static int listener, accepted, made[2];
static pid_t child;

static void is_user(int file, int user, int group) {
    struct ucred who = { 0 };
    socklen_t length = sizeof who;
    CHECK(!getsockopt(file, SOL_SOCKET, SO_PEERCRED, &who, &length));
    EQUAL(who.uid, user);
    EQUAL(who.gid, group);
}

/* One connection is accepted, and another one waits. */
static void connects(const struct sockaddr_un *name, socklen_t length) {
    CHECK(!setresgid(CLIENTS_GROUP, CLIENTS_GROUP, CLIENTS_GROUP) && !setresuid(CLIENT, CLIENT, CLIENT));
    for (int i = 0; i < 2; i++) {
        int client = socket(AF_UNIX, SOCK_STREAM, 0);
        CHECK(client >= 0 && !connect(client, (void *)name, length));
        is_user(client, 0, 0);
    }
    for (;;) pause();
}

static void begin(void) {
    struct sockaddr_un name = { AF_UNIX, "" };
    socklen_t length = offsetof(struct sockaddr_un, sun_path) + 1
        + snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "holdfast-users-%d", getpid());
    if (geteuid()) skip("root");
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(!bind(listener, (void *)&name, length) && !listen(listener, 5));
    child = fork();
    if (!child) connects(&name, length);
    accepted = accept(listener, 0, 0);
    CHECK(accepted >= 0);
    CHECK(!seteuid(MAKER) && !socketpair(AF_UNIX, SOCK_SEQPACKET, 0, made) && !seteuid(0));
}

static void check(void) {
    is_user(accepted, CLIENT, CLIENTS_GROUP);
    is_user(listener, 0, 0);
    is_user(made[0], MAKER, 0);
    is_user(made[1], MAKER, 0);
}

static void end(void) {
    int waited = accept(listener, 0, 0);
    CHECK(waited >= 0);
    is_user(waited, CLIENT, CLIENTS_GROUP);
    int status;
    CHECK(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
}

FEATURE(begin(), check(), end())
