/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Structures shared by the eBPF programs and user space. `src/shared.rs` mirrors them; a test compares the sizes.
 */
#ifndef HOLDFAST_SHARED_H
#define HOLDFAST_SHARED_H

#include <linux/types.h>

#define MAX_NODES 256
#define MAX_SERVICES 64
#define PLACEMENT_SLOTS 1024
#define MAX_HOLD_SLOTS 65536
#define MAX_WAITING 65536
#define MAX_CONVOYS 256

/* A flow; local is the service's side. IPv4 as mapped IPv6. Ports in network order. */
struct flow_key {
	__u8 local[16];
	__u8 remote[16];
	__u16 local_port;
	__u16 remote_port;
	__u8 protocol;
	__u8 pad[3];
};

/* What this node may do with a flow. */
enum flow_state {
	FLOW_OWNED = 1,       /* ours: both directions pass */
	FLOW_PREPARED = 2,    /* ours, a handoff is being prepared: out-of-order segments are copied */
	FLOW_TRANSIT_OUT = 3, /* donor: nothing leaves, what arrives goes on to the acceptor */
	FLOW_TRANSIT_IN = 4,  /* acceptor: nothing leaves, what arrives is held */
	FLOW_FLUSHING = 5,    /* ours; what arrives is held until the hold is empty */
	FLOW_MOVED = 6,       /* was ours: nothing leaves, what arrives goes on to the new owner */
	FLOW_CLOSING = 7,     /* socket closed; the last packets (TIME_WAIT) still pass */
	FLOW_LEAVING = 8,    /* ours for a moment still: what brings data goes on to the acceptor, what acknowledges passes */
};

struct flow_value {
	__u32 epoch;
	__u8 state;
	__u8 convoy;     /* whose state is this flow's, if it has one; 0: none */
	__u16 peer;      /* the other node of a handoff */
	__u32 hold_slot; /* index into holds */
	__u32 seen_s;    /* last packet, seconds of the monotonic clock */
};

/* The flows of a process that moves: one word turns all of them. */
struct convoy {
	__u8 state; /* 0: each has its own */
	__u8 ahead; /* by so much their epochs are later than their own say */
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
	__u8 by_donor;  /* while in transit: packets go by way of the donor, which has what acknowledges */
	__u8 pad[2];
};

/* A flow or a record to be set, with many others; of a flow without a state the convoy alone. */
struct change {
	struct flow_key key;
	union {
		struct flow_value flow;
		struct record record;
	};
};

/* Changes that are carried out at once at most. */
#define CHANGES_MAX 1024

/* How many there are, and how many the map did not take. */
struct change_order {
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
	__u8 generation;  /* which half of it is current */
	__u8 by_port;     /* whole service to one node (paper 002, section II-A) */
	__u16 port_owner; /* with by_port */
	__u8 has_previous;
	__u8 pad;
};

enum node_flags {
	NODE_KNOWN = 1,
	NODE_ENCAP = 2, /* reached by encapsulation, not by link address */
	NODE_V6 = 4,    /* its address is IPv6 */
	NODE_HOLDER = 8, /* it steers: what begins a flow it would send on, but for what was encapsulated for it */
};

enum successor_role {
	SUCCESSOR_SERVES = 0, /* new clients go to the node, unless somebody listens here */
	SUCCESSOR_ALONE = 1,  /* new clients go to the node in any case: what listens here ends handshakes, or does not run yet */
	SUCCESSOR_BEFORE = 2, /* the server has come here from the node, where handshakes that had begun there end */
};

/* Another node that has, or had, the server of a service. */
struct successor {
	__u16 node;
	__u16 role;
};

struct node {
	__u8 address[16]; /* mapped when IPv4 */
	__u8 link[6];     /* next hop */
	__u8 own_link[6]; /* source link address towards it */
	__u32 ifindex;
	__u16 flags;
	__u16 pad;
};

