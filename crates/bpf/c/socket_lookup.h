/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Lookup of the socket that waits for a packet at this node, and of the node to which its server has moved.
 */
#ifndef HOLDFAST_SOCKET_LOOKUP_H
#define HOLDFAST_SOCKET_LOOKUP_H

#include "parse.h"

/* Fills in the tuple of a packet's socket; returns its size. */
static __always_inline __u32 socket_tuple(struct bpf_sock_tuple *tuple, const struct packet *p)
{
	if (p->v6) {
		__builtin_memcpy(tuple->ipv6.saddr, p->flow.remote, 16);
		__builtin_memcpy(tuple->ipv6.daddr, p->flow.local, 16);
		tuple->ipv6.sport = p->flow.remote_port;
		tuple->ipv6.dport = p->flow.local_port;
		return sizeof(tuple->ipv6);
	}
	tuple->ipv4.saddr = unmap_v4(p->flow.remote);
	tuple->ipv4.daddr = unmap_v4(p->flow.local);
	tuple->ipv4.sport = p->flow.remote_port;
	tuple->ipv4.dport = p->flow.local_port;
	return sizeof(tuple->ipv4);
}

static __always_inline struct bpf_sock *lookup_socket(struct __sk_buff *skb, const struct packet *p, int any)
{
	struct bpf_sock_tuple tuple;
	__u32 size = socket_tuple(&tuple, p);
	return any ? bpf_skc_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0)
		   : bpf_sk_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
}

#define TCP_TIME_WAIT_STATE 6
#define TCP_LISTEN_STATE 10
#define TCP_NEW_SYN_RECV_STATE 12

enum socket_match {
	MATCH_NONE,
	MATCH_LISTENER, /* end of a handshake: a half-open connection, or a SYN cookie */
	MATCH_SOCKET,
	MATCH_TIME_WAIT, /* TIME_WAIT: the connection has ended, and its last packets may be retransmitted */
};

static __always_inline int is_cookie(struct __sk_buff *skb, const struct packet *p, struct bpf_sock *listener)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	if (!p->tcp_ack || p->tcp_rst || p->fragment)
		return 0;
	if (p->v6) {
		struct ipv6hdr *ip = data + sizeof(struct ethhdr);
		struct tcphdr *tcp = (void *)(ip + 1);
		return (void *)(tcp + 1) <= end && ip->nexthdr == IPPROTO_TCP &&
		       !bpf_tcp_check_syncookie(listener, ip, sizeof(*ip), tcp, sizeof(*tcp));
	}
	struct iphdr *ip = data + sizeof(struct ethhdr);
	struct tcphdr *tcp = (void *)(ip + 1);
	return (void *)(tcp + 1) <= end && ip->ihl == 5 &&
	       !bpf_tcp_check_syncookie(listener, ip, sizeof(*ip), tcp, sizeof(*tcp));
}

/* Returns the kind of socket that waits for a TCP packet other than a SYN. */
static __noinline enum socket_match match_socket(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock *socket = lookup_socket(skb, p, 1);
	if (!socket)
		return MATCH_NONE;
	enum socket_match by = MATCH_SOCKET;
	if (socket->state == TCP_LISTEN_STATE)
		by = is_cookie(skb, p, socket) ? MATCH_LISTENER : MATCH_NONE;
	else if (socket->state == TCP_NEW_SYN_RECV_STATE)
		by = MATCH_LISTENER;
	else if (socket->state == TCP_TIME_WAIT_STATE)
		by = MATCH_TIME_WAIT;
	bpf_sk_release(socket);
	return by;
}

/* Returns true if the first packet of a flow has a socket here. */
static __noinline int is_served_here(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock *socket;
	if (p->flow.protocol == IPPROTO_UDP) {
		struct bpf_sock_tuple tuple;
		__u32 size = socket_tuple(&tuple, p);
		socket = bpf_sk_lookup_udp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
		if (!socket)
			return 0;
		bpf_sk_release(socket);
		return 1;
	}
	/* No connection has port 0, so this finds the listener even beside a connection between the same ports. */
	struct packet any = *p;
	any.flow.remote_port = 0;
	socket = lookup_socket(skb, &any, 1);
	if (!socket)
		return 0;
	int listens = socket->state == TCP_LISTEN_STATE;
	bpf_sk_release(socket);
	return listens;
}

/* Returns the record of another node that has, or had, the packet's server. With broadcast every node sees the packet,
 * and the table alone determines the owner.
 */
static __always_inline struct successor *successor_of(struct config *config, const struct packet *p)
{
	struct service_key key = {.port = p->flow.local_port, .protocol = p->flow.protocol};
	__builtin_memcpy(key.address, p->flow.local, 16);
	return config->reach == REACH_BROADCAST ? 0 : bpf_map_lookup_elem(&successors, &key);
}

/* Returns the node that has the packet's server; 0 if the server is here or unknown. */
static __always_inline __u16 moved_server_node(struct __sk_buff *skb, struct config *config, const struct packet *p)
{
	struct successor *to = successor_of(config, p);
	if (!to || to->role == SUCCESSOR_PREVIOUS)
		return 0;
	return to->role == SUCCESSOR_EXCLUSIVE || !is_served_here(skb, p) ? to->node : 0;
}

/* Returns the node from which the packet's server moved here; 0 if there is none, or the move was long ago. */
static __always_inline __u16 previous_server_node(struct config *config, const struct packet *p)
{
	struct successor *from = successor_of(config, p);
	return from && from->role == SUCCESSOR_PREVIOUS ? from->node : 0;
}

#endif
