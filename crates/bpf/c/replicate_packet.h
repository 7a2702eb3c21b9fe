/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Reading, translating and making segments. All accesses go through the scratch memory: no packet pointers. Checksums change by
 * difference, which is right for whole checksums and for partial ones (GSO, veth).
 */
#ifndef HOLDFAST_REPLICATE_PACKET_H
#define HOLDFAST_REPLICATE_PACKET_H

#include "replicate_maps.h"

#define L4_V4 (ETH_HLEN + 20)
#define L4_V6 (ETH_HLEN + 40)
#define CHECKSUM_AT 16
#define ECN_MASK 3
/* BPF_F_IPV6 of Linux 6.16: the sum of a whole packet does not change with addresses of IPv6. */
#define CHECKSUM_IPV6 (1ull << 7)

static __always_inline __u32 get32(const __u8 *at)
{
	return ((__u32)at[0] << 24) | ((__u32)at[1] << 16) | ((__u32)at[2] << 8) | at[3];
}

static __always_inline void put32(__u8 *at, __u32 value)
{
	at[0] = value >> 24;
	at[1] = value >> 16;
	at[2] = value >> 8;
	at[3] = value;
}

static __always_inline void put16(__u8 *at, __u16 value)
{
	at[0] = value >> 8;
	at[1] = value;
}

static __always_inline __u16 fold16(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static __always_inline void map_v4_address(__u8 *to, const __u8 *from)
{
	__builtin_memset(to, 0, 10);
	to[10] = to[11] = 0xff;
	__builtin_memcpy(to + 12, from, 4);
}

struct option_walk {
	__u32 at, end;
};

static long read_option(__u32 index, struct option_walk *walk)
{
	struct scratch *s = scratch();
	__u32 at = walk->at;
	if (!s || at >= walk->end || at > 58)
		return 1;
	struct segment *p = &s->p;
	__u8 kind = s->original[at & 63];
	if (!kind)
		return 1;
	if (kind == 1) {
		walk->at = at + 1;
		return 0;
	}
	__u8 size = s->original[(at + 1) & 63];
	if (size < 2 || at + size > walk->end)
		return 1;
	if (kind == 2 && size == 4)
		p->mss_at = at + 2;
	else if (kind == 3 && size == 3)
		p->scale_at = at + 2;
	else if (kind == 4 && size == 2)
		p->permit_at = at;
	else if (kind == 5) {
		p->sack_at = at + 2;
		p->sack_count = (size - 2) / 8;
	} else if (kind == 8 && size == 10)
		p->timestamp_at = at + 2;
	walk->at = at + size;
	return 0;
}

static __always_inline void read_options(struct scratch *s, __u32 header)
{
	struct segment *p = &s->p;
	if (header == 32 && *(__u32 *)(s->original + 20) == bpf_htonl(0x0101080a)) {
		p->timestamp_at = 24;
	} else if (header > 20) {
		struct option_walk walk = {.at = 20, .end = header};
		bpf_loop(40, read_option, &walk, 0);
	}
	__u32 timestamp = p->timestamp_at, mss = p->mss_at, scale = p->scale_at;
	if (timestamp && timestamp <= 52) {
		p->timestamp = get32(s->original + timestamp);
		p->echo = get32(s->original + timestamp + 4);
	}
	if (mss && mss <= 58)
		p->mss = (s->original[mss] << 8) | s->original[mss + 1];
	if (scale && scale <= 58) {
		p->has_scale = 1;
		p->scale = s->original[scale] > 14 ? 14 : s->original[scale];
	}
}

enum parse_outcome { NOT_TCP, IS_TCP, IS_MALFORMED };

/* Reads addresses; returns the length of the datagram in bytes from its network header on, or 0. */
static __always_inline __u32 read_network(struct __sk_buff *skb, struct scratch *s)
{
	struct segment *p = &s->p;
	if (p->ethertype == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)(s->link + 16);
		if (bpf_skb_load_bytes(skb, ETH_HLEN, ip, 20))
			return 0;
		/* Fragments and IP options: no server of TCP sends them today. */
		if (ip->version != 4 || ip->ihl != 5 || ip->protocol != IPPROTO_TCP || ip->frag_off & bpf_htons(0x3fff))
			return 0;
		map_v4_address(p->source, (__u8 *)&ip->saddr);
		map_v4_address(p->destination, (__u8 *)&ip->daddr);
		p->traffic_class = ip->tos;
		p->l4 = L4_V4;
		__u32 length = bpf_ntohs(ip->tot_len);
		return length ? length : skb->len - ETH_HLEN; /* 0: BIG TCP */
	}
	if (p->ethertype == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (void *)(s->link + 16);
		if (bpf_skb_load_bytes(skb, ETH_HLEN, ip, 40) || ip->nexthdr != IPPROTO_TCP)
			return 0;
		__builtin_memcpy(p->source, &ip->saddr, 16);
		__builtin_memcpy(p->destination, &ip->daddr, 16);
		p->traffic_class = ip->priority << 4 | ip->flow_lbl[0] >> 4;
		p->l4 = L4_V6;
		__u32 length = bpf_ntohs(ip->payload_len);
		return length ? length + 40 : skb->len - ETH_HLEN;
	}
	return 0;
}