/* Packets of a private flow (at an address that one node alone has) that are for this node's stack bear this mark: routing then
 * delivers them here, whoever's the address is.
 */
#define PRIVATE_MARK 0x686f6c64

/* Where packets of a connection go whose other end has left its host; the key is the flow as it is seen here. */
struct translation {
	__u16 node;
	__u16 pad;
	__u32 hops; /* how often the other end had moved before the move that led there */
};

/* Destinations of flows that were steered before: see c/cache.h. One set is one cache line. */
#define CACHE_SETS (1 << 14)
#define CACHE_WAYS 8

struct cache_set {
	__u64 way[CACHE_WAYS]; /* upper 48 bits of the flow's hash, and the node; 0: empty */
};

/* How the flow table is shared out: each service has some room for itself, and the rest is for whoever comes first. */
struct room {
	__u32 flows[MAX_SERVICES]; /* of each service, roughly: user space counts anew now and then */
	__u32 services;            /* how many there are */
	__u32 guaranteed;          /* flows for which each has room in any case */
	__u32 capacity;            /* flows that fit; 0: no limits but the table's own */
	__u32 pad;
};

enum reach {
	REACH_STEER = 0,
	REACH_BROADCAST = 1,
};

struct config {
	__u16 self;
	__u8 reach;
	__u8 holder;         /* this node steers, and answers ARP and ND with broadcast */
	__u32 hold_ifindex;  /* TUN that holds packets in transit */
	__u16 mss_clamp_v4;  /* 0: none */
	__u16 mss_clamp_v6;
	__u16 mtu;           /* of the node's interface, bytes of the network layer */
	__u8 shared_link[6]; /* broadcast: the link address the pool shares */
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
	COUNTERS,
};

enum event_kind {
	EVENT_ESTABLISHED = 1,
	EVENT_CLOSED = 2,      /* the old TCP state is in detail */
	EVENT_FOLLOWED = 3,    /* closed, and a new connection between the same ports has gone to where the server is */
};

struct event {
	struct flow_key flow;
	__u32 epoch;
	__u8 kind;
	__u8 detail;
	__u8 pad[2];
};

/* What a handshake has left, for a connection that is put into a listener's queue. */
struct handshake {
	__u32 peer_timestamp; /* the last that came; 0: not known */
	__u32 timestamp;      /* the next of ours */
	__u16 mss;            /* the peer's */
	__u8 receive_scale;
	__u8 send_scale;
	__u8 ecn;
	__u8 scales;
	__u8 sack;
	__u8 timestamps;
	__u8 microseconds; /* the unit of our timestamps */
	__u8 pad[3];
	__u32 sequence; /* of the packet that ends the handshake */
};

/* Congestion state given to a restored socket. */
struct congestion {
	__u32 cwnd;
	__u32 ssthresh;
	__u32 ecn;
};

/* src/shared.rs asserts the same. */
_Static_assert(sizeof(struct flow_key) == 40, "flow_key");
_Static_assert(sizeof(struct flow_value) == 16, "flow_value");
_Static_assert(sizeof(struct convoy) == 8, "convoy");
_Static_assert(sizeof(struct record) == 12, "record");
_Static_assert(sizeof(struct change) == 56, "change");
_Static_assert(sizeof(struct change_order) == 8, "change_order");
_Static_assert(sizeof(struct service_key) == 20, "service_key");
_Static_assert(sizeof(struct service) == 8, "service");
_Static_assert(sizeof(struct node) == 36, "node");
_Static_assert(sizeof(struct successor) == 4, "successor");
_Static_assert(sizeof(struct translation) == 8, "translation");
_Static_assert(sizeof(struct config) == 24, "config");
_Static_assert(sizeof(struct event) == 48, "event");
_Static_assert(sizeof(struct room) == 272, "room");
_Static_assert(sizeof(struct handshake) == 24, "handshake");

#endif
