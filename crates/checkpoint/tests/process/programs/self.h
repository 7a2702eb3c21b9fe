/* Parts common to all programs under test: a program reports when it is ready, checks itself repeatedly until told to
 * end, and writes a verdict. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const char *folder;

/* Writes a text as a symbolic link, which needs no descriptor that a move could lose. If a copy is ended and the
 * original goes on, either may have made or renamed the same link before the other; then the call is repeated with
 * another name. */
static void leave(const char *name, const char *text) {
    static unsigned tries;
    char path[512], made[540];
    int saved = errno;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (;;) {
        snprintf(made, sizeof made, "%s.%d.%u", path, (int)getpid(), __atomic_fetch_add(&tries, 1, __ATOMIC_RELAXED));
        if (symlink(text, made)) {
            if (errno != EEXIST) _exit(99);
        } else if (!rename(made, path)) break;
        else if (errno != ENOENT) _exit(99);
    }
    errno = saved;
}

static void fail(int line, const char *format, ...) {
    char what[400], text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    snprintf(text, sizeof text, "line %d: %s (errno %d)", line, what, errno);
    leave("verdict", text);
    _exit(1);
}

#define CHECK(condition) do { if (!(condition)) fail(__LINE__, "%s", #condition); } while (0)
#define EQUAL(found, wanted) do { long f_ = (long)(found), w_ = (long)(wanted); \
    if (f_ != w_) fail(__LINE__, "%s is %ld, not %ld", #found, f_, w_); } while (0)

/* Returns 1 until the test wants the program to end. */
static int go_on(void) {
    char path[512];
    snprintf(path, sizeof path, "%s/end", folder);
    int saved = errno, there = access(path, F_OK) == 0;
    errno = saved;
    return !there;
}

static void ready(void) { leave("ready", "ready"); }

static int passed(void) {
    leave("verdict", "passed");
    return 0;
}

static long read_all(int file, char *into, size_t room) {
    size_t length = 0;
    for (;;) {
        long more = read(file, into + length, room - length);
        if (more < 0) return -1;
        if (!more || length + more == room) return length + more;
        length += more;
    }
}

/* Counts the self-checks, so that a test can wait for them. */
static void beat(void) {
    static long beats;
    char text[32];
    snprintf(text, sizeof text, "%ld", ++beats);
    leave("beats", text);
}

static void nap(long milliseconds) {
    struct timespec left = { milliseconds / 1000, milliseconds % 1000 * 1000000 };
    while (nanosleep(&left, &left)) CHECK(errno == EINTR);
}
