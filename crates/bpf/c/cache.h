/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Where recorded flows go, in one cache line each: a look into the steering table costs three or four lines that, with very
 * many flows, are all in main memory. The table stays the truth. What is here was in the table, and user space clears it after each
 * change of the record (src/steering.rs). 62 bits of a hash stand for the flow, with a secret seed, so that nobody can
 * choose flows that share them; by chance, two of the 131,072 flows that fit do so in one of 5 * 10^8
 * caches. More sets would not make it faster: a megabyte is what a processor's own cache holds.
 */
#ifndef HOLDFAST_CACHE_H
#define HOLDFAST_CACHE_H

#include "parse.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CACHE_SETS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct cache_set);
} destinations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} seed SEC(".maps");

#define NODE_BITS 0xffffull

/* src/steering.rs computes the same. */
static __always_inline __u64 wide_hash(const struct flow_key *flow, __u64 h)
{
	const __u64 *word = (const __u64 *)flow;
#pragma unroll
	for (unsigned i = 0; i < sizeof(*flow) / 8; i++) {
		h = (h ^ word[i]) * 0x9fb21c651e98df25ull;
		h ^= h >> 32;
	}
	h *= 0x9fb21c651e98df25ull;
	return h ^ (h >> 29);
}

static __always_inline __u16 recorded(const struct flow_key *flow)
{
	struct record *record = bpf_map_lookup_elem(&steering, flow);
	if (!record)
		return 0;
	return record->state == RECORD_TRANSIT && !record->by_donor ? record->acceptor : record->owner;
}

/* Puts a destination that was just read from the table into the set. */
static __noinline int remember(struct cache_set *set, const struct flow_key *flow, __u64 hash, __u16 node)
{
	if (!set)
		return 0;
	__u32 way = CACHE_WAYS;
	for (int i = 0; i < CACHE_WAYS; i++) {
		if (!set->way[i]) {
			way = i;
			break;
		}
	}
	if (way == CACHE_WAYS) {
		/* Flows that do not all fit would drive one another out with every packet: let most of them wait. */
		__u32 chance = bpf_get_prandom_u32();
		if (chance & 15)
			return 0;
		way = chance >> 4;
	}
	__u64 *slot = &set->way[way & (CACHE_WAYS - 1)];
	/* An exchange, since it is a barrier too. User space changes the record, then clears the slot: if it had changed the
	 * record before the second look, we clear; if after it, it clears what we wrote.
	 */
	__sync_lock_test_and_set(slot, (hash & ~NODE_BITS) | node);
	if (recorded(flow) != node)
		__sync_lock_test_and_set(slot, 0);
	return 0;
}

/* Where a flow would be in the cache. */
static __always_inline struct cache_set *set_of(const struct flow_key *flow, __u64 *hash)
{
	__u32 zero = 0;
	__u64 *start = bpf_map_lookup_elem(&seed, &zero);
	if (!start)
		return 0;
	*hash = wide_hash(flow, *start);
	__u32 index = *hash & (CACHE_SETS - 1);
	struct cache_set *set = bpf_map_lookup_elem(&destinations, &index);
	/* The processor fetches the line while it does what comes before the line is needed. */
	if (set)
		(void)*(volatile __u64 *)&set->way[0];
	return set;
}

/* The node the steering table sends a flow to: the owner; in transit, the acceptor, which holds it, unless the donor is to
 * see it first. 0: no record.
 */
static __always_inline __u16 recorded_destination(const struct flow_key *flow, struct cache_set *set, __u64 hash)
{
	if (!set)
		return recorded(flow);
	/* Without a branch that depends on the line: the processor goes on with the packet while the line is on its way. */
	__u64 found = 0;
#pragma unroll
	for (int i = 0; i < CACHE_WAYS; i++) {
		__u64 other = (set->way[i] ^ hash) & ~NODE_BITS;
		barrier_var(other);
		/* All ones if `other` is 0: no node in it borrows from the highest bit. */
		__u64 same = (__s64)((other >> 1) - 1) >> 63;
		barrier_var(same);
		found |= set->way[i] & same;
	}
	if (found & NODE_BITS)
		return found & NODE_BITS;
	__u16 node = recorded(flow);
	if (node)
		remember(set, flow, hash, node);
	return node;
}

#endif
