/* PR_SET_DUMPABLE off: no other process of the user may inspect the process. */
#include <sys/prctl.h>
#include "feature.h"

FEATURE(CHECK(!prctl(PR_SET_DUMPABLE, 0)), EQUAL(prctl(PR_GET_DUMPABLE), 0), )
