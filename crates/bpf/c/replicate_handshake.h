/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Handshakes: a client's SYN goes to all live legs; their answers are collected, and user space lets the client see one.
 */
#ifndef HOLDFAST_REPLICATE_HANDSHAKE_H
#define HOLDFAST_REPLICATE_HANDSHAKE_H

#include "replicate_rules.h"

static __always_inline struct half_open *half_open_of(const struct scratch *s)
{
	return bpf_map_lookup_elem(&repl_half_open, &s->key);
}

struct strip_walk {
	__u32 at, end;
	__u32 left; /* bytes of the present option */
	__u32 blank;
};

/* Replaces options that would differ between servers, or tie the connection to one of them, by NOP: all but MSS, window scale, SACK
 * permitted and timestamps.
 */
static long strip_byte(__u32 index, struct strip_walk *walk)
{
	struct scratch *s = scratch();
	__u32 at = walk->at;
	if (!s || at >= walk->end)
		return 1;
	if (!walk->left) {
		__u8 kind = s->original[at & 63], size = s->original[(at + 1) & 63];
		if (!kind)
			return 1;
		/* A malformed option ends the list: servers would disagree about the rest. */
		__u32 is_malformed = size < 2 || at + size > walk->end;
		__u32 is_kept = kind == 2 || kind == 3 || (kind == 4 && s->p.permit_at) || (kind == 8 && s->p.timestamp_at);
		walk->left = kind == 1 ? 1 : is_malformed ? walk->end - at : size;
		walk->blank = is_malformed || !is_kept;
	}
	if (walk->blank)
		s->original[at & 63] = 1;
	walk->left--;
	walk->at = at + 1;
	return 0;
}

static __always_inline void strip_options(struct scratch *s, __u32 service_flags)
{
	struct strip_walk walk = {.at = 20, .end = s->p.header};
	if (service_flags & SERVICE_STRIP_TIMESTAMPS)
		s->p.timestamp_at = 0;
	if (service_flags & SERVICE_STRIP_SACK)
		s->p.permit_at = 0;
	bpf_loop(40, strip_byte, &walk, 0);
}

static __always_inline void read_client_offer(const struct scratch *s, struct half_open *h)
{
	h->client_timestamp = s->p.timestamp;
	h->client_scale = s->p.scale;
	h->client_options = FLAG(s->p.timestamp_at != 0, HAS_TIMESTAMPS) | FLAG(s->p.permit_at != 0, HAS_SACK) |
			    FLAG(s->p.has_scale, HAS_SCALE);
	h->client.ifindex = s->made.path.ifindex;
	__builtin_memcpy(h->client.link, s->link + 8, 6);
	__builtin_memcpy(h->client.link + 6, s->link + 2, 6);
}

/* Returns the scale of the windows that legs are told. The send clamp is exact to this power of two, in bytes. */
static __always_inline __u8 leg_scale(__u8 client_scale)
{
	return client_scale > LEG_SCALE_MAX ? LEG_SCALE_MAX : client_scale;
}

static __always_inline int send_syn(struct __sk_buff *skb, struct scratch *s, const struct replicated_service *g, __u32 i)
{
	struct edit *e = &s->edit;
	const struct leg_path *leg = &g->leg[LEG(i)];
	__builtin_memset(e, 0, sizeof(*e));
	__builtin_memcpy(e->addresses, s->p.source, 16);
	__builtin_memcpy(e->addresses + 16, leg->endpoint.address, 16);
	e->path = leg->path;
	e->source_port = s->p.source_port;
	e->destination_port = leg->endpoint.port;
	e->sequence = s->p.sequence;
	e->window = s->p.window;
	e->timestamp = s->p.timestamp;
	__u32 scale_at = s->p.scale_at;
	if (scale_at && scale_at <= 58)
		s->original[scale_at] = leg_scale(s->p.scale);
	/* Offers ECN: a Linux server then acknowledges a segment with CWR at once, whoever the client is. */
	e->flags = TCP_SYN | TCP_ECE | TCP_CWR;
	if (repl_apply(skb))
		return -1;
	return bpf_clone_redirect(skb, e->path.ifindex, 0);
}

