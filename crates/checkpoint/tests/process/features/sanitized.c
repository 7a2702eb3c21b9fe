/* flags: -fsanitize=address -fno-omit-frame-pointer */
/* AddressSanitizer: its shadow memory reserves terabytes of addresses, and it still detects poisoned memory. */
#include <sys/mman.h>
#include "feature.h"

static unsigned char *heap;
int __asan_address_is_poisoned(void const volatile *address);

static void check(void) {
    unsigned char *some = malloc(100);
    fill(some, 100, 1);
    EQUAL(some[99], (99 * 7 + 1) >> 3);
    CHECK(__asan_address_is_poisoned(some + 100));
    const void *volatile at = some;
    free(some);
    CHECK(__asan_address_is_poisoned(at));
    CHECK(!__asan_address_is_poisoned(heap + 9999) && __asan_address_is_poisoned(heap + 10000));
    EQUAL(heap[9999], (9999 * 7 + 4) >> 3 & 255);
}

FEATURE(heap = malloc(10000); fill(heap, 10000, 4), check(), free(heap))
