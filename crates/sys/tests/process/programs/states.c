/* A server with connections in every half-closed state, with data in both queues. Usage: FOLDER IPV4 IPV6. */
#include "self.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

enum { PORT = 7000, HEARD = 20000, SHORT = 1000, STATES = 6, FAMILIES = 2, ROOM = 65536 };
static const int states[STATES] = { TCP_FIN_WAIT1, TCP_FIN_WAIT2, TCP_CLOSE_WAIT, TCP_LAST_ACK, TCP_CLOSING, TCP_CLOSING };
/* The last connection has sent all its data, and none of the data has arrived. */
enum { UNHEARD = STATES - 1 };

static struct one { int wanted, listener, file; long sent; struct sockaddr_in6 own, peer; } all[FAMILIES * STATES];
static char text[1 << 20];

/* Bytes that differ from position to position. */
static char expected(int seed, unsigned at) { return at * 31 ^ (at >> 8) * 7 ^ seed; }

static int state(int file) {
    struct tcp_info info;
    socklen_t length = sizeof info;
    CHECK(!getsockopt(file, IPPROTO_TCP, TCP_INFO, &info, &length));
    return info.tcpi_state;
}

static int queued(int file, unsigned long request) {
    int length = -1;
    CHECK(!ioctl(file, request, &length));
    return length;
}

static void names(int file, struct sockaddr_in6 *own, struct sockaddr_in6 *peer) {
    socklen_t lengths[2] = { sizeof *own, sizeof *peer };
    memset(own, 0, sizeof *own);
    memset(peer, 0, sizeof *peer);
    CHECK(!getsockname(file, (void *)own, &lengths[0]) && !getpeername(file, (void *)peer, &lengths[1]));
}

static int access_of(const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int there = !access(path, F_OK);
    errno = 0;
    return there;
}

static int listening(const char *address, int port) {
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
    struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(port) };
    int is_v6 = inet_pton(AF_INET6, address, &v6.sin6_addr) == 1, room = ROOM;
    CHECK(is_v6 || inet_pton(AF_INET, address, &v4.sin_addr) == 1);
    int file = socket(is_v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
    CHECK(file >= 0 && !setsockopt(file, SOL_SOCKET, SO_SNDBUF, &room, sizeof room));
    CHECK(!(is_v6 ? bind(file, (void *)&v6, sizeof v6) : bind(file, (void *)&v4, sizeof v4)) && !listen(file, 5));
    return file;
}

/* Fills the send queue, while the other end does not read. */
static long filled(int file, int seed) {
    long sent = 0;
    for (int idle = 0; idle < 50;) {
        for (int at = 0; at < 4096; at++) text[at] = expected(seed, sent + at);
        long more = send(file, text, 4096, MSG_DONTWAIT);
        CHECK(more > 0 || errno == EAGAIN);
        if (more > 0) sent += more, idle = 0; else idle++, nap(2);
    }
    CHECK(queued(file, TIOCOUTQ) > 0);
    errno = 0;
    return sent;
}

static void begin(struct one *one, int seed) {
    one->file = accept(one->listener, 0, 0);
    CHECK(one->file >= 0);
    while (queued(one->file, FIONREAD) < HEARD) nap(1);
    if (one->wanted == TCP_CLOSE_WAIT || one->wanted == TCP_LAST_ACK) while (state(one->file) != TCP_CLOSE_WAIT) nap(1);
    if (seed % STATES == UNHEARD) {
        for (int at = 0; at < SHORT; at++) text[at] = expected(seed, at);
        EQUAL(write(one->file, text, SHORT), SHORT);
        one->sent = SHORT;
    } else if (one->wanted != TCP_FIN_WAIT2) one->sent = filled(one->file, seed);
    if (one->wanted != TCP_CLOSE_WAIT) CHECK(!shutdown(one->file, SHUT_WR));
    names(one->file, &one->own, &one->peer);
}

static void check(struct one *one, int seed) {
    struct sockaddr_in6 own, peer;
    names(one->file, &own, &peer);
    CHECK(!memcmp(&own, &one->own, sizeof own) && !memcmp(&peer, &one->peer, sizeof peer));
    /* If the server's FIN has not been sent yet, CLOSING and LAST-ACK cannot be told apart. */
    if (seed % STATES == UNHEARD || one->wanted != TCP_CLOSING || state(one->file) != TCP_LAST_ACK) EQUAL(state(one->file), one->wanted);
    EQUAL(queued(one->file, FIONREAD), HEARD);
    EQUAL(queued(one->file, TIOCOUTQ) > 0, one->wanted != TCP_FIN_WAIT2);
    EQUAL(recv(one->file, text, sizeof text, MSG_PEEK | MSG_DONTWAIT), HEARD);
    for (int at = 0; at < HEARD; at++) CHECK(text[at] == expected(seed, at));
}

/* At this point the client reads, and answers the server's FIN with its own. */
static void end(struct one *one, int seed) {
    if (one->wanted == TCP_CLOSE_WAIT) {
        for (int at = 0; at < 4; at++) text[at] = expected(seed, one->sent + at);
        EQUAL(write(one->file, text, 4), 4);
        CHECK(!shutdown(one->file, SHUT_WR));
    }
    EQUAL(read_all(one->file, text, sizeof text), HEARD);
    for (int at = 0; at < HEARD; at++) CHECK(text[at] == expected(seed, at));
    while (state(one->file) != TCP_CLOSE) nap(1);
    close(one->file);
}

int main(int count, char **words) {
    CHECK(count == 4);
    folder = words[1];
    signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < FAMILIES * STATES; i++) {
        all[i].wanted = states[i % STATES];
        all[i].listener = listening(words[2 + i / STATES], PORT + i);
    }
    ready();
    for (int i = 0; i < FAMILIES * STATES; i++) if (i % STATES != UNHEARD) begin(&all[i], i);
    leave("quiet", "quiet");
    /* Waits until packets no longer reach the clients. */
    while (!access_of("deaf")) nap(1);
    for (int i = 0; i < FAMILIES * STATES; i++) if (i % STATES == UNHEARD) begin(&all[i], i);
    /* Tells the clients that close after the server to send their FIN. */
    leave("half", "half");
    for (int i = 0; i < FAMILIES * STATES; i++) {
        char name[16], number[32];
        while (state(all[i].file) != all[i].wanted) nap(1);
        snprintf(name, sizeof name, "sent%d", i);
        snprintf(number, sizeof number, "%ld", all[i].sent + (all[i].wanted == TCP_CLOSE_WAIT ? 4 : 0));
        leave(name, number);
    }
    leave("settled", "settled");
    while (go_on()) {
        for (int i = 0; i < FAMILIES * STATES; i++) check(&all[i], i);
        beat();
        nap(2);
    }
    leave("ends", "ends");
    for (int i = 0; i < FAMILIES * STATES; i++) end(&all[i], i);
    return passed();
}
