/* Arguments and environment, as the program has changed them, read through procfs; the executable; the auxiliary
 * vector. */
#include <sys/auxv.h>
#include "feature.h"

extern char **environ;
static char **arguments;
static char executable[512], *first;

static void look(const char *name, char *into, size_t room) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/%s", name);
    int file = open(path, O_RDONLY);
    CHECK(file >= 0);
    memset(into, 0, room);
    CHECK(read_all(file, into, room) >= 0);
    close(file);
}

static void end(void) {
    static char text[65536], link[512];
    long length = readlink("/proc/self/exe", link, sizeof link - 1);
    CHECK(length > 0 && !strcmp(link, executable));
    look("cmdline", text, sizeof text);
    CHECK(!strncmp(text, "CHANGED", 7));
    look("environ", text, sizeof text);
    CHECK(!memcmp(text, first, strlen(first)));
    look("auxv", text, sizeof text);
    unsigned long *pair = (unsigned long *)text, random = 0;
    for (; pair[0]; pair += 2) if (pair[0] == AT_RANDOM) random = pair[1];
    EQUAL(random, getauxval(AT_RANDOM));
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = strdup(words[1]);
    arguments = words;
    first = environ[0];
    CHECK(readlink("/proc/self/exe", executable, sizeof executable - 1) > 0 && first);
    memcpy(words[0], "CHANGED", 7);
    *first = 'Q';
    ready();
    while (go_on()) { CHECK(!strncmp(arguments[0], "CHANGED", 7) && *environ[0] == 'Q'); beat(); nap(2); }
    end();
    return passed();
}