/* Makes the SYN-ACK for the client. The connection's initial sequence number and timestamp are the primary's. */
__noinline int repl_show_syn_ack(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct replicated_service *g = service_config(s);
	struct half_open *h = half_open_of(s);
	if (!g || !h || h->state == HANDSHAKE_PENDING)
		return -1;
	__u32 live = h->live, primary = live >> 8 & (LEGS - 1), edge = h->leg[LEG(primary)].edge;
	struct made *m = &s->made;
	m->options = h->client_options;
	m->mss = 65535;
	m->scale = 0;
	__u32 roles = live;
#pragma unroll
	for (int i = 0; i < LEGS; i++) {
		const struct handshake_answer *leg = &h->leg[i];
		__u32 bit = roles >> i & 1;
		m->options &= choose(bit, leg->options, 0xff);
		m->mss = choose(bit & (leg->mss < m->mss), leg->mss, m->mss);
		m->scale = choose(bit & (leg->scale > m->scale), leg->scale, m->scale);
		edge = choose(bit, seq_min(edge, leg->edge), edge);
	}
	__u32 window = edge - h->client_isn - 1;
	m->sequence = h->leg[LEG(primary)].isn;
	m->ack = h->client_isn + 1;
	m->window = window > 65535 ? 65535 : window;
	m->timestamp = h->leg[LEG(primary)].timestamp;
	m->echo = h->client_timestamp;
	m->flags = TCP_SYN | TCP_ACK;
	m->path = h->client;
	h->state = HANDSHAKE_SHOWN;
	address_client(s, g);
	return send_made(skb, s);
}

/* Takes a client's SYN. */
__noinline int repl_client_syn(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct replicated_service *g = service_config(s);
	__u32 live = service_roles(s) & 0xf;
	if (!g)
		return -1;
	struct half_open *h = half_open_of(s);
	if (h && h->client_isn == s->p.sequence && h->state != HANDSHAKE_PENDING)
		return h->state == HANDSHAKE_SHOWN ? repl_show_syn_ack(skb) : 0;
	if (!live) {
		count(REPL_NO_LEG);
		return 0;
	}
	strip_options(s, g->flags);
	if (!h || h->client_isn != s->p.sequence) {
		struct half_open *fresh = (void *)s->blank;
		__builtin_memset(fresh, 0, sizeof(*fresh));
		fresh->client_isn = s->p.sequence;
		read_client_offer(s, fresh);
		fresh->attempts = 1;
		fresh->since_ns = bpf_ktime_get_ns();
		if (bpf_map_update_elem(&repl_half_open, &s->key, fresh, BPF_ANY))
			return -1;
	} else {
		h->attempts++;
		h->since_ns = bpf_ktime_get_ns();
	}
	for (__u32 i = 0; i < LEGS; i++)
		if (live >> i & 1 && !send_syn(skb, s, g, i))
			count(REPL_CLONES);
	return 0;
}

/* Decides whether all live legs have answered; reports the result. */
__noinline int repl_check_handshake(void)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct half_open *h = half_open_of(s);
	__u32 roles = service_roles(s), live = roles & 0xf, primary = roles >> 8 & (LEGS - 1);
	if (!h || !live || h->state != HANDSHAKE_PENDING)
		return -1;
	__u32 answered = *(volatile __u32 *)&h->answered, refused = *(volatile __u32 *)&h->refused;
	__u32 is_opened = (answered & live) == live;
	if (!is_opened && !refused)
		return 0;
	if (is_opened) {
		if (!__sync_bool_compare_and_swap(&h->state, HANDSHAKE_PENDING, HANDSHAKE_ANSWERED))
			return 0;
		if (!(live >> primary & 1))
			primary = live & 1 ? 0 : live & 2 ? 1 : live & 4 ? 2 : 3;
		h->live = live | primary << 8;
	}
	struct replication_event *event = new_event(s, is_opened ? REPLICATION_OPENED : REPLICATION_REFUSED);
	if (!event)
		return -1;
	event->answered = answered;
	event->legs = refused;
	bpf_ringbuf_submit(event, 0);
	return 0;
}

