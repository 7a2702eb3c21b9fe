/* Does one thing that prevents a move, and reports it. */
#include "self.h"
#include <asm/ldt.h>
#include <linux/filter.h>
#include <linux/if_packet.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

static void *map(int file, int flags, size_t bytes, off_t offset) {
    void *place = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, file, offset);
    if (place == MAP_FAILED) fail(__LINE__, "mmap");
    return place;
}

/* Starts a keeper, which removes an object when the program ends, since the object would outlive the program. */
static void start_keeper(int id, char kind) {
    pid_t self = getpid();
    if (fork()) return;
    setsid();
    if (fork()) _exit(0);
    prctl(PR_SET_NAME, "keeper");
    while (!kill(self, 0)) nap(5);
    if (kind == 's') semctl(id, 0, IPC_RMID); else if (kind == 'h') shmctl(id, IPC_RMID, 0); else msgctl(id, IPC_RMID, 0);
    _exit(0);
}

static void map_io_uring(void) {
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

static void deleted_file(void) {
    char path[512];
    snprintf(path, sizeof path, "%s/library", folder);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0 && !ftruncate(file, 8192));
    /* Two mappings of one file, which must be reported once. */
    char *place = map(file, MAP_PRIVATE, 8192, 0);
    CHECK(!mprotect(place + 4096, 4096, PROT_READ));
    close(file);
    CHECK(!unlink(path));
}

/* The inner child's parent is this process after the reparenting, and its session belongs to a process in another
 * branch of the tree. */
static void other_branch(void) {
    CHECK(!prctl(PR_SET_CHILD_SUBREAPER, 1));
    if (fork()) return;
    if (fork()) for (;;) pause();
    setsid();
    if (!fork()) {
        if (!fork()) for (;;) pause();
        _exit(0);
    }
    wait(0);
    for (;;) pause();
}

static void partial_segment(void) {
    int id = shmget(IPC_PRIVATE, 8192, 0600);
    char *place = shmat(id, 0, 0);
    CHECK(id >= 0 && place != (void *)-1 && !shmctl(id, IPC_RMID, 0));
    CHECK(!munmap(place, 4096));
}

