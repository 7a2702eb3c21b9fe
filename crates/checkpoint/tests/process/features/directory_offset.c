/* A half-read directory yields its remaining entries, each once. A directory read to its end yields all entries after a
 * rewind. */
#include <dirent.h>
#include <sys/stat.h>
#include "feature.h"

#define NAMES 200

static int directory, ended;
static char seen_before[NAMES], seen[NAMES];
static off_t half;
static DIR *stream;
static int of_stream;

/* Records the next names of a directory, up to `wanted` or the end. */
static int read_names(int directory, char *noted, int wanted) {
    char entries[1024];
    int count = 0;
    while (count < wanted) {
        long length = syscall(SYS_getdents64, directory, entries, sizeof entries);
        CHECK(length >= 0);
        if (!length) break;
        for (long at = 0; at < length;) {
            struct dirent64 *entry = (void *)(entries + at);
            at += entry->d_reclen;
            if (entry->d_name[0] == '.') continue;
            int number = atoi(entry->d_name + 1);
            CHECK(number >= 0 && number < NAMES && !noted[number]);
            noted[number] = 1;
            count++;
        }
    }
    return count;
}

static void begin(void) {
    char path[512], name[540];
    snprintf(path, sizeof path, "%s/names", folder);
    CHECK(!mkdir(path, 0755));
    for (int i = 0; i < NAMES; i++) {
        snprintf(name, sizeof name, "%s/n%d", path, i);
        int file = open(name, O_CREAT | O_WRONLY, 0644);
        CHECK(file >= 0 && !close(file));
    }
    directory = open(path, O_RDONLY | O_DIRECTORY);
    CHECK(directory >= 0);
    int count = read_names(directory, seen_before, NAMES / 2);
    CHECK(count >= NAMES / 2 && count < NAMES);
    half = lseek(directory, 0, SEEK_CUR);
    CHECK(half > 0);
    ended = open(path, O_RDONLY | O_DIRECTORY);
    CHECK(ended >= 0);
    EQUAL(read_names(ended, seen, NAMES + 1), NAMES);
    stream = opendir(path);
    CHECK(stream);
}

static void check(void) {
    EQUAL(lseek(directory, 0, SEEK_CUR), half);
    memcpy(seen, seen_before, NAMES);
    read_names(directory, seen, NAMES);
    for (int i = 0; i < NAMES; i++) EQUAL(seen[i], 1);
    EQUAL(lseek(directory, half, SEEK_SET), half);
    memset(seen, 0, NAMES);
    EQUAL(read_names(ended, seen, 1), 0);
    EQUAL(lseek(ended, 0, SEEK_SET), 0);
    EQUAL(read_names(ended, seen, NAMES + 1), NAMES);
    /* One name per check, over all moves. */
    struct dirent *entry = readdir(stream);
    if (entry) of_stream += entry->d_name[0] != '.';
    else {
        EQUAL(of_stream, NAMES);
        of_stream = 0;
        rewinddir(stream);
    }
}

FEATURE(begin(), check(), )
