/* Connections over the loopback device, within a process and with its child, over IPv4 and IPv6, and listeners for
 * other processes of the tree. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include "feature.h"

enum { FAMILIES = 2 };

static struct { int listener, near, far, child, half, other, datagrams, asker; socklen_t length; struct sockaddr_storage at, udp; } of[FAMILIES];
static pid_t child;

static int bound(int type, int family, struct sockaddr_storage *at, socklen_t *length) {
    struct sockaddr_in6 *v6 = (void *)at;
    struct sockaddr_in *v4 = (void *)at;
    memset(at, 0, sizeof *at);
    at->ss_family = family ? AF_INET6 : AF_INET;
    *length = family ? sizeof *v6 : sizeof *v4;
    if (family) v6->sin6_addr = in6addr_loopback; else v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int file = socket(at->ss_family, type, 0);
    CHECK(file >= 0 && !bind(file, (void *)at, *length) && !getsockname(file, (void *)at, length));
    return file;
}

/* Opens a connection to the listener, and accepts its far end. */
static int connected(int i, int *far) {
    int near = socket(of[i].at.ss_family, SOCK_STREAM, 0), one = 1;
    CHECK(near >= 0 && !connect(near, (void *)&of[i].at, of[i].length));
    CHECK(!setsockopt(near, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    CHECK((*far = accept(of[i].listener, 0, 0)) >= 0);
    return near;
}

static void echo(void) {
    prctl(PR_SET_PDEATHSIG, 9);
    for (int i = 0; i < FAMILIES; i++) close(of[i].child);
    for (;;) for (int i = 0; i < FAMILIES; i++) {
        char text[64];
        long length = read(of[i].far, text, sizeof text);
        if (length <= 0) _exit(33);
        if (write(of[i].far, text, length) != length) _exit(34);
    }
}

static void begin(void) {
    for (int i = 0; i < FAMILIES; i++) {
        of[i].listener = bound(SOCK_STREAM, i, &of[i].at, &of[i].length);
        CHECK(!listen(of[i].listener, 5));
        of[i].child = connected(i, &of[i].far);
        of[i].datagrams = bound(SOCK_DGRAM, i, &of[i].udp, &of[i].length);
        of[i].asker = socket(of[i].udp.ss_family, SOCK_DGRAM, 0);
        CHECK(of[i].asker >= 0 && !connect(of[i].asker, (void *)&of[i].udp, of[i].length));
    }
    child = fork();
    if (!child) echo();
    for (int i = 0; i < FAMILIES; i++) {
        close(of[i].far);
        of[i].near = connected(i, &of[i].far);
        EQUAL(write(of[i].near, "in the queue", 12), 12);
        EQUAL(send(of[i].asker, "in the queue", 12, 0), 12);
        /* One side has sent FIN, and the other side has not read everything. */
        of[i].half = connected(i, &of[i].other);
        EQUAL(write(of[i].half, "last words", 10), 10);
        CHECK(!shutdown(of[i].half, SHUT_WR));
    }
}

static void check(void) {
    static long turn;
    for (int i = 0; i < FAMILIES; i++) {
        char text[64], answer[64];
        long length = sprintf(text, "turn %ld", ++turn);
        EQUAL(recv(of[i].other, answer, sizeof answer, MSG_PEEK), 10);
        EQUAL(write(of[i].other, text, length), length);
        EQUAL(recv(of[i].half, answer, length, MSG_WAITALL), length);
        EQUAL(write(of[i].child, text, length), length);
        EQUAL(read(of[i].child, answer, sizeof answer), length);
        CHECK(!memcmp(text, answer, length));
        EQUAL(write(of[i].near, text, length), length);
        EQUAL(recv(of[i].far, answer, 12, MSG_WAITALL), 12);
        CHECK(!memcmp(answer, turn > FAMILIES ? "and the next" : "in the queue", 12));
        EQUAL(recv(of[i].far, answer, length, MSG_WAITALL), length);
        CHECK(!memcmp(text, answer, length));
        EQUAL(write(of[i].near, "and the next", 12), 12);
        EQUAL(send(of[i].asker, text, length, 0), length);
        EQUAL(recv(of[i].datagrams, answer, sizeof answer, 0), 12);
        EQUAL(recv(of[i].datagrams, answer, sizeof answer, 0), length);
        EQUAL(send(of[i].asker, "and the next", 12, 0), 12);
        CHECK(!memcmp(text, answer, length));
    }
}

static void end(void) {
    for (int i = 0; i < FAMILIES; i++) {
        int far, near = connected(i, &far);
        EQUAL(write(far, "new", 3), 3);
        char text[3];
        EQUAL(recv(near, text, 3, MSG_WAITALL), 3);
        close(of[i].child);
        char words[32];
        EQUAL(read_all(of[i].other, words, sizeof words), 10);
        CHECK(!memcmp(words, "last words", 10));
        CHECK(!close(of[i].other));
        EQUAL(read(of[i].half, words, sizeof words), 0);
    }
    int status;
    EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    EQUAL(WEXITSTATUS(status), 33);
}

FEATURE(begin(), check(), end())