/* Reads a segment into the scratch memory. */
__noinline int repl_parse(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	if (!s)
		return NOT_TCP;
	struct segment *p = &s->p;
	__builtin_memset(p, 0, sizeof(*p));
	/* 14 bytes from offset 2 on, so that the network header is aligned. */
	if (bpf_skb_load_bytes(skb, 0, s->link + 2, ETH_HLEN))
		return NOT_TCP;
	p->ethertype = *(__u16 *)(s->link + 14);
	__u32 length = read_network(skb, s);
	if (!length)
		return NOT_TCP;
	__builtin_memcpy(p->addresses, p->source, 32);
	__u32 l4 = p->l4;
	if (bpf_skb_load_bytes(skb, l4, s->original, 20))
		return IS_MALFORMED;
	__u32 header = (s->original[12] >> 4) * 4;
	if (header < 20 || header > 60 || length > skb->len - ETH_HLEN || length < l4 - ETH_HLEN + header)
		return IS_MALFORMED;
	if (bpf_skb_load_bytes(skb, l4, s->original, header))
		return IS_MALFORMED;
	__builtin_memcpy(s->current, s->original, 64);
	p->header = header;
	p->source_port = *(__u16 *)s->original;
	p->destination_port = *(__u16 *)(s->original + 2);
	p->sequence = bpf_ntohl(*(__u32 *)(s->original + 4));
	p->ack = bpf_ntohl(*(__u32 *)(s->original + 8));
	p->flags = s->original[13];
	p->window = (s->original[14] << 8) | s->original[15];
	p->payload = length - (l4 - ETH_HLEN) - header;
	read_options(s, header);
	return IS_TCP;
}

/* Moves, clips or blanks SACK blocks. An invalid block (without length, at the acknowledgement) is ignored by TCP. */
static __always_inline void edit_sack(struct scratch *s, const struct edit *e)
{
	__u32 at = s->p.sack_at, blank = e->sack == SACK_BLANK, clip = e->sack == SACK_CLIP;
	for (int i = 0; i < 4; i++, at += 8) {
		if (i >= s->p.sack_count || at < 20 || at > 52)
			break;
		__u32 left = get32(s->original + at) - e->sack_minus, right = get32(s->original + at + 4) - e->sack_minus;
		right = choose(clip, seq_min(right, e->sack_limit), right);
		__u32 empty = blank | (clip & ~(BEFORE(left, right) & AFTER(right, e->ack)) & 1);
		put32(s->next + at, choose(empty, e->ack, left));
		put32(s->next + at + 4, choose(empty, e->ack, right));
	}
}

static __always_inline void edit_header(struct scratch *s, const struct edit *e)
{
	__u32 timestamp = s->p.timestamp_at;
	__builtin_memcpy(s->next, s->original, 64);
	*(__u16 *)s->next = e->source_port;
	*(__u16 *)(s->next + 2) = e->destination_port;
	put32(s->next + 4, e->sequence);
	put32(s->next + 8, e->ack);
	s->next[13] = e->flags;
	put16(s->next + 14, e->window);
	if (timestamp >= 22 && timestamp <= 52) {
		if (e->strip_timestamps) {
			for (int i = 0; i < 10; i++)
				*(volatile __u8 *)(s->next + timestamp - 2 + i) = 1;
		} else {
			put32(s->next + timestamp, e->timestamp);
			put32(s->next + timestamp + 4, e->echo);
		}
	}
	if (s->p.sack_at)
		edit_sack(s, e);
}

