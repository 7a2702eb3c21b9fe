/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Packets of clients: to the primary, and as clones to the replicas.
 */
#ifndef HOLDFAST_REPLICATE_CLIENT_H
#define HOLDFAST_REPLICATE_CLIENT_H

#include "replicate_handshake.h"

/* Input may be as far behind what the client was shown: all of it is old. */
#define INPUT_BEHIND_MAX (1u << 30)

enum client_verdict { CLIENT_FORWARD, CLIENT_DROP, CLIENT_ANSWER, CLIENT_RESET, CLIENT_CLOSED };

static __always_inline void copy_for_leg(struct scratch *s, __u32 lag, struct connection *c, __u32 i, __u64 now)
{
	struct leg_copy *copy = &s->copy[LEG(i)];
	struct leg_state *leg = &c->leg[LEG(i)];
	__u32 ack = aligned_ack(s, c, i, s->p.ack);
	copy->ack = ack - leg->sequence_offset;
	copy->window = window_for(s, lag, c, i, ack);
	copy->echo = seq_min(s->p.echo - leg->timestamp_offset, leg->timestamp);
	copy->sack_minus = leg->sequence_offset;
	copy->strip_timestamps = !(leg->options & HAS_TIMESTAMPS);
	leg->told = seq_max(leg->told, ack);
	if (now && !leg->owes_since_ns && BEFORE(leg->ack, c->client_nxt))
		leg->owes_since_ns = now;
}

/* Takes a client's segment into account, and prepares the copies. */
__noinline int repl_read_client(void)
{
	struct scratch *s = scratch();
	if (!s)
		return CLIENT_DROP;
	struct replicated_service *g = service_config(s);
	struct connection *c = connection_of(s);
	__u32 roles = service_roles(s), lag = g ? g->lag : 0, verdict = CLIENT_FORWARD;
	struct segment *p = &s->p;
	if (!g || !c)
		return CLIENT_DROP;
	__u32 fin = p->flags & TCP_FIN, end = p->sequence + p->payload + fin;
	__u64 now = p->payload || fin ? bpf_ktime_get_ns() : 0;
	bpf_spin_lock(&c->lock);
	read_roles(s, c, roles);
	__u32 is_inside = !AFTER(p->sequence + p->payload, c->shown_edge) & !BEFORE(end, c->shown_ack - INPUT_BEHIND_MAX);
	__u32 acks_unsent = AFTER(p->ack, c->sent), is_reset = (p->flags & TCP_RST) > 0;
	if (!is_inside | (acks_unsent & !is_reset)) {
		/* RFC 9293, section 3.10.7.4: an unacceptable segment is answered, a reset is not. */
		verdict = is_reset ? CLIENT_DROP : CLIENT_ANSWER;
	} else if (is_reset) {
		/* Legs judge a reset by its exact position, as RFC 5961 says. */
		__u32 is_exact = 0;
#pragma unroll
		for (int i = 0; i < LEGS; i++)
			is_exact |= IS_LIVE(s, i) & (p->sequence == c->leg[i].ack);
		if (is_exact && !(c->flags & CONNECTION_CLOSED)) {
			c->flags |= CONNECTION_CLOSED;
			verdict = CLIENT_RESET;
		}
	} else {
		c->client_nxt = seq_max(c->client_nxt, end);
		if (fin) {
			c->flags |= CONNECTION_CLIENT_FIN;
			c->client_fin_seq = end - 1;
		}
		__u32 is_new = !BEFORE(p->ack, c->client_ack);
		c->client_ack = seq_max(c->client_ack, p->ack);
		c->client_edge = choose(is_new, p->ack + (p->window << (c->client_scale & 15)), c->client_edge);
		if (p->timestamp_at)
			c->client_timestamp = seq_max(c->client_timestamp, p->timestamp);
	}
	if (is_inside & !(acks_unsent & !is_reset))
		for (__u32 i = 0; i < LEGS; i++)
			copy_for_leg(s, lag, c, i, now);
	if (is_over(s, c)) {
		c->flags |= CONNECTION_CLOSED;
		verdict = CLIENT_CLOSED;
	}
	bpf_spin_unlock(&c->lock);
	if (!is_inside)
		count(REPL_OUTSIDE_WINDOW);
	else if (verdict == CLIENT_ANSWER)
		count(REPL_UNSENT_ACKED);
	return verdict;
}

