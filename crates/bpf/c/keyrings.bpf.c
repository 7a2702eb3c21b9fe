/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Keys in the keyrings of threads, which no other interface shows for another process.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* Kernel structures, with the fields that are read; the loader relocates the fields by name. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct assoc_array {
	void *root;
	unsigned long nr_leaves_on_tree;
};

struct assoc_array_node {
	void *slots[16];
};

struct key {
	char *description;
	struct assoc_array keys;
};

struct cred {
	struct key *session_keyring;
	struct key *process_keyring;
	struct key *thread_keyring;
};

struct task_struct {
	const struct cred *real_cred;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};

#pragma clang attribute pop

/* Low bits of a slot (`linux/assoc_array_priv.h`, `security/keys/keyring.c`). */
#define META 1UL     /* a node or a shortcut, not a key */
#define SHORTCUT 2UL /* of META: a shortcut */
#define KEYRING 2UL  /* of a key: a keyring */
#define SLOTS 16

/* `src/keyrings.rs` mirrors this structure and asserts the size. */
struct key_counts {
	__u64 own;     /* keys of thread and process */
	__u64 session; /* keys of the session that are not keyrings */
};

_Static_assert(sizeof(struct key_counts) == 16, "key_counts");

static __always_inline __u64 keyring_length(struct key *keyring)
{
	return keyring ? BPF_CORE_READ(keyring, keys.nr_leaves_on_tree) : 0;
}

/* Returns true for the key that systemd puts into each service's session keyring. */
static __always_inline int is_systemds(void *key)
{
	static const char name[] = "invocation_id";
	char found[sizeof(name) + 1] = {}; /* one byte more, to tell a longer name apart */
	char *description = BPF_CORE_READ((struct key *)key, description);
	bpf_probe_read_kernel_str(found, sizeof(found), description);
	for (unsigned int i = 0; i < sizeof(name); i++)
		if (found[i] != name[i])
			return 0;
	return 1;
}

/* Counts the keys of a session keyring. Keyrings do not count, because a login links the user's keyrings into it. */
static __always_inline __u64 count_keys(struct key *keyring)
{
	__u64 all = keyring_length(keyring), count = 0;
	if (!all)
		return 0;
	__u64 root = (__u64)BPF_CORE_READ(keyring, keys.root);
	if ((root & (META | SHORTCUT)) != META)
		return all;
	struct assoc_array_node *node = (void *)(root & ~(META | SHORTCUT));
	for (unsigned int i = 0; i < SLOTS; i++) {
		__u64 slot = (__u64)BPF_CORE_READ(node, slots[i]);
		if (slot & META)
			return all;
		if (slot && !(slot & KEYRING) && !is_systemds((void *)slot))
			count++;
	}
	return count;
}

SEC("iter/task")
int read_keyrings(struct bpf_iter__task *context)
{
	struct task_struct *task = context->task;
	struct key_counts counts = {};
	if (!task)
		return 0;
	const struct cred *cred = BPF_CORE_READ(task, real_cred);
	if (bpf_core_field_exists(cred->session_keyring)) {
		struct key *thread = BPF_CORE_READ(cred, thread_keyring);
		struct key *process = BPF_CORE_READ(cred, process_keyring);
		counts.own = keyring_length(thread) + keyring_length(process);
		counts.session = count_keys(BPF_CORE_READ(cred, session_keyring));
	}
	bpf_seq_write(context->meta->seq, &counts, sizeof(counts));
	return 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
