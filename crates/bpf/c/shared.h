/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Structures shared by the eBPF programs and user space, mirrored in `src/shared_with_c.rs`; both sides assert the sizes.
 */
#ifndef HOLDFAST_SHARED_H
#define HOLDFAST_SHARED_H

#include <linux/types.h>

#define MAX_NODES 65536
#define MAX_NODE_ADDRESSES 8192
#define MAX_SERVICES 64
#define PLACEMENT_SLOTS 1024
#define MAX_HOLD_SLOTS 65536
/* The slot that counts the new clients in the hold: they wait for the contact node to serve. */
#define NEW_CLIENTS_SLOT (MAX_HOLD_SLOTS - 1)
#define NEW_CLIENTS_MAX 4096
#define MAX_PENDING_HANDSHAKES 65536
#define MAX_FLOW_GROUPS 256

/* Key of a flow; local is the service's side. IPv4 as mapped IPv6. Ports in network order. */
struct flow_key {
	__u8 local[16];
	__u8 remote[16];
	__u16 local_port;
	__u16 remote_port;
	__u8 protocol;
	__u8 pad[3];
};

/* State of a flow at this node. */
enum flow_state {
	FLOW_OWNED = 1,       /* owner: both directions pass */
	FLOW_PREPARED = 2,    /* owner, preparing a handoff: out-of-order segments are copied */
	FLOW_TRANSIT_OUT = 3, /* donor: drops outgoing packets, forwards incoming ones to the acceptor */
	FLOW_TRANSIT_IN = 4,  /* acceptor: drops outgoing packets, holds incoming ones */
	FLOW_FLUSHING = 5,    /* owner; holds incoming packets until the hold is empty */
	FLOW_MOVED = 6,       /* former owner: drops outgoing packets, forwards incoming ones to the new owner */
	FLOW_CLOSING = 7,     /* socket closed; the last packets (TIME_WAIT) still pass */
	FLOW_REDIRECTING_DATA = 8, /* owner before the freeze: forwards data to the acceptor, passes acknowledgements */
};

struct flow_value {
	__u32 epoch;
	__u8 state;
	__u8 flow_group; /* overrides the state, if the group has one; 0: none */
	__u16 peer;      /* the other node of a handoff */
	__u32 hold_slot; /* index into holds */
	__u32 last_packet_s; /* last packet, seconds of the monotonic clock */
};

/* The flows of a moving process (a flow group): one word changes the state of all of them. */
struct flow_group {
	__u8 state;        /* 0: each flow has its own */
	__u8 epoch_offset; /* number added to the flows' own epochs */
	__u16 peer;
	__u32 pad;
};

enum record_state {
	RECORD_OWNED = 1,
	RECORD_TRANSIT = 2,
};

/* The holder's record of a flow. */
struct record {
	__u32 epoch;
	__u16 owner;    /* the donor while in transit */
	__u16 acceptor; /* only while in transit */
	__u8 state;
	__u8 via_donor; /* in transit: packets go via the donor, which processes acknowledgements */
	__u8 pad[2];
};

/* One flow or record to be set in a batch; for a flow without a state, only the flow group is set. */
struct change {
	struct flow_key key;
	union {
		struct flow_value flow;
		struct record record;
	};
};

/* Most changes in one batch. */
#define CHANGES_MAX 1024

/* Number of changes in a batch, and number of entries that did not fit in the map. */
struct batch_header {
	__u32 count;
	__u32 failed;
};

struct service_key {
	__u8 address[16];
	__u16 port; /* network order */
	__u8 protocol;
	__u8 pad;
};

struct service {
	__u16 index;      /* row of the placement table */
	__u8 generation;  /* current half of the row */
	__u8 by_port;     /* whole service on one node (paper 002, section II-A) */
	__u16 port_owner; /* with by_port */
	__u8 flags;
	__u8 own_node_placed; /* the current half of the row names this node */
};

enum steered_service_flags {
	HAS_PREVIOUS = 1,  /* the other half of the row is the previous table */
	IS_REPLICATED = 2, /* the replicator of this node takes the packets without a record */
};

enum node_flags {
	NODE_KNOWN = 1,
	NODE_ENCAP = 2, /* reached by encapsulation, not by link address */
	NODE_V6 = 4,    /* the node's address is IPv6 */
	NODE_HOLDER = 8, /* holds the steering table: steers packets that begin a flow, unless encapsulated for it */
};

enum successor_role {
	SUCCESSOR_FALLBACK = 0,  /* new clients go to the node, unless a server listens here */
	SUCCESSOR_EXCLUSIVE = 1, /* new clients go to the node; a listener here completes handshakes, or is yet to run */
	SUCCESSOR_PREVIOUS = 2,  /* the server moved here from the node, which completes its handshakes in progress */
};

/* Another node that has, or had, the server of a service. */
struct successor {
	__u16 node;
	__u16 role;
};

struct node {
	__u8 address[16]; /* mapped when IPv4 */
	__u8 link[6];     /* next hop */
	__u8 own_link[6]; /* source link address towards the node */
	__u32 ifindex;
	__u16 flags;
	__u16 pad;
};

/* Mark of packets of a private flow (at an address that one node alone has) for this node's stack: routing then
 * delivers them here, although another host may have the address.
 */
#define PRIVATE_MARK 0x686f6c64

/* Destination of a connection's packets after its other end has moved away from its host; the key is the flow as seen
 * here. */
struct translation {
	__u16 node;
	__u16 pad;
	__u32 hops; /* number of moves of the other end before the move to that node */
};

/* Cached destinations of steered flows: see c/cache.h. One set is one cache line. */
#define CACHE_SETS (1 << 14)
#define CACHE_WAYS 8

