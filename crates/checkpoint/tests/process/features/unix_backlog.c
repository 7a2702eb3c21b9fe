/* Connections that wait at unix listeners, in order. Data written to a connection before its accept does not move. */
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include "feature.h"

#define WAITING 3

static int listeners[2], clients[2][WAITING];
static struct sockaddr_un names[2];
static socklen_t lengths[2];
static int first[2];

static void connect_one(int which, int place) {
    int client = socket(AF_UNIX, which ? SOCK_SEQPACKET : SOCK_STREAM, 0);
    CHECK(client >= 0 && !connect(client, (void *)(names + which), lengths[which]));
    clients[which][place % WAITING] = client;
}

static void begin(void) {
    names[0].sun_family = names[1].sun_family = AF_UNIX;
    lengths[0] = offsetof(struct sockaddr_un, sun_path) + 1 + snprintf(names[0].sun_path, 108, "%s/listener", folder);
    lengths[1] = offsetof(struct sockaddr_un, sun_path) + 1 + snprintf(names[1].sun_path + 1, 107, "holdfast-backlog-%d", getpid());
    for (int which = 0; which < 2; which++) {
        listeners[which] = socket(AF_UNIX, which ? SOCK_SEQPACKET : SOCK_STREAM, 0);
        CHECK(!bind(listeners[which], (void *)(names + which), lengths[which]) && !listen(listeners[which], 8));
        for (int i = 0; i < WAITING; i++) connect_one(which, i);
    }
}

static void check(void) {
    for (int which = 0; which < 2; which++) {
        char text[32], found[32] = { 0 };
        int server = accept(listeners[which], 0, 0), client = clients[which][first[which] % WAITING];
        CHECK(server >= 0);
        /* No other process is at the other end. */
        int length = snprintf(text, sizeof text, "number %d", first[which]);
        EQUAL(write(client, text, length), length);
        EQUAL(read(server, found, sizeof found), length);
        CHECK(!strcmp(text, found));
        EQUAL(write(server, "answer", 6), 6);
        EQUAL(read(client, found, sizeof found), 6);
        close(server), close(client);
        connect_one(which, first[which] + WAITING);
        first[which]++;
    }
}

FEATURE(begin(), check(), )
