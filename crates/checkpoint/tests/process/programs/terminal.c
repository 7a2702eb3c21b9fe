/* A terminal with master and slave in the tree: modes, window size, the session that it controls, its foreground
 * group. */
#include "self.h"
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>

/* True if the terminal is not opened again by /dev/tty. */
static int quiet;

/* Answers lines up to a line that begins with q. */
static void answer(int terminal) {
    char text[64];
    long length;
    while ((length = read(terminal, text, sizeof text)) > 0 && text[0] != 'q') {
        EQUAL(tcgetpgrp(terminal), getpgrp());
        int own = quiet ? dup(terminal) : open("/dev/tty", O_RDWR);
        CHECK(own >= 0);
        EQUAL(write(own, text, length), length);
        close(own);
    }
}

/* Starts a background job. */
static void begin_job(int signal) {
    (void)signal;
    if (!fork()) {
        prctl(PR_SET_PDEATHSIG, 9);
        for (;;) pause();
    }
    leave("begun", "begun");
}

/* Leads a session that the terminal controls; either the shell itself is in the foreground, or a job of it. */
static void shell(const char *name, int has_job) {
    CHECK(setsid() == getpid());
    int terminal = open(name, O_RDWR);
    CHECK(terminal >= 0 && tcgetsid(terminal) == getpid());
    signal(SIGTTOU, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGUSR1, begin_job);
    if (!has_job) {
        answer(terminal);
        _exit(22);
    }
    pid_t job = fork();
    if (!job) {
        setpgid(0, 0);
        while (tcgetpgrp(terminal) != getpgrp()) nap(1); /* a background reader would be stopped */
        answer(terminal);
        _exit(21);
    }
    setpgid(job, job);
    CHECK(!tcsetpgrp(terminal, job));
    int status;
    EQUAL(waitpid(job, &status, 0), job);
    EQUAL(tcgetsid(terminal), getpid());
    _exit(WEXITSTATUS(status) + 1);
}

int main(int count, char **words) {
    CHECK(count == 2 || count == 3);
    folder = words[1];
    int has_job = count == 3 && !strcmp(words[2], "job");
    quiet = count == 3 && !has_job;
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(master >= 0 && !grantpt(master) && !unlockpt(master));
    char name[64];
    CHECK(!ptsname_r(master, name, sizeof name));
    struct winsize window = { 33, 121, 5, 6 };
    CHECK(!ioctl(master, TIOCSWINSZ, &window));
    struct termios modes;
    CHECK(!tcgetattr(master, &modes));
    modes.c_lflag &= ~ECHO;
    modes.c_oflag &= ~OPOST;
    modes.c_cc[VERASE] = 'x';
    CHECK(!tcsetattr(master, TCSANOW, &modes));
    pid_t leader = fork();
    if (!leader) {
        close(master);
        shell(name, has_job);
    }
    while (tcgetpgrp(master) <= 0 || (has_job && tcgetpgrp(master) == leader)) nap(1);
    pid_t job = tcgetpgrp(master);
    char text[16];
    snprintf(text, sizeof text, "%d", leader);
    leave("leader", text);
    ready();
    while (go_on()) {
        char found[64];
        EQUAL(write(master, "hellxlo\n", 8), 8);
        EQUAL(read_all(master, found, 6), 6);
        CHECK(!memcmp(found, "hello\n", 6));
        CHECK(!tcgetattr(master, &modes) && !(modes.c_lflag & ECHO) && modes.c_cc[VERASE] == 'x');
        CHECK(!ioctl(master, TIOCGWINSZ, &window) && window.ws_row == 33 && window.ws_col == 121);
        EQUAL(tcgetsid(master), leader);
        EQUAL(tcgetpgrp(master), job);
        char now[64];
        CHECK(!ptsname_r(master, now, sizeof now) && !strcmp(now, name) && !access(name, R_OK | W_OK));
        beat();
        nap(2);
    }
    EQUAL(write(master, "q\n", 2), 2);
    int status;
    EQUAL(waitpid(leader, &status, 0), leader);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 22);
    return passed();
}
