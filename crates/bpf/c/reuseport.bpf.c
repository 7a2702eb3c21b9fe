/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Sockets that share an address and a port (SO_REUSEPORT). Among UDP sockets the kernel selects one for each client by
 * a hash with a secret of its own, so that after a move clients would reach other sockets than before.
 * `query_receivers` reports the kernel's selection here; `select_socket` delivers to the socket that user space has
 * assigned to a client, and leaves other clients to the kernel. `list_reuseport` reports the programs by which groups of
 * sockets select.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "shared.h"

#define ETH_P_IPV6 0x86DD
#define MEMBERS_MAX 16384
#define CLIENTS_MAX (1 << 17)
#define QUERIES_MAX 64

/* Sockets with assigned clients; the kernel removes a socket that is closed. User space sees their cookies. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, MEMBERS_MAX);
	__type(key, __u32);
	__type(value, __u64);
} members SEC(".maps");

/* Member number of each client. The client that was silent longest is evicted first. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, CLIENTS_MAX);
	__type(key, struct flow_key);
	__type(value, __u32);
} clients SEC(".maps");

/* Candidate sockets, as numbers from 1 on. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} marks SEC(".maps");

struct selection_query {
	struct flow_key flow;
	__u32 socket_mark; /* mark of the socket; 0: another socket, or none */
	__u32 pad;
};

struct selection_queries {
	__u32 count;
	__u32 pad;
	struct selection_query entries[QUERIES_MAX];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct selection_queries);
} selection_queries SEC(".maps");

static __always_inline int is_v4(const __u8 *address)
{
	const __u64 *high = (const __u64 *)address;
	const __u32 *words = (const __u32 *)address;
	return !*high && words[2] == bpf_htonl(0xffff);
}

static __always_inline void map_v4(__u8 *to, __u32 address)
{
	__u32 *words = (__u32 *)to;
	words[0] = words[1] = 0;
	words[2] = bpf_htonl(0xffff);
	words[3] = address;
}

static __always_inline __u32 query_socket(struct __sk_buff *skb, struct flow_key *flow)
{
	struct bpf_sock_tuple tuple = {};
	__u32 size;
	if (is_v4(flow->local)) {
		tuple.ipv4.saddr = ((__u32 *)flow->remote)[3];
		tuple.ipv4.daddr = ((__u32 *)flow->local)[3];
		tuple.ipv4.sport = flow->remote_port;
		tuple.ipv4.dport = flow->local_port;
		size = sizeof(tuple.ipv4);
	} else {
		__builtin_memcpy(tuple.ipv6.saddr, flow->remote, 16);
		__builtin_memcpy(tuple.ipv6.daddr, flow->local, 16);
		tuple.ipv6.sport = flow->remote_port;
		tuple.ipv6.dport = flow->local_port;
		size = sizeof(tuple.ipv6);
	}
	struct bpf_sock *socket = bpf_sk_lookup_udp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return 0;
	__u32 *mark = bpf_sk_storage_get(&marks, socket, 0, 0);
	__u32 answer = mark ? *mark : 0;
	bpf_sk_release(socket);
	return answer;
}

SEC("tc")
int query_receivers(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct selection_queries *all = bpf_map_lookup_elem(&selection_queries, &zero);
	if (!all)
		return 0;
	for (__u32 i = 0; i < QUERIES_MAX; i++) {
		if (i >= all->count)
			break;
		struct flow_key flow = all->entries[i].flow;
		all->entries[i].socket_mark = query_socket(skb, &flow);
	}
	return 0;
}

static __always_inline int flow_of(struct sk_reuseport_md *datagram, struct flow_key *flow)
{
	__u16 ports[2];
	if (bpf_skb_load_bytes(datagram, 0, ports, sizeof(ports)))
		return 0;
	flow->remote_port = ports[0];
	flow->local_port = ports[1];
	flow->protocol = IPPROTO_UDP;
	if (datagram->eth_protocol == bpf_htons(ETH_P_IPV6)) {
		__u8 addresses[32];
		if (bpf_skb_load_bytes_relative(datagram, __builtin_offsetof(struct ipv6hdr, saddr), addresses,
						sizeof(addresses), BPF_HDR_START_NET))
			return 0;
		__builtin_memcpy(flow->remote, addresses, 16);
		__builtin_memcpy(flow->local, addresses + 16, 16);
		return 1;
	}
	__u32 addresses[2];
	if (bpf_skb_load_bytes_relative(datagram, __builtin_offsetof(struct iphdr, saddr), addresses, sizeof(addresses),
					BPF_HDR_START_NET))
		return 0;
	map_v4(flow->remote, addresses[0]);
	map_v4(flow->local, addresses[1]);
	return 1;
}

