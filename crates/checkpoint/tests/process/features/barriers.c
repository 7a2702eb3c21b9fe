/* membarrier: commands for which the process has registered stay usable. */
#include <linux/membarrier.h>
#include "feature.h"

static long barrier(int command) { return syscall(SYS_membarrier, command, 0, 0); }

FEATURE(NEEDS(barrier(MEMBARRIER_CMD_QUERY)); CHECK(!barrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) && !barrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) && !barrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_SYNC_CORE)),
    EQUAL(barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED), 0); EQUAL(barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE), 0);
    EQUAL(barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ), -1); EQUAL(errno, EPERM), )
