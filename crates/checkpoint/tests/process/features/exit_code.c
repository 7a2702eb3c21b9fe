/* The process that waits for the program receives its exit status. */
#include "feature.h"

FEATURE(EQUAL(getpid(), syscall(SYS_getpid)), CHECK(getppid() > 0), )
