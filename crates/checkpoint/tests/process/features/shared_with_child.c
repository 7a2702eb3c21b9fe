/* Private memory shared copy-on-write by parent and child since fork: each has its own content. */
#include <sys/mman.h>
#include <sys/prctl.h>
#include "feature.h"

static unsigned char *memory;
static volatile int *board;

static void begin(void) {
    memory = anonymous(256 * 4096, PROT_READ | PROT_WRITE, 0);
    board = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fill(memory, 256 * 4096, 1);
    if (!fork()) {
        prctl(PR_SET_PDEATHSIG, 9);
        for (unsigned char turn = 1;; turn++) {
            for (int i = 0; i < 256; i += 2) memory[i * 4096] = turn;
            nap(1);
            for (int i = 0; i < 256; i++) if (memory[i * 4096] != (i % 2 ? (i * 4096 * 7 + 1) >> 3 & 255 : turn)) board[1] = 1;
            board[0]++;
        }
    }
}

static void check(void) {
    for (int before = board[0]; before == board[0];) nap(1);
    EQUAL(board[1], 0);
    for (int i = 0; i < 256; i++) EQUAL(memory[i * 4096], (i * 4096 * 7 + 1) >> 3 & 255);
}

FEATURE(begin(), check(), )
