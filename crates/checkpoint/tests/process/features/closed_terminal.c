/* A session with a controlling terminal that no process has open. */
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include "feature.h"

static int master;

static void begin(void) {
    char name[64];
    signal(SIGHUP, SIG_IGN);
    CHECK((master = posix_openpt(O_RDWR | O_NOCTTY)) >= 0);
    CHECK(!grantpt(master) && !unlockpt(master) && !ptsname_r(master, name, sizeof name));
    int slave = open(name, O_RDWR);
    CHECK(slave >= 0 && tcgetsid(slave) == getpid() && !close(slave));
}

static void check(void) {
    EQUAL(tcgetsid(master), getpid());
    EQUAL(tcgetpgrp(master), getpgrp());
}

static void end(void) {
    int own = open("/dev/tty", O_RDWR);
    CHECK(own >= 0);
    EQUAL(tcgetsid(own), getpid());
    EQUAL(tcgetpgrp(own), getpgrp());
}

FEATURE(begin(), check(), end())
