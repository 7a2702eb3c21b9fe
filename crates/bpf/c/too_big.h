/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Too-big errors to the sender of a packet that would not fit once encapsulated (RFC 1191, RFC 8201), from the packet's
 * destination.
 */
#ifndef HOLDFAST_TOO_BIG_H
#define HOLDFAST_TOO_BIG_H

#include "encap.h"

/* Quoted bytes of the packet: its network header and more than the 8 bytes that RFC 792 requires. */
#define QUOTED_V4 48
#define QUOTED_V6 88

static __always_inline __u32 checksum_words(void *at, int words, void *end)
{
	__u32 sum = 0;
	__u16 *half = at;
#pragma unroll
	for (int i = 0; i < words; i++) {
		if ((void *)(half + i + 1) > end)
			return sum;
		sum += half[i];
	}
	return sum;
}

/* Returns a packet to its sender. Not XDP_TX, here and in steer.h: over veth (6.18) packets would stay in the peer's
 * ring until another packet arrives, unless the peer runs XDP too. A redirect to the same interface needs NAPI (GRO)
 * only at the peer.
 */
static __always_inline int reflect(struct xdp_md *context, struct ethhdr *link)
{
	__u8 swap[6];
	__builtin_memcpy(swap, link->h_dest, 6);
	__builtin_memcpy(link->h_dest, link->h_source, 6);
	__builtin_memcpy(link->h_source, swap, 6);
	count(COUNT_TOO_BIG_SENT);
	return bpf_redirect(context->ingress_ifindex, 0);
}

static __always_inline int too_big_v4(struct xdp_md *context, __u16 mtu)
{
	const int header = sizeof(struct iphdr) + sizeof(struct icmphdr);
	struct ethhdr saved;
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct iphdr *old = data + sizeof(saved);
	if ((void *)(old + 1) > end)
		return XDP_DROP;
	__builtin_memcpy(&saved, data, sizeof(saved));
	__u32 client = old->saddr, service = old->daddr;
	int excess = (int)(end - data) - (int)sizeof(saved) - QUOTED_V4;
	if (excess < 0 || bpf_xdp_adjust_tail(context, -excess) || bpf_xdp_adjust_head(context, -header))
		return XDP_DROP;
	data = (void *)(long)context->data;
	end = (void *)(long)context->data_end;
	struct ethhdr *link = data;
	struct iphdr *ip = data + sizeof(*link);
	struct icmphdr *icmp = (void *)(ip + 1);
	if ((void *)(icmp + 1) + QUOTED_V4 > end)
		return XDP_DROP;
	*link = saved;
	outer_v4(ip, sizeof(*icmp) + QUOTED_V4, 0, service, client);
	/* outer_v4 made an IPIP header; the checksum includes the protocol byte. */
	ip->protocol = IPPROTO_ICMP;
	ip->check = 0;
	ip->check = fold(checksum_words(ip, sizeof(*ip) / 2, end));
	__builtin_memset(icmp, 0, sizeof(*icmp));
	icmp->type = ICMP_DEST_UNREACH;
	icmp->code = ICMP_FRAG_NEEDED;
	icmp->mtu = bpf_htons(mtu);
	icmp->checksum = fold(checksum_words(icmp, (sizeof(*icmp) + QUOTED_V4) / 2, end));
	return reflect(context, link);
}

static __always_inline int too_big_v6(struct xdp_md *context, __u16 mtu)
{
	const int header = sizeof(struct ipv6hdr) + sizeof(struct icmp6hdr);
	struct ethhdr saved;
	__u8 client[16], service[16];
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct ipv6hdr *old = data + sizeof(saved);
	if ((void *)(old + 1) > end)
		return XDP_DROP;
	__builtin_memcpy(&saved, data, sizeof(saved));
	__builtin_memcpy(client, &old->saddr, 16);
	__builtin_memcpy(service, &old->daddr, 16);
	int excess = (int)(end - data) - (int)sizeof(saved) - QUOTED_V6;
	if (excess < 0 || bpf_xdp_adjust_tail(context, -excess) || bpf_xdp_adjust_head(context, -header))
		return XDP_DROP;
	data = (void *)(long)context->data;
	end = (void *)(long)context->data_end;
	struct ethhdr *link = data;
	struct ipv6hdr *ip = data + sizeof(*link);
	struct icmp6hdr *icmp = (void *)(ip + 1);
	if ((void *)(icmp + 1) + QUOTED_V6 > end)
		return XDP_DROP;
	*link = saved;
	outer_v6(ip, sizeof(*icmp) + QUOTED_V6, 1, service, client);
	ip->nexthdr = IPPROTO_ICMPV6;
	__builtin_memset(icmp, 0, sizeof(*icmp));
	icmp->icmp6_type = ICMPV6_PKT_TOOBIG;
	icmp->icmp6_mtu = bpf_htonl(mtu);
	__u32 sum = checksum_words(&ip->saddr, 16, end);
	sum += bpf_htons(sizeof(*icmp) + QUOTED_V6) + bpf_htons(IPPROTO_ICMPV6);
	sum += checksum_words(icmp, (sizeof(*icmp) + QUOTED_V6) / 2, end);
	icmp->icmp6_cksum = fold(sum);
	return reflect(context, link);
}

static __noinline int too_big_packet(struct xdp_md *context, __u16 mtu, __u8 v6)
{
	return v6 ? too_big_v6(context, mtu) : too_big_v4(context, mtu);
}

/* Answers a packet that is too big, even one that may be fragmented: its sender then makes smaller fragments. */
static __always_inline int too_big(struct xdp_md *context, const struct packet *p, int what, __u16 mtu)
{
	count(DROP_TOO_BIG);
	/* No ICMP error answers an ICMP error (RFC 1122, section 3.2.2) or a fragment other than the first. */
	if (what == PARSE_ICMP || p->later_fragment)
		return XDP_DROP;
	return too_big_packet(context, mtu, p->v6);
}

#endif
