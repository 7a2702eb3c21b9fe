/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Snapshots of many TCP sockets, without a system call for each: an iterator over the descriptors of a process inspects
 * the registered sockets. Nothing is changed, and no lock is taken: the sockets may be in use meanwhile.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "kernel.h"
#include "socket_snapshots.h"

#define AF_INET6 10
#define RCV_SHUTDOWN 1

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct snapshot_registration);
} registered_sockets SEC(".maps");

/* Snapshots of a pass, from index 0 on. A map is used because the iterator's reads return little data at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SNAPSHOTS_MAX);
	__type(key, __u32);
	__type(value, struct socket_snapshot);
} records SEC(".maps");

/* IDs of the sockets that a pass encountered, once each. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ENCOUNTERED_MAX);
	__type(key, __u32);
	__type(value, __u64);
} encountered SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct snapshot_pass);
} passes SEC(".maps");

static __always_inline void addresses(struct socket_snapshot *o, struct sock *sk)
{
	struct sock_common *c = &sk->__sk_common;
	if (c->skc_family == AF_INET6) {
		__builtin_memcpy(o->local, c->skc_v6_rcv_saddr.in6_u.u6_addr8, 16);
		__builtin_memcpy(o->remote, c->skc_v6_daddr.in6_u.u6_addr8, 16);
		o->flags |= SNAPSHOT_V6;
	} else {
		__u32 local = c->skc_rcv_saddr, remote = c->skc_daddr;
		o->local[10] = o->local[11] = o->remote[10] = o->remote[11] = 0xff;
		__builtin_memcpy(o->local + 12, &local, 4);
		__builtin_memcpy(o->remote + 12, &remote, 4);
	}
	o->local_port = bpf_htons(c->skc_num);
	o->remote_port = c->skc_dport;
	o->namespace = c->skc_net.net->ns.inum;
}

/* Returns true if a socket has none of the rare features that need a query of the socket itself. */
static __always_inline int is_plain(struct sock *sk, struct tcp_sock *tcp)
{
	struct inet_connection_sock *icsk = (void *)tcp;
	struct inet_sock *inet = (void *)tcp;
	if (sk->sk_filter || icsk->icsk_ulp_ops || tcp->urg_data || tcp->ecn_flags)
		return 0;
	/* Headers set by the program, and a peek offset. */
	if (inet->inet_opt || sk->sk_peek_off >= 0)
		return 0;
	if (sk->__sk_common.skc_family == AF_INET6 && inet->pinet6->opt)
		return 0;
	if (bpf_core_field_exists(tcp->md5sig_info) && tcp->md5sig_info)
		return 0;
	return !bpf_core_field_exists(tcp->ao_info) || !tcp->ao_info;
}

/* Returns the clock, computed as the kernel does for TCP_TIMESTAMP. */
static __always_inline __u32 tcp_clock(struct tcp_sock *tcp)
{
	__u64 now_us = bpf_ktime_get_ns() / 1000;
	if (bpf_core_field_exists(tcp->tcp_usec_ts) && BPF_CORE_READ_BITFIELD(tcp, tcp_usec_ts))
		return ((__u32)now_us + tcp->tsoffset) | 1;
	return ((__u32)(now_us / 1000) + tcp->tsoffset) & ~1u;
}

static __always_inline void stream(struct socket_snapshot *o, struct sock *sk, struct tcp_sock *tcp)
{
	struct tcp_options_received *negotiated = &tcp->rx_opt;
	if (is_plain(sk, tcp))
		o->flags |= SNAPSHOT_PLAIN;
	if (sk->sk_shutdown & RCV_SHUTDOWN)
		o->flags |= SNAPSHOT_RECEIVE_SHUT;
	if (BPF_CORE_READ_BITFIELD(negotiated, wscale_ok))
		o->flags |= SNAPSHOT_WINDOW_SCALE;
	if (BPF_CORE_READ_BITFIELD(negotiated, sack_ok))
		o->flags |= SNAPSHOT_SACK;
	if (BPF_CORE_READ_BITFIELD(negotiated, tstamp_ok))
		o->flags |= SNAPSHOT_TIMESTAMPS;
	o->snd_wscale = BPF_CORE_READ_BITFIELD(negotiated, snd_wscale);
	o->rcv_wscale = BPF_CORE_READ_BITFIELD(negotiated, rcv_wscale);
	o->state = sk->__sk_common.skc_state;
	o->write_seq = tcp->write_seq;
	o->snd_una = tcp->snd_una;
	o->snd_nxt = tcp->snd_nxt;
	o->snd_wl1 = tcp->snd_wl1;
	o->snd_wnd = tcp->snd_wnd;
	o->max_window = tcp->max_window;
	o->rcv_nxt = tcp->rcv_nxt;
	o->copied_seq = tcp->copied_seq;
	o->rcv_wnd = tcp->rcv_wnd;
	o->rcv_wup = tcp->rcv_wup;
	o->mss_cache = tcp->mss_cache;
	o->mss_clamp = negotiated->mss_clamp;
	o->tsoffset = tcp->tsoffset;
	o->timestamp = tcp_clock(tcp);
	o->cwnd = tcp->snd_cwnd;
	o->ssthresh = tcp->snd_ssthresh;
	o->srtt_us = tcp->srtt_us >> 3;
	o->rttvar_us = tcp->mdev_us >> 2;
	o->min_rtt_us = tcp->rtt_min.s[0].v;
	o->rate_delivered = tcp->rate_delivered;
	o->rate_interval_us = tcp->rate_interval_us;
	o->send_buffer = sk->sk_sndbuf;
	o->receive_buffer = sk->sk_rcvbuf;
	o->receive_low_water = sk->sk_rcvlowat;
	o->window_clamp = tcp->window_clamp;
}

