/* seccomp filters that forbid nearly all system calls, including calls that a move needs. */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include "feature.h"

static void begin(void) {
    static const int allowed[] = { SYS_symlink, SYS_rename, SYS_getpid, SYS_access, SYS_nanosleep, SYS_clock_nanosleep, SYS_exit_group, SYS_getppid, SYS_restart_syscall };
    struct sock_filter code[32] = { BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0) };
    int length = 1, count = sizeof allowed / sizeof *allowed;
    for (int i = 0; i < count; i++) code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], count - i, 0);
    code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOTTY);
    code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = { length, code };
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_LOG, &program));
}

FEATURE(begin(), CHECK(syscall(SYS_mmap, 0, 4096, 0, 0x22, -1, 0) == -1 && errno == ENOTTY); CHECK(syscall(SYS_rt_sigreturn + 1000) == -1 && errno == ENOTTY), )
