/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Cached destinations of recorded flows, one cache line per set: a lookup in the steering table touches three or four
 * cache lines, all of them in main memory if there are very many flows. The table remains authoritative. Every entry
 * comes from the table, and user space clears it after each change of the record (src/steering_table.rs). A 62-bit hash
 * identifies the flow, with a secret seed, so that nobody can choose colliding flows; by chance, two of the 131,072
 * flows that fit collide in one of 5 * 10^8 caches. More sets would not be faster, because a processor's own cache
 * holds 1 MiB.
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

/* Hash of a flow; src/steering_table.rs computes the same. */
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

static __always_inline __u16 table_destination(const struct flow_key *flow)
{
	struct record *record = bpf_map_lookup_elem(&steering, flow);
	if (!record)
		return 0;
	return record->state == RECORD_TRANSIT && !record->via_donor ? record->acceptor : record->owner;
}

/* Caches a destination that was just read from the table. */
static __noinline int cache_destination(struct cache_set *set, const struct flow_key *flow, __u64 hash, __u16 node)
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
		/* If the flows of a set did not all fit, each packet would evict another flow, so a new flow enters
		 * with a chance of 1/16. */
		__u32 chance = bpf_get_prandom_u32();
		if (chance & 15)
			return 0;
		way = chance >> 4;
	}
	__u64 *slot = &set->way[way & (CACHE_WAYS - 1)];
	/* An exchange, because it is also a barrier. User space changes the record and then clears the slot. If the
	 * record changed before the second lookup, this code clears the slot; if after it, user space clears the new
	 * entry.
	 */
	__sync_lock_test_and_set(slot, (hash & ~NODE_BITS) | node);
	if (table_destination(flow) != node)
		__sync_lock_test_and_set(slot, 0);
	return 0;
}

/* Returns the set in which a flow would be cached. */
static __always_inline struct cache_set *cache_set_of(const struct flow_key *flow, __u64 *hash)
{
	__u32 zero = 0;
	__u64 *start = bpf_map_lookup_elem(&seed, &zero);
	if (!start)
		return 0;
	*hash = wide_hash(flow, *start);
	__u32 index = *hash & (CACHE_SETS - 1);
	struct cache_set *set = bpf_map_lookup_elem(&destinations, &index);
	/* The read prefetches the line: the processor continues until the line is needed. */
	if (set)
		(void)*(volatile __u64 *)&set->way[0];
	return set;
}

/* Returns the node to which the steering table sends a flow: the owner; in transit, the acceptor, which holds the
 * packet, or the donor if packets go via the donor. 0: no record.
 */
static __always_inline __u16 recorded_destination(const struct flow_key *flow, struct cache_set *set, __u64 hash)
{
	if (!set)
		return table_destination(flow);
	/* No branch depends on the line, so the processor continues with the packet while the line is fetched. */
	__u64 found = 0;
#pragma unroll
	for (int i = 0; i < CACHE_WAYS; i++) {
		__u64 other = (set->way[i] ^ hash) & ~NODE_BITS;
		barrier_var(other);
		/* All ones if `other` is 0; otherwise the highest bit, cleared by the shift, stays 0. */
		__u64 same = (__s64)((other >> 1) - 1) >> 63;
		barrier_var(same);
		found |= set->way[i] & same;
	}
	if (found & NODE_BITS)
		return found & NODE_BITS;
	__u16 node = table_destination(flow);
	if (node)
		cache_destination(set, flow, hash, node);
	return node;
}

#endif
