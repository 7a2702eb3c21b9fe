/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Packets of legs: the primary's go to the client, the replicas' end here. A segment passes four steps: plan which output is new,
 * compute its digest, decide what becomes of the segment, and send what follows.
 */
#ifndef HOLDFAST_REPLICATE_LEG_H
#define HOLDFAST_REPLICATE_LEG_H

#include "replicate_client.h"
#include "replicate_digest.h"

/* A bulk segment of this length is not turned into an acknowledgement: the client's next packet carries it at less cost. */
#define REFLECT_MAX 3000
/* A RST may be as far behind what the leg was told last. */
#define RESET_BEHIND_MAX (1u << 20)

/* Splits a stretch at the last position for which the digest of the shown output is known. */
static __always_inline void plan_comparison(const struct connection *c, const struct leg_state *leg, struct take *t, __u32 new_nxt)
{
	__u32 best = t->nxt, base = c->isn + 1;
	__u64 expected = 0;
#pragma unroll
	for (int k = 0; k <= MARKS; k++) {
		const struct mark *mark = k < MARKS ? &c->marks[k & (MARKS - 1)] : &c->tip;
		__u32 at = (__u32)mark->position + base;
		__u32 is_inside = AFTER(at, best) & (!AFTER(at, t->to) | (at == new_nxt));
		__u64 mask = -(__u64)is_inside;
		barrier_var(mask);
		best = choose(is_inside, at, best);
		expected = (mark->digest & mask) | (expected & ~mask);
	}
	t->compare = best != t->nxt;
	t->expected = expected;
	t->compare_at = best;
	t->split = choose(t->compare & !AFTER(best, t->to), best, t->to);
}

/* Plans which part of a segment is new. */
__noinline int repl_plan(__u32 i)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct replicated_service *g = service_config(s);
	struct connection *c = connection_of(s);
	struct take *t = &s->take;
	if (!g || !c || i >= LEGS)
		return -1;
	__u32 compares = (g->flags & SERVICE_COMPARE) / SERVICE_COMPARE, payload = s->p.payload;
	__builtin_memset(t, 0, sizeof(*t));
	bpf_spin_lock(&c->lock);
	const struct leg_state *leg = &c->leg[LEG(i)];
	__u32 sequence = s->p.sequence + leg->sequence_offset, end = sequence + payload, nxt = leg->nxt;
	__u32 has_early = leg->early_from != leg->early_to;
	__u32 is_new = (payload > 0) & AFTER(end, nxt), is_beyond = AFTER(sequence, nxt);
	__u32 in_order = is_new & !is_beyond, is_early = is_new & is_beyond;
	/* Closes the gap, and ends within the stretch beyond it. */
	__u32 reaches = in_order & has_early & !BEFORE(end, leg->early_from), merge = reaches & !AFTER(end, leg->early_to);
	__u32 appends = has_early & !BEFORE(sequence, leg->early_from) & !AFTER(sequence, leg->early_to);
	t->nxt = nxt;
	t->base = c->isn + 1;
	t->sequence = sequence;
	t->in_order = in_order;
	t->merge = merge;
	t->is_early = is_early;
	t->reject = is_early & has_early & !appends;
	t->from = choose(in_order, nxt, choose(appends, leg->early_to, sequence));
	t->to = choose(merge, leg->early_from, end);
	t->to = choose((is_new & !t->reject) > 0, seq_max(t->to, t->from), t->from);
	t->split = t->to;
	__u32 new_nxt = choose(merge, leg->early_to, t->to);
	t->new_nxt = choose(in_order, new_nxt, nxt);
	if (compares & in_order & !(leg->flags & LEG_DIVERGED))
		plan_comparison(c, leg, t, new_nxt);
	bpf_spin_unlock(&c->lock);
	t->hashes = compares & (t->to != t->from);
	return 0;
}

