/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * XDP: the holder sends each packet of a service to the flow's owner; every node decapsulates packets from its peers.
 */
#ifndef HOLDFAST_STEER_H
#define HOLDFAST_STEER_H

#include "cache.h"
#include "encap.h"
#include "too_big.h"


/* Drops a packet that cannot be rewritten and therefore not be forwarded. */
static __always_inline int count_write_failure(void)
{
	count(DROP_MALFORMED);
	return XDP_DROP;
}

static __always_inline int steer_link(struct xdp_md *context, const struct node *node)
{
	struct ethhdr *link = (void *)(long)context->data;
	if ((void *)(link + 1) > (void *)(long)context->data_end)
		return count_write_failure();
	link_header(link, node, link->h_proto);
	count(COUNT_STEERED_LINK);
	return bpf_redirect(node->ifindex, 0);
}

static __always_inline int steer_encap(struct xdp_md *context, const struct node *node, const struct node *self,
				       const struct packet *p)
{
	__u8 v6 = node->flags & NODE_V6 ? 1 : 0;
	int grow = v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	if (bpf_xdp_adjust_head(context, -grow))
		return count_write_failure();
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct ethhdr *link = data;
	if ((void *)(link + 1) > end)
		return count_write_failure();
	if (v6) {
		struct ipv6hdr *ip = (void *)(link + 1);
		if ((void *)(ip + 1) > end)
			return count_write_failure();
		link_header(link, node, bpf_htons(ETH_P_IPV6));
		outer_v6(ip, p->l3_length, p->v6, self->address, node->address);
	} else {
		struct iphdr *ip = (void *)(link + 1);
		if ((void *)(ip + 1) > end)
			return count_write_failure();
		link_header(link, node, bpf_htons(ETH_P_IP));
		outer_v4(ip, p->l3_length, p->v6, unmap_v4(self->address), unmap_v4(node->address));
	}
	count(COUNT_STEERED_ENCAP);
	return bpf_redirect(node->ifindex, 0);
}

/* Peers encapsulate only packets to service addresses and private flows, which limits an attacker with a forged peer
 * address. Returns 1 for a packet to a service, 0 for another, -1 for one that is too short.
 */
static __always_inline int is_to_a_service(const void *at, const void *end, __u8 inner)
{
	__u8 address[16];
	if (inner == IPPROTO_IPIP) {
		const struct iphdr *ip = at;
		if ((void *)(ip + 1) > end)
			return -1;
		map_v4(address, ip->daddr);
	} else {
		const struct ipv6hdr *ip = at;
		if ((void *)(ip + 1) > end)
			return -1;
		__builtin_memcpy(address, &ip->daddr, 16);
	}
	return is_service_address(address);
}

/* Returns true for a packet of a private flow that is, or was, at this node. */
static __noinline int is_to_a_private_flow(struct xdp_md *context)
{
	struct packet p;
	int what = parse(&p, (void *)(long)context->data, (void *)(long)context->data_end, INGRESS);
	return (what == PARSE_FLOW || what == PARSE_ICMP) && bpf_map_lookup_elem(&flows, &p.flow);
}

/* Strips the outer header of a packet that a peer encapsulated for this node. Returns 1: stripped, 0: not such a
 * packet, -1: drop. */
static __always_inline int decapsulate(struct xdp_md *context, const struct node *self)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct ethhdr *link = data;
	__u8 source[16], inner;
	int outer;
	if ((void *)(link + 1) > end)
		return 0;
	if (link->h_proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)(link + 1);
		if ((void *)(ip + 1) > end || (ip->protocol != IPPROTO_IPIP && ip->protocol != IPPROTO_IPV6))
			return 0;
		if (ip->ihl != 5 || (self->flags & NODE_V6) || ip->daddr != unmap_v4(self->address))
			return 0;
		map_v4(source, ip->saddr);
		inner = ip->protocol;
		outer = sizeof(*ip);
	} else if (link->h_proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (void *)(link + 1);
		if ((void *)(ip + 1) > end || (ip->nexthdr != IPPROTO_IPIP && ip->nexthdr != IPPROTO_IPV6))
			return 0;
		if (!(self->flags & NODE_V6) || !same_address(&ip->daddr, self->address))
			return 0;
		__builtin_memcpy(source, &ip->saddr, 16);
		inner = ip->nexthdr;
		outer = sizeof(*ip);
	} else {
		return 0;
	}
	if (!bpf_map_lookup_elem(&peers, source)) {
		count(DROP_NOT_A_PEER);
		return -1;
	}
	struct ethhdr saved = *link;
	saved.h_proto = inner == IPPROTO_IPIP ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
	if (bpf_xdp_adjust_head(context, outer))
		return count_write_failure(), -1;
	link = (void *)(long)context->data;
	end = (void *)(long)context->data_end;
	if ((void *)(link + 1) > end)
		return count_write_failure(), -1;
	*link = saved;
	int to_a_service = is_to_a_service(link + 1, end, inner);
	if (to_a_service < 0 || (!to_a_service && !is_to_a_private_flow(context))) {
		count(to_a_service ? DROP_MALFORMED : DROP_NOT_A_SERVICE);
		return -1;
	}
	count(COUNT_DECAPSULATED);
	return 1;
}