static __always_inline int store_addresses(struct __sk_buff *skb, struct scratch *s, __s64 difference)
{
	__u32 l4 = s->p.l4;
	if (s->p.ethertype == bpf_htons(ETH_P_IP)) {
		bpf_l4_csum_replace(skb, l4 + CHECKSUM_AT, 0, difference, BPF_F_PSEUDO_HDR);
		bpf_l3_csum_replace(skb, ETH_HLEN + 10, 0, difference, 0);
		if (bpf_skb_store_bytes(skb, ETH_HLEN + 12, s->edit.addresses + 12, 4, 0))
			return -1;
		return bpf_skb_store_bytes(skb, ETH_HLEN + 16, s->edit.addresses + 28, 4, 0);
	}
	if (bpf_l4_csum_replace(skb, l4 + CHECKSUM_AT, 0, difference, BPF_F_PSEUDO_HDR | CHECKSUM_IPV6))
		bpf_l4_csum_replace(skb, l4 + CHECKSUM_AT, 0, difference, BPF_F_PSEUDO_HDR);
	return bpf_skb_store_bytes(skb, ETH_HLEN + 8, s->edit.addresses, 32, 0);
}

/* Clears the ECN field: the client has not negotiated it. */
static __always_inline void clear_ecn(struct __sk_buff *skb, struct scratch *s)
{
	__u8 was = s->p.traffic_class;
	if (!(was & ECN_MASK))
		return;
	if (s->p.ethertype == bpf_htons(ETH_P_IP)) {
		__u8 is = was & ~ECN_MASK;
		bpf_l3_csum_replace(skb, ETH_HLEN + 10, bpf_htons(0x4500 | was), bpf_htons(0x4500 | is), 2);
		bpf_skb_store_bytes(skb, ETH_HLEN + 1, &is, 1, 0);
	} else {
		__u8 is = s->link[17] & ~(ECN_MASK << 4);
		bpf_skb_store_bytes(skb, ETH_HLEN + 1, &is, 1, BPF_F_RECOMPUTE_CSUM);
	}
	s->p.traffic_class = was & ~ECN_MASK;
}

/* Carries out the edit in the scratch memory. Returns 0, or -1 if the packet is unusable. */
__noinline int repl_apply(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct edit *e = &s->edit;
	__u32 header = s->p.header, l4 = s->p.l4;
	if (header < 20 || header > 60 || (l4 != L4_V4 && l4 != L4_V6))
		return -1;
	edit_header(s, e);
	if (bpf_skb_load_bytes(skb, l4 + CHECKSUM_AT, s->next + CHECKSUM_AT, 2))
		return -1;
	*(__u16 *)(s->current + CHECKSUM_AT) = *(__u16 *)(s->next + CHECKSUM_AT);
	__s64 changed = bpf_csum_diff((__be32 *)s->current, header, (__be32 *)s->next, header, 0);
	if (bpf_skb_store_bytes(skb, l4, s->next, header, 0))
		return -1;
	bpf_l4_csum_replace(skb, l4 + CHECKSUM_AT, 0, changed, 0);
	/* The prefixes of mapped addresses cancel out. */
	__s64 addresses = bpf_csum_diff((__be32 *)s->p.addresses, 32, (__be32 *)e->addresses, 32, 0);
	if (store_addresses(skb, s, addresses))
		return -1;
	if (e->clear_ecn)
		clear_ecn(skb, s);
	bpf_skb_store_bytes(skb, 0, e->path.link, 12, 0);
	__builtin_memcpy(s->current, s->next, 64);
	__builtin_memcpy(s->p.addresses, e->addresses, 32);
	return 0;
}

