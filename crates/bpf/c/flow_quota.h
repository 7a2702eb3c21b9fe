/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Capacity of the flow table: a flood of one service must not fill the table, or other services could have no new
 * connections.
 */
#ifndef HOLDFAST_FLOW_QUOTA_H
#define HOLDFAST_FLOW_QUOTA_H

#include "maps.h"

/* Returns true if a service may have one more flow: within its guarantee, or within capacity that is neither guaranteed
 * nor in use. */
static __noinline int has_quota(const struct service *service)
{
	__u32 zero = 0;
	struct flow_quota *all = bpf_map_lookup_elem(&room, &zero);
	if (!service || !all || !all->capacity || service->index >= MAX_SERVICES)
		return 1;
	__u32 guaranteed = all->guaranteed;
	if (all->flows[service->index & (MAX_SERVICES - 1)] < guaranteed)
		return 1;
	__u32 taken = 0;
	for (__u32 i = 0; i < MAX_SERVICES && i < all->services; i++)
		taken += all->flows[i] > guaranteed ? all->flows[i] : guaranteed;
	return taken < all->capacity;
}

/* Counts one more flow of a service. */
static __always_inline void count_new_flow(const struct service *service)
{
	__u32 zero = 0;
	struct flow_quota *all = bpf_map_lookup_elem(&room, &zero);
	if (all && service->index < MAX_SERVICES)
		__sync_fetch_and_add(&all->flows[service->index & (MAX_SERVICES - 1)], 1);
}

#endif
