/* Threads that wait inside calls that have done a part of their work. No signal arrives, so each call completes: none
 * may return before the other end has taken or sent the rest. Usage: FOLDER [moves]. */
#include "self.h"
#include <netinet/in.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <termios.h>

#define BIG (600 << 10)
#define SOME 400
#define ALL 1000
#define MESSAGES 64

/* A call with its descriptors: the first is the caller's, the second the other end. */
struct job {
    const char *name;
    long (*call)(struct job *);
    void (*open)(struct job *);
    /* Number of bytes or messages that the call must return. */
    long wanted;
    int near, far, other;
    char *memory;
    volatile long result;
    volatile int tid;
    int error;
    pthread_t thread;
};

static char pattern[BIG];
static volatile int stop;

static void limit(int file, int option, int seconds) {
    struct timeval time = { seconds, 0 };
    CHECK(!setsockopt(file, SOL_SOCKET, option, &time, sizeof time));
}

static void small(int file) {
    int bytes = 16384;
    CHECK(!setsockopt(file, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes));
    CHECK(!setsockopt(file, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes));
}

static void pipes(struct job *job) {
    int ends[2];
    CHECK(!pipe(ends));
    job->near = ends[1], job->far = ends[0];
}

static void unix_pair(struct job *job) {
    int ends[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    small(job->near = ends[0]), small(job->far = ends[1]);
}

static void datagrams(struct job *job) {
    int ends[2], bytes = 8192;
    CHECK(!socketpair(AF_UNIX, SOCK_DGRAM, 0, ends));
    CHECK(!setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes));
    job->near = ends[0], job->far = ends[1];
}

static void tcp_pair(struct job *job) {
    struct sockaddr_in at = { .sin_family = AF_INET };
    socklen_t length = sizeof at;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0);
    small(listener);
    CHECK(!bind(listener, (void *)&at, length) && !listen(listener, 1) && !getsockname(listener, (void *)&at, &length));
    small(job->near = socket(AF_INET, SOCK_STREAM, 0));
    CHECK(!connect(job->near, (void *)&at, length) && (job->far = accept(listener, 0, 0)) >= 0 && !close(listener));
}

static void timed_pair(struct job *job) { unix_pair(job), limit(job->near, SO_SNDTIMEO, 5000); }

static void full_pair(struct job *job) {
    timed_pair(job);
    CHECK(!fcntl(job->near, F_SETFL, O_NONBLOCK));
    while (write(job->near, pattern, 4096) > 0);
    while (write(job->near, pattern, 1) > 0);
    CHECK(errno == EAGAIN && !fcntl(job->near, F_SETFL, 0));
}

static void file_to_pair(struct job *job) {
    unix_pair(job);
    CHECK((job->other = memfd_create("file", MFD_CLOEXEC)) >= 0);
    EQUAL(write(job->other, pattern, BIG), BIG);
    EQUAL(lseek(job->other, 0, SEEK_SET), 0);
}

static void terminal(struct job *job) {
    struct termios raw;
    CHECK((job->far = posix_openpt(O_RDWR | O_NOCTTY)) >= 0 && !grantpt(job->far) && !unlockpt(job->far));
    CHECK((job->near = open(ptsname(job->far), O_RDWR | O_NOCTTY)) >= 0 && !tcgetattr(job->near, &raw));
    cfmakeraw(&raw);
    CHECK(!tcsetattr(job->near, TCSANOW, &raw));
}

/* A part of the awaited data has arrived. */
static void some(struct job *job) { EQUAL(write(job->far, pattern, SOME), SOME); }
static void some_of_pair(struct job *job) { unix_pair(job), some(job); }
static void some_of_timed(struct job *job) { some_of_pair(job), limit(job->near, SO_RCVTIMEO, 5000); }
static void some_of_tcp(struct job *job) { tcp_pair(job), some(job); }
static void some_of_least(struct job *job) {
    int least = ALL;
    some_of_pair(job);
    CHECK(!setsockopt(job->near, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least));
}
static void some_messages(struct job *job) {
    datagrams(job);
    for (int i = 0; i < 5; i++) EQUAL(write(job->far, pattern + i, 1), 1);
}

