/* Processes that populate pages all the time, read other pages, and drop some: no page is lost, and no dropped page
 * returns. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "feature.h"

#define CHILDREN 9
#define PAGES 4096
#define PAGE 4096L
#define EACH_TIME 6

/* Shared by all processes: the number of a page with wrong content, plus 1. */
static int *wrong;
static pid_t children[CHILDREN];

static void look(unsigned char *memory, unsigned long *has, unsigned page) {
    unsigned long there = *(unsigned long *)(memory + page * PAGE + 64);
    if (there != has[page]) *wrong = (int)page + 1;
}

static void go_through(unsigned seed) {
    unsigned char *memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static unsigned long has[PAGES], count;
    CHECK(memory != MAP_FAILED);
    pid_t parent = getppid();
    while (getppid() == parent) {
        for (int i = 0; i < EACH_TIME; i++) {
            seed = seed * 1103515245u + 12345u;
            unsigned page = seed >> 8 & (PAGES - 1);
            look(memory, has, page);
            if (seed >> 28 == 0) {
                CHECK(!madvise(memory + page * PAGE, PAGE, MADV_DONTNEED));
                has[page] = 0;
            } else if (seed >> 28 > 4) {
                has[page] = *(unsigned long *)(memory + page * PAGE + 64) = ++count;
            }
            look(memory, has, seed >> 4 & (PAGES - 1));
        }
        nap(1);
    }
    _exit(0);
}

static void begin(void) {
    wrong = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(wrong != MAP_FAILED);
    for (int i = 0; i < CHILDREN; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (!children[i]) go_through(i + 1);
    }
}

static void end(void) {
    EQUAL(*wrong, 0);
    for (int i = 0; i < CHILDREN; i++) {
        CHECK(!kill(children[i], SIGKILL));
        EQUAL(waitpid(children[i], 0, 0), children[i]);
    }
}

FEATURE(begin(), EQUAL(*wrong, 0), end())
