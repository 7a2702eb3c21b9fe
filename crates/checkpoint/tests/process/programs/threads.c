/* Many threads: their IDs, thread-local memory, vector registers, mutexes, condition variables, stacks. */
#include "self.h"
#include <immintrin.h>
#include <pthread.h>
#include <sys/prctl.h>

#define THREADS 12
static __thread long local = 77;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static volatile int stop;
static long turn, turns, protected;

__attribute__((target("avx2"))) static void *vectors(void *number) {
    long tid = syscall(SYS_gettid);
    __m256i value = _mm256_set1_epi64x((long)number * 1000003), one = _mm256_set1_epi64x(1);
    long expected = (long)number * 1000003;
    double x = 1.0;
    while (!stop) {
        for (int i = 0; i < 10000; i++) {
            value = _mm256_add_epi64(value, one);
            __asm__ volatile("" : "+x"(value));
            x = x * 1.5;
            if (x > 1e100) x = 1.0;
        }
        expected += 10000;
        long lanes[4];
        _mm256_storeu_si256((__m256i *)lanes, value);
        for (int i = 0; i < 4; i++) EQUAL(lanes[i], expected);
        EQUAL(syscall(SYS_gettid), tid);
        CHECK(x > 0);
        nap(1);
    }
    return number;
}

static void *taking_turns(void *number) {
    char name[16], found[16];
    snprintf(name, sizeof name, "turner-%ld", (long)number);
    CHECK(!prctl(PR_SET_NAME, name));
    local = 1000 + (long)number;
    while (!stop) {
        pthread_mutex_lock(&mutex);
        while (turn != (long)number && !stop) pthread_cond_wait(&condition, &mutex);
        turn = (turn + 1) % 4;
        turns++;
        pthread_cond_broadcast(&condition);
        pthread_mutex_unlock(&mutex);
        EQUAL(local, 1000 + (long)number);
        CHECK(!prctl(PR_GET_NAME, found) && !strcmp(name, found));
        nap(1);
    }
    return number;
}

static void *contending(void *number) {
    while (!stop) {
        pthread_mutex_lock(&mutex);
        long seen = ++protected;
        for (volatile int i = 0; i < 300; i++);
        EQUAL(protected, seen);
        pthread_mutex_unlock(&mutex);
    }
    return number;
}

static void *short_lived(void *number) {
    local++;
    EQUAL(local, 78);
    return number;
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) {
        void *(*body)(void *) = i < 4 ? taking_turns : i < 6 ? contending : vectors;
        CHECK(!pthread_create(&threads[i], 0, body, (void *)i));
    }
    ready();
    long before = 0;
    while (go_on()) {
        pthread_t brief;
        void *result;
        CHECK(!pthread_create(&brief, 0, short_lived, (void *)5));
        CHECK(!pthread_join(brief, &result) && result == (void *)5);
        nap(5);
        if (turns > before) beat();
        before = turns;
        EQUAL(local, 77);
    }
    stop = 1;
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&condition);
    pthread_mutex_unlock(&mutex);
    for (long i = 0; i < THREADS; i++) {
        void *result;
        CHECK(!pthread_join(threads[i], &result));
        EQUAL(result, i);
    }
    return passed();
}
