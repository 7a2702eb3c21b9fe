/* Private file mappings: changed pages are transferred, and other pages are mapped from the file, including pages that
 * were changed once and dropped later. */
#include <sys/mman.h>
#include "feature.h"

#define PAGES 400

static unsigned char *memory, *changed;
static long rounds, dropped = -1;

/* Maps a file in which each byte is 1. */
static void begin_changed(void) {
    char path[512];
    static unsigned char ones[4096];
    snprintf(path, sizeof path, "%s/ones", folder);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    memset(ones, 1, sizeof ones);
    for (int page = 0; page < PAGES; page++) EQUAL(write(file, ones, sizeof ones), sizeof ones);
    changed = mmap(0, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    CHECK(changed != MAP_FAILED && !close(file));
    memset(changed, 2, PAGES * 4096);
}

/* One page at a time is dropped and has the file's content, far from any other such page. */
static void check_changed(void) {
    for (long page = 0; page < PAGES; page++) EQUAL(changed[page * 4096 + 5], page == dropped ? 1 : 2);
    if (dropped >= 0) memset(changed + dropped * 4096, 2, 4096);
    dropped = rounds * 37 % PAGES;
    CHECK(!madvise(changed + dropped * 4096, 4096, MADV_DONTNEED));
    EQUAL(changed[dropped * 4096 + 5], 1);
}

static void begin(void) {
    char path[512];
    static unsigned char bytes[20 * 4096 + 100];
    snprintf(path, sizeof path, "%s/file", folder);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    fill(bytes, sizeof bytes, 11);
    EQUAL(write(file, bytes, sizeof bytes), sizeof bytes);
    memory = mmap(0, sizeof bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    CHECK(memory != MAP_FAILED && !close(file));
    memory[4096] = 'c';
    begin_changed();
}

static void check(void) {
    EQUAL(memory[4096], 'c');
    for (int i = 4097; i < 20 * 4096 + 100; i += 511) if (i % 4096) EQUAL(memory[i], (i * 7 + 11) >> 3 & 255);
    long page = 2 + ++rounds % 18;
    memory[page * 4096] = rounds;
    nap(1);
    EQUAL(memory[page * 4096], rounds & 255);
    CHECK(!madvise(memory + page * 4096, 4096, MADV_DONTNEED));
    EQUAL(memory[page * 4096], (page * 4096 * 7 + 11) >> 3 & 255);
    EQUAL(memory[20 * 4096 + 101], 0);
    check_changed();
}

FEATURE(begin(), check(), )
