/* System V shared memory: a segment with a key, a removed segment, and their owners and attachments. */
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include "feature.h"

enum { BYTES = 3 * 4096 + 100 };

static int with_key, removed, theirs;
static unsigned char *writable, *again, *guarded, *hidden, *foreign;
static const unsigned char *constant;
static volatile int *board;

static struct shmid_ds of(int id) {
    struct shmid_ds found;
    CHECK(!shmctl(id, IPC_STAT, &found));
    return found;
}

static void *attach(int id, int flags) {
    void *place = shmat(id, 0, flags);
    CHECK(place != (void *)-1);
    return place;
}

/* A segment that another user has created, and that only this user may attach. */
static void borrow(void) {
    CHECK(!setresuid(-1, 65534, -1));
    theirs = shmget(IPC_PRIVATE, 4096, 0600);
    foreign = attach(theirs, 0);
    CHECK(!shmctl(theirs, IPC_RMID, 0));
    CHECK(!setresuid(-1, 0, -1));
    fill(foreign, 4096, 8);
}

static void begin(void) {
    borrow();
    removed = shmget(IPC_PRIVATE, 4096, 0600);
    hidden = attach(removed, 0);
    CHECK(!shmctl(removed, IPC_RMID, 0));
    with_key = shmget(getpid(), BYTES, IPC_CREAT | IPC_EXCL | 0640);
    CHECK(with_key >= 0);
    writable = attach(with_key, 0);
    constant = attach(with_key, SHM_RDONLY);
    guarded = attach(with_key, 0);
    CHECK(!mprotect(guarded + 4096, 4096, PROT_NONE));
    struct shmid_ds wanted = of(with_key);
    wanted.shm_perm.uid = 65534;
    wanted.shm_perm.mode = 0604;
    CHECK(!shmctl(with_key, IPC_SET, &wanted));
    fill(writable, BYTES, 3);
    fill(hidden, 4096, 5);
    board = (void *)(hidden + 4000);
    board[0] = board[1] = 0;
    if (!fork()) {
        prctl(PR_SET_PDEATHSIG, 9);
        for (;;) {
            board[1] |= writable[BYTES - 1] != (((BYTES - 1) * 7 + 3) >> 3 & 255);
            board[0]++;
            nap(1);
        }
    }
}

static void check(void) {
    unsigned long bytes = sum(writable, BYTES);
    EQUAL(sum(constant, BYTES), bytes);
    EQUAL(shmget(getpid(), 0, 0), with_key);
    struct shmid_ds found = of(with_key);
    EQUAL(found.shm_perm.__key, getpid());
    EQUAL(found.shm_segsz, BYTES);
    EQUAL(found.shm_perm.mode, 0604);
    EQUAL(found.shm_perm.uid, 65534);
    EQUAL(found.shm_perm.cuid, 0);
    /* Three mappings in each of two processes; one of the three consists of three parts. */
    EQUAL(found.shm_nattch, 10);
    found = of(removed);
    EQUAL(found.shm_nattch, 2);
    CHECK(found.shm_perm.mode & SHM_DEST);
    /* A process without capabilities may not inspect the segment. */
    if (!shmctl(theirs, IPC_STAT, &found)) {
        EQUAL(found.shm_perm.cuid, 65534);
        EQUAL(found.shm_perm.mode & 0777, 0600);
    } else CHECK(errno == EACCES);
    errno = 0;
    EQUAL(foreign[4095], (4095 * 7 + 8) >> 3 & 255);
    /* One more attachment is made and removed. */
    again = attach(with_key, 0);
    again[17]++;
    EQUAL(constant[17], again[17]);
    EQUAL(of(with_key).shm_nattch, 11);
    CHECK(!shmdt(again));
    for (int before = board[0]; before == board[0];) nap(1);
    EQUAL(board[1], 0);
    EQUAL(sum(hidden, 4000), sum(hidden, 4000));
    EQUAL(hidden[3999], (3999 * 7 + 5) >> 3 & 255);
}

static void end(void) {
    CHECK(!shmctl(with_key, IPC_RMID, 0));
    CHECK(!shmdt(writable) && !shmdt(constant) && !shmdt(guarded));
}

FEATURE(begin(), check(), end())
