/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Digest of an epoll set's entries as one number: a reader that knows the expected digest need not read the set.
 */
#ifndef HOLDFAST_EPOLL_H
#define HOLDFAST_EPOLL_H

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <linux/types.h>

/* Most visited entries, and most nodes on the stack of the walk: a tree of the kernel is less than twice as deep as the
 * logarithm of its size. */
#define EPOLL_ENTRIES_MAX (1 << 20)
#define EPOLL_DEPTH_MAX 64
/* `digest.rs` has the same constant. */
#define EPOLL_MULTIPLIER 0x9fb21c651e98df25ULL

struct file;

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct rb_node {
	struct rb_node *rb_right;
	struct rb_node *rb_left;
};

struct rb_root {
	struct rb_node *rb_node;
};

struct rb_root_cached {
	struct rb_root rb_root;
};

struct eventpoll {
	struct rb_root_cached rbr;
};

struct epoll_filefd {
	struct file *file;
	int fd;
};

struct epoll_event {
	__u32 events;
	__u64 data;
};

struct epitem {
	struct rb_node rbn;
	struct epoll_filefd ffd;
	struct epoll_event event;
};

#pragma clang attribute pop

/* Stack of the walk; one reader at a time. */
struct epoll_pending {
	__u64 nodes[EPOLL_DEPTH_MAX];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct epoll_pending);
} epoll_pending SEC(".maps");

struct epoll_walk {
	struct rb_node *node;
	__u64 digest;
	__u32 waiting;
	int is_done;
};

static __always_inline __u64 epoll_mix(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * EPOLL_MULTIPLIER;
	return hash ^ (hash >> 32);
}

static __always_inline __u64 epoll_entry(struct epitem *entry)
{
	__u64 file = (__u64)BPF_CORE_READ(entry, ffd.file);
	__u32 fd = BPF_CORE_READ(entry, ffd.fd), events = BPF_CORE_READ(entry, event.events);
	__u64 hash = epoll_mix(0, file);
	hash = epoll_mix(hash, (__u64)fd << 32 | events);
	hash = epoll_mix(hash, BPF_CORE_READ(entry, event.data));
	return epoll_mix(hash, 1);
}

/* Visits one entry; the order of entries does not matter. */
static long epoll_step(__u32 index, void *context)
{
	struct epoll_walk *walk = context;
	__u32 zero = 0;
	struct epoll_pending *pending = bpf_map_lookup_elem(&epoll_pending, &zero);
	if (!pending)
		return 1;
	if (!walk->node) {
		walk->is_done = !walk->waiting;
		if (walk->is_done)
			return 1;
		walk->waiting--;
		walk->node = (void *)pending->nodes[walk->waiting % EPOLL_DEPTH_MAX];
	}
	struct rb_node *node = walk->node, *right = BPF_CORE_READ(node, rb_right);
	walk->digest += epoll_entry((void *)node - bpf_core_field_offset(struct epitem, rbn));
	if (right) {
		if (walk->waiting >= EPOLL_DEPTH_MAX)
			return 1;
		pending->nodes[walk->waiting % EPOLL_DEPTH_MAX] = (__u64)right;
		walk->waiting++;
	}
	walk->node = BPF_CORE_READ(node, rb_left);
	return 0;
}

/* Computes the sum over the set's entries; returns true if all were visited. */
static __always_inline int epoll_digest(void *private_data, __u64 *digest)
{
	struct eventpoll *set = private_data;
	struct epoll_walk walk = {.node = BPF_CORE_READ(set, rbr.rb_root.rb_node)};
	bpf_loop(EPOLL_ENTRIES_MAX, epoll_step, &walk, 0);
	*digest = walk.digest;
	return walk.is_done;
}

#endif
