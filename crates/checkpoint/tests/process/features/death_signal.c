/* PR_SET_PDEATHSIG: the child gets its signal when its parent ends after the move, and not before. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include "feature.h"

static volatile int *seen;
static volatile int end;
static pid_t middle;
static void on(int signal) { (void)signal; *seen = 1; }

static void begin(void) {
    seen = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK((middle = fork()) >= 0);
    if (!middle) {
        if (!fork()) {
            signal(SIGUSR2, on);
            prctl(PR_SET_PDEATHSIG, SIGUSR2);
            seen[1] = 1;
            while (!*seen) nap(1);
            _exit(0);
        }
        for (;;) pause();
    }
    while (!seen[1]) nap(1);
}

FEATURE(begin(), EQUAL(*seen, 0), CHECK(!kill(middle, SIGKILL)); CHECK(waitpid(middle, 0, 0) == middle); while (!*seen) nap(1))
