/* PR_SET_TSC: reading the time stamp counter is a fault. */
#include <setjmp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <x86intrin.h>
#include "feature.h"

static sigjmp_buf back;
static volatile int faults;
static void on(int signal) { (void)signal; faults++; siglongjmp(back, 1); }

static void check(void) {
    int before = faults, mode;
    if (!sigsetjmp(back, 1)) __rdtsc();
    EQUAL(faults, before + 1);
    CHECK(!prctl(PR_GET_TSC, &mode));
    EQUAL(mode, PR_TSC_SIGSEGV);
}

FEATURE(signal(SIGSEGV, on); CHECK(!prctl(PR_SET_TSC, PR_TSC_SIGSEGV)), check(), )