/* Computes the digests of the planned stretch. */
__noinline int repl_hash_take(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct take *t = &s->take;
	if (!t->hashes)
		return 0;
	__u32 offset = s->p.l4 + s->p.header - t->sequence, failed;
	failed = repl_hash(skb, offset + t->from, t->split - t->from, t->from - t->base) != 0;
	t->first = s->hash;
	failed |= repl_hash(skb, offset + t->split, t->to - t->split, t->split - t->base) != 0;
	t->second = s->hash;
	if (failed)
		t->reject = 1;
	return 0;
}

enum {
	DO_PASS = 1,       /* the translated segment goes to the client */
	DO_TELL = 2,       /* the client is shown an acknowledgement, or the end of the output */
	DO_REFLECT = 4,    /* the leg is told what the client has */
	DO_PUSH = 8,       /* the other legs are told how far they may send */
	DO_WAKE = 16,      /* the primary is told how far it may send */
	DO_GONE = 32,      /* the leg does not serve the connection */
	DO_FINISHED = 64,  /* events */
	DO_OUTPUT_AFTER_FIN = 128,
	DO_DIVERGED = 256,
	DO_CLOSED = 512,
	IS_PRIMARY = 1024,
	IS_HELD_FIN = 2048,
	IS_COMPARED = 4096,
	IS_GAP = 8192,
	DO_EARLY_DIVERGED = 16384,
};

/* Adds the planned stretch to the leg's output. Returns 1 if the leg's digest differs from the expected one. */
static __always_inline __u32 commit_take(struct take *t, struct leg_state *leg)
{
	__u32 stale = (t->nxt != leg->nxt) & (t->in_order | t->is_early);
	t->reject |= stale;
	__u32 differs = 0;
	if (t->reject)
		return 0;
	__u64 sum = t->first + t->second;
	if (t->in_order) {
		__u64 whole = leg->digest + sum + (leg->early_digest & -(__u64)t->merge);
		__u64 at = choose(t->compare_at == t->split, 1, 0) ? leg->digest + t->first : whole;
		t->actual = at;
		differs = t->compare & (at != t->expected);
		leg->digest = whole;
		leg->nxt = t->new_nxt;
		leg->compared = choose(t->compare & !differs, t->compare_at, leg->compared);
		/* What the segment did not reach is still beyond a gap. */
		__u32 is_used = !AFTER(leg->early_from, leg->nxt);
		leg->early_from = choose(is_used, leg->nxt, leg->early_from);
		leg->early_to = choose(is_used, leg->nxt, leg->early_to);
		leg->early_digest &= ~-(__u64)is_used;
	} else if (t->is_early) {
		leg->early_from = choose(leg->early_from != leg->early_to, leg->early_from, t->from);
		leg->early_to = t->to;
		leg->early_digest += sum;
	}
	return differs;
}

/* Records the digest of the shown output at the primary's new end. */
static __always_inline void advance_tip(struct connection *c, const struct leg_state *primary, __u32 lag)
{
	__u32 at = (__u32)c->tip.position + c->isn + 1;
	if (!AFTER(primary->nxt, at))
		return;
	c->tip.position += primary->nxt - at;
	c->tip.digest = primary->digest;
	__u32 spacing = lag / MARKS + 1;
	__u64 last = c->marks[(c->mark_next - 1) & (MARKS - 1)].position;
	if (c->tip.position - last < spacing)
		return;
	c->marks[c->mark_next & (MARKS - 1)] = c->tip;
	c->mark_next++;
}

static __always_inline void edit_for_client(struct scratch *s, struct connection *c, const struct clamp *clamp, __u32 timestamp)
{
	struct edit *e = &s->edit;
	e->path = c->client;
	e->ack = clamp->ack;
	e->window = shown_window(c, clamp);
	e->timestamp = timestamp;
	e->echo = s->p.echo;
	e->sack = SACK_CLIP;
	e->sack_minus = 0;
	e->sack_limit = clamp->next_ack;
	e->strip_timestamps = !(c->options & HAS_TIMESTAMPS);
	e->clear_ecn = 1;
}

