// How far a peer is. The stack smooths what its acknowledgements of data took as well, which a peer may delay by up to 200 ms (RFC 9260,
// section 6.2): right for retransmissions, and no distance. Handshakes and heartbeats are answered at once. So `rtt`, in
// microseconds, which nothing else here reads between two measurements, is kept for these alone, smoothed as RFC 9260, section
// 6.3.1 smooths.

#include <netinet/sctp_os.h>
#include <netinet/sctp_pcb.h>
#include <netinet/sctp_var.h>
#include <netinet/sctp_output.h>
#include <netinet/sctputil.h>

// The library's own.
int holdfast_unused_sctp_calculate_rto(struct sctp_tcb *, struct sctp_association *, struct sctp_nets *, struct timeval *, int);

int sctp_calculate_rto(struct sctp_tcb *stcb, struct sctp_association *asoc, struct sctp_nets *net, struct timeval *old, int from)
{
	const uint64_t before = net->rtt;
	const int done = holdfast_unused_sctp_calculate_rto(stcb, asoc, net, old, from);

	if (from == SCTP_RTT_FROM_DATA)
		net->rtt = before;
	else if (done && before != 0)
		net->rtt = before - before / 8 + net->rtt / 8;
	return done;
}

static struct sctp_tcb *association(struct socket *socket, sctp_assoc_t id)
{
	return sctp_findassociation_ep_asocid((struct sctp_inpcb *)socket->so_pcb, id, 0);
}

// Of the primary path; 0: nothing is known yet, or there is no such association.
uint64_t holdfast_usrsctp_round_trip_us(struct socket *socket, sctp_assoc_t id)
{
	const struct sctp_tcb *stcb = association(socket, id);

	if (stcb == NULL || stcb->asoc.primary_destination == NULL)
		return 0;
	return stcb->asoc.primary_destination->rtt;
}

// Asks for an answer to measure by: where there is traffic, the stack sends no heartbeats of its own accord.
void holdfast_usrsctp_measure(struct socket *socket, sctp_assoc_t id)
{
	struct sctp_tcb *stcb = association(socket, id);

	if (stcb == NULL || stcb->asoc.primary_destination == NULL || SCTP_GET_STATE(stcb) != SCTP_STATE_OPEN)
		return;
	sctp_send_hb(stcb, stcb->asoc.primary_destination, SCTP_SO_LOCKED);
	sctp_chunk_output(stcb->sctp_ep, stcb, SCTP_OUTPUT_FROM_SOCKOPT, SCTP_SO_LOCKED);
}
