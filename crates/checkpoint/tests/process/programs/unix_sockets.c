/* Unix sockets: pairs of all types with data, descriptors in flight, a listener with a file, an abstract name. */
#include "self.h"
#include <stddef.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

static void send_file(int to, int file) {
    char byte = 'f', space[CMSG_SPACE(sizeof file)] = { 0 };
    struct iovec part = { &byte, 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space };
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(head), &file, sizeof file);
    EQUAL(sendmsg(to, &message, 0), 1);
}

static int receive_file(int from) {
    char byte, space[CMSG_SPACE(sizeof(int))];
    struct iovec part = { &byte, 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space };
    EQUAL(recvmsg(from, &message, 0), 1);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    CHECK(head && head->cmsg_type == SCM_RIGHTS);
    int file;
    memcpy(&file, CMSG_DATA(head), sizeof file);
    return file;
}

static void exchange(int from, int to, const char *text) {
    char found[64] = { 0 };
    EQUAL(send(from, text, strlen(text), MSG_NOSIGNAL), strlen(text));
    EQUAL(recv(to, found, sizeof found, 0), strlen(text));
    CHECK(!strcmp(text, found));
}

/* Connects to a listener by its file, and to a datagram socket by its abstract name. */
static void call(int listener, struct sockaddr_un *name, int bound, struct sockaddr_un *hidden, long hidden_length) {
    int client = socket(AF_UNIX, SOCK_STREAM, 0), to_hidden = socket(AF_UNIX, SOCK_DGRAM, 0);
    CHECK(!connect(client, (void *)name, sizeof *name));
    int server = accept(listener, 0, 0);
    CHECK(server >= 0);
    exchange(client, server, "by its file");
    CHECK(!connect(to_hidden, (void *)hidden, hidden_length));
    exchange(to_hidden, bound, "by its hidden name");
    close(client), close(server), close(to_hidden);
}

static void echo(const int *stream) {
    close(stream[0]);
    char found[64];
    long length;
    while ((length = recv(stream[1], found, sizeof found, 0)) > 0)
        EQUAL(send(stream[1], found, length, MSG_NOSIGNAL), length);
    _exit(length ? 8 : 9);
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    int stream[2], packet[2], datagram[2], files[2], one = 1;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, stream) && !socketpair(AF_UNIX, SOCK_SEQPACKET, 0, packet));
    CHECK(!socketpair(AF_UNIX, SOCK_DGRAM, 0, datagram) && !socketpair(AF_UNIX, SOCK_STREAM, 0, files));
    CHECK(!setsockopt(datagram[0], SOL_SOCKET, SO_PASSCRED, &one, sizeof one));
    struct sockaddr_un name = { AF_UNIX, "" }, hidden = { AF_UNIX, "" };
    snprintf(name.sun_path, sizeof name.sun_path, "%s/s", folder);
    long hidden_length = offsetof(struct sockaddr_un, sun_path) + 1
        + snprintf(hidden.sun_path + 1, sizeof hidden.sun_path - 1, "holdfast-%d", getpid());
    int listener = socket(AF_UNIX, SOCK_STREAM, 0), bound = socket(AF_UNIX, SOCK_DGRAM, 0);
    CHECK(!bind(listener, (void *)&name, sizeof name) && !listen(listener, 5));
    CHECK(!bind(bound, (void *)&hidden, hidden_length));
    EQUAL(send(stream[0], "kept", 4, 0), 4);
    EQUAL(send(packet[0], "a", 1, 0), 1);
    EQUAL(send(packet[0], "bb", 2, 0), 2);
    EQUAL(send(datagram[1], "ccc", 3, 0), 3);
    int pipe_ends[2];
    CHECK(!pipe(pipe_ends));
    send_file(files[0], pipe_ends[1]);
    close(pipe_ends[1]);
    pid_t child = fork();
    if (!child) echo(stream);
    close(stream[1]);
    char found[64] = { 0 };
    EQUAL(recv(stream[0], found, 4, MSG_WAITALL), 4);
    ready();
    for (long turn = 1; go_on(); turn++) {
        exchange(stream[0], stream[0], "echo");
        if (turn % 4 == 0) {
            EQUAL(recv(packet[1], found, 64, 0), 1);
            EQUAL(recv(packet[1], found, 64, 0), 2);
            EQUAL(send(packet[0], "a", 1, 0), 1);
            EQUAL(send(packet[0], "bb", 2, 0), 2);
            EQUAL(recv(datagram[0], found, 64, 0), 3);
            EQUAL(send(datagram[1], "ccc", 3, 0), 3);
            int writer = receive_file(files[1]);
            EQUAL(write(writer, "through", 7), 7);
            EQUAL(read(pipe_ends[0], found, 64), 7);
            send_file(files[0], writer);
            close(writer);
            call(listener, &name, bound, &hidden, hidden_length);
        }
        int value = 0;
        socklen_t length = sizeof value;
        CHECK(!getsockopt(datagram[0], SOL_SOCKET, SO_PASSCRED, &value, &length) && value == 1);
        beat();
        nap(1);
    }
    close(stream[0]);
    int status;
    EQUAL(waitpid(child, &status, 0), child);
    EQUAL(WEXITSTATUS(status), 9);
    return passed();
}
