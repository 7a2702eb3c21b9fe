/* rseq: a sequence that is stopped in the middle always goes to its abort handler. The sequence here ends in no other
 * way. */
#include <linux/rseq.h>
#include <pthread.h>
#include <signal.h>
#include <sys/rseq.h>
#include <sys/time.h>
#include "feature.h"

static volatile long aborts, stop;

static void on(int signal) { (void)signal; }

/* Loops inside a sequence until the kernel aborts the sequence. */
static void *body(void *unused) {
    struct rseq *area = (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);
    while (!stop) {
        __asm__ volatile(
            ".pushsection .data.rel, \"aw\"; .balign 32; 7: .long 0, 0; .quad 1f, 2f - 1f, 4f; .popsection\n"
            "lea 7b(%%rip), %%rax; mov %%rax, %0\n"
            "1: pause; jmp 1b\n"
            "2: ud2; .byte 0x0f, 0xb9, 0x3d; .long 0x53053053\n"
            "4:\n"
            : "=m"(area->rseq_cs) : : "rax", "memory");
        aborts++;
    }
    return unused;
}

static pthread_t thread;

static void begin(void) {
    if (!__rseq_size) skip("rseq");
    struct sigaction action = { .sa_handler = on, .sa_flags = SA_RESTART };
    CHECK(!sigaction(SIGUSR1, &action, 0));
    CHECK(!pthread_create(&thread, 0, body, 0));
    nap(5);
}

/* A signal aborts the sequence too, but only if the kernel still knows that the thread is inside. */
FEATURE(begin(), long before = aborts; while (aborts == before) { CHECK(!pthread_kill(thread, SIGUSR1)); nap(1); }, stop = 1; CHECK(!pthread_kill(thread, SIGUSR1)); CHECK(!pthread_join(thread, 0)))