/* Compares the output of replicas that came before the primary's with it. Returns the legs that differ. */
static __always_inline __u32 compare_early_output(struct scratch *s, struct connection *c, const struct leg_state *primary)
{
	__u32 differing = 0;
#pragma unroll
	for (int j = 0; j < LEGS; j++) {
		struct leg_state *leg = &c->leg[j];
		__u32 is_level = IS_LIVE(s, j) & (j != s->primary) & (leg->nxt == primary->nxt) & !(leg->flags & LEG_DIVERGED);
		__u32 differs = is_level & (leg->digest != primary->digest);
		leg->compared = choose(is_level & !differs, leg->nxt, leg->compared);
		leg->flags |= FLAG(differs, LEG_DIVERGED);
		differing |= differs << j;
	}
	return differing;
}

/* Sees the leg's end of output, and the legs that ended earlier than it goes on. */
static __always_inline __u32 commit_fin(struct scratch *s, struct connection *c, struct leg_state *leg, __u32 fin_seq, __u32 fin)
{
	__u32 was_finished = leg->flags & LEG_FIN && s->take.nxt == leg->fin_seq, early = 0;
	if (fin) {
		leg->flags |= LEG_FIN;
		leg->fin_seq = fin_seq;
	}
#pragma unroll
	for (int j = 0; j < LEGS; j++)
		early |= (IS_LIVE(s, j) & is_finished(&c->leg[j]) & BEFORE(c->leg[j].fin_seq, leg->nxt)) << j;
	s->early_legs = early;
	__u32 passed = c->flags & CONNECTION_FIN_PASSED;
	return FLAG(is_finished(leg) & !was_finished, DO_FINISHED) | FLAG((early > 0) & !passed, DO_OUTPUT_AFTER_FIN);
}

static __always_inline void note_answer(struct leg_state *leg, __u32 client_nxt, __u64 now)
{
	__u64 since = leg->owes_since_ns;
	__u32 is_level = !BEFORE(leg->ack, client_nxt);
	if (since && is_level) {
		__u32 sample = (now - since) >> 10; /* about 1 us; the smoothing hides the difference */
		__u32 old = leg->round_trip_us;
		leg->round_trip_us = old ? old - old / 8 + sample / 8 : sample;
	}
	leg->owes_since_ns = is_level ? 0 : now;
}

