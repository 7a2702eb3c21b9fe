/* A server with connections in every half-closed state, with data in both queues. Usage: FOLDER IPV4 IPV6. */
#include "self.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

enum { PORT = 7000, RECEIVED_BYTES = 20000, SHORT_BYTES = 1000, STATES = 6, FAMILIES = 2, BUFFER_BYTES = 65536 };
static const int states[STATES] = { TCP_FIN_WAIT1, TCP_FIN_WAIT2, TCP_CLOSE_WAIT, TCP_LAST_ACK, TCP_CLOSING, TCP_CLOSING };
/* The last connection has sent all its data, and none of the data has arrived. */
enum { UNRECEIVED = STATES - 1 };

static struct connection { int wanted, listener, file; long sent; struct sockaddr_in6 own, peer; } all[FAMILIES * STATES];
static char text[1 << 20];

/* Bytes that differ from position to position. */
static char expected(int seed, unsigned at) { return at * 31 ^ (at >> 8) * 7 ^ seed; }

static int tcp_state(int file) {
    struct tcp_info info;
    socklen_t length = sizeof info;
    CHECK(!getsockopt(file, IPPROTO_TCP, TCP_INFO, &info, &length));
    return info.tcpi_state;
}

static int queue_length(int file, unsigned long request) {
    int length = -1;
    CHECK(!ioctl(file, request, &length));
    return length;
}

static void read_names(int file, struct sockaddr_in6 *own, struct sockaddr_in6 *peer) {
    socklen_t lengths[2] = { sizeof *own, sizeof *peer };
    memset(own, 0, sizeof *own);
    memset(peer, 0, sizeof *peer);
    CHECK(!getsockname(file, (void *)own, &lengths[0]) && !getpeername(file, (void *)peer, &lengths[1]));
}

static int file_exists(const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int there = !access(path, F_OK);
    errno = 0;
    return there;
}

static int open_listener(const char *address, int port) {
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
    struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(port) };
    int is_v6 = inet_pton(AF_INET6, address, &v6.sin6_addr) == 1, room = BUFFER_BYTES;
    CHECK(is_v6 || inet_pton(AF_INET, address, &v4.sin_addr) == 1);
    int file = socket(is_v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
    CHECK(file >= 0 && !setsockopt(file, SOL_SOCKET, SO_SNDBUF, &room, sizeof room));
    CHECK(!(is_v6 ? bind(file, (void *)&v6, sizeof v6) : bind(file, (void *)&v4, sizeof v4)) && !listen(file, 5));
    return file;
}

/* Fills the send queue, while the other end does not read. */
static long fill_send_queue(int file, int seed) {
    long sent = 0;
    for (int idle = 0; idle < 50;) {
        for (int at = 0; at < 4096; at++) text[at] = expected(seed, sent + at);
        long more = send(file, text, 4096, MSG_DONTWAIT);
        CHECK(more > 0 || errno == EAGAIN);
        if (more > 0) sent += more, idle = 0; else idle++, nap(2);
    }
    CHECK(queue_length(file, TIOCOUTQ) > 0);
    errno = 0;
    return sent;
}

static void begin(struct connection *connection, int seed) {
    connection->file = accept(connection->listener, 0, 0);
    CHECK(connection->file >= 0);
    while (queue_length(connection->file, FIONREAD) < RECEIVED_BYTES) nap(1);
    if (connection->wanted == TCP_CLOSE_WAIT || connection->wanted == TCP_LAST_ACK) while (tcp_state(connection->file) != TCP_CLOSE_WAIT) nap(1);
    if (seed % STATES == UNRECEIVED) {
        for (int at = 0; at < SHORT_BYTES; at++) text[at] = expected(seed, at);
        EQUAL(write(connection->file, text, SHORT_BYTES), SHORT_BYTES);
        connection->sent = SHORT_BYTES;
    } else if (connection->wanted != TCP_FIN_WAIT2) connection->sent = fill_send_queue(connection->file, seed);
    if (connection->wanted != TCP_CLOSE_WAIT) CHECK(!shutdown(connection->file, SHUT_WR));
    read_names(connection->file, &connection->own, &connection->peer);
}

static void check(struct connection *connection, int seed) {
    struct sockaddr_in6 own, peer;
    read_names(connection->file, &own, &peer);
    CHECK(!memcmp(&own, &connection->own, sizeof own) && !memcmp(&peer, &connection->peer, sizeof peer));
    /* If the server's FIN has not been sent yet, CLOSING and LAST-ACK cannot be told apart. */
    if (seed % STATES == UNRECEIVED || connection->wanted != TCP_CLOSING || tcp_state(connection->file) != TCP_LAST_ACK) EQUAL(tcp_state(connection->file), connection->wanted);
    EQUAL(queue_length(connection->file, FIONREAD), RECEIVED_BYTES);
    EQUAL(queue_length(connection->file, TIOCOUTQ) > 0, connection->wanted != TCP_FIN_WAIT2);
    EQUAL(recv(connection->file, text, sizeof text, MSG_PEEK | MSG_DONTWAIT), RECEIVED_BYTES);
    for (int at = 0; at < RECEIVED_BYTES; at++) CHECK(text[at] == expected(seed, at));
}

/* At this point the client reads, and answers the server's FIN with its own. */
static void end(struct connection *connection, int seed) {
    if (connection->wanted == TCP_CLOSE_WAIT) {
        for (int at = 0; at < 4; at++) text[at] = expected(seed, connection->sent + at);
        EQUAL(write(connection->file, text, 4), 4);
        CHECK(!shutdown(connection->file, SHUT_WR));
    }
    EQUAL(read_all(connection->file, text, sizeof text), RECEIVED_BYTES);
    for (int at = 0; at < RECEIVED_BYTES; at++) CHECK(text[at] == expected(seed, at));
    while (tcp_state(connection->file) != TCP_CLOSE) nap(1);
    close(connection->file);
}

int main(int count, char **words) {
    CHECK(count == 4);
    folder = words[1];
    signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < FAMILIES * STATES; i++) {
        all[i].wanted = states[i % STATES];
        all[i].listener = open_listener(words[2 + i / STATES], PORT + i);
    }
    ready();
    for (int i = 0; i < FAMILIES * STATES; i++) if (i % STATES != UNRECEIVED) begin(&all[i], i);
    leave("quiet", "quiet");
    /* Waits until packets no longer reach the clients. */
    while (!file_exists("deaf")) nap(1);
    for (int i = 0; i < FAMILIES * STATES; i++) if (i % STATES == UNRECEIVED) begin(&all[i], i);
    /* Tells the clients that close after the server to send their FIN. */
    leave("half", "half");
    for (int i = 0; i < FAMILIES * STATES; i++) {
        char name[16], number[32];
        while (tcp_state(all[i].file) != all[i].wanted) nap(1);
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
