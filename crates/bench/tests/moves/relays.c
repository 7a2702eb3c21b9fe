/* Runs four threads with a UDP socket each, all on one address and port: a server of relays. A thread answers a
 * datagram with its own number and its count of datagrams from that client, a count that no other thread knows. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define THREADS 4
#define CLIENTS 1024

struct relay {
    int number, fd, clients;
    struct { struct sockaddr_in address; int count; } of[CLIENTS];
};

static int open_bound(const char *address, int port) {
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
    if (inet_pton(AF_INET, address, &at.sin_addr) != 1) exit(2);
    int fd = socket(AF_INET, SOCK_DGRAM, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at)) exit(3);
    return fd;
}

static void *serve(void *argument) {
    struct relay *relay = argument;
    for (;;) {
        struct sockaddr_in from;
        socklen_t length = sizeof from;
        char bytes[64];
        if (recvfrom(relay->fd, bytes, sizeof bytes, 0, (struct sockaddr *)&from, &length) < 0) continue;
        int at = 0;
        while (at < relay->clients && (relay->of[at].address.sin_port != from.sin_port ||
                                       relay->of[at].address.sin_addr.s_addr != from.sin_addr.s_addr))
            at++;
        if (at == CLIENTS) exit(4);
        if (at == relay->clients) {
            relay->clients++;
            relay->of[at].address = from;
        }
        int said = snprintf(bytes, sizeof bytes, "%d %d", relay->number, ++relay->of[at].count);
        sendto(relay->fd, bytes, said, 0, (struct sockaddr *)&from, length);
    }
    return NULL;
}

int main(int words, char **word) {
    if (words != 4) return 2;
    close_range(3, ~0U, 0);
    static struct relay relays[THREADS];
    for (int i = 0; i < THREADS; i++) {
        relays[i].number = i;
        relays[i].fd = open_bound(word[1], atoi(word[2]));
    }
    for (int i = 1; i < THREADS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, &relays[i])) return 5;
    }
    FILE *file = fopen(word[3], "w");
    fprintf(file, "%d", (int)getpid());
    fclose(file);
    serve(&relays[0]);
}
