/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Restores the longest retransmission timeout (TCP_RTO_MAX_MS) of moved connections without their descriptors: a
 * duplicate that stays open after the program has closed its own would keep the connection, and its events in the
 * program's epoll sets, alive. An iterator over the TCP sockets of a network namespace sets stored timeouts, each once.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "kernel.h"

#define SOL_TCP 6
#define TCP_RTO_MAX_MS 44

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, int);
} stored_rto_max SEC(".maps");

SEC("iter/tcp")
int restore_rto_max(struct bpf_iter__tcp *context)
{
	struct sock_common *common = context->sk_common;
	if (!common)
		return 0;
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(common);
	if (!tcp)
		return 0;
	int *stored = bpf_sk_storage_get(&stored_rto_max, (struct sock *)tcp, 0, 0);
	if (!stored)
		return 0;
	int value = *stored;
	bpf_setsockopt(tcp, SOL_TCP, TCP_RTO_MAX_MS, &value, sizeof(value));
	bpf_sk_storage_delete(&stored_rto_max, (struct sock *)tcp);
	return 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
