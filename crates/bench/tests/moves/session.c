/* A client of a database on another host: sends one request after another, checks every byte of the answers, and
 * appends its host to a file with each answer, until told to end. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

enum { MESSAGE = 700 };

static int ask(int fd, long number) {
    char asked[MESSAGE], answer[MESSAGE];
    for (int at = 0; at < MESSAGE; at++) asked[at] = (char)(number * 31 + at);
    if (write(fd, asked, MESSAGE) != MESSAGE) return 0;
    for (long got = 0, more; got < MESSAGE; got += more)
        if ((more = read(fd, answer + got, MESSAGE - got)) <= 0) return 0;
    return !memcmp(asked, answer, MESSAGE);
}

int main(int count, char **words) {
    if (count != 4) return 2;
    /* Descriptors inherited from the parent. */
    close_range(3, ~0U, 0);
    char end[512];
    snprintf(end, sizeof end, "%s.end", words[1]);
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(atoi(words[3])) };
    struct sockaddr_in6 at6 = { .sin6_family = AF_INET6, .sin6_port = htons(atoi(words[3])) };
    int v6 = inet_pton(AF_INET6, words[2], &at6.sin6_addr) == 1, one = 1;
    if (!v6) inet_pton(AF_INET, words[2], &at.sin_addr);
    int fd = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || (v6 ? connect(fd, (void *)&at6, sizeof at6) : connect(fd, (void *)&at, sizeof at))) return 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct sockaddr_in6 before = { 0 }, after = { 0 };
    socklen_t length = sizeof before;
    getsockname(fd, (void *)&before, &length);
    for (long number = 1; access(end, F_OK); number++) {
        if (!ask(fd, number)) return 4;
        length = sizeof after;
        if (getsockname(fd, (void *)&after, &length) || memcmp(&before, &after, sizeof after)) return 5;
        struct utsname host;
        char line[256];
        uname(&host);
        int bytes = snprintf(line, sizeof line, "%s %ld %d\n", host.nodename, number, (int)getpid());
        int file = open(words[1], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
        if (file < 0 || write(file, line, bytes) != bytes) return 6;
        close(file);
        struct timespec nap = { 0, 2000000 };
        while (nanosleep(&nap, &nap)) {}
    }
    return 0;
}
