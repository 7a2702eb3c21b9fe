/* flags: -static -no-pie */
/* A program without shared libraries, at fixed addresses. */
#include <sys/mman.h>
#include "feature.h"

static long data = 7;

FEATURE(, EQUAL(data, 7 + 0); CHECK((unsigned long)&data < 1L << 32), )
