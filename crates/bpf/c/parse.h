/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * The parser of all programs: from link header to flow. Every input has a result; unknown packets are PARSE_OTHER.
 */
#ifndef HOLDFAST_PARSE_H
#define HOLDFAST_PARSE_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <linux/icmpv6.h>
#include "maps.h"

/* Defined here because <linux/icmp.h> includes the C library. */
struct icmphdr {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__u16 unused;
	__u16 mtu;
};

#define ICMP_DEST_UNREACH 3
#define ICMP_FRAG_NEEDED 4
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12

enum direction { INGRESS, EGRESS };

enum parse_result {
	PARSE_OTHER,    /* not a packet of a flow */
	PARSE_FLOW,     /* TCP or UDP with ports */
	PARSE_ICMP,     /* an ICMP error about a flow */
	PARSE_MALFORMED,
	PARSE_FRAGMENT_UNKNOWN, /* a later fragment without a known first one */
};

struct packet {
	struct flow_key flow;
	__u16 l3; /* offsets from the start of the frame */
	__u16 l4;
	__u16 l3_length; /* length of the network layer according to its header, bytes */
	__u8 v6;
	__u8 fragment;
	__u8 later_fragment; /* not the first of its datagram */
	__u8 tcp_syn, tcp_ack, tcp_rst;
	__u32 seq;
	__u32 payload; /* number of TCP bytes that take sequence space */
};

/* Returns true for the first packet of a TCP connection. */
static __always_inline int begins_connection(const struct packet *p, int what)
{
	return what == PARSE_FLOW && p->flow.protocol == IPPROTO_TCP && p->tcp_syn && !p->tcp_ack;
}

#define IP_MF 0x2000
#define IP_OFFSET 0x1fff

static __always_inline void map_v4(__u8 *to, __u32 address)
{
	__builtin_memset(to, 0, 10);
	to[10] = to[11] = 0xff;
	__builtin_memcpy(to + 12, &address, 4);
}

/* Copies the addresses of an IPv4 header into the flow. */
static __always_inline void addresses_v4(struct flow_key *flow, __u32 source, __u32 destination, enum direction d)
{
	map_v4(flow->local, d == INGRESS ? destination : source);
	map_v4(flow->remote, d == INGRESS ? source : destination);
}

static __always_inline void ports(struct flow_key *flow, __u16 source, __u16 destination, enum direction d)
{
	flow->local_port = d == INGRESS ? destination : source;
	flow->remote_port = d == INGRESS ? source : destination;
}

static __always_inline void remember_fragment(const struct packet *p, __u32 id, enum direction d)
{
	struct fragment_key key = {.id = id, .protocol = p->flow.protocol};
	struct fragment_ports value = {};
	__builtin_memcpy(key.source, d == INGRESS ? p->flow.remote : p->flow.local, 16);
	__builtin_memcpy(key.destination, d == INGRESS ? p->flow.local : p->flow.remote, 16);
	value.source = d == INGRESS ? p->flow.remote_port : p->flow.local_port;
	value.destination = d == INGRESS ? p->flow.local_port : p->flow.remote_port;
	bpf_map_update_elem(&fragments, &key, &value, BPF_ANY);
}

static __always_inline int recall_fragment(struct packet *p, __u32 id, enum direction d)
{
	struct fragment_key key = {.id = id, .protocol = p->flow.protocol};
	__builtin_memcpy(key.source, d == INGRESS ? p->flow.remote : p->flow.local, 16);
	__builtin_memcpy(key.destination, d == INGRESS ? p->flow.local : p->flow.remote, 16);
	p->later_fragment = 1;
	struct fragment_ports *value = bpf_map_lookup_elem(&fragments, &key);
	if (!value)
		return PARSE_FRAGMENT_UNKNOWN;
	ports(&p->flow, value->source, value->destination, d);
	return PARSE_FLOW;
}

struct extension {
	__u8 next;
	__u8 length;
	__u16 offset; /* of a fragment header */
	__u32 id;
};

/* Parses the packet quoted by an ICMP error. The local side sent the packet, so its source is the local side. */
static __always_inline int quoted_v4(struct packet *p, void *at, void *end, enum direction d)
{
	struct iphdr *ip = at;
	if ((void *)(ip + 1) > end || ip->ihl != 5)
		return PARSE_OTHER;
	__u16 *port = (void *)(ip + 1);
	if ((void *)(port + 2) > end || (ip->frag_off & bpf_htons(IP_OFFSET)))
		return PARSE_OTHER;
	if (ip->protocol != IPPROTO_TCP && ip->protocol != IPPROTO_UDP)
		return PARSE_OTHER;
	enum direction quoted = d == INGRESS ? EGRESS : INGRESS;
	addresses_v4(&p->flow, ip->saddr, ip->daddr, quoted);
	ports(&p->flow, port[0], port[1], quoted);
	p->flow.protocol = ip->protocol;
	return PARSE_ICMP;
}

