/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Security modules' data beside the credentials of threads: only there does a Landlock domain show.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* Kernel structures, with the fields that are read; the loader relocates the fields by name. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct cred {
	void *security;
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

/* `src/domains.rs` mirrors this structure and asserts the size. */
struct kept {
	__u64 address; /* address of the words, 0 if they cannot be read */
	__u64 words[31];
};

_Static_assert(sizeof(struct kept) == 256, "kept");

SEC("iter/task")
int read_kept(struct bpf_iter__task *context)
{
	struct task_struct *task = context->task;
	struct kept kept = {};
	if (!task)
		return 0;
	void *security = BPF_CORE_READ(task, real_cred, security);
	if (!bpf_probe_read_kernel(kept.words, sizeof(kept.words), security))
		kept.address = (__u64)security;
	bpf_seq_write(context->meta->seq, &kept, sizeof(kept));
	return 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
