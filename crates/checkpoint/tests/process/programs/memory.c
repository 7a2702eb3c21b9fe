/* One thread: heap, stack, data, private mappings of all protections, written file pages. */
#include "self.h"
#include <sys/mman.h>

static char data[100000] = "initialised";
static char bss[300000];
static const char *const relocated = data;

static unsigned long sum(const char *from, size_t bytes) {
    unsigned long s = 0;
    for (size_t i = 0; i < bytes; i++) s = s * 31 + (unsigned char)from[i];
    return s;
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    char stack[60000];
    size_t big = 8 << 20;
    char *heap = malloc(70000), *large = malloc(big);
    char *closed = mmap(0, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *readable = mmap(0, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *reserved = mmap(0, 1L << 36, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *given = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(heap && large && closed != MAP_FAILED && reserved != MAP_FAILED && given != MAP_FAILED);
    int self = open("/proc/self/exe", O_RDONLY);
    char *program = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE, self, 0);
    CHECK(program != MAP_FAILED);
    close(self);
    for (size_t i = 0; i < big; i++) large[i] = i * 7 >> 3;
    memset(heap, 'h', 70000);
    memset(stack, 's', sizeof stack);
    memset(bss, 'b', sizeof bss);
    memset(closed, 'c', 16384);
    memset(readable, 'r', 16384);
    memset(given, 'g', 1 << 20);
    program[5000] = 'p';
    CHECK(!mprotect(closed, 16384, PROT_NONE) && !mprotect(readable, 16384, PROT_READ));
    unsigned long of_large = sum(large, big), of_heap = sum(heap, 70000), of_stack = sum(stack, sizeof stack);
    unsigned long of_program = sum(program, 8192), of_bss = sum(bss, sizeof bss);
    pid_t pid = getpid();
    void *end = sbrk(0);
    ready();
    unsigned long rounds = 0;
    while (go_on()) {
        rounds++;
        EQUAL(sum(large, big), of_large);
        EQUAL(sum(heap, 70000), of_heap);
        EQUAL(sum(stack, sizeof stack), of_stack);
        EQUAL(sum(bss, sizeof bss), of_bss);
        EQUAL(sum(program, 8192), of_program);
        CHECK(!strcmp(relocated, "initialised") && readable[16383] == 'r');
        EQUAL(getpid(), pid);
        EQUAL(syscall(SYS_gettid), pid);
        CHECK(sbrk(0) == end);
        /* Changes between checks, so that each pre-copy round has new, removed and moved pages. */
        large[rounds * 4099 % big]++;
        of_large = sum(large, big);
        memset(given + (rounds % 256) * 4096, (int)rounds, 4096);
        CHECK(!madvise(given + (rounds * 3 % 256) * 4096, 4096, MADV_DONTNEED));
        EQUAL(given[(rounds * 3 % 256) * 4096], 0);
        char *fleeting = mmap(0, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(fleeting, 'f', 65536);
        CHECK(!munmap(fleeting, 65536));
        beat();
        nap(1);
    }
    CHECK(!mprotect(closed, 16384, PROT_READ));
    CHECK(closed[0] == 'c' && closed[16383] == 'c');
    CHECK(!mprotect(reserved + (1L << 35), 4096, PROT_READ | PROT_WRITE));
    reserved[1L << 35] = 1;
    return passed();
}
