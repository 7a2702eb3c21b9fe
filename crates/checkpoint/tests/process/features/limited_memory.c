/* Limits of memory and processes that are just met: the move needs no more than the program uses. */
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include "feature.h"

static unsigned char *memory;

static void begin(void) {
    memory = anonymous(8 << 20, PROT_READ | PROT_WRITE, 0);
    fill(memory, 8 << 20, 1);
    struct rlimit space = { 64 << 20, 64 << 20 }, one = { 1, 1 }, nothing = { 0, 0 };
    CHECK(!chmod(folder, 0777) && !setresuid(3333, 3333, 3333));
    CHECK(!setrlimit(RLIMIT_AS, &space) && !setrlimit(RLIMIT_NPROC, &one) && !setrlimit(RLIMIT_MEMLOCK, &nothing) && !setrlimit(RLIMIT_STACK, &(struct rlimit){ 1 << 20, 1 << 20 }));
}

static void check(void) {
    EQUAL(memory[(8 << 20) - 1], (((8 << 20) - 1) * 7 + 1) >> 3 & 255);
    CHECK(mmap(0, 64 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(fork() == -1 && errno == EAGAIN);
}

FEATURE(begin(), check(), )
