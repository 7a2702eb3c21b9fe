/* SPDX-License-Identifier: (MIT OR GPL-2.0-only) */
#ifndef HOLDFAST_MAPS_H
#define HOLDFAST_MAPS_H

#include "shared.h"
#include "pending_handshakes.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct config);
} config SEC(".maps");

/* The lease of the contact node. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct lease);
} lease SEC(".maps");

/* Services by address and port, and each address once more under port 0. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * MAX_SERVICES);
	__type(key, struct service_key);
	__type(value, struct service);
} services SEC(".maps");

/* Nodes to which servers have moved from this node: the first packet of a flow with such a server is sent there. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SERVICES);
	__type(key, struct service_key);
	__type(value, struct successor);
} successors SEC(".maps");

/* Node of each slot: [service][generation][slot]. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SERVICES * 2 * PLACEMENT_SLOTS);
	__type(key, __u32);
	__type(value, __u16);
} placement SEC(".maps");

/* Path to each node, by number. A group gives each number once, so numbers grow with every node that joins again. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_NODES);
	__type(key, __u32);
	__type(value, struct node);
} nodes SEC(".maps");

/* Source addresses from which encapsulated packets are accepted. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_NODE_ADDRESSES);
	__type(key, __u8[16]);
	__type(value, __u16);
} peers SEC(".maps");

/* The steering table (holder and former holder only). No entry is evicted. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, struct record);
} steering SEC(".maps");

/* Flows of this node. No entry is evicted. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, struct flow_value);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_quota);
} room SEC(".maps");

/* Flow groups; number 0 is unused. The names of pinned maps stay, because a restarted daemon finds the pins by them. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_FLOW_GROUPS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_group);
} convoys SEC(".maps");

/* Private flows with a peer that is not at its address's host. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 16);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, struct translation);
} translations SEC(".maps");

/* Number of packets in the hold, by slot; user space subtracts the packets that it has replayed. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_HOLD_SLOTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u32);
} holds SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

struct fragment_key {
	__u8 source[16];
	__u8 destination[16];
	__u32 id;
	__u32 protocol;
};

struct fragment_ports {
	__u16 source;
	__u16 destination;
};

/* Ports of first fragments, for later ones. Losing an entry loses one datagram, so eviction is acceptable here. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fragment_key);
	__type(value, struct fragment_ports);
} fragments SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} events SEC(".maps");

/* Changes written by user space: see batch_setter.h. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CHANGES_MAX);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct change);
} changes SEC(".maps");

static __always_inline void count(__u32 which)
{
	__u64 *counter = bpf_map_lookup_elem(&counters, &which);
	if (counter)
		(*counter)++;
}

static __always_inline struct config *get_config(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&config, &zero);
}

/* Returns true while this node may place new flows and answer for the service addresses. */
static __always_inline int has_lease(void)
{
	__u32 zero = 0;
	struct lease *current = bpf_map_lookup_elem(&lease, &zero);
	if (!current || !*(volatile __u64 *)&current->table_ready)
		return 0;
	__u64 until_ns = *(volatile __u64 *)&current->until_ns;
	return until_ns == LEASE_WITHOUT_END || bpf_ktime_get_boot_ns() < until_ns;
}

/* Returns the contact node that follows this node, the former one; 0 if unknown. */
static __always_inline __u16 next_contact(void)
{
	__u32 zero = 0;
	struct lease *current = bpf_map_lookup_elem(&lease, &zero);
	return current ? *(volatile __u64 *)&current->contact : 0;
}

static __always_inline void emit(const struct flow_key *flow, __u32 epoch, __u8 kind, __u8 detail)
{
	struct event *event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!event) {
		count(COUNT_EVENTS_LOST);
		return;
	}
	event->flow = *flow;
	event->epoch = epoch;
	event->kind = kind;
	event->detail = detail;
	event->pad[0] = event->pad[1] = 0;
	bpf_ringbuf_submit(event, 0);
}

/* State, flow group and peer share one word, because all of them may change concurrently. */
union flow_state_word {
	struct {
		__u8 state;
		__u8 flow_group;
		__u16 peer;
	};
	__u32 word;
};

static __always_inline __u32 *state_word_of(struct flow_value *flow)
{
	return (__u32 *)&flow->state;
}

/* Effective state of a flow: its own, or its group's. */
struct effective_state {
	__u8 state;
	__u16 peer;
	__u32 epoch;
};

static __always_inline struct effective_state effective_state_of(const struct flow_value *flow)
{
	struct effective_state now = {.state = flow->state, .peer = flow->peer, .epoch = flow->epoch};
	__u32 index = flow->flow_group;
	if (!index)
		return now;
	struct flow_group *flow_group = bpf_map_lookup_elem(&convoys, &index);
	__u64 word = flow_group ? *(volatile __u64 *)flow_group : 0;
	struct flow_group all;
	__builtin_memcpy(&all, &word, sizeof(all));
	if (!all.state)
		return now;
	now.epoch += all.epoch_offset;
	/* The flow's socket closed while this node was the owner. */
	if (now.state == FLOW_CLOSING && (all.state == FLOW_REDIRECTING_DATA || all.state == FLOW_FLUSHING))
		return now;
	now.state = all.state;
	now.peer = all.peer;
	return now;
}

/* Changes a flow's state, if it is still `from`. */
static __always_inline void change_state(struct flow_value *flow, __u8 from, __u8 to)
{
	union flow_state_word was = {.word = *(volatile __u32 *)state_word_of(flow)}, now = was;
	if (was.state != from)
		return;
	now.state = to;
	__sync_val_compare_and_swap(state_word_of(flow), was.word, now.word);
}

#endif
