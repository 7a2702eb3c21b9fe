/* A thread that accesses files as another user than its own. */
#include <sys/fsuid.h>
#include <sys/stat.h>
#include "feature.h"

FEATURE(CHECK(!chmod(folder, 0777)); setfsgid(77); setfsuid(88), EQUAL(setfsuid(-1), 88); EQUAL(setfsgid(-1), 77); EQUAL(geteuid(), 0), )