SEC("sk_reuseport")
int select_socket(struct sk_reuseport_md *datagram)
{
	struct flow_key flow = {};
	if (datagram->ip_protocol != IPPROTO_UDP || !flow_of(datagram, &flow))
		return SK_PASS;
	__u32 *member = bpf_map_lookup_elem(&clients, &flow);
	/* A socket that was closed, or belongs to another group, is not selected, and the kernel selects one. */
	if (member)
		bpf_sk_select_reuseport(datagram, &members, member, 0);
	return SK_PASS;
}

/* Kernel structures, with the fields that are read; the loader relocates the fields by name. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sock_filter;

struct sock_fprog_kern {
	__u16 len;
	struct sock_filter *filter;
};

struct bpf_prog {
	__u8 tag[8];
	struct sock_fprog_kern *orig_prog;
};

struct sock;

struct sock_reuseport {
	__u16 num_socks;
	struct bpf_prog *prog;
	struct sock *socks[];
};

struct sock {
	struct sock_reuseport *sk_reuseport_cb;
};

struct socket {
	struct sock *sk;
};

struct file;
struct task_struct;
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

#define CODE_MAX 512 /* instructions */
#define GROUP_MAX 1024

/* Record of a socket in a group. */
struct reuseport_socket {
	__u64 group;	 /* identity of the group, for comparison only */
	__u64 cookie;
	__u64 tag;	 /* tag of the group's program; 0: none */
	__u32 fd;
	__u32 index;	 /* index in the group; GROUP_MAX: beyond the limit */
	__u32 length;	 /* number of instructions of a classic program; 0: not classic, or too long */
	__u32 pad;
	__u64 code[CODE_MAX];
};

/* Larger than the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct reuseport_socket);
} reuseport_sockets SEC(".maps");

static __always_inline __u32 index_of(struct sock_reuseport *group, struct sock *sk)
{
	__u32 count = BPF_CORE_READ(group, num_socks);
	for (__u32 index = 0; index < GROUP_MAX; index++) {
		struct sock *other = 0;
		if (index >= count)
			break;
		bpf_core_read(&other, sizeof(other), &group->socks[index]);
		if (other == sk)
			return index;
	}
	return GROUP_MAX;
}

SEC("iter/task_file")
int list_reuseport(struct bpf_iter__task_file *context)
{
	__u32 zero = 0;
	struct file *file = context->file;
	if (!context->task || !file)
		return 0;
	struct socket *socket = bpf_sock_from_file(file);
	struct reuseport_socket *s = bpf_map_lookup_elem(&reuseport_sockets, &zero);
	if (!socket || !s)
		return 0;
	struct sock *sk = socket->sk;
	if (!sk)
		return 0;
	struct sock_reuseport *group = BPF_CORE_READ(sk, sk_reuseport_cb);
	if (!group)
		return 0;
	struct bpf_prog *program = BPF_CORE_READ(group, prog);
	s->group = (__u64)group;
	s->cookie = bpf_get_socket_cookie(sk);
	s->fd = context->fd;
	s->index = index_of(group, sk);
	s->tag = 0;
	s->length = 0;
	s->pad = 0;
	if (program) {
		bpf_core_read(&s->tag, sizeof(s->tag), &program->tag);
		struct sock_fprog_kern *classic = BPF_CORE_READ(program, orig_prog);
		__u32 length = classic ? BPF_CORE_READ(classic, len) : 0;
		if (length <= CODE_MAX && length &&
		    !bpf_probe_read_kernel(s->code, length * 8, BPF_CORE_READ(classic, filter)))
			s->length = length;
		/* A classic program need not have a tag. */
		if (!s->tag)
			s->tag = 1;
	}
	__u32 size = __builtin_offsetof(struct reuseport_socket, code);
	bpf_seq_write(context->meta->seq, s, size);
	for (__u32 at = 0; at < CODE_MAX; at++) {
		if (at >= s->length)
			break;
		bpf_seq_write(context->meta->seq, &s->code[at], 8);
	}
	return 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
