/* The vDSO differs at each host, simulated by a change of a byte that nothing reads. The functions of the old vDSO stay
 * at their addresses, and answer as system calls do, to several threads. */
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/time.h>
#include "feature.h"

static unsigned long vdso, bytes, function;
static int changes;
static volatile int ended;

/* Follows the code at a function's old address: either the function itself, or a chain of jumps, each followed by its
 * target address. */
static unsigned long leads_to(unsigned long at, int *jumps) {
    const unsigned char *code = (void *)at;
    for (*jumps = 0; !memcmp(code, "\xff\x25\0\0\0\0", 6); code = *(void **)(code + 6)) ++*jumps;
    return (unsigned long)code;
}

/* Makes the vDSO differ from the one that the kernel gives to other processes. */
static void change(unsigned long base) {
    CHECK(!memcmp((char *)base, "\177ELF", 4));
    CHECK(!mprotect((void *)base, bytes, PROT_READ | PROT_WRITE | PROT_EXEC));
    ++((char *)base)[EI_NIDENT - 1];
    CHECK(!mprotect((void *)base, bytes, PROT_READ | PROT_EXEC));
    changes++;
}

static void find(void) {
    const ElfW(Sym) *symbols = 0;
    const char *strings = 0;
    vdso = getauxval(AT_SYSINFO_EHDR);
    const ElfW(Ehdr) *head = (void *)vdso;
    const ElfW(Phdr) *parts = (void *)(vdso + head->e_phoff);
    bytes = (parts[0].p_memsz + 4095) & ~4095ul;
    for (int i = 0; i < head->e_phnum; i++) {
        if (parts[i].p_type != PT_DYNAMIC) continue;
        for (const ElfW(Dyn) *entry = (void *)(vdso + parts[i].p_offset); entry->d_tag; entry++) {
            if (entry->d_tag == DT_SYMTAB) symbols = (void *)(vdso + entry->d_un.d_ptr);
            if (entry->d_tag == DT_STRTAB) strings = (void *)(vdso + entry->d_un.d_ptr);
        }
    }
    CHECK(symbols && strings);
    for (int i = 1; !function; i++)
        if (!strcmp(strings + symbols[i].st_name, "__vdso_clock_gettime")) function = symbols[i].st_value;
    change(vdso);
}

static int before(struct timespec a, struct timespec b) {
    return a.tv_sec < b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec <= b.tv_nsec);
}

static void answers(void) {
    static const clockid_t clocks[] = { CLOCK_MONOTONIC, CLOCK_MONOTONIC_RAW, CLOCK_MONOTONIC_COARSE, CLOCK_BOOTTIME, CLOCK_REALTIME_COARSE };
    for (int i = 0; i < 5; i++) {
        struct timespec first, now, last, step;
        CHECK(!syscall(SYS_clock_gettime, clocks[i], &first));
        CHECK(!clock_gettime(clocks[i], &now));
        CHECK(!syscall(SYS_clock_gettime, clocks[i], &last));
        CHECK(before(first, now) && before(now, last));
        CHECK(!clock_getres(clocks[i], &step) && !step.tv_sec && step.tv_nsec);
    }
    struct timeval now;
    long first = syscall(SYS_time, 0), middle = time(0), last = syscall(SYS_time, 0);
    CHECK(first <= middle && middle <= last);
    CHECK(!gettimeofday(&now, 0) && now.tv_sec >= first);
    unsigned cpu, node;
    CHECK(!getcpu(&cpu, &node) && cpu < 8192);
}

static void *asks(void *nothing) {
    while (!ended) answers();
    return nothing;
}

static void check(void) {
    int jumps;
    EQUAL(getauxval(AT_SYSINFO_EHDR), vdso);
    unsigned long code = leads_to(vdso + function, &jumps);
    CHECK(jumps == changes || jumps == changes - 1);
    if (jumps == changes) change(code - function);
    answers();
}

static pthread_t threads[3];

static void begin(void) {
    find();
    for (int i = 0; i < 3; i++) CHECK(!pthread_create(threads + i, 0, asks, 0));
}

static void end(void) {
    ended = 1;
    for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], 0));
    /* Once at the beginning, and once at each of the two hosts that the program moved to. */
    EQUAL(changes, 3);
}

FEATURE(begin(), check(), end())
