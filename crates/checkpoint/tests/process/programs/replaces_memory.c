/* Writes a page, unmaps its memory and maps other memory there, each when told to by a file. */
#include "self.h"
#include <sys/mman.h>

#define BYTES 65536

static void wait_for_file(const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    while (access(path, F_OK)) usleep(1000);
}

static char *map(char *at, int flags) {
    return mmap(at, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

int main(int count, char **arguments) {
    if (count < 2) return 2;
    folder = arguments[1];
    char *memory = map(0, 0);
    CHECK(memory != MAP_FAILED);
    memset(memory, 1, BYTES);
    ready();
    wait_for_file("write");
    memset(memory, 2, BYTES);
    leave("written", "written");
    wait_for_file("unmap");
    CHECK(!munmap(memory, BYTES));
    leave("unmapped", "unmapped");
    wait_for_file("map");
    CHECK(map(memory, MAP_FIXED_NOREPLACE) == memory);
    leave("mapped", "mapped");
    while (go_on()) usleep(1000);
    for (int at = 0; at < BYTES; at++) EQUAL(memory[at], 0);
    leave("verdict", "passed");
    return 0;
}
