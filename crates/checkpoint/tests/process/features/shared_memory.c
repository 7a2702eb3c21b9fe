/* Anonymous shared memory, mapped twice by parent and child, written by both. */
#include <sys/mman.h>
#include <sys/prctl.h>
#include "feature.h"

static volatile long *board;

static void begin(void) {
    board = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    fill((char *)board + 8192, 1 << 18, 2);
    if (!fork()) {
        prctl(PR_SET_PDEATHSIG, 9);
        for (;;) { if (board[0] > board[1]) board[1]++; nap(1); }
    }
}

static void check(void) {
    long mine = ++board[0];
    while (board[1] < mine) nap(1);
    EQUAL(((unsigned char *)board)[8192 + 99999], (99999 * 7 + 2) >> 3 & 255);
}

FEATURE(begin(), check(), )