static __always_inline void socket_options(struct option_fingerprint *m, struct sock *sk)
{
	struct sock_common *c = &sk->__sk_common;
	m->sk_flags = c->skc_flags;
	m->pacing = sk->sk_max_pacing_rate;
	m->receive_timeout = sk->sk_rcvtimeo;
	m->send_timeout = sk->sk_sndtimeo;
	m->linger = sk->sk_lingertime;
	m->priority = sk->sk_priority;
	m->mark = sk->sk_mark;
	if (bpf_core_field_exists(sk->sk_ll_usec))
		m->busy_poll_us = sk->sk_ll_usec;
	m->descriptor_flags = sk->sk_socket->file->f_flags;
	m->device = c->skc_bound_dev_if;
	m->timestamping = sk->sk_tsflags;
	m->reserved_memory = sk->sk_reserved_mem;
	m->send_clock = sk->sk_clockid;
	if (bpf_core_field_exists(sk->sk_prefer_busy_poll)) {
		m->prefer_busy_poll = sk->sk_prefer_busy_poll;
		m->busy_poll_budget = sk->sk_busy_poll_budget;
	}
	m->user_locks = sk->sk_userlocks;
	m->tx_rehash = sk->sk_txrehash;
	m->reuse = BPF_CORE_READ_BITFIELD(c, skc_reuse);
	m->reuse_port = BPF_CORE_READ_BITFIELD(c, skc_reuseport);
	m->v6_only = BPF_CORE_READ_BITFIELD(c, skc_ipv6only);
	m->family = c->skc_family;
}

static __always_inline void ip_options(struct option_fingerprint *m, struct sock *sk, struct tcp_sock *tcp)
{
	struct inet_sock *inet = (void *)tcp;
	m->inet_flags = inet->inet_flags;
	m->ttl = inet->uc_ttl;
	m->tos = inet->tos;
	m->min_ttl = inet->min_ttl;
	m->mtu_discover = inet->pmtudisc;
	m->port_range = inet->local_port_range;
	m->unicast_device = inet->uc_index;
	if (sk->__sk_common.skc_family != AF_INET6)
		return;
	struct ipv6_pinfo *v6 = inet->pinet6;
	m->hop_limit = v6->hop_limit;
	m->v6_class = v6->tclass;
	m->v6_mtu_discover = v6->pmtudisc;
	m->v6_min_hops = v6->min_hopcount;
	m->v6_receive = v6->rxopt.all;
	m->v6_unicast_device = v6->ucast_oif;
	m->v6_sources = v6->srcprefs;
	/* If the socket has no hop limit, its route or device determines the limit. */
	if (m->hop_limit < 0) {
		m->route_metrics = sk->sk_dst_cache->_metrics;
		m->route_device = sk->sk_dst_cache->dev->ifindex;
	}
}

