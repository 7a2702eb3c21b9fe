/* How the program ends is what who waits for it learns. */
#include "feature.h"

FEATURE(EQUAL(getpid(), syscall(SYS_getpid)), CHECK(getppid() > 0), )
