/* Files: positions, flags, numbers, locks of all kinds, directories, removed files, standard input and output. */
#include "self.h"
#include <dirent.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

static int in_folder(const char *name, int flags) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, flags, 0600);
    CHECK(file >= 0);
    return file;
}

static struct flock range(int type, long start, long length) {
    return (struct flock){ .l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length };
}

/* Another process checks that a lock is held. */
static void is_locked(const char *name, long start, int record) {
    pid_t child = fork();
    if (!child) {
        int file = in_folder(name, O_RDWR);
        struct flock lock = range(F_WRLCK, start, 1);
        int taken = record ? fcntl(file, F_SETLK, &lock) : flock(file, LOCK_EX | LOCK_NB);
        _exit(taken == -1 && (errno == EAGAIN || errno == EACCES) ? 0 : 1);
    }
    int status;
    EQUAL(waitpid(child, &status, 0), child);
    EQUAL(status, 0);
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    int data = in_folder("data", O_RDWR | O_CREAT);
    char text[1000];
    for (int i = 0; i < 1000; i++) text[i] = 'a' + i % 26;
    EQUAL(write(data, text, 1000), 1000);
    EQUAL(lseek(data, 300, SEEK_SET), 300);
    int log = in_folder("log", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC);
    EQUAL(dup3(data, 100, O_CLOEXEC), 100);
    int other = in_folder("data", O_RDONLY);
    EQUAL(lseek(other, 17, SEEK_SET), 17);
    int removed = in_folder("removed", O_RDWR | O_CREAT);
    EQUAL(write(removed, "has no name", 11), 11);
    char path[512];
    snprintf(path, sizeof path, "%s/removed", folder);
    CHECK(!unlink(path));
    int directory = in_folder(".", O_RDONLY | O_DIRECTORY);
    int place = in_folder(".", O_PATH);
    int locked = in_folder("locked", O_RDWR | O_CREAT), whole = in_folder("whole", O_RDWR | O_CREAT);
    struct flock record = range(F_WRLCK, 10, 20), open_file = range(F_WRLCK, 100, 0);
    CHECK(!fcntl(locked, F_SETLK, &record) && !fcntl(locked, F_OFD_SETLK, &open_file) && !flock(whole, LOCK_EX));
    struct rlimit few = { 200, 300 };
    CHECK(!setrlimit(RLIMIT_NOFILE, &few));
    struct stat standard[3], now;
    for (int i = 0; i < 3; i++) CHECK(!fstat(i, standard + i));
    ready();
    for (long turn = 0; go_on(); turn++) {
        char byte;
        long at = 300 + turn % 700;
        EQUAL(read(data, &byte, 1), 1);
        EQUAL(byte, 'a' + at % 26);
        EQUAL(lseek(100, 0, SEEK_CUR), at + 1);
        if (at == 999) EQUAL(lseek(100, 300, SEEK_SET), 300);
        EQUAL(lseek(other, 0, SEEK_CUR), 17);
        EQUAL(fcntl(100, F_GETFD), FD_CLOEXEC);
        EQUAL(fcntl(data, F_GETFD), 0);
        EQUAL(fcntl(log, F_GETFL) & (O_ACCMODE | O_APPEND), O_WRONLY | O_APPEND);
        EQUAL(write(log, "x", 1), 1);
        EQUAL(lseek(log, 0, SEEK_END), turn + 1);
        char kept[12] = { 0 };
        EQUAL(pread(removed, kept, 11, 0), 11);
        CHECK(!strcmp(kept, "has no name") && !fstat(removed, &now) && !now.st_nlink);
        CHECK(!faccessat(directory, "data", R_OK, 0) && !faccessat(place, "log", W_OK, 0));
        CHECK(fcntl(place, F_GETFL) & O_PATH);
        if (turn % 16 == 0) {
            is_locked("locked", 15, 1);
            is_locked("locked", 5000, 1);
            is_locked("whole", 0, 0);
        }
        CHECK(!getrlimit(RLIMIT_NOFILE, &few) && few.rlim_cur == 200 && few.rlim_max == 300);
        for (int i = 0; i < 3; i++) CHECK(!fstat(i, &now) && now.st_rdev == standard[i].st_rdev);
        int next = open("/dev/null", O_RDONLY);
        EQUAL(next, whole + 1);
        close(next);
        beat();
        nap(1);
    }
    return passed();
}
