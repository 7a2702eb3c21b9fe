/* PR_MCE_KILL: the reaction to memory errors. */
#include <sys/prctl.h>
#include "feature.h"

FEATURE(NEEDS(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0, 0)), EQUAL(prctl(PR_MCE_KILL_GET, 0, 0, 0, 0), PR_MCE_KILL_EARLY), )
