/* Calls of splice(2) that wait while they hold a pipe's lock: one has done a part of its work, the other none. */
#include "self.h"
#include <pthread.h>
#include <sys/socket.h>

#define BYTES (1 << 18)

static int full[2], empty[2], out[2], in[2];
static volatile pid_t writer, reader;
static char content[BYTES];

static void *writes(void *unused) {
    writer = syscall(SYS_gettid);
    EQUAL(splice(full[0], 0, out[0], 0, BYTES, 0), BYTES);
    return unused;
}

static void *reads(void *unused) {
    reader = syscall(SYS_gettid);
    EQUAL(splice(in[0], 0, empty[1], 0, 4096, 0), 5);
    return unused;
}

/* Waits until a thread waits in splice(2). */
static void waits(volatile pid_t *thread) {
    char path[64], text[64] = "";
    do {
        nap(1);
        snprintf(path, sizeof path, "/proc/self/task/%d/syscall", *thread);
        int file = open(path, O_RDONLY);
        if (file < 0) continue;
        CHECK(read(file, text, sizeof text - 1) > 0 && !close(file));
    } while (strtol(text, 0, 10) != SYS_splice);
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    CHECK(!pipe(full) && !pipe(empty));
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, out) && !socketpair(AF_UNIX, SOCK_STREAM, 0, in));
    EQUAL(fcntl(full[1], F_SETPIPE_SZ, BYTES), BYTES);
    int room = 1 << 14;
    CHECK(!setsockopt(out[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room));
    for (int i = 0; i < BYTES; i++) content[i] = i * 7 >> 3;
    EQUAL(write(full[1], content, BYTES), BYTES);
    pthread_t threads[2];
    CHECK(!pthread_create(&threads[0], 0, writes, 0) && !pthread_create(&threads[1], 0, reads, 0));
    waits(&writer);
    waits(&reader);
    ready();
    while (go_on()) {
        beat();
        nap(1);
    }
    static char got[BYTES];
    EQUAL(read_all(out[1], got, BYTES), BYTES);
    CHECK(!memcmp(got, content, BYTES));
    EQUAL(fcntl(full[1], F_GETPIPE_SZ), BYTES);
    EQUAL(write(in[1], "hello", 5), 5);
    CHECK(!pthread_join(threads[0], 0) && !pthread_join(threads[1], 0));
    EQUAL(read(empty[0], got, 64), 5);
    CHECK(!memcmp(got, "hello", 5));
    return passed();
}
