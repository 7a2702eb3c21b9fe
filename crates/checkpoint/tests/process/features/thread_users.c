/* Threads of one process that run as different users, as in file servers. */
#include <pthread.h>
#include <sys/stat.h>
#include "feature.h"

static volatile int stop;

static void *body(void *number) {
    long user = 1000 + (long)number;
    CHECK(!syscall(SYS_setresuid, user, user, user));
    while (!stop) { EQUAL(geteuid(), user); nap(1); }
    return 0;
}

static pthread_t threads[3];

FEATURE(CHECK(!chmod(folder, 0777)); for (long i = 0; i < 3; i++) CHECK(!pthread_create(&threads[i], 0, body, (void *)i)), EQUAL(getuid(), 0),
    stop = 1; for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], 0)))
