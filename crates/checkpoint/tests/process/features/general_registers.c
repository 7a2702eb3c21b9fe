/* A loop that makes no system calls, with a value in every register and the direction flag set. */
#include <pthread.h>
#include "feature.h"

static volatile long stop, rounds;

static void *body(void *unused) {
    while (!stop) {
        unsigned long wrong;
        __asm__ volatile(
            "sub $128, %%rsp; push %%rbp; std\n"
            "mov $11, %%rbx; mov $12, %%rcx; mov $13, %%rdx; mov $14, %%rsi; mov $15, %%rdi; mov $16, %%r8\n"
            "mov $17, %%r9; mov $18, %%r10; mov $19, %%r11; mov $20, %%r12; mov $21, %%r13; mov $22, %%rbp\n"
            "mov $20000000, %%r14; 1: dec %%r14; jnz 1b\n"
            "pushfq; pop %%rax; cld; and $0x400, %%rax; xor $0x400, %%rax\n"
            "sub $11, %%rbx; or %%rbx, %%rax; sub $12, %%rcx; or %%rcx, %%rax; sub $13, %%rdx; or %%rdx, %%rax; sub $14, %%rsi; or %%rsi, %%rax\n"
            "sub $15, %%rdi; or %%rdi, %%rax; sub $16, %%r8; or %%r8, %%rax; sub $17, %%r9; or %%r9, %%rax; sub $18, %%r10; or %%r10, %%rax\n"
            "sub $19, %%r11; or %%r11, %%rax; sub $20, %%r12; or %%r12, %%rax; sub $21, %%r13; or %%r13, %%rax; sub $22, %%rbp; or %%rbp, %%rax\n"
            "pop %%rbp; add $128, %%rsp\n"
            : "=a"(wrong) : : "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "memory", "cc");
        EQUAL(wrong, 0);
        rounds++;
    }
    return unused;
}

static pthread_t thread;

FEATURE(CHECK(!pthread_create(&thread, 0, body, 0)), for (long before = rounds; before == rounds;) nap(1), stop = 1; CHECK(!pthread_join(thread, 0)))
