/* Runs four listeners that share an address and a port, with a reuseport program that sends every connection to the
 * third. Each connection receives the number of its listener. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/filter.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define LISTENERS 4

int main(int words, char **word) {
    if (words != 4) return 2;
    close_range(3, ~0U, 0);
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(atoi(word[2])) };
    if (inet_pton(AF_INET, word[1], &at.sin_addr) != 1) return 2;
    struct pollfd listeners[LISTENERS];
    int one = 1;
    for (int i = 0; i < LISTENERS; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one);
        if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 128)) return 3;
        listeners[i] = (struct pollfd){ .fd = fd, .events = POLLIN };
    }
    struct sock_filter code[] = { { BPF_RET | BPF_K, 0, 0, 2 } };
    struct sock_fprog program = { 1, code };
    if (setsockopt(listeners[0].fd, SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &program, sizeof program)) return 4;
    FILE *file = fopen(word[3], "w");
    fprintf(file, "%d", (int)getpid());
    fclose(file);
    for (;;) {
        if (poll(listeners, LISTENERS, -1) < 0) continue;
        for (int i = 0; i < LISTENERS; i++) {
            if (!(listeners[i].revents & POLLIN)) continue;
            int fd = accept(listeners[i].fd, NULL, NULL);
            dprintf(fd, "%d", i);
            close(fd);
        }
    }
}
