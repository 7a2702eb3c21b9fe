/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Room in the flow table: one service that is flooded must not take it all, or no other could have a new connection.
 */
#ifndef HOLDFAST_ROOM_H
#define HOLDFAST_ROOM_H

#include "maps.h"

/* Whether a service may have one more flow: within what is its own, or within what nobody is guaranteed and nobody has. */
static __noinline int has_room(const struct service *service)
{
	__u32 zero = 0;
	struct room *all = bpf_map_lookup_elem(&room, &zero);
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

/* A service has one more flow. */
static __always_inline void took_room(const struct service *service)
{
	__u32 zero = 0;
	struct room *all = bpf_map_lookup_elem(&room, &zero);
	if (all && service->index < MAX_SERVICES)
		__sync_fetch_and_add(&all->flows[service->index & (MAX_SERVICES - 1)], 1);
}

#endif
