/* Epoll sets with all modes and waiting threads; eventfd, timerfd, signalfd, inotify, pidfd. */
#include "self.h"
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/wait.h>

static int set, wake, answer;

/* Waits in the set without a time limit, and answers each wake-up. */
static void *waiter(void *unused) {
    (void)unused;
    for (;;) {
        struct epoll_event found;
        int got = epoll_wait(set, &found, 1, -1);
        if (got < 0) CHECK(errno == EINTR);
        if (got < 1) continue;
        EQUAL(found.data.u64, 0x1234567890abcdef);
        unsigned long number;
        EQUAL(read(wake, &number, 8), 8);
        if (number == 1000000) return 0;
        EQUAL(write(answer, &number, 8), 8);
    }
}

static int add_watch(int epoll, int file, unsigned events, unsigned long data) {
    struct epoll_event event = { .events = events, .data.u64 = data };
    return epoll_ctl(epoll, EPOLL_CTL_ADD, file, &event);
}

static unsigned long next_event(int epoll, int timeout) {
    struct epoll_event found;
    int got = epoll_wait(epoll, &found, 1, timeout);
    CHECK(got >= 0);
    return got ? found.data.u64 : 0;
}

static void check_semaphore(int semaphore) {
    unsigned long number;
    for (int i = 0; i < 3; i++) EQUAL(read(semaphore, &number, 8), 8);
    CHECK(read(semaphore, &number, 8) == -1 && errno == EAGAIN);
    number = 3;
    EQUAL(write(semaphore, &number, 8), 8);
}

static void check_wake(unsigned long number) {
    unsigned long answered;
    EQUAL(write(wake, &number, 8), 8);
    EQUAL(read(answer, &answered, 8), 8);
    EQUAL(answered, number);
}

static void check_signal(int by_signal, int signals, int signal) {
    struct signalfd_siginfo info;
    CHECK(!kill(getpid(), signal));
    EQUAL(next_event(by_signal, 10000), 5);
    EQUAL(read(signals, &info, sizeof info), sizeof info);
    EQUAL(info.ssi_signo, signal);
    CHECK(read(signals, &info, sizeof info) == -1 && errno == EAGAIN);
}

/* A new file in the watched folder is reported. */
static void check_notified(int notify, int watch, long turn) {
    char path[512], events[4096];
    snprintf(path, sizeof path, "%s/watched/new-%ld", folder, turn);
    close(open(path, O_CREAT | O_RDWR, 0600));
    int seen = 0;
    long length = read(notify, events, sizeof events);
    for (long at = 0; at < length;) {
        struct inotify_event *event = (void *)(events + at);
        if (event->wd == watch && event->mask & IN_CREATE && strstr(path, event->name)) seen = 1;
        at += sizeof *event + event->len;
    }
    CHECK(seen && !unlink(path));
}

static void check_pidfd(int process, pid_t child) {
    CHECK(!syscall(SYS_pidfd_send_signal, process, SIGKILL, 0, 0));
    siginfo_t end;
    CHECK(!waitid(P_PIDFD, process, &end, WEXITED) && end.si_pid == child);
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    set = epoll_create1(EPOLL_CLOEXEC), wake = eventfd(0, 0), answer = eventfd(0, EFD_CLOEXEC);
    CHECK(!add_watch(set, wake, EPOLLIN, 0x1234567890abcdef));
    pthread_t thread;
    sigset_t usr;
    sigemptyset(&usr);
    sigaddset(&usr, SIGUSR1);
    sigaddset(&usr, SIGUSR2);
    CHECK(!sigprocmask(SIG_BLOCK, &usr, 0));
    CHECK(!pthread_create(&thread, 0, waiter, 0));
    int signals = signalfd(-1, &usr, SFD_NONBLOCK), by_signal = epoll_create1(0);
    CHECK(!add_watch(by_signal, signals, EPOLLIN, 5));
    int semaphore = eventfd(3, EFD_SEMAPHORE | EFD_NONBLOCK), once = eventfd(1, 0), modes = epoll_create1(0);
    CHECK(!add_watch(modes, once, EPOLLIN | EPOLLONESHOT, 7));
    EQUAL(next_event(modes, 0), 7);
    EQUAL(next_event(modes, 0), 0);
    int ticking = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK), far = timerfd_create(CLOCK_REALTIME, 0);
    struct itimerspec every = { { 0, 20000000 }, { 0, 20000000 } }, later = { { 0, 0 }, { 1000, 0 } }, left;
    CHECK(!timerfd_settime(ticking, 0, &every, 0) && !timerfd_settime(far, 0, &later, 0));
    int nested = epoll_create1(0);
    CHECK(!add_watch(nested, ticking, EPOLLIN, 8) && !add_watch(modes, nested, EPOLLIN, 9));
    char path[512];
    snprintf(path, sizeof path, "%s/watched", folder);
    CHECK(!mkdir(path, 0700));
    int notify = inotify_init1(IN_NONBLOCK), folder_watch = inotify_add_watch(notify, path, IN_CREATE);
    CHECK(folder_watch > 0);
    pid_t child = fork();
    if (!child) for (;;) pause();
    int process = syscall(SYS_pidfd_open, child, 0);
    CHECK(process >= 0);
    pid_t zombie = fork();
    if (!zombie) _exit(7);
    struct pollfd ended = { syscall(SYS_pidfd_open, zombie, 0), POLLIN, 0 };
    CHECK(ended.fd >= 0);
    EQUAL(poll(&ended, 1, 60000), 1);
    unsigned long ticks = 0;
    ready();
    for (long turn = 1; go_on(); turn++) {
        unsigned long number = turn;
        check_wake(number);
        check_semaphore(semaphore);
        /* A signal arrives through the set that waits for it, even right after a move. */
        check_signal(by_signal, signals, turn % 2 ? SIGUSR1 : SIGUSR2);
        if (turn % 4 == 0) {
            EQUAL(next_event(modes, 10000), 9);
            EQUAL(next_event(nested, 0), 8);
            EQUAL(read(ticking, &number, 8), 8);
            ticks += number;
        }
        CHECK(!timerfd_gettime(far, &left) && left.it_value.tv_sec > 500 && left.it_value.tv_sec < 1000);
        check_notified(notify, folder_watch, turn);
        struct pollfd ask = { process, POLLIN, 0 };
        EQUAL(poll(&ask, 1, 0), 0);
        EQUAL(poll(&ended, 1, 0), 1);
        beat();
        nap(1);
    }
    CHECK(ticks > 0);
    check_pidfd(process, child);
    siginfo_t end;
    CHECK(!waitid(P_PIDFD, ended.fd, &end, WEXITED) && end.si_pid == zombie && end.si_status == 7);
    unsigned long stop = 1000000;
    EQUAL(write(wake, &stop, 8), 8);
    CHECK(!pthread_join(thread, 0));
    return passed();
}
