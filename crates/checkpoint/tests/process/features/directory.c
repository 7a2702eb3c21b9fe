/* The working directory, with an unusual name. */
#include <sys/stat.h>
#include "feature.h"

static char path[700];

static void check(void) {
    char found[700];
    CHECK(getcwd(found, sizeof found));
    CHECK(!strcmp(found, path));
    CHECK(!access("inside", F_OK));
}

FEATURE(snprintf(path, sizeof path, "%s/a b\n\xc3\xa4", folder); CHECK(!mkdir(path, 0755) && !chdir(path) && !mkdir("inside", 0755)), check(), )