/* Decides what becomes of a segment of leg i. Returns DO_ flags. */
__noinline int repl_decide(__u32 i)
{
	struct scratch *s = scratch();
	if (!s)
		return DO_GONE;
	struct replicated_service *g = service_config(s);
	struct connection *c = connection_of(s);
	__u32 roles = service_roles(s), lag = g ? g->lag : 0, compares = g ? (g->flags & SERVICE_COMPARE) / SERVICE_COMPARE : 0;
	struct clamp clamp;
	struct segment *p = &s->p;
	struct take *t = &s->take;
	if (!c || i >= LEGS)
		return DO_GONE;
	__u64 now = bpf_ktime_get_ns();
	__u32 fin = p->flags & TCP_FIN, payload = p->payload, has_content = (payload | fin) > 0;
	bpf_spin_lock(&c->lock);
	read_roles(s, c, roles);
	if (!IS_LIVE(s, i)) {
		bpf_spin_unlock(&c->lock);
		return DO_GONE;
	}
	struct leg_state *leg = &c->leg[LEG(i)];
	__u32 is_primary = i == s->primary, is_replica = is_primary ^ 1, sequence = p->sequence + leg->sequence_offset, end = sequence + payload;
	__u32 was_nxt = leg->nxt, was_ack = leg->ack, was_edge = leg->edge, was_sent = c->sent;
	__u32 ack = choose(AFTER(p->ack, c->client_nxt), leg->ack, p->ack);
	leg->ack = seq_max(leg->ack, ack);
	leg->edge = seq_max(leg->edge, ack + (p->window << (leg->scale & 15)));
	leg->timestamp = choose(p->timestamp_at > 0, seq_max(leg->timestamp, p->timestamp), leg->timestamp);
	note_answer(leg, c->client_nxt, now);
	__u32 differs = commit_take(t, leg), reject = t->reject;
	leg->flags |= FLAG(differs, LEG_DIVERGED);
	__u32 what = FLAG(differs, DO_DIVERGED) | FLAG(t->compare & !reject, IS_COMPARED) | FLAG(reject, IS_GAP);
	what |= commit_fin(s, c, leg, end, fin);
	/* Output of a sound leg proves that others have ended too early. They leave the connection at once, so that this very segment can
	 * reach the client: the leg would repeat it only after a timeout.
	 */
	c->present &= ~choose((what & DO_OUTPUT_AFTER_FIN) > 0 && !(leg->flags & LEG_DIVERGED), s->early_legs, 0);
	read_roles(s, c, roles);
	is_primary = i == s->primary;
	is_replica = is_primary ^ 1;
	what |= FLAG(is_primary, IS_PRIMARY);
	s->early_diverged = 0;
	if (is_primary) {
		advance_tip(c, leg, lag);
		if (compares & AFTER(leg->nxt, was_nxt))
			s->early_diverged = compare_early_output(s, c, leg);
		what |= FLAG(s->early_diverged > 0, DO_EARLY_DIVERGED);
		c->probing &= -(__u32)!AFTER(leg->nxt, was_nxt);
	}
	find_clamp(s, c, i, &clamp);
	__u32 news = AFTER(clamp.ack, c->shown_ack) | AFTER(clamp.edge, c->shown_edge);
	__u32 probe = !has_content & (sequence != was_nxt);
	/* Also the answer to what the client sends again because an acknowledgement was lost, and to its probes. */
	__u32 repeats = !has_content & (p->ack == was_ack) & !AFTER(leg->edge, was_edge) & (s->low == i);
	/* A leg that lagged when it was promoted catches up without the client. */
	__u32 fin_passed = c->flags & CONNECTION_FIN_PASSED;
	__u32 is_old = has_content & !AFTER(end + (fin & fin_passed), c->client_ack);
	__u32 passes_primary = is_primary & !reject & !is_old & ((payload > 0) | (fin & fin_passed) | news | probe | repeats);
	__u32 passes_replica = is_replica & !has_content & (news | (repeats & !probe));
	__u32 passes = passes_primary | passes_replica;
	what |= FLAG(passes, DO_PASS) | FLAG(news & !passes, DO_TELL) | FLAG((what & DO_FINISHED) > 0, DO_TELL);
	__u32 could = aligned_ack(s, c, i, c->client_ack);
	__u32 again = has_content & !AFTER(end + fin, was_nxt + (fin & is_finished(leg)));
	__u32 is_due = AFTER(could, leg->told) & ((payload < REFLECT_MAX) | (c->client_ack == c->sent));
	/* After a loss, a replica repeats the first segment that was not acknowledged, and nothing else until it hears more. If it was told
	 * less than it could be, these bytes are all of that segment; so it is told exactly from here on.
	 */
	leg->told = choose(is_replica & again, seq_max(leg->told, told_ack(leg, c->client_ack)), leg->told);
	__u32 reflects = (is_replica & (probe | again | t->is_early | is_due)) | is_old | reject;
	what |= FLAG(reflects, DO_REFLECT);
	__u32 held = (c->flags & CONNECTION_HELD) > 0;
	what |= FLAG(is_replica & held & (c->client_ack == c->sent) & AFTER(leg->nxt, was_nxt), DO_WAKE);
	/* Replicas whose clamp the primary's end lifts. */
	what |= FLAG(is_primary & ((what & DO_FINISHED) > 0) & !fin_passed, DO_PUSH);
	what |= FLAG((fin > 0) & !fin_passed, IS_HELD_FIN);
	__u32 is_probing = is_replica & probe & (c->sent == leg->nxt) & AFTER(c->client_edge, c->sent);
	c->probing |= is_probing << i;
	/* The client drops what is older than it has seen, and two processors may overtake each other: only the primary's packets advance
	 * the timestamp.
	 */
	__u32 shown = c->timestamp_shown;
	shown = choose(is_primary & (p->timestamp_at > 0), seq_max(p->timestamp + leg->timestamp_offset, shown), shown);
	if (passes) {
		c->sent = choose(passes_primary & (payload > 0), seq_max(c->sent, end), c->sent);
		c->timestamp_shown = shown;
		c->shown_ack = seq_max(c->shown_ack, clamp.ack);
		c->shown_edge = seq_max(c->shown_edge, clamp.edge);
		edit_for_client(s, c, &clamp, shown);
		s->edit.sequence = choose((has_content | probe) & is_primary, sequence, was_sent);
		s->edit.flags = (p->flags & ~(TCP_ECE | TCP_CWR | TCP_FIN)) | choose(fin_passed > 0, fin, 0);
	}
	if (is_over(s, c)) {
		c->flags |= CONNECTION_CLOSED;
		what |= DO_CLOSED;
	}
	bpf_spin_unlock(&c->lock);
	return what;
}

