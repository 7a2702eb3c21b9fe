/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * tcx ingress: decides which packets reach this node's stack. The stack never sees a flow of another owner, and so
 * never resets one.
 */
#ifndef HOLDFAST_INGRESS_H
#define HOLDFAST_INGRESS_H

#include "socket_lookup.h"
#include "encap.h"
#include "neighbour_replies.h"
#include "flow_quota.h"

#define NEXT (-1) /* TCX_NEXT */
#define DROP 2    /* TCX_DROP */

static __always_inline __u32 now_s(void)
{
	return bpf_ktime_get_ns() / 1000000000ull;
}

static __always_inline int count_drop(__u32 reason)
{
	count(reason);
	return DROP;
}

/* Returns the first epoch of a flow. Epochs of one pair of ports must grow from connection to connection, on all nodes,
 * so they start from the clock. */
static __always_inline __u32 first_epoch(void)
{
	return bpf_ktime_get_tai_ns() / 1000000000ull;
}

/* Most hops left to a forwarded packet; with HOPS_NONE, no node forwards it again. */
#define HOPS_ANY 255
#define HOPS_NONE 1

/* Decrements the hop limit, and caps it at `most`. Without that, two nodes with temporarily different tables could
 * forward a packet to each other for ever. */
static __always_inline int lower_ttl(struct __sk_buff *skb, const struct packet *p, __u8 most)
{
	const __u32 l3 = sizeof(struct ethhdr);
	if (p->v6) {
		__u32 at = l3 + __builtin_offsetof(struct ipv6hdr, hop_limit);
		__u8 hops;
		if (bpf_skb_load_bytes(skb, at, &hops, 1) || hops <= 1)
			return 0;
		hops = hops - 1 < most ? hops - 1 : most;
		return !bpf_skb_store_bytes(skb, at, &hops, 1, BPF_F_RECOMPUTE_CSUM);
	}
	__u32 at = l3 + __builtin_offsetof(struct iphdr, ttl);
	__u8 word[2]; /* the checksum covers 16 bits: TTL and protocol */
	if (bpf_skb_load_bytes(skb, at, word, 2) || word[0] <= 1)
		return 0;
	__u16 old, new;
	__builtin_memcpy(&old, word, 2);
	word[0] = word[0] - 1 < most ? word[0] - 1 : most;
	__builtin_memcpy(&new, word, 2);
	bpf_l3_csum_replace(skb, l3 + __builtin_offsetof(struct iphdr, check), old, new, 2);
	return !bpf_skb_store_bytes(skb, at, word, 2, 0);
}

/* Returns true if the donor's stack gets a packet of a flow with data forwarded to the acceptor: a packet without
 * data. */
static __always_inline int is_for_donor(const struct packet *p, int what)
{
	if (what == PARSE_ICMP)
		return 1;
	return p->flow.protocol == IPPROTO_TCP && !p->payload && !p->fragment;
}

static __always_inline int hold(struct config *config, struct flow_value *flow)
{
	__u32 slot = flow->hold_slot;
	__u32 *held = bpf_map_lookup_elem(&holds, &slot);
	if (!held)
		return count_drop(DROP_TRANSIT_ELSEWHERE);
	__sync_fetch_and_add(held, 1);
	count(COUNT_HELD);
	return bpf_redirect(config->hold_ifindex, 0);
}

/* Keeps the first packet of a new client until this contact node serves: user space has the packet steered then. A client
 * whose packet was dropped would wait a second until it repeats the packet. */
static __always_inline int hold_new_client(struct config *config)
{
	__u32 slot = NEW_CLIENTS_SLOT;
	__u32 *waiting = bpf_map_lookup_elem(&holds, &slot);
	if (!waiting || *(volatile __u32 *)waiting >= NEW_CLIENTS_MAX)
		return count_drop(DROP_NO_LEASE);
	__sync_fetch_and_add(waiting, 1);
	count(COUNT_HELD);
	return bpf_redirect(config->hold_ifindex, 0);
}

/* Gives a packet the headers for a node, with encapsulation if the node needs it or `wrapped` is set. Returns 0, or the
 * reason to drop the packet.
 */
