/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Insertion of connections into the queue of a listener, which user space cannot do. The daemon makes a packet that
 * completes a handshake and writes it to its TUN; here the packet gets the request that the handshake would have left,
 * as if the listener used SYN cookies. The kernel then makes the connection's socket, which waits to be accepted.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "pending_handshakes.h"

#define TCX_NEXT_PROGRAM (-1)
#define TCX_DROP_IT 2
#define TCP_LISTEN_STATE 10

/* Kernel structures; a mere declaration would have another BTF kind for the loader. */
struct sock {
};
struct tcp_sock;

/* Kernel structure; `struct handshake` begins with the same fields. */
struct bpf_tcp_req_attrs {
	__u32 rcv_tsval;
	__u32 rcv_tsecr;
	__u16 mss;
	__u8 rcv_wscale;
	__u8 snd_wscale;
	__u8 ecn_ok;
	__u8 wscale_ok;
	__u8 sack_ok;
	__u8 tstamp_ok;
	__u8 usec_ts_ok;
	__u8 reserved[3];
};

extern int bpf_sk_assign_tcp_reqsk(struct __sk_buff *skb, struct sock *sk, struct bpf_tcp_req_attrs *attrs,
				   int attrs__sz) __ksym;

static __always_inline void map_address(__u8 *to, __u32 address)
{
	__builtin_memset(to, 0, 10);
	to[10] = to[11] = 0xff;
	__builtin_memcpy(to + 12, &address, 4);
}

/* Parses a packet of the TUN, which begins with the network layer. Returns the tuple's size, 0 if it is not TCP. */
static __always_inline __u32 read_packet(struct __sk_buff *skb, struct flow_key *flow, struct bpf_sock_tuple *tuple,
					 __u32 *sequence)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct tcphdr *tcp;
	flow->protocol = IPPROTO_TCP;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data;
		tcp = (void *)(ip + 1);
		if ((void *)(tcp + 1) > end || ip->ihl != 5 || ip->protocol != IPPROTO_TCP)
			return 0;
		map_address(flow->local, ip->daddr);
		map_address(flow->remote, ip->saddr);
		tuple->ipv4.saddr = ip->saddr;
		tuple->ipv4.daddr = ip->daddr;
		tuple->ipv4.sport = tcp->source;
		tuple->ipv4.dport = tcp->dest;
	} else {
		struct ipv6hdr *ip = data;
		tcp = (void *)(ip + 1);
		if ((void *)(tcp + 1) > end || ip->nexthdr != IPPROTO_TCP)
			return 0;
		__builtin_memcpy(flow->local, &ip->daddr, 16);
		__builtin_memcpy(flow->remote, &ip->saddr, 16);
		__builtin_memcpy(tuple->ipv6.saddr, &ip->saddr, 16);
		__builtin_memcpy(tuple->ipv6.daddr, &ip->daddr, 16);
		tuple->ipv6.sport = tcp->source;
		tuple->ipv6.dport = tcp->dest;
	}
	if (!tcp->ack || tcp->syn || tcp->rst)
		return 0;
	*sequence = bpf_ntohl(tcp->seq);
	flow->local_port = tcp->dest;
	flow->remote_port = tcp->source;
	return skb->protocol == bpf_htons(ETH_P_IP) ? sizeof(tuple->ipv4) : sizeof(tuple->ipv6);
}

SEC("tc")
int holdfast_queue(struct __sk_buff *skb)
{
	struct flow_key flow = {};
	struct bpf_sock_tuple tuple = {};
	__u32 sequence = 0, size = read_packet(skb, &flow, &tuple, &sequence);
	if (!size)
		return TCX_NEXT_PROGRAM;
	struct handshake *handshake = bpf_map_lookup_elem(&waiting, &flow);
	if (!handshake)
		return TCX_NEXT_PROGRAM;
	if (sequence != handshake->sequence)
		return TCX_DROP_IT;
	struct bpf_tcp_req_attrs attributes;
	_Static_assert(sizeof(attributes) == __builtin_offsetof(struct handshake, sequence), "the same fields");
	__builtin_memcpy(&attributes, handshake, sizeof(attributes));
	struct bpf_sock *socket = size == sizeof(tuple.ipv4)
					  ? bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0)
					  : bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return TCX_DROP_IT;
	int assigned = -1;
	if (socket->state == TCP_LISTEN_STATE) {
		struct tcp_sock *listener = bpf_skc_to_tcp_sock(socket);
		if (listener)
			assigned = bpf_sk_assign_tcp_reqsk(skb, (struct sock *)listener, &attributes, sizeof(attributes));
	}
	bpf_sk_release(socket);
	return assigned ? TCX_DROP_IT : TCX_NEXT_PROGRAM;
}

char _license[] SEC("license") = "Dual MIT/GPL";
