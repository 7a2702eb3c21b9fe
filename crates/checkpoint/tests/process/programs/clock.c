/* Threads that mostly read the clock and write deep into their stacks. With a second argument, a byte of the vDSO that
 * nothing reads is changed, to simulate another kernel. */
#include <pthread.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include "self.h"

static volatile int ended;

static int before(struct timespec a, struct timespec b) {
    return a.tv_sec < b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec <= b.tv_nsec);
}

static void *asks(void *nothing) {
    struct timespec last = { 0, 0 }, now;
    volatile char deep[200000] = { 0 };
    for (int page = 0; !ended; page = (page + 4096) % sizeof deep) {
        deep[page]++;
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
    CHECK(count == 2 || count == 3);
    folder = words[1];
    if (count == 3) {
        char *vdso = (char *)getauxval(AT_SYSINFO_EHDR);
        CHECK(!mprotect(vdso, 8192, PROT_READ | PROT_WRITE | PROT_EXEC));
        vdso[15]++;
        CHECK(!mprotect(vdso, 8192, PROT_READ | PROT_EXEC));
    }
    for (int i = 0; i < 3; i++) CHECK(!pthread_create(threads + i, 0, asks, 0));
    ready();
    do { beat(); nap(2); } while (go_on());
    ended = 1;
    for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], 0));
    return passed();
}
