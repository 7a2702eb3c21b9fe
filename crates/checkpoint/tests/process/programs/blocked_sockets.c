/* Holds a socket that cannot move, until told to end. Usage: FOLDER KIND. */
#include "self.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>

static struct sockaddr_in at = { .sin_family = AF_INET };
static int listener, near, far;

static void open_listener(void) {
    socklen_t length = sizeof at;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    near = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0 && near >= 0 && !bind(listener, (void *)&at, length) && !getsockname(listener, (void *)&at, &length));
    CHECK(!listen(listener, 0));
}

static void connect_pair(void) {
    CHECK(!connect(near, (void *)&at, sizeof at));
    CHECK((far = accept(listener, 0, 0)) >= 0);
}

static void set_or_skip(int file, int level, int option, const void *value, socklen_t length, const char *needs) {
    if (!setsockopt(file, level, option, value, length)) return;
    CHECK(errno == ENOENT || errno == ENOPROTOOPT || errno == EINVAL);
    leave("skipped", needs);
}

static void wait_for_events(int file, int events) {
    struct pollfd one = { file, events, 0 };
    EQUAL(poll(&one, 1, 30000), 1);
}

static void md5_keys(void) {
    struct tcp_md5sig key = { .tcpm_keylen = 3, .tcpm_key = "key" };
    memcpy(&key.tcpm_addr, &at, sizeof at);
    set_or_skip(listener, IPPROTO_TCP, TCP_MD5SIG, &key, sizeof key, "keys of TCP");
    set_or_skip(near, IPPROTO_TCP, TCP_MD5SIG, &key, sizeof key, "keys of TCP");
    connect_pair();
}

static void urgent_data(void) {
    connect_pair();
    EQUAL(send(near, "!", 1, MSG_OOB), 1);
    wait_for_events(far, POLLPRI);
}

static void kernel_tls(void) {
    connect_pair();
    set_or_skip(near, IPPROTO_TCP, TCP_ULP, "tls", 4, "TLS in the kernel");
}

/* The listener's backlog is full, so the connection stays incomplete. */
static void connecting(void) {
    CHECK(!connect(near, (void *)&at, sizeof at));
    for (int i = 0; i < 8; i++) {
        int file = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        CHECK(file >= 0);
        if (connect(file, (void *)&at, sizeof at)) CHECK(errno == EINPROGRESS);
    }
}

static void refused(void) {
    close(listener);
    CHECK(!fcntl(near, F_SETFL, O_NONBLOCK));
    CHECK(connect(near, (void *)&at, sizeof at));
    wait_for_events(near, 0);
}

static void corked(void) {
    int file = socket(AF_INET, SOCK_DGRAM, 0), one = 1;
    CHECK(file >= 0 && !connect(file, (void *)&at, sizeof at));
    set_or_skip(file, IPPROTO_UDP, UDP_CORK, &one, sizeof one, "corks");
    EQUAL(send(file, "half", 4, 0), 4);
}

static void encapsulates(void) {
    int file = socket(AF_INET, SOCK_DGRAM, 0), kind = UDP_ENCAP_ESPINUDP;
    set_or_skip(file, IPPROTO_UDP, UDP_ENCAP, &kind, sizeof kind, "IPsec");
}

static void open_in_namespace(int type) {
    int home = open("/proc/self/ns/net", O_RDONLY);
    CHECK(home >= 0 && !unshare(CLONE_NEWNET));
    int file = socket(AF_INET, type, 0);
    CHECK(file >= 0 && !setns(home, CLONE_NEWNET));
    close(home);
}

static void tcp_in_namespace(void) { open_in_namespace(SOCK_STREAM); }
static void udp_in_namespace(void) { open_in_namespace(SOCK_DGRAM); }

static void out_of_band(void) {
    int pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    if (send(pair[0], "!", 1, MSG_OOB) != 1) leave("skipped", "out-of-band data of Unix sockets");
}

static const struct { const char *name; void (*run)(void); } cases[] = { { "keys", md5_keys }, { "urgent", urgent_data },
    { "kernel_tls", kernel_tls }, { "connecting", connecting }, { "refused", refused }, { "corked", corked },
    { "encapsulates", encapsulates }, { "tcp_apart", tcp_in_namespace }, { "udp_apart", udp_in_namespace }, { "out_of_band", out_of_band } };

int main(int count, char **words) {
    CHECK(count == 3);
    folder = words[1];
    prctl(PR_SET_PDEATHSIG, 9);
    open_listener();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) if (!strcmp(words[2], cases[i].name)) cases[i].run(), folder = words[1], count = 0;
    CHECK(!count);
    ready();
    while (go_on()) nap(5);
    return passed();
}
