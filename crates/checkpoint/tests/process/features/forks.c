/* Children are born and end all the time, with a copy of everything that their parent has. */
#include <sys/mman.h>
#include <sys/wait.h>
#include "feature.h"

static unsigned char *memory;

static void check(void) {
    static int rounds;
    pid_t children[3], self = getpid();
    rounds++;
    memory[rounds % 65536] = rounds;
    unsigned long wanted = sum(memory, 65536);
    for (int i = 0; i < 3; i++) {
        CHECK((children[i] = fork()) >= 0);
        if (!children[i]) { nap(i * 2); _exit(getppid() == self && sum(memory, 65536) == wanted ? 40 + i : 1); }
    }
    for (int i = 0; i < 3; i++) { int status; EQUAL(waitpid(children[i], &status, 0), children[i]); EQUAL(status, (40 + i) << 8); }
}

FEATURE(memory = anonymous(65536, PROT_READ | PROT_WRITE, 0); fill(memory, 65536, 1), check(), )
