/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * IP-in-IP encapsulation (RFC 2003, RFC 2473) between nodes on different segments.
 */
#ifndef HOLDFAST_ENCAP_H
#define HOLDFAST_ENCAP_H

#include "parse.h"

#define ENCAP_TTL 64

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

static __always_inline void outer_v4(struct iphdr *ip, __u16 inner_length, __u8 inner_v6, __u32 source, __u32 destination)
{
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 4;
	ip->ihl = 5;
	ip->tot_len = bpf_htons(inner_length + sizeof(*ip));
	ip->ttl = ENCAP_TTL;
	ip->protocol = inner_v6 ? IPPROTO_IPV6 : IPPROTO_IPIP;
	ip->saddr = source;
	ip->daddr = destination;
	__u32 sum = 0;
	__u16 *half = (__u16 *)ip;
#pragma unroll
	for (unsigned i = 0; i < sizeof(*ip) / 2; i++)
		sum += half[i];
	ip->check = fold(sum);
}

static __always_inline void outer_v6(struct ipv6hdr *ip, __u16 inner_length, __u8 inner_v6, const __u8 *source,
				     const __u8 *destination)
{
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 6;
	ip->payload_len = bpf_htons(inner_length);
	ip->hop_limit = ENCAP_TTL;
	ip->nexthdr = inner_v6 ? IPPROTO_IPV6 : IPPROTO_IPIP;
	__builtin_memcpy(&ip->saddr, source, 16);
	__builtin_memcpy(&ip->daddr, destination, 16);
}

static __always_inline __u32 unmap_v4(const __u8 *address)
{
	__u32 v4;
	__builtin_memcpy(&v4, address + 12, 4);
	return v4;
}

static __always_inline int same_address(const void *a, const void *b)
{
	const __u32 *x = a, *y = b;
	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3];
}

static __always_inline void link_header(struct ethhdr *link, const struct node *node, __u16 protocol)
{
	__builtin_memcpy(link->h_dest, node->link, 6);
	__builtin_memcpy(link->h_source, node->own_link, 6);
	link->h_proto = protocol;
}

static __always_inline __u32 encap_size(const struct node *node)
{
	return node->flags & NODE_V6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
}

#endif
