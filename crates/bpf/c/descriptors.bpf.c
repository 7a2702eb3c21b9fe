/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Descriptors of a process, with one read and no system call for each. The process may be running, and is not changed.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include "epoll.h"
#include "descriptors.h"

/* Kernel structures, with the fields that are read; the loader relocates the fields by name. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct vfsmount;

struct qstr {
	const unsigned char *name;
};

struct dentry {
	struct qstr d_name;
};

struct path {
	struct vfsmount *mnt;
	struct dentry *dentry;
};

struct vfsmount {
	int mnt_flags;
};

struct mount {
	struct vfsmount mnt;
	int mnt_id;
};

struct super_block {
	__u32 s_dev;
	unsigned long s_magic;
};

struct list_head {
	struct list_head *next;
};

struct file_lock_context {
	struct list_head flc_flock;
	struct list_head flc_posix;
	struct list_head flc_lease;
};

struct inode {
	unsigned short i_mode;
	struct super_block *i_sb;
	unsigned long i_ino;
	struct file_lock_context *i_flctx;
};

struct file_operations {
	void *show_fdinfo;
};

struct proto_ops {
	void *show_fdinfo;
};

struct file {
	const struct file_operations *f_op;
	struct inode *f_inode;
	unsigned int f_flags;
	void *private_data;
	struct path f_path;
	long long f_pos;
};

struct pid;

struct fown_struct {
	struct pid *pid;
};

/* Variant of Linux 6.12 and later. */
struct file___owner_apart {
	struct fown_struct *f_owner;
};

struct file___owner_inside {
	struct fown_struct f_owner;
};

struct sock_common {
	unsigned short skc_family;
};

struct sock {
	struct sock_common __sk_common;
	__u16 sk_type;
	__u16 sk_protocol;
};

struct socket {
	struct sock *sk;
	const struct proto_ops *ops;
};

struct fdtable {
	unsigned long *close_on_exec;
};

struct files_struct {
	struct fdtable *fdt;
};

struct task_struct {
	int pid;
	int tgid;
	struct files_struct *files;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
};

#pragma clang attribute pop

#define ANON_INODE_FS_MAGIC 0x09041934

#define IS_NONEMPTY(list) (BPF_CORE_READ(list, next) != (list))

/* Returns true if there is a lock or lease on a file. The lists are checked, because the lock context outlives its
 * locks, and all files without a name share an inode. */
static __always_inline int is_locked(struct inode *inode)
{
	struct file_lock_context *locks;
	/* Read as a number, so that addresses in it can be compared. */
	bpf_core_read(&locks, sizeof(locks), &inode->i_flctx);
	return locks && (IS_NONEMPTY(&locks->flc_flock) || IS_NONEMPTY(&locks->flc_posix) || IS_NONEMPTY(&locks->flc_lease));
}

static __always_inline int has_owner(struct file *file)
{
	struct file___owner_apart *apart = (void *)file;
	struct file___owner_inside *inside = (void *)file;
	if (!bpf_core_field_exists(apart->f_owner))
		return !!BPF_CORE_READ(inside, f_owner.pid);
	struct fown_struct *owner = BPF_CORE_READ(apart, f_owner);
	return owner && BPF_CORE_READ(owner, pid);
}

static __always_inline void file_fields(struct descriptor *l, struct file *file)
{
	struct inode *inode = file->f_inode;
	l->file = (__u64)file;
	l->position = file->f_pos;
	l->flags = file->f_flags;
	l->inode = inode->i_ino;
	l->mode = inode->i_mode;
	l->device = inode->i_sb->s_dev;
	struct mount *mount = (void *)file->f_path.mnt - bpf_core_field_offset(struct mount, mnt);
	l->mount = BPF_CORE_READ(mount, mnt_id);
	if (is_locked(inode))
		l->bits |= DESCRIPTOR_MORE;
	if (has_owner(file))
		l->bits |= DESCRIPTOR_OWNER;
}

static const char epoll_name[] = "[eventpoll]";

/* Returns true if an anonymous file is an epoll set. */
static __always_inline int is_epoll(struct file *file)
{
	char name[sizeof(epoll_name)] = {};
	if (file->f_inode->i_sb->s_magic != ANON_INODE_FS_MAGIC)
		return 0;
	bpf_probe_read_kernel_str(name, sizeof(name), BPF_CORE_READ(file, f_path.dentry, d_name.name));
	return !bpf_strncmp(name, sizeof(name), epoll_name);
}

/* Fills in the fields that depend on the file's kind. A socket's fdinfo has extra lines only if its protocol adds
 * some. */
static __always_inline void kind_fields(struct descriptor *l, struct file *file)
{
	struct socket *socket = bpf_sock_from_file(file);
	if (!socket) {
		int has_locks = l->bits & DESCRIPTOR_MORE;
		if (file->f_op->show_fdinfo)
			l->bits |= DESCRIPTOR_MORE;
		if (!has_locks && is_epoll(file) && epoll_digest(file->private_data, &l->digest))
			l->bits |= DESCRIPTOR_DIGEST;
		return;
	}
	if (socket->ops->show_fdinfo)
		l->bits |= DESCRIPTOR_MORE;
	struct sock *sk = socket->sk;
	if (!sk)
		return;
	l->family = sk->__sk_common.skc_family;
	l->type = sk->sk_type;
	l->protocol = sk->sk_protocol;
	l->cookie = bpf_get_socket_cookie(sk);
}

static __always_inline int closes_on_exec(struct task_struct *task, __u32 fd)
{
	unsigned long word = 0, *words = task->files->fdt->close_on_exec;
	bpf_probe_read_kernel(&word, sizeof(word), words + fd / 64);
	return word >> (fd % 64) & 1;
}

SEC("iter/task_file")
int list_descriptors(struct bpf_iter__task_file *context)
{
	struct task_struct *task = context->task;
	struct file *file = context->file;
	if (!task || !file)
		return 0;
	struct descriptor l = {.fd = context->fd};
	l.table = (__u64)task->files;
	file_fields(&l, file);
	kind_fields(&l, file);
	if (closes_on_exec(task, l.fd))
		l.bits |= DESCRIPTOR_CLOSE_ON_EXEC;
	if (task->pid != task->tgid)
		l.bits |= DESCRIPTOR_THREAD;
	bpf_seq_write(context->meta->seq, &l, sizeof(l));
	return 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
