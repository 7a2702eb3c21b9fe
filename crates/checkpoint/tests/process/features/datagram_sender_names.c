/* Unread datagrams of a unix socket keep the names of their senders, even of closed ones. */
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include "feature.h"

#define SENDERS 4

static int receiver;
static struct sockaddr_un names[SENDERS], to;
static socklen_t lengths[SENDERS], to_length;

static socklen_t hidden(struct sockaddr_un *name, const char *kind) {
    name->sun_family = AF_UNIX;
    return offsetof(struct sockaddr_un, sun_path) + 1
        + snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "holdfast-%s-%d", kind, getpid());
}

static int sender(int which) {
    int from = socket(AF_UNIX, SOCK_DGRAM, 0);
    CHECK(from >= 0);
    if (lengths[which]) CHECK(!bind(from, (void *)(names + which), lengths[which]));
    CHECK(!connect(from, (void *)&to, to_length));
    return from;
}

static int kept[SENDERS];

static void send_all(void) {
    for (int which = 0; which < SENDERS; which++) {
        /* The third sender is closed when its datagram is read. */
        int from = which == 2 ? sender(which) : kept[which];
        char byte = 'a' + which;
        EQUAL(send(from, &byte, 1, 0), 1);
        if (which == 2) close(from);
    }
}

static void begin(void) {
    to_length = hidden(&to, "receiver");
    receiver = socket(AF_UNIX, SOCK_DGRAM, 0);
    CHECK(!bind(receiver, (void *)&to, to_length));
    lengths[0] = hidden(names, "first");
    names[1].sun_family = AF_UNIX;
    lengths[1] = offsetof(struct sockaddr_un, sun_path) + 1 + snprintf(names[1].sun_path, 108, "%s/sender", folder);
    lengths[2] = hidden(names + 2, "gone");
    for (int which = 0; which < SENDERS; which++)
        if (which != 2) kept[which] = sender(which);
    send_all();
}

static void check(void) {
    for (int which = 0; which < SENDERS; which++) {
        struct sockaddr_un from = { 0 };
        socklen_t length = sizeof from;
        char byte;
        EQUAL(recvfrom(receiver, &byte, 1, 0, (void *)&from, &length), 1);
        EQUAL(byte, 'a' + which);
        EQUAL(length, lengths[which]);
        if (length) CHECK(!memcmp(&from, names + which, length));
    }
    send_all();
}

FEATURE(begin(), check(), )
