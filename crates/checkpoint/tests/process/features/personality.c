/* personality(2) of each thread. */
#include <pthread.h>
#include <sys/personality.h>
#include "feature.h"

static volatile int stop;

static void *other(void *unused) {
    CHECK(personality(0x0080000) >= 0);
    while (!stop) { EQUAL(personality(0xffffffff), 0x0080000); nap(1); }
    return unused;
}

static pthread_t thread;

FEATURE(CHECK(personality(ADDR_NO_RANDOMIZE) >= 0); CHECK(!pthread_create(&thread, 0, other, 0)),
    EQUAL(personality(0xffffffff), ADDR_NO_RANDOMIZE), stop = 1; CHECK(!pthread_join(thread, 0)))
