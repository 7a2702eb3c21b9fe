/* Counts as `counter` does, while two threads write a large memory all the time. Each page has an expected content; a
 * mismatch is written in place of a count. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define PAGES 4096
#define WORDS 512
#define PARTS 2

typedef unsigned long word;
static word *memory, *versions;
static const char *counts;

static void append(const char *line, int length) {
    int file = open(counts, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0 || write(file, line, length) != length) _exit(4);
    close(file);
}

static word expected(word page, word version, word at) {
    return (page * 0x9e3779b97f4a7c15ul ^ version * 0xc2b2ae3d27d4eb4ful) + at;
}

static void *busy(void *part) {
    for (word turn = 0;; turn++) {
        word page = (turn * 769 % (PAGES / PARTS)) * PARTS + (word)part;
        word *words = memory + page * WORDS, version = versions[page]++;
        for (word at = 0; at < WORDS; at++) {
            if (words[at] != (version ? expected(page, version, at) : 0)) {
                char line[128];
                append(line, snprintf(line, sizeof line, "page %lu is wrong at %lu\n", page, at));
                _exit(6);
            }
            words[at] = expected(page, version + 1, at);
        }
        /* The nap keeps this program from occupying a slow machine on its own. */
        struct timespec nap = { 0, 20000 };
        if (turn % 16 == 0) nanosleep(&nap, NULL);
    }
    return NULL;
}

int main(int count, char **words) {
    if (count != 2) return 2;
    close_range(3, ~0U, 0);
    counts = words[1];
    char end[512];
    snprintf(end, sizeof end, "%s.end", words[1]);
    memory = mmap(0, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    versions = calloc(PAGES, sizeof *versions);
    if (memory == MAP_FAILED || !versions) return 3;
    for (word part = 0; part < PARTS; part++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, busy, (void *)part)) return 3;
    }
    for (long number = 1; access(end, F_OK); number++) {
        struct utsname host;
        char line[256];
        uname(&host);
        append(line, snprintf(line, sizeof line, "%s %ld %d\n", host.nodename, number, (int)getpid()));
        struct timespec nap = { 0, 5000000 };
        while (nanosleep(&nap, &nap)) {}
    }
    return 0;
}
