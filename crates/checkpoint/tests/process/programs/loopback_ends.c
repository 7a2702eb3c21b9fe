/* A child with one end of a connection over the loopback device; its parent has the other end. Usage: FOLDER KIND. */
#include "self.h"
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>

int main(int count, char **words) {
    CHECK(count == 3);
    folder = words[1];
    prctl(PR_SET_PDEATHSIG, 9);
    int datagrams = !strncmp(words[2], "udp", 3), type = datagrams ? SOCK_DGRAM : SOCK_STREAM;
    int v6 = !!strchr(words[2], '6'), accepted = !strstr(words[2], "waiting");
    union { struct sockaddr any; struct sockaddr_in v4; struct sockaddr_in6 v6; } at = { 0 };
    socklen_t length = v6 ? sizeof at.v6 : sizeof at.v4;
    at.any.sa_family = v6 ? AF_INET6 : AF_INET;
    if (v6) at.v6.sin6_addr = in6addr_loopback; else at.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int other = socket(at.any.sa_family, type, 0);
    CHECK(other >= 0 && !bind(other, &at.any, length) && !getsockname(other, &at.any, &length));
    CHECK(datagrams || !listen(other, 5));
    pid_t child = fork();
    if (child) {
        char text[32];
        if (!datagrams && accepted) CHECK(accept(other, 0, 0) >= 0);
        snprintf(text, sizeof text, "%d", child);
        leave("child", text);
        ready();
        for (;;) pause();
    }
    prctl(PR_SET_PDEATHSIG, 9);
    close(other);
    int near = socket(at.any.sa_family, type, 0);
    CHECK(near >= 0 && !connect(near, &at.any, length));
    for (;;) pause();
}
