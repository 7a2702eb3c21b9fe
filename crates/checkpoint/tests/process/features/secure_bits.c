/* Securebits, their locks, and PR_SET_KEEPCAPS. */
#include <linux/securebits.h>
#include <sys/prctl.h>
#include "feature.h"

enum { BITS = SECBIT_NO_CAP_AMBIENT_RAISE | SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED | SECBIT_KEEP_CAPS | SECBIT_NOROOT };

FEATURE(CHECK(!prctl(PR_SET_SECUREBITS, BITS)), EQUAL(prctl(PR_GET_SECUREBITS), BITS); EQUAL(prctl(PR_GET_KEEPCAPS), 1), EQUAL(prctl(PR_SET_SECUREBITS, 0), -1))
