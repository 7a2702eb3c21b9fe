/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * The rules of replication that several kinds of packets share: roles, clamps, and segments made by the replicator. Functions with a
 * connection run under its lock.
 */
#ifndef HOLDFAST_REPLICATE_RULES_H
#define HOLDFAST_REPLICATE_RULES_H

#include "replicate_packet.h"

/* Bounds an index in the register that is used: the compiler would leave out a mask that it knows to be needless. */
static __always_inline __u32 LEG(__u32 i)
{
	_Static_assert(LEGS == 4, "mask");
	asm volatile("%0 &= 3" : "+r"(i));
	return i;
}

#define IS_LIVE(s, i) ((s)->live >> (i) & 1)

static __always_inline struct connection *connection_of(const struct scratch *s)
{
	return bpf_map_lookup_elem(&repl_connections, &s->key);
}

/* Output of a leg with its FIN, once there is no gap. */
static __always_inline __u32 is_finished(const struct leg_state *leg)
{
	return leg->flags & LEG_FIN && leg->nxt == leg->fin_seq;
}

/* Finds the roles in force. A primary that is not live is replaced by the first live leg. */
static __always_inline void read_roles(struct scratch *s, const struct connection *c, __u32 service_roles)
{
	__u32 own = c->own_roles, roles = choose(own >> 31, own, service_roles);
	__u32 live = roles & c->present & 0xf, primary = roles >> 8 & (LEGS - 1);
	s->live = live;
	__u32 first = choose(live & 1, 0, choose(live >> 1 & 1, 1, choose(live >> 2 & 1, 2, 3)));
	primary = choose(live >> primary & 1, primary, first);
	s->primary = primary;
	__u32 slowest = c->leg[LEG(s->primary)].nxt;
#pragma unroll
	for (int i = 0; i < LEGS; i++)
		slowest = choose(live >> i & 1, seq_min(slowest, c->leg[i].nxt), slowest);
	s->slowest = slowest;
}

/* Returns the window field for a leg whose window begins at `ack`, service space. A replica's window ends where the output that the
 * client was sent ends: the replica holds back further output, and can continue without retransmissions when it is promoted. A
 * replica that lacks less than a unit of the window, or that probes, is given the whole unit: if it has output that a stopped
 * primary lacks, some bytes of it arrive. The primary's window ends `lag` behind the slowest leg's output.
 */
static __always_inline __u32 window_for(struct scratch *s, __u32 lag, struct connection *c, __u32 i, __u32 ack)
{
	__u32 is_primary = i == s->primary, edge = c->client_edge, bound = s->slowest + lag;
	const struct leg_state *leg = &c->leg[LEG(i)], *primary = &c->leg[LEG(s->primary)];
	__u32 held = is_primary & (lag > 0) & AFTER(edge, bound);
	__u32 is_held = choose(is_primary, held, (c->flags & CONNECTION_HELD) / CONNECTION_HELD);
	c->flags = (c->flags & ~CONNECTION_HELD) | FLAG(is_held, CONNECTION_HELD);
	__u32 is_clamped = !is_primary & !(primary->flags & LEG_FIN) & AFTER(edge, c->sent);
	edge = choose(held, bound, edge);
	edge = choose(is_clamped, c->sent, edge);
	__u32 bytes = choose(AFTER(edge, ack), edge - ack, 0), room = bytes >> (leg->client_scale & 15);
	room |= is_clamped & (room == 0) & (((bytes > 0) & AFTER(c->sent, leg->nxt)) | (c->probing >> i & 1));
	return choose(room > 65535, 65535, room);
}

/* Returns what a leg may be told that the client has: nothing that did not arrive here without a gap. */
static __always_inline __u32 told_ack(const struct leg_state *leg, __u32 client_ack)
{
	return seq_min(client_ack, leg->nxt + is_finished(leg));
}

/* Returns the acknowledgement for a leg. Windows are told in units of 2^scale bytes: a leg whose window would end a few bytes before
 * the clamp is told less than it could be, so that it reaches the clamp.
 */
static __always_inline __u32 aligned_ack(struct scratch *s, const struct connection *c, __u32 i, __u32 client_ack)
{
	const struct leg_state *leg = &c->leg[LEG(i)];
	__u32 ack = told_ack(leg, client_ack), unit = 1u << (leg->client_scale & 15);
	__u32 aligned = ack - ((ack - c->sent) & (unit - 1));
	__u32 is_short = (i != s->primary) & AFTER(c->sent, leg->nxt) & !BEFORE(aligned, leg->told);
	return choose(is_short, aligned, ack);
}

struct clamp {
	__u32 ack, edge;
	__u32 next_ack; /* lowest acknowledgement of the other legs */
};

/* Finds the lowest acknowledgement and window edge of all live legs. */
static __always_inline void find_clamp(struct scratch *s, const struct connection *c, __u32 but, struct clamp *clamp)
{
	__u32 live = s->live, low = s->primary;
	const struct leg_state *primary = &c->leg[LEG(s->primary)];
	clamp->ack = primary->ack;
	clamp->edge = primary->edge;
	clamp->next_ack = choose(s->primary == but, primary->ack + (1u << 30), primary->ack);
#pragma unroll
	for (int i = 0; i < LEGS; i++) {
		const struct leg_state *leg = &c->leg[i];
		__u32 bit = live >> i & 1;
		low = choose(bit & BEFORE(leg->ack, clamp->ack), i, low);
		clamp->ack = choose(bit, seq_min(clamp->ack, leg->ack), clamp->ack);
		clamp->edge = choose(bit, seq_min(clamp->edge, leg->edge), clamp->edge);
		clamp->next_ack = choose(bit & (i != but), seq_min(clamp->next_ack, leg->ack), clamp->next_ack);
	}
	s->low = low;
}

