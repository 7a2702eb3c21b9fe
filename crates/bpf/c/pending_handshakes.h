/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Connections without an accepting program, to be put into the queue of a listener here.
 */
#ifndef HOLDFAST_PENDING_HANDSHAKES_H
#define HOLDFAST_PENDING_HANDSHAKES_H

#include "shared.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_PENDING_HANDSHAKES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, struct handshake);
} waiting SEC(".maps");

#endif
