/* Talks to itself over the loopback device, over IPv4 and IPv6, with connections in all stages of closing. Checks every
 * byte, and appends its host to a file in each round, until told to end. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 24, BYTES = 5000 };
enum kind { OPEN, ENDED, RESET, CLOSED, KINDS };

static struct { int near, far; long number; enum kind kind; } slots[SLOTS];
static struct { int listener, near, far, datagrams, asker; socklen_t length; struct sockaddr_in6 at; } families[2];

static char failed[512];

static void fail(int line) {
    int saved = errno, file = open(failed, O_WRONLY | O_APPEND | O_CREAT, 0666);
    dprintf(file, "line %d: %s\n", line, strerror(saved));
    exit(9);
}
#define CHECK(condition) do { if (!(condition)) fail(__LINE__); } while (0)

static char expected(long number, long at) { return (char)(number * 31 + at * 7 + (at >> 8)); }

static int open_bound(int i, int type, struct sockaddr_in6 *at) {
    memset(at, 0, sizeof *at);
    at->sin6_family = i ? AF_INET6 : AF_INET;
    families[i].length = i ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    if (i) at->sin6_addr = in6addr_loopback; else ((struct sockaddr_in *)at)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int file = socket(at->sin6_family, type, 0), one = 1;
    if (type == SOCK_STREAM) setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    CHECK(file >= 0 && !bind(file, (void *)at, families[i].length) && !getsockname(file, (void *)at, &families[i].length));
    return file;
}

static void connect_pair(int i, int *near, int *far) {
    CHECK((*far = socket(i ? AF_INET6 : AF_INET, SOCK_STREAM, 0)) >= 0);
    CHECK(!connect(*far, (void *)&families[i].at, families[i].length) && (*near = accept(families[i].listener, 0, 0)) >= 0);
}

static void send_pattern(int file, long number, int length) {
    char text[BYTES];
    for (int at = 0; at < length; at++) text[at] = expected(number, at);
    CHECK(write(file, text, length) == length);
}

static void expect_pattern(int file, long number, int length) {
    char text[BYTES];
    CHECK(recv(file, text, length, MSG_WAITALL) == length);
    for (int at = 0; at < length; at++) CHECK(text[at] == expected(number, at));
}

static void begin(int slot, long number) {
    int near, far;
    connect_pair(number % 2, &near, &far);
    enum kind kind = number / 2 % KINDS;
    send_pattern(far, number, BYTES);
    if (kind == RESET) {
        struct linger now = { 1, 0 };
        char one;
        CHECK(recv(near, &one, 1, MSG_PEEK) == 1);
        CHECK(!setsockopt(far, SOL_SOCKET, SO_LINGER, &now, sizeof now));
    }
    if (kind != OPEN) CHECK(!close(far));
    if (kind == CLOSED) {
        /* The listener's side closes last, so that it does not stay in TIME-WAIT for a minute. */
        struct pollfd come = { near, POLLRDHUP, 0 };
        CHECK(poll(&come, 1, -1) == 1 && !shutdown(near, SHUT_WR));
    }
    slots[slot].near = near, slots[slot].far = far, slots[slot].number = number, slots[slot].kind = kind;
}

static void end(int slot) {
    int near = slots[slot].near;
    char one;
    if (slots[slot].kind == OPEN) {
        expect_pattern(near, slots[slot].number, BYTES);
        send_pattern(slots[slot].far, -slots[slot].number, BYTES);
        CHECK(!close(slots[slot].far));
        expect_pattern(near, -slots[slot].number, BYTES);
    } else expect_pattern(near, slots[slot].number, BYTES);
    if (slots[slot].kind == RESET) CHECK(read(near, &one, 1) == -1 && errno == ECONNRESET);
    CHECK(read(near, &one, 1) == 0);
    if (slots[slot].kind == ENDED) {
        /* The other end is closed and only the kernel still receives for it; this end can still be shut down. */
        struct pollfd come = { near, POLLIN | POLLRDHUP, 0 };
        struct sockaddr_storage peer;
        socklen_t length = sizeof peer;
        CHECK(poll(&come, 1, 0) == 1 && come.revents == (POLLIN | POLLRDHUP));
        CHECK(!getpeername(near, (void *)&peer, &length) && !shutdown(near, SHUT_WR));
        CHECK(read(near, &one, 1) == 0);
    }
    if (slots[slot].kind != OPEN) CHECK(write(near, &one, 1) == -1 && errno == EPIPE);
    close(near);
}

static void run_round(long number) {
    for (int i = 0; i < 2; i++) {
        send_pattern(families[i].near, number, 700);
        expect_pattern(families[i].far, number, 700);
        send_pattern(families[i].far, number + 1, 300);
        expect_pattern(families[i].near, number + 1, 300);
        if (number > 1) expect_pattern(families[i].datagrams, number - 1, 500);
        send_pattern(families[i].asker, number, 500);
    }
    int slot = number % SLOTS;
    if (number > SLOTS) end(slot);
    begin(slot, number);
}

int main(int count, char **words) {
    if (count != 2) return 2;
    close_range(3, ~0U, 0);
    signal(SIGPIPE, SIG_IGN);
    char end[512];
    snprintf(end, sizeof end, "%s.end", words[1]);
    snprintf(failed, sizeof failed, "%s.failed", words[1]);
    for (int i = 0; i < 2; i++) {
        struct sockaddr_in6 at;
        families[i].datagrams = open_bound(i, SOCK_DGRAM, &at);
        families[i].asker = socket(at.sin6_family, SOCK_DGRAM, 0);
        CHECK(families[i].asker >= 0 && !connect(families[i].asker, (void *)&at, families[i].length));
        families[i].listener = open_bound(i, SOCK_STREAM, &families[i].at);
        CHECK(!listen(families[i].listener, 5));
        connect_pair(i, &families[i].near, &families[i].far);
    }
    for (long number = 1; access(end, F_OK); number++) {
        run_round(number);
        struct utsname host;
        char line[256];
        uname(&host);
        int bytes = snprintf(line, sizeof line, "%s %ld %d\n", host.nodename, number, (int)getpid());
        int file = open(words[1], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
        CHECK(file >= 0 && write(file, line, bytes) == bytes);
        close(file);
        struct timespec nap = { 0, 2000000 };
        while (nanosleep(&nap, &nap)) {}
    }
    return 0;
}
