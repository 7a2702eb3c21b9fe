/* A robust mutex: when its owner dies after the move, the next thread gets it with EOWNERDEAD. */
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "feature.h"

static struct shared { pthread_mutex_t mutex; volatile int held, end; } *shared;
static pid_t child;

static void begin(void) {
    pthread_mutexattr_t how;
    shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED && !pthread_mutexattr_init(&how));
    CHECK(!pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST) && !pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED));
    CHECK(!pthread_mutex_init(&shared->mutex, &how));
    child = fork();
    if (!child) {
        pthread_mutex_lock(&shared->mutex);
        shared->held = 1;
        while (!shared->end) nap(1);
        _exit(0);
    }
    while (!shared->held) nap(1);
}

FEATURE(begin(), EQUAL(pthread_mutex_trylock(&shared->mutex), EBUSY), shared->end = 1; EQUAL(pthread_mutex_lock(&shared->mutex), EOWNERDEAD); CHECK(waitpid(child, 0, 0) == child))
