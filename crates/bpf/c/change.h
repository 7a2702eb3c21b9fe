/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Batched changes of flows and records, in place. The map's own batch call allocates a new element for each entry and
 * frees the old one, which takes several times as long while connections are stopped. Programs that read meanwhile see
 * a flow or record from before or after the change, or a destination of either.
 */
#ifndef HOLDFAST_CHANGE_H
#define HOLDFAST_CHANGE_H

#include "maps.h"

/* Makes a flow join or leave a convoy; its state and peer may change concurrently. */
static __always_inline int join(struct flow_value *flow, __u8 convoy)
{
#pragma unroll
	for (int tries = 0; tries < 4; tries++) {
		union flow_turn was = {.word = *(volatile __u32 *)turn_of(flow)}, now = was;
		now.convoy = convoy;
		if (__sync_val_compare_and_swap(turn_of(flow), was.word, now.word) == was.word)
			return 0;
	}
	return 1;
}

/* Gives a flow the state, convoy and peer of a change. A flow with a socket that closed meanwhile does not become
 * owned. */
static __always_inline int turn_to(struct flow_value *flow, struct flow_value *change)
{
#pragma unroll
	for (int tries = 0; tries < 4; tries++) {
		union flow_turn was = {.word = *(volatile __u32 *)turn_of(flow)}, now = {.word = *turn_of(change)};
		if (was.state == FLOW_CLOSING && now.state == FLOW_OWNED)
			now.state = FLOW_CLOSING;
		if (__sync_val_compare_and_swap(turn_of(flow), was.word, now.word) == was.word)
			return 0;
	}
	return 1;
}

static long change_flow(__u32 index, struct change_order *order)
{
	struct change *change = bpf_map_lookup_elem(&changes, &index);
	if (!change)
		return 1;
	struct flow_value *flow = bpf_map_lookup_elem(&flows, &change->key);
	if (!change->flow.state) {
		if (flow)
			order->failed += join(flow, change->flow.convoy);
		return 0;
	}
	if (!flow) {
		if (bpf_map_update_elem(&flows, &change->key, &change->flow, BPF_ANY))
			order->failed++;
		return 0;
	}
	flow->epoch = change->flow.epoch;
	flow->hold_slot = change->flow.hold_slot;
	flow->seen_s = change->flow.seen_s;
	/* The state is written last, after everything that it refers to. */
	order->failed += turn_to(flow, &change->flow);
	return 0;
}

static long change_record(__u32 index, struct change_order *order)
{
	struct change *change = bpf_map_lookup_elem(&changes, &index);
	if (!change)
		return 1;
	struct record *record = bpf_map_lookup_elem(&steering, &change->key);
	if (!record) {
		if (bpf_map_update_elem(&steering, &change->key, &change->record, BPF_ANY))
			order->failed++;
		return 0;
	}
	record->epoch = change->record.epoch;
	/* Both nodes are written as one word, while the state says that there is an acceptor. */
	__u32 *nodes = (__u32 *)&record->owner, next = *(__u32 *)&change->record.owner;
	int begins = change->record.state == RECORD_TRANSIT;
	if (begins)
		__sync_lock_test_and_set(nodes, next);
	/* State and `by_donor` are one word, too. */
	*(volatile __u32 *)&record->state = *(__u32 *)&change->record.state;
	if (!begins)
		__sync_lock_test_and_set(nodes, next);
	return 0;
}

SEC("syscall")
int change_flows(struct change_order *context)
{
	struct change_order order = {.count = context->count};
	bpf_loop(order.count, change_flow, &order, 0);
	context->failed = order.failed;
	return 0;
}

SEC("syscall")
int change_records(struct change_order *context)
{
	struct change_order order = {.count = context->count};
	bpf_loop(order.count, change_record, &order, 0);
	context->failed = order.failed;
	return 0;
}

#endif
