/* Unread expirations of timers: their number is not lost, and no expiration is counted twice. */
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/timerfd.h>
#include "feature.h"

#define PERIOD_NS 10000000L
#define UNREAD 7
/* linux/timerfd.h */
#define SET_TICKS _IOW('T', 0, unsigned long)

static int once, often, counted, never_read, turns;
static long began, total, last, running;

static long now(void) {
    struct timespec time;
    CHECK(!clock_gettime(CLOCK_MONOTONIC, &time));
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

static int started(struct itimerspec times) {
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    CHECK(timer >= 0 && !timerfd_settime(timer, 0, &times, 0));
    return timer;
}

static void expire(void) {
    unsigned long ticks = UNREAD;
    if (ioctl(counted, SET_TICKS, &ticks)) skip("TFD_IOC_SET_TICKS");
}

static void begin(void) {
    once = started((struct itimerspec){ { 0, 0 }, { 0, 1000000 } });
    counted = started((struct itimerspec){ { 100000, 0 }, { 100000, 0 } });
    began = now();
    often = started((struct itimerspec){ { 0, PERIOD_NS }, { 0, PERIOD_NS } });
    expire();
    last = now();
    never_read = started((struct itimerspec){ { 0, PERIOD_NS }, { 0, PERIOD_NS } });
    nap(20);
}

static void check(void) {
    struct pollfd expired[2] = { { once, POLLIN }, { counted, POLLIN } };
    EQUAL(poll(expired, 2, 0), 2);
    struct itimerspec left;
    CHECK(!timerfd_gettime(often, &left));
    EQUAL(left.it_interval.tv_nsec, PERIOD_NS);
    /* A longer pause may be one in which the program was stopped, and the timer with it. */
    long time = now();
    if (time - last < PERIOD_NS) running += time - last;
    last = time;
    if (++turns % 16) return;
    unsigned long expirations = 0;
    EQUAL(read(counted, &expirations, 8), 8);
    EQUAL(expirations, UNREAD);
    CHECK(read(counted, &expirations, 8) == -1 && errno == EAGAIN);
    expire();
    /* The timer pauses while the program is stopped, so only the largest possible number is known. */
    expirations = 0;
    if (read(often, &expirations, 8) != 8) EQUAL(errno, EAGAIN);
    errno = 0;
    total += expirations;
    CHECK(total <= (now() - began) / PERIOD_NS);
}

static void end(void) {
    unsigned long expirations;
    EQUAL(read(once, &expirations, 8), 8);
    EQUAL(expirations, 1);
    CHECK(read(once, &expirations, 8) == -1 && errno == EAGAIN);
    EQUAL(read(never_read, &expirations, 8), 8);
    CHECK((long)expirations >= running / PERIOD_NS / 2);
    CHECK((long)expirations <= (now() - began) / PERIOD_NS);
    struct pollfd again = { often, POLLIN };
    EQUAL(poll(&again, 1, 60000), 1);
}

FEATURE(begin(), check(), end())
