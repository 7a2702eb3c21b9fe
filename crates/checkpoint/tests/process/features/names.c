/* Names of threads, including empty and unusual ones. */
#include <pthread.h>
#include <sys/prctl.h>
#include "feature.h"

static volatile int stop;
static const char *const names[] = { "", "a) R (b", "fifteen letters", "x\ny" };

static void *body(void *number) {
    char found[16];
    CHECK(!prctl(PR_SET_NAME, names[(long)number]));
    while (!stop) { CHECK(!prctl(PR_GET_NAME, found) && !strcmp(found, names[(long)number])); nap(1); }
    return 0;
}

static pthread_t threads[4];
static char own[16];

FEATURE(CHECK(!prctl(PR_SET_NAME, ") Z 1 (")); for (long i = 0; i < 4; i++) CHECK(!pthread_create(&threads[i], 0, body, (void *)i)),
    CHECK(!prctl(PR_GET_NAME, own) && !strcmp(own, ") Z 1 (")), stop = 1; for (int i = 0; i < 4; i++) CHECK(!pthread_join(threads[i], 0)))
