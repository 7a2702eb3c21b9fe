/* Names that are not UTF-8, or end like the kernel's names of removed files: of threads, the working directory, mapped
 * files. */
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include "feature.h"

static char directory[512], path[600];
static char *map, *memory;

static void begin(void) {
    snprintf(directory, sizeof directory, "%s/d\xff\xfe\nx (deleted)", folder);
    CHECK(!mkdir(directory, 0755) && !chdir(directory));
    snprintf(path, sizeof path, "%s/m\xe9 (deleted)", directory);
    int file = open(path, O_RDWR | O_CREAT, 0644);
    CHECK(file >= 0 && write(file, "hello", 5) == 5);
    map = mmap(0, 4096, PROT_READ, MAP_PRIVATE, file, 0);
    int memfd = memfd_create("n\xff\nm", 0);
    CHECK(memfd >= 0 && !ftruncate(memfd, 4096));
    memory = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    CHECK(map != MAP_FAILED && memory != MAP_FAILED && !close(file) && !close(memfd));
    strcpy(memory, "shared");
    CHECK(!prctl(PR_SET_NAME, "name-\xd0\xff (x)"));
}

static void check(void) {
    char found[600];
    CHECK(getcwd(found, sizeof found) && !strcmp(found, directory));
    CHECK(!memcmp(map, "hello", 5) && !strcmp(memory, "shared"));
    CHECK(!prctl(PR_GET_NAME, found) && !strcmp(found, "name-\xd0\xff (x)"));
}

FEATURE(begin(), check(), )
