//! Prefetching for the packets of a batch: the stack's data for a packet is fetched from memory while earlier packets
//! are handled (`c/prefetch.c`). With thousands of associations most of a packet's time was waiting for memory.

use super::packet_receive_buffers::ReceivedPacket;

/// A prefetch step, and the number of packets that it runs ahead.
type PrefetchStep<F> = (usize, F);

unsafe extern "C" {
    fn holdfast_usrsctp_expect_bucket(tag: u32);
    fn holdfast_usrsctp_expect_association(tag: u32);
    fn holdfast_usrsctp_expect_parts(tag: u32);
    fn holdfast_usrsctp_expect_carried(tag: u32);
}

/// Passes each packet to `take`, prefetched.
///
/// # Safety
/// The stack runs, and its lock is held.
pub unsafe fn for_each_prefetched(
    packets: &[ReceivedPacket<'_>],
    take: impl FnMut(&ReceivedPacket<'_>),
) {
    let steps: [PrefetchStep<unsafe extern "C" fn(u32)>; 4] = [
        (12, holdfast_usrsctp_expect_bucket),
        (9, holdfast_usrsctp_expect_association),
        (6, holdfast_usrsctp_expect_parts),
        (3, holdfast_usrsctp_expect_carried),
    ];
    let prefetch = |step: unsafe extern "C" fn(u32), packet: &ReceivedPacket<'_>| {
        if let Some(tag) = verification_tag(packet.bytes) {
            // SAFETY: guaranteed by the caller.
            unsafe { step(tag) };
        }
    };
    for_each_ahead(packets, &steps, prefetch, take);
}

fn for_each_ahead<P, F: Copy>(
    packets: &[P],
    steps: &[PrefetchStep<F>],
    mut announce: impl FnMut(F, &P),
    mut take: impl FnMut(&P),
) {
    for &(ahead, step) in steps {
        let first = packets.iter().take(ahead);
        first.for_each(|packet| announce(step, packet));
    }
    for (index, packet) in packets.iter().enumerate() {
        for &(ahead, step) in steps {
            if let Some(upcoming) = packets.get(index + ahead) {
                announce(step, upcoming);
            }
        }
        take(packet);
    }
}

/// Returns the verification tag (RFC 9260, section 3.1), by which the stack finds the association.
fn verification_tag(packet: &[u8]) -> Option<u32> {
    let octets = packet.get(4..8)?.try_into().ok()?;
    Some(u32::from_be_bytes(octets))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn every_step_runs_once_in_order_before_its_packet() {
        let packets: Vec<usize> = (0..30).collect();
        let steps_run = RefCell::new(vec![Vec::new(); packets.len()]);
        let taken = RefCell::new(Vec::new());
        for_each_ahead(
            &packets,
            &[(12, 'b'), (8, 'a'), (4, 'p')],
            |step, &packet| {
                // Not so far ahead that the data is evicted from the cache again.
                assert!(packet <= taken.borrow().len() + 12);
                steps_run.borrow_mut()[packet].push(step);
            },
            |&packet| {
                assert_eq!(steps_run.borrow()[packet], ['b', 'a', 'p']);
                taken.borrow_mut().push(packet);
            },
        );
        assert_eq!(taken.into_inner(), packets);
    }

    #[test]
    fn short_packet_has_no_tag() {
        assert_eq!(
            verification_tag(&[0, 1, 2, 3, 1, 0, 0, 2, 9]),
            Some(0x0100_0002)
        );
        assert_eq!(verification_tag(&[0; 7]), None);
    }
}
