/* no_new_privs, set for one thread only. */
#include <pthread.h>
#include <sys/prctl.h>
#include "feature.h"

static volatile int stop;
static void *body(void *unused) {
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    while (!stop) { EQUAL(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1); nap(1); }
    return unused;
}
static pthread_t thread;

FEATURE(CHECK(!pthread_create(&thread, 0, body, 0)), EQUAL(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 0), stop = 1; CHECK(!pthread_join(thread, 0)))
