/* Does one thing that cannot move, and says so. */
#include "self.h"
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/wait.h>

static void *map(int file, int flags, size_t bytes, off_t offset) {
    void *place = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, file, offset);
    if (place == MAP_FAILED) fail(__LINE__, "mmap");
    return place;
}

static void own_uring(void) {
    struct io_uring_params parameters = { 0 };
    int ring = syscall(SYS_io_uring_setup, 4, &parameters);
    CHECK(ring >= 0);
    map(ring, MAP_SHARED | MAP_POPULATE, 4096, IORING_OFF_SQ_RING);
    close(ring);
}

static void aio(void) {
    unsigned long context = 0;
    CHECK(!syscall(SYS_io_setup, 8, &context));
}

static void deleted(void) {
    char path[512];
    snprintf(path, sizeof path, "%s/library", folder);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0 && !ftruncate(file, 4096));
    map(file, MAP_PRIVATE, 4096, 0);
    close(file);
    CHECK(!unlink(path));
}

static void system_v(void) {
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    CHECK(id >= 0 && shmat(id, 0, 0) != (void *)-1 && !shmctl(id, IPC_RMID, 0));
}

static void traced(void) {
    pid_t child = fork();
    if (!child) for (;;) pause();
    CHECK(!ptrace(PTRACE_SEIZE, child, 0, PTRACE_O_EXITKILL));
}

static void strict(void) {
    if (fork()) return;
    prctl(PR_SET_PDEATHSIG, 9);
    CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
    for (;;) __asm__ volatile("pause");
}

static int spin(void *unused) {
    (void)unused;
    prctl(PR_SET_PDEATHSIG, 9);
    for (;;) pause();
    return 0;
}

static void shares_memory(void) {
    static char stack[65536];
    CHECK(clone(spin, stack + sizeof stack, CLONE_VM | SIGCHLD, 0) > 0);
}

static void first_thread_ends(void);

int main(int count, char **words) {
    CHECK(count == 3);
    folder = words[1];
    const char *what = words[2];
    prctl(PR_SET_PDEATHSIG, 9);
    if (!strcmp(what, "io_uring")) own_uring();
    else if (!strcmp(what, "aio")) aio();
    else if (!strcmp(what, "deleted")) deleted();
    else if (!strcmp(what, "system_v")) system_v();
    else if (!strcmp(what, "traced")) traced();
    else if (!strcmp(what, "strict")) strict();
    else if (!strcmp(what, "shares_memory")) shares_memory();
    else if (!strcmp(what, "network")) CHECK(!unshare(CLONE_NEWNET));
    else if (!strcmp(what, "mounts")) CHECK(!unshare(CLONE_NEWNS));
    else if (!strcmp(what, "names")) CHECK(!unshare(CLONE_NEWUTS));
    else if (!strcmp(what, "root")) { ready(); char path[512]; snprintf(path, sizeof path, "%s", folder); CHECK(!chroot(path)); for (;;) pause(); }
    else if (!strcmp(what, "private_memfd")) map(memfd_create("private", 0), MAP_PRIVATE, 4096, 0);
    else if (!strcmp(what, "secret")) { int s = syscall(SYS_memfd_secret, 0); if (s >= 0) { CHECK(!ftruncate(s, 4096)); map(s, MAP_SHARED, 4096, 0); } else errno = 0; }
    else if (!strcmp(what, "first_thread")) first_thread_ends();
    else if (!strcmp(what, "outsider")) {
        char *shared = map(-1, MAP_SHARED | MAP_ANONYMOUS, 4096, 0);
        *shared = 1;
        /* The one that is to be moved is the child: the parent is the outsider. */
        pid_t child = fork();
        if (child) {
            char text[32];
            snprintf(text, sizeof text, "%d", child);
            leave("child", text);
            for (;;) pause();
        }
        prctl(PR_SET_PDEATHSIG, 9);
        char path[512];
        snprintf(path, sizeof path, "%s/child", folder);
        while (readlink(path, path + 256, 32) < 0) nap(1);
    } else fail(__LINE__, "what is %s", what);
    ready();
    for (;;) pause();
}

#include <pthread.h>

static void *second(void *unused) {
    nap(50);
    ready();
    for (;;) pause();
    return unused;
}

static void first_thread_ends(void) {
    pthread_t thread;
    CHECK(!pthread_create(&thread, 0, second, 0));
    pthread_exit(0);
}