static void *segment(void) {
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    void *place = shmat(id, 0, 0);
    CHECK(id >= 0 && place != (void *)-1 && !shmctl(id, IPC_RMID, 0));
    return place;
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

static void *unshare_and_wait(void *what) {
    CHECK(!unshare(what ? CLONE_FS : CLONE_FILES));
    ready();
    for (;;) pause();
    return what;
}

/* A thread with its own working directory, or its own descriptors. */
static void thread_unshares(int directory) {
    pthread_t thread;
    CHECK(!pthread_create(&thread, 0, unshare_and_wait, directory ? "" : 0));
    for (;;) pause();
}

static void shared_directory(void) {
    pid_t child = syscall(SYS_clone, CLONE_FS | SIGCHLD, 0, 0, 0, 0);
    CHECK(child >= 0);
    if (!child) { prctl(PR_SET_PDEATHSIG, 9); for (;;) pause(); }
}

static void deleted_directory(void) {
    char path[600];
    snprintf(path, sizeof path, "%s/gone", folder);
    CHECK(!mkdir(path, 0700) && !chdir(path) && !rmdir(path));
}

/* Two siblings that share memory. */
static void siblings(void) {
    static char stacks[2][65536];
    if (!fork()) {
        prctl(PR_SET_PDEATHSIG, 9);
        CHECK(clone(spin, stacks[0] + 65536, CLONE_VM | CLONE_PARENT | SIGCHLD, 0) > 0);
        for (;;) pause();
    }
    nap(50);
}

static void semaphores(void) {
    int set = semget(IPC_PRIVATE, 1, 0600);
    struct sembuf up = { 0, 1, 0 };
    CHECK(set >= 0 && !semop(set, &up, 1));
    start_keeper(set, 's');
}

static void messages(void) {
    int queue = msgget(IPC_PRIVATE, 0600);
    struct { long kind; char text[8]; } message = { 1, "hello" };
    CHECK(queue >= 0 && !msgsnd(queue, &message, 8, 0));
    start_keeper(queue, 'm');
}

static void unattached_segment(void) {
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    CHECK(id >= 0);
    start_keeper(id, 'h');
}

/* A child in a namespace that applies only to children born later. */
static void child_in_namespace(int kind) {
    CHECK(!unshare(kind));
    if (fork()) return;
    prctl(PR_SET_PDEATHSIG, 9);
    for (;;) pause();
}

static void user_namespace(void) { CHECK(!unshare(CLONE_NEWUSER)); }
static void ipc_namespace(void) { CHECK(!unshare(CLONE_NEWIPC)); }
static void cgroup_namespace(void) { CHECK(!unshare(CLONE_NEWCGROUP)); }
static void pid_namespace(void) { child_in_namespace(CLONE_NEWPID); }
static void time_namespace(void) { child_in_namespace(CLONE_NEWTIME); }

static void speculation_control(void) {
    long control = prctl(PR_GET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, 0, 0, 0);
    if (control < 0 || !(control & PR_SPEC_PRCTL)) leave("skipped", "control of speculation");
    else CHECK(!prctl(PR_SET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, PR_SPEC_DISABLE, 0, 0));
}

static void protection_key(void) {
    int of = syscall(SYS_pkey_alloc, 0, 0);
    if (of < 0) leave("skipped", "protection keys");
    else CHECK(!syscall(SYS_pkey_mprotect, map(-1, MAP_PRIVATE | MAP_ANONYMOUS, 4096, 0), 4096, PROT_READ, of));
}

static void secret_memory(void) {
    int file = syscall(SYS_memfd_secret, 0);
    if (file < 0) return leave("skipped", "secret memory");
    CHECK(!ftruncate(file, 4096));
    map(file, MAP_SHARED, 4096, 0);
    close(file);
}

/* A packet ring: packets of the loopback device in mapped memory. */
static void packet_ring(void) {
    struct tpacket_req ring = { .tp_block_size = 4096, .tp_block_nr = 1, .tp_frame_size = 2048, .tp_frame_nr = 2 };
    int file = socket(AF_PACKET, SOCK_RAW, 0);
    CHECK(file >= 0 && !setsockopt(file, SOL_PACKET, PACKET_RX_RING, &ring, sizeof ring));
    map(file, MAP_SHARED, 4096, 0);
    close(file);
}

static void device(void) {
    int file = open("/dev/mem", O_RDONLY);
    void *place = file < 0 ? MAP_FAILED : mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0xf0000);
    if (place == MAP_FAILED) leave("skipped", "memory of a device");
    close(file);
}

/* The handler of the child's page faults is outside the child's tree. */
static void outside_fault_handler(void) {
    pid_t child = fork();
    char path[600];
    snprintf(path, sizeof path, "%s/taken", folder);
    if (!child) {
        prctl(PR_SET_PDEATHSIG, 9);
        int file = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
        struct uffdio_api api = { .api = UFFD_API };
        CHECK(file >= 0 && !ioctl(file, UFFDIO_API, &api));
        struct uffdio_register range = { { (unsigned long)map(-1, MAP_PRIVATE | MAP_ANONYMOUS, 4096, 0), 4096 }, UFFDIO_REGISTER_MODE_MISSING };
        CHECK(!ioctl(file, UFFDIO_REGISTER, &range));
        char text[32];
        snprintf(text, sizeof text, "%d", file);
        leave("file", text);
        while (readlink(path, text, sizeof text) < 0) nap(1);
        close(file);
        for (;;) pause();
    }
    char text[32] = { 0 }, file[600];
    snprintf(file, sizeof file, "%s/file", folder);
    while (readlink(file, text, sizeof text - 1) < 0) nap(1);
    CHECK(syscall(SYS_pidfd_getfd, syscall(SYS_pidfd_open, child, 0), atoi(text), 0) >= 0);
    leave("taken", "taken");
    snprintf(text, sizeof text, "%d", child);
    leave("child", text);
}

static void thread_clock(void) {
    timer_t timer;
    struct sigevent event = { .sigev_notify = SIGEV_NONE };
    CHECK(!timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer));
}

static void sealed_mapping(void) {
    CHECK(!syscall(462 /* mseal */, map(-1, MAP_PRIVATE | MAP_ANONYMOUS, 4096, 0), 4096, 0));
}

