/* Capability sets: effective, permitted, inheritable, bounding, ambient. */
#include <linux/capability.h>
#include <sys/prctl.h>
#include "feature.h"

static struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
static struct __user_cap_data_struct wanted[2];

static void begin(void) {
    CHECK(!prctl(PR_CAPBSET_DROP, CAP_MKNOD) && !prctl(PR_CAPBSET_DROP, CAP_SYSLOG));
    wanted[0] = (struct __user_cap_data_struct){ 1 << CAP_CHOWN | 1 << CAP_KILL, 1 << CAP_CHOWN | 1 << CAP_KILL | 1 << CAP_FOWNER, 1 << CAP_CHOWN | 1 << CAP_FOWNER };
    wanted[1] = (struct __user_cap_data_struct){ 0, 1 << (CAP_BPF - 32), 0 };
    CHECK(!syscall(SYS_capset, &header, wanted));
    CHECK(!prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_FOWNER, 0, 0));
}

static void check(void) {
    struct __user_cap_data_struct found[2];
    CHECK(!syscall(SYS_capget, &header, found));
    CHECK(!memcmp(found, wanted, sizeof found));
    for (int i = 0; i <= CAP_LAST_CAP && prctl(PR_CAPBSET_READ, i) >= 0; i++) EQUAL(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, i, 0, 0), i == CAP_FOWNER);
    EQUAL(prctl(PR_CAPBSET_READ, CAP_MKNOD), 0);
    EQUAL(prctl(PR_CAPBSET_READ, CAP_SYSLOG), 0);
    EQUAL(prctl(PR_CAPBSET_READ, CAP_CHOWN), 1);
}

FEATURE(begin(), check(), )
