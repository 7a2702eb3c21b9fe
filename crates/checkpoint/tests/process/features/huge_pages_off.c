/* PR_SET_THP_DISABLE: transparent huge pages are switched off. */
#include <sys/prctl.h>
#include "feature.h"

FEATURE(CHECK(!prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)), EQUAL(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1), )
