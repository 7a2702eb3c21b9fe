/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Structures of the replicator that user space shares; src/replication/shared_with_c.rs mirrors them. "Service space" is the
 * sequence numbers that the client sees.
 */
#ifndef HOLDFAST_REPLICATE_H
#define HOLDFAST_REPLICATE_H

#include <linux/bpf.h>

#define LEGS 4 /* the primary and up to three replicas of a service */
#define MAX_REPLICATED_SERVICES 64
#define MARKS 8
#define LEG_SCALE_MAX 4 /* windows of up to 1 MiB */

/* An address with a port: of a service, or of a leg's server. IPv4 as mapped IPv6; the port in network order. */
struct endpoint {
	__u8 address[16];
	__u16 port;
	__u16 pad;
};

/* The leg that an endpoint belongs to. */
struct leg_ref {
	__u16 service;
	__u8 leg;
	__u8 pad;
};

/* Path to a neighbour. */
struct path {
	__u32 ifindex;
	__u8 link[12]; /* link addresses of the neighbour and of this node */
};

struct leg_path {
	struct endpoint endpoint;
	struct path path;
};

enum service_flags {
	SERVICE_STRIP_TIMESTAMPS = 1, /* removes the option from SYN segments: not all servers have it */
	SERVICE_STRIP_SACK = 2,
	SERVICE_COMPARE = 4, /* computes and compares digests of the legs' outputs */
};

struct replicated_service {
	struct endpoint endpoint;
	__u32 flags;
	__u32 lag; /* number of bytes by which the primary may be ahead of the slowest leg */
	struct leg_path leg[LEGS];
};

/* Roles: bits 0 to 3 live legs, bits 8 and 9 the primary. Bit 31 marks a connection's own roles. */
#define ROLES_OWN (1u << 31)

struct connection_key {
	__u8 client[16];
	__u16 client_port; /* network order */
	__u16 service;
};

enum tcp_options {
	HAS_TIMESTAMPS = 1,
	HAS_SACK = 2,
	HAS_SCALE = 4,
};

/* A leg's answer to a handshake. */
struct handshake_answer {
	__u32 isn;
	__u32 timestamp;
	__u32 edge; /* right edge of the window for the client */
	__u16 mss;
	__u8 scale;
	__u8 options;
};

enum handshake_state { HANDSHAKE_PENDING, HANDSHAKE_ANSWERED, HANDSHAKE_SHOWN };

/* A connection whose client has not completed the handshake. */
struct half_open {
	__u32 client_isn;
	__u32 client_timestamp;
	__u32 answered; /* legs */
	__u32 refused;  /* legs */
	__u32 state;
	__u32 attempts; /* number of SYN segments of the client */
	__u64 since_ns;
	struct path client;
	__u8 client_scale;
	__u8 client_options;
	__u16 pad;
	__u32 live; /* legs in the connection, once the state is HANDSHAKE_ANSWERED */
	struct handshake_answer leg[LEGS];
};

enum leg_flags {
	LEG_FIN = 1,      /* has ended its output at fin_seq */
	LEG_RESET = 2,    /* has reset the connection */
	LEG_DIVERGED = 4, /* its output differs from the output that the client saw */
};

/* A leg in one connection. */
struct leg_state {
	__u32 sequence_offset;  /* service space minus the leg's own */
	__u32 timestamp_offset; /* shown minus the leg's own */
	__u32 nxt;              /* end of the output that has arrived without a gap, service space */
	__u32 early_from, early_to; /* one stretch of output beyond a gap; equal if there is none */
	__u32 ack;              /* acknowledgement of the client's stream */
	__u32 edge;             /* right edge of the window for the client */
	__u32 told;             /* acknowledgement that the leg was last told, service space */
	__u32 timestamp;        /* latest, the leg's own */
	__u32 fin_seq;
	__u32 compared;         /* end of the output that was compared, service space */
	__u32 round_trip_us;    /* smoothed */
	__u16 mss;
	__u8 scale;
	__u8 client_scale; /* shift by which the leg reads windows */
	__u8 options;
	__u8 flags;
	__u8 pad[2];
	__u64 digest;       /* of the output before nxt */
	__u64 early_digest; /* of the stretch beyond the gap */
	__u64 owes_since_ns; /* time since which the leg has not acknowledged input; 0 if it has */
};

