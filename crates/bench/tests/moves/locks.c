/* Holds locks of every kind on files beside its file of counts, as counter.c writes it (hold); tries all the time to
 * get the locks that these exclude (try); or waits for a lock on one file, to write or to read (wait, read). Each
 * lock that it gets is written to the file named by its last argument. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

enum { WHOLE, RECORD, OPEN_FILE };
struct lock {
    const char *name;
    int flags, kind, type;
    long start, length;
};
static const struct lock held[] = {
    { "whole", O_RDWR, WHOLE, F_WRLCK, 0, 0 },
    { "appended", O_WRONLY, WHOLE, F_WRLCK, 0, 0 },
    { "read", O_RDONLY, WHOLE, F_RDLCK, 0, 0 },
    { "ranges", O_RDWR, RECORD, F_WRLCK, 0, 10 },
    { "ranges", O_RDWR, RECORD, F_RDLCK, 20, 10 },
    { "ranges", O_RDWR, RECORD, F_WRLCK, 100, 0 },
    { "open", O_RDWR, OPEN_FILE, F_WRLCK, 0, 0 },
    { "byte", O_RDWR, OPEN_FILE, F_WRLCK, 5, 1 },
    { "record", O_RDWR, RECORD, F_WRLCK, 7, 1 },
    { "journal", O_WRONLY, OPEN_FILE, F_WRLCK, 0, 0 },
    { "log", O_WRONLY, RECORD, F_WRLCK, 3, 50 },
};
/* Locks that must be refused at every instant: for writers of any part, and for readers of a whole range. */
static const struct lock excluded[] = {
    { "whole", O_RDWR, WHOLE, F_WRLCK, 0, 0 },
    { "appended", O_RDWR, WHOLE, F_WRLCK, 0, 0 },
    { "read", O_RDWR, WHOLE, F_WRLCK, 0, 0 },
    { "ranges", O_RDWR, OPEN_FILE, F_WRLCK, 0, 1 },
    { "ranges", O_RDWR, OPEN_FILE, F_WRLCK, 4, 2 },
    { "ranges", O_RDWR, OPEN_FILE, F_RDLCK, 0, 10 },
    { "ranges", O_RDWR, OPEN_FILE, F_WRLCK, 20, 10 },
    { "ranges", O_RDWR, OPEN_FILE, F_RDLCK, 100, 0 },
    { "ranges", O_RDWR, OPEN_FILE, F_WRLCK, 5000, 1 },
    { "open", O_RDWR, OPEN_FILE, F_RDLCK, 0, 0 },
    { "open", O_RDWR, OPEN_FILE, F_WRLCK, 0, 1 },
    { "open", O_RDWR, OPEN_FILE, F_WRLCK, 77, 1 },
    { "byte", O_RDWR, OPEN_FILE, F_WRLCK, 5, 1 },
    { "record", O_RDWR, OPEN_FILE, F_WRLCK, 7, 1 },
    { "journal", O_RDWR, OPEN_FILE, F_RDLCK, 0, 0 },
    { "journal", O_RDWR, OPEN_FILE, F_WRLCK, 0, 0 },
    { "log", O_RDWR, OPEN_FILE, F_RDLCK, 3, 50 },
};
enum { HELD = sizeof held / sizeof *held, EXCLUDED = sizeof excluded / sizeof *excluded };

static int open_lock_file(const char *counts, const struct lock *of) {
    char path[512];
    snprintf(path, sizeof path, "%s.%s", counts, of->name);
    return open(path, of->flags | O_CREAT | O_CLOEXEC, 0666);
}

static int set_lock(int file, const struct lock *of, int type, int waits) {
    struct flock range = { .l_type = type, .l_whence = SEEK_SET, .l_start = of->start, .l_len = of->length };
    if (of->kind == WHOLE) {
        int how = type == F_UNLCK ? LOCK_UN : type == F_RDLCK ? LOCK_SH : LOCK_EX;
        return flock(file, waits ? how : how | LOCK_NB);
    }
    if (of->kind == RECORD) return fcntl(file, waits ? F_SETLKW : F_SETLK, &range);
    return fcntl(file, waits ? F_OFD_SETLKW : F_OFD_SETLK, &range);
}

static int append(const char *path, const char *line) {
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    int written = file >= 0 && write(file, line, strlen(line)) == (ssize_t)strlen(line);
    close(file);
    return written;
}

static int report_lock(const char *path, const struct lock *of) {
    char line[256];
    snprintf(line, sizeof line, "%s %s %ld %ld\n", of->name, of->type == F_RDLCK ? "read" : "write", of->start, of->length);
    return append(path, line);
}

static int hold_locks(const char *counts) {
    for (int at = 0; at < HELD; at++) {
        /* No descriptor of a file may be closed: the process's locks on the file would be released. */
        int again = at > 0 && !strcmp(held[at].name, held[at - 1].name);
        static int file;
        if (!again) file = open_lock_file(counts, &held[at]);
        if (file < 0 || set_lock(file, &held[at], held[at].type, 0)) return 3;
    }
    char end[512];
    snprintf(end, sizeof end, "%s.end", counts);
    for (long number = 1; access(end, F_OK); number++) {
        struct utsname host;
        char line[256];
        uname(&host);
        snprintf(line, sizeof line, "%s %ld %d\n", host.nodename, number, (int)getpid());
        if (!append(counts, line)) return 4;
        struct timespec nap = { 0, 5000000 };
        while (nanosleep(&nap, &nap)) {}
    }
    return 0;
}

/* Writes each lock that it gets once. The file FILE.rounds holds the number of rounds. */
static int try_locks(const char *counts, const char *path) {
    int files[EXCLUDED], acquired[EXCLUDED] = { 0 }, remaining = EXCLUDED;
    char name[512];
    snprintf(name, sizeof name, "%s.rounds", path);
    int rounds = open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    for (int at = 0; at < EXCLUDED; at++) {
        if ((files[at] = open_lock_file(counts, &excluded[at])) < 0) return 3;
    }
    for (long number = 1; remaining; number++) {
        for (int at = 0; at < EXCLUDED; at++) {
            if (acquired[at]) continue;
            if (!set_lock(files[at], &excluded[at], excluded[at].type, 0)) {
                if (!report_lock(path, &excluded[at])) return 4;
                set_lock(files[at], &excluded[at], F_UNLCK, 0);
                acquired[at] = 1, remaining--;
            } else if (errno != EAGAIN && errno != EACCES) {
                return 5;
            }
        }
        if (pwrite(rounds, &number, sizeof number, 0) != sizeof number) return 6;
    }
    return 0;
}

static int wait_for_locks(const char *counts, const char *path, int type) {
    static const int which[] = { 0, 4, 5, 9, 10, 12 };
    for (unsigned at = 0; at < sizeof which / sizeof *which; at++) {
        struct lock of = excluded[which[at]];
        if (type == F_RDLCK) {
            of.type = type;
            if (of.kind != WHOLE) continue;
        }
        if (fork()) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int file = open_lock_file(counts, &of);
        if (file < 0 || set_lock(file, &of, of.type, 1)) return 3;
        return report_lock(path, &of) ? 0 : 4;
    }
    for (;;) pause();
}

int main(int count, char **words) {
    /* Descriptors inherited from the parent. */
    close_range(3, ~0U, 0);
    if (count == 3 && !strcmp(words[2], "hold")) return hold_locks(words[1]);
    if (count != 4) return 2;
    if (!strcmp(words[2], "try")) return try_locks(words[1], words[3]);
    return wait_for_locks(words[1], words[3], !strcmp(words[2], "read") ? F_RDLCK : F_WRLCK);
}