static struct iovec *parts(char *memory, long bytes) {
    static __thread struct iovec three[3];
    three[0] = (struct iovec) { memory, 100 };
    three[1] = (struct iovec) { memory + 100, 0 };
    three[2] = (struct iovec) { memory + 100, bytes - 100 };
    return three;
}

static struct mmsghdr *messages(char *memory) {
    static __thread struct iovec each[MESSAGES];
    static __thread struct mmsghdr all[MESSAGES];
    for (int i = 0; i < MESSAGES; i++) {
        each[i] = (struct iovec) { memory + i, 1 };
        all[i].msg_hdr = (struct msghdr) { .msg_iov = &each[i], .msg_iovlen = 1 };
    }
    return all;
}

static long writes(struct job *job) { return write(job->near, pattern, job->wanted); }
static long writes_parts(struct job *job) { return writev(job->near, parts(pattern, BIG), 3); }
static long writes_parts_2(struct job *job) { return pwritev2(job->near, parts(pattern, BIG), 3, -1, 0); }
static long sends(struct job *job) { return send(job->near, pattern, BIG, 0); }
static long sends_parts(struct job *job) {
    struct msghdr message = { .msg_iov = parts(pattern, BIG), .msg_iovlen = 3 };
    long sent = sendmsg(job->near, &message, 0);
    CHECK(message.msg_iovlen == 3);
    return sent;
}
static long sends_messages(struct job *job) { return sendmmsg(job->near, messages(pattern), MESSAGES, 0); }
static long sends_file(struct job *job) { return sendfile(job->near, job->other, 0, BIG); }
static long receives(struct job *job) { return recv(job->near, job->memory, ALL, MSG_WAITALL); }
static long receives_least(struct job *job) { return read(job->near, job->memory, ALL); }
static long receives_least_parts(struct job *job) { return readv(job->near, parts(job->memory, ALL), 3); }
static long peeks(struct job *job) { return recv(job->near, job->memory, ALL, MSG_WAITALL | MSG_PEEK); }
static long receives_parts(struct job *job) {
    struct msghdr message = { .msg_iov = parts(job->memory, ALL), .msg_iovlen = 3 };
    struct iovec *told = message.msg_iov;
    long received = recvmsg(job->near, &message, MSG_WAITALL);
    CHECK(message.msg_iov == told && message.msg_iovlen == 3);
    return received;
}
static long receives_messages(struct job *job) { return recvmmsg(job->near, messages(job->memory), MESSAGES, 0, 0); }

#define W(name, open, call, wanted) { name, call, open, wanted, -1, -1, -1, 0, -2, 0, 0, 0 }
static struct job jobs[] = {
    W("write to a pipe", pipes, writes, BIG), W("writev to a pipe", pipes, writes_parts, BIG), W("pwritev2 to a pipe", pipes, writes_parts_2, BIG),
    W("write to a unix socket", unix_pair, writes, BIG), W("writev to a unix socket", unix_pair, writes_parts, BIG),
    W("send to a unix socket", unix_pair, sends, BIG), W("sendmsg to a unix socket", unix_pair, sends_parts, BIG),
    W("send with SO_SNDTIMEO", timed_pair, sends, BIG), W("write with SO_SNDTIMEO to a full socket", full_pair, writes, 100),
    W("send over TCP", tcp_pair, sends, BIG), W("sendmsg over TCP", tcp_pair, sends_parts, BIG), W("writev over TCP", tcp_pair, writes_parts, BIG),
    W("sendmmsg", datagrams, sends_messages, MESSAGES), W("sendfile", file_to_pair, sends_file, BIG),
    W("recv with MSG_WAITALL", some_of_pair, receives, ALL), W("recv with MSG_WAITALL and SO_RCVTIMEO", some_of_timed, receives, ALL),
    W("recvmsg with MSG_WAITALL", some_of_pair, receives_parts, ALL), W("recv with MSG_WAITALL over TCP", some_of_tcp, receives, ALL),
    W("recvmsg with MSG_WAITALL over TCP", some_of_tcp, receives_parts, ALL), W("recv with MSG_PEEK", some_of_tcp, peeks, ALL),
    W("read with SO_RCVLOWAT", some_of_least, receives_least, ALL), W("readv with SO_RCVLOWAT", some_of_least, receives_least_parts, ALL),
    W("recvmmsg", some_messages, receives_messages, MESSAGES),
    /* The last entry, because data waiting in a terminal does not move. */
    W("write to a terminal", terminal, writes, 20000) };