static __always_inline void tcp_options(struct option_fingerprint *m, struct sock *sk, struct tcp_sock *tcp)
{
	struct inet_connection_sock *icsk = (void *)tcp;
	/* Read as a number, because the verifier forbids comparisons of pointers. */
	bpf_core_read(&m->congestion_control, sizeof(m->congestion_control), &icsk->icsk_ca_ops);
	m->user_timeout = icsk->icsk_user_timeout;
	m->rto_min = icsk->icsk_rto_min;
	if (bpf_core_field_exists(icsk->icsk_rto_max))
		m->rto_max = icsk->icsk_rto_max;
	m->delack_max = icsk->icsk_delack_max;
	m->syn_retries = icsk->icsk_syn_retries;
	m->keepalive_time = tcp->keepalive_time;
	m->keepalive_interval = tcp->keepalive_intvl;
	m->keepalive_probes = tcp->keepalive_probes;
	m->linger2 = tcp->linger2;
	m->tx_delay = tcp->tcp_tx_delay;
	m->notsent_low_water = tcp->notsent_lowat;
	/* TCP_NODELAY and TCP_CORK; the third bit only requests sending now. */
	m->nagle = BPF_CORE_READ_BITFIELD(tcp, nonagle) & 3;
	m->thin_timeouts = BPF_CORE_READ_BITFIELD(tcp, thin_lto);
	m->inq = BPF_CORE_READ_BITFIELD(tcp, recvmsg_inq);
	m->save_syn = BPF_CORE_READ_BITFIELD(tcp, save_syn);
	m->no_cookie = BPF_CORE_READ_BITFIELD(tcp, fastopen_no_cookie);
	/* The count rises up to 255; only its comparison with the limit matters. */
	struct net *net = sk->__sk_common.skc_net.net;
	m->ping_pong = icsk->icsk_ack.pingpong;
	if (bpf_core_field_exists(net->ipv4.sysctl_tcp_pingpong_thresh)) {
		__u8 limit = net->ipv4.sysctl_tcp_pingpong_thresh;
		m->ping_pong = m->ping_pong >= limit;
	}
}

/* Returns true if no word differs. A separate function has its own stack. */
static __attribute__((noinline)) int is_unchanged(const struct socket_snapshot *now,
						  const struct socket_snapshot *reported)
{
	const __u64 *one = (const void *)now, *other = (const void *)reported;
#pragma unroll
	for (int i = 0; i < sizeof(struct socket_snapshot) / 8; i++)
		if (one[i] != other[i])
			return 0;
	return 1;
}

/* Adds a socket to the snapshots of this pass; returns true if it fitted. */
static __always_inline int add(struct snapshot_pass *pass, const struct socket_snapshot *o)
{
	__u32 at = pass->record_count;
	struct socket_snapshot *place = bpf_map_lookup_elem(&records, &at);
	pass->record_count = at + (place || at == SNAPSHOTS_MAX);
	if (place)
		*place = *o;
	return !!place;
}

/* Returns true at a pass's first encounter of a socket, which several descriptors, of several processes, may refer
 * to. */
static __always_inline int record_encounter(struct snapshot_pass *pass, struct snapshot_registration *registration)
{
	__u32 at = pass->encountered_count;
	if (registration->pass == pass->number)
		return 0;
	registration->pass = pass->number;
	__u64 *place = bpf_map_lookup_elem(&encountered, &at);
	pass->encountered_count = at + (place || at == ENCOUNTERED_MAX);
	if (place)
		*place = registration->id;
	return 1;
}

SEC("iter/task_file")
int snapshot_sockets(struct bpf_iter__task_file *context)
{
	__u32 zero = 0;
	struct file *file = context->file;
	struct snapshot_pass *pass = bpf_map_lookup_elem(&passes, &zero);
	if (!context->task || !file || !pass)
		return 0;
	struct socket *socket = bpf_sock_from_file(file);
	if (!socket)
		return 0;
	struct sock *sk = socket->sk;
	if (!sk)
		return 0;
	struct snapshot_registration *registration = bpf_sk_storage_get(&registered_sockets, sk, 0, 0);
	if (!registration || !record_encounter(pass, registration))
		return 0;
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);
	if (!tcp)
		return 0;
	struct socket_snapshot o = {.id = registration->id};
	int once = registration->once;
	addresses(&o, sk);
	stream(&o, sk, tcp);
	socket_options(&o.option_fingerprint, sk);
	ip_options(&o.option_fingerprint, sk, tcp);
	tcp_options(&o.option_fingerprint, sk, tcp);
	if (once) {
		if (add(pass, &o))
			bpf_sk_storage_delete(&registered_sockets, sk);
		return 0;
	}
	__u32 clock = o.timestamp;
	o.timestamp = 0;
	/* The field changes with traffic, and is the kernel's decision. */
	o.option_fingerprint.ping_pong = 0;
	if (is_unchanged(&o, &registration->last_reported))
		return 0;
	o.timestamp = clock;
	if (!add(pass, &o))
		return 0;
	o.timestamp = 0;
	registration->last_reported = o;
	return 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
