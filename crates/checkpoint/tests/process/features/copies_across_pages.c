/* Copies by vector registers that cross a page boundary: a thread stopped at the page fault in the middle has half of
 * the data in its registers. */
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include "feature.h"

enum { THREADS = 3, PAGES = 64, BYTES = 256 };

static volatile int stop;

static void *copy(void *unused) {
    unsigned char *pages = mmap(0, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char from[BYTES];
    unsigned turn = 0;
    while (!stop) {
        turn++;
        for (int i = 0; i < BYTES; i++) from[i] = 31 * turn + 7 * i;
        for (int page = 1; page < PAGES; page++) {
            unsigned char *to = pages + page * 4096 - BYTES / 2;
            memcpy(to, from, BYTES);
            CHECK(!memcmp(to, from, BYTES));
        }
        for (int page = 1; page < PAGES; page++) CHECK(!memcmp(pages + page * 4096 - BYTES / 2, from, BYTES));
    }
    return unused;
}

static pthread_t threads[THREADS];

FEATURE(for (int i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], 0, copy, 0)), ,
    stop = 1; for (int i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], 0)))
