/* Identity and rights of the process: IDs, groups, capabilities, limits, mask, directory, names, priorities. */
#include "self.h"
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

extern char **environ;

static struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
static struct __user_cap_data_struct caps[2];

static void check_capabilities(void) {
    struct __user_cap_data_struct read[2];
    CHECK(!syscall(SYS_capget, &header, read));
    EQUAL(read[0].permitted, caps[0].permitted);
    EQUAL(read[0].effective, caps[0].effective);
    EQUAL(read[0].inheritable, caps[0].inheritable);
    EQUAL(prctl(PR_CAPBSET_READ, CAP_SYS_BOOT), 0);
    EQUAL(prctl(PR_CAPBSET_READ, CAP_CHOWN), 1);
    EQUAL(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_NET_RAW, 0, 0), 1);
}

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    CHECK(!chmod(folder, 0777));
    char directory[512], here[512], name[16];
    snprintf(directory, sizeof directory, "%s/inner", folder);
    CHECK(!mkdir(directory, 0777) && !chdir(directory));
    gid_t groups[] = { 7, 11, 13 }, list[8];
    struct rlimit files = { 333, 1000 }, core = { 0, 4096 }, found;
    CHECK(!setrlimit(RLIMIT_NOFILE, &files) && !setrlimit(RLIMIT_CORE, &core));
    int priority = nice(2);
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(0, &set);
    CHECK(!sched_setaffinity(0, sizeof set, &set));
    CHECK(!prctl(PR_CAPBSET_DROP, CAP_SYS_BOOT) && !prctl(PR_SET_KEEPCAPS, 1));
    CHECK(!setgroups(3, groups) && !setresgid(1001, 1002, 1003) && !setresuid(2001, 2002, 2003));
    caps[0].permitted = 1 << CAP_NET_BIND_SERVICE | 1 << CAP_NET_RAW;
    caps[0].effective = 1 << CAP_NET_RAW;
    caps[0].inheritable = 1 << CAP_NET_RAW;
    CHECK(!syscall(SYS_capset, &header, caps));
    CHECK(!prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_RAW, 0, 0));
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_NAME, "somebody else"));
    CHECK(!prctl(PR_SET_DUMPABLE, 1) && !prctl(PR_SET_TIMERSLACK, 123456) && !prctl(PR_SET_CHILD_SUBREAPER, 1));
    umask(0027);
    ready();
    while (go_on()) {
        uid_t ids[3];
        CHECK(!getresuid(&ids[0], &ids[1], &ids[2]) && ids[0] == 2001 && ids[1] == 2002 && ids[2] == 2003);
        CHECK(!getresgid(&ids[0], &ids[1], &ids[2]) && ids[0] == 1001 && ids[1] == 1002 && ids[2] == 1003);
        EQUAL(getgroups(8, list), 3);
        CHECK(list[0] == 7 && list[1] == 11 && list[2] == 13);
        check_capabilities();
        EQUAL(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
        EQUAL(prctl(PR_GET_DUMPABLE), 1);
        EQUAL(prctl(PR_GET_TIMERSLACK), 123456);
        int reaper = 0;
        CHECK(!prctl(PR_GET_CHILD_SUBREAPER, &reaper) && reaper);
        CHECK(!prctl(PR_GET_NAME, name) && !strcmp(name, "somebody else"));
        CHECK(!getrlimit(RLIMIT_NOFILE, &found) && found.rlim_cur == 333 && found.rlim_max == 1000);
        CHECK(!getrlimit(RLIMIT_CORE, &found) && found.rlim_cur == 0 && found.rlim_max == 4096);
        errno = 0;
        CHECK(getpriority(PRIO_PROCESS, 0) == priority && !errno);
        CPU_ZERO(&set);
        CHECK(!sched_getaffinity(0, sizeof set, &set));
        EQUAL(CPU_COUNT(&set), 1);
        mode_t mask = umask(0027);
        EQUAL(mask, 0027);
        CHECK(getcwd(here, sizeof here) && !strcmp(here, directory));
        char line[4096] = "";
        int file = open("/proc/self/cmdline", O_RDONLY);
        CHECK(file >= 0 && read_all(file, line, sizeof line) > 0 && strstr(line, "identity"));
        close(file);
        CHECK(environ && getenv("PATH"));
        beat();
        nap(1);
    }
    return passed();
}
