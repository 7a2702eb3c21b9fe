/* Floating point, vector and control registers: x87, SSE, AVX, AVX-512, rounding modes. */
#include <fenv.h>
#include <immintrin.h>
#include <pthread.h>
#include <string.h>
#include "feature.h"

static volatile int stop;

__attribute__((target("avx512f"))) static void *wide(void *unused) {
    __m512i value = _mm512_set_epi64(1, 2, 3, 4, 5, 6, 7, 8), one = _mm512_set1_epi64(1);
    __mmask16 mask = 0x5aa5;
    long turns = 0;
    while (!stop) {
        for (int i = 0; i < 100000; i++, turns++) {
            value = _mm512_add_epi64(value, one);
            __asm__ volatile("" : "+v"(value), "+Yk"(mask));
        }
        long found[8];
        _mm512_storeu_si512(found, value);
        for (int i = 0; i < 8; i++) EQUAL(found[i], 8 - i + turns);
        EQUAL(mask, 0x5aa5);
    }
    return unused;
}

/* The registers that only AVX-512 has, and that the C library uses to copy memory. */
__attribute__((target("avx512f"))) static void *high(void *unused) {
    unsigned char in[128], out[128];
    for (int i = 0; i < 128; i++) in[i] = 7 * i + 1;
    while (!stop) {
        memset(out, 0, sizeof(out));
        long turns = 1000000;
        __asm__ volatile("vmovdqu64 (%1), %%zmm16; vmovdqu64 64(%1), %%zmm31\n"
                         "1: dec %0; jnz 1b\n"
                         "vmovdqu64 %%zmm16, (%2); vmovdqu64 %%zmm31, 64(%2)\n"
                         : "+r"(turns) : "r"(in), "r"(out) : "memory", "xmm16", "xmm31");
        CHECK(!memcmp(in, out, sizeof(in)));
    }
    return unused;
}

static void *x87(void *unused) {
    CHECK(!fesetround(FE_TOWARDZERO));
    unsigned status = _mm_getcsr(), found;
    while (!stop) {
        long double value = 1.0L;
        for (int i = 0; i < 1000; i++) { value = value * 1.0000001L; __asm__ volatile("" : "+t"(value)); }
        CHECK(value > 1.00009999L && value < 1.0001001L);
        EQUAL(fegetround(), FE_TOWARDZERO);
        found = _mm_getcsr();
        EQUAL(found & 0xffc0, status & 0xffc0);
    }
    return unused;
}

/* Defines a function that holds values in vector registers while its thread sleeps. The first thread calls it, since a
 * move makes the first thread do more work than the others. */
#define HELD(name, needs, move, first, last, bytes) \
    needs static void name(void) { \
        unsigned char in[2 * bytes], out[2 * bytes] = { 0 }; \
        for (int i = 0; i < 2 * bytes; i++) in[i] = 5 * i + 3; \
        struct timespec pause = { 0, 3000000 }; \
        long number = SYS_nanosleep; \
        __asm__ volatile(move " (%1), %%" first "\n" move " " #bytes "(%1), %%" last "\n" \
                         "syscall\n" \
                         move " %%" first ", (%2)\n" move " %%" last ", " #bytes "(%2)\n" \
                         : "+a"(number) : "r"(in), "r"(out), "D"(&pause), "S"(0L) \
                         : "memory", "rcx", "r11", "xmm2", "xmm15"); \
        CHECK(!memcmp(in, out, sizeof in)); \
    }

HELD(held_wide, __attribute__((target("avx512f"))), "vmovdqu64", "zmm2", "zmm15", 64)
HELD(held_narrow, , "movdqu", "xmm2", "xmm15", 16)

static pthread_t threads[3];

FEATURE(CHECK(!pthread_create(&threads[0], 0, x87, 0)); int avx = __builtin_cpu_supports("avx512f"); if (avx) { CHECK(!pthread_create(&threads[1], 0, wide, 0)); CHECK(!pthread_create(&threads[2], 0, high, 0)); }, avx ? held_wide() : held_narrow(),
    stop = 1; CHECK(!pthread_join(threads[0], 0)); if (avx) { CHECK(!pthread_join(threads[1], 0)); CHECK(!pthread_join(threads[2], 0)); })
