/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Traffic for `holdfast bench steer`: makes UDP packets of many flows to a service address, and counts and checks the
 * packets that arrive at an owner. Not part of the data plane.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#define FLOWS_PER_ADDRESS 32768
#define FIRST_PORT 1024
#define MAX_FLOWS (1 << 20)
#define PAYLOAD 18

/* Parameters of the traffic, set by user space and mirrored in src/traffic.rs. */
struct plan {
	__u32 flows;
	__u32 ifindex;
	__u32 service;     /* address, network order */
	__u32 client;      /* first client address, network order */
	__u16 port;        /* of the service, network order */
	__u8 to_link[6];
	__u8 own_link[6];
	__u16 owners;      /* flow i belongs to owner i % owners */
	__u32 sample_mask; /* bits that must be zero in a packet's number for the packet to be checked */
	__u32 round;       /* distinguishes the arrivals of successive plans */
};

struct seen {
	__u64 packets;
	__u64 checked;
	__u64 flows; /* checked packets that were the first of their flow in the round */
	__u64 wrong_flow;
	__u64 wrong_owner;
	__u64 wrong_content;
};

struct payload {
	__u64 number;
	__u32 flow;
	__u32 mixed; /* computed from number and flow */
	__u16 end;
} __attribute__((packed));

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct plan);
} plan SEC(".maps");

struct position {
	__u64 number;
	__u32 flow;
	__u32 pad;
};

/* Position of the generator, of which only one runs at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct position);
} position SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct seen);
} seen SEC(".maps");

/* The round in which a flow was last checked. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_FLOWS);
	__type(key, __u32);
	__type(value, __u32);
} arrived SEC(".maps");

struct frame {
	struct ethhdr link;
	struct iphdr ip;
	struct udphdr udp;
	struct payload payload;
} __attribute__((packed));

static __always_inline __u32 mix(__u64 number, __u32 flow)
{
	return ((__u32)number ^ (flow * 0x9e3779b1)) * 0x85ebca6b;
}

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

static __always_inline __u32 add(const void *at, int halves)
{
	const __u16 *half = at;
	__u32 sum = 0;
#pragma unroll
	for (int i = 0; i < halves; i++)
		sum += half[i];
	return sum;
}

static __always_inline __u32 udp_sum(const struct frame *frame)
{
	return add(&frame->ip.saddr, 4) + bpf_htons(IPPROTO_UDP) + frame->udp.len +
	       add(&frame->udp, (sizeof(struct udphdr) + PAYLOAD) / 2);
}

SEC("xdp")
int traffic_make(struct xdp_md *context)
{
	__u32 zero = 0;
	struct plan *p = bpf_map_lookup_elem(&plan, &zero);
	struct position *at = bpf_map_lookup_elem(&position, &zero);
	struct frame *frame = (void *)(long)context->data;
	if (!p || !at || (void *)(frame + 1) > (void *)(long)context->data_end)
		return XDP_DROP;
	__u32 flow = at->flow;
	at->flow = flow + 1 < p->flows ? flow + 1 : 0;
	__u64 number = at->number++;
	/* The reused page may contain other data, so every byte is written. */
	__builtin_memcpy(frame->link.h_dest, p->to_link, 6);
	__builtin_memcpy(frame->link.h_source, p->own_link, 6);
	frame->link.h_proto = bpf_htons(ETH_P_IP);
	__builtin_memset(&frame->ip, 0, sizeof(frame->ip));
	frame->ip.version = 4;
	frame->ip.ihl = 5;
	frame->ip.tot_len = bpf_htons(sizeof(*frame) - sizeof(frame->link));
	frame->ip.ttl = 64;
	frame->ip.protocol = IPPROTO_UDP;
	frame->ip.saddr = bpf_htonl(bpf_ntohl(p->client) + flow / FLOWS_PER_ADDRESS);
	frame->ip.daddr = p->service;
	frame->ip.check = fold(add(&frame->ip, 10));
	frame->udp.source = bpf_htons(FIRST_PORT + flow % FLOWS_PER_ADDRESS);
	frame->udp.dest = p->port;
	frame->udp.len = bpf_htons(sizeof(struct udphdr) + PAYLOAD);
	frame->udp.check = 0;
	frame->payload.number = number;
	frame->payload.flow = flow;
	frame->payload.mixed = mix(number, flow);
	frame->payload.end = 0x4648;
	frame->udp.check = fold(udp_sum(frame));
	return bpf_redirect(p->ifindex, 0);
}

static __always_inline void check(const struct frame *frame, const struct plan *p, struct seen *s, __u32 owner)
{
	__u32 flow = frame->payload.flow;
	__u32 *round = bpf_map_lookup_elem(&arrived, &flow);
	s->checked++;
	if (round && *round != p->round) {
		*round = p->round;
		s->flows++;
	}
	if (flow >= p->flows || frame->ip.daddr != p->service || frame->udp.dest != p->port ||
	    frame->ip.saddr != bpf_htonl(bpf_ntohl(p->client) + flow / FLOWS_PER_ADDRESS) ||
	    frame->udp.source != bpf_htons(FIRST_PORT + flow % FLOWS_PER_ADDRESS))
		s->wrong_flow++;
	if (p->owners && flow % p->owners != owner)
		s->wrong_owner++;
	if (frame->payload.mixed != mix(frame->payload.number, flow) || frame->payload.end != 0x4648 ||
	    fold(udp_sum(frame)) != 0 || fold(add(&frame->ip, 10)) != 0)
		s->wrong_content++;
}

/* Counts a packet of the plan and returns 1; returns 0 for any other packet. */
static __always_inline int take(void *data, void *end, __u32 owner)
{
	__u32 zero = 0;
	struct plan *p = bpf_map_lookup_elem(&plan, &zero);
	struct seen *s = bpf_map_lookup_elem(&seen, &owner);
	struct frame *frame = data;
	if (!p || !s || (void *)(frame + 1) > end)
		return 0;
	if (frame->link.h_proto != bpf_htons(ETH_P_IP) || frame->ip.daddr != p->service)
		return 0;
	s->packets++;
	if (!(frame->payload.number & p->sample_mask))
		check(frame, p, s, owner);
	return 1;
}

#define SINKS(owner)                                                                                                   \
	SEC("tc") int traffic_take_##owner(struct __sk_buff *skb)                                                      \
	{                                                                                                              \
		return take((void *)(long)skb->data, (void *)(long)skb->data_end, owner) ? TC_ACT_SHOT : TC_ACT_OK;    \
	}                                                                                                              \
	SEC("xdp") int traffic_take_xdp_##owner(struct xdp_md *context)                                                \
	{                                                                                                              \
		void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;                      \
		return take(data, end, owner) ? XDP_DROP : XDP_PASS;                                                   \
	}

SINKS(0)
SINKS(1)

char _license[] SEC("license") = "Dual MIT/GPL";
