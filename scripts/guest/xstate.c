/* Lets User-mode Linux 6.1 run on processors with a larger register state than it knows (AMX). The kernel accepts only
 * complete register sets, so the missing part of a set is filled with the process's current state. Loaded with
 * LD_PRELOAD. */
#define _GNU_SOURCE
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char whole[65536] __attribute__((aligned(64)));

long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	pid_t pid = va_arg(arguments, pid_t);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);
	if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
		struct iovec *part = data;
		struct iovec full = { whole, sizeof(whole) };
		if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, address, &full) == 0 && full.iov_len > part->iov_len) {
			memcpy(whole, part->iov_base, part->iov_len);
			return syscall(SYS_ptrace, request, pid, address, &full);
		}
	}
	long peeked;
	/* Requests that read a word follow the C library's convention: the word is the result. */
	if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
		long result = syscall(SYS_ptrace, request, pid, address, &peeked);
		return result < 0 ? result : peeked;
	}
	return syscall(SYS_ptrace, request, pid, address, data);
}
