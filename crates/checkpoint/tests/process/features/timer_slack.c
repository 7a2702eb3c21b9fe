/* PR_SET_TIMERSLACK of each thread. */
#include <pthread.h>
#include <sys/prctl.h>
#include "feature.h"

static volatile int stop;
static void *body(void *unused) { CHECK(!prctl(PR_SET_TIMERSLACK, 77777)); while (!stop) { EQUAL(prctl(PR_GET_TIMERSLACK), 77777); nap(1); } return unused; }
static pthread_t thread;

FEATURE(CHECK(!prctl(PR_SET_TIMERSLACK, 1)); CHECK(!pthread_create(&thread, 0, body, 0)), EQUAL(prctl(PR_GET_TIMERSLACK), 1), stop = 1; CHECK(!pthread_join(thread, 0)))
