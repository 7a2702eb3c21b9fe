/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * What files.bpf.c tells of a descriptor; `src/files.rs` mirrors it and asserts the size.
 */
#ifndef HOLDFAST_FILES_H
#define HOLDFAST_FILES_H

#include <linux/types.h>

enum listed_bits {
	LISTED_CLOSE_ON_EXEC = 1,
	LISTED_MORE = 2,   /* its kind or its locks add lines to fdinfo */
	LISTED_THREAD = 4, /* of a thread that is not its process's first, and has a table of its own */
	LISTED_DIGEST = 8, /* the digest is that of an epoll set */
	LISTED_OWNER = 16, /* F_SETOWN has named somebody */
};

/* A descriptor. */
struct listed {
	__u64 table; /* identity of the descriptor table */
	__u64 file;  /* identity of the open file */
	__s64 position;
	__u64 inode;
	__u64 cookie; /* of a socket, else 0 */
	__u32 device; /* as the kernel numbers it inside */
	__u32 mount;
	__u32 fd;
	__u32 flags;
	__u32 bits;
	__u16 mode;
	__u16 family; /* of a socket, else 0 */
	__u16 type;
	__u16 protocol;
	__u32 pad;
	__u64 digest; /* of what an epoll set watches, else 0 */
};

_Static_assert(sizeof(struct listed) == 80, "listed");

#endif
