/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * A congestion control that a restored socket uses for a moment: its init sets the congestion window and threshold that
 * the socket had at the donor, and ECN if that was negotiated (RFC 3168). Then the daemon sets the original congestion
 * control, which keeps them. (No socket option sets them; TCP_BPF_SNDCWND_CLAMP would also limit the window
 * permanently.)
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_tracing.h>
#include "shared.h"

#define AF_INET6 10

struct in6_addr {
	union {
		__u8 u6_addr8[16];
	} in6_u;
} __attribute__((preserve_access_index));

struct sock_common {
	__u32 skc_daddr;
	__u32 skc_rcv_saddr;
	__u16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
} __attribute__((preserve_access_index));

struct tcp_sock {
	__u32 snd_cwnd;
	__u32 snd_ssthresh;
	__u8 ecn_flags;
} __attribute__((preserve_access_index));

#define ECN_RFC3168 1 /* TCP_ECN_OK */

struct rate_sample;
struct tcp_congestion_ops {
	void (*init)(struct sock *sk);
	__u32 (*ssthresh)(struct sock *sk);
	void (*cong_avoid)(struct sock *sk, __u32 ack, __u32 acked);
	__u32 (*undo_cwnd)(struct sock *sk);
	char name[16];
};

extern __u32 tcp_reno_ssthresh(struct sock *sk) __ksym;
extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern __u32 tcp_reno_undo_cwnd(struct sock *sk) __ksym;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, struct congestion);
} congestion SEC(".maps");

static __always_inline void map_v4(__u8 *to, __u32 address)
{
	__builtin_memset(to, 0, 10);
	to[10] = to[11] = 0xff;
	__builtin_memcpy(to + 12, &address, 4);
}

SEC("struct_ops")
void BPF_PROG(restore_init, struct sock *sk)
{
	struct flow_key flow = {.protocol = 6};
	if (sk->__sk_common.skc_family == AF_INET6) {
		__builtin_memcpy(flow.local, sk->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr8, 16);
		__builtin_memcpy(flow.remote, sk->__sk_common.skc_v6_daddr.in6_u.u6_addr8, 16);
	} else {
		map_v4(flow.local, sk->__sk_common.skc_rcv_saddr);
		map_v4(flow.remote, sk->__sk_common.skc_daddr);
	}
	flow.local_port = bpf_htons(sk->__sk_common.skc_num);
	flow.remote_port = sk->__sk_common.skc_dport;
	struct congestion *had = bpf_map_lookup_elem(&congestion, &flow);
	if (!had)
		return;
	struct tcp_sock *tcp = (struct tcp_sock *)sk;
	tcp->snd_cwnd = had->cwnd;
	tcp->snd_ssthresh = had->ssthresh;
	if (had->ecn)
		tcp->ecn_flags |= ECN_RFC3168;
}

SEC("struct_ops")
__u32 BPF_PROG(restore_ssthresh, struct sock *sk)
{
	return tcp_reno_ssthresh(sk);
}

SEC("struct_ops")
void BPF_PROG(restore_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	tcp_reno_cong_avoid(sk, ack, acked);
}

SEC("struct_ops")
__u32 BPF_PROG(restore_undo_cwnd, struct sock *sk)
{
	return tcp_reno_undo_cwnd(sk);
}

SEC(".struct_ops.link")
struct tcp_congestion_ops holdfast_restore = {
	.init = (void *)restore_init,
	.ssthresh = (void *)restore_ssthresh,
	.cong_avoid = (void *)restore_cong_avoid,
	.undo_cwnd = (void *)restore_undo_cwnd,
	.name = "hf_restore",
};

char _license[] SEC("license") = "Dual MIT/GPL";
