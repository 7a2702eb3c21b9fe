/* seccomp filters; one thread has one filter more than the others. */
#include "self.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/prctl.h>

static volatile int stop;

static void refuse(int call, int error) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { 4, code };
    CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
}

static void *stricter(void *unused) {
    refuse(SYS_getppid, EXDEV);
    while (!stop) {
        CHECK(syscall(SYS_getppid) == -1 && errno == EXDEV);
        CHECK(syscall(SYS_personality, 0xffffffff) == -1 && errno == ENOTTY);
        nap(1);
    }
    return unused;
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    refuse(SYS_personality, ENOTTY);
    refuse(SYS_userfaultfd, EPERM);
    refuse(SYS_munmap, EPERM);
    pthread_t thread;
    CHECK(!pthread_create(&thread, 0, stricter, 0));
    ready();
    while (go_on()) {
        CHECK(syscall(SYS_personality, 0xffffffff) == -1 && errno == ENOTTY);
        CHECK(syscall(SYS_userfaultfd, 0) == -1 && errno == EPERM);
        CHECK(syscall(SYS_getppid) >= 0);
        beat();
        nap(1);
    }
    stop = 1;
    CHECK(!pthread_join(thread, 0));
    return passed();
}
