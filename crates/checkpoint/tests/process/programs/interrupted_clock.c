/* Signals arrive again and again while the program reads the clock, mostly inside the vDSO; handlers take most of the
 * time. */
#include <signal.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/time.h>
#include "self.h"

static volatile sig_atomic_t handled;

/* The timer fires once: if the next signal were pending already, the program would make no progress in between. */
static void interrupt_soon(void) {
    struct itimerval soon = { { 0, 0 }, { 0, 300 } };
    CHECK(!setitimer(ITIMER_REAL, &soon, 0));
}

static void handler(int signal) {
    handled++;
    nap(3);
    interrupt_soon();
}

static int before(struct timespec a, struct timespec b) {
    return a.tv_sec < b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec <= b.tv_nsec);
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    /* Makes the vDSO differ from that of other processes, by a byte that nothing reads. */
    char *vdso = (char *)getauxval(AT_SYSINFO_EHDR);
    CHECK(!mprotect(vdso, 8192, PROT_READ | PROT_WRITE | PROT_EXEC));
    vdso[15]++;
    CHECK(!mprotect(vdso, 8192, PROT_READ | PROT_EXEC));
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART };
    CHECK(!sigaction(SIGALRM, &action, 0));
    interrupt_soon();
    ready();
    int last = 0;
    do {
        struct timespec first, now, end;
        CHECK(!syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &first));
        for (int i = 0; i < 200; i++) CHECK(!clock_gettime(CLOCK_MONOTONIC, &now));
        CHECK(!syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &end));
        CHECK(before(first, now) && before(now, end));
        if (handled != last) beat();
        last = handled;
    } while (go_on());
    return passed();
}
