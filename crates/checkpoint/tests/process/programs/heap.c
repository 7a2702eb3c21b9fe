/* A large heap that two threads write all the time, page by page; each page has an expected content. When the file
 * `moved` exists, the program performs every kind of memory operation, while pages may still be missing (post-copy). */
#include "self.h"
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PAGE 4096
#define WORDS (PAGE / 8)
#define PAGES 16384
#define PARTS 2
#define OTHERS 1024

typedef unsigned long word;
static word *heap, *others, *versions;
static char *guard;
static volatile int stops;
static pthread_barrier_t barrier;

static word mix(word page, word version, word at) {
    word x = page * 0x9e3779b97f4a7c15ul ^ version * 0xc2b2ae3d27d4eb4ful ^ at;
    return x ^ x >> 29;
}

static void fill(word *base, word page, word version) {
    for (word at = 1; at < WORDS; at++) base[page * WORDS + at] = mix(page, version, at);
    base[page * WORDS] = version;
}

static void check(const word *base, word page, word version, const char *what) {
    const word *words = base + page * WORDS;
    if (words[0] != version) fail(__LINE__, "%s: page %ld has version %ld, not %ld", what, page, words[0], version);
    for (word at = 1; at < WORDS; at++)
        if (words[at] != mix(page, version, at)) fail(__LINE__, "%s: page %ld, word %ld", what, page, at);
}

static void check_all(const char *what) {
    for (word page = 0; page < PAGES; page++) check(heap, page, versions[page], what);
}

static void check_guard(void) {
    if (guard && (!access(guard, F_OK) || errno != EFAULT)) fail(__LINE__, "the guard page is gone");
}

/* Each thread writes every second page. */
static void *write_all(void *part) {
    for (word turn = 0;; turn++) {
        if (turn % 256 == 0 && stops) {
            pthread_barrier_wait(&barrier);
            pthread_barrier_wait(&barrier);
        }
        word page = (turn * 7919 % (PAGES / PARTS)) * PARTS + (word)part;
        check(heap, page, versions[page], "before it is written");
        fill(heap, page, ++versions[page]);
    }
    return 0;
}

