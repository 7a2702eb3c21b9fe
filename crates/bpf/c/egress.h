/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * tcx egress: decides which packets this node may send. DROP (not a steal): TCP then keeps the data as unsent
 * (feasibility, e1).
 */
#ifndef HOLDFAST_EGRESS_H
#define HOLDFAST_EGRESS_H

#include "ingress.h"

#define EEXIST 17
#define ENOSPC 28
#define OPTION_END 0
#define OPTION_NOP 1
#define OPTION_MSS 2

/* Lowers the MSS in a SYN-ACK, so that the client's segments fit once encapsulated. */
static __always_inline void clamp_mss(struct __sk_buff *skb, const struct packet *p, __u16 limit)
{
	if (!limit)
		return;
	__u32 at = p->l4 + sizeof(struct tcphdr);
#pragma unroll
	for (int i = 0; i < 6; i++) {
		__u8 option[4];
		if (bpf_skb_load_bytes(skb, at, option, 4))
			return;
		if (option[0] == OPTION_NOP) {
			at++;
			continue;
		}
		if (option[0] == OPTION_END || option[1] < 2)
			return;
		if (option[0] == OPTION_MSS) {
			__u16 old = *(__u16 *)(option + 2), wanted = bpf_htons(limit);
			if (bpf_ntohs(old) <= limit)
				return;
			bpf_l4_csum_replace(skb, p->l4 + __builtin_offsetof(struct tcphdr, check), old, wanted, 2);
			bpf_skb_store_bytes(skb, at + 2, &wanted, 2, 0);
			return;
		}
		at += option[1];
		if (at > p->l4 + 60u)
			return;
	}
}

/* Returns true for a refusal, the answer to a SYN without listener: a reset with sequence number 0. */
static __always_inline int is_reset(const struct packet *p)
{
	return p->tcp_rst && p->seq == 0;
}

static __always_inline int egress_unknown(struct __sk_buff *skb, struct config *config, struct service *service,
					  struct packet *p)
{
	if (p->flow.protocol == IPPROTO_UDP) {
		/* The first answer makes this node the owner: a change of the table then does not move the flow. */
		struct flow_value value = {.epoch = first_epoch(), .state = FLOW_OWNED, .last_packet_s = now_s()};
		long refused = -ENOSPC;
		if (has_quota(service))
			refused = bpf_map_update_elem(&flows, &p->flow, &value, BPF_NOEXIST);
		if (!refused) {
			count_new_flow(service);
			emit(&p->flow, value.epoch, EVENT_ESTABLISHED, 0);
		} else if (refused != -EEXIST) {
			count(DROP_FLOWS_FULL); /* the datagram passes anyway */
		}
		return NEXT;
	}
	if (p->tcp_syn) {
		clamp_mss(skb, p, p->v6 ? config->mss_clamp_v6 : config->mss_clamp_v4);
		return NEXT;
	}
	if (is_reset(p))
		return NEXT;
	return count_drop(DROP_EGRESS_NOT_OWNER);
}

/* Sends a packet to a node, past the route to its address. */
static __always_inline int translate(struct __sk_buff *skb, struct config *config, const struct packet *p, __u16 to)
{
	struct node *node = node_of(to);
	/* Without a known node, the packet takes its normal route, and the host of the address forwards it. */
	if (!node)
		return NEXT;
	__u32 why = set_next_hop(skb, config, p, node, 0);
	if (why)
		return count_drop(why);
	/* A redirect to this same interface would run this program again. */
	return node->ifindex == skb->ifindex ? NEXT : bpf_redirect(node->ifindex, 0);
}

/* Delivers a packet between two ends at this node. */
static __always_inline int translate_here(struct __sk_buff *skb, struct config *config, const struct packet *p)
{
	struct flow_key there = {
		.local_port = p->flow.remote_port,
		.remote_port = p->flow.local_port,
		.protocol = p->flow.protocol,
	};
	__builtin_memcpy(there.local, p->flow.remote, 16);
	__builtin_memcpy(there.remote, p->flow.local, 16);
	struct flow_value *flow = bpf_map_lookup_elem(&flows, &there);
	if (!flow)
		return NEXT;
	struct effective_state now = effective_state_of(flow);
	switch (now.state) {
	case FLOW_REDIRECTING_DATA:
		if (is_for_donor(p, PARSE_FLOW))
			break;
		return translate(skb, config, p, now.peer);
	case FLOW_TRANSIT_OUT:
	case FLOW_MOVED:
		return translate(skb, config, p, now.peer);
	case FLOW_TRANSIT_IN:
		return hold(config, flow);
	case FLOW_FLUSHING: {
		int verdict = flush_or_hold(config, flow);
		if (verdict != NEXT)
			return verdict;
	}
	}
	return mark_private(config);
}

/* Handles a packet of no service: see private_ingress. */
static __always_inline int private_egress(struct __sk_buff *skb, struct config *config, const struct packet *p)
{
	struct flow_value *flow = bpf_map_lookup_elem(&flows, &p->flow);
	/* The socket is being restored for a process on its way here, and must be silent until its packets are held. */
	if (!flow && skb->sk) {
		__u16 *peer = bpf_map_lookup_elem(&peers, p->flow.local);
		if (peer && *peer != config->own_id)
			return count_drop(DROP_EGRESS_TRANSIT);
	}
	__u8 state = flow ? effective_state_of(flow).state : 0;
	if (state == FLOW_TRANSIT_OUT || state == FLOW_TRANSIT_IN)
		return count_drop(DROP_EGRESS_TRANSIT);
	if (state == FLOW_MOVED)
		return count_drop(DROP_EGRESS_NOT_OWNER);
	struct translation *to = bpf_map_lookup_elem(&translations, &p->flow);
	if (!to)
		return NEXT;
	return to->node == config->own_id ? translate_here(skb, config, p) : translate(skb, config, p, to->node);
}

SEC("tc")
int holdfast_egress(struct __sk_buff *skb)
{
	struct config *config = get_config();
	if (!config)
		return NEXT;
	struct packet p;
	int what = parse_skb(skb, &p, EGRESS);
	if (what != PARSE_FLOW)
		return NEXT;
	struct service *service = service_of(&p.flow);
	if (!service)
		return private_egress(skb, config, &p);
	struct flow_value *flow = bpf_map_lookup_elem(&flows, &p.flow);
	/* The replicator sends what its legs answer. */
	if (!flow && service->flags & IS_REPLICATED && p.flow.protocol == IPPROTO_TCP)
		return NEXT;
	if (!flow)
		return egress_unknown(skb, config, service, &p);
	switch (effective_state_of(flow).state) {
	case FLOW_TRANSIT_OUT:
	case FLOW_TRANSIT_IN:
		return count_drop(DROP_EGRESS_TRANSIT);
	case FLOW_MOVED:
		/* A SYN-ACK passes: it answers a SYN of a new connection between the same ports, steered here. */
		if (p.tcp_syn && p.tcp_ack) {
			clamp_mss(skb, &p, p.v6 ? config->mss_clamp_v6 : config->mss_clamp_v4);
			return NEXT;
		}
		return is_reset(&p) ? NEXT : count_drop(DROP_EGRESS_NOT_OWNER);
	default:
		if (p.tcp_syn)
			clamp_mss(skb, &p, p.v6 ? config->mss_clamp_v6 : config->mss_clamp_v4);
		return NEXT;
	}
}

#endif
