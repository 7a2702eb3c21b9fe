/* The OOM score adjustment, and the core dump filter. */
#include "feature.h"

static void write_text(const char *path, const char *text) {
    int file = open(path, O_WRONLY);
    CHECK(file >= 0);
    EQUAL(write(file, text, strlen(text)), strlen(text));
    close(file);
}

static long read_number(const char *path, int base) {
    char text[64] = "";
    int file = open(path, O_RDONLY);
    CHECK(file >= 0 && read(file, text, 63) > 0);
    close(file);
    return strtol(text, 0, base);
}

FEATURE(write_text("/proc/self/oom_score_adj", "321"); write_text("/proc/self/coredump_filter", "0x75"), ,
    EQUAL(read_number("/proc/self/oom_score_adj", 10), 321); EQUAL(read_number("/proc/self/coredump_filter", 16), 0x75))
