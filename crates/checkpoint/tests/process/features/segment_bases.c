/* Segment bases set by arch_prctl: the thread pointer in fs, and gs, which programs use freely. */
#include <asm/prctl.h>
#include <pthread.h>
#include "feature.h"

static volatile int stop;
static volatile long cells[2] = { 4711, 4712 };

static long at_gs(void) { long found; __asm__ volatile("mov %%gs:0, %0" : "=r"(found)); return found; }

static void *body(void *unused) {
    CHECK(!syscall(SYS_arch_prctl, ARCH_SET_GS, &cells[1]));
    while (!stop) { EQUAL(at_gs(), 4712); nap(1); }
    return unused;
}

static pthread_t thread;

FEATURE(CHECK(!syscall(SYS_arch_prctl, ARCH_SET_GS, &cells[0])); CHECK(!pthread_create(&thread, 0, body, 0)), EQUAL(at_gs(), 4711), stop = 1; CHECK(!pthread_join(thread, 0)))
