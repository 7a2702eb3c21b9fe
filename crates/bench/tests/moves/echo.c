/* Echoes datagrams and bytes of connections: a server without any support for moves. The datagram "wait" makes it stop
 * accepting connections, "accept" makes it accept them again, and "write" makes it write to its memory from then on. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static int open_bound(int kind, const char *address, int port) {
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
    struct sockaddr_in6 at6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
    int v6 = inet_pton(AF_INET, address, &at.sin_addr) != 1;
    if (v6 && inet_pton(AF_INET6, address, &at6.sin6_addr) != 1) exit(2);
    int fd = socket(v6 ? AF_INET6 : AF_INET, kind, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd < 0 || (v6 ? bind(fd, (struct sockaddr *)&at6, sizeof at6) : bind(fd, (struct sockaddr *)&at, sizeof at))) exit(3);
    return fd;
}

static void watch(int epoll, int fd) {
    struct epoll_event event = { .events = EPOLLIN, .data.fd = fd };
    /* A client repeats an unanswered "accept", so the descriptor may be in the set already. */
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) && errno != EEXIST) exit(4);
}

static char memory[32 << 20];

static void *write_memory(void *unused) {
    for (;;)
        for (size_t at = 0; at < sizeof memory; at += 4096) ((volatile char *)memory)[at]++;
    return unused;
}

int main(int words, char **word) {
    if (words != 4) return 2;
    close_range(3, ~0U, 0);
    signal(SIGPIPE, SIG_IGN);
    int port = atoi(word[2]);
    int datagrams = open_bound(SOCK_DGRAM, word[1], port), listener = open_bound(SOCK_STREAM, word[1], port);
    int epoll = epoll_create1(0);
    listen(listener, 128);
    watch(epoll, datagrams);
    watch(epoll, listener);
    FILE *file = fopen(word[3], "w");
    fprintf(file, "%d", (int)getpid());
    fclose(file);
    for (;;) {
        struct epoll_event event;
        if (epoll_wait(epoll, &event, 1, -1) != 1) continue;
        int fd = event.data.fd;
        char bytes[2048];
        if (fd == listener) {
            int connection = accept(listener, NULL, NULL);
            if (connection >= 0) watch(epoll, connection);
        } else if (fd == datagrams) {
            struct sockaddr_storage from;
            socklen_t length = sizeof from;
            /* Readability is only a hint, so the read must not block: a copy lacks the datagram that the original was
             * notified of. */
            long got = recvfrom(fd, bytes, sizeof bytes, MSG_DONTWAIT, (struct sockaddr *)&from, &length);
            if (got == 4 && !memcmp(bytes, "wait", 4)) epoll_ctl(epoll, EPOLL_CTL_DEL, listener, NULL);
            if (got == 6 && !memcmp(bytes, "accept", 6)) watch(epoll, listener);
            pthread_t writer;
            if (got == 5 && !memcmp(bytes, "write", 5) && !memory[0]) pthread_create(&writer, NULL, write_memory, NULL);
            if (got >= 0) sendto(fd, bytes, got, 0, (struct sockaddr *)&from, length);
        } else {
            long got = read(fd, bytes, sizeof bytes);
            if (got <= 0) close(fd);
            else for (long at = 0, more; at < got; at += more) {
                more = write(fd, bytes + at, got - at);
                if (more <= 0) {
                    close(fd);
                    break;
                }
            }
        }
    }
}
