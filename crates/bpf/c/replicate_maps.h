/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Maps of the replicator, and the scratch memory in which its functions leave results for each other. The functions are global:
 * the verifier checks each one alone, with unknown arguments and memory.
 */
#ifndef HOLDFAST_REPLICATE_MAPS_H
#define HOLDFAST_REPLICATE_MAPS_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include "replicate.h"

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16
#define TCP_ECE 64
#define TCP_CWR 128

/* 1 or 0, and minimum and maximum of sequence numbers, without branches: each branch would double the verifier's work. */
#define BEFORE(a, b) ((__u32)((a) - (b)) >> 31)
#define AFTER(a, b) BEFORE(b, a)
#define FLAG(condition, flag) ((__u32)(condition) * (flag))

static __always_inline __u32 sign_mask(__u32 difference)
{
	__u32 mask = (__s32)difference >> 31;
	barrier_var(mask);
	return mask;
}

static __always_inline __u32 seq_max(__u32 a, __u32 b)
{
	return a + ((b - a) & ~sign_mask(b - a));
}

static __always_inline __u32 seq_min(__u32 a, __u32 b)
{
	return a + ((b - a) & sign_mask(b - a));
}

/* Returns b if bit is 1, a if bit is 0. */
static __always_inline __u32 choose(__u32 bit, __u32 b, __u32 a)
{
	__u32 mask = -bit;
	barrier_var(mask);
	return a ^ ((a ^ b) & mask);
}

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_REPLICATED_SERVICES);
	__type(key, struct endpoint);
	__type(value, __u32);
} repl_services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_REPLICATED_SERVICES * LEGS);
	__type(key, struct endpoint);
	__type(value, struct leg_ref);
} repl_legs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_REPLICATED_SERVICES);
	__type(key, __u32);
	__type(value, struct replicated_service);
} repl_config SEC(".maps");

/* Roles of each service in its low 32 bits: one write changes them in all connections. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_REPLICATED_SERVICES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} repl_roles SEC(".maps");

/* A flood of SYN segments evicts the oldest entries here, and no connection. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct connection_key);
	__type(value, struct half_open);
} repl_half_open SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct connection_key);
	__type(value, struct connection);
} repl_connections SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REPL_COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} repl_counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} repl_events SEC(".maps");

/* A segment as it came, and its present addresses. */
struct segment {
	__u8 addresses[32]; /* source and destination, as they are in the packet at present */
	__u8 source[16], destination[16];
	__u16 source_port, destination_port;
	__u32 sequence, ack, window, payload;
	__u32 timestamp, echo;
	__u32 l4, header; /* offset from the frame's start, and length, in bytes */
	__u16 ethertype;
	__u16 mss;
	__u8 flags, scale, has_scale, traffic_class;
	/* Offsets of option values in the header; 0: the option is missing. */
	__u8 timestamp_at, mss_at, scale_at, sack_at, sack_count, permit_at;
};

enum sack_edit { SACK_MOVE, SACK_CLIP, SACK_BLANK };

/* New contents of a segment. */
struct edit {
	__u8 addresses[32];
	struct path path;
	__u16 source_port, destination_port;
	__u32 sequence, ack, window;
	__u32 timestamp, echo;
	__u32 sack_minus; /* is subtracted from the edges of SACK blocks, */
	__u32 sack_limit; /* which end here with SACK_CLIP */
	__u8 flags, sack, strip_timestamps, clear_ecn;
};

/* A segment without data that replaces the packet. */
struct made {
	__u8 addresses[32];
	struct path path;
	__u16 source_port, destination_port;
	__u32 sequence, ack, window;
	__u32 timestamp, echo;
	__u16 mss;
	__u8 flags, scale, options;
};

struct leg_copy {
	__u32 ack, window, echo, sack_minus;
	__u16 port;
	__u8 strip_timestamps, pad;
};

/* Output of a segment that is new for its leg, service space. Conditions are 0 or 1. */
struct take {
	__u32 sequence; /* of the segment */
	__u32 base;     /* of the output */
	__u32 nxt;      /* of the leg, when the take was planned, and afterwards */
	__u32 new_nxt;
	__u32 from, to; /* new stretch */
	__u32 split;    /* position for a comparison within the stretch, or its end */
	__u32 in_order;
	__u32 is_early; /* the stretch is beyond a gap */
	__u32 merge;    /* the stretch closes the gap */
	__u32 reject;   /* the stretch is beyond a second gap */
	__u32 hashes;   /* the stretch has digests */
	__u32 compare;  /* the leg's digest at `compare_at` has to be `expected` */
	__u32 compare_at;
	__u64 expected, actual;
	__u64 first, second; /* digests of the parts before and after the split */
};

#define CHUNK 256

struct scratch {
	/* The TCP header as it came, as it is in the packet at present, and as it will be. */
	__u8 original[64], current[64], next[64];
	__u8 link[64]; /* link and network header as they came */
	__u8 frame[112];
	__u8 chunk[CHUNK + 16];
	__u64 hash;
	struct segment p;
	struct edit edit;
	struct made made;
	struct leg_copy copy[LEGS];
	struct take take;
	struct connection_key key;
	__u32 leg;
	/* Roles in force, read through memory so that the verifier does not follow single values. */
	volatile __u32 live, primary;
	volatile __u32 slowest; /* end of the least output of a live leg */
	volatile __u32 low;     /* first leg with the lowest acknowledgement */
	__u32 early_legs;       /* legs that ended before the output of another */
	__u32 early_diverged;   /* replicas whose output came before the primary's, and differs */
	__u8 blank[sizeof(struct connection)] __attribute__((aligned(8)));
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} repl_scratch SEC(".maps");

static __always_inline struct scratch *scratch(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&repl_scratch, &zero);
}

static __always_inline struct replicated_service *service_config(const struct scratch *s)
{
	__u32 index = s->key.service;
	return bpf_map_lookup_elem(&repl_config, &index);
}

static __always_inline __u32 service_roles(const struct scratch *s)
{
	__u32 index = s->key.service;
	__u64 *roles = bpf_map_lookup_elem(&repl_roles, &index);
	return roles ? *(volatile __u32 *)roles : 0;
}

static __always_inline void count(__u32 which)
{
	__u64 *n = bpf_map_lookup_elem(&repl_counters, &which);
	if (n)
		(*n)++;
}

static __always_inline struct replication_event *new_event(const struct scratch *s, __u8 kind)
{
	struct replication_event *event = bpf_ringbuf_reserve(&repl_events, sizeof(*event), 0);
	if (!event) {
		count(REPL_LOST_EVENTS);
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->key = s->key;
	event->kind = kind;
	return event;
}

#endif
