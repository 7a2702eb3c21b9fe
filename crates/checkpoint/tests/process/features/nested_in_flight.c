/* Nested descriptors in flight: a socket in flight, with a pipe in flight in its queue, with bytes in the pipe. */
#include <sys/socket.h>
#include "feature.h"

static int outer[2];
static long turn;

static void send_file(int to, int file) {
    char byte = 'f', space[CMSG_SPACE(sizeof file)] = { 0 };
    struct iovec part = { &byte, 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space };
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(head), &file, sizeof file);
    EQUAL(sendmsg(to, &message, 0), 1);
    CHECK(!close(file));
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

/* Only the outer pair keeps descriptor numbers; all else is in flight. */
static void put(void) {
    int inner[2], ends[2];
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, inner) && !pipe(ends));
    EQUAL(write(ends[1], &turn, sizeof turn), sizeof turn);
    send_file(inner[0], ends[0]);
    send_file(inner[0], ends[1]);
    send_file(outer[0], inner[1]);
    send_file(outer[0], inner[0]);
}

static void get(void) {
    long found;
    int receiving = receive_file(outer[1]), sending = receive_file(outer[1]);
    int reading = receive_file(receiving), writing = receive_file(receiving);
    EQUAL(read(reading, &found, sizeof found), sizeof found);
    EQUAL(found, turn);
    EQUAL(write(writing, "more", 4), 4);
    EQUAL(read(reading, &found, sizeof found), 4);
    EQUAL(write(sending, "still a pair", 12), 12);
    char text[16];
    EQUAL(read(receiving, text, sizeof text), 12);
    close(receiving), close(sending), close(reading), close(writing);
    turn++;
}

FEATURE(CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, outer)); put(), get(); put(), )
