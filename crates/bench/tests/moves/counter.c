/* Counts, and appends each count with the host's name to a file, until told to end. The file shows where the program
 * ran, whether it ran twice, and whether it lost anything. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/shm.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

static volatile long shared;

/* Another thread, which writes memory all the time. A round covers 2,048 pages, a multiple of 256, so in each later
 * round a page must already hold the byte to be written. */
static void *busy(void *memory) {
    char *bytes = memory;
    for (long at = 0;; at = (at + 4096) % (8 << 20)) {
        if (shared >= 2048 && bytes[at] != (char)(shared + 1)) _exit(6);
        bytes[at] = (char)++shared;
        struct timespec nap = { 0, 200000 };
        nanosleep(&nap, NULL);
    }
    return NULL;
}

/* Attaches System V memory owned by another user. */
static volatile long *elsewhere(void) {
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    long *place = shmat(id, NULL, 0);
    struct shmid_ds of;
    if (id < 0 || place == (void *)-1 || shmctl(id, IPC_STAT, &of)) exit(6);
    of.shm_perm.uid = 65534;
    if (shmctl(id, IPC_SET, &of) || shmctl(id, IPC_RMID, NULL)) exit(7);
    return place;
}

int main(int count, char **words) {
    if (count != 2) return 2;
    /* Descriptors inherited from the parent. */
    close_range(3, ~0U, 0);
    char end[512];
    snprintf(end, sizeof end, "%s.end", words[1]);
    pthread_t thread;
    char *memory = calloc(1, 8 << 20);
    if (!memory || pthread_create(&thread, NULL, busy, memory)) return 3;
    volatile long *kept = elsewhere();
    for (long number = 1; access(end, F_OK); number++) {
        if (*kept != number - 1) return 8;
        *kept = number;
        struct utsname host;
        char line[256];
        uname(&host);
        int length = snprintf(line, sizeof line, "%s %ld %d\n", host.nodename, number, (int)getpid());
        int file = open(words[1], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
        if (file < 0 || write(file, line, length) != length) return 4;
        close(file);
        struct timespec nap = { 0, 5000000 };
        while (nanosleep(&nap, &nap)) {}
    }
    return shared > 0 ? 0 : 5;
}
