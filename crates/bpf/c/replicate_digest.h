/* SPDX-License-Identifier: (MIT OR GPL-2.0-only)
 * Digests of output. The digest of a stretch is the sum over its 32-bit little-endian words w[k], with k the word's number in the
 * stream, of w[k] * R^k modulo 2^64. Digests of adjacent stretches add up, wherever segments begin and end, so two legs with equal
 * output have equal digests at each position. One differing byte, and two exchanged words, always change the digest.
 */
#ifndef HOLDFAST_REPLICATE_DIGEST_H
#define HOLDFAST_REPLICATE_DIGEST_H

#include "replicate_maps.h"

#define DIGEST_R 0x9fb21c651e98df25ull
/* Powers of the inverse of R: Horner's scheme goes through the words forwards. */
#define DIGEST_Q1 0x2ab9c720d1024adull
#define DIGEST_Q2 0x2dc26d22ce11ce9ull
#define DIGEST_Q3 0x4925e2a39fc14d75ull
#define DIGEST_Q4 0xd23ec227ecd5cc11ull
#define CHUNK_WORDS (CHUNK / 4)

struct hash_walk {
	struct __sk_buff *skb;
	__u64 hash;
	__u32 offset; /* in the frame */
	__u32 left;   /* bytes */
	__u32 align;  /* position of the first byte within its word; 0 after the first chunk */
	__u32 chunks;
};

static long hash_chunk(__u32 index, struct hash_walk *walk)
{
	struct scratch *s = scratch();
	__u32 align = walk->align & 3, length = CHUNK - align;
	if (!s || !walk->left)
		return 1;
	if (walk->left < length) {
		length = walk->left;
		__builtin_memset(s->chunk, 0, CHUNK);
	}
	*(__u32 *)s->chunk = 0;
	barrier_var(length);
	if (length < 1 || length > CHUNK || bpf_skb_load_bytes(walk->skb, walk->offset, s->chunk + align, length))
		return 1;
	const __u32 *word = (const __u32 *)s->chunk;
	__u64 hash = walk->hash;
#pragma unroll
	for (int i = 0; i < CHUNK_WORDS; i += 4) {
		hash = hash * DIGEST_Q4 + (word[i] * DIGEST_Q3 + word[i + 1] * DIGEST_Q2 + word[i + 2] * DIGEST_Q1 + word[i + 3]);
		barrier_var(hash); /* keeps the compiler from loading all words at once, onto the stack */
	}
	walk->hash = hash;
	walk->offset += length;
	walk->left -= length;
	walk->align = 0;
	walk->chunks++;
	return 0;
}

static __always_inline __u64 power_of_r(__u32 exponent)
{
	__u64 result = 1, base = DIGEST_R;
	for (int i = 0; i < 32; i++) {
		__u64 bit = -(__u64)(exponent >> i & 1);
		barrier_var(bit);
		result *= (base & bit) | (1 & ~bit);
		base *= base;
	}
	return result;
}

/* Computes the digest of `length` bytes of the frame from `offset` on, which are at `position` of the stream, modulo 2^32. The
 * result is `hash` in the scratch memory.
 */
__noinline int repl_hash(struct __sk_buff *skb, __u32 offset, __u32 length, __u32 position)
{
	struct scratch *s = scratch();
	struct hash_walk walk = {.skb = skb, .offset = offset, .left = length, .align = position & 3};
	if (!s)
		return -1;
	s->hash = 0;
	if (!length)
		return 0;
	bpf_loop(1024, hash_chunk, &walk, 0);
	if (walk.left)
		return -1;
	s->hash = walk.hash * power_of_r(position / 4 + walk.chunks * CHUNK_WORDS - 1);
	return 0;
}

#endif
