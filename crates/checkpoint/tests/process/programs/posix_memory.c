/* Named semaphores and POSIX shared memory: with names, without, renamed, and with a descriptor; a child shares all
 * of it. */
#include "self.h"
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define BYTES 20000

static char name[3][64];

static void *map(int file) {
    void *place = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(place != MAP_FAILED);
    return place;
}

static void *memory(const char *of, int *file) {
    *file = shm_open(of, O_RDWR | O_CREAT | O_EXCL, 0640);
    CHECK(*file >= 0 && !ftruncate(*file, BYTES));
    return map(*file);
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    for (int i = 0; i < 3; i++) {
        snprintf(name[i], sizeof name[i], "/holdfast-%d-%d", (int)getpid(), i);
        shm_unlink(name[i]);
        sem_unlink(name[i]);
    }
    /* As Python's programs do: the name is removed at once, and no process opens it again. */
    sem_t *lock = sem_open(name[0], O_CREAT | O_EXCL, 0600, 1);
    CHECK(lock != SEM_FAILED && !sem_unlink(name[0]));
    sem_t *named = sem_open(name[1], O_CREAT | O_EXCL, 0600, 2);
    CHECK(named != SEM_FAILED);
    int closed, kept, file;
    volatile long *nameless = memory(name[0], &closed);
    CHECK(!shm_unlink(name[0]) && !close(closed));
    volatile long *shared = memory(name[2], &kept);
    char path[512];
    snprintf(path, sizeof path, "%s/removed", folder);
    file = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(file >= 0 && !ftruncate(file, BYTES));
    volatile long *removed = map(file);
    CHECK(!close(file) && !unlink(path));
    pid_t child = fork();
    CHECK(child >= 0);
    while (!child) {
        CHECK(!sem_wait(lock));
        if (nameless[0] < 0) _exit(0);
        nameless[1]++, shared[1]++, removed[1]++;
        CHECK(!sem_post(lock));
        nap(1);
    }
    ready();
    long rounds = 0;
    for (int ends = 0; !ends; ends = !go_on()) {
        rounds++;
        CHECK(!sem_wait(lock));
        EQUAL(nameless[0], rounds - 1);
        EQUAL(shared[0], rounds - 1);
        EQUAL(removed[0], rounds - 1);
        CHECK(nameless[1] == shared[1] && shared[1] == removed[1]);
        nameless[0] = shared[0] = removed[0] = rounds;
        shared[BYTES / 8 - 1] = rounds;
        CHECK(!sem_post(lock));
        long found;
        CHECK(pread(kept, &found, sizeof found, 0) == sizeof found);
        EQUAL(found, rounds);
        beat();
        nap(1);
    }
    long before = nameless[1];
    while (nameless[1] == before) nap(1);
    struct stat stat;
    CHECK(!fstat(kept, &stat));
    EQUAL(stat.st_mode & 07777, 0640);
    EQUAL(stat.st_nlink, 1);
    int again = shm_open(name[2], O_RDWR, 0), value;
    CHECK(again >= 0);
    volatile long *same = map(again);
    same[5] = 42;
    EQUAL(shared[5], 42);
    sem_t *other = sem_open(name[1], 0);
    CHECK(other != SEM_FAILED && !sem_wait(other) && !sem_getvalue(named, &value));
    EQUAL(value, 1);
    CHECK(!sem_wait(lock));
    nameless[0] = -1;
    CHECK(!sem_post(lock));
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    EQUAL(status, 0);
    CHECK(!sem_unlink(name[1]) && !shm_unlink(name[2]));
    return passed();
}
