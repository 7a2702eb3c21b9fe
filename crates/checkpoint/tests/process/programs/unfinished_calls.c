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

#define LARGE_BYTES (600 << 10)
#define PART_BYTES 400
#define WHOLE_BYTES 1000
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

static char pattern[LARGE_BYTES];
static volatile int stop;

static void set_timeout(int file, int option, int seconds) {
    struct timeval time = { seconds, 0 };
    CHECK(!setsockopt(file, SOL_SOCKET, option, &time, sizeof time));
}

static void shrink_buffers(int file) {
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
    shrink_buffers(job->near = ends[0]), shrink_buffers(job->far = ends[1]);
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
    shrink_buffers(listener);
    CHECK(!bind(listener, (void *)&at, length) && !listen(listener, 1) && !getsockname(listener, (void *)&at, &length));
    shrink_buffers(job->near = socket(AF_INET, SOCK_STREAM, 0));
    CHECK(!connect(job->near, (void *)&at, length) && (job->far = accept(listener, 0, 0)) >= 0 && !close(listener));
}

static void timed_pair(struct job *job) { unix_pair(job), set_timeout(job->near, SO_SNDTIMEO, 5000); }

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
    EQUAL(write(job->other, pattern, LARGE_BYTES), LARGE_BYTES);
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
static void send_part(struct job *job) { EQUAL(write(job->far, pattern, PART_BYTES), PART_BYTES); }
static void partial_pair(struct job *job) { unix_pair(job), send_part(job); }
static void partial_timed_pair(struct job *job) { partial_pair(job), set_timeout(job->near, SO_RCVTIMEO, 5000); }
static void partial_tcp_pair(struct job *job) { tcp_pair(job), send_part(job); }
static void partial_low_water_pair(struct job *job) {
    int least = WHOLE_BYTES;
    partial_pair(job);
    CHECK(!setsockopt(job->near, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least));
}
static void partial_messages(struct job *job) {
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
static long writes_parts(struct job *job) { return writev(job->near, parts(pattern, LARGE_BYTES), 3); }
static long writes_parts_2(struct job *job) { return pwritev2(job->near, parts(pattern, LARGE_BYTES), 3, -1, 0); }
static long sends(struct job *job) { return send(job->near, pattern, LARGE_BYTES, 0); }
static long sends_parts(struct job *job) {
    struct msghdr message = { .msg_iov = parts(pattern, LARGE_BYTES), .msg_iovlen = 3 };
    long sent = sendmsg(job->near, &message, 0);
    CHECK(message.msg_iovlen == 3);
    return sent;
}
static long sends_messages(struct job *job) { return sendmmsg(job->near, messages(pattern), MESSAGES, 0); }
static long sends_file(struct job *job) { return sendfile(job->near, job->other, 0, LARGE_BYTES); }
static long receives(struct job *job) { return recv(job->near, job->memory, WHOLE_BYTES, MSG_WAITALL); }
static long receives_low_water(struct job *job) { return read(job->near, job->memory, WHOLE_BYTES); }
static long receives_low_water_parts(struct job *job) { return readv(job->near, parts(job->memory, WHOLE_BYTES), 3); }
static long peeks(struct job *job) { return recv(job->near, job->memory, WHOLE_BYTES, MSG_WAITALL | MSG_PEEK); }
static long receives_parts(struct job *job) {
    struct msghdr message = { .msg_iov = parts(job->memory, WHOLE_BYTES), .msg_iovlen = 3 };
    struct iovec *original_parts = message.msg_iov;
    long received = recvmsg(job->near, &message, MSG_WAITALL);
    CHECK(message.msg_iov == original_parts && message.msg_iovlen == 3);
    return received;
}
static long receives_messages(struct job *job) { return recvmmsg(job->near, messages(job->memory), MESSAGES, 0, 0); }

#define JOB(name, open, call, wanted) { name, call, open, wanted, -1, -1, -1, 0, -2, 0, 0, 0 }
static struct job jobs[] = {
    JOB("write to a pipe", pipes, writes, LARGE_BYTES), JOB("writev to a pipe", pipes, writes_parts, LARGE_BYTES), JOB("pwritev2 to a pipe", pipes, writes_parts_2, LARGE_BYTES),
    JOB("write to a unix socket", unix_pair, writes, LARGE_BYTES), JOB("writev to a unix socket", unix_pair, writes_parts, LARGE_BYTES),
    JOB("send to a unix socket", unix_pair, sends, LARGE_BYTES), JOB("sendmsg to a unix socket", unix_pair, sends_parts, LARGE_BYTES),
    JOB("send with SO_SNDTIMEO", timed_pair, sends, LARGE_BYTES), JOB("write with SO_SNDTIMEO to a full socket", full_pair, writes, 100),
    JOB("send over TCP", tcp_pair, sends, LARGE_BYTES), JOB("sendmsg over TCP", tcp_pair, sends_parts, LARGE_BYTES), JOB("writev over TCP", tcp_pair, writes_parts, LARGE_BYTES),
    JOB("sendmmsg", datagrams, sends_messages, MESSAGES), JOB("sendfile", file_to_pair, sends_file, LARGE_BYTES),
    JOB("recv with MSG_WAITALL", partial_pair, receives, WHOLE_BYTES), JOB("recv with MSG_WAITALL and SO_RCVTIMEO", partial_timed_pair, receives, WHOLE_BYTES),
    JOB("recvmsg with MSG_WAITALL", partial_pair, receives_parts, WHOLE_BYTES), JOB("recv with MSG_WAITALL over TCP", partial_tcp_pair, receives, WHOLE_BYTES),
    JOB("recvmsg with MSG_WAITALL over TCP", partial_tcp_pair, receives_parts, WHOLE_BYTES), JOB("recv with MSG_PEEK", partial_tcp_pair, peeks, WHOLE_BYTES),
    JOB("read with SO_RCVLOWAT", partial_low_water_pair, receives_low_water, WHOLE_BYTES), JOB("readv with SO_RCVLOWAT", partial_low_water_pair, receives_low_water_parts, WHOLE_BYTES),
    JOB("recvmmsg", partial_messages, receives_messages, MESSAGES),
    /* The last entry, because data waiting in a terminal does not move. */
    JOB("write to a terminal", terminal, writes, 20000) };
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
static void *fill_buffers(void *unused) {
    static char zeros[4 << 20], random_bytes[1 << 20];
    int zero = open("/dev/zero", O_RDONLY);
    CHECK(zero >= 0);
    while (!stop) {
        EQUAL(read(zero, zeros, sizeof zeros), sizeof zeros);
        EQUAL(getrandom(random_bytes, sizeof random_bytes, 0), sizeof random_bytes);
    }
    return unused;
}

static int is_sleeping(int tid) {
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

static void check_none_returned(void) {
    for (struct job *job = jobs; job < jobs + JOBS; job++)
        /* A restored socket may have space for a little more data. */
        if (job->result != -2 && (job->open != full_pair || job->result != job->wanted)) errno = job->error, fail(__LINE__, "%s returned %ld of %ld", job->name, job->result, job->wanted);
}

static int is_reader(struct job *job) { return !!job->memory; }

/* Does the rest of the work at the other end. */
static void finish(struct job *job) {
    static char got[LARGE_BYTES * 2];
    if (job->call == receives_messages) {
        for (int i = 5; i < MESSAGES; i++) EQUAL(write(job->far, pattern + i, 1), 1);
    } else if (is_reader(job)) {
        EQUAL(write(job->far, pattern + PART_BYTES, WHOLE_BYTES - PART_BYTES), WHOLE_BYTES - PART_BYTES);
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
    for (int i = 0; i < LARGE_BYTES; i++) pattern[i] = (i * 7 + (i >> 8)) % 251;
    for (struct job *job = jobs; job < jobs + JOBS; job++) {
        job->open(job);
        if (job->call == receives || job->call == receives_low_water || job->call == receives_low_water_parts || job->call == peeks
            || job->call == receives_parts || job->call == receives_messages) CHECK((job->memory = calloc(1, WHOLE_BYTES)));
        CHECK(!pthread_create(&job->thread, 0, work, job));
    }
    pthread_t filler;
    CHECK(!pthread_create(&filler, 0, fill_buffers, 0));
    for (int quiet = 0; quiet < 20; quiet++) {
        check_none_returned();
        for (int i = 0; i < JOBS; i++) if (!jobs[i].tid || !is_sleeping(jobs[i].tid)) quiet = 0;
        nap(1);
    }
    check_none_returned();
    ready();
    while (go_on()) {
        check_none_returned();
        beat();
        nap(2);
    }
    stop = 1;
    CHECK(!pthread_join(filler, 0));
    check_none_returned();
    for (struct job *job = jobs; job < jobs + JOBS; job++) finish(job);
    return passed();
}
