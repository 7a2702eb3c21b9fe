/* Threads that do little else than ask the clock. */
#include <pthread.h>
#include "self.h"

static volatile int ended;

static int before(struct timespec a, struct timespec b) {
    return a.tv_sec < b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec <= b.tv_nsec);
}

static void *asks(void *nothing) {
    struct timespec last = { 0, 0 }, now;
    while (!ended) {
        for (int i = 0; i < 1000; i++) {
            CHECK(!clock_gettime(i % 10 ? CLOCK_MONOTONIC : CLOCK_MONOTONIC_COARSE, &now));
            if (!(i % 10)) continue;
            CHECK(before(last, now));
            last = now;
        }
    }
    return nothing;
}

int main(int count, char **words) {
    pthread_t threads[3];
    CHECK(count == 2);
    folder = words[1];
    for (int i = 0; i < 3; i++) CHECK(!pthread_create(threads + i, 0, asks, 0));
    ready();
    do { beat(); nap(2); } while (go_on());
    ended = 1;
    for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], 0));
    return passed();
}
