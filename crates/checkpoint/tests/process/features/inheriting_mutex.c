/* A mutex with priority inheritance, which stores the owner's thread ID for the kernel, held and waited for while the
 * program is moved. */
#include <pthread.h>
#include "feature.h"

static pthread_mutex_t mutex;
static volatile long stop, turns[2], inside;
static pthread_t threads[2];

static void *body(void *number) {
    while (!stop) {
        CHECK(!pthread_mutex_lock(&mutex));
        EQUAL(inside++, 0);
        nap(3);
        EQUAL(--inside, 0);
        turns[(long)number]++;
        CHECK(!pthread_mutex_unlock(&mutex));
        nap(1);
    }
    return 0;
}

static void begin(void) {
    pthread_mutexattr_t how;
    CHECK(!pthread_mutexattr_init(&how) && !pthread_mutexattr_setprotocol(&how, PTHREAD_PRIO_INHERIT) && !pthread_mutex_init(&mutex, &how));
    for (long i = 0; i < 2; i++) CHECK(!pthread_create(&threads[i], 0, body, (void *)i));
}

FEATURE(begin(), for (long a = turns[0], b = turns[1]; a == turns[0] || b == turns[1];) nap(1), stop = 1; for (int i = 0; i < 2; i++) CHECK(!pthread_join(threads[i], 0)))
