/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * sock_ops: a flow gets its entry when the handshake is complete (a SYN leaves no state), and loses it after its
 * socket.
 */
#ifndef HOLDFAST_SOCKETS_H
#define HOLDFAST_SOCKETS_H

#include "ingress.h"

#define AF_INET6 10
#define STATE_LAST_ACK 9
#define STATE_CLOSE 7

static __always_inline void flow_of(struct flow_key *flow, struct bpf_sock_ops *ops)
{
	__builtin_memset(flow, 0, sizeof(*flow));
	if (ops->family == AF_INET6) {
		__u32 *local = (__u32 *)flow->local, *remote = (__u32 *)flow->remote;
		local[0] = ops->local_ip6[0];
		local[1] = ops->local_ip6[1];
		local[2] = ops->local_ip6[2];
		local[3] = ops->local_ip6[3];
		remote[0] = ops->remote_ip6[0];
		remote[1] = ops->remote_ip6[1];
		remote[2] = ops->remote_ip6[2];
		remote[3] = ops->remote_ip6[3];
	} else {
		map_v4(flow->local, ops->local_ip4);
		map_v4(flow->remote, ops->remote_ip4);
	}
	flow->local_port = bpf_htons(ops->local_port);
	flow->remote_port = ops->remote_port >> 16; /* network order in the upper half */
	flow->protocol = IPPROTO_TCP;
}

/* Returns true for a connection from this host itself, by its loopback address: the daemon's check of a server. The
 * connection cannot belong to another node. */
static __always_inline int is_from_loopback(const struct flow_key *flow)
{
	static const __u8 loopback[16] = {[15] = 1};
	static const __u8 mapped[12] = {[10] = 0xff, [11] = 0xff};
	if (same_address(flow->remote, loopback))
		return 1;
	for (int i = 0; i < 12; i++)
		if (flow->remote[i] != mapped[i])
			return 0;
	return flow->remote[12] == 127;
}

static __always_inline void on_established(struct flow_key *flow, struct service *service)
{
	struct flow_value value = {
		.epoch = first_epoch(),
		.state = FLOW_OWNED,
		.last_packet_s = now_s(),
	};
	struct flow_value *old = bpf_map_lookup_elem(&flows, flow);
	if (old && old->epoch >= value.epoch)
		value.epoch = old->epoch + 1;
	if ((!old && !has_quota(service)) || bpf_map_update_elem(&flows, flow, &value, BPF_ANY)) {
		count(DROP_FLOWS_FULL);
		return;
	}
	if (!old)
		count_new_flow(service);
	emit(flow, value.epoch, EVENT_ESTABLISHED, 0);
}

static __always_inline void on_closed(struct flow_key *flow, __u8 from)
{
	struct flow_value *value = bpf_map_lookup_elem(&flows, flow);
	if (!value)
		return;
	/* A socket that closes because its flow moved has no effect on the flow. */
	struct effective_state now = effective_state_of(value);
	if (now.state != FLOW_OWNED && now.state != FLOW_FLUSHING && now.state != FLOW_PREPARED &&
	    now.state != FLOW_REDIRECTING_DATA)
		return;
	change_state(value, value->state, FLOW_CLOSING);
	value->last_packet_s = now_s();
	emit(flow, now.epoch, EVENT_CLOSED, from);
}

SEC("sockops")
int holdfast_sockets(struct bpf_sock_ops *ops)
{
	struct flow_key flow;
	struct service *service;
	switch (ops->op) {
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		flow_of(&flow, ops);
		service = service_of(&flow);
		if (!service || is_from_loopback(&flow))
			return 1;
		/* A connection that the daemon put into the queue has an entry already. */
		if (bpf_map_delete_elem(&waiting, &flow))
			on_established(&flow, service);
		bpf_sock_ops_cb_flags_set(ops, BPF_SOCK_OPS_STATE_CB_FLAG);
		return 1;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		/* A repaired socket "connects" from the service's address; its flow has an entry already. */
		flow_of(&flow, ops);
		if (service_of(&flow))
			bpf_sock_ops_cb_flags_set(ops, BPF_SOCK_OPS_STATE_CB_FLAG);
		return 1;
	case BPF_SOCK_OPS_STATE_CB:
		if (ops->args[1] != STATE_CLOSE)
			return 1;
		flow_of(&flow, ops);
		if (service_of(&flow))
			on_closed(&flow, ops->args[0]);
		return 1;
	}
	return 1;
}

#endif
