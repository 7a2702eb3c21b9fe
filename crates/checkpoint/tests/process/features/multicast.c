/* Multicast: joined groups of a socket, their source filters, and sending options. */
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include "feature.h"

static int socket4, socket6, quiet;
static unsigned lo;

static struct sockaddr_storage address(const char *text) {
    struct sockaddr_storage found = { 0 };
    struct sockaddr_in *v4 = (void *)&found;
    struct sockaddr_in6 *v6 = (void *)&found;
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) found.ss_family = AF_INET;
    else {
        CHECK(inet_pton(AF_INET6, text, &v6->sin6_addr) == 1);
        found.ss_family = AF_INET6;
    }
    return found;
}

static int level(const char *group) { return strchr(group, ':') ? IPPROTO_IPV6 : IPPROTO_IP; }

static void with_source(int socket, int option, const char *group, const char *source) {
    struct group_source_req request = { .gsr_interface = lo, .gsr_group = address(group), .gsr_source = address(source) };
    CHECK(!setsockopt(socket, level(group), option, &request, sizeof request));
}

static void join(int socket, const char *group) {
    struct group_req request = { .gr_interface = lo, .gr_group = address(group) };
    CHECK(!setsockopt(socket, level(group), MCAST_JOIN_GROUP, &request, sizeof request));
}

/* Reads a source filter; fails with the kernel's error if the socket is no member of the group. */
static int filter(int socket, const char *group, unsigned *mode, unsigned *sources) {
    struct group_filter *found = calloc(1, GROUP_FILTER_SIZE(8));
    socklen_t length = GROUP_FILTER_SIZE(8);
    found->gf_interface = lo;
    found->gf_group = address(group);
    found->gf_numsrc = 8;
    int outcome = getsockopt(socket, level(group), MCAST_MSFILTER, found, &length);
    *mode = found->gf_fmode;
    *sources = found->gf_numsrc;
    free(found);
    return outcome;
}

static void member(int socket, const char *group, unsigned mode, unsigned sources) {
    unsigned its_mode, its_sources;
    CHECK(!filter(socket, group, &its_mode, &its_sources));
    EQUAL(its_mode, mode);
    EQUAL(its_sources, sources);
}

static void no_member(int socket, const char *group) {
    unsigned mode, sources;
    CHECK(filter(socket, group, &mode, &sources) && errno == EADDRNOTAVAIL);
    errno = 0;
}

static void set(int socket, int level, int option, int value) {
    CHECK(!setsockopt(socket, level, option, &value, sizeof value));
}

static int get(int socket, int level, int option) {
    int value = 0;
    socklen_t length = sizeof value;
    CHECK(!getsockopt(socket, level, option, &value, &length));
    return value;
}

static void begin(void) {
    lo = if_nametoindex("lo");
    socket4 = socket(AF_INET, SOCK_DGRAM, 0);
    socket6 = socket(AF_INET6, SOCK_DGRAM, 0);
    quiet = socket(AF_INET6, SOCK_DGRAM, 0);
    CHECK(lo && socket4 >= 0 && socket6 >= 0 && quiet >= 0);
    join(socket4, "239.3.4.5");
    with_source(socket4, MCAST_JOIN_SOURCE_GROUP, "232.3.4.6", "10.0.0.1");
    with_source(socket4, MCAST_JOIN_SOURCE_GROUP, "232.3.4.6", "10.0.0.2");
    join(socket4, "239.3.4.7");
    with_source(socket4, MCAST_BLOCK_SOURCE, "239.3.4.7", "10.0.0.3");
    join(socket6, "ff15::345");
    join(socket6, "239.3.4.8");
    with_source(socket6, MCAST_JOIN_SOURCE_GROUP, "ff35::346", "fd00::1");
    set(socket4, IPPROTO_IP, IP_MULTICAST_TTL, 7);
    set(socket4, IPPROTO_IP, IP_MULTICAST_LOOP, 0);
    set(socket4, IPPROTO_IP, IP_MULTICAST_ALL, 0);
    set(socket6, IPPROTO_IPV6, IPV6_MULTICAST_IF, lo);
    set(socket6, IPPROTO_IPV6, IPV6_MULTICAST_HOPS, 9);
    set(socket6, IPPROTO_IPV6, IPV6_MULTICAST_LOOP, 0);
}

static void check(void) {
    member(socket4, "239.3.4.5", MCAST_EXCLUDE, 0);
    member(socket4, "232.3.4.6", MCAST_INCLUDE, 2);
    member(socket4, "239.3.4.7", MCAST_EXCLUDE, 1);
    no_member(socket4, "239.3.4.8");
    member(socket6, "ff15::345", MCAST_EXCLUDE, 0);
    member(socket6, "239.3.4.8", MCAST_EXCLUDE, 0);
    member(socket6, "ff35::346", MCAST_INCLUDE, 1);
    no_member(quiet, "ff15::345");
    no_member(quiet, "239.3.4.8");
    EQUAL(get(socket4, IPPROTO_IP, IP_MULTICAST_TTL), 7);
    EQUAL(get(socket4, IPPROTO_IP, IP_MULTICAST_LOOP), 0);
    EQUAL(get(socket4, IPPROTO_IP, IP_MULTICAST_ALL), 0);
    EQUAL(get(socket6, IPPROTO_IPV6, IPV6_MULTICAST_IF), lo);
    EQUAL(get(socket6, IPPROTO_IPV6, IPV6_MULTICAST_HOPS), 9);
    EQUAL(get(socket6, IPPROTO_IPV6, IPV6_MULTICAST_LOOP), 0);
    EQUAL(get(quiet, IPPROTO_IPV6, IPV6_MULTICAST_LOOP), 1);
}

FEATURE(begin(), check(), )
