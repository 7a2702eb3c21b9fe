/* Real, effective, saved and filesystem IDs of user and group, and supplementary groups. */
#include <grp.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include "feature.h"

static void begin(void) {
    gid_t groups[40];
    for (int i = 0; i < 40; i++) groups[i] = 5000 + i * 3;
    CHECK(!chmod(folder, 0777));
    CHECK(!setgroups(40, groups) && !setresgid(101, 102, 103) && !setresuid(201, 202, 203));
}

static void check(void) {
    uid_t users[3];
    gid_t groups[3], more[50];
    CHECK(!getresuid(users, users + 1, users + 2) && users[0] == 201 && users[1] == 202 && users[2] == 203);
    CHECK(!getresgid(groups, groups + 1, groups + 2) && groups[0] == 101 && groups[1] == 102 && groups[2] == 103);
    EQUAL(setfsuid(-1), 202);
    EQUAL(setfsgid(-1), 102);
    EQUAL(getgroups(50, more), 40);
    for (int i = 0; i < 40; i++) EQUAL(more[i], 5000 + i * 3);
}

FEATURE(begin(), check(), EQUAL(seteuid(0), -1))
