/* A server: echoes over TCP and UDP, both families, for outside clients; has a connection to itself; reads some
 * connections only when told to. Usage: FOLDER IPV4 IPV6. */
#include "self.h"
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

enum { ECHO_PORT = 8080, LAZY_PORT = 8081, BOUND_PORT = 9090, ANY_PORT = 9091 };
enum { CONNECTIONS = 1200 };

static struct { int file, lazy; struct sockaddr_in6 peer; socklen_t length; } connections[CONNECTIONS];
static int set, used;

static socklen_t address(struct sockaddr_storage *at, const char *text, int port) {
    memset(at, 0, sizeof *at);
    if (strchr(text, ':')) {
        struct sockaddr_in6 *v6 = (void *)at;
        v6->sin6_family = AF_INET6, v6->sin6_port = htons(port);
        CHECK(inet_pton(AF_INET6, text, &v6->sin6_addr) == 1);
        return sizeof *v6;
    }
    struct sockaddr_in *v4 = (void *)at;
    v4->sin_family = AF_INET, v4->sin_port = htons(port);
    CHECK(inet_pton(AF_INET, text, &v4->sin_addr) == 1);
    return sizeof *v4;
}

static int bound(int type, const char *text, int port) {
    struct sockaddr_storage at;
    socklen_t length = address(&at, text, port);
    int one = 1, file = socket(at.ss_family, type | SOCK_NONBLOCK, 0);
    CHECK(file >= 0 && !setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
    if (at.ss_family == AF_INET6) CHECK(!setsockopt(file, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one));
    CHECK(!bind(file, (void *)&at, length));
    if (type == SOCK_STREAM) CHECK(!listen(file, 77));
    return file;
}

static void watch(int file, unsigned long data) {
    struct epoll_event event = { .events = EPOLLIN, .data.u64 = data };
    CHECK(!epoll_ctl(set, EPOLL_CTL_ADD, file, &event));
}

static int option(int file, int level, int name) {
    int value = -1;
    socklen_t length = sizeof value;
    CHECK(!getsockopt(file, level, name, &value, &length));
    return value;
}

static void take(int listener, int lazy) {
    int at = used++, one = 1, idle = 77;
    CHECK(at < CONNECTIONS);
    connections[at].length = sizeof connections[at].peer;
    int file = accept4(listener, (void *)&connections[at].peer, &connections[at].length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(file >= 0);
    CHECK(!setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    CHECK(!setsockopt(file, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle));
    connections[at].file = file, connections[at].lazy = lazy;
    if (!lazy) watch(file, at + 1000);
}

static void echo_stream(int at) {
    char text[4096];
    int file = connections[at].file;
    long length = read(file, text, sizeof text);
    if (length < 0 && errno == EAGAIN) return;
    if (length < 0) fail(__LINE__, "connection %d", at);
    if (!length) {
        close(file);
        connections[at].file = -1;
    } else {
        EQUAL(send(file, text, length, MSG_NOSIGNAL), length);
    }
}

static void echo_datagram(int file) {
    char text[2048];
    struct sockaddr_in6 from;
    socklen_t size = sizeof from;
    long length = recvfrom(file, text, sizeof text, 0, (void *)&from, &size);
    if (length >= 0) EQUAL(sendto(file, text, length, 0, (void *)&from, size), length);
}

/* Reads the waiting data to its end, and sends all of it back. */
static void catch_up(int at) {
    static char text[1 << 20];
    int file = connections[at].file;
    CHECK(!fcntl(file, F_SETFL, 0));
    long length = read_all(file, text, sizeof text);
    CHECK(length >= 0);
    for (long sent = 0; sent < length;) {
        long more = send(file, text + sent, length - sent, MSG_NOSIGNAL);
        CHECK(more > 0);
        sent += more;
    }
    close(file);
    connections[at].file = -1;
}

static void look_at(int at) {
    if (connections[at].file < 0) return;
    struct sockaddr_in6 peer;
    socklen_t length = sizeof peer;
    int file = connections[at].file;
    if (getpeername(file, (void *)&peer, &length)) return;
    CHECK(length == connections[at].length && !memcmp(&peer, &connections[at].peer, length));
    EQUAL(option(file, IPPROTO_TCP, TCP_NODELAY), 1);
    EQUAL(option(file, IPPROTO_TCP, TCP_KEEPIDLE), 77);
    EQUAL(fcntl(file, F_GETFL), O_RDWR | O_NONBLOCK);
    EQUAL(fcntl(file, F_GETFD), FD_CLOEXEC);
}

int main(int count, char **words) {
    CHECK(count == 4);
    folder = words[1];
    set = epoll_create1(0);
    int files[10], number = 0;
    for (int family = 2; family < 4; family++) {
        files[number++] = bound(SOCK_STREAM, words[family], ECHO_PORT);
        files[number++] = bound(SOCK_STREAM, words[family], LAZY_PORT);
        files[number++] = bound(SOCK_DGRAM, words[family], BOUND_PORT);
        files[number++] = bound(SOCK_DGRAM, family == 2 ? "0.0.0.0" : "::", ANY_PORT);
    }
    for (int i = 0; i < number; i++) watch(files[i], i);
    /* A connection inside the tree, and unconnected sockets. */
    struct sockaddr_storage own;
    int inside = bound(SOCK_STREAM, "127.0.0.1", 7070), near = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!connect(near, (void *)&own, address(&own, "127.0.0.1", 7070)));
    struct pollfd come = { inside, POLLIN, 0 };
    EQUAL(poll(&come, 1, 10000), 1);
    int far = accept4(inside, 0, 0, 0), idle = socket(AF_INET6, SOCK_STREAM, 0), loose = socket(AF_INET, SOCK_DGRAM, 0);
    CHECK(far >= 0 && idle >= 0 && loose >= 0);
    EQUAL(write(near, "in the queue", 12), 12);
    ready();
    for (long turn = 0; go_on(); turn++) {
        struct epoll_event found[64];
        int got = epoll_wait(set, found, 64, 2);
        CHECK(got >= 0 || errno == EINTR);
        for (int i = 0; i < got; i++) {
            unsigned long data = found[i].data.u64;
            if (data >= 1000) echo_stream(data - 1000);
            else if (data % 4 < 2) take(files[data], data % 4);
            else echo_datagram(files[data]);
        }
        char path[512], text[16] = { 0 };
        snprintf(path, sizeof path, "%s/read", folder);
        if (!access(path, F_OK))
            for (int i = 0; i < used; i++)
                if (connections[i].lazy && connections[i].file >= 0) catch_up(i);
        if (used) look_at(turn % used);
        EQUAL(read(far, text, 12), 12);
        CHECK(!strcmp(text, "in the queue"));
        EQUAL(write(near, "in the queue", 12), 12);
        EQUAL(option(files[0], SOL_SOCKET, SO_ACCEPTCONN), 1);
        EQUAL(option(idle, SOL_SOCKET, SO_ACCEPTCONN), 0);
        beat();
    }
    return passed();
}
