/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Kernel structures, with the fields that the iterators read; the loader relocates the fields by name.
 */
#ifndef HOLDFAST_KERNEL_H
#define HOLDFAST_KERNEL_H

#include <linux/bpf.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct in6_addr {
	union {
		__u8 u6_addr8[16];
	} in6_u;
};

struct netns_ipv4 {
	__u8 sysctl_tcp_pingpong_thresh;
};

struct ns_common {
	unsigned int inum;
};

struct net {
	struct ns_common ns;
	struct netns_ipv4 ipv4;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct sock_common {
	__u32 skc_daddr;
	__u32 skc_rcv_saddr;
	__u16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	unsigned char skc_reuse : 4;
	unsigned char skc_reuseport : 1;
	unsigned char skc_ipv6only : 1;
	int skc_bound_dev_if;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	unsigned long skc_flags;
};

struct file {
	unsigned int f_flags;
};

struct sock;

struct socket {
	struct sock *sk;
	struct file *file;
};

struct net_device {
	int ifindex;
};

struct dst_entry {
	struct net_device *dev;
	unsigned long _metrics;
};

struct sk_filter;

struct sock {
	struct sock_common __sk_common;
	unsigned int sk_ll_usec;
	__u8 sk_prefer_busy_poll;
	__u16 sk_busy_poll_budget;
	__u32 sk_tsflags;
	int sk_reserved_mem;
	__u8 sk_clockid;
	int sk_peek_off;
	__u8 sk_userlocks;
	int sk_rcvbuf;
	struct sk_filter *sk_filter;
	long sk_rcvtimeo;
	int sk_rcvlowat;
	struct socket *sk_socket;
	unsigned long sk_max_pacing_rate;
	long sk_sndtimeo;
	__u32 sk_priority;
	__u32 sk_mark;
	struct dst_entry *sk_dst_cache;
	int sk_sndbuf;
	__u8 sk_shutdown;
	unsigned long sk_lingertime;
	__u8 sk_txrehash;
};

struct ipv6_txoptions;

struct ipv6_pinfo {
	int ucast_oif;
	struct {
		__u16 all;
	} rxopt;
	__u8 srcprefs;
	struct ipv6_txoptions *opt;
	__s16 hop_limit;
	__u8 pmtudisc;
	__u8 tclass;
	__u8 min_hopcount;
};

struct ip_options_rcu;

struct inet_sock {
	struct ipv6_pinfo *pinet6;
	struct ip_options_rcu *inet_opt;
	__u32 local_port_range;
	int uc_index;
	unsigned long inet_flags;
	__s16 uc_ttl;
	__u8 tos;
	__u8 min_ttl;
	__u8 pmtudisc;
};

struct tcp_congestion_ops;
struct tcp_ulp_ops;

struct inet_connection_sock {
	__u32 icsk_rto_min;
	__u32 icsk_rto_max;
	__u32 icsk_delack_max;
	struct tcp_congestion_ops *icsk_ca_ops;
	struct tcp_ulp_ops *icsk_ulp_ops;
	__u8 icsk_syn_retries;
	struct {
		__u8 pingpong;
	} icsk_ack;
	__u32 icsk_user_timeout;
};

struct minmax_sample {
	__u32 v;
};

struct minmax {
	struct minmax_sample s[3];
};

struct tcp_options_received {
	__u16 tstamp_ok : 1, wscale_ok : 1, sack_ok : 3;
	__u16 snd_wscale : 4, rcv_wscale : 4;
	__u16 mss_clamp;
};

struct tcp_sock {
	__u32 max_window;
	__u32 notsent_lowat;
	__u32 tsoffset;
	__u32 snd_wnd;
	__u32 mss_cache;
	__u32 snd_cwnd;
	__u8 recvmsg_inq : 1;
	__u8 tcp_usec_ts : 1;
	__u8 fastopen_no_cookie : 1;
	__u8 save_syn : 2;
	__u32 copied_seq;
	__u32 snd_wl1;
	__u32 mdev_us;
	__u16 urg_data;
	__u32 snd_ssthresh;
	struct minmax rtt_min;
	__u32 write_seq;
	__u8 ecn_flags;
	__u8 nonagle : 4;
	__u32 rcv_nxt;
	__u32 snd_nxt;
	__u32 snd_una;
	__u32 window_clamp;
	__u32 srtt_us;
	__u32 rcv_wnd;
	struct tcp_options_received rx_opt;
	__u32 rcv_wup;
	__u32 rate_delivered;
	__u32 rate_interval_us;
	__u8 thin_lto : 1;
	__u8 keepalive_probes;
	__u32 tcp_tx_delay;
	unsigned int keepalive_time;
	unsigned int keepalive_intvl;
	int linger2;
	void *md5sig_info;
	void *ao_info;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
};

struct task_struct;

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
};

#pragma clang attribute pop

#endif