static int there(const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

/* The kernel writes to pages that may be missing, and reads from others. */
static void calls(void) {
    int ends[2];
    CHECK(!pipe(ends));
    for (word page = 0; page < 64; page++) {
        word *from = others + page * WORDS, *to = others + (page + 64) * WORDS;
        EQUAL(write(ends[1], from, PAGE), PAGE);
        EQUAL(read(ends[0], to + 1, PAGE - 8), PAGE - 8);
        EQUAL(read(ends[0], to, 8), 8);
        EQUAL(to[1], 1);
        for (word at = 1; at < WORDS - 1; at++) EQUAL(to[at + 1], mix(page, 1, at));
        EQUAL(to[0], mix(page, 1, WORDS - 1));
    }
    close(ends[0]), close(ends[1]);
}

/* Pages are dropped, moved and populated again; a dropped page is zero, whatever content the donor still has. */
static void mappings(void) {
    word *gone = others + 128 * WORDS;
    CHECK(!madvise(gone, 64 * PAGE, MADV_DONTNEED));
    for (word at = 0; at < 64 * WORDS; at++) EQUAL(gone[at], 0);
    word *unmapped = others + 192 * WORDS;
    CHECK(!munmap(unmapped, 64 * PAGE));
    CHECK(mmap(unmapped, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == unmapped);
    for (word at = 0; at < 64 * WORDS; at++) EQUAL(unmapped[at], 0);
    word *moved = mremap(others + 256 * WORDS, 256 * PAGE, 512 * PAGE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED);
    check(moved - 256 * WORDS, 300, 1, "moved");
    word *again = mremap(moved, 512 * PAGE, 256 * PAGE, 0);
    CHECK(again == moved);
    check(moved - 256 * WORDS, 511, 1, "moved");
    word *place = mmap(0, 512 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(place != MAP_FAILED);
    word *third = mremap(moved, 256 * PAGE, 256 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place + 64 * WORDS);
    CHECK(third == place + 64 * WORDS);
    for (word page = 256; page < 512; page++) check(third - 256 * WORDS, page, 1, "moved twice");
    word *closed = others + 512 * WORDS;
    CHECK(!mprotect(closed, 128 * PAGE, PROT_NONE) && !mprotect(closed, 128 * PAGE, PROT_READ));
    for (word page = 512; page < 640; page++) check(others, page, 1, "protected");
}

/* A child, and a grandchild, have everything that their parent has. Writes of each stay its own. */
static void children(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        check_guard();
        for (word page = 640; page < 700; page++) check(others, page, 1, "in a child");
        fill(others, 700, 2);
        pid_t grandchild = fork();
        if (!grandchild) {
            for (word page = 701; page < 760; page++) check(others, page, 1, "in a grandchild");
            check(others, 700, 2, "in a grandchild");
            for (word page = 0; page < PAGES; page += 97) heap[page * WORDS] += 0;
            _exit(7);
        }
        int status;
        EQUAL(waitpid(grandchild, &status, 0), grandchild);
        EQUAL(WEXITSTATUS(status), 7);
        for (word page = 1000; page < OTHERS; page++) check(others, page, 1, "in a child, last");
        _exit(8);
    }
    for (word page = 640; page < 760; page++) check(others, page, 1, "beside a child");
    int status;
    EQUAL(waitpid(child, &status, 0), child);
    EQUAL(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 8);
}

/* Makes many children, one after the other: no descriptor may stay open for each of them. */
static void many_children(void) {
    for (word turn = 0; turn < 300; turn++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            check(others, 760 + turn % 240, 1, "in one of many");
            _exit(9);
        }
        int status;
        EQUAL(waitpid(child, &status, 0), child);
        EQUAL(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 9);
    }
}

int main(int count, char **words) {
    CHECK(count == 2 || count == 3);
    folder = words[1];
    if (count == 3) {
        /* An ordinary user without rights; steps that need rights are done before. */
        CHECK(!chown(folder, 65534, 65534) && !setgid(65534) && !setuid(65534));
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS, both = PROT_READ | PROT_WRITE;
    heap = mmap(0, (size_t)(PAGES + 1) * PAGE, both, flags, -1, 0);
    /* A guard page (MADV_GUARD_INSTALL) behind the heap, if the kernel has guard pages. */
    guard = (char *)(heap + PAGES * WORDS);
    if (madvise(guard, PAGE, 102)) guard = 0;
    /* A separate mapping, so that operations on it do not affect the heap's mapping. */
    mmap(0, PAGE, PROT_NONE, flags, -1, 0);
    others = mmap(0, OTHERS * PAGE, both, flags, -1, 0);
    mmap(0, PAGE, PROT_NONE, flags, -1, 0);
    versions = calloc(PAGES, sizeof *versions);
    CHECK(heap != MAP_FAILED && others != MAP_FAILED && versions);
    for (word page = 0; page < PAGES; page++) fill(heap, page, versions[page] = 1);
    CHECK(!pthread_barrier_init(&barrier, 0, PARTS + 1));
    pthread_t threads[PARTS];
    for (word part = 0; part < PARTS; part++) CHECK(!pthread_create(&threads[part], 0, write_all, (void *)part));
    int did = 0;
    for (word turn = 0; go_on(); turn++) {
        check_guard();
        if (!did) {
            /* Written again and again, so that none of the pages is transferred before the move. */
            for (word page = 0; page < OTHERS; page++) fill(others, page, 1);
            if (!turn) ready();
            if (there("moved")) {
                leave("begins", "begins");
                did = 1;
            }
        }
        if (did == 1 && there("alone")) {
            calls();
            mappings();
            children();
            many_children();
            leave("did", "did");
            did = 2;
        }
        if (turn % 16 == 0 || did == 1) beat();
        if (did) nap(1);
    }
    stops = 1;
    pthread_barrier_wait(&barrier);
    check_all("in the end");
    return passed();
}
