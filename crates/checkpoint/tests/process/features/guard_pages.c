/* Guard pages (MADV_GUARD_INSTALL), also in shared memory, in a file, and below a thread's stack: touching one is still
 * a fault. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include "feature.h"

#define INSTALL 102
#define REMOVE 103
#define PAGES 64

static char *private, *shared, *file;
static sigjmp_buf back;
static void *volatile fault;
static long turns;

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    fault = info->si_addr;
    siglongjmp(back, 1);
}

static void *waits(void *unused) {
    for (;;) pause();
    return unused;
}

static void begin(void) {
    private = anonymous(PAGES * 4096, PROT_READ | PROT_WRITE, 0);
    shared = mmap(0, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int self = open("/proc/self/exe", O_RDONLY);
    file = mmap(0, 4096, PROT_READ, MAP_PRIVATE, self, 0);
    CHECK(shared != MAP_FAILED && file != MAP_FAILED && !close(self));
    for (int i = 0; i < PAGES; i++) private[i * 4096] = shared[i * 4096] = i;
    for (int i = 1; i < PAGES; i += 4) {
        NEEDS(madvise(private + i * 4096, 8192, INSTALL));
        NEEDS(madvise(shared + i * 4096, 4096, INSTALL));
    }
    NEEDS(madvise(file, 4096, INSTALL));
    /* A stack as glibc 2.42 and newer makes them. */
    char *stack = anonymous(1 << 20, PROT_READ | PROT_WRITE, MAP_NORESERVE | MAP_STACK);
    CHECK(!madvise(stack, 4096, INSTALL));
    pthread_attr_t how;
    pthread_t thread;
    CHECK(!pthread_attr_init(&how) && !pthread_attr_setstack(&how, stack + 4096, (1 << 20) - 4096));
    CHECK(!pthread_create(&thread, &how, waits, 0));
    struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
    CHECK(!sigaction(SIGSEGV, &action, 0));
}

static void touch(volatile char *at, int faults, int value) {
    fault = 0;
    if (!sigsetjmp(back, 1)) EQUAL(*at, value);
    EQUAL(fault, faults ? at : 0);
}

static void check(void) {
    /* The last page is a guard page in every second check. */
    char *last = private + (PAGES - 1) * 4096;
    for (int i = 0; i < PAGES - 1; i++) {
        touch(private + i * 4096, i % 4 == 1 || i % 4 == 2, i);
        touch(shared + i * 4096, i % 4 == 1, i);
    }
    touch(file, 1, 0);
    CHECK(!madvise(last, 4096, turns++ % 2 ? REMOVE : INSTALL));
    touch(last, turns % 2, 0);
    if (turns % 2 == 0) *last = 0;
}

FEATURE(begin(), check(), for (int i = 1; i < PAGES; i += 4) { CHECK(!madvise(private + i * 4096, 8192, REMOVE)); private[i * 4096] = 7; })
