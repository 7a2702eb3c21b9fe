/* Memory files: some only open, some also mapped, sealed, with a file position. */
#include "self.h"
#include <sys/mman.h>
#include <sys/stat.h>

int main(int count, char **words) {
    CHECK(count == 2);
    folder = words[1];
    int plain = memfd_create("plain", MFD_CLOEXEC), mapped = memfd_create("mapped", MFD_ALLOW_SEALING);
    int sealed = memfd_create("sealed", MFD_ALLOW_SEALING), big = memfd_create("big", 0);
    EQUAL(write(plain, "by value", 8), 8);
    CHECK(!ftruncate(mapped, 1 << 20) && !fcntl(mapped, F_ADD_SEALS, F_SEAL_SHRINK));
    long *words_of = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, mapped, 0);
    CHECK(words_of != MAP_FAILED);
    EQUAL(write(sealed, "closed", 6), 6);
    CHECK(!fcntl(sealed, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SEAL));
    CHECK(!ftruncate(big, 20 << 20));
    EQUAL(pwrite(big, "far", 3, 15 << 20), 3);
    ready();
    for (long turn = 1; go_on(); turn++) {
        char text[16] = { 0 };
        EQUAL(pread(plain, text, 8, 0), 8);
        CHECK(!strcmp(text, "by value"));
        EQUAL(lseek(plain, 0, SEEK_CUR), 8);
        /* Mapping and descriptor show the same memory. */
        words_of[1000] = turn;
        long through;
        EQUAL(pread(mapped, &through, 8, 8000), 8);
        EQUAL(through, turn);
        through = -turn;
        EQUAL(pwrite(mapped, &through, 8, 900000), 8);
        EQUAL(words_of[900000 / 8], -turn);
        EQUAL(fcntl(mapped, F_GET_SEALS), F_SEAL_SHRINK);
        EQUAL(fcntl(sealed, F_GET_SEALS), F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SEAL);
        CHECK(pwrite(sealed, "x", 1, 0) == -1 && errno == EPERM);
        EQUAL(pread(big, text, 3, 15 << 20), 3);
        CHECK(!memcmp(text, "far", 3));
        struct stat now;
        CHECK(!fstat(big, &now) && now.st_size == 20 << 20 && now.st_blocks < 1000);
        beat();
        nap(1);
    }
    return passed();
}
