/* Closed connections with open descriptors: unread data can be read, followed by the end or the error. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include "feature.h"

enum { BULK = 300000 };
/* Kinds of an end: FINs of both sides, with the peer's first (PASSIVE) or the program's first (ACTIVE); a reset, and a
 * reset that the program has already seen. */
enum how { PASSIVE, ACTIVE, RESET, KNOWN, HOWS };

static struct one { enum how how; int file, length, events; } all[2 * HOWS * 2];
static int count, fresh, set;
static char bulk[BULK];

static int state(int file) {
    struct tcp_info info;
    socklen_t length = sizeof info;
    CHECK(!getsockopt(file, IPPROTO_TCP, TCP_INFO, &info, &length));
    return info.tcpi_state;
}

static int events(int file) {
    struct pollfd one = { file, POLLIN | POLLOUT | POLLRDHUP | POLLPRI, 0 };
    CHECK(poll(&one, 1, 0) >= 0);
    return one.revents;
}

static int unread(int file) {
    int length = -1;
    CHECK(!ioctl(file, FIONREAD, &length));
    return length;
}

static void pair(int family, int *near, int *far) {
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT };
    struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct sockaddr *at = family == AF_INET6 ? (void *)&v6 : (void *)&v4;
    socklen_t length = family == AF_INET6 ? sizeof v6 : sizeof v4;
    int listener = socket(family, SOCK_STREAM, 0);
    CHECK(listener >= 0 && !bind(listener, at, length) && !listen(listener, 1) && !getsockname(listener, at, &length));
    CHECK((*far = socket(family, SOCK_STREAM, 0)) >= 0);
    int room = 2 * BULK;
    CHECK(!setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &room, sizeof room));
    CHECK(!setsockopt(*far, SOL_SOCKET, SO_SNDBUF, &room, sizeof room));
    CHECK(!connect(*far, at, length) && (*near = accept4(listener, 0, 0, SOCK_NONBLOCK)) >= 0);
    close(listener);
}

static void end_one(int family, enum how how, int length) {
    int near, far, one = 1;
    pair(family, &near, &far);
    CHECK(!setsockopt(near, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    EQUAL(write(far, bulk, length), length);
    while (unread(near) < length) nap(1);
    if (how == ACTIVE) CHECK(!shutdown(near, SHUT_WR));
    struct linger now = { 1, 0 };
    if (how == RESET || how == KNOWN) CHECK(!setsockopt(far, SOL_SOCKET, SO_LINGER, &now, sizeof now));
    CHECK(!close(far));
    while (!(events(near) & POLLRDHUP)) nap(1);
    if (how == PASSIVE) CHECK(!shutdown(near, SHUT_WR));
    while (state(near) != TCP_CLOSE) nap(1);
    int error = 0;
    socklen_t size = sizeof error;
    if (how == KNOWN) CHECK(!getsockopt(near, SOL_SOCKET, SO_ERROR, &error, &size) && error == ECONNRESET);
    struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP, .data.u32 = count };
    CHECK(!epoll_ctl(set, EPOLL_CTL_ADD, near, &event));
    all[count++] = (struct one){ how, near, length, events(near) };
}

static void begin(void) {
    fill(bulk, sizeof bulk, 7);
    signal(SIGPIPE, SIG_IGN);
    set = epoll_create1(0);
    for (int v6 = 0; v6 < 2; v6++)
        for (enum how how = 0; how < HOWS; how++)
            for (int long_one = 0; long_one < 2; long_one++) end_one(v6 ? AF_INET6 : AF_INET, how, long_one ? BULK : 0);
    CHECK((fresh = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
}

static void check(void) {
    static char found[BULK + 1];
    struct epoll_event ready[2 * HOWS * 2];
    EQUAL(epoll_wait(set, ready, count, 0), count);
    for (int i = 0; i < count; i++) {
        struct one *one = &all[i];
        int nodelay = 0;
        socklen_t size = sizeof nodelay;
        EQUAL(events(one->file), one->events);
        EQUAL(!!(one->events & POLLERR), one->how == RESET);
        EQUAL(unread(one->file), one->length);
        EQUAL(state(one->file), TCP_CLOSE);
        EQUAL(fcntl(one->file, F_GETFL), O_RDWR | O_NONBLOCK);
        CHECK(!getsockopt(one->file, IPPROTO_TCP, TCP_NODELAY, &nodelay, &size) && nodelay == 1);
        struct sockaddr_storage peer;
        size = sizeof peer;
        CHECK(getpeername(one->file, (void *)&peer, &size) && errno == ENOTCONN);
        /* Peeking at an empty queue would consume the error. */
        if (one->length) EQUAL(recv(one->file, found, sizeof found, MSG_PEEK), one->length);
        if (one->length) CHECK(!memcmp(found, bulk, one->length));
    }
    EQUAL(events(fresh), POLLOUT | POLLHUP);
    errno = 0;
}

static void end(void) {
    static char found[BULK];
    for (int i = 0; i < count; i++) {
        struct one *one = &all[i];
        for (long got = 0, more; got < one->length; got += more)
            CHECK((more = read(one->file, found, one->length - got)) > 0 && !memcmp(found, bulk + got, more));
        if (one->how == RESET) CHECK(read(one->file, found, 1) == -1 && errno == ECONNRESET);
        EQUAL(read(one->file, found, 1), 0);
        CHECK(write(one->file, found, 1) == -1 && errno == EPIPE);
    }
    struct sockaddr_in nobody = { .sin_family = AF_INET, .sin_port = htons(1), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    CHECK(connect(fresh, (void *)&nobody, sizeof nobody) && errno == ECONNREFUSED);
}

FEATURE(begin(), check(), end())
