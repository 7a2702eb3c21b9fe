/* Threads that wait in the kernel in many ways; no call may report that its thread was stopped. */
#include "self.h"
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/select.h>

static volatile int stop;
static sem_t semaphore;

#define LOOP(name, ...) static void *name(void *unused) { while (!stop) { __VA_ARGS__; } return unused; }
LOOP(sleeping, struct timespec t = { 0, 3000000 }; EQUAL(nanosleep(&t, 0), 0))
LOOP(sleeping_until, struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); t.tv_nsec += 3000000;
    if (t.tv_nsec >= 1000000000) { t.tv_nsec -= 1000000000; t.tv_sec++; }
    EQUAL(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0), 0))
LOOP(polling, EQUAL(poll(0, 0, 3), 0))
LOOP(selecting, struct timeval t = { 0 }; t.tv_usec = 3000; EQUAL(select(0, 0, 0, 0, &t), 0))
LOOP(polling_masked, struct timespec t = { 0, 3000000 }; sigset_t none; sigemptyset(&none); EQUAL(ppoll(0, 0, &t, &none), 0))
LOOP(waiting_for_signal, struct timespec t = { 0, 3000000 }; sigset_t one; sigemptyset(&one); sigaddset(&one, SIGRTMAX);
    CHECK(sigtimedwait(&one, 0, &t) == -1 && errno == EAGAIN))
LOOP(locking, struct timespec t; clock_gettime(CLOCK_REALTIME, &t); t.tv_nsec += 3000000;
    if (t.tv_nsec >= 1000000000) { t.tv_nsec -= 1000000000; t.tv_sec++; }
    CHECK(sem_timedwait(&semaphore, &t) == -1 && errno == ETIMEDOUT))
LOOP(yielding, getppid())

static void *epolling(void *unused) {
    int set = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event;
    CHECK(set >= 0);
    while (!stop) EQUAL(epoll_wait(set, &event, 1, 3), 0);
    close(set);
    return unused;
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    CHECK(!sem_init(&semaphore, 0, 0));
    void *(*bodies[])(void *) = { sleeping, sleeping_until, polling, selecting, polling_masked, waiting_for_signal, locking, yielding,
        /* The last entry, because a test without descriptors leaves it out. */
        epolling };
    int threads = getenv("NO_EPOLL") ? 8 : 9;
    pthread_t ids[9];
    for (int i = 0; i < threads; i++) CHECK(!pthread_create(&ids[i], 0, bodies[i], 0));
    ready();
    while (go_on()) {
        nap(2);
        beat();
    }
    stop = 1;
    for (int i = 0; i < threads; i++) CHECK(!pthread_join(ids[i], 0));
    return passed();
}
