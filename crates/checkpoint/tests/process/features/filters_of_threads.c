/* seccomp filters shared by two threads: the kernel can still synchronize them (TSYNC), which it does only if one
 * thread's filters descend from the other's. */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/prctl.h>
#include "feature.h"

static volatile int stop;

static long refuse(int call, int flags) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EXDEV),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { 4, code };
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
}

static void are_refused(void) {
    CHECK(syscall(SYS_swapon, 0, 0) == -1 && errno == EXDEV);
    CHECK(syscall(SYS_swapoff, 0) == -1 && errno == EXDEV);
}

static void *works(void *unused) {
    while (!stop) {
        are_refused();
        nap(1);
    }
    CHECK(syscall(SYS_acct, 0) == -1 && errno == EXDEV);
    return unused;
}

static pthread_t thread;

static void begin(void) {
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    EQUAL(refuse(SYS_swapon, 0), 0);
    EQUAL(refuse(SYS_swapoff, 0), 0);
    CHECK(!pthread_create(&thread, 0, works, 0));
}

static void end(void) {
    EQUAL(refuse(SYS_acct, SECCOMP_FILTER_FLAG_TSYNC), 0);
    stop = 1;
    CHECK(!pthread_join(thread, 0));
}

FEATURE(begin(), are_refused(), end())