/* Number of input bytes that a leg has acknowledged, without the client's FIN. */
static __always_inline __u32 acknowledged_input(const struct connection *c, __u32 i)
{
	__u32 end = choose((c->flags & CONNECTION_CLIENT_FIN) > 0, seq_min(c->client_nxt, c->client_fin_seq), c->client_nxt);
	return seq_min(c->leg[LEG(i)].ack, end) - c->client_isn - 1;
}

static __always_inline void report_leg(struct scratch *s, __u32 i, __u8 kind, __u32 legs)
{
	struct connection *c = connection_of(s);
	struct replication_event *event = c ? new_event(s, kind) : 0;
	if (!event)
		return;
	event->leg = i;
	event->legs = legs;
	event->acknowledged = acknowledged_input(c, i);
	bpf_ringbuf_submit(event, 0);
}

/* Reports that the output of leg i, with this digest, differs from the primary's before `at`. */
static __always_inline void report_divergence(struct scratch *s, __u32 i, __u32 at, __u64 expected, __u64 actual)
{
	struct connection *c = connection_of(s);
	struct replication_event *event = c ? new_event(s, REPLICATION_DIVERGED) : 0;
	if (!event)
		return;
	__u32 primary = s->primary & (LEGS - 1), low = (__u32)c->tip.position + c->isn + 1;
	event->leg = i;
	event->known = 1u << LEG(i) | 1u << primary;
	event->position = c->tip.position - (low - at);
	event->digest[primary] = expected;
	event->digest[LEG(i)] = actual;
	bpf_ringbuf_submit(event, 0);
}

/* Reports replicas whose output came before the primary's, and differs. */
__noinline int repl_report_early(void)
{
	struct scratch *s = scratch();
	struct connection *c = s ? connection_of(s) : 0;
	if (!c)
		return -1;
	const struct leg_state *primary = &c->leg[LEG(s->primary)];
	for (__u32 i = 0; i < LEGS; i++) {
		if (!(s->early_diverged >> i & 1))
			continue;
		count(REPL_DIVERGED);
		report_divergence(s, i, primary->nxt, primary->digest, c->leg[LEG(i)].digest);
	}
	return 0;
}

__noinline int repl_report(__u32 i, __u32 what)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	if (what & DO_FINISHED)
		report_leg(s, i, REPLICATION_LEG_FINISHED, 0);
	if (what & DO_OUTPUT_AFTER_FIN)
		report_leg(s, i, REPLICATION_OUTPUT_AFTER_FIN, s->early_legs);
	if (what & DO_DIVERGED) {
		count(REPL_DIVERGED);
		report_divergence(s, i, s->take.compare_at, s->take.expected, s->take.actual);
	}
	if (what & DO_EARLY_DIVERGED)
		repl_report_early();
	if (what & DO_CLOSED)
		report_closed(s);
	return 0;
}

static __always_inline void count_leg_packet(__u32 what)
{
	count(what & IS_PRIMARY ? REPL_PRIMARY_PACKETS : REPL_ABSORBED);
	if (what & IS_HELD_FIN)
		count(REPL_HELD_FINS);
	if (what & IS_COMPARED)
		count(REPL_COMPARED);
	if (what & IS_GAP)
		count(REPL_GAPS);
}

