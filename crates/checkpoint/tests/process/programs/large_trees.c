/* Many processes with many threads. Each thread has its own name, alternate stack, signal mask, timer slack and
 * thread-local memory, and checks them all the time. Each process also makes short-lived threads. Arguments: processes,
 * threads of each, mappings of the first. */
#include "self.h"
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { STOP, BEATS };
static volatile long *board;
static __thread long local;
static pthread_barrier_t made;

static void compare(long number, const char *stack, const char *name, long tid) {
    stack_t found;
    char called[16];
    sigset_t mask;
    EQUAL(local, number);
    EQUAL(syscall(SYS_gettid), tid);
    CHECK(!sigaltstack(0, &found) && found.ss_sp == stack && !(found.ss_flags & SS_DISABLE));
    CHECK(!prctl(PR_GET_NAME, called) && !strcmp(called, name));
    CHECK(!pthread_sigmask(SIG_BLOCK, 0, &mask));
    for (int signal = 0; signal < 8; signal++) EQUAL(sigismember(&mask, SIGRTMIN + 4 + signal), number >> signal & 1);
    EQUAL(prctl(PR_GET_TIMERSLACK), 60000 + number);
}

static void *standing(void *argument) {
    long number = (long)argument, tid = syscall(SYS_gettid);
    char name[16], *memory = mmap(0, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    stack_t stack = { .ss_sp = memory, .ss_size = 65536 };
    CHECK(!sigaltstack(&stack, 0));
    snprintf(name, sizeof name, "one-%ld", number);
    CHECK(!prctl(PR_SET_NAME, name) && !prctl(PR_SET_TIMERSLACK, 60000 + number));
    sigset_t mask;
    sigemptyset(&mask);
    for (int signal = 0; signal < 8; signal++) if (number >> signal & 1) sigaddset(&mask, SIGRTMIN + 4 + signal);
    CHECK(!pthread_sigmask(SIG_BLOCK, &mask, 0));
    local = number;
    pthread_barrier_wait(&made);
    while (!board[STOP]) {
        compare(number, memory, name, tid);
        nap(50 + number % 7);
    }
    return argument;
}

static void *passing(void *argument) { return argument; }

static void one_process(long threads, long place) {
    pthread_t *all = malloc(threads * sizeof *all), brief;
    pthread_barrier_init(&made, 0, threads + 1);
    for (long i = 0; i < threads; i++) CHECK(!pthread_create(&all[i], 0, standing, (void *)(i + 1)));
    pthread_barrier_wait(&made);
    do {
        void *result;
        CHECK(!pthread_create(&brief, 0, passing, all));
        CHECK(!pthread_join(brief, &result) && result == all);
        board[BEATS + place]++;
        nap(5);
    } while (!board[STOP]);
    for (long i = 0; i < threads; i++) {
        void *result;
        CHECK(!pthread_join(all[i], &result));
        EQUAL(result, i + 1);
    }
    _exit(21);
}

int main(int count, char **words) {
    CHECK(count >= 4);
    folder = words[1];
    long processes = atol(words[2]), threads = atol(words[3]), mappings = count > 4 ? atol(words[4]) : 0;
    board = mmap(0, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    for (long i = 1; i < processes; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) one_process(threads, i);
    }
    char *many = mmap(0, (mappings + 1) * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(many != MAP_FAILED);
    for (long i = 0; i < mappings; i += 2) CHECK(!mprotect(many + i * 4096, 4096, PROT_READ));
    pthread_t *all = malloc(threads * sizeof *all), brief;
    pthread_barrier_init(&made, 0, threads + 1);
    for (long i = 0; i < threads; i++) CHECK(!pthread_create(&all[i], 0, standing, (void *)(i + 1)));
    pthread_barrier_wait(&made);
    for (long i = 1; i < processes; i++) while (!board[BEATS + i]) nap(1);
    ready();
    while (go_on()) {
        void *result;
        CHECK(!pthread_create(&brief, 0, passing, all) && !pthread_join(brief, &result) && result == all);
        for (long i = 1; i < processes; i++) {
            long seen = board[BEATS + i];
            while (board[BEATS + i] == seen) nap(1);
        }
        beat();
        nap(2);
    }
    board[STOP] = 1;
    for (long i = 1; i < processes; i++) {
        int status;
        CHECK(wait(&status) > 0 && WIFEXITED(status));
        EQUAL(WEXITSTATUS(status), 21);
    }
    for (long i = 0; i < threads; i++) {
        void *result;
        CHECK(!pthread_join(all[i], &result));
        EQUAL(result, i + 1);
    }
    return passed();
}
