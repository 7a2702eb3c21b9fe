/* A file that never had a name: its content, its position, and that it can still get a name. */
#include <sys/stat.h>
#include "feature.h"

#define BYTES 300000

static int file;
static unsigned long wanted;
static char content[BYTES], found[BYTES];

static void begin(void) {
    NEEDS(file = open(folder, O_TMPFILE | O_RDWR, 0640));
    fill(content, BYTES, 3);
    wanted = sum(content, BYTES);
    EQUAL(write(file, content, BYTES), BYTES);
    EQUAL(lseek(file, 1000, SEEK_SET), 1000);
}

static void check(void) {
    struct stat stat;
    CHECK(!fstat(file, &stat));
    EQUAL(stat.st_nlink, 0);
    EQUAL(stat.st_mode & 07777, 0640);
    EQUAL(stat.st_size, BYTES);
    EQUAL(lseek(file, 0, SEEK_CUR), 1000);
    EQUAL(pread(file, found, BYTES, 0), BYTES);
    EQUAL(sum(found, BYTES), wanted);
    /* Later writes persist. */
    ++content[BYTES - 1];
    EQUAL(pwrite(file, content + BYTES - 1, 1, BYTES - 1), 1);
    wanted = sum(content, BYTES);
}

static void end(void) {
    char own[64], name[512];
    struct stat stat;
    snprintf(own, sizeof own, "/proc/self/fd/%d", file);
    snprintf(name, sizeof name, "%s/named", folder);
    CHECK(!linkat(AT_FDCWD, own, AT_FDCWD, name, AT_SYMLINK_FOLLOW));
    CHECK(!lstat(name, &stat));
    EQUAL(stat.st_size, BYTES);
    EQUAL(stat.st_nlink, 1);
}

FEATURE(begin(), check(), end())
