// Measurement of a peer's distance. The stack's smoothed round-trip time includes the peer's delay of acknowledgements,
// up to 200 ms (RFC 9260, section 6.2), which is right for retransmissions and wrong for a distance. Handshakes and
// heartbeats are answered at once. So `rtt` (microseconds), which the stack here does not read between two
// measurements, keeps only their values, smoothed as in RFC 9260, section 6.3.1.

#include <netinet/sctp_os.h>
#include <netinet/sctp_pcb.h>
#include <netinet/sctp_var.h>
#include <netinet/sctp_output.h>
#include <netinet/sctputil.h>

// The library's own function, renamed.
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

// Returns the round-trip time of the primary path; 0 if there is no measurement yet or no such association.
uint64_t holdfast_usrsctp_round_trip_us(struct socket *socket, sctp_assoc_t id)
{
	const struct sctp_tcb *stcb = association(socket, id);

	if (stcb == NULL || stcb->asoc.primary_destination == NULL)
		return 0;
	return stcb->asoc.primary_destination->rtt;
}

// Sends a heartbeat to measure by: while there is traffic, the stack sends none on its own.
void holdfast_usrsctp_measure(struct socket *socket, sctp_assoc_t id)
{
	struct sctp_tcb *stcb = association(socket, id);

	if (stcb == NULL || stcb->asoc.primary_destination == NULL || SCTP_GET_STATE(stcb) != SCTP_STATE_OPEN)
		return;
	sctp_send_hb(stcb, stcb->asoc.primary_destination, SCTP_SO_LOCKED);
	sctp_chunk_output(stcb->sctp_ep, stcb, SCTP_OUTPUT_FROM_SOCKOPT, SCTP_SO_LOCKED);
}