static __always_inline __u32 set_next_hop(struct __sk_buff *skb, struct config *config, const struct packet *p,
					  const struct node *node, int wrapped)
{
	int encap = wrapped || node->flags & NODE_ENCAP;
	struct node *self = node_of(config->own_id);
	if (!self)
		return DROP_NO_NODE;
	if (encap) {
		/* A GSO packet is split into smaller segments later. */
		if (!skb->gso_size && config->mtu && p->l3_length + encap_size(node) > config->mtu)
			return DROP_TOO_BIG;
		__u8 v6 = node->flags & NODE_V6 ? 1 : 0;
		__u64 flags = v6 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV4;
		if (bpf_skb_adjust_room(skb, encap_size(node), BPF_ADJ_ROOM_MAC, flags))
			return DROP_TOO_BIG;
		if (v6) {
			struct ipv6hdr ip;
			outer_v6(&ip, p->l3_length, p->v6, self->address, node->address);
			bpf_skb_store_bytes(skb, sizeof(struct ethhdr), &ip, sizeof(ip), 0);
		} else {
			struct iphdr ip;
			outer_v4(&ip, p->l3_length, p->v6, unmap_v4(self->address), unmap_v4(node->address));
			bpf_skb_store_bytes(skb, sizeof(struct ethhdr), &ip, sizeof(ip), 0);
		}
	}
	struct ethhdr link;
	__u16 outer = node->flags & NODE_V6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	__u16 inner = p->v6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	link_header(&link, node, encap ? outer : inner);
	bpf_skb_store_bytes(skb, 0, &link, sizeof(link), 0);
	return 0;
}

/* Sends a packet to a node, with at most `hops` hops left. */
static __always_inline int forward_within(struct __sk_buff *skb, struct config *config, const struct packet *p, __u16 to,
					  int wrapped, __u8 hops)
{
	struct node *node = node_of(to);
	if (!node)
		return count_drop(DROP_NO_NODE);
	if (!lower_ttl(skb, p, hops))
		return count_drop(DROP_HOPS_USED_UP);
	__u32 why = set_next_hop(skb, config, p, node, wrapped);
	if (why)
		return count_drop(why);
	count(COUNT_FORWARDED_STRAGGLER);
	return bpf_redirect(node->ifindex, 0);
}

/* Forwards a straggler: it took an old route, and the flow is, or will be, at another node. */
static __always_inline int forward(struct __sk_buff *skb, struct config *config, const struct packet *p, __u16 to, int wrapped)
{
	return forward_within(skb, config, p, to, wrapped, HOPS_ANY);
}

/* Forwards a straggler of a service's flow. */
static __always_inline int forward_straggler(struct __sk_buff *skb, struct config *config, const struct packet *p, __u16 to)
{
	/* With broadcast every node has its own copy. */
	if (config->reach == REACH_BROADCAST)
		return count_drop(DROP_TRANSIT_ELSEWHERE);
	return forward(skb, config, p, to, 0);
}

/* Forwards a straggler of a flow that is at another node. To the holder, a packet that has room for it is encapsulated:
 * the steering table may still lead here after a new connection between the same ports began at the holder.
 */
static __always_inline int forward_moved(struct __sk_buff *skb, struct config *config, const struct packet *p, __u16 to)
{
	if (config->reach == REACH_BROADCAST)
		return count_drop(DROP_TRANSIT_ELSEWHERE);
	struct node *node = node_of(to);
	int wrapped = node && node->flags & NODE_HOLDER && !skb->gso_size &&
		      (!config->mtu || p->l3_length + encap_size(node) <= config->mtu);
	return forward(skb, config, p, to, wrapped);
}

/* Sends the first packet of a flow after its server, which moved from here. If the holder is the destination, the
 * packet is encapsulated, because the holder would send it back otherwise. */
static __always_inline int follow_server(struct __sk_buff *skb, struct config *config, const struct packet *p, __u16 to)
{
	struct node *node = node_of(to);
	return forward(skb, config, p, to, node && node->flags & NODE_HOLDER);
}

/* Returns the hop limit of a packet. */
static __always_inline __u8 hops_left(struct __sk_buff *skb, const struct packet *p)
{
	__u32 at = p->v6 ? __builtin_offsetof(struct ipv6hdr, hop_limit) : __builtin_offsetof(struct iphdr, ttl);
	__u8 hops = 0;
	bpf_skb_load_bytes(skb, sizeof(struct ethhdr) + at, &hops, 1);
	return hops;
}

/* Sends a packet that begins a flow to the node that has the server. While a server moves, two nodes may each take the
 * other for that node, and forward the packet to each other. The one where the hop limit ends keeps the packet if a
 * server listens there. */
