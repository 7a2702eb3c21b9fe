/* umask: the file mode creation mask. */
#include <sys/stat.h>
#include "feature.h"

FEATURE(umask(0137), EQUAL(umask(0137), 0137), )
