/* The vDSO: its functions stay at their addresses, and answer. */
#include <sched.h>
#include <sys/auxv.h>
#include <sys/time.h>
#include "feature.h"

static unsigned long vdso;

static void check(void) {
    struct timeval time;
    unsigned cpu, node;
    EQUAL(getauxval(AT_SYSINFO_EHDR), vdso);
    CHECK(!memcmp((char *)vdso, "\177ELF", 4));
    CHECK(!gettimeofday(&time, 0) && time.tv_sec > 1000000000);
    CHECK(!getcpu(&cpu, &node));
}

FEATURE(vdso = getauxval(AT_SYSINFO_EHDR), check(), )