/* Digest of the output that the client was shown, up to a position. */
struct mark {
	__u64 position; /* number of bytes from the start of the output */
	__u64 digest;
};

enum connection_flags {
	CONNECTION_FIN_PASSED = 1, /* the client was shown the end of the output */
	CONNECTION_HELD = 2,       /* the lag bound cuts the primary's window */
	CONNECTION_CLIENT_FIN = 4, /* the client has ended its input at client_fin_seq */
	CONNECTION_CLOSED = 8,     /* ended on both sides, or reset by the client */
};

struct connection {
	struct bpf_spin_lock lock;
	__u32 client_isn, isn;
	__u32 sent;      /* end of the output that the client was sent */
	__u32 shown_ack; /* acknowledgement and window edge that the client was last shown */
	__u32 shown_edge;
	__u32 client_nxt; /* end of the client's input */
	__u32 client_ack, client_edge;
	__u32 client_timestamp, timestamp_shown;
	__u32 client_fin_seq;
	__u32 own_roles; /* 0: as the service */
	__u32 present;   /* legs that have the connection */
	struct path client;
	__u16 mss;
	__u8 scale; /* as shown to the client */
	__u8 client_scale;
	__u8 options;
	__u8 flags;
	__u8 probing; /* replicas that have probed, for a window or for a sign of life, since the primary's last output */
	__u8 pad;
	__u32 mark_next; /* number of marks made */
	__u32 pad_2;
	struct mark tip; /* of all output that was shown without a gap */
	struct mark marks[MARKS];
	struct leg_state leg[LEGS];
};

enum replication_event_kind {
	REPLICATION_OPENED = 1,
	REPLICATION_CLOSED,
	REPLICATION_REFUSED,
	REPLICATION_LEG_RESET,
	REPLICATION_LEG_FINISHED,
	REPLICATION_OUTPUT_AFTER_FIN,
	REPLICATION_DIVERGED,
};

struct replication_event {
	struct connection_key key;
	__u8 kind;
	__u8 leg;
	__u8 legs;     /* refused legs, or legs that have ended earlier */
	__u8 answered; /* legs that have answered a handshake */
	__u32 acknowledged; /* number of input bytes */
	__u32 known;        /* legs with a digest */
	__u64 position;     /* number of output bytes */
	__u64 digest[LEGS];
};

/* The frame of a test run, with a command of user space. The ethertype is that of the client's family, so that the frame can become
 * a segment.
 */
struct test_run_frame {
	__u8 link[12];
	__u16 ethertype;
	__u16 pad;
	struct connection_key key;
	__u32 argument;
	__u8 rest[64];
};

enum replication_counter {
	REPL_CLIENT_PACKETS,
	REPL_CLONES,
	REPL_PRIMARY_PACKETS,
	REPL_ABSORBED,
	REPL_SHOWN_ACKS,    /* acknowledgements for the client from a replica's packet */
	REPL_REFLECTED,     /* acknowledgements made for a leg from its own packet */
	REPL_PUSHED,        /* window updates made for a leg */
	REPL_HELD_FINS,
	REPL_RESETS,
	REPL_COMPARED,
	REPL_DIVERGED,
	REPL_MALFORMED,
	REPL_UNKNOWN,       /* packets of no connection */
	REPL_UNSENT_ACKED,  /* the client acknowledges what it was not sent */
	REPL_OUTSIDE_WINDOW,
	REPL_GAPS,          /* output of a leg beyond a second gap, dropped */
	REPL_NO_LEG,
	REPL_TABLE_FULL,
	REPL_LOST_EVENTS,
	REPL_COUNTERS,
};

_Static_assert(sizeof(struct endpoint) == 20, "endpoint");
_Static_assert(sizeof(struct leg_path) == 36, "leg_path");
_Static_assert(sizeof(struct replicated_service) == 172, "replicated_service");
_Static_assert(sizeof(struct connection_key) == 20, "connection_key");
_Static_assert(sizeof(struct half_open) == 120, "half_open");
_Static_assert(sizeof(struct leg_state) == 80, "leg_state");
_Static_assert(sizeof(struct connection) == 552, "connection");
_Static_assert(sizeof(struct replication_event) == 72, "replication_event");
_Static_assert(sizeof(struct test_run_frame) == 104, "test_run_frame");

#endif
