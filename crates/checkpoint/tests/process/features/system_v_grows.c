/* System V segments that are made, used and removed all the time, also while the program is copied. */
#include <sys/shm.h>
#include "feature.h"

static int kept = -1;
static unsigned char *last;
static unsigned turn;

static void check(void) {
    if (last) {
        EQUAL(last[5000], (5000 * 7 + turn) >> 3 & 255);
        CHECK(!shmdt(last));
    }
    kept = shmget(IPC_PRIVATE, 8192, 0600);
    last = shmat(kept, 0, 0);
    CHECK(kept >= 0 && last != (void *)-1 && !shmctl(kept, IPC_RMID, 0));
    fill(last, 8192, ++turn);
    for (int i = 0; i < 5; i++) {
        EQUAL(sum(last, 8192), sum(last, 8192));
        EQUAL(last[8191], (8191 * 7 + turn) >> 3 & 255);
        nap(3);
    }
}

FEATURE(, check(), )
