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

/* `src/landlock.rs` mirrors this structure and asserts the size. */
struct security_blob {
	__u64 address; /* address of the words, 0 if they cannot be read */
	__u64 words[31];
};

_Static_assert(sizeof(struct security_blob) == 256, "security_blob");

SEC("iter/task")
int read_security_blob(struct bpf_iter__task *context)
{
	struct task_struct *task = context->task;
	struct security_blob blob = {};
	if (!task)
		return 0;
	void *security = BPF_CORE_READ(task, real_cred, security);
	if (!bpf_probe_read_kernel(blob.words, sizeof(blob.words), security))
		blob.address = (__u64)security;
	bpf_seq_write(context->meta->seq, &blob, sizeof(blob));
	return 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
