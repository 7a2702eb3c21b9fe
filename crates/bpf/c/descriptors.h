/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Record of a descriptor from descriptors.bpf.c; `src/descriptors.rs` mirrors it and asserts the size.
 */
#ifndef HOLDFAST_DESCRIPTORS_H
#define HOLDFAST_DESCRIPTORS_H

#include <linux/types.h>

enum descriptor_bits {
	DESCRIPTOR_CLOSE_ON_EXEC = 1,
	DESCRIPTOR_MORE = 2,   /* the kind or locks of the file add lines to fdinfo */
	DESCRIPTOR_THREAD = 4, /* in the table of a thread that has its own and is not its process's first */
	DESCRIPTOR_DIGEST = 8, /* the digest is valid: the file is an epoll set */
	DESCRIPTOR_OWNER = 16, /* the file has an owner (F_SETOWN) */
};

/* Record of a descriptor. */
struct descriptor {
	__u64 table; /* identity of the descriptor table */
	__u64 file;  /* identity of the open file */
	__s64 position;
	__u64 inode;
	__u64 cookie; /* cookie of a socket, otherwise 0 */
	__u32 device; /* device in the kernel's internal numbering */
	__u32 mount;
	__u32 fd;
	__u32 flags;
	__u32 bits;
	__u16 mode;
	__u16 family; /* address family of a socket, otherwise 0 */
	__u16 type;
	__u16 protocol;
	__u32 pad;
	__u64 digest; /* digest of an epoll set's entries, otherwise 0 */
};

_Static_assert(sizeof(struct descriptor) == 80, "descriptor");

#endif
