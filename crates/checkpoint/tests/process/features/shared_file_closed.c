/* Shared mappings without write permission: one of a file opened for reading and writing may become writable, and one
 * of a file opened for reading may not. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *both, *never;

static void begin(void) {
    char path[512];
    snprintf(path, sizeof path, "%s/file", folder);
    int file = open(path, O_RDWR | O_CREAT, 0600), reader = open(path, O_RDONLY);
    CHECK(file >= 0 && reader >= 0 && write(file, "content", 7) == 7 && !ftruncate(file, 8192));
    both = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    never = mmap(0, 8192, PROT_READ, MAP_SHARED, reader, 0);
    CHECK(both != MAP_FAILED && never != MAP_FAILED && !close(file) && !close(reader));
    CHECK(!mprotect(both, 8192, PROT_READ));
}

static void check(void) {
    static long rounds;
    CHECK(!mprotect(both, 8192, PROT_READ | PROT_WRITE));
    both[5000] = ++rounds;
    CHECK(!mprotect(both, 8192, PROT_READ));
    EQUAL(never[5000], rounds & 255);
    CHECK(mprotect(never, 8192, PROT_READ | PROT_WRITE) == -1 && errno == EACCES);
    CHECK(!memcmp(never, "content", 7));
}

FEATURE(begin(), check(), )
