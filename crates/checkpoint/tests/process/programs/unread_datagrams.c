/* Unread datagrams: all of them, in order, with their senders. Usage: FOLDER IPV4 IPV6. */
#include "self.h"
#include <arpa/inet.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

enum { PORT = 9090, EACH = 40 };

static int bound(const char *text) {
    int v6 = !!strchr(text, ':'), file = socket(v6 ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in6 at6 = { .sin6_family = AF_INET6, .sin6_port = htons(PORT) };
    struct sockaddr_in at4 = { .sin_family = AF_INET, .sin_port = htons(PORT) };
    CHECK(file >= 0 && inet_pton(v6 ? AF_INET6 : AF_INET, text, v6 ? (void *)&at6.sin6_addr : (void *)&at4.sin_addr) == 1);
    CHECK(!bind(file, v6 ? (void *)&at6 : (void *)&at4, v6 ? sizeof at6 : sizeof at4));
    return file;
}

/* Each datagram contains its sender's port and its number, and has a length that depends on the number. */
static void read_one(int file, int number, int flags) {
    char text[4096];
    struct sockaddr_in6 from;
    socklen_t length = sizeof from;
    int found = -1, port = -1;
    long bytes = recvfrom(file, text, sizeof text - 1, flags, (void *)&from, &length);
    CHECK(bytes > 0);
    text[bytes] = 0;
    CHECK(sscanf(text, "%d %d ", &port, &found) == 2);
    EQUAL(found, number);
    EQUAL(bytes, 20 + 37 * number);
    EQUAL(port, ntohs(from.sin6_port));
    for (long i = 20; i < bytes; i++) EQUAL(text[i], 'a' + number % 26);
}

int main(int count, char **words) {
    CHECK(count == 4);
    folder = words[1];
    int files[2] = { bound(words[2]), bound(words[3]) };
    ready();
    do {
        /* The first datagram stays in the queue. */
        int waits = 0;
        for (int i = 0; i < 2; i++) {
            if (ioctl(files[i], FIONREAD, &waits) || !waits) break;
            read_one(files[i], 0, MSG_PEEK);
        }
        if (waits) leave("peeked", "yes");
        beat();
        nap(2);
    } while (go_on());
    for (int i = 0; i < 2; i++) {
        for (int number = 0; number < EACH; number++) read_one(files[i], number, 0);
        char text[16];
        CHECK(recv(files[i], text, sizeof text, 0) == -1 && errno == EAGAIN);
    }
    return passed();
}
