/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Structures shared by socket_snapshots.bpf.c and user space; `src/socket_snapshots.rs` mirrors them and asserts the
 * sizes.
 */
#ifndef HOLDFAST_SOCKET_SNAPSHOTS_H
#define HOLDFAST_SOCKET_SNAPSHOTS_H

#include <linux/types.h>

enum snapshot_flags {
	SNAPSHOT_V6 = 1,
	SNAPSHOT_PLAIN = 2, /* no filter, upper layer protocol, keys, urgent data, ECN, headers or peek offset */
	SNAPSHOT_RECEIVE_SHUT = 4,
	SNAPSHOT_WINDOW_SCALE = 8,
	SNAPSHOT_SACK = 16,
	SNAPSHOT_TIMESTAMPS = 32,
};

/* Raw fields that hold socket options: sockets of a namespace with equal fingerprints have equal options, apart from
 * the options in struct socket_snapshot. For comparison only. */
struct option_fingerprint {
	__u64 sk_flags;
	__u64 inet_flags;
	__u64 pacing;
	__u64 receive_timeout;
	__u64 send_timeout;
	__u64 linger;
	__u64 congestion_control;
	__u64 route_metrics;
	__u32 route_device;
	__u32 priority;
	__u32 mark;
	__u32 busy_poll_us;
	__u32 descriptor_flags;
	__u32 device;
	__u32 user_timeout;
	__u32 rto_min;
	__u32 rto_max;
	__u32 delack_max;
	__u32 keepalive_time;
	__u32 keepalive_interval;
	__u32 linger2;
	__u32 tx_delay;
	__u32 notsent_low_water;
	__u32 timestamping;
	__u32 port_range;
	__s32 unicast_device;
	__s32 v6_unicast_device;
	__u32 reserved_memory;
	__s16 ttl;
	__s16 hop_limit;
	__u16 family;
	__u16 v6_receive;
	__u16 busy_poll_budget;
	__u8 user_locks;
	__u8 tx_rehash;
	__u8 reuse;
	__u8 reuse_port;
	__u8 v6_only;
	__u8 tos;
	__u8 min_ttl;
	__u8 mtu_discover;
	__u8 v6_class;
	__u8 v6_mtu_discover;
	__u8 v6_min_hops;
	__u8 syn_retries;
	__u8 keepalive_probes;
	__u8 nagle;
	__u8 thin_timeouts;
	__u8 inq;
	__u8 ping_pong;
	__u8 prefer_busy_poll;
	__u8 save_syn;
	__u8 no_cookie;
	__u8 v6_sources;
	__u8 send_clock;
};

/* Snapshot of a TCP socket. Addresses as in struct flow_key; other fields as in the kernel's struct tcp_sock, times in
 * microseconds. */
struct socket_snapshot {
	__u64 id;
	__u8 local[16];
	__u8 remote[16];
	__u16 local_port;
	__u16 remote_port;
	__u8 state;
	__u8 flags;
	__u8 snd_wscale;
	__u8 rcv_wscale;
	__u32 write_seq;
	__u32 snd_una;
	__u32 snd_nxt;
	__u32 snd_wl1;
	__u32 snd_wnd;
	__u32 max_window;
	__u32 rcv_nxt;
	__u32 copied_seq;
	__u32 rcv_wnd;
	__u32 rcv_wup;
	__u32 mss_cache;
	__u32 mss_clamp;
	__u32 tsoffset;
	__u32 cwnd;
	__u32 ssthresh;
	__u32 srtt_us;
	__u32 rttvar_us;
	__u32 min_rtt_us;
	__u32 rate_delivered;
	__u32 rate_interval_us;
	__u32 send_buffer;
	__u32 receive_buffer;
	__u32 receive_low_water;
	__u32 window_clamp;
	__u32 namespace; /* inode number of the socket's network namespace */
	__u32 timestamp; /* TCP clock of the socket; lowest bit set: counts microseconds */
	struct option_fingerprint option_fingerprint;
};

/* Most sockets in one pass. */
#define SNAPSHOTS_MAX 8192

/* Most IDs of encountered sockets in one pass. */
#define ENCOUNTERED_MAX 65536

/* One pass over the descriptors of some processes. */
struct snapshot_pass {
	__u64 record_count;      /* number of records; if more than fit, some were left out */
	__u64 encountered_count; /* number of IDs of encountered sockets, changed or not; more than fit: some left out */
	__u32 number;            /* number of the pass; not 0 */
	__u32 pad;
};

/* Value stored with a registered socket. */
struct snapshot_registration {
	__u64 id;   /* ID copied to the socket's record */
	__u32 once; /* nonzero: unregistered once it has been read; otherwise reported again only after a change */
	__u32 pass; /* last pass that encountered the socket */
	struct socket_snapshot last_reported; /* the socket as last reported, without its clock */
};

_Static_assert(sizeof(struct option_fingerprint) == 176, "option_fingerprint");
_Static_assert(__builtin_offsetof(struct option_fingerprint, ping_pong) == 170, "ping_pong");
_Static_assert(sizeof(struct socket_snapshot) == 328, "socket_snapshot");
_Static_assert(sizeof(struct snapshot_registration) == 344, "snapshot_registration");
_Static_assert(sizeof(struct snapshot_pass) == 24, "snapshot_pass");

#endif