static __always_inline int follow_new_client(struct __sk_buff *skb, struct config *config, const struct packet *p, __u16 to)
{
	if (hops_left(skb, p) <= 1 && is_served_here(skb, p))
		return NEXT;
	return follow_server(skb, config, p, to);
}

/* Sends a packet of a handshake to the node where the handshake began. The packet cannot be forwarded again,
 * because that node sends packets of unknown flows after the server, to this node.
 */
static __always_inline int follow_handshake(struct __sk_buff *skb, struct config *config, const struct packet *p, __u16 to)
{
	struct node *node = node_of(to);
	return forward_within(skb, config, p, to, node && node->flags & NODE_HOLDER, HOPS_NONE);
}

/* Copies out-of-order segments to the acceptor from prepare on, because the kernel does not export the out-of-order
 * queue. */
static __always_inline void copy_out_of_order(struct __sk_buff *skb, struct config *config, const struct packet *p)
{
	if (p->flow.protocol != IPPROTO_TCP || !p->payload)
		return;
	struct bpf_sock *socket = lookup_socket(skb, p, 0);
	if (!socket)
		return;
	struct bpf_tcp_sock *tcp = bpf_tcp_sock(socket);
	int ahead = tcp && (__s32)(p->seq - tcp->rcv_nxt) > 0;
	bpf_sk_release(socket);
	if (ahead) {
		count(COUNT_COPIED_OUT_OF_ORDER);
		bpf_clone_redirect(skb, config->hold_ifindex, 0);
	}
}

/* Returns the node that gets a new client with the ports of a packet, if that is another node; otherwise 0. */
static __always_inline __u16 other_placed_node(struct config *config, struct service *service, const struct packet *p)
{
	if (config->reach == REACH_BROADCAST)
		return 0;
	__u16 to = placed_node(service, &p->flow, 0);
	return to != config->own_id ? to : 0;
}

/* Returns true if a server that gets new clients is here, or has just moved here and will get them soon. The node that
 * the placement table names may have no running server of its own while a server moves, and would return the packet. */
static __always_inline int gets_new_clients(struct config *config, const struct service *service, const struct packet *p)
{
	return service->own_node_placed || previous_server_node(config, p);
}

/* Returns the node for a client of a service that this node does not serve: the contact node steered it by shares that
 * have changed since, or before it knew them. Returns 0 if the client stays, as it does if this node gets new clients.
 */
static __always_inline __u16 node_of_stray_client(struct __sk_buff *skb, struct config *config, struct service *service,
						  const struct packet *p)
{
	return gets_new_clients(config, service, p) || is_served_here(skb, p) ? 0 : other_placed_node(config, service, p);
}

/* Handles a packet of an unknown flow that is not a SYN: only a socket that waits for it may see it. */
static __always_inline int unknown_flow(struct __sk_buff *skb, struct config *config, struct service *service,
					const struct packet *p)
{
	enum socket_match by = match_socket(skb, p);
	if (by == MATCH_LISTENER || by == MATCH_SOCKET)
		return NEXT;
	/* A connection that has ended here may have a successor of the same ports at the server's present node. */
	__u16 after = by == MATCH_TIME_WAIT ? moved_server_node(skb, config, p) : 0;
	if (after)
		return follow_server(skb, config, p, after);
	if (by == MATCH_TIME_WAIT)
		return NEXT;
	/* With broadcast every node sees the packets of all flows. */
	if (config->reach == REACH_BROADCAST)
		return count_drop(DROP_OTHER_OWNER);
	/* The table may have changed between this flow's SYN and its record at the holder: the flow may belong to the
	 * previous node, which may also be the holder. */
	if (service->flags & HAS_PREVIOUS) {
		__u16 before = placed_node(service, &p->flow, 1);
		if (before && before != config->own_id && placed_node(service, &p->flow, 0) == config->own_id) {
			count(COUNT_PASSED_PREVIOUS);
			return follow_handshake(skb, config, p, before);
		}
	}
	__u16 to = moved_server_node(skb, config, p);
	if (!to)
		to = node_of_stray_client(skb, config, service, p);
	if (to)
		return follow_server(skb, config, p, to);
	__u16 from = previous_server_node(config, p);
	return from ? follow_handshake(skb, config, p, from) : count_drop(DROP_NO_SOCKET);
}

static __always_inline void update_last_packet(struct flow_value *flow)
{
	__u32 now = now_s();
	if (flow->last_packet_s != now)
		flow->last_packet_s = now;
}

