/* Children made by clone with an exit signal other than SIGCHLD, or with none. */
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include "feature.h"

static volatile int hits, end;
static pid_t loud, silent;
static void on(int signal) { (void)signal; hits++; }

static pid_t make(int signal) {
    pid_t child = syscall(SYS_clone, signal, 0, 0, 0, 0);
    CHECK(child >= 0);
    if (!child) for (;;) pause();
    return child;
}

FEATURE(signal(SIGUSR1, on); loud = make(SIGUSR1); silent = make(0), int status; CHECK(waitpid(loud, &status, WNOHANG) == -1 && errno == ECHILD); EQUAL(waitpid(loud, &status, __WALL | WNOHANG), 0),
    int how; kill(silent, SIGKILL); EQUAL(waitpid(silent, &how, __WALL), silent); EQUAL(hits, 0); kill(loud, SIGKILL); EQUAL(waitpid(loud, &how, __WALL), loud); EQUAL(hits, 1))