/* Takes a leg's SYN-ACK, or its refusal. */
static __always_inline int leg_answer(struct scratch *s, __u32 i)
{
	struct half_open *h = half_open_of(s);
	if (!h || h->state != HANDSHAKE_PENDING || s->p.ack != h->client_isn + 1 || i >= LEGS)
		return -1;
	if (s->p.flags & TCP_RST) {
		__sync_fetch_and_or(&h->refused, 1u << i);
		return repl_check_handshake();
	}
	if (h->answered >> i & 1)
		return 0;
	struct handshake_answer *leg = &h->leg[LEG(i)];
	leg->isn = s->p.sequence;
	leg->timestamp = s->p.timestamp;
	leg->edge = s->p.ack + s->p.window;
	leg->mss = s->p.mss ? s->p.mss : 536;
	leg->scale = s->p.scale;
	leg->options = FLAG(s->p.timestamp_at != 0, HAS_TIMESTAMPS) | FLAG(s->p.permit_at != 0, HAS_SACK) |
		       FLAG(s->p.has_scale, HAS_SCALE);
	__sync_fetch_and_or(&h->answered, 1u << i);
	return repl_check_handshake();
}

static __always_inline void establish_leg(struct connection *c, const struct half_open *h, __u32 i)
{
	const struct handshake_answer *from = &h->leg[LEG(i)];
	struct leg_state *leg = &c->leg[LEG(i)];
	leg->sequence_offset = c->isn - from->isn;
	leg->timestamp_offset = c->timestamp_shown - from->timestamp;
	leg->nxt = leg->told = leg->compared = c->isn + 1;
	leg->early_from = leg->early_to = leg->nxt;
	leg->ack = c->client_isn + 1;
	leg->edge = from->edge;
	leg->timestamp = from->timestamp;
	leg->mss = from->mss;
	leg->scale = choose(c->options & HAS_SCALE && from->options & HAS_SCALE, from->scale, 0);
	leg->client_scale = choose((from->options & HAS_SCALE) != 0, leg_scale(h->client_scale), 0);
	leg->options = from->options;
}

/* Makes the connection when its client completes the handshake. Returns 0 if there is a connection. */
__noinline int repl_establish(void)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct half_open *h = half_open_of(s);
	if (!h || h->state != HANDSHAKE_SHOWN)
		return -1;
	__u32 primary = h->live >> 8 & (LEGS - 1), live = h->live & 0xf;
	struct connection *c = (void *)s->blank;
	if (s->p.ack != h->leg[LEG(primary)].isn + 1 || s->p.sequence - h->client_isn - 1 > 65535)
		return -1;
	__builtin_memset(s->blank, 0, sizeof(s->blank));
	c->client_isn = h->client_isn;
	c->isn = h->leg[LEG(primary)].isn;
	c->timestamp_shown = h->leg[LEG(primary)].timestamp;
	c->present = live;
	c->client = h->client;
	c->client_timestamp = h->client_timestamp;
	c->options = h->client_options;
	c->mss = 65535;
	for (__u32 i = 0; i < LEGS; i++) {
		const struct handshake_answer *leg = &h->leg[i];
		if (!(live >> i & 1))
			continue;
		c->options &= leg->options;
		if (leg->scale > c->scale)
			c->scale = leg->scale;
		if (leg->mss < c->mss)
			c->mss = leg->mss;
	}
	for (__u32 i = 0; i < LEGS; i++)
		establish_leg(c, h, i);
	if (!(c->options & HAS_SCALE))
		c->scale = 0;
	c->client_scale = c->options & HAS_SCALE ? h->client_scale : 0;
	c->sent = c->client_ack = c->client_edge = c->isn + 1;
	c->shown_ack = c->shown_edge = c->client_nxt = c->client_isn + 1;
	c->shown_edge += 65535;
	if (bpf_map_update_elem(&repl_connections, &s->key, c, BPF_NOEXIST)) {
		count(REPL_TABLE_FULL);
		return -1;
	}
	bpf_map_delete_elem(&repl_half_open, &s->key);
	return 0;
}

#endif