/* Passes a packet to the stack once the hold is empty; until then, the packet joins the hold. */
static __always_inline int flush_or_hold(struct config *config, struct flow_value *flow)
{
	__u32 slot = flow->hold_slot;
	__u32 *held = bpf_map_lookup_elem(&holds, &slot);
	if (held && *held)
		return hold(config, flow);
	change_state(flow, FLOW_FLUSHING, FLOW_OWNED);
	return NEXT;
}

/* Handles the SYN of a flow that has ended here or moved away. The new connection between the same ports belongs to the
 * server's present node. If this node gets no new clients, the connection belongs to a node that does: a server that
 * hangs here would complete its handshake and never answer. Later packets of the flow go there too, although the
 * steering table still leads here. A flow that moved away, and a new connection that began elsewhere, stay where they
 * are; but from the node that the server left for this one, the server's connections have come here, too.
 *
 * The SYN of a connection that has not ended goes to the connection's socket, which asks the client (RFC 5961, section
 * 4.2). A client without that connection answers with a reset, which ends the connection, and repeats its SYN.
 */
static __always_inline int reuse_entry(struct __sk_buff *skb, struct config *config, struct service *service,
				       struct flow_value *flow, const struct packet *p, struct effective_state now)
{
	__u16 to = moved_server_node(skb, config, p);
	if (!to) {
		to = other_placed_node(config, service, p);
		if (to && now.state == FLOW_MOVED && now.peer != previous_server_node(config, p))
			return follow_new_client(skb, config, p, now.peer);
		if (gets_new_clients(config, service, p))
			return NEXT;
	}
	if (!to)
		return NEXT;
	union flow_state_word was = {.word = *(volatile __u32 *)state_word_of(flow)}, next = was;
	next.state = FLOW_MOVED;
	next.peer = to;
	if (was.state == now.state && __sync_val_compare_and_swap(state_word_of(flow), was.word, next.word) == was.word &&
	    now.state == FLOW_CLOSING)
		emit(&p->flow, now.epoch, EVENT_SUPERSEDED, 0);
	return follow_new_client(skb, config, p, to);
}

/* Returns true if this node takes a packet that may begin a flow. With broadcast, the flow's record precedes the
 * table. */
static __always_inline int is_placed_here(struct config *config, struct service *service, const struct packet *p)
{
	if (config->reach == REACH_STEER)
		return 1;
	struct record *record = bpf_map_lookup_elem(&steering, &p->flow);
	__u16 owner = record ? record->owner : placed_node(service, &p->flow, 0);
	return owner == config->own_id;
}

/* Handles a packet that may begin a flow: the packet goes to the server, here or elsewhere. */
static __always_inline int new_flow(struct __sk_buff *skb, struct config *config, struct service *service,
				    const struct packet *p, int what)
{
	if (!is_placed_here(config, service, p))
		return count_drop(DROP_OTHER_OWNER);
	if (what != PARSE_FLOW)
		return NEXT;
	__u16 to = moved_server_node(skb, config, p);
	if (!to)
		to = node_of_stray_client(skb, config, service, p);
	return to ? follow_new_client(skb, config, p, to) : NEXT;
}

static __always_inline int known_flow(struct __sk_buff *skb, struct config *config, struct service *service,
				      struct flow_value *flow, const struct packet *p, int what)
{
	update_last_packet(flow);
	struct effective_state now = effective_state_of(flow);
	int begins = begins_connection(p, what);
	switch (now.state) {
	case FLOW_PREPARED:
		copy_out_of_order(skb, config, p);
		return NEXT;
	case FLOW_REDIRECTING_DATA:
		if (is_for_donor(p, what))
			return NEXT;
		return forward_straggler(skb, config, p, now.peer);
	case FLOW_TRANSIT_OUT:
		return forward_straggler(skb, config, p, now.peer);
	case FLOW_MOVED:
		/* A listener here that began a new connection between the same ports must see its handshake's end. */
		if (begins)
			return reuse_entry(skb, config, service, flow, p, now);
		if (what == PARSE_FLOW && p->flow.protocol == IPPROTO_TCP && match_socket(skb, p) == MATCH_LISTENER)
			return NEXT;
		return forward_moved(skb, config, p, now.peer);
	case FLOW_TRANSIT_IN:
		return hold(config, flow);
	case FLOW_FLUSHING:
		return flush_or_hold(config, flow);
	case FLOW_CLOSING:
		/* A datagram begins a flow: the entry of the last one stays only until the holder has removed its record. */
		if (p->flow.protocol == IPPROTO_UDP)
			return new_flow(skb, config, service, p, what);
		return begins ? reuse_entry(skb, config, service, flow, p, now) : NEXT;
	default:
		return NEXT;
	}
}