static void huge_pages(void) {
    map(-1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE, 2 << 20, 0);
}

/* A core dump that the parent has not collected yet. */
static void dumped_child(void) {
    struct rlimit any = { RLIM_INFINITY, RLIM_INFINITY };
    CHECK(!setrlimit(RLIMIT_CORE, &any) && !chdir(folder));
    pid_t child = fork();
    if (!child) abort();
    siginfo_t info;
    CHECK(!waitid(P_PID, child, &info, WEXITED | WNOWAIT));
    if (info.si_code != CLD_DUMPED) leave("skipped", "core dumps");
}

static void syscall_dispatch(void) {
    static char selector;
    CHECK(!prctl(59 /* PR_SET_SYSCALL_USER_DISPATCH */, 1, 0, 0, &selector));
}

static void ldt_segment(void) {
    struct user_desc segment = { .entry_number = 0, .limit = 0xfffff, .seg_32bit = 1, .limit_in_pages = 1 };
    CHECK(!syscall(SYS_modify_ldt, 1, &segment, sizeof segment));
}

static void asks_supervisor(void) {
    struct sock_filter code[] = { BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mknod, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
    struct sock_fprog program = { 4, code };
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    int listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
    CHECK(listener >= 0);
    /* The supervisor holds the only descriptor for requests; here the descriptor is closed. */
    close(listener);
}

static const struct { const char *name; void (*run_case)(void); } cases[] = { { "directory_of_child", shared_directory },
    { "directory_gone", deleted_directory }, { "siblings", siblings }, { "semaphores", semaphores }, { "messages", messages },
    { "thread_clock", thread_clock }, { "sealed", sealed_mapping }, { "huge", huge_pages }, { "dumped", dumped_child }, { "own_dispatch", syscall_dispatch },
    { "segment_of_nobody", unattached_segment }, { "users", user_namespace }, { "system_v_apart", ipc_namespace }, { "groups_apart", cgroup_namespace },
    { "pids_apart", pid_namespace }, { "clock_apart", time_namespace }, { "key", protection_key }, { "speculation", speculation_control }, { "secret", secret_memory }, { "packet_ring", packet_ring },
    { "device", device }, { "faults", outside_fault_handler }, { "own_segments", ldt_segment }, { "asks_supervisor", asks_supervisor } };

static int run_case(const char *what) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) if (!strcmp(what, cases[i].name)) return cases[i].run_case(), 1;
    return 0;
}

int main(int count, char **words) {
    CHECK(count == 3);
    folder = words[1];
    const char *what = words[2];
    prctl(PR_SET_PDEATHSIG, 9);
    if (run_case(what)) ;
    else if (!strcmp(what, "thread_directory")) thread_unshares(1);
    else if (!strcmp(what, "thread_descriptors")) thread_unshares(0);
    else if (!strcmp(what, "io_uring")) map_io_uring();
    else if (!strcmp(what, "aio")) aio();
    else if (!strcmp(what, "deleted")) deleted_file();
    else if (!strcmp(what, "branch")) other_branch();
    else if (!strcmp(what, "system_v")) partial_segment();
    else if (!strcmp(what, "traced")) traced();
    else if (!strcmp(what, "strict")) strict();
    else if (!strcmp(what, "shares_memory")) shares_memory();
    else if (!strcmp(what, "network")) CHECK(!unshare(CLONE_NEWNET));
    else if (!strcmp(what, "mounts")) CHECK(!unshare(CLONE_NEWNS));
    else if (!strcmp(what, "names")) CHECK(!unshare(CLONE_NEWUTS));
    else if (!strcmp(what, "root")) { ready(); char path[512]; snprintf(path, sizeof path, "%s", folder); CHECK(!chroot(path)); for (;;) pause(); }
    else if (!strcmp(what, "private_memfd")) map(memfd_create("private", 0), MAP_PRIVATE, 4096, 0);
    else if (!strcmp(what, "first_thread")) first_thread_ends();
    else if (!strcmp(what, "outsider") || !strcmp(what, "segment_outside")) {
        char *shared = *what == 's' ? segment() : map(-1, MAP_SHARED | MAP_ANONYMOUS, 4096, 0);
        *shared = 1;
        /* The child is to be moved; the parent is the process outside the tree. */
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
