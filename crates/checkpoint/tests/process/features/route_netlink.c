/* A route netlink socket that queries and monitors its network namespace: its address, its groups, and answers to its
 * requests. */
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>
#include "feature.h"

static int sockets[2];
static unsigned ports[2], sequence;

static unsigned port_of(int file) {
    struct sockaddr_nl name = { 0 };
    socklen_t length = sizeof name;
    CHECK(!getsockname(file, (void *)&name, &length));
    CHECK(name.nl_family == AF_NETLINK);
    return name.nl_pid;
}

static void begin(void) {
    for (int i = 0; i < 2; i++) {
        sockets[i] = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
        struct sockaddr_nl name = { .nl_family = AF_NETLINK, .nl_groups = i ? RTMGRP_LINK | RTMGRP_IPV4_IFADDR : 0 };
        CHECK(sockets[i] >= 0 && !bind(sockets[i], (void *)&name, sizeof name));
        ports[i] = port_of(sockets[i]);
    }
    CHECK(ports[0] && ports[1] && ports[0] != ports[1]);
}

/* Lists all interfaces: at least the loopback device is reported. */
static void asks(int file) {
    struct { struct nlmsghdr head; struct rtgenmsg body; } ask = {
        { sizeof ask, RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, ++sequence, 0 }, { AF_UNSPEC } };
    EQUAL(send(file, &ask, sizeof ask, 0), sizeof ask);
    for (int links = 0;;) {
        char answer[32768];
        int length = recv(file, answer, sizeof answer, 0);
        CHECK(length > 0);
        for (struct nlmsghdr *head = (void *)answer; NLMSG_OK(head, length); head = NLMSG_NEXT(head, length)) {
            if (head->nlmsg_seq != sequence) continue;
            if (head->nlmsg_type == NLMSG_DONE) {
                CHECK(links > 0);
                return;
            }
            EQUAL(head->nlmsg_type, RTM_NEWLINK);
            links++;
        }
    }
}

static void check(void) {
    for (int i = 0; i < 2; i++) {
        unsigned groups = 0;
        socklen_t length = sizeof groups;
        EQUAL(port_of(sockets[i]), ports[i]);
        CHECK(!getsockopt(sockets[i], SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS, &groups, &length));
        EQUAL(groups, i ? RTMGRP_LINK | RTMGRP_IPV4_IFADDR : 0);
        EQUAL(fcntl(sockets[i], F_GETFD), FD_CLOEXEC);
    }
    asks(sockets[0]);
}

FEATURE(begin(), check(), )
