/* A handler of SIGCHLD runs once for each child that ends, and at no other time; ended children stay zombies until
 * waited for. */
#include <signal.h>
#include <sys/wait.h>
#include "feature.h"

static volatile int hits, ended;
static void on(int signal) { (void)signal; hits++; }

static void make(void) {
    int before = hits;
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) _exit(3);
    while (hits == before) nap(1);
    ended++;
}

static void begin(void) {
    signal(SIGCHLD, on);
    for (int i = 0; i < 3; i++) make();
}

FEATURE(begin(), EQUAL(hits, ended), int status; EQUAL(hits, ended); for (int i = 0; i < 3; i++) { CHECK(wait(&status) > 0); EQUAL(status, 3 << 8); } CHECK(wait(&status) == -1))
