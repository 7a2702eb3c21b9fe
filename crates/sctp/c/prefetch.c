// Prefetches memory that the stack will read for a packet that is handled soon: with thousands of associations, no
// packet's association is in a cache. Tags are in the processor's byte order.

#include <netinet/sctp_os.h>
#include <netinet/sctp_pcb.h>
#include <netinet/sctp_var.h>

#define LINE 64

static void fetch(const void *from, size_t length)
{
	for (size_t at = 0; at < length; at += LINE)
		__builtin_prefetch((const char *)from + at, 1);
}

static struct sctpasochead *bucket(uint32_t tag)
{
	return &SCTP_BASE_INFO(sctp_asochash)[SCTP_PCBHASH_ASOC(tag, SCTP_BASE_INFO(hashasocmark))];
}

// First step: the hash bucket that points to the association.
void holdfast_usrsctp_expect_bucket(uint32_t tag)
{
	fetch(bucket(tag), sizeof(struct sctpasochead));
}

// Second step: the association.
void holdfast_usrsctp_expect_association(uint32_t tag)
{
	const struct sctp_tcb *stcb = LIST_FIRST(bucket(tag));

	if (stcb != NULL)
		fetch(stcb, sizeof(*stcb));
}

// Third step: the association's path, its first streams, its record of received data, the chunk that the packet may
// acknowledge, and the hash bucket in which an answer will find the association.
void holdfast_usrsctp_expect_parts(uint32_t tag)
{
	const struct sctp_tcb *stcb = LIST_FIRST(bucket(tag));
	const struct sctp_inpcb *inp;

	if (stcb == NULL)
		return;
	// Prefetching a null pointer does no harm.
	fetch(TAILQ_FIRST(&stcb->asoc.nets), sizeof(struct sctp_nets));
	fetch(TAILQ_FIRST(&stcb->asoc.sent_queue), sizeof(struct sctp_tmit_chunk));
	fetch(stcb->asoc.strmin, sizeof(struct sctp_stream_in));
	fetch(stcb->asoc.strmout, sizeof(struct sctp_stream_out));
	fetch(stcb->asoc.mapping_array, 1);
	fetch(stcb->asoc.nr_mapping_array, 1);
	inp = stcb->sctp_ep;
	fetch(&inp->sctp_asocidhash[SCTP_PCBHASH_ASOC(stcb->asoc.assoc_id, inp->hashasocidmark)], 1);
}

// Fourth step: the data of that chunk, which will be freed.
void holdfast_usrsctp_expect_carried(uint32_t tag)
{
	const struct sctp_tcb *stcb = LIST_FIRST(bucket(tag));
	const struct sctp_tmit_chunk *chunk;

	if (stcb == NULL)
		return;
	chunk = TAILQ_FIRST(&stcb->asoc.sent_queue);
	if (chunk != NULL)
		fetch(chunk->data, LINE);
}