/* Passes the edited segment to the client. */
static __always_inline int pass_to_client(struct __sk_buff *skb, struct scratch *s, const struct replicated_service *g, __u32 is_last)
{
	struct edit *e = &s->edit;
	__builtin_memcpy(e->addresses, g->endpoint.address, 16);
	__builtin_memcpy(e->addresses + 16, s->key.client, 16);
	e->source_port = g->endpoint.port;
	e->destination_port = s->key.client_port;
	__u32 ifindex = e->path.ifindex;
	if (repl_apply(skb))
		return TC_ACT_SHOT;
	if (is_last)
		return bpf_redirect(ifindex, 0);
	bpf_clone_redirect(skb, ifindex, 0);
	return 0;
}

static __always_inline int leg_segment(struct __sk_buff *skb, struct scratch *s, const struct replicated_service *g, __u32 i)
{
	if (repl_plan(i))
		return TC_ACT_SHOT;
	repl_hash_take(skb);
	__u32 what = repl_decide(i);
	if (what & DO_GONE)
		return TC_ACT_SHOT;
	count_leg_packet(what);
	if (what & (DO_FINISHED | DO_OUTPUT_AFTER_FIN | DO_DIVERGED | DO_EARLY_DIVERGED | DO_CLOSED))
		repl_report(i, what);
	__u32 follows = what & (DO_TELL | DO_REFLECT | DO_PUSH | DO_WAKE);
	if (what & DO_PASS && !follows)
		return pass_to_client(skb, s, g, 1);
	if (what & DO_PASS)
		pass_to_client(skb, s, g, 0);
	if (what & DO_TELL) {
		count(REPL_SHOWN_ACKS);
		repl_tell_client(skb, 1);
	}
	if (what & DO_REFLECT) {
		count(REPL_REFLECTED);
		repl_push(skb, i);
	}
	if (what & DO_WAKE)
		repl_push(skb, s->primary);
	if (what & DO_PUSH)
		for (__u32 j = 0; j < LEGS; j++)
			if (j != i)
				repl_push(skb, j);
	return TC_ACT_SHOT;
}

/* Takes a leg's RST, which is never passed on: user space decides. */
__noinline int repl_leg_reset(__u32 i)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct connection *c = connection_of(s);
	__u32 roles = service_roles(s), is_reported = 0;
	if (!c || i >= LEGS)
		return -1;
	bpf_spin_lock(&c->lock);
	read_roles(s, c, roles);
	struct leg_state *leg = &c->leg[LEG(i)];
	__u32 sequence = s->p.sequence + leg->sequence_offset;
	__u32 is_plausible = !BEFORE(sequence, leg->told - RESET_BEHIND_MAX) & !AFTER(sequence, c->client_edge + 1);
	is_reported = is_plausible & IS_LIVE(s, i) & !(leg->flags & LEG_RESET);
	leg->flags |= FLAG(is_reported, LEG_RESET);
	bpf_spin_unlock(&c->lock);
	if (!is_reported)
		return 0;
	count(REPL_RESETS);
	report_leg(s, i, REPLICATION_LEG_RESET, 0);
	return 0;
}

/* Takes a packet of a leg. */
__noinline int repl_from_leg(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	if (!s)
		return TC_ACT_SHOT;
	struct replicated_service *g = service_config(s);
	__u32 i = s->leg;
	__u8 flags = s->p.flags;
	if (!g || i >= LEGS)
		return TC_ACT_SHOT;
	if (!connection_of(s)) {
		if (!half_open_of(s))
			return TC_ACT_UNSPEC;
		if (flags & (TCP_SYN | TCP_RST) && flags & TCP_ACK)
			leg_answer(s, i);
		return TC_ACT_SHOT;
	}
	if (flags & TCP_RST) {
		repl_leg_reset(i);
		return TC_ACT_SHOT;
	}
	if (flags & TCP_SYN) {
		/* The leg did not receive the end of the handshake. */
		repl_push(skb, i);
		return TC_ACT_SHOT;
	}
	return leg_segment(skb, s, g, i);
}

#endif
