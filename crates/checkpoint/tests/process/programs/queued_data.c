/* Descriptors for the comparison of original and copy, at numbers that the test knows. */
#include "self.h"
#include <signal.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/wait.h>

static void move_fd_to(int file, int number) {
    CHECK(file >= 0);
    EQUAL(dup2(file, number), number);
    if (file < 20) CHECK(!close(file));
}

static void open_pair(int type, int number) {
    int ends[2];
    CHECK(type ? !socketpair(AF_UNIX, type, 0, ends) : !pipe(ends));
    move_fd_to(ends[0], number);
    move_fd_to(ends[1], number + 1);
}

int main(int count, char **words) {
    char path[512];
    CHECK(count == 2);
    folder = words[1];
    open_pair(0, 20);
    open_pair(SOCK_STREAM, 22);
    open_pair(SOCK_DGRAM, 24);
    EQUAL(write(21, "waits", 5), 5);
    EQUAL(write(23, "waits too", 9), 9);
    EQUAL(write(25, "a", 1), 1);
    EQUAL(write(25, "bc", 2), 2);
    snprintf(path, sizeof path, "%s/file", folder);
    move_fd_to(open(path, O_RDWR | O_CREAT, 0600), 26);
    move_fd_to(open(path, O_RDWR), 28);
    EQUAL(dup2(26, 27), 27);
    struct flock record = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 10, .l_len = 5 };
    struct flock range = { .l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 100 };
    CHECK(!fcntl(26, F_SETLK, &record) && !fcntl(28, F_OFD_SETLK, &range) && !flock(26, LOCK_SH));
    pid_t child = fork();
    if (!child) for (;;) pause();
    ready();
    do { beat(); nap(2); } while (go_on());
    CHECK(!kill(child, SIGKILL) && waitpid(child, 0, 0) == child);
    return passed();
}
