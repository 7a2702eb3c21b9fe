/* Pipes with content, also in packet mode, FIFOs, and a blocked reader in another process. */
#include "self.h"
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* Answers each number with three times the number. */
static void multiply(const int *orders, const int *answers) {
    close(orders[1]);
    close(answers[0]);
    long number;
    while (read(orders[0], &number, sizeof number) == sizeof number) {
        number *= 3;
        EQUAL(write(answers[1], &number, sizeof number), sizeof number);
    }
    _exit(7);
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    int full[2], packets[2], orders[2], answers[2];
    CHECK(!pipe2(full, O_NONBLOCK) && !pipe2(packets, O_DIRECT | O_CLOEXEC) && !pipe(orders) && !pipe(answers));
    EQUAL(fcntl(full[1], F_SETPIPE_SZ, 1 << 17), 1 << 17);
    static char filling[1 << 17], found[1 << 17];
    for (size_t i = 0; i < sizeof filling; i++) filling[i] = i * 13 >> 4;
    EQUAL(write(full[1], filling, sizeof filling), sizeof filling);
    EQUAL(write(packets[1], "one", 3), 3);
    EQUAL(write(packets[1], "twofold", 7), 7);
    char path[512];
    snprintf(path, sizeof path, "%s/fifo", folder);
    CHECK(!mkfifo(path, 0600));
    int fifo = open(path, O_RDWR);
    CHECK(fifo >= 0);
    EQUAL(write(fifo, "waits", 5), 5);
    signal(SIGPIPE, SIG_IGN);
    pid_t child = fork();
    if (!child) multiply(orders, answers);
    close(orders[0]);
    close(answers[1]);
    ready();
    for (long turn = 1; go_on(); turn++) {
        char byte = 'z';
        CHECK(write(full[1], &byte, 1) == -1 && errno == EAGAIN);
        EQUAL(fcntl(full[1], F_GETPIPE_SZ), 1 << 17);
        if (turn % 8 == 0) {
            EQUAL(read_all(full[0], found, sizeof found), sizeof found);
            CHECK(!memcmp(found, filling, sizeof found));
            EQUAL(write(full[1], filling, sizeof filling), sizeof filling);
            char packet[100];
            EQUAL(read(packets[0], packet, 100), 3);
            EQUAL(read(packets[0], packet, 100), 7);
            EQUAL(write(packets[1], "one", 3), 3);
            EQUAL(write(packets[1], "twofold", 7), 7);
            EQUAL(read(fifo, packet, 5), 5);
            CHECK(!memcmp(packet, "waits", 5));
            EQUAL(write(fifo, "waits", 5), 5);
        }
        long number = turn;
        EQUAL(write(orders[1], &number, sizeof number), sizeof number);
        EQUAL(read(answers[0], &number, sizeof number), sizeof number);
        EQUAL(number, turn * 3);
        beat();
        nap(1);
    }
    close(orders[1]);
    int status;
    EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    char byte;
    EQUAL(read(answers[0], &byte, 1), 0);
    return passed();
}
