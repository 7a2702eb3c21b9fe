/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Batched changes of flows and records, in place. The map's own batch call allocates a new element for each entry and
 * frees the old one, which takes several times as long while connections are stopped. Programs that read meanwhile see
 * a flow or record from before or after the change, or a destination of either.
 */
#ifndef HOLDFAST_BATCH_SETTER_H
#define HOLDFAST_BATCH_SETTER_H

#include "maps.h"

/* Makes a flow join or leave a flow group; its state and peer may change concurrently. */
static __always_inline int join_flow_group(struct flow_value *flow, __u8 flow_group)
{
#pragma unroll
	for (int tries = 0; tries < 4; tries++) {
		union flow_state_word was = {.word = *(volatile __u32 *)state_word_of(flow)}, now = was;
		now.flow_group = flow_group;
		if (__sync_val_compare_and_swap(state_word_of(flow), was.word, now.word) == was.word)
			return 0;
	}
	return 1;
}

/* Gives a flow the state, flow group and peer of a change. A flow with a socket that closed meanwhile does not become
 * owned. */
static __always_inline int apply_change(struct flow_value *flow, struct flow_value *change)
{
#pragma unroll
	for (int tries = 0; tries < 4; tries++) {
		union flow_state_word was = {.word = *(volatile __u32 *)state_word_of(flow)};
		union flow_state_word now = {.word = *state_word_of(change)};
		if (was.state == FLOW_CLOSING && now.state == FLOW_OWNED)
			now.state = FLOW_CLOSING;
		if (__sync_val_compare_and_swap(state_word_of(flow), was.word, now.word) == was.word)
			return 0;
	}
	return 1;
}

static long change_flow(__u32 index, struct batch_header *header)
{
	struct change *change = bpf_map_lookup_elem(&changes, &index);
	if (!change)
		return 1;
	struct flow_value *flow = bpf_map_lookup_elem(&flows, &change->key);
	if (!change->flow.state) {
		if (flow)
			header->failed += join_flow_group(flow, change->flow.flow_group);
		return 0;
	}
	if (!flow) {
		if (bpf_map_update_elem(&flows, &change->key, &change->flow, BPF_ANY))
			header->failed++;
		return 0;
	}
	flow->epoch = change->flow.epoch;
	flow->hold_slot = change->flow.hold_slot;
	flow->last_packet_s = change->flow.last_packet_s;
	/* The state is written last, after everything that it refers to. */
	header->failed += apply_change(flow, &change->flow);
	return 0;
}

static long change_record(__u32 index, struct batch_header *header)
{
	struct change *change = bpf_map_lookup_elem(&changes, &index);
	if (!change)
		return 1;
	struct record *record = bpf_map_lookup_elem(&steering, &change->key);
	if (!record) {
		if (bpf_map_update_elem(&steering, &change->key, &change->record, BPF_ANY))
			header->failed++;
		return 0;
	}
	record->epoch = change->record.epoch;
	/* Both nodes are written as one word, while the state says that there is an acceptor. */
	__u32 *nodes = (__u32 *)&record->owner, next = *(__u32 *)&change->record.owner;
	int begins = change->record.state == RECORD_TRANSIT;
	if (begins)
		__sync_lock_test_and_set(nodes, next);
	/* State and `via_donor` are one word, too. */
	*(volatile __u32 *)&record->state = *(__u32 *)&change->record.state;
	if (!begins)
		__sync_lock_test_and_set(nodes, next);
	return 0;
}

SEC("syscall")
int change_flows(struct batch_header *context)
{
	struct batch_header header = {.count = context->count};
	bpf_loop(header.count, change_flow, &header, 0);
	context->failed = header.failed;
	return 0;
}

SEC("syscall")
int change_records(struct batch_header *context)
{
	struct batch_header header = {.count = context->count};
	bpf_loop(header.count, change_record, &header, 0);
	context->failed = header.failed;
	return 0;
}

#endif
