/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * The replicator's data plane at tcx ingress of the contact node. The rules are those of docs/decisions/replication-*.md; user space
 * makes all decisions about legs.
 */
#include "replicate_leg.h"

static __always_inline int find_leg(struct scratch *s)
{
	struct endpoint from = {.port = s->p.source_port};
	__builtin_memcpy(from.address, s->p.source, 16);
	struct leg_ref *leg = bpf_map_lookup_elem(&repl_legs, &from);
	if (!leg)
		return 0;
	__builtin_memcpy(s->key.client, s->p.destination, 16);
	s->key.client_port = s->p.destination_port;
	s->key.service = leg->service;
	s->leg = leg->leg;
	return 1;
}

static __always_inline int find_service(struct scratch *s)
{
	struct endpoint to = {.port = s->p.destination_port};
	__builtin_memcpy(to.address, s->p.destination, 16);
	__u32 *service = bpf_map_lookup_elem(&repl_services, &to);
	if (!service)
		return 0;
	__builtin_memcpy(s->key.client, s->p.source, 16);
	s->key.client_port = s->p.source_port;
	s->key.service = *service;
	return 1;
}

SEC("tc")
int replicate_ingress(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	if (!s)
		return TC_ACT_UNSPEC;
	int outcome = repl_parse(skb);
	if (outcome == IS_MALFORMED)
		count(REPL_MALFORMED);
	if (outcome != IS_TCP)
		return TC_ACT_UNSPEC;
	if (find_service(s))
		return repl_from_client(skb);
	if (find_leg(s))
		return repl_from_leg(skb);
	return TC_ACT_UNSPEC;
}

/* Reads the command in the frame of a test run. */
static __always_inline struct scratch *read_command(struct __sk_buff *skb, __u32 *argument)
{
	struct scratch *s = scratch();
	struct test_run_frame frame;
	if (!s || bpf_skb_load_bytes(skb, 0, &frame, sizeof(frame)))
		return 0;
	__builtin_memset(&s->p, 0, sizeof(s->p));
	s->key = frame.key;
	s->p.ethertype = frame.ethertype;
	*argument = frame.argument;
	return s;
}

/* Lets the client see the answer to its handshake. */
SEC("tc")
int replicate_show_syn_ack(struct __sk_buff *skb)
{
	__u32 argument;
	if (!read_command(skb, &argument))
		return 1;
	return repl_show_syn_ack(skb) != 0;
}

/* Sends what follows from new roles. */
SEC("tc")
int replicate_send_window_update(struct __sk_buff *skb)
{
	__u32 argument;
	struct scratch *s = read_command(skb, &argument);
	if (!s)
		return 1;
	if (!connection_of(s))
		return repl_check_handshake() != 0;
	for (__u32 i = 0; i < LEGS; i++)
		repl_push(skb, i);
	repl_tell_client(skb, 1);
	return 0;
}

/* Gives a connection roles of its own: the argument; 0: the service's roles. */
SEC("tc")
int replicate_set_roles(struct __sk_buff *skb)
{
	__u32 argument;
	struct scratch *s = read_command(skb, &argument);
	struct connection *c = s ? connection_of(s) : 0;
	if (!c)
		return 1;
	*(volatile __u32 *)&c->own_roles = argument;
	return 0;
}

static __always_inline void prepare_reset(struct scratch *s, __u32 sequence, __u32 ack)
{
	struct made *m = &s->made;
	m->sequence = sequence;
	m->ack = ack;
	m->window = 0;
	m->flags = TCP_RST | TCP_ACK;
	m->options = 0;
}

static __always_inline void reset_leg(struct __sk_buff *skb, struct scratch *s, __u32 i, __u32 sequence, __u32 ack)
{
	struct replicated_service *g = service_config(s);
	if (!g)
		return;
	prepare_reset(s, sequence, ack);
	address_leg(s, g, i);
	send_made(skb, s);
}

static __always_inline int reset_client(struct __sk_buff *skb, struct scratch *s, __u32 sequence, __u32 ack)
{
	struct replicated_service *g = service_config(s);
	if (!g)
		return 1;
	prepare_reset(s, sequence, ack);
	address_client(s, g);
	bpf_map_delete_elem(&repl_connections, &s->key);
	bpf_map_delete_elem(&repl_half_open, &s->key);
	return send_made(skb, s) != 0;
}

/* Resets the client and all legs of a connection, and forgets it. */
SEC("tc")
int replicate_reset_client(struct __sk_buff *skb)
{
	__u32 argument;
	struct scratch *s = read_command(skb, &argument);
	if (!s)
		return 1;
	struct connection *c = connection_of(s);
	if (c) {
		for (__u32 i = 0; i < LEGS; i++) {
			const struct leg_state *leg = &c->leg[LEG(i)];
			if (c->present >> i & 1)
				reset_leg(skb, s, i, leg->ack, leg->told - leg->sequence_offset);
		}
		s->made.path = c->client;
		return reset_client(skb, s, c->sent, c->shown_ack);
	}
	struct half_open *h = half_open_of(s);
	if (!h)
		return 1;
	for (__u32 i = 0; i < LEGS; i++)
		if (h->answered >> i & 1)
			reset_leg(skb, s, i, h->client_isn + 1, h->leg[LEG(i)].isn + 1);
	s->made.path = h->client;
	return reset_client(skb, s, 0, h->client_isn + 1);
}

/* Forgets a connection. */
SEC("tc")
int replicate_forget(struct __sk_buff *skb)
{
	__u32 argument;
	struct scratch *s = read_command(skb, &argument);
	if (!s)
		return 1;
	bpf_map_delete_elem(&repl_half_open, &s->key);
	return bpf_map_delete_elem(&repl_connections, &s->key) != 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