/* Sends the client's segment to one leg. Returns the outcome of a redirect with `is_last` 1, or else 0. */
__noinline int repl_send_to_leg(struct __sk_buff *skb, __u32 i, __u32 is_last)
{
	struct scratch *s = scratch();
	if (!s)
		return TC_ACT_SHOT;
	struct replicated_service *g = service_config(s);
	if (!g || i >= LEGS)
		return TC_ACT_SHOT;
	const struct leg_copy *copy = &s->copy[LEG(i)];
	const struct leg_path *leg = &g->leg[LEG(i)];
	struct edit *e = &s->edit;
	__builtin_memcpy(e->addresses, s->p.source, 16);
	__builtin_memcpy(e->addresses + 16, leg->endpoint.address, 16);
	e->path = leg->path;
	e->source_port = s->p.source_port;
	e->destination_port = leg->endpoint.port;
	e->sequence = s->p.sequence;
	e->ack = s->p.flags & TCP_ACK ? copy->ack : 0;
	e->window = copy->window;
	e->timestamp = s->p.timestamp;
	e->echo = copy->echo;
	e->sack_minus = copy->sack_minus;
	/* A replica sends again what did not arrive here, whatever the client has. */
	e->sack = i == s->primary ? SACK_MOVE : SACK_BLANK;
	e->strip_timestamps = copy->strip_timestamps;
	e->clear_ecn = 0;
	/* CWR makes a Linux server acknowledge at once: the client waits for the last acknowledgement. */
	e->flags = (s->p.flags & ~(TCP_ECE | TCP_CWR)) | FLAG(s->p.payload > 0, TCP_CWR);
	__u32 ifindex = e->path.ifindex;
	if (repl_apply(skb))
		return TC_ACT_SHOT;
	if (is_last)
		return bpf_redirect(ifindex, 0);
	count(REPL_CLONES);
	bpf_clone_redirect(skb, ifindex, 0);
	return 0;
}

static __always_inline void report_closed(struct scratch *s)
{
	struct replication_event *event = new_event(s, REPLICATION_CLOSED);
	if (event)
		bpf_ringbuf_submit(event, 0);
}

static __always_inline int forward_to_legs(struct __sk_buff *skb, struct scratch *s)
{
	__u32 live = s->live, primary = s->primary & (LEGS - 1), others = live & ~(1u << primary);
	if (!live) {
		count(REPL_NO_LEG);
		return TC_ACT_SHOT;
	}
	if (!others)
		return repl_send_to_leg(skb, primary, 1);
	repl_send_to_leg(skb, primary, 0);
	for (__u32 i = 0; i < LEGS; i++) {
		if (!(others >> i & 1))
			continue;
		others &= ~(1u << i);
		if (!others)
			return repl_send_to_leg(skb, i, 1);
		repl_send_to_leg(skb, i, 0);
	}
	return TC_ACT_SHOT;
}

/* Takes a packet of a client. */
__noinline int repl_from_client(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	if (!s)
		return TC_ACT_SHOT;
	count(REPL_CLIENT_PACKETS);
	__u8 flags = s->p.flags;
	if (flags & TCP_SYN) {
		struct connection *c = connection_of(s);
		/* RFC 5961, section 4: a SYN within a connection is answered by an acknowledgement. A client that has forgotten the
		 * connection then resets it.
		 */
		if (c && !(c->flags & CONNECTION_CLOSED)) {
			repl_tell_client(skb, 0);
			return TC_ACT_SHOT;
		}
		if (c)
			bpf_map_delete_elem(&repl_connections, &s->key);
		s->made.path.ifindex = skb->ifindex;
		if (!(flags & (TCP_ACK | TCP_RST | TCP_FIN)))
			repl_client_syn(skb);
		return TC_ACT_SHOT;
	}
	if (!connection_of(s) && (flags & TCP_RST || !(flags & TCP_ACK) || repl_establish())) {
		/* A connection that began before replication did belongs to the ownership filter. */
		count(REPL_UNKNOWN);
		return TC_ACT_UNSPEC;
	}
	__u32 verdict = repl_read_client();
	if (verdict == CLIENT_ANSWER)
		repl_tell_client(skb, 0);
	if (verdict == CLIENT_ANSWER || verdict == CLIENT_DROP)
		return TC_ACT_SHOT;
	if (verdict == CLIENT_RESET || verdict == CLIENT_CLOSED)
		report_closed(s);
	return forward_to_legs(skb, s);
}

#endif
