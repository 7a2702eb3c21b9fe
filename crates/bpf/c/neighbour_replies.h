/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * ARP requests and neighbour solicitations for service addresses. With broadcast reach the holder answers with the
 * shared link address; the frames have the node's own link address as source, so that no switch learns the shared one.
 * With steer reach the kernel answers, and a node without a lease must not let the kernel see the questions.
 */
#ifndef HOLDFAST_NEIGHBOUR_REPLIES_H
#define HOLDFAST_NEIGHBOUR_REPLIES_H

#include "encap.h"

#define ARPOP_REQUEST 1
#define ARPOP_REPLY 2

struct arp_v4 {
	__u16 hardware, protocol;
	__u8 hardware_length, protocol_length;
	__u16 operation;
	__u8 sender_link[6];
	__u8 sender[4];
	__u8 target_link[6];
	__u8 target[4];
} __attribute__((packed));

struct solicitation {
	struct icmp6hdr icmp;
	__u8 target[16];
	__u8 option, option_length;
	__u8 link[6];
} __attribute__((packed));

static __always_inline int answer_arp(struct __sk_buff *skb, struct config *config, struct node *self)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *link = data;
	struct arp_v4 *arp = (void *)(link + 1);
	if ((void *)(arp + 1) > end || arp->operation != bpf_htons(ARPOP_REQUEST))
		return 0;
	__u8 address[16];
	__u32 target;
	__builtin_memcpy(&target, arp->target, 4);
	map_v4(address, target);
	if (!is_service_address(address) || !has_lease())
		return 0;
	__builtin_memcpy(link->h_dest, link->h_source, 6);
	__builtin_memcpy(link->h_source, self->own_link, 6);
	arp->operation = bpf_htons(ARPOP_REPLY);
	__builtin_memcpy(arp->target_link, arp->sender_link, 6);
	__builtin_memcpy(arp->target, arp->sender, 4);
	__builtin_memcpy(arp->sender_link, config->shared_link, 6);
	__builtin_memcpy(arp->sender, &target, 4);
	return bpf_redirect(skb->ifindex, 0);
}

static __always_inline int answer_solicitation(struct __sk_buff *skb, struct config *config, struct node *self)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *link = data;
	struct ipv6hdr *ip = (void *)(link + 1);
	struct solicitation *nd = (void *)(ip + 1);
	if ((void *)(nd + 1) > end || ip->nexthdr != IPPROTO_ICMPV6 || nd->icmp.icmp6_type != 135)
		return 0;
	if (ip->payload_len != bpf_htons(sizeof(*nd)) || nd->option != 1 || !is_service_address(nd->target) || !has_lease())
		return 0;
	__builtin_memcpy(link->h_dest, link->h_source, 6);
	__builtin_memcpy(link->h_source, self->own_link, 6);
	__builtin_memcpy(&ip->daddr, &ip->saddr, 16);
	__builtin_memcpy(&ip->saddr, nd->target, 16);
	nd->icmp.icmp6_type = 136;
	nd->icmp.icmp6_dataun.un_data32[0] = bpf_htonl(0x60000000); /* solicited, override */
	nd->option = 2;
	__builtin_memcpy(nd->link, config->shared_link, 6);
	nd->icmp.icmp6_cksum = 0;
	__u32 sum = bpf_htons(sizeof(*nd)) + bpf_htons(IPPROTO_ICMPV6);
	__u16 *half = (__u16 *)&ip->saddr; /* both addresses and the message are contiguous */
#pragma unroll
	for (unsigned i = 0; i < (32 + sizeof(*nd)) / 2; i++)
		sum += half[i];
	nd->icmp.icmp6_cksum = fold(sum);
	return bpf_redirect(skb->ifindex, 0);
}

static __noinline int answer_neighbour(struct __sk_buff *skb, struct config *config)
{
	if (!config)
		return 0;
	struct node *self = node_of(config->own_id);
	if (!self)
		return 0;
	if (skb->protocol == bpf_htons(ETH_P_ARP))
		return answer_arp(skb, config, self);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return answer_solicitation(skb, config, self);
	return 0;
}

/* Returns true for an ARP request or neighbour solicitation for a service address. */
static __noinline int asks_for_service(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *link = data;
	if (skb->protocol == bpf_htons(ETH_P_ARP)) {
		struct arp_v4 *arp = (void *)(link + 1);
		if ((void *)(arp + 1) > end || arp->operation != bpf_htons(ARPOP_REQUEST))
			return 0;
		__u8 address[16];
		__u32 target;
		__builtin_memcpy(&target, arp->target, 4);
		map_v4(address, target);
		return is_service_address(address);
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (void *)(link + 1);
		struct icmp6hdr *icmp = (void *)(ip + 1);
		__u8 *target = (void *)(icmp + 1);
		if ((void *)(target + 16) > end || ip->nexthdr != IPPROTO_ICMPV6 || icmp->icmp6_type != 135)
			return 0;
		return is_service_address(target);
	}
	return 0;
}

#endif
