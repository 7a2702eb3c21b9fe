/* Inaccessible pages between accessible ones: touching one is still a fault, at the right address. */
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include "feature.h"

static char *memory;
static sigjmp_buf back;
static void *volatile fault;

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    fault = info->si_addr;
    siglongjmp(back, 1);
}

static void begin(void) {
    memory = anonymous(64 * 4096, PROT_READ | PROT_WRITE, 0);
    for (int i = 0; i < 64; i++) memory[i * 4096] = i;
    for (int i = 0; i < 64; i += 2) CHECK(!mprotect(memory + i * 4096, 4096, i % 4 ? PROT_NONE : PROT_READ));
    struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
    CHECK(!sigaction(SIGSEGV, &action, 0));
}

static void check(void) {
    for (int i = 0; i < 64; i++) {
        volatile char *at = memory + i * 4096;
        fault = 0;
        if (!sigsetjmp(back, 1)) *at = i;
        EQUAL(fault, i % 2 ? 0 : at);
        fault = 0;
        if (!sigsetjmp(back, 1)) EQUAL(*at, i);
        EQUAL(fault, i % 4 == 2 ? at : 0);
    }
}

FEATURE(begin(), check(), for (int i = 2; i < 64; i += 4) { CHECK(!mprotect(memory + i * 4096, 4096, PROT_READ)); EQUAL(memory[i * 4096], i); })