static __always_inline int quoted_v6(struct packet *p, void *at, void *end, enum direction d)
{
	struct ipv6hdr *ip = at;
	if ((void *)(ip + 1) > end)
		return PARSE_OTHER;
	__u16 *port = (void *)(ip + 1);
	__u8 next = ip->nexthdr;
	if (next == IPPROTO_FRAGMENT) {
		/* Only the first fragment of the sent packet has ports. */
		struct extension *fragment = (void *)(ip + 1);
		if ((void *)(fragment + 1) > end || (fragment->offset & bpf_htons(0xfff8)))
			return PARSE_OTHER;
		next = fragment->next;
		port = (void *)(fragment + 1);
	}
	if ((void *)(port + 2) > end)
		return PARSE_OTHER;
	if (next != IPPROTO_TCP && next != IPPROTO_UDP)
		return PARSE_OTHER;
	/* The packet was sent by this side, so the quoted source is local when the error arrives. */
	__builtin_memcpy(p->flow.local, d == INGRESS ? &ip->saddr : &ip->daddr, 16);
	__builtin_memcpy(p->flow.remote, d == INGRESS ? &ip->daddr : &ip->saddr, 16);
	ports(&p->flow, port[0], port[1], d == INGRESS ? EGRESS : INGRESS);
	p->flow.protocol = next;
	return PARSE_ICMP;
}

static __always_inline int transport(struct packet *p, void *at, void *end, __u32 length, enum direction d)
{
	if (p->flow.protocol == IPPROTO_TCP) {
		struct tcphdr *tcp = at;
		if ((void *)(tcp + 1) > end)
			return PARSE_MALFORMED;
		__u32 header = tcp->doff * 4;
		ports(&p->flow, tcp->source, tcp->dest, d);
		p->tcp_syn = tcp->syn;
		p->tcp_ack = tcp->ack;
		p->tcp_rst = tcp->rst;
		p->seq = bpf_ntohl(tcp->seq);
		p->payload = (length > header ? length - header : 0) + tcp->fin;
		return PARSE_FLOW;
	}
	if (p->flow.protocol == IPPROTO_UDP) {
		struct udphdr *udp = at;
		if ((void *)(udp + 1) > end)
			return PARSE_MALFORMED;
		ports(&p->flow, udp->source, udp->dest, d);
		return PARSE_FLOW;
	}
	return PARSE_OTHER;
}

static __always_inline int parse_v4(struct packet *p, void *at, void *end, enum direction d)
{
	struct iphdr *ip = at;
	if ((void *)(ip + 1) > end || ip->ihl < 5)
		return PARSE_MALFORMED;
	__u32 header = ip->ihl * 4;
	p->l4 = p->l3 + header;
	p->l3_length = bpf_ntohs(ip->tot_len);
	p->flow.protocol = ip->protocol;
	addresses_v4(&p->flow, ip->saddr, ip->daddr, d);
	void *l4 = at + header;
	if (l4 > end)
		return PARSE_MALFORMED;
	__u32 length = p->l3_length > header ? p->l3_length - header : 0;
	__u16 fragment = ip->frag_off & bpf_htons(IP_MF | IP_OFFSET);
	if (fragment) {
		p->fragment = 1;
		if (ip->protocol != IPPROTO_TCP && ip->protocol != IPPROTO_UDP)
			return PARSE_OTHER;
		if (fragment & bpf_htons(IP_OFFSET))
			return recall_fragment(p, ip->id, d);
	}
	if (ip->protocol == IPPROTO_ICMP) {
		struct icmphdr *icmp = l4;
		if ((void *)(icmp + 1) > end)
			return PARSE_MALFORMED;
		if (icmp->type != ICMP_DEST_UNREACH && icmp->type != ICMP_TIME_EXCEEDED && icmp->type != ICMP_PARAMETERPROB)
			return PARSE_OTHER;
		return quoted_v4(p, icmp + 1, end, d);
	}
	__u32 id = ip->id;
	int result = transport(p, l4, end, length, d);
	if (fragment && result == PARSE_FLOW)
		remember_fragment(p, id, d);
	return result;
}

