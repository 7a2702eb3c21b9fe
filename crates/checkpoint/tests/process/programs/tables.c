/* Descriptor tables shared by processes, and separate ones; a descriptor that one process opens appears in all
 * sharers. */
#include "self.h"
#include <linux/sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

static volatile long *board;
enum { STOP, ASK, FOUND, BESIDE, OTHER };

static pid_t child_of(unsigned long flags) {
    struct clone_args how = { .flags = flags, .exit_signal = flags & CLONE_PARENT ? 0 : SIGCHLD };
    return syscall(SYS_clone3, &how, sizeof how);
}

/* Reports the file behind a number of the shared table. */
static void sharer(void) {
    while (!board[STOP]) {
        long number = board[ASK];
        if (number && !board[FOUND]) {
            char byte = 0;
            EQUAL(pread(number, &byte, 1, 0), 1);
            board[FOUND] = byte;
        }
        nap(1);
    }
    _exit(3);
}

/* Has a separate table, in which the same number is another file. */
static void stranger(int number) {
    while (!board[STOP]) {
        char byte = 0;
        EQUAL(pread(number, &byte, 1, 0), 1);
        EQUAL(byte, 'o');
        board[OTHER]++;
        nap(1);
    }
    _exit(4);
}

static int named(const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0);
    EQUAL(pwrite(file, name, 1, 0), 1);
    return file;
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    board = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int first = named("first"), other = named("other");
    pid_t apart = fork();
    if (!apart) {
        EQUAL(dup2(other, first), first);
        stranger(first);
    }
    pid_t sharing = child_of(CLONE_FILES), pair[2];
    if (!sharing) sharer();
    /* Two children share a table that their parent does not share. */
    pair[0] = fork();
    if (!pair[0]) {
        EQUAL(dup2(other, 50), 50);
        pair[1] = child_of(CLONE_FILES | CLONE_PARENT);
        if (!pair[1]) {
            while (!board[STOP]) {
                if (fcntl(50, F_GETFD) == -1 && errno == EBADF) board[BESIDE] = fcntl(51, F_GETFD) == 0;
                nap(1);
            }
            _exit(5);
        }
        while (!board[STOP]) {
            int odd = fcntl(50, F_GETFD) != -1;
            EQUAL(dup2(other, odd ? 51 : 50), odd ? 51 : 50);
            close(odd ? 50 : 51);
            nap(5);
        }
        _exit(6);
    }
    while (!board[BESIDE] || !board[OTHER]) nap(1);
    ready();
    while (go_on()) {
        long before = board[OTHER];
        int file = named("later");
        board[FOUND] = 0;
        board[ASK] = file;
        while (!board[FOUND] || board[OTHER] == before || !board[BESIDE]) nap(1);
        EQUAL(board[FOUND], 'l');
        board[ASK] = board[BESIDE] = 0;
        EQUAL(fcntl(50, F_GETFD), -1);
        close(file);
        beat();
    }
    board[STOP] = 1;
    int status, ends = 0;
    while (wait(&status) > 0) {
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) >= 3 && WEXITSTATUS(status) <= 6);
        ends++;
    }
    EQUAL(ends, 4);
    return passed();
}
