/* Frame of a program with one feature: the program sets the feature up, checks it repeatedly while it is moved, and
 * checks it once more at the end. Descriptors are tested elsewhere; the frame holds none. */
#include "../programs/self.h"

#define FEATURE(begin, check, end) \
    int main(int count, char **words) { \
        CHECK(count == 2); \
        folder = words[1]; \
        begin; \
        ready(); \
        do { check; beat(); nap(2); } while (go_on()); \
        end; \
        return passed(); \
    }

/* Reports that this kernel or processor lacks a prerequisite of the feature. */
static void skip(const char *why) {
    leave("skipped", why);
    ready();
    _exit(0);
}

/* Skips the program if the kernel lacks a call. */
#define NEEDS(call) do { \
        if ((long)(call) >= 0) break; \
        if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP && errno != ENODEV) fail(__LINE__, "%s", #call); \
        skip(#call); \
    } while (0)

static unsigned long sum(const void *from, size_t bytes) {
    const unsigned char *at = from;
    unsigned long s = 0;
    for (size_t i = 0; i < bytes; i++) s = s * 31 + at[i];
    return s;
}

/* Fills memory with bytes that depend on their position. */
static void fill(void *into, size_t bytes, unsigned seed) {
    unsigned char *at = into;
    for (size_t i = 0; i < bytes; i++) at[i] = (i * 7 + seed) >> 3;
}

#ifdef MAP_FAILED
static void *anonymous(size_t bytes, int protection, int flags) {
    void *place = mmap(0, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (place == MAP_FAILED) fail(__LINE__, "mmap");
    return place;
}

/* Returns true if the VmFlags of the mapping at this address contain a flag. Valid only while no move is under way. */
static int has_flag(const void *place, const char *flag) {
    char line[1024];
    unsigned long start, end;
    int inside = 0, found = -1;
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps);
    while (found < 0 && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2 && strchr(line, '-') < strchr(line, ' '))
            inside = (unsigned long)place >= start && (unsigned long)place < end;
        else if (inside && !strncmp(line, "VmFlags:", 8)) found = !!strstr(line, flag);
    }
    fclose(maps);
    CHECK(found >= 0);
    return found;
}
#endif