static __always_inline int parse_v6(struct packet *p, void *at, void *end, enum direction d)
{
	struct ipv6hdr *ip = at;
	if ((void *)(ip + 1) > end)
		return PARSE_MALFORMED;
	__builtin_memcpy(p->flow.local, d == INGRESS ? &ip->daddr : &ip->saddr, 16);
	__builtin_memcpy(p->flow.remote, d == INGRESS ? &ip->saddr : &ip->daddr, 16);
	__u8 next = ip->nexthdr;
	__u32 length = bpf_ntohs(ip->payload_len);
	p->l3_length = length + sizeof(*ip);
	__u32 offset = sizeof(*ip), first_of = 0, id = 0;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS && next != IPPROTO_FRAGMENT)
			break;
		struct extension *extension = at + offset;
		if ((void *)(extension + 1) > end)
			return PARSE_MALFORMED;
		__u32 size = next == IPPROTO_FRAGMENT ? 8 : (extension->length + 1) * 8;
		if (next == IPPROTO_FRAGMENT) {
			p->fragment = 1;
			id = extension->id;
			p->flow.protocol = extension->next;
			if (extension->offset & bpf_htons(0xfff8))
				return recall_fragment(p, id, d);
			first_of = 1;
		}
		next = extension->next;
		offset += size;
		if (offset > 512)
			return PARSE_MALFORMED;
		length = length > size ? length - size : 0;
	}
	p->flow.protocol = next;
	p->l4 = p->l3 + offset;
	void *l4 = at + offset;
	if (l4 > end)
		return PARSE_MALFORMED;
	if (next == IPPROTO_ICMPV6) {
		struct icmp6hdr *icmp = l4;
		if ((void *)(icmp + 1) > end)
			return PARSE_MALFORMED;
		if (icmp->icmp6_type >= ICMPV6_ECHO_REQUEST || icmp->icmp6_type == 0)
			return PARSE_OTHER;
		return quoted_v6(p, icmp + 1, end, d);
	}
	int result = transport(p, l4, end, length, d);
	if (first_of && result == PARSE_FLOW)
		remember_fragment(p, id, d);
	return result;
}

static __always_inline int parse(struct packet *p, void *data, void *end, enum direction d)
{
	struct ethhdr *link = data;
	__builtin_memset(p, 0, sizeof(*p));
	if ((void *)(link + 1) > end)
		return PARSE_MALFORMED;
	p->l3 = sizeof(*link);
	if (link->h_proto == bpf_htons(ETH_P_IP))
		return parse_v4(p, link + 1, end, d);
	if (link->h_proto == bpf_htons(ETH_P_IPV6)) {
		p->v6 = 1;
		return parse_v6(p, link + 1, end, d);
	}
	return PARSE_OTHER;
}

static __always_inline struct service *service_of(const struct flow_key *flow)
{
	struct service_key key = {.port = flow->local_port, .protocol = flow->protocol};
	__builtin_memcpy(key.address, flow->local, 16);
	return bpf_map_lookup_elem(&services, &key);
}

/* A service address of any port is in the table under port 0 and each protocol. */
static __always_inline int is_service_address(const __u8 *address)
{
	struct service_key any = {.protocol = IPPROTO_TCP};
	__builtin_memcpy(any.address, address, 16);
	if (bpf_map_lookup_elem(&services, &any))
		return 1;
	any.protocol = IPPROTO_UDP;
	return bpf_map_lookup_elem(&services, &any) != 0;
}

/* Hash of the whole key, the same at every node: multiply and fold. */
static __always_inline __u32 flow_hash(const struct flow_key *flow)
{
	const __u32 *word = (const __u32 *)flow;
	__u32 h = 0x9747b28c;
#pragma unroll
	for (unsigned i = 0; i < sizeof(*flow) / 4; i++) {
		__u32 k = word[i] * 0xcc9e2d51;
		k = (k << 15) | (k >> 17);
		h ^= k * 0x1b873593;
		h = ((h << 13) | (h >> 19)) * 5 + 0xe6546b64;
	}
	h ^= h >> 16;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	return h ^ (h >> 16);
}

/* Returns the node for a new flow; 0 if the table has no node. With `previous`, the node before the last change. */
static __always_inline __u16 placed_node(const struct service *service, const struct flow_key *flow, int previous)
{
	if (service->by_port)
		return service->port_owner;
	__u32 generation = (service->generation ^ previous) & 1;
	__u32 slot = (service->index * 2 + generation) * PLACEMENT_SLOTS + (flow_hash(flow) & (PLACEMENT_SLOTS - 1));
	__u16 *node = bpf_map_lookup_elem(&placement, &slot);
	return node ? *node : 0;
}

static __always_inline struct node *node_of(__u16 id)
{
	__u32 index = id;
	struct node *node = bpf_map_lookup_elem(&nodes, &index);
	return node && (node->flags & NODE_KNOWN) ? node : 0;
}

#endif