static __always_inline __u32 shown_window(const struct connection *c, const struct clamp *clamp)
{
	__u32 room = (clamp->edge - clamp->ack) >> (c->scale & 15);
	return choose(room > 65535, 65535, room);
}

/* Prepares an acknowledgement for a leg, as the client would give it now; the caller adds addresses. */
static __always_inline void prepare_for_leg(struct scratch *s, __u32 lag, struct connection *c, __u32 i)
{
	struct made *m = &s->made;
	struct leg_state *leg = &c->leg[LEG(i)];
	__u32 ack = aligned_ack(s, c, i, c->client_ack);
	leg->told = seq_max(leg->told, ack);
	m->sequence = c->client_nxt;
	m->ack = ack - leg->sequence_offset;
	m->window = window_for(s, lag, c, i, ack);
	m->timestamp = c->client_timestamp;
	m->echo = leg->timestamp;
	m->flags = TCP_ACK;
	m->options = leg->options & c->options & HAS_TIMESTAMPS;
}

static __always_inline void address_leg(struct scratch *s, const struct replicated_service *g, __u32 i)
{
	struct made *m = &s->made;
	const struct leg_path *leg = &g->leg[LEG(i)];
	__builtin_memcpy(m->addresses, s->key.client, 16);
	__builtin_memcpy(m->addresses + 16, leg->endpoint.address, 16);
	m->source_port = s->key.client_port;
	m->destination_port = leg->endpoint.port;
	m->path = leg->path;
}

static __always_inline void prepare_for_client(struct scratch *s, struct connection *c, const struct clamp *clamp)
{
	struct made *m = &s->made;
	m->sequence = c->sent;
	m->ack = clamp->ack;
	m->window = shown_window(c, clamp);
	m->timestamp = c->timestamp_shown;
	m->echo = c->client_timestamp;
	m->flags = TCP_ACK;
	m->options = c->options & HAS_TIMESTAMPS;
	m->path = c->client;
	c->shown_ack = seq_max(c->shown_ack, clamp->ack);
	c->shown_edge = seq_max(c->shown_edge, clamp->edge);
}

static __always_inline void address_client(struct scratch *s, const struct replicated_service *g)
{
	struct made *m = &s->made;
	__builtin_memcpy(m->addresses, g->endpoint.address, 16);
	__builtin_memcpy(m->addresses + 16, s->key.client, 16);
	m->source_port = g->endpoint.port;
	m->destination_port = s->key.client_port;
}

/* True once both directions have ended, and everybody knows. */
static __always_inline __u32 is_over(struct scratch *s, const struct connection *c)
{
	__u32 unacknowledged = 0, both = CONNECTION_FIN_PASSED | CONNECTION_CLIENT_FIN;
#pragma unroll
	for (int i = 0; i < LEGS; i++)
		unacknowledged |= IS_LIVE(s, i) & !AFTER(c->leg[i].ack, c->client_fin_seq);
	return ((c->flags & (both | CONNECTION_CLOSED)) == both) & (c->client_ack == c->sent) & !unacknowledged;
}

/* Turns the packet into the prepared segment and sends it. The packet can be turned into further segments. */
static __always_inline int send_made(struct __sk_buff *skb, struct scratch *s)
{
	__u32 ifindex = s->made.path.ifindex;
	if (repl_make(skb))
		return -1;
	return bpf_clone_redirect(skb, ifindex, 0);
}

/* Tells one leg what the client has and how far the leg may send. */
__noinline int repl_push(struct __sk_buff *skb, __u32 i)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct replicated_service *g = service_config(s);
	struct connection *c = connection_of(s);
	__u32 roles = service_roles(s);
	if (!g || !c || i >= LEGS)
		return -1;
	__u32 lag = g->lag;
	bpf_spin_lock(&c->lock);
	read_roles(s, c, roles);
	prepare_for_leg(s, lag, c, i);
	bpf_spin_unlock(&c->lock);
	if (!IS_LIVE(s, i))
		return -1;
	address_leg(s, g, i);
	count(REPL_PUSHED);
	return send_made(skb, s);
}

/* Shows the client the clamp. With `only_news` 1, only where it has moved. Passes the end of the output on, once all live legs agree. */
__noinline int repl_tell_client(struct __sk_buff *skb, __u32 only_news)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct replicated_service *g = service_config(s);
	struct connection *c = connection_of(s);
	__u32 roles = service_roles(s);
	struct clamp clamp;
	if (!g || !c)
		return -1;
	bpf_spin_lock(&c->lock);
	read_roles(s, c, roles);
	find_clamp(s, c, LEGS, &clamp);
	__u32 news = AFTER(clamp.ack, c->shown_ack) | AFTER(clamp.edge, c->shown_edge);
	__u32 unfinished = 0;
#pragma unroll
	for (int i = 0; i < LEGS; i++)
		unfinished |= IS_LIVE(s, i) & !is_finished(&c->leg[i]);
	__u32 ends = !unfinished & !(c->flags & CONNECTION_FIN_PASSED) & (s->live > 0);
	prepare_for_client(s, c, &clamp);
	if (ends) {
		s->made.sequence = c->leg[LEG(s->primary)].fin_seq;
		s->made.flags = TCP_ACK | TCP_FIN;
		c->sent = seq_max(c->sent, c->leg[LEG(s->primary)].fin_seq + 1);
		c->flags |= CONNECTION_FIN_PASSED;
	}
	bpf_spin_unlock(&c->lock);
	if (!s->live || (only_news && !news && !ends))
		return 0;
	address_client(s, g);
	return send_made(skb, s);
}

#endif