static __always_inline int ingress_verdict(struct __sk_buff *skb, struct config *config, struct service *service,
					   struct packet *p, int what)
{
	struct flow_value *flow = bpf_map_lookup_elem(&flows, &p->flow);
	if (flow)
		return known_flow(skb, config, service, flow, p, what);
	if (config->role == ROLE_HOLDER && config->reach == REACH_STEER && begins_connection(p, what) && !has_lease())
		return hold_new_client(config);
	if (what == PARSE_ICMP || p->flow.protocol == IPPROTO_UDP || (p->tcp_syn && !p->tcp_ack))
		return new_flow(skb, config, service, p, what);
	return unknown_flow(skb, config, service, p);
}

/* Delivers a packet to this node's stack, past routing, which would reject this node's own address as source. */
static __always_inline int mark_private(struct config *config)
{
	return bpf_redirect(config->hold_ifindex, BPF_F_INGRESS);
}

/* Handles a packet of no service: it may belong to a connection at the address of one node alone, which moves with its
 * process.
 */
static __always_inline int private_ingress(struct __sk_buff *skb, struct config *config, const struct packet *p, int what)
{
	struct flow_value *flow = bpf_map_lookup_elem(&flows, &p->flow);
	if (!flow)
		return NEXT;
	update_last_packet(flow);
	struct effective_state now = effective_state_of(flow);
	switch (now.state) {
	case FLOW_REDIRECTING_DATA:
		if (is_for_donor(p, what))
			break;
		return forward(skb, config, p, now.peer, 0);
	case FLOW_TRANSIT_OUT:
	case FLOW_MOVED:
		return forward(skb, config, p, now.peer, 0);
	case FLOW_TRANSIT_IN:
		return hold(config, flow);
	case FLOW_FLUSHING: {
		int verdict = flush_or_hold(config, flow);
		if (verdict != NEXT)
			return verdict;
	}
	}
	struct node *self = node_of(config->own_id);
	if (self && same_address(self->address, p->flow.remote))
		return mark_private(config);
	skb->mark = PRIVATE_MARK;
	return NEXT;
}

/* Parses the linear part of a packet; if that is too short, makes more of the packet linear (a copy) and parses
 * again. */
static __always_inline int parse_skb(struct __sk_buff *skb, struct packet *p, enum direction d)
{
	int what = parse(p, (void *)(long)skb->data, (void *)(long)skb->data_end, d);
	if (what != PARSE_MALFORMED)
		return what;
	bpf_skb_pull_data(skb, skb->len < 256 ? skb->len : 256);
	return parse(p, (void *)(long)skb->data, (void *)(long)skb->data_end, d);
}

SEC("tc")
int holdfast_ingress(struct __sk_buff *skb)
{
	struct config *config = get_config();
	if (!config)
		return NEXT;
	if (config->reach == REACH_BROADCAST && config->role == ROLE_HOLDER) {
		int answered = answer_neighbour(skb, config);
		if (answered)
			return answered;
	}
	struct packet p;
	int what = parse_skb(skb, &p, INGRESS);
	if (what == PARSE_OTHER || what == PARSE_MALFORMED) {
		/* Without a lease another node may have the service addresses. */
		if (config->role && config->reach == REACH_STEER && asks_for_service(skb) && !has_lease())
			return count_drop(DROP_NO_LEASE);
		return NEXT; /* the stack counts and drops malformed packets */
	}
	if (what == PARSE_FRAGMENT_UNKNOWN) {
		struct service_key any = {.protocol = p.flow.protocol};
		__builtin_memcpy(any.address, p.flow.local, 16);
		return bpf_map_lookup_elem(&services, &any) ? count_drop(DROP_FRAGMENT_WITHOUT_FIRST) : NEXT;
	}
	struct service *service = service_of(&p.flow);
	if (!service)
		return private_ingress(skb, config, &p, what);
	if (!config->ready)
		return count_drop(DROP_NOT_READY);
	int verdict = ingress_verdict(skb, config, service, &p, what);
	/* The shared link address is not this interface's, so the packet type is set to HOST. */
	if (verdict == NEXT && config->reach == REACH_BROADCAST)
		bpf_skb_change_type(skb, 0 /* PACKET_HOST */);
	return verdict;
}

#endif