/* Returns true for a packet that the contact node has steered to this node on one segment. */
static __always_inline int is_from_contact(struct xdp_md *context, __u16 contact)
{
	struct ethhdr *link = (void *)(long)context->data;
	struct node *node = node_of(contact);
	if (!node || (void *)(link + 1) > (void *)(long)context->data_end)
		return 0;
	int same = 1;
#pragma unroll
	for (int i = 0; i < 6; i++)
		same &= link->h_source[i] == node->link[i];
	return same;
}

/* Most hops left to a packet that a former holder forwards; the second one is for a straggler. A former holder forwards
 * no packet with so few hops. Otherwise two former holders with different tables could forward a packet to each other
 * for ever.
 */
#define FORMER_HOLDER_HOPS 2

/* Lowers the hop limit of a packet that a former holder forwards; returns 0 for one that it must not forward. */
static __always_inline int cap_hops(struct xdp_md *context, const struct packet *p)
{
	struct ethhdr *link = (void *)(long)context->data;
	void *end = (void *)(long)context->data_end;
	if (p->v6) {
		struct ipv6hdr *ip = (void *)(link + 1);
		if ((void *)(ip + 1) > end || ip->hop_limit <= FORMER_HOLDER_HOPS)
			return 0;
		ip->hop_limit = FORMER_HOLDER_HOPS;
		return 1;
	}
	struct iphdr *ip = (void *)(link + 1);
	if ((void *)(ip + 1) > end || ip->ttl <= FORMER_HOLDER_HOPS)
		return 0;
	/* The checksum covers 16 bits: TTL and protocol (RFC 1624). */
	__u16 old, new;
	__builtin_memcpy(&old, &ip->ttl, 2);
	ip->ttl = FORMER_HOLDER_HOPS;
	__builtin_memcpy(&new, &ip->ttl, 2);
	ip->check = fold((__u32)(__u16)~ip->check + (__u16)~old + new);
	return 1;
}

/* Returns the node for a packet without a record: the holder places the packet as long as the holder has a lease; a
 * former holder leaves the packet to the contact node. Returns 0 if the packet is to be dropped.
 */
static __always_inline __u16 unrecorded_destination(struct config *config, struct service *service,
						    const struct packet *p)
{
	if (config->role == ROLE_FORMER_HOLDER) {
		__u16 contact = next_contact();
		struct node *node = node_of(contact);
		/* The contact node does not steer encapsulated packets. A node that has left the group may know no other one. */
		return node && contact != config->own_id && !(node->flags & NODE_ENCAP) ? contact : 0;
	}
	if (has_lease())
		return placed_node(service, &p->flow, 0);
	/* The holder may be about to record a flow of this node. */
	return bpf_map_lookup_elem(&flows, &p->flow) ? config->own_id : 0;
}

SEC("xdp")
int holdfast_steer(struct xdp_md *context)
{
	struct config *config = get_config();
	if (!config)
		return XDP_PASS;
	struct node *self = node_of(config->own_id);
	if (!self)
		return XDP_PASS;
	int unpacked = decapsulate(context, self);
	if (unpacked)
		return unpacked < 0 ? XDP_DROP : XDP_PASS;
	if (!config->role || config->reach != REACH_STEER)
		return XDP_PASS;
	if (config->role == ROLE_FORMER_HOLDER && is_from_contact(context, next_contact()))
		return XDP_PASS;

	struct packet p;
	int what = parse(&p, (void *)(long)context->data, (void *)(long)context->data_end, INGRESS);
	if (what == PARSE_OTHER)
		return XDP_PASS;
	if (what == PARSE_FRAGMENT_UNKNOWN || what == PARSE_MALFORMED)
		return XDP_PASS; /* the ownership filter, which sees all packets, decides and counts */
	__u64 hash = 0;
	struct cache_set *set = cache_set_of(&p.flow, &hash);
	struct service *service = service_of(&p.flow);
	if (!service)
		return XDP_PASS;
	/* The former table is not told of flows that have come here since. */
	if (config->role == ROLE_FORMER_HOLDER && bpf_map_lookup_elem(&flows, &p.flow))
		return XDP_PASS;
	__u16 to = recorded_destination(&p.flow, set, hash);
	if (!to && service->flags & IS_REPLICATED) {
		/* A new client may be another contact node's by now; the replicator's connections cannot be. */
		if (has_lease() || !begins_connection(&p, what))
			return XDP_PASS;
		count(DROP_NO_LEASE);
		return XDP_DROP;
	}
	if (!to) {
		to = unrecorded_destination(config, service, &p);
		if (!to && !has_lease()) {
			/* The ingress filter keeps new clients until this node serves. */
			if (config->role == ROLE_HOLDER && begins_connection(&p, what))
				return XDP_PASS;
			count(DROP_NO_LEASE);
			return XDP_DROP;
		}
	}
	if (to == config->own_id) {
		count(COUNT_STEERED_SELF);
		return XDP_PASS;
	}
	struct node *node = node_of(to);
	if (!node) {
		count(DROP_NO_NODE);
		return XDP_DROP;
	}
	if (config->role == ROLE_FORMER_HOLDER && !cap_hops(context, &p))
		return XDP_PASS;
	if (!(node->flags & NODE_ENCAP))
		return steer_link(context, node);
	if (config->mtu && p.l3_length + encap_size(node) > config->mtu)
		return too_big(context, &p, what, config->mtu - encap_size(node));
	return steer_encap(context, node, self, &p);
}

#endif