static int JOBS = sizeof jobs / sizeof *jobs;

static void *work(void *of) {
    struct job *job = of;
    job->tid = gettid();
    long result = job->call(job);
    job->error = errno;
    job->result = result;
    return 0;
}

/* Never waits, and yet a signal would end the calls early. */
static void *fills(void *unused) {
    static char zeros[4 << 20], chance[1 << 20];
    int zero = open("/dev/zero", O_RDONLY);
    CHECK(zero >= 0);
    while (!stop) {
        EQUAL(read(zero, zeros, sizeof zeros), sizeof zeros);
        EQUAL(getrandom(chance, sizeof chance, 0), sizeof chance);
    }
    return unused;
}

static int sleeps(int tid) {
    char path[64], text[512], *state;
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
    int file = open(path, O_RDONLY);
    CHECK(file >= 0);
    long length = read(file, text, sizeof text - 1);
    CHECK(length > 0 && !close(file));
    text[length] = 0;
    CHECK((state = strrchr(text, ')')));
    return state[2] == 'S';
}

static void none_has_returned(void) {
    for (struct job *job = jobs; job < jobs + JOBS; job++)
        /* A restored socket may have space for a little more data. */
        if (job->result != -2 && (job->open != full_pair || job->result != job->wanted)) errno = job->error, fail(__LINE__, "%s returned %ld of %ld", job->name, job->result, job->wanted);
}

static int is_reader(struct job *job) { return !!job->memory; }

/* Does the rest of the work at the other end. */
static void finish(struct job *job) {
    static char got[BIG * 2];
    if (job->call == receives_messages) {
        for (int i = 5; i < MESSAGES; i++) EQUAL(write(job->far, pattern + i, 1), 1);
    } else if (is_reader(job)) {
        EQUAL(write(job->far, pattern + SOME, ALL - SOME), ALL - SOME);
    } else if (job->open == full_pair) {
        while (job->result == -2) recv(job->far, got, sizeof got, MSG_DONTWAIT), nap(1);
    } else {
        long length = 0;
        while (length < job->wanted) {
            long more = read(job->far, got + length, sizeof got - length);
            if (more <= 0) fail(__LINE__, "%s: %ld after %ld", job->name, more, length);
            length += more;
        }
        EQUAL(length, job->wanted);
        if (memcmp(got, pattern, length)) fail(__LINE__, "%s sent something else", job->name);
    }
    CHECK(!pthread_join(job->thread, 0));
    if (job->result != job->wanted) errno = job->error, fail(__LINE__, "%s returned %ld of %ld at its end", job->name, job->result, job->wanted);
    if (is_reader(job) && memcmp(job->memory, pattern, job->wanted)) fail(__LINE__, "%s gave something else", job->name);
}

int main(int count, char **words) {
    CHECK(count == 2 || count == 3);
    folder = words[1];
    if (count == 3 && !strcmp(words[2], "moves")) JOBS--;
    for (int i = 0; i < BIG; i++) pattern[i] = (i * 7 + (i >> 8)) % 251;
    for (struct job *job = jobs; job < jobs + JOBS; job++) {
        job->open(job);
        if (job->call == receives || job->call == receives_least || job->call == receives_least_parts || job->call == peeks
            || job->call == receives_parts || job->call == receives_messages) CHECK((job->memory = calloc(1, ALL)));
        CHECK(!pthread_create(&job->thread, 0, work, job));
    }
    pthread_t filler;
    CHECK(!pthread_create(&filler, 0, fills, 0));
    for (int quiet = 0; quiet < 20; quiet++) {
        none_has_returned();
        for (int i = 0; i < JOBS; i++) if (!jobs[i].tid || !sleeps(jobs[i].tid)) quiet = 0;
        nap(1);
    }
    none_has_returned();
    ready();
    while (go_on()) {
        none_has_returned();
        beat();
        nap(2);
    }
    stop = 1;
    CHECK(!pthread_join(filler, 0));
    none_has_returned();
    for (struct job *job = jobs; job < jobs + JOBS; job++) finish(job);
    return passed();
}
