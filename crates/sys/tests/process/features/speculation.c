/* PR_SET_SPECULATION_CTRL: a thread that forbids the processor to speculate. */
#include <sys/prctl.h>
#include "feature.h"

static long before;

FEATURE(before = prctl(PR_GET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, 0, 0, 0); if (before < 0 || !(before & PR_SPEC_PRCTL)) skip("no control");
    CHECK(!prctl(PR_SET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, PR_SPEC_DISABLE, 0, 0)),
    EQUAL(prctl(PR_GET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, 0, 0, 0), PR_SPEC_PRCTL | PR_SPEC_DISABLE), )
