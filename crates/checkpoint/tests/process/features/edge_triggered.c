/* Edge-triggered epoll sets (EPOLLET): each arrival is reported, whether or not the set was waited on before the
 * move. */
#include <sys/epoll.h>
#include "feature.h"

static int set, asked[2], later[2];
static long in_asked, in_later;

static void watch(int file, int number) {
    struct epoll_event event = { .events = EPOLLIN | EPOLLET, .data.u64 = number };
    CHECK(!fcntl(file, F_SETFL, O_NONBLOCK));
    CHECK(!epoll_ctl(set, EPOLL_CTL_ADD, file, &event));
}

/* Returns the bits of the descriptors reported within this time. */
static int wait_for_bits(int milliseconds) {
    struct epoll_event found[4];
    int count = epoll_wait(set, found, 4, milliseconds), all = 0;
    CHECK(count >= 0 || errno == EINTR);
    errno = 0;
    for (int i = 0; i < count; i++) {
        CHECK(found[i].events == EPOLLIN);
        all |= found[i].data.u64;
    }
    return all;
}

static void expect_bit(int bit) {
    for (int turns = 0; !(wait_for_bits(1000) & bit); turns++) CHECK(turns < 60);
}

static void add(const int *ends, long *count) {
    EQUAL(write(ends[1], "x", 1), 1);
    ++*count;
}

static void drain(const int *ends, long *count) {
    char bytes[4096];
    EQUAL(read(ends[0], bytes, sizeof bytes), *count);
    *count = 0;
}

static void begin(void) {
    set = epoll_create1(0);
    CHECK(set >= 0 && !pipe(asked) && !pipe(later));
    watch(asked[0], 1);
    watch(later[0], 2);
}

static void check(void) {
    /* Data that arrived in an earlier check, and was not waited for. */
    if (in_later) {
        expect_bit(2);
        drain(later, &in_later);
    }
    add(asked, &in_asked);
    expect_bit(1);
    if (in_asked == 8) drain(asked, &in_asked);
    add(later, &in_later);
}

FEATURE(begin(), check(), )