static __always_inline __u32 made_options(const struct made *m, __u8 *at)
{
	__u32 length = 0;
	if (m->flags & TCP_SYN) {
		at[0] = 2;
		at[1] = 4;
		put16(at + 2, m->mss);
		at[4] = at[5] = at[6] = at[7] = 1;
		if (m->options & HAS_SACK) {
			at[4] = 4;
			at[5] = 2;
		}
		at[8] = at[9] = at[10] = at[11] = 1;
		if (m->options & HAS_SCALE) {
			at[9] = 3;
			at[10] = 3;
			at[11] = m->scale;
		}
		length = 12;
	}
	if (m->options & HAS_TIMESTAMPS) {
		__u8 *timestamps = m->flags & TCP_SYN ? at + 12 : at;
		timestamps[0] = timestamps[1] = 1;
		timestamps[2] = 8;
		timestamps[3] = 10;
		put32(timestamps + 4, m->timestamp);
		put32(timestamps + 8, m->echo);
		length += 12;
	}
	return length;
}

static __always_inline void made_network(struct scratch *s, const struct made *m, __u32 length)
{
	if (s->p.ethertype == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)(s->frame + 16);
		ip->version = 4;
		ip->ihl = 5;
		ip->tot_len = bpf_htons(20 + length);
		ip->frag_off = bpf_htons(0x4000);
		ip->ttl = 64;
		ip->protocol = IPPROTO_TCP;
		__builtin_memcpy(&ip->saddr, m->addresses + 12, 4);
		__builtin_memcpy(&ip->daddr, m->addresses + 28, 4);
		ip->check = ~fold16(bpf_csum_diff(0, 0, (__be32 *)ip, 20, 0));
	} else {
		struct ipv6hdr *ip = (void *)(s->frame + 16);
		ip->version = 6;
		ip->payload_len = bpf_htons(length);
		ip->nexthdr = IPPROTO_TCP;
		ip->hop_limit = 64;
		__builtin_memcpy(&ip->saddr, m->addresses, 32);
	}
}

/* Replaces the packet by the segment without data in the scratch memory. Returns 0, or -1 if the packet is unusable. */
__noinline int repl_make(struct __sk_buff *skb)
{
	struct scratch *s = scratch();
	if (!s)
		return -1;
	struct made *m = &s->made;
	__u32 v4 = s->p.ethertype == bpf_htons(ETH_P_IP);
	__u32 l4 = v4 ? L4_V4 : L4_V6;
	__builtin_memset(s->frame, 0, sizeof(s->frame));
	__u8 *tcp = v4 ? s->frame + 2 + L4_V4 : s->frame + 2 + L4_V6;
	__u32 length = 20 + made_options(m, tcp + 20);
	if (bpf_skb_change_tail(skb, l4 + length, 0))
		return -1;
	/* A device that completes the checksum wants the sum of the pseudo header alone; the kernel then ignores other changes. */
	__u16 check = 0, changed = 0;
	bpf_skb_load_bytes(skb, l4 + CHECKSUM_AT, &check, 2);
	bpf_l4_csum_replace(skb, l4 + CHECKSUM_AT, 0, 0x5a5a, 0);
	bpf_skb_load_bytes(skb, l4 + CHECKSUM_AT, &changed, 2);
	__builtin_memcpy(s->frame + 2, m->path.link, 12);
	*(__u16 *)(s->frame + 14) = s->p.ethertype;
	made_network(s, m, length);
	*(__u16 *)tcp = m->source_port;
	*(__u16 *)(tcp + 2) = m->destination_port;
	put32(tcp + 4, m->sequence);
	put32(tcp + 8, m->ack);
	tcp[12] = length << 2;
	tcp[13] = m->flags;
	put16(tcp + 14, m->window);
	__u32 sum = bpf_csum_diff(0, 0, (__be32 *)m->addresses, 32, bpf_htonl((IPPROTO_TCP << 16) | length));
	if (check != changed)
		sum = bpf_csum_diff(0, 0, (__be32 *)tcp, 44, sum); /* zeros follow a shorter header */
	*(__u16 *)(tcp + CHECKSUM_AT) = check == changed ? fold16(sum) : (__u16)~fold16(sum);
	__u32 size = l4 + length;
	if (size < 54 || size > 110)
		return -1;
	return bpf_skb_store_bytes(skb, 0, s->frame + 2, size, 0);
}

#endif