struct cache_set {
	__u64 way[CACHE_WAYS]; /* upper 48 bits of the flow's hash, and the node ID; 0: empty */
};

/* Division of the flow table: each service has a guaranteed capacity, and the rest is shared. */
struct flow_quota {
	__u32 flows[MAX_SERVICES]; /* approximate number of each service's flows; user space recounts now and then */
	__u32 services;            /* number of services */
	__u32 guaranteed;          /* guaranteed number of flows of each service */
	__u32 capacity;            /* capacity of the table; 0: no limit but the table's own */
	__u32 pad;
};

enum reach {
	REACH_STEER = 0,
	REACH_BROADCAST = 1,
};

/* Part of this node in steering. A new contact node has the role before it has a lease. */
enum steering_role {
	ROLE_NONE = 0,
	ROLE_HOLDER = 1,        /* holds the steering table; answers ARP and ND with broadcast */
	ROLE_FORMER_HOLDER = 2, /* forwards by its former table, and packets without a record to the contact node */
};

/* Permission of the contact node to place new flows and to answer for the service addresses, until a time. */
struct lease {
	__u64 until_ns;    /* nanoseconds since boot, suspended time included; 0: no lease; all ones: without end */
	__u64 table_ready; /* 0: the steering table lacks records, so the lease does not count yet */
	__u64 table_epoch; /* newest view for which the steering table is complete; for the daemon alone */
	__u64 contact;     /* with ROLE_FORMER_HOLDER: the contact node */
};

#define LEASE_WITHOUT_END (~0ull)

struct config {
	__u16 own_id;
	__u8 reach;
	__u8 role;           /* enum steering_role */
	__u32 hold_ifindex;  /* TUN that holds packets in transit */
	__u16 mss_clamp_v4;  /* 0: none */
	__u16 mss_clamp_v6;
	__u16 mtu;           /* of the node's interface, bytes of the network layer */
	__u8 shared_link[6]; /* broadcast: link address shared by the pool */
	__u32 ready;         /* 0: fail closed */
};

enum counter {
	COUNT_STEERED_LINK,
	COUNT_STEERED_ENCAP,
	COUNT_STEERED_SELF,
	COUNT_DECAPSULATED,
	COUNT_HELD,
	COUNT_FORWARDED_STRAGGLER,
	COUNT_COPIED_OUT_OF_ORDER,
	COUNT_TOO_BIG_SENT,
	COUNT_PASSED_PREVIOUS,
	COUNT_EVENTS_LOST, /* the daemon reads the tables instead */
	/* drops, by reason */
	DROP_FIRST,
	DROP_EGRESS_TRANSIT = DROP_FIRST,
	DROP_EGRESS_NOT_OWNER,
	DROP_NO_SOCKET,
	DROP_OTHER_OWNER,
	DROP_TRANSIT_ELSEWHERE,
	DROP_NO_NODE,
	DROP_FRAGMENT_WITHOUT_FIRST,
	DROP_MALFORMED,
	DROP_NOT_A_PEER,
	DROP_NOT_READY,
	DROP_TOO_BIG,
	DROP_FLOWS_FULL,
	DROP_NOT_A_SERVICE,
	DROP_HOPS_USED_UP,
	DROP_NO_LEASE,
	COUNTERS,
};

enum event_kind {
	EVENT_ESTABLISHED = 1,
	EVENT_CLOSED = 2,      /* the previous TCP state is in detail */
	EVENT_SUPERSEDED = 3,  /* closed; a new connection between the same ports went to the server's present node */
};

struct event {
	struct flow_key flow;
	__u32 epoch;
	__u8 kind;
	__u8 detail;
	__u8 pad[2];
};

/* Results of a handshake, for a connection that is put into a listener's queue. */
struct handshake {
	__u32 peer_timestamp; /* last one received; 0: unknown */
	__u32 timestamp;      /* next one of this side */
	__u16 mss;            /* MSS of the peer */
	__u8 receive_scale;
	__u8 send_scale;
	__u8 ecn;
	__u8 window_scaling;
	__u8 sack;
	__u8 timestamps;
	__u8 microseconds; /* nonzero: timestamps of this side count microseconds */
	__u8 pad[3];
	__u32 sequence; /* sequence number of the packet that completes the handshake */
};

/* Congestion state for a restored socket. */
struct congestion {
	__u32 cwnd;
	__u32 ssthresh;
	__u32 ecn;
};

/* src/shared_with_c.rs asserts the same sizes. */
_Static_assert(sizeof(struct flow_key) == 40, "flow_key");
_Static_assert(sizeof(struct flow_value) == 16, "flow_value");
_Static_assert(sizeof(struct flow_group) == 8, "flow_group");
_Static_assert(sizeof(struct record) == 12, "record");
_Static_assert(sizeof(struct change) == 56, "change");
_Static_assert(sizeof(struct batch_header) == 8, "batch_header");
_Static_assert(sizeof(struct service_key) == 20, "service_key");
_Static_assert(sizeof(struct service) == 8, "service");
_Static_assert(sizeof(struct node) == 36, "node");
_Static_assert(sizeof(struct successor) == 4, "successor");
_Static_assert(sizeof(struct translation) == 8, "translation");
_Static_assert(sizeof(struct config) == 24, "config");
_Static_assert(sizeof(struct lease) == 32, "lease");
_Static_assert(sizeof(struct event) == 48, "event");
_Static_assert(sizeof(struct flow_quota) == 272, "flow_quota");
_Static_assert(sizeof(struct handshake) == 24, "handshake");

#endif
